"""Lines that several model answers share: an exercise starts from the answer to the one before it."""

import re
import textwrap

PIECES = {
    "imports": """\
import math

import torch
from torch import Tensor, nn""",
    "three_layers": """\
self.query = nn.Linear(d_model, d_head, bias=False)
self.key = nn.Linear(d_model, d_head, bias=False)
self.value = nn.Linear(d_model, d_head, bias=False)""",
    "four_layers": """\
self.num_heads = num_heads
self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(4))""",
    "scaled_scores": """\
query, key, value = self.query(x), self.key(x), self.value(x)
scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])""",
    "scores_of_all_heads": """\
B, T, E = x.shape
H, D = self.num_heads, E // self.num_heads
query, key, value = (
    project(x).view(B, T, H, D).transpose(1, 2) for project in (self.query, self.key, self.value)
)
scores = query @ key.transpose(-2, -1) / math.sqrt(D)""",
    "block_layers": """\
self.attention = MultiHeadAttention(d_model, num_heads, causal=True)
self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)
self.first_norm, self.second_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)""",
    "block": """\
x = x + self.attention(self.first_norm(x))
return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))""",
}


def source(text: str) -> str:
    """A source in an exercise, without its indentation, with the pieces that it names.

    >>> print(source("class Head:\\n    $three_layers").splitlines()[1])
        self.query = nn.Linear(d_model, d_head, bias=False)
    """
    plain = textwrap.dedent(text).lstrip("\n")
    return re.sub(r"(?m)^( *)\$(\w+)$", lambda found: textwrap.indent(PIECES[found[2]], found[1]), plain)
