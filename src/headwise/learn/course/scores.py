"""Exercises 1 to 4: dot products and softmax, one head, the scale, the mask."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headwise.learn.course.exercise import DocumentedCall, Exercise, Part, Space, WrongPartError, close, needs
from headwise.learn.course.pieces import source

T, S, D, DV = 3, 5, 7, 2


def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(T, D), torch.randn(S, D), torch.randn(S, DV)


def _scores(space: Space) -> None:
    query, key, _ = _tensors()
    close(needs(space, "scores")(query, key), query @ key.T, "scores(query, key)")


class _Calls(TorchFunctionMode):
    """Remembers the functions of torch that are called, under any name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def _softmax(space: Space) -> None:
    scores = torch.randn(T, S)
    with _Calls() as calls:
        found = needs(space, "softmax")(scores)
    close(found, scores.softmax(-1), "softmax(scores)")
    if (own := min((name for name in calls.names if "softmax" in name), default=None)) is not None:
        raise WrongPartError(f"it calls torch's {own}; here you write it yourself, with exp")


def _large(space: Space) -> None:
    scores = torch.tensor([[1000.0, 1001.0], [-2000.0, -2003.0]])
    close(needs(space, "softmax")(scores), scores.softmax(-1), "softmax([[1000, 1001], [-2000, -2003]])")


def _average(space: Space) -> None:
    query, key, value = _tensors()
    close(needs(space, "attend")(query, key, value), (query @ key.T).softmax(-1) @ value, "attend(query, key, value)")


DOT_PRODUCTS = Exercise(
    "dot-products",
    "Dot products and softmax",
    difficulty=1,
    minutes=15,
    idea="Attention is a weighted average. A dot product says how well a query matches a key; the softmax turns the "
    "matches of one query into weights that are positive and sum to 1; the result is the average of the values.",
    solution=source('''
        """Exercise 1: dot products and softmax."""

        import torch
        from torch import Tensor


        def scores(query: Tensor, key: Tensor) -> Tensor:
            """How well every query matches every key: one dot product for each pair.

            query (T, D), key (S, D) → scores (T, S)
            """
            return query @ key.T


        def softmax(scores: Tensor) -> Tensor:
            """Weights that are positive and sum to 1 over the keys. Write it with exp, without torch's softmax.

            scores (T, S) → weights (T, S)
            """
            powers = torch.exp(scores - scores.max(-1, keepdim=True).values)
            return powers / powers.sum(-1, keepdim=True)


        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            """The average of the values, weighted by how well their keys match the query.

            query (T, D), key (S, D), value (S, Dv) → (T, Dv)
            """
            return softmax(scores(query, key)) @ value
    '''),
    parts=(
        Part(
            "the scores",
            "Which axis do the two tensors share, and which product sums over it?",
            "A matrix product sums over the last axis of the first and the first axis of the second, so the keys must "
            "be transposed.",
            "return query @ key.T",
            _scores,
        ),
        Part(
            "the softmax",
            "Over which axis must the weights of one query sum to 1?",
            "Take exp of every score, then divide each row by its sum. keepdim=True keeps the axis, so that the "
            "division lines up.",
            "return powers / powers.sum(-1, keepdim=True)",
            _softmax,
        ),
        Part(
            "the softmax of large scores",
            "What is exp(1000) in float32?",
            "Subtracting the same number from all scores of a row does not change its softmax. Which number makes the "
            "largest power exp(0)?",
            "powers = torch.exp(scores - scores.max(-1, keepdim=True).values)",
            _large,
        ),
        Part(
            "the average of the values",
            "The weights are (T, S) and the values (S, Dv): what is left if you sum over S?",
            "The functions above give the weights; one more matrix product averages the values with them.",
            "return softmax(scores(query, key)) @ value",
            _average,
        ),
    ),
    more="headwise steps TEXT shows the same on words; docs/steps.md has the pictures.",
)

ONE_HEAD = Exercise(
    "one-head",
    "One head",
    difficulty=2,
    minutes=15,
    idea="A token looks for something, offers something, and passes something on. Three learned matrices make the "
    "query, the key and the value from the same token. A head is those three matrices and the average of exercise 1.",
    solution=source('''
        """Exercise 2: one head."""

        import torch
        from torch import Tensor, nn


        class Head(nn.Module):
            """One attention head, without scale and mask; exercises 3 and 4 add those."""

            def __init__(self, d_model: int, d_head: int) -> None:
                """Make three projections from d_model to d_head: for queries, keys and values."""
                super().__init__()
                $three_layers

            def forward(self, x: Tensor) -> Tensor:
                """Every token reads the values of all tokens, weighted by the softmax of query · key.

                x (B, T, d_model) → (B, T, d_head)
                """
                query, key, value = self.query(x), self.key(x), self.value(x)  # (B, T, d_head)
                scores = query @ key.transpose(-2, -1)  # (B, T, T)
                return scores.softmax(-1) @ value
    '''),
    judged="Head",
    call=DocumentedCall((13, 7), ((2, 5, 13),), (2, 5, 7)),
    ignores=("scale-missing",),
    early=(
        "scores are not scaled",
        "the scores are scaled by 1/√d_head; leave that to exercise 3, this head has no scale",
    ),
    parts=(
        Part(
            "the three projections",
            "How many learned matrices does one head have, and what goes into each?",
            "All three take x: one nn.Linear makes queries, one keys, one values.",
            "query, key, value = self.query(x), self.key(x), self.value(x)",
            steps=(1,),
        ),
        Part(
            "the scores",
            "Keys are (B, T, d_head) now. Which two axes must change places before the product?",
            "transpose(-2, -1) swaps the last two axes and leaves the batch alone; .T would reverse all of them.",
            "scores = query @ key.transpose(-2, -1)",
            steps=(4,),
        ),
        Part(
            "the softmax",
            "Which axis of the scores counts keys?",
            "A row is a query and a column is a key, so the weights of a row sum to 1: the last axis.",
            "weights = scores.softmax(-1)",
            steps=(7,),
        ),
        Part(
            "the weighted values",
            "What is multiplied with the weights: the keys, the values or x?",
            "The weights say how much to read from each token; what is read is the value.",
            "return scores.softmax(-1) @ value",
            steps=(8,),
        ),
    ),
    more="headwise steps --form head shows the shapes.",
)


def _enough(spread: Callable[[int], float]) -> None:
    """Fail if measurements differ more than those of 10,000 dot products, which differ by 1 %."""
    found = torch.tensor([float(spread(4)) for _ in range(8)])
    if found.std() > 0.03 * found.mean():
        raise WrongPartError(
            f"spread(4) is {found.min():.3g} in one call and {found.max():.3g} in another: with at least 10,000 dot "
            "products, they would agree to a few percent"
        )


def _spread(space: Space) -> None:
    spread = needs(space, "spread")
    _enough(spread)
    for width in (4, 64):
        found = float(spread(width))
        if math.isclose(found, math.sqrt(width), rel_tol=1e-7):  # a measurement is never that exact
            raise WrongPartError(f"spread({width}) is exactly √{width}: nothing is measured")
        if not 0.85 * math.sqrt(width) < found < 1.15 * math.sqrt(width):
            raise WrongPartError(
                f"spread({width}) is {found:.3g}; dot products of {width} terms spread by {math.sqrt(width):g}"
            )


SCALE = Exercise(
    "scale",
    "The scale",
    difficulty=2,
    minutes=10,
    idea="A dot product of D random terms has a standard deviation of √D. With wide heads the largest score wins the "
    "whole softmax and gradients vanish. Dividing by √D keeps the scores in the same range for every width.",
    solution=source('''
        """Exercise 3: the scale."""

        $imports


        def spread(width: int) -> float:
            """Measure it: the standard deviation of at least 10,000 dot products of random vectors (torch.randn).

            Each of the two vectors has `width` numbers. Return a number.
            """
            first, second = torch.randn(2, 20_000, width)
            return float((first * second).sum(-1).std())


        class ScaledHead(nn.Module):
            """One attention head with the scale."""

            def __init__(self, d_model: int, d_head: int) -> None:
                """Make the three projections, as before."""
                super().__init__()
                $three_layers

            def forward(self, x: Tensor) -> Tensor:
                """As before, with scores that have the same spread for every d_head.

                x (B, T, d_model) → (B, T, d_head)
                """
                $scaled_scores
                return scores.softmax(-1) @ value
    '''),
    judged="ScaledHead",
    call=DocumentedCall((13, 7), ((2, 5, 13),), (2, 5, 7)),
    parts=(
        Part(
            "the measurement",
            "How do you get many dot products at once, without a loop?",
            "Multiply two tensors (n, width) element by element and sum over the last axis: n dot products.",
            "return float((first * second).sum(-1).std())",
            _spread,
        ),
        Part(
            "the head itself",
            "Does it still do what the head of exercise 2 did?",
            "Start from your own Head, and change the scores only.",
            "query, key, value = self.query(x), self.key(x), self.value(x)",
            steps=(1, 4, 7, 8),
        ),
        Part(
            "the scale",
            "Which width does the sum in one score run over: that of the model or that of the head?",
            "Divide the scores, before the softmax, by the square root of the width of a query.",
            "scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])",
            steps=(6,),
        ),
    ),
    more="The interview asks why: headwise course --interview.",
)


def _triangle(space: Space) -> None:
    for length in (5, 3):
        found = needs(space, "causal_mask")(length)
        close(found, torch.ones(length, length).tril().bool(), f"causal_mask({length})")


def _blind(space: Space) -> None:
    torch.manual_seed(0)
    head = needs(space, "CausalHead")(13, 7).eval()
    x = torch.randn(2, 5, 13)
    changed = x.clone()
    changed[:, 3:] += 1
    with torch.no_grad():
        before, after = head(x), head(changed)
    if not torch.allclose(before[:, :3], after[:, :3], atol=1e-5, equal_nan=True):
        raise WrongPartError("tokens 0 to 2 changed when only tokens 3 and 4 did: they see the future")


MASK = Exercise(
    "mask",
    "The mask",
    difficulty=2,
    minutes=15,
    idea="A model that predicts the next token must not see it. A hidden score becomes −∞ before the softmax, so its "
    "weight is exactly 0 and the other weights still sum to 1.",
    solution=source('''
        """Exercise 4: the mask."""

        $imports


        def causal_mask(length: int) -> Tensor:
            """True where a query (row) may see a key (column): itself and earlier tokens.

            → boolean, (length, length)
            """
            return torch.ones(length, length, dtype=torch.bool).tril()


        class CausalHead(nn.Module):
            """One attention head that cannot see the future."""

            def __init__(self, d_model: int, d_head: int) -> None:
                """Make the three projections, as before."""
                super().__init__()
                $three_layers

            def forward(self, x: Tensor) -> Tensor:
                """As before; token i reads tokens 0 to i.

                x (B, T, d_model) → (B, T, d_head)
                """
                $scaled_scores
                visible = causal_mask(x.shape[1]).to(x.device)
                scores = scores.masked_fill(~visible, -math.inf)
                return scores.softmax(-1) @ value
    '''),
    judged="CausalHead",
    call=DocumentedCall((13, 7), ((2, 5, 13),), (2, 5, 7), causal=True),
    parts=(
        Part(
            "the triangle",
            "Row i is a query. Up to which column may it look?",
            "A lower triangle with the diagonal: torch.tril of ones. True means visible.",
            "return torch.ones(length, length, dtype=torch.bool).tril()",
            _triangle,
        ),
        Part(
            "the scaled head",
            "Does it still do what the head of exercise 3 did?",
            "Start from your own ScaledHead; the mask is one more line between the scale and the softmax.",
            "scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])",
            steps=(1, 4, 6, 7, 8),
        ),
        Part(
            "the future is hidden",
            "Which number has an exponential of exactly 0?",
            "Fill the hidden scores with −∞ before the softmax. In it, a score of 0 counts as exp(0) = 1.",
            "scores = scores.masked_fill(~visible, -math.inf)",
            _blind,
        ),
        Part(
            "nothing else is hidden",
            "Does every token still see itself, and do its weights still sum to 1?",
            "The mask goes before the softmax; the diagonal stays visible.",
            "scores = scores.masked_fill(~visible, -math.inf)",
            steps=(5,),
        ),
    ),
    more="docs/masks.md: masks as rules that combine with & | ~.",
)

EXERCISES = (DOT_PRODUCTS, ONE_HEAD, SCALE, MASK)
