"""`headwise survey`: exit statuses, what is printed where."""

import json

import pytest

from headwise.cli import main
from headwise.study.survey.job import ProgressLine, _duration


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("The captain looked at the sea.")
    (tmp_path / "b.jsonl").write_text('{"text": "It was late."}\n{broken\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_read_is_0_and_some_skipped_is_3(corpus, capsys):
    assert main(["survey", "a.txt"]) == 0
    assert main(["survey", "a.txt", "b.jsonl"]) == 3
    told = capsys.readouterr()
    assert "b.jsonl:2: not JSON: Expecting property name" in told.out
    assert "1 document was skipped" in told.err
    assert main(["survey", "a.txt", "b.jsonl", "--skipped-is-fine"]) == 0


def test_results_go_to_standard_output_and_to_files(corpus, capsys):
    options = ["--context", "64", "--out", "s.parquet", "--html", "s.html", "--json"]
    assert main(["survey", "a.txt", *options]) == 0
    out, chatter = capsys.readouterr()
    told = json.loads(out.splitlines()[0])
    assert told["counts"]["documents"] == 1
    assert len(told["heads"]) == 56
    assert "100 % · 1 document ·" in chatter
    assert "wrote s.parquet" in chatter
    assert "What the attention heads of the built-in model do" in (corpus / "s.html").read_text()
    assert main(["survey", "a.txt", "--context", "64", "--out", "s.parquet", "--resume", "--all"]) == 0
    assert capsys.readouterr().out.count("\n") > 56


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt"], "nowhere.txt: there is no such file or folder"),
        (["a.txt", "--model", "nowhere"], "there is no folder nowhere"),
        (["a.txt", "--out", "s.csv"], "ends in .json or .parquet"),
        (["a.txt", "--context", "0"], "context=0"),
        (["a.txt", "--threads", "0"], "--threads 0: expected 1 or more"),
        (["a.txt", "--device", "nothing"], "--device nothing"),
        (["a.txt", "--html", "nowhere/s.html"], "--html nowhere/s.html"),
    ],
)
def test_what_cannot_be_done_is_2_in_words(corpus, arguments, message, capsys):
    assert main(["survey", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_several_processes_need_a_result_file(corpus, capsys, monkeypatch):
    from headwise.study.survey.job import Processes

    processes = Processes()
    processes.size = 2
    monkeypatch.setattr("headwise.cli.survey.processes_from_environment", lambda: processes)
    assert main(["survey", "a.txt"]) == 2
    assert "several processes need --out" in capsys.readouterr().err


class Terminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_a_terminal_has_one_line_that_is_written_over(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("headwise.study.survey.job.time.monotonic", lambda: now[0])
    stream = Terminal()
    progress = ProgressLine(1000, 100, stream)
    progress.show(10, 1, 1)
    assert stream.text == ""
    now[0] = 10.0
    progress.show(300, 5000, 3)
    progress.show(900, 7000, 4, last=True)
    first, second = stream.text.split("\r\033[K")[1:]
    assert first == "40 % · 3 documents · 5,000 tokens, 500 per second · about 20 s left"
    assert second == "100 % · 4 documents · 7,000 tokens, 700 per second\n"
    assert [_duration(x) for x in (7, 130, 9000)] == ["7 s", "2 min", "2.5 h"]


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_a_time_between_saves_that_is_no_time_is_refused(corpus, seconds, capsys):
    assert main(["survey", "a.txt", "--save-every", seconds]) == 2
    assert f"--save-every {seconds}: expected a non-negative number of seconds" in capsys.readouterr().err


def test_a_character_of_several_tokens_is_quoted_once(corpus, capsys):
    (corpus / "tokyo.txt").write_text("東京の海は青い。東京の海は青い。", encoding="utf-8")
    assert main(["survey", "tokyo.txt"]) == 0
    quotes = [line for line in capsys.readouterr().out.splitlines() if "京" in line]
    assert quotes
    assert not any("東東" in line.translate(str.maketrans("", "", "[]{}")) for line in quotes)
