"""The compiled loop: sums of attention weights on the CPU, in one pass that never writes scores to memory.

`walk.cpp` is the loop, `build.py` builds and loads it. What it does not support is computed tile by tile.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.masks.lowering import simplify
from headwise.weights.compiled.build import library
from headwise.weights.scoring import KeyBias, Relative, Slopes
from headwise.weights.source import Source
from headwise.weights.structure import Structure, structure_of
from headwise.weights.sums import CellSum, KeySum, Largest, OctaveSum, ProbeSum, RowSum, Sum

ABOUT = "the compiled loop, in one pass over the weights"
TASKS = 32  # at least this many, for many threads; it does not depend on their number, so no sum does
LEAST_ROWS = 1024  # of a task: with fewer, arranging the keys would take a noticeable part of its time
STRIP = 64  # queries; a task is a multiple of the strips of the loop
ALONE = 2**22  # with fewer multiply-adds, starting another thread takes longer than it saves
HIDDEN = -1e30  # log of a hidden weight
POINTER, WHOLE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class WalkRule(ctypes.Structure):
    """`Rule` of walk.cpp."""

    _fields_ = (
        *((name, WHOLE) for name in ("left", "right", "first", "stop")),
        *((name, POINTER) for name in ("keys", "open", "documents", "asked", "offered")),
        *((f"{name}_stride", WHOLE) for name in ("keys", "open", "documents", "asked", "offered")),
    )


class Probe(ctypes.Structure):
    """`Probe` of walk.cpp."""

    _fields_ = (("rule", WalkRule), ("mass", POINTER))


class Column(ctypes.Structure):
    """`Column` of walk.cpp."""

    _fields_ = (("weights", POINTER), ("total", POINTER))


class Picture(ctypes.Structure):
    """`Picture` of walk.cpp."""

    _fields_ = (
        *((name, WHOLE) for name in ("column", "rows", "cols", "first", "stop")),
        *((name, POINTER) for name in ("row_cell", "col_cell", "cells")),
    )


class Walk(ctypes.Structure):
    """`Walk` of walk.cpp."""

    _fields_ = (
        *((name, POINTER) for name in ("query", "key", "normalizer", "position", "slopes", "key_bias")),
        *((f"{name}_{axis}", WHOLE) for name in ("query", "key") for axis in ("batch", "head", "row")),
        *((name, WHOLE) for name in ("B", "H", "group", "T", "S", "D")),
        ("scale", REAL),
        ("softcap", REAL),
        ("mask", WalkRule),
        *((name, POINTER) for name in ("mass", "entropy", "distance", "best", "running_max", "running_sum")),
        ("best_key", POINTER),
        ("top", WHOLE),
        ("top_best", POINTER),
        ("top_key", POINTER),
        ("octaves", WHOLE),
        ("histogram", POINTER),
        *((name, WHOLE) for name in ("probe_count", "column_count", "picture_count")),
        *((name, POINTER) for name in ("probes", "columns", "pictures")),
        ("chunk", WHOLE),
        ("threads", WHOLE),
    )


def refuses(source: Source) -> str | None:
    """Why the compiled loop cannot walk over this source, or None."""
    scoring, relative = source.scoring, source.scoring.relative
    if not source.query.is_cpu:
        return "it runs on the CPU"
    if source.precise != torch.float32:
        return f"it computes in float32, and these weights need {str(source.precise).removeprefix('torch.')}"
    if scoring.score is not None:
        return "it does not know the score function"
    relative = relative.inner if type(relative) is KeyBias else relative
    if relative is not None and type(relative) is not Slopes:
        return f"it does not know the positions {type(relative).__name__}"
    if scoring.positions is not None:
        return "the queries are not at the end of the keys"
    if source.first_key or source.key.shape[2] != source.frame.S:
        return "the keys are on several ranks"
    if _structure(source) is None:
        return f"it does not know the mask {source.mask!r}"
    loaded = library()
    return loaded if isinstance(loaded, str) else None


def _structure(source: Source) -> Structure | None:
    return structure_of(simplify(source.mask, source.frame.T, source.frame.S), source)


def supports(part: Sum, source: Source) -> bool:
    """Whether the loop can compute this sum."""
    return not isinstance(part, ProbeSum) or structure_of(part.probe, source) is not None


def add(source: Source, normalizer: Tensor, sums: Sequence[Sum]) -> None:
    """Add to the tensors of all sums. `normalizer` is (B·H, T), finite."""
    while sums:
        call = LoopCall(source, normalizer)
        sums = [part for part in sums if not call.ask(part)]
        call.run()


def log_sum_exp(source: Source) -> Tensor:
    """The row log-sum-exp (B, H, T) without sinks; minus infinity for a row that sees nothing."""
    call = LoopCall(source, None)
    best, total = call.new(fill=HIDDEN), call.new()
    call.set("running_max", best)
    call.set("running_sum", total)
    call.run()
    return torch.where(total > 0, best + total.log(), -torch.inf).view(source.shape[:3])


class LoopCall:
    """One call of the loop: its arguments, the tensors they point to, and what to do with the results.

    Args:
        source: what to walk over.
        normalizer: (B·H, T), finite; None for raw scores.
    """

    def __init__(self, source: Source, normalizer: Tensor | None) -> None:
        self.source, self.walk = source, Walk()
        self.kept: list[object] = []
        self.after: list[Callable[[], object]] = []
        self.rows: dict[str, Tensor] = {}
        self.columns: list[Column] = []
        self.by_query: list[Tensor | None] = []  # of each column
        self.totals: dict[int, Tensor] = {}  # by column
        self.probes: list[Probe] = []
        self.pictures: list[Picture] = []
        loaded = library()
        assert not isinstance(loaded, str)  # noqa: S101 - `refuses` was asked
        self.loaded: ctypes.CDLL = loaded
        self.panel = loaded.headwise_panel()
        self._sizes()
        self._inputs(normalizer)

    def _sizes(self) -> None:
        B, H, T, S = self.source.shape
        D = self.source.query.shape[3]
        chunks = -(-TASKS // max(1, B * H))
        rows = max(LEAST_ROWS, -(-T // chunks))
        self.chunk = -(-rows // STRIP) * STRIP
        self.chunks = max(1, -(-T // self.chunk))
        threads = 1 if B * H * T * S * D < ALONE else torch.get_num_threads()
        sizes = {"B": B, "H": H, "group": self.source.group, "T": T, "S": S, "D": D}
        for name, value in {**sizes, "chunk": self.chunk, "threads": threads}.items():
            setattr(self.walk, name, value)

    def _inputs(self, normalizer: Tensor | None) -> None:
        source, scoring = self.source, self.source.scoring
        for name in ("query", "key"):
            tensor = getattr(source, name).detach().float()
            tensor = tensor if tensor.stride(3) == 1 else tensor.contiguous()
            self.set(name, tensor)
            for axis, stride in zip(("batch", "head", "row"), tensor.stride(), strict=False):
                setattr(self.walk, f"{name}_{axis}", stride)
        self.set("position", source.positions().int())
        if normalizer is not None:
            self.set("normalizer", normalizer.float().contiguous())
        self._relative(scoring.relative)
        self.walk.scale, self.walk.softcap = scoring.scale_for(source.query.shape[3]), scoring.softcap or 0.0
        structure = _structure(source)
        assert structure is not None  # noqa: S101 - `refuses` was asked
        self.walk.mask = self._rule(structure, (0, source.frame.S))

    def _relative(self, relative: Relative | None) -> None:
        source = self.source
        if type(relative) is KeyBias:
            table = relative.table.detach()[source.axis("batch")[:, None], source.axis("head")].float()
            table = torch.nn.functional.pad(table.clamp(min=HIDDEN), (0, self.panel))
            self.set("key_bias", table.contiguous())
            relative = relative.inner
        if relative is not None:
            self.set("slopes", relative.table.detach().float()[source.axis("head")].contiguous())

    def new(self, *tail: int, fill: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor (B·H, T) or (B·H, *tail)."""
        B, H, T, _ = self.source.shape
        return torch.full((B * H, *(tail or (T,))), fill, dtype=dtype)

    def point(self, tensor: Tensor) -> int:
        """The address of a tensor, which is kept until the call ends."""
        self.kept.append(tensor)
        return tensor.data_ptr()

    def set(self, name: str, tensor: Tensor) -> None:
        """Make an argument of the loop point to a tensor."""
        setattr(self.walk, name, self.point(tensor))

    def _rule(self, structure: Structure, span: tuple[int, int]) -> WalkRule:
        first, stop = max(span[0], structure.first), min(span[1], structure.stop)
        if structure.keys is not None:  # blocks without an allowed key are skipped
            seen = structure.keys.any(0).nonzero()[:, 0]
            first, stop = (max(first, int(seen[0])), min(stop, int(seen[-1]) + 1)) if len(seen) else (0, 0)
        rule = WalkRule(structure.left, structure.right, first, max(first, stop))
        asked, offered = structure.match or (None, None)
        if asked is not None and offered is not None:
            asked, offered = _codes(asked, offered)
        documents = None if structure.documents is None else _codes(structure.documents)[0]
        tables = {"keys": structure.keys, "open": structure.open_keys}
        tables |= {"documents": documents, "asked": asked, "offered": offered}
        for name, table in tables.items():
            if table is not None:
                nothing = 0 if name in ("keys", "open") else -1
                padded = torch.nn.functional.pad(table.int(), (0, self.panel), value=nothing)
                setattr(rule, name, self.point(padded))
                setattr(rule, f"{name}_stride", 0 if len(padded) == 1 else padded.shape[1])
        return rule

    # What is asked of the loop. Results are new tensors, which are added to those of the readings afterwards.

    def ask(self, part: Sum) -> bool:
        """Have the loop compute a sum; False if that needs another call."""
        if isinstance(part, Largest):
            return self._largest(part)
        if isinstance(part, RowSum):
            self._row_sum(part)
        elif isinstance(part, ProbeSum):
            self._probe(part)
        elif isinstance(part, OctaveSum):
            self._octaves(part)
        elif isinstance(part, KeySum):
            self._key_sum(part)
        else:
            self._cells(part)
        return True

    def _row_sum(self, part: RowSum) -> None:
        if part.kind not in self.rows:
            self.rows[part.kind] = self.new()
            self.set(part.kind, self.rows[part.kind])
        found = self.rows[part.kind]
        self.after.append(lambda: part.into.add_(found))

    def _probe(self, part: ProbeSum) -> None:
        frame = self.source.frame
        if part.probe.hides_nothing(frame.T, frame.S):
            self._row_sum(RowSum("mass", part.into))
            return
        structure, found = structure_of(part.probe, self.source), self.new()
        assert structure is not None  # noqa: S101 - `supports` was asked
        span = part.probe.key_range(*frame.span(slice(None)), frame.T, frame.S)
        self.probes.append(Probe(self._rule(structure, span), self.point(found)))
        self.after.append(lambda: part.into.add_(found))

    def _largest(self, part: Largest) -> bool:
        several = part.best.dim() == 3
        names = ("top_best", "top_key") if several else ("best", "best_key")
        if getattr(self.walk, names[0]) is not None:
            return False
        self.walk.top = part.best.shape[2] if several else self.walk.top
        for name, tensor in zip(names, (part.best, part.key), strict=True):  # raised in place
            assert tensor.is_contiguous()  # noqa: S101 - readings make them
            self.set(name, tensor)
        return True

    def _octaves(self, part: OctaveSum) -> None:
        octaves = part.into.shape[1]
        if "histogram" not in self.rows:
            found = self.rows["histogram"] = self.new(octaves, dtype=torch.float64).repeat(self.chunks, 1, 1)
            self.set("histogram", found)
            self.walk.octaves = octaves
        self.after.append(lambda: part.into.add_(self.rows["histogram"].sum(0)))

    def _column(self, by_query: Tensor | None) -> int:
        """The index of the column statistic with these weights of the queries."""
        index = next((i for i, known in enumerate(self.by_query) if known is by_query), None)
        if index is not None:
            return index
        weights = None if by_query is None else self.point(by_query.float().contiguous())
        self.by_query.append(by_query)
        self.columns.append(Column(weights, None))
        return len(self.columns) - 1

    def _key_sum(self, part: KeySum) -> None:
        index = self._column(part.by_query)
        if index not in self.totals:
            found = self.new(self.source.shape[3], dtype=torch.float64).repeat(self.chunks, 1, 1)
            self.totals[index], self.columns[index].total = found, self.point(found)
        self.after.append(lambda: part.into.add_(self.totals[index].sum(0)))

    def _cells(self, part: CellSum) -> None:
        """A picture. Each chunk of queries writes its rows that much lower, so that no two chunks write to one row."""
        _, R, C = part.into.shape
        row, col = part.row.int().contiguous(), torch.nn.functional.pad(part.col.int(), (0, self.panel), value=-1)
        found = self.new(R + self.chunks - 1, C, dtype=torch.float64)
        column = -1 if part.largest else self._column(part.by_query)
        inside = (part.col >= 0).nonzero()
        span = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
        size = (column, R + self.chunks - 1, C, *span)
        self.pictures.append(Picture(*size, self.point(row), self.point(col), self.point(found)))
        self.after.append(lambda: self._add_cells(part, found, row))

    def _add_cells(self, part: CellSum, found: Tensor, row: Tensor) -> None:
        T = len(row)
        for chunk in range(self.chunks):
            first, last = int(row[chunk * self.chunk]), int(row[min((chunk + 1) * self.chunk, T) - 1]) + 1
            into, from_chunk = part.into[:, first:last], found[:, first + chunk : last + chunk]
            if part.largest:
                torch.maximum(into, from_chunk, out=into)
            else:
                into.add_(from_chunk)

    def run(self) -> None:
        """Walk, and add the results."""
        self._list("probe", (Probe * len(self.probes))(*self.probes))
        self._list("column", (Column * len(self.columns))(*self.columns))
        self._list("picture", (Picture * len(self.pictures))(*self.pictures))
        self.loaded.headwise_walk(ctypes.byref(self.walk))
        for step in self.after:
            step()

    def _list(self, name: str, array: "ctypes.Array[Any]") -> None:
        self.kept.append(array)
        setattr(self.walk, f"{name}_count", len(array))
        setattr(self.walk, f"{name}s", ctypes.addressof(array))


def _codes(*tables: Tensor) -> list[Tensor]:
    """The tables with small whole numbers in place of their values; equal values get equal numbers."""
    _, names = torch.unique(torch.cat([x.flatten() for x in tables]), return_inverse=True)
    parts = names.split([x.numel() for x in tables])
    return [part.view(x.shape) for part, x in zip(parts, tables, strict=True)]
