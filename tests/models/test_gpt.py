"""The small GPT: what it computes, how it writes."""

import pytest
import torch

from headwise import OptionError, ShapeError, documents, watch
from headwise.models import GPT, GPTConfig
from headwise.models.gpt import Sampler

V, E, H, L, C = 53, 24, 3, 2, 31


def made(**options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(V, d_model=E, num_heads=H, num_layers=L, context_length=C, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def tokens(T, B=1):
    return torch.randint(1, V, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("position", ["rotary", "learned"])
@torch.no_grad()
def test_token_by_token_with_caches_is_the_whole_at_once(position):
    model, text = made(position=position), tokens(13, 2)
    caches = model.make_caches(2)
    steps = [model(text[:, :5], caches=caches)] + [model(text[:, t : t + 1], caches=caches) for t in range(5, 13)]
    torch.testing.assert_close(torch.cat(steps, 1), model(text))


@torch.no_grad()
def test_the_future_changes_nothing():
    model, text = made(), tokens(13)
    other = text.clone()
    other[0, 9:] = 7
    torch.testing.assert_close(model(text)[:, :9], model(other)[:, :9])


@torch.no_grad()
def test_texts_in_one_row_do_not_see_each_other():
    model, first, second = made(), tokens(5), tokens(8)
    row = torch.cat([first, second], 1)
    mask = documents(torch.tensor([[0] * 5 + [1] * 8]))
    torch.testing.assert_close(model(row, mask)[:, :5], model(first))
    torch.testing.assert_close(model(row, mask)[:, 5:], model(second))


@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_writing_goes_on_beyond_the_context(position):
    model = made(position=position)
    found = model.generate([0, 5, 7], 3 * C, temperature=0)
    assert found.shape == (3 + 3 * C,)
    assert found[:3].tolist() == [0, 5, 7]
    with torch.no_grad():
        for end in (4, 10, C):  # within the context: the likeliest token after all before it
            assert found[end] == model(found[None, :end])[0, -1].argmax()


def test_a_prompt_beyond_the_context_is_read_from_its_end():
    model, long = made(), tokens(2 * C)[0].tolist()
    short = [0, *long[-(C // 2) :]]
    assert model.generate(long, 3, temperature=0)[-3:].tolist() == model.generate(short, 3, temperature=0)[-3:].tolist()


def test_a_seed_gives_the_same_text_and_another_seed_another():
    model = made()
    first, again, other = (model.generate([0], 20, seed=seed).tolist() for seed in (3, 3, 4))
    assert first == again != other


def test_tokens_come_one_by_one():
    stream = made().stream([0, 1], 5, seed=0)
    assert isinstance(next(stream), int)
    assert len(list(stream)) == 4


def test_heads_can_be_watched_while_it_writes():
    model = made()
    with watch(model) as seen:
        model.generate([0, 1, 2], 4, seed=0)
    assert [weights.shape for weights in seen.calls["blocks.1.attention"]] == [
        (1, H, 3, 3), (1, H, 1, 4), (1, H, 1, 5), (1, H, 1, 6),
    ]  # fmt: skip


def test_sampler_takes_the_likeliest_few():
    logits = torch.tensor([1.0, 4.0, 2.0, 3.0])
    share = logits.double().softmax(0)
    torch.testing.assert_close(Sampler(1.0).probabilities(logits), share)
    assert Sampler(1.0, top_k=2).probabilities(logits).nonzero()[:, 0].tolist() == [1, 3]
    assert Sampler(1.0, top_p=0.5).probabilities(logits).nonzero()[:, 0].tolist() == [1]
    assert Sampler(1.0, top_p=0.7).probabilities(logits).nonzero()[:, 0].tolist() == [1, 3]
    torch.testing.assert_close(Sampler(0.5).probabilities(logits), (2 * logits.double()).softmax(0))


def test_sampler_draws_as_often_as_probable():
    sampler, logits = Sampler(1.0, seed=0), torch.tensor([0.0, 1.0, 2.0])
    drawn = torch.bincount(torch.tensor([sampler(logits) for _ in range(4000)]), minlength=3) / 4000
    torch.testing.assert_close(drawn.double(), logits.double().softmax(0), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.generate([], 3), ShapeError, "no tokens to continue"),
        (lambda m: m.generate([0], 0), OptionError, "max_new_tokens=0"),
        (lambda m: m.generate([0], 1, temperature=-1), OptionError, "temperature=-1"),
        (lambda m: m.generate([0], 1, top_k=0), OptionError, "top_k=0"),
        (lambda m: m.generate([0], 1, top_p=1.5), OptionError, "top_p=1.5"),
        (lambda m: m(torch.zeros(3, dtype=torch.long)), ShapeError, r"tokens have shape \(3,\)"),
        (lambda m: m(torch.zeros(1, 3)), ShapeError, "float32; expected integers"),
        (lambda m: m(torch.zeros(1, 0, dtype=torch.long)), ShapeError, r"\(1, 0\)"),
        (lambda m: GPTConfig(V, position="sine"), OptionError, "position='sine'"),
        (lambda m: GPTConfig(0), OptionError, "vocab_size=0"),
        (lambda m: made(position="learned")(tokens(C + 1)), ShapeError, "32 tokens; this model has learned"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(made())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while inductor starts
def test_it_compiles_as_one_graph():
    model, text = made(), tokens(13)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(text), model(text))
