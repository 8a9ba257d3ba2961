"""A view as one self-contained HTML file that needs no network.

Its script is the files of the folder `page/`, one after the other. The Content-Security-Policy holds a hash of that
script, so the browser runs nothing else; the data is a block that is never run, and tokens become text nodes.

What goes into the file depends on a budget of bytes. A short text has all its weights in the page. A long one has a
picture of every head, the largest weights of every row of the clearest heads, and finer pictures where there is
room. The manifest records which, and the page tells the reader.
"""

import base64
import functools
import hashlib
import importlib.resources
import json
from collections.abc import Iterable, Sequence
from html import escape
from string import Template

import torch

from headwise.errors import OptionError
from headwise.view.color import page_tables
from headwise.view.data import PageData, Section, clearest, plain, ratios, shares, whole_numbers
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
KEYS, KINDS = ("keys", "values", "logs"), ("rest", "peak", "uniform")  # sections of a head: largest weights, pictures
SHARES = {KEYS: 0.45, KINDS: 0.15}  # of the budget, at most; finer pictures take the rest
# Compressed bytes per number, to estimate sizes before anything is computed: 0.4 (sharp heads) to 0.95 (random ones).
PACKED = {torch.float32: 3.4, torch.float16: 1.7}


@functools.cache
def script(*more: str) -> str:
    """The shared tables, all scripts and `more` in one scope; it offers `headwise.show(root, manifest, source)`."""
    shared = _json({"colors": page_tables(), "tokens": page_rules()})
    together = "\n".join([f"const SHARED = {shared};", *(page_file(f"{name}.js") for name in SCRIPTS), *more])
    return f'(() => {{\n"use strict";\n{together}}})();\n'


@functools.cache
def page_file(name: str, package: str = "headwise.view") -> str:
    """The text of a file in the folder `page/` of a package."""
    return (importlib.resources.files(package) / "page" / name).read_text(encoding="utf-8")


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
    return Template(page_file("page.html")).substitute(
        policy=escape(policy()),
        title=escape(title or "What the heads do"),
        style=page_file("page.css"),
        script=script(),
        data=_json([each.to_dict() for each in data]),
    )


def policy() -> str:
    """Only our own style and script may run; pictures are made in the page."""
    return (
        f"default-src 'none'; script-src {_hash(script())}; style-src {_hash(page_file('page.css'))}; "
        f"img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded(view: View, budget: int, title: str = "") -> PageData:
    """The data of a page without a server, within a budget of bytes if possible."""
    data = PageData(view, title)
    for dtype in _dtypes_that_fit(view, budget):
        whole = _with_weights(data, dtype)
        if whole.size <= budget:
            return whole
    return _with_pictures(data, budget)


def _dtypes_that_fit(view: View, budget: int) -> list[torch.dtype]:
    """The dtypes in which all weights may fit, estimated from the number of visible ones; the most precise first."""
    if view.T * view.S > DENSE:
        return []
    seen = sum(int(weights.select(heads=[0])._source().keys_seen().sum()) * weights.shape[1] for weights in view.maps)
    return [dtype for dtype, packed in PACKED.items() if seen * packed * 0.4 < budget * 3 / 4]


def _with_weights(base: PageData, dtype: torch.dtype) -> PageData:
    """A short text: every weight of every head."""
    data = base.copy()
    data.manifest["embedded"] = {"weights": str(dtype).removeprefix("torch.")}
    for layer, weights in enumerate(data.view.maps):
        statistics = LayerStatistics.of(weights)
        data.add_layer(layer, statistics)
        for head, dense in enumerate(weights[0].to(dtype)):
            data.sections[f"weights/{layer}.{head}"] = plain(dense)
            data.sections[f"logs/{layer}.{head}"] = plain(statistics.log_sum_exp[head].float())
    return data


def _with_pictures(base: PageData, budget: int) -> PageData:
    """A long text: a picture of every head, and as much more as fits."""
    data, view = base.copy(), base.view
    offers = Offers(data, budget)
    for layer, weights in enumerate(view.maps):
        offers.measure(layer, weights)
    order = places = [f"{layer}.{index}" for layer, index in clearest(view)]
    coarse = {f"mass/{head}": offers.finer[0, head] for head in order}
    room: float = budget - data.size - sum(len(head) + 8 for head in order) - 200
    room -= sum(section.size for section in coarse.values())
    data.sections |= coarse
    for kinds, share in SHARES.items():
        room = _fill(data, (offers.named(head, kinds) for head in order), room, room - budget * share)
    if view.T * view.S <= DENSE:
        room = _add_whole_heads(data, order, room)
    order = [head for head in order if f"mass/{head}" in data.sections]
    for level in range(1, offers.finest + 1):
        finer = ({f"mass/{head}": offers.finer[level, head]} for head in order)
        room = _fill(data, finer, room, 0)
    single = [head for head in places if {f"keys/{head}", f"weights/{head}"} & set(data.sections)]
    data.manifest["embedded"] = {"weights": None, "keys": single}
    return data


def _add_whole_heads(data: PageData, order: list[str], room: float) -> float:
    """Replace the pictures of the clearest heads by all their weights while there is room; return what remains."""
    for head in order:
        layer, index = map(int, head.split("."))
        weights = data.view.maps[layer].select(heads=[index])
        whole = {
            f"weights/{head}": plain(weights[0, 0].half()),
            f"logs/{head}": plain(weights.log_sum_exp()[0, 0].float()),
        }
        replaced = [f"{name}/{head}" for name in ("mass", *KEYS, *KINDS)]
        before = sum(data.sections[name].size for name in replaced if name in data.sections)
        size = sum(section.size for section in whole.values()) - before
        if size > room:
            break
        for name in replaced:
            data.sections.pop(name, None)
        data.sections |= whole
        room -= size
    return room


class Offers:
    """Sections that may go into a page if the budget allows.

    Args:
        data: the data of the page; what every page has is added to it.
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
        most = max(1, int(budget * SHARES[KEYS] * 3 / 4 / each) + 1)
        self.with_keys = set(clearest(data.view)[:most])

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

    def named(self, head: str, kinds: Sequence[str]) -> dict[str, Section]:
        """The sections of these kinds of a head, as far as they were kept."""
        return {
            f"{kind}/{head}": self.sections[f"{kind}/{head}"] for kind in kinds if f"{kind}/{head}" in self.sections
        }


def _fill(data: PageData, offers: Iterable[dict[str, Section]], room: float, least: float) -> float:
    """Add sections, or replace those of the same name, while `least` of the room remains; return what remains."""
    for sections in offers:
        replaced = sum(data.sections[name].size for name in sections if name in data.sections)
        size = sum(section.size for section in sections.values()) - replaced
        if room - size >= max(least, 0):
            data.sections |= sections
            room -= size
    return room
