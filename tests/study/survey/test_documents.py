"""Every document is read once, whatever the file and however it is cut; what cannot be read is named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise import OptionError
from headwise.study.survey.corpus import open_corpus, text_corpus
from headwise.study.survey.documents import lines, passages
from headwise.study.survey.tally import Skipped


def read(*paths, step=64, column="text"):
    corpus = open_corpus(paths, step, column)
    found = [each for unit in range(len(corpus)) for each in corpus.read(unit)]
    bad = [(each.place.rpartition("/")[2], each.reason) for each in found if isinstance(each, Skipped)]
    return [each for each in found if not isinstance(each, Skipped)], bad


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.integers(4, 40))
def test_passages_put_together_are_the_text(text, step):
    found = list(passages(text, step))
    assert "".join(found) == text
    assert all(len(passage.encode()) <= 2 * step for passage in found)


def test_a_text_is_parted_at_the_end_of_a_line_or_else_before_a_space():
    assert list(passages("one two\nthree four", 11)) == ["one two\n", "three four"]
    assert list(passages("aaa bbb ccc ddd eee fff", 12)) == ["aaa bbb ccc", " ddd eee fff"]
    assert list(passages("漢字漢字", 7)) == ["漢字", "漢字"]


@pytest.mark.parametrize("step", [7, 64, 10**6])
def test_a_text_file_is_one_document_in_passages(tmp_path, step):
    text = "Größe und Maß — 漢字 ☃\n" * 9
    (tmp_path / "a.txt").write_text("\ufeff" + text, encoding="utf-8")
    found, bad = read(tmp_path / "a.txt", step=step)
    assert "".join(document.text for document in found) == text
    assert [document.number for document in found] == list(range(found[0].passages))
    assert bad == []


@pytest.mark.parametrize("step", [1, 5, 23, 1000])
def test_every_line_is_read_once_wherever_units_begin(tmp_path, step):
    texts = ["x" * (i % 13 + 1) + str(i) for i in range(31)]
    records = [json.dumps({"text": text}) + ("\r\n" if i % 3 else "\n\n") for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "".join(records).rstrip(), encoding="utf-8")
    found, bad = read(tmp_path / "a.jsonl", step=step)
    assert [document.text for document in found] == texts
    assert bad == []


def test_bad_lines_are_named_with_their_number_and_the_others_read(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST", 200)
    rows = [
        b'{"text": "good"}',
        b"{broken",
        b"[1]",
        b'{"body": "x"}',
        b'{"text": 5}',
        b'{"text": null}',
        b'{"text": " "}',
    ]
    rows += [b'{"text": "\xff"}', b"", b'{"text": "\\ud800"}', b"[" * 150, b'{"text": "good too"}']
    rows.append(b'{"text": "' + b"x" * 300 + b'"}')
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows))
    for step in (9, 10**6):
        found, bad = read(tmp_path / "a.jsonl", step=step)
        assert [document.text for document in found] == ["good", "good too"]
        assert [place for place, _ in bad] == [f"a.jsonl:{n}" for n in (2, 3, 4, 5, 6, 7, 8, 10, 11, 13)]
        reasons = [reason for _, reason in bad]
        assert reasons[0].startswith("not JSON: Expecting property name")
        assert reasons[1] == "not a JSON object but a list"
        assert reasons[2] == "no field 'text' (found: 'body'); choose one with --column"
        assert reasons[3:6] == ["not text but int", "not text but null", "empty"]
        assert "not UTF-8 text: invalid start byte" in reasons[6]
        assert "lone surrogate" in reasons[7]
        assert "the limit is 200" in reasons[9]


def test_a_line_nested_too_deeply_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("[" * 200_000)
    found, bad = read(tmp_path / "a.jsonl", step=10**6)
    assert found == []
    assert bad[0][1].startswith("not readable JSON: ")


def test_files_that_are_no_text_are_named_and_the_others_read(tmp_path):
    (tmp_path / "binary").write_bytes(b"ab\0cd")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.txt").write_text(" \n\t\n")
    (tmp_path / "latin.txt").write_bytes(("ok\n" * 40).encode() + "Größe".encode("latin-1") + b"\n" + b"x" * 999)
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / ".hidden").write_text("not read")
    found, bad = read(tmp_path)
    assert [document.text for document in found] == ["good"]
    assert bad == [
        ("binary", "binary: a zero at byte 2"),
        ("blank.txt", "empty: only white space"),
        ("empty.txt", "empty"),
        ("latin.txt:41", "not UTF-8 text: invalid start byte at byte 122"),
    ]


def test_a_character_cut_in_two_by_the_reading_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.setattr("headwise.study.survey.disk.BLOCK", 7)
    (tmp_path / "a.txt").write_text("漢字" * 20)
    assert read(tmp_path / "a.txt")[1] == []
    (tmp_path / "b.txt").write_bytes(("漢字" * 20).encode() + b"\xe6\xbc")
    assert read(tmp_path / "b.txt")[1] == [("b.txt:1", "not UTF-8 text: unexpected end of data at byte 120")]


@pytest.mark.parametrize("step", [5, 60, 10**6])
def test_every_row_of_a_table_is_read_once_wherever_units_begin(tmp_path, step):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = ["y" * (i % 17 + 1) + str(i) for i in range(53)]
    table = arrow.table({"id": list(range(53)), "body": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=19)
    corpus = open_corpus([tmp_path / "a.parquet"], step, "body")
    assert [document.text for unit in range(len(corpus)) for document in corpus.read(unit)] == texts
    backwards = [[document.text for document in corpus.read(unit)] for unit in reversed(range(len(corpus)))]
    assert [text for unit in reversed(backwards) for text in unit] == texts


def test_bad_tables_and_bad_rows_are_named_and_the_others_read(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["one", None, "", "two"]}), tmp_path / "a.parquet")
    parquet.write_table(arrow.table({"body": ["x"]}), tmp_path / "b.parquet")
    parquet.write_table(arrow.table({"text": [1.5]}), tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    many = arrow.table({"text": [f"{i} " * 50 for i in range(40)]})
    parquet.write_table(many, tmp_path / "e.parquet", row_group_size=20, compression=None, use_dictionary=False)
    damaged = bytearray((tmp_path / "e.parquet").read_bytes())
    start = parquet.read_metadata(tmp_path / "e.parquet").row_group(1).column(0).data_page_offset
    damaged[start : start + 40] = b"\xff" * 40
    (tmp_path / "e.parquet").write_bytes(damaged)
    parquet.write_table(arrow.table({"text": arrow.array([], arrow.string())}), tmp_path / "f.parquet")
    found, bad = read(tmp_path, step=10**6)
    assert [document.text for document in found] == ["one", "two", *(f"{i} " * 50 for i in range(20))]
    assert [place for place, _ in bad] == [
        "a.parquet:2", "a.parquet:3", "b.parquet", "c.parquet", "d.parquet", "e.parquet:21", "f.parquet"
    ]  # fmt: skip
    reasons = [reason for _, reason in bad]
    assert reasons[:2] == ["not text but null", "empty"]
    assert reasons[2] == "no column 'text' (found: body); choose one with --column"
    assert reasons[3] == "column 'text' is not text but double"
    assert reasons[4].startswith("cannot be read as Parquet: ")
    assert reasons[5].startswith("20 rows from here cannot be read: ")
    assert reasons[6] == "empty: no rows"


def test_a_file_named_twice_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("once")
    assert len(read(tmp_path, tmp_path / "a.txt")[0]) == 1


def test_a_file_that_changes_during_a_survey_ends_it(tmp_path):
    (tmp_path / "a.txt").write_text("before")
    corpus = open_corpus([tmp_path], 64, "text")
    (tmp_path / "a.txt").write_text("before and after")
    with pytest.raises(OptionError, match="had 6 bytes when the survey began and has 16 now"):
        list(corpus.read(0))


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(OptionError, match="nowhere: there is no such file or folder"):
        open_corpus([tmp_path / "nowhere"], 64, "text")
    with pytest.raises(OptionError, match="there are no files in this folder"):
        open_corpus([tmp_path], 64, "text")
    with pytest.raises(OptionError, match=r"texts=\[\]: expected at least one"):
        text_corpus([], 64)
    with pytest.raises(OptionError, match="there are no documents"):
        open_corpus([], 64, "text")


def test_texts_in_memory_come_in_groups_and_wrong_ones_are_named():
    corpus = text_corpus(["a" * 30, "b" * 50, 7, "c"], 64)
    assert len(corpus) == 2
    found = [each for unit in range(2) for each in corpus.read(unit)]
    assert [each.text[0] if not isinstance(each, Skipped) else each.place for each in found] == [
        "a",
        "b",
        "texts:3",
        "c",
    ]
