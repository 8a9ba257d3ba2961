"""A score function of the user: outputs, maps, statistics and gradients against the reference; what it may not do."""

import copy
import dataclasses
import functools
import math
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from closeness import assert_close_to_truth
from headwise import (
    AttentionMap,
    CheckpointError,
    OptionError,
    Scoring,
    StaleMapError,
    alibi,
    attend,
    causal,
    explain,
    previous_token,
    reference,
)
from headwise.attention.backends.flex import score_mod
from headwise.masks import Composite
from headwise.weights.score import Score

B, H, Hkv, T, S, D = 2, 6, 3, 11, 13, 8
double = {"dtype": torch.float64}


def heads(seed=0, requires_grad=False):
    torch.manual_seed(seed)
    found = torch.randn(B, H, T, D, **double), torch.randn(B, Hkv, S, D, **double), torch.randn(B, Hkv, S, D, **double)
    return tuple(x.requires_grad_(requires_grad) for x in found)


TABLE = torch.linspace(-1, 1, H * 16, **double).view(H, 16)
AHEAD = torch.tensor(0.3, **double)


def by_name(score, batch, head, query, key):
    return score * (1 + AHEAD * (key > query)) + 0.1 * batch


def with_factor(score, batch, head, query, key, factor):
    return score * factor + (query + 2 * key) % 5


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(H, 16, generator=torch.Generator().manual_seed(3), **double))
        self.gain = nn.Linear(1, 1, **double)

    def forward(self, score, batch, head, query, key):
        return self.gain(score[..., None])[..., 0] + self.bias[head, (query - key).abs()]


class Holder:
    def __init__(self):
        self.tables = {"a": TABLE.clone()}

    def __call__(self, score, batch, head, query, key):
        return score + self.tables["a"][head, key]

    def method(self, score, *places):
        return self(score, *places).tanh()


@dataclasses.dataclass(frozen=True, eq=False)
class Table(Composite):
    """A score function that saves and moves like a mask."""

    table: Tensor

    def __call__(self, score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + self.table[head, (query - key).abs()]


def closure():
    table, slope = TABLE.clone(), torch.tensor(0.2, **double)

    def inner(score):
        return score + slope * score**2

    return lambda score, batch, head, query, key: inner(score) + table[head, (query - key).abs()]


def hiding(score, batch, head, query, key):
    return torch.where((key % 3 == 1) | (query == S - 2), -math.inf, score)


FUNCTIONS = {
    "a function that reads a global": lambda: by_name,
    "a closure": closure,
    "a partial": lambda: functools.partial(with_factor, factor=torch.tensor(1.5, **double)),
    "a module": Learned,
    "an object": Holder,
    "a method": lambda: Holder().method,
    "a composite": lambda: Table(TABLE.clone()),
    "no tensors": lambda: lambda score, batch, head, query, key: score * 0.5 - (query - key).abs() * 0.1,
    "a table without the score": lambda: lambda score, batch, head, query, key: TABLE[head, key],
    "minus infinity": lambda: hiding,
}
OPTIONS = {
    "alone": dict,
    "causal": lambda: {"causal": True},
    "everything": lambda: {
        "causal": True,
        "softcap": 1.5,
        "scale": 0.7,
        "sinks": torch.linspace(-1, 1, H, **double),
        "relative": alibi(slopes=torch.linspace(0.1, 0.4, H, **double)),
        "attn_bias": torch.randn(B, 1, T, S, generator=torch.Generator().manual_seed(5), **double),
    },
}


def truth_of(q, k, v, function, options):
    """Output and weights by the reference."""
    options = dict(options)
    visible = causal().to_tensor(T, S) if options.pop("causal", False) else None
    relative, bias = options.pop("relative", None), options.pop("attn_bias", None)
    if relative is not None:
        bias = Scoring(bias=bias, relative=relative).whole_bias(q, S)
    return reference.attend(q, k, v, visible=visible, bias=bias, score=function, **options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_output_map_and_statistics_equal_the_reference(kind, options):
    function, options = FUNCTIONS[kind](), OPTIONS[options]()
    q, k, v = heads()
    output, weights = attend(q, k, v, score=function, **options, return_weights=True)
    truth, dense = truth_of(q, k, v, function, options)
    with torch.no_grad():
        assert_close_to_truth(output, truth)
        assert_close_to_truth(weights.to_tensor(), dense)
        assert_close_to_truth(weights[1, 2:5, 3:9, ::2], dense[1, 2:5, 3:9, ::2])
        places = torch.tensor([0, 1]), torch.tensor([4, 0]), torch.tensor([10, 2]), torch.tensor([3, 12])
        assert_close_to_truth(weights[places], dense[places])
        logs = dense.clamp(min=1e-300).log()
        panel = weights.panel(entropy=True, received=True, peak=True, masses={"p": previous_token()}, pooled=(T, S))
        assert_close_to_truth(panel.entropy, -(dense * logs).sum(-1))
        assert_close_to_truth(panel.received.total, dense.sum(2))
        assert_close_to_truth(panel.pooled, dense)
        assert_close_to_truth(panel.masses["p"], (dense * previous_token().to_tensor(T, S)).sum(-1))
        assert_close_to_truth(panel.peak.weight, dense.amax(-1))
        assert_close_to_truth(weights.select(heads=[4, 1], rows=slice(2, 7))[:], dense[:, [4, 1], 2:7])
        assert_close_to_truth(weights.clone().to_tensor(), dense)


def test_a_key_that_the_function_hides_is_not_counted():
    q, k, v = heads()
    output, weights = attend(q, k, v, score=hiding, return_weights=True)
    seen = hiding(torch.zeros(T, S), None, None, torch.arange(T)[:, None] + S - T, torch.arange(S)) == 0
    assert (output[:, :, T - 2] == 0).all()  # this query sees nothing
    assert weights.log_sum_exp()[0, 0, T - 2] == -math.inf
    counted = weights.received()
    assert_close_to_truth(counted.mean, counted.total / seen.sum(0).clamp(min=1))
    assert torch.equal(weights._source().keys_seen(), seen.sum(-1).expand(B, H, T))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["a closure", "a module", "a composite", "a partial"])
def test_gradients_reach_query_key_and_the_tensors_that_a_function_reads(kind, options):
    function, options = FUNCTIONS[kind](), OPTIONS[options]()
    q, k, v = heads(requires_grad=True)
    learned = [x.requires_grad_() for x in Score(function).settled((B, H, T, S), q.device, q.dtype).learnable]
    assert len(learned) == {"a module": 3, "a closure": 2}.get(kind, 1)
    output, weights = attend(q, k, v, score=function, **options, return_weights=True)
    truth, dense = truth_of(q, k, v, function, options)
    entropy = -(dense * dense.clamp(min=1e-300).log()).sum(-1)
    pairs = {
        "output": (output.square().sum(), truth.square().sum()),
        "statistic": (weights.entropy().square().sum(), entropy.square().sum()),
        "tile": (weights[:, 2:4, :, 1:9].square().sum(), dense[:, 2:4, :, 1:9].square().sum()),
    }
    for name, (found, wanted) in pairs.items():
        inputs = [q, k, *learned]
        ours = torch.autograd.grad(found, inputs, retain_graph=True)
        theirs = torch.autograd.grad(wanted, inputs, retain_graph=True)
        for a, b in zip(ours, theirs, strict=True):
            assert_close_to_truth(a, b), name
        assert all(x.abs().sum() > 0 for x in ours[:3])  # a constant added to all scores of a row has no effect


def test_rows_computed_again_in_the_backward_pass_have_the_same_gradient(monkeypatch):
    monkeypatch.setattr("headwise.attention.backends.dense.BLOCK_BYTES", 2000)
    q, k, v = heads(requires_grad=True)
    function = Learned()
    found = torch.autograd.grad(attend(q, k, v, score=function, causal=True).sum(), [q, k, function.bias])
    wanted = torch.autograd.grad(truth_of(q, k, v, function, {"causal": True})[0].sum(), [q, k, function.bias])
    for a, b in zip(found, wanted, strict=True):
        assert_close_to_truth(a, b)


def test_a_detached_map_has_no_gradient_and_keeps_its_numbers():
    function = Learned()
    q, k, v = heads()
    _, weights = attend(q, k, v, score=function, return_weights=True)
    kept = weights.clone().detach()
    before = kept[:]
    assert weights.requires_grad
    assert not kept.requires_grad
    with torch.no_grad():
        function.bias.add_(1.0)
    assert torch.equal(kept[:], before)
    with pytest.raises(StaleMapError):
        weights.entropy()


def _repickled(x):
    return pickle.loads(pickle.dumps(x))  # noqa: S301 - our own bytes


@pytest.mark.parametrize("kind", ["a function that reads a global", "a module", "a composite", "an object"])
def test_maps_can_be_pickled_and_copied(kind):
    q, k, v = heads()
    _, weights = attend(q, k, v, score=FUNCTIONS[kind](), return_weights=True)
    with torch.no_grad():
        for other in (_repickled(weights), copy.deepcopy(weights), copy.copy(weights), weights.kept()):
            assert_close_to_truth(other[:], weights[:])
            assert_close_to_truth(other.entropy(), weights.entropy())
        if kind != "a module":  # which would have to be converted as well
            assert (weights.to(torch.float32)[:] - weights[:]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["a function that reads a global", "a composite"])
def test_maps_can_be_saved_if_a_name_leads_to_the_function(kind, tmp_path):
    q, k, v = heads()
    _, weights = attend(q, k, v, score=FUNCTIONS[kind](), return_weights=True)
    weights.save(tmp_path / "map.safetensors")
    assert_close_to_truth(AttentionMap.load(tmp_path / "map.safetensors").to_tensor(), weights.to_tensor())


@pytest.mark.parametrize("kind", ["a closure", "a module"])
def test_maps_that_cannot_be_saved_or_pickled_say_why(kind, tmp_path):
    q, k, v = heads()
    _, weights = attend(q, k, v, score=FUNCTIONS[kind](), return_weights=True)
    with pytest.raises(OptionError, match=r"the score function .* cannot be saved.*weights.kept\(\)"):
        weights.save(tmp_path / "map.safetensors")
    weights.kept().save(tmp_path / "kept.safetensors")
    if kind == "a closure":
        with pytest.raises(OptionError, match=r"the score function closure.<locals>.<lambda> cannot be pickled"):
            pickle.dumps(weights)


def test_a_saved_map_names_the_function_it_needs(tmp_path, monkeypatch):
    q, k, v = heads()
    attend(q, k, v, score=by_name, return_weights=True)[1].save(tmp_path / "map.safetensors")
    monkeypatch.delattr(f"{__name__}.by_name")
    with pytest.raises(CheckpointError, match="by_name, which is not defined yet"):
        AttentionMap.load(tmp_path / "map.safetensors")


@pytest.mark.parametrize("kind", ["a closure", "a module", "a composite", "no tensors"])
def test_one_compiled_graph_gives_output_and_map(kind):
    torch.compiler.reset()
    function = FUNCTIONS[kind]()
    q, k, v = heads()

    @functools.partial(torch.compile, fullgraph=True, backend="eager")
    def run(q, k, v):
        return attend(q, k, v, score=function, causal=True, return_weights=True)

    output, weights = run(q, k, v)
    truth, dense = truth_of(q, k, v, function, {"causal": True})
    with torch.no_grad():
        assert_close_to_truth(output, truth)
        assert_close_to_truth(weights[:], dense)
    if kind == "a module":  # the map finds the parameters when it is first read
        found = torch.autograd.grad(weights.entropy().sum(), function.bias)[0]
        wanted = torch.autograd.grad(-(dense * dense.clamp(min=1e-300).log()).sum(), function.bias)[0]
        assert_close_to_truth(found, wanted)
    torch.compiler.reset()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_flex_attention_takes_the_same_function(kind, options):
    """Not compiled, FlexAttention runs on the CPU: what it is given must mean the same."""
    options = OPTIONS[options]() | {"causal": False, "sinks": None}
    function = FUNCTIONS[kind]()
    q, k, v = heads()
    names = ("scale", "softcap", "relative")
    parts = {name: options[name] for name in names if name in options}
    scoring = Scoring(score=function, bias=options.get("attn_bias"), **parts)
    scoring = scoring.settled((B, H, T, S), q.device, q.dtype)
    modified = score_mod(scoring, q.dtype, T, S)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        found = flex_attention(q, k, v, modified, scale=scoring.scale, enable_gqa=True)
    truth, _ = truth_of(q, k, v, function, options)
    seen = torch.ones(T, dtype=torch.bool)
    seen[T - 2] = kind != "minus infinity"
    with torch.no_grad():
        assert_close_to_truth(found[:, :, seen], truth[:, :, seen])


def test_explain_says_why_fused_kernels_refuse():
    found = explain(*heads(), score=by_name)
    assert found.path == "rows"
    assert "a score function" in found.refused["sdpa"]


def test_a_map_made_by_hand_takes_a_function():
    q, k, v = heads()
    weights = AttentionMap(q, k, Scoring(score=by_name))
    assert_close_to_truth(weights[:], truth_of(q, k, v, by_name, {})[1])


def in_place(score, batch, head, query, key):
    score += 1
    return score


def in_its_own(score, batch, head, query, key):
    AHEAD.add_(0.0)
    return score


WRONG = {
    "number": (3, r"score=3: expected a function of \(score, batch, head, query, key\)"),
    "arity": (lambda score, q, k: score, r"too many positional arguments; expected a function of"),
    "nothing": (lambda *_: None, "returned a NoneType; expected a tensor of scores"),
    "bool": (lambda s, b, h, q, k: q >= k, r"returned \(7, 17\) of torch.bool; expected floats of the same shape"),
    "chained": (lambda s, b, h, q, k: s + TABLE[h][..., q], "score=<lambda>: called with|returned"),
    "an axis too many": (lambda s, b, h, q, k: s[None], r"returned \(1, 3, 5, 7, 17\)"),
    "whole shape": (lambda s, b, h, q, k: s + torch.zeros(1, H, 1, 1), "it raised RuntimeError: The size of tensor"),
    "in place": (in_place, "in_place writes to score in place"),
    "in its own": (in_its_own, "in_its_own writes to a tensor of its own in place"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_functions_that_cannot_work_are_refused(kind):
    function, words = WRONG[kind]
    with pytest.raises(OptionError, match=words):
        attend(*heads(), score=function)


def test_a_function_that_reads_other_tensors_later_is_refused():
    def fickle(score, batch, head, query, key):
        return score + TABLE[head, key] if score.shape[-1] == S else score + AHEAD

    q, k, v = heads(requires_grad=True)
    TABLE[0, 0].item()
    with pytest.raises(OptionError, match="do not branch on shapes or values"):
        attend(q, k, v, score=lambda s, *x: fickle(s, *x) + (AHEAD + TABLE[0, 0] if s.shape[-1] == S else 0.0))


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, q, k: s.softmax(-1),
        lambda s, b, h, q, k: s * s.amax(-1, keepdim=True),
        lambda s, b, h, q, k: s - s.mean(),
        lambda s, b, h, q, k: s + torch.rand_like(s),
    ],
    ids=["softmax", "largest of the row", "mean", "random"],
)
def test_a_function_of_more_than_one_score_is_refused(score):
    q, k, v = torch.randn(3, 2, 3, 5, 7)
    with pytest.raises(OptionError, match="gives other scores for a part of a tile than for the whole"):
        attend(q, k, v, score=score)
