"""Keeps a call going over small faults, and remembers them: a view that needed `contiguous`, a hard-wired GPU."""

import linecache
import re
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

LAYERS = re.compile(r"(Linear|Conv\dd|Embedding|LayerNorm|MultiheadAttention)\.__init__\(\) ")
MIXED = {
    "matmul", "__matmul__", "__rmatmul__", "einsum", "bmm", "baddbmm", "mm", "linear", "scaled_dot_product_attention",
}  # fmt: skip


@dataclass
class Repaired:
    """What had to be repaired: kind → line."""

    lines: dict[str, int | None] = field(default_factory=dict)
    names: dict[str, int | None] = field(default_factory=dict)  # names never defined
    attributes: dict[str, int | None] = field(default_factory=dict)
    super_missing: bool = False


class Repairs(TorchFunctionMode):
    """While entered, a failing `view` becomes `reshape`, products have one precision, and a GPU is this machine."""

    def __init__(self, filename: str | None, repaired: Repaired) -> None:
        super().__init__()
        self.filename, self.repaired = filename, repaired

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call, with arguments changed or a second try."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], Tensor):
            self._note("cuda")
            return args[0]
        if _gpu(kwargs.get("device")):
            self._note("cuda")
            kwargs["device"] = "cpu"
        if name == "to" and len(args) > 1 and _gpu(args[1]):
            self._note("cuda")
            args = (args[0], "cpu", *args[2:])
        if name == "view" and args and isinstance(args[0], Tensor):
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if "view size is not compatible" not in str(error):
                    raise
                self._note("contiguous")
                return torch.Tensor.reshape(*args, **kwargs)
        if name in MIXED:
            args = self._in_one_precision(args)
        return func(*args, **kwargs)

    def _in_one_precision(self, args: Any) -> Any:
        """A `.float()` that does nothing where a learner runs it meets our doubles."""
        kinds = {leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        if kinds != {torch.float32, torch.float64}:
            return args
        self._note("precision")
        return tree_map(lambda leaf: leaf.double() if isinstance(leaf, Tensor) else leaf, args)

    def _note(self, kind: str) -> None:
        self.repaired.lines.setdefault(kind, learner_line(self.filename))


def _gpu(device: Any) -> bool:
    return str(device).startswith(("cuda", "mps")) and isinstance(device, str | torch.device)


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
    line, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == filename:
            line = step.tb_lineno
        step = step.tb_next
    return line


def on_purpose(error: BaseException) -> bool:
    """Whether the learner's code, or a library, raised it by a `raise` of its own: perhaps we called it wrongly."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is None or "torch" in step.tb_frame.f_code.co_filename:
        return False
    return linecache.getline(step.tb_frame.f_code.co_filename, step.tb_lineno).strip().startswith("raise")


def in_a_constructor(error: BaseException) -> bool:
    """Whether a call failed while it was making a layer."""
    step, inside = error.__traceback__, False
    while step is not None:
        code = step.tb_frame.f_code
        inside = inside or (
            code.co_name == "__init__" and "torch" in code.co_filename and "modules" in code.co_filename
        )
        step = step.tb_next
    return inside or LAYERS.match(str(error)) is not None
