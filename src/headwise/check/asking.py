"""`headwise.check(...)`: judges a class, a function, an object or a file."""

import inspect
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from headwise.check import sandbox
from headwise.check.report import Report


def check(
    target: Any,
    *,
    name: str | None = None,
    build: str | None = None,
    call: str | None = None,
    thorough: bool = False,
    solution: bool = False,
    seconds: float = sandbox.SECONDS,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """A report on somebody's multi-head attention: right, wrong with the mistake named, a known variant, or not judged.

    >>> from headwise.textbook import HeadsAtOnce
    >>> report = check(HeadsAtOnce)
    >>> report.verdict, report.variants
    ('variant', ['causal inside'])

    Args:
        target: a path (judged in a process of its own, with limits) or a class, function or object, which runs in this
            process: hand in only code you would run yourself.
        name: the class or function to judge in a file; the best candidate unless given.
        build: how to make it, such as "MyAttention(32, 4)"; E is the width, H the heads, context the longest length.
        call: how to call it, such as "m(x, x, x)"; q, k, v and x are inputs.
        thorough: measure speed as well.
        solution: put a right class of the same kind into the report.
        seconds: time limit for a file.
        progress: called with a word for every stage.
    """
    if isinstance(target, str | Path):
        return sandbox.run(
            Path(target),
            name=name,
            build=build,
            call=call,
            seconds=seconds,
            thorough=thorough,
            solution=solution,
            progress=progress,
        )
    from headwise.check.case import Case  # nothing of the checker is loaded before it is asked
    from headwise.check.judging import judge
    from headwise.check.telling import told

    case = Case(name or _name(target), target, _namespace(target), None, progress, thorough)
    bound = None
    if build is not None or call is not None:
        bound = told(case, build, call)
    report = judge(case, bound, solution=solution)
    report.in_process = True
    return report


def _name(target: Any) -> str:
    return getattr(target, "__name__", type(target).__name__)


def _namespace(target: Any) -> MutableMapping[str, Any]:
    """A copy of the globals around the target where names can be supplied without touching them... if that suffices.

    Functions read their own globals, so a name that is missing there stays missing: it is a finding.
    """
    for thing in (target, type(target)):
        members = [thing] if inspect.isfunction(thing) else list(vars(thing).values()) if inspect.isclass(thing) else []
        for member in members:
            space = getattr(member, "__globals__", None)
            if space is not None:
                return dict(space)
    return dict(vars(sys.modules["__main__"]))
