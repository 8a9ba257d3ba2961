"""What was understood of one call: how projections, scores and output came about."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.check.fits import Fit, Role
from headwise.check.trace import Core

NO_ROLE = Role([], None, False, False, False)


@dataclass
class Projection:
    """How queries, keys or values come from the input."""

    source: str  # query, key or value: which input it reads
    fit: Fit
    # heads: right; view: split without a transpose; tokens: the input was read as tokens by a view; moved: otherwise
    split: str
    role: Role = field(default_factory=lambda: NO_ROLE)
    position: str = ""  # rotary, added, or empty
    by_position: Tensor | None = None  # (T, H·D, E) where the map differs by position
    biases: Tensor | None = None  # (T, H·D)
    norm: bool = False  # the input was normalized first
    then: str = ""  # what happened between the map and the product: norm, nonlinear or other
    normalized: bool = False  # that was exactly a norm of every head
    free: Tensor | None = None  # a direction of the weights that the inputs do not determine

    @property
    def weight(self) -> Tensor:
        """(H·D, E); at the first position where the map differs by position."""
        return self.fit.weight if self.by_position is None else self.by_position[0]


@dataclass
class Scores:
    """How scores became weights."""

    factor: float  # of the query-key product, inside the softmax
    axis: str  # the axis along which weights sum to one: keys, queries, heads, batch
    visible: Tensor  # (B, H, T, S), True where a weight is not zero
    bias: Tensor | None = None  # (H, T, S) that was added
    swapped: bool = False  # rows belong to the second operand
    leaks: bool = False  # future scores are one constant that is not small enough: a causal mask that hides nothing
    fill: float | None = None  # that constant
    by_head: bool = False  # every head has its own factor
    cap: float = 0.0  # scores are cap · tanh(scores / cap); 0 for none
    relative: bool = False  # a term that depends on query and distance is added
    relative_is_linear: bool = False  # that term is linear in query and key at every pair of positions
    after: str = ""  # what happened after the softmax: masked, scaled, random
    after_factor: float = 1.0
    empty: Tensor | None = None  # rows that are not numbers


@dataclass
class OutputMap:
    """How the result comes from the heads."""

    fit: Fit
    merge: str  # heads: right; view, moved: tokens shuffled; mean: heads added up
    role: Role
    residual: float  # factor of the input that is added; 0 for none
    last: bool  # whether this is what the learner returns, or something follows
    before: str = ""  # what happens to the merged heads before the map: norm, gate, or the name of an activation
    after: str = ""  # what follows the map, where something does: norm, the name of an activation, or other


@dataclass
class AttentionReading:
    """Everything that was understood of one call; a stage that was not understood is None."""

    core: Core
    query: Projection | None
    key: Projection | None
    value: Projection | None
    scores: Scores | None
    output: OutputMap | None
    between_tokens: bool  # the weights are a table of queries × keys
    used: bool = True  # the result depends on the heads
    mask_arguments: list[Any] | None = None  # what was measured about every mask argument, once it was

    @property
    def projections(self) -> dict[str, Projection]:
        """Those of query, key and value that were understood, by name."""
        parts = {"query": self.query, "key": self.key, "value": self.value}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def understood(self) -> int:
        """How many of the five stages are explained to rounding."""
        return len(self.projections) + (self.scores is not None) + (self.output is not None)

    @property
    def visible(self) -> Tensor:
        """(B, H, T, S), True where a key has weight when it meets the values."""
        if self.scores is None or self.scores.after == "masked":
            return (self.core.weights != 0) & torch.isfinite(self.core.weights)
        return self.scores.visible

    @property
    def pattern(self) -> str:
        """The name of the pattern of visible keys; `full` where none could be read."""
        readable = self.scores is not None and not self.scores.leaks and self.scores.after != "random"
        return pattern(self.visible) if readable and self.between_tokens else "full"


def pattern(visible: Tensor) -> str:
    """The name of a (B, H, T, S) pattern of visible keys.

    full, causal, strict (a token does not see itself), ahead (it sees the next one), future (itself and later ones),
    later (later ones only), causal and more (a part of the past), or other.
    """
    T, S = visible.shape[-2:]
    table = visible[0, 0]
    if not bool((visible == table).all()):
        return "other"
    if bool(table.all()):
        return "full"
    if T != S:
        return "other"
    ones = torch.ones(T, S, dtype=torch.bool)
    shapes = {
        "causal": ones.tril(), "strict": ones.tril(-1), "ahead": ones.tril(1),
        "future": ones.triu(), "later": ones.triu(1),
    }  # fmt: skip
    shapes |= {f"later by {k}": ones.triu(k) for k in range(2, T)}
    for name, expected in shapes.items():
        rows = expected.any(-1)  # rows that see nothing come out as even weights in some code, as NaN in other
        if bool((table[rows] == expected[rows]).all()) and int(rows.sum()) > 1:
            return name.partition(" ")[0]
    return "causal and more" if bool((table <= ones.tril()).all()) else "other"
