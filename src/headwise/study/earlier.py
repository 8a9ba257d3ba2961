"""What a model computed before each attention layer, so that runs which change one layer alone can start there.

Removing a head of layer 7 changes nothing in layers 0 to 6. `EarlierModules` keeps what the modules before each layer
returned for every sample, and lets them return it again, so only the rest of the pass is computed. Nothing is looked up
by name: a run shows which modules had finished when a layer was called.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_open: ContextVar[frozenset[object]] = ContextVar("headwise_earlier", default=frozenset())


@dataclasses.dataclass
class _Call:
    """One call of a module in a run, and the numbers of its first and last event."""

    module: nn.Module
    parent: "_Call | None"
    start: int
    end: int = -1


class EarlierModules:
    """What the modules before each layer returned, for some samples.

    Args:
        model: the model.
        layers: its attention layers, by name.
        run: runs the model on one sample, given its number.
        samples: how many there are.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[str, nn.Module], run: Callable[[int], Any], samples: int
    ) -> None:
        self.before = _finished_before(model, layers, lambda: run(0))
        self.kept: dict[nn.Module, _Kept] = {}
        modules = list(dict.fromkeys(module for some in self.before.values() for module in some))
        for sample in range(samples):
            with ExitStack() as stack:
                for module in modules:
                    stack.callback(module.register_forward_hook(self._keep).remove)
                run(sample)

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self.kept.setdefault(module, _Kept()).add(output)

    @contextmanager
    def skipped(self, layer: str, samples: Tensor) -> Iterator[None]:
        """A context in which modules before a layer return what they returned for these samples, in this thread alone.

        Args:
            layer: the name of the layer.
            samples: for every row of the batch, its sample.
        """
        context = object()
        token = _open.set(_open.get() | {context})
        changed = [module for module in self.before.get(layer, ()) if self.kept[module].fits]
        had = {module: vars(module).get("forward") for module in changed}
        try:
            for module in changed:
                vars(module)["forward"] = _Given(context, self.kept[module], samples, module.forward)
            yield
        finally:
            for module in changed:
                del vars(module)["forward"]
                if had[module] is not None:
                    vars(module)["forward"] = had[module]
            _open.reset(token)


class _Kept:
    """What a module returned for each sample, as a batch."""

    def __init__(self) -> None:
        self.leaves: list[list[Any]] = []
        self.plan: Any = None
        self.fits = True  # whether every tensor is that of one sample

    def add(self, output: Any) -> None:
        """Keep what the module returned for the next sample."""
        leaves, self.plan = tree_flatten(output)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        self.fits &= bool(tensors) and all(x.dim() > 0 and x.shape[0] == 1 for x in tensors)
        self.fits &= all(x is None or isinstance(x, Tensor | int | float) for x in leaves)
        if self.fits:  # the model may change what the module returned, so it is copied
            self.leaves.append([x.detach().clone() if isinstance(x, Tensor) else x for x in leaves])

    def rows(self, samples: Tensor) -> Any:
        """What the module would return for a batch of these samples."""
        which, found = samples.tolist(), []
        for number, first in enumerate(self.leaves[0]):
            one = len(set(which)) == 1
            if not isinstance(first, Tensor):
                found.append(first)
            elif one:
                found.append(self.leaves[which[0]][number].repeat(len(which), *[1] * (first.dim() - 1)))
            else:
                found.append(torch.cat([self.leaves[sample][number] for sample in which]))
        return tree_unflatten(found, self.plan)


class _Given:
    """The `forward` of a module that returns what was kept, in the thread or task that asked for it."""

    def __init__(self, context: object, kept: _Kept, samples: Tensor, forward: Callable[..., Any]) -> None:
        self.context, self.kept, self.samples, self.forward = context, kept, samples, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.context not in _open.get():
            return self.forward(*args, **kwargs)
        return self.kept.rows(self.samples)


def _finished_before(
    model: nn.Module, layers: Mapping[str, nn.Module], run: Callable[[], Any]
) -> dict[str, list[nn.Module]]:
    """By layer, the largest modules that had finished when it was called; only modules that are called once."""
    calls: list[_Call] = []
    stack: list[_Call] = []
    events = 0

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal events
        events += 1
        stack.append(_Call(module, stack[-1] if stack else None, events))
        calls.append(stack[-1])

    def end(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal events
        events += 1
        stack.pop().end = events

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
            hooks.callback(module.register_forward_hook(end).remove)
        run()
    times: dict[nn.Module, int] = {}
    for call in calls:
        times[call.module] = times.get(call.module, 0) + 1
    single = [call for call in calls if times[call.module] == 1 and call.parent is not None]
    found = {}
    for name, layer in layers.items():
        start = next((call.start for call in single if call.module is layer), 0)
        found[name] = [call.module for call in single if call.end < start < call.parent.end]  # type: ignore[union-attr]
    return found
