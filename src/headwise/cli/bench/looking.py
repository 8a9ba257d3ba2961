"""What looking costs: the attention that every key receives, and the weights of every head, by whoever offers them."""

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise import reference
from headwise.attention import attend
from headwise.cli.bench.layers import built
from headwise.cli.bench.measuring import Verdict, judged
from headwise.cli.bench.peers import OURS, PEERS
from headwise.cli.bench.peers.peer import load, why_not
from headwise.cli.bench.setting import Problem, Setting
from headwise.cli.bench.sweep import Candidate, Trial
from headwise.masks import causal
from headwise.weights import AttentionMap, Scoring

JUDGED = 1024  # tokens up to which sums over all queries are compared, which takes the whole matrix in float64
FUSED = "SDPA alone, nothing seen"
MATRICES = 3  # scores, their softmax, and a mask or a copy


def received(setting: Setting) -> list[Candidate]:
    """Candidates that give (B, H, S): the attention every key receives, summed over the queries.

    Query and key are given. Ours is measured twice: after a forward pass, which leaves each row's log-sum-exp behind,
    and without one.
    """
    return [
        Candidate(FUSED, lambda T: _fused(setting, T)),
        _columns(f"{OURS}, after a forward pass", setting, _after_forward),
        _columns(f"{OURS}, from query and key", setting, _from_query_and_key),
        _columns("flash-colreduce", setting, _flash_colreduce, refuses=_no_colreduce(setting)),
        _columns("softmax, then a sum", setting, _dense, matrices=MATRICES),
    ]


def heads(setting: Setting, tokens: int) -> tuple[Tensor, Tensor]:
    """Query and key (B, H, T, D), the same at every call."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (2, setting.batch, setting.heads, tokens, setting.head_dim)
    query, key = torch.randn(shape, generator=generator).to(**setting.place)
    return query, key


Columns = Callable[[Setting, Tensor, Tensor], Callable[[], Tensor]]


def _columns(name: str, setting: Setting, way: Columns, *, matrices: int = 0, refuses: str | None = None) -> Candidate:
    def trial(tokens: int) -> Trial:
        run = torch.no_grad()(way(setting, *heads(setting, tokens)))
        return Trial(run, lambda: _judged_columns(setting, way, tokens))

    return Candidate(name, trial, lambda tokens: matrices * setting.matrix_bytes(tokens), refuses)


def _judged_columns(setting: Setting, way: Columns, tokens: int) -> Verdict:
    query, key = heads(setting, min(tokens, JUDGED))
    T = query.shape[2]
    visible = causal().to_tensor(T, device=query.device) if setting.causal else None
    truth, plain = (
        reference.attend(query.to(dtype), key.to(dtype), key.to(dtype), visible=visible)[1].sum(2)
        for dtype in (torch.float64, setting.torch_dtype)
    )
    with torch.no_grad():
        return judged(way(setting, query, key)(), truth, plain)


def _fused(setting: Setting, tokens: int) -> Trial:
    query, key = heads(setting, tokens)

    def run() -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(query, key, key, is_causal=setting.causal)

    return Trial(run, lambda: Verdict(0.0, 0.0))  # torch's own, and nothing is read from it


def _scoring(setting: Setting) -> Scoring:
    return Scoring(causal()) if setting.causal else Scoring()


def _after_forward(setting: Setting, query: Tensor, key: Tensor) -> Callable[[], Tensor]:
    with torch.no_grad():
        _, weights = attend(query, key, key, causal=setting.causal, return_weights=True)
        weights.log_sum_exp()
    return lambda: weights.received().total


def _from_query_and_key(setting: Setting, query: Tensor, key: Tensor) -> Callable[[], Tensor]:
    return lambda: AttentionMap(query, key, _scoring(setting)).received().total


def _flash_colreduce(setting: Setting, query: Tensor, key: Tensor) -> Callable[[], Tensor]:
    reduce = load("flash_colreduce").flash_colreduce
    return lambda: reduce(query, key, "sum", is_causal=setting.causal)


def _no_colreduce(setting: Setting) -> str | None:
    return why_not("flash_colreduce") or ("on CUDA only" if setting.device != "cuda" else None)


def _dense(setting: Setting, query: Tensor, key: Tensor) -> Callable[[], Tensor]:
    T = query.shape[2]
    hidden = torch.ones(T, T, dtype=torch.bool, device=query.device).triu(1) if setting.causal else None

    def run() -> Tensor:
        scores = query @ key.transpose(2, 3) / math.sqrt(setting.head_dim)
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        return scores.softmax(-1).sum(2)

    return run


def weights_of_every_head(problem: Problem) -> list[Candidate]:
    """Candidates that run a layer and give the weights of every head, as a map or as a tensor (B, H, T, T)."""
    return [
        _layer(f"{OURS}, a map", problem, _ours),
        _layer(f"{OURS}, a map made dense", problem, _ours_dense, matrices=2),
        *(_layer(name, problem, _theirs, name) for name in ("nn.MHA with weights", "GPT-2 eager", "Llama eager")),
    ]


Given = Tensor | AttentionMap
Way = Callable[[Any, Tensor], Given]


def _layer(name: str, problem: Problem, way: Way, peer_name: str = OURS, matrices: int = 0) -> Candidate:
    peer = next(peer for peer in PEERS if peer.name == peer_name)
    setting = problem.setting

    def trial(tokens: int) -> Trial:
        module, x = built(peer, problem, tokens), problem.x(tokens)

        def run() -> Given:
            with torch.no_grad():
                return way(module, x)

        return Trial(run, lambda: problem.judge_weights(run(), tokens))

    count = matrices + peer.matrices
    return Candidate(name, trial, lambda tokens: count * setting.matrix_bytes(tokens), peer.refuses(setting))


def _ours(module: Any, x: Tensor) -> Given:
    weights: AttentionMap = module(x, return_weights=True)[1]
    return weights


def _ours_dense(module: Any, x: Tensor) -> Given:
    weights: Tensor = module(x, return_weights=True)[1].to_tensor(limit=sys.maxsize)  # what is free was asked before
    return weights


def _theirs(module: Any, x: Tensor) -> Given:
    weights: Tensor = module.both(x)[1]
    return weights
