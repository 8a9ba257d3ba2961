"""`import headwise` imports nothing heavy, and its names are the same in whatever order modules are imported."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import headwise

TREE = ast.parse(Path(headwise.__file__).read_text(encoding="utf-8"))
IS_FUNCTION = "assert inspect.isfunction(headwise.check); assert 'torch' not in sys.modules"


def typed_imports():
    """Public name → module, as type checkers read it."""
    block = next(node for node in TREE.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {alias.name: node.module for node in block.body for alias in node.names}


def test_table_imports_for_type_checkers_and_all_agree():
    modules = {name for name in headwise.__all__ if inspect.ismodule(getattr(headwise, name))}
    table = {name: f"headwise.{module}" for name, module in headwise._HOME.items()}
    typed = typed_imports()
    assert sorted(typed) == sorted(headwise.__all__)
    assert {name: module for name, module in typed.items() if name not in modules} == table
    assert {name: f"{typed[name]}.{name}" for name in modules} == {
        name: f"headwise.{headwise._MODULES[name]}" for name in modules
    }


def test_every_public_name_is_listed_and_is_what_its_module_defines():
    assert set(headwise.__all__) <= set(dir(headwise))
    for name, module in headwise._HOME.items():
        assert getattr(headwise, name) is getattr(sys.modules[f"headwise.{module}"], name)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'headwise' has no attribute 'atend'"):
        _ = headwise.atend


@pytest.mark.parametrize(
    "code",
    [
        "import headwise; assert headwise.__version__ and headwise.errors.ShapeError is headwise.ShapeError",
        "import headwise.check.report; import headwise",
        "import headwise; headwise.check; import headwise.check.report",
        "from headwise import check; import headwise; assert headwise.check is check",
        "from headwise.check import Report, check; import headwise; assert headwise.check is check",
        "import importlib, headwise; room = importlib.import_module('headwise.check'); assert inspect.ismodule(room)",
    ],
)
def test_check_is_a_function_in_every_order_of_imports_and_needs_no_torch(code):
    subprocess.run([sys.executable, "-c", f"import inspect, sys; {code}; {IS_FUNCTION}"], check=True)


LATER = """
import headwise.view.color, headwise, inspect
assert inspect.isfunction(headwise.view)
from headwise import *
assert view is headwise.view and inspect.isfunction(check) and inspect.ismodule(probes)
assert headwise.masks.probes is probes
"""
SHOWN = """
import sys, torch, headwise
q = torch.ones(1, 1, 2, 3)
shown = headwise.AttentionMap(q, q)
assert "headwise.view" not in sys.modules
assert shown._repr_html_().startswith("<")
"""


@pytest.mark.parametrize("code", [LATER, SHOWN], ids=["view is a function", "a map is shown"])
def test_what_is_imported_later_is_there_when_it_is_used(code):
    subprocess.run([sys.executable, "-c", code], check=True)
