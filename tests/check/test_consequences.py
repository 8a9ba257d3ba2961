"""One mistake, one finding, on the line that was written: what follows from it is not reported beside it."""

import pytest
from test_public_habits import RIGHT, changed, judged

from headwise.check.templates import write

PROJECTED = """        q = self.w_q(query).view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.w_k(key).view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.w_v(value).view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)
"""
LOOP = """        parts = []
        for project, x in zip((self.w_q, self.w_k, self.w_v), (query, key, value)):
            y = project(x)
            parts.append(y.view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2))
        q, k, v = parts
"""
GENERATOR = """        q, k, v = (
            project(x).view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)
            for project, x in ((self.w_q, query), (self.w_k, key), (self.w_v, value))
        )
"""
LOOPS = {"loop": LOOP, "generator": GENERATOR}


def only(report):
    assert report.verdict == "wrong", report
    assert len(report.wrong) == 1, report
    return report.wrong[0]


def test_projection_that_is_not_applied_is_one_mistake(tmp_path):
    found = only(judged(tmp_path, changed(RIGHT, ("self.w_o(merged)", "merged"))))
    assert (found.name, found.text) == ("no-out-proj", "return merged")


def test_value_made_from_the_key_is_one_mistake(tmp_path):
    found = only(judged(tmp_path, changed(RIGHT, ("self.w_v(value)", "self.w_v(key)"))))
    assert (found.name, found.text[:4]) == ("wrong-role", "v = ")


@pytest.mark.parametrize("form", LOOPS.values(), ids=LOOPS)
def test_projections_in_a_loop_are_right(tmp_path, form):
    assert judged(tmp_path, changed(RIGHT, (PROJECTED, form))).verdict == "right"


@pytest.mark.parametrize("form", LOOPS.values(), ids=LOOPS)
def test_wrong_layer_in_a_loop_is_reported_where_the_loop_names_it(tmp_path, form):
    text = changed(RIGHT, (PROJECTED, form.replace("self.w_v,", "self.w_k,").replace("self.w_v)", "self.w_k)")))
    found = only(judged(tmp_path, text))
    assert found.name == "wrong-role"
    assert found.text.startswith("for project, x in")


def test_one_part_of_a_wide_layer_for_all_heads_is_reported_where_it_is_taken(tmp_path):
    whole, part = (
        ".view(batch, -1, self.num_heads, self.head_dim)",
        "[:, :, None, : self.head_dim].expand(-1, -1, self.num_heads, -1)",
    )
    found = only(judged(tmp_path, changed(RIGHT, (whole, part))))
    assert (found.name, found.text[:4]) == ("heads-share-weights", "q = ")


def test_table_that_only_an_uncalled_method_reads_is_reported(tmp_path):
    text = changed(
        RIGHT,
        ("        self.dropout = nn.Dropout(dropout)\n",
         "        self.dropout = nn.Dropout(dropout)\n"
         "        self.register_buffer('angles', torch.arange(4.0 * 4).view(4, 4))\n\n"
         "    def rotate(self, x):\n        return x * self.angles.cos()\n"),
    )  # fmt: skip
    found = only(judged(tmp_path, text))
    assert (found.name, found.detail) == ("table-unused", "only rotate reads angles, and nothing calls rotate")


def test_mask_that_is_computed_twice_is_no_mistake(tmp_path):
    text = write("fused")
    line = next(line for line in text.splitlines() if "tril" in line or "triu" in line)
    twice = changed(text, (line, f"{line}\n{line}"))
    assert judged(tmp_path, twice).verdict == judged(tmp_path, text).verdict == "variant"


def test_mask_returned_in_place_of_weights_is_not_called_right(tmp_path):
    report = judged(tmp_path, changed(RIGHT, ("return self.w_o(merged)", "return self.w_o(merged), mask")))
    assert report.verdict != "right", report


def test_mask_that_fits_no_scores_in_any_shape_is_an_error(tmp_path):
    row = "            mask = mask.view(batch, 1, 1, -1)\n            scores = scores.masked_fill(mask[..., 1:] == 0"
    report = judged(tmp_path, changed(RIGHT, ("            scores = scores.masked_fill(mask == 0", row)))
    assert (report.verdict, report.cause) == ("wrong", "mask-crashes"), report


def test_head_mask_that_changes_only_the_returned_weights_is_reported(tmp_path):
    text = changed(RIGHT, ("mask=None):", "mask=None, head_mask=None):"),
                   ("return self.w_o(merged)", "if head_mask is not None:\n"
                    "            weights = weights * head_mask\n        return self.w_o(merged), weights"))  # fmt: skip
    found = only(judged(tmp_path, text))
    assert (found.name, found.text) == ("option-ignored", "weights = weights * head_mask")


def test_inverted_mask_of_an_assignment_is_reported_where_it_is_applied(tmp_path):
    text = changed(write("separate"), ("mask == 0", "mask == 1"))
    report = judged(tmp_path, text, form="interview")
    found = next((f for f in report.wrong if f.name == "form-mask"), None)
    assert found is None or "mask == 1" in found.text, report


SHAPES = {
    "axes of the queries": ("self.w_q(query).view(batch, -1, self.num_heads, self.head_dim)",
                            "self.w_q(query).view(-1, batch, self.num_heads, self.head_dim)"),
    "no transpose of the values": ("v = self.w_v(value).view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)",
                                   "v = self.w_v(value).view(batch, -1, self.num_heads, self.head_dim)"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), SHAPES.values(), ids=SHAPES)
def test_shape_that_does_not_fit_is_reported_where_it_was_made(tmp_path, old, new):
    found = only(judged(tmp_path, changed(RIGHT, (old, new))))
    assert found.name in ("crashes", "contiguous", "product-axes", "view-sizes")
    assert new.removeprefix("v = ") in found.text


def test_number_that_is_not_minus_infinity_is_reported_where_it_is_written(tmp_path):
    apart = 'hidden = mask == 0\n            scores = scores.masked_fill(hidden, float("nan"))'
    text = changed(RIGHT, ('scores = scores.masked_fill(mask == 0, float("-inf"))', apart))
    found = only(judged(tmp_path, text))
    assert (found.name, "nan" in found.text) == ("mask-nan", True)


def test_head_of_a_class_with_layers_is_told_to_apply_them(tmp_path):
    text = RIGHT[: RIGHT.index("        batch =")] + "        pass\n"
    report = judged(tmp_path, text)
    assert (report.verdict, report.hint) == ("unfinished", "The layers are there; apply each of them to its input.")


@pytest.mark.parametrize("after", ["", ", diagonal=1"])
def test_triangle_of_the_wrong_side_is_one_mistake_at_the_line_that_makes_it(tmp_path, after):
    text = changed(write("fused"), ("block_size)))", f"block_size){after}))"), ("[:T, :T] == 0", "[:T, :T].bool()"))
    found = only(judged(tmp_path, text))
    assert found.name == "causal-inverted"
    assert "tril" in found.text
    assert "and not token 0" in found.detail


def test_mask_that_is_multiplied_with_infinity_is_named_where_the_scores_become_nan(tmp_path):
    filled, added = 'scores = scores.masked_fill(mask == 0, float("-inf"))', 'scores = scores + mask * float("-inf")'
    text = changed(RIGHT, (filled, added), ("self.dropout(weights)", "self.dropout(weights.nan_to_num())"))
    found = only(judged(tmp_path, text))
    assert (found.name, found.text) == ("mask-nan", added)


def test_key_made_from_a_projected_query_is_one_mistake(tmp_path):
    projected = PROJECTED.replace("        q = self.w_q(query)", "        query = self.w_q(query)\n        q = query")
    found = only(judged(tmp_path, changed(RIGHT, (PROJECTED, projected.replace("self.w_k(key)", "self.w_k(query)")))))
    assert (found.name, found.text[:4]) == ("wrong-role", "k = ")


def test_what_is_said_to_be_right_does_not_contradict_the_mistake(tmp_path):
    report = judged(tmp_path, changed(RIGHT, (".contiguous().view(batch", ".view(batch")))
    assert only(report).name == "contiguous"
    assert "head merge" not in report.good
    wide = changed(
        RIGHT, ("num_heads * self.head_dim)", "w_o.in_features)"), ("softmax(scores, dim=-1)", "softmax(scores, dim=1)")
    )
    report = judged(tmp_path, changed(wide, ("return self.w_o(merged)", "return self.w_o(merged), weights")))
    assert only(report).name == "softmax-axis"
    assert not [words for words in report.good if "sum to one" in words]
