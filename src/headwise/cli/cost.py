"""`headwise cost`: the parameters, operations, bytes and times of attention, each number with its formula."""

import argparse
from typing import Any

import torch

from headwise.cli.console import add_json, check_positive, console, print_json, rich, table
from headwise.errors import OptionError
from headwise.learn import configs
from headwise.learn.cost import Amount, Cost, alternatives, answers, bound_seconds, human

EXAMPLES = """examples:
  headwise cost --model gpt2
  headwise cost --model llama-3.1-8b --seq 8192 --batch 4
  headwise cost --d-model 512 --heads 8 --kv-heads 2 --seq 4096 --dtype float32
  headwise cost --model gpt-oss-20b --seq 32768 --bandwidth 4800 --flops 990
  headwise cost --models
  headwise cost --model mistral-7b --json
"""
SIZES = ("d_model", "heads", "kv_heads", "head_dim", "layers", "causal", "bias")  # that a known model sets itself
NARROW, LEFT_OUT = 72, ("D", "L", "tokens", "window")  # below so many columns, the list of models does without these
DTYPES = {name: getattr(torch, name).itemsize for name in ("float32", "bfloat16", "float16", "float8_e4m3fn")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("name", nargs="?", help=argparse.SUPPRESS)  # people type the name of a model here
    parser.add_argument("--model", metavar="NAME", help="a known model, such as gpt2 or llama-3.1-8b")
    parser.add_argument("--models", action="store_true", help="list the known models")
    parser.add_argument("--d-model", type=int, metavar="E", help="model width, if no model is named (default: 768)")
    parser.add_argument("--heads", type=int, metavar="H", help="query heads (default: 12)")
    parser.add_argument("--kv-heads", type=int, metavar="HKV", help="key/value heads (default: as many as query heads)")
    parser.add_argument("--head-dim", type=int, metavar="D", help="head dimension (default: d-model / heads)")
    parser.add_argument("--layers", type=int, metavar="L", help="layers (default: 1)")
    parser.add_argument(
        "--seq", type=int, metavar="T", help="sequence length (default: 1024, or the model's context if shorter)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="batch size")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="hide later tokens (default: --causal)")
    parser.add_argument("--bias", action="store_true", default=None, help="projections have biases")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of weights, activations and cache")
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help="memory bandwidth, for a lower bound on time")
    parser.add_argument("--flops", type=float, metavar="TFLOP/S", help="peak operations, for a lower bound on time")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Show the costs."""
    if options.name is not None:
        raise OptionError(f"a model is named by an option. Did you mean headwise cost --model {options.name}?")
    if options.models:
        return _list_models(options)
    cost, config = _cost(options)
    speeds = _speed("--flops", options.flops, 1e12), _speed("--bandwidth", options.bandwidth, 1e9)
    if options.json:
        print_json(_as_data(cost, config, speeds))
    else:
        _show(cost, config, options.dtype, speeds)
    return 0


def _cost(options: argparse.Namespace) -> tuple[Cost, configs.Config | None]:
    given = {name: value for name in SIZES if (value := getattr(options, name)) is not None}
    item_bytes = DTYPES[options.dtype]
    if options.model is not None:
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise OptionError(f"--model {options.model} sets its own sizes. Leave out {names}, or --model.")
        config = configs.find(options.model)
        seq = min(1024, config.context) if options.seq is None else options.seq
        return Cost.of_model(config, seq, options.batch, item_bytes), config
    widths = given.pop("d_model", 768), given.pop("heads", 12), given.pop("kv_heads", None)
    seq = 1024 if options.seq is None else options.seq
    return Cost.of(*widths, seq=seq, batch=options.batch, item_bytes=item_bytes, **given), None


def _speed(name: str, value: float | None, unit: float) -> float | None:
    return None if value is None else check_positive(name, value) * unit


def _list_models(options: argparse.Namespace) -> int:
    known = configs.CONFIGS.values()
    if options.json:
        fields = ["name", "aliases", "d_model", "num_heads", "num_kv_heads", "head_dim", "layers", "context", "window"]
        fields += ["windowed_layers", "vocabulary", "feed_forward", "parameters", "position", "source", "note"]
        print_json({"models": [{field: getattr(config, field) for field in fields} for config in known]})
        return 0
    numeric = ("E", "H", "Hkv", "D", "L", "tokens", "window", "weights", "cache")
    out = console()
    kept = [name for name in numeric if out.width >= NARROW or name not in LEFT_OUT]
    grid = table("model", *kept, right=kept, whole=("model", *kept))
    for config in known:
        cost = Cost.of_model(config, 1)
        sizes = (config.d_model, config.num_heads, config.num_kv_heads, config.head_dim, config.layers)
        context = f"{config.context // 1024}k" if config.context >= 2**14 else str(config.context)
        weights = human(cost.parameters.value * config.layers)
        per_token = cost.kv_cache_per_token.value * config.layers
        cache = human(per_token, "B", binary=True) if config.causal else ""  # an encoder keeps none
        shown = [*map(str, sizes), context, str(config.window or ""), weights, cache]
        row = dict(zip(numeric, shown, strict=True))
        grid.add_row(f"[bold cyan]{config.name}[/]", *(row[name] for name in kept))
    out.print(grid)
    out.print("[dim]E model width, H and Hkv query and key/value heads, D head dimension, L layers;[/]")
    out.print("[dim]tokens: longest text, 1k = 1024; window: keys visible in a windowed layer;[/]")
    out.print("[dim]weights: attention parameters; cache: bytes per token in bfloat16, of all layers[/]")
    if len(kept) < len(numeric):
        out.print(f"[dim]{NARROW} columns or more show {', '.join(LEFT_OUT[:-1])} and {LEFT_OUT[-1]} too[/]")
    return 0


def amounts(cost: Cost) -> dict[str, Amount]:
    """Every number of one layer, by name."""
    return {
        "parameters": cost.parameters,
        "weights": cost.weight_bytes,
        "T×T matrix": cost.matrix_bytes,
        "kept for backward, fused": cost.fused_activation_bytes,
        "kept for backward, with T×T": cost.matrix_activation_bytes,
        "KV cache of a token": cost.kv_cache_per_token,
        "KV cache": cost.kv_cache,
        "KV cache of all layers": cost.model_kv_cache,
        "decode: operations": cost.decode_flops,
        "decode: bytes read": cost.decode_bytes,
    }


def times(cost: Cost, flops: float | None, bandwidth: float | None) -> dict[str, float | None]:
    """The least seconds one layer needs on such a machine."""
    return {
        "prefill": bound_seconds(cost.visible_flops, cost.prefill_bytes, flops, bandwidth),
        "decode": bound_seconds(cost.decode_flops.value, cost.decode_bytes.value, flops, bandwidth),
    }


def _as_data(cost: Cost, config: configs.Config | None, speeds: tuple[float | None, float | None]) -> dict[str, Any]:
    near = cost.near
    return {
        "model": None if config is None else config.name,
        "sizes": {"batch": cost.batch, "seq": cost.seq, "d_model": cost.d_model, "heads": cost.num_heads}
        | {"kv_heads": cost.num_kv_heads, "head_dim": cost.head_dim, "layers": cost.layers, "causal": cost.causal},
        "kind": cost.kind,
        "steps": [step._asdict() for step in cost.steps()],
        "amounts": {name: amount._asdict() for name, amount in amounts(cost).items()},
        "windowed": None if near is None else {name: amount._asdict() for name, amount in amounts(near).items()},
        "window": config.window if config is not None else None,
        "intensity": cost.intensity,
        "crossover": cost.crossover,
        "alternatives": [
            {"kind": c.kind, "kv_heads": c.num_kv_heads, "intensity": c.intensity}
            | {name: amount.value for name, amount in amounts(c).items()}
            for c in alternatives(cost)
        ],
        "seconds": times(cost, *speeds),
        "answers": [answer._asdict() for answer in answers(cost)],
    }


def _show(cost: Cost, config: configs.Config | None, dtype: str, speeds: tuple[float | None, float | None]) -> None:
    out = console()
    name = "" if config is None else f"[bold cyan]{config.name}[/]: "
    out.print(
        f"[bold]COST[/]  {name}width {cost.d_model}, {cost.num_heads} heads of {cost.head_dim}, {cost.num_kv_heads} "
        f"key/value ({cost.kind}); batch {cost.batch}, {cost.seq} tokens, {dtype}"
    )
    out.print(
        "[dim]B batch, T tokens, E width, H and Hkv heads, D head width; of one layer, unless it says otherwise; one "
        "multiply-and-add counts as two operations (FLOPs)[/]\n"
    )
    out.print(_steps_table(cost))
    _show_amounts(cost, config)
    _show_kinds(cost)
    if any(speed is not None for speed in speeds):
        prefill, decode = (human(seconds or 0, "s") for seconds in times(cost, *speeds).values())
        each = " of each text" if cost.batch > 1 else ""
        out.print(
            f"\n[bold]TIME[/]  one layer takes at least {prefill} for the text and {decode} for one more token{each}"
        )
    out.print("\n[bold]INTERVIEW QUESTIONS[/]")
    for answer in answers(cost):
        out.print(f"[bold cyan]{answer.question}[/]")
        out.print(rich("padding").Padding(answer.answer, (0, 0, 0, 2)))


def _steps_table(cost: Cost) -> Any:
    """Operations by step, with an extra column for each way of skipping hidden pairs."""
    steps = cost.steps()
    parts = {"operations": [step.total for step in steps]}
    if cost.causal:
        parts["visible only"] = [step.visible for step in steps]
    if cost.near is not None:
        parts["in a window"] = [step.visible for step in cost.near.steps()]
    grid = table("", "step", "formula", *parts, "share", right=(*parts, "share"))
    total = sum(parts["operations"])
    for step, *amounts in zip(steps, *parts.values(), strict=True):
        share = f"{step.total / total:.1%}" if step.total else ""
        grid.add_row(f"[bold cyan]{step.number}[/]", step.name, step.formula, *map(human, amounts), share)
    grid.add_section()
    sums = [f"[bold]{human(sum(amounts))}[/]" for amounts in parts.values()]
    grid.add_row("", "[bold]all ten[/]", f"{human(cost.flops)} in matrix products", *sums, "")
    return grid


def _show_amounts(cost: Cost, config: configs.Config | None) -> None:
    near = cost.near
    columns = ["one layer"] + ["windowed"] * (near is not None) + ["all layers"] * (cost.layers > 1)
    grid = table("", "formula", *columns, right=columns)
    windowed = None if near is None else amounts(near)
    for name, amount in amounts(cost).items():
        if name == "KV cache of all layers":
            continue  # shown in the last column
        values = [amount.value] if windowed is None else [amount.value, windowed[name].value]
        if cost.layers > 1:
            values.append(amount.value * (cost.layers - cost.windowed_layers) + values[-1] * cost.windowed_layers)
        cells = [f"{n:,}" if name == "parameters" else _short(name, n) for n in values]
        grid.add_row(f"[bold]{name}[/]", amount.formula, *cells)
    intensities = [f"{c.intensity:.3g}" for c in (cost, near) if c is not None]
    grid.add_row("[bold]decode: operations per byte[/]", "operations / bytes read", *intensities)
    grid.add_row("[bold]crossover[/]", "E·(1 + Hkv/H) tokens", f"{cost.crossover:.6g}")
    out = console()
    out.print()
    out.print(grid)
    out.print("[dim]crossover: above so many tokens, scores cost more than projections[/]")
    if cost.batch > 1:
        out.print(f"[dim]for a batch of {cost.batch} texts; decoding makes one new token for each of them[/]")
    if config is not None:
        share = cost.parameters.value * cost.layers / config.parameters
        out.print(f"[dim]attention is {share:.1%} of the model's {human(config.parameters)} parameters[/]")
        for remark in _remarks(cost, config):
            out.print(f"[dim]{remark}[/]")


def _short(name: str, n: int) -> str:
    return human(n) if name == "decode: operations" else human(n, "B", binary=True)


def _remarks(cost: Cost, config: configs.Config) -> list[str]:
    remarks = []
    if cost.seq > config.context:
        remarks.append(f"{cost.seq:,} tokens exceed its context of {config.context:,}")
    if config.window is not None and not cost.is_windowed:
        remarks.append(f"its window of W = {config.window:,} tokens hides nothing from a text of {cost.seq:,}")
    elif config.window is not None:
        which = f"{config.windowed_layers} of {config.layers} layers" if cost.near is not None else "all layers"
        remarks.append(f"{which} see and cache at most W = {config.window} tokens")
    if not config.causal:
        remarks.append("it does not generate text: cache and decoding are for comparison only")
    return [*remarks, config.note] if config.note else remarks


def _show_kinds(cost: Cost) -> None:
    kinds = alternatives(cost)
    titles = [f"{c.kind}, {c.num_kv_heads} kv" for c in kinds]
    grid = table("the same layer as", *titles, right=titles)
    rows: dict[str, list[str]] = {
        "parameters": [f"{c.parameters.value:,}" for c in kinds],
        "operations": [human(c.flops) for c in kinds],
        "KV cache of a token": [human(c.kv_cache_per_token.value, "B", binary=True) for c in kinds],
        "KV cache of all layers": [human(c.model_kv_cache.value, "B", binary=True) for c in kinds],
        "decode: bytes read": [human(c.decode_bytes.value, "B", binary=True) for c in kinds],
        "decode: operations per byte": [f"{c.intensity:.3g}" for c in kinds],
        "crossover, tokens": [f"{c.crossover:.6g}" for c in kinds],
    }
    for name, cells in rows.items():
        shown = [f"[green]{x}[/]" if c == cost else x for c, x in zip(kinds, cells, strict=True)]
        grid.add_row(f"[bold]{name}[/]", *shown)
    out = console()
    out.print()
    out.print(grid)
