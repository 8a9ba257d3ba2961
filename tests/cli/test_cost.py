import json
import re
import sys

import pytest

from headwise.cli import main
from headwise.errors import install_command
from headwise.learn.configs import CONFIGS
from headwise.learn.cost import Cost


def printed(capsys, *arguments):
    assert main(["cost", *arguments]) == 0
    return capsys.readouterr().out


def test_tables_hold_steps_amounts_kinds_and_answers(capsys):
    out = printed(capsys, "--model", "gpt2")
    words = ("COST", "2·B·H·T²·D", "T×T matrix", "KV cache of a token", "GQA, 3 kv", "crossover", "INTERVIEW QUESTIONS")
    for word in words:
        assert word in out
    assert "TIME" not in out
    assert "attention is 22.8% of the model's 124 M parameters" in out


def test_the_crossover_is_explained_where_it_stands(capsys):
    assert "crossover: above so many tokens, scores cost more than projections" in printed(capsys, "--seq", "16")


def test_json_holds_what_the_formulas_say(capsys):
    sizes = [
        "--d-model",
        "512",
        "--heads",
        "8",
        "--kv-heads",
        "2",
        "--seq",
        "4096",
        "--batch",
        "3",
        "--dtype",
        "float32",
    ]
    told = json.loads(printed(capsys, *sizes, "--json"))
    cost = Cost.of(512, 8, 2, seq=4096, batch=3, item_bytes=4)
    assert told["kind"] == "GQA"
    assert sum(step["matmul"] for step in told["steps"]) == cost.flops
    assert told["amounts"]["KV cache"] == {"formula": "2·B·T·Hkv·D · bytes", "value": cost.kv_cache.value}
    assert told["crossover"] == 512 * 1.25
    assert [kind["kv_heads"] for kind in told["alternatives"]] == [8, 2, 1]
    assert told["seconds"] == {"prefill": None, "decode": None}
    assert len(told["answers"]) == 5


def test_biases_are_counted_where_they_are(capsys):
    told = json.loads(printed(capsys, "--d-model", "512", "--heads", "8", "--bias", "--json"))
    assert told["amounts"]["parameters"]["value"] == 4 * (512 * 512 + 512)


def test_models_are_listed_whole(capsys):
    out = printed(capsys, "--models")
    assert all(name in out for name in CONFIGS)
    assert "…" not in out
    told = json.loads(printed(capsys, "--models", "--json"))
    assert [model["name"] for model in told["models"]] == list(CONFIGS)


@pytest.mark.parametrize("name", ["bert-base", "gemma-3-4b", "gpt3", "gpt-oss-20b", "llama-3.1-405b", "mistral-7b"])
def test_every_kind_of_model_is_told(name, capsys):
    out = " ".join(printed(capsys, "--model", name, "--seq", "3000").split())
    assert ("visible only" in out) == CONFIGS[name].causal
    window = CONFIGS[name].window
    assert ("see and cache at most W = " in out) == (window is not None and window < 3000)
    assert ("hides nothing from a text of 3,000" in out) == (window is not None and window >= 3000)
    assert ("it does not generate text" in out) == (not CONFIGS[name].causal)
    assert CONFIGS[name].note in out


def test_time_is_bounded_by_the_machine(capsys):
    arguments = ["--model", "llama-3.1-8b", "--seq", "8192"]
    told = json.loads(printed(capsys, *arguments, "--bandwidth", "1000", "--flops", "100", "--json"))
    cost = Cost.of_model(CONFIGS["llama-3.1-8b"], 8192)
    assert told["seconds"]["prefill"] == cost.visible_flops / 100e12
    assert told["seconds"]["decode"] == cost.decode_bytes.value / 1000e9
    out = printed(capsys, *arguments, "--bandwidth", "1000", "--flops", "100")
    assert "at least 12.4 ms for the text and 117 µs for one more token" in " ".join(out.split())
    assert "TIME" in printed(capsys, *arguments, "--bandwidth", "1000")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "7"], "d_model=768 cannot be cut into num_heads=7 equal heads"),
        (["--kv-heads", "5"], "num_heads=12 query heads cannot share num_kv_heads=5"),
        (["--seq", "-1"], "seq=-1: expected a whole number from 1 up"),
        (["--batch", "0"], "batch=0: expected a whole number from 1 up"),
        (["--layers", "0"], "layers=0: expected a whole number from 1 up"),
        (["--model", "lama-3.1-8b"], "no model is called 'lama-3.1-8b'. Did you mean llama-3.1-8b"),
        (["--model", "gpt2", "--heads", "4"], "--model gpt2 sets its own sizes. Leave out --heads, or --model."),
        (["--flops", "0"], "--flops 0: expected a number above 0"),
        (["--bandwidth", "-5"], "--bandwidth -5: expected a number above 0"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_wrong_usage_ends_with_words_and_status_two(arguments, words, capsys):
    assert main(["cost", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("headwise cost: ")
    assert words in captured.err


@pytest.mark.parametrize("arguments", [["--models"], ["--model", "gpt2"], ["--model", "gpt-oss-20b", "--seq", "32768"]])
def test_sixty_columns_cut_no_number_and_no_formula(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = printed(capsys, *arguments)
    assert max(map(len, out.splitlines())) <= 60
    assert "…" not in out
    row = re.search(r"^ gpt2 +768 +12 +12 +28\.3 M +36 KiB *$", out, re.MULTILINE)
    assert (row is not None) == (arguments == ["--models"])
    assert ("72 columns or more show D, L, tokens and window too" in out) == (arguments == ["--models"])


def test_without_rich_the_table_is_refused_and_json_is_not(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["cost"]) == 2
    assert install_command("terminal") in capsys.readouterr().err
    assert json.loads(printed(capsys, "--json"))
    assert json.loads(printed(capsys, "--models", "--json"))


@pytest.mark.parametrize("arguments", [["--models"], ["--model", "gemma-3-27b", "--seq", "9999"]], ids=str)
def test_eighty_columns_are_enough(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    out = printed(capsys, *arguments)
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "…" not in out


def test_a_text_beyond_the_context_is_told(capsys):
    assert main(["cost", "--model", "gpt2", "--seq", "2048"]) == 0
    assert "2,048 tokens exceed its context of 1,024" in capsys.readouterr().out
    assert main(["cost", "--model", "gpt2", "--seq", "1024"]) == 0
    assert "exceed its context" not in capsys.readouterr().out


def test_one_more_token_is_of_each_text(capsys):
    assert main(["cost", "--batch", "3", "--flops", "1", "--bandwidth", "1"]) == 0
    assert "for one more token of each text" in " ".join(capsys.readouterr().out.split())


def test_parameters_are_exact_and_agree_between_table_and_answer(capsys):
    out = printed(capsys, "--d-model", "512", "--heads", "8", "--bias", "--seq", "10")
    assert out.count("1,050,624") == 3, "in the table, beside MHA, and in the answer"
    assert "1.05 M" not in out
    llama = " ".join(printed(capsys, "--model", "llama-3.1-8b").split())
    assert "of their own, but gives each token" in llama
    assert "With 8 key/value heads, as here, it is 41,943,040 parameters." in llama
    assert "67,108,864 parameters" in llama
