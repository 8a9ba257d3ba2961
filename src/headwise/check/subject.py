"""The object under test: its callable, its tensors and what it is called with."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headwise.check.names import WEIGHTS_IN, constructor_role, plain, value_for
from headwise.check.sizes import Sizes

METHODS = (
    "forward",
    "__call__",
    "call",
    "attention",
    "attend",
    "compute",
    "prefill",
    "compute_attention",
    "apply",
    "run",
    "multi_head_attention",
)


def entry(thing: Any) -> Callable[..., Any] | None:
    """The method that takes the input."""
    if isinstance(thing, nn.Module):
        if type(thing).forward is not nn.Module.forward:
            return thing.__call__
        own = next((name for name in METHODS if name in vars(type(thing))), None)  # a module called by another name
        return None if own is None else getattr(thing, own)
    if inspect.isfunction(thing):
        return thing
    for name in METHODS:
        method = getattr(thing, name, None)
        if callable(method) and not isinstance(thing, type):
            return method  # type: ignore[no-any-return]
    return None


def signature(thing: Any) -> list[inspect.Parameter]:
    """The parameters of that method, without those of keywords nobody names."""
    forward = isinstance(thing, nn.Module) and type(thing).forward is not nn.Module.forward
    target = thing.forward if forward else entry(thing)
    if target is None:
        return []
    parameters = inspect.signature(target).parameters.values()
    return [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def tensors(thing: Any) -> dict[str, Tensor]:
    """Every parameter by name; of a plain class also tensors and modules it holds as attributes or in lists."""
    if isinstance(thing, nn.Module):
        return dict(thing.named_parameters()) | dict(_loose(thing))
    return dict(_loose(thing))


def _loose(thing: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Trainable tensors that no module registers: in attributes, lists and dictionaries."""
    held: Any = {} if isinstance(thing, Tensor) else getattr(thing, "__dict__", {})
    if isinstance(thing, list | tuple):
        held = {str(i): part for i, part in enumerate(thing)}
    elif isinstance(thing, dict):
        held = {str(k): part for k, part in thing.items()}
    for name, part in held.items():
        if name.startswith("_") and isinstance(thing, nn.Module):
            continue
        full = f"{prefix}{name}"
        if isinstance(part, nn.Module) and not isinstance(thing, nn.Module):
            for inner, tensor in part.named_parameters():
                yield f"{full}.{inner}", tensor
        elif isinstance(part, nn.Parameter) or (isinstance(part, Tensor) and (part.requires_grad or part.dim() > 1)):
            if not isinstance(thing, nn.Module) or isinstance(part, nn.Parameter) or part.requires_grad:
                yield full, part
        elif depth < 3 and isinstance(part, list | tuple | dict):
            yield from _loose(part, f"{full}.", depth + 1)
        elif isinstance(part, nn.Module):
            for inner, tensor in part.named_parameters():
                yield f"{full}.{inner}", tensor


def modules(thing: Any) -> Iterator[nn.Module]:
    """Modules inside, also of a plain class, also in ordinary lists."""
    if isinstance(thing, nn.Module):
        yield from thing.modules()
    held = [*vars(thing).values()] if hasattr(thing, "__dict__") else []
    for part in held:
        for item in part if isinstance(part, list | tuple) else [part]:
            if isinstance(item, nn.Module) and item is not thing:
                yield from item.modules()


def prepare(thing: Any, seed: int = 0) -> None:
    """Double precision, evaluation mode, and every parameter random: biases and norms as well.

    Small initial values hide wrong scales and zero biases hide wrong ones, so nothing keeps its initial value.
    """
    for module in modules(thing):
        module.double()
        module.eval()
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(thing).values():
        if not tensor.is_floating_point() or tensor.device.type == "meta":
            continue
        if tensor.dim() == 0 and not tensor.requires_grad:  # a constant that is kept as a parameter
            tensor.data = tensor.data.double()
            continue
        if tensor.dtype != torch.float64:
            tensor.data = tensor.data.double()
        fan = tensor.shape[-1] if tensor.dim() > 1 else 4
        if tensor.dim() > 2 and tensor.shape[-1] <= 3:  # a convolution
            fan = tensor[0].numel()
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        tensor.data.copy_(noise * (1.2 / fan**0.5) + (1.0 if tensor.dim() <= 1 and _is_scale(tensor, thing) else 0.0))
    if not isinstance(thing, nn.Module):
        _double_attributes(thing)


def _is_scale(tensor: Tensor, thing: Any) -> bool:
    """Whether it is the weight of a norm: those stay near one."""
    return any(getattr(module, "weight", None) is tensor for module in modules(thing))


def _double_attributes(thing: Any) -> None:
    for name, part in list(getattr(thing, "__dict__", {}).items()):
        if isinstance(part, Tensor) and part.is_floating_point() and part.dtype != torch.float64:
            setattr(thing, name, part.double())


class FunctionWithWeights(nn.Module):
    """A function that takes its weights as arguments, made into a module that holds them."""

    def __init__(self, function: Callable[..., Any], sizes: Sizes) -> None:
        super().__init__()
        self.function, self.sizes = [function], sizes
        self.held: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        for p in inspect.signature(function).parameters.values():
            word, role = plain(p.name), constructor_role(p.name)
            if word in WEIGHTS_IN:
                width = 3 * sizes.E if WEIGHTS_IN[word] == "qkv" else sizes.E
                self.held[p.name] = f"weight_{p.name}"
                self.register_parameter(f"weight_{p.name}", nn.Parameter(torch.randn(sizes.E, width)))
            elif role in ("heads", "kv_heads", "head_width") or (role in ("width", "context") and len(word) > 1):
                self.constants[p.name] = value_for(role, sizes)

    def free(self) -> list[inspect.Parameter]:
        """Parameters that remain for the call."""
        parameters = inspect.signature(self.function[0]).parameters.values()
        return [p for p in parameters if p.name not in self.held and p.name not in self.constants]

    def forward(self, **named: Any) -> Any:
        """The function with its weights filled in."""
        weights = {name: getattr(self, held) for name, held in self.held.items()}
        return self.function[0](**named, **weights, **self.constants)
