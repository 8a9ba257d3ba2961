"""Each bad input has its own error, which says what was given, what was expected and how to go on."""

import inspect
import math
import re

import numpy as np
import pytest
import torch

from headwise import (
    AttentionMap,
    DeviceError,
    DtypeError,
    HeadCountError,
    HeadwiseError,
    MaskError,
    MultiHeadAttention,
    OptionError,
    ShapeError,
    UnknownOptionError,
    alibi,
    attend,
    causal,
    documents,
    explain,
    latent,
    linear,
    llama3,
    longrope,
    multi_axis_rotary,
    ntk,
    offset,
    padding,
    prefix,
    rotary,
    temperature,
    token_is,
    window,
    yarn,
)
from headwise.attention.attend import CALLED_ELSEWHERE
from headwise.layer.options import ELSEWHERE

B, H, T, S, D, E = 2, 6, 5, 7, 11, 18


def heads(**changes):
    shapes = {"query": (B, H, T, D), "key": (B, H, S, D), "value": (B, H, S, D)} | changes
    return [torch.randn(shape) if isinstance(shape, tuple) else shape for shape in shapes.values()]


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (ShapeError, {"query": (B, T, D)}, r"query has 3 dimensions, shape \(2, 5, 11\); expected 4.*unflatten"),
        (ShapeError, {"value": (B, H, 3, D)}, r"key has \(B, Hkv, S\) = \(2, 6, 7\) and value \(2, 6, 3\)"),
        (ShapeError, {"key": (3, H, S, D), "value": (3, H, S, D)}, "query has a batch of 2 and key of 3"),
        (ShapeError, {"key": (B, H, S, 4)}, "query heads are 11 wide and key heads 4"),
        (
            HeadCountError,
            {"key": (B, 4, S, D), "value": (B, 4, S, D)},
            "query has 6 heads and key has 4.*multiple.*divides 6",
        ),
        (DtypeError, {"query": torch.ones(B, H, T, D, dtype=torch.int64)}, "query is torch.int64.*embedding"),
        (
            DtypeError,
            {"key": torch.ones(B, H, S, D, dtype=torch.float64)},
            "query is torch.float32 and key torch.float64",
        ),
        (DtypeError, {"query": [[1.0]]}, "query is a list; expected a torch.Tensor"),
        (DeviceError, {"value": torch.ones(B, H, S, D, device="meta")}, "query is on cpu and value on meta"),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "",
)
def test_attend_refuses_tensors_that_do_not_belong_together(error, changes, message):
    for function in (attend, explain):
        with pytest.raises(error, match=message):
            function(*heads(**changes))


@pytest.mark.parametrize("dropout", [1.0, 1, -0.1, 2, math.nan, "0.1", True])
def test_dropout_outside_its_range_is_refused(dropout):
    with pytest.raises(OptionError, match=r"dropout=.*expected a probability in \[0, 1\)"):
        attend(*heads(), dropout=dropout)
    with pytest.raises(OptionError, match=r"dropout="):
        MultiHeadAttention(E, 3, dropout=dropout)


@pytest.mark.parametrize(
    ("error", "bias", "message"),
    [
        (DtypeError, torch.ones(T, S, dtype=torch.bool), "attn_bias is torch.bool.*pass it as mask="),
        (ShapeError, torch.zeros(T, 3), r"bias of shape \(5, 3\) does not fit .* = \(2, 6, 5, 7\)"),
        (ShapeError, torch.zeros(B, T, S), r"bias of shape \(2, 5, 7\)"),
        (DtypeError, [[0.0]], "attn_bias is a list"),
        (DeviceError, torch.zeros(T, S, device="meta"), "attn_bias is on meta and the query on cpu"),
    ],
    ids=str,
)
def test_bad_bias_is_refused(error, bias, message):
    with pytest.raises(error, match=message):
        attend(*heads(), attn_bias=bias)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(T, 3), r"\(5, 3\) does not fit: expected \(T, S\) = \(5, 7\)"),
        (torch.ones(B, S), r"\(2, 7\) is \(B, S\).*padding\(mask\)"),
        (torch.ones(3, 1, T, S), "made for 3 samples"),
        (torch.ones(1, 4, T, S), "made for 4 heads"),
        (torch.ones(1, 1, 3, S), "made for 3 queries"),
        (padding([1, 2, 3]), "made for 3 samples"),
        (padding([1]), "made for 1 samples, and the scores, .* have 2"),
        (padding(torch.ones(B, 1)), "made for 1 keys"),
        (documents([0]), "made for 1 keys"),
        (torch.full((T, S), -math.inf), "pass them as attn_bias="),
        (torch.full((T, S), 2), "from 2 to 2"),
        ("causal", "mask is a str; expected a headwise mask"),
        (True, "mask is a bool"),
    ],
    ids=str,
)
def test_masks_that_do_not_fit_are_refused(mask, message):
    with pytest.raises(MaskError, match=message):
        attend(*heads(), mask=mask)


@pytest.mark.parametrize(
    ("error", "arguments", "options", "message"),
    [
        (HeadCountError, (10, 3), {}, r"d_model=10 .* num_heads=3 .*10 / 3 = 3.33333.*such as 1, 2, 5"),
        (HeadCountError, (18, 6), {"num_kv_heads": 4}, "num_heads=6 .* num_kv_heads=4"),
        (OptionError, (0, 1), {}, "d_model=0: expected a whole number from 1 up"),
        (OptionError, (-8, 2), {}, "d_model=-8"),
        (OptionError, (8, 0), {}, "num_heads=0"),
        (OptionError, (8, -2), {}, "num_heads=-2"),
        (OptionError, (8.0, 2), {}, r"d_model=8.0"),
        (OptionError, (8, 2), {"num_kv_heads": 0}, "num_kv_heads=0"),
        (OptionError, (8, 2), {"d_in": -1}, "d_in=-1"),
        (OptionError, (8, 2), {"d_key": 0}, "d_key=0"),
        (OptionError, (8, 2), {"context_length": 0}, "context_length=0"),
        (OptionError, (8,), {}, r"d_model=8, num_heads=None\): both are needed"),
        (OptionError, (), {}, "both are needed"),
        (OptionError, (8, 8, 16), {}, r"3 arguments by position; expected .d_model, num_heads.. Name the others\.$"),
        (OptionError, (8, 2, 0.1), {}, r"Name the others, such as dropout=0.1\."),
        (OptionError, (8, 2), {"out_proj": False, "d_out": 4}, "out_proj=False .* 8 wide, and d_out=4"),
        (OptionError, (8, 2), {"mask": torch.ones(3, 3)}, "mask=Tensor: expected a mask that fits every length"),
    ],
    ids=str,
)
def test_layer_refuses_bad_options(error, arguments, options, message):
    with pytest.raises(error, match=message):
        MultiHeadAttention(*arguments, **options)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("error", "inputs", "message"),
    [
        (ShapeError, [(B, T, 17)], r"query of shape \(2, 5, 17\) is 17 wide; this layer was made for d_in=18"),
        (ShapeError, [(T, E)], r"query has 2 dimensions, shape \(5, 18\); expected 3, \(B, T, 18\).*x\[None\]"),
        (ShapeError, [(B, 1, T, E)], "query has 4 dimensions"),
        (ShapeError, [(B, T, E), (B, S, 4), (B, S, E)], r"key of shape \(2, 7, 4\) is 4 wide.*d_key=18"),
        (ShapeError, [(B, T, E), (B, S, E), (B, S, 4)], "value of shape .* is 4 wide"),
        (ShapeError, [(B, T, E), (B, S, E), (B, T, E)], "as many values as keys"),
        (ShapeError, [(B, T, E), (3, S, E)], "one batch size B"),
        (ShapeError, [(B, T, E), None, (B, S, E)], "value is given without key"),
        (DtypeError, [torch.ones(B, T, E, dtype=torch.int64)], "input is torch.int64.*embedding"),
        (DtypeError, [torch.ones(B, T, E, dtype=torch.float64)], "input is torch.float64 and weight torch.float32"),
        (DeviceError, [torch.ones(B, T, E, device="meta")], "input is on meta and weight on cpu"),
        (
            DtypeError,
            [(B, T, E), torch.ones(B, S, E, dtype=torch.float64)],
            "query is torch.float32 and key torch.float64",
        ),
    ],
    ids=str,
)
def test_layer_refuses_inputs_that_do_not_fit(error, inputs, message, grad):
    layer = MultiHeadAttention(E, 3)
    tensors = [torch.randn(x) if isinstance(x, tuple) else x for x in inputs]
    with torch.set_grad_enabled(grad), pytest.raises(error, match=message):
        layer(*tensors)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, True, "x", torch.ones(())], ids=str)
def test_scale_must_be_above_zero(scale):
    with pytest.raises(OptionError, match="scale=.*expected a number above 0"):
        attend(*heads(), scale=scale)


@pytest.mark.parametrize(
    ("arguments", "options", "instead"),
    [
        ((768, 768, 1024, 0.1, 12), {}, "768, 12, causal=True, context_length=1024, dropout=0.1, bias={'out'}"),
        ((8, 15, 13, 0.0, 3, True), {}, "15, 3, d_in=8, causal=True, context_length=13"),
        ((8, 15, 13, 0.0), {"num_heads": 3}, "15, 3, d_in=8, causal=True, context_length=13, bias={'out'}"),
        ((8, 15), {"dropout": 0.5, "num_heads": 3}, "15, 3, d_in=8, causal=True, dropout=0.5, bias={'out'}"),
        ((), {"d_in": 32, "d_out": 32, "num_heads": 4}, "32, 4, causal=True, bias={'out'}"),
        ((), {"d_in": 8, "d_out": 15, "context_length": 13, "dropout": 0.0, "num_heads": 3, "qkv_bias": True},
         "15, 3, d_in=8, causal=True, context_length=13"),
        ((8, 15, 13, 0.0, 3), {"device": "cpu"},
         "15, 3, d_in=8, causal=True, context_length=13, bias={'out'}, device='cpu'"),
    ],
    ids=str,
)  # fmt: skip
def test_sizes_of_a_textbook_are_told_what_to_write(arguments, options, instead):
    with pytest.raises(OptionError, match=re.escape(f"Write MultiHeadAttention({instead}), which")) as caught:
        MultiHeadAttention(*arguments, **options)
    assert "headwise.textbook.Homework" in str(caught.value)
    layer = eval(f"MultiHeadAttention({instead})")  # noqa: S307 - the text that the error proposes
    sizes = dict(zip(("d_in", "d_out", "context_length", "dropout", "num_heads", "qkv_bias"), arguments, strict=False))
    assert (layer.causal, layer.out_proj.bias is not None) == (True, True)
    assert (layer.qkv_proj.bias is not None) == (sizes | options).get("qkv_bias", False)
    assert (layer.d_in, layer.d_out) == tuple((sizes | options)[name] for name in ("d_in", "d_out"))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((8, 2), {"d_model": 8}, "d_model is given twice: 8 by position and d_model=8"),
        ((8, 2), {"num_heads": 2}, "num_heads is given twice"),
        ((8, 15, 13, 0.0, 3, True, 1), {}, "7 arguments by position"),
        ((8, 15, 13, 0.0), {}, "4 arguments by position"),
    ],
    ids=str,
)
def test_arguments_by_position_and_by_name_do_not_fight(arguments, options, message):
    with pytest.raises(OptionError, match=message):
        MultiHeadAttention(*arguments, **options)


def test_layer_for_other_widths_is_not_called_with_one_input():
    with pytest.raises(ShapeError, match=r"queries 18 wide, keys 10 and values 10.*mha\(query, key, value\)"):
        MultiHeadAttention(E, 3, d_key=10)(torch.randn(B, T, E))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((causal(),), r"value is the mask causal\(\); pass it as mask="),
        ((torch.ones(T, T),), "value has 2 dimensions.*Pass a mask as mask="),
    ],
    ids=str,
)
def test_mask_in_the_place_of_the_value_is_told_where_to_go(arguments, message):
    x = torch.randn(B, T, E)
    with pytest.raises(ShapeError, match=message):
        MultiHeadAttention(E, 3)(x, x, *arguments)


def test_three_dimensional_mask_in_the_place_of_the_key_is_told_where_to_go():
    layer, x = MultiHeadAttention(E, 3), torch.randn(B, T, E)
    with pytest.raises(ShapeError, match=r"key of shape \(2, 5, 5\) is 5 wide.*mask=mask\[:, None\]"):
        layer(x, torch.ones(B, T, T))
    with pytest.raises(MaskError, match=r"\(B, T, S\) or \(H, T, S\)"):
        layer(x, torch.ones(B, T, T).bool())


@pytest.mark.parametrize(
    "arguments", [(), (torch.randn(B, H, T, D),), (torch.nn.Linear(2, 2), torch.randn(2, 2))], ids=len
)
def test_explain_says_what_it_takes(arguments):
    with pytest.raises(HeadwiseError, match="explain takes what attend takes|is a Linear|value"):
        explain(*arguments)


def test_mask_given_twice_is_refused():
    with pytest.raises(ShapeError, match=r"not a key \(B, S, E\) but a tensor of shape \(5, 5\)"):
        MultiHeadAttention(E, 3)(torch.randn(B, T, E), torch.ones(T, T), mask=causal())


def test_layer_refuses_masks_in_the_same_words():
    layer = MultiHeadAttention(E, 3)
    with pytest.raises(MaskError, match=r"padding\(mask\)"):
        layer(torch.randn(B, T, E), mask=torch.ones(B, T))
    with pytest.raises(MaskError, match="attn_bias="):
        layer(torch.randn(B, T, E), mask=torch.zeros(T, T).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf))
    with pytest.raises(MaskError, match="made for 3 samples"):
        MultiHeadAttention(E, 3, mask=padding([1, 2, 3]))(torch.randn(B, T, E))


def test_every_error_is_of_one_family_and_of_a_builtin():
    for error in (ShapeError, HeadCountError, MaskError, DtypeError, DeviceError, OptionError):
        assert issubclass(error, HeadwiseError)
        assert issubclass(error, ValueError | TypeError)


HINTS = {name: text for name, text in {**CALLED_ELSEWHERE, **ELSEWHERE}.items() if name != "bias"}


@pytest.mark.parametrize("name", HINTS)
def test_names_of_other_libraries_are_told_what_they_are_called_here(name):
    said = rf"MultiHeadAttention has no option {name}=\. Here it is {re.escape(HINTS[name])}\."
    with pytest.raises(UnknownOptionError, match=said):
        MultiHeadAttention(16, 2, **{name: 3})


@pytest.mark.parametrize("name", CALLED_ELSEWHERE)
def test_names_of_other_libraries_in_a_call_are_told_what_they_are_called_here(name):
    layer, x, said = MultiHeadAttention(16, 2), torch.randn(1, 3, 16), re.escape(CALLED_ELSEWHERE[name])
    for call in (
        lambda: attend(*heads(), **{name: None}),
        lambda: explain(*heads(), **{name: None}),
        lambda: layer(x, **{name: None}),
        lambda: explain(layer, x, **{name: None}),
    ):
        with pytest.raises(UnknownOptionError, match=rf"has no option {name}=\. Here it is {said}\."):
            call()


def test_the_words_of_hints_are_options_that_exist():
    """A hint that names an option must name one of the layer, of a call or of `attend`."""
    made, called = inspect.signature(MultiHeadAttention).parameters, inspect.signature(attend).parameters
    known = {*made, *called, *inspect.signature(MultiHeadAttention.forward).parameters, "slopes", *ELSEWHERE}
    known |= set(inspect.signature(latent).parameters)
    for text in (*HINTS.values(), CALLED_ELSEWHERE["bias"]):
        assert set(re.findall(r"(\w+)=", text)) <= known, text
    assert not set(ELSEWHERE) & set(made)
    assert not set(CALLED_ELSEWHERE) & set(called)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MultiHeadAttention(16, 2, num_kvheads=1), "Did you mean num_kv_heads=?"),
        (lambda: MultiHeadAttention(16, 2, frobnicate=1), "no option frobnicate=.$"),
        (lambda: MultiHeadAttention(16, 2, positions=[0]), "Here it is passed with each call"),
        (lambda: MultiHeadAttention(16, 2)(torch.randn(1, 3, 16), softcap=3.0), "MultiHeadAttention(..., softcap=...)"),
        (lambda: explain(MultiHeadAttention(16, 2), torch.randn(1, 3, 16), casual=True), "Did you mean causal=?"),
    ],
)
def test_unknown_options_are_named_as_they_are_here(call, message):
    pattern = re.escape(message.removesuffix("$")) + ("$" if message.endswith("$") else "")
    with pytest.raises(UnknownOptionError, match=pattern) as caught:
        call()
    assert isinstance(caught.value, TypeError)


def test_the_signature_of_the_layer_is_visible_and_its_subclasses_may_add_to_it():
    parameters = inspect.signature(MultiHeadAttention).parameters
    assert list(parameters)[:3] == ["d_model", "num_heads", "num_kv_heads"]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[2:])
    assert all(p.annotation is not p.empty for p in parameters.values())

    class Mine(MultiHeadAttention):
        def __init__(self, width, **options):
            super().__init__(width, 2, causal=True, **options)

    assert Mine(16, dropout=0.1).dropout == 0.1
    with pytest.raises(UnknownOptionError, match="Here it is d_model="):
        Mine(16, embed_dim=16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: causal() and causal(), "combine masks with &"),
        (lambda: MultiHeadAttention(16, 2, causal="no"), "causal='no': expected True or False"),
        (lambda: MultiHeadAttention(16, 2)(torch.randn(1, 3, 16), causal="yes"), "causal='yes'"),
        (lambda: MultiHeadAttention(16, 2, mask=causal), "did you forget the parentheses"),
        (lambda: MultiHeadAttention(16, 2)(torch.ones(2, 3).long()), "token ids must go through an embedding"),
    ],
)
def test_slips_are_caught(call, message):
    with pytest.raises(HeadwiseError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: documents(lengths=5), r"documents\(lengths=.*expected whole numbers, one per text, such as"),
        (lambda: documents(lengths=torch.ones(2, dtype=torch.complex64)), "expected whole numbers, one per text"),
        (lambda: prefix(None), "prefix=None: expected a whole number from 0 up"),
        (lambda: prefix(np.array([[3]])), r"prefix=ndarray of shape \(1, 1\) and int64: expected a whole number"),
        (lambda: window(torch.tensor([3, 5])), r"window\(back\)=Tensor of shape \(2,\) and torch.int64: expected"),
        (lambda: window(3, torch.tensor(2.0)), r"window\(ahead\)=tensor\(2.\): expected a whole number"),
        (lambda: padding([3, 5], side=np.array(["left", "right"])), 'expected "right" or "left"'),
        (lambda: offset(np.array([1, 2])), r"offset\(ndarray of shape \(2,\) and int64\): expected a whole number"),
        (lambda: token_is([1, 2, 3], True), "token_is.*expected a token id or several, whole numbers"),
        (lambda: causal().draw("5"), "for '5' queries: expected a whole number from 0 up"),
        (lambda: causal().to_tensor(5, -1), "for -1 keys: expected a whole number from 0 up"),
        (lambda: documents([0, 0, 1]).to_tensor(7), "is made for 3 keys, and 7 are asked for"),
        (lambda: causal().tile(3, slice(None), 5, 5), "tile 3: expected a slice of rows or columns"),
        (lambda: alibi(slopes=[0.5, None]), r"alibi\(slopes=\[0.5, None\]\): expected one float per head"),
        (lambda: alibi(torch.ones(2)), r"num_heads=Tensor of shape \(2,\) and torch.float32: expected a whole number"),
        (lambda: attend(*heads(), causal=torch.ones(T, S)), r"causal=Tensor of shape \(5, 7\).*expected True or False"),
        (lambda: attend(*heads(), return_weights="yes"), "return_weights='yes': expected True or False"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_plausible_slips_get_our_errors(call, message):
    with pytest.raises(HeadwiseError, match=message):
        call()


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (lambda w: w.panel(pooled=2.5), "pooled rows=2.5: expected a whole number from 1 up"),
        (lambda w: w.panel(pooled=(2, 3, 4)), r"pooled=\(2, 3, 4\): expected rows and columns of a picture"),
        (lambda w: w.panel(entropy=np.ones(2)), r"entropy=ndarray of shape \(2,\) and float64: expected True or False"),
        (lambda w: w.topk(torch.tensor([1, 2])), r"topk\(k\)=Tensor of shape \(2,\).*expected a whole number"),
        (lambda w: w.to_tensor(limit="1 GB"), "limit='1 GB': expected a number of bytes"),
        (lambda w: w[0, {1, 2}], "head index .* expected whole numbers or bool"),
        (lambda w: w.select(rows=[None, 1]), r"query index \[None, 1\]: expected whole numbers or bool"),
        (lambda w: w.summary("text"), "summary.*expected token ids"),
        (lambda w: AttentionMap(w._query, w._key, 3.0), "scoring=3.0: expected a headwise.Scoring"),
        (lambda w: w.save(3), r"save\(int\): expected the path of a file"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_slips_in_looking_get_our_errors(look, message):
    with pytest.raises(HeadwiseError, match=message):
        look(attend(*heads(), return_weights=True)[1])


@pytest.mark.parametrize("three", [3, np.int64(3), np.array(3), torch.tensor(3)], ids=str)
def test_whole_numbers_of_every_kind_are_accepted(three):
    query, key, value = heads()
    expected = attend(query, key, value, mask=window(3, 3) & prefix(3))
    torch.testing.assert_close(attend(query, key, value, mask=window(three, three) & prefix(three)), expected)
    _, weights = attend(query, key, value, return_weights=True)
    assert weights.topk(three).keys.shape == (B, H, T, 3)
    assert weights.pooled(three, three).shape == weights.panel(pooled=three).pooled.shape == (B, H, 3, 3)
    assert weights.panel(pooled=torch.Size((2, 3))).pooled.shape == (B, H, 2, 3)
    assert causal().to_tensor(three, three).shape == (1, 1, 3, 3)
    torch.testing.assert_close(alibi(three).table, alibi(3).table)


def turned(**options):
    """A layer of heads 8 wide with a rotary, called with these options."""
    layer = MultiHeadAttention(16, 2, position=rotary(), causal=True).eval()
    with torch.no_grad():
        return layer(torch.randn(2, 3, 16), **{n: x(layer) if callable(x) else x for n, x in options.items()})


def caching(**options):
    return lambda layer: layer.make_cache(2, **options)


PLAUSIBLE = {
    "lengths: one number": (lambda: turned(cache=caching(), lengths=3), r"lengths=3: expected 2 whole numbers"),
    "lengths: a static cache": (
        lambda: turned(cache=caching(capacity=8, static=True), lengths=torch.tensor(3)), r"expected 2 whole numbers",
    ),
    "lengths: halves": (lambda: turned(cache=caching(), lengths=[1.5, 2]), r"lengths=\[1.5, 2\]: expected 2"),
    "positions: a word": (lambda: turned(positions="learned"), "positions is a str; expected whole numbers"),
    "positions: a mask": (lambda: turned(positions=causal()), "positions is a Causal"),
    "positions: of keys": (
        lambda: turned(positions=[0, 1, 2], key=torch.randn(2, 5, 16), key_positions={}), "key_positions is a dict",
    ),
    "weights: a word": (lambda: turned(return_weights="all"), "return_weights='all': expected True or False"),
    "yarn: factor": (lambda: yarn("4", 64), "factor='4': expected a number above 0"),
    "yarn: length": (lambda: yarn(4.0, 0), "original_length=0: expected a number above 0"),
    "yarn: no length": (lambda: yarn(4.0, None), "original_length=None"),
    "yarn: beta": (lambda: yarn(4.0, 64, beta_fast=0), "beta_fast=0: expected a number above 0"),
    "yarn: betas": (lambda: yarn(4.0, 64, beta_fast=1, beta_slow=32), "beta_fast=1, beta_slow=32.*smaller"),
    "yarn: truncate": (lambda: yarn(4.0, 64, truncate="no"), "truncate='no'"),
    "llama3: factors": (lambda: llama3(8.0, low_freq_factor=None), "low_freq_factor=None: expected a number above 0"),
    "llama3: length": (lambda: llama3(8.0, original_length="8k"), "original_length='8k'"),
    "ntk: factor": (lambda: ntk(None), "factor=None"),
    "linear: factor": (lambda: linear(0), "factor=0"),
    "rotary: width": (lambda: rotary(width=0.5), "width=0.5: expected a whole number from 1 up"),
    "rotary: pairs": (lambda: rotary(interleaved="yes"), "interleaved='yes': expected True or False"),
    "longrope: factors": (lambda: longrope(4.0, 64, 1.0, [1.0]), "expected a list with one number for each pair"),
    "axes: sections": (lambda: multi_axis_rotary(16), r"sections=16\): expected two or more"),
    "temperature": (lambda: temperature(first=None), "first=None: expected a whole number from 0 up"),
    "cache: dtype": (lambda: turned(cache=caching(dtype="float16")), "dtype='float16': expected a floating"),
    "cache: static": (lambda: turned(cache=caching(static="yes")), "static='yes': expected True or False"),
    "cache: samples": (lambda: MultiHeadAttention(16, 2).make_cache(torch.ones(2)), "batch=.*expected a whole number"),
    "cache: order": (lambda: MultiHeadAttention(16, 2).make_cache(2).reorder(None), "samples. is a NoneType"),
    "layer: dtype": (lambda: MultiHeadAttention(16, 2, dtype=torch.int64), "dtype=torch.int64: expected a floating"),
    "layer: width": (lambda: MultiHeadAttention(torch.tensor([16, 2]), 2), "d_model=.*expected a whole number"),
    "layer: too wide": (lambda: MultiHeadAttention(10**30, 2), "expected a whole number"),
    "layer: out_proj": (lambda: MultiHeadAttention(16, 2, out_proj=32), "out_proj=32: expected True or False"),
    "layer: bias": (lambda: MultiHeadAttention(16, 2, bias=torch.zeros(16)), "expected True, False, or the"),
    "weights: prefix": (
        lambda: MultiHeadAttention.from_state_dict(MultiHeadAttention(16, 2).state_dict(), 2, prefix=None),
        "prefix=None: expected text",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLAUSIBLE)
def test_plausible_slips_get_an_error_of_ours(case):
    call, message = PLAUSIBLE[case]
    with pytest.raises(HeadwiseError, match=message):
        call()
