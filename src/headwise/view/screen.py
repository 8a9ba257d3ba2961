"""One head's map in a terminal: the part of it that is shown, the cursor, the keys, and the full-screen mode.

`MapScreen` does not touch the terminal: keys come in as names, lines go out. `show` runs a screen in a real terminal,
and restores the terminal however it ends.
"""

import dataclasses
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from headwise.view.color import CURSOR, NOTHING, Palette
from headwise.view.pictures import Cell, pixels
from headwise.view.result import View
from headwise.view.terminal import RAMP, wrapped
from headwise.view.tokens import cut, fill, shown, wide
from headwise.view.words import in_numbers

LABEL = 18  # columns of a token and its position beside the map
HEADER, FOOTER = 2, 4  # lines above and below the map
APART = 12  # columns from one label above the map to the next
NEAREST = 3  # the zoom at which a weight is eight columns wide; one column at 0; at −1 a cell is 2 × 2 weights
PRINTED = 48  # most lines of a printed map
KEPT = 64  # pictures kept in memory, so that going back is free
KEYS = (  # each with what the last line says of it, if it does, and what the list of keys says
    ("arrows", "move", "move by a cell"),
    ("PgUp PgDn", "", "move by half a screen"),
    ("Home End", "", "first key, the query itself"),
    ("+ -", "zoom", "zoom in, zoom out"),
    ("Enter", "one weight", "largest weight of the cell"),
    ("n p", "other head", "next head, previous head"),
    ("t", "labels", "show or hide the tokens"),
    ("?", "keys", "list of keys, back to the map"),
    ("q", "quits", "quit, as do Escape and Ctrl-C"),
)
LEFT_OUT = ("t", "n p", "Enter", "+ -")  # of the last line where it is too narrow, in this order
SEQUENCES = {
    "[A": "up", "[B": "down", "[C": "right", "[D": "left", "OA": "up", "OB": "down", "OC": "right", "OD": "left",
    "[H": "home", "[F": "end", "OH": "home", "OF": "end", "[1~": "home", "[4~": "end", "[5~": "pageup",
    "[6~": "pagedown",
}  # fmt: skip
NAMES = {"\r": "enter", "\n": "enter", "\x04": "q", "": "q"}  # Ctrl-D or a closed terminal quits
PATIENCE = 0.05  # seconds to wait for the rest of an escape sequence
ENTER = "\033[?1049h\033[?25l"  # alternate screen, no cursor
LEAVE = "\033[0m\033[?25h\033[?1049l"  # colors, cursor and screen as they were
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


@dataclasses.dataclass(frozen=True)
class MapWindow:
    """The visible part of a map: its first query and key, how many of each a cell covers, and the number of cells."""

    query: int
    key: int
    span: int
    rows: int
    cols: int

    def at(self, query: int, key: int) -> tuple[int, int]:
        """The cell of a query and a key."""
        return (query - self.query) // self.span, (key - self.key) // self.span


class MapScreen:
    """The map of one head, moved and zoomed by keys.

    Args:
        view: the model and text.
        layer: the layer of the head.
        head: its number.
        palette: how weights are drawn; a row takes a line in letters and half a line in colors.
        width: columns of the screen.
        height: lines of the screen.
    """

    def __init__(self, view: View, layer: int, head: int, palette: Palette, width: int, height: int) -> None:
        view.check_place(layer, head)
        self.view, self.layer, self.head, self.palette = view, layer, head, palette
        self.query, self.key = view.T - 1, 0
        self.words = width >= 60
        self.cell: Cell | None = None
        self.ended, self.pointing, self.helping = False, True, False
        self._pictures: dict[tuple[int, int, MapWindow], Tensor] = {}
        self.top = self.left = 0  # the first cells shown
        self.resize(width, height)
        self.zoom = self._furthest()

    def resize(self, width: int, height: int) -> None:
        self.width, self.height = width, height

    @property
    def span(self) -> int:
        """How many queries, and how many keys, a cell covers."""
        return int(2 ** max(0, -self.zoom))

    @property
    def wide(self) -> int:
        """Columns per cell."""
        return int(2 ** max(0, self.zoom))

    @property
    def per_line(self) -> int:
        """Rows of cells per line: two if cells are smallest and there are colors."""
        return 2 if self.palette.depth and self.wide == 1 else 1

    @property
    def tall(self) -> int:
        """Lines per cell, at least one."""
        return max(1, self.wide // 2)

    def _room(self) -> tuple[int, int]:
        """How many cells fit, down and across."""
        lines = max(self.tall, self.height - HEADER - FOOTER)
        columns = max(self.wide, self.width - (LABEL if self.words else 0))
        return lines * self.per_line // self.tall, columns // self.wide

    def _furthest(self) -> int:
        """The zoom that shows the whole map."""
        self.zoom = NEAREST
        while self.zoom > -64:
            rows, cols = self._room()
            whole = self.span * rows >= self.view.T and self.span * cols >= self.view.S
            if whole and self.tall <= self.height - HEADER - FOOTER:
                break
            self.zoom -= 1
        return self.zoom

    def window(self) -> MapWindow:
        """The part that is shown now: as much as fits, with the cursor inside."""
        rows, cols = (-(-size // self.span) for size in (self.view.T, self.view.S))
        down, across = self._room()
        down, across = min(down, rows), min(across, cols)
        self.top = _around(self.query // self.span, self.top, down, rows)
        self.left = _around(self.key // self.span, self.left, across, cols)
        return MapWindow(self.top * self.span, self.left * self.span, self.span, down, across)

    def press(self, key: str) -> None:
        """Handle a key; unknown keys do nothing. `?` lists the keys until the next one is pressed."""
        if self.helping or key == "?":
            self.ended, self.helping = key == "q", not self.helping
            return
        self.cell = None
        if key in MOVES:
            self._move(*MOVES[key])
        elif key in ("pageup", "pagedown"):
            self._move(max(1, self._room()[0] // 2) * (1 if key == "pagedown" else -1), 0)
        elif key in ("home", "end"):
            self.key = 0 if key == "home" else min(self.query, self.view.S - 1)
        elif key in ("+", "=", "-", "−"):
            self._zoom(closer=key in "+=")
        elif key == "t":
            self.words = not self.words
        elif key in ("n", "p"):
            self._next(1 if key == "n" else -1)
        elif key == "enter":
            self._inspect()
        elif key in ("q", "escape"):
            self.ended = True

    def _move(self, down: int, right: int) -> None:
        self.query = min(max(self.query // self.span + down, 0) * self.span, self.view.T - 1)
        self.key = min(max(self.key // self.span + right, 0) * self.span, self.view.S - 1)

    def _zoom(self, *, closer: bool) -> None:
        """Zoom by a factor of 2, keeping the cursor about where it is on the screen."""
        rows, cols = self._room()
        down, right = (self.query // self.span - self.top) / rows, (self.key // self.span - self.left) / cols
        zoom = self.zoom
        self.zoom = min(NEAREST, zoom + 1) if closer else max(self._furthest(), zoom - 1)
        rows, cols = self._room()
        self.top, self.left = self.query // self.span - int(down * rows), self.key // self.span - int(right * cols)

    def _next(self, step: int) -> None:
        places = [(layer, head) for layer, weights in enumerate(self.view.maps) for head in range(weights.shape[1])]
        self.layer, self.head = places[(places.index((self.layer, self.head)) + step) % len(places)]

    def _inspect(self) -> None:
        """Move to the largest weight of the cell under the cursor and describe it."""
        first, key = self.query - self.query % self.span, self.key - self.key % self.span
        rows = slice(first, min(first + self.span, self.view.T))
        found = self.view.maps[self.layer][0, self.head, rows, key : key + self.span]
        place = int(found.argmax())
        self.query, self.key = first + place // found.shape[1], key + place % found.shape[1]
        self.cell = self.view.cell(self.layer, self.head, self.query, self.key)

    def lines(self) -> list[str]:
        """The lines of the screen, which fit its size."""
        if self.helping:
            return [*_keys_listed(), *[""] * (self.height - len(KEYS) - 2), self._last_line()]
        window = self.window()
        body = self._body(window)
        space = [""] * (self.height - HEADER - FOOTER - len(body))
        return [*self._header(window), *body, *space, *self._footer(window)][: self.height]

    def picture(self, window: MapWindow) -> Tensor:
        """The picture of a window, (rows, cols): weights summed over keys, averaged over queries."""
        known = (self.layer, self.head, window)
        if known not in self._pictures:
            rows = slice(window.query, window.query + window.rows * window.span)
            part = self.view.maps[self.layer].select(heads=[self.head], rows=rows)
            keys = range(window.key, min(window.key + window.cols * window.span, self.view.S))
            if len(self._pictures) >= KEPT:
                self._pictures.clear()
            self._pictures[known] = pixels(part, window.span, keys)[0]
        return self._pictures[known]

    def _body(self, window: MapWindow) -> list[str]:
        picture = self.picture(window)
        levels = self.palette.levels(picture)
        row, col = window.at(self.query, self.key) if self.pointing else (-1, -1)
        lines = []
        if self.per_line == 2:
            levels += [[NOTHING] * len(levels[0])] * (len(levels) % 2)
            for line in range(0, len(levels), 2):
                at = row - line if row - line in (0, 1) else None
                lines.append(self._label(window, line, at is not None) + self._halves(levels[line : line + 2], at, col))
            return lines
        for line, shares in enumerate(picture.tolist()):
            cursor = col if line == row else None
            lines.append(self._label(window, line, line == row) + self._solid(levels[line], shares, cursor))
            blank = " " * LABEL * self.words + self._solid(levels[line], None, cursor)
            lines += [blank] * (self.tall - 1)
        return lines

    def _halves(self, levels: list[list[int]], at: int | None, cursor: int) -> str:
        """A line of two rows of cells, with the cursor in the upper one (0), in the lower one (1) or in neither."""
        parts = list(map(self.palette.halves, *levels))
        if at is not None:
            other = levels[1 - at][cursor]
            back = "49" if other == NOTHING else self.palette.code(other, back=True)
            parts[cursor] = f"\033[{CURSOR[self.palette.depth]};{back}m{'▀▄'[at]}"
        return "".join(parts) + self.palette.reset

    def _solid(self, levels: list[int], shares: list[float] | None, cursor: int | None) -> str:
        """A line of cells, with their weights as numbers if given and wide enough."""
        texts = map(number, shares) if shares is not None and self.wide >= 4 else [""] * len(levels)
        cells = (
            self.palette.cell(level, text, self.wide, cursor=place == cursor)
            for place, (level, text) in enumerate(zip(levels, texts, strict=True))
        )
        return "".join(cells) + self.palette.reset

    def _label(self, window: MapWindow, line: int, here: bool) -> str:
        """The query token and its position; if a cell covers several, the first, or the one under the cursor."""
        if not self.words:
            return ""
        query = self.query if here else window.query + line * window.span
        text = f"{query:>5} {cut(shown(self.view.labels[query]), LABEL - 8)}"
        return (self.palette.strong if here else self.palette.faint)(fill(text, LABEL - 2)) + (" ›" if here else "  ")

    def _header(self, window: MapWindow) -> list[str]:
        """What the head does, then labels of key tokens where they fit, always including the one under the cursor."""
        head = self.view.summaries[self.layer][self.head]
        title = self.palette.strong(cut(f"{self.layer}.{self.head}  {in_numbers(head)}", self.width))
        if not self.words:
            axes = ("rows: queries (attending tokens)", "columns: keys (attended tokens)")
            long, short = (" · ".join(names) for names in (axes, [name.partition(" (")[0] for name in axes]))
            return [title, long if len(long) <= self.width else short]
        row = [" "] * (self.width - LABEL)
        if self.pointing:
            _write(row, window.at(self.query, self.key)[1] * self.wide, self._key_label(self.key, "⌄"))
        for col in range(0, window.cols, max(1, APART // self.wide)):
            _write(row, col * self.wide, self._key_label(window.key + col * window.span))
        return [title, fill("query ↓  key →", LABEL) + "".join(row).rstrip()]

    def _key_label(self, key: int, mark: str = "") -> str:
        return cut(f"{mark}{key} {shown(self.view.key_labels[key])}", max(self.wide, APART) - 1)

    def _footer(self, window: MapWindow) -> list[str]:
        """The pair under the cursor, its weight, the zoom, and the keys."""
        query, key = (
            f"{place:,} “{cut(shown(words[place]), 20)}”"
            for place, words in ((self.query, self.view.labels), (self.key, self.view.key_labels))
        )
        near = "a cell is one weight" if window.span == 1 else f"a cell is {window.span:,} × {window.span:,} weights"
        last = min(window.query + window.rows * window.span, self.view.T) - 1
        part = f"queries {window.query:,}–{last:,} of {self.view.T:,} × {self.view.S:,}"
        told = [*wrapped(self._described(window).split(" · "), self.width), *wrapped([near, part], self.width)]
        lines = [cut(f"{query} attends to {key}", self.width), *told]
        return [*lines[: FOOTER - 1], self._last_line()]

    def _last_line(self) -> str:
        """The keys; on a narrow screen fewer of them, which `?` lists."""
        shown = [(key, short) for key, short, _ in KEYS if short]
        for left_out in LEFT_OUT:
            if len(_in_a_line(shown)) > self.width:
                shown = [(key, short) for key, short in shown if key != left_out]
        return self.palette.faint(_in_a_line(shown))

    def _described(self, window: MapWindow) -> str:
        if self.cell is not None:
            return described(self.cell)
        mass = float(self.picture(window)[window.at(self.query, self.key)])
        if window.span == 1:
            return f"weight {precise(mass)}"
        queries = self._covered("query", "queries", self.query, self.view.T)
        keys = self._covered("key", "keys", self.key, self.view.S)
        return f"{queries} put{'s' * ('–' not in queries)} {precise(mass)} on {keys}"

    def _covered(self, one: str, several: str, place: int, size: int) -> str:
        """The positions that the cell of this one covers, such as "queries 296–299"."""
        first = place - place % self.span
        last = min(first + self.span, size) - 1
        return f"{one} {first:,}" if first == last else f"{several} {first:,}–{last:,}"


def printed(view: View, layer: int, head: int, width: int) -> list[str]:
    """A whole map in letters: a line per query of a short text, or per several queries of a longer one."""
    screen = MapScreen(view, layer, head, Palette(0), width, HEADER + FOOTER + min(view.T, PRINTED))
    screen.pointing, screen.words = False, True
    screen.zoom = screen._furthest()
    window = screen.window()
    scale = "one weight" if window.span == 1 else f"{window.span:,} × {window.span:,} weights"
    return [*screen._header(window), *screen._body(window), *wrapped([f"a letter is {scale}; {RAMP}"], width)]


def described(cell: Cell) -> str:
    """One weight in words."""
    if cell.logit == -torch.inf:
        return "weight 0: this query may not see this key"
    rank = f"rank {cell.rank:,} of {cell.visible:,}"
    return f"weight {precise(cell.weight)} · logit {cell.logit:.3f} · {rank} · {cell.times_uniform:.2f} × uniform"


def precise(weight: float) -> str:
    """A weight in four decimals; one that would round to 0 is not called 0.

    >>> precise(0.6858), precise(1.9e-7), precise(0.0)
    ('0.6858', '< 0.0001', '0')
    """
    text = f"{weight:.4f}"
    return text if text != "0.0000" else "< 0.0001" if weight > 0 else "0"


def number(share: float) -> str:
    """A weight in three columns, such as .43 or 1.0; nothing if it rounds to 0."""
    text = f"{share:.2f}"
    return {"0.00": "", "1.00": "1.0"}.get(text, text.removeprefix("0"))


def _keys_listed() -> list[str]:
    """What each key does, in at most 40 columns."""
    return ["Keys", *(f"{key:<11}{told}" for key, _, told in KEYS)]


def _in_a_line(keys: Sequence[tuple[str, str]]) -> str:
    return " · ".join(f"{key} {short}" for key, short in keys)


def _around(place: int, first: int, room: int, size: int) -> int:
    """Where a window of `room` begins so that it contains `place`, moved as little as possible, within `size`."""
    first = min(max(first, place - room + 1), place)
    return max(0, min(first, size - room))


def _write(row: list[str], col: int, text: str) -> None:
    """Write text into a row of single columns if they are free; the second column of a wide letter stays empty."""
    size = wide(text)
    if col + size > len(row) or any(letter != " " for letter in row[max(0, col - 1) : col + size + 1]):
        return
    row[col : col + size] = [text, *[""] * (size - 1)]


def show(screen: MapScreen) -> None:
    """Run a screen in the terminal until it ends or the user presses Ctrl-C."""
    with suppress(KeyboardInterrupt), _full_screen() as read:
        while not screen.ended:
            screen.resize(*shutil.get_terminal_size())
            _draw(screen.lines())
            key = read()
            if key is not None:
                screen.press(key)


def _draw(lines: list[str]) -> None:
    """Write all lines at once, each to its end, without scrolling."""
    sys.stdout.write("\033[H" + "\n".join(f"{line}\033[K" for line in lines) + "\033[J")
    sys.stdout.flush()


@contextmanager
def _full_screen() -> Iterator[Callable[[], str | None]]:
    """The alternate screen and a function that reads a key; the terminal is restored on any exit, also by a signal."""
    import termios  # not on Windows
    import tty

    place = sys.stdin.fileno()
    before = termios.tcgetattr(place)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    handlers: dict[int, Any] = {
        signal.SIGWINCH: lambda *_: None,
        signal.SIGINT: signal.default_int_handler,  # a process started in the background would ignore Ctrl-C
        signal.SIGTERM: _end,
        signal.SIGHUP: _end,
        signal.SIGTSTP: signal.SIG_IGN,  # a stopped process could not restore the terminal
    }
    old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    # Every signal also interrupts the wait for a key; otherwise one that arrives just before it would be missed.
    waker = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    try:
        tty.setcbreak(place)
        sys.stdout.write(ENTER)
        yield lambda: _key(place, wake)
    finally:
        termios.tcsetattr(place, termios.TCSADRAIN, before)
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(waker)
        os.close(wake)
        os.close(woken)
        sys.stdout.write(LEAVE)
        sys.stdout.flush()


def _end(number: int, _: Any) -> None:
    """Turn a signal that ends the program into an exception, so that the terminal is restored on the way."""
    raise SystemExit(128 + number)


def _key(place: int, wake: int) -> str | None:
    """The name of the next key; None if a signal came first, such as that of a new size."""
    ready = select.select([place, wake], [], [])[0]
    if wake in ready:
        os.read(wake, 64)
        return None
    letter = _letter(place)
    if letter != "\033":
        return NAMES.get(letter, letter)
    rest = ""
    while not (rest[1:] and (rest[-1].isalpha() or rest[-1] == "~")) and select.select([place], [], [], PATIENCE)[0]:
        rest += _letter(place)
    return SEQUENCES.get(rest, "escape" if not rest else "")


def _letter(place: int) -> str:
    """One character, which may be several bytes; nothing if the terminal is closed."""
    data = os.read(place, 1)
    if data and data[0] >= 0xC0:
        data += os.read(place, 3 if data[0] >= 0xF0 else 2 if data[0] >= 0xE0 else 1)
    return data.decode("utf-8", "replace")
