"""Measures that do not depend on how fast the machine is."""

import dataclasses

import pytest
import torch

from headwise.cli.bench import measurement
from headwise.cli.bench.measurement import fitted, growth, launches, ratio
from headwise.cli.bench.peers import PEERS, peer_named
from headwise.cli.bench.sweep import Effort, built, ladder
from headwise.cli.bench.workload import Problem, Workload


def test_every_candidate_runs_equally_often(monkeypatch):
    counts = {"a": 0, "b": 0}

    def count(name):
        counts[name] += 1

    found = measurement.interleaved({n: lambda n=n: count(n) for n in counts}, rounds=7, seconds=0.0, least=5, warm=2)
    assert counts == {"a": 7, "b": 7}
    assert {entry["rounds"] for entry in found.values()} == {5}


def test_memory_is_what_tensors_take_at_their_peak():
    def run():
        first = torch.ones(3, 2**18)  # 3 MiB
        second = first + 1  # 6 MiB together
        del first
        return second.sum()

    assert measurement.tensor_peak(run, "cpu") == pytest.approx(6, abs=0.001)


def test_memory_leaves_out_what_was_there_before():
    before = torch.ones(2**20)
    assert measurement.tensor_peak(lambda: before.view(4, -1).mul_(2), "cpu") < 0.001  # the number 2 alone


def test_profiling_says_nothing(capfd):
    measurement.tensor_peak(lambda: torch.ones(3), "cpu")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("power", [0.5, 1, 2, 3])
def test_the_exponent_of_a_power_law_is_found(power):
    found = fitted([(T, 0.3 * T**power) for T in (128, 256, 512, 1024, 2048)])
    assert found.exponent == pytest.approx(power, abs=1e-3)
    assert found.points == 3


def test_what_does_not_grow_does_not_hide_the_exponent():
    assert fitted([(T, max(40.0, (T / 100) ** 2)) for T in (16, 32, 64, 2048, 4096, 8192)]).exponent == 2


def test_fewer_than_two_points_give_no_exponent():
    assert fitted([(128, 3.0)]) is None
    assert fitted([(128, 3.0), (256, 0.0)]) is None  # nothing was taken: it has no logarithm
    assert fitted([(128, 3.0), (256, 6.0)]) == (1.0, 2)


def test_growth_is_told_of_every_candidate():
    rows = [{"name": "a", "tokens": T, "ms": T**2, "MiB": T} for T in (3, 5, 7)]
    told = growth([*rows, {"name": "b", "tokens": 3, "ms": 1.0, "MiB": 1.0}])
    assert told == {
        "a": {"ms": {"exponent": 2.0, "points": 2}, "MiB": {"exponent": 1.0, "points": 2}},
        "b": {"ms": None, "MiB": None},
    }


def test_the_least_operations_are_those_torch_counts_in_a_layer_without_hidden_pairs():
    from torch.utils.flop_counter import FlopCounterMode

    problem = Problem(Workload(15, 3, batch=2, causal=False))
    module, x = built(PEERS[0], problem, 7), problem.x(7)
    for backward in (False, True):
        workload = dataclasses.replace(problem.workload, backward=backward)
        with FlopCounterMode(display=False) as counter:
            output = built(peer_named("textbook class"), problem, 7)(x.requires_grad_())
            if backward:
                output.sum().backward()
        assert workload.least_work(7)[0] == counter.get_total_flops()
    assert module.training is False


def test_the_least_bytes_are_weights_once_and_each_tensor_once():
    parameters, tensor = 4 * 15 * 15 + 4 * 15, 2 * 7 * 15
    assert Workload(15, 3, batch=2).least_work(7)[1] == 4 * (parameters + 2 * tensor)
    assert Workload(15, 3, batch=2, backward=True).least_work(7)[1] == 4 * (3 * parameters + 5 * tensor)


def test_the_share_of_the_ceiling_is_the_least_time_over_the_time():
    workload = Workload(15, 3, batch=2)
    flops, moved = workload.least_work(7)
    assert workload.ceiling_share(7, 2000.0, {"flops": flops, "bytes": moved * 10}) == 0.5
    assert workload.ceiling_share(7, 2000.0, {"flops": flops * 10, "bytes": moved}) == 0.5


def test_a_view_is_no_launch():
    x = torch.ones(2, 3)
    assert launches(lambda: x.transpose(0, 1).reshape(3, 2, 1).expand(3, 2, 5), "cpu") == 0
    assert launches(lambda: (x @ x.T).softmax(-1), "cpu") == 2


def counted(name, heads, backward=False):
    problem = Problem(Workload(24, heads, backward=backward))
    module, x = built(peer_named(name), problem, 7), problem.x(7)
    return launches(lambda: module(x).sum().backward() if backward else module(x), "cpu")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
def test_launches_of_a_list_grow_with_its_heads_and_those_of_the_class_do_not(backward):
    in_a_list = [counted("textbook list", heads, backward) for heads in (2, 4, 6)]
    assert in_a_list[1] - in_a_list[0] == in_a_list[2] - in_a_list[1] >= 2 * 8
    for name in ("textbook class", "headwise"):
        assert len({counted(name, heads, backward) for heads in (2, 4, 6)}) == 1


def test_a_ratio_of_medians_is_certain_only_beyond_the_noise():
    quiet, noisy = [1.0] * 9, [1.3, 0.8, 1.2, 0.7, 1.1, 0.9, 1.4, 0.6, 1.0]
    assert ratio([0.8 + 0.01 * i for i in range(9)], quiet) == (0.84, 0.81, 0.87)
    assert ratio([0.8 + 0.01 * i for i in range(9)], quiet).is_certain
    assert not ratio(noisy, quiet).is_certain
    assert ratio([*quiet[:8], 50.0], quiet).high == 1.0  # one slow round decides nothing


def test_the_ladder_has_every_rung_with_one_head_and_with_all():
    rows = ladder(Workload(12, 3), [5, 7], Effort(0.01, 1.0, quiet=True))
    assert [(row["tokens"], row["heads"], row["mode"], row["name"]) for row in rows] == [
        (tokens, heads, mode, name)
        for tokens in (5, 7)
        for heads in (1, 3)
        for mode in ("forward", "forward+backward")
        for name in ("textbook list", "textbook class", "headwise")
    ]
    assert all(row["ms"] > 0 and row["MiB"] > 0 and row["launches"] > 0 for row in rows)
