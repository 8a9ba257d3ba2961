"""Turns a reading into findings: which stage differs from the reference, and by which named mistake."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise import reference
from headwise.check import lines, mutants
from headwise.check.bound import Bound
from headwise.check.calling import Inputs, make_inputs
from headwise.check.findings import Finding
from headwise.check.fits import same
from headwise.check.names import constructor_role, plain
from headwise.check.patterns import pattern
from headwise.check.stages import Projection, Reading
from headwise.check.subject import tensors


@dataclass
class Diagnosis:
    """What is wrong, what is special, and what could not be explained."""

    findings: list[Finding] = field(default_factory=list)
    variants: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)  # stages that were not understood; any of them forbids "right"
    good: list[str] = field(default_factory=list)
    recipe: mutants.Recipe = field(default_factory=mutants.Recipe)
    visible: str = "full"

    def wrong(self, name: str, detail: str = "", line: int | None = None) -> None:
        """Add a finding."""
        self.findings.append(Finding(name, detail, line))


def diagnose(bound: Bound, reading: Reading) -> Diagnosis:
    """Every stage in turn."""
    result = Diagnosis()
    if not _between_tokens(bound, reading, result):
        return result
    _projections(bound, reading, result)
    _scores(bound, reading, result)
    _output(bound, reading, result)
    return result


def _between_tokens(bound: Bound, reading: Reading, result: Diagnosis) -> bool:
    rows, columns = reading.core.weights.shape[-2:]
    T, S = bound.inputs.query.shape[1], bound.inputs.key.shape[1]
    if (rows, columns) == (T, S):
        return True
    line = reading.core.score_nodes[0].line
    H = _asked_heads(bound) or bound.sizes.H
    if columns == rows == H or columns in (bound.sizes.H, bound.sizes.D):
        result.wrong(
            "attends-over-heads", f"weights are a table of {rows}×{columns} for {T} tokens and {H} heads", line
        )
    elif columns == rows == bound.inputs.query.shape[0]:
        result.wrong("attends-over-batch", f"weights are a table of {rows}×{columns} for {T} tokens", line)
    else:
        result.doubts.append(f"weights are a table of {rows}×{columns} for {T} queries and {S} keys")
    return False


def _asked_heads(bound: Bound) -> int | None:
    """The number of heads the constructor was given."""
    given = [v for k, v in bound.built.arguments.items() if constructor_role(k) == "heads" and type(v) is int]
    if not given and bound.built.config is not None:
        given = [bound.sizes.H]
    return given[0] if given else None


# -- projections ------------------------------------------------------------------------------------------------------


def _projections(bound: Bound, reading: Reading, result: Diagnosis) -> None:
    parts = {"query": reading.query, "key": reading.key, "value": reading.value}
    for name, part in parts.items():
        if part is None:
            result.doubts.append(f"how the {name} of a head follows from the input")
    known = {name: part for name, part in parts.items() if part is not None}
    shuffled = [name for name, part in known.items() if part.split != "heads"]
    if shuffled:
        line = lines.split_line(bound.trace, reading.core)
        result.wrong("split-view", f"{_listed(shuffled)} of one head hold pieces of several tokens", line)
    elif len(known) == 3:
        result.good.append("head split")
    for name, part in known.items():
        _extras(name, part, result)
    if len(known) == 3:
        _positions(known, reading, result)
        _roles(bound, reading, known, result)
        _sharing(bound, reading, known, result)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _extras(name: str, part: Projection, result: Diagnosis) -> None:
    if part.norm and "the input is normalised first" not in result.variants:
        result.variants.append("the input is normalised first")
    if part.then == "norm":
        result.variants.append("queries and keys are normalised")
        if not part.normalised:
            result.doubts.append(f"the norm of the {name}")
    elif part.then:
        result.doubts.append(f"what happens to the {name} between projection and product")
    if part.position == "added" and "positions are added inside" not in result.variants:
        result.variants.append("positions are added inside")


def _positions(known: dict[str, Projection], reading: Reading, result: Diagnosis) -> None:
    """A turn of queries and keys must depend on their distance alone; values are not turned."""
    query, key = known["query"], known["key"]
    if query.position != "rotary" and key.position != "rotary":
        return
    if query.by_position is None or key.by_position is None:
        result.doubts.append("queries and keys are treated differently by position")
        return
    H = reading.core.query.shape[1]
    a, b = query.by_position.unflatten(1, (H, -1)), key.by_position.unflatten(1, (H, -1))
    T = min(len(a), len(b))
    near = [torch.einsum("hde,hdf->hef", a[t], b[t]) for t in range(T)]
    next_to = [torch.einsum("hde,hdf->hef", a[t + 1], b[t]) for t in range(T - 1)]
    if all(same(m, near[0], 1e-5) for m in near) and all(same(m, next_to[0], 1e-5) for m in next_to):
        result.variants.append("rotary positions")
    else:
        result.doubts.append("the map depends on the position, and not only on the distance")
    if known["value"].position == "rotary":
        result.variants.append("values are turned by position, too")


def _roles(bound: Bound, reading: Reading, known: dict[str, Projection], result: Diagnosis) -> None:
    """Inputs and parameters against their names."""
    stated = set(bound.form.roles.values())
    if {"query", "key", "value"} <= stated:
        for name, part in known.items():
            if part.source != name:
                result.wrong("wrong-role", f"the {name} is made from the argument for the {part.source}", None)
    for name, part in known.items():
        others = {_role_in(n) for n in part.role.names} - {None}
        if len(others) == 1 and others != {name} and _unused(bound, known, name):
            result.wrong("wrong-role", f"the {name} is made by {part.role.names[0]}", None)


def _role_in(parameter: str) -> str | None:
    words = [plain(p) for p in parameter.split(".")]
    for word in words:
        stripped = (
            word.removesuffix("weight").removesuffix("proj").removesuffix("s").removeprefix("w").removeprefix("proj")
        )
        for role in ("query", "key", "value"):
            if role in word or stripped == role[0] or stripped in (f"to{role[0]}", f"fc{role[0]}", f"linear{role[0]}"):
                return role
    return None


def _unused(bound: Bound, known: dict[str, Projection], name: str) -> bool:
    used = {n for part in known.values() for n in part.role.names}
    return any(_role_in(n) == name and n not in used for n, t in tensors(bound.thing).items() if t.dim() > 1)


def _sharing(bound: Bound, reading: Reading, known: dict[str, Projection], result: Diagnosis) -> None:
    """Between query, key and value, and between heads."""
    parts = {n: p for n, p in known.items() if p.position != "rotary"}
    bare = [name for name, part in known.items() if part.role.plain]
    if bare and not tensors(bound.thing):
        result.variants.append("it has no weights of its own")
    elif bare:
        verb = "are" if len(bare) > 1 else "is"
        result.wrong("no-qkv-proj", f"{_listed(bare)} {verb} the input itself")
    elif len(parts) == 3 and all(_proportional(parts["query"], parts[n]) for n in ("key", "value")):
        result.wrong("one-projection", f"all three use {_listed(parts['query'].role.names) or 'the same weights'}")
    elif "query" in parts and "key" in parts and _proportional(parts["query"], parts["key"]):
        result.wrong("one-projection", "query and key use the same weights")
    elif "value" in parts and "key" in parts and _proportional(parts["key"], parts["value"]):
        result.wrong("one-projection", "key and value use the same weights")
    H = reading.core.weights.shape[1]
    if H > 1 and not any(f.name == "split-view" for f in result.findings):
        _between_heads(H, reading, known, result)


def _proportional(a: Projection, b: Projection) -> bool:
    if a.fit.weight.shape != b.fit.weight.shape:
        return False
    u, v = a.fit.weight.flatten(), b.fit.weight.flatten()
    return bool(torch.dot(u, v).abs() > (1 - 1e-9) * u.norm() * v.norm())


def _between_heads(H: int, reading: Reading, known: dict[str, Projection], result: Diagnosis) -> None:
    shared = {}
    for name, part in known.items():
        weight = part.fit.weight if part.by_position is None else part.by_position[0]
        width = weight.shape[0] // H
        blocks = weight.unflatten(0, (H, width))
        if part.role.sliced and not part.role.plain:
            whole = weight.shape[1] >= H * width
            own = blocks if not whole else torch.stack([blocks[h].narrow(1, h * width, width) for h in range(H)])
            shared[name] = same(own, own[:1].expand_as(own), 1e-7)
        else:
            shared[name] = same(blocks, blocks[:1].expand_as(blocks), 1e-7)
    if all(shared.values()):
        small = any(part.role.sliced for part in known.values())
        how = (
            "one small matrix is applied to every head's slice of the input"
            if small
            else "every head has the same matrix"
        )
        result.wrong("heads-share-weights", how)
    elif shared["query"] and not shared["key"]:
        result.wrong("heads-share-weights", "all heads ask with the same query")
    elif shared["key"] and shared["value"]:
        result.variants.append("one key/value head for all queries (multi-query)")
    elif any(part.role.sliced for part in known.values()):
        result.variants.append("every head reads only its own slice of the input")


# -- scores -----------------------------------------------------------------------------------------------------------


def _scores(bound: Bound, reading: Reading, result: Diagnosis) -> None:
    scores, core = reading.scores, reading.core
    if scores is None:
        result.doubts.append("how weights follow from queries and keys")
        return
    node = core.softmax_nodes[0]
    if scores.axis != "keys":
        result.wrong("softmax-axis", f"weights sum to 1 over {scores.axis}, not over keys", node.line)
    else:
        result.good.append("softmax axis")
    if scores.after == "random":
        result.wrong("dropout-in-eval", "weights are dropped at random after eval()", lines.dropout_line(bound.trace))
    if scores.after == "masked":
        result.wrong("mask-after-softmax", "weights are set to zero after the softmax", node.line)
    if scores.leaks:
        result.wrong("mask-leaks", "scores of the future are set to a number near zero", _mask_line(bound, reading))
        _scale(bound, reading, result)
        return
    if scores.bias is not None:
        result.variants.append("a bias by position is added to the scores")
    _scale(bound, reading, result)
    _visible(bound, reading, result)


def _scale(bound: Bound, reading: Reading, result: Diagnosis) -> None:
    scores, query, key = reading.scores, reading.query, reading.key
    assert scores is not None  # noqa: S101
    D = reading.core.query.shape[-1]
    line, number = lines.scale_line(bound.trace, reading.core)
    right = 1 / math.sqrt(D)
    if scores.factor is None:
        result.doubts.append("the scale of the scores")
        return
    factors = [1.0 if p is None or p.role.factor is None else abs(p.role.factor) for p in (query, key)]
    unknown = any(p is None or p.role.factor is None for p in (query, key))
    total = abs(scores.factor) * factors[0] * factors[1]
    if any(p is not None and p.then == "norm" for p in (query, key)):
        return  # the norm decides how large scores are
    if _learned_temperature(bound, reading) or scores.by_head:
        result.variants.append("a learned scale")
        return
    if _near(total, right):
        if _near(abs(scores.after_factor), 1.0):
            result.good.append(f"scale 1/√{D}")
    elif scores.bias is not None and _near(total, 1.0):
        result.variants.append("scores are not scaled, beside a bias (as in T5)")
    elif unknown:
        result.doubts.append(f"the scale of the scores: {total:.4g} was measured where 1/√{D} = {right:.4g} is usual")
    else:
        name = _scale_name(total, D, bound, reading)
        result.wrong(name, _scale_words(total, D, number), line)
    if not _near(abs(scores.after_factor), 1.0) and scores.after != "random":
        result.findings = [f for f in result.findings if f.name != "scale-missing"]
        result.wrong(
            "scale-after-softmax", f"weights are multiplied by {scores.after_factor:.4g} after the softmax", line
        )


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-4 * abs(b)


def _scale_name(total: float, D: int, bound: Bound, reading: Reading) -> str:
    E, (B, T) = bound.sizes.E, bound.inputs.query.shape[:2]
    known = {
        "scale-missing": 1.0, "scale-d_model": E**-0.5, "scale-multiplied": D**0.5, "scale-no-sqrt": 1 / D,
        "scale-batch": B**-0.5, "scale-length": T**-0.5,
    }  # fmt: skip
    return next((name for name, value in known.items() if _near(total, value)), "scale-other")


def _scale_words(total: float, D: int, number: float | None) -> str:
    right = f"√{D} = {math.sqrt(D):.3f}, the root of the head's width"
    if _near(total, 1.0):
        return f"they should be divided by {right}"
    return f"they are divided by {1 / total:.4g}, not by {right}"


def _learned_temperature(bound: Bound, reading: Reading) -> bool:
    """A parameter of one number, or of one for each head, that takes part in the scores."""
    H = reading.core.weights.shape[1]
    small = [t for t in tensors(bound.thing).values() if t.numel() in {1, H} and t.numel() <= H and t.requires_grad]
    return bool(small) and any(t.dim() != 1 or t.numel() == 1 or t.numel() == H for t in small)


def _visible(bound: Bound, reading: Reading, result: Diagnosis) -> None:
    assert reading.scores is not None  # noqa: S101
    scores, node = reading.scores, reading.core.softmax_nodes[0]
    visible = scores.visible if scores.after != "masked" else reading.core.weights != 0
    if scores.after == "random":
        return
    result.visible = pattern(visible)
    line = _mask_line(bound, reading) or node.line
    if result.visible == "causal":
        result.variants.append("causal inside")
    elif result.visible in ("future", "later"):
        result.wrong("causal-inverted", "a token sees the tokens after it and not those before", line)
    elif result.visible == "strict":
        result.wrong("causal-off-by-one", "a token does not see itself", line)
    elif result.visible == "ahead":
        result.wrong("causal-off-by-one", "a token sees the one after it", line)
    elif result.visible != "full":
        result.variants.append("a fixed pattern of visible keys")
    discarded = lines.discarded_mask(bound.trace, reading.core)
    if discarded is not None and result.visible == "full":
        result.wrong("mask-discarded", "the masked scores are not assigned to anything", discarded.line)


def _mask_line(bound: Bound, reading: Reading) -> int | None:
    found = [n for n in bound.trace.nodes if n.op.rstrip("_") in ("masked_fill", "where", "tril", "triu") and n.line]
    before = [n for n in found if n.index < reading.core.softmax_nodes[0].index]
    return before[-1].line if before else None


# -- output -----------------------------------------------------------------------------------------------------------


def _output(bound: Bound, reading: Reading, result: Diagnosis) -> None:
    out, core = reading.output, reading.core
    if out is None:
        if reading.scores is not None and not torch.isfinite(core.heads).all():
            return
        result.doubts.append("how the output follows from the heads")
        return
    H, Dv = core.heads.shape[1], core.heads.shape[-1]
    if out.merge in ("view", "moved"):
        line = lines.merge_line(bound.trace, core)
        result.wrong("merge-view", "the output of one token holds heads of several tokens", line)
    elif out.merge == "mean":
        result.wrong(
            "heads-averaged", "every head enters the output with the same weight", lines.last_line(bound.trace)
        )
    else:
        result.good.append("head merge")
    if out.residual:
        result.variants.append("the input is added to the output (residual)")
    if not out.last:
        result.variants.append("something follows the attention (a norm or a further layer), which was not judged")
    asked = _asked_heads(bound)
    if asked and asked > 1 and H == 1:
        result.wrong("single-head", f"{asked} heads were asked for; weights are one table of all {Dv} numbers")
    if H == 1 and not asked:
        result.variants.append("a single head")
    if out.role.plain and out.last and out.merge != "mean" and not (H == 1 and not asked) and tensors(bound.thing):
        _unprojected(bound, reading, result)


def _unprojected(bound: Bound, reading: Reading, result: Diagnosis) -> None:
    width = reading.output.fit.weight.shape[0] if reading.output is not None else 0
    H = reading.core.heads.shape[1]
    line = lines.last_line(bound.trace)
    if width == H * bound.sizes.E and H > 1:
        result.wrong("too-wide", f"{H} heads of {bound.sizes.E} give {width} where {bound.sizes.E} was asked for", line)
    result.wrong("no-out-proj", "the heads are returned side by side", line)


# -- proof ------------------------------------------------------------------------------------------------------------


def recipe(bound: Bound, reading: Reading, diagnosis: Diagnosis) -> tuple[mutants.Recipe, mutants.Maps] | None:
    """What was understood, as a changed reference with the learner's own weights; None where it is not enough."""
    parts = (reading.query, reading.key, reading.value)
    out, scores = reading.output, reading.scores
    if any(p is None or p.position or p.then or p.norm for p in parts) or out is None or scores is None:
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
    bound: Bound, reading: Reading, made: tuple[mutants.Recipe, mutants.Maps], inputs: Inputs, visible: Tensor | None
) -> Tensor:
    """The output the understanding promises for other inputs."""
    bias = None if reading.scores is None else reading.scores.bias
    H = reading.core.heads.shape[1]
    return mutants.attention(*inputs, made[1], H, made[0], visible=visible, bias=bias)[0]


def proven(bound: Bound, reading: Reading, diagnosis: Diagnosis) -> float | None:
    """The largest difference between prediction and output on fresh inputs; None if nothing is predicted."""
    made = recipe(bound, reading, diagnosis)
    if made is None or reading.scores is None or any(f.name == "dropout-in-eval" for f in diagnosis.findings):
        return None
    inputs = make_inputs(bound.form, bound.sizes, seed=7)
    output = bound.form.result(bound.call(inputs), inputs)
    visible = reading.scores.visible if reading.scores.after != "masked" else reading.core.weights != 0
    if output is None:
        return None
    promised = predict(bound, reading, made, inputs, visible[:1].expand(visible.shape))
    gap = (output - promised).abs()
    if reading.scores.empty is not None:
        gap = gap[torch.isfinite(output)]
    return float(gap.max()) if gap.numel() else None


def rightful(bound: Bound, reading: Reading) -> Tensor | None:
    """What the reference gives with the learner's own weights on the traced inputs."""
    made = recipe(bound, reading, Diagnosis())
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
