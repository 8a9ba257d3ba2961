"""The ladder from one causal head to all heads at once, in three classes written to be read.

Each rung takes the arguments of the textbooks in their order, `(d_in, d_out, context_length, dropout, num_heads,
qkv_bias)`, computes the same function, and can be built from the weights of the rung below.
`headwise.MultiHeadAttention` is the step after the last: the same function again, fused.
"""

from typing import Self

import torch
from torch import Tensor, nn

from headwise.errors import HeadCountError, ShapeError


class CausalHead(nn.Module):
    """First rung: one head. Each token attends to itself and to the tokens before it.

    `d_in` is the width of the tokens, `d_out` that of the head; `qkv_bias` gives the three projections a bias.

    >>> CausalHead(3, 2, context_length=6, dropout=0.0)(torch.randn(2, 6, 3)).shape
    torch.Size([2, 6, 2])
    """

    mask: Tensor

    def __init__(self, d_in: int, d_out: int, context_length: int, dropout: float, qkv_bias: bool = False) -> None:
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", future(context_length))

    def forward(self, x: Tensor) -> Tensor:
        """The context vectors (B, T, d_out) of the tokens `x` (B, T, d_in)."""
        T = checked_length(x, self.mask)
        query, key, value = self.W_query(x), self.W_key(x), self.W_value(x)  # (B, T, d_out)
        scores = query @ key.transpose(1, 2)  # (B, T, T)
        scores = scores.masked_fill(self.mask[:T, :T], -torch.inf)
        weights = (scores / key.shape[-1] ** 0.5).softmax(dim=-1)
        context: Tensor = self.dropout(weights) @ value
        return context


class HeadsInAList(nn.Module):
    """Second rung: several heads, one after the other, with their results side by side. Clear but slow: H small
    products where one large one would do. It has no output projection, so its heads never mix.

    `d_in` is the width of the tokens, `d_out` that of all heads together; `qkv_bias` gives the projections a bias.

    >>> HeadsInAList(3, 4, context_length=6, dropout=0.0, num_heads=2)(torch.randn(2, 6, 3)).shape
    torch.Size([2, 6, 4])
    """

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        head_dim = width_of_one_head(d_out, num_heads)  # not d_out: concatenation multiplies by num_heads
        self.heads = nn.ModuleList(
            CausalHead(d_in, head_dim, context_length, dropout, qkv_bias) for _ in range(num_heads)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The context vectors (B, T, d_out) of the tokens `x` (B, T, d_in)."""
        return torch.cat([head(x) for head in self.heads], dim=-1)

    @classmethod
    def from_heads(cls, *heads: CausalHead) -> Self:
        """A list of existing heads of one shape, which are shared, not copied."""
        first = heads[0]
        d_in, head_dim = first.W_query.in_features, first.W_query.out_features
        kinds = {(head.W_query.weight.shape, head.W_query.bias is None, head.mask.shape) for head in heads}
        if len(kinds) > 1:
            raise ShapeError(
                f"heads of one list must agree in shape, bias and context length; head 0 maps {d_in} to {head_dim}."
            )
        result = cls(d_in, head_dim * len(heads), len(first.mask), first.dropout.p, len(heads))
        result.heads = nn.ModuleList(heads)
        return result


class HeadsAtOnce(nn.Module):
    """Third rung: one matrix for all queries, one for all keys, one for all values; heads are a reshape away.

    `d_in` is the width of the tokens, `d_out` that of all heads together and of the output; `qkv_bias` gives the first
    three projections a bias.

    >>> HeadsAtOnce(768, 768, context_length=1024, dropout=0.1, num_heads=12)(torch.randn(4, 100, 768)).shape
    torch.Size([4, 100, 768])
    """

    mask: Tensor

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.d_out, self.num_heads = d_out, num_heads
        self.head_dim = width_of_one_head(d_out, num_heads)
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", future(context_length))

    def split(self, x: Tensor) -> Tensor:
        """`x` (B, T, H·D) split into heads: (B, H, T, D). A view, then a transpose: a view alone would mix tokens."""
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The mixed context vectors (B, T, d_out) of the tokens `x` (B, T, d_in)."""
        T = checked_length(x, self.mask)
        query, key, value = self.split(self.W_query(x)), self.split(self.W_key(x)), self.split(self.W_value(x))
        scores = query @ key.transpose(2, 3)  # (B, H, T, T)
        scores = scores.masked_fill(self.mask[:T, :T], -torch.inf)
        weights = (scores / self.head_dim**0.5).softmax(dim=-1)
        context = self.dropout(weights) @ value  # (B, H, T, D)
        output: Tensor = self.out_proj(context.transpose(1, 2).flatten(2))  # view cannot undo a transpose
        return output

    @classmethod
    def from_list(cls, rung: HeadsInAList) -> Self:
        """All heads of the second rung in one set of matrices. The output projection, which the list lacks, is the
        identity, so that both rungs return the same tensor."""
        heads = [head for head in rung.heads if isinstance(head, CausalHead)]
        first = heads[0].W_query
        d_out = first.out_features * len(heads)
        has_bias = first.bias is not None
        result = cls(first.in_features, d_out, len(heads[0].mask), heads[0].dropout.p, len(heads), has_bias)
        result = result.to(first.weight)
        with torch.no_grad():
            for name in ("W_query", "W_key", "W_value"):
                linear = getattr(result, name)
                linear.weight.copy_(torch.cat([getattr(head, name).weight for head in heads]))
                if has_bias:
                    linear.bias.copy_(torch.cat([getattr(head, name).bias for head in heads]))
            nn.init.eye_(result.out_proj.weight)
            nn.init.zeros_(result.out_proj.bias)
        return result

    def to_list(self) -> HeadsInAList:
        """The second rung with these weights. It has no output projection, so it returns this rung's step 9."""
        has_bias = self.W_query.bias is not None
        d_in, d_out = self.W_query.in_features, self.W_query.out_features
        result = HeadsInAList(d_in, d_out, len(self.mask), self.dropout.p, self.num_heads, has_bias)
        result = result.to(self.W_query.weight)
        with torch.no_grad():
            for i, head in enumerate(result.heads):
                rows = slice(i * self.head_dim, (i + 1) * self.head_dim)
                for name in ("W_query", "W_key", "W_value"):
                    ours, theirs = getattr(self, name), getattr(head, name)
                    theirs.weight.copy_(ours.weight[rows])
                    if has_bias:
                        theirs.bias.copy_(ours.bias[rows])
        return result


def future(context_length: int) -> Tensor:
    """True strictly above the diagonal, for the tokens ahead of each token, which must be hidden."""
    return torch.ones(context_length, context_length, dtype=torch.bool).triu(diagonal=1)


def width_of_one_head(d_out: int, num_heads: int, name: str = "d_out") -> int:
    """`d_out / num_heads`, refused unless it is a whole number; `name` is what the caller calls `d_out`."""
    if num_heads < 1 or d_out % num_heads:
        raise HeadCountError(
            f"{name}={d_out} cannot be cut into num_heads={num_heads} equal heads. "
            f"Choose a num_heads that divides {d_out}."
        )
    return d_out // num_heads


def checked_length(x: Tensor, mask: Tensor) -> int:
    """T of `x` (B, T, d_in), refused if the mask of this rung is too small for it."""
    if x.dim() != 3:
        raise ShapeError(f"x has shape {tuple(x.shape)}; expected 3 dimensions (B, T, d_in).")
    T = x.shape[1]
    if len(mask) < T:
        raise ShapeError(
            f"x has {T} tokens and context_length is {len(mask)}. Construct the module with context_length={T} or more."
        )
    return T
