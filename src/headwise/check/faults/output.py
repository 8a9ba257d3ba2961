"""Mistakes after the weights: merging heads, their number, the output projection and what surrounds it."""

import ast
import re
from pathlib import Path

import torch
from torch import nn

from headwise.check.arguments import constructor_role, parameters_of
from headwise.check.binding import Bound
from headwise.check.calls import PLAIN, leaves
from headwise.check.faults.questions import (
    SINGLE,
    asked_heads,
    has_number,
    near,
    number_in_place_of_argument,
    of_stages,
)
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import modules, tensors
from headwise.check.reading import AttentionReading

MULTI_HEAD = re.compile(r"multi_?head|mha\b|mhsa\b", re.IGNORECASE)
# A layer named for the output, and as wide as its input: not the one that predicts words or classes.
OUTPUT_LAYER = re.compile(
    r"self\.(\w*proj\w*|\w*out\w*|w_?o|dense|fc_?o\w*|o|linear)\s*=\s*[\w.]*Linear\(\s*([\w.]+)\s*,\s*(\2)\s*[,)]",
    re.IGNORECASE,
)
# The sizes that the self-attention of BERT and its descendants keeps; their output projection is in another class.
BERT_SIZES = ("num_attention_heads", "attention_head_size", "all_head_size")
CALLED_A_LIST = re.compile(r"wrapper|naive|\blist\b|Heads?InA|stack|side by side", re.IGNORECASE)
IN_A_LIST = re.compile(r"(\w+\.\d+)\.(?!weight$|bias$)[\w.]+")  # a parameter of a module in a list, not of a layer
OUTPUT_CLASS = re.compile(r"\w*(Self|Attention|Attn)\w*Output\b")


@of_stages
def head_merge(bound: Bound, reading: AttentionReading) -> Found:
    """Heads must be put side by side, token by token."""
    out, core = reading.output, reading.core
    if not reading.used:
        return
    if out is None:
        if reading.scores is None or torch.isfinite(core.heads).all():
            yield Note("doubt", "how the output follows from the heads")
    elif out.merge in ("view", "moved"):
        yield Finding("merge-view", "the output of one token holds heads of several tokens", core.merge_line())
    elif out.merge == "mean" and core.heads.shape[1] > 1 and same(core.heads, core.heads[:, :1].expand_as(core.heads)):
        return  # of equal heads, nobody can tell how they were put together
    elif out.merge == "mean" and core.heads.shape[1] > 1 and same(core.value, core.value[:, :1].expand_as(core.value)):
        yield Note("variant", "heads share their values and are averaged (interpretable multi-head attention)")
    elif out.merge == "mean":
        words = "every head enters the output with the same weight"
        yield Finding("heads-averaged", words, core.output_line())
    elif _is_per_head(reading):
        words = "every slice of the output depends on one head only"
        yield Finding("out-proj-per-head", words, core.output_line())
    elif _is_chained(reading):
        words = "head 1 is given what head 0 returns, not the input"
        yield Finding("heads-chained", words, core.writing_line() or core.output_line())
    elif lost := _lost_numbers(reading):
        yield Finding("heads-overwritten", lost, core.writing_line() or core.merge_line())
    else:
        yield Note("good", "head merge")


def _is_chained(reading: AttentionReading) -> bool:
    """Whether the attention of one head follows from that of another."""
    softmax, trace = reading.core.nodes.softmax, reading.core.trace
    own = len(softmax) == reading.core.heads.shape[1] > 1
    return own and softmax[1].index in trace.reaches(softmax[0].index)


def _lost_numbers(reading: AttentionReading) -> str:
    """Which numbers of the heads do not reach the output, in words; empty where all do."""
    out, (H, Dv) = reading.output, reading.core.heads.shape[1::2]
    if out is None or out.before or out.fit.weight.shape[1] != H * Dv:
        return ""
    reach = out.fit.weight.abs().amax(0).unflatten(0, (H, Dv))
    dead = (reach < 1e-9 * reach.max()).sum(1)
    heads = [f"{int(n)} of the {Dv} numbers of head {h}" for h, n in enumerate(dead) if n]
    return f"{', '.join(heads[:2])}{', …' if len(heads) > 2 else ''} are missing" if heads else ""


def _is_per_head(reading: AttentionReading) -> bool:
    """Whether the output map consists of one block for every head."""
    out, (H, Dv) = reading.output, reading.core.heads.shape[1::2]
    if out is None or H == 1 or out.role.plain or out.fit.weight.shape[0] % H:
        return False
    blocks = out.fit.weight.unflatten(0, (H, -1)).unflatten(2, (H, Dv)).norm(dim=(1, 3))  # (H, H)
    return bool((blocks - blocks.diag().diag()).max() < 1e-9 * blocks.max())


@of_stages
def around_output(bound: Bound, reading: AttentionReading) -> Found:
    """What else contributes to the output is a variant, if it is known."""
    out = reading.output
    if out is None or not reading.used:
        return
    if out.before:
        yield Note("variant", f"a {out.before} between the heads and the output projection")
        layers = {type(m).__name__.lower() for m in modules(bound.thing)}  # nn.Softmax is no activation of the heads
        if out.before not in ("norm", "gate", *layers):
            yield Note("untried", f"whether the {out.before} of the heads is meant")
    if out.residual:
        yield Note("variant", "the input is added to the output (residual)")
        if not near(out.residual, 1.0) and not has_number(bound):
            words = f"the factor is {out.residual:.4g}"
            yield Finding("residual-scaled", words, reading.core.trace.last_line())
    if not out.last:
        known = out.after == "norm"
        yield Note("variant", f"a {out.after} follows the attention" if known else "something follows the attention")
        if not known:
            yield Note("untried", "what follows the attention in this class")


@of_stages
def head_count(bound: Bound, reading: AttentionReading) -> Found:
    """There must be as many heads as asked for."""
    asked, seen = asked_heads(bound), reading.core.heads.shape[1]
    if reading.between_tokens and asked and 1 < seen != asked:
        words = f"{asked} heads were asked for, {seen} are computed"
        written = number_in_place_of_argument(bound.case, "heads")
        if written is not None and written.number == seen:
            yield Finding("size-fixed", f"{written.words}; {words}", written.line)
            return
        looped = reading.core.order == "one product per head"
        line = bound.case.line_with(r"\brange\(") if looped else bound.case.shape_line(reading.core.split_line())
        yield Finding("heads-lost", words, line or reading.core.score_line)
    if reading.output is None or seen > 1:
        return
    asked, Dv = _heads_of_layer(bound, reading), reading.core.heads.shape[-1]
    line = reading.core.score_line
    early = bound.case.return_in_loop()
    if early is not None and (given := asked_heads(bound) or asked) and given > 1:
        yield Finding("heads-lost", f"the loop returns in its first round: 1 of {given} heads is computed", early)
        return
    if asked and asked > 1:
        yield Finding(
            "single-head", f"{asked} heads were asked for; the weights are one table of all {Dv} numbers", line
        )
    elif not asked and MULTI_HEAD.search(type(bound.thing).__name__):
        yield Finding("single-head", "it is called multi-head, but nothing is split into heads", line)
    elif not asked:
        yield Note("variant", SINGLE)


def _heads_of_layer(bound: Bound, reading: AttentionReading) -> int | None:
    """The number of heads asked for; None for one of several heads, which only knows their number."""
    asked, (H, Dv) = asked_heads(bound), reading.core.heads.shape[1::2]
    return None if H == 1 and asked and Dv * asked == bound.sizes.E else asked


@of_stages
def output_width(bound: Bound, reading: AttentionReading) -> Found:
    """The output must be as wide as asked for, and heads must fill the width unless they have one of their own."""
    out, sizes, (H, Dv) = reading.output, bound.sizes, reading.core.heads.shape[1::2]
    if out is None or out.role.plain or not out.last or not bound.built.names_with_role("width"):
        return
    width = out.fit.weight.shape[0]
    line = bound.case.line_of_attribute(out.role.names[0]) if out.role.names else None
    if width not in (sizes.E, sizes.out, sizes.D, sizes.H * sizes.Dv, 3 * sizes.E, H * Dv):
        yield Finding("output-width", f"it is {width} wide where {sizes.out} was asked for", line)
    own = bound.built.names_with_role("head_width") or bound.built.names_with_role("value_width")
    if not own and bound.built.config is None and asked_heads(bound) == H and H * Dv < min(sizes.E, sizes.out):
        words = f"{H} heads of {Dv} numbers for a width of {sizes.out}"
        yield Finding("head-width", words, reading.core.split_line())
    elif not own and asked_heads(bound) == H and H * Dv > max(sizes.E, sizes.out):
        yield Note("variant", f"{H} heads of {Dv} numbers for a width of {sizes.out}")
        if not _is_meant_for_each(bound):
            yield Note(
                "untried", f"whether heads of {Dv} numbers are meant, where {sizes.out} / {H} = {sizes.D} is usual"
            )


def _is_meant_for_each(bound: Bound) -> bool:
    """Whether the code multiplies a width that the constructor takes with the number of heads: each has all of it."""
    taken = {p.name for p in parameters_of(bound.case.target)}
    products = [n for n in ast.walk(bound.case.tree) if isinstance(n, ast.BinOp)]
    for n in (n for n in products if isinstance(n.op, ast.Mult)):
        names = [ast.unparse(side).removeprefix("self.") for side in (n.left, n.right)]
        if set(names) <= taken and "heads" in map(constructor_role, names):
            return True
    return False


@of_stages
def output_projection(bound: Bound, reading: AttentionReading) -> Found:
    """The concatenated heads need one more projection."""
    out, H, E = reading.output, reading.core.heads.shape[1], bound.sizes.out
    if (
        out is None
        or not reading.used
        or not out.role.plain
        or not out.last
        or out.merge == "mean"
        or not tensors(bound.thing)
    ):
        return
    if H == 1 and not _heads_of_layer(bound, reading):
        return
    width = out.fit.weight.shape[0]
    line = bound.case.idle_line() or bound.case.return_line() or reading.core.trace.last_line()
    if width == H * E and H > 1:
        if bound.built.names_with_role("out_width"):
            yield Note(
                "variant", "every head has the output width, and nothing follows their concatenation (a wrapper)"
            )
            return
        yield Finding("too-wide", f"{H} heads of {E} give {width} where {E} was asked for", line)
    separate = not any(leaf.shape[:-1] == bound.inputs.query.shape[:-1] for leaf in leaves(bound.returned))
    thrown = next((found for name in tensors(bound.thing) if (found := _thrown_away(bound, name))), None)
    words = _idle_projection(bound) if thrown is None else f"the result of {thrown[0]} is not assigned; "
    where = _projecting_class(bound)
    if not words and not separate and is_list_of_heads(reading) and _is_called_a_list(bound):
        yield Note("variant", "a list of heads side by side, without an output projection")
    elif where is not None and not separate:
        yield Note("variant", f"the output projection is in {where}")
    else:
        how = "one by one, (B, H, T, D)" if separate and bound.form.layout == PLAIN else "side by side"
        yield Finding("no-out-proj", f"{words}the heads are returned {how}", line if thrown is None else thrown[1])


def is_list_of_heads(reading: AttentionReading) -> bool:
    """Whether every head is a module of its own, with all its layers, which leaves out the projection on purpose."""
    parts = reading.projections
    found = {role: [IN_A_LIST.fullmatch(name) for name in part.role.names] for role, part in parts.items()}
    heads = [{match[1] for match in matches if match} for matches in found.values() if all(matches)]
    return len(heads) == 3 and heads[0] == heads[1] == heads[2] and len(heads[0]) == reading.core.heads.shape[1] > 1


def _is_called_a_list(bound: Bound) -> bool:
    """Whether the name or the text of a class says that it only puts heads side by side."""
    text = f"{getattr(bound.case.target, '__name__', '')} {getattr(bound.case.target, '__doc__', '') or ''}"
    return CALLED_A_LIST.search(text) is not None


def _thrown_away(bound: Bound, name: str) -> tuple[str, int] | None:
    """A call of the layer with this parameter whose result is not assigned, with its line."""
    called = f"self.{name.rpartition('.')[0]}"
    statements = [n for n in ast.walk(bound.case.tree) if isinstance(n, ast.Expr)]
    calls = ((n.value, n.lineno) for n in statements if isinstance(n.value, ast.Call))
    return next(((ast.unparse(call), line) for call, line in calls if ast.unparse(call.func) == called), None)


def _idle_projection(bound: Bound) -> str:
    """That a linear layer as wide as the output is made and never called, in words; empty where there is none."""
    layers = bound.thing.named_modules() if isinstance(bound.thing, nn.Module) else ()
    linear = [(name, m) for name, m in layers if isinstance(m, nn.Linear) and m.out_features == bound.sizes.out]
    idle = next((name for name, m in linear if not bound.trace.reads(m.weight)), None)
    line = None if idle is None else bound.case.line_of_attribute(idle)
    made = f"which is made in line {line}" if line is not None else "which is made"
    return "" if idle is None else f"call self.{idle}, {made} and never used; "


def _projecting_class(bound: Bound) -> str | None:
    """Another class of the file that calls this one and projects its output, as in BERT."""
    name = getattr(bound.case.target, "__name__", "")
    if "SelfAttention" in name and all(re.search(rf"\bself\.{size} = ", bound.case.source) for size in BERT_SIZES):
        return "a class of its own, as in BERT"
    if bound.case.filename is None or not name or not Path(bound.case.filename).is_file():
        return None
    try:
        source = Path(bound.case.filename).read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name != name:
            text = ast.get_source_segment(source, node) or ""
            if re.search(rf"\b{name}\(", text) and (OUTPUT_LAYER.search(text) or OUTPUT_CLASS.search(text)):
                return node.name
    return None
