"""The four key operations (view, transpose, matmul, contiguous) and what they do to memory: strides and copies."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = ("aten.clone", "aten._to_copy", "aten.copy_")


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # numbers to skip for one step along each axis
    contiguous: bool

    @classmethod
    def of(cls, x: Tensor) -> "Layout":
        """The layout of `x`."""
        return cls(tuple(x.shape), x.stride(), x.is_contiguous())


class Operation(NamedTuple):
    """One operation, measured."""

    name: str
    code: str
    before: Layout
    after: Layout | None  # None where torch refuses
    shares: bool  # whether both look at the same memory
    copied: int  # bytes that torch moved to do it
    made: int  # bytes of new memory that the result takes
    why: str


class _Copies(TorchDispatchMode):
    """Adds up the bytes that torch copies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing what would guard against it takes a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation, and looks whether it was a copy."""
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(COPIES):
            self.bytes += result.numel() * result.element_size()
        return result


def key_operations(batch: int, seq: int, num_heads: int, head_dim: int, device: str = "cpu") -> list[Operation]:
    """The four operations on tensors (`batch`, `seq`, `num_heads`, `head_dim`), in the order of need, and two traps.

    >>> [(o.name, o.shares) for o in key_operations(2, 5, 3, 7)][:4]
    [('view', True), ('transpose', True), ('matmul', False), ('contiguous', False)]
    """
    B, T, H, D = batch, seq, num_heads, head_dim
    x = torch.zeros(B, T, H * D, device=device)
    split = x.view(B, T, H, D)
    query = split.transpose(1, 2)
    heads = torch.zeros(B, H, T, D, device=device).transpose(1, 2)  # what step 8 wrote, turned back
    measured = [
        _measure(
            "view", f"x.view({B}, {T}, {H}, {D})", x, lambda: x.view(B, T, H, D),
            "The same memory read with another shape: H·D numbers become H steps of D.",
        ),
        _measure(
            "transpose", "x.transpose(1, 2)", split, lambda: split.transpose(1, 2),
            "Two strides change places; no number moves. The tokens of a head lie H·D apart.",
        ),
        _measure(
            "matmul", "q @ k.transpose(-2, -1)", query, lambda: query @ query.transpose(-2, -1),
            "Writes a new tensor, T×T for every head. With several samples, heads are first copied together.",
        ),
        _measure(
            "contiguous", f"x.contiguous().view({B}, {T}, {H * D})", heads,
            lambda: heads.contiguous().view(B, T, H * D),
            "Copies into reading order: the heads of a token touch, and one view can join them.",
        ),
    ]  # fmt: skip
    if 1 in (T, H):  # then both traps are harmless
        return measured
    traps = [
        _measure(
            "trap: view after transpose", f"x.view({B}, {T}, {H * D})", heads, lambda: heads.view(B, T, H * D),
            "No stride joins axes that do not touch. reshape and flatten copy where they must.",
        ),
        _measure(
            "trap: view instead of transpose", f"x.view({B}, {H}, {T}, {D})", x, lambda: x.view(B, H, T, D),
            "The right shape and the wrong numbers: a head would hold pieces of other heads.",
        ),
    ]  # fmt: skip
    return measured + traps


def _measure(name: str, code: str, before: Tensor, do: Callable[[], Tensor], why: str) -> Operation:
    copies = _Copies()
    try:
        with torch.no_grad(), copies:
            after = do()
    except RuntimeError:
        return Operation(name, code, Layout.of(before), None, False, copies.bytes, 0, why)
    shares = after.untyped_storage()._cdata == before.untyped_storage()._cdata
    made = 0 if shares else after.numel() * after.element_size()
    return Operation(name, code, Layout.of(before), Layout.of(after), shares, copies.bytes, made, why)


class Picture(NamedTuple):
    """One token row of memory, and the head that two ways of splitting read from it."""

    memory: list[int]
    right: list[list[int]]  # view, then transpose
    wrong: list[list[int]]  # view alone


def picture(seq: int = 2, num_heads: int = 2, head_dim: int = 3) -> Picture:
    """Memory numbered from 0, and head 0 by the right and by the wrong way.

    >>> picture()
    Picture(memory=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], right=[[0, 1, 2], [6, 7, 8]], wrong=[[0, 1, 2], [3, 4, 5]])
    """
    memory = torch.arange(seq * num_heads * head_dim)
    right = memory.view(seq, num_heads, head_dim).transpose(0, 1)[0]
    wrong = memory.view(num_heads, seq, head_dim)[0]
    return Picture(memory.tolist(), right.tolist(), wrong.tolist())


def picture_text() -> str:
    """The smallest example of why a view alone is wrong, in a sentence."""
    seen = picture()
    return (
        f"Memory of 2 tokens, 2 heads of 3: {' '.join(map(str, seen.memory))}. Head 0 is {seen.right}; a view alone "
        f"would read {seen.wrong}, all of token 0."
    )


def memory_text(op: Operation) -> str:
    """What an operation did to memory, in words."""
    if op.after is None:
        return "RuntimeError"
    if op.shares:
        return "same memory, contiguous" if op.after.contiguous else "same memory, not contiguous"
    return f"{op.copied:,} bytes copied, {op.made:,} new"
