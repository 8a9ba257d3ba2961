"""Small helpers that people keep in a file beside their attention, and call by the same few names."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """GPT-2's linear layer: (output width, input width), weights stored as (input, output)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.02), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        """(…, nx) to (…, nf)."""
        return x @ self.weight + self.bias


def clones(module: nn.Module, count: int) -> nn.ModuleList:
    """So many copies of a layer."""
    return nn.ModuleList(copy.deepcopy(module) for _ in range(count))


HELPERS: dict[str, Callable[..., Any]] = {
    "clones": clones, "clone_layers": clones, "get_clones": clones, "_get_clones": clones, "clone_modules": clones,
    "clone": clones, "make_clones": clones, "Conv1D": Conv1D, "LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm,
}  # fmt: skip
