"""Writes the notebooks in examples/notebooks: one path for each kind of document, and the course.

python docs/tools/notebooks.py
"""

from pathlib import Path

from headwise.learn.course import EXERCISES
from headwise.learn.course.notebooks import INSTALL, as_json, course_notebook, notebook

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
Cells = list[tuple[str, str]]
MD, PY = "markdown", "code"

JUDGED = """%%headwise_check
import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))
"""

COURSE: Cells = [
    (
        MD,
        "# A course's assignment: multi-head attention\n\n"
        "Write the class, have it judged, see what its heads do, and go on to a block.",
    ),
    (PY, INSTALL),
    (MD, "## The shapes first\n\nTen steps on real tensors of the assignment's sizes."),
    (PY, "!headwise steps --form course --d-model 512 --heads 8 --seq 10 --batch 2"),
    (
        MD,
        "## Your class\n\n"
        "`%%headwise_check` runs a cell and judges the class in it. This one has a mistake."
        " The report names the cell and the line.",
    ),
    (PY, "%load_ext headwise.check"),
    (
        PY,
        JUDGED
        + """
    def split_heads(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, x, mask=None):
        Q, K, V = self.split_heads(self.W_q(x)), self.split_heads(self.W_k(x)), self.split_heads(self.W_v(x))
        scores = Q @ K.transpose(-2, -1) / x.size(-1) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        attention = F.softmax(scores, dim=-1)
        output = (attention @ V).transpose(1, 2).reshape(x.shape)
        return self.W_o(output), attention""",
    ),
    (
        MD,
        "Mend line 18 (`self.d_k` in place of `x.size(-1)`) and run the cell again until it says RIGHT.\n\n"
        "## The assignment's own class, and the fast layer\n\nThe same weights, the same numbers.",
    ),
    (
        PY,
        """import torch
from headwise import textbook

mine = textbook.Course(d_model=512, num_heads=8)
x = torch.randn(2, 10, 512)
output, attention = mine(x)
layer = mine.to_layer()
print(output.shape, attention.shape, (layer(x)[0] - output).abs().max().item())""",
    ),
    (MD, "## What heads do with words"),
    (PY, '!headwise steps "The quick brown fox jumps"'),
    (
        MD,
        "## Next: a Transformer block\n\n"
        "`headwise course 12` hands out the exercise; here is its skeleton, graded as you write.",
    ),
    (
        PY,
        """from headwise.learn.course import find, grade

print(find("block").skeleton)
print(grade(find("block"), globals()).sentence())""",
    ),
]

BOOK: Cells = [
    (MD, "# A book's section: from one causal head to all heads at once"),
    (PY, INSTALL),
    (MD, "## One causal head"),
    (
        PY,
        """import torch
from headwise.textbook import CausalAttention, MultiHeadAttn, MultiHeadedAttentionWrapper

torch.manual_seed(0)
x = torch.randn(2, 6, 32)
head = CausalAttention(32, 8, context_length=16, dropout=0.0)
print(head(x).shape)""",
    ),
    (MD, "## Several heads: the structure"),
    (PY, "from headwise.learn.course import structure\n\nprint(structure(32, 4))"),
    (MD, "## The wrapper: a list of heads\n\nEvery head is `d_out` wide, so the output is `num_heads · d_out` wide."),
    (
        PY,
        """wrapper = MultiHeadedAttentionWrapper(32, 8, context_length=16, dropout=0.0, num_heads=4)
print(wrapper(x).shape)""",
    ),
    (MD, "## The class: all heads at once"),
    (
        PY,
        """efficient = MultiHeadAttn(32, 32, context_length=16, dropout=0.0, num_heads=4)
print(efficient(x).shape)
print(sum(p.numel() for p in wrapper.parameters()), sum(p.numel() for p in efficient.parameters()))""",
    ),
    (MD, "## Why the class is faster\n\nTime, memory and launches of three rungs, on this machine."),
    (PY, "!headwise bench --ladder --lengths 64 --d-model 64 --heads 4 --seconds 0.05"),
    (MD, "## The same weights in the fused layer"),
    (
        PY,
        """layer = efficient.to_layer()
torch.testing.assert_close(layer(x), efficient(x))
print(layer)""",
    ),
    (MD, "## Your own file"),
    (
        PY,
        """from headwise import check

print(check(MultiHeadAttn))""",
    ),
]

HOMEWORK: Cells = [
    (MD, "# A homework guide: ten steps, four operations, one checklist"),
    (PY, INSTALL),
    (MD, "## The card"),
    (PY, "!headwise course --card"),
    (MD, "## Dimension tracking, with GPT-2's sizes"),
    (PY, "!headwise steps --form homework --d-model 768 --heads 12 --seq 100 --batch 4"),
    (MD, "## The template, used"),
    (
        PY,
        """import torch
from headwise.textbook import Homework

mha = Homework(d_in=768, d_out=768, context_length=1024, dropout=0.1, num_heads=12)
x = torch.randn(4, 100, 768)
output = mha(x)
assert output.shape == x.shape and not output.isnan().any()
print(output.shape)""",
    ),
    (MD, "## What the causal mask does"),
    (
        PY,
        """from headwise import causal

print(causal())""",
    ),
    (MD, "## Why scale: measured\n\nWithout the scale, dot products spread like √D and the softmax saturates."),
    (
        PY,
        """for width in (4, 64, 1024):
    scores = (torch.randn(1000, 16, width) * torch.randn(1000, 1, width)).sum(-1)
    print(width, f"spread {scores.std():.1f}, largest weight {scores.softmax(-1).amax(-1).mean():.2f}",
          f"scaled {(scores / width ** 0.5).softmax(-1).amax(-1).mean():.2f}")""",
    ),
    (MD, "## The minimal version, judged as a fragment"),
    (
        PY,
        '''from pathlib import Path

Path("minimal.py").write_text("""
def forward(self, x):
    b, n, _ = x.shape
    q = self.W_q(x).view(b, n, self.h, self.d).transpose(1, 2)
    k = self.W_k(x).view(b, n, self.h, self.d).transpose(1, 2)
    v = self.W_v(x).view(b, n, self.h, self.d).transpose(1, 2)
    scores = (q @ k.transpose(-2, -1) / self.d**0.5).masked_fill(self.mask[:n, :n].bool(), -torch.inf)
    return self.proj((scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, n, self.d_out))
""")''',
    ),
    (PY, "!headwise check minimal.py"),
]

INTERVIEW: Cells = [
    (MD, "# An interview: implement it, explain it, count it"),
    (PY, INSTALL),
    (MD, "## The questions"),
    (PY, "!headwise course --interview"),
    (MD, "## Your code\n\nWrite it here; the checker accepts any style and names a mistake with its line."),
    (PY, "%load_ext headwise.check"),
    (
        PY,
        JUDGED
        + """
    def forward(self, Q, K, V, mask=None):
        q, k, v = (
            project(x).view(x.size(0), -1, self.num_heads, self.d_k).transpose(1, 2)
            for project, x in ((self.W_q, Q), (self.W_k, K), (self.W_v, V))
        )
        scores = q @ k.transpose(-2, -1) / self.d_k**0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
        return self.W_o((weights @ v).transpose(1, 2).reshape(Q.shape))""",
    ),
    (MD, "## The tests of the question"),
    (
        PY,
        """mha = MultiHeadAttention(512, 8)
q = torch.randn(2, 10, 512)
print(mha(q, q, q).shape, sum(p.numel() for p in mha.parameters()))
print(mha(q, q, q, torch.tril(torch.ones(10, 10))).shape)""",
    ),
    (MD, "## Follow-ups in numbers"),
    (PY, "!headwise cost --d-model 512 --heads 8 --bias"),
    (MD, "## Say it in your own words"),
    (
        PY,
        '!headwise course --interview root --answer "Scores grow with the width, the softmax saturates."',
    ),
    (MD, "## Find the mistake in somebody else's class"),
    (PY, "!headwise quiz"),
]

HANDBOOK: Cells = [
    (MD, "# A handbook's chapter: what the heads do, side by side"),
    (PY, INSTALL),
    (MD, "## Ten steps on words\n\nWhat every head reads, then concatenated, then through the output projection."),
    (PY, '!headwise steps "The quick brown fox jumps"'),
    (MD, "## The same as a page\n\nEvery number can be hovered; mask, scale and the number of heads can be switched."),
    (
        PY,
        """from headwise.learn import word_steps, words_page
from pathlib import Path

steps = word_steps("The quick brown fox jumps")
Path("fox.html").write_text(words_page(steps), encoding="utf-8")
print(steps.words)""",
    ),
    (MD, "## Heat maps of every head"),
    (
        PY,
        """from headwise import load_builtin, view

view(load_builtin(), "The cat that I saw yesterday ran away")""",
    ),
    (MD, "## The class"),
    (
        PY,
        """import torch
from headwise.textbook import Handbook

mha = Handbook(512, 8)
x = torch.randn(2, 10, 512)
output, weights = mha(x, x, x)
print(output.shape, weights.shape)""",
    ),
    (MD, "## Configurations of known models"),
    (PY, "!headwise cost --models"),
    (
        MD,
        "## If one head fails, do others compensate?\n\n"
        "Silence the previous-token head of layer 4 and compare the loss.",
    ),
    (
        PY,
        """from headwise import silence

model = load_builtin()
tokens = model.tokens("The captain looked at the sea, and the sea looked at the captain.")
def loss():
    logits = model.gpt(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]).item()

with torch.no_grad():
    whole = loss()
    with silence(model.gpt, {"blocks.4.attention": [2]}):
        print(f"loss {whole:.2f} with all heads, {loss():.2f} without head 4.2")""",
    ),
]

PATHS = {"course": COURSE, "book": BOOK, "homework": HOMEWORK, "interview": INTERVIEW, "handbook": HANDBOOK}


def notebooks() -> dict[str, str]:
    """The notebooks by file name."""
    made = {f"{name}.ipynb": as_json(notebook(cells)) for name, cells in PATHS.items()}
    return made | {"exercises.ipynb": as_json(course_notebook(EXERCISES))}


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in notebooks().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
