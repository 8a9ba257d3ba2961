"""Turns a reading into findings: which stage differs from the reference, and by which named mistake."""

from headwise.check.bound import Bound
from headwise.check.diagnosis import Diagnosis, asked_heads
from headwise.check.output_faults import judge_output
from headwise.check.projection_faults import judge_projections
from headwise.check.score_faults import judge_scores
from headwise.check.stages import Reading


def diagnose(bound: Bound, reading: Reading) -> Diagnosis:
    """Every stage in turn."""
    result = Diagnosis()
    if not _between_tokens(bound, reading, result):
        return result
    judge_projections(bound, reading, result)
    judge_scores(bound, reading, result)
    judge_output(bound, reading, result)
    return result


def _between_tokens(bound: Bound, reading: Reading, result: Diagnosis) -> bool:
    rows, columns = reading.core.weights.shape[-2:]
    T, S = bound.inputs.query.shape[1], bound.inputs.key.shape[1]
    if (rows, columns) == (T, S):
        return True
    line = reading.core.score_nodes[0].line
    H = asked_heads(bound) or bound.sizes.H
    if columns == rows == bound.sizes.D != H:
        result.wrong("attends-over-features", f"weights are a table of {rows}×{columns} for {T} tokens", line)
    elif columns == rows == H or columns in (bound.sizes.H, bound.sizes.D):
        result.wrong(
            "attends-over-heads", f"weights are a table of {rows}×{columns} for {T} tokens and {H} heads", line
        )
    elif columns == rows == bound.inputs.query.shape[0]:
        result.wrong("attends-over-batch", f"weights are a table of {rows}×{columns} for {T} tokens", line)
    else:
        result.doubts.append(f"weights are a table of {rows}×{columns} for {T} queries and {S} keys")
    return False
