"""What the verbs share: tables and JSON on standard output, messages on standard error, files, and common options."""

import argparse
import codecs
import contextlib
import io
import json
import math
import os
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO
from unicodedata import east_asian_width

from headwise.errors import OptionError, need, printable

SECOND = "\x00"  # stands for the second column of a wide character, since `textwrap` counts characters
MODEL_HELP = "builtin, or a model folder, from transformers or examples/train_gpt.py"


def rich(module: str) -> Any:
    """A module of rich."""
    return need(f"rich.{module}", "terminal", "tables in the terminal")


def columns(stream: TextIO, otherwise: int) -> int:
    """The width of a stream: what COLUMNS says, or that of its terminal, or `otherwise`."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    try:
        return os.get_terminal_size(stream.fileno()).columns or otherwise
    except (OSError, ValueError):  # a pipe, a file, or a stream in memory
        return otherwise


def console() -> Any:
    """A `rich.console.Console`. Without a terminal it prints plain text, as wide as COLUMNS says, or 80 columns."""
    made = rich("console").Console(highlight=False, width=columns(sys.stdout, 80))
    made.on_broken_pipe = _raise_again
    return made


def _raise_again() -> NoReturn:
    """Let `main` handle a closed pipe; rich would end the program with status 1."""
    raise


def table(*columns: str, lines: bool = False, right: Iterable[str] = (), whole: Iterable[str] = ()) -> Any:
    """A `rich.table.Table` with these columns; `right` names the right-aligned ones, `whole` those never wrapped."""
    made = rich("table").Table(
        box=rich("box").SIMPLE_HEAD, show_lines=lines, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for column in columns:
        justify = "right" if column in right else "left"
        made.add_column(column, justify=justify, no_wrap=column in whole, overflow="fold")  # a long word is not cut
    return made


def print_json(data: object) -> None:
    """Print one JSON object on one line."""
    print(json.dumps(data))


def status(text: str) -> None:
    """Replace the current line of the terminal; nothing is printed if standard error is not a terminal."""
    if sys.stderr.isatty():
        line = filled(printable(text), columns(sys.stderr, 80) - 1).partition("\n")[0]  # a second line would stay
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)  # the escape sequence clears the line


@contextlib.contextmanager
def late_status(seconds: float = 2.0) -> Iterator[Callable[[str], None]]:
    """A function that is told each stage; the terminal shows it from `seconds` on, when most work is done."""
    told, lock, is_shown = ["starting"], threading.Lock(), threading.Event()

    def show() -> None:
        with lock:
            is_shown.set()
            status(f"{told[-1]} ...")

    def tell(words: str) -> None:
        with lock:
            told.append(words)
            if is_shown.is_set():
                status(f"{words} ...")

    timer = threading.Timer(seconds, show)
    timer.daemon = True
    timer.start()
    try:
        yield tell
    finally:
        timer.cancel()
        timer.join()
        if is_shown.is_set():
            status("")


def say(text: str) -> None:
    """Print a message on standard error, in place of the current status; a pipe gets whole lines, for grep."""
    status("")
    print(filled(printable(text, lines=True), columns(sys.stderr, sys.maxsize)), file=sys.stderr, flush=True)


def paragraph(text: str, indent: str = "") -> None:
    """Print a paragraph in at most 78 columns."""
    print(filled(f"{indent}{printable(text)}", min(78, columns(sys.stdout, 78))))


def filled(text: str, width: int) -> str:
    """Every line of a text broken between words into lines of at most so many columns, each indented like the first."""
    return "\n".join(_filled(line, width) for line in text.split("\n"))


def _filled(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip(" "))]
    doubled = re.sub(r"\S", lambda letter: letter[0] + SECOND * (east_asian_width(letter[0]) in "WF"), line)
    has_wide = SECOND in doubled  # then a long word may be broken, also between the columns of a wide character
    return textwrap.fill(
        doubled, width - has_wide, subsequent_indent=indent, break_on_hyphens=False, break_long_words=has_wide
    ).replace(SECOND, "")


def can_ask() -> bool:
    """Whether somebody can type an answer. In a notebook, `!headwise` has a terminal but no keyboard."""
    return sys.stdin.isatty() and "JPY_PARENT_PID" not in os.environ


def standard_input() -> str:
    """The text piped in, without the newline that a shell adds."""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}.") from error


def typed_text(text: str) -> str:
    """A text from the command line; what the locale (such as C) could not decode is read as UTF-8."""
    if not any("\udc80" <= letter <= "\udcff" for letter in text):
        return text
    try:
        return os.fsencode(text).decode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise OptionError(f"the text is not UTF-8 ({error.reason}). Pass it in a file, with --file.") from error


def text_file(path: Path) -> str:
    """The text in a file that `--file` names."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OptionError(f"--file {path} is not a file. Text from a pipe is read from standard input: pass - instead.")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--file {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"--file {path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error


def write_file(option: str, path: Path, content: str | Callable[[Path], object], stream: TextIO | None = None) -> None:
    """Write a file that `option` names, and say so: on standard error, or on `stream`.

    `content` is the text, or a function that writes to the path it is given.
    """
    from headwise.models.files import atomically  # here, because it imports torch

    write = content if callable(content) else lambda beside: beside.write_text(content, encoding="utf-8")
    try:
        atomically(path, write)
    except OSError as error:
        raise OptionError(f"{option} {path}: {error.strerror}. Name a file in a folder that exists.") from error
    print(f"wrote {printable(str(path))}", file=sys.stderr if stream is None else stream)


def check_file(option: str, path: Path | None) -> None:
    """Raise, before any work is done, if `option` names a file that could not be written."""
    if path is None:
        return
    if path.is_dir():
        raise OptionError(f"{option} {path} is a folder; expected the name of a file.")
    if path.exists() and not path.is_file():
        raise OptionError(f"{option} {path} is a pipe or a device; expected the name of a file.")
    if not path.parent.is_dir():
        raise OptionError(f"{option} {path}: there is no folder {path.parent}. Name a file in a folder that exists.")
    if not os.access(path.parent, os.W_OK):
        raise OptionError(f"{option} {path}: the folder {path.parent} cannot be written to. Name another one.")


def add_json(parser: argparse._ActionsContainer, instead: str = "tables") -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help=f"print one JSON object instead of {instead}")


def check_positive(option: str, value: float) -> float:
    """`value`, or an error if it is not a finite number above 0."""
    if not 0 < value < math.inf:
        raise OptionError(f"{option} {value:g}: expected a number above 0.")
    return value


def check_seconds(option: str, value: float | None) -> None:
    """Raise if a time was given and it is not a finite number of seconds from 0 on."""
    if value is not None and not 0 <= value < math.inf:
        raise OptionError(f"{option} {value:g}: expected a non-negative number of seconds.")


def check_at_least_one(option: str, value: int | None) -> None:
    """Raise if a number was given and it is below 1."""
    if value is not None and value < 1:
        raise OptionError(f"{option} {value}: expected 1 or more.")


# What stands for our typography in an encoding that lacks it, such as cp1252 on Windows or latin-1.
PLAIN = {
    "\u00a0": " ", "→": "->", "←": "<-", "“": '"', "”": '"', "’": "'", "…": "...", "×": "x", "·": "-", "–": "-",
    "−": "-", "√": "sqrt ", "≤": "<=", "≥": ">=", "±": "+-", "▀": "#", "▄": "#", "█": "#", "━": "=", "─": "-",
    "│": "|", "␣": "_", "⏎": "/", **dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789", strict=True)),
}  # fmt: skip


def print_anywhere() -> None:
    """Let both streams write any text: characters that their encoding lacks are replaced instead of raising."""
    codecs.register_error("headwise", _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="headwise")


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)  # noqa: S101 - streams are written to
    given = error.object[error.start : error.end]
    return "".join(PLAIN.get(letter, f"\\u{ord(letter):04x}") for letter in given), error.end
