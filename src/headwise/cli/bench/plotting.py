"""Time and memory against length, both axes logarithmic: a line for each candidate, named where it ends."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.cli.bench.growth import is_doubtful
from headwise.cli.bench.peers import OURS
from headwise.cli.bench.report import heading, sizes
from headwise.errors import OptionError, need
from headwise.models.files import atomically

# Colours that people with any kind of colour vision can tell apart, one for each family of candidates (Okabe and Ito);
# members of a family differ by their dashes and marks.
COLOURS = {
    OURS: "#D55E00",
    "SDPA": "#009E73",
    "FlexAttention": "#56B4E9",
    "nn.MHA": "#0072B2",
    "x-transformers": "#CC79A7",
    "GPT-2": "#E69F00",
    "Llama": "#7F7F7F",
    "keras": "#8C7A00",
    "textbook": "#000000",
}
SPARE = "#444444"
STYLES = (("-", "o"), ("--", "s"), (":", "^"))
PANELS = {"ms": "time, ms", "MiB": "memory, MiB"}
LINE_HEIGHT = 0.036  # of a panel: what a name needs
SUFFIXES = (".svg", ".png", ".pdf")


def check_drawable(path: Path) -> None:
    """Refuse what could not be drawn, before anything is measured for it."""
    if path.suffix not in SUFFIXES:
        raise OptionError(f"--plot {path}: expected a name that ends in {', '.join(SUFFIXES)}.")
    need("matplotlib", "bench", "plots")


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture of a result."""
    check_drawable(path)
    if not result["rows"]:
        raise OptionError(f"--plot {path}: nothing was measured, so there is nothing to draw.")
    matplotlib: Any = need("matplotlib", "bench", "plots")
    with matplotlib.rc_context({"svg.hashsalt": "headwise", "font.size": 9}):  # the same result, the same file
        made = figure(result)
        kind = {"Date": None} if path.suffix == ".svg" else None
        try:
            atomically(path, lambda beside: made.savefig(beside, format=path.suffix[1:], metadata=kind, dpi=150))
        except OSError as error:
            raise OptionError(f"--plot {path}: {error.strerror}. Name a file in a folder that exists.") from error


def figure(result: dict[str, Any]) -> Any:
    """A `matplotlib.figure.Figure` with one panel for time and one for memory."""
    made = need("matplotlib.figure", "bench", "plots").Figure(figsize=(12.5, 5.6), layout="constrained")
    made.suptitle(f"One attention layer: {sizes(result)}", fontsize=11)
    made.supxlabel(heading(result), fontsize=7, color="#555555")
    for axes, (key, label) in zip(made.subplots(1, 2), PANELS.items(), strict=True):
        _panel(axes, result, key, label)
    return made


def _panel(axes: Any, result: dict[str, Any], key: str, label: str) -> None:
    lines = {name: points for name, points in _points(result["rows"], key).items() if points}
    axes.set(xscale="log", yscale="log", xlabel="tokens", title=label)
    lengths = sorted({row["tokens"] for row in result["rows"]})
    axes.set_xticks(lengths, [f"{T:,}" for T in lengths])
    axes.minorticks_off()
    values = [value for points in lines.values() for _, value in points]
    if values and max(values) < 30 * min(values):  # too few powers of ten to read a value off
        ticker = need("matplotlib.ticker", "bench", "plots")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    for name, (colour, dashes, mark) in zip(lines, _looks(list(lines)), strict=True):
        ours = name == OURS
        axes.plot(
            *zip(*lines[name], strict=True),
            color=colour,
            linestyle=dashes,
            marker=mark,
            markersize=5 if ours else 3.5,
            linewidth=3 if ours else 1.3,
            zorder=3 if ours else 2,
        )
    _name(axes, result, key, lines)


def _points(rows: list[dict[str, Any]], key: str) -> dict[str, list[tuple[int, float]]]:
    names = dict.fromkeys(row["name"] for row in rows)
    return {name: [(row["tokens"], row[key]) for row in rows if row["name"] == name and row[key] > 0] for name in names}


def _looks(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Colour, dashes and mark of each."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        family = next((word for word in COLOURS if name.startswith(word)), name)
        seen[family] = seen.get(family, -1) + 1
        found.append((COLOURS.get(family, SPARE), *STYLES[seen[family] % len(STYLES)]))
    return found


def _name(axes: Any, result: dict[str, Any], key: str, lines: dict[str, list[tuple[int, float]]]) -> None:
    """Every line's name and exponent right of the panel, as near to its end as others allow."""
    ends = {name: points[-1] for name, points in lines.items()}
    low, high = (math.log(y) for y in axes.get_ylim())
    heights = {name: (math.log(y) - low) / (high - low) for name, (_, y) in ends.items()}
    placed = spread(heights)
    for name, (colour, _, _) in zip(lines, _looks(list(lines)), strict=True):
        law = result["growth"][name][key]
        power = "" if law is None else f"  $T^{{{law['exponent']:.2f}}}$" + "?" * is_doubtful(law)
        axes.annotate(
            name + power,
            ends[name],
            xytext=(1.06, placed[name]),
            textcoords="axes fraction",
            color=colour,
            fontsize=8,
            fontweight="bold" if name == OURS else "normal",
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "alpha": 0.6,
                "shrinkA": 2,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def spread(heights: dict[str, float], gap: float = LINE_HEIGHT) -> dict[str, float]:
    """The same heights, moved apart so that neighbours differ by `gap`, in their order and around their middle.

    >>> spread({"a": 0.5, "b": 0.5, "c": 0.9}, gap=0.1)
    {'a': 0.45, 'b': 0.55, 'c': 0.9}
    """
    groups: list[tuple[list[str], float]] = []  # names that touch, lowest first, and the middle of them
    for name in sorted(heights, key=heights.__getitem__):
        names, middle = [name], heights[name]
        while (
            groups and middle - gap * (len(names) - 1) / 2 < groups[-1][1] + gap * (len(groups[-1][0]) + 1) / 2 - 1e-9
        ):
            below, its_middle = groups.pop()
            middle = (its_middle * len(below) + middle * len(names)) / (len(below) + len(names))
            names = below + names
        groups.append((names, middle))
    placed = {n: middle + gap * (i - (len(g) - 1) / 2) for g, middle in groups for i, n in enumerate(g)}
    return {name: round(placed[name], 6) for name in heights}
