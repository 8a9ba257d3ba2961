"""The ten steps as one self-contained HTML page."""

import math
from html import escape
from string import Template

from headwise.learn.steps import SIX, Explained, Operation, Setting, head_split_text, number_text, shape_text
from headwise.view.static_page import static_page

MOST_INK = 0.45  # of a cell: its number is still easy to read
STYLE = """
* { box-sizing: border-box; }
body { max-width: 60rem; }
h2 { margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0; }
code, .shape, td.n { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .88rem; }
ol { list-style: none; margin: 1.2rem 0 0; padding: 0; }
ol > li { display: grid; grid-template-columns: 2.6rem minmax(0, 1fr); gap: 0 .7rem; background: var(--card);
  border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; margin-bottom: .6rem; }
.number { font-size: 1.5rem; font-weight: 700; color: var(--mark); line-height: 1.2; text-align: right; }
.name { font-weight: 700; }
.code { display: block; overflow-wrap: anywhere; margin: .15rem 0; }
.shape { color: var(--soft); overflow-wrap: anywhere; }
.shape span { white-space: nowrap; }
.shape b { color: var(--out); font-weight: 600; }
.differs { color: var(--warn); font-size: .92rem; }
.matrices { display: flex; flex-wrap: wrap; gap: .6rem 1.4rem; margin-top: .5rem; }
.scroll { max-width: 100%; }
caption { text-align: left; font-size: .82rem; color: var(--soft); }
td.n { padding: .1rem .35rem; text-align: right; font-size: .8rem; font-variant-numeric: tabular-nums; }
table.layout { width: 100%; font-size: .92rem; }
table.layout th, table.layout td { text-align: left; vertical-align: top; padding: .45rem .8rem .45rem 0;
  border-bottom: 1px solid var(--line); }
table.layout .shape { white-space: nowrap; }
.trap { color: var(--warn); }
ol { --plus: 190, 84, 10; }
@media (prefers-color-scheme: dark) { ol { --plus: 244, 162, 89; } }
@media (max-width: 40rem) {
  ol > li { grid-template-columns: 1.5rem minmax(0, 1fr); gap: 0 .5rem; padding: .7rem .6rem; }
  .number { font-size: 1.15rem; }
  td.n { padding: .1rem .15rem; font-size: .7rem; }
  table.layout thead { display: none; }
  table.layout tr { display: block; border-bottom: 1px solid var(--line); padding: .5rem 0; }
  table.layout td { display: block; border: 0; padding: .1rem 0; }
}
"""
BODY = Template("""
<h1>Multi-head attention in ten steps</h1>
<p>$headline</p>
<p class="soft">$subject</p>
$notes
<ol>
$steps
</ol>
<p class="soft">$six. Numbers are from the first sample and, after step 2, from head 0. A row is a token.
More color means further from zero, in its matrix: orange is positive, blue is negative, and a weight is blue.</p>
<h2>The four key operations, in memory</h2>
<p class="soft">Measured at these sizes. A stride is how many numbers to skip to advance by one along an axis.</p>
<div class="scroll"><table class="layout">
<thead><tr><th>operation</th><th>shape</th><th>strides</th><th>memory</th><th>why</th></tr></thead>
<tbody>
$layout
</tbody></table></div>
<p>$picture</p>
""")


def steps_page(setting: Setting, steps: list[Explained], operations: list[Operation]) -> str:
    """The whole page."""
    differences = setting.differences()
    body = BODY.substitute(
        headline=escape(setting.headline()),
        subject=escape(_sentence(setting.subject())),
        notes="\n".join(f'<p class="differs">Also: {escape(note)}; not shown here.</p>' for note in setting.notes()),
        steps="\n".join(_step(step, differences.get(step.number)) for step in steps),
        six=escape(_sentence(SIX)),
        layout="\n".join(_operation(op) for op in operations),
        picture=escape(head_split_text()),
    )
    return static_page(f"Ten steps: {setting.headline()}", STYLE, body)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _step(step: Explained, differs: str | None) -> str:
    before, after = (
        ", ".join(f"<span>{names} {shape_text(s)}</span>" for names, s in part.items()) for part in step.shapes()
    )
    shown = {} if step.number == 2 else step.numbers()
    matrices = "".join(
        _matrix(name, rows, "heat" if step.name == "softmax" else "plus") for name, rows in shown.items()
    )
    return (
        f'<li><span class="number">{step.number}</span><div><span class="name">{escape(step.name)}</span> '
        f'<span class="shape">{before} → <b>{after}</b></span>'
        f'<code class="code">{escape(step.operation)}</code><p>{escape(step.why)}</p>'
        + (f'<p class="differs">In this form: {escape(differs)}.</p>' if differs else "")
        + (f'<div class="matrices">{matrices}</div>' if matrices else "")
        + "</div></li>"
    )


def _matrix(name: str, rows: list[list[float]], above: str) -> str:
    """A table whose cells have more color the further they are from zero; `above` is the color of those above it."""
    most = max((abs(n) for row in rows for n in row if math.isfinite(n)), default=0.0) or 1.0
    body = "".join("<tr>" + "".join(_cell(n, n / most, above) for n in row) + "</tr>" for row in rows)
    low = f" from {number_text(-most)}" if above == "plus" else " from 0"
    scale = f"color{low} to {number_text(most)}"
    return f'<div class="scroll"><table><caption>{escape(name)}, {scale}</caption>{body}</table></div>'


def _cell(n: float, share: float, above: str) -> str:
    ink = MOST_INK * abs(share) if math.isfinite(share) else 0.0
    color = above if n > 0 else "heat"
    return f'<td class="n" style="background: rgba(var(--{color}), {ink:.2f})">{number_text(n)}</td>'


def _operation(op: Operation) -> str:
    shape, strides = shape_text(op.before.shape), shape_text(op.before.strides)
    if op.after is not None:
        shape += f"<br>→ <b>{shape_text(op.after.shape)}</b>"
        strides += f"<br>→ <b>{shape_text(op.after.strides)}</b>"
    trap = ' class="trap"' if op.name.startswith("trap") else ""
    return (
        f"<tr><td><strong{trap}>{escape(op.name)}</strong><br><code>{escape(op.code)}</code></td>"
        f'<td class="shape">{shape}</td><td class="shape">{strides}</td>'
        f"<td>{escape(op.memory)}</td><td>{escape(op.why)}</td></tr>"
    )
