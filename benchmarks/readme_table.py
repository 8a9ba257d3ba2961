"""Write the speed tables of `docs/performance.md`, and the short one of the README, from `benchmarks/results/`.

python benchmarks/layer.py > layer.txt                      measure, then keep the last line
tail -n 1 layer.txt > benchmarks/results/layer-cpu.json
python benchmarks/readme_table.py                           rewrite the table
"""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- speed table -->", "<!-- end of speed table -->"
PEERS = ["hand-wired", "nn.MultiheadAttention", "nn.MHA with weights", "textbook class"]


def lines(data: dict, short: bool) -> list[str]:
    """One row per setting: our milliseconds, and our time against each peer's."""
    groups: dict[tuple, dict[str, float]] = {}
    for row in data["rows"]:
        mask = {True: "causal", False: "no mask"}.get(row.get("causal"), "")
        place = (*row["size"], row.get("dtype", "float32"), mask, row["mode"])
        groups.setdefault(place, {})[row["name"]] = row["ms"]
    result = [f"{data['device']}, torch {data['torch']}, commit {data['commit']}:", ""]
    result += ["| (B, T, d, H) | | headwise | " + " | ".join(PEERS) + " |", "|---|---|---" + "|---" * len(PEERS) + "|"]
    for (B, T, E, H, dtype, mask, mode), times in groups.items():
        if short and (mask == "no mask" or "compiled" in mode):
            continue
        ours = times["headwise"]
        time = f"{ours * 1e3:.0f} µs" if ours < 0.1 else f"{ours:.3g} ms"
        ratios = [f"{ours / times[peer]:.2f}×" if peer in times else "" for peer in PEERS]
        what = ", ".join(part for part in (dtype, mask, mode) if part)
        result.append(f"| ({B}, {T}, {E}, {H}) | {what} | {time} | " + " | ".join(ratios) + " |")
    return [*result, ""]


def table(short: bool) -> str:
    """The whole section, from every result file of the layer benchmark."""
    parts = [BEGIN, ""]
    for file in sorted(RESULTS.glob("layer-*.json")):
        parts += lines(json.loads(file.read_text()), short)
    return "\n".join([*parts, END])


def main() -> None:
    """Put each table between its two marks."""
    for name, short in (("README.md", True), ("docs/performance.md", False)):
        page = ROOT / name
        before, rest = page.read_text().split(BEGIN)
        page.write_text(before + table(short) + rest.split(END)[1])


if __name__ == "__main__":
    main()
