"""Where the tensors of a checkpoint come from: a state dict, safetensors (one file or many), or a torch file.

Safetensors are read tensor by tensor, when asked for. Torch files are unpickled with `weights_only=True`, never else.
"""

import abc
import json
import os
import pickle
import shutil
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import CheckpointError, need

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
INDEX = ".safetensors.index.json"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "weights")


class Source(Mapping[str, Tensor], abc.ABC):
    """Names to tensors, which are read when they are asked for."""

    @abc.abstractmethod
    def sketch(self, name: str) -> Tensor:
        """A tensor of this shape and dtype without numbers, on the meta device; nothing is read."""

    @abc.abstractmethod
    def write(self, path: Path, changed: Mapping[str, Tensor]) -> None:
        """The same checkpoint at another path, with some tensors changed."""

    @property
    def notes(self) -> object:
        """What lies beside the tensors and may tell whose they are."""
        return None


class StateDict(Source):
    """Tensors in memory, maybe inside the object that a torch file held."""

    def __init__(self, tensors: Mapping[str, Tensor], outer: Any = None) -> None:
        self.tensors, self.outer = tensors, outer

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def sketch(self, name: str) -> Tensor:
        """Of a tensor that is there already."""
        return torch.empty_like(self.tensors[name], device="meta")

    def write(self, path: Path, changed: Mapping[str, Tensor]) -> None:
        """A torch file; what else the object held stays in it."""
        _check_suffix(path, TORCH_SUFFIXES)
        tensors = OrderedDict({**self.tensors, **changed})
        if self.notes is not None:
            tensors._metadata = self.notes  # type: ignore[attr-defined]
        whole: Mapping[str, Any] = tensors
        if self.outer is not None:
            whole = {name: tensors if part is self.tensors else part for name, part in self.outer.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        atomically(path, lambda beside: torch.save(whole, beside))

    @property
    def notes(self) -> object:
        """The versions torch keeps beside a state dict."""
        return getattr(self.tensors, "_metadata", None)


class Safetensors(Source):
    """One or several safetensors files; `places` says which tensor is in which."""

    def __init__(self, places: Mapping[str, Path], index: Path | None = None) -> None:
        self.places, self.index = places, index
        self.open = {path: self._open(path) for path in dict.fromkeys(places.values())}

    @classmethod
    def of_file(cls, path: Path) -> "Safetensors":
        """A single file."""
        return cls(dict.fromkeys(cls._open(path).keys(), path))

    @classmethod
    def of_index(cls, path: Path) -> "Safetensors":
        """The shards that an index names, all of them beside it."""
        places = {}
        named = _json(path).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise CheckpointError(f'{path} has no "weight_map" from tensors to files.')
        for name, shard in named.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(f"{path} names the shard {shard!r}; expected a file in the same folder.")
            places[name] = path.parent / shard
        missing = sorted({place.name for place in places.values() if not place.is_file()})
        if missing:
            raise CheckpointError(f"{path.name} names {', '.join(missing)}, which is not in {path.parent}.")
        found = cls(places, path)
        found._check_index()
        return found

    def _check_index(self) -> None:
        """Raise unless every shard holds what the index says, and nothing else."""
        for path, file in self.open.items():
            held, named = set(file.keys()), {name for name, place in self.places.items() if place == path}
            if held != named:
                less, more = sorted(named - held), sorted(held - named)
                what = f"does not hold {less[0]}" if less else f"holds {more[0]}, which the index does not name"
                raise CheckpointError(f"{path.name} {what}: the index and the files do not belong together.")

    @staticmethod
    def _open(path: Path) -> Any:
        safetensors = need("safetensors", "save", "safetensors files")
        try:
            return safetensors.safe_open(str(path), framework="pt", device="cpu")
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}.") from error

    def __getitem__(self, name: str) -> Tensor:
        return self.open[self.places[name]].get_tensor(name)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def sketch(self, name: str) -> Tensor:
        """From the header alone."""
        part = self.open[self.places[name]].get_slice(name)
        return torch.empty(part.get_shape(), dtype=DTYPES.get(part.get_dtype(), torch.uint8), device="meta")

    def write(self, path: Path, changed: Mapping[str, Tensor]) -> None:
        """One file; or a folder with the shards, the index and the configuration."""
        if self.index is None:
            origin = next(iter(self.open))
            path = path / origin.name if path.is_dir() else path
            _check_suffix(path, (".safetensors",))
            self._write_file(origin, path, changed)
            return
        if path.is_file() or path.suffix:
            raise CheckpointError(f"{path}: this checkpoint is several files; name a folder to write them into.")
        path.mkdir(parents=True, exist_ok=True)
        for shard in self.open:
            self._write_file(shard, path / shard.name, changed)
        for beside in (self.index, self.index.parent / "config.json"):
            copy = path / beside.name
            if beside.is_file() and not (copy.exists() and copy.samefile(beside)):
                shutil.copyfile(beside, copy)

    def _write_file(self, origin: Path, path: Path, changed: Mapping[str, Tensor]) -> None:
        save_file = need("safetensors.torch", "save", "safetensors files").save_file
        tensors = {name: changed.get(name, self[name]).contiguous() for name in self if self.places[name] == origin}
        path.parent.mkdir(parents=True, exist_ok=True)
        atomically(path, lambda beside: save_file(tensors, str(beside), metadata=self.open[origin].metadata()))


def open_source(source: object, with_config: bool = True) -> tuple[Source, dict[str, Any] | None]:
    """The tensors, and the configuration beside them if there is one and it is asked for."""
    if isinstance(source, nn.Module):
        described = getattr(getattr(source, "config", None), "to_dict", None)
        state = _tensors(source.state_dict(), f"the state dict of {type(source).__name__}")
        return StateDict(state), described() if callable(described) else None
    if isinstance(source, Mapping):
        return _unwrapped(source, "the dictionary"), None
    if not isinstance(source, str | Path):
        raise CheckpointError(
            f"a {type(source).__name__} is given; expected a path to .safetensors, .pt or a model's folder, a state "
            f"dict, or a module."
        )
    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    found = _in_folder(path) if path.is_dir() else path
    config = found.parent / "config.json"
    return _open_file(found), _json(config) if with_config and config.is_file() else None


def _in_folder(folder: Path) -> Path:
    """The weights in a model's folder."""
    indexes = sorted(folder.glob(f"*{INDEX}"))
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".bin", ".pt", ".pth")]
    tensors = [path for path in files if path.suffix == ".safetensors"]
    found = indexes or tensors or files
    if len(found) != 1:
        what = "no weights" if not found else f"several: {', '.join(path.name for path in found)}"
        raise CheckpointError(
            f"{folder} holds {what}; expected one .safetensors, .safetensors.index.json, .bin or .pt file. Name the "
            f"file itself."
        )
    return found[0]


def _open_file(path: Path) -> Source:
    if path.name.endswith(INDEX):
        return Safetensors.of_index(path)
    if path.suffix == ".safetensors":
        return Safetensors.of_file(path)
    if path.suffix in TORCH_SUFFIXES:
        return _torch_file(path)
    raise CheckpointError(
        f"{path}: expected .safetensors, .safetensors.index.json, .pt, .pth, .bin or .ckpt, or a folder with one of "
        f"them."
    )


def _torch_file(path: Path) -> StateDict:
    """A torch file, by the reader that runs no code; the tensors may be inside, as training scripts save them."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, or is no torch file: reading it would run code that it brings. If you "
            f"trust it, load it yourself, and save its state dict as safetensors."
        ) from error
    except (RuntimeError, EOFError, OSError, LookupError, ValueError, struct.error, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read as a torch file: {reason}.") from error
    return _unwrapped(loaded, str(path))


def _unwrapped(loaded: object, where: str) -> StateDict:
    """A state dict, or the one inside what a training script keeps."""
    if isinstance(loaded, Mapping):
        for name in WRAPPERS:
            if isinstance(inner := loaded.get(name), Mapping):
                return StateDict(_tensors(inner, f"{where}, {name!r}"), loaded)
    return StateDict(_tensors(loaded, where))


def _is_zip(path: Path) -> bool:
    """Whether torch can map the file instead of reading it."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _tensors(found: object, where: str) -> Mapping[str, Tensor]:
    """A state dict, or an error."""
    whole = isinstance(found, Mapping) and found and all(isinstance(x, Tensor) for x in found.values())
    if not isinstance(found, Mapping) or not whole or not all(isinstance(name, str) for name in found):
        kinds = sorted({type(x).__name__ for x in found.values()}) if isinstance(found, Mapping) else []
        held = f" of {', '.join(kinds)}" if kinds else ""
        raise CheckpointError(
            f"{where} is a {type(found).__name__}{held}; expected a state dict, names to tensors, or one of them under "
            f"{', '.join(map(repr, WRAPPERS))}."
        )
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}; expected an object.")
    return found


def _check_suffix(path: Path, suffixes: tuple[str, ...]) -> None:
    if path.suffix not in suffixes or path.is_dir():
        raise CheckpointError(f"{path}: this checkpoint is written as a {' or '.join(suffixes)} file.")


# Files that are there whole or not at all.


def atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file beside its place, then put it there: a failure or a kill leaves what was there.

    A device, a pipe and the like are written to as they are: nothing may take their place.
    """
    path = path.resolve() if path.is_symlink() and path.is_file() else path
    if (path.exists() and not path.is_file()) or path.parent == Path("/dev"):
        write(path)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
