"""What a survey found: the numbers of every head over all documents, saved as JSON or Parquet and exactly mergeable."""

import dataclasses
import functools
import hashlib
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headwise.errors import CheckpointError, OptionError, need
from headwise.models.files import write_synced
from headwise.study.survey.measures import IMPORTANCE, PEAK, PEAKS, SHOWN, WAYS
from headwise.study.survey.passages import Passage
from headwise.study.survey.tally import KINDS, ONE, WITHOUT_FIRST, Fields, Skipped, Tally
from headwise.weights import display
from headwise.weights.panel import octave_edges
from headwise.weights.readings import octave_count
from headwise.weights.summary import FEWEST, LEAST, READINGS, Head, HeadSummary, clearest, kinds_in_words, traits

FORMAT = "headwise survey 3"
TABLES = (".parquet", ".pq")
# What surveys must share to be merged.
SAME = ("model", "fingerprint", "context", "by", "statistics", "importance", "evidence")
NUMBER_OF = {name: key for key, name, _ in READINGS if key in SHOWN}  # by the name of a kind, the number behind it
SUM = " sum"
KEY = b"headwise"  # in the metadata of a Parquet file


class CorpusEntry(NamedTuple):
    """A file or folder that the user named: how much it holds, and a digest of its files' names and content."""

    name: str
    files: int
    bytes: int
    digest: str


@dataclasses.dataclass(frozen=True)
class SurveyedHead(HeadSummary):
    """One head over a whole corpus.

    `numbers`, `without_first` and `reading` are those of a `Summary`, over all queries of all windows. `std` and
    `spread` use the same names; names of numbers that leave out the first token begin with "without_first ".

    Args:
        layer: its name in the model.
        rows: how many queries the means are over.
        std: the standard deviation between queries.
        spread: the standard deviation between the means of windows: how much the head depends on the text.
        histogram: the share of attention at distance 0, 1, 2–3, 4–7, ...
        without_first_histogram: the same without the first token.
    """

    layer: str
    rows: int
    std: dict[str, float]
    spread: dict[str, float]
    histogram: tuple[float, ...]
    without_first_histogram: tuple[float, ...]

    @classmethod
    def of(cls, layer: str, fields: Fields, head: int) -> "SurveyedHead":
        """The means and deviations of one head, from the exact sums of its layer."""
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
                chance[kind][name] = _share(even, rows) if rows >= FEWEST.get(name, LEAST) else 1.0
                means[kind][name] = _share(sums, rows)
                std[kind + name] = _deviation(sums, squares, rows)
                spread[kind + name] = _deviation(mean, mean_squares, windows)
            chance[kind]["entropy"] = 0.0 if fields[f"{kind}rows"][head] >= LEAST else 1.0
            if "distance" in means[kind]:  # not in cross-attention
                peaks = fields[f"{kind}peaks"][head * PEAKS : (head + 1) * PEAKS]
                distance = means[kind].pop("distance")
                share = max(peaks[1:-1]) / max(fields[f"{kind}rows"][head], 1)
                means[kind] |= {"positional": share, "distance": distance}
                chance[kind]["positional"] = chance[kind]["peak"]
        return cls(
            head=head,
            traits=traits(means[""], chance[""], means[WITHOUT_FIRST], chance[WITHOUT_FIRST]),
            numbers=means[""],
            without_first=means[WITHOUT_FIRST],
            layer=layer,
            rows=fields["rows"][head],
            std=std,
            spread=spread,
            histogram=_histogram(fields, "", head),
            without_first_histogram=_histogram(fields, WITHOUT_FIRST, head),
        )

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain data."""
        data = dataclasses.asdict(self)
        del data["traits"]
        return {"layer": self.layer, "head": self.head, "reading": self.reading, **data}


class Survey:
    """What every head of a model does over a corpus; made by `headwise.survey`, and read from disk by `Survey.load`.

    Args:
        settings: what the numbers depend on: model, context, batch.
        corpus: the files and folders that were surveyed.
        tally: everything that was counted.
    """

    def __init__(self, settings: dict[str, Any], corpus: Sequence[CorpusEntry], tally: Tally) -> None:
        self.settings, self.corpus, self.tally = settings, tuple(corpus), tally

    @classmethod
    def load(cls, path: str | Path) -> "Survey":
        """The survey that `save` wrote to `path`, a .json or .parquet file."""
        path = Path(path)
        if path.exists() and not path.is_file():
            raise OptionError(f"{path} is not a file; expected a survey that headwise wrote.")
        try:
            data = _read(path)
            if data.get("format") != FORMAT:
                raise CheckpointError(f"{path} has the format {data.get('format')!r}; this version reads {FORMAT!r}.")
            if "checksum" in data and data["checksum"] != _checksum(data):
                raise CheckpointError(f"{path} is damaged: its checksum does not match. Survey the files again.")
            corpus = [CorpusEntry(**entry) for entry in data["corpus"]]
            return cls(data["settings"], corpus, Tally.from_dict({**data["tally"], "evidence": data["evidence"]}))
        except OSError as error:
            raise OptionError(f"{path}: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is not a survey that headwise wrote: {error!r}.") from error

    def save(self, path: str | Path) -> None:
        """Write the survey to `path`, a .json or .parquet file. Both hold the exact sums, so it can be merged later."""
        path = Path(path)
        check_path(path)
        tally = self.tally.to_dict()
        del tally["evidence"]  # it is there already
        data = {"format": FORMAT, **self.to_dict(), "tally": tally}
        data["checksum"] = _checksum(data)
        is_table = path.suffix.lower() in TABLES
        write_synced(path, _table(self, data) if is_table else json.dumps(data, indent=1) + "\n")

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in the order in which the model runs them."""
        return tuple(self.tally.layers)

    @property
    def documents(self) -> int:
        """How many documents were read."""
        return self.tally.counts["documents"]

    @property
    def counts(self) -> dict[str, int]:
        """Documents read, cut into windows and skipped; windows; tokens."""
        names = ("documents", "cut", "skipped", "windows", "windows lost", "tokens")
        return {name: self.tally.counts[name] for name in names}

    @property
    def skipped(self) -> list[Skipped]:
        """What could not be read, ordered by place: the first 10,000; `counts` counts them all."""
        return self.tally.skipped

    @property
    def edges(self) -> list[int]:
        """The distances at which the octaves of the histograms begin, and the end of the last one."""
        context = int(self.settings["context"])
        return [int(edge) for edge in octave_edges(octave_count(context, context))]

    @functools.cached_property
    def heads(self) -> tuple[SurveyedHead, ...]:
        """Every head, layer by layer."""
        return tuple(
            SurveyedHead.of(layer, fields, head)
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
        """Every head with the number of its layer."""
        return [Head(self.layers.index(head.layer), head.head, head) for head in self.heads]

    def clearest(self, most: int = 12) -> list[Head]:
        """The `most` heads that do one thing most clearly: first one of every kind, then the others."""
        return clearest(self.placed, most)

    def evidence(self, layer: str | int, head: int, number: str | None = None) -> list[Passage]:
        """The passages of the corpus in which a head was strongest, the best first.

        Args:
            layer: its layer, by name or number.
            head: its number in the layer.
            number: strongest in what: "previous", "induction" or a statistic of your own; by default what the head is
                named for, or the largest weight of all.
        """
        found = self.head(layer, head)
        name = NUMBER_OF.get(found.kind, PEAK) if number is None else number
        there = {each for _, _, each in self.tally.passages.best}
        if there and name not in there:
            raise OptionError(f"evidence({layer!r}, {head}, {number!r}): there are passages for {sorted(there)}.")
        return self.tally.passages.of(found.layer, head, name)

    @property
    def sentence(self) -> str:
        """The whole survey in one line."""
        counts, heads = self.counts, sorted({len(fields["rows"]) for fields in self.tally.layers.values()})
        parts = [f"{many(len(self.layers), 'layer')} × {' or '.join(map(str, heads))} heads"] if heads else []
        skipped = f", {counts['skipped']:,} skipped" if counts["skipped"] else ""
        parts.append(many(counts["documents"], "document") + skipped)
        parts.append(f"{many(counts['windows'], 'window')} of at most {self.settings['context']:,} tokens")
        parts += [f"{many(counts['cut'], 'document')} cut into several windows"] if counts["cut"] else []
        parts += [f"{many(counts['windows lost'], 'window')} lost"] if counts["windows lost"] else []
        parts += [many(counts["tokens"], "token"), *kinds_in_words(self.placed).values()]
        parts += [WAYS[self.settings["by"]], *([IMPORTANCE] if self.settings["importance"] else [])]
        return " · ".join(parts)

    def merge(self, *others: "Survey") -> "Survey":
        """This survey and `others` as one, exactly as if their documents had been surveyed together.

        The order does not matter. Surveys of different models or contexts are refused, and so are documents that would
        count twice.
        """
        whole, known = Tally(), {}
        for survey in (self, *others):
            for name in SAME:
                if survey.settings[name] != self.settings[name]:
                    raise OptionError(
                        f"merge: surveys with {name} {self.settings[name]!r} and {survey.settings[name]!r}; expected "
                        f"one model, one context, and the same measurements."
                    )
            for entry in survey.corpus:
                if entry.digest in known:
                    raise OptionError(f"merge: {entry.name} is in two of the surveys, and would count twice.")
                known[entry.digest] = entry
            whole.add(survey.tally)
        return Survey(self.settings, sorted(known.values()), whole)

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain data."""
        return {
            "sentence": self.sentence,
            "settings": self.settings,
            "corpus": [entry._asdict() for entry in self.corpus],
            "counts": self.counts,
            "skipped": [each._asdict() for each in self.skipped],
            "edges": self.edges,
            "heads": [head.to_dict() for head in self.heads],
            "evidence": self.tally.passages.to_rows(),
        }

    def to_html(self) -> str:
        """One page with every head, which needs no network and no script."""
        return display.html(self)

    def __repr__(self) -> str:
        return f"Survey({self.sentence})"

    def __str__(self) -> str:
        return display.text(self, 120)


def many(count: int, noun: str) -> str:
    """A number and what it counts: "1 document", "1,200 documents"."""
    return f"{count:,} {noun}" + "s" * (count != 1)


# Means and deviations from exact sums -------------------------------------------------------------------------------


def _names(fields: Fields, kind: str) -> list[str]:
    """The names of a summary's numbers, without or with the first token."""
    found = [field.removesuffix(SUM) for field in fields if field.endswith(SUM)]
    return [name.removeprefix(kind) for name in found if name.startswith(WITHOUT_FIRST) == (kind == WITHOUT_FIRST)]


def _share(sums: int, many: int) -> float:
    """A mean, rounded once."""
    return sums / (max(many, 1) * int(ONE))


def _deviation(sums: int, squares: int, many: int) -> float:
    """√(mean of squares − square of mean); the difference is exact because it is between integers."""
    many, one = max(many, 1), int(ONE)
    return math.sqrt(max(0, squares * many * one - sums * sums) / (many * many * one * one))


def _histogram(fields: Fields, kind: str, head: int) -> tuple[float, ...]:
    octaves = len(fields[f"{kind}octaves"]) // len(fields["rows"])
    seeing = fields[f"{kind}seeing"][head]
    return tuple(_share(sums, seeing) for sums in fields[f"{kind}octaves"][head * octaves : (head + 1) * octaves])


# Files --------------------------------------------------------------------------------------------------------------


def check_path(path: Path) -> None:
    """Raise, before anything is surveyed, if the result could not be written to `path`."""
    if path.suffix.lower() not in (".json", *TABLES):
        raise OptionError(f"out={str(path)!r}: expected a name that ends in .json or .parquet.")
    if path.is_dir():
        raise OptionError(f"out={str(path)!r} is a folder; expected the name of a file.")
    if path.exists() and not path.is_file():
        raise OptionError(f"out={str(path)!r} is a pipe or a device; expected the name of a file.")
    if not path.parent.is_dir():
        raise OptionError(f"out={str(path)!r}: there is no folder {path.parent}.")
    if path.suffix.lower() in TABLES:
        need("pyarrow.parquet", "survey", "Parquet files")


def _read(path: Path) -> Any:
    if path.suffix.lower() not in TABLES:
        return json.loads(path.read_bytes())
    parquet = need("pyarrow.parquet", "survey", "Parquet files")
    return json.loads((parquet.read_schema(path).metadata or {})[KEY])


def _checksum(data: dict[str, Any]) -> str:
    """A digest of everything from which a survey is read."""
    parts = json.dumps([data[name] for name in ("settings", "corpus", "tally", "evidence")], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()


def _table(survey: Survey, data: dict[str, Any]) -> bytes:
    """A Parquet file: a row per head and a column per number; everything else is in its metadata."""
    arrow = need("pyarrow", "survey", "Parquet files")
    parquet = need("pyarrow.parquet", "survey", "Parquet files")
    about = json.dumps({name: value for name, value in data.items() if name != "heads"})
    table = arrow.Table.from_pylist([_row(survey, head) for head in survey.heads])
    file = io.BytesIO()
    parquet.write_table(table.replace_schema_metadata({KEY: about}), file)
    return file.getvalue()


def _row(survey: Survey, head: SurveyedHead) -> dict[str, Any]:
    row: dict[str, Any] = {"layer": head.layer, "head": head.head, "reading": head.reading, "rows": head.rows}
    for kind, numbers in (("", head.numbers), (WITHOUT_FIRST, head.without_first)):
        for name, mean in numbers.items():
            row[kind + name] = mean
            if kind + name in head.std:
                row[f"{kind}{name}_std"] = head.std[kind + name]
                row[f"{kind}{name}_spread"] = head.spread[kind + name]
    row |= {"histogram": head.histogram, "without_first_histogram": head.without_first_histogram}
    row["evidence"] = [
        {"score": one.score, "place": one.place, "text": one.text} for one in survey.evidence(head.layer, head.head)
    ]
    return {name.replace(" ", "_"): value for name, value in row.items()}
