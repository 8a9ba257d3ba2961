"""Nobody is called slow by accident, and the compiler is not imported to keep it away."""

import itertools
import subprocess
import sys

import pytest

from headwise.check.faults import speed
from headwise.check.faults.speed import ROUNDS, Times, compared, is_noisy, least_factor
from headwise.check.templates import write


@pytest.fixture
def clock(monkeypatch):
    """`clock(seconds)` is a call that takes the next of these times whenever it is made."""
    now = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(speed.torch, "ones", lambda _: None)

    def party(seconds):
        times = iter(seconds)

        def run():
            now[0] += next(times)

        return run

    return party


def test_five_times_the_time_in_every_round_is_slow(clock):
    found = compared(clock(itertools.repeat(5.0)), clock(itertools.repeat(1.0)))
    assert found == (5.0, 5.0, 5.0)


def test_one_slow_sample_is_not_slow(clock):
    assert compared(clock(itertools.chain([50.0, 50.0], itertools.repeat(1.0))), clock(itertools.repeat(1.0))) is None


@pytest.mark.parametrize("bad", range(ROUNDS))
def test_a_single_round_that_does_not_show_it_is_enough(bad, clock):
    calls = 1 + speed.WARM
    times = [1.0] + [5.0] * bad * calls + [2.0] + [5.0] * 99
    assert compared(clock(times), clock(itertools.repeat(1.0))) is None


def test_a_machine_that_takes_many_times_for_the_same_work_cannot_tell(clock):
    rounds = [[1.0] * (1 + speed.WARM), [1.7] * (1 + speed.WARM)] * ROUNDS
    assert compared(clock(itertools.repeat(9.0)), clock(itertools.chain([1.0], *rounds))) is None


def test_the_lower_end_is_the_best_time_beside_the_worst_of_the_other():
    assert least_factor(Times(6.0, [3.0, 9.0]), Times(1.0, [1.0, 1.5])) == 2.0
    assert least_factor(Times(1.5, [9.0, 9.0]), Times(1.0, [1.0, 1.0])) == 1.5
    assert not is_noisy([1.0, 1.1, 1.2])


JUDGE = """
import sys
from pathlib import Path
from headwise.check.verdict import judge_file
print(judge_file(Path(sys.argv[1]), thorough=False).verdict, "torch._dynamo" in sys.modules)
import torch
kept = [name for name, held in vars(torch._refs).items() if "__dynamo_disable" in getattr(held, "__dict__", ())]
print("_dynamo" in vars(torch), kept)
"""


def test_a_file_is_judged_without_the_compiler_and_nothing_is_left_in_its_place(tmp_path):
    path = tmp_path / "attention.py"
    path.write_text(write("separate"))
    ended = subprocess.run([sys.executable, "-c", JUDGE, path], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["right False", "False []"]
