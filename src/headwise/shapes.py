"""The dimension legend, and the checks of public arguments.

    B  batch              T, S   query length, key length
    H  query heads        D, Dv  head width of query and key, of value
    Hkv  key/value heads  E      model width

Public tensors of the core are (B, H, T, D); the layer takes (B, T, E). Checks run once, where a user's tensor enters.
They look at shapes and dtypes, never at values, so they cost nothing in a compiled graph.
"""

import math
import operator
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from headwise.errors import DeviceError, DtypeError, HeadCountError, OptionError, ShapeError

LARGEST = 2**62  # what torch can count


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless query (B, H, T, D), key (B, Hkv, S, D) and value (B, Hkv, S, Dv) fit together."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ShapeError(
                f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}; expected 4, (B, H, T, D). "
                f"Split a (B, T, E) tensor into heads with x.unflatten(-1, (H, D)).transpose(1, 2)."
            )
    B, H, _, D = query.shape
    Bkv, Hkv, _, Dkey = key.shape
    if key.shape[:3] != value.shape[:3]:
        raise ShapeError(
            f"key has (B, Hkv, S) = {tuple(key.shape[:3])} and value {tuple(value.shape[:3])}; every key needs "
            f"one value, so these must be equal."
        )
    if Bkv != B:
        raise ShapeError(f"query has a batch of {B} and key of {Bkv}; they must be equal. Expand the smaller one.")
    if Dkey != D:
        raise ShapeError(f"query heads are {D} wide and key heads {Dkey}; a dot product needs equal widths.")
    if Hkv < 1 or H % Hkv:
        raise HeadCountError(
            f"query has {H} heads and key has {Hkv}; query heads must be a multiple of key heads. "
            f"Pass a number of key heads that divides {H}, or repeat the key heads."
        )
    check_alike(query=query, key=key, value=value)


def check_tensor(name: str, x: object) -> None:
    """Raise unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise DtypeError(
            f"{name} is a {type(x).__name__}; expected a torch.Tensor. Convert it with torch.as_tensor(...)."
        )


def check_alike(**tensors: Tensor) -> None:
    """Raise unless all tensors are floating point, of one dtype and on one device."""
    (first_name, first), *rest = tensors.items()
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise DtypeError(
                f"{name} is {tensor.dtype}; attention needs floating point. Token ids must go through an embedding "
                f"first; other numbers through {name}.float()."
            )
    for name, tensor in rest:
        if tensor.device != first.device:
            raise DeviceError(
                f"{first_name} is on {first.device} and {name} on {tensor.device}; move one with .to(...)."
            )
        if tensor.dtype != first.dtype and not torch.is_autocast_enabled(first.device.type):
            raise DtypeError(
                f"{first_name} is {first.dtype} and {name} {tensor.dtype}; cast one with .to(...), or run under "
                f"torch.autocast."
            )


def check_attn_bias(bias: Tensor, B: int, H: int, T: int, S: int, device: torch.device) -> None:
    """Raise unless an `attn_bias` broadcasts to the scores (B, H, T, S)."""
    check_tensor("attn_bias", bias)
    if not bias.is_floating_point():
        raise DtypeError(
            f"attn_bias is {bias.dtype}; it is added to the scores, so it must be floating point. "
            f"A table of who may attend is a mask: pass it as mask=."
        )
    if bias.device != device:
        raise DeviceError(f"attn_bias is on {bias.device} and the query on {device}; move one with .to(...).")
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if bias.dim() not in (2, 4) or any(n != 1 and n != size for n, size in zip(shape, (B, H, T, S), strict=True)):
        raise ShapeError(
            f"attn_bias of shape {tuple(bias.shape)} does not fit the scores (B, H, T, S) = {(B, H, T, S)}. "
            f"Expected (T, S) or 4 dimensions, with size 1 for axes to broadcast."
        )


def check_probability(name: str, p: float) -> float:
    """`p`, refused unless it lies in [0, 1)."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
        raise OptionError(f"{name}={p!r}: expected a probability in [0, 1). At 1 nothing would be left to attend to.")
    return float(p)


def whole_number(n: object) -> int | None:
    """`n` as an int if it is one whole number: an int, one of numpy's, or a tensor that holds one. Else None."""
    if isinstance(n, bool) or not isinstance(n, SupportsIndex) or getattr(n, "shape", ()) != ():
        return None
    try:
        return operator.index(n)
    except (TypeError, ValueError, RuntimeError):  # a float or bool in an array or tensor, or one on the meta device
        return None


def check_size(name: str, n: object) -> int:
    """`n`, refused unless it is a whole number from 1 up."""
    found = whole_number(n)
    if found is None or not 1 <= found < LARGEST:
        raise OptionError(f"{name}={brief(n)}: expected a whole number from 1 up.")
    return found


def check_truth(name: str, value: object) -> bool:
    """`value` as True or False; refused if it is a string or has no single truth, as a tensor of many numbers."""
    try:
        if not isinstance(value, str):
            return bool(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"{name}={brief(value)}: expected True or False.") from error
    raise OptionError(f"{name}={brief(value)}: expected True or False.")


def brief(x: object) -> str:
    """`x` for a message: an array or tensor by its shape, anything else as Python writes it."""
    shape = getattr(x, "shape", None)
    if shape is None or shape == ():
        return repr(x)
    return f"{type(x).__name__} of shape {tuple(shape)} and {getattr(x, 'dtype', None)}"


def check_flag(name: str, value: object) -> bool:
    """`value` as True or False, refused if it is anything else; None counts as False."""
    if value is not None and value is not True and value is not False:
        raise OptionError(f"{name}={value!r}: expected True or False.")
    return bool(value)


def check_dtype(dtype: object) -> None:
    """Raise unless `dtype` is None or a floating-point dtype of torch."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise DtypeError(f"dtype={dtype!r}: expected a floating-point dtype of torch, such as torch.bfloat16.")


def as_numbers(name: str, x: object, device: torch.device | None = None) -> Tensor:
    """`x` as a tensor, refused if torch cannot read it as numbers."""
    try:
        return torch.as_tensor(x, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeError(f"{name} is a {type(x).__name__}; expected whole numbers, as a list or a tensor.") from error


def check_factor(name: str, factor: float | None, default: str) -> None:
    """Raise unless `factor` is None or above 0: a hidden score, minus infinity, must stay so when scaled."""
    if factor is None:
        return
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise OptionError(f"{name}={factor!r}: expected a number above 0, or None for {default}.")


def check_sinks(sinks: Any, H: int, device: torch.device) -> None:
    """Raise unless `sinks` is one floating-point score per query head."""
    check_tensor("sinks", sinks)
    if not sinks.is_floating_point() or tuple(sinks.shape) != (H,):
        raise ShapeError(
            f"sinks of shape {tuple(sinks.shape)} and {sinks.dtype}; expected one floating-point score per query head, "
            f"({H},)."
        )
    if sinks.device != device:
        raise DeviceError(f"sinks are on {sinks.device} and the query on {device}; move one with .to(...).")
