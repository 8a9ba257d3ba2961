"""All documents of a survey as numbered units of work, and their texts cut into windows that a model can read."""

import bisect
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from headwise.errors import OptionError
from headwise.models.text_model import TokenCodec
from headwise.study.survey.documents import Document, DocumentSource, LinesFile, TableFile, TextFile, TextList
from headwise.study.survey.result import TABLES, CorpusEntry
from headwise.study.survey.tally import Skipped

LINES = (".jsonl", ".ndjson")
BUFFERED = 8  # full batches of tokens that may wait for windows of the same length


class Corpus:
    """The files of a survey in order, with their units numbered consecutively.

    Args:
        sources: the files.
        entries: what the user named.
        state: for each file by name, a text that changes if the file changes.
    """

    def __init__(
        self, sources: Sequence[DocumentSource], entries: Sequence[CorpusEntry], state: Mapping[str, str]
    ) -> None:
        self.sources, self.entries, self.state = sources, tuple(entries), state
        self._ends = list(accumulate(source.units for source in sources))
        self.size = sum(source.size for source in sources)
        self._open: DocumentSource | None = None

    def __len__(self) -> int:
        """The number of units."""
        return self._ends[-1]

    def read(self, unit: int) -> Iterator[Document | Skipped]:
        """The documents of a unit."""
        source, number = self._find(unit)
        if self._open is not None and self._open is not source:
            self._open.close()
        self._open = source
        return source.read(number)

    def bytes_of(self, unit: int) -> float:
        """About how many bytes a unit has."""
        source, _ = self._find(unit)
        return source.size / source.units

    def _find(self, unit: int) -> tuple[DocumentSource, int]:
        place = bisect.bisect_right(self._ends, unit)
        return self.sources[place], unit - (self._ends[place - 1] if place else 0)


def open_corpus(paths: Iterable[str | Path], step: int, column: str) -> Corpus:
    """The documents of files and folders.

    Args:
        paths: text files, JSONL or Parquet, recognized by suffix; for a folder, all files in it except hidden ones.
        step: about how many bytes a unit has.
        column: the field of JSONL or the column of Parquet that holds the text.
    """
    sources: list[DocumentSource] = []
    entries: list[CorpusEntry] = []
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
            if real in state:  # named twice, or both itself and its folder
                continue
            state[real] = f"{about.st_size} bytes, {about.st_mtime_ns}"
            sources.append(_source(file, about.st_size, step, column))
        entries.append(CorpusEntry(_shown(path), len(files), size, digest.hexdigest()[:16]))
    if not sources:
        raise OptionError("there are no documents; name text files, JSONL, Parquet, or folders of them.")
    return Corpus(sources, entries, state)


def text_corpus(texts: Iterable[str], step: int) -> Corpus:
    """A corpus of texts in memory."""
    held = list(texts)
    if not held:
        raise OptionError("texts=[]: expected at least one text.")
    source = TextList(held, step)
    digest = hashlib.sha256(b"\0".join(str(text).encode("utf-8", "surrogatepass") for text in held)).hexdigest()
    return Corpus([source], [CorpusEntry("texts", len(held), source.size, digest[:16])], {"texts": digest})


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise OptionError(f"{path}: there is no such file or folder.")
    found = []
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        found += [Path(folder) / name for name in sorted(names) if not name.startswith(".")]
    files = [file for file in found if file.is_file()]  # no pipes and no broken links
    if not files:
        raise OptionError(f"{path}: there are no files in this folder.")
    return files


def _source(file: Path, size: int, step: int, column: str) -> DocumentSource:
    name, suffix = _shown(file), file.suffix.lower()
    if suffix in TABLES:
        return TableFile(file, name, size, step, column)
    if suffix in LINES:
        return LinesFile(file, name, size, step, column)
    return TextFile(file, name, size, step)


def _shown(path: Path) -> str:
    """A path as text, even if its name is not valid UTF-8."""
    return path.as_posix().encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# Windows ------------------------------------------------------------------------------------------------------------


class TokenWindow(NamedTuple):
    """Tokens to read at once, and how to report their document if it is skipped."""

    ids: list[int]
    skipped: Callable[[str], Skipped]


def cut(ids: Sequence[int], codec: TokenCodec, context: int) -> list[list[int]]:
    """The fewest windows of at most `context` tokens, of about equal length, each with the tokens that frame a text.

    >>> cut([5, 6, 7, 8, 9], TokenCodec(list, before=(1,)), context=4)
    [[1, 5, 6], [1, 7, 8, 9]]
    """
    room = context - len(codec.before) - len(codec.after)
    count = -(-len(ids) // room)
    edges = [len(ids) * k // count for k in range(count + 1)] if count else []
    return [[*codec.before, *ids[a:b], *codec.after] for a, b in pairwise(edges)]


def batches(windows: Iterable[TokenWindow], size: int, context: int) -> Iterator[list[TokenWindow]]:
    """Up to `size` windows of the same length at a time, so that nothing is padded."""
    waiting: dict[int, list[TokenWindow]] = {}
    tokens = 0
    for window in windows:
        length = len(window.ids)
        same = waiting.setdefault(length, [])
        same.append(window)
        tokens += length
        if len(same) == size:
            yield waiting.pop(length)
            tokens -= length * size
        elif tokens > BUFFERED * size * context:
            yield from waiting.values()
            waiting, tokens = {}, 0
    yield from waiting.values()
