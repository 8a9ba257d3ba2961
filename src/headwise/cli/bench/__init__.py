"""`headwise bench`: our layer against every peer, in one run on this machine."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from headwise.cli.bench import report
from headwise.cli.bench.measuring import DTYPES
from headwise.cli.bench.peers import OURS, PEERS, named
from headwise.cli.bench.peers.peer import INSTALL, version_of
from headwise.cli.bench.plotting import check_drawable, draw
from headwise.cli.bench.run import measured, with_ladder, with_looking
from headwise.cli.bench.setting import Setting
from headwise.cli.bench.sweep import Effort
from headwise.cli.terminal import console, table
from headwise.errors import OptionError
from headwise.models.files import atomically
from headwise.shapes import check_size

SUMMARY = "the layer against every peer in one run: checked first, then time, memory, growth, share of the ceilings"
EXAMPLES = """examples:
  headwise bench --list
  headwise bench --lengths 16,32 --d-model 32 --heads 2 --seconds 0.1 --out bench.json --plot bench.svg
  headwise bench --lengths 16,32 --d-model 32 --heads 2 --seconds 0.1 --only headwise,nn.mha --backward
  headwise bench --lengths 16,32 --d-model 32 --heads 2 --seconds 0.1 --only headwise --ladder --looking --json
  headwise bench --from bench.json --plot bench.png
"""
NOTES = (
    "medians ± half the distance of the quartiles; T^n: growth over the upper half of the lengths, ? from two alone",
    "ceiling: the least time this machine could take for the operations and bytes of the longest text, over the time",
)
LENGTHS = "128,256,512,1024,2048,4096"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("--device", choices=["cpu", "cuda"], help="where (default cuda where there is one)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and input (default float32)")
    parser.add_argument("--lengths", default=LENGTHS, metavar="T,T,...", help=f"tokens of a text (default {LENGTHS})")
    parser.add_argument("--batch", type=int, default=1, help="texts (default 1)")
    parser.add_argument("--d-model", type=int, default=256, help="width of the layer (default 256)")
    parser.add_argument("--heads", type=int, default=4, help="heads (default 4)")
    parser.add_argument("--backward", action="store_true", help="forward and backward instead of forward alone")
    parser.add_argument("--no-causal", action="store_true", help="no mask, for those who can do without")
    parser.add_argument("--only", metavar="NAME,...", help="peers with one of these words in their name; see --list")
    parser.add_argument("--seconds", type=float, default=1.5, help="of rounds at each length (default 1.5)")
    parser.add_argument(
        "--limit", type=float, default=1.5, help="seconds of one run beyond which a peer is left out (default 1.5)"
    )
    parser.add_argument("--ladder", action="store_true", help="why the class is faster: list, class, fused layer")
    parser.add_argument("--looking", action="store_true", help="what weights and their column sums cost")
    parser.add_argument("--list", action="store_true", help="name the peers, with version or how to install them")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="show a result instead of measuring")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time and memory: .svg, .png or .pdf")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(options: argparse.Namespace) -> int:
    """Measure or read, show, write."""
    if options.list:
        return _list(options.json)
    _check_before(options)
    result = _measure(options) if options.source is None else read(options.source)
    if options.out is not None:
        _write(options.out, json.dumps(result))
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    if options.plot is not None:
        draw(result, options.plot)
        print(f"wrote {options.plot}", file=sys.stderr)
    return 0


def _check_before(options: argparse.Namespace) -> None:
    """Refuse now what would be refused after minutes of measuring."""
    for name in ("out", "plot"):
        path = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            raise OptionError(f"--{name} {path}: there is no folder {path.parent}. Name a file in one that exists.")
    if options.plot is not None:
        check_drawable(options.plot)
    if not options.json:
        console()


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    lengths, peers = lengths_of(options.lengths), named(options.only)
    for name in ("seconds", "limit"):
        if not 0 < getattr(options, name) < math.inf:
            raise OptionError(f"--{name} {getattr(options, name):g}: expected a number above 0.")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    setting = Setting(
        options.d_model, options.heads, options.batch, not options.no_causal, options.dtype, device, options.backward
    )
    effort = Effort(options.seconds, options.limit)
    result = measured(setting, lengths, peers, effort)
    if options.ladder:
        result = with_ladder(result, setting, lengths, effort)
    if options.looking:
        result = with_looking(result, setting, lengths, effort)
    return result


def lengths_of(text: str) -> list[int]:
    """The numbers in a list with commas, smallest first.

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
    """A result that `--out` wrote."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        report.tables(result)
    except OSError as error:
        raise OptionError(f"--from {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"--from {path}: no result of headwise bench. Make one with --out {path}.") from error
    return result


def _write(path: Path, text: str) -> None:
    try:
        atomically(path, lambda beside: beside.write_text(text + "\n", encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--out {path}: {error.strerror}. Name a file in a folder that exists.") from error
    print(f"wrote {path}", file=sys.stderr)


def show(result: dict[str, Any]) -> None:
    """Tables, who was left out, and what it all was measured on."""
    out = console()
    out.print(f"[bold]BENCH[/]  {report.sizes(result)}")
    out.print(f"[dim]{report.heading(result)}[/]")
    out.print(f"[dim]the machine's ceilings: {report.ceilings(result)}[/]")
    for made in report.tables(result):
        out.print(f"\n[bold]{made.title}[/]")
        grid = table(*made.head, right=made.head[1:])
        for name, *cells in made.rows:
            grid.add_row(f"[bold cyan]{name}[/]" if name.startswith(OURS) else name, *cells)
        out.print(grid)
    for line in NOTES:
        out.print(f"[dim]{line}[/]")
    for line in report.left_out(result):
        out.print(f"[dim]left out: {line}[/]")


def _list(as_json: bool) -> int:
    from headwise import __version__

    rows = [(peer.name, peer.about, peer.package, peer.version) for peer in PEERS[1:]]
    rows = [(OURS, PEERS[0].about, "headwise", __version__), *rows]
    rows.append(
        ("flash-colreduce", "column sums, with --looking on CUDA", "flash_colreduce", version_of("flash_colreduce"))
    )
    if as_json:
        keys = ("name", "about", "package", "version")
        print(json.dumps({"peers": [dict(zip(keys, row, strict=True)) for row in rows]}))
        return 0
    grid = table("peer", "what it is", "package", "version", whole=("peer",))
    for name, what, package, version in rows:
        grid.add_row(f"[bold cyan]{name}[/]", what, package.replace("_", "-"), version or f"[dim]{INSTALL}[/]")
    console().print(grid)
    return 0
