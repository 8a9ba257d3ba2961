"""`headwise view`: what every head does with a text."""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.cli.terminal import standard_input
from headwise.errors import OptionError
from headwise.models import TextModel, open_model
from headwise.view import View, view
from headwise.view.color import palette
from headwise.view.screen import MapScreen, printed
from headwise.view.terminal import drawn, drawn_layer

SUMMARY = "what every head of a model does with a text, in 24 lines and as a page"
EXAMPLES = """examples:
  headwise view "The captain looked at the sea, and the sea looked at the captain."
  headwise view "To be, or not to be, that is the question." --layer 3 --plain
  headwise view "To be, or not to be, that is the question." --head 3.0
  headwise view "Once upon a time" --html once.html
  headwise view "Once upon a time" --json
"""
PAGE = Path("heads.html")
MARK = b'name="generator" content="headwise"'  # stands at the beginning of every page of ours
LONG = 4096  # tokens; of longer texts some queries are looked at unless --exact
QUERIES = 256
SHORT = 512  # tokens that one thread looks at fastest
SLOW = 2048  # tokens from which on progress is told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("text", nargs="?", help="the text; - reads standard input")
    parser.add_argument("--file", type=Path, help="a file of text instead")
    parser.add_argument("--tokens", type=int, metavar="N", help="only the first N tokens of it")
    parser.add_argument(
        "--model",
        default="builtin",
        help="the folder of a transformers model, or one that examples/train_gpt.py wrote (default builtin)",
    )
    parser.add_argument("--layer", type=int, metavar="N", help="only this layer, in larger pictures")
    parser.add_argument(
        "--head", type=_place, metavar="L.H", help="one head's map, full screen, with keys to move and zoom"
    )
    parser.add_argument("--html", type=Path, metavar="PATH", help=f"where to write the page (default {PAGE})")
    parser.add_argument("--no-html", action="store_true", help="write no page")
    parser.add_argument(
        "--exact",
        action="store_true",
        help=f"look at every query of a text of more than {LONG:,} tokens, and not at {QUERIES} of them",
    )
    parser.add_argument("--plain", action="store_true", help="letters instead of colours and keys, as into a pipe")
    parser.add_argument("--json", action="store_true", help="print all numbers as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Read, look, print, write the page."""
    _check(options)
    text = read(options)
    model = open_model(options.model)
    sight = _look(model, _tokens(model, text, options), options)
    if options.json:
        print(json.dumps(_data(sight, options)))
    elif options.head is not None:
        _show_head(sight, options)
    else:
        size = _size()
        shades = palette(sys.stdout, plain=options.plain)
        print(
            drawn(sight, size[0], shades) if options.layer is None else drawn_layer(sight, options.layer, *size, shades)
        )
    sys.stdout.flush()  # before what is said of the page
    page = _page(sight, options)
    if page is not None:
        _write_page(sight, page, asked=options.html is not None)
    return 0


def read(options: argparse.Namespace) -> str:
    """The text, from where it is."""
    if options.text is not None and options.file is not None:
        raise OptionError("a text and --file are given: pass one of them.")
    if options.text is None and options.file is None:
        raise OptionError("which text? Pass one, such as: headwise view 'The captain looked at the sea.', or --file.")
    if options.file is None:
        text = standard_input() if options.text == "-" else str(options.text)
    else:
        text = _file(options.file)
    if not text.strip():
        raise OptionError("the text is empty; expected at least one word.")
    return text


def _file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--file {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"--file {path} is no text in UTF-8: {error.reason} at byte {error.start}.") from error


def _check(options: argparse.Namespace) -> None:
    if options.layer is not None and options.head is not None:
        raise OptionError("--layer and --head: pass one of them; --head 3.5 is head 5 of layer 3.")
    if options.html is not None and options.no_html:
        raise OptionError("--html and --no-html: pass one of them.")
    if options.tokens is not None and options.tokens < 1:
        raise OptionError(f"--tokens {options.tokens}: expected 1 or more.")


def _place(text: str) -> tuple[int, int]:
    layer, dot, head = text.partition(".")
    if not (dot and layer.isdecimal() and head.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected layer and head, such as 3.5")
    return int(layer), int(head)


def _tokens(model: TextModel, text: str, options: argparse.Namespace) -> Tensor:
    """The tokens to look at; where they are more than the model can read or was made for, that is said."""
    ids = model.tokens(text, most=10**9)
    given = ids.shape[1]
    ids = ids[:, : options.tokens]
    count = ids.shape[1]
    if model.limit is not None and count > model.limit:
        raise OptionError(
            f"the text is {count:,} tokens long and the model can read {model.limit:,}. "
            f"Look at its beginning with --tokens {model.limit}."
        )
    if count < given:
        _say(f"shown are the first {count:,} of {given:,} tokens.")
    if model.trained is not None and count > model.trained:
        _say(
            f"{count:,} tokens, and the model was made for {model.trained:,}: beyond them its heads do what they never "
            f"learned. --tokens {model.trained} shows the beginning."
        )
    return ids


def _look(model: TextModel, ids: Tensor, options: argparse.Namespace) -> View:
    count = ids.shape[1]
    if count < SHORT:
        torch.set_num_threads(1)  # too little to share: two threads on a busy machine took many times as long
    some = count > LONG and not options.exact
    if some:
        _say(f"numbers come from {QUERIES} of {count:,} queries, evenly spread; --exact takes all, and its time.")
    told: dict[str, Any] = {"progress": _progress} if count >= SLOW else {}
    sight = view(model, ids, queries=QUERIES if some else None, **told)
    if options.head is None and told:  # all that takes long, before anything is printed
        sight.pairs()
        _ = sight.summaries
        _say(f"{count:,} tokens read.")
    return sight


def _progress(stage: str, done: int, of: int) -> None:
    """One line that changes in a terminal, a line a stage elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[Kheadwise view: {stage}: layer {done} of {of}", end="", file=sys.stderr, flush=True)
    elif done == of:
        _say(f"{stage}: {of} layers done")


def _say(text: str) -> None:
    clear = "\r\033[K" if sys.stderr.isatty() else ""  # of progress
    print(f"{clear}headwise view: {text}", file=sys.stderr, flush=True)


def _size() -> tuple[int, int]:
    """Columns and lines; 40 columns at least, 80 × 24 where there is no terminal."""
    columns, lines = shutil.get_terminal_size((80, 24))
    return max(40, columns), max(12, lines)


def _show_head(sight: View, options: argparse.Namespace) -> None:
    """One map: with keys in a terminal, else printed once in letters."""
    width, height = _size()
    layer, head = options.head
    if options.plain or not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("\n".join(printed(sight, layer, head, width)))
        return
    from headwise.view.screen import show

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
    """Where the page goes: where it was asked for, else for a first view into the working directory."""
    first_view = not options.json and options.layer is None and options.head is None
    if options.html is not None or options.no_html or not first_view:
        return options.html  # type: ignore[no-any-return]
    if sight.T > LONG:
        _say(f"no page: of {sight.T:,} tokens it takes a while, as it looks at every query; --html {PAGE} writes it.")
        return None
    return PAGE


def _write_page(sight: View, path: Path, *, asked: bool) -> None:
    """Write the page, and say so. A file of somebody else is left alone unless it was named."""
    if not asked and path.exists() and MARK not in _beginning(path):
        _say(f"{path} is no page of ours and stays; --html PATH writes elsewhere.")
        return
    try:
        sight.save(path)
    except OSError as error:
        raise OptionError(
            f"the page cannot be written to {path}: {error.strerror}. Name another place with --html, or --no-html."
        ) from error
    _say(f"wrote {path}")


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4096)
    except OSError:
        return b""
