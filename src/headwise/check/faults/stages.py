"""The stages of attention in order: projections, scores, output. Each function checks one thing in the reading."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from headwise.check.binding import Bound
from headwise.check.calls import COLUMNS, PLAIN, ROWS, make_inputs
from headwise.check.code.candidates import NAME
from headwise.check.code.intent import states_channels
from headwise.check.faults import output, projections, scores
from headwise.check.faults.questions import PARTIAL, Fault, asked_heads, influence, listed, of_stages, role_in
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import tensors
from headwise.check.proof import TOLERANCE, changed_maps, prediction_error
from headwise.check.reading import AttentionReading, read
from headwise.check.trace import ARITHMETIC, PARTS, PRODUCTS, VIEWS, Core, Node, unnormalized_scores


def unread_attention(bound: Bound, reading: AttentionReading | None) -> Found:
    """There must be a product of queries and keys that goes through a softmax to the values."""
    if reading is not None:
        return
    logarithm = next((n for n in bound.trace.nodes if n.op == "_log_softmax" and n.value.dim() >= 3), None)
    if logarithm is not None:
        yield Finding("softmax-missing", "a log-softmax takes its place", logarithm.line)
        return
    free = not tensors(bound.thing) and bound.form.layout != PLAIN  # then how heads and tokens are laid out is a guess
    bare = None if free else unnormalized_scores(bound.trace, bound.inputs.query.shape[1])
    if bare is not None:
        alias = None if bound.trace.softmax_nodes() else bound.case.alias_after(bare[0].line)
        line = alias or bare[1].line or bare[0].line
        yield Finding("softmax-missing", "scores are multiplied with the values as they are", line)
        return
    divided = bound.trace.misaligned_softmax()
    if divided is not None:
        sums = divided.value.sum(-1).flatten()
        words = f"exponentials are divided by sums of another axis: rows sum to {_numbers(sums)}"
        yield Finding("softmax-axis", words, divided.line)
        return
    summed = bound.trace.summed_weights()
    if summed is not None:
        words = "they are summed over the keys on their own, which gives 1 for every query"
        yield Finding("weights-summed", words, summed.line)
    yield from _isolated_tokens(bound)
    yield Note("doubt", "no product of queries and keys that goes through a softmax to values was seen")


def _numbers(values: Tensor) -> str:
    """The first two of many numbers."""
    return f"{float(values[0]):.4g}, {float(values[1]):.4g}, …"


def _isolated_tokens(bound: Bound) -> Iterator[Finding]:
    """Tokens that no other token influences, or only some do although the class name does not say so."""
    named = NAME.search(getattr(bound.case.target, "__name__", "")) is not None
    projects = len({role_in(name) for name in tensors(bound.thing)} - {None}) == 3
    projects = projects or any(re.search(r"qkv|attn|attention", name, re.IGNORECASE) for name in tensors(bound.thing))
    moved = influence(bound) if bound.trace.softmax_nodes() or (named and projects) else None
    if moved is None or len(moved) < 3:
        return
    alone = torch.eye(len(moved), dtype=torch.bool)
    part = moved.diagonal().all() and torch.equal(moved, moved.T) and not moved.all()
    if not (moved & ~alone).any():
        tables = bound.trace.softmax_nodes()
        product = bound.trace.elementwise_before(tables[0].index) if tables else None
        if product is not None:
            words = f"queries and keys give {bound.sizes.named(product.value.shape)}, not a table of tokens × tokens"
            yield Finding("elementwise-product", words, product.line)
            return
        softmax = next((n.line for n in bound.trace.softmax_nodes() if n.line is not None), None)
        line = bound.case.idle_line() or bound.trace.line_of_values() or softmax or bound.case.last_alias()
        yield Finding("tokens-alone", "a token's output stays the same whatever the other tokens are", line)
    elif part and not PARTIAL.search(getattr(bound.case.target, "__name__", "")) and not _is_of_lines(bound, moved):
        row = int((~moved).any(1).nonzero()[0])
        unseen = ", ".join(str(int(j)) for j in (~moved[row]).nonzero()[:3])
        yield Finding("sees-a-part", f"token {row} and token {unseen} do not influence each other", _cut_line(bound))


def _is_of_lines(bound: Bound, moved: torch.Tensor) -> bool:
    """Whether every pixel sees its own row or column of a picture: which of its axes are tokens was a guess."""
    rows = torch.block_diag(*[torch.ones(COLUMNS, COLUMNS)] * ROWS).bool()
    columns = torch.ones(ROWS, ROWS).bool().kron(torch.eye(COLUMNS).bool())
    return moved.shape == rows.shape and any(torch.equal(moved, seen) for seen in (rows, columns, rows | columns))


def _cut_line(bound: Bound) -> int | None:
    """The first line that takes a part of the tokens, or gives their axis to something else."""
    tokens = bound.inputs.query.shape[:2]
    for node in bound.trace.nodes:
        whole = bool(node.parents) and bound.trace.nodes[node.parents[0]].value.shape[:2] == tokens
        if whole and node.op in PARTS | VIEWS and node.value.shape[:2] not in (tokens, (tokens.numel(),)):
            return node.line
    return None


@of_stages
def unused_attention(bound: Bound, reading: AttentionReading) -> Found:
    """The result must depend on the product of weights and values."""
    if not reading.used:
        words = "what is returned does not depend on the product of weights and values"
        ends = [reading.core.trace.nodes[n].line for n in reading.core.trace.returned if n is not None]
        line = reading.core.bypass_line() or bound.case.return_line() or next((n for n in ends if n), None)
        yield Finding("attention-unused", words, line)


def attention_table(bound: Bound, reading: AttentionReading | None) -> Found:
    """The weights must be a table of queries × keys."""
    if reading is None or reading.between_tokens:
        return
    rows, columns = reading.core.weights.shape[-2:]
    T, S = bound.inputs.query.shape[1], bound.inputs.key.shape[1]
    H, line = asked_heads(bound) or bound.sizes.H, reading.core.score_line
    words = f"the weights are a table of {rows}×{columns} for {T} tokens"
    summed = reading.core.query.shape[-1]  # over how many numbers the first product sums
    numbers = columns == rows and rows in (bound.sizes.D, bound.sizes.E) and rows != H
    if numbers and (summed % T == 0 or reading.core.was_split_into(H, rows)):
        turned = reading.core.swap_line(T if summed % T == 0 else None)
        if (said := states_channels(bound.case)) is not None:
            yield Note("doubt", f"{words}: it runs between channels, as line {said} says")
            return
        yield Finding("attends-over-features", words, turned or line)
    elif columns == rows == H or columns in (bound.sizes.H, bound.sizes.D):
        by_name = re.search("einsum|rearrange", bound.case.text(line)) is not None
        moved = reading.core.reordering_view(*bound.inputs.query.shape[:2])
        split = None if by_name else moved or reading.core.swap_line() or reading.core.split_line()
        yield Finding("attends-over-heads", f"{words} and {H} heads", split or line)
    elif columns == rows == bound.inputs.query.shape[0]:
        yield Finding("attends-over-batch", words, line)
    else:
        yield Note("doubt", f"the weights are a table of {rows}×{columns} for {T} queries and {S} keys")


def unused_tables(bound: Bound, reading: AttentionReading | None) -> Found:
    """A table that the constructor stores must be read by something that is called."""
    held = bound.thing.named_buffers(recurse=False) if isinstance(bound.thing, nn.Module) else ()
    for name, table in held:
        method = bound.case.only_read_in(name) if table.numel() > 1 else None
        if method is not None:
            words = f"only {method} reads {name}, and nothing calls {method}"
            yield Finding("table-unused", words, None if reading is None else reading.core.score_line)
            return


def unused_results(bound: Bound, reading: AttentionReading | None) -> Found:
    """What is computed from queries, keys or values must be used."""
    if reading is None or reading.core.trace is not bound.trace:
        return
    trace, core = bound.trace, reading.core
    sizes = {core.query.numel(), core.key.numel(), core.value.numel()}
    used = {p for n in trace.nodes for p in n.parents} | {n for n in trace.returned if n is not None} | trace.read
    kept = [part for part in getattr(bound.thing, "__dict__", {}).values() if isinstance(part, Tensor)]
    behind = {n.index for name in ("query", "key", "value") for n in core.behind(name)}
    for node in trace.nodes:
        if node.index not in used and any(_is_again(node, trace.nodes[n]) for n in used):
            continue  # it was computed twice
        if node.index not in used and node.line is not None and _is_mask(node, core):
            yield Finding("mask-unused", "it is a table of queries × keys", node.outermost)
            return
        if node.op not in ARITHMETIC or node.index in used or node.line is None or node.value.numel() not in sizes:
            continue
        derived = any(p.index in behind and p.op in PRODUCTS for p in trace.ancestors([node.index]))
        if derived and not any(part.shape == node.value.shape and same(part, node.value) for part in kept):
            yield Finding("result-unused", "it is made of queries, keys or values", node.outermost)
            return


def _is_again(node: Node, other: Node) -> bool:
    """Whether another operation gave the same numbers in the same way."""
    return node.op == other.op and node.value.shape == other.value.shape and torch.equal(node.value, other.value)


def _is_mask(node: Node, core: Core) -> bool:
    """Whether this is a table that says for every query and key whether something holds."""
    table = node.value.dtype == torch.bool and node.value.shape[-2:] == core.weights.shape[-2:]
    return table and node.value.dim() >= 2 and min(node.value.shape[-2:]) > 1


STAGES: tuple[Fault, ...] = (
    unread_attention,
    unused_attention,
    attention_table,
    projections.unread_projections,
    projections.head_split,
    projections.norms_and_positions,
    projections.rotary_positions,
    projections.rotary_axis,
    projections.roles,
    projections.shared_projections,
    projections.weights_of_maps,
    scores.unread_scores,
    scores.shifted_softmax,
    scores.softmax,
    scores.scale,
    projections.shared_heads,  # after the scale, which is wrong whoever shares what
    scores.built_in_mask,
    scores.masks_without_effect,
    output.head_merge,
    output.around_output,
    output.head_count,
    output.output_width,
    output.output_projection,
)


def stage_findings(bound: Bound, reading: AttentionReading | None) -> list[Finding]:
    """The mistakes in all stages, for another call of the same object."""
    return [found for fault in STAGES for found in fault(bound, reading) if isinstance(found, Finding)]


@of_stages
def fresh_inputs(bound: Bound, reading: AttentionReading) -> Found:
    """What was understood must hold for inputs that were not used to understand it."""
    error = prediction_error(bound, reading)
    if error is None:
        again = bound.called(inputs=make_inputs(bound.form, bound.sizes, seed=7))
        changed = changed_maps(reading, read(again))
        if changed:
            yield Note("doubt", f"on new inputs, {listed(changed)} {'differs' if len(changed) == 1 else 'differ'}")
        else:
            yield Note("good", "every step is the same map on new inputs")
    elif error < TOLERANCE:
        yield Note("good", f"largest difference {error:.0e}")
    else:
        yield Note("doubt", f"on new inputs the output differs by {error:.2g} from what was understood")
