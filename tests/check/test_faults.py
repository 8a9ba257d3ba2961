"""Every fault we can write is found and named, in every style that can show it."""

import pytest

from headwise.check.mistakes import MISTAKES
from headwise.check.templates import SPOILED_SLOTS, STYLES, shown_by, write
from headwise.check.verdict import judge_file
from headwise.errors import OptionError

CASES = [(style, fault) for style in STYLES for fault in shown_by(style)]


def judged(folder, source, **options):
    path = folder / "attention.py"
    path.write_text(source)
    return judge_file(path, thorough=False, **options)


@pytest.mark.parametrize("style", STYLES)
def test_template_without_fault_is_right(style, tmp_path):
    assert judged(tmp_path, write(style)).verdict in ("right", "variant")


@pytest.mark.parametrize(("style", "fault"), CASES, ids=[f"{style}-{fault}" for style, fault in CASES])
def test_fault_is_named(style, fault, tmp_path):
    report = judged(tmp_path, write(style, fault))
    assert (report.verdict, report.cause) == ("wrong", fault), report
    assert report.exit_code == 1


def test_every_fault_is_shown_in_three_styles():
    assert {name: len(styles) for name, styles in SPOILED_SLOTS.items() if len(styles) < 3} == {}


def test_every_fault_has_words():
    for name in SPOILED_SLOTS:
        mistake = MISTAKES[name]
        assert mistake.title
        assert mistake.why.endswith(".")
        assert mistake.hint.endswith(".")


PAIRS = [
    ("separate", "scale-d_model", "merge-view"),
    ("separate", "no-out-proj", "softmax-axis"),
    ("fused", "scale-missing", "causal-inverted"),
    ("listed", "scale-d_model", "one-projection"),
    ("einsum", "scale-after-softmax", "mask-ignored"),
    ("fused", "split-view", "merge-view"),
    ("separate", "missing-import", "scale-d_model"),
]


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: "+".join(case))
def test_several_faults_at_once_are_all_named(case, tmp_path):
    style, *faults = case
    named = {finding.name for finding in judged(tmp_path, write(style, *faults)).findings}
    assert set(faults) <= named


LINES = {
    "scale-d_model": "scores = torch.matmul",
    "softmax-axis": "weights = torch.softmax",
    "split-view": "q = self.w_q(query).view",
    "merge-view": "merged = heads.reshape",
    "mask-discarded": "scores.masked_fill",
    "mask-crashes": "scores = scores.mask_fill",
    "contiguous": "merged = heads.transpose",
    "undefined-name": "q = self.w_q(query).view",
    "dropout-in-eval": "weights = torch.nn.functional.dropout",
    "layers-in-forward": "return nn.Linear",
}


@pytest.mark.parametrize("fault", LINES)
def test_line_of_the_fault_is_found(fault, tmp_path):
    report = judged(tmp_path, write("separate", fault))
    finding = next(f for f in report.findings if f.name == fault)
    assert finding.text.startswith(LINES[fault])


def test_wrong_scale_comes_with_numbers_difference_and_proof(tmp_path):
    report = judged(tmp_path, write("separate", "scale-d_model"))
    assert "divided by √32 = 5.657, not by √8 = 2.828" in report.findings[0].detail
    assert report.difference.startswith("output[0, 0, 0] is ")
    assert "with that one change the output equals the reference" in report.proof


def test_a_fault_a_style_cannot_show_is_refused_with_a_list():
    with pytest.raises(OptionError, match="style 'fused' cannot show 'mask-ignored'; it can show scale-missing"):
        write("fused", "mask-ignored")


def test_solution_is_only_given_when_asked_for(tmp_path):
    assert judged(tmp_path, write("separate", "no-out-proj")).solution == ""
    solution = judged(tmp_path, write("separate", "no-out-proj"), solution=True).solution
    assert judged(tmp_path, solution).verdict == "right"


def test_solution_is_causal_only_if_the_class_is(tmp_path):
    assert "class CausalSelfAttention" in judged(tmp_path, write("fused", "scale-missing"), solution=True).solution
    assert "mask=None" in judged(tmp_path, write("einsum", "no-gradient"), solution=True).solution
