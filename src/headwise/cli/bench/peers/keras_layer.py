"""`keras.layers.MultiHeadAttention` on torch."""

import torch
from torch import Tensor, nn

from headwise.cli.bench.peers.peer import load
from headwise.cli.bench.setting import Setting, Weights
from headwise.errors import OptionError


class KerasLayer(nn.Module):
    """The layer in self-attention, on the device that is measured and not on the one keras would choose."""

    def __init__(self, setting: Setting, weights: Weights) -> None:
        super().__init__()
        self.keras, self.setting = load("keras"), setting
        if self.keras.backend.backend() != "torch":
            raise OptionError(f"keras runs on {self.keras.backend.backend()}; set KERAS_BACKEND=torch.")
        H, D, E = setting.heads, setting.head_dim, setting.d_model
        with self.keras.device(setting.device):
            self.layer = self.keras.layers.MultiHeadAttention(H, D, dtype=setting.dtype)
            self.layer.build((None, None, E), (None, None, E))
        dense = (self.layer.query_dense, self.layer.key_dense, self.layer.value_dense)
        for part, (weight, bias) in zip(dense, weights[:3], strict=True):
            _put(part, weight.T.reshape(E, H, D), None if bias is None else bias.view(H, D))
        _put(self.layer.output_dense, weights.out.weight.T.reshape(H, D, E), weights.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        with self.keras.device(self.setting.device):
            output: Tensor = self.layer(x, x, use_causal_mask=self.setting.causal)
            return output


def _put(part: object, kernel: Tensor, bias: Tensor | None) -> None:
    for name, given in (("kernel", kernel), ("bias", bias)):
        if given is not None:
            value: torch.Tensor = getattr(part, name).value
            value.data.copy_(given)


def keras(setting: Setting, weights: Weights, _tokens: int) -> nn.Module:
    """The layer with these weights."""
    return KerasLayer(setting, weights)
