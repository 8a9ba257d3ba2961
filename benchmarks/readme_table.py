"""Write the tables of `docs/performance.md`, `docs/serve.md` and the README from the benchmark results.

python benchmarks/layer.py > layer.txt                      measure, then keep the last line
tail -n 1 layer.txt > benchmarks/results/layer-cpu.json
headwise bench --ladder --weights --out benchmarks/results/bench-cpu.json
python benchmarks/readme_table.py                           rewrite the tables, draw the pictures
"""

import json
from collections.abc import Callable
from pathlib import Path

from headwise.cli.bench import report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- speed table -->", "<!-- end of speed table -->"
MAPS_BEGIN, MAPS_END = "<!-- maps table -->", "<!-- end of maps table -->"
OPTIONS_BEGIN, OPTIONS_END = "<!-- options table -->", "<!-- end of options table -->"
TRAIN_BEGIN, TRAIN_END = "<!-- train table -->", "<!-- end of train table -->"
SERVE_BEGIN, SERVE_END = "<!-- serve table -->", "<!-- end of serve table -->"
PEERS_BEGIN, PEERS_END = "<!-- peers table -->", "<!-- end of peers table -->"
BENCH_BEGIN, BENCH_END = "<!-- bench table -->", "<!-- end of bench table -->"
LADDER_BEGIN, LADDER_END = "<!-- ladder table -->", "<!-- end of ladder table -->"
LOOKING_BEGIN, LOOKING_END = "<!-- looking table -->", "<!-- end of looking table -->"
PEERS = ["hand-wired", "nn.MultiheadAttention", "nn.MHA with weights", "textbook class"]


def lines(data: dict) -> list[str]:
    """One row per setting: our milliseconds, and our time relative to each peer's."""
    groups: dict[tuple, dict[str, float]] = {}
    for row in data["rows"]:
        mask = {True: "causal", False: "no mask"}.get(row.get("causal"), "")
        place = (*row["size"], row.get("dtype", "float32"), mask, row["mode"])
        groups.setdefault(place, {})[row["name"]] = row["ms"]
    result = [f"{data['device']}, torch {data['torch']}, commit {data['commit']}:", ""]
    result += ["| (B, T, d, H) | | headwise | " + " | ".join(PEERS) + " |", "|---|---|---" + "|---" * len(PEERS) + "|"]
    for (B, T, E, H, dtype, mask, mode), times in groups.items():
        ours = times["headwise"]
        time = f"{ours * 1e3:.0f} µs" if ours < 0.1 else f"{ours:.3g} ms"
        ratios = [f"{ours / times[peer]:.2f}×" if peer in times else "" for peer in PEERS]
        what = ", ".join(part for part in (dtype, mask, mode) if part)
        result.append(f"| ({B}, {T}, {E}, {H}) | {what} | {time} | " + " | ".join(ratios) + " |")
    return [*result, ""]


def table() -> str:
    """The layer's speed, from every result file of the layer benchmark."""
    parts = [BEGIN, ""]
    for file in sorted(RESULTS.glob("layer-*.json")):
        parts += lines(json.loads(file.read_text()))
    return "\n".join([*parts, END])


def maps_table() -> str:
    """The cost of looking at weights, from every result file of the maps benchmark."""
    parts = [MAPS_BEGIN, ""]
    for file in sorted(RESULTS.glob("maps-*.json")):
        parts += maps_lines(json.loads(file.read_text()))
    for file in sorted(RESULTS.glob("map-table-*.json")):
        parts += shapes_lines(json.loads(file.read_text()))
    return "\n".join([*parts, MAPS_END])


def maps_lines(data: dict) -> list[str]:
    """One table per device: statistics as rows, shapes as columns, relative to one forward pass of fused attention."""
    shapes = [row for row in data["rows"] if "shape" in row and "times" in row]
    result = [f"{data['device']}, torch {data['torch']}, commit {data['commit']}:", ""]
    for row in data["rows"]:
        if "setting" in row:
            times = {name: value["ms"] for name, value in row["times"].items()}
            ratios = [times[f"{name} with weights"] / times[name] for name in ("forward", "forward+backward")]
            size = "({}, {}, {}, {})".format(*row["setting"])
            text = f"`return_weights=True` takes {ratios[0]:.3f}× the time forward, {ratios[1]:.3f}× with backward"
            result.append(f"- layer {size}: {text}")
    heads = ["({}, {}, {}, {})".format(*row["shape"]) for row in shapes]
    result += ["", "| (B, H, T, D) | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name in shapes[0]["times"]:
        cells = []
        for row in shapes:
            ms, base = row["times"][name]["ms"], row["times"]["SDPA forward"]["ms"]
            cells.append(f"{ms:.3g} ms" if name == "SDPA forward" else f"{ms / base:.2f}×")
        result.append(f"| {name} | " + " | ".join(cells) + " |")
    if all("extra MiB" in row for row in shapes):
        memory = [f"{row['extra MiB']:.0f} MiB" for row in shapes]
        result.append("| extra memory for the panel | " + " | ".join(memory) + " |")
    for key in (key for key in shapes[0] if key.endswith("error")):
        cells = [f"{row[key]:.1e} ({row[key] / row[key + ' of plain float32']:.1f}×)" for row in shapes]
        result.append(f"| {key} | " + " | ".join(cells) + " |")
    for row in data["rows"]:
        if "times" not in row:
            size = "({}, {}, {}, {})".format(*row["shape"])
            text = f"the panel takes {row['extra MiB']:.0f} MiB in addition to query, key and log-sum-exp."
            result += ["", f"{size}: {text}"]
    return [*result, ""]


def shapes_lines(data: dict) -> list[str]:
    """Statistics of many shapes, relative to the fastest forward pass installed."""
    names = list(data["rows"][0]["ratios"])
    result = [f"{data['device']}, torch {data['torch']}, commit {data['commit']}, `maps.py --table`:", ""]
    result += ["| (B, H, Hkv, T, D) | forward | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for row in data["rows"]:
        ratios = [f"{row['ratios'][name]:.2f}×" for name in names]
        shape = "({}, {}, {}, {}, {})".format(*row["shape"])
        result.append(f"| {row['case']} {shape} | {row['forward ms']:.3g} ms | " + " | ".join(ratios) + " |")
    return [*result, ""]


def options_table() -> str:
    """The cost of options, from every result file of the options benchmark."""
    parts = [OPTIONS_BEGIN, ""]
    for file in sorted(RESULTS.glob("options-*.json")):
        data = json.loads(file.read_text())
        parts += [f"{data['device']}, torch {data['torch']}, commit {data['commit']}:", ""]
        parts += ["| | headwise | others: their time divided by ours |", "|---|---|---|"]
        for row in data["rows"]:
            times = {name: value["ms"] for name, value in row["times"].items()}
            ours = times.pop("headwise")
            rate = f", {row['gigabytes'] / ours:.2f} TB/s" if "gigabytes" in row else ""
            peers = ", ".join(f"{name} {ms / ours:.2f}×" for name, ms in times.items())
            parts.append(f"| {row['title']} | {ours:.3g} ms{rate} | {peers} |")
        parts.append("")
    return "\n".join([*parts, OPTIONS_END])


def train_table() -> str:
    """Training with our layer and with others in its place, from every result file of the training benchmark."""
    parts = [TRAIN_BEGIN, ""]
    for file in sorted(RESULTS.glob("train-*.json")):
        data = json.loads(file.read_text())
        parts += [f"{data['device']}, torch {data['torch']}, commit {data['commit']}:", ""]
        parts += ["| | tokens per second | speedup of headwise | final loss | largest loss difference to headwise |"]
        parts += ["|---" * 5 + "|"]
        ours = data["rows"][0]["tokens_per_second"]
        for row in data["rows"]:
            speed = row["tokens_per_second"]
            parts.append(
                f"| {row['block']} | {speed:,.0f} | {ours / speed:.3f}× | {row['loss']:.3f} | {row['apart']:.3f} |"
            )
        parts.append("")
    return "\n".join([*parts, TRAIN_END])


def serve_table() -> str:
    """The response times of the server, from every result file of the serve benchmark."""
    parts = [SERVE_BEGIN, ""]
    for file in sorted(RESULTS.glob("serve-*.json")):
        data = json.loads(file.read_text())
        cells = {(row["what"], row["tokens"]): _told(row) for row in data["rows"]}
        lengths = sorted({tokens for _, tokens in cells})
        names = list(dict.fromkeys(row["what"] for row in reversed(data["rows"])))[
            ::-1
        ]  # the longest text has the most levels
        layers = data["rows"][0]["layers"]
        parts += [f"{data['device']}, torch {data['torch']}, commit {data['commit']}, {layers} layers of 8 heads:", ""]
        parts += [
            "| | " + " | ".join(f"{tokens:,} tokens" for tokens in lengths) + " |",
            "|---" * (len(lengths) + 1) + "|",
        ]
        parts += [f"| {name} | " + " | ".join(cells.get((name, x), "") for x in lengths) + " |" for name in names]
        parts.append("")
    return "\n".join([*parts, SERVE_END])


SHOWN = {  # in the README; docs/performance.md has every peer
    "headwise",
    "SDPA by hand",
    "FlexAttention by hand",
    "nn.MHA",
    "x-transformers flash",
    "textbook class",
}
SHOWN_WEIGHTS = {"headwise, a map", "nn.MHA with weights"}
WEIGHTS = "| *with the weights of every head* | | | | |"


def peers_table() -> str:
    """The short table of the README: a layer without and with the weights of every head, on the GPU, short and long."""
    data = json.loads((RESULTS / "bench-h200.json").read_text())
    parts = [PEERS_BEGIN, "", f"{report.heading(data)}; {report.sizes(data)}:", ""]
    lengths = (2048, 32768)
    heads = [f"{T:,} tokens" for T in lengths]
    parts += ["| | " + " | ".join(heads) + " | time grows | memory grows |", "|---" * (len(heads) + 3) + "|"]
    weights = data["looking"]["weights"]
    for part, names, above in ((data, SHOWN, []), (weights, SHOWN_WEIGHTS, [WEIGHTS])):
        parts += above
        for name in (name for name in dict.fromkeys(row["name"] for row in part["rows"]) if name in names):
            times = {row["tokens"]: row for row in part["rows"] if row["name"] == name}
            cells = [
                f"{times[T]['ms']:.3g} ms, {times[T]['MiB']:,.0f} MiB" if T in times else "out of memory"
                for T in lengths
            ]
            laws = [f"T^{part['growth'][name][kind]['exponent']:.2f}" for kind in ("ms", "MiB")]
            parts.append(f"| {name} | {' | '.join(cells + laws)} |")
    return "\n".join([*parts, "", PEERS_END])


def bench_table() -> str:
    """The layer and all its peers, with a plot, from every result of `headwise bench`."""

    def part(file: Path, data: dict) -> list[str]:
        lines = [f"Ceilings: {report.ceilings(data)}.", ""]
        for table in report.layer(data):
            lines += report.markdown(table)
        lines += [*(f"- left out: {line}" for line in report.left_out(data)), ""]
        return [*lines, f"![Time and memory against tokens: {data['device']}](images/{picture(file).name})", ""]

    return _of_bench(BENCH_BEGIN, BENCH_END, part)


def ladder_table() -> str:
    """The list of heads, the class and the layer, from every result of `headwise bench --ladder`."""
    return _of_bench(
        LADDER_BEGIN,
        LADDER_END,
        lambda _file, data: report.markdown(report.ladder(data["ladder"])) if "ladder" in data else [],
    )


def looking_table() -> str:
    """The cost of looking at weights, from every result of `headwise bench --looking`."""
    return _of_bench(
        LOOKING_BEGIN,
        LOOKING_END,
        lambda _file, data: [line for table in report.weights(data) for line in report.markdown(table)],
    )


def _of_bench(begin: str, end: str, part: Callable[[Path, dict], list[str]]) -> str:
    """The given part of every result that has it, below a line that describes the machine."""
    parts = [begin, ""]
    for file in bench_results():
        data = json.loads(file.read_text())
        found = part(file, data)
        if found:
            parts += [f"{report.heading(data)}; {report.sizes(data)}:", "", *found]
    return "\n".join([*parts, end])


def bench_results() -> list[Path]:
    """All result files of `headwise bench`."""
    return sorted(RESULTS.glob("bench-*.json"))


def picture(file: Path) -> Path:
    """The path of the plot of a result."""
    return ROOT / "docs" / "images" / f"{file.stem}.svg"


def _told(row: dict) -> str:
    if "MiB" in row:
        return f"{row['MiB']:,} MiB"
    return f"{row['ms']:.3g} ms" if row["ms"] < 1000 else f"{row['ms'] / 1000:.3g} s"


def replace(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what is between two markers of a page, markers included, by `text`, which contains both."""
    before, rest = page.read_text().split(begin)
    page.write_text(before + text + rest.split(end)[1])


def main() -> None:
    """Write every table between its two markers, and draw the plots."""
    replace(ROOT / "README.md", PEERS_BEGIN, PEERS_END, peers_table())
    replace(ROOT / "docs/performance.md", BEGIN, END, table())
    replace(ROOT / "docs/performance.md", MAPS_BEGIN, MAPS_END, maps_table())
    replace(ROOT / "docs/performance.md", OPTIONS_BEGIN, OPTIONS_END, options_table())
    replace(ROOT / "docs/performance.md", TRAIN_BEGIN, TRAIN_END, train_table())
    replace(ROOT / "docs/performance.md", BENCH_BEGIN, BENCH_END, bench_table())
    replace(ROOT / "docs/performance.md", LADDER_BEGIN, LADDER_END, ladder_table())
    replace(ROOT / "docs/performance.md", LOOKING_BEGIN, LOOKING_END, looking_table())
    for file in bench_results():
        report.draw(json.loads(file.read_text()), picture(file))
    replace(ROOT / "docs/serve.md", SERVE_BEGIN, SERVE_END, serve_table())


if __name__ == "__main__":
    main()
