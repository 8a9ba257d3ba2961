"""`headwise view`: what every attention head does with a text."""

import argparse
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.cli import console
from headwise.cli.console import MODEL_HELP, add_json, check_at_least_one, print_json
from headwise.errors import OptionError
from headwise.models import TextModel, open_model
from headwise.study.finite import nan_told
from headwise.view import View, view
from headwise.view.color import palette
from headwise.view.screen import KEYS, MapScreen, printed, show
from headwise.view.terminal import drawn, drawn_layer
from headwise.view.texts import CROSS, DECODER, PARTS

EXAMPLES = """examples:
  headwise view "To be, or not to be, that is the question."
  headwise view "To be, or not to be, that is the question." --layer 3 --plain
  headwise view "To be, or not to be, that is the question." --head 3.0
  headwise view --file texts/sea.txt --tokens 100 --html sea.html
  headwise view "Once upon a time" --html once.html --importance
  headwise view "Once upon a time" --json
"""
PAGE = Path("heads.html")
MARK = b'name="generator" content="headwise"'  # at the beginning of every page that headwise writes
LONG = 4096  # tokens; longer texts are sampled unless --exact
QUERIES = 256
SHORT = 512  # tokens below which one thread is fastest
SLOW = 2048  # tokens from which progress is shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("text", nargs="?", help="the text; - reads standard input")
    parser.add_argument("--file", type=Path, help="read the text from a file")
    parser.add_argument("--tokens", type=int, metavar="N", help="use only the first N tokens")
    parser.add_argument("--model", default="builtin", help=MODEL_HELP)
    parser.add_argument("--layer", type=int, metavar="N", help="show only this layer, with larger pictures")
    keys = "; ".join(f"{key}: {told}" for key, _, told in KEYS)
    parser.add_argument(
        "--head",
        type=_place,
        metavar="L.H",
        help=f"explore one head on the full screen, such as 3.5: layer 3, head 5. Keys: {keys}",
    )
    parser.add_argument(
        "--part", choices=PARTS, help="of an encoder–decoder model: what to show (default: its encoder)"
    )
    parser.add_argument(
        "--target", metavar="TEXT", help="the text that its decoder reads (default: what the model writes)"
    )
    parser.add_argument("--html", type=Path, metavar="PATH", help=f"path of the page (default: {PAGE})")
    parser.add_argument("--no-html", action="store_true", help="do not write a page")
    parser.add_argument(
        "--importance",
        action="store_true",
        help="also measure how much the loss depends on each head; the page is colored by it",
    )
    parser.add_argument(
        "--values", action="store_true", help="also show what the weights carry (always done up to 1,024 tokens)"
    )
    parser.add_argument(
        "--exact", action="store_true", help=f"use every query; by default, {QUERIES} of more than {LONG:,}"
    )
    parser.add_argument("--plain", action="store_true", help="plain text, without colors or a full screen")
    add_json(parser, "pictures")


def run(options: argparse.Namespace) -> int:
    """Show the heads and write the page."""
    _check(options)
    text = read(options)
    model = open_model(options.model, both=True)
    _say_part(model, options)
    sight = _look(model, _tokens(model, text, options), options)
    _warn_of_nan(sight)
    if options.json:
        print_json(_data(sight, options))
    elif options.head is not None:
        _show_head(sight, options)
    else:
        (width, height), shades = _size(), palette(sys.stdout, plain=options.plain)
        whole = options.layer is None
        print(
            drawn(sight, width, shades, height) if whole else drawn_layer(sight, options.layer, width, height, shades)
        )
    sys.stdout.flush()  # before the message about the page
    page = _page(sight, options)
    if page is not None:
        _write_page(sight, page, asked=options.html is not None)
    return 0


def read(options: argparse.Namespace) -> str:
    """The text: the argument, standard input or a file."""
    if options.text is not None and options.file is not None:
        raise OptionError("both a text and --file are given: pass one of them.")
    if options.text is None and options.file is None:
        raise OptionError(
            "no text given. Pass one, such as: headwise view 'The captain looked at the sea.', or use --file."
        )
    if options.file is not None:
        text = console.text_file(options.file)
    else:
        text = console.standard_input() if options.text == "-" else console.typed_text(options.text)
    if not text.strip():
        raise OptionError("the text is empty; expected at least one word.")
    return text


def _check(options: argparse.Namespace) -> None:
    if options.layer is not None and options.head is not None:
        raise OptionError("--layer and --head: pass one of them; --head 3.5 is head 5 of layer 3.")
    if options.html is not None and options.no_html:
        raise OptionError("--html and --no-html: pass one of them.")
    console.check_file("--html", options.html)
    check_at_least_one("--tokens", options.tokens)


def _place(text: str) -> tuple[int, int]:
    layer, dot, head = text.partition(".")
    if not (dot and layer.isdecimal() and head.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected layer and head, such as 3.5")
    return int(layer), int(head)


def _tokens(model: TextModel, text: str, options: argparse.Namespace) -> Tensor:
    """The tokens to show, with a warning if there are more than the model was trained for."""
    ids = model.tokens(text, most=10**9)
    given = ids.shape[1]
    ids = ids[:, : options.tokens]
    count = ids.shape[1]
    if model.limit is not None and count > model.limit:
        raise OptionError(
            f"the text is {count:,} tokens long and the model can read {model.limit:,}. "
            f"Show its beginning with --tokens {model.limit}."
        )
    if count < given:
        _say(f"showing the first {count:,} of {given:,} tokens.")
    if model.trained is not None and count > model.trained:
        _say(
            f"the text has {count:,} tokens and the model was trained for {model.trained:,}: beyond that its heads are "
            f"unreliable. --tokens {model.trained} shows the beginning."
        )
    return ids


def _say_part(model: TextModel, options: argparse.Namespace) -> None:
    """What of an encoder–decoder model is shown, where it was not asked for."""
    if model.start is not None and options.part is None:
        _say(
            f"this shows the encoder. --part {DECODER} shows how the decoder attends to its own text, and --part "
            f"{CROSS} how it attends to this one."
        )
    if options.part in (DECODER, CROSS) and options.target is None:
        _say("the decoder reads what the model writes; --target TEXT gives it another text.")


def _look(model: TextModel, ids: Tensor, options: argparse.Namespace) -> View:
    count = ids.shape[1]
    if count < SHORT:
        torch.set_num_threads(1)  # too little work to share: two threads on a busy machine took many times as long
    some = count > LONG and not options.exact
    if some:
        _say(f"numbers are from {QUERIES} of {count:,} queries, evenly spaced; --exact uses all, and takes longer.")
    progress: dict[str, Any] = {"progress": _progress} if count >= SLOW else {}
    sight = view(
        model,
        ids,
        queries=QUERIES if some else None,
        values=options.values or None,
        importance=options.importance,
        part=options.part,
        target=None if options.target is None else console.typed_text(options.target),
        **progress,
    )
    if options.head is None and progress:  # everything slow, before anything is printed
        sight.pairs()
        _ = sight.summaries
        _say(f"{count:,} tokens read.")
    return sight


def _warn_of_nan(sight: View) -> None:
    """Say which layers have weights that are not numbers; their heads would only seem to have no pattern."""
    broken = [
        layer
        for layer, heads in enumerate(sight.summaries)
        if any(math.isnan(number) for head in heads for number in head.numbers.values())
    ]
    if broken:
        _say(nan_told(sight.names[broken[0]], broken[0], len(broken) - 1))


def _progress(stage: str, done: int, of: int) -> None:
    """One changing line in a terminal, otherwise one line per stage."""
    console.status(f"headwise view: {stage}: layer {done} of {of}")
    if done == of and not sys.stderr.isatty():
        _say(f"{stage}: {of} layers done")


def _say(text: str) -> None:
    console.say(f"headwise view: {text}")


def _size() -> tuple[int, int]:
    """Columns and lines, at least 40 × 12; without a terminal 80 columns, and lines enough for more heads."""
    columns, lines = shutil.get_terminal_size((80, 48))
    return max(40, columns), max(12, lines)


def _show_head(sight: View, options: argparse.Namespace) -> None:
    """Show one map: interactive in a terminal, otherwise printed once."""
    width, height = _size()
    layer, head = options.head
    if options.plain or not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("\n".join(printed(sight, layer, head, width)))
        return
    show(MapScreen(sight, layer, head, palette(sys.stdout), width, height))


def _data(sight: View, options: argparse.Namespace) -> dict[str, Any]:
    """All numbers, or those of one layer or head."""
    found = sight.to_dict()
    if options.layer is None and options.head is None:
        return found
    layer, head = options.head or (options.layer, None)
    sight.check_place(layer, head)
    part = found["layers"][layer]
    heads = part["heads"] if head is None else [part["heads"][head]]
    return found | {"layers": [part | {"layer": layer, "heads": heads}]}


def _page(sight: View, options: argparse.Namespace) -> Path | None:
    """The path of the page: --html, or the default for a plain view without --layer, --head or --json."""
    first_view = not options.json and options.layer is None and options.head is None
    if options.html is not None or options.no_html or not first_view:
        return options.html  # type: ignore[no-any-return]
    if sight.T > LONG:
        _say(f"no page written: for {sight.T:,} tokens it takes a while, as it uses every query; pass --html {PAGE}.")
        return None
    return PAGE


def _write_page(sight: View, path: Path, *, asked: bool) -> None:
    """Write the page and say so. By default, never overwrite a file that headwise did not write."""
    if not asked and path.exists() and MARK not in _beginning(path):
        _say(f"{path} was not written by headwise and is kept; --html PATH writes elsewhere.")
        return
    try:
        sight.save(path)
    except OSError as error:
        raise OptionError(
            f"the page cannot be written to {path}: {error.strerror}. Name another path with --html, or pass --no-html."
        ) from error
    _say(f"wrote {path}")


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4096)
    except OSError:
        return b""
