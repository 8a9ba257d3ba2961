"""`flex_attention` written out in plain operations, so that a trace sees its scores and its weights."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def flex_attention_written_out(source: str) -> Iterator[None]:
    """While a file that uses it is loaded, torch's functions are the ones below; they run on the CPU."""
    if "flex_attention" not in source:
        yield
        return
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")
    saved = module.flex_attention, module.create_block_mask

    def create_block_mask(*args: Any, **options: Any) -> Any:
        return saved[1](*args, **options | {"device": "cpu", "_compile": False})

    module.flex_attention, module.create_block_mask = flex_attention, create_block_mask
    try:
        yield
    finally:
        module.flex_attention, module.create_block_mask = saved


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """Attention whose scores go through `score_mod`, with the keys that `block_mask` allows."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.size(1) // t.size(1), dim=1) for t in (key, value))
    sizes = (*query.shape[:3], key.size(2))
    counted = [torch.arange(n, device=query.device) for n in sizes]
    places = [numbers.view([-1 if axis == i else 1 for i in range(4)]) for axis, numbers in enumerate(counted)]
    scores = query @ key.mT * (query.size(-1) ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if block_mask is None:
        return scores.softmax(-1) @ value
    if (made_for := tuple(block_mask.seq_lengths)) != sizes[2:]:
        raise ValueError(f"block_mask was made for {made_for} queries and keys; here there are {sizes[2:]}")
    allowed = block_mask.mask_mod(*places).expand(sizes)
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    if query.device.type != "meta" and not bool(allowed.any(-1).all()):
        weights = weights.masked_fill(~allowed, 0.0)  # torch gives zeros, not NaN, where no key is visible
    return weights @ value
