"""Keeps an attempt going: supplies a missing name or attribute, remembers it, and runs again."""

import contextlib
import inspect
import linecache
import re
from collections.abc import MutableMapping
from typing import Any

from torch import nn

from headwise.check.attempt import Attempt
from headwise.check.bound import double_by_default, quiet
from headwise.check.names import constructor_role, value_for
from headwise.check.repairs import Repaired, Repairs, error_line
from headwise.check.sizes import Sizes

FEW = 6  # repairs of one attempt


def mended(work: Any, thing: Any, attempt: Attempt, sizes: Sizes, repaired: Repaired) -> Any:
    """Run, and where a name or an attribute is missing, supply it, remember it and run again."""
    for _ in range(FEW):
        try:
            with (
                Repairs(attempt.filename, repaired),
                quiet(),
                contextlib.nullcontext() if thing is None else double_by_default(),
            ):
                return work()
        except NameError as error:
            name, line = getattr(error, "name", None), error_line(error, attempt.filename)
            if name is None or isinstance(error, UnboundLocalError):
                raise
            if attempt.late is not None and attempt.late(name):
                continue
            if not _supply(attempt.namespace, name, sizes):
                raise
            repaired.names[name] = line
        except AttributeError as error:
            line = error_line(error, attempt.filename)
            if "before Module.__init__() call" in str(error) and inspect.isclass(attempt.target):
                repaired.super_missing = True
                work = _with_super(attempt.target, work)
            elif not _supply_attribute(error, thing, sizes, repaired, line, attempt.filename):
                raise
    return work()


def _with_super(cls: Any, work: Any) -> Any:
    """The same work while the class's constructor first does what `super().__init__()` would have done."""
    original = cls.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        original(self, *args, **kwargs)

    def patched() -> Any:
        cls.__init__ = init
        try:
            return work()
        finally:
            cls.__init__ = original

    return patched


def _supply(namespace: MutableMapping[str, Any], name: str, sizes: Sizes) -> bool:
    lengths = ("seq_len", "T", "seq_length", "n", "t", "num_tokens", "len", "length", "L")
    known: dict[str, Any] = (
        dict.fromkeys(lengths, sizes.T) | dict.fromkeys(("N", "B", "b"), sizes.B) | {"device": "cpu"}
    )
    role = constructor_role(name)
    if name in known:
        namespace[name] = known[name]
    elif role is not None:
        namespace[name] = sizes.T if role == "context" and "max" not in name else value_for(role, sizes)
    else:
        return False
    return True


def _supply_attribute(
    error: AttributeError, thing: Any, sizes: Sizes, repaired: Repaired, line: int | None, filename: str | None
) -> bool:
    match = re.search(r"object has no attribute '(\w+)'", str(error))
    name = match[1] if match else None
    role = constructor_role(name) if name else None
    if thing is None or name is None or role is None or getattr(error, "obj", thing) is not thing:
        return False
    called = re.search(rf"\bself\.{name}\(", "" if line is None else linecache.getline(filename or "", line))
    if called and role != "dropout":
        return False
    setattr(thing, name, nn.Identity() if called else value_for(role, sizes))
    repaired.attributes[name] = line
    return True
