"""The stages of attention as they were understood: projections, scores, output."""

from dataclasses import dataclass, field

from torch import Tensor

from headwise.check.core import Core
from headwise.check.fits import Fit
from headwise.check.roles import Role


@dataclass
class Projection:
    """How queries, keys or values come from the input."""

    source: str  # query, key or value: which input it reads
    fit: Fit
    split: str  # heads: right; view: cut without a transpose; moved: some other shuffle of tokens
    role: Role
    position: str = ""  # rotary, added, or empty
    by_position: Tensor | None = None  # (T, H·D, E) where the map differs by position
    biases: Tensor | None = None  # (T, H·D)
    norm: bool = False  # the input was normalised first
    then: str = ""  # what happened between the map and the product
    normalised: bool = False  # that it was a norm of every head, and nothing else
    free: Tensor | None = None  # a direction of the weights that the inputs do not determine


@dataclass
class Scores:
    """How scores became weights."""

    factor: float | None  # of the product, inside the softmax
    axis: str  # keys, queries, heads, batch; empty where nothing sums to one
    visible: Tensor  # (B, H, T, S), True where a weight is not zero
    bias: Tensor | None = None  # (H, T, S) that was added
    swapped: bool = False  # rows belong to the second operand
    leaks: bool = False  # future scores are one constant that is not small: a causal mask that hides nothing
    by_head: bool = False  # every head has its own factor
    relative: bool = False  # a term that depends on query and distance is added
    after: str = ""  # what happened after the softmax: masked, scaled, random
    after_factor: float = 1.0
    empty: Tensor | None = None  # rows that are not numbers


@dataclass
class Output:
    """How the result comes from the heads."""

    fit: Fit
    merge: str  # heads, view, moved, mean
    role: Role
    residual: float  # factor of the input that is added; 0 for none
    last: bool  # whether that is what the learner returns, or something follows
    norm: bool = False


@dataclass
class Reading:
    """Everything that was understood."""

    core: Core
    query: Projection | None
    key: Projection | None
    value: Projection | None
    scores: Scores | None
    output: Output | None
    notes: list[str] = field(default_factory=list)

    @property
    def understood(self) -> int:
        """How many of the five stages are explained to rounding."""
        parts = (self.query, self.key, self.value, self.scores, self.output)
        return sum(part is not None for part in parts)
