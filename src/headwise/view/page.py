"""A view as one self-contained HTML file that needs no network.

Its script is the files of the folder `page/`, one after the other. The Content-Security-Policy holds a hash of that
script, so the browser runs nothing else; the data is a block that is never run, and tokens become text nodes.

What goes into the file depends on a budget of bytes. A short text has all its weights in the page, as floats or in a
byte each, and the page derives every kind of picture from them. A long one has pictures of every head, of every kind
that the page offers, as fine as there is room for, and the largest weights of the rows of the clearest heads. All
heads are treated alike, so that no control leads to an empty page.
"""

import base64
import functools
import hashlib
import importlib.resources
import json
import re
from collections.abc import Sequence
from html import escape
from string import Template

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.view.carried import MEASURES, Carried
from headwise.view.color import page_tables
from headwise.view.data import PageData, Section, clearest, first_key, plain, ratios, shares, signed, whole_numbers
from headwise.view.pictures import LayerStatistics, PooledCells, filled, levels, pooled_contributions, span_at
from headwise.view.result import View
from headwise.view.tokens import page_rules
from headwise.weights import AttentionMap
from headwise.weights.summary import NEAR, SINK

SCRIPTS = (
    "dom", "tokens", "color", "sections", "picture", "embedded", "carried", "subject", "store", "atlas", "table",
    "viewport", "tiles", "map", "gestures", "reading", "lines", "stage", "saving", "help", "app", "main",
)  # fmt: skip
COMMENT = re.compile(r"^ *//.*\n", re.MULTILINE)  # on lines of their own; they are for readers of the source
SMALLEST = 200_000  # bytes: the page without data, and little more
SLACK = 0.97  # share of the budget for data; names and escapes take the rest
BUDGET, LONG_BUDGET = 5_000_000, 12_000_000  # bytes of a file, up to LONG tokens and beyond
LONG = 2**14
DENSE = 2**20  # most weights of a head that are ever held in memory at once, here and in the browser
# How precisely all weights may be stored, best first: as floats, or as square roots in so many steps.
PRECISIONS: tuple[torch.dtype | int, ...] = (torch.float32, torch.float16, 255, 127, 63, 31)
PACKED = {torch.float32: 3.4, torch.float16: 1.7}  # bytes per visible float, compressed and as text
FINEST = 2  # deepest level that is tried for pictures: 1024 pixels
MANIFEST = 4000  # bytes that the lists of heads and kinds may still add
COARSEST = 2  # how often a picture of 256 pixels may be halved
STEPS = 63  # shades of pictures: more take more room and look the same
SPARSE = 4  # times less room than usual, at best, for a picture
PIXEL = 0.22  # bytes that a pixel of a picture takes, from experience; half of them are hidden
RANKING = 1 / 8  # most of the budget that the largest weight of every row of every head may take
BEST = 3.2  # bytes that such a weight and its key take
# Pictures of contributions, the finest first: queries and keys in a pixel, steps (0: as float16), and about how many
# times the bytes of single contributions in 127 steps they take, from experience.
CELLS = ((1, 0, 2.9), (1, 127, 0.97), (1, 63, 0.78), (1, 31, 0.58), (2, 127, 0.287), (4, 127, 0.083), (8, 127, 0.026))
SOME = 6  # layers from which these bytes are estimated
KEYS, KINDS = ("keys", "values", "logs"), ("mass", "rest", "peak", "uniform")


@functools.cache
def script(*more: str) -> str:
    """The shared tables, all scripts and `more` in one scope; it offers `headwise.show(root, manifest, source)`."""
    shared = _json({"colors": page_tables(), "tokens": page_rules(), "near": NEAR, "sink": SINK})
    together = "\n".join([f"const SHARED = {shared};", *(page_file(f"{name}.js") for name in SCRIPTS), *more])
    return f'(() => {{\n"use strict";\n{COMMENT.sub("", together)}}})();\n'


@functools.cache
def page_file(name: str, package: str = "headwise.view") -> str:
    """The text of a file in the folder `page/` of a package."""
    return (importlib.resources.files(package) / "page" / name).read_text(encoding="utf-8")


def _json(data: object) -> str:
    """JSON for a script element: with every < escaped, nothing in it can end the element or look like markup."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def standalone(view: View, *, against: View | None = None, budget: int | None = None, title: str = "") -> str:
    """The whole page as HTML; the arguments are those of `View.save`."""
    if budget is None:
        budget = BUDGET if max(view.T, view.S) <= LONG else LONG_BUDGET
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < SMALLEST:
        raise OptionError(
            f"budget={budget!r}: expected bytes, at least {SMALLEST:,}; the page itself takes some of them."
        )
    views = [view] if against is None else [view, against]
    room = int((budget * SLACK - len(document([], title))) / len(views))
    data = [embedded(each, room, title) for each in views]
    if against is not None:
        title = data[0].manifest["title"] = title or view.compared(against)
        data[1].manifest["name"] = against.name_beside(view)
    return document(data, title)


def document(data: Sequence[PageData], title: str = "") -> str:
    """The page around this data."""
    return Template(page_file("page.html")).substitute(
        policy=escape(policy()),
        title=escape(title or (data[0].manifest["title"] if data else "headwise")),
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
    if view.T * view.S <= DENSE:
        whole = _with_weights(data, budget)
        if whole is not None:
            return whole
    return Pyramids(data, budget).filled()


def _with_weights(base: PageData, budget: int) -> PageData | None:
    """A short text: every weight of every head, as precisely as there is room for; None if there is not."""
    statistics = [LayerStatistics.of(weights) for weights in base.view.maps]
    for layer, found in enumerate(statistics):
        base.add_layer(layer, found)
    room = budget - base.size
    for precision in PRECISIONS:
        if _estimate(base.view, precision) > room:
            continue
        data = base.copy()
        data.manifest["embedded"] = _told(precision)
        for layer, weights in enumerate(base.view.maps):
            for head, dense in enumerate(weights[0]):
                data.sections[f"weights/{layer}.{head}"] = _stored(dense, precision)
                if isinstance(precision, torch.dtype):
                    data.sections[f"logs/{layer}.{head}"] = plain(statistics[layer].log_sum_exp[head].float())
        if data.size <= budget:
            _add_carried(data, budget)
            return data
    return None


def _add_carried(data: PageData, budget: int) -> None:
    """What the weights of a short text carry: sizes, from which the page weighs every weight, and contributions.

    Where not all contributions fit, there are pictures of them; where these do not fit, the page does not offer them.
    """
    view = data.view
    if view.carried is None:
        return
    data.sections |= {f"norms/{layer}": plain(found.norms.float()) for layer, found in enumerate(view.carried)}
    room = budget - data.size
    size = _contributed_size(view)
    tried = ((span, _contributed(view, span, steps, room)) for span, steps, share in CELLS if share * size <= room)
    span, found = next(((span, sections) for span, sections in tried if sections is not None), (1, {}))
    data.sections |= found
    coarsest = max((x.code for x in found.values()), key=_range, default="plain")
    if coarsest != "plain" and span == 1:
        data.manifest["embedded"]["contributions"] = coarsest
    data.manifest["measures"] = list(MEASURES if found else MEASURES[:2])


def _range(code: str) -> float:
    """The width of a step of numbers that have a sign, at their largest."""
    _, *numbers = code.split(" ")
    return float(numbers[0]) / float(numbers[1]) if numbers else 0.0


def _share_section(picture: Tensor, steps: int) -> Section:
    return signed(picture, steps) if steps else plain(picture.half())


def _contributed(view: View, span: int, steps: int, room: float) -> dict[str, Section] | None:
    """The contributions to every head in cells of `span` queries and keys; None if they do not fit."""
    sections: dict[str, Section] = {}
    taken = 0
    for layer, found in enumerate(view.carried or ()):
        for head, picture in enumerate(pooled_contributions(found.contributions(), span)):
            section = sections[f"contribution/{layer}.{head}"] = _share_section(picture, steps)
            taken += section.size + MANIFEST // 100
        if taken > room:
            return None
    return sections


def _contributed_size(view: View) -> float:
    """About how many bytes single contributions take in 127 steps: from one head of some layers."""
    layers = (view.carried or ())[:: max(1, len(view.maps) // SOME)]
    some = (found.contributions([place % found.weights.shape[1]]) for place, found in enumerate(layers))
    heads = sum(weights.shape[1] for weights in view.maps)
    return sum(signed(pooled_contributions(shares, 1)[0]).size for shares in some) * heads / len(layers)


def _told(precision: torch.dtype | int) -> dict[str, object]:
    """What the manifest says about the precision."""
    if isinstance(precision, int):
        return {"weights": "bytes", "steps": precision}
    return {"weights": str(precision).removeprefix("torch.")}


def _stored(dense: Tensor, precision: torch.dtype | int) -> Section:
    return shares(dense, precision) if isinstance(precision, int) else plain(dense.to(precision))


def _estimate(view: View, precision: torch.dtype | int) -> float:
    """About how many bytes all weights take: from the visible ones, or from one head of every layer."""
    if isinstance(precision, torch.dtype):
        visible = (int(weights.select(heads=[0])._source().keys_seen().sum()) for weights in view.maps)
        counts = sum(seen * weights.shape[1] for seen, weights in zip(visible, view.maps, strict=True))
        return counts * PACKED[precision] * 0.4
    some = (weights[0, layer % weights.shape[1]] for layer, weights in enumerate(view.maps))
    heads = sum(weights.shape[1] for weights in view.maps)
    return sum(_stored(dense, precision).size for dense in some) * heads / len(view.maps)


class Pyramids:
    """Pictures of every head of a long text, of every kind, as fine as there is room for.

    Args:
        data: the data of the page, without sections of heads.
        budget: bytes of the page.
    """

    def __init__(self, data: PageData, budget: int) -> None:
        self.data, self.budget, self.view = data.copy(), budget, data.view
        self.order = [f"{layer}.{index}" for layer, index in clearest(self.view)]
        T, S = self.view.T, self.view.S
        # Finer pictures than could ever fit are not computed; where most weights are zero, a pixel takes far less room.
        finest = (k for k in range(FINEST, 0, -1) if len(self.order) * 2 * 4**k * 256**2 * PIXEL / SPARSE <= budget)
        self.finest = min(next(finest, 0), levels(T, S))
        # Pictures of all kinds take at most half of the room.
        each = len(KINDS) * 256**2 * PIXEL
        self.coarsest = -next((k for k in range(COARSEST) if len(self.order) * each / 4**k < budget / 2), COARSEST)
        self.offers: dict[tuple[str, int], dict[str, Section]] = {}
        # The heads whose largest weights may fit: per row 8 keys of 2 or 4 bytes, 8 weights of 2 and a log-sum-exp.
        rows = T * (8 * (4 if S < 2**16 else 6) + 4) * 0.4
        self.with_keys = set(clearest(self.view)[: max(1, int(budget / 2 / rows))])
        self.keys: dict[str, dict[str, Section]] = {}
        self.ranked = len(self.order) * T * BEST <= budget * RANKING
        self.best: dict[str, Section] = {}

    def filled(self) -> PageData:
        """The data with what fits."""
        for layer, weights in enumerate(self.view.maps):
            self._measure(layer, weights)
            self.view.progress("drawing", layer + 1, len(self.view.maps))
        kinds = [kind for kind in KINDS if self._add(kind, self.coarsest)]
        carried = MEASURES[1:] if self.view.carried is not None else ()
        self.data.manifest["measures"] = [MEASURES[0], *(measure for measure in carried if self._add(measure, 0))]
        self._add_sections(self.best)
        room = self.budget - self.data.size
        single = self._add_keys(room / 2)
        for level in range(self.coarsest + 1, self.finest + 1):
            if not (self._add("mass", level) and self._add("rest", level)):
                break
        self.data.manifest["embedded"] = {"weights": None, "keys": single, "kinds": kinds}
        return self.data

    def _measure(self, layer: int, weights: AttentionMap) -> None:
        """One pass over a layer: its margins go into the page, its pictures become offers."""
        T, S = self.view.T, self.view.S
        fine, coarse = _span(self.finest, T, S), _span(self.coarsest, T, S)
        mass, rest = (PooledCells.of(kind, fine, range(S)) for kind in ("mass", "rest"))
        peak, uniform = (PooledCells.of(kind, coarse, range(S)) for kind in ("peak", "uniform"))
        chosen = [head for head in range(weights.shape[1]) if (layer, head) in self.with_keys]
        statistics = LayerStatistics.of(
            weights, top=bool(chosen) or self.ranked, cells=[mass, peak, uniform], rest=[rest]
        )
        self.data.add_layer(layer, statistics)
        self._offer("peak", self.coarsest, layer, peak)
        self._offer("uniform", self.coarsest, layer, uniform)
        for level in range(self.finest, self.coarsest - 1, -1):
            self._offer("mass", level, layer, mass)
            self._offer("rest", level, layer, rest)
            mass, rest = mass.halved(), rest.halved()
        for head in chosen:
            self.keys[f"{layer}.{head}"] = _largest(f"{layer}.{head}", statistics, head)
        if self.ranked:
            self.best |= _best(layer, statistics, first_key(self.view))
        if self.view.carried is not None:
            self._measure_carried(layer, self.view.carried[layer], coarse)

    def _measure_carried(self, layer: int, found: Carried, span: int) -> None:
        """Pictures of what the weights of a layer carry."""
        (weighed,) = filled(found.by_value, [PooledCells(span, range(self.view.S))])
        shared = pooled_contributions(found.contributions(), span)
        for head, (by_value, share) in enumerate(zip(weighed.values(), shared, strict=True)):
            self.offers.setdefault(("value", 0), {})[f"value/{layer}.{head}"] = shares(by_value, STEPS)
            self.offers.setdefault(("contribution", 0), {})[f"contribution/{layer}.{head}"] = signed(share)

    def _offer(self, kind: str, level: int, layer: int, cells: PooledCells) -> None:
        found = self.offers.setdefault((kind, level), {})
        for head, picture in enumerate(cells.values()):
            found[f"{kind}/{layer}.{head}"] = ratios(picture) if kind == "uniform" else shares(picture, STEPS)

    def _add(self, kind: str, level: int) -> bool:
        """Add the pictures of all heads, in place of coarser ones, if they fit."""
        return self._add_sections(self.offers[kind, level])

    def _add_sections(self, found: dict[str, Section]) -> bool:
        """Add sections, in place of those of the same name, if they fit."""
        replaced = sum(self.data.sections[name].size for name in found if name in self.data.sections)
        size = sum(len(name) + section.size for name, section in found.items()) - replaced
        fits = self.data.size + size + MANIFEST <= self.budget
        if fits:
            self.data.sections |= found
        return fits

    def _add_keys(self, room: float) -> list[str]:
        """Add the largest weights of the clearest heads while there is room; return those heads."""
        added: list[str] = []
        for head in self.order:
            size = sum(section.size for section in self.keys.get(head, {}).values())
            if not size or size > room:
                break
            self.data.sections |= self.keys[head]
            room -= size
            added.append(head)
        return added


def _span(level: int, T: int, S: int) -> int:
    """Queries and keys per pixel; a negative level is coarser than a whole map in 256 pixels."""
    return span_at(max(level, 0), T, S) << max(-level, 0)


def _best(layer: int, statistics: LayerStatistics, first: int) -> dict[str, Section]:
    """The largest weight of every row besides that of the first token, in every head of a layer, and its key."""
    assert statistics.top_keys is not None  # noqa: S101 - requested
    assert statistics.top_weights is not None  # noqa: S101
    keys, weights = statistics.top_keys[..., :2], statistics.top_weights[..., :2]
    weights = weights.masked_fill((keys == first) | (keys < 0), 0)
    weight, place = weights.max(-1)
    key = keys.gather(-1, place[..., None])[..., 0].clamp(min=0)
    return {f"best-keys/{layer}": whole_numbers(key), f"best/{layer}": plain(weight.half())}


def _largest(name: str, statistics: LayerStatistics, head: int) -> dict[str, Section]:
    """The largest weights of the rows of a head, and what logits need."""
    assert statistics.top_keys is not None  # noqa: S101 - requested
    assert statistics.top_weights is not None  # noqa: S101
    return {
        f"keys/{name}": whole_numbers(statistics.top_keys[head].clamp(min=0)),
        f"values/{name}": plain(statistics.top_weights[head].half()),
        f"logs/{name}": plain(statistics.log_sum_exp[head].float()),
    }
