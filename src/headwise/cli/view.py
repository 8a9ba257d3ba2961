"""`headwise view`: what every head does with a text."""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from headwise.cli.terminal import standard_input
from headwise.errors import OptionError
from headwise.models import open_model
from headwise.view.looking import view
from headwise.view.terminal import drawn

SUMMARY = "what every head of a model does with a text, in 24 lines"
EXAMPLES = """examples:
  headwise view "The captain looked at the sea, and the sea looked at the captain."
  headwise view "To be, or not to be, that is the question." --plain
  headwise view "Once upon a time" --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("text", nargs="?", help="the text; - reads standard input")
    parser.add_argument("--file", type=Path, help="a file of text instead")
    parser.add_argument(
        "--model", default="builtin", help="a folder that examples/train_gpt.py wrote (default builtin)"
    )
    parser.add_argument("--plain", action="store_true", help="letters instead of colours, as into a pipe")
    parser.add_argument("--json", action="store_true", help="print all numbers as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Read, look, print."""
    text = read(options)
    sight = view(open_model(options.model), text)
    if options.json:
        print(json.dumps(sight.to_dict()))
        return 0
    colours = not options.plain and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(drawn(sight, max(40, shutil.get_terminal_size((80, 24)).columns), colours=colours))
    return 0


def read(options: argparse.Namespace) -> str:
    """The text, from where it is."""
    if (options.text is None) == (options.file is None):
        raise OptionError("which text? Pass one, such as: headwise view 'The captain looked at the sea.', or --file.")
    if options.file is None:
        return standard_input() if options.text == "-" else str(options.text)
    try:
        return str(options.file.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--file {options.file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise OptionError(
            f"--file {options.file} is no text in UTF-8: {error.reason} at byte {error.start}."
        ) from error
