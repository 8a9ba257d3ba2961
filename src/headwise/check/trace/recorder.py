"""Records every operation of a call, with the lines of the learner's file that were running."""

import heapq
import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
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
COMPARES = {"eq", "ne", "lt", "le", "gt", "ge", "logical_not", "bitwise_not"}
REPEATS = {"repeat", "expand", "repeat_interleave", "index_select", "index"}
SCALES = {"mul", "div", "mul_", "div_", "baddbmm"}
UNFILLED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
ROUNDING = ("floor_divide", "floor", "round", "trunc", "ceil")
RANDOM = ("native_dropout", "bernoulli_", "bernoulli", "rand_like", "rand", "dropout")
LAYERS = re.compile(r"(Linear|Conv\dd|Embedding|LayerNorm|MultiheadAttention)\.__init__\(\) ")
MOST = 20_000  # operations of one call
TORCH_FOLDER = Path(torch.__file__).parent
OURS = "headwise.check"  # what calls the learner
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
                value = value.zero_() if name in UNFILLED else value  # whatever the memory held before
                node = Node(len(self.nodes), name, parents, value, numbers, stack, operands, sources)
                self._add(self._as_product(node, plain) if name == "sum" else node, out)
                self._kept += given
        return result

    def _add(self, node: Node, out: Tensor) -> None:
        self.nodes.append(node)
        self._kept.append(out)
        self._producer[id(out)] = node.index
        if node.op.endswith("_") and not node.op.endswith("__"):
            self._written[out.untyped_storage().data_ptr()] = node.index

    def _as_product(self, node: Node, arguments: list[Any]) -> Node:
        """A sum over one axis of `a * b`, in which each has an axis of its own: the product of matrices that it is."""
        above = self.nodes[node.parents[0]] if node.parents else node
        factors = [self.nodes[p].value for p in above.parents]
        summed = [leaf for leaf in arguments if type(leaf) is int]
        if above.op != "mul" or len(factors) != 2 or len(summed) != 1 or factors[0].dim() != factors[1].dim():
            return node
        shape, over = above.value.shape, summed[0] % above.value.dim()
        own = [_own_axes(*factors), _own_axes(*reversed(factors))]
        if [len(axes) for axes in own] != [1, 1] or any(factor.shape[over] != shape[over] for factor in factors):
            return node
        first, second = (0, 1) if own[0] < own[1] else (1, 0)
        (row,), (column,) = own[first], own[second]
        rest = [i for i in range(len(shape)) if i not in (over, row, column)]
        sizes = [shape[i] for i in rest]
        left = factors[first].permute(*rest, row, over, column)[..., 0].expand(*sizes, -1, -1).flatten(0, -3)
        right = factors[second].permute(*rest, over, column, row)[..., 0].expand(*sizes, -1, -1).flatten(0, -3)
        sources: list[int | None] = [above.parents[first], above.parents[second]]
        return replace(node, op="bmm", value=left @ right, operands=[left, right], operand_nodes=sources)

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

    def reads(self, parameter: Tensor) -> bool:
        """Whether an operation has taken this tensor or a view of it."""
        place = parameter.untyped_storage().data_ptr()
        return any(t.device.type != "meta" and t.untyped_storage().data_ptr() == place for t in self._kept)

    def is_behind_softmax(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from weights."""
        source, first = self.source(tensor), min((n.index for n in self.softmax_nodes()), default=None)
        return source is not None and first is not None and source in self.reaches(first)

    def elementwise_scores(self, weights: Tensor) -> Node | None:
        """Behind these weights, the product, number by number, of two results of a projection; None for other ones."""
        source = self.source(weights)
        return None if source is None else self.elementwise_before(source)

    def elementwise_before(self, start: int) -> Node | None:
        """The same behind a node."""
        for node in self.ancestors([start], PRODUCTS):
            shapes = [self.nodes[p].value.shape for p in node.parents]
            if node.op in ("mul", "mul_") and shapes == [node.value.shape] * 2 and node.line is not None:
                projected = [any(n.op in PRODUCTS for n in self.ancestors([p])) for p in node.parents]
                if all(projected) and len(set(node.parents)) == 2:
                    return node
        return None

    def first_infinite(self) -> Node | None:
        """The first result that holds infinite numbers or NaN."""
        found = (n for n in self.nodes if n.value.is_floating_point() and n.line is not None)
        return next((n for n in found if not bool(torch.isfinite(n.value).all())), None)

    def last_line(self) -> int | None:
        """The last line of the learner's file that computed something."""
        return next((n.line for n in reversed(self.nodes) if n.line is not None), None)

    def softmax_nodes(self) -> list[Node]:
        """Where scores become weights: a softmax, or exponentials divided by their sum."""
        named = [node for node in self.nodes if node.op in SOFTMAX and node.value.dim() >= 1]
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

    def summed_weights(self) -> Node | None:
        """A sum over the axis of a softmax, which gives ones whatever the scores are."""
        weights = {node.index for node in self.softmax_nodes()}
        for node in self.nodes:
            if node.op in VIEWS | MOVES | {"unsqueeze", "squeeze"} and weights & set(node.parents):
                weights.add(node.index)
            elif (
                node.op == "sum" and weights & set(node.parents) and torch.allclose(node.value, node.value.new_ones(()))
            ):
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


def _own_axes(a: Tensor, b: Tensor) -> list[int]:
    """Axes along which a has several numbers and b has one."""
    return [axis for axis in range(a.dim()) if a.shape[axis] > 1 == b.shape[axis]]


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
    if "Need attn_mask" in str(error):  # with which torch's own attention refuses `is_causal` alone
        return True
    return not is_of_torch(file) and linecache.getline(file, line).strip().startswith("raise")


def is_of_torch(filename: str) -> bool:
    """Whether a file belongs to torch itself, whatever folders of a project are called."""
    return Path(filename).is_relative_to(TORCH_FOLDER)


def in_layer_constructor(error: BaseException) -> bool:
    """Whether the call failed while it was making a layer."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [code.co_filename for code in codes if code.co_name == "__init__"]
    return any(is_of_torch(file) and "modules" in file for file in files) or LAYERS.match(str(error)) is not None
