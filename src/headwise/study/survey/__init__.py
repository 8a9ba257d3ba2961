"""Head statistics over a whole corpus. The package can be called: `headwise.survey(model, paths)` gives a `Survey`."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.verbs import make_callable

if TYPE_CHECKING:
    from headwise.study.survey.result import Survey

__all__ = ["load", "survey"]


def load(path: str | Path) -> "Survey":
    """The survey that was written to this `path`, a .json or .parquet file."""
    from headwise.study.survey.files import load

    return load(path)


def survey(
    model: Any,
    documents: str | Path | Iterable[str | Path] | None = None,
    *,
    texts: Iterable[str] | None = None,
    tokenize: Callable[[str], Sequence[int]] | None = None,
    context: int | None = None,
    batch: int = 8,
    column: str = "text",
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> "Survey":
    """What every head of a model does over many documents, as exact means of what `headwise.weights.summary` defines.

    >>> from headwise import load_builtin, survey
    >>> found = survey(load_builtin(), texts=["The captain looked at the sea.", "It was late, and it was dark."])
    >>> found.documents, len(found.heads)
    (2, 56)
    >>> found.head(4, 2).reading.split()[0]
    'previous-token'

    Args:
        model: the built-in model or its like, the folder of one or of a transformers model, or a module.
        documents: paths of text files, JSONL, Parquet, or folders of them.
        texts: texts instead of files.
        tokenize: for a module, its transformers tokenizer or a function from a text to token ids.
        context: tokens of a window; longer documents are cut. The model's own, at most 1024, unless given.
        batch: windows looked at together.
        column: the field of JSONL and the column of Parquet that holds the text.
        out: a .json or .parquet file to write; while the survey runs, its journal lies beside it.
        resume: go on with the survey whose journal lies beside `out`.
        progress: tell of it on standard error.
    """
    from headwise.errors import OptionError
    from headwise.study.survey.running import make_job, run
    from headwise.study.survey.subject import subject_of

    if isinstance(texts, str):
        raise OptionError("texts= is one text: expected a list of them, such as texts=[text].")
    paths = [documents] if isinstance(documents, str | Path) else documents
    job = make_job(subject_of(model, tokenize), paths, texts=texts, context=context, batch=batch, column=column)
    stream = sys.stderr if progress else None
    found = run(job, None if out is None else Path(out), resume=resume, stream=stream)
    assert found is not None  # noqa: S101 - one process is the first
    return found


make_callable(__name__, survey)
