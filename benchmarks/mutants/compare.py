"""A mutant beside its original: parameters shared, every call compared, training drawn, edges tried."""

import copy
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn

from mutants import observe
from mutants.drivers import DRIVERS, SIZES, Driver, Inputs, Size, source_of
from mutants.observe import Seen, built, edges, initial, module_names, randomize, same, training_calls, training_draws

SIGMAS = 6.0
TRAINED = 2  # sizes at which training is drawn


class Original:
    """A right style with everything it does, computed once."""

    def __init__(self, driver: Driver, source: str) -> None:
        self.driver, self.source = driver, source
        self.names = module_names(source, "original")
        self.fresh = [initial(built(self.names, self.driver, size)) for size in SIZES]
        self.modules = [built(self.names, self.driver, size).double() for size in SIZES]
        for module in self.modules:
            randomize(module)
        self.seen = [results(m, self.driver, s) for m, s in self._sized()]
        self.draws = [training_draws(m, self.driver, s) for m, s in self._sized()[:TRAINED]]
        self.trained = [trained_results(m, self.driver, s) for m, s in self._sized()]
        self.edges = [edges(m, self.driver, s) for m, s in self._sized()[:TRAINED]]

    def _sized(self) -> list[tuple[nn.Module, Size]]:
        return list(zip(self.modules, SIZES, strict=True))


@cache
def original(style: str) -> Original:
    """The right class of a style."""
    return Original(DRIVERS[style], source_of(style))


def results(
    module: nn.Module,
    driver: Driver,
    size: Size,
    dtype: torch.dtype = torch.float64,
    flip: frozenset[str] = frozenset(),
) -> dict[str, Seen]:
    """Everything about every call at one size."""
    return {call.name: observe.observe(module, call) for call in driver.calls(Inputs(size, dtype, flip))}


def trained_results(module: nn.Module, driver: Driver, size: Size) -> dict[str, Seen]:
    """The first calls in training mode, at fixed draws of dropout."""
    module.train()
    found = {call.name: observe.observe(module, call) for call in training_calls(driver, Inputs(size))}
    module.eval()
    return found


def renamed(module: nn.Module, mine: nn.Module) -> bool:
    """Whether a mutant has the parameters of its original in the same order, some of them under other names."""
    wanted, found = ([(n, p.shape) for n, p in m.named_parameters()] for m in (module, mine))
    return dict(wanted).keys() != dict(found).keys() and [shape for _, shape in wanted] == [shape for _, shape in found]


def share(right: Original, modules: list[nn.Module]) -> None:
    """Give the mutants the parameters of the original; their buffers stay their own."""
    for module, mine in zip(right.modules, modules, strict=True):
        values = dict(module.named_parameters())
        if renamed(module, mine):
            values = dict(zip((name for name, _ in mine.named_parameters()), values.values(), strict=True))
        mine.double()
        with torch.no_grad():
            for name, parameter in mine.named_parameters():
                if name in values:
                    parameter.copy_(values[name])
                elif name.split(".")[-1] == "bias":
                    parameter.zero_()


def without_biases(right: Original) -> Original:
    """The original with every bias zero."""
    bare = copy.copy(right)
    bare.modules = copy.deepcopy(right.modules)
    for module in bare.modules:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name.split(".")[-1] == "bias":
                    parameter.zero_()
    sized = list(zip(bare.modules, SIZES, strict=True))
    bare.seen = [results(m, bare.driver, s) for m, s in sized]
    bare.draws = [training_draws(m, bare.driver, s) for m, s in sized[:TRAINED]]
    bare.trained = [trained_results(m, bare.driver, s) for m, s in sized]
    return bare


# Results.


def first_difference(
    right: list[dict[str, Seen]], mine: list[dict[str, Seen]], weights: bool = True, tolerance: float = 1e-7
) -> str:
    """The first call whose result differs, and how; empty if none does."""
    for size, one, two in zip(SIZES, right, mine, strict=False):
        for name, wanted in one.items():
            reason = _difference(wanted, two[name], weights, tolerance)
            if reason:
                return f"{name} at {tuple(size)}: {reason}"
    return ""


def _difference(wanted: Seen, seen: Seen, weights: bool, tolerance: float) -> str:
    if wanted.error or seen.error:
        return "" if wanted.error and seen.error else f"raises {seen.error}" if seen.error else "raises no error"
    if not seen.untouched:
        return "changes its inputs"
    if wanted.steady and not seen.steady:
        return "a second call differs"
    if not _paired(wanted, seen, tolerance):
        return "another result"
    if seen.shape != wanted.shape:
        return "" if seen.outputs and same(seen.outputs[0], wanted.outputs[0], tolerance) else "another order"
    if seen.attached != wanted.attached:
        return "detached"
    if not all(same(a, b, 10 * tolerance) for a, b in zip(wanted.input_grads, seen.input_grads, strict=True)):
        return "another gradient of an input"
    if weights and not all(same(g, seen.grads[n], 10 * tolerance) for n, g in wanted.grads.items() if n in seen.grads):
        return "another gradient of a parameter"
    return ""


def _paired(wanted: Seen, seen: Seen, tolerance: float) -> bool:
    """Whether everything returned is what the original returns there, or a part of it with the output."""
    if len(seen.outputs) == len(wanted.outputs):
        return all(same(a, b, tolerance) for a, b in zip(wanted.outputs, seen.outputs, strict=True))
    return len(seen.outputs) == 1 and same(wanted.outputs[0], seen.outputs[0], tolerance)


def is_shortened(right: list[dict[str, Seen]], mine: list[dict[str, Seen]]) -> bool:
    """Whether a call returns less than the original does."""
    return any(one[name].shape != two[name].shape for one, two in zip(right, mine, strict=True) for name in one)


def training_difference(right: Original, modules: list[nn.Module], weights: bool = True) -> tuple[bool, str]:
    """Whether training is wrong, and what it changes. The same draws give the same results; else many are compared."""
    mine = [trained_results(m, right.driver, s) for m, s in zip(modules, SIZES, strict=True)]
    if not first_difference(right.trained, mine, weights):
        return False, ""
    reason = _failure(right.trained, mine) or _expectation(right, modules)
    return (True, f"training: {reason}") if reason else (False, "training: other draws of dropout")


def _failure(right: list[dict[str, Seen]], mine: list[dict[str, Seen]]) -> str:
    for one, two in zip(right, mine, strict=True):
        for name, wanted in one.items():
            seen = two[name]
            if seen.error and not wanted.error:
                return f"{name} raises {seen.error}"
            if not all(bool(t.isfinite().all()) for t in [*seen.outputs, *seen.grads.values()]):
                return f"{name} is not finite"
            if seen.attached != wanted.attached and seen.shape == wanted.shape:
                return f"{name} is detached"
    return ""


def _expectation(right: Original, modules: list[nn.Module]) -> str:
    for module, size, draws in zip(modules, SIZES, right.draws, strict=False):
        for name, mine in training_draws(module, right.driver, size).items():
            if not _has_same_mean(draws[name], mine):
                return f"another expectation ({name})"
    return ""


def _has_same_mean(one: list[tuple[Tensor, Tensor]], two: list[tuple[Tensor, Tensor]]) -> bool:
    for (mean, var), (other, spread) in zip(one, two, strict=False):
        error = ((var + spread) / observe.DRAWS).sqrt() + 1e-7
        if mean.shape != other.shape or not bool(((mean - other).abs() < SIGMAS * error).all()):
            return False
    return True


def edge_differences(right: Original, modules: list[nn.Module]) -> Iterator[str]:
    """The edges at which a mutant behaves in another way."""
    for module, size, wanted in zip(modules, SIZES, right.edges, strict=False):
        for name, result in edges(module, right.driver, size).items():
            if not _is_same_edge(wanted[name], result):
                yield name


def _is_same_edge(one: str | list[Tensor], two: str | list[Tensor]) -> bool:
    if isinstance(one, str) or isinstance(two, str):
        return one == two if isinstance(one, str) and isinstance(two, str) else False
    return len(one) == len(two) and all(map(same, one, two))
