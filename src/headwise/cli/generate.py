"""`headwise generate`: text from the built-in model."""

import argparse

import torch

from headwise.cli.console import add_json, print_json, standard_input, typed_text
from headwise.models import load, load_builtin

EXAMPLES = """examples:
  headwise generate "Once upon a time" --tokens 20
  headwise generate "The captain" --temperature 0.7 --top-p 0.9 --seed 1
  headwise generate "It was" --temperature 0 --tokens 10 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("text", help="the beginning of the text; - reads standard input")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 takes the most likely token")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens only")
    parser.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="sample from the top tokens of total probability P"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="random seed; the same seed gives the same text")
    parser.add_argument("--model", default="builtin", help="builtin, or a folder written by examples/train_gpt.py")
    add_json(parser, "streaming the text")


def run(options: argparse.Namespace) -> int:
    """Print the text as it is generated."""
    torch.set_num_threads(1)  # one token is too little work to share: two busy threads took six times as long
    model = load_builtin() if options.model == "builtin" else load(options.model)
    text = standard_input() if options.text == "-" else typed_text(options.text)
    sampling = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    pieces = model.stream(text, options.tokens, seed=options.seed, **sampling)
    if options.json:
        print_json({"text": text, "continuation": "".join(pieces), "seed": options.seed, **sampling})
        return 0
    first = next(pieces)  # raises an error for wrong options before anything is printed
    print(text + first, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0
