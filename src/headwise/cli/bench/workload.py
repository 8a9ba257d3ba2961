"""The layer being measured: its sizes, one set of weights for every candidate, and the expected output."""

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise import reference
from headwise.cli.bench.measurement import DTYPES, Verdict, judged
from headwise.errors import OptionError
from headwise.layer.options import Widths
from headwise.learn.cost import Cost, bound_seconds
from headwise.shapes import check_size
from headwise.weights import AttentionMap

SAMPLED = 64  # queries whose output is compared, including the first and the last
GRADIENT_TOKENS = 128  # tokens over which gradients are compared, which needs the whole matrix in float64


class ProjectionWeights(NamedTuple):
    """The query, key, value and output projections."""

    query: reference.Linear
    key: reference.Linear
    value: reference.Linear
    out: reference.Linear

    def to(self, dtype: torch.dtype, *, biases: bool = True) -> "ProjectionWeights":
        """The same numbers in another dtype, with or without biases."""
        made = ((w.to(dtype), b.to(dtype) if biases and b is not None else None) for w, b in self)
        return ProjectionWeights(*(reference.Linear(w, b) for w, b in made))

    @property
    def fused(self) -> reference.Linear:
        """Query, key and value as one projection."""
        biases = [b for _, b in self[:3] if b is not None]
        return reference.Linear(torch.cat([w for w, _ in self[:3]]), torch.cat(biases) if biases else None)


@dataclasses.dataclass(frozen=True)
class Workload:
    """The sizes and kind of the layer that is measured.

    Args:
        d_model: width of input and output.
        heads: query heads, and as many key/value heads, which every peer supports.
        batch: texts per batch.
        causal: whether a token sees only itself and earlier tokens.
        dtype: a name from `DTYPES`.
        device: "cpu" or "cuda".
        backward: whether to run forward and backward, or only forward without gradients.
    """

    d_model: int
    heads: int
    batch: int = 1
    causal: bool = True
    dtype: str = "float32"
    device: str = "cpu"
    backward: bool = False

    def __post_init__(self) -> None:
        check_size("--batch", self.batch)
        Widths.complete(self.d_model, self.heads, None, None)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise OptionError("--device cuda: torch finds no CUDA device here. Leave it out to measure the CPU.")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's own object."""
        return DTYPES[self.dtype]

    @property
    def head_dim(self) -> int:
        """The head dimension."""
        return self.d_model // self.heads

    @property
    def place(self) -> dict[str, Any]:
        """Device and dtype, as keyword arguments of torch's constructors."""
        return {"device": self.device, "dtype": self.torch_dtype}

    def cost(self, tokens: int) -> Cost:
        """The cost formulas for this layer."""
        item = self.torch_dtype.itemsize
        return Cost.of(
            self.d_model, self.heads, seq=tokens, batch=self.batch, causal=self.causal, bias=True, item_bytes=item
        )

    def matrix_bytes(self, tokens: int) -> int:
        """Bytes of the T×T matrix of all heads."""
        return self.cost(tokens).matrix_bytes.value

    def least_work(self, tokens: int) -> tuple[int, int]:
        """The operations and bytes that any implementation needs.

        Forward: the matrix products over visible pairs; reads weights and input, writes the output. Backward: two more
        products for each of them; reads weights, input and output gradient, writes the gradients of weights and input.
        """
        cost = self.cost(tokens)
        weights = cost.weight_bytes.value
        tensor = self.batch * tokens * self.d_model * self.torch_dtype.itemsize
        if not self.backward:
            return cost.visible_flops, weights + 2 * tensor
        return 3 * cost.visible_flops, 3 * weights + 5 * tensor

    def ceiling_share(self, tokens: int, ms: float, ceilings: dict[str, float]) -> float:
        """The shortest time this machine could need, divided by the time measured."""
        bound = bound_seconds(*self.least_work(tokens), ceilings["flops"], ceilings["bytes"])
        return 0.0 if bound is None else bound / (ms / 1e3)


Expected = tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]  # queries; output and weights, twice


class Problem:
    """Weights and inputs for a workload, and the reference's answer to them."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        E = workload.d_model
        generator = torch.Generator().manual_seed(0)

        def linear() -> reference.Linear:
            w = torch.randn(E, E, generator=generator) / math.sqrt(E)  # scores of variance 1, so weights differ
            b = torch.randn(E, generator=generator) / 10  # visible in the output without dominating it
            return reference.Linear(w.to(**workload.place), b.to(**workload.place))

        self.weights = ProjectionWeights(linear(), linear(), linear(), linear())
        self.known: dict[tuple[int, bool], Expected] = {}

    def x(self, tokens: int) -> Tensor:
        """The input (B, T, E), the same at every call."""
        generator = torch.Generator().manual_seed(tokens)
        shape = (self.workload.batch, tokens, self.workload.d_model)
        return torch.randn(shape, generator=generator).to(**self.workload.place)

    def judge(self, output: Tensor, tokens: int, *, biases: bool) -> Verdict:
        """Compare some queries of an output (B, T, E) with the reference."""
        rows, truth, plain = self._sampled(tokens, biases)
        return judged(output.detach()[:, rows], truth[0], plain[0])

    def judge_weights(self, weights: Tensor | AttentionMap, tokens: int) -> Verdict:
        """Compare some queries of all heads' weights (B, H, T, T), a tensor or a map, with the reference."""
        rows, truth, plain = self._sampled(tokens, True)
        return judged(weights[:, :, rows].detach(), truth[1], plain[1])

    def judge_gradient(self, gradient: Tensor, *, biases: bool) -> Verdict:
        """Compare the gradient of the output's sum of squares with respect to `gradient_input()`."""
        found = []
        for dtype in (torch.float64, self.workload.torch_dtype):
            x = self.gradient_input().to(dtype).requires_grad_()
            rows = torch.arange(x.shape[1], device=x.device)
            self._reference(x, x, rows, biases)[0].double().square().sum().backward()
            assert x.grad is not None  # noqa: S101
            found.append(x.grad)
        return judged(gradient, *found)

    def gradient_input(self) -> Tensor:
        """One text, short enough to differentiate the reference."""
        return self.x(GRADIENT_TOKENS)[:1]

    def _sampled(self, tokens: int, biases: bool) -> Expected:
        """Some queries, and the reference's output and weights for them in float64 and in the measured dtype."""
        if (tokens, biases) not in self.known:
            x = self.x(tokens)
            rows = torch.linspace(0, tokens - 1, min(tokens, SAMPLED), device=x.device).round().long()
            dtypes = (torch.float64, self.workload.torch_dtype)
            truth, plain = (self._reference(x[:, rows].to(dtype), x.to(dtype), rows, biases) for dtype in dtypes)
            self.known[tokens, biases] = rows, truth, plain
        return self.known[tokens, biases]

    def _reference(self, query: Tensor, key: Tensor, rows: Tensor, biases: bool) -> tuple[Tensor, Tensor]:
        visible = rows[:, None] >= torch.arange(key.shape[1], device=key.device) if self.workload.causal else None
        linears = self.weights.to(key.dtype, biases=biases)
        return reference.multi_head_attention(query, key, key, linears, self.workload.heads, visible=visible)
