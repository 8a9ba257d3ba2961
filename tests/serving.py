"""Servers for tests, and what tests ask them again and again."""

import time

import torch

from headwise.models import GPT, GPTConfig, LanguageModel, load_builtin
from headwise.serve.app import Server
from headwise.serve.limits import Limits
from headwise.serve.models import Models
from headwise.serve.security import Door

TOKEN = "a-secret-of-the-tests"  # noqa: S105
PORT = 8765
OWN = {"authorization": f"Bearer {TOKEN}"}
TEXT = "The captain looked at the sea, and the sea looked at the captain."


def small_model(layers=2, heads=3):
    """Untrained, quick, for texts of any length."""
    torch.manual_seed(0)
    tokenizer = load_builtin().tokenizer
    config = GPTConfig(tokenizer.get_vocab_size(), d_model=24, num_heads=heads, num_layers=layers, context_length=32768)
    return LanguageModel(GPT(config).eval().requires_grad_(False), tokenizer)


def server_of(limits=None, **models):
    offered = Models(["builtin"])
    for name, model in models.items():
        offered.add(name, model)
    return Server(offered, Door(PORT, TOKEN), limits or Limits())


def begun(client, text=TEXT, **asked):
    answer = client.post("/api/looks", json={"text": text, **asked})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def until(client, id, stages, seconds=30):
    """How the look stands once it is at one of these stages."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        told = client.get(f"/api/looks/{id}").json()
        if told["stage"] in stages:
            return told
        time.sleep(0.01)
    raise AssertionError(f"still {told}")


def looked(client, text=TEXT, **asked):
    """How a look stands that can be seen."""
    told = until(client, begun(client, text, **asked), ("finished", "failed", "refining"))
    assert told["error"] is None
    return told


def refused(answer, status, words):
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]
    return True
