"""Right attention is called right, however it is written."""

import pytest
import torch
from right_forms import RIGHT, VARIANTS, DropMask, KeepMask, Lengths, Plain

import headwise
from headwise.check import check


@pytest.mark.parametrize("form", RIGHT, ids=lambda form: form.__name__)
def test_right_form_is_called_right(form):
    report = check(form)
    assert (report.verdict, report.doubts, report.cause) == ("right", [], None)
    assert report.exit_code == 0


@pytest.mark.parametrize(("form", "word"), VARIANTS.items(), ids=lambda form: getattr(form, "__name__", ""))
def test_variant_is_called_a_variant_and_named(form, word):
    report = check(form)
    assert (report.verdict, report.cause) == ("variant", None), report
    assert any(word in variant for variant in report.variants), report.variants


@pytest.mark.parametrize(
    ("form", "words"),
    [(KeepMask, "1 keeps a key"), (DropMask, "1 hides a key"), (Lengths, "how many keys of each sample are real")],
    ids=["keep", "drop", "lengths"],
)
def test_meaning_of_a_mask_is_measured_and_printed(form, words):
    (line,) = check(form).masks
    assert words in line


def test_an_object_is_right_as_far_as_tested_because_it_has_one_size_only():
    report = check(KeepMask(32, 4))
    assert (report.verdict, report.exit_code) == ("partial", 2)
    assert [item.words for item in report.certificate if item.status == "not judged"] == ["its sizes cannot be chosen"]
    assert "RIGHT AS FAR AS TESTED" in str(report)


def test_judging_in_this_process_says_so_and_leaves_no_trace():
    before = torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled()
    assert check(Plain).in_process
    assert (torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled()) == before


def test_the_package_itself_can_be_called():
    assert headwise.check(KeepMask).verdict == "right"


@pytest.mark.parametrize("form", [headwise.textbook.HeadsAtOnce, headwise.MultiHeadAttention], ids=lambda f: f.__name__)
def test_our_own_layers_are_right_and_what_could_not_be_tried_is_said(form):
    report = check(form)
    assert report.verdict in ("variant", "partial"), report
    assert report.certificate[0].status == "verified"


def test_returned_weights_are_recognised():
    class WithWeights(KeepMask):
        def forward(self, x):
            q, k, v = (w(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
            return self.wo((weights @ v).transpose(1, 2).flatten(2)), weights

    def item(form):
        return next(i.status for i in check(form).certificate if i.name.startswith("returned weights"))

    assert item(WithWeights) == "verified"
    assert item(KeepMask) == "does not apply"
