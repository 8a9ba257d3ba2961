"""The `headwise` command, one module per verb. Results go to standard output, messages to standard error.

May import every room; nothing imports it.
"""

import argparse
import errno
import importlib
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from headwise.cli.console import HelpFormatter, print_anywhere
from headwise.errors import HeadwiseError, printable, suggestion

# Every verb and what it does. Its module is imported when it is asked for: most of them need torch.
VERBS = {
    "view": "show what every attention head of a model does with a text, in 24 lines and as a page",
    "serve": "explore attention in the browser: type a text, switch models and heads",
    "survey": "measure every attention head of a model over a whole corpus; run it with torchrun for several processes",
    "heads": "find the heads of known kinds by experiment: induction, retrieval, previous-token, sinks, ...",
    "trace": "trace an answer back to the passages of its prompt, by four methods, and test each by deletion",
    "check": "check the multi-head attention in a file: right, or which mistake is on which line",
    "steps": "walk through attention in ten steps, on your words or on small tensors: shapes, code, reasons, memory",
    "cost": "compute what attention costs: parameters, operations, memory, cache; MHA, GQA and MQA compared",
    "course": "learn attention by writing it: fourteen exercises with hints, from dot products to a decoder; interview",
    "quiz": "find and fix the mistake in a class; the checker judges your answer",
    "bench": "compare the layer with other implementations: correctness, time, memory, growth with length",
    "generate": "generate text with the built-in model, a small GPT trained on old books",
    "inspect": "list the attention layers in a checkpoint: heads, widths, options, parameters, cache",
    "tour": "see the ten steps, the fused layer against the reference, and its speed on this machine",
}
EXAMPLES = """examples:
  headwise view "The captain looked at the sea, and the sea looked at the captain."
  headwise check examples/attention.py
  headwise steps "The quick brown fox"
  headwise course
  headwise cost --model gpt2
"""


class Parser(argparse.ArgumentParser):
    """Says what to do about a text that the shell has split into words."""

    def error(self, message: str) -> NoReturn:
        """Exit with what is wrong."""
        left = message.removeprefix("unrecognized arguments: ")
        if left != message and not left.startswith("-"):
            message += '\nPut a text in quotes: "The quick brown fox".'
        super().error(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Exit status: 0 success, 1 the checked code is wrong, 2 wrong usage or failure."""
    print_anywhere()
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's; no verb needs NumPy
    arguments = sys.argv[1:] if arguments is None else arguments
    verb = next((word for word in arguments if word in VERBS), None)
    typed = next((word for word in arguments if not word.startswith("-")), None)
    if verb is None and typed is not None:
        known = suggestion(typed, VERBS, "headwise --help")
        print(_told(f"headwise: no verb is called {typed!r}.{known}"), file=sys.stderr)
        return 2
    parser = _parser(verb)
    options = parser.parse_args(arguments)
    if options.version:
        print(_version())
        return 0
    if options.verb is None:
        parser.print_help()
        return 2
    try:
        status = int(options.run(options))
        sys.stdout.flush()  # now, while an error can still be reported
    except BrokenPipeError:  # `headwise ... | head` closed the pipe
        _discard_output()
        return 0
    except KeyboardInterrupt:
        return 130  # the shells' status for Ctrl-C
    except HeadwiseError as error:
        print(_told(f"headwise {options.verb}: {error}"), file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT):
            raise
        print(f"headwise {options.verb}: the output cannot be written: {error.strerror}.", file=sys.stderr)
        _discard_output()
        return 2
    return status


def _told(message: str) -> str:
    """A message for standard error, wrapped between words if that is a terminal."""
    lines = printable(message, lines=True).splitlines()
    if not sys.stderr.isatty():
        return "\n".join(lines)
    width = shutil.get_terminal_size((80, 24)).columns
    filled = (textwrap.fill(line, width, break_on_hyphens=False, break_long_words=False) for line in lines)
    return "\n".join(filled)


def module_of(verb: str) -> ModuleType:
    """The module of a verb: its options, its examples, and `run`."""
    return importlib.import_module(f"headwise.cli.{verb}")


def _parser(asked: str | None) -> argparse.ArgumentParser:
    """The parser of the command, with the options of the one verb that is asked for."""
    parser = Parser(
        prog="headwise",
        description="Multi-head attention you can read, run and see.\n`headwise VERB --help` explains a verb.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the versions of headwise and torch, then exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, summary in VERBS.items():
        described = textwrap.fill(summary, 79)
        verb = verbs.add_parser(name, help=summary, description=described, formatter_class=HelpFormatter)
        if name == asked:
            module = module_of(name)
            verb.epilog = module.EXAMPLES
            module.add_arguments(verb)
            verb.set_defaults(run=module.run)
    return parser


def _discard_output() -> None:
    """Discard the remaining output, which Python would flush again at exit."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115


def _version() -> str:
    import torch

    from headwise import __version__

    return f"headwise {__version__}, torch {torch.__version__}"
