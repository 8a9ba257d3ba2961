"""Reads a traced call stage by stage: projections, scores, output, each explained by that stage's own input.

Linear maps are solved for from the recorded numbers, so the layout of the weights does not have to be known. Imports
`binding`, `fits` and `trace`.
"""

from headwise.check.binding import Bound
from headwise.check.objects import tensors
from headwise.check.reading.output import read_output
from headwise.check.reading.parts import AttentionReading, OutputMap, Projection, Scores, pattern
from headwise.check.reading.projections import NONLINEAR, read_projection
from headwise.check.reading.scores import multiple, read_scores
from headwise.check.trace import Core, Node, find_attention

__all__ = [
    "NONLINEAR", "AttentionReading", "OutputMap", "Projection", "Scores", "multiple", "pattern", "read",
]  # fmt: skip


def read(bound: Bound) -> AttentionReading | None:
    """The reading that explains most, or None where the trace holds no attention."""
    nodes = find_attention(bound.trace)
    if nodes is None:
        return None
    best: AttentionReading | None = None
    for core in nodes.arrangements(*bound.inputs.query.shape[:2]):
        reading = _read(bound, core)
        if best is None or _quality(reading) > _quality(best):
            best = reading
        if best.understood == 5 and _quality(best) >= 8:
            break
    return best


def _quality(reading: AttentionReading) -> int:
    right = [p for p in reading.projections.values() if p.split == "heads"]
    return reading.understood + len(right) + (reading.output is not None and reading.output.merge == "heads")


def _read(bound: Bound, core: Core) -> AttentionReading:
    parameters = tensors(bound.thing)
    scores = read_scores(core)
    feeds = [_feeds(core.nodes.scores, 0), _feeds(core.nodes.scores, 1)]
    if scores is not None and scores.swapped:
        core.query, core.key = core.key, core.query
        feeds.reverse()
    feeds.append(_feeds(core.nodes.products, 1 if core.weights_first else 0))
    query, key, value = (
        read_projection(heads, nodes, bound.inputs._asdict(), core.trace, parameters)
        for heads, nodes in zip((core.query, core.key, core.value), feeds, strict=True)
    )
    output = None if bound.output is None else read_output(bound.inputs.query, core, bound.output, parameters)
    between = tuple(core.weights.shape[-2:]) == (bound.inputs.query.shape[1], bound.inputs.key.shape[1])
    return AttentionReading(core, query, key, value, scores, output, between, used=_is_used(bound, core))


def _is_used(bound: Bound, core: Core) -> bool:
    """Whether what is returned as the output depends on a product of weights and values."""
    size = 0 if bound.output is None else bound.output.numel()
    ends = [node for node in core.trace.returned if node is not None and core.trace.nodes[node].value.numel() == size]
    reached = {index for node in core.nodes.products for index in core.trace.reaches(node.index)}
    return not ends or any(end in reached for end in ends)


def _feeds(nodes: list[Node], side: int) -> list[int | None]:
    return [node.operand_nodes[side - 2] for node in nodes]
