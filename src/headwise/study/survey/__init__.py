"""`survey`: what every head of a model does over a whole corpus, on one process or many.

`disk` reads files, `documents` and `corpus` make texts of them, `measures` measures a batch of them, with `statistics`
of the user's own, `passages` keeps the strongest passages, `tally` adds everything up, `journal` keeps the progress on
disk, `job` runs it all, `result` is the answer.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from headwise.errors import OptionError
from headwise.models import open_model
from headwise.shapes import check_flag
from headwise.study.survey.result import Survey
from headwise.study.survey.statistics import Statistics

__all__ = ["Survey", "survey"]


def survey(
    model: Any,
    documents: str | Path | Iterable[str | Path] | None = None,
    *,
    texts: Iterable[str] | None = None,
    tokenize: Callable[[str], Sequence[int]] | None = None,
    context: int | None = None,
    batch: int = 8,
    column: str = "text",
    by: str = "weight",
    statistics: Statistics | None = None,
    importance: bool = False,
    evidence: int = 3,
    out: str | Path | None = None,
    resume: bool = False,
    strict: bool = False,
    progress: bool = False,
) -> Survey:
    """What every head of a model does over many documents: exact means of the numbers in `headwise.weights.summary`.

    >>> from headwise import load_builtin, survey
    >>> found = survey(load_builtin(), texts=["The captain looked at the sea.", "It was late, and it was dark."])
    >>> found.documents, len(found.heads)
    (2, 56)
    >>> found.head(4, 2).reading.split()[0]
    'previous-token'

    Args:
        model: anything that `headwise.models.open_model` opens: the built-in model, the folder of a model, a
            transformers model or another module.
        documents: paths of text files, JSONL, Parquet, or folders of them.
        texts: texts in memory, instead of files.
        tokenize: for a model in memory: its transformers tokenizer, or a function from a text to token ids.
        context: tokens in a window; longer documents are cut. By default what the model reads, at most 1024.
        batch: windows read together.
        column: the field of JSONL or the column of Parquet that holds the text.
        by: what to measure: attention weights ("weight"), weights scaled by what their values write ("value"), or the
            share of each token in what the head writes ("contribution").
        statistics: of your own, by name: a `headwise.weights.Reading` such as a `Statistic`, a mask or probe, or a
            function of the tokens (B, T) that makes one. Things that have a name may come in a list.
        importance: also measure what removing each head would add to the loss, by its gradient.
        evidence: how many passages to keep for each head and number; 0 for none.
        out: a .json or .parquet file to write; while the survey runs, its journal is beside it.
        resume: continue the survey whose journal is beside `out`.
        strict: raise an error at the first document that cannot be read, instead of skipping and listing it.
        progress: report progress on standard error.
    """
    from headwise.study.survey.job import SurveyJob
    from headwise.study.survey.measures import Measures
    from headwise.study.survey.statistics import own_statistics

    if isinstance(texts, str):
        raise OptionError("texts= is a single text; expected a list of texts, such as texts=[text].")
    paths = [documents] if isinstance(documents, str | Path) else documents
    opened = open_model(model, tokenize, dtype=torch.float32, both=True)
    measures = Measures(by, own_statistics(statistics), check_flag("importance", importance), evidence)
    job = SurveyJob.of(
        opened, paths, texts=texts, context=context, batch=batch, column=column, strict=strict, measures=measures
    )
    found = job.run(None if out is None else Path(out), resume=resume, stream=sys.stderr if progress else None)
    assert found is not None  # noqa: S101 - a single process is the first
    return found
