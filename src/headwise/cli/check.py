"""`headwise check`: checks anyone's multi-head attention and names the mistake."""

import argparse
from pathlib import Path
from typing import Any

from headwise.check import sandbox
from headwise.check.mistakes import MISTAKES
from headwise.check.report import LABEL, WORDS, Report, wrapped
from headwise.cli.console import add_json, console, late_status, print_json, rich, say
from headwise.cli.source import fitted
from headwise.errors import nearest

EXAMPLES = """examples:
  headwise check --list
  headwise check examples/attention.py
  headwise check examples/attention.py --name MultiHeadAttention --json
  headwise check examples/attention.py --form interview
  headwise check examples/attention.py --solution \\
    --against examples/attention.py:MultiHeadAttention
  headwise check examples/attention.py --call "m(q, k, v, mask)" \\
    --build "MultiHeadAttention(E, H)"
"""
ASSIGNMENTS = ("course", "book", "homework", "interview", "handbook")
COLORS = {
    "RIGHT": "bold green", "RIGHT AS FAR AS TESTED": "bold yellow", "WRONG": "bold red", "CANNOT JUDGE": "bold yellow",
    "UNFINISHED": "bold yellow", "FRAGILE": "yellow", "SLOW": "cyan", "STYLE": "cyan", "OK": "green",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("file", nargs="?", type=Path, help="Python file, notebook, or Markdown page with Python blocks")
    parser.add_argument("--name", help="class or function to check (default: the most likely one)")
    parser.add_argument("--build", metavar="CODE", help='how to construct it: "MyMHA(E, H)" with width E and H heads')
    parser.add_argument("--call", metavar="CODE", help='how to call it: "m(x, mask)"; inputs are x, q, k, v, memory')
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--form",
        choices=ASSIGNMENTS,
        metavar="NAME",
        help="also judge the constructor, call, return values, names and mask of an assignment: "
        + ", ".join(ASSIGNMENTS),
    )
    asked.add_argument(
        "--against", metavar="FILE:CLASS", help="also compare with a reference: a class in another file, or in this one"
    )
    parser.add_argument(
        "--solution", action="store_true", help="also print a correct class, in the form of --form or --against"
    )
    parser.add_argument(
        "--thorough", action="store_true", help="also measure the speed and try torch.compile (2 s more)"
    )
    parser.add_argument("--seconds", type=float, default=sandbox.SECONDS, help="time limit")
    parser.add_argument(
        "--require-jail",
        action="store_true",
        help="refuse to run the file unless it is kept from your files, the network and other processes",
    )
    parser.add_argument("--list", action="store_true", help="list the mistakes that the checker can name, then exit")
    add_json(parser, "text")


def run(options: argparse.Namespace) -> int:
    """Check the file and print the report. Exit status: 0 right, 1 wrong, 2 could not be judged."""
    if options.list:
        return listed(options.json)
    if options.file is None:
        say("headwise check: no file given. Try: headwise check attention.py")
        return 2
    if not options.file.is_file():
        say(f"headwise check: {_missing(options.file)}")
        return 2
    with late_status() as progress:
        report = sandbox.run(
            options.file,
            name=options.name,
            build=options.build,
            call=options.call,
            form=options.form,
            against=options.against,
            seconds=options.seconds,
            thorough=options.thorough,
            solution=options.solution,
            require_jail=options.require_jail,
            progress=progress,
        )
    if options.json:
        print_json(report.to_dict())
    else:
        show(report)
    return report.exit_code


def _missing(path: Path) -> str:
    """What is wrong with a path that is no file."""
    if path.is_dir():
        return f"{path} is a folder. Name one file, such as {path / 'attention.py'}."
    beside = [found.name for found in path.parent.glob("*") if found.is_file()] if path.parent.is_dir() else []
    near = nearest(path.name, beside)
    cure = (
        "Check its name, and the folder that you are in." if near is None else f"Did you mean {path.with_name(near)}?"
    )
    return f"there is no file {path}. {cure}"


def show(report: Report) -> None:
    """Print the report, with the first word of each line in color."""
    out = console()
    for line in (part for whole in report.lines() for part in wrapped(whole, out.width)):
        out.print(_colored(line), soft_wrap=True)
    if report.solution:
        out.print("\nA correct class:\n", markup=False)
        out.print(fitted(report.solution), markup=False, soft_wrap=True)


def _colored(line: str) -> Any:
    from rich.text import Text

    text = Text(line)
    for word in sorted({*WORDS.values(), *LABEL.values(), "OK"}, key=len):  # the longest word that fits comes last
        if line.startswith(word):
            text.stylize(COLORS[word], 0, len(word))
    return text


def listed(as_json: bool) -> int:
    """Print every mistake that the checker can name."""
    if as_json:
        print_json([mistake._asdict() for mistake in MISTAKES.values()])
        return 0
    rows = rich("table").Table.grid(padding=(0, 1, 0, 0))
    for mistake in MISTAKES.values():
        rows.add_row(mistake.name, mistake.severity, mistake.title)
    console().print(rows)
    return 0
