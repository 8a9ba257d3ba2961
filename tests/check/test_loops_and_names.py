"""Attention in loops and sums, names in other scripts, names that only the file's example explains, and layouts."""

import pytest

from headwise.check.templates import write
from headwise.check.verdict import judge_file

RIGHT = write("separate")

START = """
import math

import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.h, self.dk = n_heads, d_model // n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (w(x).view(B, T, self.h, self.dk).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
"""
END = """
        return self.wo(out.transpose(1, 2).reshape(B, T, C))
"""
QUERIES = """
        rows = []
        for i in range(T):
            scores = q[:, :, i : i + 1] @ k.mT / math.sqrt(self.dk)
            rows.append(scores.softmax(-1) @ v)
        out = torch.cat(rows, dim=2)
"""
CAUSAL = """
        rows = []
        for i in range(T):
            scores = q[:, :, i : i + 1] @ k[:, :, : i + 1].mT / math.sqrt(self.dk)
            rows.append(scores.softmax(-1) @ v[:, :, : i + 1])
        out = torch.cat(rows, dim=2)
"""
SUMS = """
        scores = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) / math.sqrt(self.dk)
        out = (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)
"""
SINGLE = """
        out = torch.zeros(B, self.h, T, self.dk, dtype=x.dtype)
        for b in range(B):
            for h in range(self.h):
                for i in range(T):
                    scores = k[b, h] @ q[b, h, i] / math.sqrt(self.dk)
                    out[b, h, i] = torch.softmax(scores, dim=0) @ v[b, h]
"""


def judged(folder, text):
    file = folder / "student.py"
    file.write_text(text)
    return judge_file(file, thorough=False)


@pytest.mark.parametrize(
    ("body", "verdict"),
    [(QUERIES, "right"), (CAUSAL, "variant"), (SUMS, "right"), (SINGLE, "partial")],
    ids=["one product per query", "with the keys so far", "products as sums", "one product per sample, head and query"],
)
def test_attention_in_loops_and_sums_is_read(tmp_path, body, verdict):
    report = judged(tmp_path, START + body + END)
    assert (report.verdict, report.findings) == (verdict, [])
    assert report.certificate[0].status == "verified"


@pytest.mark.parametrize(
    ("body", "right", "wrong", "cause"),
    [
        (QUERIES, "math.sqrt(self.dk)", "math.sqrt(C)", "scale-d_model"),
        (CAUSAL, "v[:, :, : i + 1]", "v[:, :, -(i + 1) :]", None),
        (CAUSAL, ": i + 1]", ": i + 2]", "causal-future"),
        (SUMS, "softmax(-1)", "softmax(-2)", "softmax-axis"),
        (SUMS, "math.sqrt(self.dk)", "math.sqrt(T)", "scale-length"),
    ],
)
def test_mistakes_in_loops_and_sums_are_found(tmp_path, body, right, wrong, cause):
    text = (START + body + END).replace(right, wrong)
    report = judged(tmp_path, text.replace("x[:, :, : i + 1]", "x"))
    assert report.verdict in ("wrong", "unknown")
    if cause is not None:
        assert report.verdict == "wrong"
        assert report.wrong[0].line is not None


NAMES = [
    "输入维度 头数 查询 键 值 掩码", "入力次元 ヘッド数 クエリ キー バリュー マスク",
    "모델_차원 헤드_수 쿼리 키 값 마스크",
    "размер_модели число_голов запрос ключ значение маска",
    "dimensión número_cabezas consulta clave valor máscara",
    "taille_modèle nb_têtes requête clé valeur masque",
]  # fmt: skip


@pytest.mark.parametrize("names", NAMES, ids=["Chinese", "Japanese", "Korean", "Russian", "Spanish", "French"])
def test_names_in_other_languages_are_understood(tmp_path, names):
    names = names.split()
    text = RIGHT.replace("d_model", names[0]).replace("num_heads", names[1])
    for plain, name in zip(("query", "key", "value", "mask"), names[2:], strict=True):
        text = text.replace(f"{plain},", f"{name},").replace(f"({plain})", f"({name})").replace(f"{plain}=", f"{name}=")
        text = text.replace(f"{plain} is", f"{name} is").replace(f"{plain} ==", f"{name} ==")
        text = text.replace(f"{plain}.shape", f"{name}.shape").replace(f"{plain}.size", f"{name}.size")
    report = judged(tmp_path, text)
    assert report.verdict in ("right", "variant"), report


def test_example_of_the_file_tells_what_unknown_names_mean(tmp_path):
    text = RIGHT.replace("d_model, num_heads", "aa, bb, cc, dd").replace("d_model", "aa").replace("num_heads", "dd")
    text = text.replace(
        "self.dd, self.head_dim = dd", "assert bb == aa and cc == 10\n        self.dd, self.head_dim = dd"
    )
    text = text.replace("cc == 10", "cc > dd")
    report = judged(tmp_path, f"{text}\n\nprint(MultiHeadAttention(8, 8, 10, 2))\n")
    assert report.verdict in ("right", "variant"), report


def test_heads_cut_along_the_tokens_are_not_read_as_a_class_without_a_batch(tmp_path):
    cut = """
        parts = [t.chunk(self.h, dim=1) for t in (self.wq(x), self.wk(x), self.wv(x))]
        heads = [(a @ b.mT / math.sqrt(self.dk)).softmax(-1) @ c for a, b, c in zip(*parts)]
        return self.wo(torch.cat(heads, dim=1))
"""
    report = judged(tmp_path, START.partition("        q, k, v")[0] + cut)
    assert (report.cause, report.wrong[0].text[:7]) == ("sees-a-part", "parts =")


def test_input_widths_of_their_own_leave_the_width_of_all_heads_to_the_heads(tmp_path):
    text = RIGHT.replace("d_model, num_heads", "q_dim, k_dim, v_dim, hidden, out_dim, num_heads").replace(
        "d_model", "hidden"
    )
    for name in ("q", "k", "v"):
        text = text.replace(f"self.w_{name} = nn.Linear(hidden", f"self.w_{name} = nn.Linear({name}_dim")
    text = text.replace("self.w_o = nn.Linear(hidden, hidden", "self.w_o = nn.Linear(hidden, out_dim")
    assert judged(tmp_path, text).verdict in ("right", "variant")


def test_names_passed_in_another_order_are_a_wrong_role(tmp_path):
    fused = """
        q, k, v = self.qkv(x).view(B, T, self.h, 3 * self.dk).transpose(1, 2).chunk(3, dim=-1)
        out = attend(q, v, k)
"""
    helper = """

def attend(query, key, value):
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value
"""
    text = START.partition("        q, k, v")[0] + fused + END + helper
    text = text.replace("self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))",
                        "self.qkv, self.wo = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)")  # fmt: skip
    found = judged(tmp_path, text).wrong
    assert [(f.name, f.detail, f.text) for f in found] == [
        ("wrong-role", "v is passed as key", "out = attend(q, v, k)")
    ]
    assert judged(tmp_path, text.replace("(q, v, k)", "(q, k, v)")).verdict == "right"
