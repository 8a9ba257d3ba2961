import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from headwise import cli
from headwise.cli import VERBS, console, main, module_of, tour

EXAMPLES = [
    line.strip()
    for text in (cli.EXAMPLES, *(module_of(verb).EXAMPLES for verb in VERBS))
    for line in text.replace("\\\n", "").splitlines()
    if line.startswith("  headwise ")
]


@pytest.fixture
def examples_files(tmp_path, monkeypatch):
    """The files that examples of the help name."""
    from safetensors.torch import save_file

    save_file(torch.nn.TransformerEncoderLayer(16, 4, 8).state_dict(), tmp_path / "model.safetensors")
    root = Path(__file__).parents[2]
    shutil.copytree(root / "examples", tmp_path / "examples")
    shutil.copy(root / "benchmarks" / "results" / "bench-cpu.json", tmp_path / "bench.json")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "sea.txt").write_text("The captain looked at the sea, and the sea looked at the captain.")
    (tmp_path / "corpus.jsonl").write_text('{"text": "It was a dark evening in November."}\n')
    monkeypatch.setattr(tour.measure, "__defaults__", ((2, 37, 60, 12), 3))  # the test of the tour has the real size
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.usefixtures("examples_files")
def test_examples_of_the_help_run(example, capsys):
    program, *arguments = shlex.split(example)
    assert program == "headwise"
    assert main(arguments) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_in_the_examples(verb, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    assert capsys.readouterr().out.endswith(module_of(verb).EXAMPLES)


@pytest.mark.parametrize("verb", VERBS)
def test_help_names_defaults_once_and_only_where_there_are_some(verb, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert not re.search(r"\(default: (None|False|\[\]|==SUPPRESS==)\)|\) \(default:", out)
    assert ("(default: 0.95)" in out) == (verb == "generate")


def test_tour_shows_steps_agreement_masks_and_speed(capsys, monkeypatch):
    size, _ = tour.measure.__defaults__
    monkeypatch.setattr(tour.measure, "__defaults__", (size, 2))  # two rounds at the size that users get
    assert main(["tour"]) == 0
    out = capsys.readouterr().out
    for word in ("READ", "RUN", "MASKS", "SPEED"):
        assert word in out
    assert re.search(r"7 +softmax +weights +\(1, 3, 6, 6\)", out)


def test_tour_fits_into_eighty_columns(capsys, monkeypatch):
    monkeypatch.setattr(tour.measure, "__defaults__", ((2, 37, 60, 12), 2))
    assert main(["tour", "--tokens", "12", "--width", "24"]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80


def test_tour_as_json_holds_what_the_text_shows(capsys):
    assert main(["tour", "--json", "--no-speed", "--tokens", "5", "--width", "6", "--heads", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [step["number"] for step in told["steps"]] == list(range(1, 11))
    assert told["steps"][6]["shapes"] == {"weights": [1, 2, 5, 5]}
    for row in told["agreement"]:
        assert row["error"]["headwise"] <= 2 * row["error"]["plain"] + 1e-6
    assert told["speed"] is None


@pytest.mark.parametrize("arguments", [["--heads", "5"], ["--tokens", "0"], ["--width", "-3"]], ids=str)
def test_bad_sizes_end_with_words_and_status_two(arguments, capsys):
    assert main(["tour", "--no-speed", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("headwise tour: ")
    assert captured.out == ""


def test_help_of_the_command_ends_in_examples(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert capsys.readouterr().out.endswith(cli.EXAMPLES)


def test_no_verb_prints_help_and_ends_with_two(capsys):
    assert main([]) == 2
    assert "tour" in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "shown"), [(60.0, []), (0.0, ["starting ...", "masks ...", ""])])
def test_progress_is_shown_only_after_a_while(seconds, shown, monkeypatch):
    texts = []
    monkeypatch.setattr(console, "status", texts.append)
    with console.late_status(seconds) as tell:
        deadline = time.monotonic() + 5
        while shown and not texts and time.monotonic() < deadline:
            time.sleep(0.001)
        tell("masks")
    assert texts == shown


def test_module_runs_as_a_program():
    result = subprocess.run([sys.executable, "-m", "headwise", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("headwise 0.1.0, torch ")


MISTYPED = {
    "viwe": "no command is called 'viwe'. Did you mean view?",
    "chek mine.py": "no command is called 'chek'. Did you mean check? All of them: headwise --help.",
    "interview": "Did you mean headwise course --interview?",
    "hint": "Did you mean headwise course --hint or headwise quiz --hint?",
    "help viwe": "Did you mean view?",
    "--vresion": "there is no option --vresion. Did you mean --version?",
    "course --interveiw": "there is no option --interveiw. Did you mean --interview?",
    "view --modle x": "headwise view: there is no option --modle. Did you mean --model?",
    "view -json hi": "there is no option -json. Did you mean --json?",
    "inspect --haeds=4": "there is no option --haeds. Did you mean --heads?",  # not: the file is missing
    "check --plan": "there is no option --plan. headwise check --help explains those above.",
    "cost --dtype float3": "there is no 'float3'. Did you mean float32? Known: float32,",
    "view --layer x hi": "argument --layer: 'x' is not a whole number.",
    "quiz --folder": "argument --folder: expected one argument",
    "course splitt": "no exercise is called 'splitt'. Did you mean split-and-merge?",
    "heads bultin": "there is no folder bultin; expected",
    "trace bultin hello": "Nothing is downloaded. Did you mean builtin?",
    "generate hello --model bultin": "Did you mean builtin?",
    "quiz more words": "unexpected argument 'more words'.",
    "steps The quick brown fox": "unexpected argument 'quick brown fox'. Put a text in quotes",
}


def status_of(arguments):
    """The exit status of a command, which argparse gives in its own way."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("line", MISTYPED)
def test_a_mistyped_name_gets_the_usage_of_its_command_and_the_nearest_name(line, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert status_of(line.split()) == 2
    captured = capsys.readouterr()
    assert MISTYPED[line] in captured.err
    assert captured.out == ""
    usage = re.search(r"usage: (headwise( [a-z]+)?) ", captured.err)
    assert usage is None or usage[1].split()[1:] == [word for word in line.split()[:1] if word in VERBS]
    assert (usage is None) != ("option" in MISTYPED[line] or "argument" in MISTYPED[line] or "float3" in line)


@pytest.mark.parametrize("verb", ["", "view"])
def test_help_followed_by_a_command_is_its_help(verb, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["help", *verb.split()])
    helped = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main([*verb.split(), "--help"])
    assert helped == capsys.readouterr().out


def test_options_stand_before_between_and_after_other_arguments(capsys):
    words = ["builtin", "One, two. One, two. One,"]
    answers = []
    for line in ([*words, "--new", "2"], [words[0], "--new=2", words[1]], ["--new", "2", *words]):
        assert main(["trace", *line, "--draws", "1", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1] == answers[2]


def test_a_text_that_begins_with_a_dash_follows_two_dashes(capsys):
    assert main(["view", "--json", "--", "--modle is not an option"]) == 0
    assert "".join(json.loads(capsys.readouterr().out)["tokens"][1:]) == "--modle is not an option"


TOO_MUCH = {
    "heads --lengths 100000000000000": "there is not enough memory. Try a shorter text, fewer samples",
    "heads --seed 99999999999999999999": "argument --seed: 99999999999999999999 is too large; expected at most 9,223,",
    "heads --lengths ,": "--lengths ',': expected whole numbers separated by commas",
    "cost --d-model 99999999999999": "Choose a num_heads that divides 99999999999999, such as",
    "trace builtin hi --methods atention": "no method is called 'atention'. Did you mean attention?",
}


@pytest.mark.parametrize("line", TOO_MUCH)
def test_values_that_are_too_large_or_no_values_are_refused_in_words(line, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert status_of(line.split()) == 2
    assert TOO_MUCH[line] in capsys.readouterr().err


@pytest.mark.parametrize("line", ["cost --models", "cost --help"])
def test_a_closed_pipe_ends_with_success_and_no_words(line):
    command = [sys.executable, "-m", "headwise", *line.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # before anything is written
        told = process.stderr.read()
    assert (process.returncode, told) == (0, b"")
