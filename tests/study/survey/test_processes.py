"""Real processes under torchrun: any number gives the same file, also when one is killed with SIGKILL on the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed

from headwise import OptionError
from headwise.cli import main
from headwise.study.survey import job
from headwise.study.survey.job import TorchrunProcesses, journal_folder, shared_word
from survey_words import sentence

SURVEY = ["--context", "29", "--batch", "2"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(11):
        (folder / f"{i}.txt").write_text(sentence(20 + 600 * (i % 3 == 1), i))
    (folder / "bad.txt").write_bytes(b"\xff\xfe")
    return folder


@pytest.fixture(scope="module")
def alone(corpus, tiny_folder, tmp_path_factory):
    """The bytes that one process writes."""
    out = tmp_path_factory.mktemp("alone") / "survey.json"
    assert main(["survey", str(corpus), "--model", str(tiny_folder), "--out", str(out), *SURVEY]) == 3
    return out.read_bytes()


def torchrun(processes, *options, restarts=0):
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launch, f"--max-restarts={restarts}", "-m", "headwise", "survey", *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(run):
    """What it said; a run that hangs is ended, and its processes with it."""
    try:
        return run.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        run.terminate()
        raise AssertionError(run.communicate()) from None


def kill_one(out, rank, started):
    """SIGKILL to one process, once it has something on disk."""
    folder = journal_folder(out)
    while not (folder / f"{rank}.json").exists():
        assert started.poll() is None, started.communicate()[1]
        assert not out.exists()
        time.sleep(0.01)
    os.kill(int((folder / f"{rank}.lock").read_text()), signal.SIGKILL)


def test_two_processes_write_what_one_writes(corpus, tiny_folder, alone, tmp_path):
    out = tmp_path / "survey.json"
    run = torchrun(2, corpus, "--model", tiny_folder, "--out", out, "--skipped-is-fine", *SURVEY)
    told, chatter = ended(run)
    assert run.returncode == 0, chatter
    assert out.read_bytes() == alone
    assert told.count("11 documents, 1 skipped") == 1
    assert "bad.txt:1: not UTF-8 text" in told
    assert "100 % · 11 documents" in chatter


def test_a_killed_process_ends_the_survey_and_another_number_goes_on(corpus, tiny_folder, alone, tmp_path):
    out = tmp_path / "survey.json"
    options = (corpus, "--model", tiny_folder, "--out", out, "--skipped-is-fine", "--save-every", "0", *SURVEY)
    first = torchrun(2, *options)
    kill_one(out, 1, first)
    ended(first)
    assert first.returncode != 0
    assert not out.exists()
    assert journal_folder(out).exists()
    second = torchrun(3, *options, "--resume")
    chatter = ended(second)[1]
    assert second.returncode == 0, chatter
    assert out.read_bytes() == alone
    assert not journal_folder(out).exists()


def test_torchrun_may_start_four_processes_again_by_itself(corpus, tiny_folder, alone, tmp_path):
    out = tmp_path / "survey.json"
    options = (corpus, "--model", tiny_folder, "--out", out, "--skipped-is-fine", "--save-every", "0", *SURVEY)
    run = torchrun(4, *options, "--resume", restarts=1)
    kill_one(out, 2, run)
    chatter = ended(run)[1]
    assert run.returncode == 0, chatter
    assert out.read_bytes() == alone


def together(jobs, store=None):
    """Processes as threads."""
    store = store or torch.distributed.HashStore()

    def start(rank):
        word = shared_word(store, rank, len(jobs))
        return jobs[rank](TorchrunProcesses(torch.distributed.PrefixStore(word, store), rank, len(jobs)))

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(start, range(len(jobs))))


def test_every_number_is_given_to_one_process():
    def take(processes):
        return [processes.claim() for _ in range(7)]

    assert sorted(number for numbers in together([take] * 3) for number in numbers) == list(range(21))


def test_processes_do_not_hear_what_those_before_a_restart_have_said():
    def ready(processes):
        processes.run_first(lambda: None)
        return processes.claim() < 3 and processes.finish(lambda: None) == (processes.rank == 0)

    store = torch.distributed.HashStore()
    for _ in range(3):
        assert together([ready] * 3, store) == [True] * 3


def test_what_the_first_process_refuses_ends_the_others_without_a_word():
    def refuse():
        raise OptionError("no")

    def go(processes):
        try:
            processes.run_first(refuse)
        except (OptionError, SystemExit) as error:
            return type(error).__name__, str(error)

    assert together([go] * 3) == [("OptionError", "no"), ("SystemExit", "2"), ("SystemExit", "2")]


def test_a_stopped_process_is_reported_after_a_while_and_a_slow_one_is_waited_for(monkeypatch):
    monkeypatch.setattr(job, "QUIET", 0.6)
    monkeypatch.setattr(job, "BEAT", 0.05)
    store = torch.distributed.HashStore()
    first, second = job.TorchrunProcesses(store, 0, 2), job.TorchrunProcesses(store, 1, 2)
    threading.Timer(1.5, second.finish, [lambda: None]).start()
    assert first.finish(lambda: None)
    monkeypatch.setattr(job.TorchrunProcesses, "_beat", lambda self: None)  # as SIGSTOP does
    job.TorchrunProcesses(torch.distributed.PrefixStore("another", store), 1, 2)
    first = job.TorchrunProcesses(torch.distributed.PrefixStore("another", store), 0, 2)
    with pytest.raises(OptionError, match="process 1 of 2 has shown no sign of life for [0-9] s: it was stopped"):
        first.finish(lambda: None)
