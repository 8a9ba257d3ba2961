"""The model in the package, a small GPT trained on public-domain English, and models like it. See `CARD.md`."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headwise.errors import CheckpointError, nearest, need
from headwise.models.gpt import GPT, GPTConfig
from headwise.models.text_model import TextModel, TokenCodec

FOLDER = Path(__file__).with_name("builtin")
FORMAT = "headwise gpt 1"
WEIGHTS = "weights.safetensors"
# SHA-256 of the two files, so that a damaged installation is noticed.
CHECKSUMS = {
    WEIGHTS: "06e9bceec6221d2bc7b9cbf12a9f395e7c210cd6d254cdd88a0e11aca92da599",
    "tokenizer.json": "3f0cef72d4cdd0b1f2bec742b7cd6e863340f4e034a3b811f1002f3b2fe0efc5",
}


class LanguageModel(TextModel):
    """A `gpt` and its `tokenizer`, which continues texts.

    >>> model = load_builtin()
    >>> model.write("Once upon a time", 20, seed=0)[:16]
    'Once upon a time'
    >>> model.tokens("Once upon").shape  # the start token, "On", "ce", " upon"
    torch.Size([1, 4])

    Args:
        gpt: the model.
        tokenizer: a `tokenizers.Tokenizer`.
        name: what reports call it.
    """

    def __init__(self, gpt: GPT, tokenizer: Any, name: str = "GPT") -> None:
        self.gpt, self.tokenizer = gpt, tokenizer
        length = gpt.config.context_length
        codec = dataclasses.replace(TokenCodec.of(tokenizer), before=(gpt.config.start,), after=())
        super().__init__(name, gpt, codec, length, None if gpt.position is None else length)

    def read(self, tokens: Tensor) -> None:
        """Run the model over `tokens` (B, T) so that its attention can be watched. No logits are computed."""
        self.gpt.features(tokens)

    def stream(self, text: str, max_new_tokens: int = 100, **sampling: Any) -> Iterator[str]:
        """The continuation of a text, `max_new_tokens` long, piece by piece; `sampling` as in `GPT.stream`.

        If the text is longer than the context, the model reads its end.
        """
        ids = self.tokens(text, most=10**9)[0].tolist()
        new: list[int] = []
        yielded = ""
        for token in self.gpt.stream(ids, max_new_tokens, **sampling):
            new.append(token)
            whole = self.tokenizer.decode(new)
            if not whole.endswith("\ufffd"):  # several tokens may make up one character
                yield whole[len(yielded) :]
                yielded = whole
        rest = self.tokenizer.decode(new)[len(yielded) :]
        if rest:
            yield rest

    def write(self, text: str, max_new_tokens: int = 100, **sampling: Any) -> str:
        """The text and its continuation; `max_new_tokens` and `sampling` as in `stream`."""
        return text + "".join(self.stream(text, max_new_tokens, **sampling))

    def __repr__(self) -> str:
        config = self.gpt.config
        return (
            f"LanguageModel({config.num_layers} layers of {config.num_heads} heads, {config.d_model} wide, "
            f"{config.vocab_size} tokens, context {config.context_length})"
        )


def load_builtin(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> LanguageModel:
    """The model in the package, ready to use; nothing is downloaded.

    Args:
        device: where to put it.
        dtype: of its weights, which are stored in float16.
    """
    return load(FOLDER, device, dtype, CHECKSUMS)


def no_folder(folder: Path, expected: str) -> CheckpointError:
    """The error for a model that is not there, which names one that is spelled like it: built in or beside it."""
    beside = folder.parent.glob("*/") if folder.parent.is_dir() else ()
    models = [str(one) for one in beside if any((one / name).is_file() for name in ("config.json", WEIGHTS))]
    near = nearest(str(folder), ["builtin", *models])
    return CheckpointError(f"there is no folder {folder}; {expected}." + (f" Did you mean {near}?" if near else ""))


def load(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    checksums: dict[str, str] | None = None,
) -> LanguageModel:
    """A model that `examples/train_gpt.py` wrote.

    Args:
        folder: holds `weights.safetensors` and `tokenizer.json`.
        device: where to put it.
        dtype: of its weights.
        checksums: SHA-256 of its files by name; not checked by default.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise no_folder(folder, "expected one that examples/train_gpt.py wrote")
    safetensors = need("safetensors", "builtin", "the built-in model and models like it")
    tokenizers = need("tokenizers", "builtin", "the built-in model and models like it")
    for name in CHECKSUMS:
        _check_file(folder / name, (checksums or {}).get(name))
    try:
        with safetensors.safe_open(str(folder / WEIGHTS), framework="pt", device="cpu") as file:
            config = _config(folder, file.metadata() or {})
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except CheckpointError:
        raise
    except Exception as error:  # safetensors and tokenizers raise many kinds of errors
        raise CheckpointError(f"{folder} cannot be read as a model: {error}") from error
    if tokenizer.get_vocab_size() != config.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {tokenizer.get_vocab_size()} tokens and the weights {config.vocab_size}; "
            f"they do not belong together."
        )
    with torch.device("meta"), _Unset():
        gpt = GPT(config)
    try:
        gpt.load_state_dict({name: x.to(device, dtype) for name, x in weights.items()}, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: the weights do not fit the sizes in the configuration: {error}") from error
    return LanguageModel(gpt.eval().requires_grad_(False), tokenizer, folder.resolve().name)


class _Unset(TorchFunctionMode):
    """Skips the initialization of weights, which on the meta device would import torch's compiler (1 s)."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(function, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else given["tensor"]
        return function(*args, **given)


def _check_file(path: Path, checksum: str | None) -> None:
    if not path.is_file():
        raise CheckpointError(
            f"{path.name} is not in {path.parent}; expected weights.safetensors and tokenizer.json, as "
            f"examples/train_gpt.py writes them, or a transformers model with its config.json."
        )
    if checksum is not None and hashlib.sha256(path.read_bytes()).hexdigest() != checksum:
        raise CheckpointError(
            f"{path} is damaged: its checksum differs from the one it was shipped with. Install headwise again."
        )


def _config(folder: Path, metadata: dict[str, str]) -> GPTConfig:
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder}: the weights have the format {metadata.get('format')!r}; this version of headwise reads "
            f"{FORMAT!r}."
        )
    try:
        sizes = dict(json.loads(metadata["config"]))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: the configuration in the weights is not JSON: {error!r}.") from error
    return GPTConfig(**{name: sizes[name] for name in GPTConfig.__dataclass_fields__ if name in sizes})
