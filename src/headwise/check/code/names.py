"""The names that code reads from its module, and where they come from."""

import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from headwise.check.code.case import Case
from headwise.check.code.project import is_project_module
from headwise.check.code.stubs import Stub, StubModule


def names_used(target: Any) -> set[str]:
    """Global names that a class or function reads, including those read by its helpers in the same project."""
    found: set[str] = set()
    for thing, names, _ in _reads(target):
        found |= names
        if inspect.isclass(thing):
            found |= {base.__name__ for base in thing.__mro__} | {"nn", "torch"}
    return found


def imports_missing_in_siblings(case: Case) -> dict[str, set[str]]:
    """Names that code of the class's project reads and its file forgot to import, by the path of that file."""
    found: dict[str, set[str]] = {}
    for sibling in [] if case.loaded is None else case.loaded.siblings:
        for _, names, space in _reads(case.target):
            if space is sibling.namespace and (missing := names & set(sibling.missing_imports)):
                found.setdefault(str(sibling.path), set()).update(missing)
    return found


def stand_ins_used(target: Any) -> dict[str, str]:
    """Names that a class or its helpers read and that are only stand-ins, with where they should come from."""
    held = {name: space[name] for _, names, space in _reads(target) for name in names if name in space}
    stubs = {name: value._stub_name for name, value in held.items() if isinstance(value, Stub)}
    return stubs | {name: value.__name__ for name, value in held.items() if isinstance(value, StubModule)}


def _reads(target: Any) -> Iterator[tuple[Any, set[str], dict[str, Any]]]:
    """A class or function and its helpers in the same project, the names each member reads, and where it does so."""
    pending, seen = [target], set()
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing, set(), {}
        for member in _members(thing):
            code = getattr(getattr(member, "__func__", member), "__code__", None)
            if code is not None:
                names = {name for part in _codes(code) for name in part.co_names}
                space = getattr(member, "__globals__", {})
                yield thing, names, space
                pending += [space[n] for n in names if n in space and _is_from_file(space[n])]


def _members(thing: Any) -> list[Any]:
    members = vars(thing).values() if inspect.isclass(thing) else [thing]
    return [inspect.unwrap(member) if callable(member) else member for member in members]


def _is_from_file(thing: Any) -> bool:
    return (inspect.isclass(thing) or inspect.isfunction(thing)) and is_project_module(getattr(thing, "__module__", ""))


def globals_read(target: Any) -> dict[str, int]:
    """Names that the target's own methods look up in the module, and the first line that does so."""
    found: dict[str, int] = {}
    for member in _members(target):
        for part in _codes(getattr(member, "__code__", None)):
            for step in dis.get_instructions(part):
                if step.opname == "LOAD_GLOBAL" and step.positions is not None and step.positions.lineno is not None:
                    found.setdefault(str(step.argval), step.positions.lineno)
    return found


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    """A code object and those nested in it."""
    if code is not None:
        yield code
        for part in code.co_consts:
            if isinstance(part, CodeType):
                yield from _codes(part)
