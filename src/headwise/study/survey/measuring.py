"""From an attention map to the sums of a tally. What is measured of a head is what the summary of a map defines."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, OptionError
from headwise.study.survey.subject import Subject
from headwise.study.survey.tally import Fields, written
from headwise.study.watch import watch
from headwise.weights import AttentionMap
from headwise.weights.readings import octave_count
from headwise.weights.summary import RowStatistics as Rows
from headwise.weights.summary import rows_of

FAR = 64  # places; peaks are counted by distance up to here, before and after the query
PEAKS = 2 * FAR + 3  # one bin for each, and one at either end for all that lie further
APART = "apart "  # what names begin with where the first token is taken out
KINDS = ("", APART)


class NotFiniteError(HeadwiseError, ArithmeticError):
    """A model gave numbers that are infinite or none."""


def look(subject: Subject, windows: Sequence[Sequence[int]], context: int) -> dict[str, Fields]:
    """The sums of every layer over windows of one length. Maps are measured as they come, and let go."""
    ids = torch.tensor(windows, device=subject.device)
    _check_ids(subject, ids)
    octaves = octave_count(context, context)
    with torch.no_grad(), watch(subject.module, statistics=lambda weights: fields_of(weights, ids, octaves)) as seen:
        subject.module(ids)
    found: dict[str, Fields] = {}
    for layer, calls in seen.calls.items():  # one module may stand in several layers
        found |= {layer if len(calls) == 1 else f"{layer} #{i}": fields for i, fields in enumerate(calls)}
    return found


def fields_of(weights: AttentionMap, ids: Tensor, octaves: int) -> Fields:
    """The sums of one map's heads over its samples."""
    plain, apart = rows_of(weights, ids, histogram=True)
    return _fields("", plain, octaves) | _fields(APART, apart, octaves)


def _fields(kind: str, rows: Rows, octaves: int) -> Fields:
    found: Fields = {}
    for name, numbers in rows.numbers.items():
        found |= {f"{kind}{name} {what}": value for what, value in _sums(rows, name, numbers).items()}
    found[f"{kind}octaves"] = _finite(_octaves(rows, octaves))
    found[f"{kind}rows"] = rows.choice.counted().sum((0, 2)).tolist()
    found[f"{kind}seeing"] = (rows.choice.seen >= 1).sum((0, 2)).tolist()
    found[f"{kind}peaks"] = _peaks(rows).flatten().tolist()
    return found


def _sums(rows: Rows, name: str, numbers: Tensor) -> Fields:
    """Of one number, per head: sums over the queries that count for it and over the means of windows, and how many."""
    counted = rows.choice.counted(name)  # (B, H, T)
    numbers = numbers.double() * counted
    sums, many = numbers.sum(-1), counted.sum(-1)  # (B, H)
    means = sums / many.clamp(min=1)
    even = rows.choice.even(name).double() * counted if name in rows.masses else torch.zeros_like(numbers)
    return {
        "sum": _finite(sums.sum(0)),
        "squares": _finite(numbers.square().sum((0, 2))),
        "means": _finite(means.sum(0)),
        "mean squares": _finite(means.square().sum(0)),
        "even": _finite(even.sum((0, 2))),
        "rows": many.sum(0).tolist(),
        "windows": (many > 0).sum(0).tolist(),
    }


def _finite(sums: Tensor) -> list[int]:
    if not bool(sums.isfinite().all()):
        raise NotFiniteError("the model gave numbers that are not finite")
    return written(sums)


def _octaves(rows: Rows, octaves: int) -> Tensor:
    """Attention by octave of distance, summed over all queries, (H, octaves)."""
    assert rows.histogram is not None  # noqa: S101 - asked for
    found = rows.histogram.double().sum(0) * rows.offset.shape[2]
    return torch.nn.functional.pad(found, (0, octaves - found.shape[1]))


def _peaks(rows: Rows) -> Tensor:
    """How many queries have their largest weight at each distance, (H, PEAKS)."""
    heads = torch.arange(rows.offset.shape[1], device=rows.offset.device)[:, None]
    bins = rows.offset.clamp(-FAR - 1, FAR + 1) + FAR + 1 + heads * PEAKS
    return bins[rows.choice.counted()].bincount(minlength=len(heads) * PEAKS).view(len(heads), PEAKS)


def _check_ids(subject: Subject, ids: Tensor) -> None:
    """Refuse tokens the model does not have, before a kernel does so in words of its own."""
    embedding = next((m for m in subject.module.modules() if isinstance(m, torch.nn.Embedding)), None)
    if embedding is not None and int(ids.max()) >= embedding.num_embeddings:
        raise OptionError(
            f"{subject.name}: the tokenizer gives token {int(ids.max())} and the model has "
            f"{embedding.num_embeddings}; they do not belong together."
        )
