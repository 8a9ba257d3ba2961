"""What an exercise is: its idea, its model answer, and its parts with their hints and tests."""

import ast
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from headwise.check.sizes import CallSizes

Space = Mapping[str, Any]
NAMELESS = CallSizes(B=-1, T=-2, S=-3, H=10**9, E=-(10**18))
STUB = "raise NotImplementedError"
WAITS = "not judged before the other steps are there"
CACHE_STEP = 11  # counts as a step of its own


class WrongPartError(Exception):
    """A part of an answer is wrong; the message says how."""


class MissingNameError(WrongPartError):
    """An answer does not define a name; the message is the name."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One step of an exercise.

    Args:
        name: as in "the next is "the mask"".
        question: the first hint, a question.
        idea: the second hint.
        line: the third hint, the line of code.
        test: raises `WrongPartError` if the part is wrong; None if the checker judges it.
        steps: the steps of attention that it stands for; findings of the checker on them belong to this part.
        last: a test of what neither of them sees; it is tried if they find nothing.
    """

    name: str
    question: str
    idea: str
    line: str
    test: Callable[[Space], None] | None = None
    steps: tuple[int, ...] = ()
    last: Callable[[Space], None] | None = None

    def hint(self, level: int) -> str:
        """A hint, from 1 (a question) to 3 (the line)."""
        return (self.question, self.idea, self.line)[level - 1]


class DocumentedCall(NamedTuple):
    """One call of a class: sizes for its constructor, shapes of its inputs and of its output, if it is causal, and how
    many results it has.
    """

    sizes: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    causal: bool = False
    results: int = 1

    def named(self, parameters: Sequence[str]) -> CallSizes:
        """The sizes by name, so that a shape can be told with the names of its axes.

        Args:
            parameters: of the constructor, such as d_model and num_heads.
        """
        given = dict(zip(parameters, self.sizes, strict=False))
        (B, T, E), S = self.inputs[0], self.inputs[-1][1]
        return CallSizes(B=B, T=T, S=S, H=given.get("num_heads", 1), E=E, O=given.get("d_head", E))


@dataclasses.dataclass(frozen=True)
class Exercise:
    """One exercise of the course.

    Args:
        name: the name on the command line and of its file.
        title: the title.
        difficulty: from 1 to 5.
        minutes: how long it takes somebody who meets the idea for the first time.
        idea: the one idea that it teaches.
        solution: a model answer, from which the skeleton is made.
        parts: what is graded, in order.
        judged: the class that the checker judges, if there is one.
        call: one call of it as its docstring says: sizes for the constructor, shapes of the inputs and of the output.
        ignores: mistakes of the checker that later exercises deal with.
        early: how the checker puts what the class must lack, and what to say of one that has it already.
        seconds: time limit for each part.
        more: where to read on.
    """

    name: str
    title: str
    difficulty: int
    minutes: int
    idea: str
    solution: str
    parts: tuple[Part, ...]
    judged: str | None = None
    call: DocumentedCall | None = None
    ignores: tuple[str, ...] = ()
    early: tuple[str, str] | None = None
    seconds: float = 10.0
    more: str = ""

    @functools.cached_property
    def skeleton(self) -> str:
        """The file that the learner fills in: signatures, docstrings and shapes, without the code."""
        return skeleton_of(self.solution)

    @property
    def axes(self) -> CallSizes:
        """The sizes of its call by name; without a call, sizes that no axis has, so that shapes are told in numbers."""
        if self.call is None:
            return NAMELESS
        classes = [node for node in ast.parse(self.solution).body if isinstance(node, ast.ClassDef)]
        judged = next(node for node in classes if node.name == self.judged)
        maker = next(node for node in judged.body if getattr(node, "name", "") == "__init__")
        assert isinstance(maker, ast.FunctionDef)  # noqa: S101 - for the type checker
        return self.call.named([argument.arg for argument in maker.args.args[1:]])


def skeleton_of(solution: str) -> str:
    """A source with the body of every function that has a docstring replaced by `raise NotImplementedError`.

    >>> print(skeleton_of('def f(x):\\n    "One more."\\n    return x + 1\\n'))
    def f(x):
        "One more."
        raise NotImplementedError
    <BLANKLINE>
    """
    lines = solution.splitlines()
    tree = ast.parse(solution)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)]
    for node in sorted(functions, key=lambda node: -node.lineno):
        first, last = node.body[1], node.body[-1]
        indent = " " * first.col_offset
        kept = [f"{indent}super().__init__()"] if node.name == "__init__" else []
        lines[first.lineno - 1 : last.end_lineno] = [*kept, f"{indent}{STUB}"]
    return "\n".join(lines) + "\n"


# What tests by meaning share ----------------------------------------------------------------------------------------


def needs(space: Space, name: str) -> Any:
    """The function or class `name` of the answer."""
    if name not in space:
        raise MissingNameError(name)
    return space[name]


def made(space: Space, name: str, *sizes: Any) -> torch.nn.Module:
    """The class `name` of the answer, made with these sizes, in evaluation mode."""
    torch.manual_seed(0)
    layer: torch.nn.Module = needs(space, name)(*sizes)
    return layer.eval()


def ignores(space: Space, name: str, sizes: tuple[int, ...], others: tuple[int, ...], x: torch.Tensor) -> bool:
    """Whether the class `name` is the same for two lists of sizes: equal parameters make equal outputs."""
    first, second = made(space, name, *sizes), made(space, name, *others)
    pairs = list(zip(first.parameters(), second.parameters(), strict=False))
    if len([*first.parameters()]) != len([*second.parameters()]) or any(p.shape != q.shape for p, q in pairs):
        return False
    with torch.no_grad():
        for p, q in pairs:
            q.copy_(p)
        return torch.allclose(first(x), second(x), atol=1e-6)


def returned(found: Any) -> str:
    """What a call gives that should give a tensor, in words."""
    if isinstance(found, tuple):
        return f"{len(found)} results; expected one, the output"
    return "nothing: is there a return?" if found is None else f"a {type(found).__name__}; expected a tensor"


def close(found: Any, wanted: torch.Tensor, what: str) -> None:
    """Fail unless `found` is the tensor `wanted`, up to rounding."""
    if not isinstance(found, torch.Tensor):
        raise WrongPartError(f"{what} returns {returned(found)}")
    if found.shape != wanted.shape:
        raise WrongPartError(f"{what} has shape {tuple(found.shape)}; expected {tuple(wanted.shape)}")
    if wanted.dtype == torch.bool and found.dtype != torch.bool:
        kind = str(found.dtype).removeprefix("torch.")
        raise WrongPartError(f"{what} holds numbers ({kind}); expected booleans, True or False: dtype=torch.bool")
    is_truth = wanted.dtype == torch.bool
    if found.dtype == torch.bool or is_truth:
        found, wanted = found.to(torch.float64), wanted.to(torch.float64)
    gap = (found.detach().double() - wanted.double()).abs()
    gap = torch.where(found.double() == wanted.double(), torch.zeros_like(gap), gap)
    if not gap.max() < 1e-4:  # a NaN is not below anything
        at = int(gap.nan_to_num(torch.inf).argmax())
        place = [int(i) for i in torch.unravel_index(torch.tensor(at), gap.shape)]
        where = f"{place}" if what.endswith(")") else f" at {place}"
        got, should = (_number(x.flatten()[at].item(), is_truth=is_truth) for x in (found, wanted))
        raise WrongPartError(f"{what}{where} is {got}; expected {should}")


def _number(value: float, *, is_truth: bool) -> str:
    return str(bool(value)) if is_truth else f"{value:.4g}"


def unused(layer: torch.nn.Module, output: torch.Tensor) -> list[str]:
    """The names of layers with parameters, and of the layer's own parameters, that an output does not depend on."""
    parameters = dict(layer.named_parameters())
    found = torch.autograd.grad(output.sum(), [*parameters.values()], allow_unused=True)
    owners = [name.rpartition(".")[0] or name for name in parameters]
    used = {name for name, grad in zip(owners, found, strict=True) if grad is not None}
    return [name for name in dict.fromkeys(owners) if name not in used]
