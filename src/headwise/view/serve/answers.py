"""Answers about places of a map: a tile, a row, a column, one weight. All exact, unless a tile says otherwise."""

import ctypes
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.view.cell import cell
from headwise.view.tiling import SIDE, pixels, span_at, tile
from headwise.weights import AttentionMap

MOST = 256  # entries of a row or column, strongest first
# A pixel of more queries and keys than this is first drawn from one of its queries: at 16,384 tokens a tile of
# 2048 × 2048 weights takes 12 to 26 ms of one core, by kind, one of 4096 × 4096 up to 90, the whole up to 800.
WIDE = 8


class Square(NamedTuple):
    """A tile: its numbers, and how many of its queries they were made from."""

    data: bytes
    rows: int
    of: int


def square(weights: AttentionMap, head: int, level: int, row: int, col: int, kind: str, *, exact: bool) -> Square:
    """256 × 256 numbers, float32, little-endian.

    Args:
        weights: the map of a layer.
        head: which of its heads.
        level: how deep, 0 is the whole.
        row: of tiles.
        col: likewise.
        kind: "mass", "rest", "peak" or "uniform".
        exact: True for all queries of a tile, however many; otherwise one for each row of pixels where they are many.
    """
    T, S = weights.shape[2:]
    span = span_at(level, T, S)
    of = max(0, min(T, (row + 1) * SIDE * span) - row * SIDE * span)
    if exact or span <= WIDE or 0 in (T, S):
        return Square(_bytes(tile(weights, head, level, row, col, kind)), of, of)
    tile_rows = torch.arange(row * SIDE, (row + 1) * SIDE) * span
    rows = (tile_rows[tile_rows < T] + span // 2).clamp(max=T - 1)
    part = weights.select(heads=[head], rows=rows)
    keys = range(col * SIDE * span, max(col * SIDE * span, min(S, (col + 1) * SIDE * span)))
    found = pixels(part, span, keys, kind, tall=1)[0]
    found = F.pad(found, (0, SIDE - found.shape[1], 0, SIDE - found.shape[0]))
    return Square(_bytes(found), len(rows), of)


def row_of(weights: AttentionMap, head: int, query: int) -> dict[str, Any]:
    """Where one query looks, strongest first."""
    return _strongest(weights[0, head, query], "keys")


def column_of(weights: AttentionMap, head: int, key: int) -> dict[str, Any]:
    """Who looks at one key, strongest first."""
    return _strongest(weights[0, head, :, key], "queries")


def cell_of(weights: AttentionMap, head: int, query: int, key: int) -> dict[str, Any]:
    """One weight: how large, its logit, its rank in its row, how many keys the query sees; JSON knows no infinity."""
    found = cell(weights, head, query, key)
    hidden = {"logit": None, "rank": None} if found.logit == -math.inf else {}
    return found._asdict() | hidden


def _strongest(weights: Tensor, name: str) -> dict[str, Any]:
    best = weights.float().topk(min(MOST, len(weights)))
    there = int((best.values > 0).sum())
    whole = len(weights) <= MOST or there < MOST
    return {name: best.indices[:there].tolist(), "weights": best.values[:there].tolist(), "whole": whole}


def _bytes(picture: Tensor) -> bytes:
    data = picture.float().contiguous()
    return ctypes.string_at(data.data_ptr(), data.nbytes)
