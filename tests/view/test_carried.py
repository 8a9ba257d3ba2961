"""What weights carry, in a page and as pictures, against its definition."""

import pytest
import torch

import headwise
from headwise import MultiHeadAttention, OptionError, causal, view
from headwise.study.importance import importance
from headwise.view.carried import Carried, Parts
from headwise.view.page import embedded
from headwise.view.pictures import SIDE, tile

T, H, Hkv, D = 23, 6, 3, 5


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    return MultiHeadAttention(H * D, H, num_kv_heads=Hkv, causal=True, bias=True).eval()


@pytest.fixture(scope="module")
def seen(layer):
    with torch.no_grad(), headwise.watch(layer, outputs=True) as found:
        layer(torch.randn(1, T, H * D, generator=torch.Generator().manual_seed(0)))
    return found.outputs[""]


@pytest.fixture(scope="module")
def written(layer, seen):
    """What every key adds to what every head writes, (H, T, S, E), from the definition in float64."""
    value = seen.value[0].double().repeat_interleave(H // Hkv, 0)
    out = layer.out_proj.weight.detach().double().T.unflatten(0, (H, D))
    weights = seen.weights[0].double()
    return torch.einsum("hts,hsd,hde->htse", weights, value, out)


def shares_of(written):
    total = written.sum(2, keepdim=True)
    return (written * total).sum(-1) / total.square().sum(-1)


def test_sizes_and_shares_are_those_of_what_is_written(seen, written):
    found = Carried.of(seen)
    sizes = written.norm(dim=-1)
    expected = sizes / sizes.sum(-1, keepdim=True)
    torch.testing.assert_close(found.by_value[0].double(), expected, atol=1e-6, rtol=1e-4)
    weighed = seen.weights[0] * found.norms[:, None]
    torch.testing.assert_close(weighed.double(), sizes, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.contributions()[0].double(), shares_of(written), atol=1e-6, rtol=1e-4)


def test_some_heads_and_queries_contribute_what_they_do_among_all(seen, written):
    found, rows = Carried.of(seen), torch.tensor([3, 17])
    some = found.contributions([4, 1], rows)[0].double()
    torch.testing.assert_close(some, shares_of(written)[[4, 1]][:, rows], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.row("contribution", 4, 17), found.contributions()[0, 4, 17])
    torch.testing.assert_close(found.column("value", 2, 7), found.by_value[0, 2, :, 7])


def test_a_tile_of_contributions_is_that_of_the_map(seen, written):
    picture = Carried.of(seen).tile(3, 0, 0, 0)
    assert picture.shape == (SIDE, SIDE)
    torch.testing.assert_close(picture[:T, :T].double(), shares_of(written)[3], atol=1e-6, rtol=1e-4)
    assert not picture[T:].any()
    by_value = tile(Carried.of(seen).by_value, 3, 0, 0, 0)
    torch.testing.assert_close(by_value[:T].sum(-1), torch.ones(T))


def test_a_page_holds_shares_as_finely_as_they_fit(layer):
    x = torch.randn(1, 300, H * D)
    model = torch.nn.Sequential(layer)

    found = view(model, {"input": x})
    assert found.measures == ("weights", "value", "contribution")
    whole = embedded(found, 5_000_000)
    assert whole.sections["contribution/0.5"].shape == (300, 300)
    assert whole.manifest["measures"] == ["weights", "value", "contribution"]
    taken = whole.size - sum(x.size for name, x in whole.sections.items() if name.startswith("contribution/"))
    coarse = embedded(found, int(taken / 0.9))
    if "contribution" in coarse.manifest["measures"]:
        assert max(coarse.sections["contribution/0.5"].shape) < 300
    else:
        assert not any(name.startswith("contribution/") for name in coarse.sections)


def test_values_are_kept_up_to_a_length_or_if_asked_for(layer, monkeypatch):
    from headwise.view import result

    monkeypatch.setattr(result, "VALUES", 7)
    model = torch.nn.Sequential(layer)
    inputs = {"input": torch.randn(1, 11, H * D)}
    assert view(model, inputs).measures == ("weights",)
    assert view(model, inputs, values=True).measures == ("weights", "value", "contribution")
    with pytest.raises(OptionError, match="need the model"):
        view(torch.eye(5).expand(1, 2, 5, 5), values=True)
    with pytest.raises(OptionError, match="values='yes'"):
        view(model, inputs, values="yes")


def test_a_gated_layer_has_weights_only():
    gated = torch.nn.Sequential(MultiHeadAttention(30, 3, gate="head", causal=True))
    inputs = {"input": torch.randn(1, 11, 30)}
    assert view(gated, inputs).measures == ("weights",)
    with pytest.raises(OptionError, match="they are gated"):
        view(gated, inputs, values=True)


def test_importance_is_measured_with_the_view():
    model = headwise.load_builtin()
    text = "The captain looked at the sea."
    found = view(model, text, importance=True)
    expected = importance(model.gpt, model.tokens(text), controls=0)
    assert found.worth(4, 2) == pytest.approx(float(expected["blocks.4.attention"][0, 2]))
    assert found.to_dict()["layers"][4]["heads"][2]["importance"] == found.worth(4, 2)
    given = view(model, text, importance=importance(model.gpt, model.tokens(text), by="silence", controls=0))
    assert given.importance.by == "silence"
    with pytest.raises(OptionError, match=r"importance='worth'\): expected True"):
        view(model, text, importance="worth")


def test_parts_without_a_projection_weigh_values_alone(seen):
    found = Carried(seen.weights, Parts(seen.value, seen.read, None))
    value = seen.value[0].repeat_interleave(H // Hkv, 0)
    torch.testing.assert_close(found.norms, value.norm(dim=-1))


def test_the_first_token_that_is_left_out_is_not_padding():
    mask = headwise.padding(torch.tensor([[False] * 4 + [True] * 7])) & causal()
    weights = headwise.AttentionMap(torch.randn(1, 2, 11, 5), torch.randn(1, 2, 11, 5), headwise.Scoring(mask=mask))
    assert embedded(view(weights), 5_000_000).manifest["first"] == 4


@pytest.fixture(scope="module")
def translator():
    transformers = pytest.importorskip("transformers")
    import headwise.huggingface  # noqa: F401 - registers attn_implementation="headwise"

    sizes = {"d_model": 21, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 50}
    heads = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in
             (("attention_heads", 3), ("ffn_dim", 11))}  # fmt: skip
    config = transformers.BartConfig(**sizes, **heads)
    return transformers.BartForConditionalGeneration._from_config(config, attn_implementation="headwise").eval()


INPUTS = {"input_ids": torch.arange(4, 11)[None], "decoder_input_ids": torch.arange(4, 9)[None]}


def test_layers_of_an_encoder_and_a_decoder_are_chosen_by_size(translator):
    from headwise import ShapeError

    with pytest.raises(ShapeError, match=r"5 queries × 7 keys: 'model.decoder.layers.0.encoder_attn' and 1 more"):
        view(translator, INPUTS)
    cross = view(translator, INPUTS, layers=lambda name: "encoder_attn" in name)
    shares = cross.carried[1].contributions()
    assert shares.shape == (1, 3, 5, 7)
    torch.testing.assert_close(shares[0].sum(-1), torch.ones(3, 5, dtype=shares[0].dtype))
    assert embedded(cross, 5_000_000).sections["contribution/1.2"].shape == (5, 7)


def test_importance_without_a_default_loss_says_how_to_give_one(translator):
    def chosen(name):
        return "encoder_attn" in name

    with pytest.raises(OptionError, match="pass what headwise.importance"):
        view(translator, INPUTS, layers=chosen, importance=True)

    def loss(output, _):
        return output.logits[:, -1].logsumexp(-1)

    known = importance(translator, INPUTS, loss=loss, controls=0)
    assert view(translator, INPUTS, layers=chosen, importance=known).worth(1, 2) == pytest.approx(
        float(known["model.decoder.layers.1.encoder_attn"][0, 2])
    )
