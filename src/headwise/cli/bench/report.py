"""A result as tables of text, the same in the terminal and in the documents."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from headwise.cli.bench.growth import is_doubtful
from headwise.cli.bench.run import LOOKS
from headwise.learn.cost import human


class Table(NamedTuple):
    """A title, the names of the columns, the first one empty, and rows of cells."""

    title: str
    head: list[str]
    rows: list[list[str]]


def heading(result: dict[str, Any]) -> str:
    """What was measured on, and with what."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['device']}, torch {result['torch']}, {versions or 'no other package'}, commit {result['commit']}"


def sizes(result: dict[str, Any]) -> str:
    """The layer that was measured."""
    s = result["setting"]
    kind = "causal" if s["causal"] else "no mask"
    mode = "forward and backward" if s["backward"] else "forward"
    return f"batch {s['batch']}, width {s['d_model']}, {s['heads']} heads, {s['dtype']}, {kind}, {mode}"


def ceilings(result: dict[str, Any]) -> str:
    """What the machine can do."""
    most, dtype = result["ceilings"], result["setting"]["dtype"]
    flops, moved = human(most["flops"], "FLOP/s"), human(most["bytes"], "B/s")
    return f"{flops} in a {dtype} matrix product, {moved} in a copy, measured in the same run"


def tables(result: dict[str, Any]) -> list[Table]:
    """Time and memory of the layer; then the ladder and looking, where they were measured."""
    return [*layer(result), *([ladder(result["ladder"])] if "ladder" in result else []), *looking(result)]


def layer(result: dict[str, Any]) -> list[Table]:
    """Time and memory of the layer and its peers."""
    return [_time(result, "time of a layer, ms", share=True), _memory(result, "memory beyond weights and input, MiB")]


def looking(result: dict[str, Any]) -> list[Table]:
    """Time and memory of whoever shows weights, or sums of them; nothing where it was not measured."""
    made = []
    for name, part in result.get("looking", {}).items():
        made += [_time(part, f"{LOOKS[name]}: ms"), _memory(part, "and its memory, MiB")]
    return made


def left_out(result: dict[str, Any]) -> list[str]:
    """Who was left out of anything, from where on, and why."""
    parts = [result, *result.get("looking", {}).values()]
    return list(dict.fromkeys(_left(entry) for part in parts for entry in part["left_out"]))


def _left(entry: dict[str, Any]) -> str:
    since = "" if entry["tokens"] is None else f" from {entry['tokens']:,} tokens on"
    return f"{entry['name']}{since}: {entry['why']}"


def _time(part: dict[str, Any], title: str, *, share: bool = False) -> Table:
    lengths, names, cells = _grid(part["rows"], lambda row: f"{figure(row['ms'])}±{row['spread'] / 2:.0%}")
    shares = {row["name"]: f"{row['share']:.2%}" for row in part["rows"] if share and row["tokens"] == lengths[-1]}
    rows = []
    for name in names:
        more = [shares.get(name, "")] if share else []
        rows.append([name, *(cells.get((name, T), "") for T in lengths), _law(part, name, "ms"), *more])
    return Table(title, ["", *map(_tokens, lengths), "grows", *["ceiling"] * share], rows)


def _memory(part: dict[str, Any], title: str) -> Table:
    lengths, names, cells = _grid(part["rows"], lambda row: figure(row["MiB"]))
    rows = [[name, *(cells.get((name, T), "") for T in lengths), _law(part, name, "MiB")] for name in names]
    return Table(title, ["", *map(_tokens, lengths), "grows"], rows)


def _grid(rows: list[dict[str, Any]], cell: Any) -> tuple[list[int], list[str], dict[tuple[str, int], str]]:
    lengths = sorted({row["tokens"] for row in rows})
    names = list(dict.fromkeys(row["name"] for row in rows))
    return lengths, names, {(row["name"], row["tokens"]): cell(row) for row in rows}


def _law(part: dict[str, Any], name: str, key: str) -> str:
    """T to the fitted power; with a question mark where two points were all."""
    found = part["growth"][name][key]
    return "" if found is None else f"T^{found['exponent']:.2f}" + "?" * is_doubtful(found)


def ladder(rows: list[dict[str, Any]]) -> Table:
    """The rungs: a row for each at each length and number of heads."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    by: dict[tuple[int, int, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by.setdefault((row["tokens"], row["heads"], row["name"]), {})[row["mode"]] = row
    made = []
    for (tokens, heads, name), found in by.items():
        cells = [f"{name}, {heads} head{'s' * (heads > 1)}, {_tokens(tokens)}"]
        for row in (found[mode] for mode in modes):
            cells += [f"{figure(row['ms'])}±{row['spread'] / 2:.0%}", figure(row["MiB"]), str(row["launches"])]
        made.append(cells)
    title = f"why the class is faster: {', then '.join(modes)}"
    return Table(title, ["", *["ms", "MiB", "launches"] * len(modes)], made)


def figure(n: float) -> str:
    """Three digits, without powers of ten.

    >>> figure(0.01234), figure(12.345), figure(1234.5), figure(0.0)
    ('0.0123', '12.3', '1,234', '0')
    """
    return f"{n:,.0f}" if n >= 100 else f"{n:.3g}"


def _tokens(n: int) -> str:
    return f"T={n}"


def markdown(table: Table) -> list[str]:
    """The lines of a table in a document."""
    lines = [f"*{table.title}*", "", _line(table.head), "|---" * len(table.head) + "|"]
    return [*lines, *map(_line, table.rows), ""]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
