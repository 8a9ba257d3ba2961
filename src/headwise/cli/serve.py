"""`headwise serve`: the page, live."""

import argparse
import dataclasses

from headwise.errors import OptionError, need

SUMMARY = "the page live in a browser: type a text, switch models and heads"
EXAMPLES = """examples:
  headwise serve --no-open --for 1
  headwise serve --model builtin --port 0 --no-open --for 1 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument(
        "--model", action="append", help="builtin (default), or the folder of a model; again for more of them"
    )
    parser.add_argument("--port", type=int, default=8765, help="where to listen, 0 for any that is free (default 8765)")
    parser.add_argument("--host", default="127.0.0.1", help="at which address (default 127.0.0.1: this computer alone)")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="another name under which it may be reached"
    )
    parser.add_argument("--max-tokens", type=int, help="longest text (default 32768)")
    parser.add_argument("--max-bytes", type=int, help="largest request (default 4194304)")
    parser.add_argument("--no-open", action="store_true", help="do not open the browser")
    parser.add_argument("--for", type=float, dest="seconds", metavar="SECONDS", help="stop by itself after that time")
    parser.add_argument("--json", action="store_true", help="say where it is as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    for package in ("starlette", "uvicorn"):
        need(package, "serve", "the server")
    from headwise.view.serve.requests import Limits
    from headwise.view.serve.server import serve

    given = {"tokens": options.max_tokens, "body": options.max_bytes}
    for name, value in given.items():
        if value is not None and value < 1:
            raise OptionError(f"--max-{'bytes' if name == 'body' else name} {value}: expected 1 or more.")
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
