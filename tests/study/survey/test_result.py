"""A survey on disk is the survey; surveys merged are one survey of all documents."""

import copy
import json
import re

import pytest
import torch

import headwise
from headwise import CheckpointError, MissingExtraError, OptionError
from headwise.errors import install_command
from headwise.models import LanguageModel
from headwise.view.terminal import KIND_LETTERS
from headwise.weights.summary import KINDS


@pytest.fixture(scope="module")
def survey(tiny):
    from survey_words import sentence

    return headwise.survey(tiny, texts=[sentence(9 + i, i) for i in range(7)] + ["", "<script>&"], context=31)


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_a_survey_comes_back_from_disk_with_all_numbers(survey, tmp_path, suffix):
    path = tmp_path / f"survey.{suffix}"
    survey.save(path)
    again = headwise.Survey.load(path)
    assert again.to_dict() == survey.to_dict()
    assert again.tally.to_dict() == survey.tally.to_dict()
    again.save(tmp_path / f"again.{suffix}")
    assert (tmp_path / f"again.{suffix}").read_bytes() == path.read_bytes()


def test_the_table_on_disk_has_a_row_per_head_and_a_column_per_number(survey, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    survey.save(tmp_path / "survey.parquet")
    rows = parquet.read_table(tmp_path / "survey.parquet").to_pylist()
    assert [(row["layer"], row["head"]) for row in rows] == [(head.layer, head.head) for head in survey.heads]
    head = survey.heads[4]
    assert rows[4]["previous"] == head["previous"]
    assert rows[4]["without_first_previous_std"] == head.std["without_first previous"]
    assert rows[4]["entropy_spread"] == head.spread["entropy"]
    assert rows[4]["histogram"] == list(head.histogram)
    assert rows[4]["reading"] == head.reading


def test_merged_surveys_are_the_survey_of_all_documents_in_any_order(tiny, texts, tmp_path):
    short = [text for text in texts if len(text) < 300]
    parts = [headwise.survey(tiny, texts=short[i::3], context=31, batch=1) for i in range(3)]
    whole = headwise.survey(tiny, texts=short, context=31, batch=1)
    first, second = parts[0].merge(*parts[1:]), parts[2].merge(parts[0]).merge(parts[1])
    assert first.heads == second.heads == whole.heads
    assert first.counts == whole.counts
    first.save(tmp_path / "first.json")
    second.save(tmp_path / "second.json")
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()


def test_merging_what_does_not_belong_together_is_refused(tiny, survey):
    with pytest.raises(OptionError, match="merge: texts is in two of the surveys, and would count twice"):
        survey.merge(survey)
    with pytest.raises(OptionError, match="surveys with context 31 and 37; expected one model, one context"):
        survey.merge(headwise.survey(tiny, texts=["other"], context=37))
    other = LanguageModel(copy.deepcopy(tiny.gpt).double(), tiny.tokenizer)
    with pytest.raises(OptionError, match="surveys with fingerprint"):
        survey.merge(headwise.survey(other, texts=["other"], context=31))


def test_the_text_has_a_letter_for_every_head_the_clearest_ones_and_what_was_skipped(survey):
    text = str(survey)
    assert text.startswith("2 layers × 3 heads · 8 documents, 1 skipped")
    assert "texts:8: empty" in text
    rows = [line.split() for line in text.splitlines() if line[:7] in ("    0  ", "    1  ")]
    assert [row[-1] for row in rows] == ["blocks.0.attention", "blocks.1.attention"]
    assert [len(row) for row in rows] == [5, 5]
    assert {sign.lower() for row in rows for sign in row[1:-1]} <= set(KIND_LETTERS.values())
    assert repr(survey).startswith("Survey(2 layers")


def test_every_kind_of_head_has_a_letter_of_its_own():
    assert set(KIND_LETTERS) == {*KINDS, "mixed"}
    assert len(set(KIND_LETTERS.values())) == len(KIND_LETTERS)


def test_the_page_has_every_head_and_shows_text_as_text(survey):
    survey.settings["model"], before = "<b>", survey.settings["model"]
    page = survey.to_html()
    survey.settings["model"] = before
    assert "<script" not in page
    assert "Survey of &lt;b&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    for head in survey.placed:
        assert f'id="{head.place}"' in page
        assert head.summary.reading in page
    assert "texts:8" in page


def test_a_corpus_in_which_nothing_can_be_read_makes_a_survey_of_nothing(tiny, tmp_path):
    survey = headwise.survey(tiny, texts=["", " "], context=31)
    assert survey.heads == ()
    assert str(survey).startswith("0 documents, 2 skipped")
    assert "0 documents" in survey.to_html()
    survey.save(tmp_path / "survey.parquet")
    survey.save(tmp_path / "survey.json")
    assert headwise.Survey.load(tmp_path / "survey.parquet").counts == survey.counts
    assert headwise.Survey.load(tmp_path / "survey.json").counts == survey.counts


def test_other_files_are_refused(tmp_path, survey):
    with pytest.raises(OptionError, match="No such file"):
        headwise.Survey.load(tmp_path / "nothing.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not a survey that headwise wrote"):
        headwise.Survey.load(tmp_path / "other.json")
    (tmp_path / "other.json").write_text(json.dumps({"format": "headwise survey 99"}))
    with pytest.raises(CheckpointError, match="'headwise survey 99'; this version reads 'headwise survey 3'"):
        headwise.Survey.load(tmp_path / "other.json")
    (tmp_path / "other.parquet").write_text("no table")
    with pytest.raises(CheckpointError, match="is not a survey that headwise wrote"):
        headwise.Survey.load(tmp_path / "other.parquet")
    with pytest.raises(OptionError, match=r"there are layers \['blocks.0.attention', 'blocks.1.attention'\]"):
        survey.head(7, 0)


def test_without_pyarrow_tables_name_the_extra_before_anything_is_surveyed(survey, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_text("")
    message = re.escape(f"Parquet files need pyarrow. Install it with: {install_command('survey')}")
    with pytest.raises(MissingExtraError, match=message):
        survey.save(tmp_path / "survey.parquet")
    with pytest.raises(MissingExtraError, match=message):
        headwise.survey("builtin", tmp_path)
    survey.save(tmp_path / "survey.json")


def test_a_mean_of_whole_numbers_is_rounded_once():
    from headwise.study.survey.result import _deviation, _share
    from headwise.study.survey.tally import as_integers

    numbers = torch.tensor([0.1, 0.7, 0.25], dtype=torch.float64)
    sums, squares = (sum(as_integers(x)) for x in (numbers, numbers.square()))
    assert _share(sums, 3) == pytest.approx(0.35, rel=1e-15)
    assert _deviation(sums, squares, 3) == pytest.approx(numbers.std(correction=0).item(), rel=1e-14)
    far = (
        as_integers(torch.tensor([1e6] * 2, dtype=torch.float64)),
        as_integers(torch.tensor([1e12] * 2, dtype=torch.float64)),
    )
    assert _deviation(sum(far[0]), sum(far[1]), 2) == 0.0
