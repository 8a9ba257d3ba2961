"""A survey as one self-contained HTML page without scripts, light or dark as the reader prefers.

`static_page` makes other pages in the same style.
"""

from collections.abc import Mapping, Sequence
from html import escape
from string import Template

from headwise.study.survey.result import Survey, SurveyedHead
from headwise.view.evidence import Passage
from headwise.view.terminal import KIND_LETTERS, letter
from headwise.view.words import described
from headwise.weights.summary import Head

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { --ink: #1c2430; --soft: #5b6675; --paper: #fbfaf7; --card: #ffffff; --line: #e2ded4; --mark: #0b6e99;
  --out: #23743f; --warn: #9a5b00; --heat: 11, 110, 153; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e6e1; --soft: #a3abb6; --paper: #14171c; --card: #1d2128; --line: #333a45; --mark: #6cc3e8;
    --out: #7fd39b; --warn: #f0b35a; --heat: 108, 195, 232; }
}
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.soft { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
$style
</style>
</head>
<body>
$body
</body>
</html>
""")
SHOWN = ("sink", "previous", "self", "induction", "same_token", "local", "entropy", "peak")  # shaded
STYLE = """
body { max-width: 72rem; }
table { font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .15rem .5rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { position: sticky; top: 0; background: var(--paper); }
td.words, th.words { text-align: left; }
.atlas td { padding: 0; border: 0; }
.atlas a { display: block; width: 1.6rem; line-height: 1.6rem; text-align: center; color: inherit;
  text-decoration: none; font-family: ui-monospace, Menlo, Consolas, monospace; }
.bars { display: inline-flex; align-items: end; height: 1.2rem; gap: 1px; }
.passages section { break-inside: avoid; margin: .8rem 0; }
.passages h3 { font-size: 1rem; margin: 0; }
.passages ol { margin: .2rem 0; padding-left: 1.6rem; }
.passages li { white-space: pre-wrap; overflow-wrap: anywhere; }
.passages b { outline: 1.5px solid var(--ink); border-radius: 2px; }
.passages mark { background: rgba(var(--heat), .35); color: inherit; }
.bars i { width: .35rem; background: rgba(var(--heat), .8); }
"""
BODY = Template("""
<h1>What the heads of $model do</h1>
<p>$sentence</p>
<h2>All heads</h2>
<div class="scroll"><table class="atlas">
$atlas
</table></div>
<p class="soft">Each row is a layer and each letter a head; the darker its shade, the more clearly it does one thing.
Letters: $legend. A capital also attends mostly to the first token.</p>
<h2>Numbers</h2>
<p class="soft">Means over the queries that could have done otherwise (at least two visible keys and, for a kind of
keys, some of that kind and some others), ± the deviation between windows. Distances, from left to right: 0, 1, 2–3, 4–7
and so on.</p>
<div class="scroll"><table>
<thead><tr><th>head</th><th class="words">reading</th>$names<th>distance</th><th>by distance</th></tr></thead>
<tbody>
$rows
</tbody></table></div>
$evidence
$skipped
""")


def page(survey: Survey, evidence: Mapping[str, Sequence[Passage]] | None = None) -> str:
    """All heads of a survey on one page, with passages that show what they do if there are any."""
    names = [name for name in SHOWN if survey.heads and name in survey.heads[0].numbers]
    model = str(survey.settings["model"])
    body = BODY.substitute(
        model=escape(model),
        sentence=escape(survey.sentence),
        atlas=_atlas(survey.placed),
        legend=", ".join(f"{sign} {kind}" for kind, sign in KIND_LETTERS.items()),
        names="".join(f"<th>{name.replace('_', ' ')}</th>" for name in names),
        rows="\n".join(_row(head, names) for head in survey.placed),
        evidence=_evidence(survey, evidence or {}),
        skipped=_skipped(survey),
    )
    return static_page(f"Survey of {model}", STYLE, body)


def static_page(title: str, style: str, body: str) -> str:
    """A page from its title (text), its additional style (CSS) and its body (HTML)."""
    return PAGE.substitute(title=escape(title), style=style.strip(), body=body.strip())


def _atlas(heads: list[Head]) -> str:
    rows: dict[int, list[str]] = {}
    for head in heads:
        title = escape(f"{head.place}: {head.summary.reading}")
        link = f'<a href="#{head.place}" title="{title}">{letter(head.summary)}</a>'
        rows.setdefault(head.layer, []).append(f"<td {_shade(head.clarity)}>{link}</td>")
    return "\n".join(f'<tr><th scope="row">{layer}</th>{"".join(cells)}</tr>' for layer, cells in rows.items())


def _row(head: Head, names: list[str]) -> str:
    found = head.summary
    assert isinstance(found, SurveyedHead)  # noqa: S101 - heads of a survey
    cells = "".join(
        f"<td {_shade(found.numbers[name])}>{found.numbers[name]:.2f} ±{found.spread[name]:.2f}</td>" for name in names
    )
    distance = f"<td>{found.numbers['distance']:.1f} ±{found.spread['distance']:.1f}</td>"
    words = f'<th id="{head.place}" scope="row" title="{escape(found.layer)}">{head.place}</th>'
    return f'<tr>{words}<td class="words">{escape(found.reading)}</td>{cells}{distance}<td>{_bars(found)}</td></tr>'


def _bars(head: SurveyedHead) -> str:
    label = ", ".join(f"{share:.0%}" for share in head.histogram)
    bars = "".join(f'<i style="height:{max(4, round(100 * share))}%"></i>' for share in head.histogram)
    return f'<span class="bars" role="img" aria-label="{label}">{bars}</span>'


def _evidence(survey: Survey, evidence: Mapping[str, Sequence[Passage]]) -> str:
    """For each head, the passages in which the behavior it is named for was strongest."""
    parts = []
    for head in survey.placed:
        lines = "".join(f"<li>{_passage(one)}</li>" for one in evidence.get(head.place, ()))
        if lines:
            title = escape(f"{head.place} {described(head.summary)}")
            parts.append(f'<section><h3 id="passages-{head.place}">{title}</h3><ol>{lines}</ol></section>')
    if not parts:
        return ""
    about = (
        "The strongest passages among a few windows of the corpus, without the first token: the token that attends is "
        "framed, and the one that it attends to most is shaded. The number is the share of its attention that counts."
    )
    return f'<h2>Passages</h2><p class="soft">{about}</p><div class="passages">{"".join(parts)}</div>'


def _passage(passage: Passage) -> str:
    words = []
    for place, word in enumerate(passage.words):
        tag = "mark" if place == passage.key else "b" if place == passage.query else ""
        words.append(f"<{tag}>{escape(word)}</{tag}>" if tag else escape(word))
    return f'<span class="soft">{passage.share:.2f}</span> <bdi>{"".join(words)}</bdi>'


def _shade(share: float) -> str:
    """A background whose strength shows a number between 0 and 1."""
    return f'style="background:rgba(var(--heat),{0.6 * min(1.0, max(0.0, share)):.2f})"'


def _skipped(survey: Survey) -> str:
    if not survey.skipped:
        return ""
    rows = "\n".join(
        f'<tr><td class="words">{escape(bad.place)}</td><td class="words">{escape(bad.reason)}</td></tr>'
        for bad in survey.skipped[:1000]
    )
    more = len(survey.skipped) - 1000
    rest = f"<p>and {more:,} more, which the saved result lists</p>" if more > 0 else ""
    return f'<h2>Skipped</h2>\n<div class="scroll"><table>{rows}</table></div>{rest}'
