"""Surveys on disk: JSON, or Parquet with a row per head. Both carry the exact sums, so that surveys can be merged."""

import json
from pathlib import Path
from typing import Any

from headwise.errors import CheckpointError, OptionError, need
from headwise.models.files import atomically
from headwise.study.survey.corpus import TABLES, Given
from headwise.study.survey.journal import FORMAT, write_down
from headwise.study.survey.measuring import APART
from headwise.study.survey.result import Survey, SurveyedHead
from headwise.study.survey.tally import Tally

KEY = b"headwise"  # of the Parquet file's own metadata


def check_path(path: Path) -> None:
    """Refuse, before anything is surveyed, what could not be written."""
    if path.suffix.lower() not in (".json", *TABLES):
        raise OptionError(f"out={str(path)!r}: expected a name that ends in .json or .parquet.")
    if not path.parent.is_dir():
        raise OptionError(f"out={str(path)!r}: there is no folder {path.parent}.")
    if path.suffix.lower() in TABLES:
        need("pyarrow.parquet", "survey", "Parquet files")


def save(survey: Survey, path: Path) -> None:
    """Write a survey, whole or not at all."""
    check_path(path)
    if path.suffix.lower() in TABLES:
        atomically(path, lambda beside: _write_table(survey, beside))
    else:
        told = {"format": FORMAT, **survey.to_dict(), "tally": survey.tally.to_dict()}
        atomically(path, lambda beside: write_down(beside, (json.dumps(told, indent=1) + "\n").encode()))


def load(path: str | Path) -> Survey:
    """The survey that `save` wrote."""
    path = Path(path)
    try:
        told = _told(path)
        if told.get("format") != FORMAT:
            raise CheckpointError(f"{path} has the format {told.get('format')!r}; this version reads {FORMAT!r}.")
        corpus = [Given(**given) for given in told["corpus"]]
        return Survey(told["settings"], corpus, Tally.from_dict(told["tally"]))
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no survey that headwise wrote: {error!r}.") from error


def _told(path: Path) -> Any:
    if path.suffix.lower() not in TABLES:
        return json.loads(path.read_bytes())
    parquet = need("pyarrow.parquet", "survey", "Parquet files")
    return json.loads((parquet.read_schema(path).metadata or {})[KEY])


def _write_table(survey: Survey, path: Path) -> None:
    """A row per head, a column per number; what is no number of a head goes into the file's metadata."""
    arrow = need("pyarrow", "survey", "Parquet files")
    parquet = need("pyarrow.parquet", "survey", "Parquet files")
    about = {name: value for name, value in survey.to_dict().items() if name != "heads"}
    rest = json.dumps({"format": FORMAT, **about, "tally": survey.tally.to_dict()})
    table = arrow.Table.from_pylist([_row(head) for head in survey.heads])
    parquet.write_table(table.replace_schema_metadata({KEY: rest}), path)


def _row(head: SurveyedHead) -> dict[str, Any]:
    row: dict[str, Any] = {"layer": head.layer, "head": head.head, "reading": head.reading, "rows": head.rows}
    for kind, numbers in (("", head.numbers), (APART, head.apart)):
        for name, mean in numbers.items():
            row[_column(kind + name)] = mean
            if kind + name in head.std:
                row[_column(f"{kind}{name}_std")] = head.std[kind + name]
                row[_column(f"{kind}{name}_spread")] = head.spread[kind + name]
    return row | {"histogram": head.histogram, "apart_histogram": head.apart_histogram}


def _column(name: str) -> str:
    return name.replace(" ", "_")
