"""`KVCache`: the keys and values of all tokens so far, so that each token is projected only once.

    layer.make_cache(batch)                  grows with the text; under a sliding window, its size is bounded
    layer.make_cache(batch, capacity=4096)   one buffer of that many tokens
    ... static=True                          constant shapes, for torch.compile and CUDA graphs
    ... storage="int8"                       8 bits per number, or "fp8"; a PagePool keeps tokens in shared pages

This file counts tokens; `storage.py` and `pages.py` keep them. Keys are stored in order, so that the last query is at
the last key, as every mask assumes. If samples differ in length, or in a static cache, unused space follows the keys of
a sample; `Appended.positions` then holds the positions of its queries.
"""

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from headwise.errors import CacheError, ShapeError
from headwise.layer.pages import Paged, PagePool
from headwise.layer.storage import Contiguous, Format, Parts, Storage, StorageLayout
from headwise.masks import Lengths, Mask, reach_back
from headwise.masks.mask import check_placeable, placed, shifted
from headwise.shapes import as_numbers, check_flag, check_size
from headwise.weights import Scoring

DRAFT = 64  # tokens that can always be rolled back, even if a window drops old keys


class Memory(NamedTuple):
    """The projected keys and values (B, Hkv, S, D) of an encoder's output, from `layer.remember(memory)`."""

    key: Tensor
    value: Tensor


class Place(NamedTuple):
    """Where new tokens are among those in the cache."""

    positions: Tensor | None  # (B or 1, T): the positions of the new tokens; None: at the end
    filled: Tensor | None  # (B,): how many tokens of each sample are in use; None: all
    dropped: int = 0  # earlier tokens of the text that have been dropped


class Appended(NamedTuple):
    """All keys and values (B, Hkv, S, D) after an append, and how to read them; see `Place`."""

    key: Tensor
    value: Tensor
    positions: Tensor | None
    filled: Tensor | None
    dropped: int = 0

    def scoring(self, scoring: Scoring) -> Scoring:
        """A scoring of the whole text, restricted to these keys and placed at the positions of the queries."""
        mask, bias, score = scoring.mask, scoring.bias, scoring.applied
        if self.dropped:
            score = None if score is None else score.shifted(self.dropped)
            mask = None if mask is None else shifted(mask, self.dropped)
            bias = bias if bias is None or bias.shape[-1] == 1 else bias[..., self.dropped :]
        if self.positions is not None and self.filled is not None:
            real = Lengths(self.filled, "right")
            mask = real if mask is None else placed(mask, self.positions) & real
        return dataclasses.replace(scoring, mask=mask, bias=bias, positions=self.positions, score=score)


class KVCache:
    """Keys and values of one layer, (B, Hkv, capacity, D) each.

    >>> cache = KVCache(2, 4, 16)
    >>> key = value = torch.randn(2, 4, 5, 16)
    >>> cache.append(key, value).key.shape, cache.append(key, value).key.shape
    (torch.Size([2, 4, 5, 16]), torch.Size([2, 4, 10, 16]))
    >>> cache
    KVCache(B=2, Hkv=4, D=16, 10 tokens, room for 64, float32, cpu)

    Args:
        batch: number of samples.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        value_dim: width of a value head, `head_dim` by default; 0 if values are made from the keys.
        capacity: the most tokens it can hold; without it, the cache grows as needed.
        window: how many keys back a query can see, not counting itself; older keys are dropped, which bounds the size.
        static: keep shapes constant, and count tokens on the device.
        storage: "dense" by default; "int8" and "fp8" keep 8 bits per number; a `PagePool` keeps tokens in its pages; a
            `Format` of your own. Attention sees keys and values as they were stored, including the new ones, so that a
            text gives the same result token by token and in chunks.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        capacity: int | None = None,
        window: int | None = None,
        static: bool = False,
        storage: "str | Format | PagePool | None" = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        B, Hkv, D = (check_size(name, size) for name, size in sizes.items())
        self.capacity = None if capacity is None else check_size("capacity", capacity)
        self.window = None if window is None else check_size("window + 1", window + 1) - 1
        if capacity is not None and window is not None:
            raise CacheError(
                f"KVCache(capacity={capacity}, window={window}): under a window old keys are dropped, so there is "
                f"no limit; pass one of the two."
            )
        static = check_flag("static", static)
        if static and (capacity is None or window is not None):
            raise CacheError(
                f"KVCache(static=True, capacity={capacity}, window={window}): a static cache needs a capacity and "
                f"drops nothing. Pass capacity=, without window=; the layer's own window mask still applies."
            )
        self.static = static
        width = D if value_dim is None else check_size("value_dim + 1", value_dim + 1) - 1
        self._storage = self._make_storage(B, ((Hkv, D), (Hkv, width)), storage, dtype, device)
        self._lengths = [0] * B  # of each sample, including dropped keys
        self._dropped = 0  # keys that left the window, the same number for all samples
        self.rewrites = 0  # grows when keys that maps refer to may be overwritten
        # A static cache counts here, on the device, so that a graph can update it.
        self._filled = torch.zeros(B, dtype=torch.int64, device=self.device) if static else None

    def _make_storage(
        self,
        batch: int,
        sizes: Sequence[tuple[int, int]],
        storage: object,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> Storage:
        """Storage for the parts of these (heads, width): keys and values here, others in a subclass."""
        if not isinstance(storage, PagePool):
            return Contiguous(StorageLayout.of(sizes, storage, dtype, device), batch, self.capacity or 0)
        if self.static:
            raise CacheError(
                "KVCache(static=True, storage=PagePool): tables of pages are kept by the host, so a graph cannot "
                "extend them. Use static=True without a pool, or a pool without static=True."
            )
        layout = storage.layout
        if layout.sizes != tuple(sizes):
            raise CacheError(
                f"this pool has pages for parts of (heads, width) = {layout.sizes}, but this cache stores "
                f"{tuple(sizes)}. Make a pool that fits with layer.make_pool(...)."
            )
        return Paged(storage, batch)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sample so far."""
        return self._lengths if self._filled is None else self._filled.tolist()

    @property
    def batch(self) -> int:
        """The number of samples."""
        return self._storage.batch

    @property
    def room(self) -> int:
        """How many tokens of a sample fit before the cache has to grow."""
        return self._storage.room

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""
        return self._storage.layout.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values as they are written and read."""
        return self._storage.layout.dtype

    @property
    def nbytes(self) -> int:
        """The memory it uses, in bytes; in a pool, that of its pages."""
        return self._storage.nbytes

    @property
    def overwrites(self) -> bool:
        """Whether a rollback or reset may change keys that were handed out, since they are views of the buffer."""
        return self._storage.views

    def text_length(self, T: int, lengths: Sequence[int] | Tensor | None = None) -> int:
        """The number of keys that masks count after T more tokens, or `lengths` of them: all tokens so far, or the
        capacity of a static cache."""
        if self._filled is not None:
            return self.room
        return max(n + m for n, m in zip(self._lengths, self._counts(lengths, T), strict=True))

    def preview(self) -> Self:
        """A copy to try a call on without changing this cache."""
        other = copy.copy(self)
        other._lengths = list(self._lengths)
        other._storage = self._storage.copy()
        other._filled = None if self._filled is None else self._filled.clone()
        return other

    def next_positions(self, T: int) -> Tensor:
        """The positions of the next T tokens in the text: (T,) if all samples have one length, else (B, T)."""
        steps = torch.arange(T, device=self.device)
        if self._filled is not None:
            return self._filled[:, None] + steps
        if len(set(self._lengths)) == 1:
            return steps + self._lengths[0]
        return torch.tensor(self._lengths, device=self.device)[:, None] + steps

    def check_mask(self, mask: Mask | None, lengths: Sequence[int] | Tensor | None) -> None:
        """Raise if the mask lets queries see keys that this cache drops, or if samples of these `lengths` differ in
        position and the mask cannot be placed for each of them."""
        if self.window is not None and ((reach := reach_back(mask)) is None or reach > self.window):
            raise CacheError(
                f"this cache drops keys more than {self.window} before a query, and here a query sees "
                f"{'all' if reach is None else reach} keys before it. Make the cache with the layer that sees furthest "
                f"back, or with capacity=, so that nothing is dropped."
            )
        if mask is None:
            return
        if self._filled is not None or lengths is not None or len(set(self._lengths)) > 1:
            check_placeable(mask)

    def append(self, key: Tensor, value: Tensor, lengths: Sequence[int] | Tensor | None = None) -> Appended:
        """Add new keys and values (B, Hkv, T, D), and return all of them.

        Args:
            key: new keys.
            value: new values.
            lengths: (B,), how many of the T tokens of each sample are real, the rest being padding on the right; all by
                default.
        """
        self._check(key, value)
        found, place = self._store((key, value), lengths)
        return Appended(found[0], found[1], *place)

    def _store(self, parts: Parts, lengths: Sequence[int] | Tensor | None) -> tuple[Parts, Place]:
        """Add new tokens, given as parts (B, heads, T, width), and return all of them."""
        if self._filled is not None:
            return self._store_static(parts, lengths)
        T = parts[0].shape[2]
        new = self._counts(lengths, T)
        after = [n + m for n, m in zip(self._lengths, new, strict=True)]
        self._make_room(max(after) - self._dropped)
        before, S = [n - self._dropped for n in self._lengths], max(after) - self._dropped
        with torch.no_grad():
            self._storage.write(parts, before, new)
            found = self._storage.read(S)
        self._lengths = after
        return found, self._place(before, new, T)

    def _place(self, before: list[int], new: list[int], T: int) -> Place:
        """Where T queries are, of which `new` are real, after `before` keys of each sample."""
        if len(set(before)) == 1 and set(new) == {T}:
            return Place(None, None, self._dropped)
        starts = torch.tensor(before, device=self.device)
        filled = starts + torch.tensor(new, device=self.device)
        return Place(starts[:, None] + torch.arange(T, device=self.device), filled, self._dropped)

    def latest(self, T: int, lengths: Sequence[int] | Tensor | None = None) -> Appended:
        """All keys and values as the last T tokens see them: what `append` returned when it added them.

        Args:
            T: how many tokens.
            lengths: as in `append`.
        """
        if self._filled is not None:
            new = T if lengths is None else self._counted(lengths, T, self.device)
            starts = self._filled - new
            key, value = self._storage.read(self.room)
            return Appended(key, value, starts[:, None] + torch.arange(T, device=self.device), starts + new)
        counts = self._counts(lengths, T)
        before = [n - m - self._dropped for n, m in zip(self._lengths, counts, strict=True)]
        if min(before) < 0:
            raise CacheError(
                f"the cache holds {self._lengths} tokens, and the queries are the last {T} of them. First call the "
                f"layer that appends these tokens, layer(x, cache=cache)."
            )
        key, value = self._storage.read(max(self._lengths) - self._dropped)
        return Appended(key, value, *self._place(before, counts, T))

    def latest_positions(self, T: int, lengths: Sequence[int] | Tensor | None = None) -> Tensor:
        """The positions of the last T tokens in the text, (T,) or (B, T); `lengths` as in `append`."""
        steps = torch.arange(T, device=self.device)
        if self._filled is not None:
            return (self._filled - (T if lengths is None else self._counted(lengths, T, self.device)))[:, None] + steps
        starts = [n - m for n, m in zip(self._lengths, self._counts(lengths, T), strict=True)]
        if len(set(starts)) == 1:
            return steps + starts[0]
        return torch.tensor(starts, device=self.device)[:, None] + steps

    def _store_static(self, parts: Parts, lengths: Sequence[int] | Tensor | None) -> tuple[Parts, Place]:
        assert self._filled is not None and self.capacity is not None  # noqa: S101, PT018 - a static cache has both
        first = parts[0]
        T, starts = first.shape[2], self._filled.clone()
        if first.is_cpu and not torch.compiler.is_compiling() and int(starts.max()) + T > self.capacity:
            raise _full(int(starts.max()) + T, self.capacity)
        new = T if lengths is None else self._counted(lengths, T, first.device)
        with torch.no_grad():
            self._storage.write_at(parts, starts)
            found = self._storage.read(self.capacity)
        self._filled += new
        positions = starts[:, None] + torch.arange(T, device=first.device)
        return found, Place(positions, starts + new)

    def _make_room(self, wanted: int) -> None:
        """Make room for `wanted` tokens per sample, first by dropping those that no later query can see."""
        if self.capacity is not None and wanted > self.capacity:
            raise _full(wanted, self.capacity)
        if wanted <= self.room:
            return
        room = max(wanted, 2 * self.room, 64)
        if self.window is not None:
            seen = min(self._lengths) - self._dropped
            gone = self._storage.drop(max(0, seen - self.window - DRAFT))
            self._dropped += gone
            wanted -= gone
            room = max(wanted, min(max(2 * self.room, 64), 2 * (self.window + DRAFT)))
        self._storage.make_room(room)

    def reorder(self, samples: Tensor | Sequence[int]) -> None:
        """Replace sample i by sample `samples[i]`, as beam search needs."""
        index = as_numbers("reorder(samples)", samples, self.device)
        if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
            raise ShapeError(
                f"reorder(samples of shape {tuple(index.shape)} and {index.dtype}): expected whole numbers, one per "
                f"sample."
            )
        chosen = index.tolist() if self._filled is None else None
        if chosen is not None and not all(0 <= i < self.batch for i in chosen):
            raise ShapeError(f"reorder({chosen}): the cache has samples 0 to {self.batch - 1}.")
        if self._filled is not None:  # in place, because a graph refers to these buffers
            if index.shape[0] != self.batch:
                raise ShapeError(f"reorder of {index.shape[0]} samples: a static cache keeps its {self.batch}.")
            assert isinstance(self._storage, Contiguous)  # noqa: S101 - a static cache has one buffer
            self._storage.reorder_in_place(index)
            self._filled.copy_(self._filled.index_select(0, index))
            self.rewrites += 1
            return
        self._storage.reorder(index)
        self._lengths = [self._lengths[i] for i in chosen or []]

    def rollback(self, tokens: int | Sequence[int] | Tensor) -> None:
        """Remove the last `tokens` tokens, such as a rejected draft: one number, or one for each sample.

        Under a window, at least the last 64 tokens can be removed.
        """
        whole = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        counts = list(whole) if isinstance(whole, Sequence) else [whole] * self.batch
        if len(counts) != self.batch or not all(isinstance(n, int) and n >= 0 for n in counts):
            raise CacheError(f"rollback({tokens!r}): expected a number from 0 up, or {self.batch} of them.")
        kept = [n - m for n, m in zip(self.lengths, counts, strict=True)]
        least = self._dropped + (self.window or 0) if self._dropped else 0
        if min(kept) < least:
            raise CacheError(
                f"rollback({tokens!r}) of a cache with {self.lengths} tokens: not before token {least}"
                + (f", because the window of {self.window} has dropped older keys." if least else ".")
            )
        self.rewrites += 1
        if self._filled is None:
            self._lengths = kept
            self._storage.truncate([n - self._dropped for n in kept])
        else:
            self._filled.copy_(torch.tensor(kept, device=self._filled.device))

    def reset(self) -> None:
        """Remove all tokens. Buffers stay allocated; pages go back to their pool."""
        self._lengths, self._dropped = [0] * self.batch, 0
        self._storage.truncate(self._lengths)
        self.rewrites += 1
        if self._filled is not None:
            self._filled.zero_()

    def _counts(self, lengths: Sequence[int] | Tensor | None, T: int) -> list[int]:
        if lengths is None:
            return [T] * self.batch
        counts = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        counts = list(counts) if isinstance(counts, Iterable) else [counts]
        if len(counts) != self.batch or not all(isinstance(n, int) and 0 <= n <= T for n in counts):
            raise CacheError(
                f"lengths={lengths}: expected {self.batch} whole numbers from 0 to {T}, the real tokens of each sample."
            )
        return counts

    def _counted(self, lengths: Sequence[int] | Tensor, T: int, device: torch.device) -> Tensor:
        """`lengths` on the device; the values are checked only if that needs no synchronization."""
        if torch.compiler.is_compiling() or (isinstance(lengths, Tensor) and not lengths.is_cpu):
            return torch.as_tensor(lengths, device=device)
        return torch.tensor(self._counts(lengths, T), device=device)

    def _check(self, key: Tensor, value: Tensor) -> None:
        B, layout = self.batch, self._storage.layout
        given = tuple((x.shape[0], x.shape[1], x.shape[3]) for x in (key, value))
        if given != tuple((B, heads, width) for heads, width in layout.sizes):
            Hkv, D = layout.sizes[0]
            raise CacheError(
                f"new keys of shape {tuple(key.shape)} do not fit a cache for (B, Hkv, D) = {(B, Hkv, D)}. Make one "
                f"for this layer and batch with layer.make_cache({key.shape[0]})."
            )
        if torch.compiler.is_compiling():
            return
        if self._storage.is_inference() and not torch.is_inference_mode_enabled():
            raise CacheError(
                "this cache was made or grown under torch.inference_mode(), and torch forbids writing to it outside. "
                "Stay in that mode, or use torch.no_grad() throughout."
            )
        if key.dtype != self.dtype or key.device != self.device:
            raise CacheError(
                f"new keys are {key.dtype} on {key.device}, and the cache is {self.dtype} on {self.device}. "
                f"Make it with layer.make_cache(..., dtype={key.dtype}, device={str(key.device)!r})."
            )
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise CacheError(
                "a cache stores no gradients, and these keys require one. Call the layer under torch.no_grad() to "
                "generate, or without a cache to train."
            )

    def __repr__(self) -> str:
        layout = self._storage.layout
        Hkv, D = layout.sizes[0]
        known = sorted(set(self._lengths))
        length = f"{known[0]}" if len(known) == 1 else f"{known[0]} to {known[-1]}"
        count = "static" if self.static else f"{length} tokens"
        window = f", window={self.window}" if self.window is not None else ""
        dtype = str(self.dtype).removeprefix("torch.")
        stored = dtype if layout.format.name == "dense" else f"{layout.format.name} for {dtype}"
        pages = f" in pages of {self._storage.pool.page_size}" if isinstance(self._storage, Paged) else ""
        return (
            f"KVCache(B={self.batch}, Hkv={Hkv}, D={D}, {count}, room for {self.room}{window}, {stored}{pages}, "
            f"{self.device})"
        )


def _full(wanted: int, capacity: int) -> CacheError:
    return CacheError(
        f"the cache holds {capacity} tokens and {wanted} are needed. Make it with a larger capacity, or without one so "
        f"that it grows."
    )
