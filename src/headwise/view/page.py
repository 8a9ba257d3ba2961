"""A view as one self-contained HTML file that needs no network.

Its script is the files of the folder `page/`, one after the other. The Content-Security-Policy holds a hash of that
script, so the browser runs nothing else; the data is a block that is never run, and tokens become text nodes.

What goes into the file depends on a budget of bytes. A short text has all its weights in the page. A long one has a
picture of every head, the largest weights of every row of the most telling heads, and finer pictures where there is
room. The manifest records which, and the page tells the reader.
"""

import base64
import functools
import hashlib
import importlib.resources
import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from string import Template
from typing import NamedTuple

import torch

from headwise.errors import OptionError
from headwise.view.color import page_tables
from headwise.view.data import PageData, Section, plain, ratios, shares, telling, whole_numbers
from headwise.view.pictures import LayerStatistics, PooledCells, filled, levels, span_at
from headwise.view.result import View
from headwise.view.tokens import page_rules
from headwise.weights import AttentionMap

SCRIPTS = (
    "dom", "tokens", "color", "sections", "picture", "embedded", "subject", "store", "atlas", "table", "viewport",
    "tiles", "map", "gestures", "reading", "stage", "saving", "help", "app", "main",
)  # fmt: skip
SMALLEST = 200_000  # bytes: the page without data, and little more
SLACK = 0.97  # share of the budget for data; names and escapes take the rest
BUDGET = 5_000_000  # bytes of a file
FINEST = 2  # deepest level that is tried for pictures: 1024 pixels
DENSE = 2**20  # most weights of a head that are ever held in memory at once, here and in the browser
SHARES = {"keys": 0.45, "kinds": 0.15}  # of the budget, at most; finer pictures take the rest
# Compressed bytes per number, to estimate sizes before anything is computed: 0.4 (sharp heads) to 0.95 (random ones).
PACKED = {torch.float32: 3.4, torch.float16: 1.7}


class PageParts(NamedTuple):
    """The parts of a page without data."""

    template: str
    style: str
    script: str

    @property
    def policy(self) -> str:
        """Only our own style and script may run; pictures are made in the page."""
        return (
            f"default-src 'none'; script-src {_hash(self.script)}; style-src {_hash(self.style)}; "
            f"img-src data: blob:; base-uri 'none'; form-action 'none'"
        )


@functools.cache
def parts() -> PageParts:
    """Template, style and script; the script offers `headwise.show(root, manifest, source)` to others."""
    return PageParts(_file("page.html"), _file("page.css"), script())


def script(*more: str) -> str:
    """All scripts as one, followed by those of a server, in a scope of their own; it begins with the shared tables."""
    shared = _json({"colors": page_tables(), "tokens": page_rules()})
    together = "\n".join([f"const SHARED = {shared};", *(_file(f"{name}.js") for name in SCRIPTS), *more])
    return f'(() => {{\n"use strict";\n{together}}})();\n'


def _file(name: str) -> str:
    return (importlib.resources.files("headwise.view") / "page" / name).read_text(encoding="utf-8")


def _json(data: object) -> str:
    """JSON for a script element: with every < escaped, nothing in it can end the element or look like markup."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def standalone(view: View, *, against: View | None = None, budget: int | None = None, title: str = "") -> str:
    """The whole page as HTML; the arguments are those of `View.save`."""
    budget = BUDGET if budget is None else budget
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < SMALLEST:
        raise OptionError(
            f"budget={budget!r}: expected bytes, at least {SMALLEST:,}; the page itself takes some of them."
        )
    views = [view] if against is None else [view, against]
    room = int((budget * SLACK - len(document([], title))) / len(views))
    return document([embedded(each, room, title) for each in views], title)


def document(data: Sequence[PageData], title: str = "") -> str:
    """The page around this data."""
    found = parts()
    return Template(found.template).substitute(
        policy=escape(found.policy),
        title=escape(title or "What the heads do"),
        style=found.style,
        script=found.script,
        data=_json([each.to_dict() for each in data]),
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded(view: View, budget: int, title: str = "") -> PageData:
    """The data of a page without a server, within a budget of bytes if possible."""
    data = PageData(view, title)
    dtype = _dtype_that_fits(view, budget)
    for tried in (dtype, torch.float16) if dtype == torch.float32 else (dtype,) if dtype else ():
        whole = _with_weights(data, tried)
        if whole.size <= budget:
            return whole
    return _with_pictures(data, budget)


# Short texts: every weight.


def _dtype_that_fits(view: View, budget: int) -> torch.dtype | None:
    """The most precise dtype in which all weights may fit, estimated from the number of visible ones."""
    if view.T * view.S > DENSE:
        return None
    seen = sum(int(weights.select(heads=[0])._source().keys_seen().sum()) * weights.shape[1] for weights in view.maps)
    room = budget * 3 / 4
    return next((dtype for dtype, packed in PACKED.items() if seen * packed * 0.4 < room), None)


def _with_weights(base: PageData, dtype: torch.dtype) -> PageData:
    data = base.copy()
    data.manifest["embedded"] = {"weights": str(dtype).removeprefix("torch.")}
    for layer, weights in enumerate(data.view.maps):
        statistics = LayerStatistics.of(weights)
        data.add_layer(layer, statistics)
        for head, dense in enumerate(weights[0].to(dtype)):
            data.sections[f"weights/{layer}.{head}"] = plain(dense)
            data.sections[f"logs/{layer}.{head}"] = plain(statistics.log_sum_exp[head].float())
    return data


# Long texts: a picture of every head, and as much more as fits.


def _with_pictures(base: PageData, budget: int) -> PageData:
    data, view = base.copy(), base.view
    offers = Offers(data, budget)
    for layer, weights in enumerate(view.maps):
        offers.measure(layer, weights)
    order = _places(view)
    room: float = budget - data.size - sum(len(name) + 8 for name in order) - 200
    coarse = [offers.at(0, head) for head in order]
    room -= sum(size for _, size in coarse)
    data.sections |= {name: section for names, _ in coarse for name, section in names.items()}
    room = _fill(data, (offers.keys(head) for head in order), room, room - budget * SHARES["keys"])
    room = _fill(data, (offers.kinds(head) for head in order), room, room - budget * SHARES["kinds"])
    if view.T * view.S <= DENSE:
        room = _add_whole_heads(data, order, room)
    order = [head for head in order if f"mass/{head}" in data.sections]
    for level in range(1, offers.finest + 1):
        finer = (offers.instead(level, head, data.sections[f"mass/{head}"].size) for head in order)
        room = _fill(data, finer, room, 0)
    single = [head for head in _places(view) if {f"keys/{head}", f"weights/{head}"} & set(data.sections)]
    data.manifest["embedded"] = {"weights": None, "keys": single}
    return data


def _add_whole_heads(data: PageData, order: list[str], room: float) -> float:
    """Replace the pictures of the most telling heads by all their weights while there is room; return what remains."""
    for head in order:
        layer, index = map(int, head.split("."))
        weights = data.view.maps[layer].select(heads=[index])
        whole = {
            f"weights/{head}": plain(weights[0, 0].half()),
            f"logs/{head}": plain(weights.log_sum_exp()[0, 0].float()),
        }
        replaced = [f"{name}/{head}" for name in ("logs", "mass", "keys", "values", "rest", "peak", "uniform")]
        before = sum(data.sections[name].size for name in replaced if name in data.sections)
        size = sum(section.size for section in whole.values()) - before
        if size > room:
            break
        for name in replaced:
            data.sections.pop(name, None)
        data.sections |= whole
        room -= size
    return room


Offer = tuple[dict[str, Section], int]  # sections, and how many bytes they add


class Offers:
    """Sections that may go into a page if the budget allows.

    Args:
        data: of the page; it gets what every page has.
        budget: bytes of the page.
    """

    def __init__(self, data: PageData, budget: int) -> None:
        self.data = data
        self.sections: dict[str, Section] = {}
        self.finer: dict[tuple[int, str], Section] = {}
        T, S = data.view.T, data.view.S
        self.finest = min(FINEST, levels(T, S))
        # The heads whose largest weights may fit: per row 8 keys of 2 or 4 bytes, 8 weights of 2 and a log-sum-exp.
        each = T * (8 * (4 if S < 2**16 else 6) + 4) * 0.4
        most = max(1, int(budget * SHARES["keys"] * 3 / 4 / each) + 1)
        self.with_keys = set(telling(data.view)[:most])

    def measure(self, layer: int, weights: AttentionMap) -> None:
        """Measure a layer: its margins go into the page, everything else becomes an offer."""
        T, S = self.data.view.T, self.data.view.S
        coarse = span_at(0, T, S)
        mass = PooledCells.of("mass", span_at(self.finest, T, S), range(S))
        peak, uniform = (PooledCells.of(kind, coarse, range(S)) for kind in ("peak", "uniform"))
        chosen = [head for head in range(weights.shape[1]) if (layer, head) in self.with_keys]
        statistics = LayerStatistics.of(weights, top=bool(chosen), cells=[mass, peak, uniform])
        self.data.add_layer(layer, statistics)
        rest = filled(weights, [PooledCells.of("rest", coarse, range(S))], without_sink=True)[0]
        for kind, cells, encode in (("rest", rest, shares), ("peak", peak, shares), ("uniform", uniform, ratios)):
            for head, picture in enumerate(cells.values()):
                self.sections[f"{kind}/{layer}.{head}"] = encode(picture)
        for level in range(self.finest, -1, -1):
            for head, picture in enumerate(mass.values()):
                self.finer[level, f"{layer}.{head}"] = shares(picture)
            mass = mass.halved()
        for head in chosen:
            self._add_keys(f"{layer}.{head}", statistics, head)

    def _add_keys(self, name: str, statistics: LayerStatistics, head: int) -> None:
        assert statistics.top_keys is not None  # noqa: S101 - requested
        assert statistics.top_weights is not None  # noqa: S101
        self.sections[f"keys/{name}"] = whole_numbers(statistics.top_keys[head].clamp(min=0))
        self.sections[f"values/{name}"] = plain(statistics.top_weights[head].half())
        self.sections[f"logs/{name}"] = plain(statistics.log_sum_exp[head].float())

    def at(self, level: int, head: str) -> Offer:
        """The picture of a head at a level, and its size."""
        section = self.finer[level, head]
        return {f"mass/{head}": section}, section.size

    def instead(self, level: int, head: str, replaced: int) -> Offer:
        """The same in place of a coarser picture of size `replaced`."""
        names, size = self.at(level, head)
        return names, size - replaced

    def keys(self, head: str) -> Offer:
        """The largest weights of a head's rows; nothing if they were not kept."""
        return self._named([f"keys/{head}", f"values/{head}", f"logs/{head}"])

    def kinds(self, head: str) -> Offer:
        """The other kinds of pictures of a head."""
        return self._named([f"rest/{head}", f"peak/{head}", f"uniform/{head}"])

    def _named(self, names: Iterable[str]) -> Offer:
        found = {name: self.sections[name] for name in names if name in self.sections}
        return found, sum(section.size for section in found.values())


def _fill(data: PageData, offers: Iterator[Offer], room: float, least: float) -> float:
    """Take offers in order while more than `least` of the room remains; return what remains."""
    for sections, size in offers:
        if room - size >= max(least, 0):
            data.sections |= sections
            room -= size
    return room


def _places(view: View) -> list[str]:
    """Every head, such as "3.5", the most telling first."""
    return [f"{layer}.{index}" for layer, index in telling(view)]
