"""A trace as one self-contained HTML page without scripts: the text shaded by every method, the passages, the tests."""

from html import escape

from headwise.errors import printable
from headwise.models.text_model import spoken
from headwise.study.trace import AnswerTrace, percent
from headwise.view.static_page import static_page

STYLE = """
body { max-width: 60rem; }
.text { line-height: 1.9; overflow-wrap: anywhere; white-space: pre-wrap; background: var(--card);
  border: 1px solid var(--line);  padding: .6rem .8rem; }
.text .frame { border-color: var(--mark); }
.scale { display: inline-flex; vertical-align: middle; margin: 0 .4rem; border: 1px solid var(--line); }
.scale i { width: 1.2rem; height: .8rem; }
.text .against { text-decoration: underline wavy var(--warn); }
table { font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .15rem .5rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
td.words, th.words { text-align: left; }
td { white-space: nowrap; }
td.words { white-space: normal; min-width: 9rem; }
"""
MEANING = {
    "rollout": "attention followed down through all layers; in each, half stays where it is, as a residual keeps it",
    "attention": "mean attention weight of the queries that predict the answer",
    "contributions": "mean share of each token in what the heads write for those queries",
    "gradient": "gradient × attention of the answer's log-probability, over all layers, heads and queries",
}


def trace_page(trace: AnswerTrace, model: str) -> str:
    """The page of a trace in a model of this name."""
    answer = "" if trace.answer is None else _plain(_words(trace)[slice(*trace.answer)]).strip()
    parts = [
        f"<h1>Where “{answer}” came from</h1>" if answer else "<h1>Where the score came from</h1>",
        f"<p>{escape(spoken(model))}, {len(trace.tokens)} tokens. More color means more; a wavy line marks tokens that "
        f"speak against the answer, which is framed. No method is the truth: the tests say how far to trust each."
        f"{_unshaded(trace)}</p>",
        "<h2>Tests</h2>",
        _tests(trace),
        "<h2>Passages</h2>",
        _passages(trace),
    ]
    for method in trace.scores:
        about = f'<p class="soft">{MEANING[method]}<br>{_scale(_most(trace, method))}</p>'
        parts += [f"<h2>{method.capitalize()}</h2>", about, _text(trace, method)]
    return static_page(f"Trace in {spoken(model)}", STYLE, "\n".join(parts))


def _first(trace: AnswerTrace) -> int:
    """The first token of a passage. Those before it, such as the start token, only draw attention."""
    return min(start for start, _ in trace.passages)


def _unshaded(trace: AnswerTrace) -> str:
    """Why the beginning of the text has no color, if it has none."""
    before = _plain(_words(trace)[: _first(trace)])
    return (
        f" {before} is in no passage and not shaded: heads look there if they find nothing to read." if before else ""
    )


def _most(trace: AnswerTrace, method: str) -> float:
    """The score that gets the full color."""
    return max(float(trace.scores[method][_first(trace) :].abs().max()), 1e-30)


def _scale(most: float) -> str:
    cells = "".join(f'<i style="background: {_shade(step / 4)}"></i>' for step in range(5))
    return f'0<span class="scale">{cells}</span>{most:.2g}'


def _shade(share: float) -> str:
    """The color of a share of the largest score; text stays readable on the strongest."""
    return f"rgba(var(--heat), {0.55 * max(share, 0) ** 0.7:.2f})"


def _words(trace: AnswerTrace) -> list[str]:
    return [f"[{token}]" for token in trace.tokens.tolist()] if trace.words is None else trace.words


def _plain(words: list[str]) -> str:
    """The text of some tokens, ready for HTML."""
    return escape(printable("".join(words).replace("\n", " ⏎ ")))


def _text(trace: AnswerTrace, method: str) -> str:
    """The text with every token shaded by its score, and the answer in a frame."""
    scores, words, first, most = trace.scores[method], _words(trace), _first(trace), _most(trace, method)
    spans = [_plain(words[:first])]
    for word, score in zip(words[first : len(scores)], scores[first:].tolist(), strict=True):
        mark = ' class="against"' if score / most < -0.05 else ""
        spans.append(f'<span{mark} style="background: {_shade(score / most)}">{_plain([word])}</span>')
    answer = _plain(words[len(scores) :])
    spans += [f'{" " * (answer[0] == " ")}<b class="frame">{answer.strip()}</b>'] if answer.strip() else []
    return f'<div class="text">{"".join(spans)}</div>'


def _tests(trace: AnswerTrace) -> str:
    random = trace.tests["random"]
    rows = [f"<tr><td class=words>nothing deleted</td><td>{trace.loss:.3f}</td></tr>"]
    rows += [f"<tr><td class=words>first by {m}</td><td>{trace.tests[m]:.3f}</td></tr>" for m in trace.scores]
    spread = f"{random['mean']:.3f} ± {random['deviation']:.3f}"
    rows.append(f"<tr><td class=words>at random, {random['draws']} draws</td><td>{spread}</td></tr>")
    count, measure = (
        trace.tests["passages"],
        "minus the score" if trace.answer is None else "loss of the answer, nats per token",
    )
    head = f"<tr><th class=words>{count} passage{'s' * (count != 1)} deleted</th><th>{measure}</th></tr>"
    better = "Deleted are the passages that a method ranks first: the higher the number then, the better the method."
    return f'<table>{head}{"".join(rows)}</table><p class="soft">{better}</p>'


def _passages(trace: AnswerTrace) -> str:
    shares = {}
    for method in trace.scores:
        scores = trace.of_passages(method)
        shares[method] = scores / max(float(scores.abs().sum()), 1e-30)
    words = _words(trace)
    rows = []
    for number, (start, stop) in enumerate(trace.passages):
        text = _plain(words[start:stop])
        numbers = "".join(f"<td>{percent(share[number].item())}</td>" for share in shares.values())
        rows.append(f"<tr><td class=words>{text}</td>{numbers}</tr>")
    head = "".join(f"<th>{method}</th>" for method in shares)
    table = f"<table><tr><th class=words>passage</th>{head}</tr>{''.join(rows)}</table>"
    below = any(bool((share < 0).any()) for share in shares.values())
    signs = "Below 0: makes the answer less likely. Without the signs, a column sums to 100 %."
    return f'<div class="scroll wide">{table}</div>' + (f'<p class="soft">{signs}</p>' if below else "")
