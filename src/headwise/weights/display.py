"""How results are shown, without importing what shows them.

Maps, summaries and surveys have methods such as `plot` and `_repr_html_`, but pictures belong to `headwise.view`, which
is built on top of them. So these methods dispatch on the type of the result, and `headwise.view` registers a renderer
for each type when headwise is imported. Your own types can register here too:

>>> class Verdict: ...
>>> @html.register
... def _(verdict: Verdict) -> str:
...     return "<p>right</p>"
>>> html(Verdict())
'<p>right</p>'
"""

import functools
from typing import Any


def _missing(kind: str, result: object) -> TypeError:
    name = type(result).__name__
    return TypeError(
        f"nothing is registered to show {name} as {kind}; register it with headwise.weights.display.{kind}."
    )


@functools.singledispatch
def html(result: Any) -> str:
    """The result as HTML for a notebook or a page."""
    raise _missing("html", result)


@functools.singledispatch
def text(result: Any, width: int = 120) -> str:
    """The result as plain text, at most `width` characters wide."""
    raise _missing("text", result)


@functools.singledispatch
def plot(result: Any, *args: Any, **options: Any) -> Any:
    """The result as matplotlib axes."""
    raise _missing("plot", result)
