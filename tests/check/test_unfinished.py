"""Unfinished work: the steps that exist are judged, and the report says which one comes next."""

import json

import pytest
import torch
from torch import nn

from headwise import check
from headwise.check.code.source import with_bodies
from headwise.check.report import Report
from headwise.check.unfinished.completion import Completed
from headwise.check.unfinished.progress import STEPS
from headwise.check.verdict import judge_file
from headwise.learn.steps import Setting, trace

IMPORTS = "import math\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n"
LAYERS = """class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q, self.W_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.W_v, self.W_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        B, T, E = query.shape
"""
CODE = {
    1: "q, k, v = self.W_q(query), self.W_k(key), self.W_v(value)",
    2: "q, k, v = (t.view(B, -1, self.num_heads, self.d_k) for t in (q, k, v))",
    3: "q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)",
    4: "scores = q @ k.transpose(-2, -1)",
    6: "scores = scores / math.sqrt(self.d_k)",
    5: "scores = scores if mask is None else scores.masked_fill(mask == 0, float('-inf'))",
    7: "weights = F.softmax(scores, dim=-1)",
    8: "out = weights @ v",
    9: "out = out.transpose(1, 2).reshape(B, -1, self.num_heads * self.d_k)",
    10: "out = self.W_o(out)",
}
WHOLE = [*CODE.values(), "return out"]


def written(*lines):
    return IMPORTS + LAYERS + "".join(f"        {line}\n" for line in lines)


def judged(folder, source):
    path = folder / "attention.py"
    path.write_text(source)
    return judge_file(path, thorough=False)


def up_to(step):
    """The code of all steps up to this one, in the order in which it is written."""
    order = list(CODE)
    return [CODE[number] for number in order[: order.index(step) + 1]]


def numbers(report):
    return [int(step.split()[0]) for step in report.done]


STOPS = [
    (1, ["pass"], [1], 2),
    (2, ["raise NotImplementedError"], [1, 2], 3),
    (3, ["# YOUR CODE HERE", "return None"], [1, 2, 3], 4),
    (4, ["..."], [1, 2, 3, 4], 5),
    (6, ["# TODO: the rest"], [1, 2, 3, 4, 6], 5),
    (5, ["return scores"], [1, 2, 3, 4, 5, 6], 7),
    (7, ["out = ...", "return self.W_o(out)"], [1, 2, 3, 4, 5, 6, 7], 8),
    (7, ["# TODO: weighted sum", "return output"], [1, 2, 3, 4, 5, 6, 7], 8),
    (8, [], [1, 2, 3, 4, 5, 6, 7, 8], 9),
    (9, ["# TODO: project", "return out"], [1, 2, 3, 4, 5, 6, 7, 8, 9], 10),
]


@pytest.mark.parametrize(("last", "end", "done", "following"), STOPS, ids=[f"{s[0]}-{' '.join(s[1])}" for s in STOPS])
def test_steps_before_the_gap_are_right_and_the_next_one_is_named(last, end, done, following, tmp_path):
    report = judged(tmp_path, written(*up_to(last), *end))
    assert (report.verdict, numbers(report)) == ("unfinished", done), report
    assert report.next.startswith(f"step {following}, ")
    assert report.exit_code == 2


def test_report_names_the_line_and_one_hint_and_survives_json(tmp_path):
    report = judged(tmp_path, written(*up_to(4), "raise NotImplementedError"))
    assert report.lines()[1:] == [
        "UNFINISHED  steps 1 to 4 are right (project, split, transpose, scores); "
        "next: step 5, hide the keys that a query may not see",
        "        it ends at line 19",
        f"        hint: {STEPS[5].hint}",
    ]
    data = json.loads(json.dumps(report.to_dict()))
    assert (data["verdict"], data["done"][3], data["next"][:6]) == ("unfinished", "4 scores", "step 5")
    assert Report.from_dict(data).lines() == report.lines()


HEADS_FIRST = "{0} = self.W_{0}({1}).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)"
HEADS_BEHIND = HEADS_FIRST.removesuffix(".transpose(1, 2)")


@pytest.mark.parametrize("behind", ["v", "qk", "qv"])
@pytest.mark.parametrize("last", [3, 4, 7])
def test_what_still_has_the_heads_behind_the_tokens_is_named_in_unfinished_code(behind, last, tmp_path):
    if (behind, last) in [("qk", 7), ("qv", 4), ("qv", 7)]:
        pytest.skip("these products raise an error or run between heads, which the ordinary judgment names")
    made = [
        (HEADS_BEHIND if name in behind else HEADS_FIRST).format(name, given)
        for name, given in (("q", "query"), ("k", "key"), ("v", "value"))
    ]
    report = judged(tmp_path, written(*made, *(CODE[n] for n in (4, 6, 7) if n <= last), "raise NotImplementedError"))
    assert report.verdict == "unfinished"
    assert 3 not in numbers(report)
    named = ", and in ".join(line for line in made if line[0] in behind)
    assert report.next == f"step 3, move the heads in front of the tokens (still behind them in {named})"


def test_values_that_einsum_takes_as_they_are_need_no_transposition_in_unfinished_code(tmp_path):
    lines = [CODE[1], CODE[2], 'weights = (torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_k)).softmax(-1)']
    report = judged(tmp_path, written(*lines, "raise NotImplementedError"))
    assert 3 in numbers(report)


def test_steps_have_the_names_of_the_ten_steps():
    taught = {step.number: step.name for step in trace(Setting.of())}
    assert {number: step.name for number, step in STEPS.items()} == taught


def changed(step, line, *end):
    """The code up to a step with that step written differently, then an end."""
    return written(*up_to(step)[:-1], line, *end)


WRONG = {
    "scale-d_model": changed(6, "scores = scores / math.sqrt(E)", "raise NotImplementedError"),
    "softmax-axis": changed(7, "weights = F.softmax(scores, dim=1)", "pass"),
    "merge-view": changed(9, "out = out.reshape(B, -1, self.num_heads * self.d_k)", "# TODO: project", "pass"),
    "split-view": written(CODE[1], "q, k, v = (t.view(B, self.num_heads, -1, self.d_k) for t in (q, k, v))", "..."),
    "scale-missing": written(*up_to(4), CODE[7], "raise NotImplementedError('values')"),
    "no-out-proj": written(*up_to(9), "return out"),
    "no-return": written(*WHOLE[:-1]),
    "missing-attribute": written(*up_to(4), "# TODO: softmax", "pass").replace("self.W_k(key)", "self.w_k(key)"),
}


@pytest.mark.parametrize("cause", WRONG)
def test_mistake_in_an_existing_step_is_named(cause, tmp_path):
    report = judged(tmp_path, WRONG[cause])
    assert (report.verdict, report.cause) == ("wrong", cause), report


@pytest.mark.parametrize("words", ["# TODO: optimise with flash attention", "# TODO: scale, then mask", "pass"])
def test_placeholder_in_finished_code_changes_nothing(words, tmp_path):
    assert judged(tmp_path, written(words, *WHOLE)).verdict == "right"


def test_empty_method_that_no_call_reaches_excuses_nothing(tmp_path):
    source = written(*up_to(9), "return out") + "\n    def reset(self):\n        pass\n"
    assert judged(tmp_path, source).cause == "no-out-proj"


def test_mask_left_for_later_is_the_only_step_missing(tmp_path):
    lines = [line for line in WHOLE if line != CODE[5]]
    lines.insert(lines.index(CODE[7]), "# TODO: apply the mask")
    report = judged(tmp_path, written(*lines))
    assert (report.verdict, numbers(report)) == ("unfinished", [1, 2, 3, 4, 6, 7, 8, 9, 10])


@pytest.mark.parametrize("body", ["pass", "raise NotImplementedError('split')", "# TODO"])
def test_empty_helper_is_supplied_so_that_the_steps_after_it_are_judged(body, tmp_path):
    split = f"\n    def split_heads(self, x):\n        {body}\n"
    lines = [CODE[1], "q, k, v = (self.split_heads(t) for t in (q, k, v))", *WHOLE[3:]]
    report = judged(tmp_path, written(*lines) + split)
    assert (report.verdict, numbers(report)) == ("unfinished", [1, 4, 5, 6, 7, 8, 9, 10]), report


def test_class_without_forward_starts_at_the_first_step(tmp_path):
    report = judged(tmp_path, IMPORTS + LAYERS.partition("    def forward")[0])
    assert (report.verdict, report.done, report.next[:6]) == ("unfinished", [], "step 1")


def test_body_of_a_comment_alone_is_no_syntax_error():
    assert with_bodies("def f(x):\n    # TODO\n") == "def f(x):\n    pass  # TODO\n"
    assert with_bodies("def f(x):\nprint(1)\n") == "def f(x):\nprint(1)\n"


# Functions and fragments.


FUNCTION = """def attention(q, k, v, mask=None):
    B, H, T, D = q.shape
    scores = q @ k.transpose(-2, -1) / math.sqrt(D)
    scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)
    return scores.softmax(-1) @ v
"""


def test_function_is_judged_as_a_whole_and_says_what_is_not_part_of_it(tmp_path):
    report = judged(tmp_path, IMPORTS + FUNCTION)
    assert (report.exit_code, report.call) == (0, "inputs of shape (B, H, T, D)")
    assert "the split into heads" in " ".join(report.variants)
    assert judged(tmp_path, IMPORTS + FUNCTION.replace("sqrt(D)", "sqrt(H * D)")).cause == "scale-d_model"
    assert judged(tmp_path, IMPORTS + FUNCTION.replace(".softmax(-1)", ".softmax(-2)")).cause == "softmax-axis"


CORE_CLASS = """class ScaledDotProductAttention(nn.Module):
    def __init__(self, {option}, attn_dropout=0.1):
        super().__init__()
        self.{option}, self.dropout = {option}, nn.Dropout(attn_dropout)

    def forward(self, q, k, v, mask=None):
        scores = torch.matmul(q {by} self.{option}{power}, k.transpose(2, 3))
        scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)
        weights = self.dropout(scores.softmax(-1))
        return torch.matmul(weights, v), weights
"""


@pytest.mark.parametrize(
    ("option", "by", "power", "given"),
    [("temperature", "/", "", "√head_dim"), ("scale", "*", "", "1/√head_dim"), ("d_k", "/", "**0.5", "head_dim")],
)
def test_class_without_weights_gets_from_its_caller_what_the_head_width_decides(option, by, power, given, tmp_path):
    source = IMPORTS + "from torch import nn\n" + CORE_CLASS.format(option=option, by=by, power=power)
    report = judged(tmp_path, source)
    assert (report.verdict, report.subject) == ("variant", f"ScaledDotProductAttention({option}={given})"), report
    assert report.call == "forward(q, k, v, mask), inputs of shape (B, H, T, D)"
    assert judged(tmp_path, source.replace(".softmax(-1)", ".softmax(-2)")).cause == "softmax-axis"
    assert judged(tmp_path, source.replace("self.dropout(scores", "(scores")).cause.startswith("dropout")


def test_unfinished_function_starts_at_the_scores(tmp_path):
    head, _, _ = FUNCTION.partition("    scores = scores if")
    report = judged(tmp_path, IMPORTS + head + "    # TODO\n")
    assert (report.verdict, numbers(report), report.next[:6]) == ("unfinished", [4, 6], "step 5")
    report = judged(tmp_path, IMPORTS + "def attention(q, k, v):\n    pass\n")
    assert (report.verdict, report.next[:6]) == ("unfinished", "step 4")


FORWARD = """def forward(self, x):
    B, T, C = x.shape
    q, k, v = self.qkv_proj(x).view(B, T, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)).softmax(-1)
    return self.out_proj((weights @ v).transpose(1, 2).reshape(B, T, C))
"""


def test_forward_outside_a_class_is_judged_with_layers_inferred_by_name(tmp_path):
    report = judged(tmp_path, FORWARD)
    assert report.exit_code == 0, report
    assert "self.qkv_proj is nn.Linear(d_model, 3 * d_model)" in report.assumed
    assert judged(tmp_path, FORWARD.replace("self.head_dim))", "C))")).cause == "scale-d_model"
    report = judged(tmp_path, FORWARD.partition("    return")[0] + "    # TODO: values\n")
    assert (report.verdict, numbers(report)) == ("unfinished", [1, 2, 3, 4, 6, 7])


def test_bare_statements_are_judged(tmp_path):
    source = "q, k, v = W_q(x), W_k(x), W_v(x)\nscores = q @ k.transpose(-2, -1) / math.sqrt(d_model)\n"
    report = judged(tmp_path, "import math\n" + source)
    assert report.verdict in ("unfinished", "wrong"), report
    assert "W_q is nn.Linear(d_model, d_model)" in report.assumed


BLOCKS = {
    "project": """queries = to_q(x)
keys = to_k(x)
values = to_v(x)
""",
    "split": """queries = queries.view(batch, seq, num_heads, head_dim).transpose(1, 2)
keys = keys.view(batch, seq, num_heads, head_dim).transpose(1, 2)
values = values.view(batch, seq, num_heads, head_dim).transpose(1, 2)
""",
    "score": """scores = queries @ keys.transpose(2, 3)
scores.masked_fill_(mask, float("-inf"))
weights = (scores / head_dim**0.5).softmax(dim=-1)
context = weights @ values
""",
    "merge": """context = context.transpose(1, 2).reshape(batch, seq, -1)
result = to_out(context)
""",
}


@pytest.mark.parametrize(("last", "following"), [("project", "step 2"), ("split", "step 4"), ("score", "step 9")])
def test_statements_in_the_order_of_the_steps_are_right_as_far_as_they_go(last, following, tmp_path):
    names = list(BLOCKS)[: list(BLOCKS).index(last) + 1]
    report = judged(tmp_path, "".join(BLOCKS[name] for name in names))
    assert (report.verdict, report.next[:6]) == ("unfinished", following), report


def test_statements_with_every_step_are_judged_as_a_forward_would_be(tmp_path):
    whole = "".join(BLOCKS.values())
    assert judged(tmp_path, whole).exit_code == 0
    assert judged(tmp_path, whole.replace("head_dim**0.5", "head_dim")).cause.startswith("scale-")
    assert judged(tmp_path, whole.replace("softmax(dim=-1)", "softmax(dim=-2)")).cause == "softmax-axis"


def test_statements_that_begin_with_split_queries_are_judged_as_a_function(tmp_path):
    report = judged(tmp_path, BLOCKS["score"])
    assert (report.verdict, report.call) == ("variant", "inputs of shape (B, H, T, D)"), report
    assert "head_dim is queries.shape[-1]" in report.assumed
    queries_and_keys = "Q = torch.randn(2, 3, 5, 7)\nK = torch.randn(2, 3, 5, 7)\nscores = Q @ K.transpose(2, 3)\n"
    report = judged(tmp_path, "import torch\n" + queries_and_keys)
    assert (report.verdict, numbers(report)) == ("unfinished", [4]), report
    assert judged(tmp_path, BLOCKS["score"].replace("/ head_dim**0.5", "")).cause == "scale-missing"


CAUSAL = """import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_in, d_out, context_length, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_out // num_heads
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out) for _ in range(3))
        self.out_proj = nn.Linear(d_out, d_out)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (w(x) for w in (self.W_query, self.W_key, self.W_value))
        q, k, v = (y.view(b, n, self.num_heads, -1).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(2, 3)
"""
DROPPED = "        scores.masked_fill(self.mask.bool()[:n, :n], -torch.inf)\n"
SOFTMAX = "        weights = torch.softmax(scores / self.head_dim**0.5, dim=-1)\n"


@pytest.mark.parametrize("rest", ["", SOFTMAX], ids=["up to the mask", "up to the softmax"])
def test_a_mask_whose_result_is_thrown_away_is_named_in_unfinished_code(rest, tmp_path):
    report = judged(tmp_path, CAUSAL + DROPPED + rest)
    assert (report.verdict, report.cause) == ("wrong", "mask-discarded"), report
    assert report.wrong[0].text.strip() == DROPPED.strip()


def test_a_stored_mask_that_is_not_used_yet_is_the_next_step(tmp_path):
    report = judged(tmp_path, CAUSAL)
    assert (report.verdict, report.next[:6]) == ("unfinished", "step 5"), report


def test_script_that_has_nothing_to_do_with_attention_is_not_called_unfinished(tmp_path):
    assert judged(tmp_path, "import torch\nx = torch.randn(3, 4)\ny = x.sum()\n").verdict == "unknown"


class Half(nn.Module):
    """Written up to the projections."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v = (nn.Linear(d_model, d_model) for _ in range(3))

    def forward(self, x):
        for layer in (self.W_q, self.W_k, self.W_v):
            layer(x)
        raise NotImplementedError


def test_live_class_is_judged_as_a_file_is():
    report = check(Half)
    assert (report.verdict, report.done) == ("unfinished", ["1 project"])


def test_completed_call_has_the_signature_and_parameters_of_the_learners_object():
    from headwise.check.arguments import Built, CallSizes
    from headwise.check.binding import Instance
    from headwise.check.environment import Repaired
    from headwise.check.objects import signature

    half = Half(32, 4)
    completed = Completed(
        Instance(half, Built(lambda: half, "Half()", {}), CallSizes(), Repaired()), lambda error: True
    )
    assert [p.name for p in signature(completed)] == ["x"]
    assert [name for name, _ in completed.named_parameters()] == [name for name, _ in half.named_parameters()]
    assert completed(torch.randn(53, 5, 32)).shape == (53, 5, 32)
    assert completed.reached.steps == {1}


SHORT_NAMES = """def forward(self, x):
    b, n, _ = x.shape
    q, k, v = (t.view(b, n, self.h, self.d).transpose(1, 2) for t in (self.w_q(x), self.w_k(x), self.w_v(x)))
    scores = q @ k.transpose(-2, -1) / self.d**0.5
    {mask}
    return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, -1))
"""


@pytest.mark.parametrize(
    "mask",
    [
        "scores = scores.masked_fill(self.mask[:n, :n].bool(), -torch.inf)",
        "hidden = self.mask.bool()[:n, :n]; scores.masked_fill_(hidden, -torch.inf)",
        "scores = scores.masked_fill(self.mask[:n, :n] == 0, -torch.inf)",
    ],
    ids=["ones hide", "ones hide, by another name", "zeros hide"],
)
def test_a_fragment_says_by_its_code_what_its_width_and_its_mask_are(mask, tmp_path):
    assert judged(tmp_path, SHORT_NAMES.format(mask=mask)).verdict == "variant"
    inverted = mask.replace("== 0", "== 1").replace(".bool()", " == 0") if "==" in mask else mask
    if inverted != mask:
        assert judged(tmp_path, SHORT_NAMES.format(mask=inverted)).verdict == "wrong"


def test_masks_that_are_refused_as_not_implemented_come_next(tmp_path):
    refusing = SHORT_NAMES.format(mask="if mask is not None:\n        raise NotImplementedError('masks come later')")
    report = judged(tmp_path, refusing.replace("(self, x)", "(self, x, mask=None)"))
    assert report.verdict == "unfinished"
    assert report.next == "step 5, hide the keys that a query may not see"
    assert [step.partition(" ")[0] for step in report.done] == ["1", "2", "3", "4", "6", "7", "8", "9", "10"]
