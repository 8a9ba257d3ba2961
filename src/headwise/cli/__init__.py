"""The `headwise` command, one module per verb. Results go to standard output, messages to standard error.

May import every room; nothing imports it.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from headwise.cli import bench, check, cost, generate, inspect, quiz, serve, steps, survey, tour, view
from headwise.cli.console import HelpFormatter
from headwise.errors import HeadwiseError

VERBS = {
    "view": view,
    "serve": serve,
    "survey": survey,
    "check": check,
    "steps": steps,
    "cost": cost,
    "quiz": quiz,
    "bench": bench,
    "generate": generate,
    "inspect": inspect,
    "tour": tour,
}

EXAMPLES = """examples:
  headwise view "The captain looked at the sea, and the sea looked at the captain."
  headwise check examples/attention.py
  headwise steps --causal
  headwise cost --model gpt2
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Exit status: 0 success, 1 the checked code is wrong, 2 wrong usage or failure."""
    parser = argparse.ArgumentParser(
        prog="headwise",
        description="Multi-head attention you can read, run and see. `headwise VERB --help` explains a verb.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, module in VERBS.items():
        verb = verbs.add_parser(
            name, help=module.SUMMARY, description=module.SUMMARY, epilog=module.EXAMPLES, formatter_class=HelpFormatter
        )
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
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
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT):
            raise
        print(f"headwise {options.verb}: the output cannot be written: {error.strerror}.", file=sys.stderr)
        _discard_output()
        return 2
    except HeadwiseError as error:
        print(f"headwise {options.verb}: {error}", file=sys.stderr)
        return 2
    return status


def _discard_output() -> None:
    """Discard the remaining output, which Python would flush again at exit."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115


def _version() -> str:
    import torch

    from headwise import __version__

    return f"headwise {__version__}, torch {torch.__version__}"
