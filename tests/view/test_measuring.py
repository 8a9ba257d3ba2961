"""Which keys queries see: by the mask's rule where that is enough, else by looking; both as the dense mask says."""

import pytest
import torch

from headwise import AttentionMap, Scoring, causal, dense, documents, padding, prefix, window
from headwise.view import pictures
from headwise.view.pictures import reach

T, S = 53, 71
MASKS = {
    "everything": (T, S, None, True),
    "causal": (T, T, causal(), True),
    "causal, more keys": (T, S, causal(), True),
    "causal, some see nothing": (S, T, causal(), True),
    "window": (T, T, causal() & window(7), True),
    "both sides": (T, T, window(3, 5), True),
    "documents": (T, T, causal() & documents(lengths=[19, 34]), None),
    "prefix": (T, T, causal() | prefix(11), None),
    "padding": (T, T, padding([47]), None),
    "holes": (T, S, dense(torch.arange(T * S).view(T, S) % 3 > 0), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_first_last_and_number_are_those_of_the_dense_mask(name, monkeypatch):
    queries, keys, mask, by_rule = MASKS[name]
    weights = AttentionMap(torch.randn(1, 3, queries, 5), torch.randn(1, 3, keys, 5), Scoring(mask=mask))
    looked = []
    original = pictures._reach_of
    monkeypatch.setattr(pictures, "_reach_of", lambda *given: looked.append(1) or original(*given))
    found = reach(weights)
    seen = weights._source().scores()[0, 0] > -torch.inf
    numbers = torch.arange(keys)
    assert found.count[0].tolist() == seen.sum(-1).tolist()
    for query in range(queries):
        there = numbers[seen[query]]
        assert int(found.first[0, query]) == (int(there[0]) if len(there) else keys)
        assert int(found.last[0, query]) == (int(there[-1]) if len(there) else -1)
    if by_rule is not None:
        assert bool(looked) is not by_rule
