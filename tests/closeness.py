"""Tolerances derived from data: an error may be a small multiple of what plain PyTorch makes in the same dtype."""

import torch
from torch import Tensor


def assert_close_to_truth(output: Tensor, truth: Tensor, plain: Tensor | None = None, *, factor: float = 2.0) -> None:
    """`output` is as near to the float64 `truth` as `plain`, times `factor`, plus one rounding of the output."""
    assert output.shape == truth.shape, f"{tuple(output.shape)} is not {tuple(truth.shape)}"
    assert output.isfinite().all(), "not all values are finite"
    # A fused gradient is a difference of two sums, each rounded in float32; in float64 the truth is rounded as well.
    roundings = {torch.float64: 256, torch.float32: 32}.get(output.dtype, 4)
    allowed = torch.finfo(output.dtype).eps * roundings * (1 + truth.abs())
    if plain is not None:
        allowed = allowed + factor * (plain.double() - truth).abs().max()
    excess = (output.double() - truth).abs() - allowed
    assert (excess <= 0).all(), f"error exceeds what rounding explains by {excess.max().item():.3g}"
