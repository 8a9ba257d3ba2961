"""What is seen: the same numbers as the maps give, and cells and pairs are theirs."""

import pytest
import torch

import headwise
from headwise import AttentionMap, OptionError, Scoring, ShapeError, causal, load_builtin, view

TEXT = "The captain looked at the sea, and the sea looked at the captain. The captain looked at the sea."


@pytest.fixture(scope="module")
def result():
    return view(load_builtin(), TEXT)


def test_numbers_are_those_of_the_maps(result):
    model = load_builtin()
    ids = model.tokens(TEXT)
    with torch.no_grad(), headwise.watch(model.gpt) as seen:
        model.gpt(ids)
    for name, summary in zip(result.names, result.summaries, strict=True):
        expected = seen[name].summary(ids[0])
        assert [head.numbers for head in summary] == [head.numbers for head in expected]


def test_pairs_are_the_largest_weights_further_back(result):
    found = []
    for layer, weights in enumerate(result.maps):
        dense = weights[0].clone()
        dense[:, :, 0] = 0
        for near in (0, 1):
            dense.diagonal(-near, 1, 2).zero_()
        found += [(dense[h, t, s].item(), layer, h, t, s) for h, t, s in (dense > 0.3).nonzero().tolist()]
    best = {}
    for weight, layer, head, query, key in sorted(found, reverse=True):
        best.setdefault((query, key), (layer, head, weight))
    for pair in result.pairs(5):
        layer, head, weight = best[pair.query, pair.key]
        assert (pair.layer, pair.head) == (layer, head)
        assert pair.weight == pytest.approx(weight, abs=1e-5)
    assert result.pairs(1)[0].weight == pytest.approx(max(weight for _, _, weight in best.values()), abs=1e-5)


def test_json_has_the_weight_of_a_pair_and_its_share_of_what_is_left_without_the_first_token(result):
    found = result.to_dict()["pairs"]
    assert found
    for pair in found:
        row = result.maps[pair["layer"]][0, pair["head"], pair["query"]]
        assert pair["weight"] == pytest.approx(float(row[pair["key"]]), abs=1e-6)
        assert pair["weight_without_first"] == pytest.approx(float(row[pair["key"]] / row[1:].sum()), abs=1e-5)


def test_the_sentence_counts_what_the_readings_say(result):
    resting = sum("first-token sink" in head.summary.reading for head in result.heads)
    sinks = f"{resting} heads put 30 % or more on the first token"
    assert f"7 layers × 8 heads · {result.T} tokens · {sinks}" in result.sentence


def test_a_reader_who_counts_the_table_gets_the_number_of_sinks(result):
    printed = [f"{head.summary['sink']:.2f}" for head in result.heads]
    assert f"{sum(number >= '0.30' for number in printed)} heads put 30 % or more on the first token" in result.sentence


def test_a_transformers_model_is_seen():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("headwise.huggingface")
    config = transformers.GPT2Config(n_embd=24, n_head=3, n_layer=2, vocab_size=50)
    model = transformers.GPT2Model._from_config(config, attn_implementation="headwise")
    assert view(model, torch.arange(9)).sentence.startswith("2 layers × 3 heads · 9 tokens")
    assert model.training, "as it was"


def test_more_tokens_than_a_model_can_read_are_refused_in_words():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("headwise.huggingface")
    config = transformers.GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=50, n_positions=8)
    model = transformers.GPT2Model._from_config(config, attn_implementation="headwise")
    with pytest.raises(ShapeError, match=r"view\(GPT2Model\).* longer than the model can read"):
        view(model, torch.arange(11))


def test_one_kind_of_layers_of_an_encoder_and_decoder_is_seen():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("headwise.huggingface")
    config = transformers.BartConfig(
        d_model=24, encoder_layers=2, decoder_layers=3, encoder_attention_heads=3, decoder_attention_heads=3,
        encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=50,
    )  # fmt: skip
    model = transformers.BartModel._from_config(config, attn_implementation="headwise")
    inputs = {"input_ids": torch.arange(4, 11)[None], "decoder_input_ids": torch.arange(4, 9)[None]}
    with pytest.raises(ShapeError, match=r"those of one size with view\(..., layers="):
        view(model, inputs)
    result = view(model, inputs, layers=lambda name: "encoder_attn" in name, words=list("abcde"), keys=list("tuvwxyz"))
    assert result.sentence.startswith("3 layers × 3 heads · 5 tokens attending to 7")
    assert view(model, inputs, layers=lambda name: name.startswith("encoder")).sentence.startswith(
        "2 layers × 3 heads · 7"
    )


def test_a_model_of_which_a_part_is_not_seen_is_refused(monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("headwise.huggingface")
    from headwise import huggingface

    config = transformers.GPT2Config(n_embd=24, n_head=3, n_layer=2, vocab_size=50)
    model = transformers.GPT2Model._from_config(config, attn_implementation="headwise")
    model.extra = torch.nn.Module()
    model.extra.inner = type("OwnAttention", (torch.nn.Module,), {})()
    monkeypatch.setattr(huggingface, "computes_attention", lambda kind: kind.__name__ == "OwnAttention")
    with pytest.raises(
        OptionError, match="OwnAttention of GPT2Model computes attention in its own code.* Choose the layers to view"
    ):
        view(model, torch.arange(9))
    assert view(model, torch.arange(9), layers=lambda name: name.startswith("h.")).sentence.startswith("2 layers")


def test_a_cell_is_one_weight_with_its_logit_rank_and_visible_keys():
    query, key = torch.randn(2, 1, 3, 7, 5, dtype=torch.float64).unbind(0)
    result = view(AttentionMap(query, key, Scoring(causal())))
    scores = (query[0, 1] @ key[0, 1].T / 5**0.5)[:, :5][4]
    order = scores.argsort(descending=True).tolist()
    for place in range(5):
        cell = result.cell(0, 1, 4, place)
        assert cell.weight == pytest.approx(scores.softmax(0)[place].item())
        assert cell.logit == pytest.approx(scores[place].item())
        assert (cell.rank, cell.visible) == (order.index(place) + 1, 5)
        assert cell.times_uniform == pytest.approx(5 * cell.weight)
    hidden = result.cell(0, 1, 4, 5)
    assert (hidden.weight, hidden.logit, hidden.rank) == (0.0, -float("inf"), 6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: view([]), OptionError, "no attention map was given"),
        (lambda: view(["a map"]), OptionError, "a str is among the maps"),
        (lambda: view(3), OptionError, r"view\(int\): expected a model"),
        (lambda: view(torch.nn.Linear(3, 3), "text"), OptionError, "pass token ids"),
        (lambda: view(load_builtin(), ""), OptionError, "at least one character"),
        (lambda: view(load_builtin(), torch.zeros(1, 0)), OptionError, "at least one"),
        (lambda: view(AttentionMap(torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8))), ShapeError, "one sample"),
        (
            lambda: view(AttentionMap(torch.randn(1, 3, 4, 8), torch.randn(1, 3, 4, 8)), words="ab"),
            ShapeError,
            "words|tokens",
        ),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, []), (1, ["1 head puts 30 % or more on the first token and has another pattern too"])],
)
def test_heads_on_the_first_token_are_counted_in_words(count, words):
    weights = torch.full((1, count + 1, 9, 9), 1 / 9)
    weights[:, :count] = torch.eye(9)[0]
    assert [part for part in view(weights).sentence.split(" · ") if "first token" in part] == words


def test_a_list_of_words_stands_apart_in_the_heading():
    weights = AttentionMap(torch.randn(1, 1, 3, 5), torch.randn(1, 1, 3, 5))
    assert view(weights, words=["the", "old", "sea"]).heading.endswith(" do with “the old sea”")


@pytest.mark.parametrize("text", ["one two <s> three", "<s> one", "one [SEP]", "<|start|> one", "<s>"])
def test_the_heading_quotes_special_tokens_that_were_typed(text):
    found = view(load_builtin(), text)
    assert found.tokens[0] == "<|start|>"
    assert found.heading.endswith(f" do with “{text}”")


def test_of_given_tokens_the_heading_leaves_out_special_ones_at_both_ends():
    weights = AttentionMap(torch.randn(1, 1, 6, 5), torch.randn(1, 1, 6, 5))
    found = view(weights, words=["[CLS]", "the", "<s>", "sea", "[SEP]", "[PAD]"])
    assert found.heading.endswith(" do with “the <s> sea”")


def test_a_view_has_a_short_name_beside_another():
    weights = AttentionMap(torch.randn(1, 1, 3, 5), torch.randn(1, 1, 3, 5))
    sea, ship = (view(weights, words=["the", "old", word]) for word in ("sea", "ship,"))
    assert ship.name_beside(sea) == "ship"
    assert sea.compared(ship) == f"{sea.heading}, compared with “the old ship,”"
    assert sea.name_beside(sea) == "other"
