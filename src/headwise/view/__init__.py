"""What heads do, to look at. The package can be called: `headwise.view(model, text)` gives a `Sight`."""

from typing import Any

from headwise.study.heads import Head
from headwise.study.survey import Survey
from headwise.verbs import make_callable
from headwise.view.looking import view
from headwise.view.sight import Pair, Sight
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


@display.html.register
def _(survey: Survey) -> str:
    from headwise.view.survey_page import page

    return page(survey)


@display.text.register
def _(survey: Survey, width: int = 120) -> str:
    from headwise.view.survey_terminal import drawn

    return drawn(survey, width)


@display.plot.register
def _(weights: AttentionMap, *args: Any, **options: Any) -> Any:
    from headwise.view.plotting import plot

    return plot(weights, *args, **options)
