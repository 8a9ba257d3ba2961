"""A score function in a layer: trained, moved, saved, watched, compiled, exported, for self- and cross-attention."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_close_to_truth
from headwise import MultiHeadAttention, OptionError, causal, explain, padding, reference, watch
from headwise.masks import Composite

B, T, S, E, H, Hkv = 2, 7, 11, 30, 6, 3


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(H, 24, generator=torch.Generator().manual_seed(7)))

    def forward(self, score, batch, head, query, key):
        return score + self.table[head, key] * (query % 3) + 0.1 * batch


@dataclasses.dataclass(frozen=True, eq=False)
class Stepped(Composite):
    steps: Tensor

    def __call__(self, score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - self.steps[head] * ((query - key).abs() // 2)


def layer_with(score, **options):
    torch.manual_seed(0)
    return MultiHeadAttention(E, H, num_kv_heads=Hkv, score=score, **options).double()


def truth_of(layer, x, memory=None, visible=None):
    weights, biases = layer.projections()
    linears = [reference.Linear(w, b) for w, b in zip(weights, biases, strict=True)]
    memory = x if memory is None else memory
    given = zip(linears, (x, memory, memory), (H, Hkv, Hkv), strict=True)
    heads = [linear(y).unflatten(-1, (count, -1)).transpose(1, 2) for linear, y, count in given]
    read, found = reference.attend(*heads, visible=visible, score=layer.score)
    return layer.out_proj(read.transpose(1, 2).flatten(2)), found


@pytest.mark.parametrize("crossing", [False, True], ids=["self", "cross"])
def test_a_layer_with_a_score_function_equals_the_reference_and_learns(crossing):
    layer = layer_with(Learned())
    x, memory = torch.randn(B, T, E).double(), torch.randn(B, S, E).double() if crossing else None
    inputs = (x,) if memory is None else (x, memory, memory)
    output, weights = layer(*inputs, return_weights=True)
    truth, dense = truth_of(layer, x, memory)
    assert_close_to_truth(output, truth)
    assert_close_to_truth(weights[:], dense)
    names = dict(layer.named_parameters())
    found = torch.autograd.grad(output.square().sum() + weights.received().total.square().sum(), names.values())
    wanted = torch.autograd.grad(truth.square().sum() + dense.sum(2).square().sum(), names.values())
    assert names["score.table"].shape == (H, 24)
    for a, b in zip(found, wanted, strict=True):
        assert_close_to_truth(a, b)
    if crossing:
        assert_close_to_truth(layer(x, layer.remember(memory)), truth)


def test_a_score_module_is_part_of_the_layer():
    layer = layer_with(Learned())
    assert "score.table" in layer.state_dict()
    assert "(score): Learned()" in repr(layer)
    other = layer_with(Learned())
    nn.init.zeros_(other.score.table)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(B, T, E).double()
    for same in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301 - our own bytes
        assert torch.equal(same(x), layer(x))
    with torch.no_grad():
        layer.score.table += 1.0
    assert not torch.equal(other(x), layer(x))


def test_a_composite_moves_with_the_layer_and_a_function_is_named():
    layer = layer_with(Stepped(torch.linspace(0, 1, H).double()))
    assert layer.to("meta").score.steps.device.type == "cpu"  # its numbers are in no state dict
    assert "score=by_hand" in repr(layer_with(by_hand))
    assert layer_with(None).score is None


def by_hand(score, batch, head, query, key):
    return score * (key != query + 1)


def test_masks_watching_and_inference_see_the_same_scores():
    layer = layer_with(Learned(), causal=True)
    x = torch.randn(B, T, E).double()
    visible = causal().to_tensor(T) & padding([5, 7]).to_tensor(T)
    truth, dense = truth_of(layer, x, visible=visible)
    with torch.no_grad(), watch(layer) as seen:
        assert_close_to_truth(layer(x, mask=padding([5, 7])), truth)
    assert not seen[""].requires_grad
    assert_close_to_truth(seen[""][:], dense)
    with torch.inference_mode():
        assert_close_to_truth(layer(x, mask=padding([5, 7]), return_weights=True)[1][:], dense)
    assert explain(layer, x).path == "rows"


@pytest.mark.parametrize("score", [Learned, lambda: by_hand], ids=["module", "function"])
def test_a_layer_with_a_score_function_compiles_and_exports(score):
    torch.compiler.reset()
    layer = layer_with(score(), causal=True).eval()
    x = torch.randn(B, T, E).double()
    truth = truth_of(layer, x, visible=causal().to_tensor(T))[0]
    with torch.no_grad():
        assert_close_to_truth(torch.compile(layer, fullgraph=True, backend="eager")(x), truth)
        length = torch.export.Dim("length", min=2, max=20)
        exported = torch.export.export(layer, (x,), dynamic_shapes=({1: length},)).module()
        assert_close_to_truth(exported(x), truth)
        y = torch.randn(B, T + 6, E).double()
        assert_close_to_truth(exported(y), truth_of(layer, y, visible=causal().to_tensor(T + 6))[0])
        cache = layer.make_cache(B, capacity=T, static=True)
        step = torch.compile(layer, fullgraph=True, backend="eager")
        parts = [step(x[:, t : t + 1], cache=cache) for t in range(T)]
        assert_close_to_truth(torch.cat(parts, 1), truth)
    torch.compiler.reset()


def test_a_score_function_that_cannot_work_is_refused():
    x = torch.randn(B, T, E).double()
    with pytest.raises(OptionError, match="Did you forget the parentheses"):
        layer_with(Learned)
    with pytest.raises(OptionError, match=r"score=5: expected a function of \(score, batch, head, query, key\)"):
        layer_with(5)
    layer = layer_with(lambda score: score)
    cache = layer.make_cache(B)
    with pytest.raises(OptionError, match="too many positional arguments"), torch.no_grad():
        layer(x, cache=cache)
    assert cache.lengths == [0, 0]
    nested = torch.nested.nested_tensor([x[0, :3], x[1]], layout=torch.jagged)
    with pytest.raises(OptionError, match="renumbers samples and positions"):
        layer_with(by_hand)(nested)
