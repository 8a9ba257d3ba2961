"""Copies the parameters of one attention into another, however each of them stores its weights.

Where the names agree, by name. Otherwise by role: the solved rows of a projection are looked up among the parameters.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.check.binding import Bound
from headwise.check.fits import ALIKE, Fit
from headwise.check.objects import tensors
from headwise.check.reading import AttentionReading, read

NONE = 1e-9  # of a bias, relative to the weights: there is none
Write = tuple[Tensor, Tensor, Tensor]  # parameter, places in it, values
AGREE = 1e-6  # of solved maps after the copy


@dataclass
class Transfer:
    """The result of a copy: `problem` says why there was none."""

    problem: str = ""
    different: str = ""  # why no parameters could make the two equal
    unequal: dict[str, bool] = field(default_factory=dict)  # projection → whether the target is the one with a bias

    def words(self) -> str:
        """Which of the two has a bias where the other has none."""
        parts = {
            True: [n for n, has in self.unequal.items() if has],
            False: [n for n, has in self.unequal.items() if not has],
        }
        said = {True: "with a bias, in the reference without", False: "without a bias, in the reference with one"}
        return "; ".join(f"{', '.join(names)} {said[has]}" for has, names in parts.items() if names)


def copy_parameters(source: Bound, target: Bound) -> Transfer:
    """Give `target` the parameters of `source`. What only the source has is set to zero there, so both can agree."""
    theirs, ours = tensors(source.thing), tensors(target.thing)
    if {name: p.shape for name, p in theirs.items()} == {name: p.shape for name, p in ours.items()}:
        with torch.no_grad():
            for name, parameter in ours.items():
                parameter.copy_(theirs[name])
        return Transfer()
    return _copy_by_role(source, target)


def _copy_by_role(source: Bound, target: Bound) -> Transfer:
    readings = read(source), read(target)
    theirs, ours = (_maps(reading) for reading in readings)
    if (plain := _only_copied(*readings)) is not None:
        return Transfer(different=plain)
    missing = [name for name in ("query", "key", "value") if name not in theirs or name not in ours]
    if missing or set(theirs) != set(ours):
        part = missing[0] if missing else next(iter(set(theirs) ^ set(ours)))
        return Transfer(f"the {part} projection could not be read in both")
    transfer, writes = Transfer(), list[Write]()
    for name, (wanted, factor) in theirs.items():
        own = ours[name][0]
        if wanted.weight.shape != own.weight.shape:
            shapes = tuple(own.weight.shape), tuple(wanted.weight.shape)
            return Transfer(f"the {name} projection is {shapes[0]} here and {shapes[1]} in the reference")
        rows = _weight_writes(target, own.weight, wanted.weight / factor)
        if rows is None:
            return Transfer(f"the rows of the {name} projection were not found among the parameters")
        writes += [*rows, *_bias_writes(source, target, wanted, own, factor)]
        if has_bias(wanted) != has_bias(own):
            transfer.unequal[name] = has_bias(own)
    with torch.no_grad():
        for parameter, where, value in writes:
            parameter.view(-1)[where] = value
    return transfer if _agree(source, target) else Transfer("after copying them by role, the projections still differ")


def _only_copied(theirs: AttentionReading | None, ours: AttentionReading | None) -> str | None:
    """A stage that is a projection in one of the two and none in the other."""
    stages = [
        {} if r is None else r.projections | ({} if r.output is None else {"output": r.output}) for r in (theirs, ours)
    ]
    for name in stages[0].keys() & stages[1].keys():
        plain = [stage[name].role.plain for stage in stages]
        if plain[0] != plain[1]:
            return f"the {name} projection is only {'here' if plain[0] else 'in the reference'}"
    return None


def _maps(reading: AttentionReading | None) -> dict[str, tuple[Fit, float]]:
    """The solved map of every stage, and its factor relative to the parameters."""
    if reading is None:
        return {}
    found = {
        name: (part.fit, part.role.factor or 1.0)
        for name, part in reading.projections.items()
        if not part.role.plain and part.by_position is None
    }
    if reading.output is not None and not reading.output.role.plain:
        found["output"] = reading.output.fit, reading.output.role.factor or 1.0
    return found


def _weight_writes(target: Bound, own: Tensor, wanted: Tensor) -> list[Write] | None:
    """What to write where, row by row or else column by column; None where they are not found."""
    for rows, values in ((own, wanted), (own.T, wanted.T)):
        places = _places(rows, tensors(target.thing))
        if places is not None:
            return [(parameter, where, value) for (parameter, where), value in zip(places, values, strict=True)]
    return None


def _places(rows: Tensor, parameters: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]] | None:
    """For every row, the parameter that holds it or a multiple of it, and the places of its numbers there."""
    found: list[tuple[Tensor, Tensor] | None] = [None] * len(rows)
    for parameter in parameters.values():
        for axis, size in enumerate(parameter.shape if parameter.dim() > 1 and parameter.is_contiguous() else ()):
            if size != rows.shape[1]:
                continue
            where = torch.arange(parameter.numel()).view(parameter.shape).movedim(axis, -1).reshape(-1, size)
            held = parameter.detach().view(-1)[where].double()
            cosine = (rows @ held.T) / (rows.norm(dim=1)[:, None] * held.norm(dim=1) + 1e-300)
            best, which = cosine.abs().max(1)
            for row in (best > ALIKE).nonzero()[:, 0].tolist():
                found[row] = found[row] or (parameter, where[which[row]])
    complete = [place for place in found if place is not None]
    return complete if len(complete) == len(rows) else None


def _bias_writes(source: Bound, target: Bound, wanted: Fit, own: Fit, factor: float) -> list[Write]:
    """A bias to copy, or zeros where only one of the two has one."""
    theirs, ours = has_bias(wanted), has_bias(own)
    if not ours:
        return _found_numbers(source, wanted.bias, torch.zeros_like(wanted.bias)) if theirs else []
    return _found_numbers(target, own.bias, wanted.bias / factor if theirs else torch.zeros_like(own.bias))


def has_bias(fit: Fit) -> bool:
    """Whether a solved map has a bias at all."""
    return float(fit.bias.norm()) > NONE * float(fit.weight.norm())


def _found_numbers(bound: Bound, own: Tensor, wanted: Tensor) -> list[Write]:
    """Where numbers are among the parameters; they are random, so that a value says where it belongs."""
    found: list[Write] = []
    for parameter in tensors(bound.thing).values():
        flat = parameter.detach().double().view(-1)
        near = (flat[:, None] - own).abs() < 1e-9 * (1 + own.abs())
        places = near.nonzero()
        if len(places):
            found.append((parameter, places[:, 0], wanted[places[:, 1]]))
    return found


def _agree(source: Bound, target: Bound) -> bool:
    """Whether the copy worked: both now have the same solved maps."""
    theirs, ours = (_maps(read(bound.called())) for bound in (source, target))
    return set(theirs) == set(ours) and all(
        _close(theirs[name][0].weight / theirs[name][1], ours[name][0].weight / ours[name][1])
        and _close(theirs[name][0].bias / theirs[name][1], ours[name][0].bias / ours[name][1])
        for name in theirs
    )


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= AGREE * (1 + a.norm()))
