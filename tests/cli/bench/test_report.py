"""A result as JSON, tables and pictures."""

import itertools
import json

import pytest

from headwise.cli.bench import report
from headwise.cli.bench.peers import matching
from headwise.cli.bench.report import draw, figure, spread
from headwise.cli.bench.sweep import Effort, ladder, measured
from headwise.cli.bench.weights import weight_costs
from headwise.cli.bench.workload import Workload
from headwise.errors import OptionError

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def result():
    workload, effort = Workload(12, 3, batch=2), Effort(0.01, 5.0, quiet=True)
    found = measured(workload, [5, 7], matching("headwise,flex,nn.mha"), effort)
    return found | {"ladder": ladder(workload, [5], effort), "looking": weight_costs(workload, [5, 7], effort)}


def test_a_result_read_from_json_gives_the_same_tables(result):
    again = json.loads(json.dumps(result))
    assert report.tables(again) == report.tables(result)
    assert report.left_out(again) == report.left_out(result)


def test_a_result_says_device_versions_and_commit(result):
    assert result["subject"] == "bench"
    text = report.heading(result)
    for word in (result["device"], f"torch {result['torch']}", f"commit {result['commit']}"):
        assert word in text


def test_tables_have_a_row_for_each_candidate_and_a_column_for_each_length(result):
    time, memory, ladder, *looks = report.tables(result)
    assert time.head == ["", "T=5", "T=7", "grows", "ceiling"]
    assert memory.head == ["", "T=5", "T=7", "grows"]
    assert [row[0] for row in time.rows] == ["headwise", "nn.MHA", "nn.MHA with weights"]
    assert [row[0] for row in ladder.rows][-1] == "headwise, 3 heads"
    assert ladder.title.startswith(
        "the ladder: forward, then forward+backward, T=5; measured here, textbook class against textbook list "
        "(3 heads, T=5): forward "
    )
    assert ", forward+backward " in ladder.title
    assert ladder.title.endswith("); 95 % intervals")
    assert len(looks) == 4
    for table in (time, memory, ladder, *looks):
        assert {len(row) for row in table.rows} == {len(table.head)}


def test_the_ladder_claims_no_difference_within_the_noise(result):
    part = result["ladder"]
    for row in part:
        row["ratio"] = {"median": 0.9, "low": 0.7, "high": 1.2} if row["mode"] == "forward" else {
            "median": 0.81, "low": 0.75, "high": 0.88
        }  # fmt: skip
    title = report.ladder(part).title
    assert "forward no difference beyond the noise (0.70 to 1.20), " in title
    assert "forward+backward 0.81 times as long (0.75 to 0.88); 95 % intervals" in title


def test_two_lengths_make_a_line_and_no_evidence(result):
    assert all(row[3].endswith("?") for row in report.tables(result)[0].rows)


def test_a_candidate_that_left_early_has_empty_cells():
    row = {"name": "a", "tokens": 5, "ms": 1.0, "spread": 0.1, "MiB": 1.0, "share": 0.5}
    part = {
        "rows": [row, row | {"tokens": 7, "name": "b"}],
        "growth": {name: {"ms": None, "MiB": None} for name in "ab"},
    }
    assert report.tables(part)[0].rows == [["a", "1±5%", "", "", ""], ["b", "", "1±5%", "", "50.00%"]]


def test_who_was_left_out_is_told_with_the_reason(result):
    assert report.left_out(result)[0].startswith("FlexAttention by hand: on CUDA only")


def test_markdown_is_a_table(result):
    lines = report.markdown(report.tables(result)[0])
    assert lines[0] == "*time of a layer, ms*"
    assert lines[2] == "|  | T=5 | T=7 | grows | ceiling |"
    assert lines[3] == "|---|---|---|---|---|"
    assert lines[4].startswith("| headwise | ")


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_of_one_result_is_always_the_same_file(result, suffix, tmp_path):
    for name in ("a", "b"):
        draw(result, tmp_path / f"{name}.{suffix}")
    first = (tmp_path / f"a.{suffix}").read_bytes()
    assert len(first) > 10_000
    assert first == (tmp_path / f"b.{suffix}").read_bytes()


def test_a_picture_names_every_candidate_with_its_exponents(result):
    made = figure(result)
    for axes, key in zip(made.axes, ("ms", "MiB"), strict=True):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert len(axes.lines) == len(axes.texts) == 3
        for text, name in zip(axes.texts, result["growth"], strict=True):
            power = result["growth"][name][key]["exponent"]
            assert text.get_text() == f"{name}  $T^{{{power:.2f}}}$?"


def test_a_picture_of_another_kind_is_refused(result, tmp_path):
    with pytest.raises(OptionError, match=r"expected a name that ends in .svg, .png, .pdf"):
        draw(result, tmp_path / "a.gif")


def test_a_picture_of_nothing_is_refused(result, tmp_path):
    with pytest.raises(OptionError, match="nothing was measured"):
        draw({**result, "rows": []}, tmp_path / "a.svg")


def test_names_beside_a_picture_never_overlap_and_keep_their_order():
    heights = {"a": 0.5, "b": 0.501, "c": 0.52, "d": 0.9, "e": 0.1}
    placed = spread(heights, gap=0.05)
    order = sorted(heights, key=heights.get)
    assert sorted(placed, key=placed.get) == order
    assert all(placed[b] - placed[a] > 0.05 - 1e-5 for a, b in itertools.pairwise(order))
    assert placed["d"] == 0.9
