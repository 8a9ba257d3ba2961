"""One try of a learner's code: what it says, and where in the code an error came from."""

import contextlib
import dataclasses
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import headwise
from headwise.learn.course.exercise import DocumentedCall, MissingNameError, WrongPartError, returned

INSTALLED = (str(Path(headwise.__file__).parent), str(Path(torch.__file__).parent), os.__file__[:-5], "<frozen")
UNWRITTEN = "it is not written yet"
SEES_LATER = "a token sees later ones"
WIDTHS = re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")
QUESTIONS = {
    "'(Linear|ModuleList|Dropout|Embedding|LayerNorm)'": "is a layer used that was not called?",
    "operator.invert": "is the mask boolean?",
    "return_types": "max and min give values and places; take .values",
}
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


@dataclasses.dataclass(frozen=True)
class PartTrial:
    """What a try says, empty if it is content; `raised` if that is an error of Python, and `failure` where it is."""

    words: str = ""
    failure: ErrorPlace | None = None
    raised: bool = False

    @classmethod
    def of(cls, test: Callable[[], None], missing: str) -> "PartTrial":
        """The trial of a test; `missing` is what to say of a name that the answer does not define."""
        try:
            test()
        except EndlessPartError:
            raise
        except MissingNameError as name:
            return cls(missing.format(name))
        except WrongPartError as failure:
            return cls(str(failure))
        except NotImplementedError:
            return cls(UNWRITTEN)
        except SystemExit:
            return cls("it exits Python with exit() or quit()")
        except Exception as error:  # whatever the learner's code raises
            words = f"it raises {type(error).__name__}: {_explained(str(error).rstrip('.'))}{place(error)}"
            return cls(words, failure_in(error), raised=True)
        return cls()


def _explained(error: str) -> str:
    """An error, with what it means where torch does not say it."""
    widths = WIDTHS.search(error)
    if widths is not None:
        return f"{error}: rows of {widths[1]} numbers meet a matrix that takes {widths[2]}"
    asked = next((question for words, question in QUESTIONS.items() if re.search(words, error)), "")
    return f"{error}; {asked}" if asked else error


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
    output = found[0] if isinstance(found, tuple) else found
    if not isinstance(output, torch.Tensor):
        raise WrongPartError(f"the call returns {returned(output)}")
    if tuple(output.shape) != call.output:
        given = ", ".join(map(str, call.inputs))
        raise WrongPartError(f"the call gives shape {tuple(output.shape)} for {given}; expected {call.output}")
    if call.causal:
        _hides_later_tokens(layer, call)


def _hides_later_tokens(layer: Callable[..., Any], call: DocumentedCall) -> None:
    """Fail if an output changes with a later token. A mask that the caller must pass is another exercise."""
    x = torch.randn(call.inputs[0])
    changed = torch.cat([x[:, :-1], torch.randn_like(x[:, -1:])], 1)
    with torch.no_grad():
        found = [layer(given) for given in (x, changed)]
    before, after = (output[0] if isinstance(output, tuple) else output for output in found)
    if not torch.allclose(before[:, :-1], after[:, :-1], atol=1e-5):
        raise WrongPartError(
            f"{SEES_LATER}: called with x alone, its earlier outputs change with the last token. Make the causal mask "
            "in forward; masks that the caller passes come in exercise 8"
        )
