"""Mistakes after the heads: merge, output projection, width."""

import re

import torch

from headwise.check import layouts, lines
from headwise.check.bound import Bound
from headwise.check.calling import leaves
from headwise.check.diagnosis import Diagnosis, asked_heads
from headwise.check.elsewhere import projecting_class
from headwise.check.fits import same
from headwise.check.stages import Reading
from headwise.check.subject import tensors

MULTI_HEAD = re.compile(r"multi_?head|mha\b|mhsa\b", re.IGNORECASE)


def judge_output(bound: Bound, reading: Reading, result: Diagnosis) -> None:
    """Findings about merge, residual and output projection."""
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
    elif out.merge == "mean" and H > 1 and same(core.value, core.value[:, :1].expand_as(core.value)):
        result.variants.append("heads share their values and are averaged (interpretable multi-head attention)")
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
    asked = asked_heads(bound)
    if H == 1 and asked and Dv * asked == bound.sizes.E:
        asked = None  # one of several heads, which knows their number
    if asked and asked > 1 and H == 1:
        result.wrong("single-head", f"{asked} heads were asked for; weights are one table of all {Dv} numbers")
    if H == 1 and not asked and MULTI_HEAD.search(type(bound.thing).__name__):
        result.wrong("single-head", "it is called multi-head, and nothing is split into heads")
    elif H == 1 and not asked:
        result.variants.append("a single head")
    if out.role.plain and out.last and out.merge != "mean" and not (H == 1 and not asked) and tensors(bound.thing):
        _unprojected(bound, reading, result)


def _unprojected(bound: Bound, reading: Reading, result: Diagnosis) -> None:
    width = reading.output.fit.weight.shape[0] if reading.output is not None else 0
    H = reading.core.heads.shape[1]
    line = lines.last_line(bound.trace)
    if width == H * bound.sizes.E and H > 1:
        result.wrong("too-wide", f"{H} heads of {bound.sizes.E} give {width} where {bound.sizes.E} was asked for", line)
    apart = not any(leaf.shape[:-1] == bound.inputs.query.shape[:-1] for leaf in leaves(bound.returned))
    where = projecting_class(bound)
    if where is not None and not apart:
        result.variants.append(f"the output projection lies in {where}")
        return
    how = "one by one, (B, H, T, D)" if apart and bound.form.layout == layouts.PLAIN else "side by side"
    result.wrong("no-out-proj", f"the heads are returned {how}", line)
