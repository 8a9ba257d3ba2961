"""The errors of headwise: each is a `HeadwiseError` and also the builtin error that fits."""

import difflib
import importlib
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType


class HeadwiseError(Exception):
    """The base of every error that headwise raises on purpose."""


class ShapeError(HeadwiseError, ValueError):
    """A tensor has the wrong number of dimensions or the wrong size."""


class HeadCountError(ShapeError):
    """A number of heads does not divide the size that it must divide."""


class MaskError(HeadwiseError, ValueError):
    """A mask does not fit, or means something other than "True may attend"."""


class DtypeError(HeadwiseError, TypeError):
    """A tensor has a dtype that attention cannot use, or two tensors disagree."""


class DeviceError(HeadwiseError, ValueError):
    """Two tensors of one call live on different devices."""


class OptionError(HeadwiseError, ValueError):
    """An option is outside its range or contradicts another option."""


class UnknownOptionError(OptionError, TypeError):
    """An option does not exist, perhaps because it has another name here."""


class CacheError(HeadwiseError, ValueError):
    """A cache is full, or the new keys and values do not fit it."""


class CheckpointError(HeadwiseError, ValueError):
    """A state dict has no known layout, or does not fit the layout it seems to have."""


class MapIndexError(HeadwiseError, IndexError):
    """An index is out of range, or of a type that attention maps do not support."""


class MapSizeError(HeadwiseError, MemoryError):
    """A dense tensor was requested that is larger than the limit."""


class StaleMapError(HeadwiseError, RuntimeError):
    """A tensor that an attention map depends on was changed after the map was made."""


class MissingExtraError(HeadwiseError, ImportError):
    """An optional dependency is not installed."""


def unknown_option(what: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> UnknownOptionError:
    """The error for an option that `what` does not have, which says what it is called here.

    Args:
        what: what was called, as the start of a sentence: "a call".
        name: the option that was given.
        known: the options there are.
        elsewhere: what names of other libraries are called here.
    """
    near = difflib.get_close_matches(name, list(known), 1)
    cure = f"Here it is {elsewhere[name]}." if name in elsewhere else f"Did you mean {near[0]}=?" if near else ""
    return UnknownOptionError(f"{what} has no option {name}=. {cure}".rstrip())


# Names that do not exist, and untrusted text ------------------------------------------------------------------------

WORD = 4  # letters of a word that is compared on its own


def suggestion(name: str, known: Iterable[str], listing: str = "") -> str:
    """What to say after "no such name": the nearest known one, and where all of them are listed.

    >>> suggestion("chek", ["check", "course"])
    ' Did you mean check? Known: check, course.'
    >>> suggestion("chek", ["check", "course"], "headwise --help")
    ' Did you mean check? All of them: headwise --help.'
    """
    known = list(known)
    near = nearest(name, known)
    guess = "" if near is None else f" Did you mean {near}?"
    return guess + (f" All of them: {listing}." if listing else f" Known: {', '.join(known)}.")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is spelled most like this one, as a whole or in one of its words; None if none is like it.

    >>> nearest("chek", ["check", "course"]), nearest("splitt", ["split-and-merge"]), nearest("x", ["check"])
    ('check', 'split-and-merge', None)
    """
    wanted, names = name.lower(), {whole.lower(): whole for whole in known}
    words = {word: whole for whole in names.values() for word in re.split(r"[^a-z0-9]+", whole.lower())}
    spelled = {word: whole for word, whole in words.items() if len(word) >= WORD} | names
    near = difflib.get_close_matches(wanted, spelled, 1, cutoff)
    near = near or [other for other in spelled if len(wanted) > 1 and other.startswith(wanted)]
    return spelled[near[0]] if near else None


def printable(text: str, *, lines: bool = False) -> str:
    """A text from a file or a name, safe to print: characters that could steer a terminal are written as escapes.

    >>> print(printable("a\\x1b[31mred\\u202e\\n"))
    a\\x1b[31mred\\u202e\\x0a

    Args:
        text: anything, such as the name of a layer or an error of another library.
        lines: keep line breaks and tabs.
    """
    kept = "\n\t" if lines else ""
    return "".join(letter if letter.isprintable() or letter in kept else _escaped(ord(letter)) for letter in text)


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# Optional packages are imported when they are used. If one is missing, the error names its install command.


def install_command(extra: str) -> str:
    """How to install an extra: from the clone or the wheel that headwise comes from, if it is still there.

    >>> install_command("serve").endswith("[serve]'")
    True
    """
    source = _source()
    if source is not None and source.is_dir() and source.samefile(os.curdir):
        source = Path(os.curdir)
    wanted = f"{'headwise' if source is None else source}[{extra}]"
    return f"pip install {shlex.quote(wanted)}"


def _source() -> Path | None:
    """The clone that headwise runs in, or the clone or wheel that pip installed it from; None for an index."""
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file() and (clone / "src" / "headwise").is_dir():
        return clone
    import json  # these here, since nearly nobody needs them
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        origin = distribution("headwise").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlsplit(json.loads(origin or "{}").get("url", ""))
    path = Path(url2pathname(url.path))
    return path if url.scheme == "file" and path.exists() else None


def need(package: str, extra: str, purpose: str, verb: str = "need") -> ModuleType:
    """The imported package, or a `MissingExtraError` that says how to install it.

    Args:
        package: the module to import, such as "rich.table".
        extra: the extra of headwise that installs it.
        purpose: what needs it, as the start of a sentence: "colored tables".
        verb: "needs" after a purpose in the singular.
    """
    name = package.partition(".")[0]
    try:
        importlib.import_module(name)
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(f"{purpose} {verb} {name}. Install it with: {install_command(extra)}") from error
