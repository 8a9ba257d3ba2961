"""No method of a study makes a tensor of T × T numbers, let alone one for each head."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headwise import (
    eviction_scores,
    evidence,
    freeze,
    gate,
    head_kinds,
    importance,
    logit_attribution,
    patch,
    sink,
    trace,
    watch,
    why,
)
from headwise.models.gpt import GPT, GPTConfig
from headwise.models.text_model import TextModel, TokenCodec

SIZE, V = 2999, 7  # long enough that the tiles of streaming, whose size is fixed, are smaller than T × T


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that is made, forward or backward."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and 0 not in x.stride():  # what is expanded takes no memory
                self.most = max(self.most, x.numel())
        return out


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return GPT(GPTConfig(V, 12, 3, 2, SIZE)).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(1, V, (1, SIZE), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def seen(model, tokens):
    with torch.no_grad(), watch(model, outputs=True) as seen:
        model(tokens)
    return seen


def intervened(context, model, tokens):
    with torch.no_grad(), context:
        model(tokens)


LAST = "blocks.1.attention"
METHODS = {
    "watch": lambda model, tokens, seen: intervened(watch(model, outputs=True), model, tokens),
    "by_value": lambda model, tokens, seen: seen.outputs[LAST].by_value().entropy(),
    "contributions": lambda model, tokens, seen: seen.outputs[LAST].contributions().received(),
    "received": lambda model, tokens, seen: seen[LAST].received(torch.rand(1, SIZE)),
    "mass_on": lambda model, tokens, seen: seen[LAST].mass_on([(0, 100), (100, SIZE)]),
    "written": lambda model, tokens, seen: seen.outputs[LAST].written(),
    "patch": lambda model, tokens, seen: intervened(patch(model, seen), model, tokens),
    "gate": lambda model, tokens, seen: intervened(gate(model, {LAST: torch.rand(3)}), model, tokens),
    "freeze": lambda model, tokens, seen: intervened(freeze(model, seen), model, tokens),
    "importance by gradient": lambda model, tokens, seen: importance(model, tokens, controls=2),
    "importance by silence": lambda model, tokens, seen: importance(model, tokens, by="silence", controls=1, batch=3),
    "importance by mean": lambda model, tokens, seen: importance(model, tokens, by="mean", controls=1, batch=3),
    "trace": lambda model, tokens, seen: trace(model, tokens, (SIZE - 2, SIZE), draws=1),
    "head_kinds": lambda model, tokens, seen: head_kinds(
        model, samples=1, length=6, lengths=(SIZE,), depths=(0.5,), vocabulary=[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]
    ),
    "logit_attribution": lambda model, tokens, seen: logit_attribution(model, tokens),
    "why": lambda model, tokens, seen: why(model, tokens, LAST, 1, SIZE - 1, 5),
    "h2o": lambda model, tokens, seen: eviction_scores(seen[LAST]),
    "snapkv": lambda model, tokens, seen: eviction_scores(seen[LAST], "snapkv", window=64),
    "dropkv": lambda model, tokens, seen: eviction_scores(seen[LAST], "dropkv", value=seen.outputs[LAST].value),
    "evidence": lambda model, tokens, seen: evidence(
        TextModel("tiny", model, TokenCodec(lambda text: tokens[0].tolist())),
        ["text"],
        lambda layer, ids: layer.by_value().mass(sink(1)),
        count=3,
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_nothing_makes_a_matrix_of_all_pairs(method, model, tokens, seen):
    with Largest() as largest:
        METHODS[method](model, tokens, seen)
    assert SIZE < largest.most < 0.6 * SIZE**2


def test_a_dense_matrix_would_be_noticed(model, tokens, seen):
    with Largest() as largest:
        seen[LAST].select(heads=0).to_tensor()
    assert largest.most >= SIZE**2
