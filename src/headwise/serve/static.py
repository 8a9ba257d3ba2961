"""The files of the page, by name: only those that are listed can be asked for."""

import functools
from importlib import resources
from pathlib import Path
from typing import NamedTuple

KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
FOLDERS = ("headwise.view", "headwise.serve")  # each with a folder `page`


class File(NamedTuple):
    """What is sent."""

    data: bytes
    kind: str


@functools.cache
def files() -> dict[str, File]:
    """All files of the page, by name."""
    found = {}
    for package in FOLDERS:
        for file in (resources.files(package) / "page").iterdir():
            kind = KINDS.get(Path(file.name).suffix)
            if kind is not None:
                found[file.name] = File(file.read_bytes(), kind)
    return found


def page() -> str:
    """The page without data, whose scripts come from files."""
    return "<!doctype html><title>headwise</title>"
