"""`View`: what the heads of a model do with one text, and where its attention maps come from."""

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import OptionError, ShapeError
from headwise.masks import Grid
from headwise.masks.probes import offset, previous_token, sink
from headwise.models import TextModel
from headwise.models.files import atomically
from headwise.shapes import check_flag, check_size
from headwise.study.importance import WAYS, Importance, Loss
from headwise.study.importance import importance as importance_of
from headwise.study.watch import Watched, watch
from headwise.view.carried import MEASURES, Carried, carried
from headwise.view.pictures import Cell, cell
from headwise.view.texts import (
    ENCODER,
    RunTexts,
    layer_names,
    part_of,
    target_loss,
    target_of,
    written,
)
from headwise.view.tokens import labels, readable
from headwise.weights import AttentionMap, Scoring
from headwise.weights.panel import TopKeys
from headwise.weights.summary import Head, Summary, clearest, kind_counts, kinds_in_words, rows_of

EXCERPT = 64  # characters of the text in a heading
NAME = 16  # characters of the short name of a view
SPECIAL = re.compile(r"<\|?\w+\|?>|\[[A-Z]+\]")  # tokens such as <|start|>, <s> and [CLS]
NEAR = sink(1) | offset(0) | previous_token()  # where most heads put most of their weight
BESIDE = 3  # keys besides the first of which one is not in NEAR
MOST_PAIRS = 32  # kept; `pairs` returns the first of them
Progress = Callable[[str, int, int], None]
Layers = Collection[str] | Callable[[str], bool] | None
LOG_ZERO = -1e4  # in place of log 0: its exponential is 0 in every precision
VALUES = 1024  # tokens up to which what weights carry is kept without being asked for
NEAR_ONE = 0.02  # how far the sum of a row may be from 1; half precision rounds


def silent(stage: str, done: int, of: int) -> None:
    """Report no progress."""


class Pair(NamedTuple):
    """A query token, a key token, and the weight between them in one head."""

    layer: int
    head: int
    query: int
    key: int
    weight: float


class View:
    """What every head does with one text: print it, save it as a page, or query it; made by `headwise.view`."""

    def __init__(
        self,
        maps: Mapping[str, AttentionMap],
        tokens: Sequence[str] | None = None,
        ids: Tensor | None = None,
        keys: Sequence[str] | None = None,
        *,
        query_ids: Tensor | None = None,
        starts: Sequence[int] | None = None,
        key_starts: Sequence[int] | None = None,
        around: tuple[int, int] | None = None,
        key_around: tuple[int, int] | None = None,
        model: str = "",
        queries: int | None = None,
        carried: tuple[Carried, ...] | None = None,
        importance: Importance | None = None,
        progress: Progress = silent,
        trained: int | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        if not maps:
            raise OptionError("there is nothing to view: no attention map was given.")
        self.names = tuple(maps)
        self.maps = tuple(weights.detach() for weights in maps.values())
        if any(weights.shape[0] != 1 for weights in self.maps) or len({weights.shape[2:] for weights in self.maps}) > 1:
            raise ShapeError(_sizes_told(self.names, self.maps))
        self.T, self.S = self.maps[0].shape[2:]
        self.tokens = _words(tokens, self.T, "tokens")
        self.keys = self.tokens if keys is None and self.S == self.T else _words(keys, self.S, "keys")
        self.ids = None if ids is None else torch.as_tensor(ids).flatten()
        self.query_ids = None if query_ids is None else torch.as_tensor(query_ids).flatten()
        self.starts, self.key_starts = _several(starts), _several(key_starts)
        self.around, self.key_around = around, key_around  # how many tokens were added in front and behind, if known
        self.model = model  # its name, if known
        self.queries, self.progress = spread(self.T, queries), progress
        self.carried = carried  # what the weights carry, layer by layer, if known
        self.importance = importance
        self.trained = trained  # how many tokens the model was trained on at a time, if known
        self.numbers = None if numbers is None else tuple(numbers)  # of its layers in their model; as they are if None

    @property
    def measures(self) -> tuple[str, ...]:
        """What can be shown: weights, and what they carry if it is known; see `headwise.view.carried`."""
        return MEASURES if self.carried is not None else MEASURES[:1]

    @functools.cached_property
    def labels(self) -> list[str]:
        """The tokens as labels: those that make up one character are numbered."""
        return labels(self.tokens, self.starts)

    @property
    def key_labels(self) -> list[str]:
        """The keys as labels."""
        return self.labels if self.keys is self.tokens else labels(self.keys, self.key_starts)

    @property
    def text(self) -> str:
        """The text that was read, with each character once."""
        return _once(self.tokens, self.starts)

    @property
    def heading(self) -> str:
        """What is shown, of which model and which text."""
        return f"What the attention heads{self._of_model} do with {self._quoted}{self._keys_quoted}"

    def compared(self, other: "View") -> str:
        """The heading of a comparison.

        Args:
            other: the view that this one is compared with.
        """
        model = other._of_model if other.model != self.model else ""
        return f"{self.heading}, compared with {other._quoted}{other._keys_quoted}{model}"

    def name_beside(self, other: "View") -> str:
        """A short name that tells it from another view: the first word that differs, or the model.

        Args:
            other: the view that it stands beside.
        """
        words, others = (view._plain.split() for view in (self, other))
        for place, word in enumerate(words):
            if word not in others[place : place + 1]:
                return _excerpt(readable(word.strip(".,:;!?")), NAME)
        return self.model if self.model and self.model != other.model else "other"

    @property
    def _of_model(self) -> str:
        if not self.model and self.numbers is not None:
            return f" of {' and '.join(map(readable, self.names))}"
        named = "the built-in model" if self.model == "builtin" else f"the model {readable(self.model)}"
        return f" of {named}" if self.model else ""

    @property
    def _plain(self) -> str:
        """The text without what was added around it; a list of words that no model has read would run together."""
        apart = not self.model and all(token.split() == [token] for token in self.tokens)
        return _written(self.tokens, self.starts, self.around, " " if apart else "")

    @property
    def _quoted(self) -> str:
        """The beginning of the text."""
        words = readable(" ".join(self._plain.split()))
        quoted = any(letter.isalpha() for letter in words)
        return f"“{_excerpt(words, EXCERPT)}”" if quoted else _count(self.T, "token")

    @property
    def _keys_quoted(self) -> str:
        """In cross-attention, the beginning of the other text."""
        words = readable(" ".join(_written(self.keys, self.key_starts, self.key_around).split()))
        if self.keys is self.tokens or not any(letter.isalpha() for letter in words):
            return ""
        return f", attending to “{_excerpt(words, EXCERPT // 2)}”"

    @property
    def sampled(self) -> tuple[AttentionMap, ...]:
        """The maps behind numbers and small pictures: of all queries, or of an evenly spaced sample of them."""
        if self.queries is None:
            return self.maps
        return tuple(weights.select(rows=self.queries) for weights in self.maps)

    @functools.cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """What each head does, layer by layer."""
        return tuple(summary for summary, _ in self._measured)

    @functools.cached_property
    def _measured(self) -> list[tuple[Summary, TopKeys]]:
        """The summary of every layer, and the largest weights of its queries without the first key, in one pass."""
        ids = self.ids if self.ids is not None and len(self.ids) == self.S else None
        asked = self.query_ids
        asked = asked if ids is not None and asked is not None and len(asked) == self.T else None
        found = []
        for done, weights in enumerate(self.sampled, 1):
            asks = asked if weights._scoring.cross else None
            rows = rows_of(weights, ids, query_ids=asks, top=min(BESIDE, self.S))
            assert rows[1].top is not None  # noqa: S101 - asked for
            found.append((Summary.of_rows(weights, *rows), rows[1].top))
            self.progress("counting", done, len(self.maps))
        return found

    @property
    def heads(self) -> list[Head]:
        """All heads, layer by layer."""
        return [Head(i, head.head, head) for i, summary in enumerate(self.summaries) for head in summary]

    def clearest(self, most: int = 5) -> list[Head]:
        """The `most` heads that do one thing most clearly: first one of each kind, then the rest."""
        return clearest(self.heads, most)

    @property
    def counts(self) -> dict[str, int]:
        """The number of heads of each kind; a first-token sink counts as what else it does, if anything."""
        return kind_counts(self.heads)

    @property
    def sentence(self) -> str:
        """A one-line summary: the size of the model and the text, and the number of heads of each kind."""
        heads = sorted({weights.shape[1] for weights in self.maps})
        size = f"{_count(len(self.maps), 'layer')} × {' or '.join(map(str, heads))} head{'s' * (heads != [1])}"
        size += f" · {_count(self.T, 'token')}"
        size += f" attending to {self.S:,}" if self.S != self.T else ""
        size += "" if self.queries is None else f" · numbers from {len(self.queries):,} of these queries"
        return " · ".join([size, *kinds_in_words(self.heads).values(), "attention is not importance"])

    def pairs(self, most: int = 8) -> list[Pair]:
        """The `most` largest weights that are not on the first, the previous or the same token; each pair once.

        In cross-attention, only those on the first token are left out.
        """
        return self._pairs[:most]

    @functools.cached_property
    def _pairs(self) -> list[Pair]:
        found = []
        for layer, (weights, (_, top)) in enumerate(zip(self.sampled, self._measured, strict=True)):
            largest, key = _apart_from_near(weights, top)
            values, places = largest.flatten().topk(min(4 * MOST_PAIRS, largest.numel()))
            keys = key.flatten()[places]
            for place, key, weight in zip(places.tolist(), keys.tolist(), values.tolist(), strict=True):
                head, row = divmod(place, weights.shape[2])
                query = row if self.queries is None else int(self.queries[row])
                found += [Pair(layer, head, query, key, weight)] if weight > 0 else []
            self.progress("pairing", layer + 1, len(self.maps))
        return strongest(found)[:MOST_PAIRS]

    def pictures(self, rows: int, cols: int) -> list[Tensor]:
        """Small pictures (H, rows, cols) of the heads of every layer; picture rows sum to 1."""
        return [weights.pooled(rows, cols)[0] for weights in self.sampled]

    def cell(self, layer: int, head: int, query: int, key: int) -> Cell:
        """The weight of a `query` on a `key` in one `layer` and `head`, its logit, its rank, and the visible keys."""
        return cell(self.maps[layer], head, query, key)

    def check_place(self, layer: int, head: int | None = None) -> None:
        """Refuse a `layer`, or a `head` of it, that does not exist."""
        if not 0 <= layer < len(self.maps):
            raise OptionError(f"layer {layer}: the model has {len(self.maps)}, 0 to {len(self.maps) - 1}.")
        heads = self.maps[layer].shape[1]
        if head is not None and not 0 <= head < heads:
            raise OptionError(f"head {layer}.{head}: layer {layer} has {heads} heads, 0 to {heads - 1}.")

    def worth(self, layer: int, head: int) -> float | None:
        """What removing the `head` of this index in the map of a `layer` adds to the loss; None if not measured."""
        found = None if self.importance is None else self.importance.effects.get(self.names[layer])
        return None if found is None else float(found[:, head].mean())

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain data, ready for JSON."""
        return {
            "model": self.model,
            "sentence": self.sentence,
            "tokens": self.tokens,
            **({} if self.starts is None else {"starts": list(self.starts)}),
            **({} if self.keys is self.tokens else {"keys": self.keys}),
            **({} if self.key_starts is None else {"key_starts": list(self.key_starts)}),
            "queries": None if self.queries is None else self.queries.tolist(),
            "layers": [
                {
                    "name": name,
                    **({} if self.numbers is None else {"number": self.numbers[layer]}),
                    "heads": [
                        {
                            "head": head.head,
                            "reading": head.reading,
                            "numbers": head.numbers,
                            "without_first": head.without_first,
                            **({} if self.importance is None else {"importance": self.worth(layer, index)}),
                        }
                        for index, head in enumerate(summary)
                    ],
                }
                for layer, (name, summary) in enumerate(zip(self.names, self.summaries, strict=True))
            ],
            "pairs": [pair._asdict() | {"weight_without_first": self._without_first(pair)} for pair in self.pairs()],
        }

    def _without_first(self, pair: Pair) -> float:
        """The weight of a pair as a share of what is left without the first token."""
        row = self.maps[pair.layer].select(heads=[pair.head], rows=[pair.query])
        return pair.weight / max(1 - float(row.mass(sink(1))), pair.weight)

    def plot(self, layer: int, head: int | Sequence[int] | None = None, **options: Any) -> Any:
        """The heads of one `layer` as matplotlib axes, labelled with the tokens.

        `head` and `options` as in `AttentionMap.plot`.
        """
        return self.maps[layer].plot(head, **{"tokens": self.labels, "keys": self.key_labels, **options})

    def _repr_html_(self) -> str:
        from headwise.view.notebook import view_html

        return view_html(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """HTML for notebooks, and plain text for those that do not show HTML."""
        return {"text/html": self._repr_html_(), "text/plain": str(self)}

    def save(
        self, path: str | Path, *, against: "View | None" = None, budget: int | None = None, title: str = ""
    ) -> Path:
        """Write one self-contained HTML file; an existing file is kept if writing fails.

        Args:
            path: where to write it.
            against: another view to compare with, of another text or another model.
            budget: the largest file size in bytes, 5 MB by default; the page says what did not fit.
            title: the title of the page.
        """
        from headwise.view.page import standalone

        path = Path(path)
        page = standalone(self, against=against, budget=budget, title=title)
        atomically(path, lambda beside: beside.write_text(page, encoding="utf-8"))
        return path

    def __repr__(self) -> str:
        return f"View({len(self.maps)} layers, {self.T} tokens): print it to see the heads"

    def __str__(self) -> str:
        from headwise.view.color import Palette
        from headwise.view.terminal import drawn

        return drawn(self, 80, Palette(0))


def _sizes_told(names: Sequence[str], maps: Sequence[AttentionMap]) -> str:
    """Why these maps cannot be shown together, and how to choose some that can."""
    samples = max(weights.shape[0] for weights in maps)
    if samples > 1:
        return f"maps of {samples} samples: expected one sample. Take one with weights.select(batch=[0])."
    groups: dict[tuple[int, int], list[str]] = {}
    for name, weights in zip(names, maps, strict=True):
        T, S = weights.shape[2:]
        groups.setdefault((T, S), []).append(name)
    sizes = "; ".join(f"{T} queries × {S} keys: {_some(found)}" for (T, S), found in groups.items())
    return (
        f"layers of different sizes cannot be viewed together ({sizes}). Choose those of one size with "
        f"view(..., layers=[...])."
    )


def _some(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are."""
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def shown_name(model: TextModel, part: str = "") -> str:
    """The name of a model in headings, which says which part of it is shown, if it has several."""
    pair = getattr(getattr(model.module, "config", None), "is_encoder_decoder", False)
    part = part or (ENCODER if pair and model.start is None else "")
    return f"{model.name} ({part})" if part else model.name


def _excerpt(words: str, most: int) -> str:
    """The beginning of a text, up to a word that ends within `most` characters."""
    return words if len(words) <= most else words[: most - 1].rsplit(" ", 1)[0] + "…"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _several(starts: Sequence[int] | None) -> Sequence[int] | None:
    """Where the character of each token starts; None if every token has its own."""
    return None if starts is None or list(starts) == list(range(len(starts))) else starts


def _once(tokens: Sequence[str], starts: Sequence[int] | None) -> str:
    """The text of some tokens, with each character once."""
    return _written(tokens, starts, (0, 0))


def _written(
    tokens: Sequence[str], starts: Sequence[int] | None, around: tuple[int, int] | None, between: str = ""
) -> str:
    """The text of some tokens, with each character once, without those that were added `around` it.

    If it is not known how many were, those that look like it are left out at both ends.
    """
    front, back = around or (0, 0)
    inside = range(front, len(tokens) - back)
    while around is None and inside and SPECIAL.fullmatch(tokens[inside[0]].strip()):
        inside = inside[1:]
    while around is None and inside and SPECIAL.fullmatch(tokens[inside[-1]].strip()):
        inside = inside[:-1]
    return between.join(tokens[place] for place in inside if starts is None or starts[place] == place)


def _words(tokens: Sequence[str] | None, count: int, name: str) -> list[str]:
    """The tokens as text; their positions if no text is given."""
    if tokens is None:
        return [str(i) for i in range(count)]
    if isinstance(tokens, str) or len(tokens) != count:
        raise ShapeError(f"{name}: {len(tokens)} given, but the maps have {count}; expected one string per token.")
    return [str(token) for token in tokens]


def spread(T: int, queries: int | None) -> Tensor | None:
    """Evenly spaced positions of so many of T queries, including the last; None for all."""
    if queries is None or check_size("queries", queries) >= T:
        return None
    return (torch.arange(1, queries + 1) * T) // queries - 1


def _apart_from_near(weights: AttentionMap, top: TopKeys) -> tuple[Tensor, Tensor]:
    """The largest weight of every query outside NEAR, and its key, given its `top` keys without the first."""
    source = weights._source()
    batch, head, row = (source.axis(name) for name in ("batch", "head", "row"))
    grid = Grid(batch[:, None, None, None], head[:, None, None], row[:, None], top.keys, source.frame.T, source.frame.S)
    near = sink(1) if weights._scoring.cross else NEAR  # the tokens of two texts are not beside each other
    found = top.weights.masked_fill(weights._probe(near).visible(grid), 0.0)
    place = found.argmax(-1, keepdim=True)
    return found.gather(-1, place)[..., 0], top.keys.gather(-1, place)[..., 0]


def strongest(pairs: Iterable[Pair]) -> list[Pair]:
    """Each pair of tokens once, in the head with the largest weight; the largest weights first."""
    found: dict[tuple[int, int], Pair] = {}
    for pair in sorted(pairs, key=lambda pair: -pair.weight):
        found.setdefault((pair.query, pair.key), pair)
    return list(found.values())


class Collected(NamedTuple):
    """Maps by layer name; what a `View` is told of the tokens, and the model, where known."""

    maps: Mapping[str, AttentionMap]
    tokens: Mapping[str, Any]
    model: str = ""
    carried: tuple[Carried, ...] | None = None
    importance: Importance | None = None
    trained: int | None = None


class Wanted(NamedTuple):
    """What to collect of a model besides its maps.

    layers: names of layers, or a function that selects them; None for all.
    values: whether to keep what the weights carry; None for short texts only.
    importance: whether to measure what each head is worth, or how.
    progress: is told what is being done.
    part: of an encoder–decoder model.
    target: the text of its decoder.
    """

    layers: Layers = None
    values: bool | None = None
    importance: bool | str | Importance = False
    progress: Progress = silent
    part: str | None = None
    target: str | None = None

    def keeps_values(self, length: int) -> bool:
        return length <= VALUES if self.values is None else check_flag("values", self.values)

    def measured(
        self, model: nn.Module, tokens: Tensor | Mapping[str, Any], loss: Loss | None = None
    ) -> Importance | None:
        """What each head is worth to the loss on these tokens, if that is asked for."""
        way = self.importance
        if isinstance(way, Importance) or way is False:
            return way or None
        way = "gradient" if way is True else way
        if way not in WAYS:
            raise OptionError(
                f"view(importance={way!r}): expected True, what headwise.importance returns, or one of "
                f"{', '.join(map(repr, WAYS))}."
            )
        try:
            with evaluating(model):
                return importance_of(model, tokens, by=way, loss=loss, controls=0)
        except OptionError as error:
            raise OptionError(
                f"view(importance={self.importance!r}): {error} Then pass what headwise.importance(model, tokens, "
                f"loss=...) returns as importance=."
            ) from error


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation, and back into what it was in."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def collected(model: Any, tokens: Any, wanted: Wanted) -> Collected:
    """The maps of one run of a model, or those given."""
    if isinstance(model, TextModel):
        return _of_texts(model, tokens, wanted)
    if wanted.part or wanted.target is not None:
        raise OptionError(
            "view: part= and target= need an encoder–decoder model with its tokenizer, as open_model(path, both=True) "
            "opens it. Choose layers of any other model with layers=[...]."
        )
    if not isinstance(model, nn.Module):
        if wanted.values or wanted.importance:
            raise OptionError("view(maps): values and importance need the model: pass it and its tokens instead.")
        return Collected(_named(model), TokenSides(None if tokens is None else _token_ids(tokens)).told)
    name = type(model).__name__
    if tokens is None or isinstance(tokens, str):
        raise OptionError(f"view({name}): pass token ids, such as tokenizer(text).input_ids.")
    if not isinstance(tokens, Mapping):
        ids = _token_ids(tokens)
        found = _watched(model, lambda: model(ids), wanted, ids.shape[1])
        importance = wanted.measured(model, ids)
        return Collected(found.maps, TokenSides(ids).told, name, found.carried, importance)
    lengths = [x.shape[1] for x in tokens.values() if isinstance(x, Tensor) and x.dim() > 1]
    found = _watched(model, lambda: model(**tokens), wanted, max(lengths, default=0))
    sides, importance = TokenSides.of(found.maps, tokens), wanted.measured(model, tokens)
    return Collected(found.maps, sides.told, name, found.carried, importance)


def _of_texts(model: TextModel, tokens: Any, wanted: Wanted) -> Collected:
    """The maps of one run of a model on its text; of one part, if it has an encoder and a decoder."""
    part = part_of(model, wanted.part)
    ids = model.tokens(tokens, most=10**9) if isinstance(tokens, str) else _token_ids(tokens)
    _check_length(model, ids)
    if not part:
        if wanted.target is not None:
            raise OptionError("target: this model reads one text, so it has no decoder that could read another.")
        found = _watched(model.module, lambda: model.read(ids), wanted, ids.shape[1])
        texts, importance = RunTexts(ids), wanted.measured(model.module, ids)
    else:
        texts = RunTexts(ids, _target(model, ids, wanted, part), part)
        names = [name for name in layer_names(model, part) if _chosen(name, wanted.layers)]
        length = max(texts.queries.shape[1], texts.keys.shape[1])
        run = lambda: model.module(**texts.inputs, use_cache=False)  # noqa: E731
        found = _watched(model.module, run, wanted._replace(layers=names), length)
        importance = wanted.measured(model.module, texts.inputs, target_loss)
    return Collected(
        found.maps, texts.view(model.codec), shown_name(model, part), found.carried, importance, model.trained
    )


def _target(model: TextModel, ids: Tensor, wanted: Wanted, part: str) -> Tensor:
    """What the decoder reads: the text that is given, or what the model writes where that can be seen."""
    if wanted.target is not None:
        return target_of(model, wanted.target)
    seen = part != ENCODER or wanted.importance
    return written(model, ids) if seen else model.decoder_tokens(ids)


def _chosen(name: str, layers: Layers) -> bool:
    return layers is None or (layers(name) if callable(layers) else name in layers)


class TokenSides(NamedTuple):
    """The token ids of the keys, and in cross-attention those of the queries, each (1, T), where known."""

    keys: Tensor | None = None
    queries: Tensor | None = None

    @property
    def told(self) -> dict[str, Any]:
        """The keyword arguments of a `View`."""
        return {"ids": self.keys, "query_ids": self.queries}

    @classmethod
    def of(cls, maps: Mapping[str, AttentionMap], given: Mapping[str, Any]) -> "TokenSides":
        """Those of the arguments that a model was called with."""
        source, target = (given.get(name) for name in ("input_ids", "decoder_input_ids"))
        crosses = any(weights._scoring.cross for weights in maps.values())
        decodes = bool(maps) and all("decoder" in name for name in maps)
        keys = target if target is not None and decodes and not crosses else source
        asked = target if crosses else None
        return cls(*(None if ids is None else _token_ids(ids) for ids in (keys, asked)))


class Seen(NamedTuple):
    """The maps of a run by layer, and what their weights carry."""

    maps: Mapping[str, AttentionMap]
    carried: tuple[Carried, ...] | None


def _watched(model: nn.Module, run: Callable[[], object], wanted: Wanted, length: int) -> Seen:
    """What is seen of one run; the last call of a layer that is called several times."""
    found = 0

    def count(weights: AttentionMap) -> AttentionMap:
        nonlocal found
        found += 1
        wanted.progress("reading", min(found, total), total)
        return weights

    keeps = wanted.keeps_values(length)
    try:
        with torch.no_grad(), evaluating(model), _watch(model, wanted.layers, count, outputs=keeps) as seen:
            total = len(seen._layers)
            run()
    except IndexError as error:
        raise ShapeError(
            f"view({type(model).__name__}): {error}. Is the text longer than the model can read, or are there ids that "
            "its embedding does not have?"
        ) from error
    maps = dict(seen)
    known = carried(maps, seen.outputs) if keeps else None
    if wanted.values and known is None:
        raise OptionError(
            f"view({type(model).__name__}, values=True): the values of some layers are not known, because they are "
            f"gated or made from latents. View the weights alone, or other layers with layers=[...]."
        )
    return Seen(maps, known)


def _watch(model: nn.Module, layers: Layers, each: Callable[[AttentionMap], AttentionMap], *, outputs: bool) -> Watched:
    """Watch the whole model; if some of its attention cannot be watched, the caller must choose the layers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error" if layers is None else "ignore", message=".*computes attention in its own code")
        try:
            return watch(model, layers=layers, statistics=each, outputs=outputs)
        except UserWarning as warning:
            raise OptionError(f"view: {warning} Choose the layers to view with layers=[...].") from warning


def _check_length(model: TextModel, ids: Tensor) -> None:
    if model.limit is not None and ids.shape[1] > model.limit:
        raise ShapeError(
            f"the text is {ids.shape[1]:,} tokens long and the model can read {model.limit:,}. Shorten it, or pass "
            f"only the first tokens: view(model, model.tokens(text, most=10**9)[:, :{model.limit}])."
        )


def _token_ids(tokens: Any) -> Tensor:
    """Token ids as (1, T)."""
    found = torch.as_tensor(tokens)
    found = found[None] if found.dim() == 1 else found
    if found.dim() != 2 or found.shape[0] != 1 or found.shape[1] == 0 or found.is_floating_point():
        raise OptionError(f"tokens of shape {tuple(found.shape)}: expected integers (T,) or (1, T), at least one.")
    return found


def _named(maps: Any) -> Mapping[str, AttentionMap]:
    """Maps by layer name, from one map, a list or a mapping; plain tensors of weights become maps."""
    if isinstance(maps, AttentionMap | Tensor):
        maps = [maps]
    if isinstance(maps, Sequence):
        maps = {f"layer {i}": weights for i, weights in enumerate(maps)}
    if not isinstance(maps, Mapping):
        raise OptionError(f"view({type(maps).__name__}): expected a model, or attention maps.")
    named = {name: map_of(weights) if isinstance(weights, Tensor) else weights for name, weights in maps.items()}
    wrong = [type(weights).__name__ for weights in named.values() if not isinstance(weights, AttentionMap)]
    if wrong:
        raise OptionError(
            f"view: a {wrong[0]} is among the maps; expected AttentionMap, as return_weights=True gives, or weights "
            f"(1, H, T, S) as a tensor."
        )
    return named


def map_of(weights: Tensor) -> AttentionMap:
    """A map of given weights (H, T, S) or (1, H, T, S), such as those of `output_attentions=True`.

    A map is made of queries and keys. Here the queries are the logarithms of the weights and key j is unit vector j, so
    that query times key is the logarithm of a weight, and its softmax is the weight.

    >>> map_of(torch.eye(3).expand(1, 2, 3, 3)).entropy().sum().item()
    0.0
    """
    weights = weights[None] if weights.dim() == 3 else weights
    if weights.dim() != 4 or not weights.is_floating_point():
        raise ShapeError(
            f"weights {tuple(weights.shape)} of {weights.dtype}: expected floats (1, H, T, S) or (H, T, S)."
        )
    precise = weights.detach().to(torch.promote_types(weights.dtype, torch.float32))
    sums = precise.sum(-1)
    if not bool(((sums - 1).abs() < NEAR_ONE).all()) or bool((precise < 0).any()):
        raise OptionError(
            f"the sums of the rows of these weights range from {sums.min():.3g} to {sums.max():.3g}: expected weights "
            "after the softmax, where each row sums to 1."
        )
    S = weights.shape[-1]
    keys = torch.eye(S, dtype=precise.dtype, device=precise.device).expand(*weights.shape[:2], S, S)
    return AttentionMap(precise.log().clamp(min=LOG_ZERO), keys, Scoring(scale=1.0))
