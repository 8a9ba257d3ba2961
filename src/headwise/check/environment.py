"""The environment of every call: small faults are repaired and remembered, nothing is printed, all is float64."""

import contextlib
import copy
import functools
import inspect
import pdb
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from headwise.check.objects import signature
from headwise.check.trace import learner_line
from headwise.check.vocabulary import plain

# The environment of a call: small faults repaired, no warnings, double precision.

MIXED = {
    "matmul", "__matmul__", "__rmatmul__", "einsum", "bmm", "baddbmm", "mm", "linear", "scaled_dot_product_attention",
    "layer_norm", "group_norm", "rms_norm", "conv1d", "conv2d",
}  # fmt: skip


@dataclass
class Repaired:
    """What had to be repaired, and on which line."""

    lines: dict[str, int | None] = field(default_factory=dict)  # contiguous, cuda or precision → line
    names: dict[str, int | None] = field(default_factory=dict)  # names that were never defined
    attributes: dict[str, int | None] = field(default_factory=dict)
    super_missing: bool = False


class Repairs(TorchFunctionMode):
    """While entered, a failing `view` becomes `reshape`, products get one precision, and a GPU becomes the CPU."""

    def __init__(self, filename: str | None, repaired: Repaired) -> None:
        super().__init__()
        self.filename, self.repaired = filename, repaired

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], Tensor):
            self._note("cuda")
            return args[0]
        if _is_gpu(kwargs.get("device")):
            self._note("cuda")
            kwargs["device"] = "cpu"
        if name == "to" and len(args) > 1 and _is_gpu(args[1]):
            self._note("cuda")
            args = (args[0], "cpu", *args[2:])
        if name == "view" and args and isinstance(args[0], Tensor):
            return self._viewed(func, args, kwargs)
        if name in MIXED:
            args, kwargs = self._in_one_precision((args, kwargs))
        if name == "scaled_dot_product_attention":
            args, kwargs = _with_one_mask(args, kwargs)
        return func(*args, **kwargs)

    def _viewed(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "view size is not compatible" not in str(error):
                raise
            self._note("contiguous")
            return torch.Tensor.reshape(*args, **kwargs)

    def _in_one_precision(self, args: Any) -> Any:
        """Arguments in double precision where a learner's `.float()` meets our doubles."""
        kinds = {leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        if kinds != {torch.float32, torch.float64}:
            return args
        self._note("precision")
        return tree_map(lambda leaf: leaf.double() if isinstance(leaf, Tensor) else leaf, args)

    def _note(self, kind: str) -> None:
        self.repaired.lines.setdefault(kind, learner_line(self.filename))


def _with_one_mask(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A mask beside `is_causal=True` in one mask: the fused kernel on the CPU takes both, the one we trace refuses."""
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    mask = given.get("attn_mask")
    if not (isinstance(mask, Tensor) and given.get("is_causal")):
        return args, kwargs
    T, S = given["query"].shape[-2], given["key"].shape[-2]
    later = torch.ones(T, S, dtype=torch.bool, device=mask.device).triu(1)
    both = mask & ~later if mask.dtype == torch.bool else mask.masked_fill(later, -torch.inf)
    return (), given | {"attn_mask": both, "is_causal": False}


def _is_gpu(device: Any) -> bool:
    return str(device).startswith(("cuda", "mps")) and isinstance(device, str | torch.device)


def mutable_defaults(thing: Any) -> dict[str, Any]:
    """Lists, dictionaries and sets that are defaults of a call's arguments: all calls share them."""
    return {p.name: p.default for p in signature(thing) if isinstance(p.default, list | dict | set)}


FORGETS = re.compile(r"(reset|clear|empty)(kv)?(caches?|states?|memory|all)?")


def forget(thing: Any) -> bool:
    """Call the method by which an object forgets earlier calls, such as `reset_cache()`; whether it has one."""
    cls: type = type(thing)
    name = _forgets(cls)
    if name is not None:
        getattr(thing, name)()
    return name is not None


@functools.cache
def _forgets(cls: type) -> str | None:
    """The name of such a method that takes no arguments."""
    names = (n for n, f in vars(cls).items() if inspect.isfunction(f) and FORGETS.fullmatch(plain(n)))
    return next((n for n in names if len(inspect.signature(vars(cls)[n]).parameters) == 1), None)


@contextlib.contextmanager
def restored_defaults(thing: Any) -> Iterator[None]:
    """Every call is the first: state is forgotten before it, and afterwards defaults hold what they held before."""
    forget(thing)
    kept = [(default, copy.copy(default)) for default in mutable_defaults(thing).values()]
    try:
        yield
    finally:
        for default, before in kept:
            default.clear()
            (default.extend if isinstance(default, list) else default.update)(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings from the learner's code or about it, and no debugger that waits for input."""
    hook, trace = sys.breakpointhook, pdb.set_trace
    sys.breakpointhook = pdb.set_trace = lambda *_, **__: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.breakpointhook, pdb.set_trace = hook, trace


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    """Tensors that a call makes itself are double precision too, unless it says otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
