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
    "a transposition that is not assigned": (
        SPLIT_V, SPLIT_V.replace(".transpose", "\n        v.transpose"), "result-dropped", "v.transpose(1, 2)",
    ),
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


METHODS = {
    "forward without self": ("forward(self, query", "forward(query", "missing-self"),
    "forward misspelled": ("def forward", "def foward", "misspelled-method"),
    "init with single underscores": ("def __init__", "def _init_", "misspelled-method"),
    "int for init": ("def __init__", "def __int__", "misspelled-method"),
}


@pytest.mark.parametrize(("old", "new", "name"), METHODS.values(), ids=METHODS)
def test_method_that_cannot_be_called_is_named_with_its_line(tmp_path, old, new, name):
    found = only(judged(tmp_path, changed(RIGHT, (old, new))))
    assert found.name == name
    assert new in found.text


def test_helper_without_self_is_named_with_its_line(tmp_path):
    helper = "def joined(x):\n        return x.transpose(1, 2).flatten(2)\n\n    def forward"
    merged = "heads.transpose(1, 2).contiguous().view(batch, -1, self.num_heads * self.head_dim)"
    text = changed(RIGHT, ("def forward", helper), (merged, "self.joined(heads)"))
    assert (only(judged(tmp_path, text)).name, only(judged(tmp_path, text)).text) == ("missing-self", "def joined(x):")
    static = changed(text, ("def joined", "@staticmethod\n    def joined"))
    assert judged(tmp_path, static).verdict == "right"


@pytest.mark.parametrize(
    ("old", "new", "name", "words"),
    [
        ("self.w_q(query)", "w_q(query)", "undefined-name", "self.w_q is set"),
        ("SUPER", "self.register_buffer(table, torch.ones(2))", "undefined-name", 'in quotes: "table"'),
        ("if mask is not None:", "if mask:", "tensor-as-condition", "argument mask"),
        ("self.num_heads, self.head_dim =", "self.num_head, self.head_dim =", "missing-attribute", "self.num_head?"),
    ],
)
def test_words_say_what_was_meant(tmp_path, old, new, name, words):
    text = RIGHT.replace(
        "super().__init__()", "super().__init__()\n        SUPER" if old == "SUPER" else "super().__init__()"
    )
    found = only(judged(tmp_path, changed(text, (old, new))))
    assert found.name == name
    assert words in found.detail


def test_line_that_only_a_mask_reaches_is_named(tmp_path):
    inside = "    weights = torch.softmax(scores, dim=-1)"
    found = only(judged(tmp_path, changed(RIGHT, (inside, "    " + inside), ("weights = self.dropout(weights)\n", "\n"),
                                          ("matmul(weights, v)", "matmul(self.dropout(weights), v)"))))  # fmt: skip
    assert (found.name, found.text) == ("option-crashes", inside.strip())
