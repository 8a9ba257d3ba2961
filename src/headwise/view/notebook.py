"""A view, a map or a summary in a notebook: static HTML without scripts, at most 300 KB, with tokens escaped."""

from collections.abc import Iterable
from html import escape

from headwise.errors import HeadwiseError
from headwise.view.color import png_url
from headwise.view.result import View
from headwise.view.tokens import cut, shown
from headwise.weights import AttentionMap
from headwise.weights.summary import HeadSummary, Summary

MOST_HEADS = 64  # that get a picture
SIDE = 64  # pixels along a picture; 64 pictures in 37 shades stay under 300 KB
MOST_ROWS = 256  # in a table of heads
ACROSS = 8  # pictures per row
WORK = 2**25  # weights that are computed for one display: about a second on one core
LEGEND = (
    "Rows are queries (the attending tokens), columns are keys (the attended ones). Brighter means more weight, from 0 "
    "to 1 on a square-root scale. Attention is not importance."
)


def view_html(view: View) -> str:
    """The sentence, a picture of every head with what it does, and the strongest pairs."""
    total = sum(len(summary) for summary in view.summaries)
    clear = {(head.layer, head.head) for head in view.clearest(MOST_HEADS)}
    rows = []
    for layer, cells in enumerate(_cells(view, clear if total > MOST_HEADS else None)):
        groups = [cells[start : start + ACROSS] for start in range(0, len(cells), ACROSS)]
        rows += [_row([f"<b>{layer}</b>" if len(view.maps) > 1 else "", *group]) for group in groups]
    some = f"<p>The {len(clear)} clearest of {total:,} heads:</p>" if total > MOST_HEADS else ""
    return (
        f"<div><p><b>{escape(view.sentence)}</b></p>{some}<table>{''.join(rows)}</table>"
        f"<p>{_pairs(view)}</p><p><small>{LEGEND}</small></p></div>"
    )


def map_html(weights: AttentionMap) -> str:
    """What the heads of one map do. A large map is sampled at some queries, and the text says so."""
    title = f"<p><code>{escape(repr(weights))}</code></p>"
    _, H, _, S = weights.shape
    if weights.numel() == 0 or weights.device.type == "meta":
        return f"<div>{title}</div>"
    queries = max(1, WORK // max(1, H * S))
    try:
        view = View({"map": weights.select(batch=[0])}, queries=queries)
        sample = "<p>The first sample:</p>" if weights.shape[0] > 1 else ""
        return f"<div>{title}{sample}{view_html(view)}</div>"
    except HeadwiseError as error:
        return f"<div>{title}<p>{escape(str(error))}</p></div>"


def summary_html(summary: Summary) -> str:
    """A table of heads and their numbers."""
    if not summary.heads:
        return "<p>no heads</p>"
    title = _row(["head", "reading", *summary.heads[0].numbers], "th")
    rows = [
        _row([str(head.head), escape(head.reading), *(f"{number:.2f}" for number in head.numbers.values())])
        for head in summary.heads[:MOST_ROWS]
    ]
    rest = len(summary) - len(rows)
    more = f"<p>and {rest:,} more heads</p>" if rest else ""
    return f"<div><table>{title}{''.join(rows)}</table>{more}</div>"


def _cells(view: View, chosen: set[tuple[int, int]] | None) -> Iterable[list[str]]:
    """The table cells of the heads to show, layer by layer."""
    for layer, summary in enumerate(view.summaries):
        shown_heads = [i for i, head in enumerate(summary) if chosen is None or (layer, head.head) in chosen]
        pictures = view.sampled[layer].select(heads=shown_heads).pooled(SIDE, SIDE)[0] if shown_heads else ()
        yield [
            _cell(_place(view, layer, summary[i].head), summary[i], *png_url(picture, SIDE))
            for i, picture in zip(shown_heads, pictures, strict=True)
        ]


def _cell(place: str, head: HeadSummary, url: str, width: int, height: int) -> str:
    title = f"{place} {escape(head.reading)}"
    picture = f'<img width="{width}" height="{height}" alt="{title}" title="{title}" src="{url}">'
    return f"{picture}<br><small>{place} {escape(head.kind)}</small>"


def _pairs(view: View) -> str:
    texts = []
    for pair in view.pairs():
        words = f"{_word(view.tokens[pair.query])} → {_word(view.keys[pair.key])}"
        texts.append(f"{words} {pair.weight:.2f} ({_place(view, pair.layer, pair.head)})")
    return " · ".join(texts)


def _place(view: View, layer: int, head: int) -> str:
    """Layer and head; for a single map only the head."""
    return f"{layer}.{head}" if len(view.maps) > 1 else f"head {head}"


def _row(cells: Iterable[str], kind: str = "td") -> str:
    return "<tr>" + "".join(f"<{kind}>{cell}</{kind}>" for cell in cells) + "</tr>"


def _word(token: str) -> str:
    return escape(cut(shown(token), 24))
