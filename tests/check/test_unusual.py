"""Unusual forms are bound and judged; what cannot be bound is not called wrong."""

import sys

import pytest
import unusual_forms as forms

from headwise.check import check
from headwise.check.verdict import judge_file


@pytest.mark.parametrize(
    "form",
    [
        forms.PaddingRequired, forms.ChannelsFirst, forms.Pixels, forms.WidthOfHeads,
        forms.NormThenFused, forms.RelativeTerm, forms.Grouped,
        forms.InFloat32, forms.SharedQueryKey, forms.NormedPixels, forms.GroupsFromDict, forms.NormedAndTurned,
        forms.SharedValuesAveraged, forms.UnscaledBesidePositions, forms.PooledUnlessOne, forms.WidthKeptAsParameter,
        forms.NormedQuery, forms.FaintFuture,
    ],
    ids=lambda form: form.__name__,
)  # fmt: skip
def test_unusual_right_form_is_not_called_wrong(form):
    report = check(form)
    untried = [item.name for item in report.certificate if item.status == "not judged"]
    assert report.verdict in ("right", "variant") or untried == ["every branch was taken"], report


@pytest.mark.parametrize(
    ("form", "untried"),
    [
        (forms.OwnSizes, "with width 24 and 6 heads: RuntimeError"),
        (forms.NormedAfterPixels, "what follows the attention in this class"),
    ],
    ids=["sizes of its own", "a norm of the sum"],
)
def test_what_could_not_be_tried_is_named_and_the_rest_is_right(form, untried):
    report = check(form)
    assert (report.verdict, report.exit_code) == ("partial", 2), report
    assert any(untried in item.words for item in report.certificate if item.status == "not judged"), report


@pytest.mark.parametrize(
    ("form", "cause"),
    [
        (forms.MaskInFactNeeded, "option-crashes"),
        (forms.ConfigurationAndSizes, "dropout-unused"),
        (forms.RelativeTermTooNarrow, "scale-d_model"), (forms.RoundedScores, "scale-other"),
        (forms.NoSoftmax, "softmax-missing"), (forms.OneSoftmaxForAll, "softmax-axis"),
        (forms.FusedSeesTheFuture, "causal-inverted"), (forms.TurnedByHead, "rotary-axis"),
        (forms.PaddingOfTheFirst, "mask-wrong-sample"), (forms.KeysAsValues, "one-projection"),
        (forms.LoopedWithoutHeads, "missing-attribute"), (forms.GroupedInTwoOrders, "grouped-order"),
        (forms.FusedDropoutAlways, "dropout-in-eval"), (forms.CrossOfOneLength, "cross-length"),
        (forms.OneEntryOfTheMask, "causal-ignored"), (forms.HeadsReturnedApart, "no-out-proj"),
        (forms.SoftmaxMadeWrongly, "crashes"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_unusual_mistake_is_named(form, cause):
    report = check(form)
    assert report.verdict == "wrong", report
    assert cause in [f.name for f in report.findings if f.severity == "wrong"], report


def test_an_argument_nobody_can_guess_is_not_a_mistake():
    report = check(forms.NeedsAGraph)
    assert report.verdict == "unknown"
    assert report.tried


def names(report):
    return {f.name: f.detail for f in report.findings if f.severity == "fragile"}


def test_fewer_key_heads_that_raise_are_a_mistake():
    report = check(forms.FewerKeysForgotten)
    assert report.verdict == "wrong"
    assert report.cause == "grouped-crashes"
    assert "num_kv_heads=2 for 4 heads" in report.wrong[0].detail


def test_a_graph_that_breaks_is_fragile_and_a_whole_one_is_not():
    assert "compile-fails" in names(check(forms.LooksAtValues, thorough=True))
    assert "compile-fails" not in names(check(forms.KeepMask, thorough=True))


def test_a_value_read_on_the_meta_device_is_fragile():
    assert "when it is called" in names(check(forms.LooksAtValues))["meta-fails"]
    assert "meta-fails" not in names(check(forms.KeepMask))


def test_an_input_beyond_the_stored_mask_is_fragile_and_its_length_is_said():
    assert "19 tokens, a stored mask of 16" in names(check(forms.StoredTable))["beyond-buffer"]


def file_of(folder, text):
    path = folder / "attention.py"
    path.write_text(text)
    return path


CLASS = """
class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (cut(t, self.heads) for t in self.qkv(x).chunk(3, -1))
        return self.out(((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))
"""
CUT = "def cut(t, heads):\n    return t.unflatten(-1, (heads, -1)).transpose(1, 2)\n"


def test_a_name_that_a_package_no_longer_has_is_named(tmp_path):
    line = "from torch.nn.functional import cut"
    report = judge_file(file_of(tmp_path, f"from torch import nn\n{line}\n{CLASS}"), thorough=False)
    assert (report.verdict, report.cause) == ("wrong", "missing-import")
    assert report.findings[0].line == 2


def test_a_file_that_is_not_here_is_not_the_fault_of_the_one_that_imports_it(tmp_path):
    report = judge_file(file_of(tmp_path, f"from torch import nn\nfrom utils import cut\n{CLASS}"), thorough=False)
    assert (report.verdict, report.cause) == ("unknown", None)
    assert any("utils" in doubt for doubt in report.doubts), report


def test_a_file_beside_is_imported(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "utils", raising=False)
    (tmp_path / "utils.py").write_text(CUT)
    report = judge_file(file_of(tmp_path, f"from torch import nn\nfrom utils import cut\n{CLASS}"), thorough=False)
    assert report.verdict == "right"
    judge_file(file_of(tmp_path, "from torch import nn\nattention = None\n"), thorough=False)
    assert "utils" not in sys.modules, "it is gone with the next file"


def test_a_name_that_only_the_demo_defines_is_named(tmp_path):
    text = f"from torch import nn\n{CUT}{CLASS.replace('self.heads) for', 'count) for')}"
    report = judge_file(file_of(tmp_path, f"{text}\nif __name__ == '__main__':\n    count = 4\n"), thorough=False)
    assert "defined only under" in names(report)["undefined-name"]
