"""Interventions: change what heads do, to see what depends on them.

    silence   heads output zeros
    patch     heads output what they output elsewhere: in another run, for another sample, or on average
    gate      heads are scaled by factors, which may have a gradient
    freeze    heads keep the attention weights of another run, and read the values of this one

>>> from headwise import MultiHeadAttention, silence
>>> model = torch.nn.Sequential(MultiHeadAttention(64, 4), torch.nn.ReLU(), MultiHeadAttention(64, 4))
>>> with silence(model, {"2": [0, 3]}):
...     y = model(torch.randn(1, 10, 64))

Each is a context. Several can be open at once, and apply in the order they were opened. Nothing is left on the model
when a context closes, even by an exception. A context applies to calls in the thread or task that opened it, and in
tasks started from there. A changed head still attends: maps that are watched inside are those the model computes
itself. A name such as "attention@3" stands for one call of a layer that the model calls several times in a pass; see
`watch`.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

from headwise.attention.backends import Call, choose
from headwise.errors import OptionError, ShapeError
from headwise.layer.attached import Attachment, attached
from headwise.study.outputs import HeadOutputs, Outputs
from headwise.study.passes import ByCall, split_name
from headwise.study.watch import Watched, attention_layers, without_fastpath
from headwise.weights import AttentionMap

Heads = Mapping[str, int | Iterable[int]]
Places = int | slice | Sequence[int] | Tensor
Source = Mapping[str, Tensor | Sequence[Tensor] | HeadOutputs] | Watched


class Intervention:
    """A context in which some heads of a model do something else; made by `silence`, `patch`, `gate` and `freeze`."""

    verb = "intervention"
    kind = "change"  # the field of an `Attachment`

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Any],
        made: Callable[[str], tuple[Any, ...]],
        heads: Mapping[str, Any],
    ) -> None:
        self.heads = dict(heads)
        self._model, self._layers, self._made = model, layers, made
        self._stack = ExitStack()
        self._is_open = False

    def __enter__(self) -> Self:
        if self._is_open:
            raise OptionError(f"this {self.verb} is already open; make another one to use inside it.")
        self._is_open = True
        things = {name: self._made(name) for name in self.heads}
        by_call = self._stack.enter_context(ByCall(self._model, self._layers, things, self.verb))
        self._stack.enter_context(without_fastpath(self._layers[name] for name in by_call))
        self._stack.enter_context(attached(self._layers, {name: self._attachment(x) for name, x in by_call.items()}))
        return self

    def __exit__(self, *problem: Any) -> None:
        self._is_open = False
        self._stack.__exit__(*problem)

    def _attachment(self, things: tuple[Any, ...] | Callable[[], tuple[Any, ...]]) -> Attachment:
        """What to attach to a layer for these heads or changes, or for those of the present call."""
        if self.kind == "silent":
            return Attachment(silent=things)

        def changed(*given: Any) -> Tensor:
            *call, read = given
            for thing in things() if callable(things) else things:
                read = thing(*call, read)
            return read  # type: ignore[no-any-return]

        return Attachment(reading=changed) if self.kind == "reading" else Attachment(change=changed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.heads})"


class Silenced(Intervention):
    """A context in which some heads of a model are switched off; made by `silence`."""

    verb = "silence"


class Patched(Intervention):
    """A context in which some heads output what they output elsewhere; made by `patch`."""

    verb = "patch"


class Gated(Intervention):
    """A context in which heads are scaled; made by `gate`."""

    verb = "gate"


class Frozen(Intervention):
    """A context in which heads keep the attention weights of another run; made by `freeze`."""

    verb, kind = "freeze", "reading"


def silence(model: nn.Module, heads: Heads, *, positions: Places | None = None) -> Silenced:
    """A context in which some heads of a model output zeros, as if their part of the output projection were zero.

    Args:
        model: the model, or a single layer (whose name is then "").
        heads: which heads of which layers, by the layer's name in `model.named_modules()`. In a layer that is called
            several times in a pass, they are silent in every call; "name@3" is its fourth call alone.
        positions: which queries of a call; all by default.
    """
    layers = checked_layers(model, "silence")
    asked = {name: which for name, which in checked_heads("silence", layers, heads).items() if which}
    if positions is None:
        found = Silenced(model, layers, lambda name: asked[name], asked)
        found.kind = "silent"
        return found
    return Silenced(model, layers, lambda name: (Change(name, asked[name], positions, _zeros),), asked)


def patch(model: nn.Module, source: Source, heads: Heads | None = None, *, positions: Places | None = None) -> Patched:
    """A context in which some heads output what they output elsewhere.

    >>> from headwise import load_builtin, patch, watch
    >>> model = load_builtin()
    >>> with torch.no_grad(), watch(model.gpt, outputs=True) as seen:
    ...     logits = model.gpt(model.tokens("The captain looked at the sea."))
    >>> with torch.no_grad(), patch(model.gpt, seen, {"blocks.4.attention": 2}, positions=[3]):
    ...     logits = model.gpt(model.tokens("The soldier looked at the sea."))

    Args:
        model: the model, or a single layer (whose name is then "").
        source: another run, from `watch(model, outputs=True)`, or what to use by the name of the layer: tensors that
            broadcast to (B, H, T, Dv), one for all passes or a list of one for each, which starts again at its end.
            `seen.outputs.mean()` replaces by the mean, `seen.outputs.resampled()` by another sample of the batch.
        heads: which heads of which layers, or of which calls; by default all heads of all layers of the source.
        positions: which queries of a call, the same in both runs; all by default.
    """
    layers = checked_layers(model, "patch")
    given: Any = source.outputs if isinstance(source, Watched) else source
    given = given.calls if isinstance(given, Outputs) else given
    if not isinstance(given, Mapping):
        raise OptionError(
            f"patch(source={type(source).__name__}): expected another run, from watch(model, outputs=True), or tensors "
            f"by layer, such as seen.outputs.mean()."
        )
    asked = checked_heads("patch", layers, dict.fromkeys(given) if heads is None else heads)
    missing = [name for name in asked if name not in given]
    if missing:
        raise OptionError(f"patch: the source has nothing for {missing[0]!r}; it has {list(given)}.")
    return Patched(model, layers, lambda name: (Change(name, asked[name], positions, _from(name, given[name])),), asked)


def gate(model: nn.Module, gates: Mapping[str, Tensor]) -> Gated:
    """A context in which heads are scaled by factors, which may have a gradient.

    Args:
        model: the model, or a single layer (whose name is then "").
        gates: factors by layer or call, (H,), (B, H) or (B, H, T). With (B, H), every sample of a batch can have other
            heads switched off: one pass then measures many of them.
    """
    layers = checked_layers(model, "gate")
    checked_heads("gate", layers, dict.fromkeys(gates) if isinstance(gates, Mapping) else gates)
    for name, factors in gates.items():
        if not isinstance(factors, Tensor) or not 1 <= factors.dim() <= 3:
            raise OptionError(f"gate({name!r}): expected a tensor of factors, (H,), (B, H) or (B, H, T).")
    sizes = {name: tuple(factors.shape) for name, factors in gates.items()}
    return Gated(model, layers, lambda name: (Change(name, None, None, _scaled(name, gates[name])),), sizes)


def freeze(model: nn.Module, source: Watched, heads: Heads | None = None) -> Frozen:
    """A context in which heads keep the attention weights of another run, and read the values of this one.

    Args:
        model: the model, or a single layer (whose name is then "").
        source: another run, from `watch(model)`, with texts of the same length.
        heads: which heads of which layers, or of which calls; by default all that the source has.
    """
    layers = checked_layers(model, "freeze")
    if not isinstance(source, Watched):
        raise OptionError(f"freeze(source={type(source).__name__}): expected another run, from headwise.watch(model).")
    asked = checked_heads("freeze", layers, dict.fromkeys(source) if heads is None else heads)
    for name in asked:
        if name not in source.calls or not isinstance(source[name], AttentionMap):
            raise OptionError(
                f"freeze: the source has no maps of {name!r}; it has {list(source.calls)}, and needs no statistics=."
            )
    return Frozen(model, layers, lambda name: (_Freeze(name, asked[name], source.calls[name]),), asked)


# What is done in a call --------------------------------------------------------------------------------------------


class Change:
    """Replaces what some heads hand to the output projection, at some positions.

    Args:
        name: the layer.
        heads: which heads; None for all.
        positions: which queries; None for all.
        function: what to hand on instead, given what the heads read (B, H, T, Dv) and the number of the pass.
    """

    def __init__(
        self,
        name: str,
        heads: tuple[int, ...] | None,
        positions: Places | None,
        function: Callable[[Tensor, int], Tensor],
    ) -> None:
        self.name, self.heads, self.positions, self.function = name, heads, positions, function
        self.number = -1

    def __call__(self, read: Tensor) -> Tensor:
        self.number += 1
        new = self.function(read, self.number)
        if self.heads is None and self.positions is None:
            return new
        return torch.where(self._chosen(read), new, read)

    def _chosen(self, read: Tensor) -> Tensor:
        """Which heads and queries change, (H, T, 1)."""
        _, H, T, _ = read.shape
        heads = torch.ones(H, dtype=torch.bool) if self.heads is None else _marked(self.heads, H, self.name, "head")
        rows = torch.ones(T, dtype=torch.bool)
        if self.positions is not None:
            rows = _marked(self.positions, T, self.name, "position")
        return (heads[:, None, None] & rows[:, None]).to(read.device)


def _marked(which: Places | tuple[int, ...], size: int, name: str, word: str) -> Tensor:
    """True at the given indices."""
    marks = torch.zeros(size, dtype=torch.bool)
    try:
        marks[which if isinstance(which, slice | int) else torch.as_tensor(which)] = True
    except IndexError as error:
        cure = " While text is generated, a call has one query." if word == "position" else ""
        raise OptionError(
            f"{word} {which!r} of {name!r}: a call has {size} of them, from 0 to {size - 1}.{cure}"
        ) from error
    return marks


def _zeros(read: Tensor, number: int) -> Tensor:
    return torch.zeros_like(read)


def _from(name: str, source: Any) -> Callable[[Tensor, int], Tensor]:
    """What a source has for a call."""

    def function(read: Tensor, number: int) -> Tensor:
        part = source if isinstance(source, Tensor | HeadOutputs) else source[number % len(source)]
        new: Tensor = part.read if isinstance(part, HeadOutputs) else part
        shape = tuple(read.shape)
        if new.dim() != 4 or any(a not in (1, b) for a, b in zip(new.shape, shape, strict=False)):
            raise ShapeError(
                f"patch({name!r}): the source has shape {tuple(new.shape)} and the heads read (B, H, T, Dv) = {shape}; "
                f"expected the same, or 1 where all are alike. Use texts of one length, or their mean."
            )
        return new.to(read).expand(shape)

    return function


def _scaled(name: str, factors: Tensor) -> Callable[[Tensor, int], Tensor]:
    """What heads read, times the factors."""
    shaped = factors[None] if factors.dim() == 1 else factors
    shaped = shaped[..., None, None] if shaped.dim() == 2 else shaped[..., None]  # (B or 1, H, T or 1, 1)

    def function(read: Tensor, number: int) -> Tensor:
        B, H, T, _ = read.shape
        if any(a not in (1, b) for a, b in zip(shaped.shape, (B, H, T, 1), strict=True)):
            raise ShapeError(
                f"gate({name!r}): factors of shape {tuple(factors.shape)}; expected (H,) = ({H},), (B, H) = {(B, H)} "
                f"or (B, H, T) = {(B, H, T)}."
            )
        return read * shaped.to(read.dtype)

    return function


class _Freeze:
    """Reads the values of a call by the weights of another."""

    def __init__(self, name: str, heads: tuple[int, ...] | None, maps: Sequence[AttentionMap]) -> None:
        self.name, self.heads, self.maps, self.number = name, heads, maps, -1

    def __call__(self, call: Call, read: Tensor) -> Tensor:
        self.number += 1
        source = self.maps[self.number % len(self.maps)]._source()
        expected = (*read.shape[:3], call.value.shape[2])
        if source.shape != expected:
            raise ShapeError(
                f"freeze({self.name!r}): the source's map is (B, H, T, S) = {source.shape} and this call's {expected}; "
                f"use texts of one length, and watch whole layers."
            )
        frozen = Call(source.query, source.key, call.value, source.scoring, call.dropout)
        found = choose(frozen).run(frozen)
        if self.heads is None:
            return found
        return torch.where(
            _marked(self.heads, read.shape[1], self.name, "head").to(read.device)[:, None, None], found, read
        )


# What may be asked for ---------------------------------------------------------------------------------------------


def checked_layers(model: Any, verb: str) -> dict[str, Any]:
    """The attention layers of a model by name."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"{verb}({type(model).__name__}): expected a torch.nn.Module, such as load_builtin().gpt.")
    return attention_layers(model, verb)


def checked_heads(verb: str, layers: Mapping[str, Any], heads: Any) -> dict[str, Any]:
    """Heads as tuples of integers by layer, None for all of a layer; checked as far as layers know their number."""
    if not isinstance(heads, Mapping):
        raise OptionError(f"{verb}(heads={heads!r}): expected heads by layer, such as {{{next(iter(layers))!r}: [0]}}.")
    bases = {name: split_name(name, layers)[0] if isinstance(name, str) else name for name in heads}
    unknown = [name for name in heads if bases[name] not in layers]
    if unknown:
        raise OptionError(f"{verb}: {unknown[0]!r} is not a headwise layer of this model; there are {list(layers)}.")
    shared = [name for name in heads if getattr(layers[bases[name]], "_spread", None) is not None]
    if shared:
        raise OptionError(f"{verb}: {shared[0]!r} is sharded over ranks; use {verb} before sharding.")
    return {
        name: None if which is None else _checked(verb, name, layers[bases[name]], which)
        for name, which in heads.items()
    }


def _checked(verb: str, name: str, layer: Any, heads: int | Iterable[int]) -> tuple[int, ...]:
    """The heads as integers, checked against the number of heads if the layer knows it."""
    which = tuple(heads) if isinstance(heads, Iterable) else (heads,)
    most = getattr(layer, "num_heads", None)
    most = most if isinstance(most, int) else sys.maxsize
    for head in which:
        if not isinstance(head, int) or isinstance(head, bool) or not 0 <= head < most:
            there = f"one of 0 to {most - 1}" if most < sys.maxsize else "an integer from 0 up"
            raise OptionError(f"{verb}({name!r}: {head!r}): expected {there}.")
    return which
