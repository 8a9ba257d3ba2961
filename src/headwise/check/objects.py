"""The object under test: its tensors and layers, random weights for them, and the method that takes the input."""

import ast
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headwise.check.arguments import CallSizes, parameters_of, source_tree, value_for
from headwise.check.vocabulary import WEIGHTS_IN, constructor_role, plain

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
    """The method that takes the input; None where there is none."""
    if isinstance(thing, nn.Module):
        if type(thing).forward is not nn.Module.forward:
            return thing.__call__
        own = next((name for name in METHODS if name in vars(type(thing))), None)  # a module without a forward
        return None if own is None else getattr(thing, own)
    if inspect.isfunction(thing):
        return thing
    for name in METHODS:
        method = getattr(thing, name, None)
        if callable(method) and not isinstance(thing, type):
            return method  # type: ignore[no-any-return]
    return None


def entry_code(thing: Any) -> CodeType | None:
    """The code of that method, or of the function."""
    forward = isinstance(thing, nn.Module) and type(thing).forward is not nn.Module.forward
    return getattr(type(thing).forward if forward else entry(thing), "__code__", None)


def signature(thing: Any) -> list[inspect.Parameter]:
    """The named parameters of that method."""
    forward = isinstance(thing, nn.Module) and type(thing).forward is not nn.Module.forward
    target = thing.forward if forward else entry(thing)
    return [] if target is None else parameters_of(target)


def call_parameters(thing: Any) -> list[inspect.Parameter]:
    """The parameters that a call may fill: those of the method, or what a function's weights leave open."""
    return thing.free() if isinstance(thing, FunctionWithWeights) else signature(thing)


def tensors(thing: Any) -> dict[str, Tensor]:
    """Every parameter by name, and for a plain class the tensors and modules in its attributes and lists."""
    registered = thing.named_parameters() if isinstance(thing, nn.Module) else ()
    return dict(registered) | dict(_loose(thing))


def _loose(thing: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Trainable tensors that are not registered in a module: in attributes, lists and dictionaries."""
    held: Any = {} if isinstance(thing, Tensor) else getattr(thing, "__dict__", {})
    if isinstance(thing, list | tuple):
        held = {str(i): part for i, part in enumerate(thing)}
    elif isinstance(thing, dict):
        held = {str(k): part for k, part in thing.items()}
    for name, part in held.items():
        if name.startswith("_") and isinstance(thing, nn.Module):
            continue
        full = f"{prefix}{name}"
        if isinstance(part, nn.Module):
            for inner, tensor in part.named_parameters():
                yield f"{full}.{inner}", tensor
        elif isinstance(part, Tensor):
            matrix = not is_lazy(part) and part.dim() > 1 and not isinstance(thing, nn.Module)
            if isinstance(part, nn.Parameter) or part.requires_grad or matrix:
                yield full, part
        elif depth < 3 and isinstance(part, list | tuple | dict):
            yield from _loose(part, f"{full}.", depth + 1)


def modules(thing: Any) -> Iterator[nn.Module]:
    """Every module inside, including those in ordinary lists and in the attributes of a plain class."""
    if isinstance(thing, nn.Module):
        yield from thing.modules()
    held = [*vars(thing).values()] if hasattr(thing, "__dict__") else []
    for part in held:
        for item in part if isinstance(part, list | tuple) else [part]:
            if isinstance(item, nn.Module) and item is not thing:
                yield from item.modules()


def kind_of_weight(tensor: Tensor, thing: Any) -> str:
    """`constant` for a number or a table of positions stored as a parameter; `scale` for that of a norm; `weight`."""
    if (tensor.dim() == 0 and not tensor.requires_grad) or (tensor.dim() >= 2 and _is_table(tensor)):
        return "constant"
    return "scale" if tensor.dim() <= 1 and _is_scale(tensor, thing) else "weight"


def random_weight(shape: Sequence[int], kind: str, generator: torch.Generator) -> Tensor:
    """Random values in float64 for a weight of this shape, near one for the scale of a norm."""
    fan = shape[-1] if len(shape) > 1 else 4
    if len(shape) > 2 and shape[-1] <= 3:  # a convolution
        fan = math.prod(shape[1:])
    noise = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return noise.mul(1.2 / math.sqrt(fan)).add(1.0 if kind == "scale" else 0.0)


def _is_table(tensor: Tensor) -> bool:
    """Whether a parameter holds cosines or sines of positions: its first row is that of no rotation."""
    first, second = tensor.detach().flatten(0, -2)[:2] if tensor[..., 0].numel() > 1 else (tensor, tensor)
    still = bool((first == 1).all()) or bool((first == 0).all())
    return still and float(tensor.detach().abs().max()) <= 1 and len(second.unique()) > 1


def _is_scale(tensor: Tensor, thing: Any) -> bool:
    """Whether it is the weight of a norm, which stays near one."""
    return any(getattr(module, "weight", None) is tensor for module in modules(thing))


COUNTED = ("heads", "kv_heads", "head_width", "value_width")


class FunctionWithWeights(nn.Module):
    """A module that holds the weights which a function takes as arguments."""

    def __init__(self, function: Callable[..., Any], sizes: CallSizes) -> None:
        super().__init__()
        self.function, self.sizes = [function], sizes
        self.held: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.keyed: dict[str, list[str]] = {}  # dictionaries of weights, with the keys that the code reads
        tree = source_tree(function)
        for p in inspect.signature(function).parameters.values():
            word, role = plain(p.name), constructor_role(p.name)
            if word in WEIGHTS_IN:
                width = 3 * sizes.E if word == "wqkv" else sizes.E
                self.held[p.name] = f"weight_{p.name}"
                self.register_parameter(f"weight_{p.name}", nn.Parameter(torch.randn(sizes.E, width)))
            elif keys := _weights_read_from(tree, p.name):
                self.keyed[p.name] = keys
                for key in keys:
                    self.register_parameter(f"weight_{key}", nn.Parameter(torch.randn(sizes.E, sizes.E)))
            elif role in COUNTED or (role in ("width", "out_width", "context") and len(word) > 1):
                self.constants[p.name] = value_for(role, sizes)

    def free(self) -> list[inspect.Parameter]:
        """Parameters that remain for the call."""
        parameters = inspect.signature(self.function[0]).parameters.values()
        return [p for p in parameters if p.name not in {*self.held, *self.constants, *self.keyed}]

    def forward(self, **named: Any) -> Any:
        weights = {name: getattr(self, held) for name, held in self.held.items()}
        keyed = {name: {key: getattr(self, f"weight_{key}") for key in keys} for name, keys in self.keyed.items()}
        return self.function[0](**named, **weights, **keyed, **self.constants)


def _weights_read_from(tree: ast.AST, name: str) -> list[str]:
    """The keys that code reads from a dictionary, `params["wq"]`, if all of them are names of weights."""
    read = (n for n in ast.walk(tree) if isinstance(n, ast.Subscript) and getattr(n.value, "id", "") == name)
    keys = dict.fromkeys(n.slice.value for n in read if isinstance(n.slice, ast.Constant))
    return [str(key) for key in keys] if all(plain(str(key)) in WEIGHTS_IN for key in keys) else []


def described(returned: Any, sizes: CallSizes | None = None) -> str:
    """`a tensor (2 samples, 5 tokens, width 12)`, `a tuple of a tensor (2 samples, 5 tokens, width 12) and None`"""
    if isinstance(returned, Tensor):
        return f"a tensor {tuple(returned.shape) if sizes is None else sizes.named(returned.shape)}"
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return (
            f"a {type(returned).__name__} of {' and '.join(described(part, sizes) for part in returned) or 'nothing'}"
        )
    return "None" if returned is None else f"a {type(returned).__name__}"
