"""All documents of a survey as numbered units of work, any of which can be read at once."""

import bisect
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from headwise.errors import OptionError
from headwise.study.survey.documents import Bad, Document, Source
from headwise.study.survey.lines import LinesFile
from headwise.study.survey.tables import TableFile
from headwise.study.survey.texts import TextFile, TextList

LINES = (".jsonl", ".ndjson")
TABLES = (".parquet", ".pq")


class Given(NamedTuple):
    """What was named: a file or a folder, how much it holds, and a digest of its files' names and sizes."""

    name: str
    files: int
    bytes: int
    digest: str


class Corpus:
    """The sources of a survey in order, and their units numbered through.

    Args:
        sources: what to read.
        given: what the user named to find them.
        state: the files by name, each with what differs once it was changed.
    """

    def __init__(self, sources: Sequence[Source], given: Sequence[Given], state: Mapping[str, str]) -> None:
        self.sources, self.given, self.state = sources, tuple(given), state
        self._ends = list(accumulate(source.units for source in sources))
        self.size = sum(source.size for source in sources)
        self._open: Source | None = None

    def __len__(self) -> int:
        """Units."""
        return self._ends[-1]

    def read(self, unit: int) -> Iterator[Document | Bad]:
        """The documents of a unit."""
        source, number = self._find(unit)
        if self._open is not None and self._open is not source:
            self._open.close()
        self._open = source
        return source.read(number)

    def bytes_of(self, unit: int) -> float:
        """About how many bytes a unit has: its share of the file."""
        source, _ = self._find(unit)
        return source.size / source.units

    def name_of(self, unit: int) -> str:
        """The file a unit is of."""
        return self._find(unit)[0].name

    def _find(self, unit: int) -> tuple[Source, int]:
        place = bisect.bisect_right(self._ends, unit)
        return self.sources[place], unit - (self._ends[place - 1] if place else 0)


def open_corpus(paths: Iterable[str | Path], step: int, column: str) -> Corpus:
    """The documents of files and folders.

    Args:
        paths: text files, JSONL, Parquet, told by their suffix; of a folder all files within, hidden ones left out.
        step: about how many bytes a unit has.
        column: the field of JSONL and the column of Parquet that holds the text.
    """
    sources: list[Source] = []
    given: list[Given] = []
    state: dict[str, str] = {}
    for path in map(Path, paths):
        digest, size = hashlib.sha256(), 0
        files = _files(path)
        for file in files:
            about = file.stat()
            size += about.st_size
            inside = file.relative_to(path).as_posix() if file != path else file.name
            digest.update(f"{inside}\0{about.st_size}\0".encode("utf-8", "surrogateescape"))
            real = str(file.resolve())
            if real in state:  # named twice, or by itself and by its folder
                continue
            state[real] = f"{about.st_size} bytes, {about.st_mtime_ns}"
            sources.append(_source(file, about.st_size, step, column))
        given.append(Given(_shown(path), len(files), size, digest.hexdigest()[:16]))
    if not sources:
        raise OptionError("which documents? Name text files, JSONL, Parquet, or folders of them.")
    return Corpus(sources, given, state)


def text_corpus(texts: Iterable[str], step: int) -> Corpus:
    """The documents that these texts are."""
    held = list(texts)
    if not held:
        raise OptionError("texts=[]: expected at least one text.")
    source = TextList(held, step)
    digest = hashlib.sha256(b"\0".join(str(text).encode("utf-8", "surrogatepass") for text in held)).hexdigest()
    return Corpus([source], [Given("texts", len(held), source.size, digest[:16])], {"texts": digest})


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise OptionError(f"{path}: there is no such file or folder.")
    found = []
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        found += [Path(folder) / name for name in sorted(names) if not name.startswith(".")]
    files = [file for file in found if file.is_file()]  # no pipes, no links that lead nowhere
    if not files:
        raise OptionError(f"{path}: there are no files in this folder.")
    return files


def _source(file: Path, size: int, step: int, column: str) -> Source:
    name, suffix = _shown(file), file.suffix.lower()
    if suffix in TABLES:
        return TableFile(file, name, size, step, column)
    if suffix in LINES:
        return LinesFile(file, name, size, step, column)
    return TextFile(file, name, size, step)


def _shown(path: Path) -> str:
    """A path as text, also where its name is none in UTF-8."""
    return path.as_posix().encode("utf-8", "surrogateescape").decode("utf-8", "replace")
