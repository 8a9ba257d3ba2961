"""Functions and classes without weights that take queries, keys and values: they are judged as a layer without weights.

What their caller has to pass, the width of a head or the divisor of the scores, is passed as a right caller would.
"""

import inspect
import itertools
import re
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

OWN = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
SHAPES = {"(B, H, T, D)": True, "(B, T, D)": False}  # whether the heads are split
PARTS = "projections, the split into heads and the output projection are not part of it"


OF_SHAPES = {
    "crashes",
    "contiguous",
    "size-fixed",
    "layer-width",
    "parts-count",
    "product-axes",
}  # errors, perhaps ours
WEIGHTS = re.compile(r"Linear|Parameter|Conv1d|Embedding|MultiheadAttention|_in_proj|randn")
SCALER = re.compile(
    r"temperature|temp|tau|scale|scaling|(scale|scaling)factor|sqrt(dk?|dim|headdim)|norm(alizer|factor)?"
)


@dataclass
class CoreCase(Case):
    """A function or class that was wrapped; it is reported with its own file."""

    @property
    def filename(self) -> str | None:
        """The file of the function."""
        return super().filename if self.loaded is not None else self.target.function.__code__.co_filename


def is_core(case: Case) -> bool:
    """Whether it takes queries, keys and values that have been projected and split already."""
    entry = _entry(case.target)
    if entry is None or isinstance(case, CoreCase) or (inspect.isclass(case.target) and not _is_weightless(case)):
        return False
    names = [p.name for p in parameters_of(entry)]
    other = [name for name in (*names, *_made_with(case.target)) if call_role(name) not in INPUTS]
    own = any(plain(n) in WEIGHTS_IN or constructor_role(n) in ("heads", "width") for n in other)
    return {"query", "key", "value"} <= {call_role(name) for name in names} and not own


def _entry(target: Any) -> Any:
    """The function that takes queries, keys and values; None where there is none."""
    found = getattr(target, "forward", None) if inspect.isclass(target) else target
    return found if inspect.isfunction(found) else None


def _made_with(target: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a class's constructor."""
    return {p.name: p for p in parameters_of(target)} if inspect.isclass(target) else {}


def _is_weightless(case: Case) -> bool:
    """Whether a class is a module that makes no weights and uses no other class of its file."""
    text = "" if case.loaded is None else case.loaded.definition(case.name)
    others = {n for n, thing in case.namespace.items() if inspect.isclass(thing) and n != case.name}
    words = set(re.findall(r"\w+", text))
    return issubclass(case.target, nn.Module) and bool(words) and not WEIGHTS.search(text) and not words & others


def core_report(case: Case, judge: Callable[[Case], Report]) -> Report:
    """The report on a core, called with heads (B, H, T, D), or with (B, T, D) where that is what it takes."""
    scaled = any(map(_is_scaler, _made_with(case.target).values()))
    reports = []
    for (shape, split), power in itertools.product(SHAPES.items(), (0.5, -0.5) if scaled else (0.5,)):
        report = judge(as_layer(case, split=split, power=power))
        _name(report, case, shape, power)
        reports.append(report)
        if report.exit_code == 0:
            return report
    return min(reports, key=lambda report: (_doubt(report), (report.cause or "").startswith("scale-")))


def _name(report: Report, case: Case, shape: str, power: float) -> None:
    """Give a report the names of what was wrapped."""
    names = ", ".join(p.name for p in parameters_of(_entry(case.target)) if p.name != "self")
    report.call = f"inputs of shape {shape}"
    report.assumed = list(getattr(case.target, "assumed", ()))
    if inspect.isclass(case.target):
        values = {n: _given(p, power) for n, p in _made_with(case.target).items()}
        known = ", ".join(f"{n}={words}" for n, words in values.items() if words)
        report.subject, report.call = f"{case.name}({known})", f"forward({names}), {report.call}"
    else:
        report.subject = f"{case.target.__name__}({names})"
    report.variants = [words for words in report.variants if words != SINGLE]
    report.variants += [PARTS] if WEIGHTLESS in report.variants else []


def _given(parameter: inspect.Parameter, power: float) -> str:
    """What a caller has to pass, in words; nothing for an option."""
    if _is_width(parameter):
        return "head_dim"
    return "" if not _is_scaler(parameter) else "√head_dim" if power > 0 else "1/√head_dim"


def _doubt(report: Report) -> int:
    """How little a report says: one that only tells of a crash, perhaps because of the shape, says least."""
    crashed = report.verdict == "wrong" and all(f.name in OF_SHAPES for f in report.wrong)
    return {"partial": 0, "unfinished": 1, "unknown": 4}.get(report.verdict, 3 if crashed else 1)


def as_layer(case: Case, *, split: bool, power: float = 0.5) -> Case:
    """The core as a layer without weights; with `split`, inputs are cut into heads and the result is merged."""

    heads, entry, made_with = CallSizes().H if split else 1, _entry(case.target), _made_with(case.target)

    def start(layer: nn.Module, options: dict[str, Any]) -> None:
        nn.Module.__init__(layer)
        layer.__dict__ |= {"num_heads": heads, "options": options}

    def core_for(layer: nn.Module, width: int) -> Any:
        """The function itself; of a class, one object for each width."""
        if not inspect.isclass(case.target):
            return case.target
        name = f"of_width_{width}"
        if name not in layer._modules:
            needed = {n: width for n, p in made_with.items() if _is_width(p)}
            needed |= {n: width**power for n, p in made_with.items() if _is_scaler(p)}
            made: Any = case.target(**needed, **layer.__dict__["options"])
            layer.add_module(name, made.train(layer.training))
        return layer._modules[name]

    def call(layer: nn.Module, given: dict[str, Any]) -> Any:
        cut = {n for n, v in given.items() if call_role(n) in INPUTS and v is not None}
        inputs = {n: _cut(v, heads, split) if n in cut else v for n, v in given.items()}
        first = next(v for n, v in inputs.items() if call_role(n) in INPUTS)
        widths = {p.name: first.shape[-1] for p in parameters_of(entry) if _is_width(p)}
        return _with_first_merged(core_for(layer, first.shape[-1])(**inputs, **widths))

    class Layer(nn.Module):  # reads no global name, because those are looked up in the learner's file
        core = True
        function = staticmethod(entry)

        def __init__(self, **options: Any) -> None:
            start(self, options)

        def forward(self, **given: Any) -> Any:
            return call(self, given)

    Layer.forward.__signature__ = _signature(entry)  # type: ignore[attr-defined]
    Layer.__init__.__signature__ = _of_options(made_with)  # type: ignore[attr-defined]
    Layer.__name__ = Layer.__qualname__ = case.name
    return CoreCase(**(vars(case) | {"target": Layer}))


def _cut(x: Tensor, heads: int, split: bool) -> Tensor:
    """(B, H, T, D), or a copy of the input as it is."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2) if split else x.clone()


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    named = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters_of(function) if not _is_width(p) and p.name != "self"]
    return inspect.Signature([OWN, *named])


def _of_options(made_with: dict[str, inspect.Parameter]) -> inspect.Signature:
    """The signature of a constructor without what the width of a head decides."""
    named = [p for p in made_with.values() if not _is_width(p) and not _is_scaler(p)]
    return inspect.Signature([OWN, *(p.replace(kind=p.KEYWORD_ONLY) for p in named)])


def _is_width(parameter: inspect.Parameter) -> bool:
    """Whether it is the width of a head, which the caller has to pass."""
    return constructor_role(parameter.name) == "head_width" and parameter.default is parameter.empty


def _is_scaler(parameter: inspect.Parameter) -> bool:
    """Whether it is a factor or divisor of the scores, which the caller has to pass."""
    named = SCALER.fullmatch(plain(parameter.name)) is not None and parameter.default is parameter.empty
    return named and parameter.annotation not in (bool, "bool")


def _with_first_merged(returned: Any) -> Any:
    if isinstance(returned, tuple) and returned:
        return (_with_first_merged(returned[0]), *returned[1:])
    heads = isinstance(returned, Tensor) and returned.dim() == 4 and returned.shape[-1] != returned.shape[-2]
    return side_by_side(returned) if heads else returned
