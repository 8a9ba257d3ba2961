"""`headwise steps`: the ten steps on real tensors, with shapes, code, reasons and memory."""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from headwise.cli.console import (
    add_json,
    check_file,
    console,
    paragraph,
    print_json,
    rich,
    table,
    typed_text,
    write_file,
)
from headwise.errors import OptionError
from headwise.learn import Setting, configs, forms, trace
from headwise.learn.page import steps_page
from headwise.learn.steps import FITS, SIX, Explained, Operation, head_split_text, number_text, shape_text
from headwise.learn.words import word_steps, words_page, words_text

EXAMPLES = """examples:
  headwise steps "The quick brown fox"
  headwise steps "The quick brown fox" --html fox.html
  headwise steps
  headwise steps --d-model 768 --heads 12 --seq 100 --batch 4 --causal
  headwise steps --form interview --seq 4 --keys 6
  headwise steps --form list --d-model 6 --heads 3
  headwise steps --forms
  headwise steps --model llama-3.1-8b --seq 16
  headwise steps --model gpt2 --json
  headwise steps --causal --html steps.html
"""

OTHER_COLUMNS = 52  # beside the code, in the table of the steps
NARROW = 72  # columns below which the shapes stand over the code, which then has a few more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("text", nargs="?", help="words to read with a real model; without them, random numbers")
    parser.add_argument("--d-model", type=int, metavar="E", help="model width (default: 8)")
    parser.add_argument("--heads", type=int, metavar="H", help="attention heads (default: 2)")
    parser.add_argument("--seq", type=int, default=4, metavar="T", help="sequence length")
    parser.add_argument("--keys", type=int, metavar="S", help="keys, for cross-attention (default: as many as tokens)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="batch size")
    parser.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, help="hide later tokens (default: as in the form)"
    )
    parser.add_argument("--form", metavar="NAME", help=f"form of the code: {_form_names()} (default: course)")
    parser.add_argument("--forms", action="store_true", help="list the forms and how they differ, then exit")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="with a text: builtin or a model folder; without: the widths of a known model (headwise cost --models)",
    )
    parser.add_argument("--layer", type=int, metavar="N", help="with a text: the layer (default: one in the middle)")
    parser.add_argument("--head", type=int, metavar="H", help="with a text: the head whose numbers are printed")
    output = parser.add_mutually_exclusive_group()
    add_json(output)
    output.add_argument("--html", metavar="FILE", type=Path, help="write a self-contained page instead")


def _form_names() -> str:
    return ", ".join(" or ".join((form.name, *form.aliases)) for form in forms.FORMS.values())


def run(options: argparse.Namespace) -> int:
    """Show the steps as tables, JSON or a page."""
    if options.forms:
        return _list_forms(options)
    check_file("--html", options.html)
    if options.text is not None:
        return _read_words(options)
    if options.layer is not None or options.head is not None:
        raise OptionError("--layer and --head choose what to show of a text. Pass a text, or leave them out.")
    setting = _setting(options)
    steps, operations = trace(setting), setting.key_operations()
    if options.json:
        print_json(_as_data(setting, steps, operations))
    elif options.html is not None:
        write_file("--html", options.html, steps_page(setting, steps, operations), sys.stdout)
    else:
        _show(setting, steps, operations)
    return 0


def _read_words(options: argparse.Namespace) -> int:
    """Show one layer of a real model on the words."""
    sizes = {"--d-model": options.d_model, "--heads": options.heads, "--keys": options.keys, "--form": options.form}
    given = [name for name, value in sizes.items() if value is not None]
    if given or options.causal is not None:
        raise OptionError(
            f"{', '.join(given) or '--causal'}: a text is read by a real model, which has its own sizes and mask. "
            f"Leave out one of them."
        )
    steps = word_steps(typed_text(options.text), options.model or "builtin", options.layer)
    if options.json:
        print_json(steps.to_dict())
    elif options.html is not None:
        write_file("--html", options.html, words_page(steps), sys.stdout)
    else:
        print(words_text(steps, min(100, shutil.get_terminal_size((80, 24)).columns), options.head))
        print()
        paragraph("Add --html steps.html for a page that explains every number you point at.")
    return 0


def _setting(options: argparse.Namespace) -> Setting:
    asked = {"d_model": options.d_model, "num_heads": options.heads, "form": options.form}
    given = {name: value for name, value in asked.items() if value is not None}
    if options.model is not None:
        if given:
            raise OptionError(
                f"--model {options.model} sets its own widths and form. Leave out --d-model, --heads and --form, or "
                f"leave out --model."
            )
        given["config"] = configs.find(options.model)
    elif "form" in given:
        given["form"] = forms.find(options.form)
    return Setting.of(seq=options.seq, keys=options.keys, batch=options.batch, causal=options.causal, **given)


def _list_forms(options: argparse.Namespace) -> int:
    if options.json:
        fields = ("name", "aliases", "title", "constructor", "call", "returns")
        known = forms.FORMS.values()
        told = [{key: getattr(form, key) for key in fields} | {"differences": form.differences()} for form in known]
        print_json({"forms": told})
        return 0
    if options.html is not None:
        raise OptionError("--forms prints a list. Leave out --html, or name one form with --form.")
    grid = table("form", "constructor, call, return value", "how it differs, by step")
    for form in forms.FORMS.values():
        made = f"[bold]{form.title}[/]\n{form.constructor}\n{form.call} → {form.returns}"
        names = "\n".join([f"[bold cyan]{form.name}[/]", *(f"or {alias}" for alias in form.aliases)])
        grid.add_row(names, made, "\n".join(f"{n}: {t}" for n, t in form.differences().items()))
    out = console()
    out.print(grid)
    out.print("All compute softmax(q·kᵀ/√D)·v. The order of mask and scale makes no difference: −inf/√D is −inf.")
    return 0


def _as_data(setting: Setting, steps: list[Explained], operations: list[Operation]) -> dict[str, Any]:
    w, config = setting.widths, setting.config
    sizes = {"batch": setting.batch, "seq": setting.seq, "keys": setting.keys, "d_model": w.d_model}
    sizes |= {"heads": w.num_heads, "kv_heads": w.num_kv_heads, "head_dim": w.head_dim, "d_out": w.d_out}
    return {
        "sizes": sizes,
        "causal": setting.causal,
        "form": None if config is not None else setting.form.name,
        "model": None if config is None else config.name,
        "also": setting.notes(),
        "steps": [step.to_dict() for step in steps],
        "differences": setting.differences(),
        "layout": [op.to_dict() for op in operations],
    }


def _show(setting: Setting, steps: list[Explained], operations: list[Operation]) -> None:
    out, config = console(), setting.config
    name = setting.form.name if config is None else config.name
    out.print(f"[bold]TEN STEPS[/]  {setting.headline()}")
    out.print(setting.subject().replace(name, f"[bold cyan]{name}[/]", 1) + "\n")
    out.print(_steps_table(steps))
    out.print(f"[dim]{SIX}[/]")
    if setting.device == "meta":
        out.print(f"[dim]{setting.size:,} numbers are too many: only shapes are traced[/]")
    for note in setting.notes():
        out.print(f"[yellow]also[/] {note}: not among the ten steps shown")
    if config is None:
        _show_differences(setting)
    _show_numbers(steps)
    _show_layout(operations)


def _steps_table(steps: list[Explained]) -> Any:
    narrow = console().width < NARROW
    titles = ["before → after, operation, and why"] if narrow else ["before → after", "operation, and why"]
    grid = table("", "step", *titles, lines=True, whole=titles[:-1])
    for step in steps:
        before, after = ("\n  ".join(f"{names} {shape_text(s)}" for names, s in part.items()) for part in step.shapes())
        shapes = f"  {before}\n[green]→ {after}[/]"
        told = [shapes, f"[bold]{_safe(_folded(step.operation))}[/]\n{step.why}"]
        grid.add_row(f"[bold cyan]{step.number}[/]", step.name, *(["\n".join(told)] if narrow else told))
    return grid


def _folded(code: str) -> str:
    """Code that is too long for its column, broken where a reader would: before a call of a chain, or a `for`."""
    width = console().width
    if len(code) <= width - (OTHER_COLUMNS if width >= NARROW else OTHER_COLUMNS // 2):
        return code
    if code.startswith("["):
        return code.replace(" for ", "\n for ")
    return code.replace(").", ")\n  .")


def _safe(code: str) -> str:
    """Escape square brackets, which rich reads as markup."""
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
    panel = rich("panel").Panel
    panels: list[tuple[int, Any]] = []
    for step in steps:
        if step.number in (1, 2) or step.operation == "scores":  # shown by step 3; step 5 without a mask
            continue
        for name, rows in step.numbers().items():
            digits = max(len(number_text(n)) for row in rows for n in row)
            body = "\n".join(" ".join(number_text(n).rjust(digits) for n in row) for row in rows)
            width = max((digits + 1) * len(rows[0]) + 3, len(f"{step.number} {name}") + 6)
            panels.append((width, panel(body, title=f"[bold cyan]{step.number}[/] {name}", width=width, style="none")))
    out = console()
    if not panels:
        out.print(f"\n[dim]numbers are shown up to {FITS} rows and columns, for example with --seq {FITS}[/]")
        return
    out.print("\n[bold]NUMBERS[/]  first sample, and after step 2 head 0; a row is a token")
    for row in _rows(panels, out.width):
        out.print(rich("columns").Columns(row, padding=(0, 0)))


def _rows(panels: list[tuple[int, Any]], most: int) -> list[list[Any]]:
    """Arrange as many panels side by side as fit."""
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
        shapes += "\n[red]error[/]" if op.after is None else ""
        what = f"[{style}]{op.name}[/]\n[bold]{_safe(op.code)}[/]\n{op.why}"
        grid.add_row(what, f"[green]{shapes}[/]\n{strides}", op.memory)
    out = console()
    out.print(
        "\n[bold]MEMORY[/]  the four key operations, measured; a stride is how far apart neighbors on an axis are"
    )
    out.print(grid)
    out.print(_safe(head_split_text()))
