"""A survey from beginning to end: take units, look, count, write."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from headwise.errors import OptionError
from headwise.shapes import check_size
from headwise.study.survey.corpus import Corpus, open_corpus, text_corpus
from headwise.study.survey.crew import Alone, Crew
from headwise.study.survey.documents import Bad, Document
from headwise.study.survey.files import check_path, load, save
from headwise.study.survey.journal import Journal, digest, prepare
from headwise.study.survey.measuring import NotFiniteError, look
from headwise.study.survey.progress import Progress
from headwise.study.survey.result import Survey
from headwise.study.survey.subject import Subject
from headwise.study.survey.tally import Tally
from headwise.study.survey.texts import passages
from headwise.study.survey.windows import Window, batches, check_context, cut

CONTEXT = 1024  # tokens of a window unless said otherwise, if the model can read so many
BYTES_PER_TOKEN = 4  # about; a unit is then as much text as one batch of full windows


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """What is surveyed, and how."""

    subject: Subject
    corpus: Corpus
    context: int
    batch: int
    settings: dict[str, Any]  # what the result depends on

    @property
    def step(self) -> int:
        """About how many bytes a unit has."""
        return unit_bytes(self.context, self.batch)


def make_job(
    subject: Subject,
    paths: Iterable[str | Path] | None,
    *,
    texts: Iterable[str] | None = None,
    context: int | None = None,
    batch: int = 8,
    column: str = "text",
) -> Job:
    """Find the documents and check what was asked for."""
    context = check_context(context, subject, CONTEXT)
    step = unit_bytes(context, check_size("batch", batch))
    if (paths is None) == (texts is None):
        raise OptionError("survey which documents? Pass the paths of files, or texts=[...].")
    corpus = open_corpus(paths, step, column) if paths is not None else text_corpus(texts or (), step)
    settings = {
        "model": subject.name,
        "fingerprint": subject.fingerprint(),
        "context": context,
        "batch": batch,
        "column": column,
        "device": subject.device.type,
    }
    return Job(subject, corpus, context, batch, settings)


def run(
    job: Job,
    out: Path | None = None,
    *,
    crew: Crew | None = None,
    resume: bool = False,
    every: float = 10.0,
    stream: TextIO | None = None,
) -> Survey | None:
    """The survey, written to `out`; on processes other than the first, None."""
    crew = crew or Alone()
    if out is None and crew.size > 1:
        raise OptionError("several processes need --out: their journals lie beside it, where all of them can write.")
    if out is not None and resume and _finished(out, job):
        return load(out) if crew.rank == 0 else None
    folder = None if out is None else journal_folder(out)
    settings = {**job.settings, "files": digest(job.corpus.state), "torch": torch.__version__}
    if out is not None and folder is not None:
        check_path(out)
        crew.first(lambda: prepare(folder, settings, job.corpus.state, resume=resume))
    with Journal(folder, crew.rank, settings, len(job.corpus), every) as journal:
        tell = work(job, crew, journal, stream)
        if not crew.done(meanwhile=tell):
            return None
        tell(last=True)
        found = Survey(job.settings, job.corpus.given, journal.whole())
        if out is not None:
            save(found, out)
        journal.remove()
        return found


def work(job: Job, crew: Crew, journal: Journal, stream: TextIO | None) -> Callable[..., None]:
    """Take units until there are none. Returns what tells how far all processes are."""
    corpus = job.corpus
    before = sum(corpus.bytes_of(unit) for unit, done in enumerate(journal.done) if done)
    progress = Progress(corpus.size, before, stream)

    def tell(last: bool = False, done: float = 0, tokens: int = 0, documents: int = 0) -> None:
        totals = crew.count("bytes", round(done)), crew.count("tokens", tokens), crew.count("documents", documents)
        progress.tell(*totals, last=last)

    while (unit := crew.claim()) < len(corpus):
        if journal.done[unit]:
            continue
        tally = tally_of(job, unit)
        journal.add(unit, tally)
        tell(False, corpus.bytes_of(unit), tally.counts["tokens"], tally.counts["documents"])
    journal.save()
    return tell


def tally_of(job: Job, unit: int) -> Tally:
    """What one unit adds to the survey. It depends on the unit and the job alone."""
    tally = Tally()
    was_training = job.subject.module.training
    job.subject.module.eval()
    for windows in batches(_windows(job, job.corpus.read(unit), tally), job.batch, job.context):
        _count(job, windows, tally)
    job.subject.module.train(was_training)
    return tally


def _windows(job: Job, documents: Iterable[Document | Bad], tally: Tally) -> Iterator[Window]:
    """The windows of documents; what was read and what was skipped is counted on the way."""
    for document in documents:
        if isinstance(document, Bad):
            _skip(document, tally)
            continue
        count = 0
        for passage in passages(document.text, job.step):
            for ids in cut(list(job.subject.encode(passage)), job.subject, job.context):
                count += 1
                yield Window(ids, document.refused)
        if not count and document.passages == 1:
            _skip(document.refused("no tokens: the tokenizer gives none for it"), tally)
        elif document.number == 0:
            tally.counts["documents"] += 1
            tally.counts["cut"] += count > 1 or document.passages > 1


def _count(job: Job, windows: list[Window], tally: Tally) -> None:
    """Look at windows and count what is seen; where numbers are not finite, at each by itself."""
    try:
        found = look(job.subject, [window.ids for window in windows], job.context)
    except NotFiniteError as error:
        if len(windows) > 1:
            for window in windows:
                _count(job, [window], tally)
            return
        tally.counts["windows lost"] += 1
        tally.skip([windows[0].refused(f"{error} in a window of it")._replace(documents=0)])
        return
    for layer, fields in found.items():
        tally.add_layer(layer, fields)
    tally.counts["windows"] += len(windows)
    tally.counts["tokens"] += sum(len(window.ids) for window in windows)


def _skip(bad: Bad, tally: Tally) -> None:
    tally.counts["skipped"] += bad.documents
    tally.skip([bad])


def unit_bytes(context: int, batch: int) -> int:
    """About how many bytes a unit has."""
    return BYTES_PER_TOKEN * context * batch


def journal_folder(out: Path) -> Path:
    """Where the journals of a survey lie while it is unfinished."""
    return out.with_name(f"{out.name}.journal")


def _finished(out: Path, job: Job) -> bool:
    """Whether the result is there already, of this very survey."""
    if not out.is_file() or journal_folder(out).exists():
        return False
    found = load(out)
    return found.settings == job.settings and found.corpus == job.corpus.given
