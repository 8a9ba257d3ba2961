"""How results are shown, without importing what shows them.

Maps, summaries and surveys have methods such as `plot` and `_repr_html_`, but pictures belong to `headwise.view`, which
is built on top of them. So these methods dispatch on the type of the result, and `headwise.view`, which is imported
when something is shown for the first time, registers a renderer for each type. Your own types can register here too:

>>> class Verdict: ...
>>> @html.register
... def _(verdict: Verdict) -> str:
...     return "<p>right</p>"
>>> html(Verdict())
'<p>right</p>'
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

RENDERERS = "headwise.view"  # registers its renderers on import; named here, because it is built on top of this room


def _shown(show: Any, result: object, *args: Any, **options: Any) -> Any:
    """The result as a renderer shows it that was not imported yet."""
    importlib.import_module(RENDERERS)
    renderer: Callable[..., Any] = show.dispatch(type(result))
    if renderer is show.dispatch(object):
        name, kind = type(result).__name__, show.__name__
        raise TypeError(
            f"nothing is registered to show {name} as {kind}; register it with headwise.weights.display.{kind}."
        )
    return renderer(result, *args, **options)


@functools.singledispatch
def html(result: Any) -> str:
    """The result as HTML for a notebook or a page."""
    return str(_shown(html, result))


@functools.singledispatch
def text(result: Any, width: int = 120) -> str:
    """The result as plain text, at most `width` characters wide."""
    return str(_shown(text, result, width))


@functools.singledispatch
def plot(result: Any, *args: Any, **options: Any) -> Any:
    """The result as matplotlib axes."""
    return _shown(plot, result, *args, **options)
