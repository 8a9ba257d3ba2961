"""The model in the package: a small GPT that was trained on public-domain English, and its tokenizer. See `CARD.md`."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headwise.errors import CheckpointError, OptionError, ShapeError, need
from headwise.models.gpt import GPT, GPTConfig

FOLDER = Path(__file__).with_name("builtin")
FORMAT = "headwise gpt 1"
# Of the two files, so that damage is noticed before it shows as nonsense.
CHECKSUMS = {
    "weights.safetensors": "06e9bceec6221d2bc7b9cbf12a9f395e7c210cd6d254cdd88a0e11aca92da599",
    "tokenizer.json": "3f0cef72d4cdd0b1f2bec742b7cd6e863340f4e034a3b811f1002f3b2fe0efc5",
}


class LanguageModel:
    """A `gpt` and its `tokenizer`: text in, text out.

    >>> model = load_builtin()
    >>> model.write("Once upon a time", 20, seed=0)[:16]
    'Once upon a time'
    >>> model.tokens("Once upon").shape  # the start token, "On", "ce", " upon"
    torch.Size([1, 4])
    """

    def __init__(self, gpt: GPT, tokenizer: Any) -> None:
        self.gpt, self.tokenizer = gpt, tokenizer

    @property
    def module(self) -> GPT:
        """The model itself."""
        return self.gpt

    @property
    def trained(self) -> int:
        """How many tokens it was trained on at a time."""
        return self.gpt.config.context_length

    @property
    def limit(self) -> int | None:
        """How many tokens it can read; None for any number."""
        return None if self.gpt.position is None else self.gpt.config.context_length

    def read(self, tokens: Tensor) -> None:
        """Run over the tokens (1, T), for who watches; nothing is predicted."""
        self.gpt.features(tokens)

    def tokens(self, text: str, *, most: int | None = None) -> Tensor:
        """The start token and those of the text, (1, T).

        Args:
            text: any text; every byte can be written.
            most: how many there may be, an error beyond; the model's context unless given.
        """
        if not isinstance(text, str) or not text:
            raise OptionError(f"text={text!r}: expected a text of at least one character.")
        ids = [self.gpt.config.start, *self.tokenizer.encode(text, add_special_tokens=False).ids]
        most = self.gpt.config.context_length if most is None else most
        if len(ids) > most:
            raise ShapeError(
                f"the text is {len(ids)} tokens long and the model was trained on {self.gpt.config.context_length}. "
                f"Shorten it, or pass most={len(ids)} to look at a longer one all the same."
            )
        return torch.tensor([ids])

    def pieces(self, tokens: Tensor) -> list[str]:
        """What each of the `tokens` stands for, as text; a part of a character shows as �."""
        return [self.tokenizer.decode([token], skip_special_tokens=False) for token in tokens.flatten().tolist()]

    def stream(self, text: str, max_new_tokens: int = 100, **sampling: Any) -> Iterator[str]:
        """What follows the text, `max_new_tokens`, piece by piece as it comes; `sampling` is that of `GPT.stream`.

        Of a text beyond the context the model reads the end.
        """
        ids = self.tokens(text, most=10**9)[0].tolist()
        new: list[int] = []
        said = ""
        for token in self.gpt.stream(ids, max_new_tokens, **sampling):
            new.append(token)
            whole = self.tokenizer.decode(new)
            if not whole.endswith("\ufffd"):  # a character of several bytes may come in several tokens
                yield whole[len(said) :]
                said = whole
        rest = self.tokenizer.decode(new)[len(said) :]
        if rest:
            yield rest

    def write(self, text: str, max_new_tokens: int = 100, **sampling: Any) -> str:
        """The text and what follows it; `max_new_tokens` and `sampling` as in `stream`."""
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


def load(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    checksums: dict[str, str] | None = None,
) -> LanguageModel:
    """A model that `examples/train_gpt.py` has written.

    Args:
        folder: with `weights.safetensors` and `tokenizer.json`.
        device: where to put it.
        dtype: of its weights.
        checksums: SHA-256 of its files by name; anything is read unless given.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}; expected one that examples/train_gpt.py has written.")
    safetensors = need("safetensors", "builtin", "the built-in model and its like")
    tokenizers = need("tokenizers", "builtin", "the built-in model and its like")
    for name in CHECKSUMS:
        _check_file(folder / name, (checksums or {}).get(name))
    try:
        with safetensors.safe_open(str(folder / "weights.safetensors"), framework="pt", device="cpu") as file:
            config = _config(folder, file.metadata() or {})
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except CheckpointError:
        raise
    except Exception as error:  # both libraries raise their own kinds, and bare Exception
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
        raise CheckpointError(f"{folder}: the weights do not fit the sizes beside them: {error}") from error
    return LanguageModel(gpt.eval().requires_grad_(False), tokenizer)


class _Unset(TorchFunctionMode):
    """Leaves out the drawing of first weights; on the meta device it would import torch's compiler, which takes 1 s."""

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
            f"{path.name} is not in {path.parent}; expected what examples/train_gpt.py writes, weights.safetensors and "
            f"tokenizer.json."
        )
    if checksum is not None and hashlib.sha256(path.read_bytes()).hexdigest() != checksum:
        raise CheckpointError(f"{path} is damaged: its checksum is not the one it was shipped with. Install again.")


def _config(folder: Path, metadata: dict[str, str]) -> GPTConfig:
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder}: the weights have the format {metadata.get('format')!r}; this version of headwise reads "
            f"{FORMAT!r}."
        )
    told = json.loads(metadata["config"])
    return GPTConfig(**{name: told[name] for name in GPTConfig.__dataclass_fields__ if name in told})
