"""Layers that share keys and values: the first makes and caches them, later ones make queries only (Gemma 3n).

    y = first(x, cache=cache)        the first layer appends its keys and values
    z = later(y, cache)              a later one reads them; its queries are the last tokens of the cache

Without a cache, as in training, `memory = first.remember(x)` makes them once, for `first(x, memory)` and
`later(y, memory)`.
"""

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.layer.options import Widths
from headwise.layer.projections import Modules, Projections, Three, project, split


class QueriesOnly(Projections):
    """One linear map, `q_proj`. Keys and values are those of another layer; made by `queries_only`."""

    cut_by_heads = True

    def fitted(self, widths: Widths) -> "QueriesOnly":
        """The same rule for heads of this width."""
        made = QueriesOnly()
        made.head_dim = widths.head_dim
        return made

    def __repr__(self) -> str:
        return "queries_only()"

    def modules(
        self,
        widths: Widths,
        biases: Mapping[str, bool],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> dict[str, nn.Module]:
        """The map of queries."""
        return {"q_proj": nn.Linear(widths.d_in, widths.num_heads * widths.head_dim, biases["q"], device, dtype)}

    def queries(self, modules: Modules, x: Tensor) -> Tensor:
        """Query heads (B, H, T, D)."""
        q = project(modules["q_proj"], x)
        return split(q, self.head_dim or q.shape[-1])

    def keys_and_values(self, modules: Modules, key: Tensor, value: Tensor) -> NoReturn:
        """Refused: there are none."""
        raise OptionError(
            "this layer makes queries only. Pass the keys and values of another layer: mha(x, cache), with the cache "
            "that layer has appended to, or mha(x, memory), with memory = layer.remember(...)."
        )

    def heads(self, modules: Modules, x: Tensor) -> Three:
        """Refused as well."""
        return self.keys_and_values(modules, x, x)


def queries_only() -> Projections:
    """Projections of a layer that reads the keys and values of another: `MultiHeadAttention(..., projections=...)`.

    >>> from headwise import MultiHeadAttention
    >>> first = MultiHeadAttention(32, 4, causal=True)
    >>> later = MultiHeadAttention(32, 4, causal=True, projections=queries_only())
    >>> x, cache = torch.randn(2, 5, 32), first.make_cache(2)
    >>> with torch.no_grad():
    ...     y = later(first(x, cache=cache), cache)
    >>> y.shape
    torch.Size([2, 5, 32])
    """
    return QueriesOnly()
