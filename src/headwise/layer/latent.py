"""`latent`: multi-head latent attention, as in DeepSeek V2 and V3.

Keys and values of all heads are linear maps of one short vector per token, the latent; a few extra numbers, shared
by all heads, carry the position. A cache stores these two and nothing else:

    x ─ kv_a_proj ─┬─ latent (kv_rank) ─ kv_a_norm ─ kv_b_proj ─ keys (H · nope_dim) and values (H · value_dim)
                   └─ shared key (rotary_dim) ─ position
    x ─ q_a_proj ─ q_a_norm ─ q_b_proj ─ queries (H · (nope_dim + rotary_dim)); or x ─ q_proj without a q_rank

There are two ways to compute the same numbers. The plain form makes all keys and values. The absorbed form multiplies
queries by the key half of `kv_b_proj`, attends over latents as if they were the one key and value of all heads, and
applies the value half to what was read. It is cheaper if few queries meet many stored tokens, as in decoding.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.backends import Call
from headwise.errors import OptionError
from headwise.layer.options import Widths
from headwise.layer.projections import Modules, Projections, Stored, is_plain, project, split
from headwise.shapes import check_size

RMS: Callable[[int], nn.Module] = functools.partial(nn.RMSNorm, eps=1e-6)


class Absorbed(Call):
    """A call over latents: one key and value for all heads, still to be multiplied by the value map."""


class Latent(Projections):
    """Queries, keys and values of multi-head latent attention; made by `latent`."""

    makes_keys = False

    def __init__(
        self,
        kv_rank: int,
        q_rank: int | None,
        nope_dim: int,
        rotary_dim: int,
        value_dim: int,
        norm: Callable[[int], nn.Module] | None,
    ) -> None:
        self.kv_rank, self.q_rank, self.nope_dim, self.rotary_dim = kv_rank, q_rank, nope_dim, rotary_dim
        self.value_dim: int = value_dim
        self.head_dim: int = nope_dim + rotary_dim
        self.turned_dim: int = rotary_dim
        self.norm = norm

    def __repr__(self) -> str:
        ranks = f"{self.kv_rank}" + (f", q_rank={self.q_rank}" if self.q_rank is not None else "")
        return f"latent({ranks}, nope_dim={self.nope_dim}, rotary_dim={self.rotary_dim}, value_dim={self.value_dim})"

    def __eq__(self, other: object) -> bool:
        """Whether both have the same sizes, which are those of the same tensors."""
        return isinstance(other, Latent) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def fitted(self, widths: Widths) -> "Latent":
        if widths.num_kv_heads != widths.num_heads:
            raise OptionError(
                f"num_kv_heads={widths.num_kv_heads} and projections=latent(...), where every head has its own key and "
                f"value, made from what all heads share. Leave out num_kv_heads."
            )
        if widths.d_key != widths.d_value:
            raise OptionError(
                f"d_key={widths.d_key}, d_value={widths.d_value} and projections=latent(...), which makes keys and "
                f"values from one input. Leave out d_value."
            )
        return self

    def modules(
        self,
        widths: Widths,
        biases: Mapping[str, bool],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> dict[str, nn.Module]:
        if biases["k"] != biases["v"]:
            raise OptionError(
                f"bias={sorted(name for name, there in biases.items() if there)!r} and projections=latent(...), where "
                f"keys and values come from one linear map. Name both 'k' and 'v', or neither."
            )
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        H, rows = widths.num_heads, widths.num_heads * self.head_dim
        found: dict[str, nn.Module | None] = {}
        if self.q_rank is None:
            found["q_proj"] = nn.Linear(widths.d_in, rows, biases["q"], **where)
        else:
            found["q_a_proj"] = nn.Linear(widths.d_in, self.q_rank, biases["q"], **where)
            found["q_a_norm"] = self._norm(self.q_rank, where)
            found["q_b_proj"] = nn.Linear(self.q_rank, rows, False, **where)
        found["kv_a_proj"] = nn.Linear(widths.d_key, self.kv_rank + self.rotary_dim, biases["k"], **where)
        found["kv_a_norm"] = self._norm(self.kv_rank, where)
        found["kv_b_proj"] = nn.Linear(self.kv_rank, H * (self.nope_dim + self.value_dim), False, **where)
        return {name: module for name, module in found.items() if module is not None}

    def _norm(self, width: int, where: dict[str, Any]) -> nn.Module | None:
        if self.norm is None:
            return None
        made = self.norm(width) if callable(self.norm) else None
        if not isinstance(made, nn.Module):
            raise OptionError(
                f"latent(norm={self.norm!r}): expected a function from a width to a module, such as nn.RMSNorm, or "
                f"None for no norm."
            )
        return made.to(**where)

    def queries(self, modules: Modules, x: Tensor) -> Tensor:
        if self.q_rank is None:
            return split(project(modules["q_proj"], x), self.head_dim)
        short = _normalized(modules.get("q_a_norm"), project(modules["q_a_proj"], x))
        return split(project(modules["q_b_proj"], short), self.head_dim)

    def keys_and_values(self, modules: Modules, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The latent and the shared key side by side, (B, 1, S, kv_rank + rotary_dim), and values of width 0."""
        if value is not key:
            raise OptionError(
                "projections=latent(...) make keys and values from one input, and two are given. Pass mha(query, key)."
            )
        latent, shared = project(modules["kv_a_proj"], key).split((self.kv_rank, self.rotary_dim), dim=-1)
        stored = torch.cat([_normalized(modules.get("kv_a_norm"), latent), shared], -1)[:, None]
        return stored, stored[..., :0]

    def stored(self, num_kv_heads: int, head_dim: int) -> Stored:
        return Stored(1, self.kv_rank + self.rotary_dim, 0)

    # From what is stored to heads.

    def call(self, modules: Modules, call: Call) -> Call:
        linear = modules["kv_b_proj"]
        if self._absorbs(call.query.shape[2], call.key.shape[2]) and is_plain(linear):
            return self._absorbed(linear.weight, call)
        return self._expanded(linear, call)

    def _absorbs(self, T: int, S: int) -> bool:
        """Whether the absorbed form takes fewer multiplications for T queries and S stored tokens, per head:

        plain     S · kv_rank · width + T · S · (width + rotary_dim), where width is that of a key and a value
        absorbed  T · kv_rank · width + T · S · (2 · kv_rank + rotary_dim)
        """
        width = self.nope_dim + self.value_dim
        return T < S and (S - T) * self.kv_rank * width > T * S * (2 * self.kv_rank - width)

    def _expanded(self, linear: nn.Module, call: Call) -> Call:
        """The plain form: keys and values of every head."""
        latent, shared = call.key.split((self.kv_rank, self.rotary_dim), dim=-1)
        pairs = split(project(linear, latent[:, 0]), self.nope_dim + self.value_dim)  # (B, H, S, nope_dim + value_dim)
        own, value = pairs.split((self.nope_dim, self.value_dim), dim=-1)
        key = torch.cat([own, shared.expand(-1, own.shape[1], -1, -1)], -1)
        return Call(call.query, key, value, call.scoring, call.dropout)

    def _absorbed(self, weight: Tensor, call: Call) -> Absorbed:
        """The absorbed form: queries are mapped to the latents, which are key and value of all heads."""
        own, turned = call.query.split((self.nope_dim, self.rotary_dim), dim=-1)
        up, _ = self._halves(weight)
        query = torch.cat([_by_head(own, up), turned], -1)
        scoring = call.scoring
        if scoring.scale is None:  # of the plain form's keys, which have another width
            scoring = dataclasses.replace(scoring, scale=self.head_dim**-0.5)
        return Absorbed(query, call.key, call.key[..., : self.kv_rank], scoring, call.dropout)

    def read(self, modules: Modules, call: Call, read: Tensor) -> Tensor:
        if not isinstance(call, Absorbed):
            return read
        _, down = self._halves(modules["kv_b_proj"].weight)
        return _by_head(read, down.mT)

    def _halves(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The maps from latents to keys (H, nope_dim, kv_rank) and values (H, value_dim, kv_rank)."""
        maps = weight.view(-1, self.nope_dim + self.value_dim, self.kv_rank)
        return maps[:, : self.nope_dim], maps[:, self.nope_dim :]


def _normalized(norm: nn.Module | None, x: Tensor) -> Tensor:
    """`x` after the norm, which under autocast computes in the dtype of its own weight."""
    return x if norm is None else norm(x.to(getattr(norm, "weight", x).dtype)).to(x.dtype)


def _by_head(heads: Tensor, maps: Tensor) -> Tensor:
    """Heads (B, H, T, m), each multiplied by its own map (H, m, n): (B, H, T, n)."""
    B, H, T, m = heads.shape
    if B == 1:
        return torch.bmm(heads[0], maps)[None]
    flat = heads.transpose(0, 1).reshape(H, B * T, m)
    return torch.bmm(flat, maps).view(H, B, T, -1).transpose(0, 1)


def latent(
    kv_rank: int,
    *,
    nope_dim: int,
    rotary_dim: int = 0,
    value_dim: int | None = None,
    q_rank: int | None = None,
    norm: Callable[[int], nn.Module] | None = RMS,
) -> Latent:
    """Multi-head latent attention for a layer: `MultiHeadAttention(..., projections=latent(512, nope_dim=128, ...))`.

    >>> from headwise import MultiHeadAttention, rotary
    >>> layer = MultiHeadAttention(
    ...     64, 4, causal=True, bias=False, position=rotary(), projections=latent(32, nope_dim=16, rotary_dim=8)
    ... )
    >>> cache = layer.make_cache(1)
    >>> with torch.no_grad():
    ...     layer(torch.randn(1, 5, 64), cache=cache).shape
    torch.Size([1, 5, 64])
    >>> cache  # one vector of 32 + 8 numbers per token
    KVCache(B=1, Hkv=1, D=40, 5 tokens, room for 64, float32, cpu)

    Args:
        kv_rank: width of the latent, from which keys and values of all heads are made.
        nope_dim: width of the part of a head that has no position: each head's own part of a key.
        rotary_dim: width of the part that the layer's position turns, whose key is shared by all heads. A key is
            nope_dim + rotary_dim wide.
        value_dim: width of a value head, `nope_dim` by default.
        q_rank: width of the vector from which queries are made; by default they are made from the input.
        norm: a function from a width to a module, which normalizes the latent and the vector of queries; None for none.
    """
    value_dim = nope_dim if value_dim is None else value_dim
    sizes = {"kv_rank": kv_rank, "nope_dim": nope_dim, "value_dim": value_dim, "rotary_dim + 1": rotary_dim + 1}
    for name, size in sizes.items():
        check_size(name, size)
    return Latent(
        kv_rank, None if q_rank is None else check_size("q_rank", q_rank), nope_dim, rotary_dim, value_dim, norm
    )
