"""Where the verbs print: results to standard output, chatter to standard error, both through rich."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headwise.errors import OptionError, need
from headwise.models.files import atomically


def console(*, chatter: bool = False) -> Any:
    """A `rich.console.Console`. Without a terminal it prints plain text, 100 columns wide."""
    rich = need("rich.console", "terminal", "tables in the terminal")
    made = rich.Console(stderr=chatter, highlight=False)
    return made if made.is_terminal else rich.Console(stderr=chatter, highlight=False, width=100)


def table(*columns: str, lines: bool = False, right: Iterable[str] = (), whole: Iterable[str] = ()) -> Any:
    """A `rich.table.Table` with these columns; `right` names those with numbers, `whole` those never wrapped."""
    rich, box = (need(f"rich.{name}", "terminal", "tables in the terminal") for name in ("table", "box"))
    made = rich.Table(box=box.SIMPLE_HEAD, show_lines=lines, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=column in whole)
    return made


def indented(text: str, by: int = 2) -> Any:
    """Text whose every line starts further right."""
    return need("rich.padding", "terminal", "tables in the terminal").Padding(text, (0, 0, 0, by))


def shape_text(shape: Iterable[int]) -> str:
    """A shape as torch prints it; its parts stay on one line."""
    return f"({', '.join(map(str, shape))})"


def standard_input() -> str:
    """What is piped in, without the line end that a shell adds."""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is no text in UTF-8: {error.reason} at byte {error.start}.") from error


def write_page(path: Path, page: str) -> None:
    """Write a page, and say so."""
    try:
        atomically(path, lambda beside: beside.write_text(page, encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--html {path}: {error.strerror}. Name a file in a folder that exists.") from error
    console().print(f"wrote {path}", soft_wrap=True)
