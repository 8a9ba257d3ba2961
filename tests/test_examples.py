"""The short examples run, and show what they say."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from headwise import rotary

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


def test_differential_attention_is_composed_of_parts(capsys):
    first, second, last = printed("differential_attention", capsys).splitlines()
    assert first.startswith("output (1, 200, 64) from AttentionMap(B=1, H=8, T=200, S=200")
    factor, total = numbers(second)
    assert factor + total == pytest.approx(1, abs=2e-3)
    assert float(last.split()[-1]) < 1e-5


@pytest.mark.parametrize("depth", [0, 1])
def test_the_composition_is_the_attention_of_diffllama(depth):
    transformers = pytest.importorskip("transformers")
    made = runpy.run_path(str(EXAMPLES / "differential_attention.py"))["DifferentialAttention"]
    torch.manual_seed(0)
    small = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 32}
    config = transformers.DiffLlamaConfig(**small, num_hidden_layers=2, vocab_size=67, pad_token_id=0)
    config._attn_implementation = "eager"
    model = transformers.DiffLlamaModel(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs, seen = model.layers[depth].self_attn, {}
    keep = lambda m, a, k, o: seen.update(x=a[0] if a else k["hidden_states"], y=o[0])  # noqa: E731
    theirs.register_forward_hook(keep, with_kwargs=True)
    options = {"num_kv_heads": 2, "causal": True, "position": rotary(), "dtype": torch.float64}
    layer = made(48, 6, depth=depth, eps=config.rms_norm_eps, **options).eval()
    state = {f"maps.{x}_proj.weight": getattr(theirs, f"{x}_proj").weight for x in "qkv"}
    for part in "qk":
        state[f"lambda_{part}"] = torch.stack([getattr(theirs, f"lambda_{part}{i}") for i in (1, 2)])
    layer.load_state_dict(state | {"out_proj.weight": theirs.o_proj.weight})
    cache = layer.maps.make_cache(2)
    with torch.no_grad():
        model(input_ids=torch.randint(3, 67, (2, 19)))
        torch.testing.assert_close(layer(seen["x"]), seen["y"], rtol=1e-4, atol=2e-5)  # angles and λ are float32
        steps = [layer(token[:, None], cache=cache) for token in seen["x"].unbind(1)]
    torch.testing.assert_close(torch.cat(steps, 1), seen["y"], rtol=1e-4, atol=2e-5)
