"""One layer to be measured: its sizes, one set of weights for every candidate, and what the right output is."""

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise import reference
from headwise.cli.bench.measuring import DTYPES, Verdict, judged
from headwise.errors import OptionError
from headwise.layer.options import Widths
from headwise.learn.cost import Cost
from headwise.shapes import check_size
from headwise.weights import AttentionMap

SAMPLED = 64  # queries whose output is compared, the first and the last among them
GRADIENT_TOKENS = 128  # tokens over which gradients are compared, which takes the whole matrix in float64


class Weights(NamedTuple):
    """The projections of query, key, value and result."""

    query: reference.Linear
    key: reference.Linear
    value: reference.Linear
    out: reference.Linear

    def to(self, dtype: torch.dtype, *, biases: bool = True) -> "Weights":
        """The same numbers in another dtype, with or without biases."""
        made = ((w.to(dtype), b.to(dtype) if biases and b is not None else None) for w, b in self)
        return Weights(*(reference.Linear(w, b) for w, b in made))

    @property
    def fused(self) -> reference.Linear:
        """Query, key and value in one."""
        biases = [b for _, b in self[:3] if b is not None]
        return reference.Linear(torch.cat([w for w, _ in self[:3]]), torch.cat(biases) if biases else None)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes and kind of the layer.

    Args:
        d_model: width of input and output.
        heads: query heads, and as many for keys and values, which every peer can do.
        batch: texts.
        causal: whether a token sees only what came before it.
        dtype: a name of `DTYPES`.
        device: "cpu" or "cuda".
        backward: whether a run is forward and backward, or forward alone without gradients.
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
        """The dtype itself."""
        return DTYPES[self.dtype]

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.d_model // self.heads

    @property
    def place(self) -> dict[str, Any]:
        """Where tensors are made."""
        return {"device": self.device, "dtype": self.torch_dtype}

    def cost(self, tokens: int) -> Cost:
        """The formulas for it."""
        item = self.torch_dtype.itemsize
        return Cost.of(
            self.d_model, self.heads, seq=tokens, batch=self.batch, causal=self.causal, bias=True, item_bytes=item
        )

    def matrix_bytes(self, tokens: int) -> int:
        """Bytes of the T×T matrix of all heads."""
        return self.cost(tokens).matrix_bytes.value


Answer = tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]  # queries; output and weights, twice


class Problem:
    """Weights and inputs for a setting, and the reference's answer to them."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        E = setting.d_model
        generator = torch.Generator().manual_seed(0)

        def linear() -> reference.Linear:
            w = torch.randn(E, E, generator=generator) / math.sqrt(E)  # scores of variance 1: weights not all alike
            b = torch.randn(E, generator=generator) / 10  # seen in the output, without drowning the rest of it
            return reference.Linear(w.to(**setting.place), b.to(**setting.place))

        self.weights = Weights(linear(), linear(), linear(), linear())
        self.known: dict[tuple[int, bool], Answer] = {}

    def x(self, tokens: int) -> Tensor:
        """The input (B, T, E), the same at every call."""
        generator = torch.Generator().manual_seed(tokens)
        shape = (self.setting.batch, tokens, self.setting.d_model)
        return torch.randn(shape, generator=generator).to(**self.setting.place)

    def judge(self, output: Tensor, tokens: int, *, biases: bool) -> Verdict:
        """Some queries of an output (B, T, E) against the reference."""
        rows, truth, plain = self._sampled(tokens, biases)
        return judged(output.detach()[:, rows], truth[0], plain[0])

    def judge_weights(self, weights: Tensor | AttentionMap, tokens: int) -> Verdict:
        """Some queries of all heads' weights (B, H, T, T), as a tensor or a map, against the reference."""
        rows, truth, plain = self._sampled(tokens, True)
        return judged(weights[:, :, rows].detach(), truth[1], plain[1])

    def judge_gradient(self, gradient: Tensor, *, biases: bool) -> Verdict:
        """The gradient of an output's sum of squares with respect to a short input, see `gradient_input`."""
        found = []
        for dtype in (torch.float64, self.setting.torch_dtype):
            x = self.gradient_input().to(dtype).requires_grad_()
            rows = torch.arange(x.shape[1], device=x.device)
            self._reference(x, x, rows, biases)[0].double().square().sum().backward()
            assert x.grad is not None  # noqa: S101
            found.append(x.grad)
        return judged(gradient, *found)

    def gradient_input(self) -> Tensor:
        """One text, short enough for the reference to be differentiated."""
        return self.x(GRADIENT_TOKENS)[:1]

    def _sampled(self, tokens: int, biases: bool) -> Answer:
        """Some queries, and the reference's output and weights for them in float64 and in the dtype measured."""
        if (tokens, biases) not in self.known:
            x = self.x(tokens)
            rows = torch.linspace(0, tokens - 1, min(tokens, SAMPLED), device=x.device).round().long()
            dtypes = (torch.float64, self.setting.torch_dtype)
            truth, plain = (self._reference(x[:, rows].to(dtype), x.to(dtype), rows, biases) for dtype in dtypes)
            self.known[tokens, biases] = rows, truth, plain
        return self.known[tokens, biases]

    def _reference(self, query: Tensor, key: Tensor, rows: Tensor, biases: bool) -> tuple[Tensor, Tensor]:
        visible = rows[:, None] >= torch.arange(key.shape[1], device=key.device) if self.setting.causal else None
        linears = self.weights.to(key.dtype, biases=biases)
        return reference.multi_head_attention(query, key, key, linears, self.setting.heads, visible=visible)
