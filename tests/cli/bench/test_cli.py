import json

import pytest
import torch

from headwise.cli import bench as verb
from headwise.cli import main

pytest.importorskip("rich")
SMALL = ["bench", "--lengths", "5,7", "--d-model", "12", "--heads", "3", "--seconds", "0.01", "--limit", "9"]
SMALL += ["--device", "cpu"]


def test_the_table_holds_who_was_measured_and_who_was_left_out(capsys):
    assert main([*SMALL, "--only", "headwise,flex"]) == 0
    out, err = capsys.readouterr()
    assert "batch 1, width 12, 3 heads, float32, causal, forward" in out
    assert "left out: FlexAttention by hand: on CUDA only" in out
    assert "T=7, candidates: 1" in err


def test_json_is_one_object_with_everything(capsys):
    assert main([*SMALL, "--only", "sdpa by hand", "--backward", "--no-causal", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["setting"] == {"d_model": 12, "heads": 3, "batch": 1, "causal": False, "dtype": "float32"} | {
        "device": "cpu",
        "backward": True,
    }
    assert [row["tokens"] for row in told["rows"]] == [5, 7]
    assert told["ceilings"].keys() == {"flops", "bytes"}


def test_the_ladder_alone_measures_three_rungs_and_no_peer(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verb, "measured", pytest.fail)
    file = str(tmp_path / "ladder.json")
    assert main([*SMALL, "--ladder", "--out", file]) == 0
    first = capsys.readouterr().out
    assert "the ladder: forward" in first
    assert "headwise, T=7" in first
    assert "nn.MHA" not in first
    assert main(["bench", "--from", file]) == 0
    assert capsys.readouterr().out == first


def test_a_result_is_shown_again_without_measuring(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    file = str(tmp_path / "a.json")
    assert main([*SMALL, "--only", "headwise", "--out", file]) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(verb, "measured", pytest.fail)
    assert main(["bench", "--from", file, "--plot", str(tmp_path / "a.svg")]) == 0
    assert capsys.readouterr().out == first
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_the_list_names_versions_and_how_to_install(capsys, monkeypatch):
    monkeypatch.setattr(verb, "version_of", lambda package: torch.__version__ if package == "torch" else None)
    assert main(["bench", "--list"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert torch.__version__ in out
    assert "pip install" in out
    assert main(["bench", "--list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["peers"]
    assert (told[0]["name"], told[-1]["name"], told[-1]["version"]) == ("headwise", "flash-colreduce", None)


def test_lengths_may_stand_with_commas_or_spaces(capsys):
    small = ["bench", "--ladder", "--d-model", "12", "--heads", "3", "--seconds", "0.01", "--json"]
    found = []
    for lengths in (["5,7"], ["5", "7"]):
        assert main([*small, "--lengths", *lengths]) == 0
        found.append({row["tokens"] for row in json.loads(capsys.readouterr().out)["ladder"]})
    assert found == [{5, 7}, {5, 7}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "12,many"], "--lengths 12,many: expected whole numbers with commas"),
        (["--lengths", "0,3"], "--lengths"),
        (["--heads", "5"], "5"),
        (["--batch", "0"], "--batch"),
        (["--only", "jax"], "no peer has 'jax' in its name"),
        (["--seconds", "0"], "--seconds 0: expected a number above 0"),
        (["--limit", "nan"], "--limit nan: expected a number above 0"),
        (["--from", "absent.json"], "--from absent.json: No such file"),
        (["--out", "absent/a.json"], "--out absent/a.json: there is no folder absent"),
        (["--plot", "absent/a.svg"], "--plot absent/a.svg: there is no folder absent"),
        (["--plot", "a.gif"], "--plot a.gif: expected a name that ends in .svg"),
    ],
    ids=str,
)
def test_wrong_usage_ends_with_words_and_status_two_before_anything_is_measured(
    arguments, words, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "measured", pytest.fail)
    assert main([*SMALL, *arguments]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("headwise bench: ")
    assert words in err


@pytest.mark.parametrize("text", ["{}", "[]", "3", "not JSON", '{"rows": [{}]}'])
def test_a_file_that_is_no_result_is_refused(text, tmp_path, capsys):
    (tmp_path / "a.json").write_text(text)
    assert main(["bench", "--from", str(tmp_path / "a.json")]) == 2
    assert "not a result of headwise bench" in capsys.readouterr().err


def test_cuda_without_a_gpu_is_refused(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["bench", "--device", "cuda"]) == 2
    assert "--device cuda: torch finds no CUDA device here" in capsys.readouterr().err
