"""The assignments of public graders: our own right answer to each, and how it is built and called to find the truth.

The answers are in `graded/`. A function becomes a module that holds the weights, so that one driver fits all: a mutant
gets the parameters of the original and is compared with it at every size.
"""

import dis
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from mutants import drivers
from mutants.drivers import Call, Driver, Inputs, Size, Slots

LINEAR = nn.Linear
ANSWERS = Path(__file__).parent / "graded"


class Assignment(NamedTuple):
    """What a grader asks for: the script that runs its tests, the task given to it, and how to drive an answer."""

    grader: str  # run_<grader>.py
    task: str
    driver: Driver


def answer_to(assignment: str) -> str:
    """The text of our right answer."""
    return (ANSWERS / f"{assignment}.py").read_text(encoding="utf-8")


class Weighted(nn.Module):
    """A function of the assignment, with weights of its own where it needs any."""

    def __init__(self, names: dict[str, Any], target: str, size: Size, widths: dict[str, int]) -> None:
        super().__init__()
        self.names = {name: value for name, value in names.items() if callable(value)}  # modules cannot be copied
        self.function, self.size = names[target], size
        for role, width in widths.items():
            setattr(self, role, nn.Linear(size.E, width, bias=False))


# Functions that are given everything.


class CausalFunction(Weighted):
    """`causal_attention(Q, K, V)`: one head, no weights."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        """The answer's result."""
        return self.function(query, key, value)


class ArrayFunctions(Weighted):
    """`compute_qkv` and `multi_head_attention` on NumPy arrays, one sample at a time."""

    def forward(self, x: Tensor) -> Tensor:
        """The answers' results, as a batch."""
        weights = [layer.weight.detach().numpy().T for layer in (self.q, self.k, self.v)]
        rows = [self.names["compute_qkv"](sample, *weights) for sample in x.detach().numpy()]
        return torch.stack([torch.as_tensor(self.function(*row, self.size.H)) for row in rows])


class FilledOutput(Weighted):
    """`solve(Q, K, V, output, N, d_model, h)`, one sample at a time."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What is written into the output, as a batch."""
        outputs = [torch.zeros_like(sample) for sample in query]
        for sample in zip(query, key, value, outputs, strict=True):
            self.function(*sample, query.shape[1], self.size.E, self.size.H)
        return torch.stack(outputs)


class GivenWeights(Weighted):
    """`run_multihead_self_attention(...)` and `run_scaled_dot_product_attention(Q, K, V, mask)`."""

    def forward(self, x: Tensor) -> Any:
        """Causal self-attention with the weights of this module."""
        weights = [layer.weight for layer in (self.q, self.k, self.v, self.o)]
        return self.function(self.size.E, self.size.H, *weights, x)

    def core(self, *inputs: Tensor) -> Any:
        """Attention without projections."""
        return self.names["run_scaled_dot_product_attention"](*inputs)


class LayersInside(Weighted):
    """A function that makes its layers at every call: they get the weights of this module, by their names."""

    def __init__(self, names: dict[str, Any], target: str, size: Size, sizes: tuple[int, ...]) -> None:
        width = size.D * sizes[-1]
        super().__init__(names, target, size, {"q": size.E, "k": width, "v": width, "o": size.E})
        self.sizes = sizes

    def layer(self, inputs: int, outputs: int, bias: bool = True) -> nn.Module:
        """Stands in for `nn.Linear`."""
        made = LINEAR(inputs, outputs, bias, dtype=self.q.weight.dtype)
        known = _target(sys._getframe(1))[-1:]
        if known in "qkvo" and made.weight.shape == getattr(self, known).weight.shape:
            made.weight = getattr(self, known).weight
        if bias:
            nn.init.zeros_(made.bias)
        return made

    def forward(self, *inputs: Tensor, mask: Tensor | None = None) -> Any:
        """The answer's result with the weights of this module."""
        with mock.patch.object(nn, "Linear", self.layer):
            return self.function(*inputs, *self.sizes, self.size.E, mask=mask)


def _target(frame: FrameType) -> str:
    """The name that a frame gives to the result of the call it is in: `w_q` of `w_q = nn.Linear(...)`."""
    later = (step for step in dis.get_instructions(frame.f_code) if step.offset > frame.f_lasti)
    return next((str(step.argval) for step in later if step.opname == "STORE_FAST"), "?")


# Calls.


def _same_lengths(i: Inputs) -> Iterator[Call]:
    """Query, key and value of one length."""
    for name, length in (("plain", i.size.T), ("one token", 1), ("two tokens", 2)):
        yield drivers._plain(*(i.x(length, i.size.E) for _ in range(3)), name=name)


def _both(i: Inputs) -> Iterator[Call]:
    """The layer, and the function for its heads with three and four axes."""
    s = i.size
    yield from drivers._self_only(i)
    for name, mask in (("core", None), ("core, mask", i.mask("mask", i.B, s.T, s.S))):
        inputs = [i.x(s.T, s.D), i.x(s.S, s.D), i.x(s.S, s.D)]
        yield _core(name, inputs, mask)
        yield _core(f"{name}, heads", [t[None].detach().requires_grad_() for t in inputs], mask)


def _core(name: str, inputs: list[Tensor], mask: Tensor | None) -> Call:
    given = inputs if mask is None else [*inputs, mask]
    return Call(name, lambda m: m.core(*given), given, masked=mask is not None)


def _context(i: Inputs) -> Iterator[Call]:
    """Queries from one sequence, keys and values from another."""
    s = i.size
    yield drivers._plain(i.x(s.T, s.E), i.x(s.S, s.E), name="context")
    yield drivers._plain(i.x(1, s.E), i.x(s.S, s.E), name="one query")
    yield drivers._plain(i.x(s.T, s.E), i.x(1, s.E), name="one key")


def _three(i: Inputs) -> Iterator[Call]:
    return drivers._three(i, "mask", ())


def _three_masked(i: Inputs) -> Iterator[Call]:
    return drivers._three(i, "mask", ("TS", "B1TS", "B11S", "1TS"))


# One table.


def _configured(names: dict[str, Any], s: Size) -> nn.Module:
    config = SimpleNamespace(n_heads=s.H, d_model=s.model, d_head=s.D, init_range=0.02)
    return names["Attention"](config)


def _tensor_slots(module: Any, size: Size) -> Slots:
    """Weights (heads, input, width) with biases (heads, width)."""
    found: Slots = {}
    for role in "QKV":
        pairs = zip(getattr(module, f"W_{role}"), getattr(module, f"b_{role}"), strict=True)
        found[role.lower()] = [(weight.T, bias) for weight, bias in pairs]
    return found | {"o": [(weight, None) for weight in module.W_O]}


def _weighted(kind: type[Weighted], target: str, roles: str) -> Callable[[dict[str, Any], Size], nn.Module]:
    return lambda names, size: kind(names, target, size, dict.fromkeys(roles, size.E))


def _inside(target: str, grouped: bool) -> Driver:
    def build(names: dict[str, Any], size: Size) -> nn.Module:
        return LayersInside(names, target, size, (size.H, size.Hkv) if grouped else (size.H,))

    return Driver(target, build, _three_masked, drivers._named("q", "k", "v", "o"), ("mask",))


def _layered(target: str, calls: Callable[[Inputs], Iterator[Call]], grouped: bool = False) -> Driver:
    def build(names: dict[str, Any], size: Size) -> nn.Module:
        return names[target](size.E, size.H, *([size.Hkv] if grouped else []))

    return Driver(target, build, calls, drivers._named("W_q", "W_k", "W_v", "W_o"))


ASSIGNMENTS = {
    "torchcode_mha": Assignment("torchcode", "mha", _layered("MultiHeadAttention", _three)),
    "torchcode_causal": Assignment(
        "torchcode", "causal_attention",
        Driver("causal_attention", _weighted(CausalFunction, "causal_attention", ""), _same_lengths, None)),
    "torchcode_gqa": Assignment(
        "torchcode", "gqa", _layered("GroupQueryAttention", drivers._self_only, grouped=True)),
    "torchcode_cross": Assignment("torchcode", "cross_attention", _layered("MultiHeadCrossAttention", _context)),
    "torchleet_mha": Assignment(
        "torchleet", "multi_head_attention", _inside("multi_head_attention", grouped=False)),
    "torchleet_gqa": Assignment(
        "torchleet", "grouped_query_attention", _inside("grouped_query_attention", grouped=True)),
    "deepml": Assignment(
        "deepml", "", Driver("multi_head_attention", _weighted(ArrayFunctions, "multi_head_attention", "qkv"),
                             drivers._self_only, None)),
    "leetgpu": Assignment("leetgpu", "", Driver("solve", _weighted(FilledOutput, "solve", ""), _same_lengths, None)),
    "arena": Assignment("arena", "", Driver(
        "Attention", _configured, lambda i: drivers._self_only(i, "model"), _tensor_slots, causal=True)),
    "cs336": Assignment("cs336", "", Driver(
        "run_multihead_self_attention", _weighted(GivenWeights, "run_multihead_self_attention", "qkvo"), _both, None)),
}  # fmt: skip
