"""Packages that only some parts need: imported when they are used, and named with their install command when absent."""

import importlib
from types import ModuleType

from headwise.errors import MissingExtraError


def need(package: str, extra: str, purpose: str) -> ModuleType:
    """The imported package, or a `MissingExtraError` that says how to get it.

    Args:
        package: what to import, such as "rich.table".
        extra: the extra of headwise that brings it.
        purpose: what it is for, as the beginning of a sentence: "coloured tables".
    """
    name = package.partition(".")[0]
    try:
        importlib.import_module(name)
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(f"{purpose} need {name}. Install it with: pip install 'headwise[{extra}]'.") from error
