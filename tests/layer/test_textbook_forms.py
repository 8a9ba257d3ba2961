"""The calls, shapes, names and counts of the five documents people learn from, as they write them."""

import inspect

import pytest
import torch

import headwise
from headwise import (
    HeadCountError,
    MultiHeadAttention,
    Norms,
    OptionError,
    RelativeBias,
    ShapeError,
    causal,
    rotary,
    window,
)
from headwise.textbook import (
    CausalAttention,
    Course,
    Handbook,
    HeadsInAList,
    Homework,
    Interview,
    MultiHeadAttn,
    MultiHeadedAttentionWrapper,
)
from textbook_forms import CourseStep, OneHead, Wrapper
from textbook_forms import Handbook as TheirHandbook
from textbook_forms import Homework as TheirHomework
from textbook_forms import Interview as TheirInterview

B, T, S, H, D = 2, 5, 7, 3, 5
E, D_IN, LENGTH = H * D, 11, 13


def count(module):
    return sum(p.numel() for p in module.parameters())


# The examples of the documents, call by call.


def test_course_step_example():
    mha = Course(d_model=512, num_heads=8)
    output, attention = mha(torch.randn(2, 10, 512))
    assert output.shape == (2, 10, 512)
    assert attention.shape == (2, 8, 10, 10)
    torch.testing.assert_close(attention.sum(-1), torch.ones(2, 8, 10))


def test_book_section_example():
    mha = MultiHeadAttn(768, 768, 1024, 0.1, 12)
    assert mha(torch.randn(2, 50, 768)).shape == (2, 50, 768)
    assert (mha.d_out, mha.num_heads, mha.head_dim) == (768, 12, 64)
    assert count(mha) == 4 * 768 * 768 + 768


def test_book_section_wrapper_is_a_list_of_causal_heads_and_widens():
    mha = MultiHeadedAttentionWrapper(D_IN, D, LENGTH, 0.0, H)
    x = torch.randn(B, T, D_IN)
    assert mha(x).shape == (B, T, H * D)
    assert all(type(head) is CausalAttention for head in mha.heads)
    torch.testing.assert_close(mha(x), torch.cat([head(x) for head in mha.heads], dim=-1))
    wide, narrow = MultiHeadedAttentionWrapper(D_IN, E, LENGTH, 0.0, H), HeadsInAList(D_IN, E, LENGTH, 0.0, H)
    assert wide(x).shape[-1] == H * narrow(x).shape[-1]
    assert count(wide) == H * count(narrow)


def test_homework_guide_examples():
    mha = Homework(d_in=768, d_out=768, context_length=1024, dropout=0.1, num_heads=12, qkv_bias=False)
    assert mha(torch.randn(4, 100, 768)).shape == (4, 100, 768)
    mha = Homework(768, 768, 1024, 0.0, 12)
    output = mha(torch.randn(2, 50, 768))
    assert output.shape == (2, 50, 768)
    assert not output.isnan().any()
    assert torch.equal(mha.mask, torch.triu(torch.ones(1024, 1024), diagonal=1).bool())


def test_interview_example_with_its_float_causal_mask():
    batch_size, seq_len, d_model, num_heads = 2, 10, 512, 8
    Q, K, V = (torch.randn(batch_size, seq_len, d_model) for _ in range(3))
    mha = Interview(d_model, num_heads)
    assert mha(Q, K, V).shape == (2, 10, 512)
    assert count(mha) == count(Course(512, 8)) == count(Handbook(512, 8)) == 1_050_624
    causal_mask = torch.tril(torch.ones(seq_len, seq_len))
    masked = mha(Q, K, V, causal_mask)
    assert masked.shape == (2, 10, 512)
    torch.testing.assert_close(masked, mha.to_layer()(Q, K, V, causal=True), atol=1e-5, rtol=1e-4)


def test_interview_splits_and_combines_heads():
    mha, x = Interview(E, H), torch.randn(B, T, E)
    heads = mha.split_heads(x)
    assert heads.shape == (B, H, T, mha.d_k)
    assert torch.equal(heads[:, 1], x[..., D : 2 * D])
    assert torch.equal(mha.combine_heads(heads), x)
    assert torch.equal(Course(E, H).split_heads(x), heads)


def test_handbook_example():
    mha = Handbook(d_model=512, num_heads=8)
    x = torch.randn(2, 10, 512)
    output, weights = mha(x, x, x)
    assert output.shape == (2, 10, 512)
    assert weights.shape == (2, 8, 10, 10)


NAMES = {
    Course: ("(d_model, num_heads)", "(x, mask=None)", "d_model num_heads d_k W_q W_k W_v W_o split_heads"),
    Interview: (
        "(d_model, num_heads)", "(Q, K, V, mask=None)",
        "d_model num_heads d_k W_q W_k W_v W_o split_heads combine_heads",
    ),
    Handbook: ("(d_model, num_heads)", "(query, key, value, mask=None)", "d_model num_heads d_k W_q W_k W_v W_o"),
    MultiHeadAttn: (
        "(d_in, d_out, context_length, dropout, num_heads, qkv_bias=False)", "(x)",
        "d_out num_heads head_dim W_query W_key W_value out_proj dropout mask",
    ),
    Homework: (
        "(d_in, d_out, context_length, dropout, num_heads, qkv_bias=False)", "(x)",
        "d_out num_heads head_dim W_query W_key W_value out_proj dropout mask",
    ),
    MultiHeadedAttentionWrapper: ("(d_in, d_out, context_length, dropout, num_heads, qkv_bias=False)", "(x)", "heads"),
    CausalAttention: (
        "(d_in, d_out, context_length, dropout, qkv_bias=False)", "(x)", "W_query W_key W_value dropout mask",
    ),
}  # fmt: skip


def plain(function):
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return str(inspect.Signature([p for p in parameters if p.name != "self"]))


@pytest.mark.parametrize("form", NAMES, ids=lambda form: form.__name__)
def test_forms_have_the_signatures_and_names_of_their_documents(form):
    constructor, call, names = NAMES[form]
    assert (plain(form), plain(form.forward)) == (constructor, call)
    made = (
        form(E, H) if "d_model" in constructor else form(*(D_IN, E, LENGTH, 0.0, H)[: 4 + ("num_heads" in constructor)])
    )
    assert all(hasattr(made, name) for name in names.split())


# The numbers: the document's class written again, the form, and the fused layer, in float64.


def sentences(form):
    """A form, the class written again in the tests, and inputs for both."""
    if form in (Course, Interview, Handbook):
        made, again = form(E, H), {Course: CourseStep, Interview: TheirInterview, Handbook: TheirHandbook}[form](E, H)
        inputs = (torch.randn(B, T, E),) if form is Course else (torch.randn(B, T, E), *[torch.randn(B, S, E)] * 2)
    elif form is CausalAttention:
        made, again = form(D_IN, D, LENGTH, 0.3, True), OneHead(D_IN, D, LENGTH, 0.3, True)
        inputs = (torch.randn(B, T, D_IN),)
    else:
        again = (Wrapper if form is MultiHeadedAttentionWrapper else TheirHomework)(D_IN, E, LENGTH, 0.3, H, True)
        made, inputs = form(D_IN, E, LENGTH, 0.3, H, True), (torch.randn(B, T, D_IN),)
    again.load_state_dict(made.state_dict(), strict=False)
    return made.double().eval(), again.double().eval(), [x.double() for x in inputs]


def pair(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("form", NAMES, ids=lambda form: form.__name__)
def test_forms_layers_and_documents_return_the_same_numbers(form):
    made, again, inputs = sentences(form)
    layer = made.to_layer()
    back = form.from_layer(layer)
    assert not layer.training
    assert layer.dropout == (0.3 if hasattr(made, "mask") or hasattr(made, "heads") else 0.0)
    expected = pair(again(*inputs))
    for result in (made(*inputs), layer(*inputs), back(*inputs)):
        assert len(pair(result)) == len(expected)
        for found, truth in zip(pair(result), expected, strict=True):
            torch.testing.assert_close(found[:], truth, atol=1e-12, rtol=1e-12)
    assert back.state_dict().keys() == made.state_dict().keys()
    assert all(torch.equal(x, y) for x, y in zip(back.state_dict().values(), made.state_dict().values(), strict=True))


@pytest.mark.parametrize("shape", [(T, S), (1, T, S), (1, 1, T, S), (B, 1, 1, S), (B, H, T, S), (B, 1, T, S)], ids=str)
@pytest.mark.parametrize("form", [Interview, Handbook])
def test_masks_of_the_documents_give_the_same_numbers(form, shape):
    made, again, inputs = sentences(form)
    mask = (torch.rand(shape) > 0.3).float()
    mask[..., 0] = 1  # the documents disagree about a row that sees nothing
    full = mask if mask.dim() != 3 else mask[None]  # what the layer takes
    for result in (made(*inputs, mask), made(*inputs, mask.bool()), made.to_layer()(*inputs, full)):
        for found, truth in zip(pair(result), pair(again(*inputs, mask)), strict=True):
            torch.testing.assert_close(found[:], truth, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("form", [Course, Interview, Handbook])
def test_a_row_that_sees_nothing_gives_zeros_and_finite_gradients(form):
    made, _, inputs = sentences(form)
    mask = torch.ones(T, inputs[-1].shape[1]).tril()
    mask[2] = 0
    output, *weights = pair(made(*inputs, mask))
    torch.testing.assert_close(output[:, 2], made.W_o.bias.expand(B, E))
    assert all((x[:, :, 2] == 0).all() for x in weights)
    output.sum().backward()
    assert all(p.grad.isfinite().all() for p in made.parameters())
    torch.testing.assert_close(pair(made.to_layer()(*inputs, mask=mask))[0], output)


def test_half_precision_has_no_overflowing_fill():
    made, x = Course(E, H).half(), torch.randn(B, T, E).half()
    assert made(x, torch.ones(T, T).tril())[0].isfinite().all()


def test_a_mask_per_sample_without_a_head_axis_is_refused():
    with pytest.raises(ShapeError, match=r"\(3, 5, 5\).*pass mask\[:, None\]"):
        Course(E, H)(torch.randn(3, T, E), torch.ones(3, T, T))


@pytest.mark.parametrize("form", [Course, Interview, Handbook])
def test_heads_that_do_not_divide_are_named(form):
    with pytest.raises(HeadCountError, match="d_model=10 cannot be cut into num_heads=3"):
        form(10, 3)


REFUSED = {
    "grouped heads": (Course, {"num_kv_heads": 1}, "num_kv_heads=1"),
    "positions": (Handbook, {"position": rotary(), "head_dim": 6}, "position=rotary"),
    "a learned position": (Interview, {"position": RelativeBias(H)}, "differ in position.weight"),
    "norms": (Interview, {"qk_norm": "head"}, "differ in k_norm.weight, q_norm.weight"),
    "sinks": (Course, {"sinks": True}, "sinks"),
    "a soft-cap": (Course, {"softcap": 3.0}, "softcap=3"),
    "a scale": (Course, {"scale": 1.0}, "scale=1"),
    "a causal layer": (Course, {"causal": True}, r"mask=causal\(\)"),
    "a window": (Homework, {"causal": True, "mask": window(3), "context_length": 9}, r"window\(3\)"),
    "no mask": (Homework, {"context_length": 9}, r"mask=causal\(\)"),
    "no output projection": (Homework, {"causal": True, "out_proj": False, "context_length": 9}, "out_proj.weight"),
    "an output projection": (
        MultiHeadedAttentionWrapper, {"causal": True, "context_length": 9}, "out_proj.bias, out_proj.weight",
    ),
    "another width": (Course, {"d_in": 11}, "d_in=11"),
    "dropout": (Course, {"dropout": 0.1}, "dropout=0.1"),
    "no length": (Homework, {"causal": True}, r"Homework.from_layer\(layer, context_length=1024\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_form_refuses_a_layer_that_does_more_than_it_can(case):
    form, options, message = REFUSED[case]
    with pytest.raises(OptionError, match=message):
        form.from_layer(MultiHeadAttention(E, H, **options))


def test_a_layer_without_biases_becomes_a_form_with_zeros_and_a_length_may_be_given():
    layer = MultiHeadAttention(E, H, bias=False, causal=True, dtype=torch.float64)
    x = torch.randn(B, T, E, dtype=torch.float64)
    made = Homework.from_layer(layer, context_length=LENGTH)
    assert made.W_query.bias is None
    assert len(made.mask) == LENGTH
    torch.testing.assert_close(made(x), layer(x))
    plain = MultiHeadAttention(E, H, bias={"q", "out"}, dtype=torch.float64)
    torch.testing.assert_close(Course.from_layer(plain)(x)[0], plain(x))


def test_the_layer_also_takes_the_masks_of_the_documents():
    layer = MultiHeadAttention(E, H, return_weights=True)
    x = torch.randn(B, T, E)
    for found, expected in zip(layer(x, torch.ones(T, T).tril()), layer(x, causal()), strict=True):
        torch.testing.assert_close(found[:], expected[:])


@pytest.mark.parametrize(
    ("d_model", "heads"),
    [(768, 12), (1024, 16), (1280, 20), (1600, 25), (12288, 96)],
    ids=["GPT-2 small", "medium", "large", "XL", "GPT-3"],
)
def test_configurations_of_the_tables_are_accepted(d_model, heads):
    with torch.device("meta"):
        assert MultiHeadAttention(d_model, heads).head_dim == Homework(d_model, d_model, 8, 0.0, heads).head_dim


def test_the_public_name_of_the_room_holds_every_form():
    assert headwise.textbook.Homework is Homework


@pytest.mark.parametrize(
    "options",
    [{"qk_norm": "unweighted"}, {"qk_norm": Norms(value="unweighted")}, {"gate": lambda x: torch.full_like(x, 2.0)}],
    ids=["norm", "value norm", "gate"],
)
def test_options_without_parameters_are_not_lost_on_the_way_back(options):
    with pytest.raises(OptionError, match=r"cannot do what this layer does: their outputs differ by"):
        Course.from_layer(MultiHeadAttention(24, 3, **options))


def test_another_librarys_layer_is_refused_by_name():
    with pytest.raises(OptionError, match=r"Course.from_layer\(MultiheadAttention\): expected a headwise"):
        Course.from_layer(torch.nn.MultiheadAttention(24, 3))
