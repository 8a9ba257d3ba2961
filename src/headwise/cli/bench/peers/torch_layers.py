"""Peers that need only torch: wired by hand, torch's own layer, the textbook's classes, and our layer."""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import reference
from headwise.cli.bench.workload import ProjectionWeights, Workload
from headwise.layer import MultiHeadAttention
from headwise.textbook import HeadsAtOnce


def fill(linear: nn.Linear, given: reference.Linear) -> None:
    """Copy weights into a linear layer."""
    linear.weight.data.copy_(given.weight)
    if given.bias is not None:
        linear.bias.data.copy_(given.bias)


class HandWired(nn.Module):
    """What an expert writes by hand: one fused QKV linear, views, torch's fused attention, no checks."""

    def __init__(self, d_model: int, num_heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.num_heads, self.causal = num_heads, causal

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention over three (B, H, T, D), returned in that shape."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        B, T, E = x.shape
        q, k, v = (y.view(B, T, self.num_heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        output: Tensor = self.out(self.attend(q, k, v).transpose(1, 2).reshape(B, T, E))
        return output

    def filled(self, weights: ProjectionWeights) -> "HandWired":
        """The module itself, with these weights."""
        fill(self.qkv, weights.fused)
        fill(self.out, weights.out)
        return self


class HandWiredFlex(HandWired):
    """The same on compiled FlexAttention, with a block mask."""

    def __init__(self, workload: Workload) -> None:
        from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

        super().__init__(workload.d_model, workload.heads, workload.causal)
        torch._dynamo.reset()  # past eight shapes the compiler gives up, and FlexAttention builds the whole matrix
        self.kernel: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)

        def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return q >= k

        @functools.cache
        def block_mask(T: int) -> BlockMask | None:
            return create_block_mask(sees, None, None, T, T, device=workload.device) if workload.causal else None

        self.block_mask = block_mask

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention over three (B, H, T, D), returned in that shape."""
        return self.kernel(query, key, value, block_mask=self.block_mask(query.shape[2]))


def hand_wired(workload: Workload, weights: ProjectionWeights, _tokens: int) -> HandWired:
    """On `scaled_dot_product_attention`."""
    return HandWired(workload.d_model, workload.heads, workload.causal).filled(weights)


def flex(workload: Workload, weights: ProjectionWeights, _tokens: int) -> HandWired:
    """On `flex_attention`."""
    return HandWiredFlex(workload).filled(weights)


class TorchLayer(nn.Module):
    """`torch.nn.MultiheadAttention` in self-attention, called as its documentation says, with its mask made once."""

    mask: Tensor | None

    def __init__(self, d_model: int, num_heads: int, *, tokens: int, causal: bool, weights: bool) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.causal, self.weights = causal, weights
        mask = torch.full((tokens, tokens), -math.inf).triu(1) if causal else None
        self.register_buffer("mask", mask, persistent=False)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output (B, T, E), and the weights of every head (B, H, T, T) if `weights` was set."""
        mask = None if self.mask is None else self.mask[: x.shape[1], : x.shape[1]]
        output, weights = self.mha(
            x, x, x, attn_mask=mask, is_causal=self.causal, need_weights=self.weights, average_attn_weights=False
        )
        return output, weights

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        return self.both(x)[0]


def torch_mha(workload: Workload, weights: ProjectionWeights, tokens: int, *, need_weights: bool) -> TorchLayer:
    """torch's layer with these weights."""
    layer = TorchLayer(workload.d_model, workload.heads, tokens=tokens, causal=workload.causal, weights=need_weights)
    layer.mha.in_proj_weight.data.copy_(weights.fused.weight)
    if weights.fused.bias is not None:
        layer.mha.in_proj_bias.data.copy_(weights.fused.bias)
    fill(layer.mha.out_proj, weights.out)
    return layer


def heads_at_once(workload: Workload, weights: ProjectionWeights, tokens: int) -> HeadsAtOnce:
    """The textbook's vectorized class: one matrix for all heads, a T×T tensor."""
    E = workload.d_model
    rung = HeadsAtOnce(E, E, tokens, 0.0, workload.heads, qkv_bias=True).to(workload.torch_dtype)
    for linear, given in zip((rung.W_query, rung.W_key, rung.W_value, rung.out_proj), weights, strict=True):
        fill(linear, given)
    return rung


def heads_in_a_list(workload: Workload, weights: ProjectionWeights, tokens: int) -> nn.Module:
    """The textbook's list of heads, run one after the other, followed by the output projection it lacks."""
    whole = heads_at_once(workload, weights, tokens)
    return nn.Sequential(whole.to_list(), whole.out_proj)


def ours(workload: Workload, weights: ProjectionWeights, _tokens: int) -> MultiHeadAttention:
    """Our layer."""
    names = ("W_query", "W_key", "W_value", "out_proj")
    state: dict[str, torch.Tensor] = {}
    for name, (weight, bias) in zip(names, weights, strict=True):
        state |= {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})
    return MultiHeadAttention.from_state_dict(state, num_heads=workload.heads, causal=workload.causal)
