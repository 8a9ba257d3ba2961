"""What heads do, to look at. The package can be called: `headwise.view(model, text)` gives a `Sight`."""

from typing import Any

from headwise.verbs import make_callable
from headwise.view.maps import view
from headwise.view.result import Head, Pair, Sight
from headwise.weights import AttentionMap, display
from headwise.weights.summary import Summary

__all__ = ["Head", "Pair", "Sight", "view"]

make_callable(__name__, view)


@display.html.register
def _(weights: AttentionMap) -> str:
    from headwise.view.notebook import map_html

    return map_html(weights)


@display.html.register
def _(summary: Summary) -> str:
    from headwise.view.notebook import summary_html

    return summary_html(summary)


@display.plot.register
def _(weights: AttentionMap, *args: Any, **options: Any) -> Any:
    from headwise.view.plot import plot

    return plot(weights, *args, **options)
