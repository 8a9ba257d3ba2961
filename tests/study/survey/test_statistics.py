"""Statistics that the package does not know, in a survey: means, spreads, evidence, on disk and over processes."""

import copy
import json

import pytest
import torch

import headwise
from headwise import CheckpointError, OptionError, previous_token, token_is
from headwise.cli import main
from headwise.masks import Grid, Mask
from headwise.models import LanguageModel
from headwise.study.survey.job import SurveyJob
from headwise.study.survey.measures import Measures
from headwise.study.survey.statistics import OwnStatistic, own_statistics
from headwise.weights import Reading, Statistic
from survey_words import dense_windows, sentence

CONTEXT = 31
TEXTS = [sentence(9 + 5 * i, i) for i in range(5)]
FILE = """
from headwise.weights import Statistic

squares = Statistic(lambda pair: pair.weight**2)
number = 3


def {name}(tokens):
    return Statistic(lambda pair: pair.weight * (pair.key_token == pair.query_token), tokens=tokens)
"""


class Spread(Reading):
    """max − min of what keys receive from a query: one number per head and sample, in a class of one's own."""

    by_row, differentiable = False, (False,)

    def start(self, source):
        self.source = source
        self.seen = torch.zeros(source.shape[0] * source.shape[1], source.shape[3], dtype=torch.float64)

    def take(self, tile):
        self.seen[tile.heads, tile.cols] += tile.weights.sum(1)

    def finish(self):
        B, H, _, S = self.source.shape
        seen = self.seen.view(B, H, S)
        return (seen.amax(-1) - seen.amin(-1),)


class Even(Mask):
    """A probe of one's own: keys at even places."""

    def visible(self, grid: Grid):
        return grid.col % 2 == 0


@pytest.fixture(scope="module")
def exact(tiny):
    return LanguageModel(copy.deepcopy(tiny.gpt).double(), tiny.tokenizer)


def test_each_kind_of_statistic_is_that_of_the_dense_weights(exact):
    statistics = {
        "squares": Statistic(lambda pair: pair.weight**2),
        "best": Statistic(lambda pair: pair.weight * (pair.distance == 1), combine="max"),
        "got": Statistic(lambda pair: pair.weight, by="key"),
        "spread_of_keys": Spread(),
        "even": Even(),
        "the": lambda tokens: token_is(tokens, 5),
        "same": lambda tokens: Statistic(
            lambda pair: pair.weight * (pair.key_token == pair.query_token), tokens=tokens
        ),
    }
    survey = headwise.survey(exact, texts=TEXTS, context=CONTEXT, batch=2, statistics=statistics)
    for layer, head in ((0, 1), (1, 2)):
        rows = {name: [] for name in statistics}
        for ids, layers in dense_windows(exact, TEXTS, CONTEXT):
            weights = layers[layer][head]
            rows["squares"].append(weights.square().sum(-1)[1:])
            rows["best"].append(weights.diagonal(-1))
            rows["got"].append(weights.sum(0))
            rows["spread_of_keys"].append((weights.sum(0).max() - weights.sum(0).min())[None])
            rows["even"].append(weights[1:, ::2].sum(-1))
            rows["the"].append((weights * (ids == 5)).sum(-1)[1:])
            rows["same"].append((weights * (ids[:, None] == ids)).sum(-1)[1:])
        found = survey.head(layer, head)
        for name, values in rows.items():
            every, means = torch.cat(values), torch.stack([value.mean() for value in values])
            assert found[name] == pytest.approx(every.mean().item(), rel=1e-9), name
            assert found.std[name] == pytest.approx(every.std(correction=0).item(), rel=1e-6, abs=1e-9), name
            assert found.spread[name] == pytest.approx(means.std(correction=0).item(), rel=1e-6, abs=1e-9), name
        best = max(torch.cat(rows["squares"]).tolist())
        assert survey.evidence(layer, head, "squares")[0].score == pytest.approx(best, rel=1e-6)
        with pytest.raises(OptionError, match="there are passages for"):
            survey.evidence(layer, head, "got")  # of keys, not of queries


def test_statistics_are_saved_and_merged_with_everything_else(tiny, tmp_path):
    statistics = {"squares": Statistic(lambda pair: pair.weight**2)}
    options = {"context": CONTEXT, "batch": 1, "statistics": statistics}
    parts = [headwise.survey(tiny, texts=TEXTS[i::2], **options) for i in range(2)]
    whole = headwise.survey(tiny, texts=TEXTS, **options)
    assert parts[0].merge(parts[1]).heads == parts[1].merge(parts[0]).heads == whole.heads
    for suffix in ("json", "parquet"):
        whole.save(tmp_path / f"a.{suffix}")
        assert headwise.Survey.load(tmp_path / f"a.{suffix}").to_dict() == whole.to_dict()
    table = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "a.parquet").to_pylist()
    assert table[4]["squares"] == whole.heads[4]["squares"]
    assert table[4]["squares_spread"] == whole.heads[4].spread["squares"]
    assert [one["score"] for one in table[4]["evidence"]] == [one.score for one in whole.evidence(1, 1)]
    other = headwise.survey(
        tiny, texts=["other"], context=CONTEXT, statistics={"squares": Statistic(lambda pair: pair.weight**3)}
    )
    with pytest.raises(OptionError, match="surveys with statistics"):
        whole.merge(other)


def test_a_killed_survey_continues_only_with_the_same_statistic(tiny, tmp_path, monkeypatch):
    def job(power):
        measures = Measures(statistics=own_statistics({"powers": Statistic(lambda pair: pair.weight**power)}))
        return SurveyJob.of(tiny, [tmp_path / "a.txt"], context=13, batch=1, measures=measures)

    (tmp_path / "a.txt").write_text(" ".join(TEXTS))
    whole = job(2).run(tmp_path / "whole.json")
    real, count = Measures.of, []

    def failing(*arguments):
        count.append(1)
        if len(count) == 3:
            raise OptionError("stopped")
        return real(*arguments)

    monkeypatch.setattr(Measures, "of", failing)
    with pytest.raises(OptionError, match="stopped"):
        job(2).run(tmp_path / "a.json", every=0)
    with pytest.raises(OptionError, match="is a survey with another statistics"):
        job(3).run(tmp_path / "a.json", resume=True)
    found = job(2).run(tmp_path / "a.json", resume=True)
    assert found.to_dict() == whole.to_dict()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_the_digest_of_a_statistic_changes_with_what_it_measures_and_not_with_its_use(tiny):
    def digest(asked):
        return OwnStatistic.of("name", asked).digest

    powers = [Statistic(lambda pair, power=power: pair.weight**power) for power in (2, 2, 3)]
    assert digest(powers[0]) == digest(powers[1]) != digest(powers[2])
    assert digest(Even()) != digest(previous_token())
    assert digest(Statistic(powers[0].function, by="key")) != digest(powers[0])
    spread, before = Spread(), digest(Spread())
    headwise.survey(tiny, texts=["The captain looked."], statistics={"a": spread, "b": powers[0]})
    assert digest(spread) == before
    assert digest(powers[0]) == digest(powers[1])


def my_own(tokens):
    return token_is(tokens, 3)


def test_a_list_names_statistics_after_their_functions_and_classes():
    def halves(pair):
        return pair.weight / 2

    assert [each.name for each in own_statistics([my_own, Statistic(halves), Spread()])] == [
        "my_own",
        "halves",
        "Spread",
    ]


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ([Statistic(lambda pair: pair.weight)], r"'<lambda>' has no name of its own; pass a dictionary"),
        ({"sink": previous_token()}, "a survey has a number 'sink' already; choose another name"),
        ({"a b": previous_token()}, "'a b' is not a name; expected letters, digits and underscores"),
        ({"a": 3}, r"a is 3; expected a headwise.weights.Reading"),
        ({"a": Spread}, r"a is .*Spread.*; expected a headwise.weights.Reading"),
        (previous_token(), "expected a dictionary"),
        ([my_own, my_own], "'my_own' is there twice"),
        ({"a": lambda tokens: 3}, r"a\(tokens\) gave 3; expected"),
    ],
)
def test_what_is_not_a_statistic_is_refused(tiny, statistics, message):
    with pytest.raises(OptionError, match=message):
        headwise.survey(tiny, texts=TEXTS[:1], statistics=statistics)


def test_a_result_of_another_shape_is_refused(tiny):
    class Wrong(Spread):
        by_row = True

    with pytest.raises(
        OptionError, match=r"wrong gave \(1, 3\); expected a number for each head and query, \(B, H, 9\)"
    ):
        headwise.survey(tiny, texts=["The captain looked at the sea and said"], statistics={"wrong": Wrong()})


def test_windows_in_which_a_statistic_is_not_finite_are_lost_and_named(tiny):
    statistics = {"inverse": Statistic(lambda pair: 1 / (pair.position - 12) * (pair.position == 12))}
    survey = headwise.survey(tiny, texts=["The captain.", TEXTS[4]], context=64, statistics=statistics)
    assert survey.counts["windows lost"] == 1
    assert survey.skipped[0].reason.startswith("the statistic inverse produced numbers that are not finite")


# On the command line ------------------------------------------------------------------------------------------------


def test_the_verb_runs_the_file_that_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE.format(name="same"))
    (tmp_path / "a.txt").write_text("The captain looked at the sea, and the sea looked at the captain.")
    options = ["--statistic", "mine.py:squares", "--statistic", "mine.py:same", "--json", "--out", "a.json"]
    assert main(["survey", "a.txt", *options]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[0])
    assert list(found["settings"]["statistics"]) == ["squares", "same"]
    assert found["heads"][3]["numbers"]["squares"] == headwise.Survey.load("a.json").heads[3]["squares"] > 0
    assert {row["number"] for row in found["evidence"]} >= {"squares", "same", "previous"}


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere.py:name", "expected FILE.py:NAME, and there is no file 'nowhere.py'"),
        ("mine.py", "expected FILE.py:NAME, and there is no file 'mine.py'"),
        ("mine.py:other", "'other' is not in mine.py; there are Statistic, squares, number, same"),
        ("mine.py:number", "number is 3; expected a headwise.weights.Reading"),
        ("broken.py:name", "broken.py raised ZeroDivisionError: division by zero"),
    ],
)
def test_files_without_the_statistic_are_refused(tmp_path, capsys, monkeypatch, place, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE.format(name="same"))
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "a.txt").write_text("The captain looked.")
    assert main(["survey", "a.txt", "--statistic", place]) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_result_with_evidence_is_refused(tiny, tmp_path):
    headwise.survey(tiny, texts=TEXTS[:2], out=tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    (tmp_path / "a.json").write_text(text.replace("captain", "Captain", 1))
    with pytest.raises(CheckpointError, match="its checksum does not match"):
        headwise.Survey.load(tmp_path / "a.json")
