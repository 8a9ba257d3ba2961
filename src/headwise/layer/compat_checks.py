"""What `compat.MultiheadAttention` may be called with; errors are ours and those that torch raises, in one."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import shapes
from headwise.errors import HeadCountError, MaskError, OptionError, ShapeError

_torch_shape_check: Any = F._mha_shape_check  # type: ignore[attr-defined]


class InputShapeError(ShapeError, AssertionError, RuntimeError):
    """A `ShapeError` that code written for torch's class catches, too; it raises now the one, now the other."""


class PaddingMaskError(MaskError, AssertionError):
    """A `MaskError` that code written for torch's class catches, too."""


class AttentionMaskError(MaskError, RuntimeError):
    """A `MaskError` that code written for torch's class catches, too."""


class CausalFlagError(OptionError, RuntimeError):
    """An `OptionError` that code written for torch's class catches, too."""


class DivisionError(HeadCountError, AssertionError):
    """A `HeadCountError` that code written for torch's class catches, too."""


def check(
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Raise unless inputs and masks are of kinds and sizes that fit the layer and each other."""
    inputs = {"query": query, "key": key, "value": value}
    for name, x in inputs.items():
        shapes.check_tensor(name, x)
    for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        _check_mask_dtype(name, mask)
    try:
        _torch_shape_check(query, key, value, key_padding_mask, attn_mask, layer.num_heads)
    except AssertionError as error:  # torch's words, by which old code may know it, and ours
        raise InputShapeError(f"{error}. {_expected(layer, inputs)}") from error
    widths = (layer.embed_dim, layer.kdim, layer.vdim)
    if any(x.shape[-1] != width for x, width in zip(inputs.values(), widths, strict=True)):
        raise InputShapeError(f"an input has the wrong width. {_expected(layer, inputs)}")
    batch = slice(1) if layer.batch_first else slice(1, 2)
    if query.dim() == 3 and not query.shape[batch] == key.shape[batch] == value.shape[batch]:
        raise InputShapeError(f"the batch sizes differ. {_expected(layer, inputs)}")
    if key.shape[:-1] != value.shape[:-1]:
        raise InputShapeError(f"every key needs one value, and their numbers differ. {_expected(layer, inputs)}")
    shapes.check_alike(**inputs)
    shapes.check_alike(input=query, weight=layer.out_proj.weight)
    if is_causal and attn_mask is None:
        raise CausalFlagError(
            "is_causal=True without attn_mask: the flag only says that attn_mask is the causal one. Pass "
            "attn_mask=nn.Transformer.generate_square_subsequent_mask(T) as well."
        )


def check_masks(
    layer: nn.MultiheadAttention, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
) -> None:
    """Raise unless masks have the shapes torch reads."""
    length = 1 if layer.batch_first and query.dim() == 3 else 0
    T, S = query.shape[length], key.shape[length]
    B = 1 if query.dim() == 2 else query.shape[1 - length]
    if key_padding_mask is not None and tuple(key_padding_mask.shape) != ((B, S) if query.dim() == 3 else (S,)):
        raise PaddingMaskError(
            f"key_padding_mask of shape {tuple(key_padding_mask.shape)}: expected (B, S) = {(B, S)}, without B "
            f"for one sequence, and True for keys that nobody sees. {_layout(layer)}"
        )
    shape = (T, S) if attn_mask is None or attn_mask.dim() == 2 else (B * layer.num_heads, T, S)
    if attn_mask is not None and tuple(attn_mask.shape) != shape:
        raise AttentionMaskError(
            f"attn_mask of shape {tuple(attn_mask.shape)}: expected (T, S) = {(T, S)}, or one for each head of "
            f"each sample, (B·H, T, S) = {(B * layer.num_heads, T, S)}. {_layout(layer)}"
        )


def _expected(layer: nn.MultiheadAttention, inputs: dict[str, Tensor]) -> str:
    given = ", ".join(f"{name} {tuple(x.shape)}" for name, x in inputs.items())
    order = "(B, T, {})" if layer.batch_first else "(T, B, {})"
    wanted = ", ".join(
        f"{name} {order.format(width).replace('T', letter)}"
        for name, width, letter in zip(inputs, (layer.embed_dim, layer.kdim, layer.vdim), "TSS", strict=True)
    )
    return f"Given: {given}. Expected: {wanted}, or all three without B. {_layout(layer)}"


def _layout(layer: nn.MultiheadAttention) -> str:
    return (
        f"This layer has batch_first={layer.batch_first}; if the axes of your tensors are in the other order, "
        f"pass batch_first={not layer.batch_first} when you make it."
    )


def _check_mask_dtype(name: str, mask: Tensor | None) -> None:
    if mask is None:
        return
    shapes.check_tensor(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise PaddingMaskError(
            f"{name} is {mask.dtype}; only bool and floating types of {name} are supported: True hides, a float is "
            f"added to the scores. If 1 hides here, pass {name}.bool()."
        )
