"""The models a server offers: named once, opened when first asked for."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.errors import CheckpointError, OptionError
from headwise.models import TextModel, open_model
from headwise.view.serve.refusal import Refusal


class Models:
    """Models by the name a page shows: "builtin", or that of their folder.

    Args:
        paths: "builtin" or folders, the first is the one a page begins with.
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
            raise OptionError("no model is named; pass --model builtin or the folder of one.")

    def _free_name(self, path: str) -> str:
        """The last part of the path; two of the same name are numbered."""
        name = path if path == "builtin" else Path(path).resolve().name or "model"
        count = sum(known == name or known.startswith(f"{name} (") for known in self._paths)
        return name if count == 0 else f"{name} ({count + 1})"

    @property
    def names(self) -> list[str]:
        """In the order they were given."""
        return list(self._paths)

    def add(self, name: str, model: TextModel) -> None:
        """Offer a model that is there already."""
        self._paths[name], self._open[name] = name, model

    def name_of(self, name: str | None) -> str:
        """The name, the first unless given; refused where there is none."""
        if name is None:
            return self.names[0]
        if name not in self._paths:
            raise Refusal(404, f"there is no model of this name; there are {', '.join(self.names)}.")
        return name

    def __getitem__(self, name: str) -> TextModel:
        """The model, opened now if it is not yet."""
        with self._lock:
            if name not in self._open:
                self._open[name] = open_model(self._paths[name])
            return self._open[name]

    def told(self) -> list[dict[str, Any]]:
        """What a page needs to offer them."""
        return [{"name": name, "open": name in self._open} for name in self.names]
