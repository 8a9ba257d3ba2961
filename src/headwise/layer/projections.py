"""`Projections`: how a layer makes queries, keys and values from its input.

A projections object is a rule and holds no parameters. It makes the modules, which belong to the layer under their own
names, and gets them back with every call; so a module that is replaced, wrapped or sharded is used as it is.

    Fused       one linear map for queries, keys and values (the default)
    Separate    three linear maps (cross-attention, or biases that differ)

A subclass of your own is passed as `MultiHeadAttention(..., projections=...)`.
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from headwise import shapes
from headwise.attention.backends import Call
from headwise.errors import OptionError
from headwise.layer.checkpoints.forms import unpack
from headwise.layer.options import Widths

Three = tuple[Tensor, Tensor, Tensor]
ThreeBiases = Three | tuple[None, None, None]
Modules = Mapping[str, Any]  # of the layer, by name


class Stored(NamedTuple):
    """What a cache keeps of each token: `heads` keys of `key_dim` numbers, and as many values of `value_dim`."""

    heads: int
    key_dim: int
    value_dim: int


class Projections(abc.ABC):
    """How a layer makes queries, keys and values. A subclass defines `modules`, `queries` and `keys_and_values`."""

    head_dim: int | None = None  # width of a query and key head; None: the layer's
    value_dim: int | None = None  # width of a value head; None: as of a key head
    turned_dim: int | None = None  # how many numbers of a head, the last ones, the position turns; None: all of them
    cut_by_heads = False  # whether rows of the modules are whole heads, under the names of `Fused` and `Separate`
    makes_keys = True  # whether `keys_and_values` returns whole keys; False: `call` makes them from what is stored

    def fitted(self, widths: Widths) -> Self:
        """The same rule for a layer of these widths; raises if it does not fit."""
        return self

    @abc.abstractmethod
    def modules(
        self,
        widths: Widths,
        biases: Mapping[str, bool],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> dict[str, nn.Module]:
        """New modules by the names they will have in the layer.

        Args:
            widths: the sizes of the layer.
            biases: whether the maps for "q", "k" and "v" have a bias.
            device: where to make them.
            dtype: of their parameters.
        """

    @abc.abstractmethod
    def queries(self, modules: Modules, x: Tensor) -> Tensor:
        """Query heads (B, H, T, D) of an input `x` (B, T, d_in), by the layer's `modules`."""

    @abc.abstractmethod
    def keys_and_values(self, modules: Modules, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value heads as a cache stores them.

        Args:
            modules: of the layer, by name.
            key: an input (B, S, d_key), which becomes (B, heads, S, key_dim).
            value: an input (B, S, d_value), which becomes (B, heads, S, value_dim).
        """

    def heads(self, modules: Modules, x: Tensor) -> Three:
        """Queries, keys and values of one input `x`, for self-attention, by the layer's `modules`."""
        return self.queries(modules, x), *self.keys_and_values(modules, x, x)

    def cross(self, modules: Modules, query: Tensor, key: Tensor, value: Tensor) -> Three:
        """All three of separate inputs, for cross-attention.

        Args:
            modules: of the layer, by name.
            query: (B, T, d_in).
            key: (B, S, d_key).
            value: (B, S, d_value).
        """
        k, v = self.keys_and_values(modules, key, value)
        return self.queries(modules, query), k, v

    def stored(self, num_kv_heads: int, head_dim: int) -> Stored:
        """What a cache keeps of each token, in a layer of `num_kv_heads` key heads, `head_dim` wide."""
        return Stored(num_kv_heads, head_dim, head_dim if self.value_dim is None else self.value_dim)

    def turned(self, heads: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
        """Queries or keys, `heads`, after `turn` changed the part that follows the position."""
        if self.turned_dim is None:
            return turn(heads)
        still, part = heads.split((heads.shape[-1] - self.turned_dim, self.turned_dim), dim=-1)
        return torch.cat([still, turn(part)], -1)

    def call(self, modules: Modules, call: Call) -> Call:
        """The attention `call` over keys and values, given one over what is stored; `modules` are the layer's."""
        return call

    def read(self, modules: Modules, call: Call, read: Tensor) -> Tensor:
        """What the heads read, (B, H, T, Dv), from the result `read` of `call`; `modules` are the layer's."""
        return read

    def weights(self, modules: Modules) -> tuple[Three, ThreeBiases]:
        """Weights (H·D, d_in), (Hkv·D, d_key), (Hkv·D, d_value) of query, key and value in `modules`, and biases."""
        raise OptionError(
            f"this layer has projections={type(self).__name__}(...), which are not one matrix each for queries, keys "
            f"and values. Read its parameters by name: layer.state_dict()."
        )


class Separate(Projections):
    """Three linear maps: `q_proj`, `k_proj` and `v_proj`."""

    cut_by_heads = True

    def __init__(self, head_dim: int) -> None:
        self.head_dim: int = head_dim

    def modules(
        self,
        widths: Widths,
        biases: Mapping[str, bool],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> dict[str, nn.Module]:
        kv_width = widths.num_kv_heads * widths.head_dim
        return {
            "q_proj": nn.Linear(widths.d_in, widths.num_heads * widths.head_dim, biases["q"], device, dtype),
            "k_proj": nn.Linear(widths.d_key, kv_width, biases["k"], device, dtype),
            "v_proj": nn.Linear(widths.d_value, kv_width, biases["v"], device, dtype),
        }

    def queries(self, modules: Modules, x: Tensor) -> Tensor:
        return split(project(modules["q_proj"], x), self.head_dim)

    def keys_and_values(self, modules: Modules, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        k, v = project(modules["k_proj"], key), project(modules["v_proj"], value)
        return split(k, self.head_dim), split(v, self.head_dim)

    def weights(self, modules: Modules) -> tuple[Three, ThreeBiases]:
        q, k, v = (modules[f"{part}_proj"] for part in "qkv")
        return (q.weight, k.weight, v.weight), (q.bias, k.bias, v.bias)


class Fused(Projections):
    """One linear map, `qkv_proj`, for queries, keys and values.

    Its rows are head by head, (Hkv, group + 2, D): the queries of a group, its key, its value. So a slice of rows is a
    set of whole heads, which is what tensor parallelism needs.
    """

    cut_by_heads = True

    def __init__(self, head_dim: int, group: int) -> None:
        self.head_dim: int = head_dim
        self.group = group  # how many query heads share a key/value head

    def modules(
        self,
        widths: Widths,
        biases: Mapping[str, bool],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> dict[str, nn.Module]:
        rows = widths.num_kv_heads * (self.group + 2) * self.head_dim
        return {"qkv_proj": nn.Linear(widths.d_in, rows, biases["q"], device, dtype)}

    def heads(self, modules: Modules, x: Tensor) -> Three:
        """All three from one matrix product."""
        B, T, _ = x.shape
        D, group = self.head_dim, self.group
        qkv = project(modules["qkv_proj"], x)
        Hkv = qkv.shape[2] // ((group + 2) * D)
        if group == 1 and not torch.is_grad_enabled():  # three views in one call; one token needs no transpose
            parts = qkv.view(B, Hkv, 3, 1, D) if T == 1 else qkv.view(B, T, Hkv, 3, D).permute(0, 2, 3, 1, 4)
            q, k, v = parts.unbind(2)
            return q, k, v
        # Split before transposing, so that one contiguous copy joins the three gradients.
        q, k, v = qkv.view(B, T, Hkv, (group + 2) * D).split((group * D, D, D), dim=-1)
        q = q if group == 1 else q.reshape(B, T, Hkv * group, D)  # a copy: no view can join separate groups
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def queries(self, modules: Modules, x: Tensor) -> Tensor:
        linear = modules["qkv_proj"]
        if not has_plain_rows(linear):
            return self.heads(modules, x)[0]
        return self._rows(linear, x, 0, self.group).flatten(2, 3).transpose(1, 2)

    def keys_and_values(self, modules: Modules, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        linear, group = modules["qkv_proj"], self.group
        if not has_plain_rows(linear):
            _, k, v = self.heads(modules, key)
            return k, v if value is key else self.heads(modules, value)[2]
        if value is key:
            k, v = self._rows(linear, key, group, group + 2).transpose(1, 2).unbind(3)
            return k, v
        k, v = self._rows(linear, key, group, group + 1), self._rows(linear, value, group + 1, group + 2)
        return k[:, :, :, 0].transpose(1, 2), v[:, :, :, 0].transpose(1, 2)

    def cross(self, modules: Modules, query: Tensor, key: Tensor, value: Tensor) -> Three:
        """All three of separate inputs. In training the map is split once, so that one copy joins its gradient."""
        linear = modules["qkv_proj"]
        if not torch.is_grad_enabled() or not has_plain_rows(linear):
            return super().cross(modules, query, key, value)
        shapes.check_alike(input=query, weight=linear.weight)
        weights, biases = self.weights(modules)
        q, k, v = (split(F.linear(*x), self.head_dim) for x in zip((query, key, value), weights, biases, strict=True))
        return q, k, v

    def _rows(self, linear: nn.Linear, x: Tensor, start: int, stop: int) -> Tensor:
        """The part of the map from `start` to `stop` of every group, applied to `x`: (B, T, Hkv, stop - start, D)."""
        (B, T, E), D, n = x.shape, self.head_dim, stop - start
        weight = linear.weight.view(-1, self.group + 2, D, E)[:, start:stop].flatten(1, 2)  # (Hkv, n·D, E), a view
        bias = None if linear.bias is None else linear.bias.view(-1, self.group + 2, D)[:, start:stop].flatten(1)
        try:
            if torch.is_grad_enabled() or (x.is_cpu and x.element_size() < 4):
                # A copy of these rows: the gradient of a batched product would hold the input once for every head, and
                # in half precision torch's batched product on the CPU takes up to twenty times as long.
                found: Tensor = F.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
                return found.view(B, T, len(weight), n, D)
            x, weight = x.reshape(1, B * T, E).expand(len(weight), -1, -1), weight.transpose(1, 2)
            each = torch.bmm(x, weight) if bias is None else torch.baddbmm(bias[:, None], x, weight)  # (Hkv, B·T, n·D)
            return each.view(len(weight), B, T, n, D).permute(1, 2, 0, 3, 4)
        except RuntimeError:  # on a mismatch of dtypes or devices, our error says how to fix it
            shapes.check_alike(input=x, weight=linear.weight)
            raise

    def weights(self, modules: Modules) -> tuple[Three, ThreeBiases]:
        linear = modules["qkv_proj"]
        Hkv = linear.weight.shape[0] // ((self.group + 2) * self.head_dim)
        counts = (Hkv * self.group, Hkv)
        biases = (None, None, None) if linear.bias is None else unpack(linear.bias, *counts)
        return unpack(linear.weight, *counts), biases


def check_head_dim(projections: object, head_dim: int | None) -> int | None:
    """The width of a head by the projections, or as given; raises if they differ."""
    if projections is None:
        return head_dim
    if not isinstance(projections, Projections):
        cure = " Did you forget the parentheses?" if callable(projections) else ""
        raise OptionError(
            f"projections={projections!r}: expected latent(...), or your own subclass of Projections.{cure}"
        )
    if None not in (head_dim, projections.head_dim) and head_dim != projections.head_dim:
        raise OptionError(
            f"head_dim={head_dim} and projections={projections!r}, which makes heads {projections.head_dim} wide. "
            f"Leave out head_dim."
        )
    return projections.head_dim or head_dim


def split(x: Tensor, head_dim: int) -> Tensor:
    """(B, T, heads · D) as (B, heads, T, D)."""
    parts: Tensor = x.unflatten(-1, (-1, head_dim))
    return parts.transpose(1, 2)


def project(linear: Any, x: Tensor) -> Tensor:
    """`linear(x)`. In inference, a plain `nn.Linear` without hooks is run without the 3 µs of a module call."""
    if torch.compiler.is_compiling():
        return linear(x)  # type: ignore[no-any-return]
    try:
        if torch.is_grad_enabled() or not is_plain(linear):
            return linear(x)  # type: ignore[no-any-return]
        parameters = linear._parameters
        return F.linear(x, parameters["weight"], parameters["bias"])
    except RuntimeError:  # torch compares dtypes and devices; on a mismatch, our error says how to fix it
        if isinstance(linear, nn.Linear):
            shapes.check_alike(input=x, weight=linear.weight)
        raise


def has_plain_rows(linear: nn.Module) -> bool:
    """Whether rows of this map may be used by themselves. An adapter or a hook must see every input, and a quantized
    or sharded weight knows only the product with all of its rows."""
    return is_plain(linear) and type(linear.weight) is nn.Parameter


def is_plain(linear: nn.Module) -> bool:
    """Whether this is an unmodified `nn.Linear`: not patched, not sharded, and without hooks."""
    if type(linear) is not nn.Linear or "forward" in linear.__dict__ or "weight" not in linear._parameters:
        return False
    hooks = linear._forward_hooks or linear._forward_pre_hooks or _global_forward_hooks or _global_forward_pre_hooks
    return not (hooks or linear._backward_hooks or linear._backward_pre_hooks)
