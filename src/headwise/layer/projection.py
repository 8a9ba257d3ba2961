"""`project`: a linear map of an input, at the least cost of calling it, with our words where it does not fit."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from headwise import shapes


def project(linear: nn.Module, x: Tensor) -> Tensor:
    """`linear(x)`. In inference, a plain and unhooked `nn.Linear` is called without the 3 µs of a module call."""
    if torch.compiler.is_compiling():
        return linear(x)  # type: ignore[no-any-return]
    try:
        if torch.is_grad_enabled() or not is_plain(linear):
            return linear(x)  # type: ignore[no-any-return]
        parameters = linear._parameters
        return F.linear(x, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]
    except RuntimeError:  # torch has compared dtypes and devices for us; say in our words what is wrong
        if isinstance(linear, nn.Linear):
            shapes.check_alike(input=x, weight=linear.weight)
        raise


def is_plain(linear: nn.Module) -> bool:
    """Whether this is an `nn.Linear` as torch made it: not patched, not sharded, and nobody listens to its calls."""
    if type(linear) is not nn.Linear or "forward" in linear.__dict__ or "weight" not in linear._parameters:
        return False
    hooks = linear._forward_hooks or linear._forward_pre_hooks or _global_forward_hooks or _global_forward_pre_hooks
    return not (hooks or linear._backward_hooks or linear._backward_pre_hooks)
