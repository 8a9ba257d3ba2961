"""A view, a map, watched layers or a summary in a notebook.

A view is the interactive page in a frame of its own (`srcdoc`), which works in Jupyter, VS Code and Colab and in saved
notebooks. Inside the frame, or beside it where frames are removed, is a static picture of every head. Everything else
is static HTML without scripts. Tokens are escaped.
"""

from collections.abc import Iterable
from html import escape

from headwise.errors import HeadwiseError
from headwise.masks.probes import sink
from headwise.study.watch import Origin, Watched, attention_layers
from headwise.view.color import png_url
from headwise.view.page import standalone
from headwise.view.result import View
from headwise.view.tokens import cut, shown
from headwise.view.words import described, named
from headwise.weights import AttentionMap
from headwise.weights.summary import HeadSummary, Summary

MOST_HEADS = 64  # that get a picture
SIDE = 64  # pixels along a picture; 64 pictures in 37 shades stay under 300 KB
MOST_ROWS = 256  # in a table of heads
ACROSS = 8  # pictures per row
WORK = 2**25  # weights that are computed for one display: about a second on one core
LEGEND = (
    "Each row is a token, each column a token that it may attend to. More ink means more weight, from 0 to 1 on a "
    "square-root scale, without the first token; faint: more than half is left out. Attention is not importance."
)
HALF, FAINT = 0.5, 0.45  # of the weight on the first token, and how faint a picture without it is, as in the page
FRAME_BUDGET = 2_000_000  # bytes of an interactive page, which a saved notebook holds
TALL = 820  # pixels of its frame
STATIC = "A static picture of every head, for viewers that do not show the frame"
# Inside the frame the page is used with its own scripts only, as its policy says; it cannot reach the notebook.
FRAME = (
    '<iframe title="{title}" sandbox="allow-scripts allow-downloads allow-modals" loading="lazy" '
    'style="width:100%;height:{tall}px;border:1px solid #8884;border-radius:8px" srcdoc="{page}"></iframe>'
)


def view_html(view: View) -> str:
    """The interactive page in a frame, and the static picture for where frames are not shown."""
    page = escape(standalone(view, budget=FRAME_BUDGET))
    frame = FRAME.format(title=escape(view.heading), tall=TALL, page=page)
    return f"<div>{frame}<details><summary>{STATIC}</summary>{static_html(view)}</details></div>"


def static_html(view: View) -> str:
    """The sentence, a picture of every head with what it does, and the strongest pairs, without scripts."""
    total = sum(len(summary) for summary in view.summaries)
    clear = {(head.layer, head.head) for head in view.clearest(MOST_HEADS)}
    rows = []
    for layer, cells in enumerate(_cells(view, clear if total > MOST_HEADS else None)):
        groups = [cells[start : start + ACROSS] for start in range(0, len(cells), ACROSS)]
        rows += [
            _row([f"<b>{view.numbers[layer] if view.numbers else layer}</b>" if len(view.maps) > 1 else "", *group])
            for group in groups
        ]
    some = f"<p>The {len(clear)} clearest of {total:,} heads:</p>" if total > MOST_HEADS else ""
    return (
        f"<div><p><b>{escape(view.heading)}</b><br>{escape(view.sentence)}</p>{some}<table>{''.join(rows)}</table>"
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
        name, number = _layer_of(weights)
        view = View({name or "map": weights.select(batch=[0])}, queries=queries, numbers=number)
        sample = "<p>The first sample:</p>" if weights.shape[0] > 1 else ""
        # The page would read every weight, and a long map is only sampled.
        shown = sample + (view_html(view) if view.queries is None else static_html(view))
    except HeadwiseError as error:
        shown = f"<p>{escape(str(error))}</p>"
    return f"<div>{title}{shown}</div>"


def _layer_of(weights: AttentionMap) -> tuple[str, list[int] | None]:
    """The name of the layer that a map was watched in, and its number among those of the model, where known."""
    origin = weights._origin
    model = origin.model() if isinstance(origin, Origin) else None
    if not isinstance(origin, Origin) or model is None:
        return "", None
    return origin.layer, [list(attention_layers(model, "view")).index(origin.layer)]


def watched_html(watched: Watched) -> str:
    """The layers that were watched as one view; if they have different sizes, those of the first layer's size."""
    found = {name: weights for name, weights in watched.items() if isinstance(weights, AttentionMap)}
    maps = {name: weights.select(batch=[0]) for name, weights in found.items() if weights.numel()}
    if not maps:
        return f"<p>{len(watched)} layers watched, without attention maps to show.</p>"
    size = next(iter(maps.values())).shape[2:]
    alike = {name: weights for name, weights in maps.items() if weights.shape[2:] == size}
    H, S = sum(weights.shape[1] for weights in alike.values()), size[1]
    view = View(alike, queries=max(1, WORK // max(1, H * S)))
    others = f"<p>{len(maps) - len(alike)} layers of other sizes are not shown.</p>" if len(alike) < len(maps) else ""
    return (view_html(view) if view.queries is None else static_html(view)) + others


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
        pictures = (
            view.sampled[layer].select(heads=shown_heads).without(sink(1)).pooled(SIDE, SIDE)[0] if shown_heads else ()
        )
        yield [
            _cell(_place(view, layer, summary[i].head), summary[i], *png_url(picture, SIDE))
            for i, picture in zip(shown_heads, pictures, strict=True)
        ]


def _cell(place: str, head: HeadSummary, url: str, width: int, height: int) -> str:
    title = f"{place} {escape(described(head))}"
    faint = f";opacity:{FAINT}" if head["sink"] > HALF else ""
    style = f"background:#fff{faint}"
    picture = f'<img width="{width}" height="{height}" alt="{title}" title="{title}" style="{style}" src="{url}">'
    return f"{picture}<br><small>{place} {escape(named(head))}</small>"


def _pairs(view: View) -> str:
    texts = []
    for pair in view.pairs():
        words = f"{_word(view.labels[pair.query])} → {_word(view.key_labels[pair.key])}"
        texts.append(f"{words} {pair.weight:.2f} ({_place(view, pair.layer, pair.head)})")
    return " · ".join(texts)


def _place(view: View, layer: int, head: int) -> str:
    """Layer and head; for a single map whose layer is not known only the head."""
    number = layer if view.numbers is None else view.numbers[layer]
    return f"{number}.{head}" if len(view.maps) > 1 or view.numbers else f"head {head}"


def _row(cells: Iterable[str], kind: str = "td") -> str:
    return "<tr>" + "".join(f"<{kind}>{cell}</{kind}>" for cell in cells) + "</tr>"


def _word(token: str) -> str:
    return escape(cut(shown(token), 24))
