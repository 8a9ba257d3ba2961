"""Arguments of the constructor that do not reach what they are for, and results that are not what was meant."""

from test_consequences import only
from test_public_habits import RIGHT, changed, judged

from headwise.check.templates import write

LAYERS = "self.w_q, self.w_k, self.w_v = (nn.Linear(d_model, d_model) for _ in range(3))"
BIASED = """self.w_q = nn.Linear(d_model, d_model, bias=qkv_bias)
        self.w_k = nn.Linear(d_model, d_model, bias=qkv_bias)
        self.w_v = nn.Linear(d_model, d_model, bias=qkv_bias)"""
SIZES = "self.num_heads, self.head_dim = num_heads, d_model // num_heads"


def test_number_in_place_of_the_argument_is_named_with_its_line(tmp_path):
    text = changed(RIGHT, (SIZES, "self.num_heads = 8\n        self.head_dim = d_model // num_heads"))
    found = only(judged(tmp_path, text))
    assert (found.name, found.text) == ("size-fixed", "self.num_heads = 8")
    assert "num_heads" in found.detail


def test_option_for_biases_must_leave_none(tmp_path):
    right = changed(RIGHT, (LAYERS, BIASED), ("num_heads, dropout", "num_heads, qkv_bias=False, dropout"))
    assert judged(tmp_path, right).verdict == "right"
    found = only(judged(tmp_path, changed(right, ("self.w_v = nn.Linear(d_model, d_model, bias=qkv_bias)",
                                                  "self.w_v = nn.Linear(d_model, d_model)"))))  # fmt: skip
    assert (found.name, found.text) == ("option-ignored", "self.w_v = nn.Linear(d_model, d_model)")
    assert "w_v.bias" in found.detail


def test_layer_that_is_returned_uncalled_is_named(tmp_path):
    found = only(judged(tmp_path, changed(RIGHT, ("return self.w_o(merged)", "out = self.w_o\n        return out"))))
    assert (found.name, found.text) == ("not-called", "out = self.w_o")


def test_heads_joined_along_the_tokens_are_named(tmp_path):
    joined = "y = y.transpose(1, 2).reshape(B, T, C)\n        return self.c_proj(y)"
    text = changed(write("fused"), (joined, "return torch.cat(y.unbind(1), dim=1)"))
    found = only(judged(tmp_path, text))
    assert (found.name, found.text) == ("joined-axis", "return torch.cat(y.unbind(1), dim=1)")
