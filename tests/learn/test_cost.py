import dataclasses
import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from headwise import HeadCountError, KVCache, MultiHeadAttention, OptionError, causal, reference, window
from headwise.learn.configs import CONFIGS, find
from headwise.learn.cost import Cost, alternatives, answers, bound_seconds, human
from headwise.learn.steps import layer_projections
from headwise.textbook import HeadsAtOnce

B, T, D, E = 2, 5, 7, 13
HEADS = [(6, 6), (6, 3), (6, 1), (1, 1)]
grouped = pytest.mark.parametrize(("H", "Hkv"), HEADS, ids=str)


def cost_of(H, Hkv, **options):
    return Cost.of(E, H, Hkv, D, **{"seq": T, "batch": B, "item_bytes": 4} | options)


def layer_of(H, Hkv, **options):
    return MultiHeadAttention(E, H, num_kv_heads=Hkv, head_dim=D, **{"bias": False, "causal": True} | options)


def traced(layer, x, **options):
    steps = []
    args = (x, x, x, layer_projections(layer), layer.num_heads, layer.num_kv_heads)
    return reference.multi_head_attention(*args, visible=causal().to_tensor(x.shape[1]), steps=steps, **options), steps


def counted(call):
    """What torch counts; it knows no number for its fused kernel on the CPU, so that one is written out."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops()


@grouped
@pytest.mark.parametrize("bias", [False, True])
def test_parameters_are_those_of_the_layer(H, Hkv, bias):
    layer = layer_of(H, Hkv, bias=bias)
    assert cost_of(H, Hkv, bias=bias).parameters.value == sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=lambda config: config.name)
def test_parameters_of_known_models_are_those_of_their_layer(config):
    assert Cost.of_model(config, T).parameters.value == sum(p.numel() for p in config.attention().parameters())


@grouped
def test_operations_are_those_torch_counts_in_the_reference(H, Hkv):
    layer, x = layer_of(H, Hkv), torch.randn(B, T, E)
    assert cost_of(H, Hkv).flops == counted(lambda: traced(layer, x))


@grouped
def test_operations_are_those_torch_counts_in_the_fused_layer(H, Hkv):
    layer = layer_of(H, Hkv, causal=False).eval()  # the whole matrix: some causal paths leave out hidden blocks
    assert cost_of(H, Hkv).flops == counted(lambda: layer(torch.randn(B, T, E)))


def test_operations_are_those_torch_counts_in_the_textbook_class():
    book = HeadsAtOnce(42, 42, T, 0.0, 6)
    assert Cost.of(42, 6, seq=T, batch=B).flops == counted(lambda: book(torch.randn(B, T, 42)))


@grouped
def test_each_step_costs_what_torch_counts_between_it_and_the_last(H, Hkv):
    layer, x, counts = layer_of(H, Hkv), torch.randn(B, T, E), []

    class Marks(list):
        def append(self, step):
            counts.append(counter.get_total_flops())

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        args = (x, x, x, layer_projections(layer), H, Hkv)
        reference.multi_head_attention(*args, visible=causal().to_tensor(T), steps=Marks())
    spent = [after - before for before, after in itertools.pairwise([0, *counts])]
    assert [step.matmul for step in cost_of(H, Hkv).steps()] == spent


@grouped
def test_pointwise_operations_are_per_score(H, Hkv):
    scores = B * H * T * T
    _, steps = traced(layer_of(H, Hkv), torch.randn(B, T, E))
    by_name = {step.name: step for step in cost_of(H, Hkv).steps()}
    assert by_name["scale"].pointwise == steps[5].tensors["scores"].numel() == scores
    assert by_name["softmax"].pointwise == 5 * steps[6].tensors["weights"].numel()
    assert [step.name for step in steps] == [step.name for step in cost_of(H, Hkv).steps()]


@pytest.mark.parametrize("length", [1, 2, 7, 11])
@pytest.mark.parametrize("W", [None, 1, 3, 7, 13])
def test_visible_pairs_are_those_the_mask_shows(length, W):
    mask = causal() if W is None else causal() & window(W - 1)
    assert dataclasses.replace(Cost.of(E, 1, seq=length), reach=W).pairs() == mask.to_tensor(length).sum()


def test_all_pairs_are_visible_without_a_mask():
    assert Cost.of(E, 1, seq=T, causal=False).pairs() == T**2


def test_visible_operations_leave_out_hidden_pairs_alone():
    cost = cost_of(6, 3)
    shown = cost.pairs() / T**2
    for step in cost.steps():
        share = shown if step.number in (4, 6, 7, 8) else 1
        assert step.visible == pytest.approx(share * step.total)
    assert cost.visible_flops < cost.flops
    assert cost_of(6, 3, causal=False).visible_flops == cost.flops


@grouped
def test_scores_overtake_projections_at_the_crossover(H, Hkv):
    def projections_and_scores(length):
        steps = {step.number: step.matmul for step in cost_of(H, Hkv, seq=length).steps()}
        return steps[1] + steps[10], steps[4] + steps[8]

    crossover = cost_of(H, Hkv).crossover
    before, after = projections_and_scores(int(crossover)), projections_and_scores(int(crossover) + 1)
    assert before[0] >= before[1]
    assert after[0] < after[1]


def saved_bytes(parameters, call):
    """Bytes of floating-point memory that autograd keeps, parameters left out."""
    own, kept = {p.untyped_storage().data_ptr() for p in parameters}, {}

    def pack(x):
        storage = x.untyped_storage()
        if x.is_floating_point() and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = call()
    assert output.requires_grad
    return sum(kept.values())


@grouped
def test_fused_layer_keeps_for_backward_what_the_formula_says(H, Hkv):
    # d_key stores the projections apart; the packed one of a grouped layer keeps a copy of its queries besides.
    layer = layer_of(H, Hkv, d_key=E)
    x = torch.randn(B, T, E, requires_grad=True)
    assert saved_bytes(layer.parameters(), lambda: layer(x)) == cost_of(H, Hkv).fused_activation_bytes.value


@pytest.mark.parametrize(("H", "Hkv"), [(6, 6), (6, 1)], ids=str)
def test_packed_layer_keeps_no_more(H, Hkv):
    layer, x = layer_of(H, Hkv), torch.randn(B, T, E, requires_grad=True)
    assert saved_bytes(layer.parameters(), lambda: layer(x)) == cost_of(H, Hkv).fused_activation_bytes.value


def test_textbook_class_keeps_the_matrix_for_backward():
    book, x = HeadsAtOnce(42, 42, T, 0.0, 6), torch.randn(B, T, 42, requires_grad=True)
    expected = Cost.of(42, 6, seq=T, batch=B, item_bytes=4).matrix_activation_bytes.value
    assert saved_bytes(book.parameters(), lambda: book(x)) == expected


@pytest.mark.parametrize(("H", "Hkv"), [(6, 3), (6, 1)], ids=str)
def test_reference_keeps_keys_and_values_of_every_query_head(H, Hkv):
    layer, x = layer_of(H, Hkv, d_key=E), torch.randn(B, T, E, requires_grad=True)
    kept = saved_bytes(layer.parameters(), lambda: traced(layer, x)[0][0])
    cost = cost_of(H, Hkv)
    again = cost.matrix_bytes.value  # it keeps the softmax, and the weights with empty rows set to zero
    assert kept == cost.matrix_activation_bytes.value + again


@grouped
def test_matrix_is_as_large_as_the_weights_of_the_reference(H, Hkv):
    (_, weights), _ = traced(layer_of(H, Hkv), torch.randn(B, T, E))
    assert cost_of(H, Hkv).matrix_bytes.value == weights.numel() * weights.element_size()


@grouped
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cache_holds_the_bytes_of_the_formula(H, Hkv, dtype):
    cost = cost_of(H, Hkv, item_bytes=dtype.itemsize)
    cache = KVCache(B, Hkv, D, capacity=T, dtype=dtype)
    assert cost.kv_cache.value == cache.nbytes == B * T * cost.kv_cache_per_token.value


@pytest.mark.parametrize("config", CONFIGS.values(), ids=lambda config: config.name)
@pytest.mark.parametrize("seq", [100, 3000])
def test_cache_of_a_model_is_that_of_its_layers(config, seq):
    total = 0
    for layer in range(config.layers):
        keep = min(seq, config.window) if config.windowed(layer) else seq
        meta = {"device": "meta", "dtype": torch.bfloat16}
        total += KVCache(B, config.num_kv_heads, config.head_dim, capacity=keep, **meta).nbytes
    assert Cost.of_model(config, seq, B).model_kv_cache.value == total


@grouped
@torch.no_grad()
def test_decode_step_costs_the_operations_torch_counts(H, Hkv):
    layer = layer_of(H, Hkv).eval()
    cache = layer.make_cache(B)
    layer(torch.randn(B, T - 1, E), cache=cache)
    cost = cost_of(H, Hkv)
    assert cost.decode_flops.value == counted(lambda: layer(torch.randn(B, 1, E), cache=cache))
    weights = sum(p.numel() * p.element_size() for p in layer.parameters())
    held = sum(x.numel() * x.element_size() for x in cache._storage.read(T))
    assert cost.decode_bytes.value == weights + held
    assert cost.intensity == cost.decode_flops.value / cost.decode_bytes.value


@torch.no_grad()
def test_decode_step_under_a_window_counts_the_keys_it_sees():
    W = 3
    layer = layer_of(6, 3, mask=window(W - 1)).eval()
    cache = layer.make_cache(B)
    layer(torch.randn(B, T - 1, E), cache=cache)
    cost = dataclasses.replace(cost_of(6, 3), reach=W)
    assert cost.decode_flops.value == counted(lambda: layer(torch.randn(B, 1, E), cache=cache))
    assert cost.kv_cache.value == KVCache(B, 3, D, capacity=W).nbytes
    assert "min(T, W)" in cost.decode_flops.formula


def test_models_with_layers_of_two_kinds_have_a_near_one():
    gemma, mistral, gpt2 = (Cost.of_model(find(name), 5000) for name in ("gemma-3-4b", "mistral-7b", "gpt2"))
    assert (gemma.keys, gemma.near.keys) == (5000, 1024)
    assert (mistral.keys, mistral.near) == (4096, None)
    assert (gpt2.keys, gpt2.near) == (5000, None)


def test_grouped_heads_save_parameters_and_cache_but_no_scores():
    mha, gqa, mqa = alternatives(cost_of(6, 2))
    assert (mha.kind, gqa.kind, mqa.kind) == ("MHA", "GQA", "MQA")
    assert mha.kv_cache.value == 3 * gqa.kv_cache.value == 6 * mqa.kv_cache.value
    assert mha.parameters.value > gqa.parameters.value > mqa.parameters.value
    assert mha.intensity < gqa.intensity < mqa.intensity
    assert len({c.steps()[3] for c in (mha, gqa, mqa)}) == 1


@pytest.mark.parametrize(
    ("H", "kv"), [(12, [12, 3, 1]), (25, [25, 5, 1]), (7, [7, 1]), (2, [2, 1]), (1, [1]), (32, [32, 8, 1])], ids=str
)
def test_alternatives_have_key_value_heads_that_divide(H, kv):
    assert [cost.num_kv_heads for cost in alternatives(Cost.of(E, H, head_dim=D, seq=T))] == kv


def test_known_numbers_of_known_models():
    llama = Cost.of_model(find("llama-3.1-8b"), 131072)
    assert llama.kv_cache_per_token.value * 32 == 131072  # 128 KiB a token
    assert llama.model_kv_cache.value == 16 * 2**30  # 16 GiB at full context
    assert Cost.of_model(find("gpt2"), 1024).parameters.value == 2_362_368
    assert Cost.of_model(find("gpt3"), 2048).crossover == 2 * 12288


def test_bound_is_the_slower_of_computing_and_moving():
    assert bound_seconds(10, 100, 1, 100) == 10
    assert bound_seconds(10, 100, 1, 1) == 100
    assert bound_seconds(10, 100, None, 50) == 2
    assert bound_seconds(10, 100, None, None) is None


@pytest.mark.parametrize(
    ("n", "unit", "binary", "text"),
    [
        (0, "B", True, "0 B"),
        (1023, "B", True, "1020 B"),
        (1024, "B", True, "1 KiB"),
        (1.5 * 2**30, "B", True, "1.5 GiB"),
        (999, "", False, "999"),
        (999_600, "", False, "1 M"),
        (1.234e-9, "s", False, "1.23 ns"),
        (5e21, "", False, "5000 E"),
    ],
)
def test_numbers_are_readable(n, unit, binary, text):
    assert human(n, unit, binary=binary) == text


def test_heads_that_do_not_divide_are_refused_as_everywhere():
    with pytest.raises(HeadCountError, match="d_model=13 cannot be cut into num_heads=2 equal heads"):
        Cost.of(E, 2, seq=T)
    with pytest.raises(HeadCountError, match="num_heads=6 query heads cannot share num_kv_heads=4"):
        Cost.of(12, 6, 4, seq=T)


@pytest.mark.parametrize("wrong", [{"seq": 0}, {"batch": -3}, {"layers": 0}, {"item_bytes": 0}], ids=str)
def test_sizes_below_one_are_refused_by_name(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(OptionError, match=f"{name}={value}: expected a whole number from 1 up"):
        cost_of(6, 3, **wrong)


def test_windowed_layers_need_a_window():
    with pytest.raises(OptionError, match="windowed_layers=3 and no window"):
        Cost(E, 6, 3, D, T, layers=5, windowed_layers=3)


COST = Cost.of(512, 8, seq=1024)


def test_one_large_head_costs_the_same_products_and_parameters():
    one = COST.as_one_head()
    assert (one.num_heads, one.head_dim) == (1, 512)
    assert one.flops == COST.flops
    assert one.parameters.value == COST.parameters.value
    assert 8 * one.steps()[6].total == COST.steps()[6].total


def test_scores_of_a_head_have_the_rank_of_its_width_at_most():
    T, D = 11, 3
    scores = torch.randn(T, D, dtype=torch.float64) @ torch.randn(D, T, dtype=torch.float64)
    assert torch.linalg.matrix_rank(scores) == D
    assert "rank 64 at most" in answers(COST)[0].answer


def test_twice_the_length_doubles_projections_and_quadruples_scores():
    (p1, s1), (p2, s2) = COST.matmul_split(), Cost.of(512, 8, seq=2048).matmul_split()
    assert (p2, s2) == (2 * p1, 4 * s1)
    assert "at 2048 tokens, 2 and 4 times as many" in answers(COST)[1].answer
    assert "equal at T = 2·E = 1024 tokens" in answers(COST)[1].answer


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_grouped_answer_names_the_saving(kv_heads):
    told = answers(COST.with_kv_heads(kv_heads))[2].answer
    assert "MHA with 8: cache 2 KiB per token and layer, parameters 100%" in told
    assert "GQA with 2: cache 512 B per token and layer (1/4), parameters 62.5%" in told
    assert "MQA with 1: cache 256 B per token and layer (1/8), parameters 56.25%" in told


def test_every_answer_is_a_question_and_a_sentence():
    for answer in answers(Cost.of(7, 1, seq=3)):
        assert answer.question.endswith("?")
        assert answer.answer.endswith(".")


def test_answers_for_a_batch_say_that_they_are_for_several_texts():
    alone, four = answers(COST), answers(dataclasses.replace(COST, batch=4))
    assert "for 4 texts" not in " ".join(answer.answer for answer in alone)
    assert all("4 texts" in four[place].answer for place in (0, 1, 3, 4))
    assert "one new token for each of 4 texts" in four[4].answer
    assert "A larger batch" not in four[4].answer


def test_a_window_that_a_text_does_not_reach_changes_nothing():
    for name in ("mistral-7b", "gemma-3-4b"):
        short = Cost.of_model(find(name), 512)
        assert not short.is_windowed
        assert short.near is None
        assert "W" not in short.kv_cache.formula + short.decode_flops.formula
        assert "window" not in answers(short)[1].answer
        assert Cost.of_model(find(name), 5000).is_windowed
