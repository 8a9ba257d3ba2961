"""`headwise trace`: from an answer back to the prompt."""

import argparse
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.cli.console import (
    MODEL_HELP,
    add_json,
    check_at_least_one,
    check_file,
    print_json,
    say,
    standard_input,
    text_file,
    typed_text,
    write_file,
)
from headwise.errors import OptionError, printable, suggestion
from headwise.models import open_model
from headwise.models.gpt import GPT
from headwise.models.text_model import TextModel
from headwise.study.trace import METHODS, trace, words_of
from headwise.view.traced import trace_page

EXAMPLES = """examples:
  headwise trace builtin --answer Barnaby \\
    "The dog was named Barnaby. The sea was calm. He called his dog, Barnaby"
  headwise trace builtin --file texts/sea.txt --new 8 --html trace.html
  headwise trace builtin "One, two, three. One, two, three. One," --new 4 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("text", nargs="?", help="the prompt, and with --answer also the answer; - reads standard input")
    parser.add_argument("--file", type=Path, help="read the text from a file")
    answer = parser.add_mutually_exclusive_group()
    answer.add_argument("--answer", metavar="SPAN", help="words of the text (last occurrence), or tokens START:STOP")
    answer.add_argument(
        "--new", type=int, metavar="N", help="let the model generate an answer of N tokens (default: 8)"
    )
    parser.add_argument("--methods", default=",".join(METHODS), metavar="A,B", help="methods to compare")
    parser.add_argument("--draws", type=int, default=8, metavar="N", help="random deletions to compare with")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the deletions")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the text, shaded by every method")
    add_json(parser, "a table")


def run(options: argparse.Namespace) -> int:
    """Trace the answer and print where it came from."""
    check_at_least_one("--draws", options.draws)
    if options.html is not None:
        check_file("--html", options.html)
    model = open_model(options.model, encoder=False)
    text = _text(options)
    tokens = model.tokens(text, most=sys.maxsize if model.limit is None else model.limit)
    if model.trained is not None and tokens.shape[1] > model.trained:
        say(f"the text is {tokens.shape[1]} tokens long, and the model was trained on {model.trained} at a time")
    tokens = tokens[:, : tokens.shape[1] - len(model.codec.after)]
    if options.answer is None:
        tokens, answer = _generated(model, tokens, 8 if options.new is None else options.new)
    else:
        answer = _span(model, tokens, options.answer)
    methods = _methods(options.methods)
    found = trace(model, tokens, answer, methods=methods, draws=options.draws, seed=options.seed)
    if options.json:
        print_json({"model": model.name, **found.to_json()})
    else:
        print(printable(found.table(max(60, shutil.get_terminal_size((80, 24)).columns)), lines=True))
    if options.html is not None:
        write_file("--html", options.html, trace_page(found, model.name))
    return 0


def _methods(names: str) -> list[str]:
    methods = [name.strip() for name in names.split(",")]
    for name in methods:
        if name not in METHODS:
            raise OptionError(f"--methods: no method is called {name!r}.{suggestion(name, METHODS)}")
    return methods


def _text(options: argparse.Namespace) -> str:
    if (options.text is None) == (options.file is None):
        raise OptionError("pass a text, or --file with the name of one.")
    if options.file is not None:
        return text_file(options.file)
    return standard_input() if options.text == "-" else typed_text(options.text)


def _generated(model: TextModel, tokens: Tensor, count: int) -> tuple[Tensor, tuple[int, int]]:
    """The tokens with the likeliest continuation, and where that is."""
    check_at_least_one("--new", count)
    given, limit = tokens.shape[1], model.limit
    if limit is not None and given + count > limit:
        raise OptionError(
            f"--new {count}: the text is {given} tokens long and the model can read {limit}. "
            f"Pass --new {limit - given}, or a shorter text."
            if given < limit
            else f"the text is {given} tokens long and the model can read {limit}. Pass a shorter text."
        )
    module: Any = model.module
    if isinstance(module, GPT):
        whole = _continued(module, tokens, count)
    elif hasattr(module, "generate"):
        with torch.no_grad():
            whole = module.generate(
                tokens, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(tokens)
            )
    else:
        raise OptionError(f"{model.name} does not generate text; say where the answer is: --answer SPAN.")
    return whole, (tokens.shape[1], whole.shape[1])


@torch.no_grad()
def _continued(module: GPT, tokens: Tensor, count: int) -> Tensor:
    """The tokens and the likeliest next ones; `stream` would forget the beginning of a text longer than its context."""
    caches, new = module.make_caches(), tokens
    for _ in range(count):
        new = module.logits(module.features(new, caches=caches)[:, -1:]).argmax(-1)
        tokens = torch.cat([tokens, new], 1)
    return tokens


def _span(model: TextModel, tokens: Tensor, answer: str) -> tuple[int, int]:
    """The tokens of an answer that is given by its words or by START:STOP."""
    numbers = re.fullmatch(r"(\d+):(\d+)", answer)
    if numbers:
        return int(numbers[1]), int(numbers[2])
    first = len(model.codec.before)
    words = words_of(model, tokens[0, first:])
    text, edges = "".join(words), [0]
    for word in words:
        edges.append(edges[-1] + len(word))
    place = text.rfind(answer) if answer.strip() else -1
    if place < 0:
        raise OptionError(f"--answer {answer!r}: these words are not in the text; tokens can be given as START:STOP.")
    inside = [i for i in range(len(words)) if edges[i] < place + len(answer) and edges[i + 1] > place]
    stop = inside[-1] + 1
    while stop < len(words) and not words[stop]:  # the rest of a character
        stop += 1
    return first + inside[0], first + stop
