"""What a survey found: every head's numbers over all documents, exactly mergeable."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.errors import OptionError
from headwise.study.survey.corpus import Given
from headwise.study.survey.documents import Bad
from headwise.study.survey.measuring import APART, KINDS, PEAKS
from headwise.study.survey.progress import many
from headwise.study.survey.tally import ONE, Fields, Tally
from headwise.view.result import Head, counted, most_telling, told_kinds
from headwise.weights.panel import octave_edges
from headwise.weights.readings import octave_count
from headwise.weights.summary import LEAST, HeadSummary, traits

SAME = ("model", "fingerprint", "context")  # what surveys must share to be merged
SUM = " sum"


@dataclasses.dataclass(frozen=True)
class SurveyedHead(HeadSummary):
    """One head over a whole corpus.

    `numbers`, `apart` and `reading` are those of a `Summary`, over all queries of all windows. By the same
    names, those apart from the first token beginning with "apart ":

    Args:
        layer: its name in the model.
        rows: how many queries the means are over.
        std: the deviation between queries.
        spread: the deviation between windows of their means: how much it depends on the text.
        histogram: the share of attention at distance 0, 1, 2–3, 4–7, ...; `apart_histogram` without the first token.
    """

    layer: str
    rows: int
    std: dict[str, float]
    spread: dict[str, float]
    histogram: tuple[float, ...]
    apart_histogram: tuple[float, ...]


class Survey:
    """See `headwise.survey`.

    Args:
        settings: what the numbers depend on: model, context, batch.
        corpus: what was named, and a digest of it.
        tally: everything counted.
    """

    def __init__(self, settings: dict[str, Any], corpus: Sequence[Given], tally: Tally) -> None:
        self.settings, self.corpus, self.tally = settings, tuple(corpus), tally

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in the order in which the model runs them."""
        return tuple(self.tally.layers)

    @property
    def documents(self) -> int:
        """How many were read."""
        return self.tally.counts["documents"]

    @property
    def counts(self) -> dict[str, int]:
        """Documents read, cut into windows and skipped; windows; tokens."""
        names = ("documents", "cut", "skipped", "windows", "windows lost", "tokens")
        return {name: self.tally.counts[name] for name in names}

    @property
    def skipped(self) -> list[Bad]:
        """What could not be read, by place: at most 10,000 are named, `counts` has them all."""
        return self.tally.skipped

    @property
    def edges(self) -> list[int]:
        """Where the octaves of the histograms begin; the last one ends the last octave."""
        context = int(self.settings["context"])
        return [int(edge) for edge in octave_edges(octave_count(context, context))]

    @functools.cached_property
    def heads(self) -> tuple[SurveyedHead, ...]:
        """Every head, layer by layer."""
        return tuple(
            _head(layer, fields, head)
            for layer, fields in self.tally.layers.items()
            for head in range(len(fields["rows"]))
        )

    def head(self, layer: str | int, head: int) -> SurveyedHead:
        """One head, by the name or the number of its layer."""
        name = self.layers[layer] if isinstance(layer, int) and -len(self.layers) <= layer < len(self.layers) else layer
        found = next((each for each in self.heads if (each.layer, each.head) == (name, head)), None)
        if found is None:
            raise OptionError(f"head({layer!r}, {head}): there are layers {list(self.layers)} and no such head.")
        return found

    @property
    def placed(self) -> list[Head]:
        """Every head with the number of its layer, as a sight has them."""
        return [Head(self.layers.index(head.layer), head.head, head) for head in self.heads]

    def telling(self, most: int = 12) -> list[Head]:
        """The heads that do one thing most clearly: first one of every kind, then the others."""
        return most_telling(self.placed, most)

    @property
    def sentence(self) -> str:
        """All of it in one line of numbers."""
        counts, heads = self.counts, sorted({len(fields["rows"]) for fields in self.tally.layers.values()})
        told = [f"{many(len(self.layers), 'layer')} × {' or '.join(map(str, heads))} heads"] if heads else []
        told.append(
            many(counts["documents"], "document") + f", {counts['skipped']:,} skipped" * (counts["skipped"] > 0)
        )
        told.append(f"{many(counts['windows'], 'window')} of at most {self.settings['context']:,} tokens")
        told += [f"{many(counts['cut'], 'document')} cut into several"] if counts["cut"] else []
        told += [f"{many(counts['windows lost'], 'window')} lost"] if counts["windows lost"] else []
        told += [many(counts["tokens"], "token"), *told_kinds(counted(self.placed))]
        return " · ".join([*told, "weights, not importance"])

    def merge(self, *others: "Survey") -> "Survey":
        """This survey and others as one, exactly as if their documents had been surveyed together.

        The order does not matter. Refused for other models or contexts, and where documents would count twice.
        """
        whole, known = Tally(), {}
        for survey in (self, *others):
            for name in SAME:
                if survey.settings[name] != self.settings[name]:
                    raise OptionError(
                        f"merge: surveys with {name} {self.settings[name]!r} and {survey.settings[name]!r}; expected "
                        f"one model and one context."
                    )
            for given in survey.corpus:
                if given.digest in known:
                    raise OptionError(f"merge: {given.name} is in two of the surveys, and would count twice.")
                known[given.digest] = given
            whole.add(survey.tally)
        return Survey(self.settings, sorted(known.values()), whole)

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain data."""
        return {
            "sentence": self.sentence,
            "settings": self.settings,
            "corpus": [given._asdict() for given in self.corpus],
            "counts": self.counts,
            "skipped": [bad._asdict() for bad in self.skipped],
            "edges": self.edges,
            "heads": [_told(head) for head in self.heads],
        }

    def save(self, path: str | Path) -> None:
        """Write it to a .json or .parquet file; see `headwise.study.survey.load`."""
        from headwise.study.survey.files import save

        save(self, Path(path))

    def to_html(self) -> str:
        """One page with every head, which needs no network and no script."""
        from headwise.study.survey.page import page

        return page(self)

    def __repr__(self) -> str:
        return f"Survey({self.sentence})"

    def __str__(self) -> str:
        from headwise.study.survey.terminal import drawn

        return drawn(self, 120)


def _told(head: SurveyedHead) -> dict[str, Any]:
    told = dataclasses.asdict(head)
    del told["traits"]
    return {"layer": head.layer, "head": head.head, "reading": head.reading, **told}


def _head(layer: str, fields: Fields, head: int) -> SurveyedHead:
    means: dict[str, dict[str, float]] = {}
    chance: dict[str, dict[str, float]] = {}
    std, spread = {}, {}
    for kind in KINDS:
        means[kind], chance[kind] = {}, {}
        for name in _names(fields, kind):
            sums, squares, mean, mean_squares, even, rows, windows = (
                fields[f"{kind}{name} {what}"][head]
                for what in ("sum", "squares", "means", "mean squares", "even", "rows", "windows")
            )
            chance[kind][name] = _share(even, rows) if rows >= LEAST else 1.0
            means[kind][name] = _share(sums, rows)
            std[kind + name] = _deviation(sums, squares, rows)
            spread[kind + name] = _deviation(mean, mean_squares, windows)
        peaks = fields[f"{kind}peaks"][head * PEAKS : (head + 1) * PEAKS]
        distance = means[kind].pop("distance")
        rows = fields[f"{kind}rows"][head]
        means[kind] |= {"positional": max(peaks[1:-1]) / max(rows, 1), "distance": distance}
        chance[kind]["positional"] = 0.0 if rows >= LEAST else 1.0
    return SurveyedHead(
        head=head,
        traits=traits(means[""]["sink"], means[APART], chance[APART] | {"sink": chance[""]["sink"]}),
        numbers=means[""],
        apart=means[APART],
        layer=layer,
        rows=fields["rows"][head],
        std=std,
        spread=spread,
        histogram=_histogram(fields, "", head),
        apart_histogram=_histogram(fields, APART, head),
    )


def _names(fields: Fields, kind: str) -> list[str]:
    """The numbers a summary has, apart from the first token or not."""
    found = [field.removesuffix(SUM) for field in fields if field.endswith(SUM)]
    return [name.removeprefix(kind) for name in found if name.startswith(APART) == (kind == APART)]


def _share(sums: int, many: int) -> float:
    """A mean, rounded once."""
    return sums / (max(many, 1) * int(ONE))


def _deviation(sums: int, squares: int, many: int) -> float:
    """√(mean of squares − square of mean); the difference is taken of whole numbers, so nothing cancels."""
    many, one = max(many, 1), int(ONE)
    return math.sqrt(max(0, squares * many * one - sums * sums) / (many * many * one * one))


def _histogram(fields: Fields, kind: str, head: int) -> tuple[float, ...]:
    octaves = len(fields[f"{kind}octaves"]) // len(fields["rows"])
    seeing = fields[f"{kind}seeing"][head]
    return tuple(_share(sums, seeing) for sums in fields[f"{kind}octaves"][head * octaves : (head + 1) * octaves])
