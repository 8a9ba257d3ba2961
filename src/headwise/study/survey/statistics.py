"""Statistics of your own in a survey: a reading or a probe, or a function of the tokens that makes one.

    headwise.survey(model, paths, statistics={"quotes": lambda tokens: token_is(tokens, QUOTES)})
    headwise survey books/ --statistic my_statistics.py:quotes

On the command line, the file that you name is run as Python code, with all your rights, like any script of yours.
"""

import dataclasses
import hashlib
import importlib.util
import keyword
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from torch import Tensor

from headwise.errors import HeadwiseError, OptionError
from headwise.masks import Mask
from headwise.shapes import brief
from headwise.weights import AttentionMap, Reading, Statistic
from headwise.weights.summary import READINGS

Asked = Reading | Mask | Callable[[Tensor], Reading | Mask]
Statistics = Mapping[str, Asked] | Iterable[Asked]
# Names that a survey uses itself.
TAKEN = {key for key, _, _ in READINGS} | {"sink", "peak", "distance", "importance", "effect"}
TAKEN |= {"layer", "head", "reading", "rows", "histogram", "evidence"}
EXPECTED = (
    "a headwise.weights.Reading, such as a Statistic, a mask or probe, or a function of the tokens that makes one"
)


@dataclasses.dataclass(frozen=True, eq=False)
class OwnStatistic:
    """A statistic that the user brings.

    Args:
        name: of its number in the results.
        asked: what to measure.
        digest: changes with what is measured, so that a survey is not continued or merged with another statistic.
    """

    name: str
    asked: Asked
    digest: str

    @classmethod
    def of(cls, name: str, asked: Any, source: bytes = b"") -> "OwnStatistic":
        """A checked statistic; `source` is the file that it is from."""
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise OptionError(f"statistics: {name!r} is not a name; expected letters, digits and underscores.")
        if name in TAKEN or name.startswith("without_first"):
            raise OptionError(f"statistics: a survey has a number {name!r} already; choose another name.")
        if isinstance(asked, type) or not (isinstance(asked, Reading | Mask) or callable(asked)):
            raise OptionError(f"statistics: {name} is {brief(asked)}; expected {EXPECTED}.")
        return cls(name, asked, hashlib.sha256(source or repr(_content(asked)).encode()).hexdigest()[:16])

    @classmethod
    def from_file(cls, place: str) -> "OwnStatistic":
        """The statistic at "file.py:name". This runs the file."""
        file, _, name = place.rpartition(":")
        path = Path(file)
        if not file or not path.is_file():
            raise OptionError(f"--statistic {place}: expected FILE.py:NAME, and there is no file {file or place!r}.")
        found = vars(_run(path, place))
        if name not in found:
            there = [each for each in found if not each.startswith("_")]
            raise OptionError(
                f"--statistic {place}: {name!r} is not in {path}; there are {', '.join(there) or 'none'}."
            )
        return cls.of(name, found[name], path.read_bytes())

    def reading(self, weights: AttentionMap, tokens: Tensor) -> Reading:
        """What to read from a map whose keys are these tokens, (B, S)."""
        asked: Any = self.asked
        if not isinstance(asked, Reading | Mask):
            asked = asked(tokens)
        if isinstance(asked, Mask):
            asked = weights._mass_reading(asked)
        if not isinstance(asked, Reading):
            raise OptionError(f"statistics: {self.name}(tokens) gave {brief(asked)}; expected {EXPECTED}.")
        return asked

    def checked(self, results: tuple[Tensor, ...], reading: Reading, shape: Iterable[int]) -> Tensor:
        """The numbers of a map, (B, H, queries) or (B, H, anything)."""
        B, H, T, _ = shape
        found = results[0][..., None] if results[0].dim() == 2 else results[0]
        if found.dim() != 3 or found.shape[:2] != (B, H) or (reading.by_row and found.shape[2] != T):
            last = T if reading.by_row else "any"
            raise OptionError(
                f"statistics: {self.name} gave {tuple(results[0].shape)}; expected a number for each head and "
                f"{'query' if reading.by_row else 'sample'}, (B, H, {last}) = ({B}, {H}, {last})."
            )
        return found


def own_statistics(given: Statistics | Iterable[OwnStatistic] | None) -> tuple[OwnStatistic, ...]:
    """The statistics of a call: by name, or a list of things that have a name."""
    if given is None:
        return ()
    if isinstance(given, Mapping):
        found = [OwnStatistic.of(name, asked) for name, asked in given.items()]
    elif isinstance(given, Reading | Mask | str) or not isinstance(given, Iterable):
        raise OptionError(f"statistics={brief(given)}: expected a dictionary {{name: statistic}}, or a list of them.")
    else:
        found = [each if isinstance(each, OwnStatistic) else OwnStatistic.of(_name_of(each), each) for each in given]
    names = [each.name for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"statistics: {twice!r} is there twice; pass a dictionary {{name: statistic}}.")
    return tuple(found)


def _name_of(asked: Any) -> str:
    """What a statistic in a list is called: as its function, or as its class."""
    named = asked.function if isinstance(asked, Statistic) else asked
    name = getattr(named, "name", None) or getattr(named, "__name__", None) or type(named).__name__
    if not isinstance(name, str) or not name.isidentifier():
        raise OptionError(f"statistics: {name!r} has no name of its own; pass a dictionary {{name: statistic}}.")
    return name


def _run(path: Path, place: str) -> Any:
    """The module of a file."""
    spec = importlib.util.spec_from_file_location(f"headwise_statistics_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise OptionError(f"--statistic {place}: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look there
    try:
        spec.loader.exec_module(module)
    except HeadwiseError:
        raise
    except Exception as error:
        raise OptionError(f"--statistic {place}: {path} raised {type(error).__name__}: {error}.") from error
    return module


def _content(value: Any) -> object:
    """What makes a statistic what it is, without addresses and without what a reading keeps while it reads."""
    if isinstance(value, CodeType):
        return value.co_code.hex(), value.co_names, [_content(each) for each in value.co_consts]
    if hasattr(value, "__code__"):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return _content(value.__code__), [_content(each) for each in (*(value.__defaults__ or ()), *cells)]
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, Mask | Reading):
        kept = (str, int, float, tuple, list, Mask) if isinstance(value, Reading) else (object,)
        methods = [_content(each) for each in vars(type(value)).values() if hasattr(each, "__code__")]
        own = {name: each for name, each in vars(value).items() if isinstance(each, kept) or hasattr(each, "__code__")}
        return type(value).__qualname__, methods, [(name, _content(each)) for name, each in sorted(own.items())]
    return repr(value) if isinstance(value, str | int | float | tuple | list | None) else type(value).__qualname__
