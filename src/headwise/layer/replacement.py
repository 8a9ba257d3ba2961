"""`replace`: replaces torch's attention in a model by ours, and checks that its results stay the same.

>>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False)
>>> replace(model).names
('layers.0.self_attn', 'layers.1.self_attn')
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from headwise.errors import OptionError
from headwise.layer.compat import MultiheadAttention

B, T, S = 2, 5, 7  # sizes of the batch on which each layer is compared
SHOWN = 4  # names in a repr


@dataclasses.dataclass(frozen=True, repr=False)
class Replaced:
    """The result of `replace`.

    Args:
        names: the replaced layers, as in `model.named_modules()`; "" is the model itself.
        left_alone: layers of a subclass of torch's class, which may compute something else.
        difference: the largest measured difference, relative to the largest value compared; None without a check.
    """

    names: tuple[str, ...]
    left_alone: tuple[str, ...]
    difference: float | None

    def __repr__(self) -> str:
        proof = "not checked" if self.difference is None else f"largest relative difference {self.difference:.2g}"
        rest = f", left alone: {_listed(self.left_alone)}" if self.left_alone else ""
        count = "1 layer" if len(self.names) == 1 else f"{len(self.names)} layers"
        return f"Replaced({count}: {_listed(self.names)}, {proof}{rest})"


def replace(model: nn.Module, *, probe: Any = None, check: bool = True) -> Replaced:
    """Turns every `torch.nn.MultiheadAttention` of `model` into `headwise.compat.MultiheadAttention`, in place.

    Each layer remains the same object and only changes its class. So its parameters, hooks, dtype and device stay, and
    an optimizer still holds its parameters. The model itself may be such a layer.

    Before any change, both classes run each layer on a random batch with a causal mask and a padding mask, in
    evaluation; outputs and weights must agree to half the digits of their dtype. The random state and the model's own
    state are restored.

    Args:
        model: any module.
        probe: an input on which the whole model is compared as well, before and after: a tensor, a tuple of positional
            arguments, or a dict of named ones. Torch's fast path for inference, which bypasses the layers, is off
            meanwhile. If the results differ, everything is put back.
        check: False skips the comparison.

    >>> model = torch.nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    >>> replace(model, probe=(torch.randn(2, 5, 8), torch.randn(2, 3, 8))).difference < 1e-4
    True
    """
    layers, left_alone = _found(model)
    if probe is not None and not check:
        raise OptionError("replace(probe=..., check=False): the probe would not be used. Leave out one of the two.")
    difference = max(_layer_difference(name, layer) for name, layer in layers.items()) if check else None
    before = None if probe is None else _run(model, probe)
    _set_class(layers, MultiheadAttention)
    if before is not None and difference is not None:
        try:
            found = _largest_difference("the output of the model", before, _run(model, probe))
        except BaseException:
            _set_class(layers, nn.MultiheadAttention)
            raise
        difference = max(difference, found)
    return Replaced(tuple(layers), left_alone, difference)


def _found(model: nn.Module) -> tuple[dict[str, nn.MultiheadAttention], tuple[str, ...]]:
    """The layers to replace, each under its first name, and the names of those of a subclass."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"replace({type(model).__name__}): expected a torch.nn.Module.")
    alike = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.MultiheadAttention)}
    layers = {name: layer for name, layer in alike.items() if type(layer) is nn.MultiheadAttention}
    others = {name: layer for name, layer in alike.items() if not isinstance(layer, MultiheadAttention)}
    left_alone = tuple(name for name in others if name not in layers)
    if not layers:
        raise OptionError(
            f"replace({type(model).__name__}): looked for layers that are exactly torch.nn.MultiheadAttention and "
            f"found none; {len(alike) - len(left_alone)} are headwise's already, {len(left_alone)} are of a subclass "
            f"({_listed(left_alone)}). Attention of another kind is read by MultiHeadAttention.from_state_dict."
        )
    for name, layer in layers.items():
        if "forward" in layer.__dict__:
            raise OptionError(
                f"layer {name!r} has a forward attached to the object itself, which hides that of its class. Remove it "
                f"first (del layer.forward), or call replace before attaching it."
            )
    return layers, left_alone


def _set_class(layers: Mapping[str, nn.MultiheadAttention], kind: type[nn.MultiheadAttention]) -> None:
    for layer in layers.values():
        layer.__class__ = kind


def _layer_difference(name: str, layer: nn.MultiheadAttention) -> float:
    """The largest difference between torch's forward and ours on the parameters of one layer."""
    given = _batch(name, layer)
    with _evaluating(layer):
        torchs = _results(layer, given)
        _set_class({name: layer}, MultiheadAttention)
        try:
            ours = _results(layer, given)
        finally:
            _set_class({name: layer}, nn.MultiheadAttention)
    return _largest_difference(f"layer {name!r}", torchs, ours)


def _results(layer: nn.MultiheadAttention, given: dict[str, Any]) -> list[Any]:
    """Output and weights, and the output without weights, which takes another path. Hooks do not run."""
    return [*layer.forward(**given, need_weights=True), layer.forward(**given, need_weights=False)[0]]


def _batch(name: str, layer: nn.MultiheadAttention) -> dict[str, Any]:
    """Random inputs of the layer's widths, with two masks under which every query sees a key."""
    weight = layer.out_proj.weight
    if weight.is_meta:
        raise OptionError(
            f"layer {name!r} is on the meta device, which holds no numbers to compare. Load the model first, or "
            f"pass check=False."
        )
    random = torch.Generator().manual_seed(0)  # not the global one
    widths = ((T, layer.embed_dim), (S, layer.kdim), (S, layer.vdim))
    inputs = [torch.randn(B, length, width, generator=random).to(weight) for length, width in widths]
    query, key, value = inputs if layer.batch_first else [x.transpose(0, 1) for x in inputs]
    padding = torch.zeros(B, S, dtype=torch.bool, device=weight.device)
    padding[1, -2:] = True
    future = torch.ones(T, S, dtype=torch.bool, device=weight.device).triu(1)
    masks = {"key_padding_mask": padding, "attn_mask": future}
    return {"query": query, "key": key, "value": value, **masks, "average_attn_weights": False}


def _run(model: nn.Module, probe: Any) -> list[Any]:
    """The tensors that the model returns for the probe, with the same random numbers every time."""
    args, named = (), {}
    if isinstance(probe, Mapping):
        named = dict(probe)
    else:
        args = tuple(probe) if isinstance(probe, tuple | list) else (probe,)
    gpus = sorted({x.device.index for x in model.parameters() if x.device.type == "cuda"})
    with _evaluating(model), torch.random.fork_rng(gpus):
        return [x for x in _pytree.tree_leaves(model(*args, **named)) if isinstance(x, Tensor)]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients and without torch's fast path; restores everything at the end."""
    training = [module for module in model.modules() if module.training]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module in training:
            module.training = True


def _largest_difference(what: str, torchs: list[Any], ours: list[Any]) -> float:
    """The largest relative difference; raises if it exceeds half the digits of the dtype."""
    if not torchs or [x.shape for x in torchs] != [x.shape for x in ours]:
        shapes = [[tuple(x.shape) for x in tensors] for tensors in (torchs, ours)]
        raise OptionError(f"{what}: torch gives tensors of shape {shapes[0]} and headwise {shapes[1]}. {PUT_BACK}")
    return max(_difference(what, *pair) for pair in zip(torchs, ours, strict=True))


def _difference(what: str, torchs: Tensor, ours: Tensor) -> float:
    if not torchs.numel():
        return 0.0
    exact = torchs.double()
    finite = exact.isfinite()
    if not finite.any():
        raise OptionError(
            f"{what}: torch's numbers are all NaN or infinite, so there is nothing to compare. Pass a probe under "
            f"which every query sees a key, repair the weights, or pass check=False."
        )
    # For a query that sees no key, torch returns NaN and we return zeros: that difference is intended.
    error = (ours.double() - exact).abs()[finite].max().item()
    difference = error / max(exact[finite].abs().max().item(), math.ulp(0.0))
    digits = torchs.dtype if torchs.is_floating_point() else torch.float64
    allowed = math.sqrt(torch.finfo(digits).eps)
    if not difference <= allowed:  # not ">": NaN must not pass
        raise OptionError(
            f"{what}: torch and headwise differ by {difference:.3g} of the largest number, and rounding in "
            f"{str(torchs.dtype).removeprefix('torch.')} explains {allowed:.3g}. {PUT_BACK}"
        )
    return difference


PUT_BACK = "The model is unchanged. Please report this layer's options; check=False replaces without comparing."


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(repr(name) for name in names[:SHOWN]) or "none") + more
