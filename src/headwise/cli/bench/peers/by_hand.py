"""What an expert writes by hand on torch's fused kernels. Nothing is checked."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.cli.bench.peers.peer import fill
from headwise.cli.bench.setting import Setting, Weights


class HandWired(nn.Module):
    """One fused QKV linear, views, torch's fused attention."""

    def __init__(self, d_model: int, num_heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.num_heads, self.causal = num_heads, causal

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(B, H, T, D), three times, to (B, H, T, D)."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        B, T, E = x.shape
        q, k, v = (y.view(B, T, self.num_heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        output: Tensor = self.out(self.attend(q, k, v).transpose(1, 2).reshape(B, T, E))
        return output


class Flex(HandWired):
    """The same on FlexAttention, compiled, with a block mask."""

    def __init__(self, setting: Setting) -> None:
        from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

        super().__init__(setting.d_model, setting.heads, setting.causal)
        torch._dynamo.reset()  # past eight shapes of one function the compiler gives up, and Flex makes the matrix
        self.kernel: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)

        def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return q >= k

        @functools.cache
        def block_mask(T: int) -> BlockMask | None:
            return create_block_mask(sees, None, None, T, T, device=setting.device) if setting.causal else None

        self.block_mask = block_mask

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(B, H, T, D), three times, to (B, H, T, D)."""
        return self.kernel(query, key, value, block_mask=self.block_mask(query.shape[2]))


def hand_wired(setting: Setting, weights: Weights, _tokens: int) -> nn.Module:
    """With `scaled_dot_product_attention`."""
    return _filled(HandWired(setting.d_model, setting.heads, setting.causal), weights)


def flex(setting: Setting, weights: Weights, _tokens: int) -> nn.Module:
    """With `flex_attention`."""
    return _filled(Flex(setting), weights)


def _filled(module: HandWired, weights: Weights) -> nn.Module:
    fill(module.qkv, weights.fused)
    fill(module.out, weights.out)
    return module
