"""The table of mistakes, the tuple of faults, and the one rule that joins them."""

import ast
import inspect
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
from right_forms import KeepMask

import headwise
from headwise.check import MISTAKES, Finding, Report, check
from headwise.check.code.case import Case
from headwise.check.faults import (
    CALLS_AGAIN,
    CERTIFICATE,
    FAULTS,
    IF_NOTHING_IS_WRONG,
    ONLY_IF_RIGHT,
    PROGRESS,
    Examination,
)
from headwise.check.faults.stages import stage_findings
from headwise.check.mistakes import ORDER, settled
from headwise.check.proof import Recipe
from headwise.check.reading import read
from headwise.check.search import bind

CHECK = Path(inspect.getfile(check)).parent
SOURCES = {path: path.read_text(encoding="utf-8") for path in CHECK.rglob("*.py")}


def names(findings):
    return [finding.name for finding in findings]


def test_a_finding_that_another_explains_is_left_out():
    assert names(settled([Finding("batch-leak"), Finding("split-view")])) == ["split-view"]
    assert names(settled([Finding("nan-empty-row"), Finding("single-head")])) == ["single-head", "nan-empty-row"]


def test_a_symptom_is_left_out_beside_a_mistake_that_may_cause_it():
    assert names(settled([Finding("batch-leak"), Finding("single-head")])) == ["single-head"]
    assert names(settled([Finding("batch-leak"), Finding("cross-length")])) == ["batch-leak", "cross-length"]
    assert names(settled([Finding("cross-length"), Finding("scale-missing")])) == ["cross-length", "scale-missing"]


def test_what_is_explained_still_explains_others():
    found = [Finding("too-wide"), Finding("no-out-proj"), Finding("dead-parameter")]
    assert names(settled(found)) == ["too-wide"]


def test_the_most_serious_comes_first_and_every_mistake_once():
    found = [Finding("slow"), Finding("half-fails"), Finding("scale-other", "a"), Finding("scale-other", "b")]
    assert [(f.name, f.detail) for f in settled(found)] == [("scale-other", "a"), ("half-fails", ""), ("slow", "")]


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_every_row_of_the_table_is_complete(mistake):
    assert mistake.severity in ORDER
    assert mistake.why.endswith(".")
    assert mistake.hint.endswith(".")
    assert set(mistake.explains) <= set(MISTAKES) - {mistake.name}
    assert not [name for name in mistake.explains if mistake.name in MISTAKES[name].explains], "both would be left out"
    assert mistake.step in {"", *(f.name for f in fields(Recipe))}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_of_the_table_can_be_found(name):
    tables = {CHECK / "mistakes.py", CHECK / "templates.py"}
    assert any(f'"{name}"' in text for path, text in SOURCES.items() if path not in tables)


def test_every_fault_is_a_function_of_what_was_bound_and_read():
    every = (*FAULTS, *IF_NOTHING_IS_WRONG, *ONLY_IF_RIGHT)
    assert len(set(every)) == len(every)
    assert {*CALLS_AGAIN, *PROGRESS} <= set(every)
    assert {fault for faults in CERTIFICATE.values() for fault in faults} <= {*FAULTS, *IF_NOTHING_IS_WRONG}
    for fault in every:
        assert list(inspect.signature(fault).parameters)[:2] == ["bound", "reading"]
        assert fault.__doc__


def test_the_faults_of_a_bound_object_can_be_asked_one_by_one():
    bound, _ = bind(Case("KeepMask", KeepMask, {}, thorough=False))
    reading = read(bound)
    assert stage_findings(bound, reading) == []
    found = Examination()
    found.ask(bound, reading, FAULTS)
    assert names(found.findings) == ["nan-empty-row"]


def test_check_is_a_typed_function_and_its_module_imports_little():
    assert inspect.isfunction(headwise.check)
    assert headwise.check is check
    assert get_type_hints(check)["return"] is Report
    body = ast.parse(SOURCES[CHECK / "__init__.py"]).body
    imported = {node.module for node in body if isinstance(node, ast.ImportFrom) and node.module.startswith("headwise")}
    assert imported == {"headwise.check.mistakes", "headwise.check.report"}


class Notebook:
    def __init__(self):
        self.magics = {}

    def register_magic_function(self, function, kind, name):
        self.magics[kind, name] = function


@pytest.mark.parametrize("extension", ["headwise", "headwise.check"])
def test_the_cell_magic_is_registered(extension):
    shell = Notebook()
    sys.modules[extension].load_ipython_extension(shell)
    assert list(shell.magics) == [("cell", "headwise_check")]
