"""A result as tables of text, for the terminal and the documents, and as a plot of time and memory against length."""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from headwise.cli.bench.measurement import Ratio, is_doubtful
from headwise.cli.bench.peers import OURS
from headwise.cli.bench.sweep import RUNGS
from headwise.cli.bench.weights import TITLES
from headwise.cli.console import write_file
from headwise.errors import OptionError, need
from headwise.learn.cost import human

# Okabe and Ito's colors, which people with any kind of color vision can tell apart: one for each family of candidates.
# Members of a family differ in dashes and markers.
COLORS = {
    OURS: "#D55E00", "SDPA": "#009E73", "FlexAttention": "#56B4E9", "nn.MHA": "#0072B2", "x-transformers": "#CC79A7",
    "GPT-2": "#E69F00", "Llama": "#7F7F7F", "keras": "#8C7A00", "textbook": "#000000",
}  # fmt: skip
SPARE = "#444444"
STYLES = (("-", "o"), ("--", "s"), (":", "^"))
PANELS = {"ms": "time, ms", "MiB": "memory, MiB"}
LINE_HEIGHT = 0.036  # of a panel, for one name
MOST_SPREAD = 2.0  # half the interquartile range, relative to the median; beyond it, a time says nothing
SUFFIXES = (".svg", ".png", ".pdf")


class Table(NamedTuple):
    """A title, the column names, the first of them empty, and rows of cells."""

    title: str
    head: list[str]
    rows: list[list[str]]


def heading(result: dict[str, Any]) -> str:
    """The device, the versions and the commit."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['device']}, torch {result['torch']}, {versions or 'no other package'}, commit {result['commit']}"


def sizes(result: dict[str, Any]) -> str:
    """The sizes and kind of the measured layer."""
    s = result["setting"]
    kind = "causal" if s["causal"] else "no mask"
    mode = "forward and backward" if s["backward"] else "forward"
    return f"batch {s['batch']}, width {s['d_model']}, {s['heads']} heads, {s['dtype']}, {kind}, {mode}"


def ceilings(result: dict[str, Any]) -> str:
    """The machine's ceilings."""
    most, dtype = result["ceilings"], result["setting"]["dtype"]
    flops, moved = human(most["flops"], "FLOP/s"), human(most["bytes"], "B/s")
    return f"{flops} in a {dtype} matrix product, {moved} in a copy, measured in the same run"


def tables(result: dict[str, Any]) -> list[Table]:
    """Time and memory of the layer; then the ladder and the cost of weights, if they were measured."""
    return [
        *(layer(result) if result["rows"] else []),
        *([ladder(result["ladder"])] if "ladder" in result else []),
        *weights(result),
    ]


def layer(result: dict[str, Any]) -> list[Table]:
    """Time and memory of the layer and its peers."""
    memory = _by_length(result, "memory beyond weights and input, MiB", "MiB")
    return [_by_length(result, "time of a layer, ms", "ms", share=True), memory]


def weights(result: dict[str, Any]) -> list[Table]:
    """Time and memory of everything that returns weights, or sums of them; empty if it was not measured."""
    made = []
    for name, part in result.get("looking", {}).items():
        made += [_by_length(part, f"{TITLES[name]}: ms", "ms"), _by_length(part, "and its memory, MiB", "MiB")]
    return made


def left_out(result: dict[str, Any]) -> list[str]:
    """Which candidates were left out, from which length on, and why."""
    parts = [result, *result.get("looking", {}).values()]
    found = []
    for entry in (entry for part in parts for entry in part["left_out"]):
        since = "" if entry["tokens"] is None else f" from {entry['tokens']:,} tokens on"
        found.append(f"{entry['name']}{since}: {entry['why']}")
    return list(dict.fromkeys(found))


def _by_length(part: dict[str, Any], title: str, key: str, *, share: bool = False) -> Table:
    """One row for every name, one column for every length, then the growth and, if asked, the ceiling's share."""
    lengths = sorted({row["tokens"] for row in part["rows"]})
    rows = []
    for name, found in _by_name(part["rows"]).items():
        cells = {row["tokens"]: _time(row) if key == "ms" else digits(row[key]) for row in found}
        shares = [f"{row['share']:.2%}" for row in found if row["tokens"] == lengths[-1]] if share else []
        law = _law(part, name, key, "T^{:.2f}")
        rows.append([name, *(cells.get(T, "") for T in lengths), law, *(shares or [""] * share)])
    return Table(title, ["", *map(_tokens, lengths), "grows", *["ceiling"] * share], rows)


def _by_name(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [row for row in rows if row["name"] == name] for name in dict.fromkeys(row["name"] for row in rows)}


def _time(row: dict[str, Any]) -> str:
    spread = row["spread"] / 2
    return f"{digits(row['ms'])}±{spread:.0%}" if spread <= MOST_SPREAD else f"{digits(row['ms'])}±?"


def _law(part: dict[str, Any], name: str, key: str, form: str) -> str:
    """T to the fitted power, with a question mark if it was fitted to two points only."""
    found = part["growth"][name][key]
    return "" if found is None else form.format(found["exponent"]) + "?" * is_doubtful(found)


def ladder(rows: list[dict[str, Any]]) -> Table:
    """One row for every rung, length and number of heads; what they share is in the title."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    by: dict[tuple[int, int, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by.setdefault((row["tokens"], row["heads"], row["name"]), {})[row["mode"]] = row
    lengths, counts = {tokens for tokens, _, _ in by}, {heads for _, heads, _ in by}
    made = []
    for (tokens, heads, name), found in by.items():
        cells = [", ".join([name, *([_heads(heads)] * (len(counts) > 1)), *([_tokens(tokens)] * (len(lengths) > 1))])]
        for row in (found[mode] for mode in modes):
            cells += [_time(row), digits(row["MiB"]), str(row["launches"])]
        made.append(cells)
    shared = [*map(_heads, counts if len(counts) == 1 else ()), *map(_tokens, lengths if len(lengths) == 1 else ())]
    title = ", ".join([f"the ladder: {', then '.join(modes)}", *shared])
    return Table(f"{title}{_compared(rows)}", ["", *["ms", "MiB", "launches"] * len(modes)], made)


def _compared(rows: list[dict[str, Any]]) -> str:
    """What this run measured: how long all heads at once took, compared with the list of heads, at the last length."""
    last = rows[-1]
    at = [r for r in rows if r["name"] == RUNGS[1] and all(r[key] == last[key] for key in ("tokens", "heads"))]
    if not at or any("ratio" not in row for row in at):
        return ""
    found = {row["mode"]: Ratio(**row["ratio"]) for row in at}
    where = f"{_heads(last['heads'])}, {_tokens(last['tokens'])}"
    said = ", ".join(f"{mode} {_claim(ratio)}" for mode, ratio in found.items())
    return f"; measured here, {RUNGS[1]} against {RUNGS[0]} ({where}): {said}; 95 % intervals"


def _claim(ratio: Ratio) -> str:
    """A ratio in words, or that there is none to speak of."""
    between = f"{ratio.low:.2f} to {ratio.high:.2f}"
    if ratio.is_certain:
        return f"{ratio.median:.2f} times as long ({between})"
    return f"no difference beyond the noise ({between})"


def digits(n: float) -> str:
    """Three digits, without powers of ten.

    >>> digits(0.01234), digits(12.345), digits(1234.5), digits(0.0)
    ('0.0123', '12.3', '1,234', '0')
    """
    return f"{n:,.0f}" if n >= 100 else f"{n:.3g}"


def _heads(n: int) -> str:
    return f"{n} head{'s' * (n > 1)}"


def _tokens(n: int) -> str:
    return f"T={n}"


def markdown(table: Table) -> list[str]:
    """The lines of a table in Markdown."""
    head, *rows = (f"| {' | '.join(cells)} |" for cells in (table.head, *table.rows))
    return [f"*{table.title}*", "", head, "|---" * len(table.head) + "|", *rows, ""]


def check_drawable(path: Path) -> None:
    """Raise if the plot could not be drawn, before minutes are spent on measuring."""
    if path.suffix not in SUFFIXES:
        raise OptionError(f"--plot {path}: expected a name that ends in {', '.join(SUFFIXES)}.")
    need("matplotlib", "bench", "plots")


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the plot of a result."""
    check_drawable(path)
    if not result["rows"]:
        raise OptionError(f"--plot {path}: nothing was measured, so there is nothing to draw.")
    matplotlib: Any = need("matplotlib", "bench", "plots")
    with matplotlib.rc_context({"svg.hashsalt": "headwise", "font.size": 9}):  # the same result gives the same file
        made = figure(result)
        kind = {"Date": None} if path.suffix == ".svg" else None
        write_file("--plot", path, lambda beside: made.savefig(beside, format=path.suffix[1:], metadata=kind, dpi=150))


def figure(result: dict[str, Any]) -> Any:
    """A `matplotlib.figure.Figure` with one panel for time and one for memory."""
    made = need("matplotlib.figure", "bench", "plots").Figure(figsize=(12.5, 5.6), layout="constrained")
    made.suptitle(f"One attention layer: {sizes(result)}", fontsize=11)
    made.supxlabel(heading(result), fontsize=7, color="#555555")
    for axes, (key, label) in zip(made.subplots(1, 2), PANELS.items(), strict=True):
        _panel(axes, result, key, label)
    return made


def _panel(axes: Any, result: dict[str, Any], key: str, label: str) -> None:
    points = {
        name: [(row["tokens"], row[key]) for row in rows if row[key] > 0]
        for name, rows in _by_name(result["rows"]).items()
    }
    lines = {name: found for name, found in points.items() if found}
    axes.set(xscale="log", yscale="log", xlabel="tokens", title=label)
    lengths = sorted({row["tokens"] for row in result["rows"]})
    axes.set_xticks(lengths, [f"{T:,}" for T in lengths])
    axes.minorticks_off()
    values = [value for found in lines.values() for _, value in found]
    if values and max(values) < 30 * min(values):  # too few powers of ten to read values from
        ticker = need("matplotlib.ticker", "bench", "plots")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    for name, (color, dashes, mark) in _styles(lines).items():
        look: dict[str, Any] = {"color": color, "linestyle": dashes, "marker": mark}
        look |= (
            {"markersize": 5, "linewidth": 3, "zorder": 3} if name == OURS else {"markersize": 3.5, "linewidth": 1.3}
        )
        axes.plot(*zip(*lines[name], strict=True), **look)
    _name(axes, result, key, lines)


def _styles(names: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """The color, dashes and marker of each line."""
    seen: Counter[str] = Counter()
    found = {}
    for name in names:
        family = next((word for word in COLORS if name.startswith(word)), name)
        found[name] = (COLORS.get(family, SPARE), *STYLES[seen[family] % len(STYLES)])
        seen[family] += 1
    return found


def _name(axes: Any, result: dict[str, Any], key: str, lines: dict[str, list[tuple[int, float]]]) -> None:
    """Write the name and exponent of every line to the right of the panel, as close to its end as possible."""
    ends = {name: points[-1] for name, points in lines.items()}
    low, high = (math.log(y) for y in axes.get_ylim())
    heights = {name: (math.log(y) - low) / (high - low) for name, (_, y) in ends.items()}
    placed = spread(heights)
    for name, (color, _, _) in _styles(lines).items():
        label = name + _law(result, name, key, "  $T^{{{:.2f}}}$")
        arrow: dict[str, Any] = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6}
        arrow |= {"shrinkA": 2, "shrinkB": 3, "relpos": (0, 0.5)}
        axes.annotate(
            label,
            ends[name],
            xytext=(1.06, placed[name]),
            textcoords="axes fraction",
            color=color,
            fontsize=8,
            fontweight="bold" if name == OURS else "normal",
            va="center",
            arrowprops=arrow,
        )


def spread(heights: dict[str, float], gap: float = LINE_HEIGHT) -> dict[str, float]:
    """The same heights, moved so that neighbors are at least `gap` apart, keeping their order and their mean.

    >>> spread({"a": 0.5, "b": 0.5, "c": 0.9}, gap=0.1)
    {'a': 0.45, 'b': 0.55, 'c': 0.9}
    """
    groups: list[tuple[list[str], float]] = []  # groups of names that touch, lowest first, and their mean height
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
