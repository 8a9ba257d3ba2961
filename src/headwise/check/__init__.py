"""Judges anybody's multi-head attention: load, bind, trace, read, prove, report.

`check` runs the whole; `mistakes` is the table of what can be named, `faults` finds them. The machinery is imported by
the first check. Imports `layer` and everything below it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from headwise.check.mistakes import MISTAKES, Finding, Mistake
from headwise.check.report import Report

__all__ = ["MISTAKES", "Finding", "Mistake", "Report", "check"]


def check(
    target: Any,
    *,
    name: str | None = None,
    build: str | None = None,
    call: str | None = None,
    form: str | None = None,
    against: Any = None,
    thorough: bool = False,
    solution: bool = False,
    seconds: float = 60.0,
    require_jail: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """A report on somebody's multi-head attention: right, wrong with the mistake named, a known variant, or not judged.

    >>> from headwise.textbook import HeadsAtOnce
    >>> report = check(HeadsAtOnce)
    >>> report.verdict, report.variants
    ('variant', ['a built-in causal mask'])

    Args:
        target: a path, which is judged in a process of its own, with limits; or a class, function or object, which runs
            in this process, so pass only code that you would run yourself.
        name: the class or function to judge in a file; the best candidate unless given.
        build: how to make it, such as "MyAttention(32, 4)"; E is the width, H the number of heads, context the longest
            length.
        call: how to call it, such as "m(x, x, x)"; q, k, v and x are inputs.
        form: the assignment whose constructor, call, return values, names and mask it must have: course, book,
            homework, interview or handbook.
        against: a reference that it must agree with: a class, an object, or a path such as "other.py:Class".
        thorough: also measure speed and try `torch.compile`.
        solution: put a right class of the same kind into the report.
        seconds: time limit for a file.
        require_jail: refuse to run a file unless it is kept from your files, the network and other processes.
        progress: called with a word for every stage.
    """
    from headwise.check import sandbox

    if form is not None:
        from headwise.check.assignment.forms import find_form

        find_form(form)
    if isinstance(target, str | Path):
        return sandbox.run(
            Path(target),
            name=name,
            build=build,
            call=call,
            form=form,
            against=_reference_path(against),
            seconds=seconds,
            thorough=thorough,
            solution=solution,
            require_jail=require_jail,
            progress=progress,
        )
    from headwise.check.assignment.comparison import find_assignment
    from headwise.check.code.case import Case
    from headwise.check.verdict import judge

    assignment = find_assignment(form, against)
    called = name or str(getattr(target, "__name__", type(target).__name__))
    case = Case(called, target, namespace(target), None, progress, thorough, assignment)
    report = judge(case, build, call, solution)
    report.in_process, report.evidence = True, None
    return report


def namespace(target: Any) -> MutableMapping[str, Any]:
    """A copy of the globals around the target: names that we supply must not be left behind there."""
    for thing in (target, type(target)):
        members = [thing] if inspect.isfunction(thing) else list(vars(thing).values()) if inspect.isclass(thing) else []
        for member in members:
            space = getattr(member, "__globals__", None)
            if space is not None:
                return dict(space)
    return dict(vars(sys.modules["__main__"]))


def _reference_path(against: Any) -> str | None:
    """Where another process finds the reference."""
    if against is None or isinstance(against, str | Path):
        return None if against is None else str(against)
    from headwise.errors import OptionError

    owner = against if inspect.isclass(against) or inspect.isfunction(against) else type(against)
    try:
        file = inspect.getsourcefile(owner)
    except TypeError:
        file = None
    if file is None or not inspect.isclass(against):
        raise OptionError(
            f"a file is judged in a process of its own, where this {owner.__name__} does not exist. "
            'Pass against="file.py:Class", or pass the class to judge instead of its file.'
        )
    return f"{file}:{owner.__name__}"


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext headwise.check` adds the cell magic `%%headwise_check`."""
    from headwise.check.magic import check_cell

    shell.register_magic_function(lambda line, cell: check_cell(shell, line, cell), "cell", "headwise_check")
