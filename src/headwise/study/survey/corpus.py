"""All documents of a survey as numbered units of work, and their texts cut into windows that a model can read."""

import bisect
import errno
import hashlib
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from headwise.errors import OptionError
from headwise.models.text_model import TokenCodec
from headwise.study.survey.disk import retried, why
from headwise.study.survey.documents import (
    Document,
    DocumentSource,
    LinesFile,
    MissingSource,
    TableFile,
    TextFile,
    TextList,
)
from headwise.study.survey.result import TABLES, CorpusEntry
from headwise.study.survey.tally import Skipped

LINES = (".jsonl", ".ndjson")
KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
BUFFERED = 8  # full batches of tokens that may wait for windows of the same length


class Corpus:
    """The files of a survey in order, with their units numbered consecutively.

    Args:
        sources: the files by their real path, each once.
        named: what the user named, and the files in it: how they are called there, and their real path.
    """

    def __init__(self, sources: Mapping[str, DocumentSource], named: Sequence["NamedFiles"]) -> None:
        self.sources, self.named = list(sources.values()), named
        self.paths = list(sources)
        self._ends = list(accumulate(source.units for source in self.sources))
        self.size = sum(source.size for source in self.sources)
        self.state: dict[str, str] = {}  # for each file by name, a text that changes if its content changes
        self._open: DocumentSource | None = None

    def __len__(self) -> int:
        """The number of units."""
        return self._ends[-1]

    def seal(self) -> None:
        """Read all files once: from now on, their content must not change."""
        self.state = {path: source.seal() for path, source in zip(self.paths, self.sources, strict=True)}

    def accept(self, state: Mapping[str, str]) -> None:
        """Take over what the first process has sealed. A file is checked when a unit of it is first read."""
        if list(state) != self.paths:
            raise OptionError("the processes of this survey find different files; they must see the same folders.")
        self.state = dict(state)
        for source, sealed in zip(self.sources, state.values(), strict=True):
            source.accept(sealed)

    @property
    def entries(self) -> tuple[CorpusEntry, ...]:
        """What the user named, with a digest of the names and the content."""
        return tuple(self._entry(named) for named in self.named)

    def read(self, unit: int) -> Iterator[Document | Skipped]:
        """The documents of a unit."""
        source, number = self._find(unit)
        if self._open is not None and self._open is not source:
            self._open.close()
        self._open = source
        return source.read(number)

    def lost(self, unit: int, reason: str) -> Skipped:
        """The report about a unit that could not be read."""
        source, number = self._find(unit)
        return source.lost(number, reason)

    def close(self) -> None:
        """Close the file that was read last."""
        if self._open is not None:
            self._open.close()

    def number_in_file(self, unit: int) -> int:
        """Which unit of its file a unit is."""
        return self._find(unit)[1]

    def bytes_of(self, unit: int) -> float:
        """About how many bytes a unit has."""
        source, _ = self._find(unit)
        return source.size / source.units

    def _find(self, unit: int) -> tuple[DocumentSource, int]:
        place = bisect.bisect_right(self._ends, unit)
        return self.sources[place], unit - (self._ends[place - 1] if place else 0)

    def _entry(self, named: "NamedFiles") -> CorpusEntry:
        digest = hashlib.sha256()
        for inside, path in named.files.items():
            digest.update(f"{inside}\0{self.state[path]}\0".encode("utf-8", "surrogateescape"))
        return CorpusEntry(named.name, named.total, named.size, digest.hexdigest()[:16])


class NamedFiles(NamedTuple):
    """A file or folder that the user named."""

    name: str
    files: dict[str, str]  # how each is called inside the folder, and its real path
    total: int
    size: int


def open_corpus(paths: Iterable[str | Path], step: int, column: str) -> Corpus:
    """The documents of files and folders.

    Args:
        paths: text files, JSONL or Parquet, recognized by suffix; for a folder, all files in it except hidden ones.
        step: about how many bytes a unit has.
        column: the field of JSONL or the column of Parquet that holds the text.
    """
    sources: dict[str, DocumentSource] = {}
    named: list[NamedFiles] = []
    for path in map(Path, paths):
        entry = NamedFiles(_shown(path), {}, 0, 0)
        for found in _found(path):
            real = str(found.path.resolve() if found.problem is None else found.path.absolute())
            entry.files[found.path.relative_to(path).as_posix() if found.path != path else path.name] = real
            entry = entry._replace(total=entry.total + (found.problem is None), size=entry.size + found.size)
            if real not in sources:  # else named twice, or both itself and its folder
                sources[real] = _source(found, step, column)
        named.append(entry)
    if not sources:
        raise OptionError("there are no documents; name text files, JSONL, Parquet, or folders of them.")
    return Corpus(sources, named)


def text_corpus(texts: Iterable[str], step: int) -> Corpus:
    """A corpus of texts in memory."""
    held = list(texts)
    if not held:
        raise OptionError("texts=[]: expected at least one text.")
    source = TextList(held, step)
    return Corpus({"texts": source}, [NamedFiles("texts", {"texts": "texts"}, len(held), source.size)])


class FoundFile(NamedTuple):
    """A file, or something else in a folder and the reason why it is not read."""

    path: Path
    size: int = 0
    problem: str | None = None


def _found(path: Path) -> list[FoundFile]:
    """The file, or everything in the folder: nothing is left out without a reason, except hidden files."""
    found = _look(path)
    if found is None:
        found_inside = list(_inside(path))
        if not found_inside:
            raise OptionError(f"{path}: there are no files in this folder.")
        if found_inside[0].path == path:
            raise OptionError(f"{path}: {found_inside[0].problem}.")
        return found_inside
    if found.problem is not None:
        raise OptionError(f"{path}: {found.problem}.")
    return [found]


def _inside(path: Path) -> Iterator[FoundFile]:
    """The files of a folder by name, then those of its folders."""
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        try:
            names = retried(lambda folder=folder: sorted(each.name for each in folder.iterdir()))  # type: ignore[misc]
        except OSError as error:
            yield FoundFile(folder, problem=f"this folder cannot be read: {why(error)}")
            continue
        folders = []
        for name in names:
            if name.startswith("."):
                continue
            found = _look(folder / name)
            if found is not None:
                yield found
            elif (folder / name).is_symlink():
                yield FoundFile(
                    folder / name, problem="a link to a folder, which is not followed; name the folder itself"
                )
            else:
                folders.append(folder / name)
        waiting += reversed(folders)


def _look(path: Path) -> FoundFile | None:
    """A file, or why it is none; None for a folder."""
    try:
        about = retried(lambda: path.stat())
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP) and path.is_symlink():
            return FoundFile(path, problem=f"a link to {_shown(path.readlink())}, which does not exist")
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        return FoundFile(
            path, problem="there is no such file or folder" if missing else f"cannot be read: {why(error)}"
        )
    if stat.S_ISDIR(about.st_mode):
        return None
    if not stat.S_ISREG(about.st_mode):
        return FoundFile(
            path, problem=f"{KINDS.get(stat.S_IFMT(about.st_mode), 'a special file')}; expected a file or folder"
        )
    return FoundFile(path, about.st_size)


def _source(found: FoundFile, step: int, column: str) -> DocumentSource:
    file, size, problem = found
    name, suffix = _shown(file), file.suffix.lower()
    if problem is not None:
        return MissingSource(name, problem)
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
    """Tokens to read at once, and where they are from.

    ids: the tokens.
    skipped: makes the report if the document is skipped, from the reason.
    unit: which unit of the file it is in.
    number: of the window in its unit.
    """

    ids: list[int]
    skipped: Callable[[str], Skipped]
    unit: int
    number: int


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
