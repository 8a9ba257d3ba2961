"""The short examples run, and show what they say."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def printed(name, capsys):
    """What an example prints."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def numbers(line):
    return [float(n) for n in re.findall(r"\d\.\d+", line)]


def test_supervised_heads_learn_to_look_where_they_are_told(capsys):
    first, *_, last = printed("supervise_attention", capsys).splitlines()
    assert max(numbers(first)) < 0.3
    assert min(numbers(last)) > 0.8


def test_induction_heads_are_found_and_depend_on_the_head_before_them(capsys):
    pytest.importorskip("tokenizers")
    one, other, previous, without = printed("induction_heads", capsys).splitlines()
    assert re.match(r"induction head 5\.[46]: 0\.9", one)
    assert re.match(r"induction head 5\.[46]: 0\.9", other)
    assert re.match(r"previous-token head 4\.2: 0\.[89].* loss on the repetition 0\.00", previous)
    one, other, loss = re.fullmatch(r"without 4\.2: \d\.\d: (\S+), \d\.\d: (\S+); loss (\S+)", without).groups()
    assert max(float(one), float(other)) < 0.6
    assert float(loss) > 3


def test_a_needle_is_found_among_sixteen_thousand_tokens(capsys):
    out = printed("long_context", capsys)
    assert "T=16384, S=16384" in out
    weight = re.search(r"head 1, last query: (\d\.\d+) on key 4321\n", out)
    assert weight
    assert float(weight[1]) > 0.9
    rows = [numbers(line) for line in out.splitlines()[-8:]]
    assert [round(sum(row), 1) for row in rows] == [1.0] * 8


def test_swapped_attention_gives_the_same_and_can_be_seen(capsys):
    out = printed("swap_torch_attention", capsys)
    assert "Replaced(2 layers: 'layers.0.self_attn', 'layers.1.self_attn'" in out
    assert float(re.search(r"largest difference (\S+)", out)[1]) < 1e-5
    assert out.count("AttentionMap(B=3, H=4, T=50, S=50") == 2
    assert out.count(" 0 attention on padding") == 2


def test_every_generated_token_is_seen(capsys):
    pytest.importorskip("transformers")
    out = printed("watch_generation", capsys)
    assert "prompt: AttentionMap(B=1, H=4, T=24, S=24" in out
    assert re.findall(r"^token \d+ at (\d+): ", out, re.MULTILINE) == ["24", "25", "26", "27", "28"]
