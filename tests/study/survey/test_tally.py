"""Adding up gives the same to the last bit in any order, grouping and number of parts."""

import json
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.study.survey import tally as tallies
from headwise.study.survey.tally import ONE, Skipped, Tally, as_integers

NUMBERS = st.floats(0, 2.0**60, allow_subnormal=False)


def one(numbers, bad=()):
    tally = Tally()
    tally.counts["documents"] = 1
    tally.add_layer("layer", {"sink sum": as_integers(torch.tensor(numbers, dtype=torch.float64))})
    tally.skip(bad)
    return tally


def text(tally):
    return json.dumps(tally.to_dict())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=12), st.randoms())
def test_tallies_add_up_alike_in_any_order_and_grouping(rows, draw):
    parts = [one(row, [Skipped("file", i, "empty")]) for i, row in enumerate(rows)]
    straight = Tally()
    for part in parts:
        straight.add(part)
    shuffled = parts.copy()
    draw.shuffle(shuffled)
    groups = [Tally() for _ in range(3)]
    for part in shuffled:
        draw.choice(groups).add(Tally.from_dict(json.loads(text(part))))
    grouped = Tally()
    for group in groups:
        grouped.add(group)
    assert text(grouped) == text(straight)


@given(NUMBERS)
def test_a_number_is_written_down_to_2_to_the_minus_64_and_from_2_to_the_minus_11_exactly(number):
    found = as_integers(torch.tensor([number], dtype=torch.float64))[0] / int(ONE)
    assert abs(found - number) <= 1 / ONE
    assert found == number or number < 2**-11


def test_floats_added_up_would_not_be_alike():
    draw = random.Random(0)  # noqa: S311
    numbers = [draw.random() * 10 ** draw.randint(-6, 6) for _ in range(1000)]
    assert sum(numbers) != sum(sorted(numbers))
    exact = [sum(as_integers(torch.tensor(x, dtype=torch.float64))) for x in (numbers, sorted(numbers))]
    assert exact[0] == exact[1]


def test_the_first_of_what_was_skipped_are_named_whoever_saw_them(monkeypatch):
    monkeypatch.setattr(tallies, "LISTED", 5)
    bad = [Skipped("b" if i % 2 else "a", i, "empty") for i in range(11)]
    forwards, backwards = Tally(), Tally()
    for each, other in zip(bad, reversed(bad), strict=True):
        forwards.skip([each])
        backwards.skip([other])
    assert forwards.skipped == backwards.skipped == [Skipped("a", i, "empty") for i in (0, 2, 4, 6, 8)]
