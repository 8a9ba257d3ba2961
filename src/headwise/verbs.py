"""Packages that can be called, each named like its verb: `headwise.view(model, text)` is `headwise.view.view`."""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(package: str, verb: Callable[..., Any]) -> None:
    """Let a call of the package be a call of `verb`, with its signature and words for who asks."""

    @functools.wraps(verb)
    def call(_: ModuleType, *args: Any, **options: Any) -> Any:
        return verb(*args, **options)

    own = inspect.signature(verb)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    call.__signature__ = own.replace(parameters=[itself, *own.parameters.values()])  # type: ignore[attr-defined]
    sys.modules[package].__class__ = type("CallablePackage", (ModuleType,), {"__call__": call})
