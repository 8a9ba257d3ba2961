"""`headwise view`: what it prints and writes; bad input gets clear words and status 2, and nothing is half-written."""

import json
import os
import subprocess
import sys

import pytest
import torch

from headwise import load_builtin, view
from headwise.cli import main
from headwise.models import builtin
from headwise.view import View
from headwise.view.screen import KEYS
from headwise.view.terminal import WITHOUT
from headwise.view.words import described

TEXT = "The captain looked at the sea, and the sea looked at the captain."


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working directory of its own, and a page that costs nothing where its content is not the matter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    return tmp_path


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_first_view_fits_24_lines_and_a_page_is_written(folder, capsys):
    assert main(["view", TEXT]) == 0
    told = capsys.readouterr()
    assert len(told.out.splitlines()) + len(told.err.splitlines()) <= 23
    assert told.err == "headwise view: wrote heads.html\n"
    assert left(folder) == ["heads.html"]
    assert (folder / "heads.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "arguments", [["--no-html"], ["--json"], ["--layer", "3"], ["--head", "3.0"], ["--layer", "3", "--plain"]], ids=str
)
def test_no_page_is_written_where_none_is_expected(arguments, folder, capsys):
    assert main(["view", TEXT, *arguments]) == 0
    assert capsys.readouterr().out
    assert left(folder) == []


def test_a_page_goes_where_it_is_asked_for(folder, capsys):
    (folder / "other.html").write_text("mine")
    assert main(["view", TEXT, "--json", "--html", "other.html"]) == 0
    json.loads(capsys.readouterr().out)
    assert left(folder) == ["other.html"]
    assert (folder / "other.html").read_text() != "mine"


def test_a_page_of_ours_is_written_over_and_a_file_of_others_is_not(folder, capsys):
    (folder / "heads.html").write_text("mine")
    assert main(["view", TEXT]) == 0
    assert "heads.html was not written by headwise and is kept" in capsys.readouterr().err
    assert (folder / "heads.html").read_text() == "mine"
    (folder / "heads.html").unlink()
    pages = []
    for text in (TEXT, "Once upon a time"):
        assert main(["view", text]) == 0
        assert "wrote heads.html" in capsys.readouterr().err
        pages.append((folder / "heads.html").read_bytes())
    assert pages[0] != pages[1]


def test_figures_are_the_same_in_python_terminal_and_json(capsys):
    result = view(load_builtin(), TEXT)
    assert main(["view", TEXT, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(json.dumps(result.to_dict()))
    for layer, summary in zip(told["layers"], result.summaries, strict=True):
        for one, head in zip(layer["heads"], summary, strict=True):
            assert (one["numbers"], one["without_first"], one["reading"]) == (
                head.numbers,
                head.without_first,
                head.reading,
            )
            assert "sink" in one["numbers"]
            assert "sink" not in one["without_first"], "taken out"
            assert 0 <= one["without_first"]["entropy"] <= 1.000001, "as a share of the log of the visible keys"
    assert main(["view", TEXT, "--no-html"]) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("  4.2  ")]
    assert described(result.summaries[4][2]).replace(WITHOUT, "") in line
    assert f"% on the first token or a second sink: of all attention; other %:{WITHOUT}" in " ".join(shown.split())
    assert str(result) == shown.rstrip("\n")


def test_json_of_one_layer_or_head_is_that_part(capsys):
    assert main(["view", TEXT, "--json", "--head", "3.5"]) == 0
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert layer["layer"] == 3
    assert [head["head"] for head in layer["heads"]] == [5]
    assert main(["view", TEXT, "--json", "--layer", "2"]) == 0
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert len(layer["heads"]) == 8


def test_the_help_lists_the_keys_of_the_full_screen(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["view", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "Keys: arrows: move by a cell; PgUp PgDn: move by half a screen; " in told
    for key, _, does in KEYS:
        assert f"{key}: {does}" in told


def test_a_head_into_a_pipe_is_printed_once_in_letters(capsys):
    assert main(["view", TEXT, "--head", "3.0"]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "captain" in told
    assert len(told.splitlines()) == 2 + load_builtin().tokens(TEXT).shape[1] + 1


def test_a_terminal_of_40_columns_is_enough(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    for arguments in ([], ["--layer", "1"], ["--head", "1.4"]):
        assert main(["view", TEXT, "--no-html", *arguments]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no text given"),
        ([""], "the text is empty"),
        ([" \n"], "the text is empty"),
        (["a", "--file", "b"], "pass one of them"),
        (["--file", "nowhere"], "No such file"),
        (["--file", "."], "Is a directory"),
        (["a", "--model", "nowhere"], "there is no folder nowhere"),
        (["a", "--model", "."], "weights.safetensors is not in"),
        (["a", "--layer", "7"], "layer 7: the model has 7, 0 to 6"),
        (["a", "--head", "3.8"], "head 3.8: layer 3 has 8 heads, 0 to 7"),
        (["a", "--head", "3.8", "--json"], "head 3.8"),
        (["a", "--head", "1.1", "--layer", "1"], "pass one of them"),
        (["a", "--html", "x", "--no-html"], "pass one of them"),
        (["a", "--tokens", "0"], "--tokens 0: expected 1 or more"),
    ],
    ids=str,
)
def test_bad_input_is_refused(arguments, message, folder, capsys):
    assert main(["view", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("headwise view: ")
    assert message in told.err
    assert left(folder) == []


def test_a_head_that_is_no_place_is_wrong_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["view", "a", "--head", "five"])
    assert "expected layer and head, such as 3.5" in capsys.readouterr().err


def test_a_binary_file_is_refused(folder, capsys):
    (folder / "binary").write_bytes(b"\xff\xfe\x00\x01")
    assert main(["view", "--file", "binary"]) == 2
    assert "is not UTF-8 text: invalid start byte at byte 0" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--layer", "0"], ["--head", "0.0"], ["--json"]], ids=str)
def test_one_token_is_shown(arguments, capsys, folder):
    assert main(["view", "a", "--tokens", "1", *arguments]) == 0
    assert "1 token" in capsys.readouterr().out or arguments == ["--head", "0.0"]


def test_the_page_of_one_token_is_written(folder):
    assert main(["view", "a", "--tokens", "1"]) == 0
    assert left(folder) == ["heads.html"]


def test_more_tokens_than_the_model_was_made_for_are_told(monkeypatch, folder, capsys):
    model = builtin.load_builtin()
    model.trained = 7
    monkeypatch.setattr("headwise.cli.view.open_model", lambda name, **_: model)
    (folder / "long.txt").write_text(TEXT)
    assert main(["view", "--file", "long.txt", "--no-html"]) == 0
    told = capsys.readouterr()
    assert "16 tokens and the model was trained for 7" in told.err
    assert "--tokens 7 shows the beginning" in told.err
    assert main(["view", "--file", "long.txt", "--tokens", "7", "--no-html"]) == 0
    told = capsys.readouterr()
    assert told.err == "headwise view: showing the first 7 of 16 tokens.\n"
    assert "7 tokens" in told.out


def test_a_model_that_can_read_no_more_refuses_with_the_numbers(monkeypatch, folder, capsys):
    model = builtin.load_builtin()
    model.limit = 7
    monkeypatch.setattr("headwise.cli.view.open_model", lambda name, **_: model)
    assert main(["view", TEXT]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "tokens long and the model can read 7. Show its beginning with --tokens 7." in told
    assert main(["view", TEXT, "--tokens", "7"]) == 0


def test_of_a_long_text_some_queries_are_looked_at_and_progress_is_told(monkeypatch, folder, capsys):
    from headwise.cli import view as verb

    for name, value in {"LONG": 11, "QUERIES": 5, "SLOW": 11}.items():
        monkeypatch.setattr(verb, name, value)
    assert main(["view", TEXT, "--no-html"]) == 0
    told = capsys.readouterr()
    assert "numbers from 5 of these queries" in told.out
    assert "numbers are from 5 of 16 queries" in told.err
    assert "reading: 7 layers done" in told.err
    assert told.err.endswith("headwise view: 16 tokens read.\n")
    assert main(["view", TEXT]) == 0
    assert "no page written: for 16 tokens it takes a while" in capsys.readouterr().err
    assert left(folder) == []
    assert main(["view", TEXT, "--no-html", "--exact"]) == 0
    assert "numbers from" not in capsys.readouterr().out


def test_layers_whose_weights_are_nan_are_named(monkeypatch, capsys):
    model = builtin.load_builtin()
    torch.nn.init.constant_(model.gpt.blocks[4].attention.out_proj.weight, float("nan"))
    monkeypatch.setattr("headwise.cli.view.open_model", lambda name, **_: model)
    assert main(["view", TEXT, "--no-html"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "attention weights of blocks.5.attention (layer 5) and 1 more are NaN" in told


def test_a_page_that_cannot_be_written_is_refused_and_leaves_nothing_behind(folder, capsys):
    for path in ("/dev/full", "missing/heads.html", str(folder)):
        assert main(["view", "a sea", "--html", path]) == 2
        told = capsys.readouterr()
        assert f"--html {path}" in " ".join(told.err.split())
        assert told.out == ""
    assert left(folder) == []
    assert not os.path.isfile("/dev/full")  # noqa: PTH113


def test_a_disk_that_fills_up_leaves_the_old_page(folder, monkeypatch, capsys):
    from pathlib import Path

    def full(path, text, **_):
        with path.open("w") as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    assert main(["view", "a sea"]) == 0
    before = (folder / "heads.html").read_bytes()
    monkeypatch.setattr(Path, "write_text", full)
    assert main(["view", "another sea"]) == 2
    assert "No space left on device" in " ".join(capsys.readouterr().err.split())
    assert (folder / "heads.html").read_bytes() == before
    assert left(folder) == ["heads.html"]


def program(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "headwise", "view", "a sea", "--no-html", *arguments], **options)


def test_an_output_that_is_full_is_told():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = program(stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "headwise view: the output cannot be written: No space left on device.\n"


def test_a_pipe_that_is_closed_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = program(stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_first_view_imports_no_more_than_it_needs():
    code = "import sys; from headwise.cli import main; main(['view', 'a sea']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    slow = {"torch._dynamo", "sympy", "transformers", "matplotlib", "starlette"}
    assert not slow & set(done.stderr.split())


def test_a_sight_may_be_of_maps_alone():
    from headwise import AttentionMap

    result = View({"only": AttentionMap(torch.randn(1, 2, 3, 5), torch.randn(1, 2, 3, 5))})
    assert result.to_dict()["layers"][0]["name"] == "only"


@pytest.mark.parametrize("verb", ["view", "steps"])
def test_a_text_in_a_locale_that_does_not_know_its_letters_is_read_as_utf8(verb, tmp_path):
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    options = ["--no-html", "--json"] if verb == "view" else ["--json"]
    run = subprocess.run(
        [sys.executable, "-m", "headwise", verb, "The sea 東京", *options],
        capture_output=True, env=environment, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert "京" in json.dumps(json.loads(run.stdout), ensure_ascii=False)


def test_parts_of_a_character_are_numbered_in_digits_where_an_encoding_lacks_small_ones():
    from headwise.cli.console import print_anywhere

    print_anywhere()
    assert "東¹ 京³".encode("ascii", "headwise") == b"\\u67711 \\u4eac3"
