"""One try of a learner's code: what it says, and where in the code an error came from."""

import ast
import contextlib
import dataclasses
import difflib
import linecache
import os
import re
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import headwise
from headwise.check import MISTAKES
from headwise.check.explain import explained, shapes_met
from headwise.check.sizes import CallSizes
from headwise.check.trace import Trace
from headwise.learn.course.exercise import DocumentedCall, MissingNameError, WrongPartError, returned

INSTALLED = (str(Path(headwise.__file__).parent), str(Path(torch.__file__).parent), os.__file__[:-5], "<frozen")
UNWRITTEN, RAISES = "it is not written yet", "it raises "
SEES_LATER, SEES_EARLIER = "a token sees later ones", "a token sees no later one"
WIDTHS = re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")
QUESTIONS = {
    "'(Linear|ModuleList|Dropout|Embedding|LayerNorm)'": "is a layer used that was not called?",
    "operator.invert": "is the mask boolean?",
    "return_types": "max and min give values and places; take .values",
    "'NoneType' object": "does a function end without a return?",
}
MODULES = {"F": "torch.nn.functional", "nn": "torch.nn", "torch": "torch", "math": "math"}  # by their usual names
ALLOCATED = re.compile(r"tried to allocate (\d+) bytes")
NAMED_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError)
Limit = Callable[[float], contextlib.AbstractContextManager[Any]]


class EndlessPartError(WrongPartError):
    """A part did not end."""


class Span(NamedTuple):
    """A piece of source, from a line and column to another; columns count bytes, as in `ast`."""

    line: int
    column: int
    end_line: int
    end_column: int

    @classmethod
    def of(cls, node: Any) -> "Span":
        """Where a node of a tree is."""
        return cls(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)

    def holds(self, other: "Span") -> bool:
        """Whether another piece is inside this one."""
        return (self.line, self.column) <= (other.line, other.column) and (other.end_line, other.end_column) <= (
            self.end_line,
            self.end_column,
        )


class ErrorPlace(NamedTuple):
    """Where an error came from, in a learner's code."""

    filename: str
    function: str
    span: Span

    @property
    def line(self) -> int:
        """Its line."""
        return self.span.line

    @property
    def expression(self) -> ast.expr | None:
        """What failed, if it is an expression."""
        nodes = ast.walk(ast.parse("".join(linecache.getlines(self.filename))))
        return next((node for node in nodes if isinstance(node, ast.expr) and Span.of(node) == self.span), None)


@dataclasses.dataclass(frozen=True)
class PartTrial:
    """What a try says, empty if it is content; `raised` if that is an error of Python, and `failure` where it is."""

    words: str = ""
    failure: ErrorPlace | None = None
    raised: bool = False
    selfless: bool = False  # a method has no self, so that none of its lines does what it should
    error: str = ""  # Python's or torch's own words for it
    meant: str = ""  # the expression that a misspelt or forgotten name stands for

    @classmethod
    def of(cls, test: Callable[[], None], missing: Callable[[str], str], sizes: CallSizes | None = None) -> "PartTrial":
        """The trial of a test.

        Args:
            test: what is tried.
            missing: says something of a name that the answer does not define.
            sizes: of the tensors that the test makes, to tell shapes with the names of their axes.
        """
        try:
            test()
        except EndlessPartError:
            raise
        except MissingNameError as name:
            return cls(missing(str(name)))
        except WrongPartError as failure:
            return cls(str(failure))
        except NotImplementedError:
            return cls(UNWRITTEN)
        except SystemExit:
            return cls("it exits Python with exit() or quit()")
        except Exception as error:  # whatever the learner's code raises
            if (method := method_without_self(error)) is not None:
                line = method.__code__.co_firstlineno
                words = f"{method.__name__} has no self: the first parameter of a method is self (line {line})"
                return cls(words, raised=True, selfless=True)
            place_of = failure_in(error)
            words = f"{RAISES}{type(error).__name__}: {_told(_again(test, error, place_of), place_of, sizes)}"
            return cls(words, place_of, raised=True, error=str(error), meant=_repaired(error, place_of))
        return cls()


class _Raised(NamedTuple):
    error: Exception
    trace: Trace | None


def _again(test: Callable[[], None], error: Exception, failure: ErrorPlace | None) -> _Raised:
    """The same error with a record of what was computed before it; without one if it does not come again."""
    if failure is None:
        return _Raised(error, None)
    trace = Trace(failure.filename)
    try:
        with trace:
            test()
    except EndlessPartError:
        raise
    except Exception as other:  # whatever the learner's code raises
        if (type(other), str(other), failure_in(other)) == (type(error), str(error), failure):
            return _Raised(other, trace)
    return _Raised(error, None)


def _told(raised: _Raised, failure: ErrorPlace | None, sizes: CallSizes | None) -> str:
    """An error with its cause, as the checker tells it, and its line."""
    error, trace = raised
    if failure is not None and sizes is not None and isinstance(error, NAMED_ERRORS):
        found = explained(error, failure.filename, sizes, trace=trace)
        if found is not None:
            asked, line = _question(str(error)), found.line
            if found.name == "float-size" and (divides := _division(error)) is not None:
                asked, line = "/ gives a float, // a whole number", divides
            return f"{found.title}: {found.detail}{asked and f'; {asked}'} (line {line})"
    of_shapes = isinstance(error, RuntimeError) and not ALLOCATED.search(str(error))
    met = "" if sizes is None or not of_shapes else _met(error, failure, sizes)
    if isinstance(error, AssertionError) and not str(error) and failure is not None:
        return f"{_false(error, failure)}{place(error)}"
    return f"{_explained(error)}{met}{place(error)}"


def _met(error: Exception, failure: ErrorPlace | None, sizes: CallSizes) -> str:
    """The shapes of the tensors that met: of the operands or, where they cannot be told, of the statement's names."""
    if failure is None:
        return ""
    words = ", ".join(_operands(error, failure, sizes)) or shapes_met(error, failure.filename, sizes)
    return words and f"; {words}"


def _operands(error: Exception, failure: ErrorPlace, sizes: CallSizes) -> Iterator[str]:
    """The tensors that the expression which failed is computed from, with their shapes."""
    *_, frame = frames(error)
    for part in _parts(failure.expression):
        if any(isinstance(node, ast.NamedExpr | ast.Await) for node in ast.walk(part)):  # it would do something
            continue
        with torch.no_grad(), contextlib.suppress(Exception):  # a name of a comprehension, for example
            value = eval(ast.unparse(part), frame.f_globals, frame.f_locals)  # noqa: S307 - it ran before
            if isinstance(value, torch.Tensor):
                yield f"{ast.unparse(part)} is {sizes.named(value.shape)}"


def _parts(node: ast.expr | None) -> Iterator[ast.expr]:
    """The operands of an expression: of an operator, or of a call with what it is a method of."""
    if isinstance(node, ast.BinOp):
        yield from (node.left, node.right)
    elif isinstance(node, ast.Call):
        given = (*node.args, *(word.value for word in node.keywords))
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        for part in (*owner, *given):
            yield from part.elts if isinstance(part, ast.List | ast.Tuple) else (part,)


def _division(error: BaseException) -> int | None:
    """The line nearest to an error, of those through which it came, that divides with /."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(INSTALLED)]
    return next((frame.lineno for frame in reversed(lines) if re.search(r"(?<!/)/(?!/)", frame.line or "")), None)


def _false(error: AssertionError, failure: ErrorPlace) -> str:
    """The condition that an assertion without words asks for, and the values in it."""
    *_, frame = frames(error)
    condition, values = failure.expression, dict[str, Any]()
    for node in ast.walk(condition) if condition is not None else ():
        if isinstance(node, ast.Name | ast.Attribute):
            with contextlib.suppress(Exception):  # a name that is defined later
                name = ast.unparse(node)
                values[name] = eval(name, frame.f_globals, frame.f_locals)  # noqa: S307 - it ran before
    told = ", ".join(f"{name} is {value}" for name, value in values.items() if isinstance(value, int | float | tuple))
    asked = "what is asserted" if condition is None else ast.unparse(condition)
    return f"{asked} is false" + (f"; {told}" if told else "")


def _explained(error: Exception) -> str:
    """An error, with what it means where torch does not say it."""
    said = str(error).rstrip(".")
    if "view size is not compatible" in said:
        return f"{MISTAKES['contiguous'].title}. {MISTAKES['contiguous'].why.rstrip('.')}"
    if (asked_for := ALLOCATED.search(said)) is not None:
        return f"there is not enough memory for a tensor of {int(asked_for[1]):,} bytes"
    widths = WIDTHS.search(said)
    if widths is not None:
        return f"{said}: rows of {widths[1]} numbers meet a matrix that takes {widths[2]}"
    if (near := _meant(error)) is not None:
        return f"{said}; did you mean {near}?"
    asked = _question(said)
    return f"{said}; {asked}" if asked else said


def _question(said: str) -> str:
    """What to look for where torch names a type only."""
    return next((question for words, question in QUESTIONS.items() if re.search(words, said)), "")


def _meant(error: Exception) -> str | None:
    """The name that a misspelt one is close to: of the object, or of the variables where it is used."""
    if not isinstance(error, AttributeError | NameError) or not error.name:
        return None
    known = {name for frame in frames(error) for name in (*frame.f_locals, *frame.f_globals)}
    if isinstance(error, AttributeError):
        layers = getattr(error.obj, "_modules", {})
        known = {*dir(error.obj), *layers}
    return next(iter(difflib.get_close_matches(error.name, [name for name in known if name[:2] != "__"], 1)), None)


def _repaired(error: Exception, failure: ErrorPlace | None) -> str:
    """What a misspelt name should be, or a module that was not imported, as code; empty if neither is known."""
    expression = None if failure is None else failure.expression
    if isinstance(error, NameError) and error.name in MODULES:
        return f"__import__('importlib').import_module('{MODULES[error.name]}')"
    near = _meant(error)
    if near is None or expression is None:
        return ""
    return f"{ast.unparse(expression.value)}.{near}" if isinstance(expression, ast.Attribute) else near


def frames(error: BaseException) -> Iterator[types.FrameType]:
    """The calls that an error came through, of the learner's code."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(INSTALLED):
            yield frame


def method_without_self(error: BaseException) -> types.FunctionType | None:
    """The method that lacks self, if an error shows it.

    Such a method is given one argument too many, or it names a self that it does not have.
    """
    whole = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [value for frame in whole for value in frame.f_locals.values() if isinstance(value, torch.nn.Module)]
    refused = re.match(r"(?:\w+\.)*(\w+)\(\) takes (\d+) positional arguments? but (\d+) w", str(error))
    for made in {type(module) for module in modules if not _is_installed(type(module))}:
        for name, method in vars(made).items():
            if not isinstance(method, types.FunctionType) or method.__code__.co_varnames[:1] == ("self",):
                continue
            is_refused = refused is not None and refused[1] == name and int(refused[3]) == int(refused[2]) + 1
            runs = any(frame.f_code is method.__code__ for frame in whole)
            if is_refused or (runs and "self" in method.__code__.co_names):
                return method
    return None


def _is_installed(made: type) -> bool:
    return made.__module__.partition(".")[0] in ("torch", "headwise")


def failure_in(error: BaseException) -> ErrorPlace | None:
    """The last expression of the learner's own that an error came through."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(INSTALLED)]
    if not own:
        return None
    frame, line = own[-1], own[-1].lineno or 0
    span = Span(line, frame.colno or 0, frame.end_lineno or line, frame.end_colno or 0)
    return ErrorPlace(frame.filename, frame.name, span)


def place(error: BaseException) -> str:
    """The line of the learner's code that raised the error, in words."""
    failure = failure_in(error)
    return "" if failure is None else f" (line {failure.line})"


# A class as its docstring says it is called -------------------------------------------------------------------------


def as_documented(made: Callable[..., Any], call: DocumentedCall) -> None:
    """Call a class as its docstring says; the checker is content with any way to call it."""
    layer = made(*call.sizes).eval()
    with torch.no_grad():
        found = layer(*(torch.randn(shape) for shape in call.inputs))
    output = found[0] if isinstance(found, tuple) and call.results > 1 else found
    if not isinstance(output, torch.Tensor):
        raise WrongPartError(f"the call returns {returned(output)}")
    if tuple(output.shape) != call.output:
        given = ", ".join(map(str, call.inputs))
        raise WrongPartError(f"the call gives shape {tuple(output.shape)} for {given}; expected {call.output}")
    if len(call.inputs) == 1:
        _reads_as_asked(layer, call)


def _reads_as_asked(layer: Callable[..., Any], call: DocumentedCall) -> None:
    """Fail if an output changes with a later token where that is hidden, or does not where nothing is.

    A mask that the caller must pass is another exercise.
    """
    x = torch.randn(call.inputs[0])
    changed = torch.cat([x[:, :-1], torch.randn_like(x[:, -1:])], 1)
    found = []
    for given in (x, changed):
        torch.manual_seed(0)  # dropout that never stops draws the same for both
        with torch.no_grad():
            found.append(layer(given))
    before, after = (output[0] if isinstance(output, tuple) else output for output in found)
    hides = torch.allclose(before[:, :-1], after[:, :-1], atol=1e-5)
    if hides and not call.causal and x.shape[1] > 1:
        raise WrongPartError(
            f"{SEES_EARLIER}: called with x alone, its earlier outputs do not change with the last token. Nothing is "
            "hidden here unless a mask is passed"
        )
    if call.causal and not hides:
        raise WrongPartError(
            f"{SEES_LATER}: called with x alone, its earlier outputs change with the last token. Make the causal mask "
            "in forward; masks that the caller passes come in exercise 8"
        )
