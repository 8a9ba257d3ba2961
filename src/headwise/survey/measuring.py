"""From an attention map to the sums of a tally. What is measured of a head is what `headwise.summary` defines."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, OptionError
from headwise.map import AttentionMap
from headwise.readings import octave_count
from headwise.summary import Rows, rows_of
from headwise.survey.subject import Subject
from headwise.survey.tally import Fields, written
from headwise.watch import watch

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
    counted = rows.counted  # (B, H, T)
    names = list(rows.numbers)
    numbers = torch.stack([rows.numbers[name] for name in names]).double() * counted  # (N, B, H, T)
    sums, many = numbers.sum(-1), counted.sum(-1)  # (N, B, H), (B, H)
    means = sums / many.clamp(min=1)
    totals = {
        "sum": sums.sum(1),
        "squares": numbers.square().sum(-1).sum(1),
        "means": means.sum(1),
        "mean squares": means.square().sum(1),
    }  # (N, H) each
    histogram = _octaves(rows, octaves)
    if not all(bool(x.isfinite().all()) for x in (*totals.values(), histogram)):
        raise NotFiniteError("the model gave numbers that are not finite")
    found = {
        f"{kind}{name} {what}": written(x) for what, xs in totals.items() for name, x in zip(names, xs, strict=True)
    }
    found[f"{kind}octaves"] = written(histogram)
    found[f"{kind}rows"] = many.sum(0).tolist()
    found[f"{kind}seeing"] = (rows.seen >= 1).sum((0, 2)).tolist()
    found[f"{kind}windows"] = (many > 0).sum(0).tolist()
    found[f"{kind}peaks"] = _peaks(rows).flatten().tolist()
    return found


def _octaves(rows: Rows, octaves: int) -> Tensor:
    """Attention by octave of distance, summed over all queries, (H, octaves)."""
    assert rows.histogram is not None  # noqa: S101 - asked for
    found = rows.histogram.double().sum(0) * rows.seen.shape[2]
    return torch.nn.functional.pad(found, (0, octaves - found.shape[1]))


def _peaks(rows: Rows) -> Tensor:
    """How many queries have their largest weight at each distance, (H, PEAKS)."""
    heads = torch.arange(rows.offset.shape[1], device=rows.offset.device)[:, None]
    bins = rows.offset.clamp(-FAR - 1, FAR + 1) + FAR + 1 + heads * PEAKS
    return bins[rows.counted].bincount(minlength=len(heads) * PEAKS).view(len(heads), PEAKS)


def _check_ids(subject: Subject, ids: Tensor) -> None:
    """Refuse tokens the model does not have, before a kernel does so in words of its own."""
    embedding = next((m for m in subject.module.modules() if isinstance(m, torch.nn.Embedding)), None)
    if embedding is not None and int(ids.max()) >= embedding.num_embeddings:
        raise OptionError(
            f"{subject.name}: the tokenizer gives token {int(ids.max())} and the model has "
            f"{embedding.num_embeddings}; they do not belong together."
        )
