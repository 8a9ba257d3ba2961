"""Lets a lazy map be used as a tensor: in torch functions, numpy and arithmetic.

Operations without a cheaper method compute the dense tensor first, which has a byte limit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import OptionError


class TensorLike:
    """An object that `to_tensor()` turns into a tensor."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        raise NotImplementedError

    def to_tensor(self) -> Tensor:
        """The dense tensor."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return len(self.shape)

    def dim(self) -> int:
        """How many axes there are."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or the size along `dim`."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """How many numbers there are."""
        return self.shape.numel()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """torch.anything(weights, ...): our own method of that name, or the function of the dense tensor."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        others = [*args[1:], *kwargs.values()]
        if args and isinstance(args[0], cls) and name in OWN and not any(isinstance(x, Tensor | cls) for x in others):
            return getattr(args[0], name)(*args[1:], **kwargs)
        if name == "matmul" and not isinstance(args[0], cls) and torch.compiler.is_compiling():
            raise OptionError(  # torch 2.13 traces `weights @ x` as `x @ weights`
                "a matrix product of an attention map inside a compiled function: torch.compile would swap its "
                "factors. Write weights.to_tensor() @ x, or x @ weights.to_tensor()."
            )
        return func(*(_dense(x) for x in args), **{key: _dense(x) for key, x in kwargs.items()})

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The dense weights as a numpy array; bfloat16, which numpy lacks, becomes float32."""
        if copy is False:
            raise ValueError("a numpy array of an attention map is always a copy: its numbers are computed now.")
        tensor = self.to_tensor().detach().cpu()
        array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array if dtype is None else array.astype(dtype)

    def __getattr__(self, name: str) -> Any:
        """Any method of a tensor, called on the dense tensor."""
        method = None if name.startswith("_") else getattr(Tensor, name, None)
        if not callable(method):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")  # noqa: TRY004
        if name.endswith("_") or "hook" in name:
            raise TypeError(
                f"{name} would change an attention map, which is read only; use weights.to_tensor().{name}."
            )

        def dense_method(*args: Any, **kwargs: Any) -> Any:
            given = {key: _dense(x) for key, x in kwargs.items()}
            return getattr(self.to_tensor(), name)(*(_dense(x) for x in args), **given)

        return dense_method

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("an attention map is read only; weights.to_tensor() gives a tensor that you can change.")

    def __bool__(self) -> bool:
        raise TypeError("the truth of a whole attention map is ambiguous; ask for one weight, or use .any() or .all().")


OWN = {"sum", "mean", "amax", "max", "detach"}  # torch functions for which there is a method here


def _dense(x: Any) -> Any:
    """`x` with every map in it made dense."""
    if isinstance(x, TensorLike):
        return x.to_tensor()
    if type(x) in (list, tuple):
        return type(x)(_dense(item) for item in x)
    return x


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: TensorLike, *others: Any) -> Any:
        return getattr(self.to_tensor(), name)(*(_dense(other) for other in others))

    operator.__name__ = name
    return operator


BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
for _name in (*BINARY, *(f"r{name}" for name in BINARY), "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TensorLike, f"__{_name}__", _operator(f"__{_name}__"))
TensorLike.__hash__ = object.__hash__  # type: ignore[method-assign]  # defining __eq__ removed it
