"""The cell magic `%%headwise_check`: runs a cell and judges its class, or judges a fragment as a file."""

import argparse
import ast
import dataclasses
import shlex
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from headwise.check import check
from headwise.check.mistakes import Finding, place
from headwise.check.report import Report
from headwise.errors import HeadwiseError, OptionError


def check_cell(shell: Any, line: str, cell: str) -> None:
    """Run a notebook cell, then print a report on the class named in the line, or on the last class it defines.

    Code outside any class, such as a `forward` alone, is judged as in a file. The line takes the options --form,
    --against and --solution of the command.
    """
    try:
        asked = _asked(shell, line)
        name = asked.pop("name") or last_class(cell)
        report = _on_fragment(shell, cell, asked) if name is None else None
        report = report or _on_class(shell, name, cell, asked)
    except HeadwiseError as error:
        print(f"%%headwise_check: {error}")
        return
    if report is not None:
        print(report if not report.solution else f"{report}\n\nA correct class:\n\n{report.solution}")


class _Options(argparse.ArgumentParser):
    """The line of the magic; what it does not take is an error for the reader of the notebook, and ends nothing."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}. The line takes the name of a class, --form, --against and --solution.")


def _asked(shell: Any, line: str) -> dict[str, Any]:
    """The name of the class, and the options of `check`."""
    parser = _Options("%%headwise_check", add_help=False, allow_abbrev=False)
    parser.add_argument("name", nargs="?")
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument("--form")
    compared.add_argument("--against")
    parser.add_argument("--solution", action="store_true")
    try:
        words = shlex.split(line)
    except ValueError as error:  # a quote that is not closed
        raise OptionError(f"{error} in {line!r}.") from error
    asked = vars(parser.parse_args(words))
    against = asked["against"]
    return asked | {"against": shell.user_ns.get(against, against)}  # a class of the notebook, or a file


def _on_fragment(shell: Any, cell: str, asked: dict[str, Any]) -> Report | None:
    """The report on code outside any class; None where there is none that looks like attention."""
    if not any(isinstance(node, ast.FunctionDef | ast.Assign) for node in _statements(cell)):
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cell.py"
        path.write_text(cell, encoding="utf-8")
        report = check(path, **asked)
    if report.subject == path.name:  # nothing in it is
        return None
    return _placed(report, shell)


def _on_class(shell: Any, name: str | None, cell: str, asked: dict[str, Any]) -> Report | None:
    """The report on a class, after its cell has run; None where that has failed."""
    ran = shell.run_cell(cell)
    if getattr(ran, "success", True) is False:  # the notebook has shown why; the class may be an older one
        return None
    if name is None:
        raise OptionError("this cell defines no class; name one, as in %%headwise_check MyAttention")
    if name not in shell.user_ns:
        raise OptionError(f"no {name} is defined in this notebook")
    report = check(shell.user_ns[name], **asked)
    return _placed(report, shell) if name in classes_of(cell) else report


def _placed(report: Report, shell: Any) -> Report:
    """The report with the n of `In [n]` in place of a file."""
    count = len(shell.user_ns.get("In", [""])) - 1  # IPython stores the input of a cell before it runs
    report.findings = [_in_cell(finding, count) for finding in report.findings]
    if report.stops is not None:
        report.stops += 1  # with the line of the magic
        report.ending = place(report.stops, execution_count=count or None)
    return report


def _in_cell(finding: Finding, count: int) -> Finding:
    """The finding with the n of `In [n]`; its line number counts the line of the magic, as notebooks do."""
    if finding.line is None:
        return finding
    return dataclasses.replace(finding, line=finding.line + 1, execution_count=count or None)


def classes_of(cell: str) -> list[str]:
    """The classes that a cell defines, in order; none if it is not Python, which the notebook has shown already."""
    return [node.name for node in _statements(cell) if isinstance(node, ast.ClassDef)]


def _statements(cell: str) -> list[ast.stmt]:
    """What a cell consists of; nothing if it is not Python."""
    try:
        return ast.parse(cell).body
    except SyntaxError:
        return []


def last_class(cell: str) -> str | None:
    """The class to judge unless one is named: the last whose name mentions attention or heads, else the last."""
    found = classes_of(cell)
    likely = [name for name in found if "att" in name.lower() or "head" in name.lower()]
    return (likely or found)[-1] if found else None
