"""Assignments: five documents with a form of their own, and anybody's class as a reference."""

import re
from pathlib import Path

import pytest
import torch
from right_forms import KeepMask
from torch import nn

from headwise.check import check
from headwise.check.assignment.comparison import find_assignment
from headwise.check.assignment.forms import ASSIGNMENTS, find_form
from headwise.check.templates import write
from headwise.check.verdict import judge_file
from headwise.cli import main
from headwise.cli.check import ASSIGNMENTS as OFFERED
from headwise.cli.source import fitted
from headwise.errors import OptionError
from headwise.textbook import HeadsAtOnce, HeadsInAList

SEEDS = Path(__file__).resolve().parents[3] / "shared" / "seeds"
DOCUMENTS = dict(
    zip(("course", "book", "homework", "interview", "handbook"), ("000", "001", "002", "003", "004"), strict=True)
)
ALL_DIFFER = {
    "form-constructor": "wrong", "form-call": "wrong", "form-return": "wrong", "form-mask": "wrong",
    "form-name": "fragile",
}  # fmt: skip


def judged(tmp_path, source, **options):
    path = tmp_path / "mine.py"
    path.write_text(source)
    return judge_file(path, thorough=False, **options)


def changed(source, *changes):
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return source


def form_findings(report):
    asked = ("form-", "differs-")
    return {finding.name: finding.severity for finding in report.findings if finding.name.startswith(asked)}


def detail(report, name):
    return next(finding.detail for finding in report.findings if finding.name == name)


@pytest.fixture
def defined():
    """The class that a solution defines."""

    def run(source):
        space = {}
        exec(source, space)  # noqa: S102 - our own text
        return next(v for v in space.values() if isinstance(v, type) and issubclass(v, nn.Module))

    return run


def test_the_command_line_offers_every_assignment():
    assert tuple(ASSIGNMENTS) == OFFERED == tuple(DOCUMENTS)


@pytest.mark.parametrize("form", ASSIGNMENTS)
def test_the_solution_of_an_assignment_is_right_in_its_own_form(form, tmp_path):
    report = judged(tmp_path, find_form(form).solution(), form=form)
    assert report.verdict in ("right", "variant"), report
    assert report.findings == []


@pytest.mark.parametrize(
    ("form", "build", "inputs", "shapes"),
    [
        ("course", lambda c: c(d_model=512, num_heads=8), [(2, 10, 512)], [(2, 10, 512), (2, 8, 10, 10)]),
        ("book", lambda c: c(96, 48, 64, 0.1, 12), [(2, 50, 96)], [(2, 50, 48)]),
        (
            "homework",
            lambda c: c(d_in=768, d_out=768, context_length=1024, dropout=0.1, num_heads=12, qkv_bias=False),
            [(4, 100, 768)],
            [(4, 100, 768)],
        ),
        ("interview", lambda c: c(512, 8), [(2, 10, 512)] * 3, [(2, 10, 512)]),
        ("handbook", lambda c: c(d_model=512, num_heads=8), [(2, 10, 512)] * 3, [(2, 10, 512), (2, 8, 10, 10)]),
    ],
    ids=ASSIGNMENTS,
)
def test_a_solution_runs_the_example_calls_of_its_document(form, build, inputs, shapes, defined):
    layer = build(defined(find_form(form).solution()))
    returned = layer(*(torch.randn(shape) for shape in inputs))
    assert [tuple(t.shape) for t in (returned if isinstance(returned, tuple) else (returned,))] == shapes


def test_the_interview_solution_takes_the_triangle_of_its_example_and_survives_an_empty_row(defined):
    layer = defined(find_form("interview").solution())(12, 3)
    x = torch.randn(2, 5, 12)
    causal, changed_last = (
        layer(q, q, q, torch.tril(torch.ones(5, 5))) for q in (x, torch.cat([x[:, :4], x[:, :1]], 1))
    )
    torch.testing.assert_close(causal[:, :4], changed_last[:, :4])
    nothing = layer(x, x, x, torch.zeros(5, 5))
    torch.testing.assert_close(nothing, layer.W_o.bias.expand(2, 5, 12))
    nothing.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize(
    ("written", "asked", "expected"),
    [
        ("book", "course", ALL_DIFFER),
        ("book", "handbook", ALL_DIFFER),
        ("book", "homework", {"form-name": "fragile"}),
        ("homework", "book", {"form-name": "fragile"}),
        ("course", "handbook", {"form-call": "wrong"}),
        ("course", "book", {k: v for k, v in ALL_DIFFER.items() if k != "form-call"}),
        ("interview", "course", {"form-call": "wrong", "form-return": "wrong"}),
        ("interview", "handbook", {"form-return": "wrong", "form-name": "fragile"}),
        ("handbook", "interview", {"form-return": "wrong", "form-name": "style"}),
    ],
)
def test_a_right_class_of_another_form_gets_exactly_its_deviations(written, asked, expected, tmp_path):
    assert form_findings(judged(tmp_path, find_form(written).solution(), form=asked)) == expected


KINDS = ("constructor", "width", "call", "return", "mask", "name")
CONSTRUCTOR, WIDTH, CALL, RETURN, MASK, NAME = (f"form-{part}" for part in KINDS)
TWO = "self, d_model, num_heads):"


@pytest.mark.parametrize(
    ("form", "old", "new", "name", "severity", "words"),
    [
        ("course", "mask == 0", "mask != 0", MASK, "wrong", "mask: 1 hides a key, 0 keeps it"),
        ("course", "mask == 0", "~mask", MASK, "fragile", "(T, T) floats, raises TypeError"),
        ("interview", "mask == 0", "~mask", MASK, "wrong", "(T, T) floats, raises TypeError"),
        ("course", "output, weights\n", "output, weights.mean(1)\n", RETURN, "wrong",
         "a tensor (53 samples, 5 tokens, 5 tokens)"),
        ("handbook", "output, weights\n", "weights, output\n", RETURN, "wrong",
         "tuple of a tensor (53 samples, 4 heads, 5 tokens, 5 tokens)"),
        ("interview", TWO, "self, num_heads, d_model):", CONSTRUCTOR, "wrong", "width 4 is not a multiple of 32"),
        ("interview", TWO, "self, a, b):\n        d_model, num_heads = a, b", CONSTRUCTOR, "fragile", "a call by name"),
        ("interview", TWO, "self, d_model, head_dim):\n        num_heads = d_model // head_dim", CONSTRUCTOR, "wrong",
         "makes 8 heads where 4 were asked for"),
        ("course", TWO, "self, dim, heads):\n        d_model, num_heads = dim, heads", CONSTRUCTOR, "wrong",
         "missing a required argument: 'dim'"),
        ("course", TWO, "self, num_heads, d_model):", CONSTRUCTOR, "fragile", "a call by position"),
        ("homework", "qkv_bias=False", "qkv_bias=True", CONSTRUCTOR, "wrong", "qkv_bias is True by default"),
        ("book", "nn.Linear(d_out, d_out)", "nn.Linear(d_out, d_in)", WIDTH, "wrong",
         "width 36 for d_in=32, d_out=36 and 4 heads; here it is 32 wide"),
        ("interview", "Q, K, V, mask", "V, K, Q, mask", CALL, "wrong", "taken in other roles"),
        ("interview", "mask=None", "mask", CALL, "wrong", "a call with Q, K, V alone fails"),
        ("book", "W_query", "to_q", NAME, "fragile", "W_query, not found here among to_q"),
        ("course", "split_heads", "cut", NAME, "fragile", "split_heads, not found here"),
        ("handbook", "class MultiHeadAttention", "class MHA", NAME, "fragile", "class MultiHeadAttention, here MHA"),
    ],
)  # fmt: skip
def test_a_deviation_is_named_with_what_was_found_and_its_line(form, old, new, name, severity, words, tmp_path):
    report = judged(tmp_path, changed(find_form(form).solution(), (old, new)), form=form)
    assert form_findings(report) == {name: severity}, report
    assert words in detail(report, name)
    assert report.exit_code == (severity == "wrong")
    finding = next(finding for finding in report.findings if finding.name == name)
    written = name == MASK and "mask" in new  # otherwise nothing applies one
    assert finding.text.startswith("return" if name == RETURN else ("def", "class")) or (
        written and new in finding.text
    )


def test_a_mask_mistake_with_a_name_of_its_own_is_told_once(tmp_path):
    masks = "scores = scores.masked_fill(self.mask[:T, :T].bool(), -math.inf)"
    report = judged(tmp_path, changed(find_form("book").solution(), (masks, "pass")), form="book")
    assert [finding.name for finding in report.wrong] == ["causal-ignored"]
    fill = "scores.masked_fill(hidden, torch.finfo(scores.dtype).min)"
    lost = (f"scores = {fill}", fill), ("weights = weights.masked_fill(hidden, 0.0)", "pass")
    report = judged(tmp_path, changed(find_form("interview").solution(), *lost), form="interview")
    assert [finding.name for finding in report.wrong] == ["mask-discarded"]


def test_an_inverted_mask_is_told_beside_heads_that_are_merged_wrongly(tmp_path):
    source = changed(
        find_form("course").solution(),
        ("mask == 0", "mask == 1"),
        (".transpose(1, 2).flatten(2))", ".reshape(x.shape))"),
    )
    report = judged(tmp_path, source, form="course")
    assert {finding.name for finding in report.wrong} == {"merge-view", "form-mask"}, report


def test_dropout_that_never_stops_is_not_taken_for_a_mask_that_does_not_work(tmp_path):
    always = ("weights = scores.softmax(dim=-1)", "weights = torch.dropout(scores.softmax(dim=-1), 0.1, True)")
    report = judged(tmp_path, changed(find_form("interview").solution(), always), form="interview")
    assert [finding.name for finding in report.wrong] == ["dropout-in-eval"]


def test_an_output_projection_whose_result_is_not_assigned_is_named_at_its_line(tmp_path):
    last = "return self.W_o(self.combine_heads(weights @ value))"
    lost = "out = self.combine_heads(weights @ value)\n        self.W_o(out)\n        return out"
    first = judged(tmp_path, changed(find_form("interview").solution(), (last, lost))).wrong[0]
    assert (first.name, first.text.strip()) == ("no-out-proj", "self.W_o(out)")
    assert "the result of self.W_o(out) is not assigned" in first.detail


def test_a_causal_mask_that_the_form_asks_for_and_nobody_mentions_is_missing(tmp_path):
    solution = find_form("book").solution()
    lines = [line for line in solution.splitlines() if "mask" not in line]
    report = judged(tmp_path, "\n".join(lines), form="book")
    assert "a token sees later ones" in detail(report, MASK)


def test_names_that_the_homework_guide_also_uses_are_accepted(tmp_path):
    short = [("W_query", "W_q"), ("W_key", "W_k"), ("W_value", "W_v"), ("out_proj", "proj")]
    report = judged(tmp_path, changed(find_form("homework").solution(), *short), form="homework")
    assert form_findings(report) == {}


WRAPPER = """
import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, qkv_bias=False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d_in, d_out, bias=qkv_bias) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("future", torch.ones(context_length, context_length).triu(1).bool())

    def forward(self, x):
        T = x.shape[1]
        scores = self.q(x) @ self.k(x).mT / self.k.out_features**0.5
        return self.dropout(scores.masked_fill(self.future[:T, :T], -torch.inf).softmax(-1)) @ self.v(x)


class MultiHeadedAttentionWrapper(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        made = (CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads))
        self.heads = nn.ModuleList(made)

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)
"""


def test_the_list_of_heads_fits_the_book_that_shows_one_and_nothing_else(tmp_path):
    assert judged(tmp_path, WRAPPER).verdict == "variant"
    fits = judged(tmp_path, WRAPPER, form="book")
    assert (fits.verdict, form_findings(fits)) == ("variant", {})
    assert any("as in the book section" in words for words in fits.variants)
    assert judged(tmp_path, WRAPPER, form="homework").verdict == "wrong"


@pytest.mark.parametrize("form", ["book", "homework"])
def test_dropout_on_the_output_is_not_where_the_document_has_it(form, tmp_path):
    on_weights, on_heads = "(self.dropout(weights) @ value)", "self.dropout(weights @ value)"
    report = judged(tmp_path, changed(find_form(form).solution(), (on_weights, on_heads)), form=form)
    assert report.cause == "form-dropout", report
    assert report.wrong[0].text.startswith("return self.out_proj(self.dropout")
    assert judged(tmp_path, changed(find_form(form).solution(), (on_weights, on_heads))).verdict == "variant"


def test_a_class_that_cannot_be_called_otherwise_is_judged_by_the_example_of_the_document(tmp_path):
    source = changed(
        find_form("interview").solution(),
        ("forward(self, Q, K, V, mask=None)", "forward(self, Q, K, V, secret, mask=None)"),
        ("query = self", "Q = Q + secret['a word that nobody guesses']\n        query = self"),
    )
    assert judged(tmp_path, source).verdict == "unknown"
    report = judged(tmp_path, source, form="interview")
    assert report.cause == "form-call"
    assert "missing 1 required positional argument: 'secret'" in detail(report, "form-call")


def test_a_function_is_not_the_class_that_was_asked_for():
    def attention(query, key, value, w_q, w_k, w_v, w_o, num_heads):
        q, k, v = ((x @ w).unflatten(-1, (num_heads, -1)).transpose(1, 2)
                   for x, w in ((query, w_q), (key, w_k), (value, w_v)))  # fmt: skip
        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2) @ w_o

    report = check(attention, form="interview")
    assert "this is a function" in detail(report, "form-constructor")


@pytest.mark.parametrize("form", DOCUMENTS)
def test_the_code_of_the_document_itself_has_its_form(form):
    found = sorted(SEEDS.glob(f"{DOCUMENTS[form]}_*.txt"))
    if not found:
        pytest.skip("the documents are not beside this repository")
    report = judge_file(found[0], thorough=False, form=form)
    assert form_findings(report) == {}, report
    mistakes = {"missing-import", "undefined-name"} if form == "course" else set()
    assert {finding.name for finding in report.wrong} == mistakes


# References.


def against(tmp_path, source, reference, **options):
    other = tmp_path / "other.py"
    other.write_text(reference)
    return judged(tmp_path, source, against=str(other), **options)


HANDBOOK = find_form("handbook").solution()
OUTPUT = re.compile(
    r"output\[0, \d, \d\] is -?\d+\.\d{4}, the reference gives -?\d+\.\d{4} \(\d+ of 8480 numbers differ"
)


@pytest.mark.parametrize(
    ("mine", "theirs", "fragile"),
    [
        (HANDBOOK, HANDBOOK, {}),
        (changed(HANDBOOK, ("W_q", "query_layer"), ("W_o", "merge")), HANDBOOK, {}),
        (changed(HANDBOOK, ("W_q", "to_q"), ("nn.Linear(d_model, d_model)", "nn.Linear(d_model, d_model, bias=False)")),
         HANDBOOK, {"form-parameters": "fragile"}),
        (changed(HANDBOOK, ("query, key, value, mask", "value, key, query, mask")), HANDBOOK, {"form-call": "fragile"}),
        (changed(HANDBOOK, (TWO, "self, num_heads, d_model):")), HANDBOOK, {"form-constructor": "fragile"}),
        (changed(HANDBOOK, (TWO, "self, dim, heads):\n        d_model, num_heads = dim, heads")), HANDBOOK,
         {"form-constructor": "fragile"}),
        (changed(write("einsum"), (", max_len=16", ""), ("self.max_len = max_len", "pass")),
         changed(find_form("course").solution(), ("output, weights\n", "output\n")),
         {"form-constructor": "fragile", "form-parameters": "fragile"}),
    ],
    ids=["itself", "other layers", "no bias", "other order", "swapped", "other names", "another layout of weights"],
)  # fmt: skip
def test_a_class_that_computes_what_the_reference_computes_is_right(mine, theirs, fragile, tmp_path):
    report = against(tmp_path, mine, theirs)
    assert report.exit_code == 0, report
    assert form_findings(report) == fragile
    assert any(words.startswith("equals ") for words in report.good)


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ([(" / math.sqrt(self.d_k)", "")], "differs-from-reference", "returned[0][0, 0, 0] is"),
        ([("output, weights\n", "output, weights * 2\n")], "differs-from-reference", "returned[1][0, 0, 0, 0] is"),
        ([("output, weights\n", "output\n")], RETURN, "this returns a tensor (53, 5, 32)"),
        ([("mask == 0", "mask != 0")], MASK, "here mask: 1 hides a key, 0 keeps it"),
        ([("mask == 0", "mask.unsqueeze(1) == 0")], MASK, "with mask of shape (B,1,T,S) and type bool, this raises"),
        ([("value, mask=None", "value"), ("None if mask is None else mask == 0", "None")], MASK,
         "this takes no such mask"),
        ([("scores.softmax(dim=-1)", "scores.softmax(dim=-1) * (2 if self.training else 1)")],
         "differs-from-reference", "in training mode, returned[0][0, 0, 0] is"),
        ([("scores = q", "assert self.d_k == 8\n        scores = q")], "differs-from-reference",
         "with 3 heads of 9, this raises AssertionError"),
    ],
    ids=["scale", "weights", "return", "inverted mask", "mask shape", "no mask", "training", "one size"],
)  # fmt: skip
def test_a_difference_from_the_reference_is_named_with_numbers(changes, name, words, tmp_path):
    report = against(tmp_path, changed(HANDBOOK, *changes), HANDBOOK)
    assert report.verdict == "wrong"
    assert words in detail(report, name)


def test_the_first_differing_index_is_shown_with_both_values(tmp_path):
    right = find_form("interview").solution()
    report = against(tmp_path, changed(right, (" / math.sqrt(self.d_k)", "")), right)
    assert OUTPUT.search(detail(report, "differs-from-reference"))


def test_a_causal_reference_and_dropout_are_part_of_the_comparison(tmp_path):
    fill = 'att.masked_fill(self.bias[:T, :T] == 0, float("-inf"))'
    idle = changed(write("fused"), (fill, "att"), ("torch.tril", ""),
                   ("CausalSelfAttention", "SelfAttention"), ("bias", "table"))  # fmt: skip
    report = against(tmp_path, idle, write("fused"))
    assert "causal in the reference, full here" in detail(report, MASK)
    report = against(tmp_path, changed(write("separate"), ("self.dropout(weights)", "weights")), write("separate"))
    assert "only the reference is random" in detail(report, "differs-from-reference")


@pytest.mark.parametrize("style", ["fused", "listed", "einsum"])
def test_the_solution_for_a_reference_has_its_signature_and_agrees_with_it(style, tmp_path):
    reference = write(style)
    shown = against(tmp_path, write("separate"), reference, solution=True).solution
    report = against(tmp_path, shown, reference)
    assert report.exit_code == 0, report
    assert form_findings(report) == {}
    assert any(words.startswith("equals ") for words in report.good)


def test_lines_are_those_of_the_learners_file(tmp_path):
    function = """
import math

def attention(Q, K, V, mask=None):
    scores = Q @ K.transpose(-2, -1) / math.sqrt(Q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 1, -math.inf)
    return scores.softmax(-1) @ V
"""
    report = judged(tmp_path, function, form="interview")
    lines = {finding.name: finding.text for finding in report.wrong}
    assert lines == {
        "form-constructor": "def attention(Q, K, V, mask=None):",
        "form-mask": "scores = scores.masked_fill(mask == 1, -math.inf)",
    }
    fragment = changed(METHOD, ("x, mask", "query, mask"))
    report = judged(tmp_path, fragment, form="course")
    assert all(finding.text in fragment for finding in report.findings if finding.line is not None)
    assert all(finding.line <= len(fragment.splitlines()) for finding in report.findings)


METHOD = """
def forward(self, x, mask=None):
    B, T, E = x.shape
    q, k, v = (m.view(B, T, self.num_heads, -1).transpose(1, 2) for m in (self.W_q(x), self.W_k(x), self.W_v(x)))
    weights = (q @ k.transpose(-2, -1) / self.d_k**0.5).softmax(-1)
    return self.W_o((weights @ v).transpose(1, 2).reshape(B, T, E))
"""


def test_the_class_that_the_form_asks_for_is_judged_before_others(tmp_path):
    other = changed(find_form("interview").solution(), ("class MultiHeadAttention", "class MHA2"))
    report = judged(tmp_path, find_form("interview").solution() + other, form="interview")
    assert (report.exit_code, report.others) == (0, ["MHA2"])
    assert judged(tmp_path, other, form="interview").subject.startswith("MHA2")


def test_a_report_that_passes_says_what_it_was_compared_with(tmp_path):
    solution = find_form("interview").solution()
    shown = " ".join(str(judged(tmp_path, solution, form="interview")).split())
    assert (
        "against the interview question: MultiHeadAttention(d_model, num_heads) · forward(Q, K, V, mask=None)" in shown
    )
    assert "✓ fits the interview question: constructor, call, return value and mask*" in shown
    shown = " ".join(str(against(tmp_path, solution, solution)).split())
    assert "✓ gives what the reference MultiHeadAttention gives, with the same parameters*" in shown


def test_other_names_in_the_call_are_shown_at_the_call(tmp_path):
    other = changed(find_form("course").solution(), ("x, mask=None):", "inputs, mask=None):\n        x = inputs"))
    report = judged(tmp_path, other, form="course")
    (found,) = (finding for finding in report.findings if finding.name == NAME)
    assert found.text.startswith("def forward(self, inputs")


def test_classes_and_objects_are_references_too():
    assert "equals KeepMask" in " ".join(check(KeepMask, against=KeepMask).good)
    assert detail(check(HeadsInAList, against=HeadsAtOnce), "differs-from-reference") == (
        "the output projection is only in the reference"
    )
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    report = check(layer, against=nn.MultiheadAttention(32, 4, batch_first=True))
    assert any(words.startswith("equals MultiheadAttention") for words in report.good)


NO_SOFTMAX = """
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()

    def forward(self, x):
        raise RuntimeError("closed today")
"""


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (None, "", "there is no reference file"),
        (HANDBOOK, ":Missing", "defines no 'Missing'; it defines MultiHeadAttention"),
        (
            NO_SOFTMAX,
            ":MultiHeadAttention",
            "the reference MultiHeadAttention cannot be called: RuntimeError: closed today",
        ),
        ("class A(:\n", "", "is not valid Python: invalid syntax, line 1"),
        ("x = 1\n", "", "looks like attention; write it as other.py:Class"),
    ],
    ids=["no file", "no class", "not callable", "syntax", "no attention"],
)
def test_a_reference_that_cannot_be_used_is_answered_in_words(text, name, words, tmp_path):
    if text is not None:
        (tmp_path / "other.py").write_text(text)
    report = judged(tmp_path, HANDBOOK, against=f"{tmp_path / 'other.py'}{name}")
    assert report.verdict == "unknown"
    assert words in report.doubts[0]


def test_wrong_options_are_refused(tmp_path, capsys):
    with pytest.raises(OptionError, match="no assignment is called 'novel'. Known: course, book, homework, interview"):
        check(KeepMask, form="novel")
    with pytest.raises(OptionError, match="either form or against"):
        find_assignment("book", KeepMask)
    with pytest.raises(OptionError, match="3 cannot be a reference"):
        check(KeepMask, against=3)
    with pytest.raises(OptionError, match="where this KeepMask does not exist"):
        check(tmp_path / "mine.py", against=KeepMask(32, 4))
    with pytest.raises(SystemExit):
        main(["check", "mine.py", "--form", "novel"])
    assert "argument --form: there is no 'novel'. Known: course, book" in capsys.readouterr().err


def test_the_command_prints_the_solution_of_the_form_even_for_a_file_that_does_not_run(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("class MultiHeadAttention(\n")
    assert main(["check", str(path), "--form", "handbook", "--solution"]) == 1
    assert fitted(HANDBOOK).strip() in capsys.readouterr().out
