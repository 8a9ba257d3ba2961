"""Traces equal their definitions on dense weights and gradients; deletions are measured as described."""

import json

import pytest
import torch

from headwise import OptionError, trace, watch
from headwise.models import open_model
from headwise.view.traced import trace_page
from tiny_models import CAUSAL, H, V, states, tiny

T = 13
SPAN = (9, 11)


def dense(model, tokens):
    """The text up to the answer's end, watched, and the answer's log-probability."""
    with watch(model, outputs=True) as seen:
        output = model(tokens)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    chance = logits[0, SPAN[0] - 1 : SPAN[1] - 1].log_softmax(-1).gather(1, tokens[0, SPAN[0] : SPAN[1], None]).sum()
    return seen, chance


@pytest.fixture(params=CAUSAL)
def model(request):
    return tiny(request.param)


@pytest.fixture
def tokens():
    return torch.randint(3, V, (1, T))


def test_every_method_is_its_definition_on_dense_weights(model, tokens):
    found = trace(model, tokens, SPAN, draws=2)
    seen, chance = dense(model, tokens[:, : SPAN[1]])
    size, rows = SPAN[1], slice(SPAN[0] - 1, SPAN[1] - 1)
    maps = [layer.weights.to_tensor().detach()[0] for layer in seen.outputs.values()]
    share = torch.zeros(size).double()
    share[rows] = 0.5
    for weights in reversed(maps):
        share = 0.5 * (share + weights.mean(0).T @ share)
    torch.testing.assert_close(found.scores["rollout"], share[: SPAN[0]])
    attention = torch.stack([weights[:, rows].mean((0, 1)) for weights in maps]).mean(0)
    torch.testing.assert_close(found.scores["attention"], attention[: SPAN[0]])
    parts, slopes = [], torch.autograd.grad(chance, [layer.read for layer in seen.outputs.values()])
    gradient = torch.zeros(size).double()
    for layer, weights, slope in zip(seen.outputs.values(), maps, slopes, strict=True):
        value = layer.value[0].detach().repeat_interleave(H // layer.value.shape[1], 0)
        written = torch.einsum("hsd,hde->hse", value, layer.out)
        whole = weights @ written
        each = weights * (whole @ written.transpose(1, 2)) / whole.square().sum(-1, keepdim=True)
        parts.append(each[:, rows].mean((0, 1)))
        gradient += (weights * (slope[0] @ value.transpose(1, 2))).sum((0, 1))  # A ∘ ∂L/∂A, summed over queries
    torch.testing.assert_close(found.scores["contributions"], torch.stack(parts).mean(0)[: SPAN[0]])
    torch.testing.assert_close(found.scores["gradient"], gradient[: SPAN[0]])
    assert found.loss == pytest.approx(-chance.item() / 2)


def test_deleting_passages_is_running_the_text_without_them(model, tokens):
    passages = [(1, 3), (3, 5), (5, 8), (0, 1)]
    found = trace(model, tokens, SPAN, passages=passages, delete=0.5, draws=3)
    assert found.tests["passages"] == 2
    for method in found.scores:
        top = [passages[i] for i in found.of_passages(method).topk(2).indices.tolist()]
        gone = {place for start, stop in top for place in range(start, stop)}
        kept = tokens[:, [place for place in range(SPAN[1]) if place not in gone]]
        with torch.no_grad():
            output = model(kept)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        loss = torch.nn.functional.cross_entropy(logits[0, -3:-1], kept[0, -2:])
        assert found.tests[method] == pytest.approx(loss.item())
    assert found.tests["random"]["draws"] == 3


def test_models_whose_parameters_are_frozen_have_gradients_too(tokens):
    model = tiny("llama")
    expected = trace(model, tokens, SPAN, methods=["gradient"], draws=1).scores["gradient"]
    model.requires_grad_(False)
    found = trace(model, tokens, SPAN, methods=["gradient"], draws=1)
    torch.testing.assert_close(found.scores["gradient"], expected)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_repeated_name_is_traced_to_where_it_stood():
    model = open_model("builtin")
    text = (
        "Mr. Pemberton lived in a small house by the river. He had a dog named Barnaby, who slept all day. The rain "
        "fell upon the roofs of the town. His sister had gone to London in the spring. Nobody knew what had become of "
        "the letter. The garden was full of roses. In the evening Mr. Pemberton called his dog, whose name was Barn"
    )
    tokens = model.tokens(text)
    found = trace(model, tokens, (tokens.shape[1] - 1, tokens.shape[1]))
    names = ["".join(found.words[start:stop]) for start, stop in found.passages]
    assert "Barnaby" in names[found.of_passages("gradient").argmax()]
    assert "answer: arn" in found.table()
    assert all(len(line) <= 80 for line in found.table(80).splitlines())
    data = json.loads(json.dumps(found.to_json()))
    assert data["scores"]["rollout"] == found.scores["rollout"].tolist()
    page = trace_page(found, "<model>")
    assert "&lt;model&gt;" in page
    assert "<script" not in page
    assert "Barnaby" in page


def test_scores_of_layers_make_up_the_whole(tokens):
    found = trace(tiny("gpt2"), tokens, SPAN, draws=1)
    layers = torch.stack(list(found.by_layer["gradient"].values()))
    torch.testing.assert_close(layers.sum(0), found.scores["gradient"])
    pytest.importorskip("matplotlib").use("agg")
    assert found.plot().get_xlabel() == "passage"


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("builtin", {"answer": (0, 2)}, "tokens after the first"),
        ("builtin", {"answer": (4, 99)}, r"\(4, 99\).*<= 13"),
        ("builtin", {"methods": ["magic"]}, "expected some of rollout"),
        ("builtin", {"passages": [(0, 4)]}, "two or more"),
        ("bert", {}, "gives no logits"),
        ("bart", {}, "sees the tokens after each one"),
    ],
)
def test_what_cannot_be_traced_is_refused(kind, change, words, tokens):
    with pytest.raises(OptionError, match=words):
        trace(tiny(kind), tokens, **{"answer": SPAN} | change)


@pytest.mark.parametrize(
    "text",
    [
        "The extraordinarily disagreeable housekeeper complained. Nobody listened to her complaints about the cold",
        "Whatsoever happened notwithstanding, the schoolmasters remembered everything",
    ],
    ids=["two sentences", "one sentence"],
)
def test_passages_never_cut_a_word(text):
    model = open_model("builtin")
    tokens = model.tokens(text)
    found = trace(model, tokens, (tokens.shape[1] - 1, tokens.shape[1]), methods=["attention"], draws=1)
    assert len(found.passages) > 2
    for (_, stop), (start, _) in zip(found.passages, found.passages[1:], strict=False):
        assert stop == start
        assert not (found.words[start][0].isalnum() and found.words[start - 1][-1].isalnum())


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_score_is_traced_to_its_tokens(kind, tokens):
    """Any number that the output gives, written from the definitions on dense weights."""
    model = tiny(kind)

    def score(output, ids):
        return states(output)[0].mean(0)[:3].sum()

    found = trace(model, tokens, score=score, passages=[(1, 4), (4, 8), (8, 12)], draws=2)
    with watch(model, outputs=True) as seen:
        whole = score(model(tokens), tokens)
    share, maps = torch.full((T,), 1 / T).double(), [x.weights.to_tensor().detach()[0] for x in seen.outputs.values()]
    for weights in reversed(maps):
        share = 0.5 * (share + weights.mean(0).T @ share)
    torch.testing.assert_close(found.scores["rollout"], share)
    slopes = torch.autograd.grad(whole, [layer.read for layer in seen.outputs.values()])
    gradient = torch.zeros(T).double()
    for layer, weights, slope in zip(seen.outputs.values(), maps, slopes, strict=True):
        value = layer.value[0].detach().repeat_interleave(H // layer.value.shape[1], 0)
        gradient += (weights * (slope[0] @ value.transpose(1, 2))).sum((0, 1))
    torch.testing.assert_close(found.scores["gradient"], gradient)
    assert found.loss == pytest.approx(-whole.item())
    start, stop = found.passages[found.of_passages("gradient").argmax()]
    with torch.no_grad():
        rest = tokens[:, [place for place in range(T) if not start <= place < stop]]
        assert found.tests["gradient"] == pytest.approx(-score(model(rest), rest).item())
    assert f"score {whole.item():.3f}; after deleting 1 of 3 passages" in found.table()
    assert found.to_json()["answer"] is None
    assert "Where the score came from" in trace_page(found, kind)


def test_a_trace_has_an_answer_or_a_score(tokens):
    model = tiny("llama")
    with pytest.raises(OptionError, match="pass answer=, the tokens of an answer, or score="):
        trace(model, tokens)
    with pytest.raises(OptionError, match=r"score returned shape \(13,\); expected a tensor with one number"):
        trace(model, tokens, score=lambda output, ids: output.logits[0, :, 0])
