"""What public files do and templates do not: defaults that matter, groups, siblings, registries, returned logits."""

import pytest
from odd_styles import FUNCTIONS, ROTARY, TWO_MASKS

from headwise.check.templates import write
from headwise.check.verdict import judge_file

RIGHT = write("separate")
SCALE = " / math.sqrt(self.head_dim)"


def judged(folder, text, name="attention.py", **options):
    path = folder / name
    path.write_text(text)
    return judge_file(path, thorough=False, **options)


def changed(text, *pairs):
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def test_class_is_judged_as_its_defaults_make_it(tmp_path):
    text = changed(RIGHT, ("num_heads, dropout", "num_heads, scale=False, dropout"),
                   ("super().__init__()", "super().__init__()\n        self.scale = scale"),
                   (SCALE, " / (math.sqrt(self.head_dim) if self.scale else 1.0)"))  # fmt: skip
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", "scale-missing"), report


def test_groups_are_tried_where_they_are_not_as_many_as_the_heads_in_one(tmp_path):
    shared = "k.repeat_interleave(self.n_rep, dim=1)"
    wrong = "k.repeat_interleave(self.n_kv_heads, dim=1)[:, : self.n_heads]"
    report = judged(tmp_path, changed(ROTARY, (shared, wrong), ("class Attention", "class GroupedAttention")))
    assert report.verdict == "wrong", report
    assert report.cause.startswith("grouped")
    assert "n_kv_heads=2" in report.wrong[0].detail


def test_import_that_a_sibling_forgot_is_reported_with_the_line_that_imports_the_sibling(tmp_path):
    head = "import torch\n\n\ndef scores(q, k):\n    return q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))\n"
    (tmp_path / "parts.py").write_text(head)
    text = changed(FUNCTIONS, ("import math\n", "from parts import scores as product\n"),
                   ("q @ k.transpose(-2, -1) / math.sqrt(d_k)", "product(q, k)"))  # fmt: skip
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", "missing-import"), report
    assert report.wrong[0].detail == "math in parts.py"
    assert report.wrong[0].text.startswith("from parts")


def test_mask_of_one_sample_must_not_reach_another_whatever_it_means(tmp_path):
    mask = 'scores = scores.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))'
    mixed = """pad = key_padding_mask.roll(1, 0)
            scores = scores.masked_fill((pad[:, :, None] | pad[:, None, :])[:, None], -1e9)"""
    report = judged(tmp_path, changed(TWO_MASKS, (mask, mixed)))
    assert (report.verdict, report.cause) == ("wrong", "mask-wrong-sample"), report


def test_mask_that_neither_booleans_nor_numbers_can_be_is_the_learners(tmp_path):
    text = changed(FUNCTIONS, ("mask=None", "mask"), ("if mask is not None and mask.dim()", "if mask.dim()"),
                   ("if mask is not None:", "if True:"), ("mask == 0, -1e9", "1 - mask, -1e9"))  # fmt: skip
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", "mask-crashes"), report
    assert "1 - mask" in report.wrong[0].text


def test_dropout_that_is_only_accepted_is_a_mistake_at_its_parameter(tmp_path):
    text = changed(
        FUNCTIONS, ("        self.dropout = nn.Dropout(dropout)\n", ""), (", mask, self.dropout)", ", mask)")
    )
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", "dropout-unused"), report
    assert report.wrong[0].text.startswith("def __init__")


def test_scores_returned_by_the_name_of_logits_are_no_mistake(tmp_path):
    text = changed(FUNCTIONS, ("return attn @ v, attn", "return attn @ v, scores"),
                   ("out, attn = scaled", "out, logits = scaled"), ("(out)), attn", "(out)), logits"))  # fmt: skip
    report = judged(tmp_path, text)
    assert report.verdict == "variant", report
    assert "the scores are returned, not the weights" in report.variants


def test_function_under_a_registry_that_is_not_installed_is_still_defined(tmp_path):
    registry = "import torch\nfrom nowhere_at_all import Registry\n\nREG = Registry()\n"
    text = changed(FUNCTIONS, ("import torch\n", registry),
                   ("def scaled_dot", '@REG.register(name="dot")\ndef scaled_dot'))  # fmt: skip
    assert judged(tmp_path, text).verdict == "right"


@pytest.mark.parametrize("base", ["nn.Module", "object"])
def test_class_without_forward_is_unfinished_and_its_layers_are_seen(base, tmp_path):
    begun = FUNCTIONS[FUNCTIONS.index("class") : FUNCTIONS.index("    def forward")]
    text = "from torch import nn\n\n\n" + begun.replace("(nn.Module)", f"({base})")
    report = judged(tmp_path, text)
    assert report.verdict == "unfinished", report
    assert "The layers are there" in report.hint


def test_build_that_cannot_be_called_is_said(tmp_path):
    report = judged(
        tmp_path, changed(FUNCTIONS, ("b, t, d = x.shape", "b, t, d, e = x.shape")), build="MultiHeadAttention(E, H)"
    )
    assert report.verdict == "unknown"
    assert "--build" in report.doubts[0]
