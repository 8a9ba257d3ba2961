"""A view as text: the clearest heads large, with words, then all heads as colored cells."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from headwise.errors import printable
from headwise.masks.probes import sink
from headwise.view.color import LETTERS, Palette
from headwise.view.data import WAYS
from headwise.view.result import View
from headwise.view.tokens import cut, fill, shown, wide
from headwise.view.words import BESIDES_FIRST, WITHOUT_FIRST, described, example, in_short
from headwise.weights.summary import FIRST_SINK, MIXED, ON_FIRST, READINGS, Head, HeadSummary, second_of

HEIGHT = 24  # lines of a terminal; one is for the path of the page, one for the prompt
# What a head does, in one letter: "c" for a copy of the same token and "w" for a sink on a word, since "s" is a sink;
# "u" for a key that is unique to its query, since "o" is the query's own.
OTHER_LETTERS = {"same-token": "c", "second sink": "w", "one-to-one": "u", MIXED: "·"}
KIND_LETTERS = {FIRST_SINK: "s"} | {name: name[0] for _, name, _ in READINGS} | OTHER_LETTERS
IDLE = 0.6  # of a head's weight on the first token, beyond which it is shown last
WORD = 9  # columns of a word beside a picture
SAID = 2  # lines of the sentence above it
TALL = 32  # lines of a terminal that has room for more
NORMAL = 80  # columns of a terminal; with fewer, what is said takes more lines
LEAST, MOST = 12, 32  # columns of a large picture
CLEAR = 24  # columns from which on more pictures are better than larger ones
LEGEND = "   "  # between entries, since a dot is an entry of its own
CAPITAL = f"s and capitals: {ON_FIRST}"
WITHOUT = f" {WITHOUT_FIRST}"  # how `described` says it of a share; said once for all heads
EXAMPLE = f"example {BESIDES_FIRST}"
EXPLAINED = (
    f"% on the first token or a second sink: of all attention; other %: {WITHOUT_FIRST}. "
    "Weights in examples: as they are."
)
NO_PATTERN = "No head has a clear pattern in this text; a longer one may show some."
LISTED = 12  # heads in a table without colors
EXPLAINING = 60  # columns from which on a table says what its numbers are
LARGEST = 24  # columns of a picture in the view of one layer
RAMP = f"from 0 to 1 on a square-root scale: {LETTERS!r}".replace("' ", "'\u00a0")  # never broken there
WORTH = 8  # heads whose importance is listed
NARROWEST = 15  # columns of a picture and what is said under it


def drawn(view: View, width: int, palette: Palette, height: int = HEIGHT) -> str:
    """What the heads do with the text, in a terminal of this size."""
    room = height - 2
    large, narrow = height >= TALL, width < NORMAL
    titles = 2 if large or (palette.depth == 0 and width >= EXPLAINING) else 1
    facts = 6 if large else 2 if palette.depth and not narrow else 3
    lines = [*_heading(view, width, palette, titles, facts), *[""] * (large or not narrow)]
    cells = Cells(view, width, palette)
    rest = cells.lines(max(2, (room - len(lines)) // 2)) + _importance(view, width)
    if palette.depth == 0:
        most = max(3, room - len(lines) - len(rest) - 2)
        return "\n".join([*lines, *_listed(view, width, most), "", *rest])
    left = room - len(lines) - len(rest) - 1
    fits = left >= LEAST // 2 + 3 and width >= LEAST + 2 * WORD + 4
    pictures = _large(view, width, left, palette) if fits else [*_listed(view, width, left - 1), ""]
    return "\n".join([*lines, *pictures, *rest])


def _importance(view: View, width: int) -> list[str]:
    """The heads whose removal changes the loss most, if that was measured."""
    if view.importance is None:
        return []
    worth = {
        f"{layer}.{head.head}": view.worth(layer, index) or 0.0
        for layer, summary in enumerate(view.summaries)
        for index, head in enumerate(summary)
    }
    most = sorted(worth, key=lambda place: -abs(worth[place]))[:WORTH]
    told = ", ".join(f"{place}\u00a0{worth[place]:+.3f}".replace("-", "−") for place in most)
    return wrapped(f"Importance, in nats per token ({WAYS[view.importance.by]}): {told}.".split(" "), width, " ")


def _heading(view: View, width: int, palette: Palette, titles: int, facts: int) -> list[str]:
    """What is shown, in one line or two, and at most so many lines of the sentence that counts heads by kind."""
    first = [cut(view.heading, width)] if titles == 1 else wrapped(view.heading.split(" "), width, " ")[:titles]
    lines = wrapped(view.sentence.split(" · "), width)
    if len(lines) > facts > 0:  # the page has the rest
        lines = [*lines[: facts - 1], cut(f"{lines[facts - 1]} · …", width)]
    return [*map(palette.strong, first), *map(palette.faint, lines[:facts])]


def _large(view: View, width: int, room: int, palette: Palette) -> list[str]:
    """The clearest heads, each with words beside its picture, its name and a sentence above."""
    side, across, down = _layout(view, width, room)
    notes = _notes(view, side, width, tight=room < TALL // 2)
    if len(notes) > 1:
        side, across, down = _layout(view, width, room - len(notes) + 1)
        notes = _notes(view, side, width, tight=room < TALL // 2)
    size = (width + 3) // across - 3
    heads = [head for head in _distinct(view) if head.trait][: across * down]
    if not heads:
        return [*wrapped([NO_PATTERN], width), ""]
    lines: list[str] = []
    for start in range(0, len(heads), across):
        blocks = [_block(view, head, side, size, palette) for head in heads[start : start + across]]
        lines += [""] * (start > 0)
        lines += ["   ".join(row).rstrip(" ") for row in zip(*blocks, strict=True)]
    return [*lines, *map(palette.faint, notes)]


def _notes(view: View, side: int, width: int, *, tight: bool) -> list[str]:
    """How to read pictures of at most so many rows and columns; if lines are few, without what takes one more."""
    axes, words = (
        _read_as(view, side, side).split(", "),
        "words name upper rows" if side < view.T else "two rows a line",
    )
    whole, short = (wrapped([*axes, *more, WITHOUT_FIRST], width) for more in ([words], []))
    return short if tight and len(short) < len(whole) else whole


def _layout(view: View, width: int, room: int) -> tuple[int, int, int]:
    """The side of a picture, and how many stand side by side and below each other: many, then large ones."""
    largest = max(LEAST, min(view.T, MOST, 2 * (room - 3), width - 2 * WORD - 4))

    def fitting(side: int) -> tuple[int, int, int]:
        beside = max(map(wide, _row_words(view, min(side, view.T))))
        across = max(1, (width + 3) // (min(side, view.S) + beside + 4))
        return side, across, max(1, (room + 1) // (-(-min(side, view.T) // 2) + SAID + 2))

    found = map(fitting, range(largest, min(largest, CLEAR) - 1, -1))
    return max(found, key=lambda layout: layout[1] * layout[2])


def _row_words(view: View, rows: int) -> list[str]:
    """What stands beside each line of a picture, which has two rows: their tokens, or where the upper one begins."""
    words = [cut(shown(view.labels[row * view.T // rows]), WORD) for row in range(rows)]
    return words[::2] if rows < view.T else [" / ".join(words[row : row + 2]) for row in range(0, rows, 2)]


def _read_as(view: View, rows: int, cols: int) -> str:
    """How to read pictures of at most so many rows and columns."""
    down, across = view.T / rows, view.S / cols
    squeezed = f", {_rounded(down)} × {_rounded(across)} tokens a cell" if max(down, across) > 1 else ""
    return f"rows attend to columns{squeezed}"


def _rounded(number: float) -> str:
    return f"{max(1.0, number):.{0 if number >= 10 else 1}f}".removesuffix(".0")


def _distinct(view: View) -> list[Head]:
    """The clearest heads: one of each kind, then the others; last those that leave little for other tokens."""

    def idle(head: Head) -> bool:
        return head.summary.kind == FIRST_SINK or head.summary.numbers["sink"] > IDLE

    heads = sorted(view.clearest(len(view.heads)), key=idle)
    first = {head.summary.kind: head for head in reversed(heads) if head.summary.kind != FIRST_SINK}
    return sorted(heads, key=lambda head: (first.get(head.summary.kind) is not head, idle(head)))


def _block(view: View, head: Head, side: int, size: int, palette: Palette) -> list[str]:
    """One head in lines of equal width: name, sentence in two lines, words and picture."""
    rows, cols = min(side, view.T), min(side, view.S)
    weights = view.sampled[head.layer].select(heads=[_index(view, head)])
    picture = weights.without(sink(1)).pooled(rows, cols)[0, 0]
    about = described(head.summary).replace(WITHOUT, "")
    ways = [f"{about}, e.g. {example(view, head)}", about, in_short(head.summary)]
    told = next((lines for lines in (wrapped(way.split(" "), size, " ") for way in ways) if len(lines) <= SAID), [])
    told = told or [cut(in_short(head.summary), size)]
    lines = [palette.strong(fill(f"Head {head.place}", size)), *(palette.faint(fill(line, size)) for line in told)]
    lines += [" " * size] * (SAID - len(told))
    words = _row_words(view, rows)
    beside = max(map(wide, words))
    space = " " * max(0, size - picture.shape[1] - beside - 1)
    for word, drawing in zip(words, palette.lines(picture), strict=True):
        lines.append(f"{' ' * (beside - wide(word))}{word} {drawing}{space}")
    return lines


def _index(view: View, head: Head) -> int:
    """The index of a head in its map, which may hold only some heads."""
    return [found.head for found in view.summaries[head.layer]].index(head.head)


def _listed(view: View, width: int, most: int) -> list[str]:
    """The clearest heads as a table: name, what it does, and its strongest pair of words."""
    heads = [head for head in _distinct(view) if head.trait][: min(max(1, most), LISTED)]
    pairs = [example(view, head).replace("≤ ", "≤\u00a0") for head in heads]  # never broken there
    notes = wrapped(EXPLAINED.split(" "), width, " ")
    notes = notes if width >= EXPLAINING else []
    size = min(max(map(wide, [EXAMPLE, *pairs])), max(16, 2 * width // 5 + 1))
    room = width - size - 9  # for what a head does, which is wrapped: its end often says most

    def entry(*columns: str) -> list[str]:
        parts = (
            wrapped(text.split(" "), most_wide, " ") for text, most_wide in zip(columns, (5, room, size), strict=True)
        )
        rows = zip_longest(*parts, fillvalue="")
        return [f"{place:>5}  {fill(does, room)}  {pair}".rstrip() for place, does, pair in rows]

    lines = entry("head", "what it does", EXAMPLE if notes else "example")
    first = len(lines)
    for head, pair in zip(heads, pairs, strict=True):
        more = entry(head.place, described(head.summary).replace(WITHOUT, ""), pair)
        if len(lines) == first or len(lines) + len(more) <= most + 1 - len(notes):  # a later one may need fewer lines
            lines += more
    return [*lines, *notes] if heads else wrapped([NO_PATTERN], width)


class Cells:
    """All heads as a grid of cells, a letter for what each does, inked by how clearly it does it."""

    def __init__(self, view: View, width: int, palette: Palette) -> None:
        self.view, self.width, self.palette = view, width, palette
        self.letters = letters_of(head.summary.kind for head in view.heads)
        heads = max(len(summary) for summary in view.summaries)
        self.size = 3 if 3 * heads + 4 <= width else 2 if 2 * heads + 4 <= width else 1
        self.shown = min(heads, (width - 4) // self.size)
        self.block = self.shown * self.size + 7

    def lines(self, room: int) -> list[str]:
        """The grid in about so many lines, layers side by side if they are many, and the legend."""
        legend, numbers = self._legend(), self._numbers()
        layers, room = len(self.view.summaries), room - len(numbers)
        columns = max(1, min((self.width + 3) // self.block, -(-layers // max(1, room - len(legend) - 1))))
        per = -(-layers // columns)
        rows = [[self._layer(k) for k in range(row, layers, per)] for row in range(per)]
        lines = ["   ".join(parts).rstrip(" ") for parts in rows]
        if len(lines) > max(room, 8) and columns == 1:
            kept = max(room, 8) - len(legend) - 1
            lines = [*lines[:kept], f"     and {layers - kept} more layers; --layer {kept} shows the next"]
        return [*("   ".join([line] * columns).rstrip() for line in numbers), *lines, *legend]

    def _numbers(self) -> list[str]:
        """The numbers of the heads over their cells, if every layer has the same heads and there is room."""
        heads = {tuple(head.head for head in summary) for summary in self.view.summaries}
        if len(heads) > 1 or len(str(max(next(iter(heads))))) >= self.size:
            return []
        fit = str.ljust if self.palette.depth == 0 else str.center
        return [f"{'':4}{''.join(fit(str(head), self.size) for head in next(iter(heads))[: self.shown])}"]

    def _layer(self, layer: int) -> str:
        """One layer: its number and a cell for each head."""
        cells = [Head(layer, head.head, head) for head in self.view.summaries[layer]][: self.shown]
        text = "".join(self._cell(head) for head in cells) + self.palette.reset
        return f"{layer:>3} {text}{' ' * (self.block - 7 - self.size * len(cells))}"

    def _cell(self, head: Head) -> str:
        sign = letter(head.summary, self.letters)
        if self.palette.depth == 0:
            return sign.ljust(self.size)
        level = round(min(1.0, head.clarity) * 0.8 * (self.palette.shades - 1))
        return self.palette.cell(level, sign.center(self.size), self.size)

    def _legend(self) -> list[str]:
        kinds = [f"{sign} {kind}" for kind, sign in self.letters.items()]
        sinks = any(trait.name == FIRST_SINK for head in self.view.heads for trait in head.summary.traits)
        clearly = ["more color: more clearly"] * (self.palette.depth > 0)
        hidden = max(len(summary) for summary in self.view.summaries) - self.shown
        more = [f"{hidden} more heads per layer"] if hidden else []
        axes = ["rows: layers", "columns: heads"] if self._numbers() else ["rows: layers"]
        orders = ([*[CAPITAL] * sinks, *clearly], [*clearly, *[CAPITAL] * sinks])
        return min((wrapped([*axes, *kinds, *order, *more], self.width, LEGEND) for order in orders), key=len)


def letters_of(kinds: Iterable[str]) -> dict[str, str]:
    """A different letter for each kind that occurs, the usual one where there is one."""
    found: dict[str, str] = {}
    for kind in sorted(set(kinds), key=lambda kind: (kind not in KIND_LETTERS, kind)):
        wanted = KIND_LETTERS.get(kind, "") + kind + "abcdefghijklmnopqrstuvwxyz"
        found[kind] = next((sign for sign in wanted if sign not in found.values() and not sign.isspace()), "?")
    return found


def drawn_layer(view: View, layer: int, width: int, height: int, palette: Palette) -> str:
    """One layer, with pictures as large as fit, and under each all that its head does.

    A cell is one token if a picture is wide enough for that, even if there are too few lines for all pictures.
    """
    view.check_place(layer)
    heads = [Head(layer, head.head, head) for head in view.summaries[layer]]
    place = f"layer {layer} of 0 to {len(view.maps) - 1} ({printable(view.names[layer])})"
    title = wrapped(view.heading.split(" "), width, " ")
    about = wrapped(f"{place}, {len(heads)} heads, {view.T:,} tokens".split(" "), width, " ")
    across, side, captions = _largest(heads, view.T, width, height - len(title) - len(about) - 4)
    size = (width + 1) // across
    fits = max(view.T, view.S) < size
    rows, cols = (view.T, view.S) if fits else (side // 2 if palette.depth == 0 else side // 2 * 2, side)
    pictures = view.sampled[layer].without(sink(1)).pooled(rows, cols)[0]
    lines = [*map(palette.strong, title), *about, ""]
    for start in range(0, len(heads), across):
        row = range(start, min(start + across, len(heads)))
        drawings = [palette.lines(pictures[i]) for i in row]
        space = " " * (size - pictures.shape[2])  # escape codes take no columns
        lines += [space.join(parts).rstrip(" ") for parts in zip(*drawings, strict=True)]
        under = zip_longest(*(captions[i] for i in row), fillvalue="")
        lines += [palette.strong("".join(fill(part, size) for part in parts).rstrip()) for parts in under]
        lines.append("")
    ramp = [] if palette.depth else [RAMP]
    notes = [_read_as(view, rows, cols), f"{WITHOUT_FIRST}; sink: the weight on it", *ramp]
    return "\n".join([*lines, *map(palette.faint, wrapped(notes, width))])


def _caption(head: Head, size: int) -> list[str]:
    """All that a head does, in lines that stand under its picture."""
    traits = [f"{trait.name.removeprefix('first-token ')} {trait.share:.2f}" for trait in head.summary.traits]
    first, *rest = traits or [MIXED]
    said = [
        f"{head.place} {first}",
        *(f"{second_of(head.summary.traits, 'rest: ').strip('; ')} {more}" for more in rest),
    ]
    return [line for part in said for line in wrapped(part.split(), size, " ")]


def _largest(heads: Sequence[Head], T: int, width: int, height: int) -> tuple[int, int, list[list[str]]]:
    """How many pictures fit side by side, how many columns each may have, at least 4, and the lines under them."""
    best: tuple[int, int, list[list[str]]] = (0, 0, [])
    for across in range(1, min(len(heads), max(1, (width + 1) // NARROWEST)) + 1):
        size = (width + 1) // across - 1
        captions = [_caption(head, size) for head in heads]
        rows, under = -(-len(heads) // across), max(map(len, captions))
        side = max(4, min(LARGEST, T, size, 2 * (height // rows - under - 1)))
        if side >= best[1]:  # of those as large, the one of fewer lines
            best = (across, side, captions)
    return best


def letter(head: HeadSummary, letters: Mapping[str, str] = KIND_LETTERS) -> str:
    """What a head does, in one letter; a capital if it also attends to the first token."""
    sign = letters.get(head.kind, "?")
    return sign.upper() if len(head.traits) > 1 else sign


def wrapped(parts: Sequence[str], width: int, separator: str = " · ") -> list[str]:
    """Parts with separators between them, broken into lines between parts, or between words of a part too wide."""
    lines = [parts[0]]
    for part in parts[1:]:
        joined = f"{lines[-1]}{separator}{part}"
        if wide(joined) > width:
            lines.append(part)
        else:
            lines[-1] = joined
    return [part for line in lines for part in _broken(line, width)]


def _broken(line: str, width: int) -> list[str]:
    """A line, broken between words if it is too wide; a word alone is cut."""
    return wrapped(line.split(" "), width, " ") if wide(line) > width and " " in line else [cut(line, width)]
