"""Positions and statistics that only these tests know work everywhere, from their own definition."""

import copy
import dataclasses
import pickle

import pytest
import torch

from headwise import (
    AttentionMap,
    MultiHeadAttention,
    OptionError,
    Scoring,
    ShapeError,
    alibi,
    attend,
    causal,
    reference,
)
from headwise.masks import Grid
from headwise.weights import Reading, Relative
from headwise.weights.readings import EntropyReading, PooledReading, unflat, zeros

B, H, T, S, D = 2, 3, 5, 7, 11


@dataclasses.dataclass(frozen=True, eq=False)
class Decay(Relative):
    """`table` (1, H) and a second tensor (H,), both used by head, and a tensor of integers."""

    offset: torch.Tensor
    steps: torch.Tensor
    power: float = 0.5

    @property
    def num_heads(self):
        return self.table.shape[1]

    def at(self, grid: Grid, dtype):
        distance = (grid.position - grid.col).abs().to(dtype) * self.steps.sum()
        return -self.table[0][grid.head] * distance**self.power + self.offset[grid.head] * (distance == 0)


class Sawtooth(Relative):
    """Not a dataclass."""

    def __init__(self, heads, period):
        object.__setattr__(self, "table", torch.linspace(0.5, 1.5, heads, dtype=torch.float64)[:, None])
        self.period = period

    @property
    def num_heads(self):
        return self.table.shape[0]

    def at(self, grid, dtype):
        return self.table[:, 0][grid.head] * ((grid.position - grid.col) % self.period).to(dtype)


def decay(heads=H, grad=False):
    torch.manual_seed(1)
    numbers = [torch.rand(shape, dtype=torch.float64).requires_grad_(grad) for shape in ((1, heads), (heads,))]
    return Decay(*numbers, torch.tensor([1, 2]))


RULES = {"dataclass": decay, "plain": lambda: Sawtooth(H, 3)}


def heads():
    torch.manual_seed(0)
    return [torch.randn(B, H, n, D, dtype=torch.float64) for n in (T, S, S)]


def bias_of(rule):
    grid = Grid(
        *torch.meshgrid(torch.arange(1), torch.arange(H), torch.arange(T), torch.arange(S), indexing="ij"), T, S
    )
    return rule.at(grid, torch.float64)


def saved(weights, folder):
    pytest.importorskip("safetensors")
    weights.save(folder / "map.safetensors")
    return AttentionMap.load(folder / "map.safetensors")


WAYS = {
    "clone": lambda weights, _: weights.clone(),
    "detach": lambda weights, _: weights.detach(),
    "to": lambda weights, _: weights.to("cpu"),
    "cpu": lambda weights, _: weights.cpu(),
    "deepcopy": lambda weights, _: copy.deepcopy(weights),
    "pickle": lambda weights, _: pickle.loads(pickle.dumps(weights)),  # noqa: S301
    "save": saved,
    "select": lambda weights, _: weights.select(batch=slice(0, B)),
    "pytree": lambda weights, _: torch.utils._pytree.tree_map(torch.clone, weights),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RULES)
def test_output_and_weights_agree_on_any_position(name, way, tmp_path):
    rule = RULES[name]()
    query, key, value = heads()
    output, weights = attend(query, key, value, relative=rule, return_weights=True)
    expected, dense = reference.attend(query, key, value, bias=bias_of(rule))
    torch.testing.assert_close(output, expected)
    kept = WAYS[way](weights, tmp_path)
    assert type(kept._scoring.relative) is type(rule)
    torch.testing.assert_close(kept.to_tensor(), dense)
    torch.testing.assert_close(kept.entropy(), -torch.special.xlogy(dense, dense).sum(-1))


@pytest.mark.parametrize("name", RULES)
def test_any_position_is_moved_with_all_its_tensors(name):
    rule = RULES[name]()
    assert all(x.is_meta for x in rule.to("meta").tensors())
    assert len(rule.to("meta").tensors()) == len(rule.tensors())
    with pytest.raises(ShapeError, match=rf"{type(rule).__name__} is on meta and the query on cpu"):
        attend(*heads(), relative=rule.to("meta"))
    other = rule.with_table(rule.table * 2)
    assert type(other) is type(rule)
    assert torch.equal(other.table, rule.table * 2)


@pytest.mark.parametrize("name", RULES)
def test_any_position_works_in_a_layer_in_inference_mode_and_compiled(name):
    layer, x = MultiHeadAttention(12, H, position=RULES[name](), dtype=torch.float64), torch.randn(B, S, 12).double()
    output, weights = layer(x, return_weights=True)
    with torch.inference_mode():
        found, map_found = layer(x, return_weights=True)
        torch.testing.assert_close(found, output)
    torch.testing.assert_close(map_found.to_tensor(), weights.to_tensor())
    found, map_found = torch.compile(layer, fullgraph=True, backend="eager")(x, return_weights=True)
    torch.testing.assert_close(found, output)
    torch.testing.assert_close(map_found.entropy(), weights.entropy())
    moved = copy.deepcopy(layer).to("cpu")
    torch.testing.assert_close(moved(x), output)


def test_every_tensor_of_a_position_gets_its_gradient():
    query, key, value = heads()
    found, expected = decay(grad=True), decay(grad=True)
    output, weights = attend(query, key, value, relative=found, return_weights=True)
    truth, dense = reference.attend(query, key, value, bias=bias_of(expected))
    (output.square().sum() + weights.entropy().sum() + weights[0, 1].square().sum()).backward()
    entropy = -torch.special.xlogy(dense, dense).sum()
    (truth.square().sum() + entropy + dense[0, 1].square().sum()).backward()
    for ours, theirs in zip(found.learnable, expected.learnable, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert not weights.detach().requires_grad


def test_a_position_for_other_heads_is_refused_by_name():
    with pytest.raises(ShapeError, match="Decay was made for 4 heads and there are 3"):
        attend(*heads(), relative=decay(4))
    with pytest.raises(ShapeError, match=r"alibi\(...\) was made for 4 heads"):
        attend(*heads(), relative=alibi(4))


# Statistics.


class Concentration(Reading):
    """Σ w² of every row: the class of docs/design.md."""

    def start(self, source):
        self.source, self.sum = source, zeros(source, source.shape[2])

    def take(self, tile):
        self.sum[tile.heads, tile.rows] += tile.weights.square().sum(-1)

    def finish(self):
        return (unflat(self.sum, self.source),)

    def dense(self, block):
        return (block.weights.square().sum(-1),)


class Largest(Reading):
    """The largest weight of each head, without a gradient."""

    by_row = False
    differentiable = (False,)

    def start(self, source):
        self.source, self.best = source, zeros(source)

    def take(self, tile):
        self.best[tile.heads] = torch.maximum(self.best[tile.heads], tile.weights.amax((1, 2)))

    def finish(self):
        return (unflat(self.best, self.source),)


class Halved(EntropyReading):
    """A subclass of one of ours that means something else."""

    def finish(self):
        return (super().finish()[0] / 2,)


def made(grad=False, **options):
    query, key, value = heads()
    return attend(query.requires_grad_(grad), key, value, return_weights=True, **options)[1]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"relative": decay()}], ids=["plain", "causal", "relative"])
def test_a_statistic_of_your_own_is_exact(options, monkeypatch):
    monkeypatch.setitem(__import__("headwise.weights.tiles").weights.tiles.COLUMNS, "cpu", 3)
    weights = made(**options)
    dense = weights.to_tensor()
    torch.testing.assert_close(weights.read(Concentration()), (dense.square().sum(-1),))
    torch.testing.assert_close(weights.read(Largest()), (dense.amax((2, 3)),))
    torch.testing.assert_close(weights.read(Halved())[0], weights.entropy() / 2)
    part = weights.select(heads=[2, 0], rows=slice(1, 4))
    torch.testing.assert_close(part.read(Concentration())[0], dense[:, [2, 0], 1:4].square().sum(-1))
    kept = weights.clone().without(causal())
    torch.testing.assert_close(kept.read(Concentration())[0], kept.to_tensor().square().sum(-1))


def test_a_statistic_of_your_own_has_a_gradient():
    weights, other = made(grad=True), made(grad=True)
    weights.read(Concentration())[0].sum().backward()
    other.to_tensor().square().sum().backward()
    torch.testing.assert_close(weights._query.grad, other._query.grad)
    (largest,) = weights.read(Largest())
    assert not largest.requires_grad


class WithoutDense(Concentration):
    dense = Reading.dense


class TwoResults(Concentration):
    def finish(self):
        return super().finish() * 2


def test_what_a_statistic_lacks_is_said_by_name():
    with pytest.raises(OptionError, match=r"WithoutDense has no dense\(block\).*read weights.detach\(\)"):
        made(grad=True).read(WithoutDense())
    assert made(grad=True).detach().read(WithoutDense())[0].shape == (B, H, T)
    with pytest.raises(OptionError, match=r"TwoResults.finish\(\) gave 2 results and TwoResults.differentiable has 1"):
        made(grad=True).read(TwoResults())
    with pytest.raises(OptionError, match=r"read\(Concentration\): expected an object of a class derived"):
        made().read(Concentration)


def test_two_pictures_of_different_size_share_a_pass():
    weights = made()
    pictures = [PooledReading(2, 3), PooledReading(4, 2)]
    for picture, (found,) in zip(pictures, weights._read(pictures), strict=True):
        torch.testing.assert_close(found, weights.pooled(*picture.size))


def test_a_scoring_is_moved_with_everything_in_it():
    scoring = Scoring(mask=causal(), bias=torch.zeros(T, S), sinks=torch.zeros(H), relative=decay())
    assert [x.device.type for x in scoring.to("meta").tensors()] == ["meta"] * 5
