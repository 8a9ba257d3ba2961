"""Positions, norms and gates: what each part does, and that a user's own works from its definition alone."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise import (
    HeadScale,
    MultiHeadAttention,
    Norms,
    OptionError,
    OutputGate,
    PositionalEncoding,
    ShapeError,
    cosine,
    longrope,
    multi_axis_rotary,
    rotary,
    temperature,
)

B, H, T, D = 2, 3, 7, 4
E = H * D


class Fading(PositionalEncoding):
    """Keys fade with their position, each number of a head at its own pace, which is a tensor."""

    def __init__(self) -> None:
        self.pace = torch.tensor([0.9, 0.8, 0.7, 0.6], dtype=torch.float64)

    def encode_key(self, heads: Tensor, positions: Tensor) -> Tensor:
        return (heads * self.pace ** positions[..., None]).to(heads.dtype)


class LearnedPace(nn.Module):
    """The same with paces that are learned."""

    class Rule(PositionalEncoding):
        def __init__(self, pace: Tensor) -> None:
            self.pace = pace

        def encode_key(self, heads: Tensor, positions: Tensor) -> Tensor:
            return (heads * self.pace ** positions[..., None]).to(heads.dtype)

        encode_query = PositionalEncoding.encode_query

    def __init__(self) -> None:
        super().__init__()
        self.pace = nn.Parameter(torch.tensor([0.9, 0.8, 0.7, 0.6]))

    def forward(self) -> PositionalEncoding:
        return LearnedPace.Rule(self.pace)


class Silu(nn.Module):
    """A gate of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(self.linear(x))


def halves(x: Tensor) -> Tensor:
    """A gate that is a function: half of what every head reads."""
    return x.new_full((*x.shape[:2], H), 0.5)


PARTS = {
    "own encoding": lambda: {"position": Fading()},
    "learned encoding": lambda: {"position": LearnedPace()},
    "temperature": lambda: {"position": temperature(0.5, 3)},
    "sum": lambda: {"position": multi_axis_rotary((1, 1)) + temperature(0.5, 3) + Fading()},
    "longrope": lambda: {"position": rotary(scaling=longrope(4, 5, [1.0, 1.5], [2.0, 3.0]))},
    "norms after": lambda: {"position": rotary(), "qk_norm": Norms("head", "unweighted", value="head", after=True)},
    "cosine": lambda: {"qk_norm": cosine(5.0), "scale": 1.0},
    "element gate": lambda: {"gate": "element"},
    "head gate": lambda: {"gate": "head", "bias": False},
    "own gate": lambda: {"gate": Silu()},
    "function as gate": lambda: {"gate": halves},
}
every_part = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)


def made(part, **options):
    torch.manual_seed(0)
    layer = MultiHeadAttention(E, H, causal=True, **part(), **options).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def plain(layer, x):
    """The output and weights by the plain definition of every part."""
    weights, biases = layer.projections()
    biases = [0 if b is None else b for b in biases]
    q, k, v = ((x @ w.T + b).unflatten(-1, (H, D)).transpose(1, 2) for w, b in zip(weights, biases, strict=True))
    norms = [layer.q_norm or nn.Identity(), layer.k_norm or nn.Identity()]
    rule = layer.position() if isinstance(layer.position, nn.Module) else layer.position
    at = torch.arange(x.shape[1])
    steps = [lambda q, k: (norms[0](q), norms[1](k))]
    if rule is not None:
        at = at if rule.axes == 1 else at.expand(rule.axes, -1)
        steps.insert(0 if layer._norm_after else 1, lambda q, k: (rule.encode_query(q, at), rule.encode_key(k, at)))
    for step in steps:
        q, k = step(q, k)
    v = v if layer.v_norm is None else layer.v_norm(v)
    scores = q @ k.mT * (layer._scoring.scale or D**-0.5)
    hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    read = (weights @ v).transpose(1, 2)  # (B, T, H, D)
    if layer.gate is not None:
        read = read * layer.gate(x).unflatten(-1, (H, -1))
    return layer.out_proj(read.flatten(2)), weights


@every_part
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_part_acts_on_output_and_weights_as_it_is_defined(part, mode):
    layer, x = made(part), torch.randn(B, T, E, dtype=torch.float64)
    with mode():
        expected, expected_weights = plain(layer, x)
        output, weights = layer(x, return_weights=True)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(weights.to_tensor(), expected_weights)
        torch.testing.assert_close(layer(x), expected)


@every_part
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@torch.no_grad()
def test_a_part_works_token_by_token(part, static):
    layer, x = made(part), torch.randn(B, T, E, dtype=torch.float64)
    cache, first = layer.make_cache(B, capacity=T if static else None, static=static), 6  # beyond longrope's switch
    steps = [layer(x[:, :first], cache=cache), *(layer(x[:, t : t + 1], cache=cache) for t in range(first, T))]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x))


@every_part
def test_a_part_is_copied_pickled_saved_and_compiled_with_the_layer(part):
    layer, x = made(part), torch.randn(B, T, E, dtype=torch.float64)
    expected, file = layer(x), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)]  # noqa: S301
    again = MultiHeadAttention(E, H, causal=True, **part()).double()
    again.load_state_dict(layer.state_dict())
    for other in (*copies, again):
        assert torch.equal(other(x), expected)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)


@every_part
def test_every_parameter_of_a_part_gets_a_gradient(part):
    layer = made(part).train()
    layer(torch.randn(B, T, E, dtype=torch.float64)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0 or name == "qkv_proj.bias", name


@every_part
def test_a_part_works_on_the_meta_device_and_in_half_precision(part):
    layer = MultiHeadAttention(E, H, causal=True, **part())
    assert copy.deepcopy(layer).to("meta")(torch.randn(B, T, E, device="meta")).is_meta
    half = layer.bfloat16()
    assert half(torch.randn(B, T, E, dtype=torch.bfloat16)).dtype == torch.bfloat16


@every_part
def test_a_part_can_be_initialized_late(part):
    layer, x = made(part), torch.randn(B, T, E, dtype=torch.float64)
    options = part()
    with torch.device("meta"):
        late = MultiHeadAttention(E, H, causal=True, **options).double()
    late.to_empty(device="cpu")
    for parameter in late.parameters():
        parameter.data.fill_(math.nan)
    late.reset_parameters()
    learned = isinstance(late.position, nn.Module)  # several layers may share it, so its owner initializes it
    assert all(x.isfinite().all() for name, x in late.named_parameters() if not (learned and "position" in name))
    late.load_state_dict(layer.state_dict())
    torch.testing.assert_close(late.eval()(x), layer(x))


@every_part
@torch.no_grad()
def test_a_part_works_with_watch_silence_and_remembered_keys(part):
    layer, x = made(part), torch.randn(B, T, E, dtype=torch.float64)
    with headwise.watch(layer) as watched:
        layer(x)
    torch.testing.assert_close(watched[""].to_tensor(), plain(layer, x)[1])
    with headwise.silence(layer, {"": list(range(H))}):
        nothing = layer(x)
    torch.testing.assert_close(nothing, layer.out_proj(torch.zeros_like(x)))
    at = {"positions": torch.arange(T)} if layer._encodes else {}
    remembered = layer.remember(x, **at)
    torch.testing.assert_close(layer(x, remembered, **at), layer(x))


@pytest.mark.parametrize("module", [HeadScale(H, D, start=3.0), OutputGate(E, H, D, bias=True)], ids=repr)
def test_a_module_draws_its_parameters_again_after_it_was_empty(module):
    empty = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    for parameter in empty.parameters():
        parameter.data.fill_(math.nan)
    empty.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    assert all(parameter.isfinite().all() for parameter in empty.parameters())


@pytest.mark.parametrize(
    ("sections", "alternating", "owners"),
    [
        ((2, 1, 1), False, [0, 0, 1, 2]),
        ((2, 1, 1), True, [0, 1, 2, 0]),
        ((4, 1, 1), True, [0, 1, 2, 0, 0, 0]),
        ((1, 2, 3), False, [0, 1, 1, 2, 2, 2]),
        ((3, 2), True, [0, 1, 0, 1, 0]),
    ],
    ids=str,
)
def test_every_pair_follows_its_own_axis(sections, alternating, owners):
    width = 2 * len(owners)
    x = torch.randn(B, H, T, width + 3, dtype=torch.float64)
    at = torch.randint(0, 50, (len(sections), B, T))
    turned = multi_axis_rotary(sections, width=width, alternating=alternating).turn(x, at)
    by_axis = [rotary(width=width).turn(x, axis) for axis in at]
    for pair, axis in enumerate(owners):
        for number in (pair, pair + len(owners)):
            torch.testing.assert_close(turned[..., number], by_axis[axis][..., number])
    assert torch.equal(turned[..., width:], x[..., width:])


def test_text_has_the_same_position_on_every_axis():
    rule = multi_axis_rotary((2, 1, 1))
    layer = MultiHeadAttention(24, 3, position=rule)
    y = torch.randn(B, T, 24)
    text = torch.arange(T)
    torch.testing.assert_close(layer(y), layer(y, positions=text.expand(3, T)))
    torch.testing.assert_close(layer(y), layer(y, positions=text.expand(3, B, T)))
    torch.testing.assert_close(layer(y), layer(y, positions=text))


def test_a_temperature_grows_by_steps_and_leaves_keys_alone():
    rule, x = temperature(0.5, 3), torch.ones(1, 1, 7, 2, dtype=torch.float64)
    steps = torch.tensor([0, 0, 1, 1, 1, 2, 2], dtype=torch.float64)
    torch.testing.assert_close(rule.encode_query(x, torch.arange(7))[0, 0, :, 0], 1 + 0.5 * (1 + steps).log())
    assert rule.encode_key(x, torch.arange(7)) is x
    assert not rule.encodes_keys
    layer = MultiHeadAttention(E, H, position=rule)
    query, memory = torch.randn(B, T, E), torch.randn(B, 5, E)
    assert layer(query, layer.remember(memory), positions=range(T)).shape == (B, T, E)
    with pytest.raises(OptionError, match="pass positions= for the queries"):
        layer(query, memory)


def test_long_factors_apply_from_the_first_position_beyond_the_original_length():
    short, long = [1.0, 1.5], [2.0, 3.0]
    rule, x = rotary(scaling=longrope(4, 5, short, long, attention_factor=1.0)), torch.randn(B, H, 5, D).double()
    for last, factors in ((4, short), (5, long)):
        at = torch.arange(last - 4, last + 1)
        expected = rotary(scaling=longrope(4, 5, factors, factors, attention_factor=1.0)).turn(x, at)
        torch.testing.assert_close(rule.turn(x, at), expected)
    grown = longrope(4, 5, short, long).attention_factor
    assert grown == pytest.approx(math.sqrt(1 + math.log(4) / math.log(5)))


WRONG = {
    "sections": (lambda: MultiHeadAttention(24, 3, position=multi_axis_rotary((2, 1))), r"adds up to 3 pairs.*make 4"),
    "one axis": (lambda: multi_axis_rotary((4,)), "for one axis use rotary"),
    "axes": (lambda: multi_axis_rotary((1, 1)) + multi_axis_rotary((1, 1, 2)), r"encodings of \[2, 3\] axes"),
    "factors": (
        lambda: MultiHeadAttention(24, 3, position=rotary(scaling=longrope(4, 5, [1.0] * 3, [1.0] * 4))),
        "3 short and 4 long factors, for a rotary of 4 pairs",
    ),
    "factor": (lambda: longrope(4, 5, [1.0, -1.0], [1.0, 1.0]), "a factor=-1.0: expected a number above 0"),
    "scaling": (lambda: rotary(scaling=7), r"rotary\(scaling=7\): expected linear"),
    "gate": (lambda: MultiHeadAttention(24, 3, gate="all"), "gate='all': expected 'element'"),
    "gate class": (lambda: MultiHeadAttention(24, 3, gate=Silu), "Did you forget the parentheses"),
    "norm": (lambda: MultiHeadAttention(24, 3, qk_norm=Norms(value="some")), "qk_norm='some': expected 'head'"),
    "scale": (lambda: HeadScale(3, 4, start=2.0, limit=1.0), r"start=2.0, limit=1.0\): expected 0 < start"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_part_that_cannot_work_is_refused(name):
    make, message = WRONG[name]
    with pytest.raises(OptionError, match=message):
        make()


def test_shapes_that_do_not_fit_a_part_are_refused():
    layer = MultiHeadAttention(24, 3, position=multi_axis_rotary((2, 1, 1)))
    with pytest.raises(ShapeError, match=r"expected whole numbers of shape \(axes, T\) = \(3, 7\) or \(axes, B, T\)"):
        layer(torch.randn(2, 7, 24), positions=torch.zeros(2, 7, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"factors of shape \(2, 7, 5\); expected .* \(2, 7, 24\)"):
        MultiHeadAttention(24, 3, gate=lambda x: x[..., :5])(torch.randn(2, 7, 24))
