"""What a page is told: the manifest (everything in words and single numbers), and sections of numbers.

L is a layer, H the place of a head among those of its layer's map. What `embedding` adds is on the right.

    thumbnails/L   small pictures of a layer's heads            weights/L.H   all weights of a head
    rows/L         entropy, largest weight, distance by query   mass/L.H ...  a picture of a head, one per kind
    received/L     attention received by key                    keys/L.H      the 8 largest weights of every row:
    reach/N        first, last, number of keys a query sees     values/L.H    which keys, and how large
                                                                logs/L.H      log-sum-exp by row, for logits
"""

import base64
import ctypes
import dataclasses
import gzip
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.view.pictures import Measured, Reach, levels, measure, reach, refuse_broken
from headwise.view.result import Sight


class Section(NamedTuple):
    """A tensor in a page: type of its numbers, shape, what a byte stands for, and the compressed bytes."""

    type: str
    shape: tuple[int, ...]
    code: str
    data: bytes

    @property
    def size(self) -> int:
        """Bytes it takes in the page, as text."""
        return 4 * -(-len(self.data) // 3) + 64

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        text = base64.b64encode(self.data).decode("ascii")
        return {"type": self.type, "shape": list(self.shape), "code": self.code, "data": text}


VERSION = 1
MARGIN = 1024  # most numbers along an edge of the map
ABOUT = {
    "sink": "weight on the first token",
    "previous": "weight on the token just before",
    "self": "weight on the token itself",
    "next": "weight on the token just after",
    "local": "weight at most 8 tokens away",
    "induction": "weight on what followed an earlier copy of the token",
    "same_token": "weight on earlier copies of the token",
    "delimiter": "weight on separators and punctuation",
    "entropy": "how evenly it looks: entropy as a share of that of even attention",
    "peak": "the largest weight of a row, on average",
    "positional": "share of rows whose largest weight lies at one and the same distance",
    "distance": "how many tokens away it looks, on average",
}


@dataclasses.dataclass
class Data:
    """A manifest and the sections that go with it."""

    manifest: dict[str, Any]
    sections: dict[str, Section]

    @property
    def size(self) -> int:
        """Bytes of it all as text."""
        return len(json.dumps(self.manifest)) + sum(len(name) + x.size for name, x in self.sections.items())

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"manifest": self.manifest, "sections": {name: x.to_dict() for name, x in self.sections.items()}}


def manifest(sight: Sight, title: str = "") -> dict[str, Any]:
    """Everything about a sight in words and single numbers; the same that `Sight.to_dict` and the terminal tell."""
    told = sight.to_dict()
    for layer, weights in zip(told["layers"], sight.maps, strict=True):
        group = weights._source().group
        for place, head in enumerate(layer["heads"]):
            head["group"] = place // group
        layer["shared"] = group  # query heads that share a key head
    named = set(told["layers"][0]["heads"][0]["numbers"])
    return {
        "version": VERSION,
        "title": title,
        **told,
        "keys": None if sight.keys is sight.tokens else sight.keys,
        "T": sight.T,
        "S": sight.S,
        "levels": levels(sight.T, sight.S),
        "telling": [list(place) for place in telling(sight)],
        "about": {name: text for name, text in ABOUT.items() if name in named},
    }


def edges(sight: Sight) -> Data:
    """The manifest with thumbnails and what stands at the edges of maps: all a page needs that can ask for tiles."""
    found = Data(manifest(sight), {})
    add_reach(found, sight)
    for layer, weights in enumerate(sight.maps):
        add_edges(found, sight, layer, measure(weights))
    return found


def add_edges(found: Data, sight: Sight, layer: int, seen: Measured) -> None:
    """Thumbnails, and numbers by query and key, in bins if there are many: means over queries, sums over keys."""
    refuse_broken(seen, sight.names[layer])
    span = 1
    while max(sight.T, sight.S) > MARGIN * span:
        span *= 2
    found.manifest["bin"] = span
    rows = torch.stack([_binned(x, span, mean=True) for x in (seen.entropy, seen.peak, seen.distance)], 1)
    found.sections[f"thumbnails/{layer}"] = shares(seen.thumbnails)
    received = _binned(seen.received, span, mean=False)
    dtype = torch.float32 if span == 1 else torch.float16
    found.sections |= {f"rows/{layer}": plain(rows.to(dtype)), f"received/{layer}": plain(received.to(dtype))}


def _binned(numbers: Tensor, span: int, *, mean: bool) -> Tensor:
    """(H, n) in bins of `span`."""
    n = numbers.shape[1]
    sums = torch.nn.functional.pad(numbers, (0, -n % span)).view(len(numbers), -1, span).sum(-1)
    counts = (torch.arange(sums.shape[1] + 1) * span).clamp(max=n).diff().to(sums)
    return sums / counts if mean else sums


def add_reach(found: Data, sight: Sight) -> None:
    """Which keys queries see, once for all layers that agree."""
    known: list[Reach] = []
    for layer, weights in enumerate(sight.maps):
        seen = reach(weights)
        place = next((i for i, other in enumerate(known) if seen.same_as(other)), len(known))
        if place == len(known):
            known.append(seen)
            numbers = torch.stack([seen.first, seen.last + 1, seen.count])  # the last + 1, so that all are from 0
            found.sections[f"reach/{place}"] = whole_numbers(numbers)
        found.manifest["layers"][layer]["reach"] = place


def telling(sight: Sight) -> list[tuple[int, int]]:
    """Layer and place in its map of every head, the most telling first; a map may show only some of its heads."""
    places = {
        (layer, head.head): place for layer, summary in enumerate(sight.summaries) for place, head in enumerate(summary)
    }
    return [(head.layer, places[head.layer, head.head]) for head in sight.telling(len(places))]


# Numbers in a page: little tensors as text, small and quick to read.

TYPES = {
    torch.uint8: "u1", torch.uint16: "u2", torch.uint32: "u4", torch.float16: "f2", torch.float32: "f4",
}  # fmt: skip
OCTAVE = 12  # steps of a logarithmic byte that double the number
EVEN = 128  # the byte of a ratio of 1


def plain(tensor: Tensor) -> Section:
    """The numbers as they are, in the dtype they have."""
    data = tensor.detach().cpu().contiguous()
    width = data.element_size()
    planes = data.view(torch.uint8).view(-1, width).T.contiguous()
    return Section(TYPES[data.dtype], tuple(data.shape), "plain", _compressed(planes))


def whole_numbers(tensor: Tensor) -> Section:
    """Whole numbers from 0, in two bytes where they fit, else in four."""
    fits = not tensor.numel() or int(tensor.max()) < 2**16
    return plain(tensor.to(torch.uint16 if fits else torch.uint32))


def shares(picture: Tensor) -> Section:
    """Numbers from 0 to 1, a byte each: 255 times the square root, so that small ones are told apart."""
    levels = (picture.clamp(0, 1).sqrt() * 255).round().to(torch.uint8)
    return plain(levels)._replace(code="sqrt")


def ratios(picture: Tensor) -> Section:
    """Numbers from 0 up, a byte each: 0 for 0, else by their logarithm, 12 steps to the double and 1 at 128."""
    levels = (picture.clamp(min=1e-30).log2() * OCTAVE + EVEN).round().clamp(1, 255)
    return plain(torch.where(picture > 0, levels, 0).to(torch.uint8))._replace(code="log")


def _compressed(data: Tensor) -> bytes:
    # By address, because numpy need not be installed. No time stamp: the same numbers give the same bytes.
    return gzip.compress(ctypes.string_at(data.data_ptr(), data.nbytes) if data.numel() else b"", 6, mtime=0)
