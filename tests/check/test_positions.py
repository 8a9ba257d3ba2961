"""Tables of biases by position are read beyond their ends."""

import pytest
import torch
from torch import nn

from headwise.check import check


class ByDistance(nn.Module):
    """A learned bias for every distance between query and key, cut off at 8."""

    def __init__(self, dim, heads, reach=8):
        super().__init__()
        self.heads, self.reach = heads, reach
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.table = nn.Parameter(torch.zeros(heads, 2 * reach + 1))

    def rows(self, distance):
        return distance.clamp(-self.reach, self.reach) + self.reach

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        place = torch.arange(x.size(1), device=x.device)
        bias = self.table[:, self.rows(place[None, :] - place[:, None])]
        weights = (q @ k.mT / q.size(-1) ** 0.5 + bias).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class EitherSideAlike(ByDistance):
    def rows(self, distance):
        return distance.abs().clamp(max=self.reach)


class CutOffAboveOnly(ByDistance):
    def rows(self, distance):
        return distance.clamp(max=self.reach) + self.reach


class PastOnly(ByDistance):
    """Causal, with a row for every distance into the past."""

    def rows(self, distance):
        return (-distance).clamp(0, 2 * self.reach)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        place = torch.arange(x.size(1), device=x.device)
        bias = self.table[:, self.rows(place[None, :] - place[:, None])]
        scores = (q @ k.mT / q.size(-1) ** 0.5 + bias).masked_fill(place[None, :] > place[:, None], -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class PastWithTheWrongSign(PastOnly):
    def rows(self, distance):
        return distance.clamp(0, 2 * self.reach)


@pytest.mark.parametrize("form", [ByDistance, PastOnly], ids=lambda form: form.__name__)
def test_a_table_that_is_read_rightly_is_right(form):
    assert check(form).verdict == "variant", check(form)


def test_a_table_that_does_not_tell_the_sides_apart_does_not_wrap():
    assert "bias-wraps" not in {finding.name for finding in check(EitherSideAlike).findings}


@pytest.mark.parametrize(
    ("form", "cause"),
    [(CutOffAboveOnly, "bias-wraps"), (PastWithTheWrongSign, "bias-constant")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_table_that_is_read_wrongly_is_named_with_the_line_of_its_index(form, cause):
    report = check(form)
    assert report.cause == cause, report
    assert "clamp" in report.wrong[0].text
