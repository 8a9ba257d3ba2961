"""The model a user names: the built-in one, one of our own training, or a transformers model in a folder."""

from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from headwise.errors import CheckpointError
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
        from headwise.models.folder import open_folder

        return open_folder(folder)
    return load(folder)
