"""Evidence is the sorted list of all queries of a corpus, cut; parts add up exactly, in any order."""

import itertools
import json

import pytest
import torch

from headwise import OptionError, evidence, induction, load_builtin, sink, watch

TEXTS = [
    "The captain looked at the sea, and the sea looked at the captain.",
    "It was a dark evening in November.",
    "He was thinking of the letter, and of the letter he said nothing.",
]


def masses(layer, tokens):
    return layer.by_value().mass(induction(tokens))


@pytest.fixture(scope="module")
def model():
    return load_builtin()


@pytest.fixture(scope="module")
def found(model):
    return evidence(model, TEXTS, masses, count=3)


def test_places_are_the_largest_of_all_queries(model, found):
    every = []
    for number, text in enumerate(TEXTS):
        tokens = model.tokens(text)
        with torch.no_grad(), watch(model.gpt, outputs=True) as seen:
            model.gpt(tokens)
            scores = masses(seen.outputs["blocks.5.attention"], tokens)[0, 6]
        every += [(-score, number, query) for query, score in enumerate(scores.tolist())]
    rows = found.of("blocks.5.attention", 6)
    assert [(-row["score"], row["document"], row["query"]) for row in rows] == sorted(every)[:3]
    assert "[" in found.table("blocks.5.attention", 6)


def test_parts_add_up_in_any_order(model, found):
    parts = [evidence(model, {number: text}, masses, count=3) for number, text in enumerate(TEXTS)]
    for order in itertools.permutations(parts):
        assert (order[0] + (order[1] + order[2])).places == found.places
    assert json.loads(json.dumps(found.to_json()))[0]["layer"] == "blocks.0.attention"


def test_the_first_token_is_no_evidence_by_default(model):
    tokens = model.tokens(TEXTS[0])
    with torch.no_grad(), watch(model.gpt) as seen:
        model.gpt(tokens)
    weights = seen["blocks.4.attention"]
    (row,) = evidence(model, TEXTS[:1], count=1).of("blocks.4.attention", 2)
    assert row["score"] == pytest.approx(weights[0, 2, :, 1:].max().item(), abs=1e-5)
    assert weights.mass(sink(1)).max() > 0


def test_what_cannot_be_evidence_is_refused(model, found):
    with pytest.raises(OptionError, match=r"expected one score per query, \(1, H, T\) = \(1, 8"):
        evidence(model, TEXTS[:1], lambda layer, tokens: layer.read)
    with pytest.raises(OptionError, match="no such head"):
        found.of("blocks.9.attention", 0)
    with pytest.raises(OptionError, match="cannot be added"):
        found + evidence(model, TEXTS[:1], masses, count=2)
    with pytest.raises(OptionError, match="with its tokenizer"):
        evidence(model.gpt, TEXTS)
