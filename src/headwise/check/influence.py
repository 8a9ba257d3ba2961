"""Which token of the input moves which token of the output: what can be said of attention that nobody could read."""

import re

import torch
from torch import Tensor

from headwise.check import core
from headwise.check.bound import Bound
from headwise.check.findings import Finding

PARTIAL = re.compile(r"window|local|block|axial|swin|chunk|spars|stride|dilat|band|longformer|bigbird", re.IGNORECASE)
MOVED = 1e-9  # relative; everything is computed in double precision


def findings(bound: Bound) -> list[Finding]:
    """Tokens that no other token moves, or only some do where nothing says so."""
    if not core.softmax_nodes(bound.trace):  # then it is no attention at all, and nothing to be judged
        return []
    moved = influence(bound)
    if moved is None or len(moved) < 3:
        return []
    alone = torch.eye(len(moved), dtype=torch.bool)
    if not (moved & ~alone).any():
        return [Finding("tokens-alone", "whatever the other tokens are, a token's output stays the same")]
    part = moved.diagonal().all() and torch.equal(moved, moved.T) and not moved.all()
    if part and not PARTIAL.search(getattr(bound.target, "__name__", "")):
        row = int((~moved).any(1).nonzero()[0])
        unseen = [int(j) for j in (~moved[row]).nonzero()[:3]]
        words = f"token {row} is moved by no change of token {', '.join(map(str, unseen))}, and they by none of its own"
        return [Finding("sees-a-part", words)]
    return []


def influence(bound: Bound) -> Tensor | None:
    """(T, T), True where a change of input token j moves output token i; None where it cannot be found out."""
    before = bound.output_of(bound.inputs)
    if before is None or before.dim() != 3 or before.shape[:2] != bound.inputs.query.shape[:2]:
        return None
    T = before.shape[1]
    if bound.inputs.key.shape[1] != T:
        return None
    found = torch.zeros(T, T, dtype=torch.bool)
    for j in range(T):
        after = bound.output_of(type(bound.inputs)(*_changed(bound.inputs, j)))
        if after is None or after.shape != before.shape:
            return None
        found[:, j] = (after - before).abs().amax((0, 2)) > MOVED * before.abs().max()
    return found


def _changed(inputs: tuple[Tensor, ...], j: int) -> list[Tensor]:
    """The same inputs with another token at place j; one tensor in several roles stays one."""
    made: dict[int, Tensor] = {}
    for x in inputs:
        if id(x) not in made:
            other = x.clone()
            other[:, j] = other[:, j].flip(-1) + 1
            made[id(x)] = other
    return [made[id(x)] for x in inputs]
