"""One whole run of the benchmark, from settings to a result that can be written as JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from headwise.cli.bench import ceilings, looking
from headwise.cli.bench.growth import growth
from headwise.cli.bench.ladder import climb
from headwise.cli.bench.layers import candidate
from headwise.cli.bench.machine import about
from headwise.cli.bench.peers import PEERS
from headwise.cli.bench.peers.peer import Peer
from headwise.cli.bench.setting import Problem, Setting
from headwise.cli.bench.sweep import Effort, sweep

PACKAGES = (*dict.fromkeys(peer.package for peer in PEERS if peer.package != "torch"), "flash_colreduce")
LOOKS = {
    "received": "the attention that every key receives, from query and key",
    "weights": "a forward pass of the layer with the weights of every head",
}


def measured(setting: Setting, lengths: Sequence[int], peers: Sequence[Peer], effort: Effort) -> dict[str, Any]:
    """The layer against its peers: rows, who was left out, the machine's ceilings, growth."""
    torch.manual_seed(0)
    effort.tell("measuring what the machine can do")
    most = ceilings.measured(setting.device, setting.dtype)
    problem = Problem(setting)
    candidates = [candidate(peer, problem) for peer in peers]
    head = about(setting.device, PACKAGES)  # before the sweep: files may change while it runs
    found = sweep(candidates, lengths, setting.device, effort)
    for row in found.rows:
        row["share"] = round(ceilings.share(setting, row["tokens"], row["ms"], most), 4)
    return {
        "subject": "bench",
        **head,
        "setting": dataclasses.asdict(setting),
        "ceilings": most,
        "rows": found.rows,
        "left_out": found.left_out,
        "growth": growth(found.rows),
    }


def with_ladder(result: dict[str, Any], setting: Setting, lengths: Sequence[int], effort: Effort) -> dict[str, Any]:
    """The result and the rungs of the ladder, at the shortest length and at the middle one."""
    chosen = sorted({min(lengths), sorted(lengths)[(len(lengths) - 1) // 2]})
    return {**result, "ladder": climb(setting, chosen, effort)}


def with_looking(result: dict[str, Any], setting: Setting, lengths: Sequence[int], effort: Effort) -> dict[str, Any]:
    """The result and what looking at weights costs; always forward alone."""
    setting = dataclasses.replace(setting, backward=False)
    parts = {"received": looking.received(setting), "weights": looking.weights_of_every_head(Problem(setting))}
    looks = {}
    for name, candidates in parts.items():
        effort.tell(LOOKS[name])
        found = sweep(candidates, lengths, setting.device, effort)
        looks[name] = {"rows": found.rows, "left_out": found.left_out, "growth": growth(found.rows)}
    return {**result, "looking": looks}
