"""What a module does, written down: outputs, gradients, training draws, robustness. Nothing here knows the checker."""

import copy
import inspect
import sys
import traceback
import types
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mutants.drivers import SIZES, Call, Driver, Inputs, Size

DRAWS = 3001  # equal samples in one training batch; prime, so that its axis is found by its size
RNG = 11


def module_names(source: str, name: str = "mutant") -> dict[str, Any]:
    """What a text defines; raises what it raises."""
    names: dict[str, Any] = {"__name__": name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.modules[name] = types.ModuleType(name)  # dataclasses look up the module they are defined in
        exec(compile(source, f"{name}.py", "exec", dont_inherit=True), names)  # noqa: S102 - our own text
    return names


def told(error: Exception) -> str:
    """An error in one line, with the mutant's line that raised it."""
    lines = [step.lineno for step in traceback.extract_tb(error.__traceback__) if step.filename == "mutant.py"]
    words = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return f"{words} (line {lines[-1]})" if lines else words


def built(names: dict[str, Any], driver: Driver, size: Size) -> nn.Module:
    """A module as the driver builds it, in evaluation mode, from fixed random numbers."""
    torch.manual_seed(RNG)
    return driver.build(names, size).eval()


def built_by_default(names: dict[str, Any], driver: Driver) -> str:
    """What becomes of the class when it is built from the required arguments alone: nothing, or an error."""

    def bare(*args: Any, **kwargs: Any) -> nn.Module:
        signature = inspect.signature(names[driver.target])
        given = signature.bind(*args, **kwargs).arguments
        needed = {n: v for n, v in given.items() if signature.parameters[n].default is inspect.Parameter.empty}
        return names[driver.target](**needed)

    try:
        built({**names, driver.target: bare}, driver, SIZES[0])
    except Exception as error:
        return told(error)
    return ""


def randomize(module: nn.Module) -> None:
    """Set every parameter, biases included, so that nothing hides behind a small or a zero one."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            fan = parameter.shape[-1] if parameter.ndim > 1 else 4
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.2 / fan**0.5)


@dataclass
class Seen:
    """The result of one call."""

    error: str = ""
    shape: str = ""  # of what was returned: a tensor, a tuple of two, ...
    outputs: list[Tensor] = field(default_factory=list)
    attached: list[bool] = field(default_factory=list)
    input_grads: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    steady: bool = True  # a second call gives the same
    untouched: bool = True  # the inputs are as they were


def flat(value: Any) -> tuple[list[Tensor], str]:
    """The tensors in a returned value, and its form."""
    if isinstance(value, Tensor):
        return [value], "t"
    if isinstance(value, tuple | list):
        parts = [flat(part) for part in value]
        return [t for tensors, _ in parts for t in tensors], f"({','.join(form for _, form in parts)})"
    return [], type(value).__name__


def observe(module: nn.Module, call: Call, backward: bool = True) -> Seen:
    """Everything about one call."""
    before = [t.detach().clone() for t in call.inputs]
    torch.manual_seed(RNG)
    seen = Seen()
    try:
        outputs, seen.shape = flat(call.run(module))
        seen.outputs = [t.detach().clone() for t in outputs]
        seen.attached = [t.requires_grad for t in outputs]
        if backward:
            _gradients(module, call, outputs, seen)
            again, _ = flat(call.run(module))
            seen.steady = all(map(same, seen.outputs, again))
    except Exception as error:
        seen.error = told(error)
    seen.untouched = all(map(same, before, call.inputs))
    return seen


def _gradients(module: nn.Module, call: Call, outputs: list[Tensor], seen: Seen) -> None:
    generator = torch.Generator().manual_seed(3)
    total = sum((t * torch.randn(t.shape, generator=generator).to(t.dtype)).sum() for t in outputs if t.requires_grad)
    names = dict(module.named_parameters())
    inputs = [t for t in call.inputs if t.requires_grad]
    if isinstance(total, Tensor):
        found = torch.autograd.grad(total, [*names.values(), *inputs], allow_unused=True)
    else:
        found = (None,) * (len(names) + len(inputs))
    full = [torch.zeros_like(t) if g is None else g for g, t in zip(found, [*names.values(), *inputs], strict=True)]
    seen.grads, seen.input_grads = dict(zip(names, full, strict=False)), full[len(names) :]


def same(a: Tensor, b: Tensor, tolerance: float = 1e-7) -> bool:
    """Whether two tensors are equal up to rounding, NaN and infinities included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def training_draws(module: nn.Module, driver: Driver, size: Size) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Mean and variance of the outputs over many draws of dropout, for one plain and one masked call."""
    module.train()
    found = {}
    for call in training_calls(driver, Inputs(size, copies=DRAWS)):
        outputs = observe(module, call, backward=False).outputs
        drawn = [t.movedim(t.shape.index(DRAWS), 0) for t in outputs if DRAWS in t.shape]
        found[call.name] = [(t.mean(0), t.var(0)) for t in drawn]
    module.eval()
    return found


def training_calls(driver: Driver, inputs: Inputs) -> list[Call]:
    """The first call, and the first with a mask."""
    calls = list(driver.calls(inputs))
    return [calls[0], *[call for call in calls if call.masked][:1]]


def edges(module: nn.Module, driver: Driver, size: Size) -> dict[str, str | list[Tensor]]:
    """What happens where only a sturdy class survives: half precision, too long inputs, blind queries, a copy."""
    found: dict[str, str | list[Tensor]] = {}
    for call in driver.edges(Inputs(size)):
        seen = observe(module, call, backward=False)
        found[call.name] = "error" if seen.error else seen.outputs
    for dtype in (torch.float16, torch.bfloat16):
        try:
            half = copy.deepcopy(module).to(dtype)
        except Exception:
            found[str(dtype)] = "no copy"
            continue
        for call in training_calls(driver, Inputs(size, dtype)):
            seen = observe(half, call, backward=False)
            finite = all(bool(t.isfinite().all()) for t in seen.outputs if t.is_floating_point())
            kinds = [str(t.dtype) for t in seen.outputs]
            found[f"{call.name} in {dtype}"] = "error" if seen.error else f"finite {finite} {kinds}"
    return found


def initial(module: nn.Module) -> dict[str, float]:
    """The spread of each parameter as it was made."""
    return {name: float(p.detach().double().std()) for name, p in module.named_parameters() if p.numel() > 20}
