"""Which names of its module a class or function reads, the helpers in the same file included."""

import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from headwise.check.loading import MODULE


def names_used(target: Any) -> set[str]:
    """Global names that a class or function reads, its helpers in the same file included."""
    found: set[str] = set()
    pending, seen = [target], set()
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        members = list(vars(thing).values()) if inspect.isclass(thing) else [thing]
        if inspect.isclass(thing):
            found |= {base.__name__ for base in thing.__mro__} | {"nn", "torch"}
        for member in members:
            member = inspect.unwrap(member) if callable(member) else member
            code = getattr(getattr(member, "__func__", member), "__code__", None)
            if code is None:
                continue
            names = set(code.co_names) | {n for c in code.co_consts if hasattr(c, "co_names") for n in c.co_names}
            found |= names
            space = getattr(member, "__globals__", {})
            pending += [space[n] for n in names if n in space and _of_the_file(space[n])]
    return found


def _of_the_file(thing: Any) -> bool:
    return (inspect.isclass(thing) or inspect.isfunction(thing)) and getattr(thing, "__module__", "") == MODULE


def globals_read(target: Any) -> dict[str, int]:
    """Names that the target's own methods look up in the module, and the first line that does."""
    found: dict[str, int] = {}
    members = list(vars(target).values()) if inspect.isclass(target) else [target]
    for member in members:
        code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
        for part in _codes(code):
            for step in dis.get_instructions(part):
                if step.opname == "LOAD_GLOBAL" and step.positions is not None and step.positions.lineno is not None:
                    found.setdefault(str(step.argval), step.positions.lineno)
    return found


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    if code is not None:
        yield code
        for part in code.co_consts:
            if isinstance(part, CodeType):
                yield from _codes(part)
