"""Faults that the text of a file shows, where the code never gets as far as running, and what comments admit."""

import pytest

from headwise import check
from headwise.check.report import wrapped
from headwise.check.templates import write
from headwise.check.verdict import judge_file

HEAD = "import torch\nfrom torch import nn\n"
CLASS = """
class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.dk = num_heads, d_model // num_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def split(self, x):
        return (t.unflatten(-1, (self.h, self.dk)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def forward(self, x, mask=None):
        q, k, v = self.split(x)
        scores = q @ k.mT / self.dk**0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""


def judged(tmp_path, source):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + source)
    return judge_file(path, thorough=False)


def test_the_class_itself_is_right(tmp_path):
    assert judged(tmp_path, CLASS).verdict == "right"


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("self.dk = num_heads, d_model", "self.dk = num_heads, self.width", "missing-attribute"),
        ("scores.softmax(-1)", "self.dropout(scores.softmax(-1))", "missing-attribute"),
        ("scores.softmax(-1)", "self.activation(scores.softmax(-1))", "missing-attribute"),
        ("        super().__init__()\n", "", "missing-super"),
        ("self.qkv(x)", "self.qkv(x.reshape(batch, sequence_of_mine, -1))", "undefined-name"),
    ],
)
def test_what_is_read_and_never_set_is_named(old, new, mistake, tmp_path):
    report = judged(tmp_path, CLASS.replace(old, new))
    assert report.verdict == "wrong", report
    assert mistake in {finding.name for finding in report.findings}, report


def test_an_attribute_that_is_asked_for_first_is_no_fault(tmp_path):
    guarded = CLASS.replace(
        "q, k, v = self.split(x)", "q, k, v = self.split(x)\n        hasattr(self, 'x') and self.x()"
    )
    assert judged(tmp_path, guarded).verdict == "right"


def test_a_mask_in_the_place_of_another_parameter_is_named_with_its_line(tmp_path):
    helper = """
def scores_of(q, k, positions=None, mask=None):
    scores = q @ k.mT
    scores = scores if positions is None else scores + positions
    scores = scores / q.size(-1) ** 0.5
    return scores if mask is None else scores + mask * -1e9
"""
    lines = [line for line in CLASS.splitlines() if "mask is not" not in line and "masked_fill" not in line]
    text = "\n".join(lines).replace("q @ k.mT / self.dk**0.5", "scores_of(q, k, mask)")
    report = judged(tmp_path, helper + text)
    found = [finding for finding in report.findings if finding.name == "mask-misplaced"]
    assert report.verdict == "wrong", report
    assert [finding.text for finding in found] == ["scores = scores_of(q, k, mask)"]


@pytest.mark.parametrize(("comment", "verdict"), [("", "wrong"), ("  # the mask is ignored here", "right")])
def test_a_mask_that_a_comment_says_is_left_out_is_a_trap_and_no_mistake(comment, verdict, tmp_path):
    lines = [line for line in CLASS.splitlines() if "mask is not" not in line and "masked_fill" not in line]
    text = "\n".join(lines).replace("self.dk**0.5", "self.dk**0.5" + comment)
    report = judged(tmp_path, text)
    assert report.verdict == verdict, report
    assert "mask-ignored" in {finding.name for finding in report.findings}


def test_a_mask_that_is_not_read_beside_a_causal_one_inside_is_a_trap_and_no_mistake(tmp_path):
    lines = [line for line in CLASS.splitlines() if "mask is not" not in line and "masked_fill" not in line]
    hidden = "scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)\n        return self"
    report = judged(tmp_path, "\n".join(lines).replace("return self", hidden))
    assert report.verdict == "variant", report
    assert [finding.severity for finding in report.findings if finding.name == "mask-ignored"] == ["fragile"]


def test_a_layer_called_by_its_prefill_is_judged(tmp_path):
    assert judged(tmp_path, CLASS.replace("def forward", "def prefill")).verdict == "right"


def test_a_head_does_not_speak_for_the_class_around_it(tmp_path):
    head = """
class Head(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d_model, d_model) for _ in range(3))

    def forward(self, x):
        return (self.q(x) @ self.k(x).mT / x.size(-1) ** 0.5).softmax(-1) @ self.v(x)


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, secret, num_heads):
        super().__init__()
        self.heads = nn.ModuleList(Head(d_model) for _ in range(num_heads))
        self.secret = secret["a word that nobody guesses"]

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], -1)
"""
    assert judged(tmp_path, head).verdict == "unknown"


def test_a_function_that_leaves_the_softmax_to_another_one_is_found(tmp_path):
    functions = """
def sdpa(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v


def mha(X, Wq, Wk, Wv, Wo, n_heads):
    T, d_model = X.shape
    split = lambda M: (X @ M).reshape(T, n_heads, -1).transpose(0, 1)
    return sdpa(split(Wq), split(Wk), split(Wv)).transpose(0, 1).reshape(T, d_model) @ Wo
"""
    report = judged(tmp_path, functions)
    assert report.verdict == "right", report
    assert report.subject.startswith("mha"), report


def test_a_length_that_a_constant_of_the_module_fixes_is_found_out(tmp_path):
    fixed = "n_tokens = 10\n" + CLASS.replace(
        "q, k, v = self.split(x)", "q, k, v = self.split(x.view(-1, n_tokens, x.size(-1)))"
    )
    assert (
        judged(tmp_path, fixed.replace("(self, x, mask=None)", "(self, x)").replace("mask", "None")).verdict
        != "unknown"
    )


def test_escape_codes_in_a_file_do_not_reach_the_terminal(tmp_path):
    path = tmp_path / "attention.py"
    path.write_text(write("separate", "scale-missing").replace("scores =", "'\x1b[2J\x1b]0;owned\x07'; scores =", 1))
    report = check(path)
    assert report.cause == "scale-missing"
    assert "\x1b" not in str(report)
    assert "\x07" not in str(report)


def test_a_bias_that_can_be_asked_for_and_is_never_added_is_named(tmp_path):
    ignored = CLASS.replace("num_heads):", "num_heads, qkv_bias=False):")
    used = ignored.replace("3 * d_model)", "3 * d_model, bias=qkv_bias)")
    assert judged(tmp_path, ignored).cause == "option-ignored"
    assert judged(tmp_path, used).verdict == "right"


def test_a_missing_base_class_is_named_and_nothing_else(tmp_path):
    report = judged(tmp_path, CLASS.replace("(nn.Module)", ""))
    assert [(f.name, f.text) for f in report.wrong] == [("missing-base", "class MultiHeadAttention:")]


def test_the_first_argument_of_a_static_method_is_not_the_object(tmp_path):
    static = "    @staticmethod\n    def weights(scores):\n        return scores.softmax(-1)\n"
    broken = CLASS.replace("scores.softmax(-1)", "self.weigths(scores)") + "\n" + static
    found = {f.name: f.detail for f in judged(tmp_path, broken).wrong}
    assert "weigths" in found["missing-attribute"]
    assert "softmax" not in found["missing-attribute"]


def test_a_class_for_one_token_at_a_time_is_not_blamed_for_five(tmp_path):
    one = CLASS.replace("unflatten(-1, (self.h, self.dk))", "view(x.size(0), 1, self.h, self.dk)")
    said = one.replace("    def __init__", '    """Feed one token (B, 1, E) at a time."""\n\n    def __init__')
    assert judged(tmp_path, one).verdict == "wrong"
    assert judged(tmp_path, said).verdict == "unknown"


STRICT = CLASS.replace("mask=None", "").replace(
    "        if mask is not None:\n            scores = scores.masked_fill(mask == 0, -1e9)\n",
    "        later = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu()\n"
    "        later[0, 0] = False\n"
    "        scores = scores.masked_fill(later, -torch.inf)\n",
)


def test_a_token_may_be_hidden_from_itself_only_if_the_file_says_so(tmp_path):
    stated = STRICT.replace("    def __init__", '    """Causal; a token does not see itself."""\n\n    def __init__')
    assert judged(tmp_path, STRICT).cause == "causal-off-by-one"
    assert judged(tmp_path, stated).cause is None


def test_a_softmax_over_another_axis_explains_what_it_does_to_masks(tmp_path):
    for axis in (0, 1):
        report = judged(tmp_path, CLASS.replace("softmax(-1)", f"softmax({axis})"))
        assert [f.name for f in report.wrong] == ["softmax-axis"], report


def test_weights_that_all_start_at_zero_never_learn(tmp_path):
    one = CLASS.replace("3 * d_model)", "3 * d_model, bias=False)")
    one = one.replace("d_model)\n\n", "d_model)\n        nn.init.zeros_(self.out.weight)\n\n", 1)
    both = one.replace(
        "nn.init.zeros_(self.out.weight)", "nn.init.zeros_(self.out.weight)\n        self.qkv.weight.data.zero_()"
    )
    assert judged(tmp_path, one).verdict == "right"
    assert judged(tmp_path, both).cause == "never-learns"


def test_training_without_the_scale_is_named_although_it_draws_numbers(tmp_path):
    drawn = CLASS.replace("num_heads):", "num_heads, dropout=0.1):").replace(
        "self.h, ", "self.p = dropout\n        self.h, ", 1
    )
    drawn = drawn.replace(
        "        return self.out((scores.softmax(-1)",
        "        weights = scores.softmax(-1)\n"
        "        if self.training:\n"
        "            weights = (scores * 2).softmax(-1)\n"
        "            weights = weights * weights.new_full(weights.shape, 1 - self.p).bernoulli() / (1 - self.p)\n"
        "        return self.out((weights",
    )
    right = drawn.replace("scores * 2", "scores")
    assert judged(tmp_path, drawn).cause == "training-differs"
    assert judged(tmp_path, right).verdict == "right"


def test_attention_across_the_batch_is_wrong_where_the_docstring_puts_the_batch_first(tmp_path):
    block = """
class Block(nn.Module):
    {}

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(embed_dim, num_heads)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]
"""
    stated = judged(tmp_path, block.format('"""Self-attention on embeddings of shape (batch, patches, dim)."""'))
    assert (stated.cause, stated.wrong[0].line) == ("batch-second", 9)
    assert judged(tmp_path, block.format('"""Self-attention."""')).cause is None


CACHED = """
class CachedAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.kept = num_heads, None
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x, mask=None, use_cache=False):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if use_cache and self.kept is not None:
            k, v = torch.cat([self.kept[0], k], 2), torch.cat([self.kept[1], v], 2)
        if use_cache:
            self.kept = k, v
        scores = q @ k.mT / q.size(-1) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask[..., ROWS, : k.size(2)] == 0, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""


def test_a_mask_that_is_cut_to_the_input_must_fit_the_rows_of_a_cached_step(tmp_path):
    wrong = judged(tmp_path, CACHED.replace("ROWS", ": k.size(2)"))
    right = judged(tmp_path, CACHED.replace("ROWS", "k.size(2) - q.size(2) : k.size(2)"))
    assert (wrong.cause, "mask[" in wrong.wrong[0].text) == ("cache-differs", True)
    assert right.cause is None


def test_a_report_fits_a_narrow_terminal(tmp_path):
    report = judged(tmp_path, CLASS.replace("self.dk**0.5", "1"))
    lines = [part for line in report.lines() for part in wrapped(line, 80)]
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(report.lines()).split())
