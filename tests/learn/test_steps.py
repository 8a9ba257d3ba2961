import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

import textbook_forms
from headwise import HeadCountError, MultiHeadAttention, OptionError, reference
from headwise.learn import configs, forms, steps
from headwise.learn.steps import (
    Setting,
    explain_steps,
    head_split_text,
    key_operations,
    layer_projections,
    sentences,
    trace,
)

B, T, S, H, D = 2, 5, 7, 3, 11
E = H * D


def settings():
    for form in forms.FORMS.values():
        yield Setting.of(form, d_model=E, num_heads=1 if form.name == "head" else H, seq=T, batch=B)
        if not form.own_mask:
            yield Setting.of(form, d_model=E, num_heads=H, seq=T, batch=B, causal=True)
        if form.crosses:
            yield Setting.of(form, d_model=E, num_heads=H, seq=T, keys=S, batch=B)
    llama = configs.find("llama-3.2-1b")
    grouped = dataclasses.replace(llama, d_model=26, num_heads=6, num_kv_heads=3, head_dim=D)
    yield Setting.of(config=grouped, seq=T, batch=B)


ALL = list(settings())


def named(setting):
    return f"{setting.form.name if setting.config is None else 'grouped'}-{setting.keys}-{setting.causal}"


@pytest.mark.parametrize("setting", ALL, ids=named)
def test_every_operation_makes_what_comes_after_it_from_what_is_before_it(setting):
    inputs, projections = setting.tensors()
    w = setting.widths
    future = torch.ones(setting.seq, setting.keys, dtype=torch.bool).triu(setting.keys - setting.seq + 1)
    sizes = {"B": setting.batch, "T": setting.seq, "H": w.num_heads, "D": w.head_dim}
    tools = {"future": future, "sqrt": math.sqrt, "inf": math.inf, "cat": torch.cat}
    tools |= dict(zip(setting.form.projections, projections, strict=True))
    for step in trace(setting):
        short = {steps.SHORT[name]: x for name, x in step.before.items() if name in steps.SHORT}
        found = eval(step.operation, {**inputs, **sizes, **tools, **step.before, **short})  # noqa: S307
        found = list(found) if isinstance(found, tuple | list) else [found]
        for one, expected in zip(found, step.after.values(), strict=True):
            torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("setting", ALL, ids=named)
def test_shapes_before_are_those_that_an_earlier_step_made(setting):
    seen = {}
    for step in trace(setting):
        assert step.number == 1 or all(any(x is made for made in seen.values()) for x in step.before.values())
        seen |= {(step.number, name): x for name, x in step.after.items()}


def test_sentences_are_the_comments_of_the_reference():
    source = Path(reference.__file__).read_text()
    assert sorted(sentences()) == list(range(1, 11))
    for number, sentence in sentences().items():
        assert re.search(rf"# {number}\. [A-Z][a-z ]+\. {re.escape(sentence)}\n", source)


def test_names_of_steps_are_those_of_the_reference():
    names = [
        "project",
        "split",
        "transpose",
        "scores",
        "mask",
        "scale",
        "softmax",
        "weighted values",
        "concat",
        "project",
    ]
    assert [step.name for step in trace(Setting.of())] == names


def module_of(setting, projections):
    """The learner's class of that form, with the weights of the trace."""
    kind = {"course": "CourseStep", "interview": "Interview", "handbook": "Handbook", "book": "Homework"}
    kind |= {"minimal": "Minimal", "list": "Wrapper", "head": "OneHead"}
    made = getattr(textbook_forms, kind[setting.form.name])
    w = setting.widths
    if not setting.form.own_mask:
        module = made(w.d_model, w.num_heads)
    elif setting.form.name == "head":
        module = made(w.d_model, w.d_model, T, 0.0)
    else:
        module = made(w.d_model, w.d_model, T, 0.0, w.num_heads)
    for name, linear in zip(setting.form.projections, projections, strict=True):
        if name is None:
            continue
        if setting.form.widens:
            for head, rows in zip(module.heads, linear.weight.chunk(w.num_heads), strict=True):
                getattr(head, name).weight.data = rows
            continue
        getattr(module, name).weight.data = linear.weight
        assert (getattr(module, name).bias is None) == (linear.bias is None)
        if linear.bias is not None:
            getattr(module, name).bias.data = linear.bias
    return module


@pytest.mark.parametrize("setting", [s for s in ALL if s.config is None], ids=named)
@torch.no_grad()
def test_trace_ends_where_the_class_of_that_form_ends(setting):
    inputs, projections = setting.tensors()
    module = module_of(setting, projections)
    mask = [torch.ones(T, setting.keys).tril(setting.keys - T)] if setting.causal and not setting.form.own_mask else []
    output = module(*inputs.values(), *mask)
    weighted = isinstance(output, tuple)
    assert weighted == ("weights" in setting.form.returns)
    traced = trace(setting)
    torch.testing.assert_close(output[0] if weighted else output, traced[-1].after["output"])
    if weighted:
        torch.testing.assert_close(output[1], traced[6].after["weights"])


def test_list_of_heads_is_as_many_times_wider():
    traced = trace(Setting.of(forms.find("list"), d_model=7, num_heads=3, seq=T))
    assert traced[7].after["heads"].shape == (1, 3, T, 7)
    assert traced[-1].after["output"].shape == (1, T, 21)


def test_steps_of_a_layer_end_in_its_output():
    layer = MultiHeadAttention(E, H, causal=True)
    x = torch.randn(B, T, E)
    visible = torch.ones(T, T, dtype=torch.bool).tril()
    traced = explain_steps({"x": x}, layer_projections(layer), H, visible=visible)
    torch.testing.assert_close(traced[-1].after["output"], layer(x).detach())


def test_layer_without_output_projection_has_none_here():
    assert layer_projections(MultiHeadAttention(E, H, out_proj=False))[3] is None


def test_numbers_are_those_of_the_first_head_of_the_first_sample():
    traced = trace(Setting.of(d_model=6, num_heads=2, seq=5, batch=2, causal=True))
    by_number = {step.number: step.numbers() for step in traced}
    torch.testing.assert_close(torch.tensor(by_number[3]["key"]), traced[2].after["key"][0, 0])
    torch.testing.assert_close(torch.tensor(by_number[2]["key"]), traced[1].after["key"][0, :, 0])
    torch.testing.assert_close(torch.tensor(by_number[10]["output"]), traced[9].after["output"][0])


@pytest.mark.parametrize(("size", "shown"), [({"seq": 8}, True), ({"seq": 9}, False)], ids=["eight", "nine"])
def test_numbers_are_shown_where_they_fit(size, shown):
    assert all(bool(step.numbers()) == shown for step in trace(Setting.of(d_model=8, num_heads=2, **size)))


def test_hidden_scores_are_null_in_plain_data():
    told = [step.to_dict() for step in trace(Setting.of(seq=3, causal=True))]
    assert told[4]["numbers"]["scores"][0][1:] == [None, None]
    assert told[6]["numbers"]["weights"][0] == [1.0, 0.0, 0.0]


def test_same_seed_makes_the_same_numbers():
    first, second = trace(Setting.of()), trace(Setting.of())
    assert torch.equal(first[-1].after["output"], second[-1].after["output"])
    assert not torch.equal(first[-1].after["output"], trace(Setting.of(), seed=1)[-1].after["output"])


def test_largest_models_are_traced_without_numbers():
    setting = Setting.of(config=configs.find("llama-3.1-405b"), seq=T)
    traced = trace(setting)
    assert setting.device == "meta"
    assert traced[3].after["scores"].shape == (1, 128, T, T)
    assert traced[2].after["key"].shape == (1, 8, T, 128)
    assert all(step.numbers() == {} for step in traced)


def test_longest_texts_are_traced_without_numbers():
    traced = trace(Setting.of(seq=100_003, causal=True))
    assert traced[6].after["weights"].shape == (1, 2, 100_003, 100_003)
    assert traced[6].after["weights"].is_meta


@pytest.mark.parametrize("name", configs.CONFIGS)
def test_shapes_of_known_models_have_the_heads_they_publish(name):
    config = configs.find(name)
    setting = Setting.of(config=config, seq=3)
    traced = trace(setting)
    assert traced[2].after["query"].shape == (1, config.num_heads, 3, config.head_dim)
    assert traced[2].after["value"].shape == (1, config.num_kv_heads, 3, config.head_dim)
    assert traced[9].after["output"].shape == (1, 3, config.d_model)


def test_heads_that_do_not_divide_are_refused_as_everywhere():
    with pytest.raises(HeadCountError, match=r"d_model=8 cannot be cut into num_heads=3 equal heads"):
        Setting.of(d_model=8, num_heads=3)


@pytest.mark.parametrize("wrong", [{"seq": 0}, {"batch": -1}, {"d_model": 0}, {"num_heads": -2}], ids=str)
def test_sizes_below_one_are_refused_by_name(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(OptionError, match=rf"{name}={value}: expected a whole number from 1 up"):
        Setting.of(**wrong)


def test_keys_of_their_own_need_a_form_that_takes_them():
    with pytest.raises(
        OptionError, match=r"4 tokens and 6 keys: the form 'course' takes one input.*interview, handbook"
    ):
        Setting.of(seq=4, keys=6)


def test_form_with_a_mask_of_its_own_is_always_causal():
    with pytest.raises(OptionError, match="the form 'book' always has a causal mask"):
        Setting.of(forms.find("book"), causal=False)


def by_name(*sizes, **options):
    return {op.name: op for op in key_operations(*sizes, **options)}


def test_view_keeps_memory_and_splits_a_stride():
    view = by_name(B, T, H, D)["view"]
    assert view.shares
    assert view.copied == view.made == 0
    assert view.before.strides == (T * H * D, H * D, 1)
    assert view.after.strides == (T * H * D, H * D, D, 1)


def test_transpose_swaps_two_strides_and_moves_nothing():
    transpose = by_name(B, T, H, D)["transpose"]
    a, b, c, d = transpose.before.strides
    assert transpose.after.strides == (a, c, b, d)
    assert transpose.shares
    assert not transpose.after.contiguous
    assert transpose.memory == "same memory, not contiguous"


def test_matmul_copies_heads_together_only_when_samples_are_several():
    several, one = by_name(B, T, H, D)["matmul"], by_name(1, T, H, D)["matmul"]
    assert several.copied == 2 * B * T * H * D * 4  # query and key
    assert one.copied == 0
    assert several.made == B * H * T * T * 4


def test_contiguous_copies_every_number_once():
    contiguous = by_name(B, T, H, D)["contiguous"]
    assert contiguous.copied == contiguous.made == B * T * H * D * 4
    assert not contiguous.before.contiguous
    assert contiguous.after.contiguous


def test_view_after_transpose_is_refused_by_torch():
    trap = by_name(B, T, H, D)["trap: view after transpose"]
    assert trap.after is None
    assert trap.memory == "RuntimeError"


def test_view_instead_of_transpose_has_the_right_shape_and_other_strides():
    found = by_name(B, T, H, D)
    trap, right = found["trap: view instead of transpose"], found["transpose"]
    assert trap.after.shape == right.after.shape
    assert trap.after.strides != right.after.strides


@pytest.mark.parametrize("sizes", [(B, 1, H, D), (B, T, 1, D)], ids=["one token", "one head"])
def test_traps_are_left_out_where_they_do_no_harm(sizes):
    assert len(key_operations(*sizes)) == 4
    x = torch.randn(*sizes[:2], sizes[2] * D)
    torch.testing.assert_close(x.view(sizes[0], sizes[2], sizes[1], D), x.view(*sizes[:2], sizes[2], D).transpose(1, 2))


def test_layout_of_the_meta_device_is_that_of_real_memory():
    assert key_operations(B, T, H, D, "meta") == key_operations(B, T, H, D)


def test_head_split_shows_a_head_made_of_every_token_and_one_made_of_the_first():
    assert "Head 0 is [[0, 1, 2], [6, 7, 8]]" in head_split_text()
    assert "would read [[0, 1, 2], [3, 4, 5]]" in head_split_text()


@pytest.mark.parametrize("name", forms.FORMS)
def test_a_step_does_not_contradict_its_form(name):
    form = forms.find(name)
    steps = trace(Setting.of(form=form))
    why = {step.number: step.why for step in steps}
    assert (f"The form {name} fills with" in why[5]) == (form.answers.fill != "−inf")
    assert (f"In the form {name} it {form.answers.blind_row}." in why[7]) == ("set to 0" not in form.answers.blind_row)
    assert ("here they are mixed" in why[10]) == (form.projections[3] is not None)
