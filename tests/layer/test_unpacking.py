# ruff: noqa: RUF059 - unpacking is what is tested
"""`output, attention = mha(x)` is caught where Python would take a batch of two apart, and nothing else is."""

import functools
import pickle

import pytest
import torch
from torch import nn

from headwise import HeadwiseError, MultiHeadAttention, ShapeError, watch
from headwise.layer.unpacking import unpacked_names

E, T = 15, 5
PAIR = torch.randn(2, T, E)
CAUGHT = pytest.raises(ShapeError, match=r"return_weights=True\); for the samples, .*unbind\(\)")


@pytest.fixture(params=[torch.enable_grad, torch.no_grad], ids=["training", "inference"])
def mha(request):
    with request.param():
        yield MultiHeadAttention(E, 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = MultiHeadAttention(E, 3)
        self.layers = nn.ModuleList([MultiHeadAttention(E, 3)])

    def forward(self, x):
        output, weights = self.attention(x + 0)
        return output, weights


def test_a_pair_of_names_is_caught_and_told_what_to_write(mha):
    with pytest.raises(ShapeError, match=r"^mha\(...\) returned one tensor of shape \(2, 5, 15\)"):
        output, attention = mha(PAIR)
    with CAUGHT:
        (output, attention) = mha(PAIR, PAIR, PAIR)
    with CAUGHT:
        [output, attention] = mha(PAIR, causal=True)
    with CAUGHT:
        output, _ = mha(
            PAIR,
            mask=None if PAIR.dim() == 3 else 1,
        )
    inputs, options = (PAIR,), {"causal": True}
    with CAUGHT:
        output, attention = mha(*inputs, **options)
    assert "output" not in locals()


def test_a_layer_inside_a_module_is_caught():
    with pytest.raises(ShapeError, match=r"^self.attention\(...\) returned"):
        Block()(PAIR)
    block = Block()
    with CAUGHT:
        a, b = block.attention(PAIR)


def test_a_global_name_and_a_name_of_an_enclosing_function_are_caught():
    code = "from headwise import MultiHeadAttention\nmha = MultiHeadAttention(15, 3)\noutput, attention = mha(x)"
    with CAUGHT:
        exec(code, {"x": PAIR})  # noqa: S102 - as a notebook runs a cell
    layer = MultiHeadAttention(E, 3)

    def inner():
        a, b = layer(PAIR)
        return a, b

    with CAUGHT:
        inner()


def test_a_subclass_that_calls_the_layer_is_not_in_the_way():
    class Mine(MultiHeadAttention):
        def forward(self, x):
            return super().forward(x)

    assert Mine(E, 3)(PAIR).shape == PAIR.shape
    mine = Mine(E, 3)
    assert mine(PAIR)[0].shape == (T, E)


def test_everything_else_goes_through(mha):
    a, b = (mha(PAIR), 1)
    assert a.shape == PAIR.shape
    y = mha(PAIR)
    assert [x.shape for x in mha(PAIR)] == [(T, E)] * 2
    assert torch.stack([*mha(PAIR)]).shape == PAIR.shape
    a, b = mha(PAIR).unbind()
    torch.testing.assert_close(torch.stack([a, b]), y)
    a, b = mha(PAIR, return_weights=True)
    assert a.shape == PAIR.shape
    a, b = list(map(mha, (PAIR, PAIR)))
    assert a.shape == b.shape == PAIR.shape
    a, b = tuple(mha(x) for x in (PAIR, PAIR))
    a, b = mha(PAIR), mha(PAIR)
    a, b, c = mha(torch.randn(3, T, E))
    assert c.shape == (T, E)
    with pytest.raises(ValueError, match="too many values"):
        a, b = mha(torch.randn(3, T, E))
    a, b = nn.Sequential(mha, nn.Linear(E, E))(PAIR)  # what is unpacked is not the layer's own output
    a, b = functools.partial(nn.functional.relu)(mha(PAIR))
    a, b = max((mha(PAIR), mha(PAIR)), key=torch.linalg.norm)
    a, b = mha.forward(PAIR)  # not through a call of the module


def test_a_hook_may_turn_the_output_into_a_pair(mha):
    mha.register_forward_hook(lambda module, inputs, output: (output, 1))
    a, b = mha(PAIR)
    assert (a.shape, b) == (PAIR.shape, 1)


def test_a_layer_that_returns_weights_by_default_is_unpacked():
    mha = MultiHeadAttention(E, 3, return_weights=True)
    output, attention = mha(PAIR)
    assert attention.shape == (2, 3, T, T)
    with CAUGHT:
        output, attention = mha(PAIR, return_weights=False)


def test_watching_does_not_hide_it(mha):
    with watch(mha), CAUGHT:
        output, attention = mha(PAIR)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_and_compilers_are_left_alone(mha):
    def halves(x):
        a, b = mha(x)
        return a + b

    expected = mha(PAIR).sum(0)
    torch.testing.assert_close(torch.compile(halves, fullgraph=True, backend="eager")(PAIR), expected)
    torch.testing.assert_close(torch.vmap(halves)(PAIR[None])[0], expected)
    torch.testing.assert_close(torch.func.vjp(halves, PAIR)[0], expected)
    exported = torch.export.export(_Module(halves, mha), (PAIR,))
    torch.testing.assert_close(exported.module()(PAIR), expected)
    with CAUGHT:
        halves(PAIR)


class _Module(nn.Module):
    def __init__(self, function, layer):
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x):
        return self.function(x)


def test_a_copy_is_caught_as_well():
    again = pickle.loads(pickle.dumps(MultiHeadAttention(E, 3)))  # noqa: S301 - our own bytes
    with pytest.raises(HeadwiseError):
        a, b = again(PAIR)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("a, b = mha(x)", ("mha",)),
        ("a, b = self.block.mha(x, mask=m)", ("self", "block", "mha")),
        ("a, b = mha(*x, **y)", ("mha",)),
        ("a, b = f(mha(x))", ("f",)),
        ("a, b = mha(x)[0]", None),
        ("a, b, c = mha(x)", None),
        ("a, *b = mha(x)", None),
        ("a, b = x", None),
        ("a = mha(x)", None),
        ("f(*mha(x))", None),
        ("for a, b in mha(x): pass", None),
        ("a, b = layers[0](x)", ("layers",)),
    ],
)
def test_the_name_that_is_called_and_unpacked_is_read_from_the_code(source, names):
    code = compile(source, "", "exec")
    found = {unpacked_names(code, offset) for offset in range(0, len(code.co_code), 2)} - {None}
    assert found == ({names} if names else set())
