"""The page and its files: the same scripts that a page on disk carries, and those that ask the server."""

import functools
from importlib import resources
from typing import NamedTuple

from headwise.view.page import parts, script

LIVE = ("connection", "live_source", "outcome", "silent_heads", "memory", "live")


class File(NamedTuple):
    """What is sent."""

    data: bytes
    kind: str


@functools.cache
def files() -> dict[str, File]:
    """All files there are, by name; nothing else can be asked for."""
    live = script(*(_read(f"{name}.js") for name in LIVE))
    return {
        "page.js": File(live.encode(), "text/javascript; charset=utf-8"),
        "page.css": File((parts().style + _read("live.css")).encode(), "text/css; charset=utf-8"),
    }


@functools.cache
def page() -> str:
    """The page without data, whose scripts come from files."""
    return _read("live.html")


def _read(name: str) -> str:
    return (resources.files("headwise.view.serve") / "page" / name).read_text(encoding="utf-8")
