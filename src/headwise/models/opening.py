"""The model a user names: the built-in one, one of our own training, or a transformers model in a folder."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headwise.errors import CheckpointError, HeadwiseError, MissingExtraError, OptionError, ShapeError, need
from headwise.models.builtin import load, load_builtin


@runtime_checkable
class TextModel(Protocol):
    """A model with its tokenizer, whose heads can be watched over a text."""

    @property
    def module(self) -> nn.Module:
        """The model itself."""

    @property
    def trained(self) -> int | None:
        """How many tokens it was made for, where that is known."""

    @property
    def limit(self) -> int | None:
        """How many tokens it can read; None for any number."""

    def tokens(self, text: str, *, most: int | None = None) -> Tensor:
        """The tokens of a text, (1, T); an error where there are more than `most`."""

    def pieces(self, tokens: Tensor) -> list[str]:
        """What each of the `tokens` stands for, as text."""

    def read(self, tokens: Tensor) -> None:
        """Run over the tokens (1, T), for who watches; nothing is predicted."""


def open_model(name: str | Path) -> TextModel:
    """The model of this `name`: "builtin", a folder that `examples/train_gpt.py` wrote, or one of transformers."""
    if name == "builtin":
        return load_builtin()
    folder = Path(name)
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {folder}; expected builtin, a folder that examples/train_gpt.py has written, or one "
            f"with a transformers model (config.json, safetensors, tokenizer.json). Nothing is downloaded."
        )
    if (folder / "config.json").is_file():
        return open_folder(folder)
    return load(folder)


# A transformers model in a folder on disk, on our core: config.json, safetensors, tokenizer.json. Never the hub.


class FolderModel:
    """A transformers model and its tokenizer, whose heads can be watched; see `TextModel`."""

    def __init__(self, module: nn.Module, tokenizer: Any, trained: int | None, limit: int | None) -> None:
        self.module, self.tokenizer, self.trained, self.limit = module, tokenizer, trained, limit

    def tokens(self, text: str, *, most: int | None = None) -> Tensor:
        """The tokens of the text with those the model frames it with, (1, T)."""
        if not isinstance(text, str) or not text:
            raise OptionError(f"text={text!r}: expected a text of at least one character.")
        ids = self.tokenizer.encode(text).ids
        most = self.limit if most is None else most
        if most is not None and len(ids) > most:
            raise ShapeError(f"the text is {len(ids)} tokens long and the model reads {most}. Shorten it.")
        if not ids:
            raise OptionError(f"text={text!r}: the tokenizer makes no token of it.")
        return torch.tensor([ids])

    def pieces(self, tokens: Tensor) -> list[str]:
        """What each token stands for, as text."""
        return [self.tokenizer.decode([token], skip_special_tokens=False) for token in tokens.flatten().tolist()]

    def read(self, tokens: Tensor) -> None:
        """Run the body of the model over the tokens (1, T), for who watches; nothing is predicted."""
        body: Any = getattr(self.module, "base_model", self.module)
        cached = "use_cache" in inspect.signature(body.forward).parameters
        try:
            body(tokens, **({"use_cache": False} if cached else {}))
        except IndexError as error:
            raise ShapeError(
                f"{type(self.module).__name__} cannot read these {tokens.shape[1]} tokens ({error}): a token or a "
                f"position lies beyond its tables. Shorten the text, and see that the tokenizer is the model's own."
            ) from error

    def __repr__(self) -> str:
        return f"FolderModel({type(self.module).__name__}, context {self.trained})"


def open_folder(folder: Path) -> FolderModel:
    """The model in a folder, on `attn_implementation="headwise"`. An encoder and decoder is read as its encoder."""
    transformers = need("transformers", "huggingface", "models of others")
    tokenizer = _tokenizer(folder)
    try:
        with quiet(transformers):
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            module = loaded(_kind(transformers, config), folder, use_safetensors=True)
    except HeadwiseError:
        raise
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(f"{folder} cannot be read as a transformers model: {_first_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        module = module.get_encoder()
    trained = getattr(config, "max_position_embeddings", None)
    return FolderModel(module.eval().requires_grad_(False), tokenizer, trained, _limit(module, trained))


def loaded(kind: Any, folder: Path, **options: Any) -> Any:
    """A model of a transformers class from the disk alone, on our core; refused where weights are missing."""
    module, info = kind.from_pretrained(
        folder, local_files_only=True, attn_implementation="headwise", output_loading_info=True, **options
    )
    missing = [name for name in info["missing_keys"] if "pooler" not in name]  # which comes after all attention
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of the model's weights are not in its files, such as {sorted(missing)[0]}. They "
            f"would be random; save the whole model with model.save_pretrained(folder)."
        )
    return module


def _tokenizer(folder: Path) -> Any:
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(
            f"tokenizer.json is not in {folder}, so no text can be read. Save the model's tokenizer there: "
            f"tokenizer.save_pretrained({str(folder)!r})."
        )
    try:
        return need("tokenizers", "builtin", "texts").Tokenizer.from_file(str(folder / "tokenizer.json"))
    except MissingExtraError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be read: {_first_line(error)}") from error


def _kind(transformers: Any, config: Any) -> Any:
    """The class that reads the weights as they were saved."""
    names = " ".join(getattr(config, "architectures", None) or [])
    return transformers.AutoModelForCausalLM if "CausalLM" in names or "LMHead" in names else transformers.AutoModel


def _limit(module: nn.Module, trained: int | None) -> int | None:
    """How many positions a table of learned ones has room for; None where positions are computed."""
    if trained is None:
        return None
    words: Any = getattr(module, "get_input_embeddings", lambda: None)()
    for table in module.modules():
        if isinstance(table, nn.Embedding) and table is not words and 0 <= table.num_embeddings - trained <= 2:
            before = 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa counts from behind its padding
            return min(trained, table.num_embeddings - before)
    return None


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' progress bars and reports; what matters of them we say ourselves."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
