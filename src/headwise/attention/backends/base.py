"""What a backend is: a name, a reason to refuse a call, and the run itself."""

import abc
import dataclasses
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.masks import Causal
from headwise.weights import Scoring

BEYOND_SDPA = "torch's fused attention supports neither soft-cap nor sinks, relative positions or a score function"
WIDEST = 256  # head dimension in torch's fused kernels on CUDA


class Call(NamedTuple):
    """One attention call, already checked: query (B, H, T, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv)."""

    query: Tensor
    key: Tensor
    value: Tensor
    scoring: Scoring
    dropout: float

    @property
    def ordinary(self) -> bool:
        """Whether torch's kernels accept this call as it is: no mask, or causal with as many keys as queries."""
        query, key, value, scoring, _ = self
        if scoring.bias is not None or scoring.beyond_sdpa:
            return False
        if query.size(3) != value.size(3) and self.repeats_keys:
            return False
        return scoring.mask is None or (type(scoring.mask) is Causal and query.size(2) == key.size(2))

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key/value head."""
        return True if self.query.size(1) != self.key.size(1) else False  # noqa: SIM210 - torch's symbolic bool is not one

    @property
    def repeats_keys(self) -> bool:
        """Whether torch would repeat every key for every query head: it has no fused kernel for grouped heads whose
        values are not as wide as their keys, on CUDA if they are wider than 256."""
        D, Dv = self.query.size(3), self.value.size(3)
        return Dv != D and self.grouped and (max(D, Dv) > WIDEST or not self.query.is_cuda)

    @property
    def learns(self) -> bool:
        """Whether anything here needs a gradient."""
        tensors = (self.query, self.key, self.value, *self.scoring.learnable)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    @property
    def uneven(self) -> bool:
        """Whether torch's kernel on the CPU refuses this call only because values are not as wide as keys."""
        return self.query.size(3) != self.value.size(3) and self.query.is_cpu and not self.dropout

    def even(self) -> "Call":
        """The same call with zeros added to the narrower of keys and values; the output has zeros at its end, too."""
        query, key, value, scoring, _ = self
        D, Dv = query.size(3), value.size(3)
        if Dv < D:
            return self._replace(value=F.pad(value, (0, D - Dv)))
        scoring = scoring if scoring.scale is not None else dataclasses.replace(scoring, scale=1 / math.sqrt(D))
        return self._replace(query=F.pad(query, (0, Dv - D)), key=F.pad(key, (0, Dv - D)), scoring=scoring)


class Backend(abc.ABC):
    """One way to compute attention. The table in `backends/__init__.py` is tried from top to bottom."""

    name: str
    summary: str

    @abc.abstractmethod
    def refuses(self, call: Call) -> str | None:
        """Why this backend does not run the call, or None if it does."""

    @abc.abstractmethod
    def run(self, call: Call) -> Tensor:
        """What every head reads, (B, H, T, Dv)."""

    def dense_bytes(self, call: Call) -> int:
        """The size of the largest T×S tensor that this backend makes; 0 if it makes none."""
        return 0

    def run_with_lse(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """The same, and the row log-sum-exp (B, H, T) if the kernel returns it at no extra cost. Otherwise it is
        computed when it is needed."""
        return self.run(call), None


def repeat_heads(tensor: Tensor, H: int) -> Tensor:
    """Key or value heads (B, Hkv, S, D) repeated to (B, H, S, D), for kernels without grouped heads."""
    group = H // tensor.shape[1]
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)
