"""Where a cache keeps its tokens: any number of parts, each (B, heads, tokens, width), in one buffer or in pages.

    Storage      what a cache asks of it: write, read, make room, drop, reorder
    Contiguous   one buffer per part, with a row of tokens for every sample
    Format       how a part is stored: as it is, or in 8 bits with a scale for every token and head

`pages.py` has the storage in pages of a shared pool. A cache of keys and values has two parts; a cache of compressed
vectors has others. Storage counts tokens from the first one it still holds, and knows nothing of positions or masks.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from headwise.errors import CacheError, OptionError

Parts = tuple[Tensor, ...]  # each (B, heads, tokens, width)
Device = torch.device | str | None


class Format(abc.ABC):
    """How one part (B, heads, tokens, width) is stored. A subclass of your own works like ours."""

    name: str

    @abc.abstractmethod
    def encode(self, x: Tensor) -> Parts:
        """`x` as it is stored: tensors (B, heads, tokens, any width)."""

    @abc.abstractmethod
    def decode(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        """What `encode` returned, as a tensor in `dtype`."""

    def check(self, device: torch.device) -> None:  # noqa: B027 - most formats run everywhere
        """Raise if this device cannot store it."""


class Unchanged(Format):
    """Every number as it is."""

    name = "dense"

    def encode(self, x: Tensor) -> Parts:
        return (x,)

    def decode(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        return stored[0]


class Int8(Format):
    """Whole numbers from −127 to 127, times one float32 per token and head: an error of at most 1/254 of its largest.

    >>> x = torch.tensor([[[[1.0, -0.3, 0.25]]]])
    >>> [part.flatten().tolist() for part in Int8().encode(x)][0]
    [127, -38, 32]
    """

    name = "int8"
    largest = 127.0

    def encode(self, x: Tensor) -> Parts:
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = scales(precise, self.largest)
        return (precise / scale).round().clamp(-self.largest, self.largest).to(torch.int8), scale.to(torch.float32)

    def decode(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        codes, scale = stored
        precise = torch.promote_types(dtype, torch.float32)
        return (codes.to(precise) * scale).to(dtype)


class Float8(Format):
    """8-bit floats (e4m3), times one float32 per token and head: an error of at most 1/16 of each number, unless that
    is below 1/28,000 of the largest of its token and head."""

    name = "fp8"
    largest = 448.0

    def check(self, device: torch.device) -> None:
        try:
            torch.zeros(1, device=device).to(torch.float8_e4m3fn).to(torch.float32)
        except (AttributeError, RuntimeError, TypeError) as error:
            raise CacheError(
                f"storage='fp8': torch {torch.__version__} has no 8-bit floats (e4m3) on {device}. Use storage='int8'."
            ) from error

    def encode(self, x: Tensor) -> Parts:
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = scales(precise, self.largest)
        codes = (precise / scale).clamp(-self.largest, self.largest).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), scale.to(torch.float32)  # as bytes, which every indexing kernel supports

    def decode(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        codes, scale = stored
        precise = torch.promote_types(dtype, torch.float32)
        return (codes.view(torch.float8_e4m3fn).to(precise) * scale).to(dtype)


def scales(x: Tensor, largest: float) -> Tensor:
    """The factor per token and head, (..., 1), by which `x` is divided so that no number exceeds `largest`.

    It is rounded to float32, as it is stored, so that writing and reading use the same one.
    """
    peak = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    least = torch.finfo(torch.float32).tiny
    return (peak / largest).clamp(min=least).to(torch.float32).to(x.dtype)


FORMATS: dict[str, type[Format]] = {kind.name: kind for kind in (Unchanged, Int8, Float8)}


def format_of(storage: object) -> Format:
    """The format that a user asked for by name or as an object."""
    if storage is None:
        return Unchanged()
    if isinstance(storage, Format):
        return storage
    if isinstance(storage, str) and storage in FORMATS:
        return FORMATS[storage]()
    names = ", ".join(map(repr, FORMATS))
    raise OptionError(
        f"storage={storage!r}: expected {names}, a PagePool from layer.make_pool(...), or your own subclass of "
        f"headwise.layer.storage.Format."
    )


@dataclasses.dataclass(frozen=True)
class StorageLayout:
    """What is stored for every token: the (heads, width) of each part, in which format, dtype and device.

    `dtype` is that of the parts as they are written and read, in any format.
    """

    sizes: tuple[tuple[int, int], ...]
    format: Format
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, sizes: Sequence[tuple[int, int]], storage: object, dtype: torch.dtype | None, device: Device) -> Self:
        """The layout with the format that `storage` names."""
        found = format_of(storage)
        where = torch.empty(0, device=device)
        found.check(where.device)
        return cls(tuple(sizes), found, dtype or torch.get_default_dtype(), where.device)

    def buffers(self, rows: int, tokens: int) -> list[Tensor]:
        """Zeros (rows, heads, tokens, width) for everything that is stored."""
        samples = (torch.zeros(1, heads, 1, width, dtype=self.dtype, device=self.device) for heads, width in self.sizes)
        stored = self.encode(tuple(samples))
        return [x.new_zeros(rows, x.shape[1], tokens, x.shape[3]) for x in stored]

    def encode(self, parts: Parts) -> list[Tensor]:
        """Everything that is stored for these parts, in the order of `buffers`."""
        return [x for part in parts for x in self.format.encode(part)]

    def decode(self, stored: Sequence[Tensor]) -> Parts:
        """The parts, from what is stored for them."""
        count = len(stored) // len(self.sizes)
        groups = (tuple(stored[i : i + count]) for i in range(0, len(stored), count))
        return tuple(self.format.decode(group, self.dtype) for group in groups)


class Storage(abc.ABC):
    """The tokens of a batch, as a cache asks for them."""

    layout: StorageLayout
    views = False  # whether `read` returns views of buffers, which later writes may change

    @property
    @abc.abstractmethod
    def batch(self) -> int:
        """The number of samples."""

    @property
    @abc.abstractmethod
    def room(self) -> int:
        """How many tokens of a sample fit before `make_room` is needed."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """The memory of the tokens."""

    @abc.abstractmethod
    def write(self, parts: Parts, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Write the first `counts[b]` tokens of every sample b at `starts[b]`."""

    def write_at(self, parts: Parts, starts: Tensor) -> None:
        """The same for all tokens, with `starts` (B,) on the device; only for a static cache."""
        raise CacheError("a static cache keeps its tokens in one buffer. Leave out static=True, or storage=.")

    @abc.abstractmethod
    def read(self, tokens: int) -> Parts:
        """The first `tokens` tokens of every sample."""

    @abc.abstractmethod
    def make_room(self, tokens: int) -> None:
        """Make room for so many tokens of every sample; all that is stored stays."""

    @abc.abstractmethod
    def drop(self, tokens: int) -> int:
        """Forget up to that many of the first tokens of every sample; returns how many."""

    @abc.abstractmethod
    def reorder(self, samples: Tensor) -> None:
        """Replace sample i by sample `samples[i]`."""

    @abc.abstractmethod
    def copy(self) -> "Storage":
        """A copy that shares nothing with this one."""

    def truncate(self, lengths: Sequence[int]) -> None:  # noqa: B027 - a buffer keeps its room
        """Only the first `lengths[b]` tokens of each sample are needed from now on."""

    def is_inference(self) -> bool:
        """Whether it was made under torch.inference_mode()."""
        return False


class Contiguous(Storage):
    """One buffer (B, heads, room, width) for everything that is stored."""

    def __init__(self, layout: StorageLayout, batch: int, room: int) -> None:
        self.layout = layout
        self.buffers = layout.buffers(batch, room)
        self.views = isinstance(layout.format, Unchanged)

    @property
    def batch(self) -> int:
        return self.buffers[0].shape[0]

    @property
    def room(self) -> int:
        return self.buffers[0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.buffers)

    def write(self, parts: Parts, starts: Sequence[int], counts: Sequence[int]) -> None:
        T = parts[0].shape[2]
        even = len(set(starts)) == 1 and set(counts) == {T}
        for buffer, x in zip(self.buffers, self.layout.encode(parts), strict=True):
            if even:
                buffer[:, :, starts[0] : starts[0] + T] = x
                continue
            for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
                buffer[b, :, start : start + count] = x[b, :, :count]

    def write_at(self, parts: Parts, starts: Tensor) -> None:
        B, T = parts[0].shape[0], parts[0].shape[2]
        sample = torch.arange(B, device=starts.device)[:, None]
        place = starts[:, None] + torch.arange(T, device=starts.device)  # (B, T)
        for buffer, x in zip(self.buffers, self.layout.encode(parts), strict=True):
            buffer[sample, :, place] = x.transpose(1, 2)

    def read(self, tokens: int) -> Parts:
        return self.layout.decode([x[:, :, :tokens] for x in self.buffers])

    def make_room(self, tokens: int) -> None:
        for i, buffer in enumerate(self.buffers):
            B, H, S, D = buffer.shape
            self.buffers[i] = buffer.new_zeros(B, H, tokens, D)
            self.buffers[i][:, :, :S] = buffer

    def drop(self, tokens: int) -> int:
        self.buffers = [x[:, :, tokens:] for x in self.buffers]
        return tokens

    def reorder(self, samples: Tensor) -> None:
        self.buffers = [x.index_select(0, samples) for x in self.buffers]

    def reorder_in_place(self, samples: Tensor) -> None:
        """The same in the same buffers, because a graph refers to them."""
        for x in self.buffers:
            x.copy_(x.index_select(0, samples))

    def copy(self) -> "Contiguous":
        other = Contiguous.__new__(Contiguous)
        other.layout, other.views = self.layout, self.views
        other.buffers = [x.clone() for x in self.buffers]
        return other

    def is_inference(self) -> bool:
        return self.buffers[0].is_inference()
