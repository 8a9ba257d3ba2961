"""`headwise heads`: the heads of known kinds, by experiment."""

import argparse
from pathlib import Path

from headwise.cli.console import MODEL_HELP, add_json, check_at_least_one, print_json, text_file
from headwise.errors import OptionError, printable
from headwise.models import open_model
from headwise.study.kinds import head_kinds

EXAMPLES = """examples:
  headwise heads builtin
  headwise heads builtin --samples 4 --lengths 64 --count 1
  headwise heads builtin --samples 4 --lengths 64 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("model", nargs="?", default="builtin", help=MODEL_HELP)
    parser.add_argument(
        "--samples", type=int, default=12, metavar="N", help="how many random texts; more give narrower intervals"
    )
    parser.add_argument(
        "--length", type=int, default=32, metavar="N", help="random tokens in a text, which are then repeated"
    )
    parser.add_argument(
        "--lengths",
        default="64,128,256",
        metavar="N,N,...",
        help='tokens of the texts in which needles are hidden; "" hides none',
    )
    parser.add_argument("--file", type=Path, help="hide needles in this text instead of random tokens")
    parser.add_argument("--count", type=int, default=3, metavar="N", help="heads of each kind to print")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed")
    add_json(parser, "a table")


def run(options: argparse.Namespace) -> int:
    """Try the model and print what was found."""
    check_at_least_one("--count", options.count)
    model = open_model(options.model, encoder=False)
    haystack = None if options.file is None else model.tokens(text_file(options.file))
    found = head_kinds(
        model,
        samples=options.samples,
        length=options.length,
        lengths=_numbers(options.lengths),
        haystack=haystack,
        seed=options.seed,
    )
    if options.json:
        print_json({"model": model.name, **found.to_json()})
    else:
        print(printable(found.table(options.count), lines=True))
    return 0


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise OptionError(f"--lengths {text!r}: expected whole numbers separated by commas, such as 64,128.")
    return [int(part) for part in parts]
