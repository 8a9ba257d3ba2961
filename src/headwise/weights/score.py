"""`Score`: a function of the user that changes scores, `score(score, batch, head, query, key) -> score`.

The arguments are those of FlexAttention's `score_mod`. Here they are tensors: a tile of scores, and indices that
broadcast to it, so one call serves many scores. The function may read tensors of its own, from a closure, a module or
anywhere else. They are found by calling it once and noting which tensors enter torch's functions, in order. A later
call can then be given others in their place: copies on another device, or leaves for a gradient.
"""

import inspect
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from headwise.errors import OptionError
from headwise.masks import Composite, Grid
from headwise.masks.composite import Opaque, has_address

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ARGUMENTS = ("score", "batch", "head", "query", "key")
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


class Score(Composite):
    """A user's function, the tensors it reads, and where its heads and keys start.

    Args:
        function: called with scores and the numbers of their samples, heads, query positions and key positions.
        held: the tensors it reads, in the order in which it reads them; None until they are known.
        first_head: the number of the first head, if several ranks share the heads.
        first_key: the position of the first key in the text, if a cache has dropped earlier ones.
    """

    def __init__(
        self, function: ScoreFunction, held: tuple[Tensor, ...] | None = None, first_head: int = 0, first_key: int = 0
    ) -> None:
        if not callable(function):
            raise OptionError(
                f"score={function!r}: expected a function of (score, batch, head, query, key) that returns a score."
            )
        # A composite is taken apart like a mask, a function with a name can be saved; all others stay as they are.
        known = isinstance(function, Composite) or (not torch.compiler.is_compiling() and has_address(function))
        self.function: Any = function if known else Callee(function)
        self.held, self.first_head, self.first_key = held, first_head, first_key

    def __call__(self, scores: Tensor, grid: Grid) -> Tensor:
        """The changed scores, of the same shape and dtype. `grid` broadcasts to `scores`."""
        places = grid.batch, grid.head + self.first_head, grid.position + self.first_key, grid.col + self.first_key
        if torch.compiler.is_compiling() or not self.held:
            found = self.called(scores, *places)
        else:
            with Reads((scores, *places), self.held):
                found = self.called(scores, *places)
        return found.to(scores.dtype).expand(scores.shape)

    @property
    def called(self) -> ScoreFunction:
        """The user's function."""
        found: ScoreFunction = self.function.function if isinstance(self.function, Callee) else self.function
        return found

    @property
    def name(self) -> str:
        """What to call the function in messages."""
        return getattr(self.called, "__qualname__", type(self.called).__name__)

    @property
    def learnable(self) -> tuple[Tensor, ...]:
        """The tensors it reads that can have a gradient."""
        return tuple(x for x in self.tensors() if x.is_floating_point())

    def with_learnable(self, tensors: Iterable[Tensor]) -> Self:
        """The same function reading other tensors in place of `learnable`."""
        given = iter(tensors)
        return self.map_tensors(lambda x: next(given) if x.is_floating_point() else x)

    def of_heads(self, first: int) -> "Score":
        """The same function for heads numbered from `first` on."""
        return Score(self.called, self.held, self.first_head + first, self.first_key)

    def shifted(self, dropped: int) -> "Score":
        """The same function for a text whose first `dropped` keys are gone."""
        return Score(self.called, self.held, self.first_head, self.first_key + dropped)

    def settled(self, sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> "Score":
        """This function after a call on a few scores, which checks it and finds the tensors it reads.

        Args:
            sizes: (B, H, T, S) of the scores.
            device: of the scores.
            dtype: of the scores.
        """
        if self.held is not None or 0 in sizes or torch.compiler.is_compiling():
            return self
        function: Any = self.function
        own = {id(x) for x in function.tensors()} if isinstance(function, Composite) else set[int]()
        found = tuple(x for x in self._tried(sizes, device, dtype) if id(x) not in own)
        return Score(self.called, found, self.first_head, self.first_key)

    def _tried(self, sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """The tensors that the function reads; an error if it cannot be used."""
        self._check_arity()
        # Sizes that no axis has: a function that counts on the whole shape instead of the indices fails here.
        few = [n for n in PRIMES if n not in sizes][:4]
        scores = (torch.arange(math.prod(few), device=device).square() % 101 / 50 - 1).to(dtype).view(few)  # disorder
        places = [torch.arange(n, device=device) % size for n, size in zip(few, sizes, strict=True)]
        shaped = [x.view([-1] + [1] * (3 - axis)) for axis, x in enumerate(places)]
        given = (scores, *shaped)
        before = [_version(x) for x in given]
        with torch.no_grad(), Reads(given) as reads:
            try:
                found = self.called(*given)
            except Exception as error:
                raise OptionError(
                    f"score={self.name}: called with a {dtype} score of shape {tuple(few)}, and batch, head, query and "
                    f"key that broadcast to it, it raised {type(error).__name__}: {error}. It gets tiles of any shape: "
                    f"index tables with the four numbers, as in score + table[head, query - key]."
                ) from error
        self._check_result(found, few)
        written = [name for name, x, n in zip(ARGUMENTS, given, before, strict=True) if _version(x) != n]
        written += ["a tensor of its own"] if reads.changed() else []
        if written:
            raise OptionError(f"score={self.name} writes to {written[0]} in place. Return a new tensor instead.")
        if device.type == "cpu":  # elsewhere it would wait for the device at every call
            self._check_parts(found, scores, shaped)
        outside: list[Tensor] = reads.outside  # torch's modes are not typed
        return outside

    def _check_parts(self, whole: Tensor, scores: Tensor, places: Sequence[Tensor]) -> None:
        """Raise unless a part of a tile gets the scores that it has in the whole tile."""
        batch, head, query, key = places
        with torch.no_grad():
            part = self.called(scores[:, :, 1:-1, 1:-1], batch, head, query[1:-1], key[1:-1])
        inside = whole.expand(scores.shape)[:, :, 1:-1, 1:-1]
        near = 1e-5 if scores.dtype.itemsize >= 4 else 1e-2
        if not torch.allclose(part.to(whole.dtype).expand(inside.shape), inside, near, near, equal_nan=True):
            raise OptionError(
                f"score={self.name} gives other scores for a part of a tile than for the whole. Each score must follow "
                f"from that score and its batch, head, query and key alone: no softmax, sums or random numbers."
            )

    def _check_arity(self) -> None:
        try:
            signature = inspect.signature(self.called)
        except (TypeError, ValueError):  # written in C: the call will tell
            return
        try:
            signature.bind(*ARGUMENTS)
        except TypeError as error:
            raise OptionError(
                f"score={self.name}{signature}: {error}; expected a function of (score, batch, head, query, key) that "
                f"returns the score."
            ) from error

    def _check_result(self, found: object, sizes: Sequence[int]) -> None:
        if not isinstance(found, Tensor):
            raise OptionError(f"score={self.name} returned a {type(found).__name__}; expected a tensor of scores.")
        fits = found.dim() <= 4 and all(
            n in (1, size) for n, size in zip(reversed(found.shape), reversed(sizes), strict=False)
        )
        if not fits or not found.is_floating_point():
            raise OptionError(
                f"score={self.name} was given a score of shape {tuple(sizes)} and returned {tuple(found.shape)} of "
                f"{found.dtype}; expected floats of the same shape. Index with all numbers at once, table[head, query] "
                f"instead of table[head][query]."
            )

    def __repr__(self) -> str:
        return f"Score({self.name})"


class Reads(TorchFunctionMode):
    """Notes which tensors from outside enter torch's functions, in order, and may put others in their place.

    Args:
        given: the arguments of the call, which are not from outside.
        instead: what to use in place of the first tensor from outside, the second, and so on.
    """

    def __init__(self, given: Sequence[Tensor], instead: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.outside: list[Tensor] = []
        self._versions: list[int | None] = []
        self._inside = {id(x): x for x in given}  # kept alive, so that no id is used again
        self._place: dict[int, int] = {}
        self._instead = instead

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, with other tensors if there are any."""
        args, kwargs = _pytree.tree_map_only(Tensor, self._read, (args, kwargs or {}))
        found = function(*args, **kwargs)
        for x in _pytree.tree_leaves(found):
            if isinstance(x, Tensor) and id(x) not in self._place:
                self._inside[id(x)] = x
        return found

    def _read(self, x: Tensor) -> Tensor:
        if id(x) in self._inside:
            return x
        if id(x) not in self._place:
            self._place[id(x)] = len(self.outside)
            self.outside.append(x)
            self._versions.append(_version(x))
        if self._instead is None:
            return x
        place = self._place[id(x)]
        other = self._instead[place] if place < len(self._instead) else None
        if other is None or other.shape != x.shape:
            raise OptionError(
                f"a score function reads other tensors now than when it was checked: number {place + 1} has the shape "
                f"{tuple(x.shape)}, and {None if other is None else tuple(other.shape)} was read then. It must read "
                f"the same ones at every call: do not branch on shapes or values."
            )
        self._inside[id(other)] = other
        return other

    def changed(self) -> bool:
        """Whether a tensor from outside was written to."""
        return [_version(x) for x in self.outside] != self._versions


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


class Callee(Opaque):
    """A callable without a name to find it by: a lambda, a closure, a module, an object with `__call__`."""

    def __init__(self, function: ScoreFunction) -> None:
        self.function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Callee) and other.function is self.function

    def __hash__(self) -> int:
        return id(self.function)

    def __reduce__(self) -> Any:
        """For pickle; raises a clear error if the function cannot be pickled."""
        try:
            pickle.dumps(self.function)
        except Exception as error:
            raise OptionError(
                f"{self!r} cannot be pickled: {error}. Define it at the top of a module, pass an object of a class "
                f"defined there, or pickle weights.kept(), which needs no function."
            ) from error
        return Callee, (self.function,)

    def __repr__(self) -> str:
        return f"the score function {getattr(self.function, '__qualname__', type(self.function).__name__)}"
