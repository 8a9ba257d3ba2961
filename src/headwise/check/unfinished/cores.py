"""Functions of queries, keys and values, which are judged as a layer without weights."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headwise.check.arguments import WEIGHTS_IN, CallSizes, call_role, constructor_role, parameters_of, plain
from headwise.check.calls import INPUTS
from headwise.check.code.case import Case
from headwise.check.faults.questions import SINGLE, WEIGHTLESS
from headwise.check.fits import side_by_side
from headwise.check.report import Report

PARTS = "projections, the split into heads and the output projection are not part of it"


@dataclass
class FunctionCase(Case):
    """A function that was wrapped, reported with its own file."""

    @property
    def filename(self) -> str | None:
        """The file of the function."""
        return super().filename if self.loaded is not None else self.target.function.__code__.co_filename


def is_core(target: Any) -> bool:
    """Whether it is a function of queries, keys and values that have been projected and split already."""
    if not inspect.isfunction(target):
        return False
    names = [p.name for p in parameters_of(target)]
    other = [name for name in names if call_role(name) not in INPUTS]
    own = any(plain(n) in WEIGHTS_IN or constructor_role(n) in ("heads", "width") for n in other)
    return {"query", "key", "value"} <= {call_role(name) for name in names} and not own


def core_report(case: Case, judge: Callable[[Case], Report]) -> Report:
    """The report on such a function, called with heads (B, H, T, D), or with (B, T, D) where that is what it takes."""
    function, names = case.target, ", ".join(p.name for p in parameters_of(case.target))
    reports = []
    for shape, split in (("(B, H, T, D)", True), ("(B, T, D)", False)):
        report = judge(as_layer(case, split=split))
        report.subject, report.call = f"{function.__name__}({names})", f"inputs of shape {shape}"
        report.assumed = list(getattr(function, "assumed", ()))
        report.variants = [words for words in report.variants if words != SINGLE]
        report.variants += [PARTS] if WEIGHTLESS in report.variants else []
        reports.append(report)
        if report.exit_code == 0:
            return report
    return min(reports, key=_doubt)


def _doubt(report: Report) -> int:
    """How little a report says: one that only tells of a crash, perhaps because of the shape, says least."""
    crashed = report.verdict == "wrong" and all(f.name in ("crashes", "contiguous", "size-fixed") for f in report.wrong)
    return {"partial": 0, "unfinished": 1, "unknown": 4}.get(report.verdict, 3 if crashed else 1)


def as_layer(case: Case, *, split: bool) -> Case:
    """The function as a layer without weights; with `split`, its inputs are cut into heads and its result is merged."""

    heads = CallSizes().H if split else 1

    def start(layer: nn.Module) -> None:
        nn.Module.__init__(layer)
        layer.__dict__["num_heads"] = heads

    def call(given: dict[str, Any]) -> Any:
        inputs = {n: _cut(v, heads, split) if call_role(n) in INPUTS else v for n, v in given.items()}
        first = next(v for n, v in inputs.items() if call_role(n) in INPUTS)
        widths = {p.name: first.shape[-1] for p in parameters_of(case.target) if _is_width(p)}
        return _with_first_merged(case.target(**inputs, **widths))

    class Layer(nn.Module):  # reads no global name, because those are looked up in the learner's file
        core = True
        function = staticmethod(case.target)

        def __init__(self) -> None:
            start(self)

        def forward(self, **given: Any) -> Any:
            return call(given)

    Layer.forward.__signature__ = _signature(case.target)  # type: ignore[attr-defined]
    Layer.__name__ = Layer.__qualname__ = case.name
    return FunctionCase(**(vars(case) | {"target": Layer}))


def _cut(x: Tensor, heads: int, split: bool) -> Tensor:
    """(B, H, T, D), or a copy of the input as it is."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2) if split else x.clone()


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    named = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters_of(function) if not _is_width(p)]
    return inspect.Signature([own, *named])


def _is_width(parameter: inspect.Parameter) -> bool:
    """Whether it is the width of a head, which the caller of a function has to pass."""
    return constructor_role(parameter.name) == "head_width" and parameter.default is parameter.empty


def _with_first_merged(returned: Any) -> Any:
    if isinstance(returned, tuple) and returned:
        return (_with_first_merged(returned[0]), *returned[1:])
    heads = isinstance(returned, Tensor) and returned.dim() == 4 and returned.shape[-1] != returned.shape[-2]
    return side_by_side(returned) if heads else returned
