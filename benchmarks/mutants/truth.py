"""What a mutant really changes, found by running it beside its original with the same parameters.

equivalent     nothing changes anywhere
fragile        only robustness, initial values or the statistics of dropout change
convention     right attention under another convention: mask argument inverted, weights stored in another order, biases
wrong          outputs, gradients, returned weights, expectation in training, or the inputs that it accepts change
not runnable   every call raises an error
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from mutants import compare, conventions, drivers, observe
from mutants.compare import Original, first_difference, original, results, share
from mutants.drivers import SIZES, Driver, Inputs, Size
from mutants.mutate import Mutant
from mutants.observe import built, initial, module_names
from mutants.pool import FAILED, forked

LABELS = ("equivalent", "fragile", "convention", "wrong", "not runnable")
SECONDS = 60.0
CACHE = Path(__file__).parents[2] / "scratch" / "mutants" / "truth.json"


class Truth(NamedTuple):
    """A label and why."""

    label: str
    reason: str = ""


def truth(style: str, source: str) -> Truth:
    """The label of a text that was made from a style."""
    return truth_beside(original(style), source)


def truth_beside(right: Original, source: str) -> Truth:
    """The label of a text that was made from a right one."""
    try:
        names = module_names(source)
        modules = [_build(names, right.driver, size) for size in SIZES]
    except Exception as error:
        return Truth("not runnable", observe.told(error))
    broken = [m for m in modules if not isinstance(m, nn.Module)]
    if len(broken) == len(modules):
        return Truth("not runnable", f"building raises {broken[0]}")
    if broken:
        return Truth("wrong", f"building raises {broken[0]}")
    found = _compared(right, modules)
    if found.label in ("equivalent", "fragile") and "Error" in observe.built_by_default(names, right.driver):
        return Truth("wrong", "its own defaults raise an error")
    if found.label == "equivalent" and source.count("device") < right.source.count("device"):
        return Truth("fragile", "a tensor without the device of the input")
    return found


def _build(names: dict[str, Any], driver: Driver, size: Size) -> nn.Module | str:
    try:
        return built(names, driver, size)
    except Exception as error:
        return observe.told(error)


def _compared(right: Original, modules: list[nn.Module]) -> Truth:
    doubts = list(_state_differences(right, modules))
    hard = next((truth for truth in doubts if truth.label == "wrong"), None)
    if hard is not None:
        return _unrunnable(right, modules) or hard
    if any(truth.label == "convention" for truth in doubts):
        right = compare.without_biases(right)
    share(right, modules)
    seen = [results(m, right.driver, s) for m, s in zip(modules, SIZES, strict=True)]
    errors = [one.error for sized in seen for one in sized.values()]
    if all(errors) and (dead := _unrunnable(right, modules)):
        return dead
    reason = first_difference(right.seen, seen)
    if reason and any(errors) and conventions.is_right_in_float32(right, modules):
        return Truth("fragile", "only in float32")
    if reason:
        excuse = conventions.convention(right, modules, seen)
        return Truth("convention", excuse) if excuse else Truth("wrong", reason)
    if compare.is_shortened(right.seen, seen):
        if len({one.shape for sized in right.seen for one in sized.values()}) > 1:
            return Truth("wrong", "what an option asks for is not returned")
        doubts.append(Truth("convention", "returns less"))
    return _quiet_differences(right, modules, doubts)


def _quiet_differences(right: Original, modules: list[nn.Module], doubts: list[Truth]) -> Truth:
    """The label of a mutant that gives the same results in evaluation mode."""
    wrong, reason = compare.training_difference(right, modules)
    if wrong:
        return Truth("wrong", reason)
    doubts += [Truth("fragile", reason)] if reason else []
    doubts += [Truth("fragile", reason) for reason in compare.edge_differences(right, modules)]
    order = ("convention", "fragile")
    return next((truth for label in order for truth in doubts if truth.label == label), Truth("equivalent"))


def _unrunnable(right: Original, modules: list[nn.Module]) -> Truth | None:
    """Whether every call raises, with the mutant's own parameters, in float32 as layers are made."""
    errors = []
    for module, size in zip(modules, SIZES, strict=True):
        module.float()
        for call in right.driver.calls(Inputs(size, torch.float32)):
            error = observe.observe(module, call, backward=False).error
            if not error:
                return None
            errors.append(error)
    return Truth("not runnable", errors[0])


# Parameters and buffers.


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in module.named_parameters()}


def _state_differences(right: Original, modules: list[nn.Module]) -> Iterator[Truth]:
    for module, mine, fresh in zip(right.modules, modules, right.fresh, strict=True):
        wanted, found = _shapes(module), _shapes(mine)
        if changed := [name for name in wanted if name in found and found[name] != wanted[name]]:
            yield Truth("wrong", f"{changed[0]} has shape {tuple(found[changed[0]])}")
        odd = set(wanted) ^ set(found)
        if odd and compare.renamed(module, mine):
            yield Truth("fragile", f"another name than {min(set(wanted) - set(found))}")
        elif odd and all(name.split(".")[-1] == "bias" for name in odd):
            yield Truth("convention", f"biases: {', '.join(sorted(odd))}")
        elif missing := set(wanted) - set(found):
            yield Truth("wrong", f"no parameter {min(missing)}")
        elif odd:
            yield Truth("fragile", f"one more parameter {min(odd)}")
        if set(module.state_dict()) ^ set(mine.state_dict()):
            yield Truth("fragile", "another state_dict")
        spread = initial(mine)
        if any(not 0.5 < spread[name] / fresh[name] < 2 for name in fresh if name in spread and fresh[name]):
            yield Truth("fragile", "other initial values")


# Many at once.


def _version() -> str:
    """Changes when what decides the truth changes."""
    texts = [Path(module.__file__).read_bytes() for module in (compare, conventions, drivers, observe)]
    return hashlib.sha256(b"".join([*texts, Path(__file__).read_bytes()])).hexdigest()[:12]


def _key(mutant: Mutant) -> str:
    return hashlib.sha256(f"{mutant.style}\n{mutant.source}".encode()).hexdigest()[:24]


def truths(mutants: Sequence[Mutant], workers: int = 2, cache: Path = CACHE) -> list[Truth]:
    """The labels of many mutants, in their order; each text is run once and remembered."""
    stored = json.loads(cache.read_text()) if cache.exists() else {}
    known = stored["truths"] if stored.get("version") == _version() else {}
    for style in dict.fromkeys(mutant.style for mutant in mutants):
        new = {_key(m): m for m in mutants if m.style == style and _key(m) not in known}
        if new:
            original(style)  # before the fork, once for all
            keys = list(new)
            for number, label in forked(_work, list(new.values()), workers, SECONDS):
                if label and FAILED in label:
                    raise RuntimeError(f"{new[keys[number]].describe()}: {label}")
                known[keys[number]] = label or ["not runnable", "no answer in time"]
                if len(known) % 500 == 0:
                    _save(cache, known)
            _save(cache, known)
    return [Truth(*known[_key(mutant)]) for mutant in mutants]


def _work(mutant: Mutant) -> list[str]:
    return list(truth(mutant.style, mutant.source))


def _save(cache: Path, known: dict[str, Any]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps({"version": _version(), "truths": known}))
