"""A module that is called several times in one forward pass is several layers, everywhere."""

import copy

import pytest
import torch
from torch import nn

import headwise
from headwise import MultiHeadAttention, OptionError, silence, watch
from headwise.models.text_model import TextModel, TokenCodec
from headwise.study.survey.measures import Measures
from headwise.view.serve.models import check_off, layer_names, run_model
from headwise.view.texts import RunTexts

CALLS, HEADS, WIDTH, WORDS = 5, 3, 24, 31


class Shared(nn.Module):
    """One attention layer, run several times."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attention = MultiHeadAttention(WIDTH, HEADS, causal=True)

    def forward(self, ids):
        x = self.embedding(ids)
        for _ in range(CALLS):
            x = x + self.attention(x)
        return x


def shared():
    torch.manual_seed(0)
    return Shared().eval(), "attention"


def albert():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("headwise.huggingface")
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": CALLS, "intermediate_size": 16}
    config = transformers.AlbertConfig(vocab_size=WORDS, embedding_size=7, initializer_range=0.5, **sizes)
    model = transformers.AutoModel.from_config(config, attn_implementation="headwise").eval()
    return model, "encoder.albert_layer_groups.0.albert_layers.0.attention"


MODELS = pytest.mark.parametrize("made", [shared, albert])
IDS = torch.arange(7)[None]


def output(model):
    found = model(IDS)
    return found if isinstance(found, torch.Tensor) else found.last_hidden_state


@MODELS
def test_every_call_is_a_layer_of_its_own(made):
    model, name = made()
    with torch.no_grad(), watch(model) as seen:
        output(model)
        output(model)
    names = [f"{name}@{i}" for i in range(CALLS)]
    assert list(seen) == list(seen.calls) == names
    assert [len(seen.calls[each]) for each in names] == [2] * CALLS, "two passes"
    assert seen[name] is seen[names[-1]], "the last call"
    assert not torch.allclose(seen[names[0]][:], seen[names[3]][:])
    torch.testing.assert_close(seen.calls[names[3]][0][:], seen.calls[names[3]][1][:])


@MODELS
def test_one_call_is_watched_alone(made):
    model, name = made()
    with torch.no_grad(), watch(model, layers=[f"{name}@3"]) as seen, watch(model) as every:
        output(model)
    assert list(seen) == [f"{name}@3"]
    torch.testing.assert_close(seen[f"{name}@3"][:], every[f"{name}@3"][:])
    with pytest.raises(OptionError, match="'nowhere@3' is not a headwise layer|'nowhere@3'"):
        watch(model, layers=["nowhere@3"])


@MODELS
def test_heads_of_one_call_are_silenced_alone(made):
    model, name = made()
    with torch.no_grad():
        plain = output(model)
        with silence(model, {f"{name}@2": [1]}), watch(model) as seen:
            one = output(model)
            again = output(model)
        with watch(model) as before:
            output(model)
        with silence(model, {name: [1]}):
            every = output(model)
    assert torch.equal(one, again), "in every pass"
    for call in range(CALLS):
        same = torch.equal(seen[f"{name}@{call}"][:], before[f"{name}@{call}"][:])
        assert same == (call <= 2), "what comes before it is the same"
    assert not torch.allclose(one, plain)
    assert not torch.allclose(one, every)
    assert torch.equal(output(model).detach(), plain)


def test_silencing_one_call_is_zeroing_that_call():
    model, name = shared()
    quiet = copy.deepcopy(model.attention)
    with torch.no_grad():
        quiet.out_proj.weight[:, 8:16] = 0
        x = model.embedding(IDS)
        for call in range(CALLS):
            x = x + (quiet if call == 2 else model.attention)(x)
        with silence(model, {f"{name}@2": 1}):
            torch.testing.assert_close(model(IDS), x)


def test_silencing_every_call_and_one_more_head_of_one_call_adds_up():
    model, name = shared()
    with torch.no_grad(), silence(model, {name: [0], f"{name}@4": [1, 2]}), watch(model):
        found = model(IDS)
        with silence(model, {f"{name}@{i}": [0] for i in range(4)} | {f"{name}@4": [0, 1, 2]}):
            torch.testing.assert_close(model(IDS), found)


def test_a_call_that_never_happens_is_refused():
    model, name = shared()
    words = "'attention@5' was never called; a pass of this model calls 'attention' 5 times"
    with torch.no_grad(), pytest.raises(OptionError, match=words), silence(model, {f"{name}@5": [0]}):
        model(IDS)
    with pytest.raises(OptionError, match="'attention@x' is not a headwise layer"):
        silence(model, {"attention@x": [0]})


def test_a_pass_that_fails_does_not_confuse_the_next():
    model, _ = shared()
    with torch.no_grad(), watch(model) as seen:
        with pytest.raises(IndexError):
            model(IDS + WORDS)
        model(IDS)
    assert len(seen) == CALLS


def test_layers_called_by_hand_are_passes_of_their_own():
    model, _ = shared()
    x = torch.randn(1, 7, WIDTH)
    with torch.no_grad(), watch(model) as seen:
        for _ in range(3):
            model.attention(x)
    assert list(seen) == ["attention"]
    assert len(seen.calls["attention"]) == 3


def test_a_module_that_stands_twice_in_a_model_is_two_layers():
    layer = MultiHeadAttention(WIDTH, HEADS)
    net = nn.Sequential(layer, nn.ReLU(), layer)
    with torch.no_grad(), watch(net) as seen:
        net(torch.randn(1, 5, WIDTH))
    assert list(seen) == ["0@0", "0@1"]


def test_steps_of_generation_are_passes_not_layers():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("headwise.huggingface")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_head=HEADS, n_layer=2, bos_token_id=0, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.set_attn_implementation("headwise")
    with torch.no_grad(), watch(model) as seen:
        model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert [len(calls) for calls in seen.calls.values()] == [4, 4]
    assert list(seen) == ["transformer.h.0.attn", "transformer.h.1.attn"]


@MODELS
def test_view_serve_and_survey_show_every_call(made):
    module, name = made()
    model = TextModel("shared", module, TokenCodec(lambda text: [ord(x) % WORDS for x in text]))
    names = [f"{name}@{i}" for i in range(CALLS)]
    assert headwise.view(model, "the sea and the captain").names == tuple(names)
    for by in ("weight", "value"):
        assert list(Measures(by=by).of(model, [[1, 2, 3, 4, 5, 6]], 16)) == names
    assert layer_names(model) == names
    check_off(model, [(4, 2)])
    with pytest.raises(OptionError, match="layer 5: this model has 5 layers"):
        check_off(model, [(5, 0)])


def test_the_server_switches_heads_of_one_call_off():
    pytest.importorskip("transformers")
    module, name = albert()
    model = TextModel("albert", module, TokenCodec(lambda text: [3]))
    maps = run_model(model, RunTexts(IDS)).maps
    without = run_model(model, RunTexts(IDS), [(2, 1)]).maps
    assert list(maps) == [f"{name}@{i}" for i in range(CALLS)]
    assert torch.equal(without[f"{name}@2"][:], maps[f"{name}@2"][:])
    assert not torch.allclose(without[f"{name}@3"][:], maps[f"{name}@3"][:])


def test_one_call_is_silent_in_a_compiled_model_too():
    model, name = shared()
    with torch.no_grad(), silence(model, {f"{name}@2": 1}):
        expected = model(IDS)
        torch.testing.assert_close(torch.compile(model, backend="eager")(IDS), expected)


class Checkpointed(Shared):
    def forward(self, ids):
        x = self.embedding(ids)
        for _ in range(2):
            x = x + torch.utils.checkpoint.checkpoint(self.attention, x, use_reentrant=False)
        return x


def test_a_call_that_is_repeated_for_its_gradient_cannot_be_silenced_alone():
    model = Checkpointed()
    with silence(model, {"attention@1": 0}), pytest.raises(OptionError, match="not known which one it was"):
        model(IDS).sum().backward()
