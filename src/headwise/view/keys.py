"""A terminal lent to one screen: keys as they are pressed, full size, and everything put back however it ends."""

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
