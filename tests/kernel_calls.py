"""Every kernel in several shapes of its code: for compiling without a GPU and for comparing with tiles."""

import torch
import triton

from headwise import causal, documents, induction, local, padding, prefix, previous_token, same_token, sink, window
from headwise.weights import Scoring, Statistic, readings
from headwise.weights.source import Source

MASKS = {
    "nothing": lambda B, T, S: None,
    "causal": lambda B, T, S: causal(),
    "window": lambda B, T, S: causal() & window(9),
    "padding": lambda B, T, S: causal() & padding([max(1, S - 7 * b) for b in range(B)]),
    "documents": lambda B, T, S: causal() & documents(lengths=[S // 3, S - S // 3]),
    "prefix": lambda B, T, S: causal() | prefix(5),
    "no first key": lambda B, T, S: causal() & ~prefix(1),
}


def source(B=1, H=2, Hkv=1, T=64, S=64, D=64, mask=None, dtype=torch.bfloat16, softcap=None, device="cpu", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    query = torch.randn(B, H, T, D, generator=generator, device=device).to(dtype)
    key = torch.randn(B, Hkv, S, D, generator=generator, device=device).to(dtype)
    return Source.whole(query, key, Scoring(mask, softcap=softcap))


def everything(S, device):
    """Every statistic that the kernels know."""
    ids = torch.arange(S, device=device) % 5
    return [
        readings.EntropyReading(),
        readings.PeakReading(),
        readings.DistanceReading(),
        readings.HistogramReading(),
        readings.ReceivedReading(),
        readings.PooledReading(min(3, S), min(4, S)),
        readings.PooledPeakReading(1, min(4, S)),
        readings.TopKeysReading(min(3, S)),
        readings.MassReading(sink(2)),
        readings.MassReading(previous_token()),
        readings.MassReading(local(3)),
        readings.MassReading(same_token(ids)),
        readings.MassReading(induction(ids) & ~sink(1)),
    ]


def panel(S, device):
    """What most people ask for together."""
    few = [readings.EntropyReading(), readings.PeakReading(), readings.DistanceReading(), readings.ReceivedReading()]
    probes = (sink(4), previous_token(), local(8))
    return [*few, *map(readings.MassReading, probes), readings.PooledReading(min(16, S), min(16, S))]


def squares(pair):
    """A statistic of one's own."""
    return pair.weight * pair.weight


# Combinations of statistics whose kernels are compiled: some of one walk each, some of two.
QUESTIONS = {
    "entropy": lambda S, device: [readings.EntropyReading()],
    "panel": panel,
    "keys": lambda S, device: [readings.ReceivedReading()],
    "picture": lambda S, device: [readings.ReceivedReading(), readings.PooledReading(min(16, S), min(16, S))],
    "few keys": lambda S, device: [readings.MassReading(sink(2)), readings.MassReading(previous_token())],
    "tokens": lambda S, device: [readings.MassReading(induction(torch.arange(S, device=device) % 5))],
    "largest": lambda S, device: [readings.TopKeysReading(min(8, S)), readings.PooledPeakReading(3, 5)],
    "far": lambda S, device: [readings.HistogramReading()],
    "own": lambda S, device: [Statistic(squares, kernel=triton.jit(squares))],
}
