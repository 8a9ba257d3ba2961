"""Models whose heads are modules in a list, and the triangular buffers of lectures: one causal layer, proved equal."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headwise import CheckpointError, MultiHeadAttention, open_checkpoint

B, T, E, H, D, LONGEST, V = 2, 7, 22, 3, 5, 11, 29


class Head(nn.Module):
    """One causal head, as lectures write it, with its maps and its buffer under any names."""

    def __init__(self, roles, buffer, bias=False):
        super().__init__()
        self.roles, self.buffer = roles, buffer
        for role in roles:
            setattr(self, role, nn.Linear(E, D, bias=bias))
        if buffer is not None:
            name, triangle = buffer
            self.register_buffer(name, triangle)

    def forward(self, x):
        q, k, v = (getattr(self, role)(x) for role in self.roles)
        scores = q @ k.mT * D**-0.5
        if self.buffer is not None:
            scores = scores.masked_fill(torch.ones(T, T).tril() == 0, -torch.inf)
        return F.softmax(scores, -1) @ v


class Heads(nn.Module):
    """The heads side by side, with or without an output projection."""

    def __init__(self, roles, buffer, listed="heads", out="proj", bias=False):
        super().__init__()
        heads = [Head(roles, buffer, bias) for _ in range(H)]
        self.made = [listed]
        if listed.endswith("_"):
            self.made = [f"{listed}{i + 1}" for i in range(H)]
            for name, head in zip(self.made, heads, strict=True):
                setattr(self, name, head)
        else:
            setattr(self, listed, nn.ModuleList(heads))
        self.out = out
        if out is not None:
            setattr(self, out, nn.Linear(H * D, E))

    def forward(self, x):
        heads = getattr(self, self.made[0]) if len(self.made) == 1 else [getattr(self, name) for name in self.made]
        y = torch.cat([head(x) for head in heads], -1)
        return y if self.out is None else getattr(self, self.out)(y)


TRIANGLES = {
    "ones below": torch.ones(LONGEST, LONGEST).tril(),
    "True below": torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril(),
    "whole numbers below": torch.ones(LONGEST, LONGEST, dtype=torch.int64).tril(),
    "ones above": torch.ones(LONGEST, LONGEST).triu(1),
    "True above": torch.ones(LONGEST, LONGEST, dtype=torch.bool).triu(1),
    "minus infinity above": torch.full((LONGEST, LONGEST), -torch.inf).triu(1),
    "very low above": torch.full((LONGEST, LONGEST), -1e9).triu(1),
    "with axes for samples and heads": torch.ones(1, 1, LONGEST, LONGEST).tril(),
}
LECTURE = ("query", "key", "value")
STYLES = {
    "a lecture's": {"buffer": ("tril", TRIANGLES["ones below"])},
    "without a projection": {"buffer": ("tril", TRIANGLES["ones below"]), "out": None},
    "with biases": {"buffer": ("tril", TRIANGLES["ones below"]), "bias": True},
    "a book's": {
        "roles": ("W_query", "W_key", "W_value"),
        "buffer": ("mask", TRIANGLES["ones above"]),
        "out": "out_proj",
    },
    "other lists": {"listed": "attention_heads", "roles": ("q", "k", "v"), "out": "fc", "buffer": None},
    "a list of another name": {"listed": "parts", "roles": ("Wq", "Wk", "Wv"), "out": "W_o", "buffer": None},
    "attributes": {"listed": "head_", "roles": ("to_q", "to_k", "to_v"), "buffer": ("causal", TRIANGLES["True below"])},
    "short names": {"listed": "h_heads", "roles": ("q_proj", "k_proj", "v_proj"), "out": "o_proj", "buffer": None},
}


class Model(nn.Module):
    """A model around two such layers."""

    def __init__(self, style):
        super().__init__()
        self.token_embedding_table = nn.Embedding(V, E)
        options = {"roles": LECTURE} | style
        self.blocks = nn.ModuleList(nn.ModuleDict({"sa": Heads(**options), "ln": nn.LayerNorm(E)}) for _ in range(2))


@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_heads_in_a_list_are_one_layer(style):
    torch.manual_seed(0)
    model, x = Model(STYLES[style]).eval(), torch.randn(B, T, E)
    checkpoint = open_checkpoint(model.state_dict())
    assert [layer.name for layer in checkpoint.layers] == ["blocks.0.sa", "blocks.1.sa"]
    assert {layer.num_heads for layer in checkpoint.layers} == {H}
    assert [layer.problem for layer in checkpoint.layers] == [None, None]
    layers = checkpoint.read_all()
    for number, layer in enumerate(layers.values()):
        theirs = model.blocks[number]["sa"]
        torch.testing.assert_close(layer(x), theirs(x))
        assert layer.causal == (STYLES[style]["buffer"] is not None)
        alone = MultiHeadAttention.from_state_dict(theirs.state_dict())
        torch.testing.assert_close(alone(x), theirs(x))
        nested = MultiHeadAttention.from_state_dict(model.state_dict(), prefix=f"blocks.{number}.sa.")
        torch.testing.assert_close(nested(x), theirs(x))
    written = checkpoint.state_dict(layers)
    assert list(written) == list(model.state_dict())
    assert all(torch.equal(written[name], tensor) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_changes_are_written_to_the_head_they_belong_to():
    model = Model(STYLES["a lecture's"])
    checkpoint = open_checkpoint(model)
    layer = checkpoint.read("blocks.1.sa")
    layer.qkv_proj.weight.unflatten(0, (H, 3, D))[1, 2] *= 2  # the value of head 1
    written = checkpoint.state_dict({"blocks.1.sa": layer})
    changed = [name for name, was in model.state_dict().items() if not torch.equal(written[name], was)]
    assert changed == ["blocks.1.sa.heads.1.value.weight"]


@pytest.mark.parametrize("triangle", TRIANGLES)
@pytest.mark.parametrize("name", ["tril", "mask", "causal_mask", "lower", "bias"])
@torch.no_grad()
def test_a_triangle_of_any_kind_and_name_is_causal(triangle, name):
    state = {f"sa_head.{role}.weight": torch.randn(D, E) for role in LECTURE}
    state[f"sa_head.{name}"] = TRIANGLES[triangle]
    layer = open_checkpoint(state, num_heads=1).read("sa_head")
    assert layer.causal
    assert layer.context_length == LONGEST
    listed = Heads(LECTURE, (name, TRIANGLES[triangle]))
    x = torch.randn(B, T, E)
    torch.testing.assert_close(open_checkpoint(listed).read("")(x), listed(x))


OTHERS = {
    "numbers that matter": torch.rand(LONGEST, LONGEST).tril(),
    "the future alone": torch.ones(LONGEST, LONGEST).triu(),
    "not itself": torch.ones(LONGEST, LONGEST).tril(-1),
    "a band": torch.ones(LONGEST, LONGEST).tril().triu(-3),
    "a little above": torch.full((LONGEST, LONGEST), -0.5).triu(1),
    "not square": torch.ones(LONGEST, LONGEST + 2).tril(),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_buffers_are_refused_by_name(other):
    listed = Heads(LECTURE, ("tril", OTHERS[other]))
    with pytest.raises(CheckpointError, match=r"heads.0.tril.*would be lost"):
        open_checkpoint(listed.state_dict()).read("")


@torch.no_grad()
def test_a_list_for_each_of_the_three_maps_is_one_layer():
    for names in (("W_q", "W_k", "W_v"), ("queries", "keys", "values"), ("query_heads", "key_heads", "value_heads")):
        state = {f"a.{name}.{i}.weight": torch.randn(D, E) for name in names for i in range(H)}
        state["a.proj.weight"] = torch.randn(E, H * D)
        joined = [torch.cat([state[f"a.{name}.{i}.weight"] for i in range(H)]) for name in names]
        apart = {f"{role}_proj.weight": weight for role, weight in zip("qkv", joined, strict=True)}
        apart["out_proj.weight"] = state["a.proj.weight"]
        x = torch.randn(B, T, E)
        layer, expected = open_checkpoint(state).read("a"), MultiHeadAttention.from_state_dict(apart, H)
        torch.testing.assert_close(layer(x), expected(x))


def test_layers_in_a_list_stay_layers():
    state = {f"layers.{i}.{role}.weight": torch.randn(E, E) for i in range(3) for role in LECTURE}
    with_out = state | {f"layers.{i}.proj.weight": torch.randn(E, E) for i in range(3)}
    for given in (state, with_out):
        found = open_checkpoint(given, num_heads=2)
        assert [layer.name for layer in found.layers] == ["layers.0", "layers.1", "layers.2"]
        assert {layer.num_heads for layer in found.layers} == {2}


def test_what_could_be_heads_or_layers_is_refused():
    state = {f"parts.{i}.{role}.weight": torch.randn(D, E) for i in range(3) for role in LECTURE}
    found = open_checkpoint(state)
    assert "they may be 3 heads of one layer or 3 layers" in found.layers[0].problem
    with pytest.raises(CheckpointError, match=r"3 heads of one layer or 3 layers.*Rename the list to 'heads'"):
        found.read("")
    assert MultiHeadAttention.from_state_dict(state, 1, prefix="parts.0.").num_heads == 1


def without(word):
    return lambda state: {name: tensor for name, tensor in state.items() if word not in name}


def added(name, *shape):
    return lambda state: state | {name: torch.zeros(shape)}


BROKEN = {
    "a missing head": (without("heads.1."), r"heads \[0, 2\] are not numbered"),
    "a missing map": (without("heads.1.key"), "key.weight is missing in some"),
    "unequal heads": (added("heads.2.value.weight", D + 1, E), "all heads must be alike"),
    "another projection": (added("proj.weight", E, H * D + 1), "expects 16, heads give 15"),
    "a projection in each head": (added("heads.0.proj.weight", E, D), "heads.0.proj.weight would be lost"),
    "another number of heads": (lambda state: state, "num_heads=4 is given and the tensors have 3"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_lists_that_do_not_fit_are_refused(kind):
    change, message = BROKEN[kind]
    state = change(Heads(LECTURE, None).state_dict())
    heads = {"num_heads": 4} if kind == "another number of heads" else {}
    found = open_checkpoint(state, **heads)
    assert found.layers[0].problem is not None
    with pytest.raises(CheckpointError, match=message):
        found.read("", **heads)
