"""Every public name says what it is, what it takes, and stands in the reference of docs/."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import headwise

ROOT = Path(__file__).parent.parent
PACKAGES = ("", ".check", ".learn", ".models", ".parallel", ".textbook", ".view")
ROOMS = {
    "attention",
    "layer",
    "masks",
    "study",
    "weights",
}  # what these export is for other rooms, and for `headwise` itself
MODULES = {f"headwise{package}": importlib.import_module(f"headwise{package}") for package in PACKAGES}
NAMES = {f"{place}.{name}": getattr(module, name) for place, module in MODULES.items() for name in module.__all__}
THINGS = {name: thing for name, thing in NAMES.items() if not isinstance(thing, ModuleType)}
# A constant has no words of its own: those of its type are about dictionaries and tuples.
DOCUMENTED = [name for name, thing in NAMES.items() if isinstance(thing, ModuleType) or callable(thing)]
# Letters of the dimension legend, torch's own words, and what nothing but its name could explain.
EVIDENT = {"B", "H", "T", "S", "D", "device", "dtype", "path", "data"}
MADE_BY_US = "made by `"  # says a class whose constructor is not for users


def methods(kind):
    """The public methods and properties that a class defines, or has from a base of ours, by name."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("headwise")]
    found = {name: member for base in reversed(own) for name, member in vars(base).items() if name[0] != "_"}
    for name, member in found.items():
        plain = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
        if inspect.isfunction(plain):
            yield name, plain


CALLED = {
    f"{name}.{method}" if method else name: function
    for name, thing in THINGS.items()
    for method, function in (
        [("", thing)] if inspect.isfunction(thing) else methods(thing) if inspect.isclass(thing) else []
    )
}
# Classes with a constructor written by hand; those of records and protocols say nothing of their own.
MADE = {
    name: kind
    for name, kind in THINGS.items()
    if inspect.isclass(kind) and inspect.isfunction(vars(kind).get("__init__"))
    if not hasattr(kind, "__dataclass_fields__") and not getattr(kind, "_is_protocol", False)
}


def unexplained(function, words):
    """Parameters that the words do not speak of, and whose name alone does not say what they are."""
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    said = set(re.findall(r"\w+", words))
    return [name for name in names if name not in said | EVIDENT]


def test_the_packages_are_those_that_have_public_names():
    files = (ROOT / "src" / "headwise").glob("*/__init__.py")
    found = {path.parent.name for path in files if "__all__" in path.read_text(encoding="utf-8")}
    assert found - ROOMS == {package.strip(".") for package in PACKAGES if package}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_name_says_what_it_is(name):
    words = NAMES[name].__doc__ or ""
    assert len(words.split()) >= 3
    assert not words.startswith(f"{name.split('.')[-1]}("), "these are the words of a dataclass about itself"


@pytest.mark.parametrize("name", CALLED)
def test_everything_that_can_be_called_says_what_it_gives_and_takes(name):
    words = CALLED[name].__doc__ or ""
    assert words.strip()
    assert unexplained(CALLED[name], words) == []


@pytest.mark.parametrize("name", MADE)
def test_every_class_says_what_it_is_made_of(name):
    words = MADE[name].__doc__ or ""
    if MADE_BY_US not in words:
        assert unexplained(MADE[name].__init__, words) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_stands_in_the_reference(name):
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    thing, short = NAMES[name], name.split(".")[-1]
    spellings = {name, f"{getattr(thing, '__module__', '')}.{short}"}
    spellings |= {f"headwise.{short}"} if getattr(headwise, short, None) is thing else set()
    assert spellings & shown


@pytest.mark.parametrize("name", ["check", "survey", "view"])
def test_verbs_are_plain_typed_functions(name):
    verb = getattr(headwise, name)
    signature = inspect.signature(verb)
    assert inspect.isfunction(verb)
    assert inspect.Signature.empty not in {
        signature.return_annotation,
        *(p.annotation for p in signature.parameters.values()),
    }
