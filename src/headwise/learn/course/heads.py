"""Exercises 5 to 7: a list of heads, split and merge, all heads at once."""

import torch

from headwise.learn.course.exercise import DocumentedCall, Exercise, Part, Space, WrongPartError, close, made, needs
from headwise.learn.course.pieces import source

B, T, H, D = 2, 5, 3, 7


def _width(space: Space) -> None:
    """Fail if the sizes of all matrices are those of heads of another width, side by side."""
    for d_model, heads in ((12, 3), (24, 4)):
        layer = made(space, "HeadList", d_model, heads)
        layer(torch.randn(2, 5, d_model))  # what does not fit raises an error, which is told elsewhere
        shapes = [sorted(p.shape) for p in layer.parameters() if p.dim() == 2]
        count = sum(rows * columns for rows, columns in shapes)
        for width in range(1, 2 * d_model + 1):
            is_it = count == 4 * heads * d_model * width and sorted((heads * width, d_model)) in shapes
            if is_it and width != d_model // heads:
                raise WrongPartError(
                    f"with d_model {d_model} and {heads} heads, every head is {width} wide; expected d_model / "
                    f"num_heads = {d_model // heads}"
                )


LIST = Exercise(
    "list-of-heads",
    "A list of heads",
    difficulty=2,
    minutes=15,
    idea="One head gives a token one set of weights. Several small heads give it several, for the same cost: each "
    "reads something different. Their outputs are put side by side, and a last matrix mixes them.",
    solution=source('''
        """Exercise 5: a list of heads."""

        $imports


        class SmallHead(nn.Module):
            """One causal head."""

            def __init__(self, d_model: int, d_head: int) -> None:
                """Copy what you wrote in exercise 4."""
                super().__init__()
                $three_layers

            def forward(self, x: Tensor) -> Tensor:
                """x (B, T, d_model) → (B, T, d_head)"""
                $scaled_scores
                future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
                return scores.masked_fill(future, -math.inf).softmax(-1) @ value


        class HeadList(nn.Module):
            """Several heads side by side."""

            def __init__(self, d_model: int, num_heads: int) -> None:
                """Make num_heads heads of width d_model / num_heads, and a projection that mixes them."""
                super().__init__()
                self.heads = nn.ModuleList(SmallHead(d_model, d_model // num_heads) for _ in range(num_heads))
                self.out = nn.Linear(d_model, d_model)

            def forward(self, x: Tensor) -> Tensor:
                """x (B, T, d_model) → (B, T, d_model)"""
                return self.out(torch.cat([head(x) for head in self.heads], dim=-1))
    '''),
    judged="HeadList",
    call=DocumentedCall((12, 3), ((2, 5, 12),), (2, 5, 12), causal=True),
    parts=(
        Part(
            "the heads",
            "A plain Python list hides its modules from .parameters(). What does torch offer instead?",
            "nn.ModuleList holds one causal head of width d_model // num_heads for every head.",
            "self.heads = nn.ModuleList(SmallHead(d_model, d_model // num_heads) for _ in range(num_heads))",
            steps=(1, 2, 3, 4, 5, 6, 7, 8),
            last=_width,
        ),
        Part(
            "the concatenation",
            "Each head gives (B, T, d_head). Along which axis do they go side by side?",
            "Concatenate along the last axis. A sum or a mean would mix the heads before the projection can.",
            "torch.cat([head(x) for head in self.heads], dim=-1)",
            steps=(9,),
        ),
        Part(
            "the output projection",
            "Where do the heads learn to work together?",
            "Pass the concatenated heads through one more nn.Linear(d_model, d_model).",
            "return self.out(...)",
            steps=(10,),
        ),
    ),
    more="docs/ladder.md measures why the next two exercises are worth it: headwise bench --ladder.",
)


def _split_shape(space: Space) -> None:
    for heads in (H, H + 2):
        found = needs(space, "split_heads")(torch.zeros(B, T, heads * D), heads)
        if tuple(found.shape) != (B, heads, T, D):
            raise WrongPartError(
                f"split_heads gives shape {tuple(found.shape)}; expected {(B, heads, T, D)}, that is (B, H, T, D)"
            )


def _split_numbers(space: Space) -> None:
    x = torch.arange(B * T * H * D, dtype=torch.float32).view(B, T, H * D)
    wanted = torch.stack([x[..., h * D : (h + 1) * D] for h in range(H)], 1)
    close(needs(space, "split_heads")(x, H), wanted, "split_heads(x, 3)")


def _merge(space: Space) -> None:
    for count in (H, H + 2):
        heads = torch.arange(B * count * T * D, dtype=torch.float32).view(B, count, T, D)
        close(needs(space, "merge_heads")(heads), torch.cat(heads.unbind(1), -1), "merge_heads(heads)")


SPLIT = Exercise(
    "split-and-merge",
    "Split and merge",
    difficulty=3,
    minutes=15,
    idea="One large projection gives the queries of all heads at once, side by side in the last axis. A view cuts that "
    "axis into heads and a transpose moves the heads beside the batch: no number is computed, and one matrix product "
    "then serves all heads.",
    solution=source('''
        """Exercise 6: split and merge."""

        from torch import Tensor


        def split_heads(x: Tensor, num_heads: int) -> Tensor:
            """Cut the last axis into heads and move them beside the batch. Head 0 holds the first D numbers.

            x (B, T, H·D) → (B, H, T, D)
            """
            B, T, E = x.shape
            return x.view(B, T, num_heads, E // num_heads).transpose(1, 2)


        def merge_heads(heads: Tensor) -> Tensor:
            """The inverse: the heads of a token side by side again.

            heads (B, H, T, D) → (B, T, H·D)
            """
            B, H, T, D = heads.shape
            return heads.transpose(1, 2).contiguous().view(B, T, H * D)
    '''),
    parts=(
        Part(
            "the shape of the split",
            "What is the width of one head?",
            "E // num_heads numbers belong to each head; the head axis ends up after the batch.",
            "return x.view(B, T, num_heads, E // num_heads).transpose(1, 2)",
            _split_shape,
        ),
        Part(
            "the numbers of the split",
            "What does view(B, H, T, D) do to the order of the numbers?",
            "A view never moves a number, so it can only cut the last axis. Moving the heads in front of the tokens "
            "takes a transpose.",
            "return x.view(B, T, num_heads, E // num_heads).transpose(1, 2)",
            _split_numbers,
        ),
        Part(
            "the merge",
            "Which of the two operations of the split must be undone first?",
            "Move the heads back behind the tokens, then flatten. After a transpose, view needs contiguous(); reshape "
            "and flatten copy by themselves.",
            "return heads.transpose(1, 2).contiguous().view(B, T, H * D)",
            _merge,
        ),
    ),
    more="headwise steps measures what view, transpose and contiguous do to memory.",
)

_AT_ONCE = (
    Part(
        "the projections",
        "How wide is the projection that makes the queries of all heads at once?",
        "d_model to d_model: num_heads heads of width d_model // num_heads side by side.",
        "query, key, value = self.query(x), self.key(x), self.value(x)",
        steps=(1,),
    ),
    Part(
        "the split",
        "All heads are side by side in the last axis. Where must the head axis be for one product per head?",
        "Cut the last axis into (num_heads, d_head), then move the heads beside the batch.",
        "query = self.query(x).view(B, T, H, D).transpose(1, 2)",
        steps=(2, 3),
    ),
    Part(
        "scores and scale",
        "Which two axes does the product work on, and what do the axes before them do?",
        "It works on the last two axes and gives (T, T) for every sample and head. The scale uses the width of a head.",
        "scores = query @ key.transpose(-2, -1) / math.sqrt(D)",
        steps=(4, 6),
    ),
    Part(
        "the mask",
        "What may the first token see, and which scores must not count?",
        "Scores above the diagonal belong to later tokens. They become -inf before the softmax, in every head.",
        "weights = scores.masked_fill(future, -math.inf).softmax(-1)",
        steps=(5,),
    ),
    Part(
        "softmax and values",
        "What shape do the weights have now?",
        "(B, H, T, T) @ (B, H, T, D) gives every head its own average.",
        "heads = scores.softmax(-1) @ value",
        steps=(7, 8),
    ),
    Part(
        "the merge",
        "In which order are the axes now, and which two must be adjacent to become one?",
        "Transpose back, then flatten the last two axes.",
        "merged = heads.transpose(1, 2).contiguous().view(B, T, H * D)",
        steps=(9,),
    ),
    Part(
        "the output projection",
        "Where are the heads mixed?",
        "One more nn.Linear(d_model, d_model) on the merged heads.",
        "return self.out(merged)",
        steps=(10,),
    ),
)

AT_ONCE = Exercise(
    "all-heads-at-once",
    "All heads at once",
    difficulty=3,
    minutes=25,
    idea="The class of every textbook: four matrices, one split, one product for all heads, one merge. It computes "
    "what the list of heads computes, in a few large operations instead of many small ones.",
    solution=source('''
        """Exercise 7: all heads at once."""

        $imports


        class MultiHeadAttention(nn.Module):
            """Causal multi-head self-attention."""

            def __init__(self, d_model: int, num_heads: int) -> None:
                """Make four projections from d_model to d_model; every head is d_model // num_heads wide."""
                super().__init__()
                $four_layers

            def forward(self, x: Tensor) -> Tensor:
                """x (B, T, d_model) → (B, T, d_model)"""
                B, T, E = x.shape
                H, D = self.num_heads, E // self.num_heads
                query = self.query(x).view(B, T, H, D).transpose(1, 2)  # (B, H, T, D)
                key = self.key(x).view(B, T, H, D).transpose(1, 2)
                value = self.value(x).view(B, T, H, D).transpose(1, 2)
                scores = query @ key.transpose(-2, -1) / math.sqrt(D)  # (B, H, T, T)
                future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
                weights = scores.masked_fill(future, -math.inf).softmax(-1)
                merged = (weights @ value).transpose(1, 2).contiguous().view(B, T, E)
                return self.out(merged)
    '''),
    judged="MultiHeadAttention",
    call=DocumentedCall((12, 3), ((2, 5, 12),), (2, 5, 12), causal=True),
    parts=_AT_ONCE,
    more="headwise.MultiHeadAttention is this layer at the speed of the fastest kernel: docs/layer.md.",
)

EXERCISES = (LIST, SPLIT, AT_ONCE)
