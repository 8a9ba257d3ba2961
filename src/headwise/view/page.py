"""A sight as one HTML file: no network, no dependency, everything inside.

Its script is the files of the folder `page/`, one after the other. The browser is told to run that script and nothing
else (a hash in the Content-Security-Policy), data stands in a block that is never run, and tokens become text nodes.
"""

import base64
import functools
import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from html import escape
from string import Template
from typing import NamedTuple

from headwise.errors import OptionError
from headwise.view.data import Data
from headwise.view.embedding import BUDGET, embedded
from headwise.view.sight import Sight

SCRIPTS = (
    "dom", "words", "colour", "sections", "picture", "embedded", "subject", "store", "atlas", "table", "viewport",
    "tiles", "map", "gestures", "reading", "stage", "saving", "help", "app", "main",
)  # fmt: skip
SMALLEST = 200_000  # bytes: the page without data, and little more
SLACK = 0.97  # of the budget, since a share of it is names and escapes


class Parts(NamedTuple):
    """What a page is made of."""

    template: str
    style: str
    script: str

    @property
    def policy(self) -> str:
        """Only our own style and script may act; pictures are made in the page."""
        return (
            f"default-src 'none'; script-src {_hash(self.script)}; style-src {_hash(self.style)}; "
            f"img-src data: blob:; base-uri 'none'; form-action 'none'"
        )


@functools.cache
def parts() -> Parts:
    """Template, style and script; `headwise.show(root, manifest, source)` is what the script offers to others."""
    return Parts(_file("page.html"), _file("page.css"), script())


def script(*more: str) -> str:
    """All scripts as one, those of a server after them; what they name is seen by nobody else."""
    together = "\n".join([*(_file(f"{name}.js") for name in SCRIPTS), *more])
    return f'(() => {{\n"use strict";\n{together}}})();\n'


def _file(name: str) -> str:
    return (importlib.resources.files("headwise.view") / "page" / name).read_text(encoding="utf-8")


def standalone(sight: Sight, *, against: Sight | None = None, budget: int | None = None, title: str = "") -> str:
    """The whole page.

    Args:
        sight: what to show.
        against: another sight to compare it with: of another text, or of another model.
        budget: bytes the page may take, 5 MB unless given; what does not fit is left out, and the page says so.
        title: what to call it.
    """
    budget = BUDGET if budget is None else budget
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < SMALLEST:
        raise OptionError(
            f"budget={budget!r}: expected bytes, at least {SMALLEST:,}; the page itself takes some of them."
        )
    sights = [sight] if against is None else [sight, against]
    room = int((budget * SLACK - len(document([], title))) / len(sights))
    return document([embedded(each, room, title) for each in sights], title)


def document(data: Sequence[Data], title: str = "") -> str:
    """The page around this data."""
    found = parts()
    # Nothing in a data block ends it or looks like markup once every < is written as an escape.
    text = json.dumps([x.to_dict() for x in data], separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Template(found.template).substitute(
        policy=escape(found.policy),
        title=escape(title or "What the heads do"),
        style=found.style,
        script=found.script,
        data=text,
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
