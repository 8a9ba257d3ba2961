"""Wrong attention written out: faults that templates cannot show."""

import math

import pytest
import torch
from right_forms import KeepMask, OneHead, heads_of, joined
from torch import nn

from headwise.check import check


class SharedSmallMatrix(nn.Module):
    """One small matrix for every head's slice of the input."""

    def __init__(self, embed_size, heads):
        super().__init__()
        self.heads, d = heads, embed_size // heads
        self.values, self.keys, self.queries = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, values, keys, query, mask):
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (query, keys, values))
        q, k, v = self.queries(q), self.keys(k), self.values(v)
        energy = torch.einsum("nqhd,nkhd->nhqk", q, k)
        if mask is not None:
            energy = energy.masked_fill(mask == 0, -1e20)
        weights = torch.softmax(energy / q.size(-1) ** 0.5, dim=3)
        return self.fc_out(torch.einsum("nhql,nlhd->nqhd", weights, v).flatten(2))


class QueryAsKey(KeepMask):
    def forward(self, query, key, value):
        return super().forward(key, query, value)


class TooWide(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.heads = nn.ModuleList(OneHead(embed_dim, embed_dim) for _ in range(num_heads))

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)


class RepeatedInTheOtherOrder(KeepMask):
    """Heads folded behind the batch, the mask repeated as if they were folded before it."""

    def forward(self, q, k, v, mask=None):
        b = q.size(0)
        q, k, v = (heads_of(w(x), self.h).flatten(0, 1) for w, x in ((self.wq, q), (self.wk, k), (self.wv, v)))
        scores = q @ k.mT / q.size(-1) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask.repeat(self.h, 1, 1) == 0, -torch.inf)
        return self.wo(joined((scores.softmax(-1) @ v).unflatten(0, (b, self.h))))


class SoftmaxOverSamples(KeepMask):
    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        return self.wo(joined((q @ k.mT / q.size(-1) ** 0.5).softmax(0) @ v))


class OneHeadForAll(KeepMask):
    def forward(self, x):
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        return self.wo((q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v)


class InPlace(KeepMask):
    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
        out = weights @ v
        weights.mul_(2.0)
        return self.wo(joined(out))


class SwitchWithoutEffect(KeepMask):
    def __init__(self, d_model, num_heads, causal=False):
        super().__init__(d_model, num_heads)
        self.causal = causal

    def forward(self, x):
        return super().forward(x, x, x)


class AmbiguousMask(KeepMask):
    def forward(self, x, mask=None):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.mT / q.size(-1) ** 0.5
        if mask:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.wo(joined(scores.softmax(-1) @ v))


class CrossPathInForward(KeepMask):
    def forward(self, x, context=None):
        if context is not None:
            x = nn.Linear(x.size(-1), x.size(-1))(context)
        return super().forward(x, x, x)


class WrongOnlyWithoutMemory(KeepMask):
    def forward(self, x, memory=None):
        source = x if memory is None else memory
        q, k, v = heads_of(self.wq(x), self.h), heads_of(self.wk(source), self.h), heads_of(self.wv(source), self.h)
        scale = q.size(-1) ** -0.5 if memory is not None else 1.0
        return self.wo(joined((q @ k.mT * scale).softmax(-1) @ v))


class HalfOfTheBatch(KeepMask):
    """Samples are mixed by a view before the projections."""

    def forward(self, x):
        mixed = x + x.mean(0, keepdim=True)
        return super().forward(mixed, mixed, mixed)


class MisspelledAttribute(KeepMask):
    def forward(self, x):
        q, k, v = (heads_of(w(x), self.num_heads) for w in (self.wq, self.wk, self.wv))
        return self.wo(joined((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v))


class WrongConstructor(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.qkv = nn.Linear(d_model)

    def forward(self, x):
        return self.qkv(x).softmax(-1)


class HeadsOfOneTokenByEinsum(KeepMask):
    """The values are summed up without the weights: queries and keys have no effect at all."""

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.h, -1)) for w in (self.wq, self.wk, self.wv))
        weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) / q.size(-1) ** 0.5).softmax(-1)
        return self.wo(torch.einsum("bhqk,bhvd->bhqd", weights, v).flatten(2))


class ValuesWithAnAxisOfTheirOwn(KeepMask):
    """The axis of the keys has one letter in the weights and another one in the values."""

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) / q.size(-1) ** 0.5).softmax(-1)
        return self.wo(joined(torch.einsum("bhqk,bhvd->bhqd", weights, v)))


class PiecesOfTheSequence(KeepMask):
    """Heads were to be put into groups; tokens were."""

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h).chunk(3, dim=2) for w in (self.wq, self.wk, self.wv))
        read = [(a @ b.mT / a.size(-1) ** 0.5).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)]
        return self.wo(joined(torch.cat(read, dim=2)))


class FeaturesOfAHead(KeepMask):
    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        weights = (torch.einsum("bhtd,bhte->bhde", q, k) / q.size(-1) ** 0.5).softmax(-1)
        return self.wo(joined(torch.einsum("bhde,bhte->bhtd", weights, v)))


class MultiHeadAttentionOfOneHead(nn.Module):
    def __init__(self, embed_dim, qdim, kdim, vdim):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, embed_dim) for dim in (qdim, kdim, vdim))
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, q, k, v):
        q, k, v = self.to_q(q), self.to_k(k), self.to_v(v)
        return self.out((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v)


class ReturnsNothing(KeepMask):
    def forward(self, x):
        super().forward(x, x, x)


class HeadsNeverMerged(nn.Module):
    """It fails behind the attention, where input and sizes cannot be to blame."""

    def __init__(self, k, heads):
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values = (nn.Linear(k, k * heads) for _ in range(3))
        self.unify = nn.Linear(k * heads, k)

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.heads) for w in (self.queries, self.keys, self.values))
        return self.unify(((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v).transpose(1, 2))


class GroupedQueries(KeepMask):
    """Queries are split into the groups and keys into the heads: only equal numbers run."""

    def __init__(self, d_model, num_heads, num_query_groups):
        super().__init__(d_model, num_heads)
        self.groups = num_query_groups

    def forward(self, x):
        q, k, v = (heads_of(w(x), n) for w, n in ((self.wq, self.groups), (self.wk, self.h), (self.wv, self.h)))
        return self.wo(joined((q @ k.mT / k.size(-1) ** 0.5).softmax(-1) @ v))


class TurnedWithoutItsAngles(KeepMask):
    @staticmethod
    def turned(x, cos, sin):
        return x * cos + x.flip(-1) * sin

    def forward(self, x, cos, sin):
        q, k = self.turned(heads_of(self.wq(x), self.h)), self.turned(heads_of(self.wk(x), self.h))
        return self.wo(joined((q @ k.mT).softmax(-1) @ heads_of(self.wv(x), self.h)))


WRONG = {
    GroupedQueries: "grouped-crashes", TurnedWithoutItsAngles: "wrong-arguments",
    HeadsOfOneTokenByEinsum: "tokens-alone", PiecesOfTheSequence: "sees-a-part",
    FeaturesOfAHead: "attends-over-features", ValuesWithAnAxisOfTheirOwn: "weights-summed",
    MultiHeadAttentionOfOneHead: "single-head", ReturnsNothing: "no-return", HeadsNeverMerged: "out-proj-per-head",
    SharedSmallMatrix: "heads-share-weights", QueryAsKey: "wrong-role", TooWide: "too-wide",
    RepeatedInTheOtherOrder: "mask-wrong-sample", SoftmaxOverSamples: "softmax-axis", OneHeadForAll: "single-head",
    InPlace: "backward-fails", SwitchWithoutEffect: "causal-ignored", AmbiguousMask: "tensor-as-condition",
    CrossPathInForward: "layers-in-forward", WrongOnlyWithoutMemory: "scale-missing", HalfOfTheBatch: "batch-leak",
    MisspelledAttribute: "missing-attribute", WrongConstructor: "crashes",
}  # fmt: skip


@pytest.mark.parametrize(("form", "mistake"), WRONG.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_wrong_form_is_named(form, mistake):
    report = check(form)
    assert report.verdict == "wrong", report
    assert mistake in {finding.name for finding in report.findings if finding.severity == "wrong"}, report


class WindowedPieces(PiecesOfTheSequence):
    """The same on purpose: the name says so."""


def test_pieces_that_the_name_announces_are_not_called_wrong():
    assert check(WindowedPieces).verdict == "unknown"


class Unusual(KeepMask):
    """Scores through a sine: nothing we know, and not for us to call wrong."""

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        return self.wo(joined((q @ k.mT / q.size(-1) ** 0.5).sin().softmax(-1) @ v))


def test_what_is_not_understood_is_not_called_wrong():
    report = check(Unusual)
    assert (report.verdict, report.exit_code, report.cause) == ("unknown", 2, None)
    assert "how weights follow from queries and keys" in report.doubts
    assert "the code may be right or wrong" in str(report)


class TriangleLeftOut(KeepMask):
    """The mask is made of ones alone, so that it hides nothing."""

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        visible = torch.ones(x.size(1), x.size(1)).bool()
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(~visible, -torch.inf)
        return self.wo(joined(scores.softmax(-1) @ v))


def test_a_mask_of_sizes_alone_that_hides_nothing_is_blamed_where_it_is_made():
    first = check(TriangleLeftOut).wrong[0]
    assert (first.name, "torch.ones" in first.text) == ("causal-ignored", True)


class InputInPlaceOfWeights(KeepMask):
    def forward(self, x, need_weights=False):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        y = self.wo(joined((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v))
        return (y, x) if need_weights else y


def test_an_input_that_comes_back_where_weights_were_asked_for_is_wrong():
    assert check(InputInPlaceOfWeights).cause == "weights-returned"


class PaddingOnBothSides(KeepMask):
    """A mask of the real tokens hides padded keys, and every key from padded queries."""

    def forward(self, x, mask=None):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.mT / q.size(-1) ** 0.5
        if mask is not None:
            mask = mask.bool()
            if mask.dim() == 2:
                mask = mask[:, None, :] & mask[:, :, None]
            scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
        return self.wo(joined(scores.softmax(-1) @ v))


def test_a_mask_that_empties_the_rows_of_padding_is_wrong_only_where_they_become_nan():
    first = check(PaddingOnBothSides).wrong[0]
    assert (first.name, "&" in first.text) == ("mask-empties-rows", True)


class NoAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.linear(x)


def test_a_class_without_attention_is_not_judged():
    assert check(NoAttention).verdict == "unknown"


def test_fragile_findings_do_not_make_it_wrong():
    report = check(KeepMask)
    assert [finding.name for finding in report.findings] == ["nan-empty-row"]
    assert report.verdict == "right"


class NormalisedHeads(KeepMask):
    """A norm of queries and keys before the product, as newer models have it."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.q_norm, self.k_norm = nn.RMSNorm(d_model // num_heads), nn.LayerNorm(d_model // num_heads)

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        return self.wo(joined(nn.functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)))


class OneLengthOnly(KeepMask):
    """A learned bias for every pair of positions: no mask that somebody forgot to slice."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.register_buffer("index", torch.arange(81).view(9, 9))
        self.table = nn.Parameter(torch.zeros(81, num_heads))

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        bias = self.table[self.index].permute(2, 0, 1)
        return self.wo(joined((q @ k.mT / q.size(-1) ** 0.5 + bias).softmax(-1) @ v))


class ComparedWithTorch(KeepMask):
    """A second attention, only to compare with."""

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        read = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v
        assert torch.allclose(read, nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-3)
        return self.wo(joined(read))


class TwoInputWidths(nn.Module):
    def __init__(self, q_input_dim, cand_input_dim, d_model, n_heads):
        super().__init__()
        self.h = n_heads
        self.q, self.k, self.v = (nn.Linear(dim, d_model) for dim in (q_input_dim, cand_input_dim, cand_input_dim))
        self.out = nn.Linear(d_model, d_model)

    def forward(self, query, key_value):
        q, k, v = (
            heads_of(self.q(query), self.h),
            heads_of(self.k(key_value), self.h),
            heads_of(self.v(key_value), self.h),
        )
        return self.out(joined((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v))


class EncoderFirst(KeepMask):
    def forward(self, encoder_embs, decoder_embs):
        return super().forward(decoder_embs, encoder_embs, encoder_embs)


class ValidTokens(KeepMask):
    """A required mask under another name, which also clears rows of the output."""

    def forward(self, x, valid):
        return super().forward(x, x, x, valid[:, None, None, :]) * valid.unsqueeze(-1)


@pytest.mark.parametrize(
    "form",
    [NormalisedHeads, OneLengthOnly, ComparedWithTorch, EncoderFirst, TwoInputWidths, ValidTokens],
    ids=lambda form: form.__name__,
)
def test_unusual_and_right_is_not_called_wrong(form):
    report = check(form)
    assert report.verdict in ("right", "variant"), report
