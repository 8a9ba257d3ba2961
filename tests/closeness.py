"""Tolerances derived from data: an error may be a small multiple of what plain PyTorch makes in the same dtype."""

import torch
from torch import Tensor


def assert_close_to_truth(output: Tensor, truth: Tensor, plain: Tensor | None = None, *, factor: float = 2.0) -> None:
    """`output` is as near to the float64 `truth` as `plain`, times `factor`, plus one rounding of the output.

    Entry by entry against the largest error of `plain`, and as a whole: a small error everywhere is still an error.
    """
    assert output.shape == truth.shape, f"{tuple(output.shape)} is not {tuple(truth.shape)}"
    assert output.isfinite().all(), "not all values are finite"
    error = (output.double() - truth).abs()
    rough = torch.zeros_like(truth) if plain is None else (plain.double() - truth).abs()
    # A fused gradient is a difference of two sums, each rounded in float32; in float64 the truth is rounded as well.
    roundings, floor = {torch.float64: (256, 1.0), torch.float32: (32, 1.0)}.get(output.dtype, (2, 0.05))
    rounding = torch.finfo(output.dtype).eps * roundings * (truth.abs() + floor)
    excess = error - rounding - factor * (rough.max() if rough.numel() else 0)
    assert (excess <= 0).all(), f"error exceeds what rounding explains by {excess.max().item():.3g}"
    assert error.norm() <= factor * rough.norm() + rounding.norm() / 2, (
        f"error {error.norm():.3g} in all, plain PyTorch has {rough.norm():.3g}"
    )
