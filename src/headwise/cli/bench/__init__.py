"""`headwise bench`: our layer against every peer, in one run on this machine."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from headwise.cli.bench import report
from headwise.cli.bench.measurement import DTYPES
from headwise.cli.bench.peers import OURS, PEERS, matching
from headwise.cli.bench.peers.packages import INSTALL, version_of
from headwise.cli.bench.sweep import Effort, about, ladder, measured
from headwise.cli.bench.weights import weight_costs
from headwise.cli.bench.workload import Workload
from headwise.cli.console import add_json, check_file, check_positive, console, print_json, table, write_file
from headwise.errors import OptionError
from headwise.shapes import check_size

EXAMPLES = """examples:
  headwise bench --list
  headwise bench --lengths 16,32 --d-model 32 --heads 2 --seconds 0.1 \\
    --out bench.json --plot bench.svg
  headwise bench --lengths 16,32 --d-model 32 --heads 2 --seconds 0.1 \\
    --only headwise,nn.mha --backward
  headwise bench --lengths 16,32 --d-model 32 --heads 2 --seconds 0.1 \\
    --only headwise --ladder --weights --json
  headwise bench --ladder --lengths 16,32 --d-model 32 --heads 2 --seconds 0.1
  headwise bench --from bench.json --plot bench.png
"""
NOTES = (
    "medians ± half the interquartile range; ±? where that is more than twice the median",
    "T^n: growth over the upper half of the lengths, ? if fitted to only two",
    "ceiling: the shortest time this machine could need for the operations and bytes, as a share of the time measured",
)
LENGTHS = "128,256,512,1024,2048,4096"
RUNG_LENGTHS, RUNG_SECONDS, SECONDS = "128,512", 0.3, 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("--device", choices=["cpu", "cuda"], help="device (default: cuda if there is a GPU)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype")
    parser.add_argument(
        "--lengths",
        nargs="+",
        metavar="T",
        help=f"sequence lengths, with commas or spaces (default: {LENGTHS}; with --ladder alone: {RUNG_LENGTHS})",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="batch size")
    parser.add_argument("--d-model", type=int, default=256, metavar="E", help="model width")
    parser.add_argument("--heads", type=int, default=4, metavar="H", help="attention heads")
    parser.add_argument("--backward", action="store_true", help="time forward and backward (default: forward only)")
    parser.add_argument("--no-causal", action="store_true", help="no mask; leaves out peers that are always causal")
    parser.add_argument("--only", metavar="NAME,...", help="only peers with one of these words in the name; see --list")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help=f"time to spend at each length (default: {SECONDS}; with --ladder alone: {RUNG_SECONDS})",
    )
    parser.add_argument("--limit", type=float, default=1.5, metavar="S", help="leave out what takes longer per run")
    parser.add_argument(
        "--ladder",
        action="store_true",
        help="compare only a list of heads, a class and the layer, in seconds; with --only or --weights, add this",
    )
    parser.add_argument("--weights", action="store_true", help="also measure the cost of weights and column sums")
    parser.add_argument("--list", action="store_true", help="list the implementations and their versions, then exit")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="show a saved result; measure nothing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the result as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot time and memory: .svg, .png or .pdf")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure or read a result, then show and save it."""
    if options.list:
        return _list(options.json)
    _check_before(options)
    result = _measure(options) if options.source is None else read(options.source)
    if options.out is not None:
        write_file("--out", options.out, json.dumps(result) + "\n")
    if options.json:
        print_json(result)
    else:
        show(result)
    if options.plot is not None:
        report.draw(result, options.plot)
    return 0


def _check_before(options: argparse.Namespace) -> None:
    """Raise now what would otherwise be raised after minutes of measuring."""
    check_file("--out", options.out)
    check_file("--plot", options.plot)
    if options.plot is not None:
        report.check_drawable(options.plot)
    if not options.json:
        console()


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    alone = options.ladder and options.only is None and not options.weights
    lengths = lengths_of(",".join(options.lengths or [RUNG_LENGTHS if alone else LENGTHS]))
    seconds = (RUNG_SECONDS if alone else SECONDS) if options.seconds is None else options.seconds
    effort = Effort(check_positive("--seconds", seconds), check_positive("--limit", options.limit))
    peers = matching(options.only)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    workload = Workload(
        options.d_model, options.heads, options.batch, not options.no_causal, options.dtype, device, options.backward
    )
    if alone:
        return _ladder_alone(workload, lengths, effort)
    result = measured(workload, lengths, peers, effort)
    if options.ladder:  # at the shortest length and at the middle one
        result["ladder"] = ladder(workload, sorted({lengths[0], lengths[(len(lengths) - 1) // 2]}), effort)
    if options.weights:
        result["looking"] = weight_costs(workload, lengths, effort)
    return result


def _ladder_alone(workload: Workload, lengths: list[int], effort: Effort) -> dict[str, Any]:
    """A result that holds the ladder and no peers."""
    rungs = ladder(workload, lengths, effort, one_head=False)
    head = {"subject": "bench", **about(workload.device), "setting": dataclasses.asdict(workload)}
    return {**head, "rows": [], "left_out": [], "growth": {}, "ladder": rungs}


def lengths_of(text: str) -> list[int]:
    """The numbers in a comma-separated list, smallest first.

    >>> lengths_of("64,16")
    [16, 64]
    """
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise OptionError(f"--lengths {text}: expected whole numbers with commas, such as {LENGTHS}.") from error
    for length in lengths:
        check_size("--lengths", length)
    return lengths


def read(path: Path) -> dict[str, Any]:
    """A result that `--out` saved."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        report.tables(result)
    except OSError as error:
        raise OptionError(f"--from {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"--from {path}: not a result of headwise bench. Make one with --out {path}.") from error
    return result


def show(result: dict[str, Any]) -> None:
    """Print the tables, what was left out, and what it was measured on."""
    out = console()
    out.print(f"[bold]BENCH[/]  {report.sizes(result)}")
    out.print(f"[dim]{report.heading(result)}[/]")
    if "ceilings" in result:
        out.print(f"[dim]the machine's ceilings: {report.ceilings(result)}[/]")
    for made in report.tables(result):
        out.print(f"\n[bold]{made.title}[/]")
        grid = table(*made.head, right=made.head[1:])
        for name, *cells in made.rows:
            grid.add_row(f"[bold cyan]{name}[/]" if name.startswith(OURS) else name, *cells)
        out.print(grid)
    for line in NOTES if result["rows"] else NOTES[:1]:
        out.print(f"[dim]{line}[/]")
    for line in report.left_out(result):
        out.print(f"[dim]left out: {line}[/]")


def _list(as_json: bool) -> int:
    from headwise import __version__

    rows = [(peer.name, peer.about, peer.package, version_of(peer.package)) for peer in PEERS]
    rows[0] = (OURS, PEERS[0].about, "headwise", __version__)
    colreduce = "flash_colreduce"
    rows.append(("flash-colreduce", "column sums, with --weights on CUDA", colreduce, version_of(colreduce)))
    if as_json:
        keys = ("name", "about", "package", "version")
        print_json({"peers": [dict(zip(keys, row, strict=True)) for row in rows]})
        return 0
    grid = table("name", "description", "package", "version", whole=("name",))
    for name, what, package, version in rows:
        grid.add_row(f"[bold cyan]{name}[/]", what, package.replace("_", "-"), version or f"[dim]{INSTALL}[/]")
    console().print(grid)
    return 0
