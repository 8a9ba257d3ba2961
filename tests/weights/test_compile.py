"""Statistics of a map inside `torch.compile(fullgraph=True)`: each gives what it gives outside, or says what to do."""

import pytest
import torch

from headwise import (
    AttentionMap,
    MaskError,
    alibi,
    attend,
    causal,
    documents,
    induction,
    padding,
    previous_token,
    sink,
    token_is,
)
from headwise.weights import Reading

B, H, HKV, T, S, D = 2, 6, 3, 7, 11, 5
IDS = torch.arange(S) % 4

STATISTICS = {
    "entropy": lambda w: w.entropy(),
    "peak": lambda w: w.peak(),
    "distance": lambda w: w.distance(),
    "received": lambda w: (w.received().total, w.received().count, w.received().mean),
    "topk": lambda w: w.topk(3),
    "mass": lambda w: w.mass(previous_token()),
    "mass of tokens": lambda w: w.mass(induction(IDS)) + w.mass(token_is(IDS, 2)),
    "pooled": lambda w: w.pooled(5, 4),
    "pooled peak": lambda w: w.pooled(5, 4, peak=True),
    "log_sum_exp": lambda w: w.log_sum_exp(),
    "a block": lambda w: w[0, 1, 2:5],
    "a list of heads": lambda w: w[:, [0, -2], 3:5],
    "elements": lambda w: w[torch.tensor([0, 1]), torch.tensor([1, 2])],
    "to_tensor": lambda w: w.to_tensor(),
    "sum": lambda w: (w.sum(), w.sum(-1), w.sum(-2, keepdim=True)),
    "mean": lambda w: (w.mean(), w.mean(1)),
    "amax": lambda w: w.amax(-1),
    "max": lambda w: (w.max(), *w.max(-1)),
    "select": lambda w: w.select(heads=[0, 2], rows=slice(2, 6)).entropy(),
    "without": lambda w: w.without(sink(1)).entropy(),
    "panel": lambda w: panel(w),
    "detach": lambda w: w.detach().entropy(),
    "clone": lambda w: w.clone().entropy(),
    "kept": lambda w: w.kept().to_tensor(),
    "arithmetic": lambda w: (w - 1, 1 - w, w * w, torch.einsum("bhts->bht", w)),
}


def panel(w):
    """All statistics of a panel at once."""
    found = w.panel(
        entropy=True, peak=True, distance=True, histogram=True, received=True, masses={"s": sink(2)}, pooled=5, topk=2
    )
    flat = (found.entropy, *found.peak, found.distance, found.histogram, found.received.total, found.masses["s"])
    return (*flat, found.pooled, *found.topk)


def flatten(found):
    return [found] if isinstance(found, torch.Tensor) else [x for part in found for x in flatten(part)]


def heads(dtype=torch.float64):
    shapes = [(B, H, T, D), (B, HKV, S, D), (B, HKV, S, D)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def compiled(function, backend="eager"):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_in_one_graph_is_what_it_is_outside(name):
    mask = padding([0, S]) & causal()  # one sample sees nothing

    def run(query, key, value):
        return STATISTICS[name](attend(query, key, value, mask=mask, relative=alibi(H), return_weights=True)[1])

    tensors = heads()
    backend = "aot_eager" if name == "panel" else "eager"  # which takes a third of the time
    for ours, theirs in zip(flatten(compiled(run, backend)(*tensors)), flatten(run(*tensors)), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.requires_grad == theirs.requires_grad
        if ours.requires_grad:
            (found,), (expected,) = (
                torch.autograd.grad(x.sum(), tensors[:1], retain_graph=True) for x in (ours, theirs)
            )
            torch.testing.assert_close(found, expected)


def test_one_graph_of_statistics_serves_every_length():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def run(query):
        _, weights = attend(query, query, query, causal=True, return_weights=True)
        return weights.entropy(), weights.peak().weight, weights.received().total, weights.mass(sink(2))

    torch.compiler.reset()
    traced = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    for length in (5, 13, 29):
        query = torch.randn(2, 3, length, 8)
        for ours, theirs in zip(traced(query), run(query), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert len(graphs) == 1


class Longest(Reading):
    """A statistic without `dense`."""

    differentiable = (False,)

    def start(self, source):
        self.best = torch.zeros(source.shape[0] * source.shape[1])
        self.source = source

    def take(self, tile):
        self.best[tile.heads] = torch.maximum(self.best[tile.heads], tile.weights.amax((1, 2)))

    def finish(self):
        return (self.best,)


REFUSED = {
    "summary": (lambda w: w.summary(), "Return the map from the compiled function"),
    "plot": (lambda w: w.plot(), "Return the map from the compiled function"),
    "save": (lambda w: w.save("map.safetensors"), "Return the map from the compiled function"),
    "a statistic without dense": (lambda w: w.read(Longest()), "Longest has no dense.*which a compiled graph needs"),
    "a bool mask": (lambda w: w[:, torch.ones(H) > 0], "head mask inside a compiled function"),
    "a product": (lambda w: w @ torch.ones(S, D), r"Write weights\.to_tensor\(\) @ x"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_numbers_is_refused_with_a_cure(name):
    statistic, message = REFUSED[name]
    run = compiled(lambda query: statistic(AttentionMap(query, query)))
    with pytest.raises(Exception, match=message):
        run(torch.randn(B, H, S, D))


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_documents_by_their_lengths_compile_and_work_on_the_meta_device(kind):
    def run(query, lengths):
        return attend(query, query, query, mask=documents(lengths=lengths) & causal())

    query = torch.randn(B, H, S, D)
    torch.testing.assert_close(compiled(run)(query, kind([4, 0, 7])), run(query, kind([4, 0, 7])))
    assert run(query.to("meta"), kind([4, 0, 7])).shape == query.shape
    with torch.device("meta"):
        assert run(torch.empty(B, H, S, D), kind([4, 0, 7])).shape == query.shape
        assert documents(lengths=torch.tensor([4, 7])).tensors()[0].is_meta


def test_documents_that_do_not_fit_are_refused_when_the_graph_runs():
    def run(query, lengths):
        return attend(query, query, query, mask=documents(lengths=lengths))

    query = torch.randn(B, H, S, D)
    with pytest.raises(RuntimeError, match="as many tokens in all as there are keys"):
        compiled(run)(query, torch.tensor([4, 5]))
    with pytest.raises(MaskError, match="made for 9 keys"):
        run(query, torch.tensor([4, 5]))
