"""Records every operation of a call on the way to the kernels: what it was, from what, to what, on which line."""

import heapq
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {"bmm", "mm", "addmm", "baddbmm", "dot", "mv"}
KEEP_OPERANDS = PRODUCTS | {"_softmax", "_safe_softmax", "exp", "masked_fill", "masked_fill_", "where"}


MOST = 20_000  # operations of one call


class TooLongError(RuntimeError):
    """A call makes more operations than are worth recording: it loops over single numbers."""


@dataclass
class Node:
    """One result of one operation."""

    index: int
    op: str
    parents: list[int]  # nodes whose results it read, in order of arguments; leaves are left out
    value: Tensor
    numbers: list[float]
    line: int | None
    operands: list[Tensor] = field(default_factory=list)  # kept for products and softmax only
    operand_nodes: list[int | None] = field(default_factory=list)
    arguments: tuple[Any, ...] = ()


class Trace(TorchDispatchMode):
    """Records while it is entered.

    Operations are seen below autograd, where `einsum`, `@`, `F.linear` and fused attention have all become a handful of
    products, so that one reader understands every coding style. Results are copied, because learners write in place.
    """

    def __init__(self, filename: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.filename = filename
        self.nodes: list[Node] = []
        self.returned: list[int | None] = []  # nodes of what the call returned
        self._kept: list[Tensor] = []  # an id is only unique while its object lives
        self._producer: dict[int, int] = {}
        self._written: dict[int, int] = {}  # storage → the last operation that wrote into it
        self._sdpa: Any = None
        self._fast: bool = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled while this mode is entered, and torch would import its compiler (two seconds)."""
        return False

    def __enter__(self) -> "Trace":
        self._sdpa = sdpa_kernel(SDPBackend.MATH)  # fused attention in its parts
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
        """Run the operation and write it down."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        operands = [t.detach().clone() for t in given] if name in KEEP_OPERANDS else []
        sources = [self.source(t) for t in given]
        result = func(*args, **kwargs)
        if len(self.nodes) > MOST:
            raise TooLongError(f"more than {MOST} operations in one call")
        numbers = list(_numbers(args))
        for out in tree_leaves(result):
            if isinstance(out, Tensor):
                self._add(name, given, sources, operands, out, numbers, args)
        return result

    def _add(
        self,
        name: str,
        given: list[Tensor],
        sources: list[int | None],
        operands: list[Tensor],
        out: Tensor,
        numbers: list[float],
        args: Any,
    ) -> None:
        parents = [s for s in sources if s is not None]
        plain = tuple(a for a in args if not isinstance(a, Tensor)) if isinstance(args, tuple) else ()
        value = out.detach().clone() if out.device.type != "meta" else out
        node = Node(len(self.nodes), name, parents, value, numbers, self._line(), operands, sources, plain)
        self.nodes.append(node)
        self._kept.append(out)
        self._kept.extend(given)
        self._producer[id(out)] = node.index
        if name.endswith("_") and not name.endswith("__"):
            self._written[out.untyped_storage().data_ptr()] = node.index

    def source(self, tensor: Tensor) -> int | None:
        """The node that made a tensor what it is now; None for what came from outside."""
        made = self._producer.get(id(tensor))
        written = None if tensor.device.type == "meta" else self._written.get(tensor.untyped_storage().data_ptr())
        if made is None or written is None:
            return written if made is None else made
        return max(made, written)

    def _line(self) -> int | None:
        """The innermost line of the learner's file that is being executed."""
        if self.filename is None:
            return None
        frame: Any = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == self.filename:
                return int(frame.f_lineno)
            frame = frame.f_back
        return None

    def ancestors(self, start: Iterable[int | None], stop: set[str] | None = None) -> Iterator[Node]:
        """Nodes before the given ones, nearest first; past operations named in `stop` it does not go."""
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
        """All nodes made, however indirectly, from this one."""
        found = {start}
        for node in self.nodes[start + 1 :]:
            if any(parent in found for parent in node.parents):
                found.add(node.index)
        return found


def _numbers(args: Any) -> Iterator[float]:
    """Plain numbers among the arguments, and tensors that hold a single one."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, bool):
            continue
        if isinstance(leaf, int | float) or (
            isinstance(leaf, Tensor) and leaf.numel() == 1 and leaf.device.type != "meta" and not leaf.is_complex()
        ):
            yield float(leaf)
