"""What attention weights cost: the attention every key receives, and the weights of every head, from every provider."""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise import reference
from headwise.attention import attend
from headwise.cli.bench.measurement import Verdict, judged
from headwise.cli.bench.peers import OURS, peer_named
from headwise.cli.bench.peers.packages import load, why_not
from headwise.cli.bench.sweep import Candidate, Effort, Trial, built, sweep
from headwise.cli.bench.workload import Problem, Workload
from headwise.masks import causal
from headwise.weights import AttentionMap, Scoring

JUDGED = 1024  # tokens up to which sums over all queries are compared, which needs the whole matrix in float64
FUSED = "SDPA alone, nothing seen"
MATRICES = 3  # scores, their softmax, and a mask or a copy
TITLES = {
    "received": "the attention that every key receives, from query and key",
    "weights": "a forward pass of the layer with the weights of every head",
}


def weight_costs(workload: Workload, lengths: Sequence[int], effort: Effort) -> dict[str, Any]:
    """The cost of the attention that keys receive and of the weights of every head, always forward only."""
    workload = dataclasses.replace(workload, backward=False)
    parts = {"received": received(workload), "weights": weights_of_every_head(Problem(workload))}
    costs = {}
    for name, candidates in parts.items():
        effort.tell(TITLES[name])
        costs[name] = sweep(candidates, lengths, workload.device, effort).to_dict()
    return costs


def received(workload: Workload) -> list[Candidate]:
    """Candidates that compute (B, H, S): the attention every key receives, summed over the queries.

    Query and key are given. Ours is measured twice: after a forward pass, which leaves each row's log-sum-exp behind,
    and without one.
    """
    no_colreduce = why_not("flash_colreduce") or ("on CUDA only" if workload.device != "cuda" else None)
    return [
        Candidate(FUSED, lambda T: _fused(workload, T)),
        column_sums(f"{OURS}, after a forward pass", workload, _after_forward),
        column_sums(f"{OURS}, from query and key", workload, _from_query_and_key),
        column_sums("flash-colreduce", workload, _flash_colreduce, refuses=no_colreduce),
        column_sums("softmax, then a sum", workload, _dense, matrices=MATRICES),
    ]


def query_and_key(workload: Workload, tokens: int) -> tuple[Tensor, Tensor]:
    """Query and key (B, H, T, D), the same at every call."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (2, workload.batch, workload.heads, tokens, workload.head_dim)
    query, key = torch.randn(shape, generator=generator).to(**workload.place)
    return query, key


ColumnSums = Callable[[Workload, Tensor, Tensor], Callable[[], Tensor]]


def column_sums(
    name: str, workload: Workload, prepare: ColumnSums, *, matrices: int = 0, refuses: str | None = None
) -> Candidate:
    """A candidate that computes column sums, its result compared with the reference."""

    def trial(tokens: int) -> Trial:
        run = torch.no_grad()(prepare(workload, *query_and_key(workload, tokens)))
        return Trial(run, lambda: _judged_columns(workload, prepare, tokens))

    return Candidate(name, trial, lambda tokens: matrices * workload.matrix_bytes(tokens), refuses)


def _judged_columns(workload: Workload, prepare: ColumnSums, tokens: int) -> Verdict:
    query, key = query_and_key(workload, min(tokens, JUDGED))
    visible = causal().to_tensor(query.shape[2], device=query.device) if workload.causal else None
    truth, plain = (
        reference.attend(query.to(dtype), key.to(dtype), key.to(dtype), visible=visible)[1].sum(2)
        for dtype in (torch.float64, workload.torch_dtype)
    )
    with torch.no_grad():
        return judged(prepare(workload, query, key)(), truth, plain)


def _fused(workload: Workload, tokens: int) -> Trial:
    query, key = query_and_key(workload, tokens)
    run = torch.no_grad()(lambda: F.scaled_dot_product_attention(query, key, key, is_causal=workload.causal))
    return Trial(run, lambda: Verdict(0.0, 0.0))  # torch's own kernel, and no weights to check


def _after_forward(workload: Workload, query: Tensor, key: Tensor) -> Callable[[], Tensor]:
    with torch.no_grad():
        _, weights = attend(query, key, key, causal=workload.causal, return_weights=True)
        weights.log_sum_exp()
    return lambda: weights.received().total


def _from_query_and_key(workload: Workload, query: Tensor, key: Tensor) -> Callable[[], Tensor]:
    scoring = Scoring(causal()) if workload.causal else Scoring()
    return lambda: AttentionMap(query, key, scoring).received().total


def _flash_colreduce(workload: Workload, query: Tensor, key: Tensor) -> Callable[[], Tensor]:
    reduce = load("flash_colreduce").flash_colreduce
    return lambda: reduce(query, key, "sum", is_causal=workload.causal)


def _dense(workload: Workload, query: Tensor, key: Tensor) -> Callable[[], Tensor]:
    T = query.shape[2]
    hidden = torch.ones(T, T, dtype=torch.bool, device=query.device).triu(1) if workload.causal else None

    def run() -> Tensor:
        scores = query @ key.transpose(2, 3) / math.sqrt(workload.head_dim)
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        return scores.softmax(-1).sum(2)

    return run


def weights_of_every_head(problem: Problem) -> list[Candidate]:
    """Candidates that run a layer and return the weights of every head, as a map or as a tensor (B, H, T, T)."""

    def ours(module: Any, x: Tensor) -> AttentionMap:
        weights: AttentionMap = module(x, return_weights=True)[1]
        return weights

    def dense(module: Any, x: Tensor) -> Tensor:
        return ours(module, x).to_tensor(limit=sys.maxsize)  # free memory is already checked

    def theirs(module: Any, x: Tensor) -> Tensor:
        weights: Tensor = module.both(x)[1]
        return weights

    return [
        _layer(f"{OURS}, a map", problem, ours),
        _layer(f"{OURS}, a map made dense", problem, dense, matrices=2),
        *(_layer(name, problem, theirs, name) for name in ("nn.MHA with weights", "GPT-2 eager", "Llama eager")),
    ]


WeightsOf = Callable[[Any, Tensor], Tensor | AttentionMap]


def _layer(name: str, problem: Problem, weights_of: WeightsOf, peer_name: str = OURS, matrices: int = 0) -> Candidate:
    peer, workload = peer_named(peer_name), problem.workload

    def trial(tokens: int) -> Trial:
        module, x = built(peer, problem, tokens), problem.x(tokens)
        run: Callable[[], Tensor | AttentionMap] = torch.no_grad()(lambda: weights_of(module, x))
        return Trial(run, lambda: problem.judge_weights(run(), tokens))

    count = matrices + peer.matrices
    return Candidate(name, trial, lambda tokens: count * workload.matrix_bytes(tokens), peer.refuses(workload))
