"""The layouts we know: how each names its tensors, and what these say about the layer."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headwise.errors import CheckpointError
from headwise.packing import unpack

State = Mapping[str, Tensor]
OUTS = ("out_proj", "proj", "W_o")


class Found(NamedTuple):
    """A layer as read: arguments for `MultiHeadAttention`, and tensors under the names of its separate projections."""

    options: dict[str, Any]
    state: dict[str, Tensor]


class Layout(Protocol):
    """One way to name the tensors of attention."""

    title: str
    example: str

    def matches(self, names: State) -> bool:
        """Whether these names are of this layout."""
        ...

    def read(self, names: State, num_heads: int | None, num_kv_heads: int | None) -> Found:
        """The layer, or a `CheckpointError` that says what does not fit."""
        ...


class Linears:
    """Four `nn.Linear` (or three, without the last), under the names textbooks give them."""

    def __init__(self, title: str, query: str, key: str, value: str, outs: tuple[str, ...]) -> None:
        self.title, self.parts, self.outs = title, (query, key, value), outs
        self.example = f"{query}.weight, {key}.weight, {value}.weight, {outs[0]}.weight"

    def matches(self, names: State) -> bool:
        """All three projections are there."""
        return all(f"{part}.weight" in names for part in self.parts)

    def read(self, names: State, num_heads: int | None, num_kv_heads: int | None) -> Found:
        """Heads lie one after the other in the rows, which is how our separate projections have them."""
        state: dict[str, Tensor] = {}
        for ours, theirs in zip(("q_proj", "k_proj", "v_proj"), self.parts, strict=True):
            state |= _linear(names, theirs, ours)
        out = next((name for name in self.outs if f"{name}.weight" in names), None)
        if out is not None:
            state |= _linear(names, out, "out_proj")
        used = {f"{part}.{kind}" for part in (*self.parts, out) for kind in ("weight", "bias")}
        _refuse_leftovers(self.title, set(names) - used - {"mask"})
        return _found(self.title, state, num_heads, causal_length(names.get("mask")))


class HeadList:
    """`heads.0.W_query.weight` and so on: heads in a list, each with three linears of its own, maybe projected."""

    title = "a list of heads"
    example = "heads.0.W_query.weight, heads.0.W_key.weight, heads.0.W_value.weight, heads.1.W_query.weight, ..."
    pattern = re.compile(r"heads\.(\d+)\.(W_query|W_key|W_value)\.(weight|bias)")
    parts = (("q_proj", "W_query"), ("k_proj", "W_key"), ("v_proj", "W_value"))

    def matches(self, names: State) -> bool:
        """There is a first head."""
        return "heads.0.W_query.weight" in names

    def read(self, names: State, num_heads: int | None, num_kv_heads: int | None) -> Found:
        """Stack the heads; the naive wrapper's output is as wide as all of them together."""
        heads = {int(match[1]) for name in names if (match := self.pattern.fullmatch(name))}
        if heads != set(range(len(heads))):
            raise CheckpointError(f"{self.title}: heads {sorted(heads)} are not numbered from 0 without a gap.")
        if num_heads not in (None, len(heads)):
            raise CheckpointError(f"{self.title}: num_heads={num_heads} is given and {len(heads)} heads are there.")
        state: dict[str, Tensor] = {}
        out = next((name for name in OUTS if f"{name}.weight" in names), None)
        if out is not None:
            state |= _linear(names, out, "out_proj")
        used = {f"{out}.weight", f"{out}.bias"} | {f"heads.{i}.mask" for i in heads}
        _refuse_leftovers(self.title, {name for name in names if not self.pattern.fullmatch(name)} - used)
        for ours, theirs in self.parts:
            for kind in ("weight", "bias"):
                rows = [names.get(f"heads.{i}.{theirs}.{kind}") for i in range(len(heads))]
                there = [row for row in rows if row is not None]
                if len(there) not in (0, len(heads)) or (not there and kind == "weight"):
                    raise CheckpointError(f"{self.title}: {theirs}.{kind} is missing in some heads.")
                if any(row.shape != there[0].shape or row.dim() == 0 for row in there):
                    raise CheckpointError(
                        f"{self.title}: {theirs}.{kind} has shapes {sorted({tuple(row.shape) for row in there})}; "
                        f"all heads must be alike."
                    )
                if there:
                    state[f"{ours}.{kind}"] = torch.cat(there)
        return _found(self.title, state, len(heads), causal_length(names.get("heads.0.mask")))


class Torch:
    """`torch.nn.MultiheadAttention`, with one `in_proj_weight` or, for other input widths, three."""

    title = "torch.nn.MultiheadAttention"
    example = "in_proj_weight, in_proj_bias, out_proj.weight, out_proj.bias"

    def matches(self, names: State) -> bool:
        """Its own spelling of the projections."""
        return "in_proj_weight" in names or "q_proj_weight" in names

    def read(self, names: State, num_heads: int | None, num_kv_heads: int | None) -> Found:
        """Query, key and value rows one after the other."""
        if "bias_k" in names or "bias_v" in names:
            raise CheckpointError(
                f"{self.title}: bias_k and bias_v (add_bias_kv=True) add a learned key that our layer does not have."
            )
        parts = ("q_proj", "k_proj", "v_proj")
        state: dict[str, Tensor] = {}
        if "in_proj_weight" in names:
            state |= {f"{p}.weight": w for p, w in zip(parts, _thirds(names, "in_proj_weight"), strict=True)}
        else:
            state |= {f"{p}.weight": _get(names, f"{p}_weight") for p in parts}
        if "in_proj_bias" in names:
            state |= {f"{p}.bias": b for p, b in zip(parts, _thirds(names, "in_proj_bias"), strict=True)}
        state |= _linear(names, "out_proj", "out_proj")
        used = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"} | {f"{p}_weight" for p in parts}
        _refuse_leftovers(self.title, set(names) - used)
        return _found(self.title, state, num_heads, None)


class Ours:
    """The fused, head-major layout of `headwise.MultiHeadAttention` itself."""

    title = "headwise.MultiHeadAttention"
    example = "qkv_proj.weight, out_proj.weight"

    def matches(self, names: State) -> bool:
        """Its fused projection."""
        return "qkv_proj.weight" in names

    def read(self, names: State, num_heads: int | None, num_kv_heads: int | None) -> Found:
        """Unpack. How wide all queries are the output projection tells; the rest of the rows are keys and values."""
        heads = _need_heads(self.title, num_heads)
        kv_heads = self.kv_heads(names, heads, num_kv_heads)
        state: dict[str, Tensor] = {}
        for kind in ("weight", "bias"):
            if (packed := names.get(f"qkv_proj.{kind}")) is not None:
                if packed.dim() == 0 or packed.shape[0] % (heads + 2 * kv_heads):
                    raise CheckpointError(
                        f"{self.title}: qkv_proj.{kind} {tuple(packed.shape)} does not hold {heads} query heads and "
                        f"{kv_heads} key and value heads of one width."
                    )
                for part, rows in zip("qkv", unpack(packed, heads, kv_heads), strict=True):
                    state[f"{part}_proj.{kind}"] = rows
        if "out_proj.weight" in names:
            state |= _linear(names, "out_proj", "out_proj")
        used = {f"{part}.{kind}" for part in ("qkv_proj", "out_proj") for kind in ("weight", "bias")}
        _refuse_leftovers(self.title, set(names) - used)
        return _found(self.title, state, heads, None)

    def kv_heads(self, names: State, heads: int, given: int | None) -> int:
        """The number of key/value heads."""
        out = names.get("out_proj.weight")
        if given is not None:
            return given
        if out is None:
            raise CheckpointError(
                f"{self.title}: without an output projection the tensors do not tell how many key/value heads there "
                f"are. Pass num_kv_heads=, {heads} if there are as many as query heads."
            )
        d_model = out.shape[-1]
        rest, pair = names["qkv_proj.weight"].shape[0] - d_model, 2 * d_model // heads
        if rest <= 0 or pair == 0 or rest % pair:
            raise CheckpointError(
                f"{self.title}: qkv_proj.weight {tuple(names['qkv_proj.weight'].shape)} and out_proj.weight "
                f"{tuple(out.shape)} do not make {heads} query heads with their keys and values."
            )
        return rest // pair


LAYOUTS: tuple[Layout, ...] = (
    Ours(),
    HeadList(),
    Torch(),
    Linears("W_query, W_key, W_value", "W_query", "W_key", "W_value", OUTS),
    Linears("W_q, W_k, W_v", "W_q", "W_k", "W_v", ("W_o", "out_proj", "proj")),
    Linears("q_proj, k_proj, v_proj", "q_proj", "k_proj", "v_proj", ("out_proj", "o_proj")),
)


def causal_length(mask: Tensor | None) -> int | None:
    """The context length of a stored causal mask, marking either what is hidden or what is seen; None without one."""
    if mask is None:
        return None
    square = mask.bool().flatten(0, -3)[0] if mask.dim() > 2 and mask.numel() else mask.bool()
    below = torch.ones_like(square).tril() if square.dim() == 2 else square
    if (
        square.dim() != 2
        or mask.numel() != square.numel()
        or not (torch.equal(square, ~below) or torch.equal(square, below))
    ):
        raise CheckpointError(
            f"the stored mask {tuple(mask.shape)} is not causal; only causal masks can be taken over. Remove it from "
            f"the state dict and pass the mask with each call."
        )
    return square.shape[0]


def _found(title: str, state: dict[str, Tensor], num_heads: int | None, causal: int | None) -> Found:
    """Check the shapes of the separate projections against each other and name the layer they make."""
    heads = _need_heads(title, num_heads)
    for name, tensor in state.items():
        rows = state[name.replace("bias", "weight")].shape[:1]
        if tensor.dim() != 2 if name.endswith("weight") else tensor.shape != rows:
            expected = "2 dimensions (out, in)" if name.endswith("weight") else f"{tuple(rows)}, as its weight"
            raise CheckpointError(
                f"{title}: the {name} read from it has shape {tuple(tensor.shape)}; expected {expected}."
            )
    q, k, v = (state[f"{part}_proj.weight"] for part in "qkv")
    d_model, d_in = q.shape
    if d_model % heads or k.shape[0] != v.shape[0] or k.shape[0] % (d_model // heads):
        raise CheckpointError(
            f"{title}: query {tuple(q.shape)}, key {tuple(k.shape)} and value {tuple(v.shape)} do not make "
            f"{heads} heads; rows must be whole heads of width d_model / num_heads, as many of value as of key."
        )
    biases = [f"{part}_proj.bias" in state for part in "qkv"]
    out = state.get("out_proj.weight")
    if out is not None and out.shape[1] != d_model:
        raise CheckpointError(
            f"{title}: the output projection {tuple(out.shape)} expects {out.shape[1]}, heads give {d_model}."
        )
    out_bias = "out_proj.bias" in state
    options: dict[str, Any] = {"d_model": d_model, "num_heads": heads, "d_in": d_in, "qkv_bias": biases[0]}
    options |= {
        "bias": out_bias,
        "out_proj": out is not None,
        "d_out": d_model if out is None else out.shape[0],
    }
    if any(biases) != all(biases):
        del options["qkv_bias"]
        there = {part for part, has in zip("qkv", biases, strict=True) if has}
        options["bias"] = there | {"out"} if out_bias else there
    if k.shape[0] != d_model:
        options["num_kv_heads"] = k.shape[0] // (d_model // heads)
    if k.shape[1] != d_in or v.shape[1] != d_in:
        options |= {"d_key": k.shape[1], "d_value": v.shape[1]}
    if causal is not None:
        options |= {"causal": True, "context_length": causal}
    return Found(options, state)


def _need_heads(title: str, num_heads: int | None) -> int:
    if num_heads is None:
        raise CheckpointError(
            f"{title}: num_heads is not given, and the tensors do not tell how many heads they hold. "
            f"Pass from_state_dict(state_dict, num_heads=...)."
        )
    return num_heads


def _get(names: State, name: str) -> Tensor:
    if name not in names:
        raise CheckpointError(f"{name} is missing; found {', '.join(sorted(names))}.")
    return names[name]


def _linear(names: State, theirs: str, ours: str) -> dict[str, Tensor]:
    weight, bias = _get(names, f"{theirs}.weight"), names.get(f"{theirs}.bias")
    return {f"{ours}.weight": weight} | ({} if bias is None else {f"{ours}.bias": bias})


def _thirds(names: State, name: str) -> tuple[Tensor, ...]:
    tensor = names[name]
    if tensor.dim() == 0 or tensor.shape[0] % 3:
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)}; expected three equal parts for query, key, value."
        )
    return tensor.chunk(3)


def _refuse_leftovers(title: str, extra: set[str]) -> None:
    if extra:
        raise CheckpointError(
            f"this looks like {title}, and {', '.join(sorted(extra))} would be lost: we do not know what it does. "
            f"Remove it from the state dict if it plays no part in attention."
        )
