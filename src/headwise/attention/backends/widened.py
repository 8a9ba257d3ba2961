"""Half precision on the CPU, computed in float32: as exact as it can be, and faster.

torch's CPU kernels are slower in 16 bit than in float32 plus two conversions, except for the gradient of a long
sequence in bfloat16. Measured on one Zen 4 core with torch 2.13, (1 to 4, 8 to 12, T, 64), time against the same call
in 16 bit:

                     T = 32   T = 128   T = 512   T = 2048
    bfloat16         0.99     0.91      0.96      0.92
      with backward  0.35     0.57      1.06      1.11
    float16          0.41     0.35      0.44      0.51
      with backward  0.25     0.14      0.13      0.12
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.attention.backends.base import BEYOND_SDPA, Backend, Call
from headwise.attention.backends.blocks import Rule, choose_rule
from headwise.attention.backends.sdpa import HALF
from headwise.weights.scoring import narrow
from headwise.weights.source import full_precision

SHORTEST = 16  # queries; below, converting a long cache would take longer than attending to it
LONGEST = 512  # keys up to which bfloat16 gains in training, too


class Widened(Backend):
    """The same call in float32, by the fastest backend for that, on the CPU."""

    name = "float32"
    summary = "float32 on the CPU, where torch's kernels are slower in 16 bit"

    def __init__(self, others: Sequence[Backend]) -> None:
        self.others = others  # of which the first that accepts the call in float32 runs it

    def refuses(self, call: Call) -> str | None:
        query = call.query
        if query.dtype not in HALF or not query.is_cpu:
            return "it is for 16 bit on the CPU"
        if call.scoring.beyond_sdpa:
            return BEYOND_SDPA
        if torch.compiler.is_compiling():  # a graph must not look at the length, which would fix it
            if torch.compiler.is_exporting():
                return "an exported graph may run elsewhere"
            return None if query.size(2) != 1 else "there are too few queries for a conversion to pay"
        if query.size(2) < SHORTEST or query.numel() == 0 or call.value.numel() == 0:
            return "there are too few queries for a conversion to pay"
        if query.dtype == torch.bfloat16 and call.key.size(2) > LONGEST and call.learns:
            return "torch's kernel for bfloat16 is faster at this length, with its backward pass"
        rule = choose_rule(call)
        rounded = isinstance(rule, Rule) and rule.engine == "products"
        return "scores may be rounded, which is faster" if rounded else None

    def run(self, call: Call) -> Tensor:
        wide, backend = self._widened(call)
        with full_precision(call.query):
            return backend.run(wide).to(call.value.dtype)

    def run_with_lse(self, call: Call) -> tuple[Tensor, Tensor | None]:
        wide, backend = self._widened(call)
        with full_precision(call.query):
            output, lse = backend.run_with_lse(wide)
        return output.to(call.value.dtype), lse

    def dense_bytes(self, call: Call) -> int:
        wide, backend = self._widened(call)
        return backend.dense_bytes(wide)

    def _widened(self, call: Call) -> tuple[Call, Backend]:
        wide = widened(call)
        return wide, next(backend for backend in self.others if backend.refuses(wide) is None)


def widened(call: Call) -> Call:
    """The call in float32; a bias keeps the accuracy of the query's dtype, in which the weights see it."""
    query, key, value, scoring, dropout = call
    if scoring.bias is not None:
        scoring = dataclasses.replace(scoring, bias=narrow(scoring.bias, query.dtype).float())
    return Call(query.float(), key.float(), value.float(), scoring, dropout)
