"""Attention classes as they stand in models: tables from outside, optional configurations, flags that many share."""

from types import SimpleNamespace

import pytest

from headwise.check.configuration import StandInConfig
from headwise.check.explain import explained
from headwise.check.sizes import CallSizes
from headwise.check.verdict import judge_file

HEAD = "import math\n\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
ROTATIONS = {
    "halves": "torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)",
    "neighbors": "torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)",
}
WIDENED = {"halves": "torch.cat((t, t), dim=-1)", "neighbors": "t.repeat_interleave(2, dim=-1)"}


def rotated(turn="halves", tables="cos, sin = position_embeddings", rest="", annotated="", default=""):
    """A right layer that takes its rotary tables in a call, beside a mask."""
    return f"""{HEAD}
{rest}

def turned(x):
    return {ROTATIONS[turn]}


class Attention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.v_proj, self.o_proj = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, position_embeddings{annotated}{default}, attention_mask{default}):
        B, T, E = hidden_states.shape
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(hidden_states).view(B, T, self.num_heads, -1).transpose(1, 2) for layer in layers)
        {tables}
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if attention_mask is not None:
            scores = scores + attention_mask
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, E))
"""


def judged(tmp_path, text, name=None):
    path = tmp_path / "layer.py"
    path.write_text(text)
    return judge_file(path, name=name)


def right(report):
    return report.verdict in ("right", "variant", "partial") and not report.wrong


@pytest.mark.parametrize("annotated", ["", ": tuple[torch.Tensor, torch.Tensor]"])
def test_a_pair_of_tables_is_passed_beside_a_required_mask(tmp_path, annotated):
    report = judged(tmp_path, rotated(annotated=annotated))
    assert right(report), report
    assert "rotary positions" in report.variants


def test_a_pair_that_is_none_by_default_and_always_taken_apart_is_passed(tmp_path):
    assert right(judged(tmp_path, rotated(annotated=": tuple[torch.Tensor, ...]", default=" = None")))


def test_tables_are_tried_in_the_layout_of_neighbors(tmp_path):
    report = judged(tmp_path, rotated("neighbors"))
    assert right(report), report
    assert "rotary positions" in report.variants


@pytest.mark.parametrize("turn", WIDENED)
def test_tables_of_half_the_width_are_tried(tmp_path, turn):
    halved = f"cos, sin = ({WIDENED[turn]} for t in position_embeddings)"
    assert right(judged(tmp_path, rotated(turn, tables="cos, sin = position_embeddings\n        " + halved)))


def test_a_rotation_must_fit_the_tables_that_the_file_makes(tmp_path):
    own = "\ndef tables(t):\n    t = torch.cat((t, t), dim=-1)\n    return t.cos(), t.sin()\n"
    report = judged(tmp_path, rotated("neighbors", rest=own))
    assert report.cause == "rotary-absolute", report


def test_a_rotation_of_queries_by_other_tables_than_keys_is_still_found(tmp_path):
    text = rotated().replace("k * cos + turned(k) * sin", "k * cos - turned(k) * sin")
    assert judged(tmp_path, text).verdict == "wrong"


CONFIGURED = f"""{HEAD}

class Attention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0, config=None, layer_idx=None):
        super().__init__()
        self.num_heads, self.dropout, self.config = num_heads, dropout, config
        self.kind = None if config is None else config.layer_types[layer_idx]
        self.qkv, self.out_proj = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, hidden_states, attention_mask=None):
        B, T, E = hidden_states.shape
        q, k, v = self.qkv(hidden_states).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.config._attn_implementation != "eager":
            raise ValueError("only eager")
        scores = scores if attention_mask is None else scores + attention_mask
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(B, T, E))
"""
SETTINGS = """

class ModelConfig:
    def __init__(self, embed_dim=32, num_heads=4):
        self.embed_dim, self.num_heads, self.layer_types = embed_dim, num_heads, ["full", "full"]
        self._attn_implementation = "eager"
"""


def test_a_configuration_that_is_none_by_default_is_passed_where_the_call_needs_it(tmp_path):
    report = judged(tmp_path, CONFIGURED + SETTINGS)
    assert right(report), report


def test_dropout_is_changed_beside_an_optional_configuration(tmp_path):
    text = CONFIGURED.replace("F.dropout(scores.softmax(-1), self.dropout, self.training)", "scores.softmax(-1)")
    assert "dropout-unused" in [f.name for f in judged(tmp_path, text + SETTINGS).wrong]


def test_a_configuration_is_passed_beside_any_number_of_sizes(tmp_path):
    text = CONFIGURED.replace("dropout=0.0, config=None, layer_idx=None", "rate: float, wide: bool, flat: int, config")
    text = text.replace("dropout, config", "rate, config").replace("layer_types[layer_idx]", "layer_types")
    assert right(judged(tmp_path, text + SETTINGS))


def test_a_layer_of_a_model_has_a_number(tmp_path):
    text = CONFIGURED.replace("embed_dim, num_heads, dropout=0.0, config=None", "config: ModelConfig, dropout=0.0")
    text = text.replace(
        "super().__init__()", "super().__init__()\n        embed_dim, num_heads = config.embed_dim, config.num_heads"
    )
    text = text.replace(HEAD, HEAD + SETTINGS).replace("None if config is None else ", "")
    assert right(judged(tmp_path, text))


SIMPLE = f"""{HEAD}

class SelfAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out_proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x, mask=None, output_attentions=False, **kwargs):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)
        weights = scores.softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(B, T, E)), weights
"""


def test_a_flag_that_no_line_reads_is_not_wrong_if_weights_are_returned_anyway_and_any_keyword_is_taken(tmp_path):
    assert judged(tmp_path, SIMPLE).verdict == "partial"
    assert judged(tmp_path, SIMPLE.replace(", **kwargs", "")).cause == "option-ignored"


FASTER = """

class SelfFlashAttention2(SelfAttention):
    def forward(self, x, mask=None, output_attentions=False, **kwargs):
        kind = target_dtype(x)
        return super().forward(x.to(kind), mask)


class ModelForMultipleChoice(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention, self.num_heads = SelfAttention(config.d_model, config.num_heads), config.num_heads
        self.classifier = nn.Linear(config.d_model, 1)

    def forward(self, input_ids, attention_mask=None):
        return self.classifier(self.attention(input_ids, attention_mask)[0]).softmax(-1)
"""


def test_the_plain_class_is_judged_before_a_faster_one_and_before_a_model(tmp_path):
    report = judged(tmp_path, SIMPLE + FASTER)
    assert report.subject.startswith("SelfAttention("), report


def test_a_name_that_is_imported_under_a_condition_is_defined(tmp_path):
    condition = "if torch.cuda.device_count() > 99:\n    from torch import result_type\n"
    text = SIMPLE.replace(HEAD, HEAD + condition).replace(
        "        B, T, E", "        x = x.to(result_type(x, x))\n        B, T, E"
    )
    assert not judged(tmp_path, text).wrong
    typing = text.replace("if torch.cuda.device_count() > 99", "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING")
    assert judged(tmp_path, typing).cause == "undefined-name"


def test_none_that_is_handed_on_as_an_option_is_no_gap(tmp_path):
    text = SIMPLE.replace(
        "weights = scores.softmax(-1)",
        "kind = None\n        weights = F.softmax(scores, dim=-1, dtype=kind) + 0 * scores.tanh()",
    )
    assert judged(tmp_path, text).verdict != "unfinished"
    gap = SIMPLE.replace("weights = scores.softmax(-1)", "weights = None")
    assert judged(tmp_path, gap).verdict == "unfinished"


def reads_a_key(config, path):
    """What is said about a line that reads a key which a configuration does not have."""
    path.write_text("def scale(config):\n    return config.zeta_alpha\n")
    space = {}
    exec(compile(path.read_text(), str(path), "exec"), space)  # noqa: S102 - the two lines above
    with pytest.raises(AttributeError) as caught:
        space["scale"](config)
    return explained(caught.value, str(path), CallSizes(), 2)


def test_a_key_that_our_own_configuration_lacks_is_not_the_learners_mistake(tmp_path):
    config = type("ModelConfig", (), {"zeta_alfa": 1})()
    assert reads_a_key(StandInConfig(CallSizes()), tmp_path / "one.py") is None
    assert reads_a_key(config, tmp_path / "three.py") is None
    assert reads_a_key(SimpleNamespace(zeta_alfa=1), tmp_path / "two.py").name == "unknown-name"


NORM = "\n\ndef norm(x):\n    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)\n"
ROTATED = "q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin"


def test_queries_and_keys_may_be_normalized_over_all_heads_before_a_rotation(tmp_path):
    text = rotated(rest=NORM).replace("(layer(hidden_states).view", "(kind(layer(hidden_states)).view")
    text = text.replace("for layer in layers)", "for layer, kind in zip(layers, (norm, norm, lambda x: x)))")
    report = judged(tmp_path, text)
    assert right(report), report
    assert "queries and keys are normalized" in report.variants


def test_queries_and_keys_may_be_normalized_after_a_rotation(tmp_path):
    text = rotated(rest=NORM).replace(ROTATED, f"{ROTATED}\n        q, k = norm(q), norm(k)")
    report = judged(tmp_path, text)
    assert right(report), report
    assert "queries and keys are normalized" in report.variants


CHOSEN = CONFIGURED.replace("embed_dim, num_heads, dropout=0.0, config=None, layer_idx=None", "config, layer_idx")
CHOSEN = CHOSEN.replace("num_heads, dropout, config", "config.num_heads, 0.0, config")
CHOSEN = CHOSEN.replace("(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)", "(E, 3 * E), nn.Linear(E, E)")
CHOSEN = CHOSEN.replace("super().__init__()", "super().__init__()\n        E = config.embed_dim")


@pytest.mark.parametrize(("key", "cause"), [("config.attention_multiplier", None), ("1.0", "scale-missing")])
def test_a_multiplier_of_the_configuration_may_be_the_scale(tmp_path, key, cause):
    text = CHOSEN.replace("q @ k.mT / math.sqrt(q.shape[-1])", "q @ k.mT * self.scaling")
    text = text.replace("        E = config", f"        self.scaling = {key}\n        E = config")
    settings = SETTINGS.replace("num_heads=4):", "num_heads=4):\n        self.attention_multiplier = 1.0")
    assert judged(tmp_path, text + settings).cause == cause


def test_a_window_that_the_code_computes_with_keeps_the_number_of_the_file(tmp_path):
    made = "        self.window = config.sliding_window + 1\n        E = config"
    settings = SETTINGS.replace("num_heads=4):", "num_heads=4):\n        self.sliding_window = 4096")
    assert right(judged(tmp_path, CHOSEN.replace("        E = config", made) + settings))


MEMORY = SIMPLE.replace("output_attentions=False, **kwargs", "encoder_states=None, encoder_mask=None")
MEMORY = MEMORY.replace(
    "(weights @ v).transpose(1, 2).reshape(B, T, E)), weights", "(weights @ v).transpose(1, 2).reshape(B, T, E))"
)
REFUSED = """if encoder_states is not None:
            mask = encoder_mask
            raise ValueError("no memory here")
        B, T, E"""


def test_a_mask_for_a_memory_that_is_refused_need_not_act(tmp_path):
    report = judged(tmp_path, MEMORY.replace("B, T, E", REFUSED, 1))
    assert report.verdict == "partial", report
    assert judged(tmp_path, SIMPLE.replace("**kwargs", "encoder_mask=None")).verdict == "wrong"


UNITS = SIMPLE.replace("d_model, num_heads):", "d_model, num_heads, window_size=0, in_units=False):")
UNITS = UNITS.replace(
    "self.num_heads = num_heads", "self.num_heads, self.window_size, self.in_units = num_heads, window_size, in_units"
)
UNITS = UNITS.replace(", output_attentions=False, **kwargs", "")
UNITS = UNITS.replace(
    "        q, k, v",
    "        if self.in_units:\n            x = x.view(B, T, 1, self.window_size, -1).flatten(2)\n        q, k, v",
)


def test_a_window_that_counts_only_with_a_switch_is_not_judged_without_it(tmp_path):
    report = judged(tmp_path, UNITS)
    assert report.verdict == "partial", report
    always = UNITS.replace("if self.in_units:", "if self.window_size > 99:")
    assert judged(tmp_path, always).cause == "option-ignored"


def test_a_flag_of_the_configuration_is_no_size(tmp_path):
    made = "        if config.use_relative_position_embeddings:\n            self.table = torch.zeros(shape[0])\n"
    text = CHOSEN.replace("config, layer_idx", "config, layer_idx, shape=None")
    text = text.replace("        E = config.embed_dim\n", "        E = config.embed_dim\n" + made)
    settings = SETTINGS.replace("num_heads=4):", "num_heads=4):\n        self.use_relative_position_embeddings = False")
    assert not judged(tmp_path, text + settings).wrong
