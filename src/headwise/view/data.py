"""The data of a page: a manifest (text and single numbers) and sections (compressed tensors).

L is a layer and H the index of a head in its layer's map. Sections in the right column are those that `page` adds to a
file that has no server behind it.

    thumbnails/L   small pictures of a layer's heads            weights/L.H   all weights of a head
    patterns/L     the same without the first token             mass/L.H ...  a picture of a head, one per kind
    rows/L         entropy, largest weight, distance by query   keys/L.H      the 8 largest weights of every row:
    received/L     attention received by key                    values/L.H    their keys and their values
    reach/N        first, last, number of keys a query sees     logs/L.H      log-sum-exp by row, for logits
                                                                best/L        the largest weight of every row besides
                                                                best-keys/L   that of the first token, and its key
                                                                norms/L       what each key passes on, by head

What weights carry (see `carried`) has sections of its own: `contribution/L.H`, all shares of a head or a picture of
them, and for a long text `value/L.H` and the small pictures `value/L` and `contribution/L`.

The bytes of a section are sorted by significance (all first bytes, then all second ones), because they compress better
that way. Pictures take one byte per pixel: the square root of a weight, the logarithm of a ratio, or the root of a
share that may be negative. So do weights that would take too much room as floats; fewer steps of that byte compress
better.
"""

import base64
import copy
import ctypes
import gzip
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.view.pictures import LayerStatistics, levels, reach
from headwise.view.result import View
from headwise.view.words import described
from headwise.weights.summary import NEAR

VERSION = 1
SHADES = 63  # steps of color that pictures are stored in
MARGIN = 1024  # most numbers along an edge of the map
ABOUT = {
    "sink": "weight on the first token",
    "previous": "weight on the previous token",
    "self": "weight on the token itself",
    "next": "weight on the next token",
    "local": f"weight at most {NEAR} tokens away",
    "induction": "weight on the token that followed an earlier copy of this one",
    "same_token": "weight on earlier copies of the token",
    "delimiter": "weight on separators and punctuation",
    "entropy": "how evenly attention is spread: 0 on one token, 1 on all alike",
    "peak": "mean of the largest weight of each row",
    "positional": "share of rows whose largest weight lies at the same distance",
    "distance": "mean distance between query and key, in tokens",
    "one_to_one": "largest weight of queries whose key no other query shares",
    "second_sink": "weight on the key, other than the first, that receives most",
    "monotone": "largest weight of queries on a staircase that never goes back",
}
WAYS = {
    "gradient": "estimated from the gradient, which can miss a head, be several times too large or have the wrong sign",
    "silence": "its output set to zero",
    "mean": "its output replaced by its mean",
    "patch": "its output taken from another text",
}
TYPES = {torch.uint8: "u1", torch.uint16: "u2", torch.uint32: "u4", torch.float16: "f2", torch.float32: "f4"}
OCTAVE = 12  # steps of a logarithmic byte that double the number
EVEN = 128  # the byte of a ratio of 1, and of 0 where numbers have a sign
MIDDLE = 127  # most steps on either side of 0 of a number that has a sign


class Section(NamedTuple):
    """A tensor in a page: the type of its numbers, its shape, what a byte means, and the compressed bytes."""

    type: str
    shape: tuple[int, ...]
    code: str
    data: bytes

    @property
    def size(self) -> int:
        """Bytes it takes in the page, as text."""
        return 4 * -(-len(self.data) // 3) + 64

    def to_dict(self) -> dict[str, Any]:
        text = base64.b64encode(self.data).decode("ascii")
        return {"type": self.type, "shape": list(self.shape), "code": self.code, "data": text}


def plain(tensor: Tensor) -> Section:
    """The numbers as they are, in their dtype."""
    data = tensor.detach().cpu().contiguous()
    width = data.element_size()
    planes = data.view(torch.uint8).view(-1, width).T.contiguous()
    return Section(TYPES[data.dtype], tuple(data.shape), "plain", _compressed(planes))


def whole_numbers(tensor: Tensor) -> Section:
    """Non-negative integers, in two bytes each if they fit, else in four."""
    fits = not tensor.numel() or int(tensor.max()) < 2**16
    return plain(tensor.to(torch.uint16 if fits else torch.uint32))


def shares(picture: Tensor, steps: int = 255) -> Section:
    """Numbers from 0 to 1 in a byte each: the square root in so many steps, which resolves small ones."""
    codes = (picture.clamp(0, 1).sqrt() * steps).round().to(torch.uint8)
    return plain(codes)._replace(code=f"sqrt {steps}")


def ratios(picture: Tensor) -> Section:
    """Non-negative numbers in a byte each: 0 for 0, else the logarithm, with 12 steps per octave and 1 at 128."""
    codes = (picture.clamp(min=1e-30).log2() * OCTAVE + EVEN).round().clamp(1, 255)
    return plain(torch.where(picture > 0, codes, 0).to(torch.uint8))._replace(code="log")


def signed(picture: Tensor, steps: int = MIDDLE) -> Section:
    """Numbers of either sign in a byte each: 128 for 0, and the root of their size, in `steps` up to the largest."""
    most = max(float(picture.abs().max()) if picture.numel() else 0.0, 1e-6)
    codes = (picture.abs() / most).sqrt() * picture.sign() * steps + EVEN
    return plain(codes.round().to(torch.uint8))._replace(code=f"signed {most:.6g} {steps}")


def _compressed(data: Tensor) -> bytes:
    # By address, because numpy may not be installed. Without a time stamp, equal numbers give equal bytes.
    return gzip.compress(ctypes.string_at(data.data_ptr(), data.nbytes) if data.numel() else b"", 6, mtime=0)


class PageData:
    """The manifest of a view and the sections that go with it.

    Args:
        view: what the page shows.
        title: the title of the page.
    """

    def __init__(self, view: View, title: str = "") -> None:
        self.view, self.manifest = view, manifest(view, title)
        self.sections: dict[str, Section] = {}
        self._add_reach()

    def copy(self) -> "PageData":
        """The same data, to be extended independently."""
        copied = copy.copy(self)
        copied.manifest, copied.sections = dict(self.manifest), dict(self.sections)
        return copied

    @property
    def size(self) -> int:
        """Bytes of all of it as text."""
        return len(json.dumps(self.manifest)) + sum(len(name) + x.size for name, x in self.sections.items())

    def to_dict(self) -> dict[str, Any]:
        return {"manifest": self.manifest, "sections": {name: x.to_dict() for name, x in self.sections.items()}}

    def add_layer(self, layer: int, statistics: LayerStatistics) -> None:
        """Add the thumbnails of a layer and the numbers along the edges of its maps.

        If there are many numbers they are binned: averaged over queries, summed over keys.
        """
        statistics.check_finite(self.view.names[layer])
        span = 1
        while max(self.view.T, self.view.S) > MARGIN * span:
            span *= 2
        self.manifest["bin"] = span
        by_query = (statistics.entropy, statistics.peak, statistics.distance)
        rows = torch.stack([_binned(numbers, span, mean=True) for numbers in by_query], 1)
        received = _binned(statistics.received, span, mean=False)
        dtype = torch.float32 if span == 1 else torch.float16
        self.sections[f"thumbnails/{layer}"] = shares(statistics.thumbnails, SHADES)
        self.sections[f"patterns/{layer}"] = shares(statistics.patterns, SHADES)
        self.sections |= {f"rows/{layer}": plain(rows.to(dtype)), f"received/{layer}": plain(received.to(dtype))}

    def _add_reach(self) -> None:
        """Which keys queries see, once for all layers that agree."""
        known: list[Tensor] = []
        third = self.view.T // 3
        corner, masked = self.view.T == self.view.S, False
        for layer, weights in enumerate(self.view.maps):
            seen = reach(weights)
            masked |= bool((seen.count < self.view.S).any())
            corner &= bool((seen.last[:, :third] <= third).all())
            numbers = torch.stack([seen.first, seen.last + 1, seen.count])  # last + 1, so that none is negative
            index = next((i for i, other in enumerate(known) if torch.equal(numbers, other)), len(known))
            if index == len(known):
                known.append(numbers)
                self.sections[f"reach/{index}"] = whole_numbers(numbers)
            self.manifest["layers"][layer]["reach"] = index
        self.manifest["corner"] = corner  # whether pictures are empty in the upper right, where captions fit
        self.manifest["masked"] = masked  # whether any query sees only some keys


def manifest(view: View, title: str = "") -> dict[str, Any]:
    """Everything about a view in text and single numbers; the same numbers as in `View.to_dict` and the terminal."""
    found = view.to_dict()
    for layer, weights, summary in zip(found["layers"], view.maps, view.summaries, strict=True):
        group = weights._source().group
        for index, (head, known) in enumerate(zip(layer["heads"], summary, strict=True)):
            head["group"] = index // group
            head["traits"] = [[trait.name, trait.share] for trait in known.traits]
            head["about"] = described(known)
        layer["shared"] = group  # query heads per key head
    statistics = set(found["layers"][0]["heads"][0]["numbers"])
    return {
        "version": VERSION,
        "title": title or view.heading,
        **found,
        "keys": None if view.keys is view.tokens else view.keys,
        "T": view.T,
        "S": view.S,
        "levels": levels(view.T, view.S),
        "clearest": [list(place) for place in clearest(view)],
        "about": {name: text for name, text in ABOUT.items() if name in statistics} | worth(view),
        "measures": list(view.measures),
        "first": first_key(view),
        "note": _beyond_training(view),
    }


def _beyond_training(view: View) -> str:
    """A warning where the text is longer than those the model was trained on."""
    length = max(view.T, view.S)
    if view.trained is None or length <= view.trained:
        return ""
    return (
        f"The text has {length:,} tokens and the model was trained for {view.trained:,}: beyond that its heads are "
        "unreliable."
    )


def first_key(view: View) -> int:
    """The first key that is not padding, which pictures without the first token leave out."""
    real = view.maps[0]._real_keys()
    return 0 if real is None else int(real[0].int().argmax())


def worth(view: View) -> dict[str, str]:
    """What the importance of the heads is, if it was measured."""
    if view.importance is None:
        return {}
    return {"importance": f"what removing the head adds to the loss, in nats per token ({WAYS[view.importance.by]})"}


def clearest(view: View) -> list[tuple[int, int]]:
    """Layer and index in its map of every head, the clearest first; a map may hold only some of its heads."""
    places = {
        (layer, head.head): index for layer, summary in enumerate(view.summaries) for index, head in enumerate(summary)
    }
    return [(head.layer, places[head.layer, head.head]) for head in view.clearest(len(places))]


def _binned(numbers: Tensor, span: int, *, mean: bool) -> Tensor:
    """(H, n) in bins of `span`."""
    n = numbers.shape[1]
    sums = torch.nn.functional.pad(numbers, (0, -n % span)).view(len(numbers), -1, span).sum(-1)
    counts = (torch.arange(sums.shape[1] + 1) * span).clamp(max=n).diff().to(sums)
    return sums / counts if mean else sums
