import json
import sys

import pytest
import torch

from headwise import load_builtin
from headwise.cli import main
from headwise.errors import install_command


def printed(capsys, *arguments):
    assert main(["steps", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    assert main(["steps", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("headwise steps: ")
    return captured.err


def test_tables_hold_ten_steps_numbers_and_four_operations(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = printed(capsys, "--causal")
    for word in (
        "TEN STEPS",
        "NUMBERS",
        "MEMORY",
        "weighted values",
        "−inf",
        "contiguous",
        "trap: view after transpose",
    ):
        assert word in out
    assert "→ scores (1, 2, 4, 4)" in out
    assert "[t.view(B, T, H, D) for t in (q, k, v)]" in out  # brackets are not taken for markup


def test_shapes_are_those_of_the_guide(capsys):
    sizes = ["--form", "homework", "--d-model", "768", "--heads", "12", "--seq", "100", "--batch", "4"]
    told = json.loads(printed(capsys, *sizes, "--json"))
    shapes = [next(iter(step["shapes"].values())) for step in told["steps"]]
    assert shapes == [
        [4, 100, 768],
        [4, 100, 12, 64],
        [4, 12, 100, 64],
        [4, 12, 100, 100],
        [4, 12, 100, 100],
        [4, 12, 100, 100],
        [4, 12, 100, 100],
        [4, 12, 100, 64],
        [4, 100, 768],
        [4, 100, 768],
    ]
    assert told["causal"] is True


def test_json_is_one_object_with_steps_and_layout(capsys):
    told = json.loads(printed(capsys, "--json", "--form", "interview", "--keys", "6", "--batch", "3"))
    assert told["sizes"] == {"batch": 3, "seq": 4, "keys": 6, "d_model": 8, "heads": 2, "kv_heads": 2} | {
        "head_dim": 4,
        "d_out": 8,
    }
    assert told["steps"][0]["before"] == {"Q": [3, 4, 8], "K": [3, 6, 8], "V": [3, 6, 8]}
    assert told["steps"][3]["shapes"] == {"scores": [3, 2, 4, 6]}
    assert [op["name"] for op in told["layout"]][:4] == ["view", "transpose", "matmul", "contiguous"]
    assert told["layout"][4]["after"] is None


def test_model_brings_its_widths_and_says_what_else_it_does(capsys):
    told = json.loads(printed(capsys, "--model", "Qwen-3-0.6B", "--seq", "5", "--json"))
    assert told["model"] == "qwen-3-0.6b"
    assert told["form"] is None
    assert told["causal"] is True
    assert told["steps"][2]["shapes"] == {"query": [1, 16, 5, 128], "key": [1, 8, 5, 128], "value": [1, 8, 5, 128]}
    assert told["steps"][8]["shapes"] == {"merged": [1, 5, 2048]}
    out = printed(capsys, "--model", "qwen-3-0.6b", "--seq", "5")
    assert "also queries and keys are rotated by position (rotary, base 1000000)" in " ".join(out.split())


def test_large_model_says_that_it_has_no_numbers(capsys):
    assert "570,427,392 numbers are too many: only shapes are traced" in printed(capsys, "--model", "llama-3.1-405b")


def test_wrapper_shows_that_it_widens(capsys):
    out = printed(capsys, "--form", "wrapper", "--d-model", "6", "--heads", "3")
    assert "here: 3 heads of 6 give 18, not 6" in out
    assert "→ output (1, 4, 18)" in out


def test_forms_are_listed_with_what_differs(capsys):
    out = printed(capsys, "--forms")
    assert "mha(Q, K, V, mask=None)" in out
    told = json.loads(printed(capsys, "--forms", "--json"))
    assert [form["name"] for form in told["forms"]][:3] == ["course", "interview", "handbook"]
    assert "−1e9" in told["forms"][0]["differences"]["5"]


def test_page_is_written_where_it_is_asked_for(capsys, tmp_path):
    path = tmp_path / "steps.html"
    assert printed(capsys, "--html", str(path)).strip() == f"wrote {path}"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_page_in_a_folder_that_is_not_there_is_refused(capsys, tmp_path):
    told = refused(capsys, "--html", str(tmp_path / "nowhere" / "steps.html"))
    assert "Name a file in a folder that exists." in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "3"], "d_model=8 cannot be cut into num_heads=3 equal heads"),
        (["--seq", "0"], "seq=0: expected a whole number from 1 up"),
        (["--batch", "-2"], "batch=-2: expected a whole number from 1 up"),
        (["--form", "essay"], "no form is called 'essay'. All of them: headwise steps --forms"),
        (["--model", "gpt5"], "no model is called 'gpt5'. Did you mean gpt"),
        (["--model", "gpt2", "--heads", "3"], "--model gpt2 sets its own widths and form"),
        (["--model", "gpt2", "--form", "book"], "--model gpt2 sets its own widths and form"),
        (["--keys", "5"], "4 tokens and 5 keys: the form 'course' takes one input"),
        (["--form", "book", "--no-causal"], "the form 'book' always has a causal mask"),
        (["--forms", "--html", "x.html"], "--forms prints a list"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_wrong_usage_ends_with_words_and_status_two(arguments, words, capsys):
    assert words in refused(capsys, *arguments)


def test_without_rich_the_table_is_refused_and_json_is_not(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert install_command("terminal") in refused(capsys)
    assert json.loads(printed(capsys, "--json"))


def test_eighty_columns_are_enough(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    out = printed(capsys, "--form", "book", "--d-model", "768", "--heads", "12", "--seq", "100", "--batch", "4")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "…" not in out


@pytest.mark.parametrize("form", ["course", "handbook", "book"])
def test_sixty_columns_cut_no_code(form, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = printed(capsys, "--form", form)
    assert max(len(line) for line in out.splitlines()) <= 60
    assert "…" not in out
    assert "q @ k.transpose(-2, -1)" in out
    assert "→ scores (1, 2, 4, 4)" in out


def test_one_head_alone_refuses_several(capsys):
    assert main(["steps", "--form", "head", "--heads", "4"]) == 2
    assert "4 heads: the form 'head' is a single head" in capsys.readouterr().err
    assert main(["steps", "--form", "head", "--heads", "1"]) == 0


def test_numbers_that_are_left_out_are_told(capsys):
    assert main(["steps", "--seq", "9"]) == 0
    assert "numbers are shown up to 8 rows and columns" in capsys.readouterr().out
    assert main(["steps", "--seq", "8"]) == 0
    assert "numbers are shown up to" not in capsys.readouterr().out


def test_titles_of_numbers_are_whole(capsys):
    assert main(["steps", "--d-model", "2", "--heads", "2", "--seq", "1"]) == 0
    out = capsys.readouterr().out
    for title in ("3 query", "4 scores", "7 weights", "10 output"):
        assert f" {title} " in out


def test_other_names_of_forms_are_listed(capsys):
    assert main(["steps", "--forms"]) == 0
    assert "or homework" in capsys.readouterr().out
    assert main(["steps", "--forms", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["forms"]
    assert {"homework", "textbook"} <= {alias for form in told for alias in form["aliases"]}


@pytest.mark.parametrize(
    ("layer", "told"),
    [("5", "weights of blocks.5.attention (layer 5) are NaN"), ("4", "the output of blocks.4.attention")],
)
def test_a_layer_that_computes_nan_is_named(layer, told, monkeypatch, capsys):
    model = load_builtin()
    torch.nn.init.constant_(model.gpt.blocks[4].attention.out_proj.weight, float("nan"))
    monkeypatch.setattr("headwise.learn.words.trace.open_model", lambda *_, **__: model)
    assert told in " ".join(refused(capsys, "The sea", "--layer", layer).split())


def test_the_tokens_of_one_character_are_numbered(capsys):
    assert json.loads(printed(capsys, "東京", "--json"))["words"][1:4] == ["東¹", "東²", "東³"]


@pytest.mark.parametrize("form", ["course", "handbook", "book"])
def test_code_in_eighty_columns_is_broken_where_a_reader_would(form, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["steps", "--form", form]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert any(line.endswith(" heads.transpose(1, 2)") for line in lines)
    assert any(line.endswith(" .view(B, T, H * D)") for line in lines)
    assert any(line.endswith(" for t in (q, k, v)]") for line in lines)
