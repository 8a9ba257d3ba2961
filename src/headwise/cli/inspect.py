"""`headwise inspect`: the attention layers in a checkpoint."""

import argparse
import re
from collections.abc import Sequence
from typing import Any

from headwise.cli.console import add_json, console, print_json, rich, say, table
from headwise.errors import printable
from headwise.layer.norms import Norms
from headwise.layer.positions import PositionalEncoding
from headwise.learn.cost import human
from headwise.models.checkpoint import AttentionLayer, Checkpoint, open_checkpoint
from headwise.shapes import check_size
from headwise.weights.scoring import RelativeBias

EXAMPLES = """examples:
  headwise inspect model.safetensors --heads 4
  headwise inspect model.safetensors --heads 4 --tokens 8192
  headwise inspect model.safetensors --heads 4 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("file", help=".safetensors, .safetensors.index.json, .pt or .bin file, or a folder with one")
    parser.add_argument("--heads", type=int, metavar="H", help="query heads, if the checkpoint does not say")
    parser.add_argument("--tokens", type=int, default=1, metavar="N", help="number of tokens for the cache size")
    parser.add_argument(
        "--layout", choices=["head by head", "side by side"], help="layout of a fused projection, if it is ambiguous"
    )
    add_json(parser, "a table")


def run(options: argparse.Namespace) -> int:
    """Show the layers. Exit status 2 if there are none, or if reading one needs another option."""
    check_size("--tokens", options.tokens)
    given: dict[str, Any] = {} if options.heads is None else {"num_heads": check_size("--heads", options.heads)}
    checkpoint = open_checkpoint(options.file, layout=options.layout, **given)
    if options.json:
        print_json(describe(checkpoint, options.tokens))
    elif checkpoint.layers:
        show(checkpoint, options.tokens)
    if not checkpoint.layers:
        say(f"no attention layer among the {len(checkpoint.source)} tensors of {options.file}")
    return 2 if not checkpoint.layers or any(layer.problem for layer in checkpoint.layers) else 0


def describe(checkpoint: Checkpoint, tokens: int) -> dict[str, Any]:
    """All layers as plain data."""
    return {
        "tensors": len(checkpoint.source),
        "layers": [
            {
                "name": layer.name,
                "layout": layer.layout,
                "heads": layer.num_heads,
                "kv_heads": layer.num_kv_heads,
                "head_dim": layer.head_dim,
                "d_in": layer.options.get("d_in"),
                "d_out": layer.options.get("d_out"),
                "options": in_words(layer),
                "dtype": str(layer.dtype).removeprefix("torch."),
                "parameters": layer.parameters,
                "cache_bytes": layer.cache_bytes(tokens),
                "problem": layer.problem,
            }
            for layer in checkpoint.layers
        ],
    }


def show(checkpoint: Checkpoint, tokens: int) -> None:
    """Print a table with one row for identical layers."""
    escape, out = rich("markup").escape, console()
    columns = ("layers", "heads", "width", "options", "parameters", "cache")
    rows = table(*columns, right=("parameters", "cache"), whole=("heads", "width"))
    for layers in alike(checkpoint.layers):
        first, count = layers[0], f"{sum(layer.parameters for layer in layers):,}"
        words = (heads(first), width(first), in_words(first) or "plain")
        rows.add_row(escape(printable(named(layers))), *map(printable, words), count, total_cache(layers, tokens))
    out.print(rows)
    cache = total_cache(checkpoint.layers, tokens)
    of = f"{tokens:,} tokens" if tokens != 1 else "token"
    parameters = sum(layer.parameters for layer in checkpoint.layers)
    layouts = ", ".join(dict.fromkeys(layer.layout for layer in checkpoint.layers))
    dtypes = ", ".join(dict.fromkeys(str(layer.dtype).removeprefix("torch.") for layer in checkpoint.layers))
    out.print(
        f"\n{len(checkpoint.layers)} attention layer{'s' * (len(checkpoint.layers) != 1)}, {parameters:,} parameters, "
        f"{dtypes}; cache {cache} per {of}"
    )
    out.print(f"layout: {layouts}")
    for problem in dict.fromkeys(layer.problem for layer in checkpoint.layers if layer.problem):
        names = [layer.name for layer in checkpoint.layers if layer.problem == problem]
        which = f"{printable(names[0])}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        cure = printable(problem.splitlines()[0]).replace("Pass num_heads=.", "Pass --heads.")
        out.print(f"\n{which}: {cure}", markup=False)


def alike(layers: Sequence[AttentionLayer]) -> list[list[AttentionLayer]]:
    """Layers that differ only in their number, grouped."""
    groups: dict[tuple[str, ...], list[AttentionLayer]] = {}
    for layer in sorted(layers, key=_in_order):
        key = (re.sub(r"\d+", "#", layer.name), heads(layer), width(layer), in_words(layer), str(layer.problem))
        groups.setdefault(key, []).append(layer)
    return list(groups.values())


def _in_order(layer: AttentionLayer) -> list[str | int]:
    """A sort key that puts layer 10 after layer 9."""
    return [f"{int(part):09d}" if part.isdigit() else part for part in re.split(r"(\d+)", layer.name)]


def named(layers: Sequence[AttentionLayer]) -> str:
    """One name for a group of layers, with their first number as a range or a list."""
    numbers = [re.search(r"\d+", layer.name) for layer in layers]
    if len(layers) == 1 or None in numbers:
        return layers[0].name or "(the file itself)"
    found = [int(number[0]) for number in numbers if number is not None]
    whole = found == list(range(found[0], found[-1] + 1))
    shown = f"{found[0]}–{found[-1]}" if whole else ",".join(map(str, found[:4])) + (",…" if len(found) > 4 else "")
    return re.sub(r"\d+", "{" + shown + "}", layers[0].name, count=1)


def heads(layer: AttentionLayer) -> str:
    """The heads, such as "32, 8 kv"."""
    if layer.num_heads is None:
        return "?"
    return f"{layer.num_heads}" + (f", {layer.num_kv_heads} kv" if layer.num_kv_heads != layer.num_heads else "")


def width(layer: AttentionLayer) -> str:
    """Input, heads and output, such as "4096 → 32×128 → 4096"."""
    if layer.num_heads is None or "d_in" not in layer.options:
        return "?"
    inner = f"{layer.options['d_in']} → {layer.num_heads}×{layer.head_dim}"
    return inner + (f" → {layer.options['d_out']}" if layer.options.get("out_proj", True) else ", no output projection")


def in_words(layer: AttentionLayer) -> str:
    """The options that change the result, in words."""
    options, words = layer.options, []
    if options.get("causal"):
        words.append("causal")
    if options.get("projections") is not None:
        words.append(repr(options["projections"]))
    if options.get("mask") is not None:
        words.append(repr(options["mask"]))
    position = options.get("position")
    if isinstance(position, RelativeBias):
        words.append("relative bias")
    elif position is not None:
        words.append(
            position.describe() if isinstance(position, PositionalEncoding) else type(position).__name__.lower()
        )
    words += [f"{x} {options[x]:g}" for x in ("scale", "softcap") if options.get(x) is not None]
    words += ["sinks"] if options.get("sinks") else []
    words += _norms(Norms.of(options.get("qk_norm")))
    words += [f"gate per {options['gate']}"] if options.get("gate") is not None else []
    words += ["biases"] if options.get("bias") is True else []
    return ", ".join(words)


def _norms(norms: Norms) -> list[str]:
    """Such as ["q/k norm after the position", "v norm"]."""
    given = [part for part, kind in (("q", norms.query), ("k", norms.key)) if kind is not None]
    words = [f"{'/'.join(given)} norm{' after the position' if norms.after else ''}"] if given else []
    return words + (["v norm"] if norms.value is not None else [])


def total_cache(layers: Sequence[AttentionLayer], tokens: int) -> str:
    """The cache of these layers in readable bytes, or "?" if one is unknown."""
    total = 0
    for layer in layers:
        size = layer.cache_bytes(tokens)
        if size is None:
            return "?"
        total += size
    return human(total, "B", binary=True) if total else "none"
