"""Peers of the layer as candidates: the same weights, the same input, forward alone or forward and backward."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headwise.cli.bench.measuring import Verdict
from headwise.cli.bench.peers.peer import Peer
from headwise.cli.bench.setting import GRADIENT_TOKENS, Problem
from headwise.cli.bench.sweep import Candidate, Trial

BACKWARD_MATRICES = 2  # a backward pass holds about twice the T×T tensors


def candidate(peer: Peer, problem: Problem) -> Candidate:
    """A peer that can be timed."""
    setting = problem.setting
    factor = peer.matrices * (BACKWARD_MATRICES if setting.backward else 1)
    return Candidate(
        peer.name,
        lambda tokens: _trial(peer, problem, tokens),
        lambda tokens: factor * setting.matrix_bytes(tokens),
        peer.refuses(setting),
    )


def built(peer: Peer, problem: Problem, tokens: int) -> nn.Module:
    """The peer's module with the problem's weights, in training mode if gradients are wanted."""
    setting = problem.setting
    weights = problem.weights.to(setting.torch_dtype, biases=peer.biases)
    return peer.build(setting, weights, tokens).to(**setting.place).train(setting.backward)


def _trial(peer: Peer, problem: Problem, tokens: int) -> Trial:
    backward = problem.setting.backward
    module = built(peer, problem, max(tokens, GRADIENT_TOKENS) if backward else tokens)
    x = problem.x(tokens)

    def judge() -> Verdict:
        with torch.no_grad():
            verdict = problem.judge(module(x), tokens, biases=peer.biases)
        if verdict.wrong is None and backward:
            return judged_gradient(module, problem, peer.biases)
        return verdict

    return Trial(step(module, x, backward=backward), judge)


def judged_gradient(module: nn.Module, problem: Problem, biases: bool) -> Verdict:
    """The module's gradient with respect to a short input against the reference's."""
    x = problem.gradient_input().requires_grad_()
    module(x).double().square().sum().backward()
    assert x.grad is not None  # noqa: S101
    return problem.judge_gradient(x.grad, biases=biases)


def step(module: Callable[[Tensor], Tensor], x: Tensor, *, backward: bool) -> Callable[[], object]:
    """One inference pass, or one forward and backward pass."""
    if not backward:
        return torch.no_grad()(lambda: module(x))
    x = x.clone().requires_grad_()
    gradient = torch.randn_like(x)

    def run() -> None:
        x.grad = None
        module(x).backward(gradient)

    return run
