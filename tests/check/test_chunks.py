"""Tokens taken part by part: with a size in the code, in the module or in the call."""

import pytest
from test_public_habits import RIGHT, changed, judged

WHOLE = """        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        weights = self.dropout(weights)
        heads = torch.matmul(weights, v)
"""
PARTS = """        done = []
        for start in range(0, q.size(2), SIZE):
            scores = torch.matmul(q[:, :, start : start + SIZE], k.transpose(-2, -1)) / math.sqrt(self.head_dim)
            done.append(torch.matmul(self.dropout(torch.softmax(scores, dim=-1)), v))
        heads = torch.cat(done, dim=2)
"""
CHUNKED = changed(RIGHT, (WHOLE, PARTS), (", mask=None", ""))
FORMS = {
    "a number": changed(CHUNKED, ("SIZE", "4")),
    "a constant": changed(CHUNKED, ("\n\nclass", "\nCHUNK = 4\n\n\nclass"), ("SIZE", "CHUNK")),
    "an argument of the call": changed(CHUNKED, ("key, value):", "key, value, chunk_size=4):"), ("SIZE", "chunk_size")),
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_chunks_of_a_fixed_size_are_right(tmp_path, text):
    report = judged(tmp_path, text)
    assert report.verdict == "right", report


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_chunks_in_another_order_are_wrong(tmp_path, text):
    report = judged(tmp_path, changed(text, ("cat(done,", "cat(done[::-1],")))
    assert (report.verdict, report.cause) == ("wrong", "chunks-differ"), report
    assert report.wrong[0].text.startswith("heads = torch.cat")


def test_blocks_that_keep_to_themselves_are_not_called_wrong(tmp_path):
    alone = ("query, key, value):", "x):\n        query = key = value = x")
    text = changed(FORMS["a number"], alone, ("k.transpose(-2, -1)", "k[:, :, start : start + 4].transpose(-2, -1)"),
                   ("dim=-1)), v)", "dim=-1)), v[:, :, start : start + 4])"))  # fmt: skip
    assert judged(tmp_path, text).verdict == "partial"
