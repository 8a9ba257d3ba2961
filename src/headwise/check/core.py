"""Finds the attention in a trace: queries, keys, values, weights and what the heads read, whatever the coding style."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.check.trace import PRODUCTS, Node, Trace

SOFTMAX = {"_softmax", "_safe_softmax"}


@dataclass
class Core:
    """One softmax (or one per head), the products before it and after it, arranged as (B, H, rows, columns)."""

    query: Tensor  # (B, H, T, D)
    key: Tensor  # (B, H, S, D)
    value: Tensor  # (B, H, S, Dv)
    weights: Tensor  # (B, H, T, S), as they meet the values
    softmax: Tensor | None  # (B, H, T, S), as they leave the softmax
    heads: Tensor  # (B, H, T, Dv)
    axis: int  # size of the axis that the softmax ran over
    softmax_nodes: list[Node]
    score_nodes: list[Node]
    value_nodes: list[Node]
    weights_first: bool  # weights @ values, not valuesᵀ @ weightsᵀ
    order: str  # how batch and heads lie in the products' first axis


@dataclass
class Parts:
    """The same before batch and heads are told apart: one tensor for every product."""

    softmax: list[Node]
    scores: list[Node]
    products: list[Node]  # weights times values
    sides: list[int]  # which operand of the product the weights are


def softmax_nodes(trace: Trace) -> list[Node]:
    """Where scores become weights: softmax by name, or exponentials divided by their sum."""
    named = [node for node in trace.nodes if node.op in SOFTMAX and node.value.dim() >= 2]
    return named or list(_by_hand(trace))


def _by_hand(trace: Trace) -> Iterator[Node]:
    for node in trace.nodes:
        if node.op in ("div", "mul", "div_") and node.value.dim() >= 2 and node.value.dtype.is_floating_point:
            near = [trace.nodes[p] for p in node.parents]
            near += [trace.nodes[p] for n in near for p in n.parents]
            if any(n.op == "exp" for n in near) and (node.value >= 0).all() and _sums_to_one(node.value):
                yield node


def _sums_to_one(weights: Tensor) -> bool:
    return any(_is_one(weights.sum(axis)) for axis in range(weights.dim())) or _is_one(weights.sum((-1, -2)))


def _is_one(sums: Tensor) -> bool:
    return torch.allclose(sums, torch.ones_like(sums))


def find(trace: Trace) -> Parts | None:
    """The parts, or None where the trace holds no attention."""
    found = Parts([], [], [], [])
    for node in _returned(trace, softmax_nodes(trace)):
        scores = [n for n in trace.ancestors(node.parents, PRODUCTS) if n.op in PRODUCTS]
        reached = trace.reaches(node.index)
        first = _first_products(trace, node, reached)
        if not scores or not first:
            continue
        found.softmax.append(node)
        found.scores += sorted((s for s in scores if s not in found.scores), key=lambda n: n.index)
        for product, side in first:
            found.products.append(product)
            found.sides.append(side)
    return found if found.softmax else None


def _returned(trace: Trace, nodes: list[Node]) -> list[Node]:
    """Those on which what was returned depends: a second attention, made to compare with, does not count."""
    if len(nodes) < 2 or None in trace.returned or not trace.returned:
        return nodes
    behind = {node.index for node in trace.ancestors(trace.returned)}
    return [node for node in nodes if node.index in behind] or nodes


def unnormalised(trace: Trace, T: int) -> Node | None:
    """A product of T×T scores that meets the values in a second product, with nothing but a factor in between."""
    for node in trace.nodes:
        if node.op not in PRODUCTS or node.value.shape[-2:] != (T, T):
            continue
        for product, side in _first_products(trace, node, trace.reaches(node.index)):
            weights = _batched(product.operands[side - 2])
            for scores in (_batched(node.value), _batched(node.value).mT):
                if weights.shape == scores.shape and _multiple(weights, scores):
                    return node
    return None


def _multiple(weights: Tensor, scores: Tensor) -> bool:
    """Whether weights are one factor times the scores, apart from zeros."""
    kept = weights != 0
    ratio = weights[kept] / scores[kept]
    return ratio.numel() > weights.numel() // 3 and torch.allclose(ratio, ratio.median(), rtol=1e-6)


def _first_products(trace: Trace, node: Node, reached: set[int]) -> list[tuple[Node, int]]:
    """Products that read these weights with no product in between, and on which side."""
    near = {node.index}
    found = []
    for other in trace.nodes[node.index + 1 :]:
        if other.index not in reached:
            continue
        if other.op in PRODUCTS:
            sides = [i for i, source in enumerate(other.operand_nodes) if source in near]
            if sides:
                found.append((other, sides[-1] - (len(other.operands) - 2)))
        elif any(parent in near for parent in other.parents) and other.op not in SOFTMAX:
            near.add(other.index)
    return found


def arrangements(parts: Parts, B: int) -> Iterator[Core]:
    """Every way to read batch and heads from the products; the caller knows which one makes sense.

    Where scores are a sum of several products, as with relative positions, each may be the one of queries and keys.
    """
    yield from _arrangements(parts, B)
    if len(parts.softmax) == 1 and len(parts.scores) > 1:
        for node in parts.scores:
            yield from _arrangements(replace(parts, scores=[node]), B)


def _arrangements(parts: Parts, B: int) -> Iterator[Core]:
    side = parts.sides[0]
    left, right = _operands(parts.products)
    weights = left if side == 0 else [t.transpose(-1, -2) for t in right]
    value = right if side == 0 else [t.transpose(-1, -2) for t in left]
    heads = [_batched(n.value) if side == 0 else _batched(n.value).transpose(-1, -2) for n in parts.products]
    query, key = _operands(parts.scores)
    key = [t.transpose(-1, -2) for t in key]
    for order, arranged in _orders(weights, B):
        weights4, value4, heads4 = arranged(weights), arranged(value), arranged(heads)
        for order_q, arranged_q in _orders(query, B):
            if order_q != order and len(parts.scores) == len(parts.products):
                continue
            query4, key4 = arranged_q(query), arranged_q(key)
            if _turned(query4, key4, weights4):
                query4, key4 = key4, query4
            if query4.shape[:2] != weights4.shape[:2]:
                continue
            softmax = _softmax_values(parts, weights, arranged, side)
            axis = _axis(parts.softmax[0])
            yield Core(
                query4, key4, value4, weights4, softmax, heads4, axis, parts.softmax, parts.scores, parts.products,
                side == 0, order,
            )  # fmt: skip


def _turned(query: Tensor, key: Tensor, weights: Tensor) -> bool:
    """Whether the scores were made as key @ queryᵀ: then the rows of the weights follow the second operand."""
    rows, columns = weights.shape[-2:]
    if rows != columns or query.shape[2] != key.shape[2]:
        return query.shape[2] != rows and key.shape[2] == rows
    return False


def _axis(node: Node) -> int:
    """Size of the softmax's axis."""
    if node.op in SOFTMAX:
        dim = next(a for a in node.arguments if isinstance(a, int) and not isinstance(a, bool))
        return node.value.shape[dim]
    sizes = [node.value.shape[axis] for axis in reversed(range(node.value.dim())) if _is_one(node.value.sum(axis))]
    return sizes[0] if sizes else node.value.shape[-1]


def _softmax_values(parts: Parts, weights: list[Tensor], arranged: "Arranged", side: int) -> Tensor | None:
    """The softmax's own results in the shape in which the product reads them, if no number was added or lost."""
    values = [n.value for n in parts.softmax]
    if len(values) != len(weights) or any(v.numel() != w.numel() for v, w in zip(values, weights, strict=True)):
        return None
    if side == 1 or any(v.shape[-2:] != w.shape[-2:] for v, w in zip(values, weights, strict=True)):
        return None
    return arranged([v.reshape(w.shape) for v, w in zip(values, weights, strict=True)])


class Arranged:
    """Reads a list of (N, R, C) tensors as one (B, H, R, C)."""

    def __init__(self, kind: str, B: int) -> None:
        self.kind, self.B = kind, B

    def __call__(self, parts: list[Tensor]) -> Tensor:
        """The tensor with batch and heads apart."""
        shape = parts[0].shape[1:]
        if self.kind == "heads are products":
            return torch.stack(parts, 1)
        if self.kind == "samples are products":
            return torch.stack(parts, 0)
        if self.kind == "every product alone":
            return torch.cat(parts).reshape(self.B, -1, *shape)
        if self.kind == "batch first":
            return parts[0].reshape(self.B, -1, *shape)
        return parts[0].reshape(-1, self.B, *shape).transpose(0, 1)


def _orders(parts: list[Tensor], B: int) -> Iterator[tuple[str, Arranged]]:
    N, count = parts[0].shape[0], len(parts)
    if any(p.shape != parts[0].shape for p in parts) or parts[0].numel() == 0:
        return
    kinds = []
    if count == 1 and N % B == 0:
        kinds = ["batch first", "heads first"] if N > B else ["batch first"]
    elif N == B:
        kinds = ["heads are products"]
    elif count == B:
        kinds = ["samples are products"]
    elif N == 1 and count % B == 0:
        kinds = ["every product alone"]
    for kind in kinds:
        yield kind, Arranged(kind, B)


def _operands(nodes: list[Node]) -> tuple[list[Tensor], list[Tensor]]:
    left = [_batched(n.operands[-2]) for n in nodes]
    right = [_batched(n.operands[-1]) for n in nodes]
    return left, right


def _batched(t: Tensor) -> Tensor:
    return t if t.dim() == 3 else t[None]
