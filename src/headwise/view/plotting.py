"""Maps as matplotlib axes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from headwise.errors import OptionError, ShapeError
from headwise.extras import need
from headwise.map import AttentionMap
from headwise.view.words import cut, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PIXELS = 512  # of a side; longer maps are pooled, so that rows still sum to 1
MOST_WORDS = 48  # beside an axis; beyond, numbers
ACROSS = 4  # heads beside each other
SIDE, MARGIN, LINE = 3.2, 1.3, 0.16  # inches: a map's side, where words need no more; what they need


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
        raise OptionError(f"plot(head={head!r}) of a map of shape {tuple(weights.shape)}: there is nothing to see.")
    T, S = weights.shape[2:]
    keys = tokens if keys is None and T == S else keys
    for name, words, size in (("tokens", tokens, T), ("keys", keys, S)):
        if words is not None and (isinstance(words, str) or len(words) != size):
            raise ShapeError(f"{name}: {len(words)} are given and the map has {size}; expected one text per token.")
    most = max((len(words) for words in (tokens, keys) if words is not None and len(words) <= MOST_WORDS), default=0)
    axes = _axes(pyplot, len(heads), max(SIDE, MARGIN + most * LINE), ax)
    for one, place in zip(heads, axes, strict=True):
        _draw(place, weights.select(batch=[sample], heads=[one]), tokens, keys)
        place.set_title(f"head {one}")
    return axes[0] if isinstance(head, int) else axes


def _axes(pyplot: Any, count: int, side: float, given: Any) -> Any:
    """Axes for so many heads: those given, or new ones."""
    if given is not None:
        found = list(getattr(given, "flat", given)) if hasattr(given, "__len__") else [given]
        if len(found) != count:
            raise OptionError(f"ax: {len(found)} axes are given for {count} heads; pass one for each.")
        return found
    across = min(count, ACROSS)
    down = -(-count // across)
    _, grid = pyplot.subplots(down, across, figsize=(side * across, side * down), squeeze=False, layout="constrained")
    for spare in grid.flat[count:]:
        spare.remove()
    return grid.flatten()[:count]


def _draw(ax: "Axes", weights: AttentionMap, tokens: Sequence[str] | None, keys: Sequence[str] | None) -> None:
    T, S = weights.shape[2:]
    with torch.no_grad():
        picture = weights.detach().pooled(min(T, PIXELS), min(S, PIXELS))[0, 0].cpu().numpy()
    ax.imshow(
        picture,
        norm=need("matplotlib.colors", "plot", "plots").PowerNorm(0.5, 0.0, 1.0),
        cmap="cividis",
        extent=(-0.5, S - 0.5, T - 0.5, -0.5),
        aspect="equal" if T == S else "auto",
        interpolation="nearest",
    )
    ax.set_xlabel("the word looked at")
    ax.set_ylabel("the word that looks")
    if keys is not None and S <= MOST_WORDS:
        ax.set_xticks(range(S), [_word(key) for key in keys], rotation=90, parse_math=False)
    if tokens is not None and T <= MOST_WORDS:
        ax.set_yticks(range(T), [_word(token) for token in tokens], parse_math=False)


def _word(token: str) -> str:
    return cut(shown(token), 16)
