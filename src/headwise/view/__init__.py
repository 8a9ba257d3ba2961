"""What heads do, to look at. The package can be called: `headwise.view(model, text)` gives a `Sight`."""

import sys
from types import ModuleType
from typing import Any

from headwise.view.sight import Head, Pair, Sight

__all__ = ["Head", "Pair", "Sight"]


class _Callable(ModuleType):
    """A package named like its only verb: calling it is looking."""

    def __call__(self, model: Any, tokens: Any = None, **options: Any) -> Sight:
        """A sight; see `headwise.view.looking.view`."""
        from headwise.view.looking import view

        return view(model, tokens, **options)


sys.modules[__name__].__class__ = _Callable
