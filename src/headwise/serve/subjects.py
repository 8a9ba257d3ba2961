"""What can be looked at: models that read a text, all by the same few questions."""

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import CheckpointError, HeadwiseError, OptionError, ShapeError
from headwise.extras import need
from headwise.models import LanguageModel, open_model
from headwise.watch import attention_layers

CHUNK = 1024  # tokens whose logits are in memory at a time
LOGIT_BYTES = 2**30  # that a transformers model may write for the loss: it gives all logits at once or none
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


class Subject(abc.ABC):
    """A model and its tokenizer."""

    module: nn.Module
    context: int  # how many tokens it was made for
    bound: bool  # whether it can read no more than that

    @abc.abstractmethod
    def tokens(self, text: str) -> Tensor:
        """(1, T)."""

    @abc.abstractmethod
    def pieces(self, ids: Tensor) -> list[str]:
        """What each token stands for."""

    @abc.abstractmethod
    def outcome(self, ids: Tensor) -> Outcome:
        """Run the model once over (1, T)."""

    @property
    @abc.abstractmethod
    def vocabulary(self) -> int:
        """How many tokens there are."""

    def layers(self) -> dict[str, int | None]:
        """Its attentions by name, and how many heads each has where it says so."""
        found = {}
        for name, layer in attention_layers(self.module, "serve").items():
            heads = getattr(layer, "num_heads", None)
            if not isinstance(heads, int):
                heads = getattr(getattr(layer, "config", None), "num_attention_heads", None)
            found[name] = heads if isinstance(heads, int) else None
        return found

    def ids(self, given: Sequence[int]) -> Tensor:
        """Token ids that somebody sends, checked."""
        if max(given) >= self.vocabulary:
            raise OptionError(f"token {max(given)}: this model has {self.vocabulary:,}, counted from 0.")
        return torch.tensor([given])


class OwnSubject(Subject):
    """The built-in model and its like."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.module, self.context = model, model.gpt, model.gpt.config.context_length
        self.bound = model.gpt.config.position == "learned"

    def tokens(self, text: str) -> Tensor:
        """The start token and those of the text."""
        return self.model.tokens(text, most=10**9)

    def pieces(self, ids: Tensor) -> list[str]:
        """As the tokenizer writes them."""
        return self.model.pieces(ids)

    @property
    def vocabulary(self) -> int:
        """As many as the embedding has."""
        return self.model.gpt.config.vocab_size

    def outcome(self, ids: Tensor) -> Outcome:
        """The logits are made in parts: all of a long text would take gigabytes."""
        features = self.model.gpt.features(ids)[0]
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, ids.shape[1] - 1, CHUNK):
            targets = ids[0, start + 1 : start + 1 + CHUNK]
            logits = self.model.gpt.logits(features[start : start + len(targets)])
            total += F.cross_entropy(logits, targets, reduction="sum")
        loss = float(total) / (ids.shape[1] - 1) if ids.shape[1] > 1 else None
        return Outcome(loss, self._next(self.model.gpt.logits(features[-1])))

    def _next(self, logits: Tensor) -> tuple[Next, ...]:
        return likeliest(logits, self.pieces)


class TransformersSubject(Subject):
    """A transformers model from a folder, on our core."""

    def __init__(self, folder: Path) -> None:
        transformers = need("transformers", "huggingface", "models of transformers")
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            writes = any("ForCausalLM" in name or "LMHead" in name for name in config.architectures or ())
            kind = transformers.AutoModelForCausalLM if writes else transformers.AutoModel
            options: dict[str, Any] = {"attn_implementation": "headwise", "local_files_only": True}
            self.module = kind.from_pretrained(folder, dtype=torch.float32, **options).eval()
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except HeadwiseError:
            raise
        except Exception as error:  # transformers raises every kind there is
            raise CheckpointError(f"{folder} cannot be opened by transformers: {error}") from error
        self.module.requires_grad_(False)
        self.writes = writes
        self.context = int(getattr(config, "max_position_embeddings", None) or 10**9)
        self.bound = True

    def tokens(self, text: str) -> Tensor:
        """As its tokenizer has them, with the special ones it adds."""
        found: Tensor = self.tokenizer(text, return_tensors="pt", verbose=False).input_ids
        if found.shape[1] == 0:
            raise ShapeError("the tokenizer of this model makes no token of this text.")
        return found

    def pieces(self, ids: Tensor) -> list[str]:
        """As the tokenizer writes them."""
        return [self.tokenizer.decode([token]) for token in ids.flatten().tolist()]

    @property
    def vocabulary(self) -> int:
        """As many as the embedding has."""
        return int(self.module.get_input_embeddings().weight.shape[0])  # type: ignore[operator, union-attr]

    def outcome(self, ids: Tensor) -> Outcome:
        """Loss and next token of a model that writes; an encoder has neither."""
        if not self.writes:
            self.module(input_ids=ids)
            return Outcome(None, missing="this model does not write: there is no next token, and no loss.")
        length = ids.shape[1]
        fits = length * self.vocabulary * 4 <= LOGIT_BYTES
        logits = self.module(input_ids=ids, use_cache=False, **({} if fits else {"logits_to_keep": 1})).logits[0]
        following = likeliest(logits[-1], self.pieces)
        if not fits:
            return Outcome(None, following, f"no loss: the logits of {length:,} tokens would take too much memory.")
        loss = float(F.cross_entropy(logits[:-1].float(), ids[0, 1:])) if length > 1 else None
        return Outcome(loss, following)


def likeliest(logits: Tensor, pieces: Any) -> tuple[Next, ...]:
    """The tokens that are likeliest to follow."""
    found = logits.float().softmax(-1).topk(min(LIKELIEST, len(logits)))
    return tuple(map(Next, pieces(found.indices), found.values.tolist()))


def open_subject(name: str) -> Subject:
    """The model a user names: "builtin", a folder that `examples/train_gpt.py` wrote, or one of transformers."""
    folder = Path(name)
    if name != "builtin" and (folder / "config.json").is_file():
        return TransformersSubject(folder)
    return OwnSubject(open_model(name))
