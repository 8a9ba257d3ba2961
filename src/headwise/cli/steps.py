"""`headwise steps`: the ten steps on real tensors, with shapes, code and reasons, and what they do to memory."""

import argparse
import json
from pathlib import Path
from typing import Any

from headwise.cli.terminal import console, shape_text, table, write_page
from headwise.errors import OptionError, need
from headwise.learn import configs, forms
from headwise.learn.layout import Operation, key_operations, memory_text, picture_text
from headwise.learn.page import steps_page
from headwise.learn.steps import FITS, SIX, Explained, Setting, describe, headline, number_text, numbers, trace

SUMMARY = "the ten steps on real tensors: shapes before and after, the operation, why, and what happens in memory"
EXAMPLES = """examples:
  headwise steps
  headwise steps --d-model 768 --heads 12 --seq 100 --batch 4 --causal
  headwise steps --form interview --seq 4 --keys 6
  headwise steps --form list --d-model 6 --heads 3
  headwise steps --forms
  headwise steps --model llama-3.1-8b --seq 16
  headwise steps --model gpt2 --json
  headwise steps --causal --html steps.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("--d-model", type=int, help="width of the model (default 8)")
    parser.add_argument("--heads", type=int, help="heads (default 2)")
    parser.add_argument("--seq", type=int, default=4, help="tokens (default 4)")
    parser.add_argument("--keys", type=int, help="keys, for cross-attention (default: as many as tokens)")
    parser.add_argument("--batch", type=int, default=1, help="samples (default 1)")
    parser.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, help="hide the future (default: as the form)"
    )
    parser.add_argument("--form", metavar="NAME", help=f"how it is written: {', '.join(forms.FORMS)} (default course)")
    parser.add_argument("--forms", action="store_true", help="list the forms and what differs between them")
    parser.add_argument(
        "--model", metavar="NAME", help="widths of a known model, such as gpt2; see headwise cost --models"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    output.add_argument("--html", metavar="FILE", type=Path, help="write one page that needs nothing else")


def run(options: argparse.Namespace) -> int:
    """Show the steps in the form asked for."""
    if options.forms:
        return _list_forms(options)
    setting = _setting(options)
    steps, w = trace(setting), setting.widths
    operations = key_operations(setting.batch, setting.seq, w.num_heads, w.head_dim, setting.device)
    if options.json:
        print(json.dumps(_as_data(setting, steps, operations)))
    elif options.html is not None:
        write_page(options.html, steps_page(setting, steps, operations))
    else:
        _show(setting, steps, operations)
    return 0


def _setting(options: argparse.Namespace) -> Setting:
    given = {"d_model": options.d_model, "num_heads": options.heads}
    given = {name: n for name, n in given.items() if n is not None}
    if options.model is None:
        form = None if options.form is None else forms.find(options.form)
        more: dict[str, Any] = {"form": form, **given}
    else:
        if given or options.form is not None:
            raise OptionError(
                f"--model {options.model} brings its own widths and form. Leave out --d-model, --heads and --form, or "
                f"leave out --model."
            )
        more = {"config": configs.find(options.model)}
    return Setting.of(seq=options.seq, keys=options.keys, batch=options.batch, causal=options.causal, **more)


def _list_forms(options: argparse.Namespace) -> int:
    if options.json:
        told = [
            {
                "name": f.name,
                "aliases": list(f.aliases),
                "title": f.title,
                "constructor": f.constructor,
                "call": f.call,
                "returns": f.returns,
            }
            | {"differences": {str(n): text for n, text in f.differences().items()}}
            for f in forms.FORMS.values()
        ]
        print(json.dumps({"forms": told}))
        return 0
    if options.html is not None:
        raise OptionError("--forms is a list for the terminal. Leave out --html, or name one form with --form.")
    grid = table("form", "made with, called with, returns", "how it writes what forms write differently, by step")
    for form in forms.FORMS.values():
        made = f"[bold]{form.title}[/]\n{form.constructor}\n{form.call} → {form.returns}"
        names = "\n".join([f"[bold cyan]{form.name}[/]", *(f"or {alias}" for alias in form.aliases)])
        grid.add_row(names, made, "\n".join(f"{n}: {t}" for n, t in form.differences().items()))
    out = console()
    out.print(grid)
    out.print("All of them compute softmax(q·kᵀ/√D)·v. Order of mask and scale makes no difference: −inf/√D is −inf.")
    return 0


def _as_data(setting: Setting, steps: list[Explained], operations: list[Operation]) -> dict[str, Any]:
    w = setting.widths
    sizes = {"batch": setting.batch, "seq": setting.seq, "keys": setting.keys, "d_model": w.d_model}
    sizes |= {"heads": w.num_heads, "kv_heads": w.num_kv_heads, "head_dim": w.head_dim, "d_out": w.d_out}
    config = setting.config
    layout = [
        op._asdict() | {"before": op.before._asdict(), "after": None if op.after is None else op.after._asdict()}
        for op in operations
    ]
    return {
        "sizes": sizes,
        "causal": setting.causal,
        "form": None if config is not None else setting.form.name,
        "model": None if config is None else config.name,
        "also": [] if config is None else config.options(),
        "steps": describe(steps),
        "differences": {} if config is not None else {str(n): t for n, t in setting.form.differences().items()},
        "layout": layout,
    }


def _show(setting: Setting, steps: list[Explained], operations: list[Operation]) -> None:
    out, config, form = console(), setting.config, setting.form
    out.print(f"[bold]TEN STEPS[/]  {headline(setting)}")
    if config is None:
        out.print(f"form [bold cyan]{form.name}[/], {form.title}: {form.constructor}, {form.call} → {form.returns}\n")
    else:
        out.print(f"attention of [bold cyan]{config.name}[/], {config.layers} layers of it ({config.source})\n")
    out.print(_steps_table(steps))
    out.print(f"[dim]{SIX}[/]")
    if setting.device == "meta":
        out.print(f"[dim]{setting.size:,} numbers are too many to make: only shapes are traced[/]")
    for told in [] if config is None else config.options():
        out.print(f"[yellow]also[/] {told}: not among the ten steps shown")
    if config is None:
        _show_differences(setting)
    _show_numbers(steps)
    _show_layout(operations)


def _steps_table(steps: list[Explained]) -> Any:
    grid = table("", "step", "before → after", "operation, and why", lines=True, whole=("before → after",))
    for step in steps:
        before, after = ("\n  ".join(f"{names} {shape_text(s)}" for names, s in part.items()) for part in step.shapes())
        shapes = f"  {before}\n[green]→ {after}[/]"
        grid.add_row(f"[bold cyan]{step.number}[/]", step.name, shapes, f"[bold]{_safe(step.operation)}[/]\n{step.why}")
    return grid


def _safe(code: str) -> str:
    """Square brackets are markup to rich."""
    return code.replace("[", r"\[")


def _show_differences(setting: Setting) -> None:
    grid = table("step", f"how the form `{setting.form.name}` writes it")
    for number, text in setting.form.differences().items():
        grid.add_row(f"[bold cyan]{number}[/]", text)
    if setting.form.widens:
        w = setting.widths
        grid.add_row("", f"[yellow]here: {w.num_heads} heads of {w.head_dim} give {w.d_out}, not {w.d_model}[/]")
    out = console()
    out.print()
    out.print(grid)


def _show_numbers(steps: list[Explained]) -> None:
    panel = need("rich.panel", "terminal", "tables in the terminal").Panel
    panels: list[tuple[int, Any]] = []
    for step in steps:
        if step.number in (1, 2) or step.operation == "scores":  # heads are shown at step 3; nothing is hidden
            continue
        for name, rows in numbers(step).items():
            digits = max(len(number_text(n)) for row in rows for n in row)
            body = "\n".join(" ".join(number_text(n).rjust(digits) for n in row) for row in rows)
            width = max((digits + 1) * len(rows[0]) + 3, len(f"{step.number} {name}") + 6)
            panels.append((width, panel(body, title=f"[bold cyan]{step.number}[/] {name}", width=width, style="none")))
    out = console()
    if not panels:
        out.print(
            f"\n[dim]numbers are shown where a matrix has at most {FITS} rows and columns, as with --seq {FITS}[/]"
        )
        return
    out.print("\n[bold]NUMBERS[/]  first sample; where there are heads, head 0; a row is a token")
    for row in _rows(panels, out.width):
        out.print(need("rich.columns", "terminal", "tables in the terminal").Columns(row, padding=(0, 0)))


def _rows(panels: list[tuple[int, Any]], most: int) -> list[list[Any]]:
    """Panels side by side, as many as fit."""
    rows: list[list[Any]] = []
    room = 0
    for width, panel in panels:
        if width > room:
            rows.append([])
            room = most
        rows[-1].append(panel)
        room -= width
    return rows


def _show_layout(operations: list[Operation]) -> None:
    grid = table("operation, and why", "shape, then strides", "memory", lines=True, whole=("shape, then strides",))
    for op in operations:
        style = "bold yellow" if op.name.startswith("trap") else "bold cyan"
        layouts = [op.before] if op.after is None else [op.before, op.after]
        shapes = "\n→ ".join(shape_text(x.shape) for x in layouts)
        strides = "\n→ ".join(shape_text(x.strides) for x in layouts)
        shapes += "\n[red]refused[/]" if op.after is None else ""
        what = f"[{style}]{op.name}[/]\n[bold]{_safe(op.code)}[/]\n{op.why}"
        grid.add_row(what, f"[green]{shapes}[/]\n{strides}", memory_text(op))
    out = console()
    out.print("\n[bold]MEMORY[/]  the four key operations, measured; a stride is how many numbers to skip for one step")
    out.print(grid)
    out.print(_safe(picture_text()))
