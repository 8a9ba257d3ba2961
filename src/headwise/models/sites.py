"""Where in a checkpoint attention layers stand, and how each is laid out."""

import bisect
import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from headwise.errors import CheckpointError
from headwise.layer.checkpoints.known import LAYOUTS
from headwise.layer.checkpoints.layouts import Layout
from headwise.layer.checkpoints.reading import choose, made_by_us


class Site(NamedTuple):
    """One attention layer: its names begin with `prefix`."""

    prefix: str
    layout: Layout
    problem: str | None = None  # why its layout cannot be told

    @property
    def name(self) -> str:
        """The layer's name in the model."""
        return self.prefix[:-1]


class Names:
    """The tensors of a checkpoint without their numbers, by name and by prefix."""

    def __init__(self, sketches: Mapping[str, Tensor]) -> None:
        self.sketches, self.order = sketches, sorted(sketches)

    def under(self, prefix: str) -> list[str]:
        """All names that begin with this."""
        first = bisect.bisect_left(self.order, prefix)
        last = bisect.bisect_left(self.order, prefix + chr(0x10FFFF))
        return self.order[first:last]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under a prefix, by the rest of their names."""
        return {name[len(prefix) :]: self.sketches[name] for name in self.under(prefix)}


def find_sites(names: Names, order: str | None, notes: object) -> dict[str, Site]:
    """All layers, in the order of the file; a tensor belongs to the first layout of the table that claims it."""
    found: dict[str, Site] = {}
    for name in names.sketches:
        for layout in LAYOUTS:
            prefix = name[: -len(layout.anchor)]
            if not name.endswith(layout.anchor) or (prefix and prefix[-1] not in "./") or prefix in found:
                continue
            shapes = {rest: tensor.shape for rest, tensor in names.part(prefix).items()}
            if layout.matches(shapes):
                found[prefix] = _site(prefix, layout, shapes, order, notes)
                break
    return found | _incomplete(names, found)


def _site(prefix: str, layout: Layout, shapes: Mapping[str, object], order: str | None, notes: object) -> Site:
    try:
        return Site(prefix, choose(shapes, prefix, order, made_by_us(notes, prefix)) or layout)  # type: ignore[arg-type]
    except CheckpointError as error:
        return Site(prefix, layout, str(error))


def _incomplete(names: Names, found: Mapping[str, Site]) -> dict[str, Site]:
    """Places like those of the layers found, up to their numbers, where some tensors are and others are not."""
    kinds: dict[str, Site] = {}
    for site in found.values():
        kinds.setdefault(_numberless(site.prefix), site)
    missing: dict[str, Site] = {}
    for pattern, site in kinds.items():
        if "#" not in pattern:
            continue
        shapes = {rest: tensor.shape for rest, tensor in names.part(site.prefix).items()}
        parts = {rest for rule in site.layout.rules(shapes) for rest in rule.theirs}
        for name in names.sketches:
            for rest in parts:
                prefix = name[: -len(rest)]
                if name.endswith(rest) and prefix not in found and _numberless(prefix) == pattern:
                    missing.setdefault(prefix, Site(prefix, site.layout, _gap(site.layout, names.part(prefix))))
    return missing


def _gap(layout: Layout, part: Mapping[str, Tensor]) -> str:
    """What a layer lacks."""
    try:
        layout.rules({rest: tensor.shape for rest, tensor in part.items()})
    except CheckpointError as error:
        return str(error)
    return f"something of {layout.title} is missing; found {', '.join(part)}."


def _numberless(prefix: str) -> str:
    return re.sub(r"\d+", "#", prefix)
