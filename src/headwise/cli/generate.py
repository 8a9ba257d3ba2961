"""`headwise generate`: what the built-in model would write next."""

import argparse
import json

import torch

from headwise.cli.terminal import standard_input
from headwise.models import load, load_builtin

SUMMARY = "text from the built-in model, a small GPT trained on old books"
EXAMPLES = """examples:
  headwise generate "Once upon a time" --tokens 20
  headwise generate "The captain" --temperature 0.7 --top-p 0.9 --seed 1 --tokens 20
  headwise generate "It was" --temperature 0 --tokens 10 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("text", help="how it begins; - reads standard input")
    parser.add_argument("--tokens", type=int, default=100, help="tokens to write (default 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, help="only among this many likeliest")
    parser.add_argument(
        "--top-p", type=float, default=0.95, help="only among the likeliest of this share (default 0.95)"
    )
    parser.add_argument("--seed", type=int, help="the same seed gives the same text")
    parser.add_argument(
        "--model", default="builtin", help="a folder that examples/train_gpt.py wrote (default builtin)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text as it comes")


def run(options: argparse.Namespace) -> int:
    """Print the text as it comes."""
    torch.set_num_threads(1)  # a token at a time is too little to share: two busy threads took six times as long
    model = load_builtin() if options.model == "builtin" else load(options.model)
    text = standard_input() if options.text == "-" else options.text
    sampling = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    pieces = model.stream(text, options.tokens, seed=options.seed, **sampling)
    if options.json:
        print(json.dumps({"text": text, "continuation": "".join(pieces), "seed": options.seed, **sampling}))
        return 0
    first = next(pieces)  # wrong options are told before anything is printed
    print(text + first, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0
