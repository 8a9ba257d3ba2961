"""The generated mistakes: styles that are right, mutants that keep their lines, and a truth that can be trusted."""

import ast

import pytest
import torch
from mutants import run
from mutants.compare import original
from mutants.conventions import _heads
from mutants.drivers import DRIVERS, SIZES, Inputs, source_of, triangle
from mutants.expected import accepted_lines, fits
from mutants.mutate import Mutant, mutants, mutate, pairs
from mutants.operators import OPERATORS
from mutants.pool import FAILED, forked
from mutants.truth import truth

from headwise import reference
from headwise.reference import Linear

pytestmark = pytest.mark.usefixtures("one_thread")


def projections(style, index):
    """The projections of a style as the reference takes them, and its number of key and value heads."""
    module = original(style).modules[index]
    slots = DRIVERS[style].slots(module, SIZES[index])
    rows = {role: torch.cat([weight for weight, _ in slots[role]]) for role in slots}
    bias = {role: None if slots[role][0][1] is None else torch.cat([b for _, b in slots[role]]) for role in "qkv"}
    names = dict(module.named_parameters())
    last = [name for name in names if name.endswith(("bias", "b_O"))]  # every style makes its output layer last
    output = names[last[-1]] if last else None
    linear = [Linear(rows[role], bias[role]) for role in "qkv"]
    return (*linear, Linear(rows["o"].T, output)), _heads(slots, "k", SIZES[index])[0]


@pytest.mark.parametrize("style", [style for style in DRIVERS if not DRIVERS[style].rotary])
def test_style_equals_the_reference(style):
    driver = DRIVERS[style]
    for index, size in enumerate(SIZES[:2]):
        call = next(iter(driver.calls(Inputs(size))))
        given = [x.transpose(0, 1) if style == "batch_second" else x for x in call.inputs]
        query, key, value = (given[0], given[-1], given[-1]) if len(given) < 3 else given
        found, heads = projections(style, index)
        visible = triangle(query.shape[1], key.shape[1]) if driver.causal else None
        expected, _ = reference.multi_head_attention(query, key, value, found, size.H, heads, visible=visible)
        output = original(style).seen[index][call.name].outputs[0]
        output = output.transpose(0, 1) if style == "batch_second" else output
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("style", DRIVERS)
def test_style_answers_every_call_and_keeps_its_inputs(style):
    seen = [one for sized in original(style).seen for one in sized.values()]
    assert not [one.error for one in seen if one.error]
    assert all(one.steady and one.untouched for one in seen)
    assert truth(style, source_of(style)).label == "equivalent"


def test_mutants_are_the_same_every_time_and_each_text_is_new():
    first, again = mutate(source_of("sdpa"), "sdpa"), mutate(source_of("sdpa"), "sdpa")
    assert first == again
    assert len({mutant.source for mutant in first} | {source_of("sdpa")}) == len(first) + 1
    assert pairs("sdpa", 3, seed=1) == pairs("sdpa", 3, seed=1)


def test_every_operator_finds_places():
    used = {mutant.operator for style in ("separate", "einsum", "head_list") for mutant in mutants(style)}
    assert used == set(OPERATORS)


def test_lines_that_were_not_changed_keep_their_numbers():
    old = source_of("separate").splitlines()
    for mutant in mutants("separate"):
        new = mutant.source.splitlines()
        assert len(new) == len(old)
        changed = {number for number, (a, b) in enumerate(zip(old, new, strict=True), 1) if a != b}
        assert changed
        assert changed <= set(mutant.lines)
        ast.parse(mutant.source)


KNOWN = [
    ("separate", "/ math.sqrt(self.d_k)", "/ math.sqrt(self.d_model)", "wrong"),
    ("separate", "dim=-1", "dim=-2", "wrong"),
    ("separate", "scores = scores.masked_fill", "scores.masked_fill", "wrong"),
    ("separate", "attn = torch.softmax(scores, dim=-1)", "attn = torch.softmax(scores, dim=-1).detach()", "wrong"),
    ("separate", "attn = self.dropout(attn)", "attn = torch.softmax(self.dropout(scores), -1)", "wrong"),
    ("separate", "if mask is not None", "if mask", "wrong"),
    ("separate", "dropout=0.1", "dropout=-0.1", "wrong"),
    ("separate", "mask == 0", "mask == 1", "convention"),
    ("separate", "attn = self.dropout(attn)", "pass", "fragile"),
    ("separate", "-1e9", "-1e4", "fragile"),
    ("separate", "-1e9", "-1e-9", "wrong"),
    ("separate", "        assert d_model % num_heads == 0, ", "        ", "equivalent"),
    ("separate", "batch_size = q.size(0)", "batch_size = k.size(0)", "equivalent"),
    ("separate", "        super().__init__()\n", "", "not runnable"),
    ("separate", "import math\n", "", "not runnable"),
    ("separate", ".contiguous()", "", "wrong"),
    ("fused_causal", "q, k, v = self.c_attn", "k, q, v = self.c_attn", "convention"),
    ("fused_causal", "torch.ones(block_size, block_size)", "torch.ones(block_size, block_size), 1", "wrong"),
    ("fused_causal", 'self.register_buffer("mask", ', "self.mask = (", "fragile"),
    ("rearranged", "(h d) -> b h n d", "(d h) -> b h n d", "convention"),
    ("rearranged", "b n (h d)", "b n (d h)", "convention"),
    ("head_list", "nn.ModuleList(", "list(", "wrong"),
    ("grouped", "k = k.repeat_interleave(self.num_groups, dim=1)", "k = k.repeat(1, self.num_groups, 1, 1)", "wrong"),
    ("homework", "return output, attention", "return attention, output", "convention"),
    ("homework", "return output, attention", "return output", "convention"),
    ("key_padding", "if need_weights", "if False", "wrong"),
    ("cross", "mask[:, None, None, :]", "mask[None, None]", "convention"),
    ("cross", "mask[:, None, None, :]", "mask[:, None, :, None]", "wrong"),
    ("kv_cache", "+ offset", "", "wrong"),
    ("einsum", "causal: bool = False", "causal: bool = True", "convention"),
    ("rotary", "self.wo(out)", "nn.Linear(C, C)(out)", "wrong"),
]  # fmt: skip


@pytest.mark.parametrize(("style", "old", "new", "label"), KNOWN, ids=[f"{k[0]} {k[1]} {k[2]}"[:60] for k in KNOWN])
def test_truth_is_known(style, old, new, label):
    source = source_of(style)
    assert old in source
    found = truth(style, source.replace(old, new, 1))
    assert found.label == label, found


def test_cause_is_accepted_by_its_subject():
    scale = next(m for m in mutants("separate") if m.before.strip() == "/" and m.after.strip() == "*")
    assert fits(scale, "another result", "scale-multiplied")
    assert not fits(scale, "another result", "dropout-in-eval")
    assert not fits(scale, "another result", None)


def test_line_is_accepted_where_it_was_changed_and_where_that_shows():
    unset = next(m for m in mutants("cross") if m.operator == "delete-statement" and "self.heads = heads" in m.before)
    reason = truth("cross", unset.source).reason
    assert accepted_lines(unset, reason) == {unset.line - 1, unset.line, unset.line + 1, 21}
    wrong = next(
        m for m in mutants("separate") if m.operator == "wrong-axis" and "softmax" in m.source.split("\n")[m.line - 1]
    )
    assert accepted_lines(wrong, "another result") == {wrong.line}


def test_child_that_fails_says_so_and_one_that_takes_too_long_gives_nothing():
    def work(task):
        if task == "loop":
            while True:
                pass
        return 1 / task

    answers = dict(forked(work, [2, 0, "loop"], workers=2, seconds=0.5))
    assert answers[0] == 0.5
    assert "ZeroDivisionError" in answers[1][FAILED]
    assert answers[2] is None


def test_checker_judges_mutants_without_a_fault_of_its_own():
    chosen = [m for m in mutants("sdpa") if m.operator == "swap-attribute"][:1]
    labels = [truth(mutant.style, mutant.source) for mutant in chosen]
    plain = Mutant("sdpa", "original", 0, (), "", "", source_of("sdpa"))
    judged = run.judgments([*zip(chosen, labels, strict=True), (plain, truth("sdpa", plain.source))], workers=1)
    assert not [j.said["doubts"] for j in judged if run.SHOWN["no-answer"](j)]
    assert judged[-1].verdict in ("right", "variant", "partial")
    assert set(run.rates(judged)) >= {"wrong called RIGHT", "right called WRONG", "cause", "line"}
