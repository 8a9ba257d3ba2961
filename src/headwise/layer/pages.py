"""Pages: tokens in blocks of a pool that many caches share.

    pool = layer.make_pool(pages=512, page_size=16)     memory for 512 · 16 tokens, once
    cache = layer.make_cache(batch, storage=pool)       takes pages as its samples grow, and gives them back

Samples of different lengths take only the pages they need, whereas one buffer has room for the longest in every row. A
page may belong to several samples: `reorder` copies tables of pages instead of tokens, and a shared page is copied when
one of its samples writes to it. Attention reads the pages of a batch gathered into one tensor.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import CacheError
from headwise.layer.storage import Contiguous, Device, Parts, Storage, StorageLayout
from headwise.shapes import check_size

EMPTY = 0  # a page of zeros, which stands for pages that a sample does not have


class PagePool:
    """Pages of `page_size` tokens, (pages, heads, page_size, width) for each part.

    >>> pool = PagePool(8, 4, ((2, 16), (2, 16)))
    >>> pool
    PagePool(8 pages of 4 tokens, 8 free, float32, cpu)

    Args:
        pages: how many there are.
        page_size: tokens in a page.
        sizes: (heads, width) of each part; keys and values are two parts.
        storage: "dense", "int8", "fp8" or a `Format`: how the parts are stored.
        device: where.
        dtype: of the parts.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        sizes: Sequence[tuple[int, int]],
        *,
        storage: object = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.pages, self.page_size = check_size("pages", pages), check_size("page_size", page_size)
        self.layout = StorageLayout.of(sizes, storage, dtype, device)
        self.buffers = self.layout.buffers(self.pages + 1, self.page_size)
        self._free = list(range(self.pages, EMPTY, -1))
        self._owners = [0] * (self.pages + 1)  # how many samples use each page

    @property
    def free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    @property
    def page_bytes(self) -> int:
        """The memory of one page."""
        return sum(x[0].numel() * x.element_size() for x in self.buffers)

    @property
    def nbytes(self) -> int:
        """The memory of all pages."""
        return sum(x.numel() * x.element_size() for x in self.buffers)

    def shared(self, page: int) -> bool:
        """Whether several samples use `page`."""
        return self._owners[page] > 1

    def check_free(self, wanted: int) -> None:
        """Raise unless `wanted` pages are free."""
        if wanted > self.free:
            raise CacheError(
                f"{wanted} pages of {self.page_size} tokens are needed, and {self.free} of the pool's {self.pages} are "
                f"free. Reset or drop a cache that is no longer needed, or make a larger pool."
            )

    def allocate(self) -> int:
        """A free page, filled with zeros."""
        self.check_free(1)
        page = self._free.pop()
        self._owners[page] = 1
        for buffer in self.buffers:
            buffer[page].zero_()
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Count one more sample for these `pages`."""
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Count one sample less for these `pages`; those without any are free again."""
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def copied(self, page: int) -> int:
        """A new page with the content of `page`, which is shared."""
        own = self.allocate()
        for buffer in self.buffers:
            buffer[own] = buffer[page]
        self.release([page])
        return own

    def __repr__(self) -> str:
        dtype, name = str(self.layout.dtype).removeprefix("torch."), self.layout.format.name
        stored = dtype if name == "dense" else f"{name} for {dtype}"
        return (
            f"PagePool({self.pages} pages of {self.page_size} tokens, {self.free} free, {stored}, {self.layout.device})"
        )


class Paged(Storage):
    """The tokens of a batch in pages of a pool. `tables[b]` lists the pages of sample b."""

    def __init__(self, pool: PagePool, batch: int) -> None:
        self.pool, self.layout = pool, pool.layout
        self.tables: list[list[int]] = [[] for _ in range(batch)]
        weakref.finalize(self, _release_all, pool, self.tables)  # a cache that is dropped gives its pages back

    @property
    def batch(self) -> int:
        return len(self.tables)

    @property
    def room(self) -> int:
        return max(map(len, self.tables), default=0) * self.pool.page_size

    @property
    def nbytes(self) -> int:
        """The memory of the pages in use here; a page that several samples share counts once."""
        return len({page for table in self.tables for page in table}) * self.pool.page_bytes

    def write(self, parts: Parts, starts: Sequence[int], counts: Sequence[int]) -> None:
        size = self.pool.page_size
        spans = [(s // size, -(-(s + n) // size) if n else 0) for s, n in zip(starts, counts, strict=True)]
        self._check_free(spans)
        for table, (first, stop) in zip(self.tables, spans, strict=True):
            for i in range(first, min(stop, len(table))):
                if self.pool.shared(table[i]):
                    table[i] = self.pool.copied(table[i])
            table.extend(self.pool.allocate() for _ in range(stop - len(table)))
        page, offset, sample, token = self._places(starts, counts)
        for buffer, x in zip(self.pool.buffers, self.layout.encode(parts), strict=True):
            buffer[page, :, offset] = x[sample, :, token]

    def _check_free(self, spans: Sequence[tuple[int, int]]) -> None:
        """Raise before anything is written if the pool has too few pages."""
        new = sum(max(0, stop - len(table)) for table, (_, stop) in zip(self.tables, spans, strict=True))
        written: dict[int, int] = {}  # a shared page is copied for every sample that writes, except the last owner
        for table, (first, stop) in zip(self.tables, spans, strict=True):
            for page in table[first:stop]:
                written[page] = written.get(page, 0) + 1
        new += sum(min(times, self.pool._owners[page] - 1) for page, times in written.items())
        self.pool.check_free(new)

    def _places(self, starts: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, ...]:
        """For every token to write: its page, its place there, its sample and its index among the new ones."""
        size = self.pool.page_size
        rows = [
            (table[(start + i) // size], (start + i) % size, b, i)
            for b, (table, start, count) in enumerate(zip(self.tables, starts, counts, strict=True))
            for i in range(count)
        ]
        return torch.tensor(rows, dtype=torch.long, device=self.layout.device).view(-1, 4).unbind(1)

    def read(self, tokens: int) -> Parts:
        return self.layout.decode([x[:, :, :tokens] for x in self._gathered(-(-tokens // self.pool.page_size))])

    def _gathered(self, pages: int) -> list[Tensor]:
        """The first pages of every sample side by side: (B, heads, pages · page_size, width)."""
        rows = [(table + [EMPTY] * pages)[:pages] for table in self.tables]
        index = torch.tensor(rows, dtype=torch.long, device=self.layout.device).view(self.batch, pages)
        return [x[index].transpose(1, 2).flatten(2, 3) for x in self.pool.buffers]

    def make_room(self, tokens: int) -> None:
        """Nothing: pages are taken when they are written."""

    def drop(self, tokens: int) -> int:
        whole = tokens // self.pool.page_size
        whole = min([whole, *map(len, self.tables)])
        for table in self.tables:
            self.pool.release(table[:whole])
            del table[:whole]
        return whole * self.pool.page_size

    def truncate(self, lengths: Sequence[int]) -> None:
        for table, length in zip(self.tables, lengths, strict=True):
            needed = -(-length // self.pool.page_size)
            self.pool.release(table[needed:])
            del table[needed:]

    def reorder(self, samples: Tensor) -> None:
        tables = [list(self.tables[i]) for i in samples.tolist()]
        for table in tables:
            self.pool.share(table)
        for table in self.tables:
            self.pool.release(table)
        self.tables[:] = tables

    def copy(self) -> Contiguous:
        pages = max(map(len, self.tables), default=0)
        other = Contiguous(self.layout, self.batch, 0)
        other.buffers = self._gathered(pages)
        return other

    def is_inference(self) -> bool:
        return self.pool.buffers[0].is_inference()


def _release_all(pool: PagePool, tables: list[list[int]]) -> None:
    for table in tables:
        pool.release(table)
    tables.clear()
