"""The model that is surveyed: its module, its tokenizer, and what a text must begin and end with."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import CheckpointError, HeadwiseError, OptionError, need
from headwise.models import LanguageModel, load, load_builtin
from headwise.models.opening import loaded, quiet

PROBE = "The captain looked at the sea, and the sea (42 of them) looked back."


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A model and how it reads.

    Args:
        name: what it is called in the result.
        module: it takes token ids (B, T), and `headwise.watch` sees its attention.
        encode: the tokens of a text, without any that all texts begin or end with.
        before: tokens that every window begins with.
        after: tokens that every window ends with.
        context: how many tokens it can read, if it says so.
    """

    name: str
    module: nn.Module
    encode: Callable[[str], Sequence[int]]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    context: int | None = None

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next((x.device for x in self.module.parameters()), torch.device("cpu"))

    def fingerprint(self) -> str:
        """A short text that differs for other weights or another tokenizer: some numbers of every tensor enter it."""
        digest = hashlib.sha256(json.dumps([list(self.encode(PROBE)), self.before, self.after]).encode())
        for name, tensor in self.module.state_dict().items():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            flat = tensor.detach().flatten()
            some = flat[:: max(1, len(flat) // 64)].double().cpu()
            digest.update(json.dumps(some.tolist()).encode())
        return digest.hexdigest()[:16]


def open_subject(name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Subject:
    """The model a user names: "builtin", a folder of ours, or a folder of a transformers model."""
    if name == "builtin":
        return subject_of(load_builtin(device, dtype), name=name)
    folder = Path(name)
    if (folder / "config.json").is_file():
        return _of_transformers(folder, device, dtype)
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {name}; expected builtin, a folder that examples/train_gpt.py has written, or one "
            "of a transformers model with its tokenizer."
        )
    return subject_of(load(folder, device, dtype), name=folder.name)


def subject_of(
    model: Any, tokenize: Callable[[str], Sequence[int]] | None = None, *, name: str | None = None
) -> Subject:
    """What a Python user passes as a model."""
    if isinstance(model, Subject):
        return model
    if isinstance(model, str | Path):
        return open_subject(str(model))
    if isinstance(model, LanguageModel):
        config = model.gpt.config

        def encode(text: str) -> Sequence[int]:
            return model.tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]

        return Subject(name or "GPT", model.gpt, tokenize or encode, (config.start,), (), config.context_length)
    if not isinstance(model, nn.Module):
        raise OptionError(f"survey({type(model).__name__}): expected a model, such as load_builtin(), or its folder.")
    if tokenize is None:
        raise OptionError(
            f"survey({type(model).__name__}): how is text read? Pass tokenize=, a function from a text to token ids, "
            f"or a transformers tokenizer."
        )
    own = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if hasattr(tokenize, "all_special_ids"):
        before, after = _borders(tokenize)
        return Subject(name or type(model).__name__, model, _plain(tokenize), before, after, own)
    return Subject(name or type(model).__name__, model, tokenize, (), (), own)


def _of_transformers(folder: Path, device: torch.device | str, dtype: torch.dtype) -> Subject:
    """A model in transformers' format, from the disk alone."""
    transformers = need("transformers", "huggingface", "transformers models")
    about = {"local_files_only": True}
    try:
        with quiet(transformers):
            config = transformers.AutoConfig.from_pretrained(folder, **about)
            if not config.is_encoder_decoder:
                model = loaded(transformers.AutoModel, folder, dtype=dtype)
    except HeadwiseError:  # ours, with the cure
        raise
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(f"{folder} cannot be read as a transformers model: {error}") from error
    if config.is_encoder_decoder:
        raise CheckpointError(
            f"{folder}: {config.model_type} reads two texts at once, and a survey reads one. Survey its encoder in "
            f"Python: headwise.survey(model.get_encoder(), paths, tokenize=tokenizer)."
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **about)
    except Exception as error:
        raise CheckpointError(f"{folder}: there is no tokenizer beside the model that can be read: {error}") from error
    model.config.use_cache = False
    return subject_of(model.to(device).eval().requires_grad_(False), tokenizer, name=folder.resolve().name)


def _plain(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    def encode(text: str) -> Sequence[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False).input_ids  # type: ignore[no-any-return]

    return encode


def _borders(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that a tokenizer puts before and after a text."""
    whole = list(tokenizer(PROBE).input_ids)
    inner = list(tokenizer(PROBE, add_special_tokens=False).input_ids)
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return tuple(whole[:start]), tuple(whole[start + len(inner) :])
    return (), ()
