"""Finishes a half-written call the way the reference would, so that the steps that exist can be judged like any others.

The tensors that a call left unused are what it has reached: projections, scores, weights or heads. `Completed` runs the
learner's code up to the gap and adds the remaining steps behind it.
"""

import ast
import inspect
import linecache
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from headwise.check.arguments import CallSizes, constructor_role
from headwise.check.binding import Instance
from headwise.check.faults.questions import role_in
from headwise.check.fits import fit, role, side_by_side, tokens
from headwise.check.objects import entry, modules, signature, tensors
from headwise.check.trace import PRODUCTS, Node, Trace, error_line


@dataclass
class Reached:
    """How far a call came: what was left over, and which steps its shapes show."""

    kind: str = ""  # projections, scores, weights or heads; empty where not even three projections exist
    steps: set[int] = field(default_factory=set)
    line: int | None = None  # where it stopped, or the last line that computed something
    stopped: bool = False  # by an error that only says that something was not written yet
    streams: int = 0  # queries, keys and values that were made
    returned: bool = False  # a result was returned
    behind: list[str] = field(default_factory=list)  # lines whose results still have the heads behind the tokens

    @property
    def last(self) -> int:
        """The last step that exists."""
        return max(self.steps, default=0)


class Completed(nn.Module):
    """A learner's object whose call is carried to the end by the reference."""

    def __init__(self, instance: Instance, gap: Callable[[BaseException], bool]) -> None:
        super().__init__()
        self.inner, self.sizes, self.gap = [instance.thing], instance.sizes, gap
        self.reached = Reached()
        self.filename: str | None = None  # of the learner, once a traced call has told it
        self.order: list[int] | None = None  # queries, keys and values in the order in which they were made
        self.forward = self._with_signature()  # type: ignore[method-assign]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the learner's object, under their own names."""
        yield from ((name, t) for name, t in tensors(self.inner[0]).items() if isinstance(t, nn.Parameter))

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Those of the learner's object."""
        yield from modules(self.inner[0])

    def _with_signature(self) -> Callable[..., Tensor | None]:
        """The call under the names of the learner's own arguments."""

        def forward(*args: Any, **kwargs: Any) -> Tensor | None:
            return Completed.forward(self, *args, **kwargs)

        forward.__signature__ = inspect.Signature(signature(self.inner[0]))  # type: ignore[attr-defined]
        return forward

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The output, or None where too little exists."""
        active = _get_current_dispatch_mode()
        if isinstance(active, Trace):
            return self._completed(active, args, kwargs)
        with Trace(self.filename) as trace:
            return self._completed(trace, args, kwargs)

    def _completed(self, trace: Trace, args: Any, kwargs: Any) -> Tensor | None:
        method = entry(self.inner[0])
        assert method is not None  # noqa: S101 - objects without a method were refused when they were built
        self.filename = trace.filename
        reached, returned = Reached(), None
        try:
            returned = method(*args, **kwargs)
        except Exception as error:
            if not self.gap(error):
                raise
            reached.stopped, reached.line = True, error_line(error, trace.filename)
        inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
        left = Leftover(trace, self, inputs)
        reached.line, reached.returned = reached.line or trace.last_line(), returned is not None
        output, self.reached = left.finish(reached), reached
        second = bool(inputs) and inputs[0].shape[:2] == (self.sizes.T, self.sizes.B)  # the batch comes second
        return output.transpose(0, 1) if second and output is not None else output


class Leftover:
    """What a call left unused in its trace, and the way from there to an output."""

    def __init__(self, trace: Trace, owner: Completed, inputs: list[Tensor]) -> None:
        self.trace, self.owner, self.inputs = trace, owner, inputs
        self.B, self.T = owner.sizes.B, owner.sizes.T
        self.level = _levels(trace, self.B)
        soft = {node.index for node in trace.softmax_nodes()}
        self.soft = (
            {n.index for n in trace.nodes if soft & {a.index for a in trace.ancestors([n.index])}} if soft else set()
        )
        self.ends = _ends(trace, self.B, self.T)
        self.H = _heads(owner.inner[0], owner.sizes)

    def finish(self, reached: Reached) -> Tensor | None:
        """The output, and in `reached` how much of it is the learner's; None where too little exists."""
        top = max((self.level[n.index] for n in self.ends), default=0)
        last = [n for n in self.ends if self.level[n.index] == top]
        streams = [n for n in self.ends if self.level[n.index] == 0 and self._is_made(n)]
        if top >= 2:
            return self._from_heads(last, reached)
        if top == 1:
            return self._from_table(last, streams, reached)
        return self._from_projections(streams, reached)

    def _from_projections(self, nodes: list[Node], reached: Reached) -> Tensor | None:
        parts = [part for node in nodes for part in _streams(self._tensor(node), self.B, self.T, self.owner.sizes)]
        reached.streams = len(parts)
        if len(parts) < 3:
            return None
        reached.kind, reached.steps = "projections", {1} | set.intersection(*(self._split(p) for p in parts[-3:]))
        behind = self._heads_behind()
        reached.behind = behind if len(behind) < 3 else []  # of all three, the step is simply the next one
        q, k, v = self._in_roles([self._to_heads(part) for part in parts[-3:]])
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return _merged(weights @ v)

    def _from_table(self, nodes: list[Node], streams: list[Node], reached: Reached) -> Tensor | None:
        table = self._table([self._tensor(node) for node in nodes])
        parts = [part for node in streams for part in _streams(self._tensor(node), self.B, self.T, self.owner.sizes)]
        reached.streams, reached.behind = 3 if parts else 2, self._heads_behind()
        if table is None:
            reached.steps = {1, 2} if reached.behind else set()  # scores between the heads of a token
            return None
        soft = any(node.index in self.soft for node in nodes)
        reached.kind = "weights" if soft else "scores"
        reached.steps = {1, 2, 4} | (set() if reached.behind else {3}) | ({7} if soft else set())
        found = self._to_heads(parts[-1] if parts else self.inputs[-1])
        value = found if found.shape[1] == table.shape[1] else _merged(found)[:, None]
        return _merged((table if soft else table.softmax(-1)) @ value)

    def _from_heads(self, nodes: list[Node], reached: Reached) -> Tensor | None:
        reached.kind, reached.streams = "heads", 3
        reached.steps = {1, 2, 3, 4, 8} | ({7} if any(n.index in self.soft for n in nodes) else set())
        values = [self._tensor(node) for node in nodes]
        merged = [_tokens_of_heads(value, self.B, self.T) for value in values]
        if any(m is None for m in merged):
            return None
        if len(values) == 1 and values[0].dim() == 3 and self.B in values[0].shape[:2]:
            reached.steps |= {9} | ({10} if self._is_projected(nodes[0]) else set())
        return torch.cat([m for m in merged if m is not None], -1)

    def _is_made(self, node: Node) -> bool:
        """Whether it was projected, and is not the input itself; a function gets what others have projected."""
        behind = (n.op for n in self.trace.ancestors([node.index]))
        return getattr(self.owner.inner[0], "core", False) or any(o in PRODUCTS or "convolution" in o for o in behind)

    def _is_projected(self, node: Node) -> bool:
        """Whether a product with parameters lies behind the product with the values."""
        behind = self.trace.ancestors([node.index])
        return any(n.op in PRODUCTS and _is_after(self.trace, n, self.level, self.B) for n in behind)

    def _heads_behind(self) -> list[str]:
        """The lines that make queries, keys or values with the heads behind the tokens, and leave them there."""
        source = linecache.getlines(self.trace.filename or "")
        if "einsum" in "".join(source):  # which takes the axes in any order
            return []
        s = self.owner.sizes
        made = [n for n in self.trace.nodes if n.value.shape == (s.B, s.T, s.H, s.D) and self.level[n.index] == 0]
        ahead = ((s.B, s.H, s.T, s.D), (s.B, s.H, s.D, s.T))
        moved = {p for n in self.trace.nodes if n.value.shape in ahead for p in n.parents}
        first: dict[int, int] = {}  # of a tensor and its copies
        for node in made:
            first[node.index] = next((first[p] for p in node.parents if p in first), node.index)
        moved |= {first[index] for index in moved if index in first}
        lines = [n.line for n in made if first[n.index] == n.index and n.index not in moved]
        return list(dict.fromkeys(source[line - 1].strip() for line in lines if line is not None))

    def _tensor(self, node: Node) -> Tensor:
        """The tensor itself, which the trace can follow, or its copy."""
        kept = (t for t in self.trace._kept if self.trace._producer.get(id(t)) == node.index)
        return next(kept, node.value)

    def _split(self, part: Tensor) -> set[int]:
        """Which of the steps 2 and 3 the shape of a query, key or value shows."""
        if part.dim() == 4:
            return {2} if part.shape[1] == self.T else {2, 3}
        alone = self.H == 1 or part.shape[-1] == self.owner.sizes.D
        return {2, 3} if alone or part.shape[0] not in (self.B, self.T) else set()

    def _to_heads(self, part: Tensor) -> Tensor:
        """(B, H, T, D) from whatever shape a query, key or value has."""
        B, T = self.B, self.T
        if part.dim() == 4:
            part = part.mT if part.shape[-1] == T != part.shape[-2] and part.shape[2] != T else part
            return part.transpose(1, 2) if part.shape[1] == T else part
        if part.shape[0] not in (B, T):
            return part.reshape(B, -1, *part.shape[1:])
        part = part.transpose(0, 1) if part.shape[0] == T else part
        heads = self.H if part.shape[-1] % self.H == 0 and part.shape[-1] > self.owner.sizes.D else 1
        return part.reshape(B, T, heads, -1).transpose(1, 2)

    def _table(self, parts: list[Tensor]) -> Tensor | None:
        """(B, H, T, S) from scores or weights, of one head each or of all."""
        shaped = [p[:, None] if p.dim() == 3 and p.shape[0] == self.B else p for p in parts]
        shaped = [p.reshape(self.B, -1, *p.shape[1:]) if p.dim() == 3 else p for p in shaped]
        if any(p.dim() != 4 or p.shape[-2:] != (self.T, self.T) or p.shape[0] != self.B for p in shaped):
            return None
        return torch.cat(shaped, 1)

    def _in_roles(self, parts: list[Tensor]) -> list[Tensor]:
        """Query, key and value by the names of their parameters; in the order of the code where these do not tell."""
        if self.owner.order is None:
            parameters = tensors(self.owner.inner[0])
            with _disable_current_modes(), torch.no_grad():  # the trace is of the learner's call alone
                named = [self._role(part, parameters) for part in parts]
            roles = ("query", "key", "value")
            complete = sorted(map(str, named)) == sorted(roles)
            self.owner.order = [named.index(r) for r in roles] if complete else [0, 1, 2]
        return [parts[i] for i in self.owner.order]

    def _role(self, heads: Tensor, parameters: dict[str, Tensor]) -> str | None:
        y = side_by_side(heads)
        for x in self.inputs:
            if x.shape[:2] == y.shape[:2] and (found := fit(tokens(x), tokens(y))).exact:
                names = {role_in(name) for name in role(found, parameters, heads.shape[-1]).names}
                return names.pop() if len(names) == 1 else None
        return None


def _levels(trace: Trace, B: int) -> dict[int, int]:
    """For every node, through how many products of two tensors of the batch it went."""
    level: dict[int, int] = {}
    for node in trace.nodes:
        level[node.index] = max((level[p] for p in node.parents), default=0) + _mixes(node, B)
    return level


def _mixes(node: Node, B: int) -> bool:
    """Whether it multiplies two tensors that both come from the input, and not one with a parameter."""
    return node.op in PRODUCTS and all(t.numel() % B == 0 for t in node.operands[-2:])


def _is_after(trace: Trace, node: Node, level: dict[int, int], B: int) -> bool:
    return not _mixes(node, B) and any(level[p] >= 2 for p in node.parents)


def _ends(trace: Trace, B: int, T: int) -> list[Node]:
    """Tensors of the batch that nothing else of the batch was made from, leaving out results that are thrown away."""
    thrown = _thrown_away(trace)
    live = [n for n in trace.nodes if n.value.is_floating_point() and n.value.numel() and n.index not in thrown]
    live = [n for n in live if n.value.numel() % (B * T) == 0]
    used = {parent for node in live for parent in node.parents}
    return [node for node in live if node.index not in used]


def _heads(thing: Any, sizes: CallSizes) -> int:
    """The number of heads that an object says it has; one where it says nothing."""
    held = [v for k, v in getattr(thing, "__dict__", {}).items() if type(v) is int and constructor_role(k) == "heads"]
    return held[0] if held else 1


def _streams(t: Tensor, B: int, T: int, sizes: CallSizes) -> Iterable[Tensor]:
    """One query, key or value, or all three of a fused projection."""
    if t.dim() == 5:
        axis = next((i for i, size in enumerate(t.shape) if size == 3), None)
        return t.unbind(axis) if axis is not None else [t]
    if t.dim() in (3, 4) and t.shape[-1] in (3 * sizes.E, 3 * sizes.D) and t.shape[-1] != sizes.E:
        return t.chunk(3, -1)
    return [t] if t.dim() in (3, 4) else []


def _tokens_of_heads(value: Tensor, B: int, T: int) -> Tensor | None:
    """(B, T, W) from heads in whatever shape; None where it has another meaning."""
    if value.dim() == 4 and value.shape[0] == B:
        return value.flatten(2) if value.shape[1] == T else _merged(value) if value.shape[2] == T else None
    if value.dim() == 2 and value.shape[0] == B * T:
        return value.reshape(B, T, -1)
    if value.dim() != 3 or value.shape[:2] == (B, T):
        return value if value.dim() == 3 else None
    if value.shape[:2] == (T, B):
        return value.transpose(0, 1)
    return _merged(value.reshape(B, -1, *value.shape[1:])) if value.shape[1] == T else None


def _merged(heads: Tensor) -> Tensor:
    return side_by_side(heads)


def _thrown_away(trace: Trace) -> set[int]:
    """Operations of methods of a tensor, other than those in place, whose result nobody keeps or reads."""
    tree = ast.parse("".join(linecache.getlines(trace.filename or "")))
    called = [
        (n.lineno, n.value.func) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)
    ]
    lines = {line for line, f in called if isinstance(f, ast.Attribute) and getattr(f.value, "id", "self") != "self"}
    read = {parent for node in trace.nodes if node.line not in lines for parent in node.parents}
    return {n.index for n in trace.nodes if n.line in lines and not n.op.endswith("_") and n.index not in read}
