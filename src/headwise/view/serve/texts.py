"""What a model reads in a run: one text or, if it has an encoder and a decoder, one for each.

The maps of an encoder–decoder model have three sizes, so a run shows one part of it: the encoder, the decoder's
attention to its own text, or its cross-attention to the encoder's text.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.models import TextModel
from headwise.models.text_model import TokenCodec
from headwise.view.serve.requests import Refusal

ENCODER, DECODER, CROSS = PARTS = ("encoder", "decoder", "cross-attention")
WRITTEN = 48  # most tokens of the decoder's text, if the model writes it
TAIL = 8  # tokens before a new one that may change how it is written: with a space before it or without


class RunTexts(NamedTuple):
    """The tokens that a model reads, and the part of it that is shown.

    Args:
        ids: (1, S), the text; that of the encoder if there is a decoder.
        target: (1, T), the text of the decoder, behind its start token; None if there is none, or not yet.
        part: one of PARTS; empty for a model that reads one text.
    """

    ids: Tensor
    target: Tensor | None = None
    part: str = ""

    @property
    def queries(self) -> Tensor:
        """The tokens that attend, (1, T)."""
        return self.ids if self.target is None or self.part == ENCODER else self.target

    @property
    def keys(self) -> Tensor:
        """The tokens that they attend to, (1, S)."""
        return self.queries if self.part == DECODER else self.ids

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of an encoder–decoder model."""
        assert self.target is not None  # noqa: S101 - a run writes it first
        return {"input_ids": self.ids, "decoder_input_ids": self.target}


def part_of(model: TextModel, asked: str | None) -> str:
    """The part of a model to show; refused if it does not have it."""
    if model.start is None:
        if asked:
            raise Refusal(422, "part: this model reads one text, so it has no parts.")
        return ""
    if asked is not None and asked not in PARTS:
        raise Refusal(422, f"part: expected one of {', '.join(PARTS)}.")
    return asked or ENCODER


def target_of(model: TextModel, text: str) -> Tensor:
    """The tokens (1, T) of a decoder's text, which is not ended, so that the model can go on with it."""
    assert model.start is not None  # noqa: S101 - `part_of` refuses other models
    return torch.tensor([[model.start, *model.codec.before, *model.codec.encode(text)]])


def writes(model: TextModel) -> bool:
    """Whether a model generates text."""
    return bool(getattr(model.module, "can_generate", lambda: False)())


def written(model: TextModel, ids: Tensor) -> Tensor:
    """What the decoder reads if no text is given: what the model writes, or the encoder's text if it writes none."""
    return generated(model, {"inputs": ids}, WRITTEN) if writes(model) else model.decoder_tokens(ids)


def generated(model: TextModel, inputs: dict[str, Tensor], tokens: int) -> Tensor:
    """The text with the likeliest tokens after it, without the token that ends it."""
    module: Any = model.module
    mask = torch.ones_like(inputs["inputs"])
    with torch.no_grad():
        found: Tensor = module.generate(
            **inputs, max_new_tokens=tokens, do_sample=False, num_beams=1, attention_mask=mask
        )
    end = module.generation_config.eos_token_id
    ends = set() if end is None else set(torch.as_tensor(end).flatten().tolist())
    while found.shape[1] > 1 and int(found[0, -1]) in ends:
        found = found[:, :-1]
    return found


def text_of(model: TextModel, target: Tensor) -> str:
    """The text of a decoder, without its start token and those that every text begins with."""
    _, *ids = target[0].tolist()
    before = len(model.codec.before)
    return added(model.codec, [], ids[before:] if tuple(ids[:before]) == model.codec.before else ids)


def added(codec: TokenCodec, before: Sequence[int], new: Sequence[int]) -> str:
    """What some tokens add to the text of those before them: many tokenizers write a space between two words only."""
    plain = "".join(map(codec.decode, new))
    if codec.join is None or not new:
        return plain
    tail = list(before)[-TAIL:]
    start, whole = codec.join(tail) if tail else "", codec.join([*tail, *new])
    return whole[len(start) :] if whole.startswith(start) else plain
