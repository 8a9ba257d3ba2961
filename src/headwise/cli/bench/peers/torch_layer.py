"""`torch.nn.MultiheadAttention` in self-attention, with and without weights."""

import math

import torch
from torch import Tensor, nn

from headwise.cli.bench.peers.peer import fill
from headwise.cli.bench.setting import Setting, Weights


class TorchLayer(nn.Module):
    """torch.nn.MultiheadAttention called as its documents say; the mask that it asks for is made once."""

    mask: Tensor | None

    def __init__(self, d_model: int, num_heads: int, *, tokens: int, causal: bool, weights: bool) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.causal, self.weights = causal, weights
        mask = torch.full((tokens, tokens), -math.inf).triu(1) if causal else None
        self.register_buffer("mask", mask, persistent=False)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, T, E) to (B, T, E), and the weights of every head (B, H, T, T) if wanted."""
        mask = None if self.mask is None else self.mask[: x.shape[1], : x.shape[1]]
        output, weights = self.mha(
            x,
            x,
            x,
            attn_mask=mask,
            is_causal=self.causal,
            need_weights=self.weights,
            average_attn_weights=False,
        )
        return output, weights

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        return self.both(x)[0]


def without_weights(setting: Setting, weights: Weights, tokens: int) -> TorchLayer:
    """The layer with `need_weights=False`."""
    return _filled(setting, weights, tokens, False)


def with_weights(setting: Setting, weights: Weights, tokens: int) -> TorchLayer:
    """The layer with `need_weights=True, average_attn_weights=False`."""
    return _filled(setting, weights, tokens, True)


def _filled(setting: Setting, weights: Weights, tokens: int, wanted: bool) -> TorchLayer:
    layer = TorchLayer(setting.d_model, setting.heads, tokens=tokens, causal=setting.causal, weights=wanted)
    layer.mha.in_proj_weight.data.copy_(weights.fused.weight)
    if weights.fused.bias is not None:
        layer.mha.in_proj_bias.data.copy_(weights.fused.bias)
    fill(layer.mha.out_proj, weights.out)
    return layer
