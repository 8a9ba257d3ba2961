"""Who is measured, who is left out and why."""

import pytest
import torch

from headwise.cli.bench import sweep as sweep_module
from headwise.cli.bench.measurement import Verdict
from headwise.cli.bench.peers import PEERS, Peer, peer_named
from headwise.cli.bench.sweep import Candidate, Effort, Trial, candidate, sweep
from headwise.cli.bench.workload import Problem, Workload

QUIET = Effort(0.01, 1.0, quiet=True)
FINE = Verdict(0.0, 1.0)


def runs(result=None):
    return lambda _tokens: Trial(lambda: torch.ones(8) + 1 if result is None else result(), lambda: FINE)


def test_a_row_has_time_spread_memory_and_error():
    found = sweep([Candidate("one", runs())], [5, 3], "cpu", QUIET)
    assert [(row["name"], row["tokens"]) for row in found.rows] == [("one", 3), ("one", 5)]
    assert found.left_out == []
    for row in found.rows:
        assert row["ms"] > 0
        assert row["rounds"] >= 3
        assert row["MiB"] * 2**20 == pytest.approx(64, abs=16)  # the ones and the sum, and the number 1
        assert row["error"] == 0.0


def test_a_wrong_peer_is_refused_before_it_is_timed():
    calls = []

    class Wrong(torch.nn.Module):
        def forward(self, x):
            calls.append(x.shape)
            return x

    problem = Problem(Workload(15, 3, batch=2))
    peers = [Peer("liar", lambda _workload, _weights, _tokens: Wrong()), PEERS[0]]
    found = sweep([candidate(peer, problem) for peer in peers], [7, 11], "cpu", QUIET)
    assert len(calls) == 1
    assert {row["name"] for row in found.rows} == {"headwise"}
    (entry,) = found.left_out
    assert (entry["name"], entry["tokens"]) == ("liar", 7)
    assert entry["why"].startswith("wrong: error 1.")
    assert entry["why"].endswith("not timed")


def test_who_fails_is_left_out_from_there_on_and_the_others_go_on():
    def fails(tokens):
        if tokens > 4:
            raise ValueError("too long\nfor me")
        return runs()(tokens)

    found = sweep([Candidate("one", fails), Candidate("two", runs())], [3, 5, 7], "cpu", QUIET)
    assert [(row["name"], row["tokens"]) for row in found.rows] == [("one", 3), ("two", 3), ("two", 5), ("two", 7)]
    assert found.left_out == [{"name": "one", "tokens": 5, "why": "fails: ValueError: too long for me"}]


def test_who_needs_more_memory_than_is_free_is_never_run(monkeypatch):
    monkeypatch.setattr(sweep_module, "free_bytes", lambda _device: 3 * 2**30)
    found = sweep([Candidate("big", pytest.fail, lambda _tokens: 34 * 2**30)], [3], "cpu", QUIET)
    assert found.left_out == [{"name": "big", "tokens": 3, "why": "would take 34 GiB, and 3 GiB are free"}]


def test_a_matrix_for_every_head_is_what_a_dense_peer_needs():
    problem = Problem(Workload(32, 2, batch=3))
    dense = peer_named("textbook class")
    assert candidate(dense, problem).needs(1000) == 3 * 3 * 2 * 1000**2 * 4
    assert candidate(PEERS[0], problem).needs(1000) == 0


def test_who_is_too_slow_is_left_out(monkeypatch):
    monkeypatch.setattr(sweep_module, "timed", lambda _run, _device: 2000.0)
    found = sweep([Candidate("slow", runs())], [3], "cpu", QUIET)
    assert found.left_out == [{"name": "slow", "tokens": 3, "why": "one run takes 2 s, the limit is 1 s"}]


def test_who_refuses_is_named_once():
    found = sweep([Candidate("absent", pytest.fail, refuses="not installed")], [3, 5], "cpu", QUIET)
    assert found == ([], [{"name": "absent", "tokens": None, "why": "not installed"}])


def test_out_of_memory_is_told_as_such():
    def fails(_tokens):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    assert sweep([Candidate("big", fails)], [3], "cpu", QUIET).left_out[0]["why"] == "out of memory"


def test_progress_goes_to_standard_error(capsys):
    sweep([Candidate("one", runs())], [3], "cpu", Effort(0.01, 1.0))
    assert capsys.readouterr() == ("", "T=3, candidates: 1\n")
