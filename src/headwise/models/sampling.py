"""Which token comes next: temperature, top-k, top-p, seed."""

import torch
from torch import Tensor

from headwise.errors import OptionError


class Sampler:
    """Draws a token from logits (V,).

    >>> Sampler(temperature=0)(torch.tensor([0.0, 3.0, 1.0]))
    1
    """

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> None:
        if not 0 <= temperature < float("inf"):
            raise OptionError(f"temperature={temperature}: expected 0 or more.")
        if top_k is not None and top_k < 1:
            raise OptionError(f"top_k={top_k}: expected 1 or more.")
        if top_p is not None and not 0 < top_p <= 1:
            raise OptionError(f"top_p={top_p}: expected a share above 0, at most 1.")
        if seed is not None and not -(2**63) <= seed < 2**64:
            raise OptionError(f"seed={seed}: expected a whole number of 64 bits.")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generator = torch.Generator()  # on the CPU, so that a seed means the same on every machine
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """A token."""
        if self.temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial(self.probabilities(logits), 1, generator=self.generator))

    def probabilities(self, logits: Tensor) -> Tensor:
        """What is drawn from, (V,)."""
        order = torch.sort(logits.double().cpu() / self.temperature, descending=True, stable=True)
        share = order.values.softmax(0)
        if self.top_k is not None:
            share[self.top_k :] = 0
        if self.top_p is not None:
            share = share / share.sum()
            before = share.cumsum(0) - share
            share[before >= self.top_p] = 0  # the likeliest always stays: before it there is nothing
        return torch.zeros_like(share).scatter(0, order.indices, share / share.sum())
