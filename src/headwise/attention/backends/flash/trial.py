"""A trial of the library before its first use in each of its specializations: forward and backward on a few tokens,
against the reference."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.attention.backends.base import Call
from headwise.attention.backends.dense import Whole
from headwise.attention.backends.flash import kernel
from headwise.attention.backends.flash.lowering import FlashArguments, lower
from headwise.masks import Mask, causal, documents, padding, window
from headwise.weights import Scoring

CLOSE = 0.03  # of the largest number of a tensor, in 16 bit
NAMES = ("output", *(f"gradient of the {name}" for name in ("query", "key", "value", "sinks")))
TOKENS = 193  # no multiple of any tile


class Specialization(NamedTuple):
    """What the library compiles a kernel for."""

    dtype: torch.dtype
    device: torch.device
    widths: tuple[int, int]
    group: int
    softcap: bool
    sinks: bool
    ahead: bool
    back: bool
    documents: bool
    lengths: bool

    @classmethod
    def of(cls, call: Call, how: FlashArguments, dtype: torch.dtype) -> "Specialization":
        """The kernel that a call needs."""
        query, key, value, scoring, _ = call
        back, ahead = how.band
        return cls(
            dtype,
            query.device,
            (query.shape[3], value.shape[3]),
            query.shape[1] // key.shape[1],
            how.softcap > 0,
            scoring.sinks is not None,
            ahead is not None,
            back is not None,
            how.starts is not None,
            how.lengths is not None,
        )

    def mask(self) -> Mask | None:
        """A mask that needs this kernel."""
        found: list[Mask] = []
        if self.back:
            found.append(window(37, 0 if self.ahead else 19))
        elif self.ahead:
            found.append(causal())
        if self.documents:
            found.append(documents(lengths=[71, 1, TOKENS - 72]))
        if self.lengths:
            found.append(padding([TOKENS - 60, 0]))  # a sample without a key, too
        return functools.reduce(lambda a, b: a & b, found) if found else None


@functools.cache
def failure(kind: Specialization) -> str | None:
    """What is wrong with the library's kernel, or None. Found once for each kernel, which must be compiled anyway."""
    try:
        found = results(kind, by_library=True)
    except Exception as error:  # the library asserts, and its compiler raises errors of its own
        return f"its kernel failed: {type(error).__name__}: {str(error)[:200]}"
    for name, one, other in zip(NAMES, found, results(kind), strict=False):
        off = float((one.double() - other.double()).abs().max() / other.double().abs().max())
        if not off <= CLOSE:
            return f"its {name} differs from the reference by {off:.2g} of the largest number"
    return None


def results(kind: Specialization, by_library: bool = False) -> list[Tensor]:
    """Output and gradients of a small call."""
    with torch.enable_grad(), torch.autocast(kind.device.type, enabled=False):
        call = small_call(kind, kind.dtype if by_library else torch.float64)
        query, key, value, scoring, _ = call
        _, sinks, *_ = scoring.learnable
        if by_library:
            how = lower(call)
            assert not isinstance(how, str), how  # noqa: S101 - a call of this kind was lowered before
            output, _ = kernel.attend(query, key, value, sinks, how)
        else:
            output = Whole().run(call)
        inputs = [x for x in (query, key, value, sinks) if x is not None]
        return [output.detach(), *torch.autograd.grad(output, inputs, torch.ones_like(output))]


def small_call(kind: Specialization, dtype: torch.dtype) -> Call:
    """Two samples of a few tokens, the same numbers in every dtype."""
    random = torch.Generator().manual_seed(0)
    H = 2 * kind.group

    def heads(count: int, width: int) -> Tensor:
        drawn = torch.randn(2, TOKENS, count, width, generator=random).to(kind.dtype)
        return drawn.to(kind.device, dtype).transpose(1, 2).detach().requires_grad_()

    query, key, value = heads(H, kind.widths[0]), heads(2, kind.widths[0]), heads(2, kind.widths[1])
    sinks = torch.randn(H, generator=random).to(kind.device, torch.float32 if dtype.itemsize < 4 else dtype)
    scoring = Scoring(
        mask=None if (mask := kind.mask()) is None else mask.to(kind.device),
        softcap=3.0 if kind.softcap else None,
        sinks=sinks.requires_grad_() if kind.sinks else None,
    )
    return Call(query, key, value, scoring, 0.0)
