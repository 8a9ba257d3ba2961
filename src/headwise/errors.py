"""One small family of errors; each is a `HeadwiseError` and the builtin a Python user would expect."""

import importlib
from types import ModuleType


class HeadwiseError(Exception):
    """The root of every error headwise raises on purpose."""


class ShapeError(HeadwiseError, ValueError):
    """A tensor has the wrong number of dimensions or the wrong size."""


class HeadCountError(ShapeError):
    """A number of heads does not divide what it must divide."""


class MaskError(HeadwiseError, ValueError):
    """A mask does not fit, or means something other than "True may attend"."""


class DtypeError(HeadwiseError, TypeError):
    """A tensor has a dtype that attention cannot use, or two tensors disagree."""


class DeviceError(HeadwiseError, ValueError):
    """Two tensors of one call live on different devices."""


class OptionError(HeadwiseError, ValueError):
    """An option is outside its range or contradicts another option."""


class UnknownOptionError(OptionError, TypeError):
    """An option that does not exist, perhaps by another library's name for it."""


class CacheError(HeadwiseError, ValueError):
    """A cache is full, or does not fit what it is asked to keep."""


class CheckpointError(HeadwiseError, ValueError):
    """A state dict is of no known layout, or does not fit the layout it seems to have."""


class MapIndexError(HeadwiseError, IndexError):
    """An index lies outside an attention map, or is of a kind that maps do not take."""


class MapSizeError(HeadwiseError, MemoryError):
    """A dense tensor was asked for that is larger than the limit."""


class StaleMapError(HeadwiseError, RuntimeError):
    """A tensor that an attention map looks at was changed after the map was made."""


class MissingExtraError(HeadwiseError, ImportError):
    """An optional dependency is not installed."""


# Packages that only some parts need: imported when they are used, and named with their install command when absent.


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
