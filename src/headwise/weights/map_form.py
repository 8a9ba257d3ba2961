"""A map taken apart into its tensors and a plain description, and put together again.

Copying, saving and moving a map need that, and torch's transforms (compile, export, vmap).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.masks import form
from headwise.weights import relative
from headwise.weights.scoring import Scoring
from headwise.weights.source import Frame

if TYPE_CHECKING:
    from headwise.parallel.spread import Spread
    from headwise.weights.map import AttentionMap

Parts = tuple[Tensor, Tensor, Scoring, Tensor | None, Frame | None, "Spread | None"]


def apart(weights: "AttentionMap") -> tuple[list[Any], Any]:
    """The tensors of a map, and what else there is to know."""
    scoring = weights._scoring
    tensors, description = form.apart(scoring.mask)
    bias, sinks, table = scoring.learnable
    optional = {"log_sum_exp": weights._lse, "bias": bias, "sinks": sinks}
    optional |= {"relative": table, "positions": scoring.positions}
    there = tuple(name for name, x in optional.items() if x is not None)
    leaves = [weights._query, weights._key, *(optional[name] for name in there), *tensors]
    rule = relative.apart(scoring.relative)
    frame = _framed(weights._frame)
    return leaves, (there, description, scoring.scale, scoring.softcap, rule, frame, weights._spread)


def parts(leaves: Iterable[Any], context: Any) -> Parts:
    """What a map is made of, from what `apart` gave."""
    there, description, scale, softcap, rule, frame, spread = context
    query, key, *rest = leaves
    optional = dict(zip(there, rest, strict=False))
    mask = form.together(iter(rest[len(there) :]), description)
    distances = None if rule is None else relative.together(optional["relative"], rule)
    bias, sinks, positions = (optional.get(name) for name in ("bias", "sinks", "positions"))
    scoring = Scoring(mask, bias, scale, softcap, sinks, distances, positions)
    return query, key, scoring, optional.get("log_sum_exp"), _unframed(frame), spread


def _framed(frame: Frame | None) -> Any:
    """The frame in a form that compares by value."""
    if frame is None:
        return None
    axes = (tuple(x.tolist()) if isinstance(x, Tensor) else (x.start, x.stop, x.step, "range") for x in frame[:3])
    return (*axes, *frame[3:])


def _unframed(plain: Any) -> Frame | None:
    if plain is None:
        return None
    batch, head, row = (
        range(*x[:3]) if len(x) == 4 and x[3] == "range" else torch.tensor(x, dtype=torch.long) for x in plain[:3]
    )
    return Frame(batch, head, row, *plain[3:])
