"""What weights cost is measured on correct results only."""

import pytest
import torch

from headwise.cli.bench import weights
from headwise.cli.bench.sweep import Effort, sweep
from headwise.cli.bench.workload import Problem, Workload

QUIET = Effort(0.01, 5.0, quiet=True)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "no mask"])
def test_everybody_who_can_gives_what_keys_receive(causal):
    found = sweep(weights.received(Workload(30, 3, batch=2, causal=causal)), [7, 11], "cpu", QUIET)
    names = ["SDPA alone, nothing seen", "headwise, after a forward pass", "headwise, from query and key"]
    assert [row["name"] for row in found.rows if row["tokens"] == 7] == [*names, "softmax, then a sum"]
    assert [entry["name"] for entry in found.left_out] == ["flash-colreduce"]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "no mask"])
def test_everybody_gives_the_weights_of_every_head(causal):
    pytest.importorskip("transformers")
    problem = Problem(Workload(30, 3, batch=2, causal=causal))
    found = sweep(weights.weights_of_every_head(problem), [7], "cpu", QUIET)
    assert found.left_out == []
    assert [row["name"] for row in found.rows][:2] == ["headwise, a map", "headwise, a map made dense"]
    assert len(found.rows) == 5


def test_weights_of_another_problem_are_judged_wrong():
    problem = Problem(Workload(30, 3, batch=2))
    uniform = torch.ones(2, 3, 7, 7).tril()
    assert "wrong" in problem.judge_weights(uniform / uniform.sum(-1, keepdim=True), 7).wrong


def test_sums_that_forget_the_mask_are_judged_wrong():
    def forgets(workload, query, key):
        return lambda: (query @ key.transpose(2, 3)).softmax(-1).sum(2)

    (candidate,) = [weights.column_sums("forgets", Workload(30, 3), forgets)]
    assert "wrong" in candidate.trial(7).judge().wrong
