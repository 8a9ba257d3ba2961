"""A survey either reads everything, or says what it lost; it never counts too little and calls that success.

Every call to the file system fails once, fails for good, or is the last one of the process (`faults.py`). The model is
a stand-in that counts tokens, so that hundreds of surveys take seconds.
"""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import headwise
from faults import READS, WRITES, Faults, in_child
from headwise import CheckpointError, HeadwiseError, OptionError
from headwise.cli import main
from headwise.models.text_model import TextModel, TokenCodec
from headwise.study.survey import disk
from headwise.study.survey.corpus import Corpus, open_corpus
from headwise.study.survey.documents import LongText
from headwise.study.survey.job import SurveyJob, evaluating, journal_folder
from headwise.study.survey.measures import LayerSums, Measures
from headwise.study.survey.passages import Quote, StrongQuery, WindowTexts
from headwise.study.survey.result import Survey
from survey_words import sentence

CONTEXT, BATCH = 13, 2
ERRORS = {"EIO": errno.EIO, "EMFILE": errno.EMFILE, "ESTALE": errno.ESTALE}
KINDS = ("txt", "jsonl", "parquet")


@pytest.fixture
def counting(monkeypatch):
    """A model of bytes, whose sums are the bytes that it read."""
    monkeypatch.setattr(disk, "WAITS", (0, 0))
    monkeypatch.setattr(disk, "BLOCK", 61)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a busy disk would take minutes

    def sums(measures, model, windows, context, known):
        fields = {"rows": [len(windows)], "sum": [sum(map(sum, windows))]}
        best = max(range(len(windows)), key=lambda i: (sum(windows[i]), -i))
        quote = Quote.of(0, 0, len(windows[best]), cross=False)
        found = StrongQuery(sum(windows[best]), 0.5, best, 0, 0, quote, tuple(windows[best]))
        return {"layer": LayerSums(fields, {(0, "sum"): [found]}, [WindowTexts(ids, ids) for ids in windows])}

    monkeypatch.setattr(Measures, "of", sums)
    monkeypatch.setattr(Survey, "heads", property(lambda self: ()))
    return TextModel("bytes", nn.Linear(1, 1), TokenCodec(lambda text: list(text.encode())), CONTEXT, CONTEXT)


def write_corpus(folder, kind, count=5):
    folder.mkdir(exist_ok=True)
    texts = [sentence(11 + 7 * i, i) for i in range(count)]
    if kind == "txt":
        for i, text in enumerate(texts[:3]):
            (folder / f"{i}.txt").write_text(text)
    elif kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"text": texts}), folder / "a.parquet", row_group_size=2)
    return folder


def survey(model, folder, out, **options):
    return SurveyJob.of(model, [folder], context=CONTEXT, batch=BATCH).run(out, every=0, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_one_error_at_any_read_changes_nothing(counting, tmp_path, kind, error):
    corpus = write_corpus(tmp_path / "corpus", kind)
    with Faults(corpus, READS) as calls:
        whole = survey(counting, corpus, None).to_dict()
    assert whole["counts"]["skipped"] == 0
    assert len(calls.calls) > 20
    for number in range(1, len(calls.calls) + 1):
        with Faults(corpus, READS, fail_at=number, error=error):
            assert survey(counting, corpus, None).to_dict() == whole, calls.calls[number - 1]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_that_last_lose_text_by_name_and_never_in_silence(counting, tmp_path, kind):
    corpus = write_corpus(tmp_path / "corpus", kind)
    with Faults(corpus, READS) as calls:
        whole = survey(counting, corpus, None)
    outcomes = {"lost": 0, "refused": 0}
    for number in range(1, len(calls.calls) + 1, 2):
        with Faults(corpus, READS, fail_at=number, times=10**6):
            try:
                found = survey(counting, corpus, None)
            except HeadwiseError as error:  # such as the folder itself
                assert "Input/output error" in str(error)  # noqa: PT017 - not every fault raises
                outcomes["refused"] += 1
                continue
        assert found.counts["tokens"] < whole.counts["tokens"]
        assert found.counts["skipped"] == sum(each.documents for each in found.skipped) > 0
        assert all("Input/output error" in each.reason for each in found.skipped)
        assert f"{found.counts['skipped']} skipped" in found.sentence
        outcomes["lost"] += 1
    assert outcomes["lost"] > 5


def test_a_lost_unit_leaves_the_others_as_they_are(counting, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(sentence(90, 1))
    job = SurveyJob.of(counting, [tmp_path / "a.txt"], context=CONTEXT, batch=BATCH)
    job.corpus.seal()
    good = [job.tally_of(unit).to_dict() for unit in range(len(job.corpus))]
    job.corpus.close()
    fetch = disk.SealedFile._fetch

    def failing(self, number):
        if number == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return fetch(self, number)

    monkeypatch.setattr(disk.SealedFile, "_fetch", failing)
    now = [job.tally_of(unit) for unit in range(len(job.corpus))]
    lost = [unit for unit, tally in enumerate(now) if tally.skipped]
    assert 1 <= len(lost) <= 3
    assert [tally.to_dict() for tally in now if not tally.skipped] == [x for i, x in enumerate(good) if i not in lost]
    (said,) = now[lost[0]].skipped
    assert re.fullmatch(r"bytes \d+ to \d+ cannot be read: Input/output error", said.reason)
    assert now[lost[0]].counts == {"skipped": 1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["removed", "unreadable"])
def test_files_that_vanish_while_it_runs_are_named(counting, tmp_path, monkeypatch, kind, fault):
    corpus = write_corpus(tmp_path / "corpus", kind)
    whole = survey(counting, corpus, None)
    seal = Corpus.seal

    def vanish(self):
        seal(self)
        for path in corpus.iterdir():
            if fault == "removed":
                path.unlink()

    monkeypatch.setattr(Corpus, "seal", vanish)
    faults = Faults(corpus, ("open",), only="nothing")
    if fault == "unreadable":
        with Faults(corpus, ("open",)) as calls:
            SurveyJob.of(counting, [corpus], context=CONTEXT, batch=BATCH).corpus.seal()
        faults = Faults(corpus, ("open",), fail_at=len(calls.calls) + 1, times=10**6, error=errno.EACCES)
    with faults:
        found = survey(counting, corpus, tmp_path / "out.json")
    assert found.counts["tokens"] < whole.counts["tokens"]
    assert found.counts["skipped"] == sum(each.documents for each in found.skipped) > 0
    reason = "No such file or directory" if fault == "removed" else "Permission denied"
    assert all(each.reason.endswith(reason) for each in found.skipped)
    assert {Path(each.file).name for each in found.skipped} == set(
        {"txt": ["0.txt", "1.txt", "2.txt"], "jsonl": ["a.jsonl"], "parquet": ["a.parquet"]}[kind]
    )
    saved = json.loads((tmp_path / "out.json").read_text())
    assert len(saved["skipped"]) == len(found.skipped)


def test_folders_links_and_pipes_that_are_not_read_are_named(tmp_path, counting, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus", "txt")
    (tmp_path / "elsewhere").mkdir()
    (corpus / "linked").symlink_to(tmp_path / "elsewhere")
    (corpus / "dangling.txt").symlink_to(tmp_path / "gone.txt")
    (corpus / "good.txt").symlink_to(corpus / "0.txt")
    (corpus / "locked").mkdir()
    (corpus / "locked" / "inside.txt").write_text("not seen")
    os.mkfifo(corpus / "pipe")
    with Faults(corpus, ("listdir", "scandir"), fail_at=1, times=99, error=errno.EACCES, only="locked"):
        found = survey(counting, corpus, None)
    assert {Path(each.file).name: each.reason for each in found.skipped} == {
        "dangling.txt": f"a link to {tmp_path}/gone.txt, which does not exist",
        "linked": "a link to a folder, which is not followed; name the folder itself",
        "locked": "this folder cannot be read: Permission denied",
        "pipe": "a pipe; expected a file or folder",
    }
    assert found.documents == 3
    with pytest.raises(OptionError, match="pipe: a pipe; expected a file or folder"):
        headwise.survey(counting, corpus / "pipe")


def test_a_text_that_changed_and_kept_its_length_is_surveyed_again(counting, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", "txt")
    out = tmp_path / "out.json"
    before = survey(counting, corpus, out)
    about = (corpus / "1.txt").stat()
    (corpus / "1.txt").write_text((corpus / "1.txt").read_text().replace("e", "o"))
    os.utime(corpus / "1.txt", ns=(about.st_atime_ns, about.st_mtime_ns))
    after = survey(counting, corpus, out, resume=True)
    assert after.tally.layers != before.tally.layers
    assert after.corpus[0].digest != before.corpus[0].digest


def test_a_text_that_changes_while_it_is_surveyed_ends_the_survey(counting, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", "txt")
    job = SurveyJob.of(counting, [corpus], context=CONTEXT, batch=BATCH)
    job.corpus.seal()
    (corpus / "0.txt").write_text((corpus / "0.txt").read_text().replace("e", "o"))
    with pytest.raises(OptionError, match=r"0\.txt has changed since the survey began"):
        job.tally_of(0)


def test_an_unfinished_survey_is_not_continued_with_a_text_of_other_content(counting, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", "txt")
    out = tmp_path / "out.json"
    assert in_child(lambda: killed(counting, corpus, out, 40)) == 9
    (corpus / "2.txt").write_text((corpus / "2.txt").read_text().replace("e", "o"))
    with pytest.raises(OptionError, match=r"2\.txt has changed"):
        survey(counting, corpus, out, resume=True)


def killed(model, corpus, out, number):
    with Faults(out.parent, kill_at=number, only="out"):
        survey(model, corpus, out, resume=True)


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_a_process_that_dies_at_any_call_leaves_a_survey_that_can_be_resumed(counting, tmp_path, suffix):
    corpus = write_corpus(tmp_path / "corpus", "jsonl", 2)
    whole, out = tmp_path / f"whole.{suffix}", tmp_path / f"out.{suffix}"
    survey(counting, corpus, whole)
    number = 0
    while True:
        number += 1
        status = in_child(lambda number=number: killed(counting, corpus, out, number))
        if out.exists():
            assert out.read_bytes() == whole.read_bytes()  # never half of a result
        if status == 0:
            break
        assert status == 9
        survey(counting, corpus, out, resume=True)
        assert out.read_bytes() == whole.read_bytes()
        assert not [path for path in tmp_path.iterdir() if "journal" in path.name]
        out.unlink()
        for path in tmp_path.glob(".out*.part"):
            path.unlink()
    assert number > 40


@pytest.mark.parametrize("suffix", ["json", "parquet"])
@pytest.mark.parametrize("times", [1, 10**6], ids=["once", "for good"])
def test_an_error_at_any_write_is_survived_or_told_and_resumed(counting, tmp_path, suffix, times):
    corpus = write_corpus(tmp_path / "corpus", "jsonl")
    whole, out = tmp_path / f"whole.{suffix}", tmp_path / f"out.{suffix}"
    survey(counting, corpus, whole)
    kinds = ("open", *WRITES)
    with Faults(tmp_path, kinds, only="out") as calls:
        survey(counting, corpus, out)
    assert len(calls.calls) > 40
    for number in range(1, len(calls.calls) + 1):
        out.unlink(missing_ok=True)
        with Faults(tmp_path, kinds, fail_at=number, times=times, error=errno.ENOSPC, only="out"):
            try:
                survey(counting, corpus, out)
            except HeadwiseError as error:
                assert times > 1
                assert "No space left on device" in str(error)  # noqa: PT017
            else:
                assert times == 1
        if times > 1:
            survey(counting, corpus, out, resume=True)
        assert out.read_bytes() == whole.read_bytes()
        assert not journal_folder(out).exists()


def test_the_result_is_on_disk_before_a_journal_is_deleted(counting, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", "jsonl")
    out = tmp_path / "out.parquet"
    with Faults(tmp_path, ("open", *WRITES)) as calls:
        survey(counting, corpus, out)
    names = [(name, Path(path).name) for name, path in calls.calls]
    written = max(i for i, (name, path) in enumerate(names) if name == "replace" and path.startswith(".out.parquet."))
    assert names[written - 1][0] == "fsync"  # the file, then its name in the folder
    assert names[written + 1 : written + 3] == [("open", tmp_path.name), ("fsync", tmp_path.name)]
    removed = min(i for i, call in enumerate(names) if call[0] == "rename")
    assert removed > written + 2


def test_a_changed_digit_in_a_journal_or_a_result_is_noticed(counting, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", "jsonl")
    out = tmp_path / "out.json"
    assert in_child(lambda: killed(counting, corpus, out, 50)) == 9
    journal = journal_folder(out) / "0.json"
    good = journal.read_text()
    for old, new in (('"tokens": ', '"tokens": 1'), ('"rows": [', '"rows": [2'), ('"done": [[0', '"done": [[1')):
        assert old in good
        journal.write_text(good.replace(old, new, 1))
        with pytest.raises(CheckpointError, match=r"0\.json is damaged \(its checksum does not match\)\. Delete it"):
            survey(counting, corpus, out, resume=True)
    journal.write_text(good)
    survey(counting, corpus, out, resume=True)
    out.write_text(out.read_text().replace('"rows": [\n', '"rows": [\n 3,', 1))
    with pytest.raises(CheckpointError, match=r"out\.json is damaged: its checksum does not match"):
        Survey.load(out)


def test_a_strict_survey_ends_at_the_first_loss_and_goes_on_when_it_is_repaired(counting, tmp_path, monkeypatch):
    corpus, out = write_corpus(tmp_path / "corpus", "txt"), tmp_path / "out.json"
    survey(counting, corpus, tmp_path / "whole.json")
    seal = Corpus.seal

    def vanish(self):
        seal(self)
        shutil.move(corpus / "2.txt", tmp_path / "2.txt")

    def strict(**options):
        job = SurveyJob.of(counting, [corpus], context=CONTEXT, batch=BATCH, strict=True)
        return job.run(out, every=1000, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "seal", vanish)
        with pytest.raises(
            OptionError, match=r"2\.txt: .*No such file or directory\. Without --strict, the survey skips"
        ):
            strict()
    assert not out.exists()
    shutil.move(tmp_path / "2.txt", corpus / "2.txt")
    strict(resume=True)
    assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_the_command_fails_when_something_is_skipped_unless_that_is_allowed(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("The captain looked at the sea.")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    command = ["survey", str(tmp_path), "--context", "16", "--json"]
    assert main(command) == 3
    told, chatter = capsys.readouterr()
    assert [Path(each["file"]).name for each in json.loads(told)["skipped"]] == ["gone.txt"]
    assert "1 document was skipped, so the exit status is 3 (--allow-skips: 0)" in chatter
    assert main([*command, "--allow-skips"]) == 0
    assert main([*command, "--strict"]) == 2
    assert "gone.txt: a link to" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["folder.json", "corpus.parquet"])
def test_a_result_that_cannot_be_written_is_refused_before_anything_is_read(counting, tmp_path, name, monkeypatch):
    (tmp_path / "folder.json").mkdir()
    write_corpus(tmp_path / "corpus", "parquet")
    shutil.copy(tmp_path / "corpus" / "a.parquet", tmp_path / "corpus.parquet")
    monkeypatch.setattr("headwise.study.survey.corpus.Corpus.seal", None)
    with pytest.raises(OptionError, match=r"is a folder; expected|is one of the files to survey"):
        survey(counting, tmp_path / "corpus.parquet", tmp_path / name)


def test_every_part_of_a_model_is_in_its_own_mode_again_whatever_happens():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Dropout(), nn.Linear(3, 2))).train()
    model[1][0].eval()
    modes = [each.training for each in model.modules()]

    def interrupted():
        with evaluating(model):
            assert not any(each.training for each in model.modules())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [each.training for each in model.modules()] == modes


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_long_document_is_read_in_passages_and_never_held_as_a_whole(tmp_path, monkeypatch, kind):
    for module in ("lines", "table"):
        monkeypatch.setattr(f"headwise.study.survey.documents.{module}.LONG", 50)
    text = 'The captain said: "Größe 漢字 😀"\\ and\tthen\n' * 9
    records = [{"id": i, "text": text[: 30 + 90 * i], "more": {"text": [1, {"text": None}]}} for i in range(4)]
    if kind == "jsonl":
        lines = [json.dumps(record, ensure_ascii=i % 2 == 0) for i, record in enumerate(records)]
        (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = arrow.table({"text": [record["text"] for record in records]})
        parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    corpus = open_corpus([tmp_path / f"a.{kind}"], 70, "text")
    found = []
    for unit in range(len(corpus)):
        for document in corpus.read(unit):
            parts = list(document.parts(70))
            assert isinstance(document.text, LongText) == (len(found) > 0 or kind == "jsonl")
            assert all(len(part.encode()) <= 140 for part in parts)
            found.append("".join(parts))
    assert found == [record["text"] for record in records]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "%s', "no whole character of a string"),
        ('{"text": "%s"} x', "more data at byte"),
        ('{"text": ["%s"]}', "not text but list"),
        ('{"text": "%s", "text": null}', "not text but null"),
        ('{"body": "%s", "text": 1.5}', "not text but a number"),
        ('{"body": "%s"}', "no field 'text' (found: 'body'); choose one with --column"),
        ('["%s"]', "not a JSON object"),
        ('{"text": "%s\\ud800"}', "no whole character"),
        ('{"text": "%s\\x01"}', "no whole character"),
        ('{"a": ' + "[" * 600 + ', "text": "%s"}', "more than 500 brackets are open"),
        ('{"text": "%s",}', 'expected "'),
        ('{"text": "%s", "n": ' + "9" * 9000 + "}", "expected a value"),
        ("{%s", 'expected "'),
    ],
)
def test_a_long_line_that_is_no_document_is_named(tmp_path, monkeypatch, line, reason):
    for module in ("lines", "table"):
        monkeypatch.setattr(f"headwise.study.survey.documents.{module}.LONG", 50)
    line = (line % ("x" * 60)).replace("\\x01", "\x01")
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
    corpus = open_corpus([tmp_path / "a.jsonl"], 10**6, "text")
    good, bad = corpus.read(0)
    assert good.text == "good"
    assert bad.line == 2
    assert reason in bad.reason


def test_long_lines_are_understood_as_the_json_module_understands_them(tmp_path):
    import random

    from headwise.study.survey.documents import long_json

    draw = random.Random(1)  # noqa: S311

    def value(depth):
        kind = draw.randrange(8)
        if kind == 0 and depth < 3:
            return [value(depth + 1) for _ in range(draw.randrange(4))]
        if kind == 1 and depth < 3:
            return {draw.choice(["text", "a", 'ü"', ""]): value(depth + 1) for _ in range(draw.randrange(4))}
        if kind == 2:
            return draw.choice([1, -2.5e30, 0, True, False, None, float("nan"), float("-inf")])
        return "".join(draw.choice('ab "\\/\n\t é漢😀\x7f') for _ in range(draw.randrange(40)))

    for _ in range(1000):
        record = {name: value(0) for name in draw.sample(["x", "text", "zé"], draw.randrange(4))}
        line = bytearray(json.dumps(record, ensure_ascii=draw.random() < 0.5).encode())
        if draw.random() < 0.4:
            line[draw.randrange(len(line))] = draw.randrange(256)
        try:
            truth = json.loads(bytes(line).decode()).get("text")
        except (ValueError, AttributeError):
            truth = None
        if isinstance(truth, str) and re.search("[\ud800-\udfff]", truth):
            continue  # half a character, which is refused

        def read(start, stop, line=line):
            return bytes(line[start:stop])

        found = long_json.find_text(read, 0, len(line), "text")
        assert isinstance(found, long_json.TextPlace) == isinstance(truth, str), bytes(line)
        if isinstance(truth, str):
            scanner = long_json._Scanner(read, found.start, len(line), block=draw.choice([1, 2, 3, 7]))
            assert b"".join(scanner.string()).decode() == truth
            assert (found.size, found.blank) == (len(truth.encode()), not truth.strip())


def test_the_modes_and_the_model_are_restored_when_a_survey_fails(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout()).train()
    model[0].eval()
    text_model = TextModel("model", model, TokenCodec(lambda text: list(text.encode())), CONTEXT, CONTEXT)

    def broken(*arguments):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Measures, "of", broken)
    with pytest.raises(torch.OutOfMemoryError):
        headwise.survey(text_model, texts=["a text"])
    assert [each.training for each in model] == [False, True]
