"""Writes a layer back in the layout it was read in."""

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.errors import CheckpointError
from headwise.layer.checkpoints.reading import Found
from headwise.layer.packing import unpack


def written(found: Found, names: Mapping[str, Tensor], layer: Mapping[str, Tensor], title: str) -> dict[str, Tensor]:
    """Their tensors, from the state dict of our layer; what did not change is what was read, to the last bit."""
    state = _apart(found, layer)
    _refuse_losses(found, state, title)
    result: dict[str, Tensor] = {}
    for rule in found.rules:
        theirs = [names[x] for x in rule.theirs]
        now = [_fitting(state, found, x, title) for x in rule.ours]
        same = all(torch.equal(new, found.state[x].to(new.dtype)) for new, x in zip(now, rule.ours, strict=True))
        again = theirs if same else rule.form.theirs(now, found.sizes)
        result |= {x: new.to(old.dtype) for x, new, old in zip(rule.theirs, again, theirs, strict=True)}
    ours = {x for rule in found.rules for x in rule.ours}
    learned = [x for x in found.state if x not in ours]
    return result | {x: _fitting(state, found, x, title).to(names[x].dtype) for x in learned}


def _apart(found: Found, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layer's tensors with separate projections, copied, where the checkpoint's are."""
    state: dict[str, Tensor] = {}
    where = next(iter(found.state.values())).device
    for name, tensor in layer.items():
        if tensor.device.type == "meta":
            raise CheckpointError(f"{name} of the layer is on the meta device and holds no numbers to write.")
        state[name] = tensor.detach().to(where, copy=True)
    for kind in ("weight", "bias"):
        if (packed := state.pop(f"qkv_proj.{kind}", None)) is not None:
            parts = unpack(packed, *found.sizes)
            state |= zip((f"{part}_proj.{kind}" for part in "qkv"), parts, strict=True)
    return state


def _refuse_losses(found: Found, state: Mapping[str, Tensor], title: str) -> None:
    """Raise where the checkpoint has no place for something of the layer; a shared bias is written by its owner."""
    lost = sorted(x for x in state if x not in found.state and not x.startswith("position."))
    if lost:
        raise CheckpointError(
            f"{title}: the layer has {', '.join(lost)}, which the checkpoint does not; writing it would lose them."
        )


def _fitting(state: Mapping[str, Tensor], found: Found, name: str, title: str) -> Tensor:
    """A tensor of the layer, of the shape it had."""
    was = tuple(found.state[name].shape)
    if name not in state or state[name].shape != was:
        now = "is not in the layer" if name not in state else f"has shape {tuple(state[name].shape)} in the layer"
        raise CheckpointError(f"{title}: {name} {now}; the checkpoint has {was}.")
    return state[name]
