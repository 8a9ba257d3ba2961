"""Attention in parts and in steps: right classes are proven right, and one change at a time is found with its line."""

import decoding_styles
import pytest

import headwise
from headwise.check.verdict import judge_file

STYLES = [name for name in vars(decoding_styles) if name.isupper()]
CAP = "        s = self.cap * torch.tanh(s / self.cap)\n"
HIDE = "        if mask is not None:\n            s = s.masked_fill(mask.bool().unsqueeze(1), -torch.inf)\n"
JOIN = "        if past is not None:\n            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)\n"
KEEP = "        kept = (k, v)\n"
# (style, mistake, old text, new text, start of the line that is to blame)
WRONG = [
    ("ONLINE", "chunks-differ", "result = decay * result", "result = result", "result = result +"),
    ("CHUNKS", "chunks-differ", "torch.arange(first, first + some.", "torch.arange(some.", "index ="),
    ("CAPPED", "mask-leaks", CAP + HIDE, HIDE + CAP, "s = s.masked"),
    ("PER_HEAD", "heads-share-weights", "mine = v[..., part]", "mine = v[..., : self.each]", "mine ="),
    ("PER_HEAD", "widths-confused", "heads.view(b, t, self.count * self.each)", "heads.view(x.shape)", "return"),
    ("TABLE", "bias-view", "bias.permute(2, 0, 1)", "bias.reshape(self.num_heads, N, N)", "bias = bias.reshape"),
    ("PAST", "cache-differs", JOIN + KEEP, KEEP + JOIN, "kept = (k, v)"),
    ("PAST", "causal-cache", "visible.tril(S - T)", "visible.tril()", "visible = visible.tril()"),
    ("PLACED", "cache-differs", "self.angles[start_pos:end]", "self.angles[:T]", "angles ="),
    ("PLACED", "rotary-one-side", "q, k = turn(q, angles), turn(k, angles)",
     "q = turn(q, angles)\n        v = turn(v, angles)", "v = turn"),
    ("KEEPING", "remembers-calls", "            self.seen = (k, v)", "        self.seen = (k, v)", "self.seen = (k"),
    ("GROWING", "remembers-calls", "if len(self.future) < n", "if len(self.future) == 0", "if len(self.future)"),
    ("GROWING", "causal-some-lengths", "self.future[:n, :n]", "self.future[-n:, :n]", "return self.future"),
    ("WINDOW", "window-size", "back < self.span", "back <= self.span", "near ="),
    ("PREFIX", "mask-on-queries", "inside[:, None, None, :]", "inside[:, None, :, None]", "inside = inside["),
    ("DOCUMENTS", "mask-replaces-causal", "seen & alike[:, None]", "alike[:, None]", "seen = alike"),
    ("COUNTED", "half-fails", "        p = p.to(v.dtype)\n", "", "return self.proj"),
    ("COUNTED", "mask-after-softmax", "scores = scores.masked_fill(~real, -torch.inf)\n        p = scores.softmax(-1)",
     "p = scores.softmax(-1)\n        p = p * real", "p = p * real"),
    ("WRAPPED", "batch-second", ", batch_first=True", "", "self.inner = nn"),
    ("WRAPPED", "mask-convention", "pad_mask == 0", "pad_mask == 1", "hidden = pad_mask"),
    ("BERT", "mask-rescales", "scores + attention_mask", "scores / 2 + attention_mask", "scores = scores /"),
]  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_a_right_class_is_right(style, tmp_path):
    path = tmp_path / "answer.py"
    path.write_text(getattr(decoding_styles, style))
    report = judge_file(path, thorough=False)
    assert report.verdict in ("right", "variant"), (report.findings, report.doubts, report.certificate)


@pytest.mark.parametrize("style", ["CAPPED", "BERT", "WINDOW", "PREFIX", "DOCUMENTS", "PLACED"])
def test_a_right_class_is_confirmed_by_the_process_that_did_not_load_it(style, tmp_path):
    path = tmp_path / "answer.py"
    path.write_text(getattr(decoding_styles, style))
    report = headwise.check(path)
    assert report.verdict in ("right", "variant"), report.doubts


@pytest.mark.parametrize(("style", "mistake", "old", "new", "blamed"), WRONG)
def test_one_change_is_found_with_its_line(style, mistake, old, new, blamed, tmp_path):
    source = getattr(decoding_styles, style)
    assert source.count(old) == 1
    path = tmp_path / "answer.py"
    path.write_text(source.replace(old, new))
    report = judge_file(path, thorough=False)
    assert report.verdict == "wrong"
    first = report.wrong[0]
    assert first.name == mistake, report.wrong
    assert first.line is not None
    assert path.read_text().splitlines()[first.line - 1].strip().startswith(blamed)


def test_a_cache_that_every_call_must_pass_is_tried_as_an_optional_one_is(tmp_path):
    path = tmp_path / "answer.py"
    source = decoding_styles.PAST.replace("past=None", "past")
    path.write_text(source)
    assert judge_file(path, thorough=False).verdict == "variant"
    path.write_text(source.replace("visible.tril(S - T)", "visible.tril()"))
    assert judge_file(path, thorough=False).cause == "causal-cache"


def test_a_default_that_calls_change_is_found(tmp_path):
    source = decoding_styles.PAST.replace("past=None", "past=[]").replace("if past is not None:", "if past:")
    path = tmp_path / "answer.py"
    path.write_text(source.replace("        T, S =", "        past[:] = kept\n        T, S ="))
    first = judge_file(path, thorough=False).wrong[0]
    assert (first.name, "default of past" in first.detail) == ("remembers-calls", True)
    assert "def forward" in path.read_text().splitlines()[first.line - 1]


def test_a_rate_of_dropout_that_acts_twice_is_fragile(tmp_path):
    source = decoding_styles.WINDOW.replace("span=7", "span=7, weight_drop=0.0, out_drop=0.0")
    source = source.replace(
        "self.heads, self.span =",
        "self.wd, self.od = nn.Dropout(weight_drop), nn.Dropout(out_drop)\n        self.heads, self.span =",
    )
    once = "        y = self.wd(y)\n        return self.od(self.proj("
    source = source.replace("        return self.proj(", once).replace(".reshape(B, T, E))", ".reshape(B, T, E)))")
    path = tmp_path / "answer.py"
    found = []
    for text in (source, source.replace("self.od(", "self.wd(self.od(").replace("E)))", "E))))")):
        path.write_text(text)
        found.append({f.name for f in judge_file(path, thorough=False).findings})
    assert ["dropout-twice" in names for names in found] == [False, True]


def test_dropout_in_evaluation_is_blamed_on_the_keyword_of_a_call_over_several_lines(tmp_path):
    source = decoding_styles.WINDOW.replace("span=7", "span=7, dropout=0.0")
    source = source.replace("self.heads, self.span =", "self.p = dropout\n        self.heads, self.span =")
    path = tmp_path / "answer.py"
    call = "attn_mask=near,\n            dropout_p=self.p,\n        )"
    path.write_text(source.replace("attn_mask=near)", call))
    first = judge_file(path, thorough=False).wrong[0]
    assert (first.name, first.text.strip()) == ("dropout-in-eval", "dropout_p=self.p,")


def test_weights_that_are_mixed_up_on_the_way_out_are_blamed_on_that_line(tmp_path):
    source = decoding_styles.TABLE.replace(
        "        return self.out(", "        p = scores.softmax(-1)\n        y = self.out("
    )
    source += "        shown = p.view(self.num_heads, B, N, N).mean(0)\n        return y, shown\n"
    path = tmp_path / "answer.py"
    path.write_text(source)
    first = judge_file(path, thorough=False).wrong[0]
    assert first.name == "weights-returned"
    assert first.text.strip().startswith("shown =")
