"""One head's map on a screen of text: what part of it is shown, where the cursor stands, and what keys do.

Nothing here touches a terminal: keys come in as names, lines go out.
"""

import dataclasses
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from headwise.view.color import CURSOR, LETTERS, NOTHING, Palette
from headwise.view.pictures import Cell, pixels
from headwise.view.result import Sight
from headwise.view.terminal import check_place, wrapped
from headwise.view.tokens import cut, fill, shown, wide

LABEL = 18  # columns of a word and its place beside the map
HEADER, FOOTER = 2, 4  # lines above and below the map
APART = 12  # columns from one word above the map to the next
NEAREST = 3  # the zoom at which a weight is eight columns wide; at 0 it is one, at −1 one stands for four weights
PRINTED = 48  # lines of a map that is printed once
KEPT = 64  # pictures, so that going back costs nothing
KEYS = "arrows move · + - zoom · Enter one weight · n p other heads · t words · q ends"
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


@dataclasses.dataclass(frozen=True)
class Window:
    """The part of a map that is shown: its first query and key, how many a cell covers, and how many cells."""

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
        sight: what is looked at.
        layer: of the head.
        head: its number.
        palette: how shares are shown; letters take a line a row, colours half a line.
        width: columns of the screen.
        height: its lines.
    """

    def __init__(self, sight: Sight, layer: int, head: int, palette: Palette, width: int, height: int) -> None:
        check_place(sight, layer, head)
        self.sight, self.layer, self.head, self.palette = sight, layer, head, palette
        self.query, self.key = sight.T - 1, 0
        self.words = width >= 60
        self.cell: Cell | None = None
        self.ended = False
        self.pointing = True
        self._pictures: dict[tuple[int, int, Window], Tensor] = {}
        self.top = self.left = 0  # the first cells shown
        self.resize(width, height)
        self.zoom = self._furthest()

    # What is where.

    def resize(self, width: int, height: int) -> None:
        """The screen has another size."""
        self.width, self.height = width, height

    @property
    def span(self) -> int:
        """How many queries, and keys, a cell covers."""
        return int(2 ** max(0, -self.zoom))

    @property
    def wide(self) -> int:
        """How many columns a cell has."""
        return int(2 ** max(0, self.zoom))

    @property
    def per_line(self) -> int:
        """How many cells stand above each other in one line: two of the smallest, where there are colours."""
        return 2 if self.palette.depth and self.wide == 1 else 1

    @property
    def tall(self) -> int:
        """How many lines a cell has, where it has a line."""
        return max(1, self.wide // 2)

    def _room(self) -> tuple[int, int]:
        """How many cells there is room for, down and across."""
        lines = max(self.tall, self.height - HEADER - FOOTER)
        columns = max(self.wide, self.width - (LABEL if self.words else 0))
        return lines * self.per_line // self.tall, columns // self.wide

    def _furthest(self) -> int:
        """The zoom at which the whole map is shown."""
        self.zoom = NEAREST
        while self.zoom > -64:
            rows, cols = self._room()
            whole = self.span * rows >= self.sight.T and self.span * cols >= self.sight.S
            if whole and self.tall <= self.height - HEADER - FOOTER:
                break
            self.zoom -= 1
        return self.zoom

    def window(self) -> Window:
        """What is shown now: as much as there is room for, with the cursor in it."""
        rows, cols = (-(-size // self.span) for size in (self.sight.T, self.sight.S))
        down, across = self._room()
        down, across = min(down, rows), min(across, cols)
        self.top = _around(self.query // self.span, self.top, down, rows)
        self.left = _around(self.key // self.span, self.left, across, cols)
        return Window(self.top * self.span, self.left * self.span, self.span, down, across)

    # What keys do.

    def press(self, key: str) -> None:
        """Do what a key means; others mean nothing."""
        self.cell = None
        if key in MOVES:
            self._move(*MOVES[key])
        elif key in ("pageup", "pagedown"):
            self._move(max(1, self._room()[0] // 2) * (1 if key == "pagedown" else -1), 0)
        elif key in ("home", "end"):
            self.key = 0 if key == "home" else min(self.query, self.sight.S - 1)
        elif key in ("+", "=", "-", "−"):
            self._zoom(closer=key in "+=")
        elif key == "t":
            self.words = not self.words
        elif key in ("n", "p"):
            self._next(1 if key == "n" else -1)
        elif key == "enter":
            self._look()
        elif key in ("q", "escape"):
            self.ended = True

    def _move(self, down: int, right: int) -> None:
        self.query = min(max(self.query // self.span + down, 0) * self.span, self.sight.T - 1)
        self.key = min(max(self.key // self.span + right, 0) * self.span, self.sight.S - 1)

    def _zoom(self, *, closer: bool) -> None:
        """Twice as near or far, with the cursor about where it is on the screen."""
        rows, cols = self._room()
        down = (self.query // self.span - self.top) / rows
        right = (self.key // self.span - self.left) / cols
        zoom = self.zoom
        self.zoom = min(NEAREST, zoom + 1) if closer else max(self._furthest(), zoom - 1)
        rows, cols = self._room()
        self.top, self.left = self.query // self.span - int(down * rows), self.key // self.span - int(right * cols)

    def _next(self, step: int) -> None:
        places = [(layer, head) for layer, weights in enumerate(self.sight.maps) for head in range(weights.shape[1])]
        self.layer, self.head = places[(places.index((self.layer, self.head)) + step) % len(places)]

    def _look(self) -> None:
        """Go to the largest weight of the pixel under the cursor, and say all about it."""
        first, key = self.query - self.query % self.span, self.key - self.key % self.span
        rows = slice(first, min(first + self.span, self.sight.T))
        found = self.sight.maps[self.layer][0, self.head, rows, key : key + self.span]
        place = int(found.argmax())
        self.query, self.key = first + place // found.shape[1], key + place % found.shape[1]
        self.cell = self.sight.cell(self.layer, self.head, self.query, self.key)

    # What is seen.

    def lines(self) -> list[str]:
        """The screen, at most as many lines and columns as it has."""
        window = self.window()
        body = self._body(window)
        space = [""] * (self.height - HEADER - FOOTER - len(body))
        return [*self._header(window), *body, *space, *self._footer(window)][: self.height]

    def picture(self) -> Tensor:
        """The pixels of the window, (rows, cols): sums over keys, means over queries."""
        return self._picture(self.window())

    def _picture(self, window: Window) -> Tensor:
        known = (self.layer, self.head, window)
        if known not in self._pictures:
            rows = slice(window.query, window.query + window.rows * window.span)
            part = self.sight.maps[self.layer].select(heads=[self.head], rows=rows)
            keys = range(window.key, min(window.key + window.cols * window.span, self.sight.S))
            if len(self._pictures) >= KEPT:
                self._pictures.clear()
            self._pictures[known] = pixels(part, window.span, keys)[0]
        return self._pictures[known]

    def _body(self, window: Window) -> list[str]:
        picture = self._picture(window)
        levels = self.palette.levels(picture)
        row, col = window.at(self.query, self.key) if self.pointing else (-1, -1)
        lines = []
        if self.per_line == 2:
            levels += [[NOTHING] * len(levels[0])] * (len(levels) % 2)
            for line in range(0, len(levels), 2):
                at = row - line if row - line in (0, 1) else None
                lines.append(self._label(window, line, at is not None) + self._halves(levels[line : line + 2], at, col))
            return lines
        shares = picture.tolist()
        for line in range(len(levels)):
            cursor = col if line == row else None
            for part in range(self.tall):
                label = self._label(window, line, line == row) if part == 0 else " " * LABEL * self.words
                lines.append(label + self._solid(levels[line], shares[line] if part == 0 else None, cursor))
        return lines

    def _halves(self, levels: list[list[int]], at: int | None, cursor: int) -> str:
        """A line of two rows of cells; the cursor's, if it is in the upper (0) or lower (1), in a colour of its own."""
        parts = list(map(self.palette.halves, *levels))
        if at is not None:
            other = levels[1 - at][cursor]
            back = "49" if other == NOTHING else self.palette.code(other, back=True)
            parts[cursor] = f"\033[{CURSOR[self.palette.depth]};{back}m{'▀▄'[at]}"
        return "".join(parts) + self.palette.reset

    def _solid(self, levels: list[int], shares: list[float] | None, cursor: int | None) -> str:
        """A line of cells a line high; with their shares in numbers where these are given and fit."""
        parts = []
        for place, level in enumerate(levels):
            text = number(shares[place]) if shares is not None and self.wide >= 4 else ""
            parts.append(self.palette.cell(level, text, self.wide, cursor=place == cursor))
        return "".join(parts) + self.palette.reset

    def _label(self, window: Window, line: int, here: bool) -> str:
        """The word that looks, and its place; of several the first, or the cursor's."""
        if not self.words:
            return ""
        query = self.query if here else window.query + line * window.span
        text = f"{query:>5} {cut(shown(self.sight.tokens[query]), LABEL - 8)}"
        return (self.palette.strong if here else self.palette.faint)(fill(text, LABEL - 2)) + (" ›" if here else "  ")

    def _header(self, window: Window) -> list[str]:
        """What the head does; then the words looked at, where there is room, the cursor's among them."""
        place = f"{self.layer}.{self.head}"
        reading = self.sight.summaries[self.layer][self.head].reading
        title = self.palette.strong(cut(f"{place}  {reading}", self.width))
        if not self.words:
            return [title, cut("down: the word that looks · right: the word looked at", self.width)]
        row = [" "] * (self.width - LABEL)
        _, cursor = window.at(self.query, self.key)
        if self.pointing:
            _write(row, cursor * self.wide, self._key_label(self.key, "⌄"))
        for col in range(0, window.cols, max(1, APART // self.wide)):
            _write(row, col * self.wide, self._key_label(window.key + col * window.span))
        return [title, fill("looks ↓ at →", LABEL) + "".join(row).rstrip()]

    def _key_label(self, key: int, mark: str = "") -> str:
        return cut(f"{mark}{key} {shown(self.sight.keys[key])}", max(self.wide, APART) - 1)

    def _footer(self, window: Window) -> list[str]:
        """Where the cursor stands and what is there; how near one is; the keys."""
        words = f"{self._named(self.query, self.sight.tokens)} looks at {self._named(self.key, self.sight.keys)}"
        near = "a cell is one weight" if window.span == 1 else f"a cell is {window.span:,} × {window.span:,} weights"
        last = min(window.query + window.rows * window.span, self.sight.T) - 1
        part = f"{near} · queries {window.query:,}–{last:,} of {self.sight.T:,} × {self.sight.S:,}"
        lines = [words, *wrapped(self._told(window), self.width), part][: FOOTER - 1]
        lines = [cut(line, self.width) for line in lines]
        return [*lines, self.palette.faint(cut(KEYS, self.width))]

    def _told(self, window: Window) -> str:
        if self.cell is not None:
            return told(self.cell)
        mass = float(self._picture(window)[window.at(self.query, self.key)])
        if window.span == 1:
            return f"weight {mass:.4f}"
        return f"of the weight of these {window.span:,} queries {mass:.4f} lies on these {window.span:,} keys"

    def _named(self, place: int, words: list[str]) -> str:
        return f"{place:,} “{cut(shown(words[place]), 20)}”"


def printed(sight: Sight, layer: int, head: int, width: int) -> list[str]:
    """A whole map in letters, once: a line for every query of a short text, for several of a longer one."""
    screen = MapScreen(sight, layer, head, Palette(0), width, HEADER + FOOTER + min(sight.T, PRINTED))
    screen.pointing, screen.words = False, True
    screen.zoom = screen._furthest()
    window = screen.window()
    scale = "one weight" if window.span == 1 else f"{window.span:,} × {window.span:,} weights"
    legend = f"a letter is {scale}; shares from 0 to 1, square roots: {LETTERS!r}"
    return [*screen._header(window), *screen._body(window), cut(legend, width)]


def told(cell: Cell) -> str:
    """One weight in words."""
    if cell.logit == -torch.inf:
        return "weight 0: this query may not see this key"
    rank = f"rank {cell.rank:,} of {cell.visible:,}"
    return f"weight {cell.weight:.4f} · logit {cell.logit:.3f} · {rank} · {cell.times_uniform:.2f} × uniform"


def number(share: float) -> str:
    """A share in three columns: .43, or 1.0; what rounds to nothing is left out."""
    text = f"{share:.2f}"
    return {"0.00": "", "1.00": "1.0"}.get(text, text.removeprefix("0"))


def _around(place: int, first: int, room: int, size: int) -> int:
    """Where a window of `room` begins so that `place` is in it, moved as little as possible and within `size`."""
    first = min(max(first, place - room + 1), place)
    return max(0, min(first, size - room))


def _write(row: list[str], col: int, text: str) -> None:
    """Write text into a row of single columns where nothing is yet; a wide letter's second column holds nothing."""
    size = wide(text)
    if col + size > len(row) or any(letter != " " for letter in row[max(0, col - 1) : col + size + 1]):
        return
    row[col : col + size] = [text, *[""] * (size - 1)]


# A terminal lent to one screen: keys as they are pressed, full size, and everything put back however it ends.

SEQUENCES = {
    "[A": "up", "[B": "down", "[C": "right", "[D": "left", "OA": "up", "OB": "down", "OC": "right", "OD": "left",
    "[H": "home", "[F": "end", "OH": "home", "OF": "end", "[1~": "home", "[4~": "end", "[5~": "pageup",
    "[6~": "pagedown",
}  # fmt: skip
NAMES = {"\r": "enter", "\n": "enter", "\x04": "q", "": "q"}  # Ctrl-D, or a terminal that is gone, ends it
PATIENCE = 0.05  # seconds in which the rest of a key's sequence must come after Escape
ENTER = "\033[?1049h\033[?25l"  # another screen, no cursor
LEAVE = "\033[0m\033[?25h\033[?1049l"  # colours, cursor and the screen as they were


class Screen(Protocol):
    """What can be shown and pressed."""

    ended: bool

    def resize(self, width: int, height: int) -> None:
        """The terminal has another size."""

    def press(self, key: str) -> None:
        """A key was pressed."""

    def lines(self) -> list[str]:
        """What to show."""


def show(screen: Screen) -> None:
    """Let a screen have the terminal until it ends, or Ctrl-C ends it."""
    with suppress(KeyboardInterrupt), _lent_terminal() as read:
        while not screen.ended:
            screen.resize(*shutil.get_terminal_size())
            _draw(screen.lines())
            key = read()
            if key is not None:
                screen.press(key)


def _draw(lines: list[str]) -> None:
    """All lines at once, each to its end, without scrolling."""
    text = "\033[H" + "\n".join(f"{line}\033[K" for line in lines) + "\033[J"
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _lent_terminal() -> Iterator[Callable[[], str | None]]:
    """The terminal's other screen and its keys one by one; given back however this ends, also by a signal."""
    place = sys.stdin.fileno()
    before = termios.tcgetattr(place)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    handlers: dict[int, Any] = {
        signal.SIGWINCH: lambda *_: None,
        signal.SIGINT: signal.default_int_handler,  # who was started in the background would else ignore Ctrl-C
        signal.SIGTERM: _end,
        signal.SIGHUP: _end,
        signal.SIGTSTP: signal.SIG_IGN,  # who is put to sleep cannot give back
    }
    old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    # Every signal also wakes who waits for a key: one that comes just before the waiting would else be slept over.
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
    """A signal that ends the program, as an exception: what is lent is given back on the way."""
    raise SystemExit(128 + number)


def _key(place: int, wake: int) -> str | None:
    """The name of the next key; None when a signal came instead, such as that of another size."""
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
    """One character, which may be several bytes; nothing when the terminal is gone."""
    data = os.read(place, 1)
    if data and data[0] >= 0xC0:
        data += os.read(place, 3 if data[0] >= 0xF0 else 2 if data[0] >= 0xE0 else 1)
    return data.decode("utf-8", "replace")
