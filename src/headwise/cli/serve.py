"""`headwise serve`: the page with a model behind it."""

import argparse
import dataclasses

from headwise.cli.console import MODEL_HELP, add_json, check_at_least_one, check_seconds
from headwise.errors import need

EXAMPLES = """examples:
  headwise serve --no-open --for 1
  headwise serve --model builtin --port 0 --no-open --for 1 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("--model", action="append", help=f"{MODEL_HELP}; may be repeated (default: builtin)")
    parser.add_argument("--port", type=int, default=8765, metavar="N", help="port; 0 takes a free one")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address; 127.0.0.1 is this computer only"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="also accept requests to this host name; may be repeated",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the longest text in tokens (default: 32768)")
    parser.add_argument("--max-bytes", type=int, metavar="N", help="the largest request in bytes (default: 4194304)")
    parser.add_argument("--no-open", action="store_true", help="do not open the browser")
    parser.add_argument("--for", type=float, dest="seconds", metavar="SECONDS", help="stop after this time")
    add_json(parser, "text")


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    for package in ("starlette", "uvicorn"):
        need(package, "serve", "the server", "needs")
    from headwise.view.serve.requests import Limits
    from headwise.view.serve.server import serve

    check_seconds("--for", options.seconds)
    check_at_least_one("--max-tokens", options.max_tokens)
    check_at_least_one("--max-bytes", options.max_bytes)
    given = {"tokens": options.max_tokens, "body": options.max_bytes}
    limits = dataclasses.replace(Limits(), **{name: value for name, value in given.items() if value is not None})
    return serve(
        options.model or ["builtin"],
        host=options.host,
        port=options.port,
        names=options.allow_host,
        limits=limits,
        open_browser=not options.no_open,
        seconds=options.seconds,
        as_json=options.json,
    )
