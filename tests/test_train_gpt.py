"""The training example: it learns, it can be killed, and it goes on to the bit."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from headwise.models import load

SCRIPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"
OPTIONS = [
    "--dropout",
    "0.1",
    "--steps",
    "12",
    "--report",
    "1",
    "--evaluate",
    "6",
    "--keep",
    "4",
    "--warmup",
    "3",
    "--rows",
    "4",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, first in (("train.txt", 0), ("valid.txt", 7)):
        verses = [f"The {i} birds of the {i % 11} hills sang {'again and ' * (i % 4)}again. " * 40 for i in range(12)]
        (folder / name).write_text("\x1e".join(verses[first:]))
    return folder


def started(texts, out, *more):
    command = [sys.executable, str(SCRIPT), str(texts), "--out", str(out), *OPTIONS, *more]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(out):
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_run_that_was_killed_goes_on_to_the_bit(texts, tmp_path):
    whole = started(texts, tmp_path / "whole")
    assert "held-out bits per byte" in whole.communicate()[0]
    killed = started(texts, tmp_path / "killed")
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    again = started(texts, tmp_path / "killed")
    assert "resuming at step" in again.communicate()[0]
    one, other = (load(tmp_path / name).gpt.state_dict() for name in ("whole", "killed"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")
    assert losses(tmp_path / "whole")[12] < losses(tmp_path / "whole")[1]


def test_batches_depend_on_seed_and_step_alone(texts):
    train_gpt = module()
    texts = train_gpt.read_texts(texts, False)
    tokenizer = train_gpt.make_tokenizer(texts, 300)
    config = train_gpt.GPTConfig(tokenizer.get_vocab_size(), context_length=64)
    corpus = train_gpt.Corpus(texts, tokenizer)
    batches = train_gpt.Batches(corpus, config, rows=6, repeated=0.5, seed=5)
    first, again, other = (batches.at(step) for step in (3, 3, 4))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    for tokens, targets, pieces in first:
        scored = targets != train_gpt.IGNORED
        assert tokens.shape == targets.shape == (3, 64)
        ahead = torch.cat([tokens[:, 1:], targets[:, -1:]], 1)
        inside = torch.ones_like(scored) if pieces is None else torch.cat([pieces[:, 1:], pieces[:, -1:]], 1) == pieces
        assert (targets == ahead)[scored & inside].all(), "the next token of the same text is what is predicted"


def test_a_checkpoint_of_another_run_is_refused(texts, tmp_path):
    assert "held-out" in started(texts, tmp_path, "--minutes", "0.0001").communicate()[0]
    assert "belongs to another run" in started(texts, tmp_path, "--seed", "3").communicate()[0]


def test_a_folder_without_texts_is_refused(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "contains no .txt or .txt.xz file to train on" in done.stderr


def module():
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
