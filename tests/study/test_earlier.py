"""Runs that start at a layer give what whole runs give, compute less, and leave the model as it was."""

import threading

import pytest
import torch

from headwise import importance, silence
from headwise.study.earlier import EarlierModules
from headwise.study.watch import attention_layers
from tiny_models import V, states, tiny

B, T = 3, 7
KINDS = ("builtin", "gpt2", "llama", "bert", "bart")


@pytest.fixture(params=KINDS)
def model(request):
    return tiny(request.param)


@pytest.fixture
def tokens():
    return torch.randint(3, V, (B, T))


def prefix_of(model, tokens):
    layers = attention_layers(model, "test")
    with torch.no_grad():
        return EarlierModules(model, layers, lambda i: model(tokens[i : i + 1]), len(tokens)), layers


def test_starting_at_a_layer_gives_what_a_whole_run_gives(model, tokens):
    prefix, layers = prefix_of(model, tokens)
    for name in layers:
        for samples in (torch.tensor([2, 0, 0, 1]), torch.tensor([1, 1])):
            with torch.no_grad(), silence(model, {name: [1]}):
                expected = states(model(tokens[samples]))
                with prefix.skipped(name, samples):
                    torch.testing.assert_close(states(model(tokens[samples])), expected)
    assert not any("forward" in vars(module) for module in model.modules())


def test_modules_before_the_layer_do_not_run(tokens):
    model = tiny("gpt2")
    prefix, _ = prefix_of(model, tokens)
    ran = []
    for name, module in model.named_modules():
        if name.endswith(("mlp.c_fc", "attn.c_attn")):
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    with torch.no_grad(), prefix.skipped("transformer.h.1.attn", torch.tensor([0, 1])):
        model(tokens[:2])
    assert ran == [f"transformer.h.{name}" for name in ("1.attn.c_attn", "1.mlp.c_fc", "2.attn.c_attn", "2.mlp.c_fc")]


def test_other_threads_run_the_whole_model(tokens):
    model = tiny("llama")
    prefix, _ = prefix_of(model, tokens)
    found = []

    def other():
        with torch.no_grad():
            found.append(model(tokens[:1].flip(1)).logits)

    with torch.no_grad():
        expected = model(tokens[:1].flip(1)).logits
        with prefix.skipped("model.layers.2.self_attn", torch.tensor([0])):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
    torch.testing.assert_close(found[0], expected)


def test_a_model_with_a_memory_of_its_own_is_run_whole(tokens):
    """Its second block reads what the first left elsewhere, so skipping the first would change the loss."""
    model = tiny("gpt2")
    first, second = model.transformer.h[:2]
    held = []
    first.attn.register_forward_hook(lambda _, __, output: held.append(output[0]))
    second.attn.register_forward_pre_hook(lambda _, args: (args[0] + held.pop(), *args[1:]))
    found = importance(model, tokens, by="silence", controls=0)
    name = "transformer.h.2.attn"
    with torch.no_grad(), silence(model, {name: 3}):
        logits = model(tokens).logits
    each = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(found[name][:, 3], each.mean(1) - found.loss)
