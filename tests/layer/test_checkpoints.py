import pytest
import torch
from torch import nn

from headwise import CheckpointError, MultiHeadAttention, OptionError, causal
from headwise.layer.checkpoints import forms
from headwise.textbook import HeadsAtOnce, HeadsInAList
from textbook_forms import BookSection, Handbook, Homework, Interview, Minimal, Wrapper

B, T, S, E, H = 2, 5, 7, 18, 3


def loaded(module, **options):
    options.setdefault("num_heads", H)
    return MultiHeadAttention.from_state_dict(module.state_dict(), **options).eval()


@pytest.mark.parametrize("make", [Interview, Handbook], ids=lambda c: c.__name__)
def test_w_q_layouts_give_the_same_output(make):
    theirs = make(E, H)
    ours = loaded(theirs)
    query, key, value = torch.randn(B, T, E), torch.randn(B, S, E), torch.randn(B, S, E)
    expected = theirs(query, key, value)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(ours(query, key, value), expected)


@pytest.mark.parametrize("make", [Homework, BookSection, HeadsAtOnce, Minimal], ids=lambda c: c.__name__)
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_causal_layouts_give_the_same_output(make, qkv_bias):
    theirs = make(11, E, 13, 0.0, H, qkv_bias)
    ours = loaded(theirs)
    x = torch.randn(B, T, 11)
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours.context_length == 13
    assert repr(ours.mask) == "causal()"


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_list_of_heads_has_no_output_projection_and_its_own_width(qkv_bias):
    theirs = Wrapper(11, 5, 13, 0.0, H, qkv_bias)  # widens: 3 heads of width 5 give 15
    ours = loaded(theirs, num_heads=None)
    x = torch.randn(B, T, 11)
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours.out_proj is None
    assert ours(x).shape == (B, T, 15)


def test_our_list_of_heads_loads_too():
    theirs = HeadsInAList(11, E, 13, 0.0, H)
    x = torch.randn(B, T, 11)
    torch.testing.assert_close(loaded(theirs)(x), theirs(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 11, "vdim": 13}], ids=str)
def test_torch_multihead_attention_gives_the_same_output(bias, widths):
    theirs = nn.MultiheadAttention(E, H, bias=bias, batch_first=True, **widths)
    nn.init.normal_(theirs.out_proj.weight)
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    ours = loaded(theirs)
    query = torch.randn(B, T, E)
    key, value = torch.randn(B, S, widths.get("kdim", E)), torch.randn(B, S, widths.get("vdim", E))
    expected, weights = theirs(query, key, value, average_attn_weights=False)
    output, ours_weights = ours(query, key, value, return_weights=True)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(ours_weights[:], weights)


def test_torch_causal_mask_is_passed_with_the_call():
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(B, T, E)
    blocked = torch.ones(T, T, dtype=torch.bool).triu(1)  # True blocks there
    torch.testing.assert_close(loaded(theirs)(x, mask=causal()), theirs(x, x, x, attn_mask=blocked)[0])


def test_our_own_layout_and_options():
    theirs = MultiHeadAttention(E, H)
    ours = loaded(theirs, causal=True, dropout=0.25)
    x = torch.randn(B, T, E)
    torch.testing.assert_close(ours(x), theirs(x, causal=True))
    assert ours.dropout == 0.25


def test_our_separate_layout_with_grouped_heads():
    theirs = MultiHeadAttention(E, 6, num_kv_heads=2, d_key=11)
    ours = loaded(theirs, num_heads=6)
    assert ours.num_kv_heads == 2
    x, memory = torch.randn(B, T, E), torch.randn(B, S, 11)
    torch.testing.assert_close(ours(x, memory), theirs(x, memory))


def test_separate_projections_of_one_width_become_fused_grouped_heads():
    theirs = MultiHeadAttention(E, 6, num_kv_heads=2, d_key=E)
    ours = loaded(theirs, num_heads=6)
    assert ours.fused
    assert ours.num_kv_heads == 2
    x = torch.randn(B, T, E)
    torch.testing.assert_close(ours(x), theirs(x))


def test_prefix_finds_the_layer_inside_a_model():
    model = nn.ModuleDict({"block": nn.ModuleDict({"attention": Interview(E, H)}), "head": nn.Linear(E, 4)})
    ours = MultiHeadAttention.from_state_dict(model.state_dict(), num_heads=H, prefix="block.attention.")
    x = torch.randn(B, T, E)
    torch.testing.assert_close(ours(x), model["block"]["attention"](x, x, x))


def test_dtype_of_the_checkpoint_is_kept():
    assert loaded(Interview(E, H).double()).qkv_proj.weight.dtype == torch.float64


def test_loaded_weights_are_copies():
    theirs = Interview(E, H)
    ours = loaded(theirs)
    before = ours.qkv_proj.weight.clone()
    with torch.no_grad():
        theirs.W_q.weight.zero_()
    assert torch.equal(ours.qkv_proj.weight, before)


def test_pack_and_unpack_are_inverse():
    query, key, value = torch.randn(12, 5), torch.randn(6, 5), torch.randn(6, 5)
    packed = forms.pack(query, key, value, num_heads=4, num_kv_heads=2)
    for part, again in zip((query, key, value), forms.unpack(packed, 4, 2), strict=True):
        assert torch.equal(part, again)


def broken(make, change):
    state = dict(make(E, H).state_dict()) if make is Interview else dict(make.state_dict())
    change(state)
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.clear(), "no names at all.*known layouts"),
        (lambda s: s.pop("W_k.weight"), r"no attention layout recognized. Found W_q.weight \(18, 18\).*W_q, W_k, W_v"),
        (lambda s: s.update(extra=torch.ones(3)), "extra would be lost"),
        (
            lambda s: s.update({"W_k.weight": torch.ones(20, 18), "W_k.bias": torch.ones(20)}),
            r"key \(20, 18\).*do not form 3",
        ),
        (lambda s: s.pop("W_k.bias"), "only some of query, key and value have a bias"),
        (
            lambda s: s.update({"W_k.bias": torch.ones(3)}),
            r"k_proj.bias read from it has shape \(3,\); expected \(18,\)",
        ),
        (
            lambda s: s.update({"W_o.weight": torch.ones(18, 7)}),
            r"output projection \(18, 7\) expects 7, heads give 18",
        ),
        (
            lambda s: s.update({"W_q.weight": torch.ones(18)}),
            r"q_proj.weight read from it has shape \(18,\); expected 2",
        ),
        (lambda s: s.update(mask=torch.eye(4)), r"stored mask \(4, 4\) is not causal"),
    ],
)
def test_mismatched_layouts_are_refused_with_what_was_found(change, message):
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        MultiHeadAttention.from_state_dict(broken(Interview, change), num_heads=H)


def test_missing_number_of_heads_is_asked_for():
    with pytest.raises(CheckpointError, match=r"do not determine how many heads.*num_heads="):
        MultiHeadAttention.from_state_dict(Interview(E, H).state_dict())


def test_number_of_heads_that_does_not_fit_is_refused():
    with pytest.raises(CheckpointError, match="do not form 5 heads"):
        MultiHeadAttention.from_state_dict(Interview(E, H).state_dict(), num_heads=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("heads.1.W_key.weight"), "W_key.weight is missing in some heads"),
        (lambda s: s.update({"heads.1.W_key.weight": torch.ones(4, 11)}), "all heads must be alike"),
        (lambda s: [s.pop(k) for k in list(s) if k.startswith("heads.1.")], r"\[0, 2\] are not numbered"),
        (lambda s: s.update(out=torch.ones(1)), "out would be lost"),
    ],
)
def test_broken_lists_of_heads_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        MultiHeadAttention.from_state_dict(broken(Wrapper(11, 5, 13, 0.0, H), change))


def test_list_of_heads_with_another_number_is_refused():
    with pytest.raises(CheckpointError, match="num_heads=4 is given and the tensors have 3 heads"):
        MultiHeadAttention.from_state_dict(Wrapper(11, 5, 13, 0.0, H).state_dict(), num_heads=4)


def test_learned_extra_keys_of_torch_are_refused():
    theirs = nn.MultiheadAttention(E, H, add_bias_kv=True)
    with pytest.raises(CheckpointError, match="add_bias_kv=True"):
        loaded(theirs)


def test_torch_rows_that_are_not_three_parts_are_refused():
    state = nn.MultiheadAttention(E, H).state_dict() | {"in_proj_weight": torch.ones(55, E)}
    with pytest.raises(CheckpointError, match=r"in_proj_weight has shape \(55, 18\); expected three equal parts"):
        MultiHeadAttention.from_state_dict(state, num_heads=H)


@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
def test_our_grouped_layout_tells_its_key_value_heads_by_the_output_projection(kv_heads):
    theirs = MultiHeadAttention(E, 6, num_kv_heads=kv_heads, d_out=11)
    ours = loaded(theirs, num_heads=6)
    assert ours.num_kv_heads == kv_heads
    x = torch.randn(B, T, E)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_our_layout_without_output_projection_must_be_told_its_key_value_heads(kv_heads):
    theirs = MultiHeadAttention(16, 4, num_kv_heads=kv_heads, out_proj=False)
    with pytest.raises(CheckpointError, match="do not determine how many key/value heads.*Pass num_kv_heads="):
        loaded(theirs, num_heads=4)
    x = torch.randn(B, T, 16)
    torch.testing.assert_close(loaded(theirs, num_heads=4, num_kv_heads=kv_heads)(x), theirs(x))


def test_our_layout_of_other_head_counts_is_refused():
    state = MultiHeadAttention(E, 6, num_kv_heads=2).state_dict()
    with pytest.raises(CheckpointError, match=r"\(30, 18\) and an output projection from 18 do not form 2 query"):
        MultiHeadAttention.from_state_dict(state, num_heads=2)


def test_list_of_heads_followed_by_a_projection():
    class Projected(Wrapper):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.out_proj = nn.Linear(15, 7)

        def forward(self, x):
            return self.out_proj(super().forward(x))

    theirs = Projected(11, 5, 13, 0.0, H)
    x = torch.randn(B, T, 11)
    torch.testing.assert_close(loaded(theirs, num_heads=None)(x), theirs(x))


def test_dtype_and_device_can_be_chosen():
    layer = loaded(Interview(E, H), dtype=torch.float64)
    assert layer.qkv_proj.weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (Interview(E, H), {}, "a Interview is given; expected a state dict"),
        (None, {}, "a NoneType is given"),
        ({"W_q.weight": [1.0]}, {}, "a dict is given; expected a state dict, names to tensors"),
        (Interview(E, H).state_dict(), {"num_heads": H, "d_key": 7}, "d_key=7 is given and the tensors have 18"),
        (
            Interview(E, H).state_dict(),
            {"num_heads": H, "num_kv_heads": 1},
            "num_kv_heads=1 is given and the tensors have 3",
        ),
        (
            Wrapper(11, 5, 13, 0.0, H).state_dict() | {"heads.0.W_key.weight": torch.ones(())},
            {},
            "all heads must be alike",
        ),
        (
            nn.MultiheadAttention(E, H).state_dict() | {"in_proj_bias": torch.ones(6)},
            {"num_heads": H},
            r"has shape \(2,\)",
        ),
        (Interview(E, H).state_dict() | {"mask": torch.ones(2, 1, 4, 4).tril()}, {"num_heads": H}, "is not causal"),
    ],
    ids=lambda x: "" if not isinstance(x, str) else x,
)
def test_what_is_no_state_dict_or_contradicts_it_is_refused(state, options, message):
    with pytest.raises(CheckpointError, match=message):
        MultiHeadAttention.from_state_dict(state, **options)


@pytest.mark.parametrize("heads", [-4, 0, "4", 3.0])
def test_number_of_heads_must_be_a_number(heads):
    with pytest.raises(OptionError, match="num_heads=.*whole number from 1 up"):
        MultiHeadAttention.from_state_dict(Interview(E, H).state_dict(), num_heads=heads)


def test_options_that_contradict_the_checkpoint_are_refused():
    with pytest.raises(CheckpointError, match="d_model=36 is given and the tensors have 18"):
        MultiHeadAttention.from_state_dict(Interview(E, H).state_dict(), num_heads=H, d_model=36)
