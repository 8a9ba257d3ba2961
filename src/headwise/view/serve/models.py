"""The models that a server offers, and one run of a model: its attention maps, its loss, and likely next tokens."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import CheckpointError, OptionError
from headwise.models import LanguageModel, TextModel, open_model
from headwise.models.opening import name_of_folder
from headwise.models.text_model import UNKNOWN
from headwise.study.importance import batch_of, importance, why_not_predicting
from headwise.study.interventions import silence
from headwise.study.passes import split_name
from headwise.study.watch import attention_layers, watch
from headwise.view.carried import Carried, carried
from headwise.view.serve.requests import Refusal
from headwise.view.texts import TAIL, RunTexts, added, generated, layer_names, target_loss, target_of, writes
from headwise.weights import AttentionMap

CHUNK = 1024  # tokens whose logits are in memory at a time
LOGIT_BYTES = 2**30  # most bytes of logits of a transformers model, which returns them all at once or only the last
LIKELIEST = 10
SILENCED = 2048  # tokens up to which every head is silenced; beyond, its worth is estimated from the gradient
PROBED = 8  # tokens with which a model is asked whether it predicts the next one
PREPARED = 5  # passes, about, that `importance` makes besides those that it counts

SILENT = "This model does not generate text, so there is no loss and no next token."

HeadPairs = Sequence[tuple[int, int]]


class Models:
    """Models by the name that the page shows ("builtin", or the name of the folder), opened on first use.

    Args:
        paths: "builtin" or folders; the page starts with the first.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths: dict[str, str] = {}
        self._open: dict[str, TextModel] = {}
        self._lock = threading.Lock()
        for path in dict.fromkeys(paths):
            if path != "builtin" and not Path(path).is_dir():
                raise CheckpointError(f"there is no folder {path}; expected builtin, or the folder of a model.")
            self._paths[self._free_name(path)] = path
        if not self._paths:
            raise OptionError("no model is given; pass --model builtin or the folder of a model.")

    def _free_name(self, path: str) -> str:
        """What the path says of the model; models of the same name are numbered."""
        name = path if path == "builtin" else name_of_folder(Path(path).resolve()) or "model"
        count = sum(known == name or known.startswith(f"{name} (") for known in self._paths)
        return name if count == 0 else f"{name} ({count + 1})"

    @property
    def names(self) -> list[str]:
        return list(self._paths)

    def add(self, name: str, model: TextModel) -> None:
        """Offer a model that is already open."""
        self._paths[name], self._open[name] = name, model

    def name_of(self, name: str | None) -> str:
        """The name, or that of the first model; refused if no model has it."""
        if name is None:
            return self.names[0]
        if name not in self._paths:
            raise Refusal(404, f"there is no model with this name; the models are {', '.join(self.names)}.")
        return name

    def __getitem__(self, name: str) -> TextModel:
        """The model, opened now if necessary."""
        with self._lock:
            if name not in self._open:
                self._open[name] = open_model(self._paths[name], both=True)
            return self._open[name]

    def to_dicts(self) -> list[dict[str, Any]]:
        """What a page needs to offer them."""
        return [{"name": name, "open": name in self._open} for name in self.names]


class NextToken(NamedTuple):
    """A token that may come next, its probability, what it adds to the text, and its id.

    A part of a character adds no text: it cannot be written alone.
    """

    token: str
    probability: float
    text: str
    id: int


class Outcome(NamedTuple):
    """What a model predicts for a text.

    Args:
        loss: nats per token, over every token but the first; None if there is none.
        next: the likeliest next tokens.
        missing: why something is missing.
        losses: nats for each token, None for the first; empty if there is no loss.
    """

    loss: float | None
    next: tuple[NextToken, ...] = ()
    missing: str | None = None
    losses: tuple[float | None, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything but the loss of each token, which has an address of its own."""
        return {"loss": self.loss, "missing": self.missing, "next": [one._asdict() for one in self.next]}


class Cancelled(Exception):  # noqa: N818 - not an error
    """The user has cancelled the run."""


class Worth(NamedTuple):
    """What heads are worth: how it was measured, and layer, head and what removing that head adds to the loss."""

    way: str
    effects: tuple[tuple[int, int, float], ...]


class Ran(NamedTuple):
    """One run of a model: its maps by layer, what their weights carry, if known, and its outcome."""

    maps: dict[str, AttentionMap]
    carried: tuple[Carried, ...] | None
    outcome: Outcome


def run_model(
    model: TextModel,
    texts: RunTexts,
    off: HeadPairs = (),
    *,
    maps: bool = True,
    progress: Callable[[float], None] = lambda _: None,
) -> Ran:
    """The maps of all layers of a part in order, what their weights carry, and the outcome, without any T×T tensor.

    Args:
        model: the model.
        texts: what it reads, and the part that is shown.
        off: pairs of layer and head to switch off.
        maps: False for the outcome only.
        progress: called before each module with the share that is done; an exception from it ends the run.
    """
    names = layer_names(model, texts.part)
    silent: dict[str, list[int]] = {}
    for layer, head in off:
        silent.setdefault(names[layer], []).append(head)
    with torch.no_grad(), contextlib.ExitStack() as contexts:
        contexts.enter_context(interruptible(model, progress))
        if silent:
            contexts.enter_context(silence(model.module, silent))
        seen = contexts.enter_context(watch(model.module, outputs=True)) if maps else None
        found = outcome(model, texts)
    progress(1.0)
    if seen is None:
        return Ran({}, None, found)
    collected = {name: seen[name].detach() for name in names}
    return Ran(collected, carried(collected, seen.outputs), found)


@contextlib.contextmanager
def interruptible(model: TextModel, progress: Callable[[float], None], passes: int = 1) -> Iterator[None]:
    """Call `progress` before every module that runs in this thread, with the share of all layers that have begun.

    Args:
        model: the model.
        progress: an exception from it ends the pass.
        passes: how many times the model will run.
    """
    layers = set(attention_layers(model.module, "serve").values())
    total, begun, thread = len(layer_names(model)) * passes, 0, threading.get_ident()

    def before(module: torch.nn.Module, _: Any) -> None:
        nonlocal begun
        if threading.get_ident() == thread:
            progress(min(begun / total, 1.0))
            begun += module in layers

    handles = [module.register_forward_pre_hook(before) for module in model.module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_off(model: TextModel, off: HeadPairs, part: str = "") -> None:
    """Refuse layers and heads that do not exist in this part."""
    names, layers = layer_names(model, part), attention_layers(model.module, "serve")
    for layer, head in off:
        if layer >= len(names):
            where = f"the {part}" if part else "this model"
            raise OptionError(f"layer {layer}: {where} has {len(names)} layers, counted from 0.")
        most = _head_count(layers[split_name(names[layer], layers)[0]])
        if most is not None and head >= most:
            raise OptionError(f"head {layer}.{head}: this layer has {most} heads, counted from 0.")


def _head_count(layer: Any) -> int | None:
    """How many heads an attention layer has, if it says so."""
    config = getattr(layer, "config", None)
    counts = (getattr(layer, "num_heads", None), getattr(config, "num_attention_heads", None))
    return next((count for count in counts if isinstance(count, int)), None)


def outcome(model: TextModel, texts: RunTexts) -> Outcome:
    """Run the model once. With a decoder, the loss is that of the decoder's text."""
    if isinstance(model, LanguageModel):
        return _builtin_outcome(model, texts.ids)
    if not hasattr(model.module, "lm_head") and getattr(model.module, "get_output_embeddings", lambda: None)() is None:
        if texts.target is None:
            model.read(texts.ids)
        else:
            model.module(**texts.inputs, use_cache=False)
        return Outcome(None, missing=SILENT)
    return _transformers_outcome(model, texts)


def vocabulary(model: TextModel) -> int:
    """The size of the vocabulary."""
    module: Any = model.module
    table = module.embedding if isinstance(model, LanguageModel) else module.get_input_embeddings()
    return int(table.weight.shape[0])


def _builtin_outcome(model: LanguageModel, ids: Tensor) -> Outcome:
    """Computes logits in chunks: all logits of a long text would take gigabytes."""
    hidden = model.gpt.features(ids)[0]
    losses: list[float] = []
    for start in range(0, ids.shape[1] - 1, CHUNK):
        targets = ids[0, start + 1 : start + 1 + CHUNK]
        logits = model.gpt.logits(hidden[start : start + len(targets)])
        losses += F.cross_entropy(logits, targets, reduction="none").tolist()
    return _outcome_of(losses, _likeliest(model, model.gpt.logits(hidden[-1]), ids))


def _transformers_outcome(model: TextModel, texts: RunTexts) -> Outcome:
    ids = texts.ids if texts.target is None else texts.target
    inputs = {"input_ids": ids} if texts.target is None else texts.inputs
    length = ids.shape[1]
    fits = length * vocabulary(model) * 4 <= LOGIT_BYTES
    few = {} if fits or texts.target is not None else {"logits_to_keep": 1}
    logits = model.module(**inputs, use_cache=False, **few).logits[0]
    following = _likeliest(model, logits[-1], ids)
    if not fits:
        return Outcome(None, following, f"No loss: the logits of {length:,} tokens would take too much memory.")
    return _outcome_of(F.cross_entropy(logits[:-1].float(), ids[0, 1:], reduction="none").tolist(), following)


def _outcome_of(losses: list[float], following: tuple[NextToken, ...]) -> Outcome:
    """The outcome of a text whose tokens after the first have these losses."""
    return Outcome(sum(losses) / len(losses) if losses else None, following, None, (None, *losses))


def worth_of_heads(model: TextModel, texts: RunTexts, progress: Callable[[float], None]) -> Worth:
    """What removing each head adds to the loss: every head silenced in turn, or estimated where that takes too long.

    Args:
        model: the model; refused if it does not predict the next token.
        texts: what it reads, at least two tokens, and the part whose heads are wanted.
        progress: as in `interruptible`.
    """
    ids = texts.ids if texts.target is None else texts.target
    if ids.shape[1] < 2:
        raise OptionError("a single token has no loss: nothing comes before it. Use a longer text.")
    length = max(ids.shape[1], texts.ids.shape[1])
    way = "silence" if length <= SILENCED else "gradient"
    heads = sum(_head_count(layer) or 0 for layer in attention_layers(model.module, "serve").values())
    passes = PREPARED + (-(-heads // batch_of(length, ids.device)) if way == "silence" else 1)
    if not _predicts(model, texts):
        raise OptionError(
            "this model does not predict the next token, so there is no loss that its heads could change."
        )
    given: Any = (ids, None) if texts.target is None else (texts.inputs, target_loss)
    with interruptible(model, progress, passes):
        found = importance(model.module, given[0], by=way, loss=given[1], controls=0)
    effects = [
        (layer, head, float(effect))
        for layer, name in enumerate(layer_names(model, texts.part))
        for head, effect in enumerate(found.effects.get(name, torch.empty(1, 0)).mean(0))
    ]
    return Worth(way, tuple(effects))


def _predicts(model: TextModel, texts: RunTexts) -> bool:
    """Whether a model predicts the next token of its text, or of its decoder's."""
    if texts.target is not None:
        return writes(model)
    some = texts.ids[:, :PROBED]
    return why_not_predicting(model.module, some, some) is None


def continued(model: TextModel, text: str, tokens: int, target: str = "") -> str:
    """What the model writes after a text, or after its decoder's text, the likeliest token each time."""
    if isinstance(model, LanguageModel):
        return "".join(model.stream(text, tokens, temperature=0.0))
    if not writes(model):
        raise OptionError("this model does not generate text.")
    ids = before = model.tokens(text, most=10**9)
    inputs = {"inputs": ids}
    if model.start is not None:
        before = inputs["decoder_input_ids"] = target_of(model, target)
    found = generated(model, inputs, tokens)[0].tolist()
    length = before.shape[1]
    return added(model.codec, found[:length], found[length:])


def _likeliest(model: TextModel, logits: Tensor, ids: Tensor) -> tuple[NextToken, ...]:
    """The likeliest tokens after a text (1, T)."""
    found = logits.float().softmax(-1).topk(min(LIKELIEST, logits.shape[-1]))
    codec, before = model.codec, ids[0, -TAIL:].tolist()
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    texts = {token: added(codec, before, [token]) for token in found.indices.tolist()}
    return tuple(
        NextToken(codec.label(token), share, "" if UNKNOWN in texts[token] else texts[token], token)
        for token, share in pairs
    )
