"""Value-weighted maps, contributions and importance over a corpus are those of the dense definitions."""

import copy

import pytest
import torch

import headwise
from headwise import OptionError, importance, watch
from headwise.models import LanguageModel
from headwise.study.survey.corpus import cut
from headwise.study.survey.measures import Measures
from headwise.weights import Statistic
from survey_words import sentence

CONTEXT = 31
TEXTS = [sentence(9 + 5 * i, i) for i in range(5)]


@pytest.fixture(scope="module")
def exact(tiny):
    return LanguageModel(copy.deepcopy(tiny.gpt).double(), tiny.tokenizer)


def written(model):
    """For every window its tokens and, layer by layer, the weights (H, T, T) and what each value writes (H, T, E)."""
    for text in TEXTS:
        for ids in cut(model.codec.encode(text), model.codec, CONTEXT):
            with torch.no_grad(), watch(model.gpt, outputs=True) as seen:
                model.gpt(torch.tensor([ids]))
            layers = [
                (seen[name][:][0], torch.einsum("hsd,hde->hse", layer.value[0], layer.out))
                for name, layer in seen.outputs.items()
            ]
            yield torch.tensor(ids), layers


def by_value(weights, values):
    """Kobayashi et al. 2020: A·‖f(v)‖, here with rows that sum to 1."""
    scaled = weights * values.norm(dim=-1)
    return scaled / scaled.sum(-1, keepdim=True)


def contributed(weights, values):
    """⟨A_ij f(v_j), y_i⟩ / ‖y_i‖² with y_i = Σ_j A_ij f(v_j)."""
    output = weights @ values
    return weights * (output @ values.T) / output.square().sum(-1, keepdim=True)


@pytest.mark.parametrize(("by", "defined"), [("value", by_value), ("contribution", contributed)])
def test_numbers_are_those_of_the_dense_definition(exact, by, defined):
    squares = Statistic(lambda pair: pair.weight**2)
    survey = headwise.survey(exact, texts=TEXTS, context=CONTEXT, batch=2, by=by, statistics={"squares": squares})
    windows = list(written(exact))
    for layer, head in ((0, 2), (1, 0)):
        rows = {"sink": [], "previous": [], "peak": [], "squares": [], "same_token": []}
        best, nearest = [], []
        for ids, layers in windows:
            weights, values = (x[head] for x in layers[layer])
            shares = defined(weights, values)
            place = torch.arange(len(ids))
            before = place[:, None] > place
            copies = (ids[:, None] == ids) & before
            rows["sink"].append(shares[1:, 0])
            rows["previous"].append(shares.diagonal(-1))
            rows["peak"].append(shares.masked_fill(~(before | (place[:, None] == place)), -9).amax(-1)[1:])
            rows["squares"].append(shares.square().sum(-1)[1:])
            rows["same_token"].append((shares * copies).sum(-1)[copies.any(-1)])
            best += shares[2:, 1:].diagonal().tolist()
            rest = shares[2:, 1:].diagonal()
            nearest.append(rest if by == "contribution" else rest / (1 - shares[2:, 0]))
        found = survey.head(layer, head)
        for name, values in rows.items():
            every, means = torch.cat(values), torch.stack([value.mean() for value in values if len(value)])
            assert found[name] == pytest.approx(every.mean().item(), rel=1e-8), name
            assert found.spread[name] == pytest.approx(means.std(correction=0).item(), rel=1e-6, abs=1e-9), name
        assert found.without_first["previous"] == pytest.approx(torch.cat(nearest).mean().item(), rel=1e-8)
        assert survey.evidence(layer, head, "previous")[0].score == pytest.approx(max(best), rel=1e-6)


def test_contributions_of_copies_of_the_first_token_count_only_with_it(exact):
    bare = headwise.models.TextModel(
        "bare", exact.gpt, headwise.models.text_model.TokenCodec(lambda text: [9, 4, 9, 5, 9, 9, 6])
    )
    found = headwise.survey(bare, texts=["any"], by="contribution").head(1, 1)
    ids = torch.tensor([9, 4, 9, 5, 9, 9, 6])
    with torch.no_grad(), watch(exact.gpt, outputs=True) as seen:
        exact.gpt(ids[None])
    layer = seen.outputs["blocks.1.attention"]
    shares = contributed(layer.weights[0, 1], layer.value[0, 1] @ layer.out[1])
    copies = (ids[:, None] == ids).tril(-1)
    assert found["same_token"] == pytest.approx((shares * copies).sum(-1)[[2, 4, 5]].mean().item(), rel=1e-8)
    copies[:, 0] = False
    assert found.without_first["same_token"] == pytest.approx((shares * copies).sum(-1)[[4, 5]].mean().item(), rel=1e-8)


def test_importance_is_the_mean_over_windows_of_what_the_gradient_says(exact):
    survey = headwise.survey(exact, texts=TEXTS, context=CONTEXT, batch=3, importance=True)
    effects = {}
    for text in TEXTS:
        for ids in cut(exact.codec.encode(text), exact.codec, CONTEXT):
            for name, effect in importance(exact.gpt, torch.tensor([ids]), controls=0).items():
                effects.setdefault(name, []).append(effect[0])
    for head in survey.heads:
        truth = torch.stack(effects[head.layer])[:, head.head].double()
        assert head["effect"] == pytest.approx(truth.mean().item(), rel=1e-5, abs=1e-9)
        assert head["importance"] == pytest.approx(truth.abs().mean().item(), rel=1e-5, abs=1e-9)
        assert head.spread["importance"] == pytest.approx(truth.abs().std(correction=0).item(), rel=1e-4, abs=1e-8)


def test_a_window_of_one_token_has_no_importance_and_is_counted_all_the_same(exact):
    codec = headwise.models.text_model.TokenCodec(exact.codec.encode)
    bare = headwise.models.TextModel("bare", exact.gpt, codec, 128, 128)
    texts = ["sea", TEXTS[2]]
    assert len(codec.encode("sea")) < 3
    both, one = (headwise.survey(bare, texts=some, context=64, importance=True) for some in (texts, texts[1:]))
    assert both.counts["windows"] == 2
    assert len(codec.encode("sea")) > 1 or both.head(0, 0)["importance"] == one.head(0, 0)["importance"]


def test_weights_and_numbers_without_a_loss_are_the_same_with_importance(exact):
    plain, both = (headwise.survey(exact, texts=TEXTS, context=CONTEXT, importance=flag) for flag in (False, True))
    for a, b in zip(plain.heads, both.heads, strict=True):
        assert a.numbers == {name: value for name, value in b.numbers.items() if name not in ("importance", "effect")}


def test_surveys_of_different_measurements_are_not_merged(exact):
    first = headwise.survey(exact, texts=TEXTS[:1], context=CONTEXT)
    for options in ({"by": "value"}, {"importance": True}, {"evidence": 1}):
        with pytest.raises(OptionError, match=f"surveys with {next(iter(options))}"):
            first.merge(headwise.survey(exact, texts=TEXTS[1:2], context=CONTEXT, **options))


def test_importance_for_a_model_that_predicts_nothing_is_refused_before_anything_is_read(tiny):
    transformers = pytest.importorskip("transformers")
    import headwise.huggingface

    config = transformers.BertConfig(
        vocab_size=8192, hidden_size=24, num_attention_heads=3, num_hidden_layers=1, intermediate_size=16
    )
    bert = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="headwise").eval()
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.mul_(9 if parameter.dim() == 2 else 1)
    with pytest.raises(OptionError, match="sees the tokens after each one, so it does not predict them"):
        headwise.survey(bert, texts=TEXTS, tokenize=tiny.codec.encode, importance=True)


def test_other_ways_are_refused(tiny):
    with pytest.raises(OptionError, match="by='norm': expected one of 'weight', 'value', 'contribution'"):
        Measures(by="norm")
    with pytest.raises(OptionError, match="importance"):
        headwise.survey(tiny, texts=TEXTS, importance="yes")
