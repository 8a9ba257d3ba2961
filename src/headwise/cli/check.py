"""`headwise check`: judges anybody's multi-head attention and names the mistake."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from headwise.check import sandbox
from headwise.check.mistakes import MISTAKES
from headwise.check.report import LABEL, WORDS, Report
from headwise.cli.terminal import console

SUMMARY = "judge a file's multi-head attention: right, or which mistake it makes and on which line"
EXAMPLES = """examples:
  headwise check --list
  headwise check examples/attention.py
  headwise check examples/attention.py --name MultiHeadAttention --json
  headwise check examples/attention.py --build "MultiHeadAttention(32, 4)" --call "m(q, k, v, mask)"
"""
COLOURS = {
    "RIGHT": "bold green", "WRONG": "bold red", "CANNOT JUDGE": "bold yellow", "FRAGILE": "yellow", "SLOW": "cyan",
    "STYLE": "cyan", "OK": "green",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("file", nargs="?", type=Path, help="Python file, notebook, or page with Python blocks")
    parser.add_argument("--name", help="class or function to judge; the most likely one unless given")
    parser.add_argument("--build", metavar="CODE", help='how to make it: "MyMHA(E, H)"; E is the width, H the heads')
    parser.add_argument(
        "--call", metavar="CODE", help='how to call it: "m(x, x, x, mask)"; inputs are x, q, k, v, memory'
    )
    parser.add_argument("--solution", action="store_true", help="print a right class as well")
    parser.add_argument("--seconds", type=float, default=sandbox.SECONDS, help="time limit (default 60)")
    parser.add_argument("--list", action="store_true", help="list the mistakes that can be named, and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    """Judge, print, and say it with the exit status: 0 right, 1 wrong, 2 could not be judged."""
    if options.list:
        return listed(options.json)
    if options.file is None:
        print("headwise check: which file? Try: headwise check attention.py", file=sys.stderr)
        return 2
    report = sandbox.run(
        options.file, name=options.name, build=options.build, call=options.call, seconds=options.seconds,
        solution=options.solution, progress=_progress,
    )  # fmt: skip
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(report.to_dict()))
    else:
        show(report)
    return report.exit_code


def _progress(words: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{words} ...", end="", file=sys.stderr, flush=True)


def show(report: Report) -> None:
    """The text, the first word of a line in the colour of its meaning."""
    out = console()
    for line in report.lines():
        out.print(_coloured(line), soft_wrap=True)
    if report.solution:
        out.print()
        out.print(report.solution, markup=False, soft_wrap=True)


def _coloured(line: str) -> Any:
    from rich.text import Text

    text = Text(line)
    for word in {*WORDS.values(), *LABEL.values(), "OK"}:
        if line.startswith(word):
            text.stylize(COLOURS[word], 0, len(word))
    return text


def listed(as_json: bool) -> int:
    """Every mistake that has a name."""
    if as_json:
        print(json.dumps([mistake._asdict() for mistake in MISTAKES.values()]))
        return 0
    for mistake in MISTAKES.values():
        print(f"{mistake.name:<20} {mistake.severity:<8} {mistake.title}")
    return 0
