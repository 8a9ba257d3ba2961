"""Stand-ins for what a learner's file imports and this machine does not have.

There are small helpers that people keep in a file beside their attention, the part of einops that attention uses, and
`Stub` for anything else, which is enough where only the demo code needs the package.
"""

import copy
import importlib.abc
import importlib.machinery
import math
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """GPT-2's linear layer: (output width, input width), weights stored as (input, output)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.02), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        """(…, nx) to (…, nf)."""
        return x @ self.weight + self.bias


def clones(module: nn.Module, count: int) -> nn.ModuleList:
    """`count` copies of a layer."""
    return nn.ModuleList(copy.deepcopy(module) for _ in range(count))


# The part of einops that attention uses: rearrange, repeat, reduce and einsum.

Axes = list[list[str]]


def _axes(side: str) -> Axes:
    """`b n (h d)` as [[b], [n], [h, d]]."""
    found: Axes = []
    for group, single in re.findall(r"\(([^)]*)\)|(\S+)", side):
        found.append([] if single in ("1", "()") else group.split() if not single else [single])
    return found


def _widened(axes: Axes, dims: int, other: Axes) -> tuple[Axes, Axes]:
    """Both sides with the ellipsis written out as single axes."""
    names = [f"_{i}" for i in range(dims - len(axes) + 1)]

    def spread(groups: Axes) -> Axes:
        return [g for group in groups for g in ([[n] for n in names] if group == ["..."] else [group])]

    return spread(axes), spread(other)


def _split(x: Tensor, axes: Axes, sizes: dict[str, int]) -> Tensor:
    """The tensor with grouped axes split; sizes that follow from the shape are added to `sizes`."""
    shape: list[int] = []
    for group, size in zip(axes, x.shape, strict=True):
        unknown = [name for name in group if name not in sizes]
        known = math.prod(sizes.get(name, 1) for name in group)
        if len(unknown) == 1:
            sizes[unknown[0]] = size // known
        if group and known * (sizes[unknown[0]] if unknown else 1) != size:
            raise ValueError(f"cannot split an axis of {size} into {group} with {sizes}")
        shape += [sizes[name] for name in group]
    return x.reshape(shape)


def repeat(x: Any, pattern: str, /, **sizes: int) -> Tensor:
    """Like `einops.repeat`, and like `rearrange` where no axis is new."""
    x = torch.stack(list(x)) if isinstance(x, list | tuple) else x
    x, names, right = _taken_apart(x, pattern, sizes)
    for name in [name for group in right for name in group if name not in names]:
        x = x.unsqueeze(-1).expand(*x.shape, sizes[name])
        names.append(name)
    return _put_together(x, names, right, sizes)


rearrange = repeat


def reduce(x: Tensor, pattern: str, how: str, /, **sizes: int) -> Tensor:
    """Like `einops.reduce` for mean, sum and max."""
    x, names, right = _taken_apart(x, pattern, sizes)
    kept = [name for name in names if any(name in group for group in right)]
    gone = [i for i, name in enumerate(names) if name not in kept]
    return _put_together(x.amax(gone) if how == "max" else getattr(x, how)(gone), kept, right, sizes)


def _taken_apart(x: Tensor, pattern: str, sizes: dict[str, int]) -> tuple[Tensor, list[str], Axes]:
    """The tensor with one axis per name, these names, and the axes of the result."""
    left, right = (_axes(side) for side in pattern.split("->"))
    left, right = _widened(left, x.dim(), right)
    return _split(x, left, sizes), [name for group in left for name in group], right


def _put_together(x: Tensor, names: list[str], axes: Axes, sizes: dict[str, int]) -> Tensor:
    """Axes with these names, ordered and grouped as in `axes`."""
    x = x.permute([names.index(name) for group in axes for name in group])
    return x.reshape([math.prod(sizes[name] for name in group) for group in axes])


def einsum(*operands: Any) -> Tensor:
    """Like `einops.einsum`: tensors first, axis names of several letters."""
    *tensors, pattern = operands
    names = sorted(set(re.findall(r"[A-Za-z_]\w*", pattern)))
    letters = {name: chr(ord("a") + i) for i, name in enumerate(names)}
    short = re.sub(r"[A-Za-z_]\w*", lambda m: letters[m[0]], pattern)
    return torch.einsum(short.replace(" ", ""), *tensors)


class Rearrange(nn.Module):
    """Like `einops.layers.torch.Rearrange`."""

    def __init__(self, pattern: str, **sizes: int) -> None:
        super().__init__()
        self.pattern, self.sizes = pattern, sizes

    def forward(self, x: Tensor) -> Tensor:
        return rearrange(x, self.pattern, **self.sizes)


# Everything else.


def add_to_class(cls: type) -> Callable[[Any], Any]:
    """A decorator that makes a function a method of `cls`, as textbooks do to define a class in several cells."""
    return lambda thing: setattr(cls, thing.__name__, thing)


HELPERS: dict[str, Callable[..., Any]] = {
    "clones": clones, "clone_layers": clones, "get_clones": clones, "_get_clones": clones, "clone_modules": clones,
    "clone": clones, "make_clones": clones, "Conv1D": Conv1D, "LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm,
    "Rearrange": Rearrange, "add_to_class": add_to_class,
}  # fmt: skip


class StubBase:
    """The base of a class that inherits from a stand-in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


class StubLayer(nn.Module):
    """The same for a stand-in that is called a module: whatever it is given, it is a plain layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class Stub:
    """Answers every attribute and call with another stand-in; as a decorator it returns what it decorates."""

    def __init__(self, name: str) -> None:
        self._stub_name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return HELPERS.get(name) or Stub(f"{self._stub_name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], Stub):
            return args[0]
        return Stub(f"{self._stub_name}()")

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (StubLayer,) if "Module" in self._stub_name or "Model" in self._stub_name else (StubBase,)

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False  # `if is_flash_attn_available():` must see that it is not

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __enter__(self) -> "Stub":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __getitem__(self, item: Any) -> "Stub":
        return Stub(f"{self._stub_name}[...]")

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last import finder: what no other finder finds becomes a stand-in and is noted in `missing`.

    Only for packages that a file of the learner's project names: libraries test for optional packages by importing.
    """

    def __init__(self, allowed: set[str]) -> None:
        self.allowed = allowed
        self.missing: list[str] = []
        self.active = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for every package that the file names and that is not installed."""
        top = fullname.partition(".")[0]
        installed = top in sys.modules and not isinstance(sys.modules[top], StubModule)
        if not self.active or top not in self.allowed or installed:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A module of stand-ins; for einops, the functions above."""
        top = spec.name.partition(".")[0]
        if top not in self.missing:
            self.missing.append(top)
        made = StubModule(spec.name)
        if top == "einops":
            vars(made).update(rearrange=rearrange, repeat=repeat, reduce=reduce, einsum=einsum)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class StubModule(ModuleType):
    """A module in which every attribute is a stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "0"
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return HELPERS.get(name) or Stub(f"{self.__name__}.{name}")
