"""What a page is told: the manifest (everything in words and single numbers), and sections of numbers.

L is a layer, H the place of a head among those of its layer's map. What `embedding` adds is on the right.

    thumbnails/L   small pictures of a layer's heads            weights/L.H   all weights of a head
    rows/L         entropy, largest weight, distance by query   mass/L.H ...  a picture of a head, one per kind
    received/L     attention received by key                    keys/L.H      the 8 largest weights of every row:
    reach/N        first, last, number of keys a query sees     values/L.H    which keys, and how large
                                                                logs/L.H      log-sum-exp by row, for logits
"""

import dataclasses
import json
from typing import Any

import torch
from torch import Tensor

from headwise.view.measuring import Measured, Reach, measure, reach, refuse_broken
from headwise.view.sections import Section, plain, shares, whole_numbers
from headwise.view.sight import Sight
from headwise.view.tiling import levels

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
