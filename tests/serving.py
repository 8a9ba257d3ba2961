"""Servers for tests, and what tests ask them again and again."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import time

import httpx
import pytest
import torch

import headwise
from headwise.models import GPT, GPTConfig, LanguageModel, load_builtin
from headwise.view.serve import server as server_module
from headwise.view.serve.app import Server
from headwise.view.serve.models import Models
from headwise.view.serve.requests import Limits
from headwise.view.serve.security import Door

TOKEN = "a-secret-of-the-tests"  # noqa: S105
PORT = 8765
OWN = {"authorization": f"Bearer {TOKEN}"}
TEXT = "The captain looked at the sea, and the sea looked at the captain."


@functools.cache
def builtin():
    """The built-in model, read once for all tests."""
    return load_builtin()


def small_model(layers=2, heads=3):
    """Untrained, quick, for texts of any length."""
    torch.manual_seed(0)
    tokenizer = builtin().tokenizer
    config = GPTConfig(tokenizer.get_vocab_size(), d_model=24, num_heads=heads, num_layers=layers, context_length=32768)
    return LanguageModel(GPT(config).eval().requires_grad_(False), tokenizer)


TRANSLATORS = {
    "t5": {"d_model": 24, "d_kv": 8, "num_heads": 3, "num_layers": 3, "num_decoder_layers": 2, "d_ff": 16},
    "bart": {"d_model": 24, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 3}
    | {"decoder_attention_heads": 3, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64},
}


def translator(kind, folder):
    """A small encoder–decoder model, from a folder on disk. It never ends what it writes."""
    transformers = pytest.importorskip("transformers")
    tokenizer = builtin().tokenizer
    marks = {"pad_token_id": 0, "decoder_start_token_id": 5, "eos_token_id": None, "bos_token_id": None}
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=tokenizer.get_vocab_size(), forced_eos_token_id=None, **marks, **TRANSLATORS[kind]
    )
    transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return headwise.models.open_model(folder, both=True)


def server_of(limits=None, **models):
    offered = Models(["builtin"])
    offered.add("builtin", builtin())
    for name, model in models.items():
        offered.add(name, model)
    return Server(offered, Door(PORT, TOKEN), limits or Limits())


def begun(client, text=TEXT, **asked):
    answer = client.post("/api/runs", json={"text": text, **asked})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def until(client, id, stages, seconds=30):
    """The state of a run once it is at one of these stages."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        told = client.get(f"/api/runs/{id}").json()
        if told["stage"] in stages:
            return told
        time.sleep(0.01)
    raise AssertionError(f"still {told}")


def looked(client, text=TEXT, **asked):
    """The state of a run once it has something to show."""
    told = until(client, begun(client, text, **asked), ("finished", "failed", "refining"))
    assert told["error"] is None
    return told


def refused(answer, status, words):
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]
    return True


@contextlib.contextmanager
def listening(port=0, limits=None, token=TOKEN):
    """A server over a real socket, in a thread of this process; `address` opens its page."""
    models = Models(["builtin"])
    models.add("small", small_model())
    with server_module.listening("127.0.0.1", port) as listener:
        port = listener.getsockname()[1]
        server = Server(models, Door(port, token), limits or Limits())
        server.address = f"http://127.0.0.1:{port}/#token={token}"
        process = server_module.Process(server_module.config_of(server))
        thread = threading.Thread(target=process.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield server
        finally:
            process.should_exit = True
            thread.join()


class Process:
    """A real `headwise serve` in a process of its own."""

    def __init__(self, *options, port=0, token=TOKEN):
        command = [sys.executable, "-m", "headwise", "serve", "--no-open", "--json", "--port", str(port), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment |= {"HEADWISE_TOKEN": token} if token else {}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate()[1])
        self.address = json.loads(line)["address"]
        self.root, _, self.token = self.address.partition("/#token=")
        self.port = int(self.root.rsplit(":", 1)[1])

    def client(self):
        return httpx.Client(base_url=self.root, headers={"authorization": f"Bearer {self.token}"}, timeout=20)

    def send(self, number):
        self.process.send_signal(number)
        return self.ended()

    def ended(self):
        """Its status and what it said, once it has ended."""
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
