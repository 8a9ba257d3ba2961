"""Finds the attention in a trace: the softmax and the products around it, and how batch and heads lie in them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.check.trace.core import Core
from headwise.check.trace.recorder import PRODUCTS, SOFTMAX, Node, Trace


@dataclass
class AttentionNodes:
    """The softmax and the products around it, before batch and heads are told apart: one node per product."""

    trace: Trace
    softmax: list[Node]
    scores: list[Node]
    products: list[Node]  # weights times values
    sides: list[int]  # which operand of the product the weights are

    def arrangements(self, B: int, T: int = 0) -> "Iterator[Core]":
        """Every way to read batch and heads from the products; the caller knows which one makes sense.

        Where scores are a sum of several products, as with relative positions, each may be the query-key product.
        """
        for core in self._arrangements(B, T):
            yield from core.with_heads_in_rows(T)
            yield core
        if len(self.softmax) == 1 and len(self.scores) > 1:
            for node in self.scores:
                yield from replace(self, scores=[node])._arrangements(B)

    def _row_by_row(self, B: int, T: int) -> "Iterator[Core]":
        """Where there is one product per query: keys that a query leaves out come last, as in a causal loop."""
        weights = [w if side == 0 else r.mT for w, r, side in zip(*_operands(self.products), self.sides, strict=True)]
        values = [r if side == 0 else w.mT for w, r, side in zip(*_operands(self.products), self.sides, strict=True)]
        heads = [_row(_batched(n.value)) for n in self.products]
        query, key = _queries_and_keys(self.scores)
        if any(x.shape[1] != 1 for x in (*weights, *query, *heads)):
            return
        S = max(k.shape[1] for k in key)
        wide = [torch.nn.functional.pad(w, (0, S - w.shape[-1])) for w in weights]
        for groups in _queries_of_heads(len(weights), T, 1 if len(weights[0]) == B else B):
            longest = [max(group, key=lambda i: key[i].shape[1]) for group in groups]
            if any(key[i].shape[1] != S for i in longest):
                continue
            joined = [[torch.cat([x[i] for i in group], 1) for group in groups] for x in (wide, query, heads)]
            for order in _orders(joined[0], B):
                weights4, query4, heads4 = (order(x) for x in joined)
                key4, value4 = order([key[i] for i in longest]), order([values[i] for i in longest])
                kind = f"{order.kind}, one product per query"
                yield Core(query4, key4, value4, weights4, None, heads4, self, True, kind)

    def _arrangements(self, B: int, T: int = 0) -> "Iterator[Core]":
        first = self.sides[0] == 0
        left, right = _operands(self.products)
        heads = [_batched(n.value) for n in self.products]
        if T > 1 and len(left) % T == 0 and len(self.scores) == len(left):
            yield from self._row_by_row(B, T)
        if not first:  # (weights @ values) computed as (valuesᵀ @ weightsᵀ)ᵀ
            left, right, heads = [t.mT for t in right], [t.mT for t in left], [t.mT for t in heads]
        query, key = _operands(self.scores)
        key = [t.mT for t in key]
        for order in _orders(left, B):
            weights4 = order(left)
            for order_q in _orders(query, B):
                if order_q.kind != order.kind and len(self.scores) == len(self.products):
                    continue
                query4, key4 = order_q(query), order_q(key)
                if query4.shape[2] != weights4.shape[2] == key4.shape[2]:  # computed as key @ queryᵀ
                    query4, key4 = key4, query4
                if query4.shape[:2] == weights4.shape[:2]:
                    softmax = self._softmax_values(left, order) if first else None
                    yield Core(query4, key4, order(right), weights4, softmax, order(heads), self, first, order.kind)

    def _softmax_values(self, weights: list[Tensor], order: "BatchOrder") -> Tensor | None:
        """The softmax's own results in the shape in which the product reads them, if no number was added or lost."""
        values = [n.value for n in self.softmax]
        if len(values) != len(weights):
            return None
        pairs = list(zip(values, weights, strict=True))
        if any(v.numel() != w.numel() or v.shape[-2:] != w.shape[-2:] for v, w in pairs):
            return None
        return order([v.reshape(w.shape) for v, w in pairs])


def find_attention(trace: Trace) -> AttentionNodes | None:
    """The softmax and the products around it, or None where the trace holds no attention."""
    found = AttentionNodes(trace, [], [], [], [])
    for node in _behind_output(trace, _last_of_each(trace, _tables(trace, trace.softmax_nodes()))):
        scores = [n for n in trace.ancestors(node.parents, PRODUCTS) if n.op in PRODUCTS]
        first = _distinct(_first_products(trace, node))
        if not scores or not first:
            continue
        found.softmax.append(node)
        found.scores += sorted((s for s in scores if s not in found.scores), key=lambda n: n.index)
        found.products += [product for product, _ in first]
        found.sides += [side for _, side in first]
    return found if found.softmax else _normalized_later(trace)


def _normalized_later(trace: Trace) -> AttentionNodes | None:
    """Exponentials that meet the values first and are divided by their sum afterwards, as in an online softmax."""
    for node in (n for n in trace.nodes if n.op == "exp" and tuple(n.value.shape[-2:]) == trace.tokens):
        scores = [n for n in trace.ancestors(node.parents, PRODUCTS) if n.op in PRODUCTS]
        for product, side in _first_products(trace, node) if scores else ():
            weights = product.operands[side - 2] if side == 0 else product.operands[side - 2].mT
            weights = weights / weights.sum(-1, keepdim=True)
            made = product.value.new_tensor(0) if side else weights @ product.operands[-1]
            divided = next((n for n in _quotients(trace, product) if _equal_numbers(n.value, made)), None)
            if side == 0 and divided is not None:
                operands = [*product.operands[:-2], weights, product.operands[-1]]
                met = replace(product, index=divided.index, value=made, operands=operands)
                softmax = replace(node, value=node.value / node.value.sum(-1, keepdim=True))
                return AttentionNodes(trace, [softmax], sorted(scores, key=lambda n: n.index), [met], [side])
    return None


def _quotients(trace: Trace, product: Node) -> list[Node]:
    """Divisions of something that depends on a product."""
    reached = trace.reaches(product.index)
    return [n for n in trace.nodes if n.index in reached and n.op.rstrip("_") == "div"]


def _equal_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers in the same order, whatever their shapes."""
    return a.numel() == b.numel() and torch.allclose(a.flatten(), b.flatten())


def _tables(trace: Trace, nodes: list[Node]) -> list[Node]:
    """Those that are tables of queries × keys, where there are any; a softmax of something else is not attention."""
    tables = [n for n in nodes if trace.tokens is not None and tuple(n.value.shape[-2:]) == trace.tokens]
    return tables or nodes


def _distinct(products: list[tuple[Node, int]]) -> list[tuple[Node, int]]:
    """Only the last of products that were computed several times."""
    kept: list[tuple[Node, int]] = []
    for node, side in products:
        kept = [(n, s) for n, s in kept if n.value.shape != node.value.shape or not n.value.equal(node.value)]
        kept.append((node, side))
    return kept


def _last_of_each(trace: Trace, nodes: list[Node]) -> list[Node]:
    """Without those whose result goes through another softmax before any product."""
    indices = {node.index for node in nodes}
    first = {a.index for n in nodes for a in trace.ancestors(n.parents, PRODUCTS) if a.index in indices}
    return [node for node in nodes if node.index not in first]


def _behind_output(trace: Trace, nodes: list[Node]) -> list[Node]:
    """Those that the returned tensors depend on: a second attention, computed only to compare, does not count."""
    if len(nodes) < 2 or None in trace.returned or not trace.returned:
        return nodes
    behind = {node.index for node in trace.ancestors(trace.returned)}
    return [node for node in nodes if node.index in behind] or nodes


def unnormalized_scores(trace: Trace, T: int) -> tuple[Node, Node] | None:
    """A product of T×T scores and the one in which it meets the values, with at most a factor in between."""
    for node in trace.nodes:
        if node.op not in PRODUCTS or node.value.shape[-2:] != (T, T):
            continue
        for product, side in _first_products(trace, node):
            weights = _batched(product.operands[side - 2])
            for scores in (_batched(node.value), _batched(node.value).mT):
                if weights.shape == scores.shape and _is_multiple(weights, scores):
                    return node, product
    return None


def _is_multiple(weights: Tensor, scores: Tensor) -> bool:
    """Whether weights are one factor times the scores, except for zeros."""
    kept = (weights != 0) & torch.isfinite(weights)
    ratio = weights[kept] / scores[kept]
    return ratio.numel() > weights.numel() // 3 and torch.allclose(ratio, ratio.median(), rtol=1e-6)


def _first_products(trace: Trace, node: Node) -> list[tuple[Node, int]]:
    """Products that read this node's result with no other product in between, and on which side they read it."""
    reached, near = trace.reaches(node.index), {node.index}
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


def _queries_of_heads(count: int, T: int, samples: int) -> Iterator[list[list[int]]]:
    """Which products are those of the T queries of a head: in loops over queries inside heads, or the other way."""
    yield [[*range(i, i + T)] for i in range(0, count, T)]
    H = count // (samples * T)
    if H > 1 and count == samples * T * H:
        yield [[(b * T + t) * H + h for t in range(T)] for b in range(samples) for h in range(H)]


def _queries_and_keys(nodes: list[Node]) -> tuple[list[Tensor], list[Tensor]]:
    """(N, 1, D) and (N, S, D) of products of one query with its keys, on the same side in all of them."""
    left, right = _operands(nodes)
    fits = all(a.shape[1] == 1 and b.dim() == 3 and b.shape[1] == a.shape[2] for a, b in zip(left, right, strict=True))
    return (left, [x.mT for x in right]) if fits else ([_row(x) for x in right], left)


def _row(x: Tensor) -> Tensor:
    """One row (N, 1, D), from a row or a column."""
    return x if x.shape[1] == 1 else x.mT


@dataclass(frozen=True)
class BatchOrder:
    """How batch and heads lie in the products: reads a list of (N, R, C) tensors as one (B, H, R, C)."""

    kind: str
    B: int

    def __call__(self, parts: list[Tensor]) -> Tensor:
        shape = parts[0].shape[1:]
        if self.kind == "one product per head":
            return torch.stack(parts, 1)
        if self.kind == "one product per sample":
            return torch.stack(parts, 0)
        if self.kind == "one product per sample and head":
            return torch.cat(parts).reshape(self.B, -1, *shape)
        if self.kind == "batch first":
            return parts[0].reshape(self.B, -1, *shape)
        return parts[0].reshape(-1, self.B, *shape).transpose(0, 1)


def _orders(parts: list[Tensor], B: int) -> list[BatchOrder]:
    N, count = parts[0].shape[0], len(parts)
    if any(p.shape != parts[0].shape for p in parts) or parts[0].numel() == 0:
        return []
    if count == 1 and N % B == 0:
        kinds = ["batch first", "heads first"] if N > B else ["batch first"]
    elif N == B:
        kinds = ["one product per head"]
    elif count == B:
        kinds = ["one product per sample"]
    else:
        kinds = ["one product per sample and head"] if N == 1 and count % B == 0 else []
    return [BatchOrder(kind, B) for kind in kinds]


def _operands(nodes: list[Node]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [_real(_batched(n.operands[-2]), _batched(n.operands[-1])) for n in nodes]
    return [left for left, _ in pairs], [right for _, right in pairs]


def _real(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Complex factors (N, R, D) and (N, D, C) as real ones, whose product is the real part of theirs."""
    if not left.is_complex() or not right.is_complex():
        return left, right
    both = torch.stack((right.real, -right.imag), 2).flatten(1, 2)
    return torch.view_as_real(left.resolve_conj()).flatten(-2), both


def _batched(t: Tensor) -> Tensor:
    """(N, R, C), of a matrix, or of a vector as one column."""
    return t if t.dim() == 3 else t[None, :, None] if t.dim() == 1 else t[None]
