"""A survey as text for a terminal, and as one self-contained HTML page without scripts."""

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from html import escape
from string import Template

from headwise.errors import printable
from headwise.models.text_model import spoken
from headwise.study.survey.measures import PEAK
from headwise.study.survey.passages import GAP, Passage
from headwise.study.survey.result import NUMBER_OF, Survey, SurveyedHead
from headwise.view.static_page import static_page
from headwise.view.terminal import CAPITAL, KIND_LETTERS, LEGEND, letter, wrapped
from headwise.view.tokens import cut, fill, readable, wide
from headwise.view.words import BESIDES_FIRST, BROAD, TARGETS, described
from headwise.weights.summary import MIXED, ON_FIRST, Head, HeadSummary

COLUMNS = (
    "sink",
    "previous",
    "induction",
    "monotone",
    "entropy",
    PEAK,
    "distance",
)  # in a terminal, as far as there is room
PAGE_COLUMNS = ("sink", "previous", "self", "induction", "same_token", "local", "monotone", "entropy", PEAK, "distance")
CELL = 11  # columns of a number and its deviation
NARROW = 24  # columns that what a head does takes at least
NAMED = 10  # skipped documents that are listed in a terminal
LISTED = 1000  # on a page
MEANING = {
    "sink": "share of {what} on the first token",
    "previous": "share on the previous token",
    "self": "share on the token itself",
    "next": "share on the next token",
    "induction": "share on tokens that followed an earlier copy of the token",
    "same_token": "share on earlier copies of the token",
    "local": "share at most 8 tokens away",
    "monotone": "largest weight, for tokens that follow the other text step by step",
    "one_to_one": "largest weight, for tokens whose strongest key is not also another token's",
    "second_sink": "share on the one other token that gets the most",
    "entropy": "how evenly {what} is spread: 0 means a single token, 1 means all visible tokens equally",
    PEAK: "the largest weight of a token",
    "distance": "mean distance to the tokens attended to, in tokens",
    "importance": "how much the loss of a window would change without the head, in nats, by the gradient",
    "effect": "the same with its sign: above 0 the head helps",
}
WHAT = {"weight": "attention", "value": "attention by value", "contribution": "what the head writes"}
OWN = "your own statistic"
SPREAD = "how many tokens it is spread over"


def own_columns(survey: Survey) -> list[str]:
    """The numbers that the user asked for in addition."""
    more = ["importance", "effect"] if survey.settings["importance"] else []
    return [*survey.settings["statistics"], *more]


def columns(survey: Survey, names: Iterable[str]) -> list[str]:
    """Those of the numbers that some head has, after the ones that the user asked for."""
    there = {name for head in survey.heads for name in head.numbers}
    return [name for name in (*own_columns(survey), *names) if name in there]


def meaning(survey: Survey, name: str) -> str:
    """What a number is, in words."""
    return MEANING.get(name, OWN).format(what=WHAT[survey.settings["by"]])


# Text ---------------------------------------------------------------------------------------------------------------


def drawn_survey(survey: Survey, width: int, *, every_head: bool = False) -> str:
    """The whole survey, for a terminal of this width."""
    lines = told(survey.sentence.split(" · "), width)
    if survey.heads:
        heads = survey.placed if every_head else survey.clearest()
        lines += ["", *_letters(survey, width), "", *_table(survey, heads, width), *_strongest(survey, heads, width)]
    return "\n".join([*lines, *_skipped(survey, width)])


def told(parts: Sequence[str], width: int, separator: str = " · ") -> list[str]:
    """Parts with separators between them, broken into lines between parts, and between words where one is too long."""
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}{separator}{part}" if lines[-1] else part
        if wide(joined) <= width:
            lines[-1] = joined
        else:
            lines += wrapped(part.split(" "), width, " ")
    return lines if lines[0] else lines[1:]


def _letters(survey: Survey, width: int) -> list[str]:
    """A row per layer and a letter per head, then what the letters mean."""
    rows: dict[int, list[str]] = {}
    for head in survey.placed:
        rows.setdefault(head.layer, []).append(letter(head.summary))
    most = max(map(len, rows.values()))
    lines = [
        cut(f"{layer:>5}  {' '.join(letters).ljust(2 * most)} {printable(survey.layers[layer])}", width)
        for layer, letters in rows.items()
    ]
    there = {head.summary.kind for head in survey.placed}
    legend = [f"{sign} {kind}" for kind, sign in KIND_LETTERS.items() if kind in there]
    legend += [CAPITAL] if any(len(head.summary.traits) > 1 for head in survey.placed) else []
    return [*lines, *told(["rows: layers", "columns: heads", *legend], width, LEGEND)]


def _table(survey: Survey, heads: Sequence[Head], width: int) -> list[str]:
    """A line per head: what it does, and as many numbers as there is room for."""
    does = [head.summary.reading for head in heads]
    names = columns(survey, COLUMNS)
    size = max(NARROW, min(max(map(len, does)), width - 7 - (CELL + 1) * min(2, len(names))))
    fit = max(0, (width - 7 - size) // (CELL + 1))
    lines = [f" head  {fill('what it does', size)}{''.join(name.rjust(CELL + 1) for name in names[:fit])}".rstrip()]
    for head, reading in zip(heads, does, strict=True):
        cells = "".join(_cell(head.summary, name).rjust(CELL + 1) for name in names[:fit])
        lines.append(cut(f"{head.place:>5}  {fill(reading, size)}{cells}".rstrip(), width))
    about = ["means ± standard deviation between windows, first token included; names leave it out, but for sinks"]
    about = about if fit else []
    about += [f"a wider terminal, --json and --html also show {', '.join(names[fit:])}"] if names[fit:] else []
    return [*lines, *told(about, width)]


def _cell(head: HeadSummary, name: str) -> str:
    """A mean and its deviation; nothing if the head has no such number."""
    assert isinstance(head, SurveyedHead)  # noqa: S101 - heads of a survey
    if name not in head.numbers:
        return "–"
    mean, spread = head.numbers[name], head.spread[name]
    digits = 0 if abs(mean) >= 10 else 2 if abs(mean) >= 0.1 or mean == 0 or name not in ("importance", "effect") else 3
    return f"{mean:.{digits}f} ±{spread:.{digits}f}"


def _strongest(survey: Survey, heads: Sequence[Head], width: int) -> list[str]:
    """One line per head: the passage in which it was strongest."""
    found = [(head, survey.evidence(head.layer, head.head)) for head in heads]
    lines = [f"{head.place:>5}  {_score(best[0]):>4}  {quoted(best[0], width - 13)}" for head, best in found if best]
    if not lines:
        return []
    number = f"the number: {WHAT[survey.settings['by']]} on what it is named for, or else its largest"
    broad = any(head.summary.kind == BROAD for head in heads)
    number += f"; of a broad head, {SPREAD}" if broad else ""
    about = ["strongest passage of each", "the token in [] attends to the one in {}", f"{number}, {BESIDES_FIRST}"]
    return ["", *told(about, width), *lines]


def _score(passage: Passage) -> str:
    """The number that a passage is ranked by: a share, or how many tokens."""
    return f"{passage.score:.2f}" if passage.score <= 1 else f"{passage.score:.0f}"


def quoted(passage: Passage, room: int) -> str:
    """A passage with its query in [] and its key in {}, and as much text around both as there is room for."""
    words, most = [readable(word) for word in passage.words], max(1, (room - wide(GAP)) // 2 - 2)
    query, key = passage.characters
    words[key] = f"{{{cut(words[key], most)}}}"
    words[query] = f"[{cut(words[query], most)}]"
    shown = {query, key}
    for place in _outward((query, key), len(words)):
        if words[place] == GAP:
            continue
        if wide(_with_gaps(words, shown | {place})) > room:
            break
        shown.add(place)
    return cut(_with_gaps(words, shown), room)


def _outward(marks: tuple[int, int], count: int) -> Iterator[int]:
    """The places around two marks, the nearest first."""
    near = (mark + step for far in range(1, count) for mark in marks for step in (-far, far))
    return (place for place in near if 0 <= place < count)


def _with_gaps(words: Sequence[str], shown: Collection[int]) -> str:
    """The words at these places, with a sign for those left out between them."""
    parts = [words[place] if place - 1 in shown else f"{GAP}{words[place].lstrip()}" for place in sorted(shown)]
    return "".join(parts).removeprefix(GAP).strip()


def _skipped(survey: Survey, width: int) -> list[str]:
    if not survey.skipped:
        return []
    named = (printable(f"{bad.place}: {bad.reason}") for bad in survey.skipped[:NAMED])
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)  # a path can be copied
    lines = [line for one in named for line in wrapper.wrap(one)]
    more = len(survey.skipped) - NAMED
    return ["", "skipped:", *lines, *([f"and {more:,} more, which the saved result lists"] if more > 0 else [])]


# The page -----------------------------------------------------------------------------------------------------------

STYLE = """
body { max-width: 84rem; }
.facts { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: .3rem 0 0; list-style: none; }
table { font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .15rem .5rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; }
td.words, th.words { text-align: left; }
td small { color: var(--soft); }
.numbers th:first-child { position: sticky; left: 0; background: var(--paper); }
.numbers a, .heads h3 a { color: inherit; }
.atlas td, .atlas th { padding: 0 .05rem; border: 0; }
.atlas th { font-weight: 400; color: var(--soft); padding: 0 .5rem; }
.atlas thead th { padding: 0; text-align: center; }
.atlas a { display: block; width: 1.7rem; line-height: 1.7rem; text-align: center; color: inherit;
  text-decoration: none; font-family: ui-monospace, Menlo, Consolas, monospace; }
.atlas a:hover, .atlas a:focus { outline: 2px solid var(--mark); }
.atlas .name { text-align: left; font-size: .8rem; }
.map { display: flex; flex-wrap: wrap; align-items: start; gap: 1rem 2.5rem; }
.map .scroll { max-width: 100%; }
.legend { flex: 1 1 20rem; padding: 0; margin: 1.4rem 0 0; list-style: none; }
.legend li { padding: 0 0 .15rem 1.6rem; text-indent: -1.6rem; }
.legend b { display: inline-block; min-width: 1.6rem; text-indent: 0; }
.legend b, .about b { font-family: ui-monospace, Menlo, Consolas, monospace; }
.about { columns: 24rem; padding: 0; margin: .5rem 0; list-style: none; }
.bars { display: inline-flex; align-items: end; height: 1.3rem; gap: 1px; border-bottom: 1px solid var(--soft); }
.bars i { width: .4rem; background: rgba(var(--heat), .9); }
.heads section { break-inside: avoid; margin: 0; padding: .7rem 0; border-bottom: 1px solid var(--line); }
.heads section:target { background: rgba(var(--heat), .12); }
.heads h3 { font-size: 1rem; margin: 0; }
.heads p { margin: .1rem 0; }
.heads ol { margin: .3rem 0 0; padding-left: 0; list-style: none; }
.heads li { display: grid; grid-template-columns: 2.6rem 1fr auto; gap: .1rem .6rem; }
.heads bdi { white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: rgba(var(--heat), .4); color: inherit; border-radius: 2px; }
@media (max-width: 40rem) {
  .heads li { grid-template-columns: 2.6rem 1fr; }
  .heads li .place { grid-column: 2; }
  .atlas .name { display: none; }
  .numbers td.words { min-width: 6rem; white-space: normal; }
}
"""
BODY = Template("""
<h1>What the attention heads of $model do</h1>
<ul class="facts soft">$facts</ul>
<h2>All heads</h2>
<p class="soft">Each row is a layer, each cell a head. The letter says what the head does with $what; the stronger
the color, the more clearly it does that. Select a head to see its strongest passages.</p>
<div class="map">
<div class="scroll"><table class="atlas">
$atlas
</table></div>
<ul class="legend">$legend</ul>
</div>
$heads
<h2>Numbers</h2>
<p class="soft">Each number is a mean over all tokens that have a choice: they see at least two tokens and, for a kind
of token, some of that kind and some others. After the ± is the standard deviation between windows of text, which says
how much the head depends on the text. The numbers include the first token; what a head does, with its number, leaves
it out, except for sinks.</p>
<ul class="about soft">$about</ul>
<div class="scroll wide"><table class="numbers">
<thead><tr><th>head</th><th class="words">what it does</th>$names$by_distance</tr></thead>
<tbody>
$rows
</tbody></table></div>
$skipped
""")
HEADS = Template("""<h2>Head by head</h2>
<p class="soft">The passages of the whole corpus in which each head was strongest, the clearest heads first. The
<b class="frame">framed</b> token attends to the <mark>shaded</mark> one most, besides the first token of the window.
The number is the share of $what that counts for the head's name; for a broad head, over how many tokens it is
spread; for a head without a name, the largest single weight.</p>
<div class="heads">$sections</div>
""")
BY_DISTANCE = (
    "<li><b>by distance</b> bars: the share of attention at distance 0 (the token itself), 1, 2–3, 4–7 and so on, from "
    "left to right; bars are scaled to the head's largest share</li>"
)


def page(survey: Survey) -> str:
    """All heads of a survey on one page, with the passages that show what they do."""
    names = columns(survey, PAGE_COLUMNS)
    distances = any(sum(head.histogram) for head in survey.heads)
    about = [f"<b>{_spaced(name)}</b> {escape(meaning(survey, name))}" for name in names]
    body = BODY.substitute(
        model=escape(spoken(str(survey.settings["model"]))),
        facts="".join(f"<li>{escape(part)}</li>" for part in survey.sentence.split(" · ")),
        what=WHAT[survey.settings["by"]],
        atlas=_atlas(survey),
        legend="".join(f"<li>{line}</li>" for line in _legend(survey)),
        heads=_heads(survey),
        about="".join(f"<li>{line}</li>" for line in about) + (BY_DISTANCE if distances else ""),
        names="".join(f"<th>{_spaced(name)}</th>" for name in names),
        by_distance="<th>by distance</th>" if distances else "",
        rows="\n".join(_rows(survey, names, distances)),
        skipped=_skipped_section(survey),
    )
    return static_page(f"Survey of {spoken(str(survey.settings['model']))}", STYLE, body)


def _spaced(name: str) -> str:
    return escape(name.replace("_", " "))


def _atlas(survey: Survey) -> str:
    """The heads as letters; above them their numbers, beside them the names of the layers."""
    rows: dict[int, list[str]] = {}
    for head in survey.placed:
        title = escape(f"{head.place} {described(head.summary)}")
        link = f'<a href="#{head.place}" title="{title}">{letter(head.summary)}</a>'
        rows.setdefault(head.layer, []).append(f"<td {_shade(head.clarity)}>{link}</td>")
    most = max(map(len, rows.values()), default=0)
    top = "".join(f'<th scope="col">{head}</th>' for head in range(most))
    lines = [
        f'<tr><th scope="row">{layer}</th>{"".join(cells)}{"<td></td>" * (most - len(cells))}'
        f'<th class="name">{escape(survey.layers[layer])}</th></tr>'
        for layer, cells in rows.items()
    ]
    return f"<thead><tr><th></th>{top}<th></th></tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody>"


def _legend(survey: Survey) -> Iterator[str]:
    """The letters that occur, with what they mean."""
    there = {head.summary.kind for head in survey.placed}
    for kind, sign in KIND_LETTERS.items():
        if kind in there:
            does = "no single pattern" if kind == MIXED else f"attends {TARGETS.get(kind, kind)}"
            yield f"<b>{sign}</b> {escape(kind)}: {escape(does)}"
    if any(len(head.summary.traits) > 1 for head in survey.placed):
        yield f"<b>A–Z</b> {escape(f'also puts {ON_FIRST}')}"


def _heads(survey: Survey) -> str:
    """For each head, what it does and the passages in which it did it most."""
    sections = "".join(_section(survey, head) for head in survey.clearest(len(survey.heads)))
    return HEADS.substitute(sections=sections, what=WHAT[survey.settings["by"]]) if survey.tally.passages.best else ""


def _section(survey: Survey, head: Head) -> str:
    own = NUMBER_OF.get(head.summary.kind, PEAK)
    lists = [_list(survey.evidence(head.layer, head.head))]
    for name in survey.settings["statistics"]:
        found = survey.tally.passages.of(survey.layers[head.layer], head.head, name)
        lists += [f'<p class="soft">ranked by: {_spaced(name)}</p>{_list(found)}'] if found else []
    rank = {PEAK: "largest single weight", "entropy": SPREAD}.get(own) or meaning(survey, own)
    title = f'<h3><a href="#n{head.place}">{head.place}</a> {escape(described(head.summary))}</h3>'
    about = f'<p class="soft">{escape(survey.layers[head.layer])} · passages ranked by: {escape(rank)}</p>'
    return f'<section id="{head.place}">{title}{about}{"".join(lists)}</section>\n'


def _list(passages: Sequence[Passage]) -> str:
    if not passages:
        return '<p class="soft">no passage</p>'
    lines = (
        f'<li><span class="soft">{_score(one)}</span> <bdi>{_marked(one)}</bdi> '
        f'<span class="soft place">{escape(one.place)}</span></li>'
        for one in passages
    )
    return f"<ol>{''.join(lines)}</ol>"


def _marked(passage: Passage) -> str:
    words, (query, key) = [], passage.characters
    for place, word in enumerate(passage.words):
        text = escape(readable(word))
        if place in (query, key) and text.strip():
            words.append(" " * (len(text) - len(text.lstrip(" "))))  # outside, so that no empty frame ends a line
            text = text.lstrip(" ")
        text = f"<mark>{text}</mark>" if place == key else text
        words.append(f'<b class="frame">{text}</b>' if place == query else text)
    return "".join(words)


def _rows(survey: Survey, names: Sequence[str], distances: bool) -> Iterator[str]:
    """The rows of the table of numbers, each number on a shade of its own column."""
    own = own_columns(survey)
    most = {name: max((abs(head.numbers.get(name, 0.0)) for head in survey.heads), default=1.0) for name in names}
    scales = {name: (most[name] or 1.0) if name in own or name == "distance" else 1.0 for name in names}
    for head in survey.placed:
        found = head.summary
        assert isinstance(found, SurveyedHead)  # noqa: S101 - heads of a survey
        cells = []
        for name in names:
            mean, _, spread = _cell(found, name).partition(" ")
            shade = "" if name == "distance" else f" {_shade(abs(found.numbers.get(name, 0.0)) / scales[name])}"
            cells.append(f"<td{shade}>{mean} <small>{spread}</small></td>")
        link = f'<th id="n{head.place}" scope="row"><a href="#{head.place}">{head.place}</a></th>'
        bars = f"<td>{_bars(found)}</td>" if distances else ""
        yield f'<tr>{link}<td class="words">{escape(found.reading)}</td>{"".join(cells)}{bars}</tr>'


def _bars(head: SurveyedHead) -> str:
    label = ", ".join(f"{100 * share:.0f} %" for share in head.histogram)
    most = max(head.histogram, default=0.0) or 1.0
    bars = "".join(f'<i style="height:{max(0, round(100 * share / most))}%"></i>' for share in head.histogram)
    return f'<span class="bars" role="img" aria-label="{label}" title="{label}">{bars}</span>'


def _shade(share: float) -> str:
    """A background whose strength shows a number between 0 and 1."""
    return f'style="background:rgba(var(--heat),{0.6 * min(1.0, max(0.0, share)):.2f})"'


def _skipped_section(survey: Survey) -> str:
    if not survey.skipped:
        return ""
    rows = "\n".join(
        f'<tr><td class="words">{escape(bad.place)}</td><td class="words">{escape(bad.reason)}</td></tr>'
        for bad in survey.skipped[:LISTED]
    )
    more = len(survey.skipped) - LISTED
    rest = f"<p>and {more:,} more, which the saved result lists</p>" if more > 0 else ""
    return f'<h2>Skipped</h2>\n<div class="scroll"><table>{rows}</table></div>{rest}'
