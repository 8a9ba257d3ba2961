"""Masks of transformers as ours: it describes a mask as a function of indices, which we recognise or ask tile by tile.

transformers joins small functions (causal, sliding window, packed sequences, padding, ...) and hands the result to the
mask function of an attention implementation, with the places where queries and keys begin. Most are kinds of masks we
have, so that fast paths know them; any other function of indices is asked for the tiles that are needed.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise import masks
from headwise.errors import MaskError
from headwise.masks import Extent, Grid, Mask
from headwise.masks.placement import placed

IndexFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Indexed(Mask):
    """Any function of sample, head, query and key, the last two counted from where transformers begins."""

    function: IndexFunction
    batch: int
    first_query: int | Tensor
    first_key: int

    @property
    def extent(self) -> Extent:
        return Extent(batch=self.batch if self.batch > 1 else None)

    def visible(self, grid: Grid) -> Tensor:
        return self.function(grid.batch, grid.head, grid.row + self.first_query, grid.col + self.first_key)

    def __repr__(self) -> str:
        return f"transformers' {getattr(self.function, '__qualname__', 'function')}"


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: IndexFunction | None = None,
    attention_mask: "Tensor | Prepared | None" = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> "Prepared | Tensor | None":
    """The mask function of `attn_implementation="headwise"`: a mask of ours, or None where nothing is hidden."""
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

    if isinstance(attention_mask, Prepared):
        return attention_mask
    function: Any = causal_mask_function if mask_function is None else mask_function
    if use_vmap:  # a function that only takes single numbers: transformers knows how to ask it
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask, use_vmap=True,
            allow_is_causal_skip=False, device=device,
        )  # fmt: skip
    place = _Place(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    found = place.read(function)
    keys = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if keys is not None:
        keys = keys[:, kv_offset : kv_offset + kv_length].bool()
        if torch.compiler.is_compiling() or not bool(keys.all()):
            found = masks.padding(keys) if found is None else found & masks.padding(keys)
    if found is None:
        return None
    if not place.aligned and q_length == 1:  # one token against a cache of fixed size: a compiled step wants a tensor
        return found.to_tensor(q_length, kv_length, device=device).expand(batch_size, -1, -1, -1).contiguous()
    return Prepared(found, q_length, kv_length)


CAUSAL = masks.causal()  # one object, by which the attention function knows it


class Prepared:
    """A mask on its way from where transformers makes it to where it attends. `generate` may make it beforehand, and
    then asks of it what one asks of a tensor (B, 1, T, S)."""

    ndim = 4

    def __init__(self, mask: Mask, queries: int, keys: int) -> None:
        self.mask, self.queries, self.keys = mask, queries, keys

    def for_lengths(self, T: int, S: int) -> Mask:
        """The mask, refused where the model attends to other keys than it was made for."""
        if (self.queries, self.keys) != (T, S):
            raise MaskError(
                f"this model made its mask for (T, S) = {(self.queries, self.keys)} and attends with {(T, S)}: its "
                f"code changes the mask on the way, which attn_implementation='headwise' cannot follow. Use 'eager'."
            )
        return self.mask

    def contiguous(self) -> "Prepared":
        """Itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asking what it can do, not a model
            raise AttributeError(name)
        raise _edited(f"asks for its .{name}")

    def _refuse(self, *others: Any) -> Any:
        raise _edited("computes with it")

    __getitem__ = __setitem__ = __invert__ = __neg__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __and__ = __or__ = __bool__ = _refuse
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _edited(f"calls {getattr(function, '__name__', function)} on it")


class EditedMaskError(MaskError, AttributeError):
    """A model treats its mask as a tensor."""


def _edited(how: str) -> EditedMaskError:
    return EditedMaskError(
        f"this model works on its attention mask as a tensor ({how}), and attn_implementation='headwise' gives it a "
        f"rule. Use attn_implementation='eager', whose output_attentions=True gives dense weights."
    )


@dataclasses.dataclass(frozen=True)
class _Place:
    """How many queries and keys there are, and where they begin in the text."""

    batch: int
    T: int
    S: int
    first_query: int | Tensor
    first_key: int
    device: torch.device | str

    @property
    def aligned(self) -> bool:
        """Whether the last query stands at the last key, as our masks have it."""
        return isinstance(self.first_query, int) and self.first_query + self.T == self.first_key + self.S

    def read(self, function: IndexFunction) -> Mask | None:
        """A mask of ours that says the same."""
        name, inside = getattr(function, "__qualname__", ""), _closure(function)
        if name == "and_masks.<locals>.and_mask":
            return _all([self.read(part) for part in inside["mask_functions"]])
        if name == "or_masks.<locals>.or_mask":
            parts = [self.read(part) for part in inside["mask_functions"]]
            return None if any(part is None for part in parts) else _any(parts)  # type: ignore[arg-type]
        if name == "bidirectional_mask_function":
            return None
        if name == "causal_mask_function":
            return self._here(CAUSAL)
        if name == "sliding_window_overlay.<locals>.inner_mask":
            return self._here(masks.window(inside["sliding_window"] - 1, self.S + self.T))
        if name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            return self._here(masks.window(inside["sliding_window"]))
        if name == "packed_sequence_mask_function.<locals>.inner_mask" and self.aligned and not self.first_key:
            ids = inside["packed_sequence_mask"]
            if ids.shape[1] == self.S:
                return masks.documents(ids)
        return Indexed(function, self.batch, self.first_query, self.first_key)

    def _here(self, mask: Mask) -> Mask:
        """A mask of positions for queries that stand where these do."""
        if self.aligned:
            return mask
        steps = torch.arange(self.T, device=self.device)
        return placed(mask, (steps + (self.first_query - self.first_key))[None])


def _closure(function: IndexFunction) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals) if hasattr(function, "__closure__") else {}


def _all(parts: list[Mask | None]) -> Mask | None:
    found = None
    for part in parts:
        found = part if found is None else found if part is None else found & part
    return found


def _any(parts: list[Mask]) -> Mask:
    found = parts[0]
    for part in parts[1:]:
        found = found | part
    return found
