"""A sight as text: one sentence, every head as a small picture, the most telling heads, the strongest pairs."""

import functools

from torch import Tensor

from headwise.view.sight import Head, Sight

SHADES = " .:-=+*#%@"
LINES = 24
# From dark to bright in equal steps for the eye, also for the colour-blind: cividis, ten of its colours.
RAMP = (
    (0, 34, 78), (18, 53, 112), (59, 73, 108), (87, 93, 109), (112, 113, 115), (138, 134, 120), (165, 156, 116),
    (195, 179, 105), (225, 204, 85), (254, 232, 56),
)  # fmt: skip


def drawn(sight: Sight, width: int, *, colours: bool) -> str:
    """At most 24 lines."""
    lines = wrapped(sight.sentence, width)[:2]
    pairs = _pairs(sight, width)
    telling = sight.telling(4)
    room = LINES - len(lines) - len(telling) - len(pairs) - 2
    lines += [*_atlas(sight, width, room, colours), ""]
    lines += [_bar(head, width) for head in telling]
    return "\n".join([*lines, "", *pairs])


def _atlas(sight: Sight, width: int, room: int, colours: bool) -> list[str]:
    """A row of pictures per layer, as tall and as wide as there is room."""
    layers = len(sight.maps)
    tall = max(1, min(3, room // layers))
    shown = min(layers, room // tall if layers * tall <= room else room - 1)
    heads = max(weights.shape[1] for weights in sight.maps)
    wide = max(1, min(8, (width - 3) // heads - 1))
    most = min(heads, (width - 3) // (wide + 1))
    pictures = sight.pictures(2 * tall, wide)
    lines = []
    for layer in range(shown):
        rows = [_picture(picture, colours) for picture in pictures[layer][:most]]
        for line in range(len(rows[0])):
            label = f"{layer:>2} " if line == 0 else "   "
            lines.append(label + " ".join(row[line] for row in rows))
    if shown < layers:
        lines.append(f"   and {layers - shown} more layers")
    return lines


def _picture(picture: Tensor, colours: bool) -> list[str]:
    """A picture (rows, cols) as lines of half blocks, two rows a line. Square roots, so that small weights show."""
    levels = (picture.clamp(0, 1).sqrt() * 9.999).int().tolist()
    if not colours:
        return ["".join(SHADES[level] for level in row) for row in levels[::2]]
    if len(levels) % 2:
        levels.append(levels[-1])
    return ["".join(map(_halves, *levels[i : i + 2])) + "\033[0m" for i in range(0, len(levels), 2)]


@functools.cache
def _halves(upper: int, lower: int) -> str:
    """Two pixels, one above the other."""
    (a, b, c), (d, e, f) = RAMP[upper], RAMP[lower]
    return f"\033[38;2;{a};{b};{c}m\033[48;2;{d};{e};{f}m▀"


def _bar(head: Head, width: int) -> str:
    """A head, how much of its weight does what it is named for, and the name."""
    size = max(4, min(24, width - 56))
    filled = round(size * min(1.0, head.telling))
    text = f"{head.place:>5}  {'█' * filled}{'·' * (size - filled)} {head.telling:.2f}  {head.summary.reading}"
    return text[:width]


def _pairs(sight: Sight, width: int) -> list[str]:
    """The strongest looks at other words, in as few lines as they take."""
    told = []
    for pair in sight.pairs(6):
        words = f"{_word(sight.tokens[pair.query])} → {_word(sight.keys[pair.key])}"
        told.append(f"{words} {pair.weight:.2f} ({pair.layer}.{pair.head})")
    lines = [""]
    for text in told:
        joined = f"{lines[-1]}   {text}".strip()
        if len(joined) > width:
            lines.append(text)
        else:
            lines[-1] = joined
    return lines[:2]


def _word(token: str, most: int = 14) -> str:
    """A token as one visible word: spaces, line ends and control characters shown as such, long ones cut."""
    shown = "".join(_visible(letter) for letter in token.strip(" ") or token)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _visible(letter: str) -> str:
    if letter == " ":
        return "␣"
    if letter == "\n":
        return "⏎"
    return letter if letter.isprintable() else f"\\x{ord(letter):02x}"


def wrapped(text: str, width: int) -> list[str]:
    """A sentence of numbers in lines, parted between them."""
    lines = [""]
    for part in text.split(" · "):
        joined = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(joined) > width and lines[-1]:
            lines.append(part)
        else:
            lines[-1] = joined
    return [line[:width] for line in lines]
