"""An error in the learner's code is reported by its cause, at the line of the cause."""

import pytest
from test_consequences import only
from test_public_habits import RIGHT, changed, judged

SIZES = "self.num_heads, self.head_dim = num_heads, d_model // num_heads"
SPLIT_V = "v = self.w_v(value).view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)"
PRODUCT = "torch.matmul(q, k.transpose(-2, -1))"
CAUSES = {
    "a method that is not called": (SPLIT_V, "v = self.w_v", "not-called", "v = self.w_v"),
    "a float for a size": (SIZES, SIZES.replace("//", "/"), "float-size", SIZES.replace("//", "/")),
    "super without parentheses": ("super().__init__()", "super.__init__()", "missing-super", "super.__init__()"),
    "the root of a number": ("math.sqrt(", "torch.sqrt(", "root-of-number", ""),
    "keys that are not turned": (PRODUCT, "q @ k", "product-axes", ""),
    "keys turned over other axes": (PRODUCT, "q @ k.transpose(1, 2)", "product-axes", ""),
    "weights behind the values": ("torch.matmul(weights, v)", "v @ weights", "product-axes", "heads = v @ weights"),
    "values with heads behind tokens": (SPLIT_V, SPLIT_V.removesuffix(".transpose(1, 2)"), "product-axes", "v = "),
    "a misspelled layer": ("self.w_o(merged)", "self.w_out(merged)", "missing-attribute", "return self.w_out(merged)"),
    "a misspelled class of torch": ("nn.Dropout(", "nn.dropout(", "unknown-name", "self.dropout = nn.dropout(dropout)"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "name", "line"), CAUSES.values(), ids=CAUSES)
def test_error_is_reported_by_its_cause(tmp_path, old, new, name, line):
    found = only(judged(tmp_path, changed(RIGHT, (old, new))))
    assert found.name == name
    assert found.text.startswith(line)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (PRODUCT, "q @ k", "k needs transpose(-2, -1)"),
        (PRODUCT, "q @ k.T", "only the last two axes of k"),
        ("torch.matmul(weights, v)", "v @ weights", "the weights come first: weights @ v"),
        (SPLIT_V, SPLIT_V.removesuffix(".transpose(1, 2)"), "in v the heads must come before the tokens"),
        (SPLIT_V, "v = self.w_v(value)", "v is not split into heads"),
        ("self.w_o(merged)", "self.w_out(merged)", "did you mean w_o?"),
    ],
)
def test_words_name_what_should_have_met(tmp_path, old, new, words):
    found = only(judged(tmp_path, changed(RIGHT, (old, new))))
    assert words in found.detail
