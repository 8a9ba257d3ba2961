"""What was understood, as a changed reference that must predict the output for fresh inputs."""

import math

import torch
from torch import Tensor

from headwise import reference
from headwise.check import mutants
from headwise.check.bound import Bound
from headwise.check.calling import Inputs, make_inputs
from headwise.check.diagnosis import Diagnosis
from headwise.check.patterns import pattern
from headwise.check.stages import Reading


def recipe(reading: Reading) -> tuple[mutants.Recipe, mutants.Maps] | None:
    """What was understood, as a changed reference with the learner's own weights; None where it is not enough."""
    parts = (reading.query, reading.key, reading.value)
    out, scores = reading.output, reading.scores
    if any(p is None or p.position or p.then or p.norm for p in parts) or out is None or scores is None:
        return None
    if scores.relative or scores.axis not in mutants.AXES:
        return None
    splits = {p.split for p in parts if p is not None}
    if len(splits) > 1 or not splits <= {"heads", "view"} or out.merge not in ("heads", "view", "mean") or not out.last:
        return None
    maps = [reference.Linear(p.fit.weight, p.fit.bias) for p in parts if p is not None]
    made = mutants.Recipe(
        splits.pop(), scores.factor, scores.axis, scores.after_factor if scores.after != "random" else 1.0,
        scores.after == "masked", "heads" if out.merge == "mean" else out.merge, out.residual,
    )  # fmt: skip
    return made, (maps[0], maps[1], maps[2], reference.Linear(out.fit.weight, out.fit.bias))


def predict(
    reading: Reading, made: tuple[mutants.Recipe, mutants.Maps], inputs: Inputs, visible: Tensor | None
) -> Tensor:
    """The output the understanding promises for other inputs."""
    bias = None if reading.scores is None else reading.scores.bias
    H = reading.core.heads.shape[1]
    return mutants.attention(*inputs, made[1], H, made[0], visible=visible, bias=bias)[0]


def proven(bound: Bound, reading: Reading, diagnosis: Diagnosis) -> float | None:
    """The largest difference between prediction and output on fresh inputs; None if nothing is predicted."""
    made = recipe(reading)
    if made is None or reading.scores is None or any(f.name == "dropout-in-eval" for f in diagnosis.findings):
        return None
    inputs = make_inputs(bound.form, bound.sizes, seed=7)
    output = bound.form.result(bound.call(inputs), inputs)
    visible = reading.scores.visible if reading.scores.after != "masked" else reading.core.weights != 0
    if output is None:
        return None
    promised = predict(reading, made, inputs, visible[:1].expand(visible.shape))
    gap = (output - promised).abs()
    if reading.scores.empty is not None:
        gap = gap[torch.isfinite(output)]
    return float(gap.max()) if gap.numel() else None


def rightful(bound: Bound, reading: Reading) -> Tensor | None:
    """What the reference gives with the learner's own weights on the traced inputs."""
    made = recipe(reading)
    if made is None or reading.scores is None or made[1][3] is None:
        return None
    D = reading.core.query.shape[-1]
    factors = [p.role.factor for p in (reading.query, reading.key) if p is not None]
    if any(f is None for f in factors) or pattern(reading.scores.visible) not in ("full", "causal"):
        return None
    scale = D**-0.5 / abs(math.prod(f for f in factors if f is not None))
    plain_recipe = mutants.Recipe(scale=scale, residual=made[0].residual)
    H = reading.core.heads.shape[1]
    visible = reading.scores.visible[:1]
    return mutants.attention(*bound.inputs, made[1], H, plain_recipe, visible=visible, bias=reading.scores.bias)[0]
