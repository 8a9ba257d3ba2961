"""The follow-up questions of interviews, answered with the numbers of the case at hand."""

import dataclasses
from typing import NamedTuple

from headwise.learn.cost import Cost, alternatives, human


class Answer(NamedTuple):
    """A question and its answer in numbers."""

    question: str
    answer: str


def answers(cost: Cost) -> list[Answer]:
    """Why several heads, what complexity, what grouped heads save, why a fused kernel: with the numbers of this `cost`.

    >>> answers(Cost.of(512, 8, seq=10))[0].question
    'Why several heads instead of one large one?'
    """
    return [_several_heads(cost), _complexity(cost), _grouped(cost), _matrix(cost), _decoding(cost)]


def _several_heads(cost: Cost) -> Answer:
    H, D = cost.num_heads, cost.head_dim
    one = one_large_head(cost)
    return Answer(
        "Why several heads instead of one large one?",
        f"One head of width {H * D} takes the same {human(one.matrices.value)} parameters and {human(one.flops)} "
        f"operations in matrix products as {H} of width {D}, and gives each token one set of weights over the keys "
        f"instead of {H}. The price: scores of a head have rank {D} at most, and there are {H} times as many.",
    )


def one_large_head(cost: Cost) -> Cost:
    """The same widths in a single head."""
    width = cost.num_heads * cost.head_dim
    return dataclasses.replace(cost, num_heads=1, num_kv_heads=1, head_dim=width, qk_norm=False, sinks=False)


def _complexity(cost: Cost) -> Answer:
    projections, scores = split_of(cost)
    window = cost.reach if cost.window is None else cost.window
    longer = dataclasses.replace(cost, seq=2 * cost.seq)
    projections_2, scores_2 = split_of(longer)
    return Answer(
        "What is the complexity?",
        f"O(T·E²) for projections and O(T²·E) for scores: at {cost.seq} tokens {human(projections)} and "
        f"{human(scores)} operations, at {longer.seq} {projections_2 / projections:.0f} and "
        f"{scores_2 / scores:.0f} times as many. They are equal at {cost.crossover:.6g} tokens, E·(1 + Hkv/H)."
        + (f" A window of {window} makes scores O(T·W·E)." if window is not None else ""),
    )


def split_of(cost: Cost) -> tuple[int, int]:
    """Operations of the projections (steps 1 and 10) and of the scores (steps 4 and 8)."""
    by_number = {step.number: step.matmul for step in cost.steps()}
    return by_number[1] + by_number[10], by_number[4] + by_number[8]


def _grouped(cost: Cost) -> Answer:
    kinds = alternatives(cost)
    most = kinds[0]
    told = []
    for c in kinds:
        saved = "" if c is most else f" (1/{most.num_kv_heads // c.num_kv_heads})"
        cache = human(c.kv_cache_per_token.value, "B", binary=True)
        share = c.parameters.value / most.parameters.value
        told.append(f"{c.kind} with {c.num_kv_heads}: cache {cache} a token and layer{saved}, parameters {share:.0%}")
    return Answer(
        "How do grouped-query and multi-query attention compare?",
        f"{'; '.join(told)}. Scores and weighted values cost the same in all: every query head still meets every key.",
    )


def _matrix(cost: Cost) -> Answer:
    whole, fused = cost.matrix_activation_bytes.value, cost.fused_activation_bytes.value
    return Answer(
        "Why a fused kernel?",
        f"The T×T matrix alone is {human(cost.matrix_bytes.value, 'B', binary=True)} a layer. Training keeps "
        f"{human(whole, 'B', binary=True)} with it and {human(fused, 'B', binary=True)} without: O(T²) against O(T).",
    )


def _decoding(cost: Cost) -> Answer:
    return Answer(
        "Why is generation slow?",
        f"One new token reads {human(cost.decode_bytes.value, 'B', binary=True)} a layer for "
        f"{human(cost.decode_flops.value)} operations, {cost.intensity:.3g} for each byte; a GPU could do hundreds in "
        f"that time. A larger batch shares the weights, fewer key/value heads shrink the cache.",
    )
