"""Why the class is faster: the rungs of the textbook's ladder and our layer, by time, memory and launches."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from headwise.cli.bench.launches import launches
from headwise.cli.bench.layers import built, judged_gradient, step
from headwise.cli.bench.measuring import interleaved, tensor_peak
from headwise.cli.bench.peers import OURS, PEERS
from headwise.cli.bench.setting import GRADIENT_TOKENS, Problem, Setting
from headwise.cli.bench.sweep import Effort
from headwise.errors import HeadwiseError

RUNGS = ("textbook list", "textbook class", OURS)
MODES = {"forward": False, "forward+backward": True}


def climb(setting: Setting, lengths: Sequence[int], effort: Effort) -> list[dict[str, Any]]:
    """Rows of every rung at every length, with one head and with all, forward and with backward.

    Times are from the call to the result: on a GPU the launches themselves are what the list pays for.
    """
    rows = []
    for tokens, heads in itertools.product(lengths, sorted({1, setting.heads})):
        for mode, backward in MODES.items():
            effort.tell(f"ladder, T={tokens}, heads: {heads}, {mode}")
            here = dataclasses.replace(setting, heads=heads, causal=True, backward=backward)
            rows += [{"heads": heads, "tokens": tokens, "mode": mode, **row} for row in _rungs(here, tokens, effort)]
    return rows


def _rungs(setting: Setting, tokens: int, effort: Effort) -> list[dict[str, Any]]:
    problem = Problem(setting)
    rungs = [peer for name in RUNGS for peer in PEERS if peer.name == name]
    modules = {peer.name: built(peer, problem, max(tokens, GRADIENT_TOKENS)) for peer in rungs}
    for name, module in modules.items():
        wrong = judged_gradient(module, problem, True).wrong
        if wrong is not None:
            raise HeadwiseError(f"{name}: {wrong}.")
    runs = {name: step(m, problem.x(tokens), backward=setting.backward) for name, m in modules.items()}
    times = interleaved(runs, setting.device, seconds=effort.seconds, least=5, ahead=False)
    return [
        {
            "name": name,
            **times[name],
            "MiB": tensor_peak(run, setting.device),
            "launches": launches(run, setting.device),
        }
        for name, run in runs.items()
    ]
