"""The checker's own parts, one by one."""

import json
import types

import pytest
import torch
from right_forms import KeepMask
from torch import nn

from headwise import reference
from headwise.check import Report, check, proof
from headwise.check.arguments import CallSizes, value_for
from headwise.check.assignment.forms import find_form
from headwise.check.code import stubs
from headwise.check.fits import Fit, fit, role
from headwise.check.magic import check_cell, last_class
from headwise.check.reading import pattern
from headwise.check.templates import write
from headwise.check.trace import Trace
from headwise.check.vocabulary import call_role, constructor_role


def test_fit_finds_a_linear_map_and_refuses_another():
    x = torch.randn(60, 7, dtype=torch.float64)
    weight, bias = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    found = fit(x, x @ weight.T + bias)
    assert found.exact
    torch.testing.assert_close(found.weight, weight)
    assert not fit(x, (x @ weight.T).tanh()).exact


def test_role_finds_rows_of_a_fused_transposed_parameter_and_their_factor():
    parameter = torch.randn(6, 18, dtype=torch.float64)
    solved = Fit(0.5 * parameter[:, 6:12].T, torch.zeros(6, dtype=torch.float64), 0.0)
    found = role(solved, {"fused": parameter, "other": torch.randn(6, 6).double()}, 3)
    assert (found.names, found.plain) == (["fused"], False)
    assert found.factor == pytest.approx(0.5)


def test_role_of_the_identity_is_plain():
    assert role(Fit(torch.eye(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64), 0.0), {}, 3).plain


@pytest.mark.parametrize(
    ("name", "meaning"),
    [("d_model", "width"), ("embed_size", "width"), ("nEmbd", "width"), ("h", "heads"),
     ("num_attention_heads", "heads"),
     ("n_kv_heads", "kv_heads"), ("head_dim", "head_width"), ("d_k", "head_width"), ("context_length", "context"),
     ("attn_pdrop", "dropout"), ("qkv_bias", "bias"), ("frobnicate", None), ("d_out", "out_width"),
     ("output_size", "out_width"), ("out_features", "out_width"), ("d_in", "width"), ("d_v", "value_width"),
     ("value_dim", "value_width"), ("dim_head", "head_width"), ("key_size", "width"), ("num_hiddens", "width"),
     ("num_key_value_heads", "kv_heads"), ("max_seq_length", "context"), ("ctx_len", "context"), ("nhead", "heads")],
)  # fmt: skip
def test_constructor_names_have_meanings(name, meaning):
    assert constructor_role(name) == meaning


@pytest.mark.parametrize(
    ("name", "meaning"),
    [("Q", "query"), ("keys", "key"), ("v", "value"), ("x", "self"), ("hidden_states", "self"),
     ("encoder_output", "memory"), ("src_mask", "mask"), ("valid_lens", "mask"), ("freqs_cis", "rotary"),
     ("frobnicate", None)],
)  # fmt: skip
def test_call_names_have_meanings(name, meaning):
    assert call_role(name) == meaning


def test_output_and_value_widths_are_those_of_the_input_and_the_keys_unless_set():
    usual, other = CallSizes(), CallSizes(O=24, V=6)
    assert (value_for("out_width", usual), value_for("value_width", usual)) == (usual.E, usual.D)
    assert (value_for("out_width", other), value_for("value_width", other)) == (24, 6)


def test_plain_recipe_is_the_reference():
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    maps = tuple(reference.Linear(torch.randn(12, 12, dtype=torch.float64)) for _ in range(4))
    ours = proof.attention(x, x, x, maps, 3, proof.Recipe())
    theirs = reference.multi_head_attention(x, x, x, maps, 3)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "recipe",
    [proof.Recipe(split="view"), proof.Recipe(scale=1.0), proof.Recipe(axis="queries"),
     proof.Recipe(axis="heads"), proof.Recipe(axis="batch"), proof.Recipe(after_factor=0.5),
     proof.Recipe(masked_after=True), proof.Recipe(merge="view"), proof.Recipe(residual=1.0)],
    ids=lambda recipe: recipe.deviations[0],
)  # fmt: skip
def test_every_mutant_differs_from_the_reference(recipe):
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    maps = tuple(reference.Linear(torch.randn(12, 12, dtype=torch.float64)) for _ in range(4))
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    right = reference.multi_head_attention(x, x, x, maps, 3, visible=visible)[0]
    wrong = proof.attention(x, x, x, maps, 3, recipe, visible=visible)[0]
    assert (right - wrong).nan_to_num().abs().max() > 1e-3


ONES = torch.ones(2, 3, 5, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("table", "name"),
    [(ONES, "full"), (ONES.tril(), "causal"), (ONES.tril(-1), "strict"), (ONES.tril(1), "ahead"),
     (ONES.triu(), "future"), (ONES.triu(1), "later"), (ONES.tril().triu(-1), "causal and more"),
     (ONES ^ torch.eye(5, dtype=torch.bool), "other")],
    ids=["full", "causal", "strict", "ahead", "future", "later", "window", "not itself"],
)  # fmt: skip
def test_pattern_of_visible_keys_is_named(table, name):
    assert pattern(table) == name


def test_einops_stand_in_splits_merges_repeats_and_reduces():
    x = torch.arange(24.0).view(2, 3, 4)
    split = stubs.rearrange(x, "b n (h d) -> b h n d", h=2)
    assert torch.equal(split, x.view(2, 3, 2, 2).transpose(1, 2))
    assert torch.equal(stubs.rearrange(split, "b h n d -> b n (h d)"), x)
    assert stubs.repeat(x, "b n d -> b k n d", k=5).shape == (2, 5, 3, 4)
    assert torch.equal(stubs.reduce(x, "b n d -> b d", "mean"), x.mean(1))
    assert torch.equal(stubs.rearrange(x, "... d -> d ..."), x.permute(2, 0, 1))
    assert torch.equal(stubs.einsum(x, x, "b n d, b m d -> b n m"), x @ x.mT)


def test_trace_sees_products_inside_fused_attention_and_the_line():
    q = torch.randn(2, 3, 5, 4)
    with torch.no_grad(), Trace(__file__) as trace:
        nn.functional.scaled_dot_product_attention(q, q, q)
    assert [node.op for node in trace.nodes].count("bmm") == 2
    assert all(node.line is not None for node in trace.nodes)


def test_report_survives_json():
    report = check(KeepMask)
    again = Report.from_dict(json.loads(json.dumps(report.to_dict())))
    assert str(again) == str(report)


class Shell:
    """As much of a notebook as the magic needs."""

    def __init__(self):
        self.user_ns = {"nn": nn, "KeepMask": KeepMask}

    def run_cell(self, cell):
        exec(cell, self.user_ns)  # noqa: S102


def test_magic_runs_the_cell_and_judges_its_class(capsys):
    check_cell(Shell(), "", "class MyAttention(KeepMask):\n    pass\n\nclass Other:\n    pass")
    assert "RIGHT" in capsys.readouterr().out


def test_magic_names_the_cell_and_the_line_in_it(capsys, tmp_path):
    class NumberedShell(Shell):
        def __init__(self):
            super().__init__()
            self.user_ns["In"] = ["", "import torch", "%%headwise_check\n..."]

        def run_cell(self, cell):
            path = tmp_path / "cell.py"
            path.write_text(cell)
            exec(compile(cell, str(path), "exec"), self.user_ns)  # noqa: S102

    cell = write("separate", "scale-missing")
    (line,) = [n for n, text in enumerate(cell.splitlines(), 2) if "scores = torch.matmul" in text]
    check_cell(NumberedShell(), "", cell)
    assert f"In [2], line {line}: scores = torch.matmul" in capsys.readouterr().out
    unfinished = cell[: cell.index("        scores = torch.matmul")] + "        raise NotImplementedError\n"
    check_cell(NumberedShell(), "", unfinished)
    assert f"it ends at In [2], line {len(unfinished.splitlines()) + 1}" in capsys.readouterr().out


def test_magic_does_not_judge_an_older_class_when_its_cell_fails(capsys):
    class Failing(Shell):
        def run_cell(self, cell):
            return types.SimpleNamespace(success=False)

    check_cell(Failing(), "KeepMask", "class KeepMask(:\n    pass")
    assert capsys.readouterr().out == ""


def test_magic_takes_the_options_of_the_command(capsys):
    cell = find_form("homework").solution()
    check_cell(Shell(), "--form homework", cell)
    assert "fits the homework guide" in capsys.readouterr().out
    check_cell(Shell(), "MultiHeadAttention --form handbook --solution", cell)
    printed = capsys.readouterr().out
    assert "against the handbook chapter" in printed
    assert "A correct class:" in printed
    shell = Shell()
    shell.user_ns["Mine"] = KeepMask
    check_cell(shell, "--against Mine", "class MyAttention(KeepMask):\n    pass")
    assert "against the reference KeepMask" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--from homework", "--from"),
        ("--form nonsense", "no assignment is called 'nonsense'"),
        ("--form", "expected one argument"),
        ("--form book --against other.py", "not allowed with"),
        ("Missing", "no Missing is defined"),
        ('"open', "No closing quotation"),
    ],
)
def test_magic_refuses_what_it_does_not_take(line, words, capsys):
    check_cell(Shell(), line, "class MyAttention(KeepMask):\n    pass")
    printed = capsys.readouterr().out
    assert printed.startswith("%%headwise_check: ")
    assert words in printed


def test_magic_judges_a_fragment_without_running_it(capsys):
    check_cell(Shell(), "", "s = Q @ K.transpose(-2, -1)\nw = s.softmax(-1)\nout = w @ V")
    printed = capsys.readouterr().out
    assert "scores are not scaled" in printed
    assert "line 2: s = Q @" in printed  # with the line of the magic
    assert "cell.py" not in printed


def test_magic_says_what_it_misses(capsys):
    check_cell(Shell(), "", "x = 1")
    assert "defines no class" in capsys.readouterr().out
    assert last_class("class A: pass\nclass Head: pass\nclass B: pass") == "Head"


def test_a_live_class_has_no_footnote_about_a_check_from_outside():
    report = Report("right", fits="it fits", in_process=True)
    assert "from outside" not in str(report)
    assert "✓ it fits\n" in f"{report}\n"
    assert "✓ it fits*\n" in str(Report("right", fits="it fits"))
