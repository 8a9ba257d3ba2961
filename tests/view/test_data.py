"""What a page is told is what the maps say, within its budget of bytes."""

import gzip
import json

import pytest
import torch

from headwise import AttentionMap, OptionError, Scoring, causal, load_builtin, sink, view, window
from headwise.view.data import PageData, manifest, plain, ratios, shares, whole_numbers
from headwise.view.page import embedded
from headwise.view.pictures import LayerStatistics, pixels, reach

TYPES = {"u1": torch.uint8, "u2": torch.uint16, "u4": torch.uint32, "f2": torch.float16, "f4": torch.float32}


def unpacked(section):
    """As the page reads it."""
    planes = torch.frombuffer(bytearray(gzip.decompress(section.data)), dtype=torch.uint8)
    width = int(section.type[1])
    found = planes.view(width, -1).T.contiguous().view(-1).view(TYPES[section.type]).view(section.shape)
    if section.code.startswith("sqrt "):
        return (found.float() / int(section.code[5:])) ** 2
    if section.code == "log":
        return torch.where(found > 0, 2 ** ((found.float() - 128) / 12), 0.0)
    return found


def served(result):
    """The data of a page with a server behind it."""
    data = PageData(result)
    for layer, weights in enumerate(result.maps):
        data.add_layer(layer, LayerStatistics.of(weights))
    return data


def maps(T, H=3, layers=2, mask=None):
    scoring = Scoring(mask=causal() if mask is None else mask)
    return [AttentionMap(torch.randn(1, H, T, 5) * 2, torch.randn(1, H, T, 5), scoring) for _ in range(layers)]


@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
def test_numbers_come_back_as_they_were(dtype):
    numbers = (torch.rand(3, 7, 11) * 200).to(dtype)
    assert torch.equal(unpacked(plain(numbers)), numbers)


def test_whole_numbers_take_two_bytes_where_they_fit():
    assert whole_numbers(torch.tensor([0, 65535])).type == "u2"
    assert whole_numbers(torch.tensor([0, 65536])).type == "u4"
    assert whole_numbers(torch.zeros(0)).shape == (0,)


def test_a_byte_tells_shares_and_ratios_to_a_step_of_colour():
    numbers = torch.rand(13, 17)
    for steps in (31, 255):
        assert (unpacked(shares(numbers, steps)).sqrt() - numbers.sqrt()).abs().max() <= 0.5 / steps + 1e-6
    times = torch.cat([torch.zeros(1), 2 ** torch.linspace(-10, 10, 101)])
    found = unpacked(ratios(times))
    assert found[0] == 0
    assert (found[1:].log2() - times[1:].log2()).abs().max() <= 0.5 / 12 + 1e-5
    assert found[51] == 1


def test_a_short_text_has_every_weight():
    result = view(load_builtin(), "The captain looked at the sea, and the sea looked at him.")
    data = embedded(result, 4_000_000)
    assert data.manifest["embedded"] == {"weights": "float32"}
    for layer, weights in enumerate(result.maps):
        for head in range(8):
            assert torch.equal(unpacked(data.sections[f"weights/{layer}.{head}"]), weights[0, head])
            logs = unpacked(data.sections[f"logs/{layer}.{head}"])
            torch.testing.assert_close(logs, weights.log_sum_exp()[0, head])


def test_a_longer_one_has_them_in_half_the_bytes():
    result = view(maps(113))
    whole = embedded(result, 4_000_000).size
    data = embedded(result, int(whole * 0.75))
    assert data.manifest["embedded"] == {"weights": "float16"}
    torch.testing.assert_close(unpacked(data.sections["weights/1.2"]), result.maps[1][0, 2].half())


@pytest.mark.parametrize(("share", "steps"), [(0.36, 255), (0.2, 31)])
def test_a_still_longer_one_has_every_weight_in_a_byte(share, steps):
    result = view(maps(211))
    whole = embedded(result, 8_000_000).size
    data = embedded(result, int(whole * share))
    assert data.manifest["embedded"]["weights"] == "bytes"
    assert data.manifest["embedded"]["steps"] >= steps
    steps = data.manifest["embedded"]["steps"]
    for layer, weights in enumerate(result.maps):
        for head in range(3):
            found = unpacked(data.sections[f"weights/{layer}.{head}"])
            assert (found.sqrt() - weights[0, head].sqrt()).abs().max() <= 0.5 / steps + 1e-6


def test_a_long_one_has_every_kind_of_picture_of_every_head():
    result = view(maps(1301))
    budget = 900_000
    data = embedded(result, budget)
    assert data.size <= budget
    told = data.manifest["embedded"]
    assert told["weights"] is None
    assert told["kinds"] == ["mass", "rest", "peak", "uniform"]
    shapes = {kind: {data.sections[f"{kind}/{layer}.{head}"].shape for layer in range(2) for head in range(3)}
              for kind in told["kinds"]}  # fmt: skip
    assert all(len(sizes) == 1 for sizes in shapes.values()), "all heads alike"
    for kind, sizes in shapes.items():
        span = -(-1301 // next(iter(sizes))[0])
        for layer, weights in enumerate(result.maps):
            exact = pixels(weights, span, range(1301), kind)
            for head in range(3):
                found = unpacked(data.sections[f"{kind}/{layer}.{head}"])
                if kind == "uniform":
                    seen = exact[head] > 2**-9
                    assert (found[seen].log2() - exact[head][seen].log2()).abs().max() < 0.05
                else:
                    assert (found.sqrt() - exact[head].clamp(max=1).sqrt()).abs().max() < 0.5 / 63 + 1e-3


def test_of_many_heads_pictures_are_coarser_and_still_of_every_kind():
    result = view(maps(1301, H=41, layers=1, mask=causal() & window(50)))
    data = embedded(result, 500_000)
    assert data.size <= 500_000
    assert data.manifest["embedded"]["kinds"] == ["mass", "rest", "peak", "uniform"]
    assert data.sections["peak/0.40"].shape[0] < 128


def test_the_clearest_heads_of_a_long_text_have_their_largest_weights():
    result = view(maps(1301))
    data = embedded(result, 1_500_000)
    told = data.manifest["embedded"]["keys"]
    order = [f"{layer}.{head}" for layer, head in data.manifest["clearest"]]
    assert told
    assert told == order[: len(told)]
    layer, head = map(int, told[0].split("."))
    best = result.maps[layer].topk(8)
    torch.testing.assert_close(unpacked(data.sections[f"values/{told[0]}"]), best.weights[0, head].half())
    assert torch.equal(unpacked(data.sections[f"keys/{told[0]}"]).long(), best.keys[0, head].clamp(min=0))


def test_a_whole_matrix_is_never_made_of_a_long_text(monkeypatch):
    result = view(maps(1100, H=1, layers=1, mask=causal() & window(3)))  # it would compress to next to nothing
    monkeypatch.setattr(AttentionMap, "__getitem__", lambda *_: pytest.fail("dense weights were asked for"))
    assert embedded(result, 3_000_000).manifest["embedded"]["weights"] is None


@pytest.mark.parametrize("budget", [200_000, 600_000, 1_500_000])
def test_a_budget_is_kept(budget):
    assert embedded(view(maps(523)), budget).size <= budget


def test_the_manifest_says_what_python_and_the_terminal_say():
    result = view(load_builtin(), "The captain looked at the sea.")
    told = manifest(result)
    for name, value in result.to_dict().items():
        if name != "layers":
            assert told[name] == value
    for mine, theirs in zip(told["layers"], result.summaries, strict=True):
        assert [head["numbers"] for head in mine["heads"]] == [head.numbers for head in theirs]
        assert [head["reading"] for head in mine["heads"]] == [head.reading for head in theirs]
    assert set(told["about"]) == set(result.summaries[0][0].numbers)
    json.dumps(told, allow_nan=False)


def test_edges_are_the_statistics_of_the_maps():
    result = view(maps(97))
    data = served(result)
    panel = result.maps[1].panel(entropy=True, peak=True, distance=True, received=True, pooled=(64, 64))
    rows = unpacked(data.sections["rows/1"])
    torch.testing.assert_close(rows[:, 0], panel.entropy[0])
    torch.testing.assert_close(rows[:, 1], panel.peak.weight[0])
    torch.testing.assert_close(rows[:, 2], panel.distance[0])
    torch.testing.assert_close(unpacked(data.sections["received/1"]), panel.received.total[0])
    assert (unpacked(data.sections["thumbnails/1"]).sqrt() - panel.pooled[0].sqrt()).abs().max() < 0.009
    rest = result.maps[1].without(sink(1)).pooled(64, 64)[0]
    assert (unpacked(data.sections["patterns/1"]).sqrt() - rest.sqrt()).abs().max() < 0.009
    assert not any(name.startswith(("weights", "mass", "keys")) for name in data.sections)


def test_long_edges_come_in_bins():
    result = view(maps(2050, H=1, layers=1))
    data = served(result)
    assert data.manifest["bin"] == 4
    entropy = result.maps[0].entropy()[0, 0]
    rows = unpacked(data.sections["rows/0"])[0, 0].float()
    assert rows.shape == (513,)
    torch.testing.assert_close(rows[1], entropy[4:8].mean(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rows[-1], entropy[2048:].mean(), rtol=1e-3, atol=1e-3)
    assert unpacked(data.sections["received/0"]).float().sum() == pytest.approx(2050, rel=1e-3)


def test_groups_of_heads_are_told():
    weights = AttentionMap(torch.randn(1, 6, 7, 5), torch.randn(1, 3, 7, 5))
    heads = manifest(view(weights))["layers"][0]["heads"]
    assert [head["group"] for head in heads] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("mask", [None, causal(), causal() & window(3), window(2, 4)], ids=repr)
@pytest.mark.parametrize("shape", [(13, 13), (7, 19), (19, 7)])
def test_reach_is_what_the_mask_shows(mask, shape):
    T, S = shape
    weights = AttentionMap(torch.randn(1, 2, T, 3), torch.randn(1, 2, S, 3), Scoring(mask=mask))
    found = reach(weights)
    seen = weights._source().scores()[0, 0] > -torch.inf
    for query in range(T):
        keys = seen[query].nonzero().flatten()
        assert found.count[0, query] == len(keys)
        if len(keys):
            assert (found.first[0, query], found.last[0, query]) == (keys[0], keys[-1])
        else:
            assert (found.first[0, query], found.last[0, query]) == (S, -1)


def test_a_bias_of_minus_infinity_hides_per_head():
    bias = torch.zeros(1, 2, 5, 7)
    bias[0, 1, :, :3] = -torch.inf
    weights = AttentionMap(torch.randn(1, 2, 5, 3), torch.randn(1, 2, 7, 3), Scoring(bias=bias))
    found = reach(weights)
    assert found.first[:, 0].tolist() == [0, 3]
    assert found.count[:, 0].tolist() == [7, 4]


def test_weights_that_are_no_numbers_are_refused():
    query = torch.randn(1, 2, 5, 3)
    query[0, 1, 2] = torch.nan
    with pytest.raises(OptionError, match="layer 0: its weights contain NaN"):
        embedded(view(AttentionMap(query, torch.randn(1, 2, 5, 3))), 10**6)
