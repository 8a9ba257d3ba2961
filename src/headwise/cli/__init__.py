"""The `headwise` command: one file per verb. Results go to standard output, chatter to standard error."""

import argparse
import os
import sys
from collections.abc import Sequence

from headwise.cli import check, cost, generate, inspect, quiz, serve, steps, tour, view
from headwise.errors import HeadwiseError

VERBS = {
    "view": view,
    "serve": serve,
    "check": check,
    "steps": steps,
    "cost": cost,
    "quiz": quiz,
    "generate": generate,
    "inspect": inspect,
    "tour": tour,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Exit status 0 is right, 1 code that was judged wrong, 2 wrong usage or what could not be done."""
    parser = argparse.ArgumentParser(prog="headwise", description="Multi-head attention you can read, run and see.")
    parser.add_argument("--version", action="version", version=_version())
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, module in VERBS.items():
        verb = verbs.add_parser(
            name,
            help=module.SUMMARY,
            description=module.SUMMARY,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    if options.verb is None:
        parser.print_help()
        return 2
    try:
        return int(options.run(options))
    except BrokenPipeError:  # `headwise ... | head`: who reads has enough
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - Python flushes it once more when it ends
        return 0
    except HeadwiseError as error:
        print(f"headwise {options.verb}: {error}", file=sys.stderr)
        return 2


def _version() -> str:
    import torch

    from headwise import __version__

    return f"headwise {__version__}, torch {torch.__version__}"
