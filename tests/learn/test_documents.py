"""What docs/learn.md says is what the code says."""

import re
import shlex
from pathlib import Path

import pytest

from headwise.cli import main
from headwise.learn.configs import CONFIGS
from headwise.learn.cost import Cost, human
from headwise.learn.forms import FORMS

TEXT = (Path(__file__).parents[2] / "docs" / "learn.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^headwise .*?(?=  #|$)", TEXT, re.MULTILINE)


def row(*cells):
    return "| " + " | ".join(map(str, cells)) + " |\n"


def test_models_are_those_of_the_table():
    told = re.findall(r"^\| (\S+) \| \d+ \|", TEXT, re.MULTILINE)
    assert told == list(CONFIGS)
    for config in CONFIGS.values():
        cost = Cost.of_model(config, 1)
        near = "" if config.window is None else f"{config.window} in {config.windowed_layers}"
        sizes = (config.d_model, config.num_heads, config.num_kv_heads, config.head_dim, config.layers, config.context)
        attention = human(cost.parameters.value * config.layers)
        cache = human(cost.kv_cache_per_token.value * config.layers, "B", binary=True)
        assert row(config.name, *sizes, near, config.position, attention, cache) in TEXT


def test_forms_are_those_of_the_table():
    for form in FORMS.values():
        made, called = f"`{form.constructor}`", f"`{form.call}`"
        assert row(f"`{form.name}`: {form.title}", made, called, form.returns) in TEXT


def test_formulas_are_those_of_the_code():
    cost, biased = Cost.of(512, 8, 2, seq=100), Cost.of(512, 8, 2, seq=100, bias=True)
    told = [cost.parameters, biased.parameters, cost.matrix_bytes, cost.fused_activation_bytes]
    told += [cost.matrix_activation_bytes, cost.kv_cache_per_token, cost.kv_cache, cost.decode_flops, cost.decode_bytes]
    for formula in [*(amount.formula for amount in told), *(step.formula for step in cost.steps() if step.total)]:
        assert f" | {formula} | " in TEXT


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_python_runs():
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(block, "learn.md", "exec"), {})  # noqa: S102


def test_there_are_commands():
    assert len(COMMANDS) >= 7
