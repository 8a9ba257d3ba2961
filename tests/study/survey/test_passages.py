"""The strongest passages of a whole corpus: exact, whoever read which part, and in whatever order parts are merged."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise
from headwise import OptionError, watch
from headwise.models import LanguageModel
from headwise.models.text_model import TokenCodec
from headwise.study.survey.corpus import cut
from headwise.study.survey.job import SurveyJob
from headwise.study.survey.measures import Measures
from headwise.study.survey.passages import AROUND, GAP, Passage, Passages, Quote, Ranking, WindowTexts
from survey_words import sentence

KEY = ("layer", 0, "previous")


def passage(score, place, text):
    return Passage(score, 0.5, "file", None, 0, place, 3, 2, (f"w{text}",), (text,), (0, 0))


PASSAGES = st.builds(passage, st.integers(0, 5).map(float), st.integers(0, 99), st.integers(0, 6))


@settings(max_examples=80, deadline=None)
@given(st.lists(PASSAGES, max_size=25), st.randoms(), st.integers(1, 4))
def test_passages_merge_alike_in_any_order_and_grouping(found, draw, most):
    best = {}
    for each in sorted(found, key=lambda one: one.order):
        best.setdefault(each.copy_of, each)
    truth = list(best.values())[:most]
    shuffled = found.copy()
    draw.shuffle(shuffled)
    groups = [Passages(most) for _ in range(3)]
    for each in shuffled:
        draw.choice(groups).add(KEY, each)
    whole = Passages()
    for group in groups:
        whole.merge(Passages.from_rows(json.loads(json.dumps(group.to_rows())), most))
    assert [one.order for one in whole.of(*KEY)] == [one.order for one in truth]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.integers(1, 4), st.randoms())
def test_the_best_queries_are_those_of_a_sort_that_keeps_the_order_of_equals(B, H, T, most, draw):
    draws = torch.Generator().manual_seed(draw.randrange(2**31))
    scores = torch.randint(-2, 3, (B, H, T), generator=draws).float()
    counted = torch.rand(B, H, T, generator=draws) < 0.7
    texts = [WindowTexts(ids, ids) for ids in torch.randint(0, 2, (B, T), generator=draws).tolist()]
    key = torch.arange(T).expand(B, H, T)
    found = Ranking(scores, counted, key, scores, texts, cross=False).best(most, [-1.0] * H)
    for head in range(H):
        places = [(b, t) for b in range(B) for t in range(T) if counted[b, head, t] and scores[b, head, t] >= -1]
        truth = {}
        for b, t in sorted(places, key=lambda place: -scores[place[0], head, place[1]].item()):
            quote = Quote.of(t, t, T, cross=False)
            truth.setdefault((quote.tokens(texts[b]), quote.marks), (b, t))
        assert [(one.window, one.query) for one in found[head]] == list(truth.values())[:most]


@pytest.mark.parametrize(("query", "key"), [(3, 2), (2, 2), (0, 4), (59, 1), (1, 59), (31, 8)])
@pytest.mark.parametrize("cross", [False, True])
def test_a_quote_has_the_words_around_the_query_and_the_key(query, key, cross):
    texts = WindowTexts(list(range(100, 161)), list(range(200, 261)) if cross else list(range(100, 161)))
    quote = Quote.of(query, key, 61, cross=cross)
    tokens = quote.tokens(texts)
    assert tokens[quote.marks[0]] == texts.queries[query]
    assert tokens[quote.marks[1]] == texts.keys[key]
    words = quote.words(texts, TokenCodec(list))
    assert words == tuple(GAP if token < 0 else str(token) for token in tokens)
    assert (-1 in tokens) == (cross or abs(query - key) > 2 * AROUND)
    assert len(tokens) <= 4 * AROUND + 2


def test_characters_at_the_edges_of_a_quote_are_whole():
    data = ("漢" * 40).encode()
    codec = TokenCodec(
        lambda text: list(text.encode()),
        lambda token: bytes([token]).decode("utf-8", "replace"),
        join=lambda tokens: bytes(tokens).decode("utf-8", "replace"),
    )
    for query in range(40, 44):
        quote = Quote.of(query, query, len(data), cross=False)
        words = quote.words(WindowTexts(list(data), list(data)), codec)
        assert set(words) == {"漢", ""}
        touched = {token // 3 for part in quote.parts for token in range(part.start, part.stop)}
        assert "".join(words) == "漢" * len(touched), "each once, whole at the edges"


# Of a corpus --------------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "long.txt").write_text("\n".join(sentence(60, i) for i in range(4)))
    lines = [json.dumps({"text": sentence(9 + 5 * i, i)}) for i in range(9)]
    (folder / "short.jsonl").write_text("\n".join(["", *lines, lines[2]]))  # the last is a copy
    return folder


def job_of(model, paths, **options):
    return SurveyJob.of(model, paths, context=31, batch=3, **options)


def test_evidence_is_the_maximum_over_every_query_of_the_corpus(tiny):
    exact = LanguageModel(copy.deepcopy(tiny.gpt).double(), tiny.tokenizer)
    texts = [sentence(9 + 7 * i, i) for i in range(7)]
    survey = headwise.survey(exact, texts=texts, context=31)
    for layer, head in ((0, 2), (1, 0)):
        truth = []
        for number, text in enumerate(texts):
            for ids in cut(exact.codec.encode(text), exact.codec, 31):
                with torch.no_grad(), watch(exact.gpt) as seen:
                    exact.gpt(torch.tensor([ids]))
                weights = list(seen.values())[layer][0, head]
                truth += [(weights[t, t - 1].item(), number + 1, t, ids[t], ids[t - 1]) for t in range(2, len(ids))]
        best = {}
        for row in sorted(truth, reverse=True):
            best.setdefault(row[0], row)  # no two queries that differ have equal weights
        found = survey.evidence(layer, head, "previous")
        assert len(found) == 3
        for passage, (score, line, query, token, before) in zip(found, list(best.values()), strict=False):
            assert passage.score == pytest.approx(score, rel=1e-6)
            assert (passage.file, passage.line, passage.query) == ("texts", line, query)
            assert passage.tokens[passage.marks[0]] == token
            assert before in passage.tokens
            assert passage.words[passage.marks[0]] == exact.codec.decode(token)
            assert passage.weight >= passage.score * (1 - 1e-6)


def test_weaker_passages_that_are_left_out_early_change_nothing(tiny, corpus):
    job = job_of(tiny, [corpus])
    job.corpus.seal()
    whole, early = Passages(), Passages()
    for unit in range(len(job.corpus)):
        whole.merge(job.tally_of(unit).passages)
        early.merge(job.tally_of(unit, early).passages)
    assert len(job.corpus) > 1
    assert whole.to_rows() == early.to_rows()
    assert whole.to_rows() == job.run().tally.passages.to_rows()


def test_surveys_of_files_merge_to_the_evidence_of_all_files(tiny, corpus):
    files = [corpus / "long.txt", corpus / "short.jsonl"]
    whole = job_of(tiny, files).run()
    parts = [job_of(tiny, [file]).run() for file in files]
    merged = parts[1].merge(parts[0])
    assert merged.to_dict()["evidence"] == whole.to_dict()["evidence"]
    assert {row["file"] for row in whole.to_dict()["evidence"]} == {path.as_posix() for path in files}


def test_a_document_is_named_by_its_line_and_a_copy_is_not_quoted_twice(tiny, corpus):
    rows = job_of(tiny, [corpus / "short.jsonl"]).run().to_dict()["evidence"]
    assert {row["line"] for row in rows} <= set(range(2, 11)), "line 11 is a copy, and lines count from 1"
    seen = [(row["layer"], row["head"], row["number"], *row["tokens"], *row["marks"]) for row in rows]
    assert len(seen) == len(set(seen))


def test_a_broad_head_is_quoted_by_rows_that_are_spread_over_many_tokens(tiny):
    found = headwise.survey(tiny, texts=[sentence(40, 1)])
    tokens = tiny.tokens(sentence(40, 1))
    with torch.no_grad(), headwise.watch(tiny.gpt) as seen:
        tiny.gpt(tokens)
    for layer, name in enumerate(found.layers):
        rest = seen[name].without(headwise.sink(1))
        spread = rest.entropy()[0].exp()
        for head in range(3):
            best = found.evidence(layer, head, "entropy")[0]
            assert best.score == pytest.approx(float(spread[head].max()), rel=1e-4)
            assert best.query == int(spread[head].argmax()) > 20
            assert best.key == int(rest.peak().key[0, head, best.query])


def test_how_many_passages_are_kept_can_be_chosen(tiny):
    texts = [sentence(40, 1)]
    none, five = (headwise.survey(tiny, texts=texts, evidence=most) for most in (0, 5))
    assert none.to_dict()["evidence"] == []
    assert none.evidence(0, 0) == []
    assert len(five.evidence(0, 0, "peak")) == 5
    assert none.heads == five.heads
    with pytest.raises(OptionError, match="evidence=-1: expected how many passages to keep, 0 or more"):
        Measures(evidence=-1)
    with pytest.raises(OptionError, match=r"there are passages for \['entropy', "):
        five.evidence(0, 0, "nothing")


def test_a_head_without_a_number_of_its_own_is_quoted_by_its_largest_weight():
    survey = headwise.survey(headwise.load_builtin(), texts=[sentence(40, 1)])
    mixed = next(head for head in survey.placed if head.summary.kind == "mixed")
    assert survey.evidence(mixed.layer, mixed.head) == survey.evidence(mixed.layer, mixed.head, "peak") != []
    named = next(head for head in survey.placed if head.summary.kind == "previous-token")
    assert survey.evidence(named.layer, named.head) == survey.evidence(named.layer, named.head, "previous") != []
