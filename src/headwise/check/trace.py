"""Records every operation of a call and finds the attention in it, whatever the coding style.

`Trace` records; `find_attention` picks the softmax and the products around it; `Core` arranges them as (B, H, T, S)
and says on which line of the learner's file each stage happens.
"""

import heapq
import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {"bmm", "mm", "addmm", "baddbmm", "dot", "mv"}
SOFTMAX = {"_softmax", "_safe_softmax"}
KEEP_OPERANDS = PRODUCTS | SOFTMAX | {"exp", "masked_fill", "masked_fill_", "where"}
VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "unsafe_split", "split", "chunk", "unflatten"}
MOVES = {"transpose", "permute", "repeat", "expand", "repeat_interleave", "t", "roll", "flip", "select"}
PARTS = {"slice", "select", "narrow", "index", "split", "unsafe_split", "split_with_sizes"}
SWAPS = {"transpose", "permute", "t", "movedim", "swapaxes"}
ARITHMETIC = {"add", "sub", "mul", "neg", "cat", "stack", "addcmul", "add_", "sub_", "mul_"}
REPEATS = {"repeat", "expand", "repeat_interleave", "index_select", "index"}
SCALES = {"mul", "div", "mul_", "div_", "baddbmm"}
ROUNDING = ("floor_divide", "floor", "round", "trunc", "ceil")
RANDOM = ("native_dropout", "bernoulli_", "bernoulli", "rand_like", "rand", "dropout")
LAYERS = re.compile(r"(Linear|Conv\dd|Embedding|LayerNorm|MultiheadAttention)\.__init__\(\) ")
MOST = 20_000  # operations of one call
OURS = __name__.rpartition(".")[0]  # this package
DEEPEST = 6  # calls of the learner's own functions inside each other


class TooLongError(RuntimeError):
    """A call makes more operations than are worth recording: it loops over single numbers."""


@dataclass
class Node:
    """One result of one operation."""

    index: int
    op: str
    parents: list[int]  # nodes whose results it read, in argument order; tensors from outside are left out
    value: Tensor
    numbers: list[float]
    stack: tuple[int, ...] = ()  # the lines of the learner's file that were running, innermost first
    operands: list[Tensor] = field(default_factory=list)  # kept for products, softmax and masking only
    operand_nodes: list[int | None] = field(default_factory=list)

    @property
    def line(self) -> int | None:
        """The line that did this."""
        return self.stack[0] if self.stack else None

    @property
    def outer(self) -> int | None:
        """The line that called the learner's own function in which this happened."""
        return self.stack[1] if len(self.stack) > 1 else None

    @property
    def outermost(self) -> int | None:
        """The line of the called method itself, even if helpers lie in between."""
        return self.stack[-1] if self.stack else None

    @property
    def factor(self) -> float | None:
        """The number that it multiplies with; None where it does something else."""
        number = self.numbers[-1] if self.numbers and self.op in SCALES else 0.0
        if number == 0:
            return None
        return 1 / number if self.op.startswith("div") else number


class Trace(TorchDispatchMode):
    """Records every operation while it is entered.

    Operations are seen below autograd, where `einsum`, `@`, `F.linear` and fused attention have all become a handful of
    products, so one reader understands every coding style. Results are copied, because learners write in place.
    """

    def __init__(self, filename: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.filename = filename
        self.nodes: list[Node] = []
        self.tokens: tuple[int, int] | None = None  # how many queries and keys the call has
        self.returned: list[int | None] = []  # nodes of what the call returned
        self.read: set[int] = set()  # nodes whose numbers the code has read
        self._kept: list[Tensor] = []  # an id is unique only while its object lives
        self._producer: dict[int, int] = {}
        self._written: dict[int, int] = {}  # storage → the last operation that wrote into it
        self._sdpa: Any = None
        self._fast: bool = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled while this mode is entered, and torch would import its compiler (two seconds)."""
        return False

    def __enter__(self) -> "Trace":
        self._sdpa = sdpa_kernel(SDPBackend.MATH)  # splits fused attention into its products
        self._sdpa.__enter__()
        self._fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.backends.mha.set_fastpath_enabled(self._fast)
        self._sdpa.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():  # there, `einsum` and its like arrive whole
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        name, plain = func.overloadpacket.__name__, tree_leaves(args)
        given = [leaf for leaf in (*plain, *tree_leaves(kwargs or {})) if isinstance(leaf, Tensor)]
        operands = [t.detach().clone() for t in given] if name in KEEP_OPERANDS else []
        sources = [self.source(t) for t in given]
        result = func(*args, **(kwargs or {}))
        if len(self.nodes) > MOST:
            raise TooLongError(f"more than {MOST} operations in one call")
        parents = [s for s in sources if s is not None]
        numbers, stack = list(_numbers(plain)), learner_lines(self.filename)
        if not any(isinstance(out, Tensor) for out in tree_leaves(result)):
            self.read.update(parents)
        for out in tree_leaves(result):
            if isinstance(out, Tensor):
                value = out.detach().clone() if out.device.type != "meta" else out
                self._add(Node(len(self.nodes), name, parents, value, numbers, stack, operands, sources), out)
                self._kept += given
        return result

    def _add(self, node: Node, out: Tensor) -> None:
        self.nodes.append(node)
        self._kept.append(out)
        self._producer[id(out)] = node.index
        if node.op.endswith("_") and not node.op.endswith("__"):
            self._written[out.untyped_storage().data_ptr()] = node.index

    def source(self, tensor: Tensor) -> int | None:
        """The node that gave a tensor its present values; None for a tensor from outside."""
        made = self._producer.get(id(tensor))
        written = None if tensor.device.type == "meta" else self._written.get(tensor.untyped_storage().data_ptr())
        return max((node for node in (made, written) if node is not None), default=None)

    def ancestors(self, start: Iterable[int | None], stop: set[str] | None = None) -> Iterator[Node]:
        """The given nodes and those before them, nearest first; the search does not go past operations in `stop`."""
        seen = {s for s in start if s is not None}
        pending = [-s for s in seen]
        heapq.heapify(pending)
        while pending:
            node = self.nodes[-heapq.heappop(pending)]
            yield node
            if stop is None or node.op not in stop:
                for parent in set(node.parents) - seen:
                    seen.add(parent)
                    heapq.heappush(pending, -parent)

    def reaches(self, start: int) -> set[int]:
        """All nodes that depend on this one."""
        found = {start}
        for node in self.nodes[start + 1 :]:
            if any(parent in found for parent in node.parents):
                found.add(node.index)
        return found

    def dropout_line(self) -> int | None:
        """The first line that draws random numbers."""
        return next((n.line for n in self.nodes if n.op in RANDOM), None)

    def line_of_values(self) -> int | None:
        """The first product after a softmax."""
        start = min((n.index for n in self.softmax_nodes()), default=0)
        near = self.reaches(start) if self.nodes else set()
        later = (n for n in self.nodes[start + 1 :] if n.index in near and n.line is not None)
        return next((n.line for n in later if len(n.parents) > 1 or n.op in PRODUCTS or n.op == "sum"), None)

    def first_infinite(self) -> Node | None:
        """The first result that holds infinite numbers or NaN."""
        found = (n for n in self.nodes if n.value.is_floating_point() and n.line is not None)
        return next((n for n in found if not bool(torch.isfinite(n.value).all())), None)

    def last_line(self) -> int | None:
        """The last line of the learner's file that computed something."""
        return next((n.line for n in reversed(self.nodes) if n.line is not None), None)

    def softmax_nodes(self) -> list[Node]:
        """Where scores become weights: a softmax, or exponentials divided by their sum."""
        named = [node for node in self.nodes if node.op in SOFTMAX and node.value.dim() >= 2]
        return named or list(self._softmax_by_hand())

    def misaligned_softmax(self) -> Node | None:
        """Exponentials divided by their own sums along an axis other than the one that was summed."""
        for node in self.nodes:
            if node.op.rstrip("_") == "div" and node.value.dim() >= 2 and len(node.parents) >= 2:
                above, below = (self.nodes[p] for p in node.parents[:2])
                summed = self._plain_sum(below)
                exponential = any(n.op == "exp" for n in self.ancestors([above.index], {"exp", *PRODUCTS}))
                if summed is not None and exponential and not _sums_to_one(node.value):
                    return node
        return None

    def _plain_sum(self, node: Node) -> Node | None:
        """The sum that this is, perhaps with other axes; None where something was added to it."""
        while node.op in VIEWS | MOVES | {"unsqueeze", "squeeze"} and node.parents:
            node = self.nodes[node.parents[0]]
        return node if node.op == "sum" else None

    def _softmax_by_hand(self) -> Iterator[Node]:
        for node in self.nodes:
            if node.op == "exp" and node.value.dim() >= 2 and node.value.shape[-1] > 1 and _sums_to_one(node.value):
                yield node  # of scores minus the logarithm of their sum
            if node.op in ("div", "mul", "div_") and node.value.dim() >= 2 and node.value.dtype.is_floating_point:
                near = [self.nodes[p] for p in node.parents]
                near += [self.nodes[p] for n in near for p in n.parents]
                if any(n.op == "exp" for n in near) and (node.value >= 0).all() and _sums_to_one(node.value):
                    yield node


def _numbers(leaves: list[Any]) -> Iterator[float]:
    """Plain numbers among the arguments, and tensors that hold a single one."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            number = leaf.numel() == 1 and leaf.device.type != "meta" and not leaf.is_complex()
        else:
            number = isinstance(leaf, int | float) and not isinstance(leaf, bool)
        if number:
            yield float(leaf)


def _sums_to_one(weights: Tensor) -> bool:
    return any(_is_one(weights.sum(axis)) for axis in range(weights.dim())) or _is_one(weights.sum((-1, -2)))


def _is_one(sums: Tensor) -> bool:
    return torch.allclose(sums, torch.ones_like(sums))


# Lines of the learner's file, on the stack and in tracebacks.


def learner_lines(filename: str | None) -> tuple[int, ...]:
    """The lines of the learner's file on the stack, innermost first."""
    frame: Any = sys._getframe(1)
    found: list[int] = []
    while frame is not None and filename is not None and len(found) < DEEPEST:
        if frame.f_code.co_filename == filename:
            found.append(int(frame.f_lineno))
        elif found and frame.f_globals.get("__name__", "").startswith(OURS):
            break  # what called us is not part of the call
        frame = frame.f_back
    return tuple(found)


def learner_line(filename: str | None) -> int | None:
    """The innermost line of the learner's file on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None and filename is not None:
        if frame.f_code.co_filename == filename:
            return int(frame.f_lineno)
        frame = frame.f_back
    return None


def error_line(error: BaseException, filename: str | None) -> int | None:
    """The innermost line of the learner's file in a traceback."""
    steps = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in steps if frame.f_code.co_filename == filename]
    return lines[-1] if lines else None


def is_deliberate(error: BaseException) -> bool:
    """Whether a `raise` in the learner's code or in a library other than torch raised it: our call may be wrong."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    return "torch" not in file and linecache.getline(file, line).strip().startswith("raise")


def in_layer_constructor(error: BaseException) -> bool:
    """Whether the call failed while it was making a layer."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [code.co_filename for code in codes if code.co_name == "__init__"]
    return any("torch" in file and "modules" in file for file in files) or LAYERS.match(str(error)) is not None


@dataclass
class AttentionNodes:
    """The softmax and the products around it, before batch and heads are told apart: one node per product."""

    trace: Trace
    softmax: list[Node]
    scores: list[Node]
    products: list[Node]  # weights times values
    sides: list[int]  # which operand of the product the weights are

    def arrangements(self, B: int, T: int = 0) -> "Iterator[Core]":
        """Every way to read batch and heads from the products; the caller knows which one makes sense.

        Where scores are a sum of several products, as with relative positions, each may be the query-key product.
        """
        for core in self._arrangements(B):
            yield from core.with_heads_in_rows(T)
            yield core
        if len(self.softmax) == 1 and len(self.scores) > 1:
            for node in self.scores:
                yield from replace(self, scores=[node])._arrangements(B)

    def _arrangements(self, B: int) -> "Iterator[Core]":
        first = self.sides[0] == 0
        left, right = _operands(self.products)
        heads = [_batched(n.value) for n in self.products]
        if not first:  # (weights @ values) computed as (valuesᵀ @ weightsᵀ)ᵀ
            left, right, heads = [t.mT for t in right], [t.mT for t in left], [t.mT for t in heads]
        query, key = _operands(self.scores)
        key = [t.mT for t in key]
        for order in _orders(left, B):
            weights4 = order(left)
            for order_q in _orders(query, B):
                if order_q.kind != order.kind and len(self.scores) == len(self.products):
                    continue
                query4, key4 = order_q(query), order_q(key)
                if query4.shape[2] != weights4.shape[2] == key4.shape[2]:  # computed as key @ queryᵀ
                    query4, key4 = key4, query4
                if query4.shape[:2] == weights4.shape[:2]:
                    softmax = self._softmax_values(left, order) if first else None
                    yield Core(query4, key4, order(right), weights4, softmax, order(heads), self, first, order.kind)

    def _softmax_values(self, weights: list[Tensor], order: "BatchOrder") -> Tensor | None:
        """The softmax's own results in the shape in which the product reads them, if no number was added or lost."""
        values = [n.value for n in self.softmax]
        if len(values) != len(weights):
            return None
        pairs = list(zip(values, weights, strict=True))
        if any(v.numel() != w.numel() or v.shape[-2:] != w.shape[-2:] for v, w in pairs):
            return None
        return order([v.reshape(w.shape) for v, w in pairs])


def find_attention(trace: Trace) -> AttentionNodes | None:
    """The softmax and the products around it, or None where the trace holds no attention."""
    found = AttentionNodes(trace, [], [], [], [])
    for node in _behind_output(trace, _last_of_each(trace, _tables(trace, trace.softmax_nodes()))):
        scores = [n for n in trace.ancestors(node.parents, PRODUCTS) if n.op in PRODUCTS]
        first = _distinct(_first_products(trace, node))
        if not scores or not first:
            continue
        found.softmax.append(node)
        found.scores += sorted((s for s in scores if s not in found.scores), key=lambda n: n.index)
        found.products += [product for product, _ in first]
        found.sides += [side for _, side in first]
    return found if found.softmax else _normalized_later(trace)


def _normalized_later(trace: Trace) -> AttentionNodes | None:
    """Exponentials that meet the values first and are divided by their sum afterwards, as in an online softmax."""
    for node in (n for n in trace.nodes if n.op == "exp" and tuple(n.value.shape[-2:]) == trace.tokens):
        scores = [n for n in trace.ancestors(node.parents, PRODUCTS) if n.op in PRODUCTS]
        for product, side in _first_products(trace, node) if scores else ():
            weights = product.operands[side - 2] if side == 0 else product.operands[side - 2].mT
            weights = weights / weights.sum(-1, keepdim=True)
            made = product.value.new_tensor(0) if side else weights @ product.operands[-1]
            divided = next((n for n in _quotients(trace, product) if _equal_numbers(n.value, made)), None)
            if side == 0 and divided is not None:
                operands = [*product.operands[:-2], weights, product.operands[-1]]
                met = replace(product, index=divided.index, value=made, operands=operands)
                softmax = replace(node, value=node.value / node.value.sum(-1, keepdim=True))
                return AttentionNodes(trace, [softmax], sorted(scores, key=lambda n: n.index), [met], [side])
    return None


def _quotients(trace: Trace, product: Node) -> list[Node]:
    """Divisions of something that depends on a product."""
    reached = trace.reaches(product.index)
    return [n for n in trace.nodes if n.index in reached and n.op.rstrip("_") == "div"]


def _equal_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers in the same order, whatever their shapes."""
    return a.numel() == b.numel() and torch.allclose(a.flatten(), b.flatten())


def _tables(trace: Trace, nodes: list[Node]) -> list[Node]:
    """Those that are tables of queries × keys, where there are any; a softmax of something else is not attention."""
    tables = [n for n in nodes if trace.tokens is not None and tuple(n.value.shape[-2:]) == trace.tokens]
    return tables or nodes


def _distinct(products: list[tuple[Node, int]]) -> list[tuple[Node, int]]:
    """Only the last of products that were computed several times."""
    kept: list[tuple[Node, int]] = []
    for node, side in products:
        kept = [(n, s) for n, s in kept if n.value.shape != node.value.shape or not n.value.equal(node.value)]
        kept.append((node, side))
    return kept


def _last_of_each(trace: Trace, nodes: list[Node]) -> list[Node]:
    """Without those whose result goes through another softmax before any product."""
    indices = {node.index for node in nodes}
    first = {a.index for n in nodes for a in trace.ancestors(n.parents, PRODUCTS) if a.index in indices}
    return [node for node in nodes if node.index not in first]


def _behind_output(trace: Trace, nodes: list[Node]) -> list[Node]:
    """Those that the returned tensors depend on: a second attention, computed only to compare, does not count."""
    if len(nodes) < 2 or None in trace.returned or not trace.returned:
        return nodes
    behind = {node.index for node in trace.ancestors(trace.returned)}
    return [node for node in nodes if node.index in behind] or nodes


def unnormalized_scores(trace: Trace, T: int) -> tuple[Node, Node] | None:
    """A product of T×T scores and the one in which it meets the values, with at most a factor in between."""
    for node in trace.nodes:
        if node.op not in PRODUCTS or node.value.shape[-2:] != (T, T):
            continue
        for product, side in _first_products(trace, node):
            weights = _batched(product.operands[side - 2])
            for scores in (_batched(node.value), _batched(node.value).mT):
                if weights.shape == scores.shape and _is_multiple(weights, scores):
                    return node, product
    return None


def _is_multiple(weights: Tensor, scores: Tensor) -> bool:
    """Whether weights are one factor times the scores, except for zeros."""
    kept = (weights != 0) & torch.isfinite(weights)
    ratio = weights[kept] / scores[kept]
    return ratio.numel() > weights.numel() // 3 and torch.allclose(ratio, ratio.median(), rtol=1e-6)


def _first_products(trace: Trace, node: Node) -> list[tuple[Node, int]]:
    """Products that read this node's result with no other product in between, and on which side they read it."""
    reached, near = trace.reaches(node.index), {node.index}
    found = []
    for other in trace.nodes[node.index + 1 :]:
        if other.index not in reached:
            continue
        if other.op in PRODUCTS:
            sides = [i for i, source in enumerate(other.operand_nodes) if source in near]
            if sides:
                found.append((other, sides[-1] - (len(other.operands) - 2)))
        elif any(parent in near for parent in other.parents) and other.op not in SOFTMAX:
            near.add(other.index)
    return found


def _has_numbers(x: Tensor, held: Tensor) -> bool:
    """Whether a tensor holds these sorted numbers, in any order of its axes."""
    return x.numel() == held.numel() and torch.equal(x.flatten().sort().values.to(held.dtype), held)


def _square(mask: Tensor) -> Tensor | None:
    """The one table (T, S) that a mask repeats; None where it holds several."""
    if mask.dim() < 2:
        return None
    tables = mask.reshape(-1, *mask.shape[-2:])
    return tables[0] if bool((tables == tables[0]).all()) else None


def _holds(value: Tensor, hidden: Tensor) -> bool:
    """Whether a tensor is this boolean table, or its opposite."""
    table = _square(value != 0) if value.dim() >= 2 and value.shape[-2:] == hidden.shape else None
    return table is not None and (torch.equal(table, hidden) or torch.equal(~table, hidden))


@dataclass(frozen=True)
class BatchOrder:
    """How batch and heads lie in the products: reads a list of (N, R, C) tensors as one (B, H, R, C)."""

    kind: str
    B: int

    def __call__(self, parts: list[Tensor]) -> Tensor:
        shape = parts[0].shape[1:]
        if self.kind == "one product per head":
            return torch.stack(parts, 1)
        if self.kind == "one product per sample":
            return torch.stack(parts, 0)
        if self.kind == "one product per sample and head":
            return torch.cat(parts).reshape(self.B, -1, *shape)
        if self.kind == "batch first":
            return parts[0].reshape(self.B, -1, *shape)
        return parts[0].reshape(-1, self.B, *shape).transpose(0, 1)


def _orders(parts: list[Tensor], B: int) -> list[BatchOrder]:
    N, count = parts[0].shape[0], len(parts)
    if any(p.shape != parts[0].shape for p in parts) or parts[0].numel() == 0:
        return []
    if count == 1 and N % B == 0:
        kinds = ["batch first", "heads first"] if N > B else ["batch first"]
    elif N == B:
        kinds = ["one product per head"]
    elif count == B:
        kinds = ["one product per sample"]
    else:
        kinds = ["one product per sample and head"] if N == 1 and count % B == 0 else []
    return [BatchOrder(kind, B) for kind in kinds]


def _operands(nodes: list[Node]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [_real(_batched(n.operands[-2]), _batched(n.operands[-1])) for n in nodes]
    return [left for left, _ in pairs], [right for _, right in pairs]


def _real(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Complex factors (N, R, D) and (N, D, C) as real ones, whose product is the real part of theirs."""
    if not left.is_complex() or not right.is_complex():
        return left, right
    both = torch.stack((right.real, -right.imag), 2).flatten(1, 2)
    return torch.view_as_real(left.resolve_conj()).flatten(-2), both


def _batched(t: Tensor) -> Tensor:
    return t if t.dim() == 3 else t[None]


@dataclass
class Core:
    """One softmax (or one per head) and the products around it, as (B, H, T, S), with the lines of each stage."""

    query: Tensor  # (B, H, T, D)
    key: Tensor  # (B, H, S, D)
    value: Tensor  # (B, H, S, Dv)
    weights: Tensor  # (B, H, T, S), as they meet the values
    softmax: Tensor | None  # (B, H, T, S), as they leave the softmax
    heads: Tensor  # (B, H, T, Dv)
    nodes: AttentionNodes
    weights_first: bool  # weights @ values, not valuesᵀ @ weightsᵀ
    order: str  # how batch and heads lie in the products' first axis

    @property
    def trace(self) -> Trace:
        return self.nodes.trace

    def with_heads_in_rows(self, T: int) -> "Iterator[Core]":
        """The same where all heads share keys and values and lie one after another in the rows: (B, 1, H·T, S)."""
        B, H, rows, _ = self.weights.shape
        if H != 1 or T == 0 or rows <= T or rows % T or self.query.shape[2] != rows:
            return
        for inner in (True, False):  # rows as (heads, tokens), or as (tokens, heads)
            shape = (rows // T, T) if inner else (T, rows // T)

            def split(x: Tensor, shape: tuple[int, int] = shape, inner: bool = inner) -> Tensor:
                made = x.reshape(B, *shape, x.shape[-1])
                return made if inner else made.transpose(1, 2)

            key, value = (x.expand(B, rows // T, *x.shape[2:]) for x in (self.key, self.value))
            softmax = None if self.softmax is None else split(self.softmax)
            query, weights, heads = split(self.query), split(self.weights), split(self.heads)
            kind = f"{self.order}, heads in rows {inner}"
            yield Core(query, key, value, weights, softmax, heads, self.nodes, self.weights_first, kind)

    @property
    def softmax_line(self) -> int | None:
        return self.nodes.softmax[0].line

    @property
    def score_line(self) -> int | None:
        """The line of the query-key product."""
        return self.nodes.scores[0].line

    def before_softmax(self) -> Iterator[Node]:
        """Operations between the query-key product and the softmax, last first."""
        return self.trace.ancestors(self.nodes.softmax[0].parents, PRODUCTS)

    def scale_line(self, total: float | None = None, right: float = 1.0) -> int | None:
        """The line that scales the scores; without one, the line of the product.

        Of several, the one without which a scale of `total` would be `right`; of none, one whose result is lost.
        """
        behind = [*self.trace.ancestors(self.nodes.scores[0].operand_nodes[-2:], PRODUCTS)]
        steps = [n for n in (*self.before_softmax(), *behind) if n.numbers and n.line is not None]
        scaled = [n for n in steps if n.op in SCALES]
        undone = [n for n in scaled if total and n.factor and abs(total / n.factor - right) <= 1e-4 * right]
        shifted = [n for n in steps if n.op.rstrip("_") in ("add", "sub", "pow") and n not in behind]
        inside = [n for n in scaled if n not in behind]
        found = undone or inside or shifted or scaled or self._lost_scales()
        return found[0].line if found else self.score_line

    def _lost_scales(self) -> list[Node]:
        """Operations that scale a table of scores and whose result nothing reads."""
        table = self.nodes.softmax[0].value.shape
        nodes = [n for n in self.trace.nodes if n.factor and n.value.shape == table and n.line is not None]
        read = {parent for n in self.trace.nodes for parent in n.parents}
        return [n for n in nodes if n.index not in read]

    def factor_line(self) -> int | None:
        """The line between the product with the values and the next product that multiplies with a number."""
        start = max(n.index for n in self.nodes.products)
        reached = self.trace.reaches(start)
        for node in self.trace.nodes[start + 1 :]:
            if node.index in reached and node.op in PRODUCTS:
                return None
            if node.index in reached and node.op in SCALES and node.numbers and node.line is not None:
                return node.line
        return None

    def behind(self, name: str, stop: set[str] | None = None) -> list[Node]:
        """Operations on the way to queries, keys or values, last first."""
        node, side = self.nodes.scores[0], -1 if name == "key" else -2
        if name == "value":
            node, side = self.nodes.products[0], -1 if self.weights_first else -2
        return [*self.trace.ancestors(node.operand_nodes[side:][:1], stop)]

    def _own_line(self, name: str, node: Node) -> int | None:
        """The innermost line of an operation that is on the way to this one of the three only: not in a helper."""
        others = {n.index for other in ("query", "key", "value") if other != name for n in self.behind(other)}
        theirs = {line for index in others for line in self.trace.nodes[index].stack}
        return next((line for line in node.stack if line not in theirs), None)

    def projection_line(self, name: str) -> int | None:
        """The line that makes queries, keys or values out of the input."""
        made = next((n for n in self.behind(name) if n.op in PRODUCTS and n.line is not None), None)
        return None if made is None else self._own_line(name, made) or made.line

    def is_made_with_others(self, name: str) -> bool:
        """Whether the line that projects this one of query, key and value, in a loop, projects another as well."""
        made = next((n for n in self.behind(name) if n.op in PRODUCTS and n.line is not None), None)
        others = {n.index for other in ("query", "key", "value") if other != name for n in self.behind(other)}
        return made is not None and made.index not in others and self._own_line(name, made) is None

    def reader(self, name: str) -> Node:
        """The product that reads queries, keys or values."""
        return (self.nodes.products if name == "value" else self.nodes.scores)[0]

    def use_line(self, name: str) -> int | None:
        """The last line that leads only to this one of query, key and value; without one, the product that reads it."""
        product = self.reader(name)
        own = (self._own_line(name, n) for n in self.behind(name) if n.line is not None)
        return next((line for line in own if line is not None), product.outer or product.line)

    def taken_line(self, name: str) -> int | None:
        """The last line between projection and product that takes a part of queries, keys or values."""
        behind = (n for n in self.behind(name, PRODUCTS) if n.op in PARTS and n.line not in (None, self.score_line))
        return next((n.line for n in behind if n.value.numel() < self.trace.nodes[n.parents[0]].value.numel()), None)

    def turned_line(self) -> int | None:
        """The last line between the scores and their product with the values that swaps queries and keys."""
        start, end = self.nodes.scores[0].index, self.nodes.products[0].index
        behind = self.trace.ancestors(self.nodes.products[0].operand_nodes[-2:])
        table = {self.weights.shape[-2], self.weights.shape[-1]}
        swaps = (n for n in behind if start < n.index < end and n.op in SWAPS and set(n.value.shape[-2:]) == table)
        return next((n.line for n in swaps if n.line is not None), self.score_line)

    def first_line(self, name: str) -> int | None:
        """The first line that does something to what becomes queries, keys or values."""
        behind = [n for n in self.behind(name) if n.line is not None]
        return (self._own_line(name, behind[-1]) or behind[-1].outermost) if behind else None

    def last_step(self, name: str) -> int | None:
        """The last line that changes queries, keys or values before they are multiplied with the others."""
        behind = [n for n in self.behind(name, PRODUCTS) if n.line not in (None, self.score_line)]
        lines = (self._own_line(name, n) for n in behind)
        return next((line for line in lines if line is not None), None) or self.projection_line(name)

    def value_scale_line(self) -> int | None:
        """The line that scales the values between their projection and the product."""
        node, side = self.nodes.products[0], -1 if self.weights_first else -2
        behind = self.trace.ancestors(node.operand_nodes[side:][:1], PRODUCTS)
        return next((n.line for n in behind if n.op in SCALES and n.numbers and n.line is not None), None)

    def sharing_line(self, name: str = "key") -> int | None:
        """The line that gives keys or values to several heads."""
        made = self.score_line if name == "key" else self.nodes.products[0].line
        shared = [n for n in self.behind(name, PRODUCTS) if n.op in REPEATS and n.line not in (None, made)]
        return (self._own_line(name, shared[0]) or shared[0].line) if shared else made

    def earlier_softmax(self) -> Node | None:
        """A softmax of the scores before the one that gives the weights."""
        return next((n for n in self.before_softmax() if n.op in SOFTMAX), None)

    def after_softmax_line(self) -> int | None:
        """The line that changes the weights between softmax and values."""
        reached, end = self.trace.reaches(self.nodes.softmax[0].index), self.nodes.products[0].index
        steps = [n for n in self.trace.nodes[self.nodes.softmax[0].index + 1 : end] if n.index in reached]
        changed = (n.line for n in steps if n.op.rstrip("_") in ("masked_fill", "where", "mul", "div", "tril", "triu"))
        return next((line for line in changed if line is not None), self.softmax_line)

    def activation_line(self, name: str, kinds: set[str]) -> tuple[str, int | None]:
        """The name and line of an operation of these kinds between projection and product."""
        node = next(n for n in self.behind(name, PRODUCTS) if n.op in kinds)
        return node.op.strip("_"), self._own_line(name, node) or node.line

    def step_line(self, name: str, outermost: bool = False) -> int | None:
        """The last line, in any function, that computes with queries, keys or values after their projection."""
        behind = (n for n in self.behind(name, PRODUCTS) if n.op in ARITHMETIC and n.line != self.score_line)
        lines = (n.outermost if outermost else n.line for n in behind)
        return next((line for line in lines if line is not None), self.score_line)

    def bypass_line(self) -> int | None:
        """Where the result leaves the way of queries and keys without meeting the weights."""
        ends = [n for n in self.trace.returned if n is not None]
        earlier = {n.index for n in self.trace.ancestors([n.index for n in self.nodes.scores])}
        later = [n for n in self.trace.ancestors(ends[:1]) if n.index not in earlier and n.line is not None]
        return later[-1].line if later else None

    def same_step_line(self, name: str, other: str) -> int | None:
        """The line that does to one of the three, in a helper, what is also done to another."""
        theirs = {n.line for n in self.behind(other, PRODUCTS)}
        shared = [n for n in self.behind(name, PRODUCTS) if n.op in ARITHMETIC and n.line in theirs]
        lines = (self._own_line(name, n) for n in shared)
        helped = next((n.outermost for n in shared if n.outer is not None), None)  # in a loop over all three
        return next((line for line in lines if line is not None), None) or helped or self.last_step(name)

    def bias_line(self) -> int | None:
        """The line that adds something to the scores."""
        added = (n.line for n in self.before_softmax() if n.op.rstrip("_") in ("add", "sub") and n.line is not None)
        return next(added, self.softmax_line)

    def swap_line(self) -> int | None:
        """The last line between projection and product that swaps axes of the queries."""
        behind = (n for n in self.behind("query", PRODUCTS) if n.op in SWAPS and n.line not in (None, self.score_line))
        return next((n.line for n in behind if n.value.dim() >= 4), None)

    def split_line(self, name: str = "query") -> int | None:
        """The line that mixes up the axes between projection and product, or else the view that makes the heads."""
        behind = [n for n in self.behind(name, PRODUCTS) if n.line != self.score_line and not self._is_of_layer(n)]
        views = [n for n in behind if n.op in VIEWS]
        four = [n for n in views if n.value.dim() >= 4] or views
        later = [n for n in reversed(behind) if four and n.index > four[-1].index]
        odd = next((n for n in later if n.op in SWAPS and self._axes(n) not in ("BHTD", "HBTD", "")), None)
        if odd is not None and sorted(self._axes(self.trace.nodes[odd.parents[0]])[-2:]) == ["D", "H"]:
            return odd.line  # the view was right, and the heads did not come before the tokens
        return four[-1].line if four else self.score_line

    def reordering_view(self, B: int, T: int) -> int | None:
        """The first view between projection and product that gives the axis of the tokens to something else."""
        for node in reversed(self.behind("query", PRODUCTS)):
            before = [self.trace.nodes[p].value.shape[:2] for p in node.parents[:1]]
            if node.op in VIEWS and before == [(B, T)] and node.value.dim() > 3 and node.value.shape[:2] != (B, T):
                return node.line
        return None

    def weight_line(self, weight: Tensor) -> int | None:
        """The line of the last product that reads these weights."""
        held = weight.detach().flatten().sort().values
        used = (n for n in reversed(self.trace.nodes) if n.op in PRODUCTS and n.line is not None)
        alike = (n for n in used if any(x.numel() == held.numel() for x in n.operands))
        return next((n.line for n in alike if any(_has_numbers(x, held) for x in n.operands)), None)

    def _is_of_layer(self, node: Node) -> bool:
        """Whether this only gives the result of a linear layer the shape of its input."""
        parents = [self.trace.nodes[p] for p in node.parents]
        return any(p.op in PRODUCTS and p.stack == node.stack for p in parents) and node.value.dim() <= 3

    def _axes(self, node: Node) -> str:
        """The axes of a tensor in letters, such as `BTHD`; empty where its sizes do not tell them apart."""
        (B, H, T, D), shape = self.heads.shape, tuple(node.value.shape)
        letters = {B: "B", H: "H", T: "T", D: "D"}
        if len(letters) < 4 or sorted(shape) != sorted(self.heads.shape):
            return ""
        return "".join(letters[size] for size in shape)

    def merge_line(self) -> int | None:
        """The line between the weights-value product and the next product that puts the axes into a wrong order.

        Without one, the view that joins the heads: what should come before it is missing.
        """
        start = max(n.index for n in self.nodes.products)
        reached, line = self.trace.reaches(start), self.nodes.products[-1].line
        for node in self.trace.nodes[start + 1 :]:
            if node.index not in reached:
                continue
            if node.op in PRODUCTS:
                break
            if node.op in SWAPS and self._axes(node) and self._axes(node)[-2:] != "HD":
                return node.line
            if node.op in VIEWS and (node.line != self.nodes.products[-1].line or node.value.dim() == 3):
                line = node.line
                if self._joins(node):
                    break
        return line

    def _joins(self, node: Node) -> bool:
        """Whether a view puts the heads side by side: (B, T, H·D) or (B·T, H·D)."""
        return node.value.dim() <= 3 and node.value.shape[-1] == self.heads.shape[1] * self.heads.shape[3]

    def output_line(self) -> int | None:
        """The line of the last product, which makes the output; without one, the last line that computes."""
        start = max(n.index for n in self.nodes.products)
        reached = self.trace.reaches(start)
        made = [n for n in self.trace.nodes[start + 1 :] if n.index in reached and n.op in PRODUCTS and n.line]
        return made[-1].line if made else self.trace.last_line()

    def mask_line(self, plain: Trace | None = None, moves: bool = False) -> int | None:
        """The last line before the softmax that masks something; `plain` is a trace without the mask, to leave out."""
        before = self.trace.nodes[: self.nodes.softmax[0].index]
        usual = set() if plain is None else {n.line for n in plain.nodes}
        new = [n for n in before if n.line is not None and n.line not in usual] if plain is not None else []
        if new:
            moved = [n.line for n in new if n.op in MOVES] if moves else []
            repeated = [n.line for n in new if n.op in REPEATS and n.value.dim() < 4] if moves else []
            moved = repeated[:1] or moved
            numbers = [n for n in new if n.value.is_floating_point()]
            filled = [n.line for n in numbers if n.op.rstrip("_") in ("masked_fill", "where", "add", "mul", "sub")]
            if moved or filled:
                return (moved or filled)[-1]
        masking = ("masked_fill", "where", "tril", "triu")
        last = next((n.line for n in reversed(before) if n.op.rstrip("_") in masking and n.line), None)
        made = new[-1].line if new else None
        return made if made is not None and last in usual else last or made

    def pattern_line(self, inverted: bool, nan: bool = False) -> int | None:
        """The line that made the wrong pattern of a mask: its table, or, where a right one was inverted, the masking.

        Going back from the masking operation, the table is the first tensor that holds the pattern or its opposite.
        """
        for masking in (n for n in self.before_softmax() if n.op.rstrip("_") in ("masked_fill", "where")):
            side = 1 if masking.op.startswith("masked_fill") else 0
            if len(masking.operands) <= side or not masking.operands[side].any():
                continue
            hidden = _square(masking.operands[side] != 0)
            behind = [n for n in self.trace.ancestors(masking.operand_nodes[side : side + 1]) if n.line is not None]
            alike = [n for n in behind if hidden is not None and _holds(n.value, hidden)]
            written = [n.line for n in behind if n.op in ("fill_", "copy_") and n.line != masking.line]
            if written and all(n.line == masking.line for n in alike):
                return written[0]  # entry by entry
            if hidden is not None and nan and not bool(hidden.all(-1).any()):
                return masking.line  # every row has a key left: it is the number that is written
            if hidden is not None:
                return (behind[0].line if behind and inverted else None) or (alike[-1].line if alike else masking.line)
        return None

    def bad_fill_line(self) -> int | None:
        """The line that writes NaN or plus infinity in place of scores."""
        fills = (n for n in self.before_softmax() if n.op.rstrip("_") in ("masked_fill", "where") and n.line)
        return next((n.line for n in fills if bool(n.value.isnan().any() | n.value.isposinf().any())), None)

    def rounding(self) -> Node | None:
        """Where scores are rounded to whole numbers before the softmax."""
        return next((n for n in self.before_softmax() if n.op.rstrip("_") in ROUNDING), None)

    def idle_mask(self) -> Node | None:
        """A masking operation before the softmax that hides nothing."""
        fills = (n for n in self.before_softmax() if n.op.rstrip("_") == "masked_fill" and len(n.operands) > 1)
        return next((n for n in fills if not bool(n.operands[1].any())), None)

    def sliced_mask_line(self) -> int | None:
        """The last line that takes a part of a stored table, before a masking operation that hides nothing."""
        idle = self.idle_mask()
        behind = [] if idle is None else self.trace.ancestors(idle.operand_nodes[1:2])
        return next((n.line for n in behind if n.op in PARTS and n.line is not None), None)

    def is_of_positions(self, masking: Node) -> bool:
        """Whether the mask of this operation was made from the numbers of the positions, or is a triangle."""
        behind = self.trace.ancestors(masking.operand_nodes[1:2])
        return any(n.op in ("arange", "tril", "triu") for n in behind)

    def misaligned_position(self, masking: Node) -> int | None:
        """The line that numbers queries or keys along the wrong axis: `key <= query` needs (1, S) and (T, 1)."""
        compared = {"le": (0, 1), "lt": (0, 1), "ge": (1, 0), "gt": (1, 0)}
        for node in self.trace.ancestors(masking.operand_nodes[1:2]):
            if node.op in compared and len(node.parents) == 2:
                key, query = (self.trace.nodes[node.parents[i]] for i in compared[node.op])
                if query.value.dim() < 2 or query.value.shape[-1] != 1:
                    return query.line
                if key.value.dim() >= 2 and key.value.shape[-1] == 1:
                    return key.line
        return None

    def discarded_mask(self) -> Node | None:
        """A masking operation whose result is never used."""
        table, nodes = self.nodes.softmax[0].value.shape[-2:], self.trace.nodes
        masked = (n for n in nodes if n.op in ("masked_fill", "where") and n.value.is_floating_point())
        tables = (n for n in masked if n.value.dim() >= 2 and n.value.shape[-2:] == table)
        return next((n for n in tables if not any(n.index in m.parents for m in nodes[n.index + 1 :])), None)
