"""A part of a source: some samples, heads or queries. Keys stay whole, because a row is normalised over all of them."""

import dataclasses

import torch
from torch import Tensor

from headwise.weights.source import Axis, Frame, Source


def narrowed(source: Source, batch: Axis, heads: Axis, rows: Axis) -> Source:
    """The source with only these samples, heads and queries. Slices give views, lists give copies."""
    query = take(take(take(source.query, 0, batch), 1, heads), 2, rows)
    key = _keys_of(take(source.key, 0, batch), heads, source.group)
    lse = source.log_sum_exp
    if lse is not None:
        lse = take(take(take(lse, 0, batch), 1, heads), 2, rows)
    frame = source.frame
    part = Frame(chosen(frame.batch, batch), chosen(frame.head, heads), chosen(frame.row, rows), *frame[3:])
    return dataclasses.replace(source, query=query, key=key, frame=part, log_sum_exp=lse)


def take(tensor: Tensor, axis: int, indices: Axis) -> Tensor:
    """These indices of an axis; a view where they are a range."""
    if isinstance(indices, Tensor):
        return tensor.index_select(axis, indices.to(tensor.device))
    if len(indices) == tensor.shape[axis]:
        return tensor
    index = [slice(None)] * axis + [slice(indices.start, indices.stop, indices.step)]
    return tensor[tuple(index)]


def chosen(axis: Axis, indices: Axis) -> Axis:
    """Indices of the whole, given which of ours are taken."""
    if isinstance(indices, Tensor):
        return axis[indices] if isinstance(axis, Tensor) else axis.start + indices * axis.step
    return axis[slice(indices.start, indices.stop, indices.step)]


def _keys_of(key: Tensor, heads: Axis, group: int) -> Tensor:
    """The key heads of these query heads: whole groups stay groups, anything else gets a key head each."""
    if group == 1:
        return take(key, 1, heads)
    if isinstance(heads, range) and heads.step == 1 and len(heads):
        first, last = heads.start // group, (heads.stop - 1) // group
        if first == last or (heads.start % group == 0 and heads.stop % group == 0):
            return key[:, first : last + 1]
    indices = heads if isinstance(heads, Tensor) else torch.arange(heads.start, heads.stop, heads.step)
    return key.index_select(1, (indices // group).to(key.device))
