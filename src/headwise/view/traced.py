"""A trace as one self-contained HTML page without scripts: the text shaded by every method, the passages, the tests."""

from html import escape

from headwise.errors import printable
from headwise.study.trace import AnswerTrace
from headwise.view.static_page import static_page

STYLE = """
body { max-width: 60rem; }
.text { line-height: 1.9; overflow-wrap: anywhere; white-space: pre-wrap; background: var(--card);
  border: 1px solid var(--line);  padding: .6rem .8rem; }
.text b { outline: 2px solid var(--mark); }
.text .against { text-decoration: underline wavy var(--warn); }
table { font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .15rem .5rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
td.words, th.words { text-align: left; }
"""
MEANING = {
    "rollout": "attention followed down through all layers, half of every step staying in place",
    "attention": "mean attention weight of the queries that predict the answer",
    "contributions": "mean share of each token in what the heads write for those queries",
    "gradient": "gradient × attention of the answer's log-probability, over all layers, heads and queries",
}


def trace_page(trace: AnswerTrace, model: str) -> str:
    """The page of a trace in a model of this name."""
    answer = "" if trace.answer is None else _plain(_words(trace)[slice(*trace.answer)]).strip()
    parts = [
        f"<h1>Where “{answer}” came from</h1>" if answer else "<h1>Where the score came from</h1>",
        f"<p>{escape(model)}, {len(trace.tokens)} tokens. More color means more; a wavy line marks tokens that "
        f"speak against the answer, which is framed. No method is the truth: the tests say how far to trust each.</p>",
        "<h2>Tests</h2>",
        _tests(trace),
        "<h2>Passages</h2>",
        _passages(trace),
    ]
    for method in trace.scores:
        parts += [f"<h2>{method.capitalize()}</h2>", f'<p class="soft">{MEANING[method]}</p>', _text(trace, method)]
    return static_page(f"Trace in {model}", STYLE, "\n".join(parts))


def _words(trace: AnswerTrace) -> list[str]:
    return [f"[{token}]" for token in trace.tokens.tolist()] if trace.words is None else trace.words


def _plain(words: list[str]) -> str:
    """The text of some tokens, ready for HTML."""
    return escape(printable("".join(words).replace("\n", " ⏎ ")))


def _text(trace: AnswerTrace, method: str) -> str:
    """The text with every token shaded by its score."""
    scores = trace.scores[method]
    first = min(start for start, _ in trace.passages)  # the start token, which draws attention, is in no passage
    most = max(float(scores[first:].abs().max()), 1e-30)
    spans = []
    for place, word in enumerate(_words(trace)):
        text = _plain([word])
        if place < len(scores):
            share = min(float(scores[place]) / most, 1.0)
            mark = ' class="against"' if share < -0.05 else ""
            strength = 0.55 * max(share, 0) ** 0.7  # text stays readable on the strongest color
            spans.append(f'<span{mark} style="background: rgba(var(--heat), {strength:.2f})">{text}</span>')
        else:
            spans.append(f"<b>{text}</b>")
    return f'<div class="text">{"".join(spans)}</div>'


def _tests(trace: AnswerTrace) -> str:
    random = trace.tests["random"]
    rows = [f"<tr><td class=words>nothing deleted</td><td>{trace.loss:.3f}</td></tr>"]
    rows += [f"<tr><td class=words>first by {m}</td><td>{trace.tests[m]:.3f}</td></tr>" for m in trace.scores]
    spread = f"{random['mean']:.3f} ± {random['deviation']:.3f}"
    rows.append(f"<tr><td class=words>at random, {random['draws']} draws</td><td>{spread}</td></tr>")
    count, measure = trace.tests["passages"], "minus the score" if trace.answer is None else "loss of the answer"
    head = f"<tr><th class=words>{count} passage{'s' * (count != 1)} deleted</th><th>{measure}</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _passages(trace: AnswerTrace) -> str:
    shares = {}
    for method in trace.scores:
        scores = trace.of_passages(method)
        shares[method] = scores / max(float(scores.abs().sum()), 1e-30)
    words = _words(trace)
    rows = []
    for number, (start, stop) in enumerate(trace.passages):
        text = _plain(words[start:stop])
        numbers = "".join(f"<td>{share[number].item():.1%}</td>" for share in shares.values())
        rows.append(f"<tr>{numbers}<td class=words>{text}</td></tr>")
    head = "".join(f"<th>{method}</th>" for method in shares)
    return f'<div class="scroll"><table><tr>{head}<th class=words>passage</th></tr>{"".join(rows)}</table></div>'
