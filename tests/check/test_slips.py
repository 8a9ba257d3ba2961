"""Slips of learners: each is one mistake, with the line where it was made and not only where it surfaced."""

import pytest
from test_consequences import only
from test_public_habits import RIGHT, changed, judged

from headwise.check.templates import write

LISTED = write("listed")
SPLIT_Q = "q = self.w_q(query).view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)"
SPLIT_K = "k = self.w_k(key).view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)"
SPLIT_V = "v = self.w_v(value).view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)"
SCORES = "scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim)"
SIZES = "self.num_heads, self.head_dim = num_heads, d_model // num_heads"
WEIGHTS = "weights = torch.softmax(scores, dim=-1)"
DROPPED = "weights = self.dropout(weights)"
HEADS = "heads = torch.matmul(weights, v)"
MERGED = "merged = heads.transpose(1, 2).contiguous().view(batch, -1, self.num_heads * self.head_dim)"
LAYERS = "self.w_o = nn.Linear(d_model, d_model)"
MADE = "self.dropout = nn.Dropout(dropout)"
RETURN = "return self.w_o(merged)"
HEAD_LIST = "nn.ModuleList([Head(embed_dim, embed_dim // heads) for _ in range(heads)])"
JOINED = "torch.cat([head(x, mask) for head in self.heads], dim=-1)"
EARLY = "heads = self.w_o(heads)"
LATE = "weights = weights.masked_fill(torch.ones_like(weights).triu(1).bool(), -math.inf)"
COMMA = "trailing-comma"
WRITTEN = "is written into the code, where this call needs"

# What is changed, the name of the mistake, the start of its line (the change unless given), and words of it.
SLIPS = {
    "a comma behind a tensor": (RIGHT, [(SPLIT_Q, SPLIT_Q + ",")], COMMA, "", "q is a tuple of one"),
    "a comma behind a layer": (RIGHT, [(LAYERS, LAYERS + ",")], COMMA, "", "self.w_o is a tuple of one"),
    "a comma behind scores": (RIGHT, [(SCORES, SCORES + ",")], COMMA, "", "scores is a tuple of one"),
    "a comma behind return": (RIGHT, [(RETURN, RETURN + ",")], COMMA, "", "returned as a tuple of one"),
    "a rate that is called": (RIGHT, [(MADE, "self.dropout = dropout")], "not-callable", "", "the number 0.0"),
    "scores by *": (
        RIGHT, [(SCORES, "scores = q * k / math.sqrt(self.head_dim)")], "elementwise-product", "", "tokens × tokens",
    ),
    "scores by * with turned keys": (
        RIGHT, [("torch.matmul(q, k.transpose(-2, -1))", "q * k.transpose(-2, -1)")], "elementwise-product", "scores =",
        "q @ k.transpose(-2, -1) fits",
    ),
    "weights * values": (RIGHT, [(HEADS, "heads = weights * v")], "elementwise-product", "", "weights @ v fits"),
    "* everywhere": (
        RIGHT, [(SCORES, "scores = q * k / math.sqrt(self.head_dim)"), (HEADS, "heads = weights * v")],
        "elementwise-product", "scores =", "tokens × tokens",
    ),
    "queries with heads behind tokens": (
        RIGHT, [(SPLIT_Q, SPLIT_Q.removesuffix(".transpose(1, 2)"))], "product-axes", "", "in q the heads",
    ),
    "queries and keys with heads behind tokens": (
        RIGHT, [(split, split.removesuffix(".transpose(1, 2)")) for split in (SPLIT_Q, SPLIT_K)],
        "product-axes", SPLIT_Q.removesuffix(".transpose(1, 2)"), "in q and k the heads",
    ),
    "queries and values with heads behind tokens": (
        RIGHT, [(split, split.removesuffix(".transpose(1, 2)")) for split in (SPLIT_Q, SPLIT_V)],
        "product-axes", SPLIT_Q.removesuffix(".transpose(1, 2)"), "in q and v the heads",
    ),
    "values that are not split": (
        RIGHT, [(SPLIT_V, "v = self.w_v(value)"), (HEADS, "heads = self.read(weights, v)"),
                ("    def forward", "    def read(self, w, x):\n        return w @ x\n\n    def forward")],
        "product-axes", "v = self.w_v(value)", "x is not split into heads",
    ),
    "an output projection that is never called": (
        RIGHT, [(RETURN, "return merged")], "no-out-proj", "", "call self.w_o, which is made",
    ),
    "an output projection before the heads are joined": (
        RIGHT, [(HEADS, f"{HEADS}\n        {EARLY}"), (RETURN, "return merged")], "out-proj-per-head", EARLY,
        "the heads are not concatenated yet",
    ),
    "a head width of 64": (
        RIGHT, [(SIZES, "self.num_heads = num_heads\n        self.head_dim = 64")], "size-fixed", "self.head_dim = 64",
        f"self.head_dim = 64 {WRITTEN} 8, the head width",
    ),
    "a view of 8 heads": (
        RIGHT, [(SPLIT_Q, "q = self.w_q(query).view(batch, -1, 8, 64).transpose(1, 2)")], "size-fixed", "",
        f"8 {WRITTEN} 4, the number of heads",
    ),
    "a layer of 512": (RIGHT, [(LAYERS, "self.w_o = nn.Linear(512, 512)")], "size-fixed", "", f"512 {WRITTEN} 32"),
    "a merge to 512": (
        RIGHT, [("self.num_heads * self.head_dim)", "512)"), ("batch, -1, 512", "batch, query.size(1), 512")],
        "size-fixed", "merged =", f"512 {WRITTEN} 32",
    ),
    "8 heads whatever was asked for": (
        RIGHT, [(SIZES, "self.num_heads = 8\n        self.head_dim = d_model // 8")], "size-fixed",
        "self.num_heads = 8", "the constructor takes num_heads and uses 8",
    ),
    "a projection cut along the tokens": (
        write("fused"), [("split(C, dim=2)", "split(C, dim=1)")], "parts-count", "q, k, v =", "gives 1 of",
    ),
    "a projection of twice the width": (
        write("fused"), [("3 * n_embd", "2 * n_embd")], "parts-count", "self.c_attn =", "gives 2 of",
    ),
    "a list of heads that is not joined": (
        LISTED, [(JOINED, "[head(x, mask) for head in self.heads]")], "list-for-tensor", "y = [", "list of 4 tensors",
    ),
    "heads joined along the tokens": (
        LISTED, [("self.heads], dim=-1", "self.heads], dim=1")], "joined-axis", "y =", "",
    ),
    "heads that are added": (
        LISTED, [(JOINED, "sum(head(x, mask) for head in self.heads)")], "layer-width", "y = sum",
        "self.out takes width 32",
    ),
    "heads of the whole width": (
        LISTED, [(HEAD_LIST, "nn.ModuleList([Head(embed_dim, size) for _ in range(heads)])"),
                 ("        self.heads", "        size = embed_dim\n        self.heads")],
        "too-wide", "size = embed_dim", "4 heads of 32",
    ),
    "a list of layers that is called": (
        LISTED, [(JOINED, "self.heads(x, mask)")], "not-callable", "y =", "list of 4 layers",
    ),
    "a method without the mask": (
        RIGHT, [(SCORES, "scores = self.scored(q, k, mask)"),
                ("    def forward", "    def scored(self, q, k):\n        return q @ k.mT\n\n    def forward")],
        "wrong-arguments", "scores = self.scored", "it takes (q, k) and is given (q, k, mask)",
    ),
    "a helper without return": (
        RIGHT, [("self.w_o(merged)", "self.project(merged)"),
                ("    def forward", "    def project(self, x):\n        self.w_o(x)\n\n    def forward"),
                ("return self.project(merged)", "out = self.project(merged)\n        return out.clone()")],
        "helper-no-return", "self.w_o(x)", "project ends without return",
    ),
    "a layer in place of its result": (
        RIGHT, [(WEIGHTS, "weights = nn.Softmax(dim=-1)")], "not-called", "", "takes the thing itself",
    ),
    "a shape that is called": (
        RIGHT, [("query.size(0)", "query.shape()[0]")], "not-callable", "batch =", "query.shape is the shape",
    ),
    "a shape of three sizes for two names": (
        LISTED, [("B, T, C = x.shape", "B, T = self.query(x).shape")], "parts-count", "B, T =", "2 names",
    ),
    "a float that reaches another class": (
        LISTED, [("embed_dim // heads", "embed_dim / heads")], "float-size", "self.query", "head_size is 8.0",
    ),
    "a causal mask that multiplies": (
        write("fused"), [('att.masked_fill(self.bias[:T, :T] == 0, float("-inf"))', "att * self.bias[:T, :T]")],
        "mask-leaks", "att = att * self.bias", "near zero",
    ),
    "letters of einsum": (
        LISTED, [("bqd,bkd->bqk", "bqd,bqd->bq")], "einsum-letters", "scores =", "weights is (53 samples, 5 tokens)",
    ),
    "a misspelled base": (RIGHT, [("nn.Module)", "nn.Moudle)")], "unknown-name", "class", "did you mean Module?"),
    "another name for an import": (
        LISTED, [("import torch.nn as nn", "import torch.nn as nm")], "missing-import", "",
        "nn; torch.nn is imported as nm",
    ),
    "a base with parentheses": (RIGHT, [("(nn.Module)", "(nn.Module())")], "missing-base", "class", "not nn.Module()"),
    "a part with a misspelled base": (
        LISTED, [("class Head(nn.Module)", "class Head(nn.Modul)")], "unknown-name", "class Head", "",
    ),
    "a causal mask of infinities after the softmax": (
        RIGHT, [(WEIGHTS, f"{WEIGHTS}\n        {LATE}")], "mask-after-softmax", LATE, "NaN",
    ),
    "a bias after the softmax": (
        RIGHT, [(MADE, f"{MADE}\n        self.bias = nn.Parameter(torch.zeros(num_heads, 1, 1))"),
                (WEIGHTS, f"{WEIGHTS}\n        weights = weights + self.bias")],
        "bias-after-softmax", "weights = weights + self.bias", "rows of the weights sum to",
    ),
    "a bias of the caller after the softmax": (
        RIGHT, [("mask=None", "mask=None, bias=None"),
                (WEIGHTS, f"{WEIGHTS}\n        if bias is not None:\n            weights = weights + bias")],
        "bias-after-softmax", "weights = weights + bias", "argument bias",
    ),
    "dropout of a fixed rate that is never applied": (
        RIGHT, [(", dropout=0.1", ""), (MADE, "self.dropout = nn.Dropout(0.1)"), (DROPPED, "pass")], "dropout-unused",
        "self.dropout = nn.Dropout(0.1)", "self.dropout is made and never called",
    ),
    "attention between the numbers of a head": (
        RIGHT, [(".transpose(1, 2)", ".transpose(2, 3)"), ("if mask is not None", "if False")], "attends-over-features",
        "q = ", "8×8",
    ),
    "keys × queries by a product": (
        RIGHT, [(SCORES, "scores = torch.matmul(k, q.transpose(-2, -1)) / math.sqrt(self.head_dim)")],
        "scores-transposed", "", "row t compares key t with every query",
    ),
    "keys × queries by letters": (
        RIGHT, [(SCORES, 'scores = torch.einsum("bhtd,bhsd->bhst", q, k) / math.sqrt(self.head_dim)')],
        "scores-transposed", "", "row t compares key t with every query",
    ),
    "keys and values exchanged in a call": (
        RIGHT, [(SCORES, "heads = self.attend(q, v, k)\n        return self.w_o(heads.transpose(1, 2).flatten(2))"),
                ("key, value, mask=None", "key, value"), ("if mask is not None", "if False"),
                ("    def forward", f"    def attend(self, q, k, v):\n        {SCORES}\n"
                 "        return self.dropout(scores.softmax(-1)) @ v\n\n    def forward")],
        "wrong-role", "heads = self.attend(q, v, k)", "the key is made from the argument for the value",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "pairs", "name", "line", "words"), SLIPS.values(), ids=SLIPS)
def test_slip_is_one_mistake_with_its_own_line(tmp_path, text, pairs, name, line, words):
    found = only(judged(tmp_path, changed(text, *pairs)))
    assert found.name == name
    assert found.text.startswith(line or pairs[0][1])
    assert words in found.detail


def test_proof_speaks_of_all_changes_together_and_only_of_what_it_proves(tmp_path):
    scale, merge = ("math.sqrt(self.head_dim)", "math.sqrt(32)"), ("heads.transpose(1, 2).contiguous()", "heads")
    both = judged(tmp_path, changed(RIGHT, scale, merge))
    assert both.proof.startswith("with these 2 changes together the output equals")
    mask = ('masked_fill(mask == 0, float("-inf"))', "masked_fill(mask == 0, 1e-9)")
    one = judged(tmp_path, changed(RIGHT, scale, mask))
    assert len(one.wrong) == 2
    assert "this call gives what the reference gives" in one.proof
    assert "the other mistake shows in other calls" in one.proof
    late = judged(
        tmp_path,
        changed(
            RIGHT,
            ("if mask is not None", "if False"),
            (DROPPED, "weights = weights if mask is None else weights * mask"),
        ),
    )
    assert (late.cause, late.proof) == ("mask-after-softmax", "")  # the call without a mask was right already


def test_first_of_two_definitions_is_said_to_be_lost(tmp_path):
    wrong = changed(RIGHT, (" / math.sqrt(self.head_dim)", ""))
    report = judged(tmp_path, wrong + RIGHT)
    assert report.exit_code == 0
    assert report.replaced == ["the first MultiHeadAttention (line 6), which the one in line 32 replaces"]
    assert "not judged: the first MultiHeadAttention (line 6)" in " ".join(str(report).split())
    found = only(judged(tmp_path, RIGHT + wrong))
    assert found.line > len(RIGHT.splitlines())
    twice = changed(RIGHT, ("    def forward", "    def forward(self, x):\n        return x\n\n    def forward"))
    assert judged(tmp_path, twice).replaced[0].startswith("the first forward (line 14)")


def test_dropout_on_the_output_is_mentioned(tmp_path):
    late = changed(RIGHT, (DROPPED, "pass"), (RETURN, "return self.dropout(self.w_o(merged))"))
    report = judged(tmp_path, late)
    assert report.exit_code == 0
    assert any("dropout acts on the output, not on the weights" in item.words for item in report.certificate)
    assert not any("acts on the output" in item.words for item in judged(tmp_path, RIGHT).certificate)


def test_default_that_is_used_as_a_tensor_is_named(tmp_path):
    always = changed(RIGHT, ("        if mask is not None:\n    ", ""))
    found = only(judged(tmp_path, always))
    assert found.name == "option-crashes"
    assert found.detail == "mask is None unless it is given, and this line uses it as a tensor"
