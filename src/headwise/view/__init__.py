"""What heads do, in pictures: in the terminal, as a page, in a notebook and as plots; `serve` adds a live page.

May import `study` and everything below it. Other rooms use `view`, `View`, `Head` and `Pair`; maps and summaries draw
themselves through `headwise.weights.display`, where this package registers its renderers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from headwise.models import TextModel
from headwise.study.importance import Importance
from headwise.study.survey import Survey
from headwise.study.watch import Watched
from headwise.view.result import Pair, Progress, View, Wanted, collected, silent
from headwise.weights import AttentionMap, display
from headwise.weights.summary import Head, Summary

__all__ = ["Head", "Pair", "View", "view"]

Weights = AttentionMap | Tensor


def view(
    model: TextModel | nn.Module | Weights | Sequence[Weights] | Mapping[str, Weights],
    tokens: str | Tensor | Sequence[int] | Mapping[str, Any] | None = None,
    *,
    words: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    layers: Collection[str] | Callable[[str], bool] | None = None,
    queries: int | None = None,
    values: bool | None = None,
    importance: bool | str | Importance = False,
    part: str | None = None,
    target: str | None = None,
    progress: Progress = silent,
) -> View:
    """What every head of a model does with one text.

    >>> from headwise import load_builtin
    >>> result = view(load_builtin(), "The captain looked at the sea.")
    >>> result.sentence.split(" · ")[:2]
    ['7 layers × 8 heads', '8 tokens']

    Args:
        model: the built-in model or another `TextModel`, with a text; a model with headwise layers or a transformers
            model with `attn_implementation="headwise"`, with token ids; or attention maps: one, a list, or by name,
            also as plain tensors (1, H, T, S), such as the `attentions` of an eager model.
        tokens: the text, or token ids (T,) or (1, T); or all keyword arguments to call the model with.
        words: the text of each query token; positions by default.
        keys: the text of each key token, in cross-attention.
        layers: names of the layers to view, or a function that selects them; all by default. An encoder-decoder model
            has layers of different sizes, and only layers of one size can be viewed together.
        queries: compute numbers and small pictures from this many queries, evenly spaced, and say so; from all by
            default. The cost is that many times T instead of T times T.
        values: also keep what the weights carry, so that the page can show it; by default up to 1,024 tokens.
        importance: also measure what each head is worth to the loss, and color the heads by it: True for one backward
            pass, the name of another way ("silence", "mean"), or what `headwise.importance` returns.
        part: of an encoder–decoder model that `open_model(path, both=True)` opened: "encoder" (the default), "decoder"
            for the attention of its decoder to its own text, or "cross-attention" for that to the encoder's text.
        target: the text of its decoder; by default what the model writes after reading `tokens`.
        progress: called with the name of the stage, the number of layers done, and the number of layers.
    """
    found = collected(model, tokens, Wanted(layers, values, importance, progress, part, target))
    given = {} if words is None else {"tokens": words, "starts": None}
    given |= {} if keys is None else {"keys": keys, "key_starts": None}
    return View(
        found.maps,
        **{**found.tokens, **given},
        model=found.model,
        queries=queries,
        carried=found.carried,
        importance=found.importance,
        progress=progress,
        trained=found.trained,
    )


@display.html.register
def _(weights: AttentionMap) -> str:
    from headwise.view.notebook import map_html

    return map_html(weights)


@display.html.register
def _(summary: Summary) -> str:
    from headwise.view.notebook import summary_html

    return summary_html(summary)


@display.html.register
def _(watched: Watched) -> str:
    from headwise.view.notebook import watched_html

    return watched_html(watched)


@display.html.register
def _(survey: Survey) -> str:
    from headwise.view.survey import page

    return page(survey)


@display.text.register
def _(survey: Survey, width: int = 120) -> str:
    from headwise.view.survey import drawn_survey

    return drawn_survey(survey, width)


@display.plot.register
def _(weights: AttentionMap, *args: Any, **options: Any) -> Any:
    from headwise.view.plot import plot

    return plot(weights, *args, **options)
