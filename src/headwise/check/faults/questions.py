"""What the faults of all stages share: the form of a question, and small measurements of a reading."""

import ast
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.check.arguments import constructor_role, parameters_of, plain
from headwise.check.binding import Bound
from headwise.check.calls import Inputs
from headwise.check.code.case import Case
from headwise.check.code.constants import SIZE_ROLES
from headwise.check.fits import Role, unused_rows
from headwise.check.mistakes import Found
from headwise.check.objects import tensors
from headwise.check.reading import AttentionReading
from headwise.check.vocabulary import stream

WEIGHTLESS = "it has no weights of its own"
SINGLE = "a single head"
PARTIAL = re.compile(r"window|local|block|axial|swin|chunk|spars|stride|dilat|band|longformer|bigbird", re.IGNORECASE)
OUTPUT_NAME = re.compile(r"^(\w*proj\w*|\w*out\w*|[wb]_?o|dense|fc_?o\w*|o|unify\w*)$", re.IGNORECASE)
MOVED = 1e-9  # relative change that counts; everything is computed in double precision
Fault = Callable[[Bound, AttentionReading | None], Found]


def of_stages(question: Callable[[Bound, AttentionReading], Found]) -> Fault:
    """Run a check only where attention between tokens was read."""

    @functools.wraps(question)
    def asked(bound: Bound, reading: AttentionReading | None) -> Found:
        if reading is not None and reading.between_tokens:
            yield from question(bound, reading)

    return asked


def asked_heads(bound: Bound) -> int | None:
    """The number of heads that the constructor was given."""
    given = [v for k, v in bound.built.arguments.items() if constructor_role(k) == "heads" and type(v) is int]
    if not given and bound.built.config is not None and bound.built.names_with_role("heads"):
        return bound.sizes.H
    return given[0] if given else None


def listed(words: list[str]) -> str:
    """`query, key and value`"""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def near(a: float, b: float) -> bool:
    """Whether two numbers agree to four digits."""
    return abs(a - b) <= 1e-4 * abs(b)


def has_number(bound: Bound) -> bool:
    """Whether there is a parameter of a single number: a learned gate."""
    return any(t.numel() == 1 and t.requires_grad for t in tensors(bound.thing).values())


def has_effect(bound: Bound, held: Tensor) -> bool:
    """Whether other numbers in a stored tensor change the output."""
    kept = held.detach().clone()
    noise = torch.rand(held.shape, generator=torch.Generator().manual_seed(31), dtype=torch.float64)
    with torch.no_grad():
        held.add_(noise.to(held.dtype) + 0.1)
        output = bound.output_of(bound.inputs)
        held.copy_(kept)
    return output is not None and not bound.gives(output)


def influence(bound: Bound) -> Tensor | None:
    """(T, T), True where a change of input token j changes output token i; None where that cannot be measured."""
    T, before = bound.inputs.query.shape[1], bound.output
    if bound.inputs.key.shape[1] != T or before is None or before.dim() != 3 or before.shape[1] != T:
        return None
    found = torch.zeros(T, T, dtype=torch.bool)
    for j in range(T):
        after = bound.output_of(_changed(bound.inputs, j))
        if after is None or after.shape != before.shape:
            return None
        found[:, j] = (after - before).abs().amax((0, 2)) > MOVED * before.abs().max()
    return found


def _changed(inputs: Inputs, j: int) -> Inputs:
    """The same inputs with another token at position j; a tensor in several roles stays one tensor."""
    made: dict[int, Tensor] = {}
    for x in inputs:
        if id(x) not in made:
            other = x.clone()
            other[:, j] = other[:, j].flip(-1) + 1
            made[id(x)] = other
    return Inputs(*(made[id(x)] for x in inputs))


MANGLED = re.compile(r"^_[A-Za-z]\w*?__")  # a private attribute holds the name of its class: `_MultiQuery__out`


def role_in(parameter: str) -> str | None:
    """Which of query, key and value the name of a parameter says it makes; None where it says none or several."""
    for word in (plain(MANGLED.sub("", part)) for part in parameter.split(".")):
        short = (
            word.removesuffix("weight").removesuffix("proj").removesuffix("s").removeprefix("w").removeprefix("proj")
        )
        for role in ("query", "key", "value"):
            if (
                role in word
                or role == stream(short)
                or short in (role[0], f"b{role[0]}", f"to{role[0]}", f"fc{role[0]}", f"linear{role[0]}")
            ):
                return role
    return None


def idle_role(bound: Bound, reading: AttentionReading) -> str | None:
    """Which of query, key and value has rows in a layer for all three that no map uses; None where it is not clear."""
    parts, D = reading.projections, reading.core.query.shape[-1]
    for name in {name for part in parts.values() for name in part.role.names}:
        held = tensors(bound.thing)[name]
        if held.dim() != 2 or len(held) % 3 or sum(name in part.role.names for part in parts.values()) < 3:
            continue
        rows, third = unused_rows([part.weight for part in parts.values()], held), len(held) // 3
        orders = ([r // third for r in rows], [r // D % 3 for r in rows], [r % 3 for r in rows])
        for numbers in orders if len(rows) == third else ():
            if len(set(numbers)) == 1:
                return ("query", "key", "value")[numbers[0]]
    return None


def named_role(role: Role) -> str | None:
    """The one role that the names of the parameters say, if they all say one."""
    named = {role_in(name) for name in role.names}
    return named.pop() if len(named) == 1 else None


def lines_run(bound: Bound) -> set[int]:
    """Lines of the file that were running when some tensor was made."""
    return {line for node in bound.trace.nodes for line in node.stack}


def triangle_line(case: Case, reading: AttentionReading) -> int | None:
    """The line that makes a triangle, in the call or in the constructor."""
    made = (n.line for n in reading.core.trace.nodes if n.op in ("tril", "triu") and n.line is not None)
    return next(made, None) or case.line_with(r"\b(tril|triu)\w*\(")


class Written(NamedTuple):
    """A number of the file that stands in place of an argument of the constructor."""

    name: str
    number: int
    line: int

    @property
    def words(self) -> str:
        """The argument and the number."""
        return f"the constructor takes {self.name} and uses {self.number} in its place"


def number_in_place_of_argument(case: Case, role: str | None = None) -> Written | None:
    """A size that the constructor takes as an argument, and sets to a number of its own."""
    taken = {constructor_role(p.name): p.name for p in parameters_of(case.target)}
    for node in ast.walk(case.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        target, number = node.targets[0], node.value.value
        meant = constructor_role(target.attr) if isinstance(target, ast.Attribute) else None
        if type(number) is int and meant in taken and meant in SIZE_ROLES and role in (None, meant):
            return Written(taken[meant], number, node.lineno)
    return None
