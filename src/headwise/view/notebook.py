"""A sight, a map or a summary in a notebook: static, without script, at most 300 KB; tokens only as text."""

import html
from collections.abc import Iterable

from headwise.errors import HeadwiseError
from headwise.view.color import picture_address
from headwise.view.result import Sight
from headwise.view.tokens import cut, shown
from headwise.weights import AttentionMap
from headwise.weights.summary import HeadSummary, Summary

MOST_HEADS = 64  # with pictures
SIDE = 64  # pixels of a picture; 64 of them in 37 shades stay under 300 KB
MOST_ROWS = 256  # of a table of heads
ACROSS = 8  # pictures in a row of a map's own table
WORK = 2**25  # weights that are looked at for one display: about a second on one core
LEGEND = (
    "Down: the word that looks. Right: the word looked at. Dark 0 to bright 1, square roots; weights, not importance."
)


def sight_html(sight: Sight) -> str:
    """The sentence, every head with what it does, the strongest pairs."""
    total = sum(len(summary) for summary in sight.summaries)
    telling = {(head.layer, head.head) for head in sight.telling(MOST_HEADS)}
    rows = []
    for layer, cells in enumerate(_cells(sight, telling if total > MOST_HEADS else None)):
        groups = [cells[start : start + ACROSS] for start in range(0, len(cells), ACROSS)]
        rows += [_row([f"<b>{layer}</b>" if len(sight.maps) > 1 else "", *group]) for group in groups]
    some = f"<p>The {len(telling)} most telling of {total:,} heads:</p>" if total > MOST_HEADS else ""
    return (
        f"<div><p><b>{_text(sight.sentence)}</b></p>{some}<table>{''.join(rows)}</table>"
        f"<p>{_pairs(sight)}</p><p><small>{LEGEND}</small></p></div>"
    )


def map_html(weights: AttentionMap) -> str:
    """What the heads of one map do. Of many weights some queries are looked at, and it says so."""
    title = f"<p><code>{_text(repr(weights))}</code></p>"
    _, H, _, S = weights.shape
    if weights.numel() == 0 or weights.device.type == "meta":
        return f"<div>{title}</div>"
    queries = max(1, WORK // max(1, H * S))
    try:
        sight = Sight({"map": weights.select(batch=[0])}, queries=queries)
        sample = "<p>The first sample:</p>" if weights.shape[0] > 1 else ""
        return f"<div>{title}{sample}{sight_html(sight)}</div>"
    except HeadwiseError as error:
        return f"<div>{title}<p>{_text(str(error))}</p></div>"


def summary_html(summary: Summary) -> str:
    """A table of heads and their numbers."""
    if not summary.heads:
        return "<p>no heads</p>"
    names = list(summary.heads[0].numbers)
    head = _row(["head", "reading", *names], "th")
    rows = [
        _row([str(one.head), _text(one.reading), *(f"{one.numbers[name]:.2f}" for name in names)])
        for one in summary.heads[:MOST_ROWS]
    ]
    rest = len(summary) - len(rows)
    more = f"<p>and {rest:,} more heads</p>" if rest else ""
    return f"<div><table>{head}{''.join(rows)}</table>{more}</div>"


def _cells(sight: Sight, chosen: set[tuple[int, int]] | None) -> Iterable[list[str]]:
    """The cells of the heads to be shown, layer by layer."""
    for layer, summary in enumerate(sight.summaries):
        shown_heads = [i for i, head in enumerate(summary) if chosen is None or (layer, head.head) in chosen]
        if not shown_heads:
            yield []
            continue
        pictures = sight.looked_at[layer].select(heads=shown_heads).pooled(SIDE, SIDE)[0]
        yield [
            _cell(_place(sight, layer, summary[i].head), summary[i], *picture_address(picture, SIDE))
            for i, picture in zip(shown_heads, pictures, strict=True)
        ]


def _cell(place: str, head: HeadSummary, address: str, width: int, height: int) -> str:
    told = f"{place} {_text(head.reading)}"
    picture = f'<img width="{width}" height="{height}" alt="{told}" title="{told}" src="{address}">'
    return f"{picture}<br><small>{place} {_text(head.kind)}</small>"


def _pairs(sight: Sight) -> str:
    told = []
    for pair in sight.pairs():
        words = f"{_word(sight.tokens[pair.query])} → {_word(sight.keys[pair.key])}"
        told.append(f"{words} {pair.weight:.2f} ({_place(sight, pair.layer, pair.head)})")
    return " · ".join(told)


def _place(sight: Sight, layer: int, head: int) -> str:
    """Layer and head; of a single map the head alone."""
    return f"{layer}.{head}" if len(sight.maps) > 1 else f"head {head}"


def _row(cells: Iterable[str], kind: str = "td") -> str:
    return "<tr>" + "".join(f"<{kind}>{cell}</{kind}>" for cell in cells) + "</tr>"


def _word(token: str) -> str:
    return _text(cut(shown(token), 24))


def _text(text: str) -> str:
    return html.escape(text)
