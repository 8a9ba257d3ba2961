"""One pass gives the statistics of whole rows and of rows without their first key, as dense weights do."""

import pytest
import torch

from headwise import AttentionMap, Scoring, causal, documents, local, padding, previous_token, same_token, sink, window
from headwise.weights import streaming
from headwise.weights.parts import RowParts
from headwise.weights.readings import octave, octave_count

B, H, Hkv, T, D = 2, 6, 3, 37, 7
IDS = torch.randint(0, 5, (B, T), generator=torch.Generator().manual_seed(3))
PROBES = {"previous": previous_token(), "local": local(3), "same": same_token(IDS)}
MASKS = {
    "none": None,
    "causal": causal(),
    "a window without the first key": causal() & window(4),
    "right padding": causal() & padding([T, 23]),
    "left padding": causal() & padding([19, T], side="left"),
    "documents": causal() & documents(lengths=[11, T - 11]),
}


def sample(mask, dtype, *, strong=0.0, sinks=False):
    """A map whose first key may take nearly everything in one head."""
    torch.manual_seed(5)
    query, key = torch.randn(B, H, T, D), torch.randn(B, Hkv, T, D)
    query[0, 0, :, 0], key[0, 0, 0, 0] = 3.0, strong
    scoring = Scoring(MASKS[mask], scale=1.0, sinks=torch.randn(H) if sinks else None)
    return AttentionMap(query.to(dtype), key.to(dtype), scoring)


def dense_rows(weights, *, without=False):
    """The numbers of dense float64 weights, padded queries left out."""
    exact = weights.to(torch.float64)
    A, S = exact.to_tensor() * exact.real_tokens().queries[:, None, :, None], weights.shape[3]
    hide = exact._probe(sink(1)).to_tensor(T, S)
    if without:
        A = A.masked_fill(hide, 0.0)
        A = A / A.sum(-1, keepdim=True).clamp(min=1e-300)
    apart = (torch.arange(T)[:, None] - torch.arange(S)).abs()
    largest, key = A.max(-1)
    bins = octave(apart).expand(A.shape).flatten(2)
    histogram = A.new_zeros(B, H, octave_count(T, S)).scatter_add(-1, bins, A.flatten(2))
    queries = exact.real_tokens().queries.sum(-1)[:, None, None]
    return {
        "entropy": torch.special.entr(A).sum(-1),
        "distance": (A * apart).sum(-1),
        "peak": largest,
        "key": key.masked_fill(largest == 0, -1),
        "histogram": histogram / queries,
        **{name: (A * exact._probe(probe).to_tensor(T, S)).sum(-1) for name, probe in PROBES.items()},
    }


def found_rows(panel):
    return {
        "entropy": panel.entropy,
        "distance": panel.distance,
        "peak": panel.peak.weight,
        "key": panel.peak.key,
        "histogram": panel.histogram,
        **{name: panel.masses[name] for name in PROBES},
    }


@pytest.mark.parametrize("way", ["float64", "float32", "float32 by tiles"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("strong", [0.0, 4.0, 60.0], ids=["even", "strong", "nothing left"])
@pytest.mark.parametrize("mask", MASKS)
def test_both_parts_give_what_dense_weights_give(mask, strong, sinks, way, monkeypatch):
    if way.endswith("tiles"):
        monkeypatch.setattr(streaming.compiled, "refuses", lambda source: "it is switched off")
    dtype = torch.float64 if way == "float64" else torch.float32
    weights = sample(mask, dtype, strong=strong, sinks=sinks)
    parts = RowParts.of(weights, PROBES, distance=True, histogram=True)
    sees_others = weights._within(~sink(1))._unpadded().keys_seen() > 0
    pairs = {
        "whole": (parts.whole(), dense_rows(weights)),
        "without": (parts.without_first(sees_others)[1], dense_rows(weights, without=True)),
    }
    largest = 180 if strong > 50 else 12  # score; that is what float32 rounds
    most = 2 * largest * torch.finfo(dtype).eps + 1e-12
    for which, (found, exact) in pairs.items():
        for name, value in found_rows(found).items():
            if name == "key":
                assert (value == exact["key"]).float().mean() > 0.995  # two weights may be equal up to rounding
            else:
                error = (value.double() - exact[name]).abs() / (exact[name].abs() + 4)
                assert error.max() < most, (which, name)
