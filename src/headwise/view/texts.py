"""What a model reads: one text or, if it has an encoder and a decoder, one for each.

The maps of an encoder–decoder model have three sizes, so a view shows one part of it: the encoder, the decoder's
attention to its own text, or its cross-attention to the encoder's text.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import OptionError
from headwise.models import TextModel
from headwise.models.text_model import TokenCodec
from headwise.study.passes import split_name
from headwise.study.watch import attention_layers, watch

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

    def view(self, codec: TokenCodec) -> dict[str, Any]:
        """The keyword arguments of a `View` of these texts."""
        words, starts = zip(*codec.characters(self.queries[0].tolist()), strict=True)
        crosses = self.part == CROSS
        decodes = self.target is not None and self.part != ENCODER
        told: dict[str, Any] = {"tokens": words, "starts": starts, "ids": self.keys[0]}
        told["around"] = _around(codec, self.queries[0].tolist(), decodes)
        if not crosses:
            return told
        keys, key_starts = zip(*codec.characters(self.keys[0].tolist()), strict=True)
        told |= {"keys": keys, "key_starts": key_starts, "query_ids": self.queries}
        return told | {"key_around": _around(codec, self.keys[0].tolist(), False)}

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of an encoder–decoder model."""
        assert self.target is not None  # noqa: S101 - a run writes it first
        return {"input_ids": self.ids, "decoder_input_ids": self.target}


def _around(codec: TokenCodec, ids: Sequence[int], decodes: bool) -> tuple[int, int]:
    """How many tokens were added in front of a text and behind it; the text of a decoder is not ended."""
    start = int(decodes)
    begun = start + len(codec.before)
    front = begun if tuple(ids[start:begun]) == codec.before else start
    back = 0 if decodes else len(codec.after)
    ended = back > 0 and tuple(ids[front:][-back:]) == codec.after
    return front, back if ended else 0


def part_of(model: TextModel, asked: str | None) -> str:
    """The part of a model to show; refused if it does not have it."""
    if model.start is None:
        if asked:
            raise OptionError("part: this model reads one text, so it has no parts.")
        return ""
    if asked is not None and asked not in PARTS:
        raise OptionError(f"part: expected one of {', '.join(PARTS)}.")
    return asked or ENCODER


def target_loss(output: Any, inputs: Any) -> Tensor:
    """The mean loss of every sample of the decoder's text, (B,)."""
    ids = inputs["decoder_input_ids"]
    each = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return each.mean(1)


_known: "weakref.WeakKeyDictionary[torch.nn.Module, dict[str, str]]" = weakref.WeakKeyDictionary()


def layer_names(model: TextModel, part: str = "") -> list[str]:
    """The layers of a model, or of a part of it, in the order of their calls; see `study.passes`."""
    if model.module not in _known:
        _known[model.module] = _parts_of_layers(model)
    return [name for name, found in _known[model.module].items() if part in ("", found)]


def _parts_of_layers(model: TextModel) -> dict[str, str]:
    """The part of a model that each of its layers is in, found by running it on one token."""
    with torch.no_grad(), watch(model.module, statistics=lambda weights: weights._scoring.cross) as crosses:
        model.read(torch.zeros(1, 1, dtype=torch.int64, device=model.device))
    if model.start is None:
        return dict.fromkeys(crosses, "")
    module: Any = model.module
    layers = attention_layers(module, "view")
    inside = {id(part) for part in module.get_encoder().modules()}
    encodes = {name: id(layers[split_name(name, layers)[0]]) in inside for name in crosses}
    return {name: ENCODER if encodes[name] else CROSS if cross else DECODER for name, cross in crosses.items()}


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
