"""What a model makes of a text: its loss, and what it expects to follow."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from headwise.models import LanguageModel, TextModel

CHUNK = 1024  # tokens whose logits are in memory at a time
LOGIT_BYTES = 2**30  # that a transformers model may write for the loss: it gives all logits at once, or the last
LIKELIEST = 10


class Next(NamedTuple):
    """A token that may follow, and how likely it is."""

    token: str
    probability: float


class Outcome(NamedTuple):
    """What a model makes of a text.

    Args:
        loss: nats per token, of every token but the first given those before it; None where there is none.
        next: the likeliest tokens to follow.
        missing: why something is not given.
    """

    loss: float | None
    next: tuple[Next, ...] = ()
    missing: str | None = None


def outcome(model: TextModel, ids: Tensor) -> Outcome:
    """Run the model once over (1, T)."""
    if isinstance(model, LanguageModel):
        return _of_ours(model, ids)
    if not hasattr(model.module, "lm_head") and getattr(model.module, "get_output_embeddings", lambda: None)() is None:
        model.read(ids)
        return Outcome(None, missing="This model does not write: it has no next token, and no loss.")
    return _of_transformers(model, ids)


def vocabulary(model: TextModel) -> int:
    """How many tokens the model knows."""
    module: Any = model.module
    table = module.embedding if isinstance(model, LanguageModel) else module.get_input_embeddings()
    return int(table.weight.shape[0])


def _of_ours(model: LanguageModel, ids: Tensor) -> Outcome:
    """The logits are made in parts: all of a long text would take gigabytes."""
    hidden = model.gpt.features(ids)[0]
    total, count = 0.0, ids.shape[1] - 1
    for start in range(0, count, CHUNK):
        targets = ids[0, start + 1 : start + 1 + CHUNK]
        logits = model.gpt.logits(hidden[start : start + len(targets)])
        total += float(F.cross_entropy(logits, targets, reduction="sum"))
    return Outcome(total / count if count else None, _likeliest(model, model.gpt.logits(hidden[-1])))


def _of_transformers(model: TextModel, ids: Tensor) -> Outcome:
    length = ids.shape[1]
    fits = length * vocabulary(model) * 4 <= LOGIT_BYTES
    logits = model.module(input_ids=ids, use_cache=False, **({} if fits else {"logits_to_keep": 1})).logits[0].float()
    following = _likeliest(model, logits[-1])
    if not fits:
        return Outcome(None, following, f"No loss: the logits of {length:,} tokens would take too much memory.")
    loss = float(F.cross_entropy(logits[:-1], ids[0, 1:])) if length > 1 else None
    return Outcome(loss, following)


def _likeliest(model: TextModel, logits: Tensor) -> tuple[Next, ...]:
    found = logits.float().softmax(-1).topk(min(LIKELIEST, logits.shape[-1]))
    return tuple(map(Next, model.pieces(found.indices), found.values.tolist()))
