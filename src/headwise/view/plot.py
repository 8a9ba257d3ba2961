"""Attention maps as matplotlib axes."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from headwise.errors import OptionError, ShapeError, need
from headwise.view.color import table
from headwise.view.tokens import cut, shown
from headwise.weights import AttentionMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PIXELS = 512  # per side; larger maps are pooled, so that rows still sum to 1
MOST_WORDS = 48  # tick labels along an axis; longer axes show numbers
ACROSS = 4  # heads per row
HIDDEN = "0.92"  # gray for keys that a query may not see, to tell them from small weights
SIDE, MARGIN, LINE = 3.2, 1.3, 0.16  # inches: the least side of a map, and what tick labels need


def plot(
    weights: AttentionMap,
    head: int | Sequence[int] | None = None,
    *,
    tokens: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    sample: int = 0,
    ax: Any = None,
) -> Any:
    """The axes of one head, or an array of axes of several; see `AttentionMap.plot`."""
    pyplot: Any = need("matplotlib.pyplot", "plot", "plots")
    heads = list(range(weights.shape[1])) if head is None else [head] if isinstance(head, int) else list(head)
    if not heads or weights.numel() == 0:
        raise OptionError(f"plot(head={head!r}) of a map of shape {tuple(weights.shape)}: there is nothing to plot.")
    T, S = weights.shape[2:]
    keys = tokens if keys is None and T == S else keys
    for name, words, size in (("tokens", tokens, T), ("keys", keys, S)):
        if words is not None and (isinstance(words, str) or len(words) != size):
            raise ShapeError(f"{name}: {len(words)} given, but the map has {size}; expected one string per token.")
    most = max((len(words) for words in (tokens, keys) if words is not None and len(words) <= MOST_WORDS), default=0)
    axes = _axes(pyplot, len(heads), max(SIDE, MARGIN + most * LINE), ax)
    for one, place in zip(heads, axes, strict=True):
        image = _draw(place, weights.select(batch=[sample], heads=[one]), tokens, keys)
        place.set_title(f"head {one}")
    if ax is None:  # the caller's own axes keep their size
        axes[0].figure.colorbar(image, ax=list(axes), shrink=0.8, label="attention weight (gray: hidden)")
    return axes[0] if isinstance(head, int) else axes


def _axes(pyplot: Any, count: int, side: float, given: Any) -> Any:
    """Axes for `count` heads: those given, or new ones."""
    if given is not None:
        found = list(getattr(given, "flat", given)) if hasattr(given, "__len__") else [given]
        if len(found) != count:
            raise OptionError(f"ax: {len(found)} axes given for {count} heads; pass one per head.")
        return found
    across = min(count, ACROSS)
    down = -(-count // across)
    _, grid = pyplot.subplots(down, across, figsize=(side * across, side * down), squeeze=False, layout="constrained")
    for spare in grid.flat[count:]:
        spare.remove()
    return grid.flatten()[:count]


def _draw(ax: "Axes", weights: AttentionMap, tokens: Sequence[str] | None, keys: Sequence[str] | None) -> Any:
    T, S = weights.shape[2:]
    colors: Any = need("matplotlib.colors", "plot", "plots")
    shades = [tuple(part / 255 for part in color) for color in table()]
    size = (min(T, PIXELS), min(S, PIXELS))
    with torch.no_grad():
        weights = weights.detach()
        picture = weights.pooled(*size).masked_fill(~_seen(weights, size), torch.nan)[0, 0].cpu().numpy()
    image = ax.imshow(
        picture,
        norm=colors.PowerNorm(0.5, 0.0, 1.0),
        cmap=colors.ListedColormap(shades, name="headwise").with_extremes(bad=HIDDEN),
        extent=(-0.5, S - 0.5, T - 0.5, -0.5),
        aspect="equal" if T == S else "auto",
        interpolation="nearest",
    )
    ax.set_xlabel("key (attended token)")
    ax.set_ylabel("query (attending token)")
    if keys is not None and S <= MOST_WORDS:
        ax.set_xticks(range(S), [_word(key) for key in keys], rotation=90, parse_math=False)
    if tokens is not None and T <= MOST_WORDS:
        ax.set_yticks(range(T), [_word(token) for token in tokens], parse_math=False)
    return image


def _seen(weights: AttentionMap, size: tuple[int, int]) -> torch.Tensor:
    """Which cells of a picture contain a visible pair: those that uniform attention reaches."""
    source = weights._source()
    plain = dataclasses.replace(source.scoring, softcap=None, sinks=None, relative=None)
    even = dataclasses.replace(source, query=torch.zeros_like(source.query), scoring=plain, log_sum_exp=None)
    return weights._of(even).pooled(*size) > 0


def _word(token: str) -> str:
    return cut(shown(token), 16)
