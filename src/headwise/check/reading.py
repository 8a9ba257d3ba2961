"""Reads a traced call stage by stage: each is compared with what the reference would make of that stage's own input."""

from torch import Tensor

from headwise.check import core as cores
from headwise.check.bound import Bound
from headwise.check.core import Core
from headwise.check.outputs import read_output
from headwise.check.projections import project
from headwise.check.scores import read_scores
from headwise.check.stages import Reading
from headwise.check.subject import tensors
from headwise.check.trace import Node, Trace


def read(bound: Bound, trace: Trace | None = None, output: Tensor | None = None) -> Reading | None:
    """The reading that explains most, or None where there is no attention in the trace."""
    trace = bound.trace if trace is None else trace
    output = bound.output if output is None else output
    parts = cores.find(trace)
    if parts is None:
        return None
    best: Reading | None = None
    for core in cores.arrangements(parts, bound.inputs.query.shape[0]):
        reading = _read(bound, trace, core, output)
        if best is None or _score(reading) > _score(best):
            best = reading
        if best.understood == 5 and _score(best) >= 8:
            break
    return best


def _score(reading: Reading) -> int:
    right = [p for p in (reading.query, reading.key, reading.value) if p is not None and p.split == "heads"]
    return reading.understood + len(right) + (reading.output is not None and reading.output.merge == "heads")


def _read(bound: Bound, trace: Trace, core: Core, output: Tensor | None) -> Reading:
    parameters = tensors(bound.thing)
    query_nodes, key_nodes = _feeds(core.score_nodes, 0), _feeds(core.score_nodes, 1)
    value_nodes = _feeds(core.value_nodes, 1 if core.weights_first else 0)
    sources = {"query": bound.inputs.query, "key": bound.inputs.key, "value": bound.inputs.value}
    scores = read_scores(core, trace)
    if scores is not None and scores.swapped:
        core.query, core.key = core.key, core.query
        query_nodes, key_nodes = key_nodes, query_nodes
    projections = [
        project(heads, nodes, sources, trace, parameters)
        for heads, nodes in ((core.query, query_nodes), (core.key, key_nodes), (core.value, value_nodes))
    ]
    out = None if output is None else read_output(bound, trace, core, output, parameters)
    return Reading(core, projections[0], projections[1], projections[2], scores, out)


def _feeds(nodes: list[Node], side: int) -> list[int | None]:
    return [node.operand_nodes[side - 2] for node in nodes]
