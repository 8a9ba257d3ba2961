"""Positions and masks of classes that only this file knows work in the layer, from their definition alone."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from headwise import HeadwiseError, Mask, MultiHeadAttention, OptionError, ShapeError, attend, causal, explain, rotary
from headwise.attention.backends import flex
from headwise.layer.positions import Rotary
from headwise.masks import Grid
from headwise.weights.scoring import Relative

B, H, T, D = 2, 3, 7, 4
E = H * D


@dataclasses.dataclass(frozen=True, eq=False)
class Stairs(Relative):
    """A score falls by one step of its head for every `width` tokens between query and key."""

    width: int = 2

    @property
    def num_heads(self) -> int:
        return self.table.shape[0]

    def at(self, grid: Grid, dtype: torch.dtype) -> Tensor:
        return -self.table.to(dtype)[grid.head] * ((grid.position - grid.col).abs() // self.width).to(dtype)


@dataclasses.dataclass(frozen=True)
class Paced(Rotary):
    """A rotary whose pairs turn faster or slower, each by its own factor."""

    paces: Tensor = dataclasses.field(default_factory=lambda: torch.tensor([3.0, 0.5]))

    def speeds(self, D: int, device: torch.device | None = None) -> Tensor:
        return super().speeds(D, device) * self.paces


class Doubled(Rotary):
    """A rotary that counts in twos."""

    def turn(self, heads: Tensor, positions: Tensor) -> Tensor:
        return super().turn(heads, 2 * positions)


class LearnedStairs(nn.Module):
    """Stairs whose steps are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

    def forward(self) -> Stairs:
        return Stairs(self.steps)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Listed(Mask):
    """Hides the keys in a list, which is a tensor; every query sees itself."""

    hidden: Tensor

    def visible(self, grid: Grid) -> Tensor:
        return (grid.col[:, None] != self.hidden).all(-1) | (grid.position == grid.col)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.hidden,)

    def to(self, device: torch.device | str) -> "Listed":
        return Listed(self.hidden.to(device))

    def __repr__(self) -> str:
        return "listed(...)"  # says nothing of what is hidden


POSITIONS = {
    "relative": lambda: Stairs(torch.tensor([0.5, 1.0, 2.0]), 3),
    "learned relative": LearnedStairs,
    "rotary with a tensor": Paced,
    "rotary with its own turn": Doubled,
}
every_position = pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)


def made(position, **options):
    torch.manual_seed(0)
    return MultiHeadAttention(E, H, causal=True, position=position(), dtype=torch.float64, **options).eval()


def by_hand(layer, x):
    """The output and weights of `layer`, from its projections and the plain definition of its position."""
    weights, biases = layer.projections()
    heads = [(x @ w.T + b).unflatten(-1, (H, D)).transpose(1, 2) for w, b in zip(weights, biases, strict=True)]
    q, k, v = heads
    bias, position = None, layer.position
    if isinstance(position, Rotary):
        at = torch.arange(x.shape[1])
        q, k = position.turn(q, at), position.turn(k, at)
    else:
        rule = position() if isinstance(position, nn.Module) else position
        steps = (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs() // rule.width
        bias = (-rule.table.double()[:, None, None] * steps)[None]
    read, weights = attend(q, k, v, attn_bias=bias, causal=True, return_weights=True)
    return layer.out_proj(read.transpose(1, 2).flatten(2)), weights.to_tensor()


@every_position
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_own_position_acts_on_output_and_weights(position, mode):
    layer, x = made(position), torch.randn(B, T, E, dtype=torch.float64)
    expected, expected_weights = by_hand(layer, x)
    plain = MultiHeadAttention(E, H, causal=True, dtype=torch.float64)
    plain.load_state_dict({name: y for name, y in layer.state_dict().items() if not name.startswith("position")})
    assert not torch.allclose(plain(x), expected), "the position changes nothing, so this test shows nothing"
    with mode():
        output, weights = layer(x, return_weights=True)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(weights.to_tensor(), expected_weights)


@every_position
def test_an_own_position_is_copied_pickled_and_saved_with_the_layer(position):
    layer, x = made(position), torch.randn(B, T, E, dtype=torch.float64)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)]  # noqa: S301
    again = made(position)
    nn.init.zeros_(again.out_proj.weight)
    again.load_state_dict(layer.state_dict())
    for other in (*copies, again):
        assert type(other.position) is type(layer.position)
        assert torch.equal(other(x), layer(x))


@every_position
@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.float, nn.Module.bfloat16])
def test_a_layer_with_an_own_position_changes_its_dtype(position, change):
    layer, x = made(position), torch.randn(B, T, E, dtype=torch.float64)
    expected = layer(x)
    changed = change(layer)
    dtype = changed.out_proj.weight.dtype
    torch.testing.assert_close(changed(x.to(dtype)), expected.to(dtype), rtol=0.05, atol=0.05)


@every_position
def test_an_own_position_moves_with_the_layer(position):
    layer = MultiHeadAttention(E, H, position=position(), device="meta")
    assert layer(torch.randn(B, T, E, device="meta")).is_meta
    rule = position()
    if not isinstance(rule, nn.Module):
        moved = rule.to("meta")
        assert type(moved) is type(rule)
        tensors = [x for x in vars(moved).values() if isinstance(x, Tensor)]
        assert all(x.is_meta for x in tensors)
        assert not any(x.is_meta for x in vars(rule).values() if isinstance(x, Tensor))


@every_position
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@torch.no_grad()
def test_an_own_position_counts_on_from_the_cache(position, static):
    layer, x = made(position), torch.randn(B, T, E, dtype=torch.float64)
    cache = layer.make_cache(B, capacity=T, static=static)
    steps = [layer(x[:, i : i + 1], cache=cache) for i in range(T)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x))


@every_position
def test_an_own_position_compiles(position):
    layer, x = made(position), torch.randn(B, T, E, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


@every_position
def test_an_own_position_is_named_and_explained(position):
    layer = made(position)
    assert type(layer.position).__name__.lower() in repr(layer).lower()
    assert explain(layer, torch.randn(B, T, E, dtype=torch.float64)).mask == "causal()"


def test_a_position_module_learns_and_is_in_the_state_dict():
    layer, x = made(LearnedStairs), torch.randn(B, T, E, dtype=torch.float64)
    layer(x).square().sum().backward()
    assert layer.position.steps.grad.abs().min() > 0
    assert "position.steps" in layer.state_dict()


def test_a_position_can_be_replaced_by_another_that_fits():
    layer, x = made(lambda: None), torch.randn(B, T, E, dtype=torch.float64)
    before = layer(x)
    layer.position = Stairs(torch.ones(H))
    assert not torch.allclose(layer(x), before)
    layer.position = None
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize(
    ("position", "error", "words"),
    [
        (lambda: Stairs(nn.Parameter(torch.ones(H))), OptionError, "Stairs.*neither train nor save"),
        (lambda: Stairs(torch.ones(H + 1)), ShapeError, "4 heads and there are 3"),
        (lambda: nn.Identity(), OptionError, r"Identity.*without arguments fails"),
        (lambda: nn.ParameterDict(), OptionError, "ParameterDict"),
        (lambda: Stairs, OptionError, "forget the parentheses"),
        (lambda: 7, OptionError, "position=7: expected rotary"),
        (lambda: rotary(width=3), OptionError, "width=3"),
    ],
    ids=["parameter", "heads", "module", "container", "class", "number", "width"],
)
def test_a_position_that_cannot_work_is_refused_by_name(position, error, words):
    layer = made(lambda: None)
    for assign in (lambda: made(position), lambda: setattr(layer, "position", position())):
        with pytest.raises(error, match=words):
            assign()


def test_an_own_mask_acts_in_every_call_and_moves_with_the_layer():
    layer = MultiHeadAttention(E, H, mask=Listed(torch.tensor([0, 3])))
    _, weights = layer(torch.randn(B, T, E), return_weights=True)
    seen = weights.to_tensor() > 0
    assert torch.equal(seen[0, 0], layer.mask.to_tensor(T)[0, 0])
    assert not seen[:, :, 1:, 0].any()
    meta = MultiHeadAttention(E, H, mask=Listed(torch.tensor([0, 3])), device="meta")
    assert meta(torch.randn(B, T, E, device="meta")).is_meta
    lost = MultiHeadAttention(E, H, mask=Listed(torch.tensor([0, 3], device="meta"))).to("cpu")
    with pytest.raises(HeadwiseError, match="meta"):  # the numbers of a meta tensor are nowhere
        lost(torch.randn(B, T, E))
    assert isinstance(copy.deepcopy(layer).mask, Listed)


@pytest.mark.parametrize("mask", [Listed(torch.tensor([0, 3])), causal() & Listed(torch.tensor([2]))], ids=repr)
def test_attend_in_inference_mode_returns_a_map_under_an_own_mask(mask):
    with torch.inference_mode():
        q, k, v = torch.randn(3, B, H, T, D)
        _, weights = attend(q, k, v, mask=mask, relative=Stairs(torch.ones(H)), return_weights=True)
        before = weights.to_tensor()
        q.zero_()
        assert torch.equal(weights.to_tensor(), before)


def test_masks_that_print_alike_are_not_mistaken_for_each_other():
    device = torch.device("cpu")
    one, other = Listed(torch.arange(130)), Listed(torch.tensor([1]))
    blocks = [flex.kept_block_mask(mask, 256, 256, device) for mask in (one, other, one)]
    assert blocks[0] is blocks[2]
    assert not torch.equal(blocks[0].full_kv_num_blocks, blocks[1].full_kv_num_blocks)
    one.hidden[0] = 200
    assert flex.kept_block_mask(one, 256, 256, device) is not blocks[0]
