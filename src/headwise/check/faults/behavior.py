"""How it behaves when it is called again: the same result, inputs untouched, samples apart, weights as returned."""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headwise.check.arguments import constructor_role, parameters_of
from headwise.check.binding import Bound, module_sizes
from headwise.check.calls import PLAIN, Inputs, leaves, make_inputs
from headwise.check.code.intent import states_batch_first, states_batch_second, states_output_first
from headwise.check.code.names import globals_read
from headwise.check.faults.mask_meaning import measured
from headwise.check.faults.questions import influence as influence_of
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import call_parameters
from headwise.check.reading import AttentionReading, read
from headwise.check.trace import PRODUCTS, VIEWS
from headwise.check.vocabulary import plain

REDUCES = ("mean", "sum", "amax", "var", "std", "max", "prod", "logsumexp", "linalg_vector_norm", "norm")
LARGEST_BIAS = 1e4  # larger ones hide a key
ASKS = re.compile(r"(return|need|output|with|average)\w*(weight|att|map)")  # an argument that asks for weights


def unmodified_inputs(bound: Bound, reading: AttentionReading | None) -> Found:
    """A call must not write into its inputs."""
    fresh = make_inputs(bound.form, bound.sizes, seed=13)
    kept = [x.clone() for x in fresh]
    try:
        with bound.running(), torch.no_grad():
            bound.form.call(bound.thing, fresh, as_is=True)
    except Exception:  # it raises only now, which another fault names
        return
    changed = [name for name, x, y in zip(fresh._fields, fresh, kept, strict=True) if not torch.equal(x, y)]
    if changed:
        writing = (n.line for n in bound.trace.nodes if n.op.endswith("_") and n.line is not None)
        yield Finding("input-modified", f"the {changed[0]} has different values after the call", next(writing, None))


def stated_layout(bound: Bound, reading: AttentionReading | None) -> Found:
    """Attention must run along the axis that comments call the tokens."""
    said = states_batch_second(bound.case, bound.form.roles) if bound.form.layout == PLAIN else None
    if said is not None and reading is not None and reading.between_tokens:
        words = f"the code attends along the second axis, line {said} says (tokens, batch, width)"
        yield Finding("attends-over-batch", words, reading.core.split_line())
    line = states_batch_first(bound.case, bound.form.roles) if bound.form.layout == "batch second" else None
    if line is not None:
        place = f"line {line}" if line else "the text"
        words = f"the code reads (tokens, batch, width), {place} says (batch, tokens, width)"
        inner = dict(bound.thing.named_modules()) if isinstance(bound.thing, nn.Module) else {}
        layers = [n for n, m in inner.items() if isinstance(m, nn.MultiheadAttention) and not m.batch_first]
        made = bound.case.line_of_attribute(layers[0]) if layers else None
        yield Finding("batch-second", words, made or bound.case.line_with(r"\.(shape|size\(\))"))


def repeated_calls(bound: Bound, reading: AttentionReading | None) -> Found:
    """The same input must give the same result, also after a call with another one."""
    if bound.trace.dropout_line() is not None:
        return  # dropout in evaluation mode, which has a name of its own
    other = make_inputs(bound.form, bound.sizes, seed=17)
    first = bound.output_of(bound.inputs)
    third = bound.output_of(other)
    second = bound.output_of(bound.inputs)
    if first is None:
        return
    new = _of_a_new_object(bound, other)
    if new is not None and third is not None and not same(new.nan_to_num(), third.nan_to_num()):
        words = (
            f"a new object with the same weights gives a result that differs by {float((new - third).abs().max()):.3g}"
        )
        yield Finding("remembers-calls", words, bound.case.idle_line() or bound.case.line_of_state())
        return
    if second is None or second.shape != first.shape or not same(first.nan_to_num(), second.nan_to_num()):
        gap = (
            "it fails"
            if second is None or second.shape != first.shape
            else f"{float((first - second).abs().max()):.3g}"
        )
        words = f"after a call with another input, the difference is {gap}"
        yield Finding("remembers-calls", words, bound.case.idle_line() or bound.case.line_of_state())
        return
    for given in usable_masks(bound, reading):
        if (kept := _kept_from(given, bound)) is not None:
            words = f"after a call with another {next(iter(given))}, the difference is {kept:.3g}"
            yield Finding("remembers-calls", words, bound.case.line_of_state())
            return


def _kept_from(given: dict[str, Any], bound: Bound) -> float | None:
    """How much a call with a mask depends on the mask of the call before; None where it does not."""
    other = {name: mask.roll(1, 0) for name, mask in given.items()}
    again, fresh = bound.uncalled(), bound.uncalled()
    if again is None or bound.case.line_of_state() is None:
        return None
    bound.output_of(bound.inputs, given, thing=again)
    after, alone = (bound.output_of(bound.inputs, other, thing=thing) for thing in (again, fresh))
    if after is None or alone is None or same(after.nan_to_num(), alone.nan_to_num()):
        return None
    return float((after - alone).abs().nan_to_num().max())


def _of_a_new_object(bound: Bound, inputs: Inputs) -> Tensor | None:
    """The first result of an object with the same weights that was never called; None where none can be made."""
    thing = bound.uncalled()
    if thing is None:
        return None
    return bound.output_of(inputs, thing=thing)


def batch_leak(bound: Bound, reading: AttentionReading | None) -> Found:
    """The first sample's result must not change when all others do."""
    if bound.form.layout == "unbatched":
        return
    other = make_inputs(bound.form, bound.sizes, seed=11)
    mixed = Inputs(*(torch.cat([a[:1], b[1:]]) for a, b in zip(bound.inputs, other, strict=True)))
    if bound.inputs.key is bound.inputs.query:
        mixed = Inputs(mixed.query, mixed.query, mixed.query)
    first, second, again = (bound.output_of(inputs) for inputs in (bound.inputs, mixed, bound.inputs))
    if first is None or second is None or again is None or not same(first.nan_to_num(), again.nan_to_num()):
        return
    a, b = first[0].nan_to_num(), second[0].nan_to_num()
    if not same(a, b) and reading is None and bound.form.layout == "image, channels last":
        yield Note("doubt", "which axis of the input counts samples")
    elif not same(a, b):
        gap = float((a - b).abs().max())
        words = f"changing samples 1 to {len(first) - 1} changes sample 0 by up to {gap:.3g}"
        yield Finding("batch-leak", words, _mixing_line(bound))


def _mixing_line(bound: Bound) -> int | None:
    """The first line that takes a mean or the like over the samples, or that gives their axis to something else."""
    B, nodes = bound.inputs.query.shape[0], bound.trace.nodes
    for node in nodes:
        if node.op in VIEWS and node.parents and node.value.dim() > 1 and bound.form.layout == PLAIN:
            first = nodes[node.parents[0]].value.shape[:1]
            if first == (B,) and node.value.shape[0] % B and node.value.shape[0] != 1:
                return node.line
        before = nodes[node.parents[0]].value if node.parents else None
        reduces = node.op in REDUCES
        if reduces and before is not None and before.dim() and before.shape[0] == B != (*node.value.shape, 0)[0]:
            return node.line
    return _joining_line(bound)


def _joining_line(bound: Bound) -> int | None:
    """The last line before the softmax that joins the samples with other axes, where its rows run over all of them."""
    B, nodes = bound.inputs.query.shape[0], bound.trace.nodes
    tables = [n for n in bound.trace.softmax_nodes() if n.value.shape[-1] > B and n.value.shape[-1] % B == 0]
    layers = {n.line for n in nodes if n.op in PRODUCTS}
    for node in reversed(nodes[: tables[0].index] if tables else []):
        joins = node.op in VIEWS and node.parents and node.value.dim() > 1 and node.line not in layers
        before = nodes[node.parents[0]].value.shape if joins else ()
        if before[:1] == (B,) and node.value.shape[0] > B and node.value.shape[0] % B == 0:
            return node.line
    return None


def influence(bound: Bound, reading: AttentionReading | None) -> Found:
    """Every token that may influence an output must do so, and no other may."""
    moved = influence_of(bound)
    if moved is None or reading is None:
        yield Note("untried", "which token influences which")
        return
    expected = _expected_influence(bound, reading)
    if expected is None or expected.shape != moved.shape:
        yield Note("untried", "which token should influence which")
        return
    wrong = (moved != expected).nonzero()
    if not len(wrong):
        yield Note("good", f"{len(moved)} × {len(moved)} pairs")
        return
    i, j = (int(n) for n in wrong[0])
    does = "influences" if moved[i, j] else "does not influence"
    words = f"token {j} {does} the output of token {i}; by its weights it should{'' if expected[i, j] else ' not'}"
    alone = not (moved & ~torch.eye(len(moved), dtype=torch.bool)).any()
    yield Finding("tokens-alone" if alone else "influence", words, _reinterpreting_line(bound, reading))


def _reinterpreting_line(bound: Bound, reading: AttentionReading) -> int | None:
    """The first line that gives a tensor (batch, tokens, heads) the shape (batch, heads, tokens) by a view."""
    B, H, T, _ = reading.core.weights.shape
    nodes = bound.trace.nodes
    for node in (n for n in nodes if n.op in VIEWS and n.parents and n.line is not None):
        before = nodes[node.parents[0]].value.shape
        if before[:3] == (B, T, H) and node.value.shape[:3] == (B, H, T):
            return node.line
    return _line_over_tokens(bound, reading)


def _line_over_tokens(bound: Bound, reading: AttentionReading) -> int | None:
    """The first line before the softmax that takes a norm, mean or the like over the tokens of a head."""
    B, H, T, _ = reading.core.weights.shape
    nodes = bound.trace.nodes
    for node in nodes[: reading.core.nodes.softmax[0].index]:
        before = nodes[node.parents[0]].value.shape if node.parents else ()
        if node.op in REDUCES and before[:3] == (B, H, T) and node.value.shape[2:3] != (T,) and node.line is not None:
            return node.line
    return None


def _expected_influence(bound: Bound, reading: AttentionReading) -> Tensor | None:
    """(T, T) by the pattern of weights; a token always influences itself as a query."""
    visible = reading.visible
    if visible.shape[-1] != visible.shape[-2] or reading.scores is None or reading.scores.axis != "keys":
        return None
    table = visible.any(0).any(0)
    several = int((table.sum(-1) > 1).sum())
    own = torch.eye(len(table), dtype=torch.bool) & (table.sum(-1, keepdim=True) > 1)
    return table | own if several else table


def returned_tuple(bound: Bound, reading: AttentionReading | None) -> Found:
    """A result must not be a tuple of one, as a comma behind `return` makes it."""
    line = bound.case.returned_tuple_line() if isinstance(bound.returned, tuple) and len(bound.returned) == 1 else None
    if line is not None:
        yield Finding("trailing-comma", "the result is returned as a tuple of one", line)


def returned_weights(bound: Bound, reading: AttentionReading | None) -> Found:
    """Weights that are returned must be those that were used, attached to the gradient."""
    yield from judged_weights(bound, reading, usable_masks(bound, reading))


def usable_masks(bound: Bound, reading: AttentionReading | None) -> list[dict[str, Any]]:
    """One mask for every mask argument that works."""
    first = {a.name: a.first(a.meaning) for a in measured(bound, reading) if a.meaning in ("keep", "drop")}
    return [{name: tried.mask.clone()} for name, tried in first.items() if tried is not None]


def judged_weights(bound: Bound, reading: AttentionReading | None, masks: list[dict[str, Any]] | None = None) -> Found:
    """Every returned table of queries × keys, compared with the weights of the call, and of calls with these masks."""
    found = list(_judged_weights(bound, reading))
    yield from found
    for given in masks or [] if not any(isinstance(f, Finding) for f in found) else []:
        yield from _masked_weights(bound, given)


def _masked_weights(bound: Bound, given: dict[str, Any]) -> Found:
    """What is wrong with the weights that a call with a mask returns, unless a row of it is empty."""
    try:
        other = bound.called(bound.given | given)
    except Exception:  # both together are refused
        return
    finite = other.output is not None and bool(torch.isfinite(other.output).all())
    for result in _judged_weights(other, read(other)) if finite else ():
        if isinstance(result, Finding):
            yield replace(result, detail=f"with {next(iter(given))}: {result.detail}")
        elif result.kind == "untried":
            yield Note("untried", f"with {next(iter(given))}, {result.words}")


def _judged_weights(bound: Bound, reading: AttentionReading | None) -> Found:
    tables = [] if reading is None else returned_tables(bound, reading)
    unknown = [] if reading is None else _unexplained(bound, reading, [index for index, _ in tables])
    asks = any(ASKS.search(plain(p.name)) for p in call_parameters(bound.thing))
    instead = unknown or ([] if tables else _inputs_returned(bound))
    if instead and asks and _is_direct(instead[0], bound.returned):
        words = f"shape {tuple(instead[0].shape)} is not a table of queries × keys"
        yield Finding("weights-returned", words, bound.case.return_line(several=True))
        return
    if unknown or _returns_no_number(bound):
        yield Note("untried", "what is returned besides the output")
    if reading is None or not tables:
        yield Note("absent", "none are returned")
        return
    said = states_output_first(bound.case) if tables[0][0] == 0 else None
    if said is not None and isinstance(bound.returned, tuple | list):
        words = f"the weights come first, where line {said} says that the output does"
        yield Finding("weights-returned", words, bound.case.return_line(several=True))
        return
    for index, table in tables:
        if not are_used(table, reading) and _are_scores(table, bound, reading):
            yield Note("variant", "the scores are returned, not the weights")
            continue
        if not are_used(table, reading) and _is_bias(table, index, reading):
            yield Note("untried", "a bias of the scores that is returned")
            continue
        if not are_used(table, reading):
            sums = table.double().sum(-1).flatten()
            made = reading.core.trace.returned[index] if index < len(reading.core.trace.returned) else None
            inside = None if made is None else reading.core.trace.nodes[made].line
            line = bound.case.return_line(inside, several=True)
            if line is None or bound.case.returned_count(line) > 2:  # the helper gives more: the choice is made later
                line = bound.case.return_line(several=True) or line
            line = _line_beside_output(bound, reading, made) or line or reading.core.trace.last_line()
            words = f"rows of what is returned sum to {float(sums[0]):.4g}, {float(sums[1]):.4g}, …"
            if torch.allclose(sums, torch.ones_like(sums)):
                words = "their rows sum to one, but they are not the weights multiplied with the values"
            yield Finding("weights-returned", words, line)
            return
        if not _is_attached(bound, index):
            yield Finding(
                "weights-detached", "they do not require a gradient", bound.case.line_with(r"detach|\.data\b")
            )
            return
    yield Note("good", used_words([table for _, table in tables], reading))


def used_words(tables: list[Tensor], reading: AttentionReading) -> str:
    """What is said of returned weights that were used."""
    if not all(bool(torch.allclose(t.double().sum(-1), torch.ones(()).double(), atol=1e-4)) for t in tables):
        return "they are what is multiplied with the values"
    heads = reading.core.weights.shape[1]
    is_mean = heads > 1 and all(t.numel() * heads == reading.core.weights.numel() for t in tables)
    is_mean = is_mean and all(same(t.double().flatten(), reading.core.weights.mean(1).flatten(), 1e-6) for t in tables)
    return "rows sum to one" + ("; they are the mean over heads, not the weights of a head" if is_mean else "")


def _line_beside_output(bound: Bound, reading: AttentionReading, made: int | None) -> int | None:
    """The line that computes a returned table, if that is not a step on the way to the output."""
    trace = reading.core.trace
    size = 0 if bound.output is None else bound.output.numel()
    ends = [n for n in trace.returned if n is not None and n != made and trace.nodes[n].value.numel() == size]
    behind = {node.index for node in trace.ancestors(ends)}
    return None if made is None or not ends or made in behind else trace.nodes[made].line


def returned_tables(bound: Bound, reading: AttentionReading) -> list[tuple[int, Tensor]]:
    """Returned tensors, other than the output, whose last two axes are queries and keys."""
    B, H, T, S = reading.core.weights.shape
    sizes = {B * H * T * S, B * T * S, H * T * S, T * S}  # of every sample and head, or averaged
    found = [(i, leaf) for i, leaf in enumerate(leaves(bound.returned)) if leaf.shape[-2:] == (T, S)]
    return [(i, leaf) for i, leaf in found if leaf.numel() in sizes]


def _unexplained(bound: Bound, reading: AttentionReading, tables: list[int]) -> list[Tensor]:
    """Returned tensors that are neither the output, weights, an input, nor keys and values together."""
    given = [*bound.inputs]
    rest = [(i, leaf) for i, leaf in enumerate(leaves(bound.returned)) if i not in tables]
    output = next((i for i, leaf in rest if bound.gives(bound.form.result(leaf, bound.inputs))), None)
    rest = [(i, leaf) for i, leaf in rest if i != output and not any(_is_copy(leaf, other) for other in given)]
    parts = {name: {n.index for n in reading.core.behind(name)} for name in ("query", "key", "value")}
    made = {i: reading.core.trace.returned[i] for i, _ in rest if i < len(reading.core.trace.returned)}
    kept = {i: {name for name, nodes in parts.items() if made.get(i) in nodes} for i, _ in rest}
    pair = any("key" in names for names in kept.values()) and any("value" in names for names in kept.values())
    return [leaf for i, leaf in rest if not (pair and kept[i] & {"key", "value"})]


def _inputs_returned(bound: Bound) -> list[Tensor]:
    """Inputs that come back as they are, beside the output."""
    rest = leaves(bound.returned)[1:] if bound.output is not None else []
    return [leaf for leaf in rest if any(_is_copy(leaf, other) for other in bound.inputs)]


def _returns_no_number(bound: Bound) -> bool:
    """Whether a tensor of bits or whole numbers, such as a mask, is returned."""
    parts = tree_leaves(bound.returned)
    return any(isinstance(part, Tensor) and not (part.is_floating_point() or part.is_complex()) for part in parts)


def _is_direct(leaf: Tensor, returned: Any) -> bool:
    """Whether a tensor is itself a part of what was returned, not of an object in it."""
    parts = returned.values() if isinstance(returned, dict) else returned if isinstance(returned, tuple | list) else ()
    return any(part is leaf for part in parts)


def _is_copy(leaf: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, perhaps with two axes swapped."""
    if leaf.numel() != other.numel():
        return False
    turned = [leaf] if leaf.dim() < 3 else [leaf, leaf.transpose(0, 1), leaf.transpose(1, 2)]
    return any(same(x.double().reshape(other.shape), other.double()) for x in turned)


def are_used(table: Tensor, reading: AttentionReading) -> bool:
    """Whether it equals the weights, before or after dropout, of every head or averaged, in any order of the axes."""
    used = [w for w in (reading.core.weights, reading.core.softmax) if w is not None]
    forms = [f for w in used for f in (w, w.transpose(0, 1), w.mean(1), *w.unbind(1))]  # or of one head each
    held = table.double()
    return any(f.numel() == held.numel() and same(held, f.reshape(held.shape), 1e-6) for f in forms)


def _are_scores(table: Tensor, bound: Bound, reading: AttentionReading) -> bool:
    """Whether it is what the softmax was given, returned as logits by name."""
    line = bound.case.return_line(several=True)
    before = [n.operands[0] for n in reading.core.nodes.softmax if n.operands]
    return "logit" in bound.case.text(line).lower() and any(
        x.numel() == table.numel() and same(table.reshape(x.shape), x) for x in before
    )


def _is_bias(table: Tensor, index: int, reading: AttentionReading) -> bool:
    """Whether it is added to the scores, is made without the input, and hides nothing."""
    trace = reading.core.trace
    made = trace.returned[index] if index < len(trace.returned) else None
    if made is None or not bool(table.abs().max() < LARGEST_BIAS):
        return False
    before = {n.index for n in trace.ancestors([n.index for n in reading.core.nodes.softmax])}
    added = any(made in n.parents and n.op in ("add", "add_") and n.index in before for n in trace.nodes)
    return added and not any(n.op in PRODUCTS for n in trace.ancestors([made]))


def _is_attached(bound: Bound, index: int) -> bool:
    """Whether the returned table requires a gradient where the output does."""
    try:
        with bound.running(), torch.enable_grad():
            returned = leaves(bound.form.call(bound.thing, bound.inputs, bound.given))
    except Exception:  # a call with gradients fails, which has a name of its own
        return True
    return len(returned) <= index or returned[index].requires_grad or not any(leaf.requires_grad for leaf in returned)


def globals_in_place_of_arguments(bound: Bound, reading: AttentionReading | None) -> Found:
    """A size that the constructor takes must not be read from the module instead."""
    if bound.case.loaded is None or bound.output is None or not isinstance(bound.case.target, type):
        return
    taken = {constructor_role(p.name) for p in parameters_of(bound.case.target)}
    taken |= {"head_width", "value_width", "out_width"} if {"width", "heads"} <= taken else set()
    held = module_sizes(bound.case.namespace)
    read = globals_read(bound.case.target)
    places = [(bound.case.namespace, n, line) for n, line in read.items() if n in held and constructor_role(n) in taken]
    for name, line in read.items():  # a configuration of the module beside one that the constructor takes
        table = bound.case.namespace.get(name)
        unpacked = f"**{name}" in bound.case.source  # as defaults, for what a configuration leaves out
        if isinstance(table, dict) and bound.built.config is not None and not unpacked:
            places += [(table, n, line) for n in module_sizes(table)]
    for space, name, line in places:
        kept = space[name]
        space[name] = kept + 1 if space is bound.case.namespace else kept * 2
        try:
            other = bound.called(thing=bound.rebuilt())
        except Exception as error:
            words = f"with another value of {name}: {type(error).__name__}: {error}".splitlines()[0][:160]
            yield Finding("reads-globals", words, line)
            return
        finally:
            space[name] = kept
        if other.output is None or other.output.shape != bound.output.shape or not same(other.output, bound.output):
            yield Finding("reads-globals", f"another value of {name} gives another result", line)
            return
