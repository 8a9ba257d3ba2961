"""A sight as one HTML file: no network, no dependency, everything inside.

Its script is the files of the folder `page/`, one after the other. The browser is told to run that script and nothing
else (a hash in the Content-Security-Policy), data stands in a block that is never run, and tokens become text nodes.
"""

import base64
import functools
import hashlib
import importlib.resources
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from string import Template
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.view.data import (
    Data,
    Section,
    add_edges,
    add_reach,
    manifest,
    plain,
    ratios,
    shares,
    telling,
    whole_numbers,
)
from headwise.view.pictures import Cells, Measured, levels, measure, measured, span_at
from headwise.view.result import Sight
from headwise.weights import AttentionMap

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


# A page that stands alone: which numbers go into it, within a budget of bytes.

BUDGET = 5_000_000  # bytes of a file
FINEST = 2  # deepest level that is tried for pictures: 1024 pixels
DENSE = 2**20  # most weights of a head that are ever held together, here and in the browser
SHARES = {"keys": 0.45, "kinds": 0.15}  # of the budget, at most; finer pictures take the rest
# Compressed bytes per number, for guessing before anything is made: measured from 0.4 (sharp heads) to 0.95 (random).
PACKED = {torch.float32: 3.4, torch.float16: 1.7}


def embedded(sight: Sight, budget: int, title: str = "") -> Data:
    """The data of a page that stands alone, within so many bytes as far as that can be."""
    found = Data(manifest(sight, title), {})
    add_reach(found, sight)
    dtype = _dtype_that_fits(sight, budget)
    if dtype is not None:
        whole = _with_weights(found, sight, dtype)
        if whole.size <= budget:
            return whole
        if dtype == torch.float32:
            whole = _with_weights(found, sight, torch.float16)
            if whole.size <= budget:
                return whole
    return _with_pictures(found, sight, budget)


# Short texts: every weight.


def _dtype_that_fits(sight: Sight, budget: int) -> torch.dtype | None:
    """The finest dtype in which all weights may fit, judged by how many are seen."""
    if sight.T * sight.S > DENSE:
        return None
    seen = sum(int(weights.select(heads=[0])._source().keys_seen().sum()) * weights.shape[1] for weights in sight.maps)
    room = budget * 3 / 4
    return next((dtype for dtype, packed in PACKED.items() if seen * packed * 0.4 < room), None)


def _with_weights(base: Data, sight: Sight, dtype: torch.dtype) -> Data:
    found = Data({**base.manifest, "embedded": {"weights": str(dtype).removeprefix("torch.")}}, dict(base.sections))
    for layer, weights in enumerate(sight.maps):
        seen = measure(weights)
        add_edges(found, sight, layer, seen)
        for head, dense in enumerate(weights[0].to(dtype)):
            found.sections[f"weights/{layer}.{head}"] = plain(dense)
            found.sections[f"logs/{layer}.{head}"] = plain(seen.log_sum_exp[head].float())
    return found


# Long texts: pictures of all, and as much more as there is room for.


def _with_pictures(base: Data, sight: Sight, budget: int) -> Data:
    offers = Offers()
    found = Data(dict(base.manifest), dict(base.sections))
    wanted = _heads_with_keys(sight, budget)
    for layer, weights in enumerate(sight.maps):
        _measure_layer(found, offers, sight, layer, weights, wanted)
    order = _places(sight)
    room: float = budget - found.size - sum(len(name) + 8 for name in order) - 200
    coarse = [offers.at(0, head) for head in order]
    room -= sum(size for _, size in coarse)
    found.sections |= {name: section for names, _ in coarse for name, section in names.items()}
    room = _fill(found, (offers.keys(head) for head in order), room, room - budget * SHARES["keys"])
    room = _fill(found, (offers.kinds(head) for head in order), room, room - budget * SHARES["kinds"])
    if sight.T * sight.S <= DENSE:
        room = _add_whole_heads(found, sight, order, room)
    order = [head for head in order if f"mass/{head}" in found.sections]
    for level in range(1, offers.deepest + 1):
        finer = (offers.instead(level, head, found.sections[f"mass/{head}"].size) for head in order)
        room = _fill(found, finer, room, 0)
    single = [head for head in _places(sight) if {f"keys/{head}", f"weights/{head}"} & set(found.sections)]
    found.manifest["embedded"] = {"weights": None, "keys": single}
    return found


def _add_whole_heads(found: Data, sight: Sight, order: list[str], room: float) -> float:
    """Every weight of the most telling heads, in place of their pictures, while there is room; what is left of it."""
    for head in order:
        layer, place = map(int, head.split("."))
        weights = sight.maps[layer].select(heads=[place])
        whole = {
            f"weights/{head}": plain(weights[0, 0].half()),
            f"logs/{head}": plain(weights.log_sum_exp()[0, 0].float()),
        }
        replaced = [f"{name}/{head}" for name in ("logs", "mass", "keys", "values", "rest", "peak", "uniform")]
        before = sum(found.sections[name].size for name in replaced if name in found.sections)
        size = sum(section.size for section in whole.values()) - before
        if size > room:
            break
        for name in replaced:
            found.sections.pop(name, None)
        found.sections |= whole
        room -= size
    return room


class Offers:
    """Sections that may go into a page, by head."""

    def __init__(self) -> None:
        self.sections: dict[str, Section] = {}
        self.finer: dict[tuple[int, str], Section] = {}
        self.deepest = 0

    def at(self, level: int, head: str) -> tuple[dict[str, Section], int]:
        """The picture of a head at a level, and its size."""
        section = self.finer[level, head]
        return {f"mass/{head}": section}, section.size

    def instead(self, level: int, head: str, replaced: int) -> tuple[dict[str, Section], int]:
        """The same where a coarser one of this size is replaced."""
        names, size = self.at(level, head)
        return names, size - replaced

    def keys(self, head: str) -> tuple[dict[str, Section], int]:
        """The largest weights of a head's rows; nothing where they were not kept."""
        return self._named([f"keys/{head}", f"values/{head}", f"logs/{head}"])

    def kinds(self, head: str) -> tuple[dict[str, Section], int]:
        """A head's pictures of the other kinds."""
        return self._named([f"rest/{head}", f"peak/{head}", f"uniform/{head}"])

    def _named(self, names: Iterable[str]) -> tuple[dict[str, Section], int]:
        found = {name: self.sections[name] for name in names if name in self.sections}
        return found, sum(section.size for section in found.values())


def _fill(found: Data, offers: Iterator[tuple[dict[str, Section], int]], room: float, least: float) -> float:
    """Take offers in their order while more than `least` of the room remains, which is given back."""
    for sections, size in offers:
        if room - size >= max(least, 0):
            found.sections |= sections
            room -= size
    return room


def _measure_layer(
    found: Data, offers: Offers, sight: Sight, layer: int, weights: AttentionMap, wanted: set[tuple[int, int]]
) -> None:
    """Edges into the page, everything else among the offers."""
    T, S = sight.T, sight.S
    finest = min(FINEST, levels(T, S))
    offers.deepest = finest
    coarse = span_at(0, T, S)
    cells = {"mass": Cells.of("mass", span_at(finest, T, S), range(S))}
    cells |= {kind: Cells.of(kind, coarse, range(S)) for kind in ("peak", "uniform")}
    chosen = [head for head in range(weights.shape[1]) if (layer, head) in wanted]
    seen = measure(weights, top=bool(chosen), cells=cells)
    add_edges(found, sight, layer, seen)
    rest = measured(weights, [Cells.of("rest", coarse, range(S))], apart=True)[0]
    _offer_pictures(offers, layer, {"rest": rest, "peak": cells["peak"]}, shares)
    _offer_pictures(offers, layer, {"uniform": cells["uniform"]}, ratios)
    mass = cells["mass"]
    for level in range(finest, -1, -1):
        for head, picture in enumerate(mass.values()):
            offers.finer[level, f"{layer}.{head}"] = shares(picture)
        mass = mass.halved()
    for head in chosen:
        _offer_keys(offers, f"{layer}.{head}", seen, head)


def _offer_pictures(offers: Offers, layer: int, cells: dict[str, Cells], encoded: Callable[[Tensor], Section]) -> None:
    for kind, made in cells.items():
        for head, picture in enumerate(made.values()):
            offers.sections[f"{kind}/{layer}.{head}"] = encoded(picture)


def _offer_keys(offers: Offers, name: str, seen: Measured, head: int) -> None:
    assert seen.top_keys is not None  # noqa: S101 - asked for
    assert seen.top_weights is not None  # noqa: S101
    offers.sections[f"keys/{name}"] = whole_numbers(seen.top_keys[head].clamp(min=0))
    offers.sections[f"values/{name}"] = plain(seen.top_weights[head].half())
    offers.sections[f"logs/{name}"] = plain(seen.log_sum_exp[head].float())


def _places(sight: Sight) -> list[str]:
    """Such as "3.5" for every head, the most telling first."""
    return [f"{layer}.{place}" for layer, place in telling(sight)]


def _heads_with_keys(sight: Sight, budget: int) -> set[tuple[int, int]]:
    """The places of the most telling heads whose largest weights may fit: 8 keys of 2 or 4 bytes, 8 weights of 2."""
    each = sight.T * (8 * (4 if sight.S < 2**16 else 6) + 4) * 0.4
    most = max(1, int(budget * SHARES["keys"] * 3 / 4 / each) + 1)
    return set(telling(sight)[:most])
