"""Tensors in files: state dicts, safetensors (one file or several) and torch files; and `atomically`.

Safetensors are read tensor by tensor, when asked for. Torch files are opened with `weights_only=True`, never otherwise.
"""

import abc
import contextlib
import errno
import io
import json
import os
import pickle
import pickletools
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from headwise.errors import CheckpointError, need

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
INDEX = ".index.json"  # ends the name of a file that says which tensor is in which shard
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
TENSOR_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
LONGEST_NAME = 1000  # characters; also the most digits of a layer's number
WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "weights")  # where training scripts put a state dict
LEGACY_PICKLES = 4  # in a torch file that is not a zip: magic number, protocol, system, and the object
# What transformers' Trainer saves beside the weights.
TRAINER_FILES = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")


class TensorSource(Mapping[str, Tensor], abc.ABC):
    """Tensors by name, read when they are asked for."""

    notes: object = None  # metadata beside the tensors that may tell which library wrote them

    @abc.abstractmethod
    def sketch(self, name: str) -> Tensor:
        """A tensor of the same shape and dtype on the meta device; no data is read."""

    @abc.abstractmethod
    def write(self, path: Path, changed: Mapping[str, Tensor]) -> None:
        """Write the same checkpoint to another path, with some tensors changed."""

    @property
    def config(self) -> dict[str, Any] | None:
        """The configuration that is stored with the tensors, if there is one."""
        return None


class StateDict(TensorSource):
    """Tensors in memory, perhaps inside the larger object that a torch file held."""

    def __init__(self, tensors: Mapping[str, Tensor], outer: Any = None) -> None:
        self.tensors, self.outer = tensors, outer
        self.origin: tuple[Path, int] | None = None  # the file that the tensors are mapped from, and its size
        self.notes = getattr(tensors, "_metadata", None)  # the versions that torch keeps beside a state dict

    def __getitem__(self, name: str) -> Tensor:
        if self.origin is not None:
            check_size_kept(*self.origin)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def sketch(self, name: str) -> Tensor:
        return torch.empty_like(self.tensors[name], device="meta")

    def write(self, path: Path, changed: Mapping[str, Tensor]) -> None:
        """Write a torch file; everything else in the object is kept."""
        _check_suffix(path, TORCH_SUFFIXES)
        tensors = OrderedDict({**self.tensors, **changed})
        if self.notes is not None:
            tensors._metadata = self.notes  # type: ignore[attr-defined]
        whole: Mapping[str, Any] = tensors
        if self.outer is not None:
            whole = {name: tensors if part is self.tensors else part for name, part in self.outer.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        atomically(path, lambda beside: torch.save(whole, beside))


class TorchShards(StateDict):
    """Several torch files and the index that says which tensor is in which."""

    def __init__(self, index: Path) -> None:
        self.index, self.places = index, _places(index)
        shards = {path: _torch_file(path) for path in dict.fromkeys(self.places.values())}
        _check_index(self.places, shards)
        super().__init__({name: shards[path][name] for name, path in self.places.items()})

    def write(self, path: Path, changed: Mapping[str, Tensor]) -> None:
        """Write a folder with the shards, the index and the configuration."""
        _make_folder(path)
        for shard in dict.fromkeys(self.places.values()):
            tensors = {name: changed.get(name, self[name]) for name in self if self.places[name] == shard}
            atomically(path / shard.name, lambda beside, tensors=tensors: torch.save(tensors, beside))  # type: ignore[misc]
        _copy_beside(self.index, path)


class Safetensors(TensorSource):
    """One or several safetensors files; `places` says which tensor is in which."""

    def __init__(self, places: Mapping[str, Path], index: Path | None = None) -> None:
        self.places, self.index = places, index
        self.open = {path: self._open(path) for path in dict.fromkeys(places.values())}
        self.sizes = {path: path.stat().st_size for path in self.open}

    @classmethod
    def of_file(cls, path: Path) -> "Safetensors":
        """A single file."""
        return cls(dict.fromkeys(cls._open(path).keys(), path))

    @classmethod
    def of_index(cls, path: Path) -> "Safetensors":
        """The shards that an index names, in the same folder."""
        found = cls(_places(path), path)
        _check_index(found.places, found.open)
        return found

    @staticmethod
    def _open(path: Path) -> Any:
        safetensors = need("safetensors", "save", "safetensors files")
        try:
            return safetensors.safe_open(str(path), framework="pt", device="cpu")
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}.") from error

    def __getitem__(self, name: str) -> Tensor:
        path = self.places[name]
        check_size_kept(path, self.sizes[path])
        return self.open[path].get_tensor(name)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def sketch(self, name: str) -> Tensor:
        path = self.places[name]
        check_size_kept(path, self.sizes[path])
        part = self.open[path].get_slice(name)
        return torch.empty(part.get_shape(), dtype=DTYPES.get(part.get_dtype(), torch.uint8), device="meta")

    @property
    def config(self) -> dict[str, Any] | None:
        """The sizes of a model that `examples/train_gpt.py` wrote."""
        metadata = next(iter(self.open.values())).metadata() or {}
        if "format" not in metadata or "config" not in metadata:
            return None
        try:
            return {"model_type": metadata["format"], **json.loads(metadata["config"])}
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"the configuration in {next(iter(self.open))} is not JSON: {error}.") from error

    def write(self, path: Path, changed: Mapping[str, Tensor]) -> None:
        """Write one file; or a folder with the shards, the index and the configuration."""
        if self.index is None:
            origin = next(iter(self.open))
            path = path / origin.name if path.is_dir() else path
            _check_suffix(path, (".safetensors",))
            self._write_file(origin, path, changed)
            return
        _make_folder(path)
        for shard in self.open:
            self._write_file(shard, path / shard.name, changed)
        _copy_beside(self.index, path)

    def _write_file(self, origin: Path, path: Path, changed: Mapping[str, Tensor]) -> None:
        save_file = need("safetensors.torch", "save", "safetensors files").save_file
        tensors = {name: changed.get(name, self[name]).contiguous() for name in self if self.places[name] == origin}
        path.parent.mkdir(parents=True, exist_ok=True)
        atomically(path, lambda beside: save_file(tensors, str(beside), metadata=self.open[origin].metadata()))


# Opening ------------------------------------------------------------------------------------------------------------


def open_tensors(source: object) -> TensorSource:
    """The tensors of a file, a model's folder, a state dict or a module."""
    if isinstance(source, nn.Module):
        return StateDict(_tensors(source.state_dict(), f"the state dict of {type(source).__name__}"))
    if isinstance(source, Mapping):
        return _unwrapped(source, "the dictionary")
    if not isinstance(source, str | Path):
        raise CheckpointError(
            f"a {type(source).__name__} is given; expected a path to .safetensors, .pt or a model's folder, a state "
            f"dict, or a module."
        )
    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    found = _open_file(weights_in(path) if path.is_dir() else path)
    longest = max(found, key=len, default="")
    if len(longest) > LONGEST_NAME:
        raise CheckpointError(
            f"{path} has a tensor whose name is {len(longest):,} characters long, beginning with {longest[:60]!r}; "
            f"expected at most {LONGEST_NAME}."
        )
    return found


def config_of(source: object) -> dict[str, Any] | None:
    """The configuration of what `open_tensors` opens: a module's own, or the config.json beside the weights."""
    if isinstance(source, nn.Module):
        described = getattr(getattr(source, "config", None), "to_dict", None)
        return described() if callable(described) else None
    if not isinstance(source, str | Path):
        return None
    path = Path(source)
    config = (path if path.is_dir() else path.parent) / "config.json"
    return _json(config) if config.is_file() else None


def weights_in(folder: Path) -> Path:
    """The weights in a model's folder: one file, or the index of several. What a Trainer saves beside is ignored."""
    files = [path for path in sorted(folder.iterdir()) if not path.name.startswith(TRAINER_FILES)]
    indexes = {suffix: [path for path in files if path.name.endswith(suffix + INDEX)] for suffix in TENSOR_SUFFIXES}
    alone = {suffix: [path for path in files if path.suffix == suffix] for suffix in TENSOR_SUFFIXES}
    torch_files = [path for suffix in TORCH_SUFFIXES for path in alone[suffix]]
    found = indexes[".safetensors"] or alone[".safetensors"] or indexes[".bin"] or torch_files
    if not found:
        refuse_gguf(folder)
    if len(found) != 1:
        what = "no weights" if not found else f"several: {', '.join(path.name for path in found)}"
        raise CheckpointError(
            f"{folder} holds {what}; expected one file of weights (model.safetensors, "
            f"model.safetensors.index.json, pytorch_model.bin, a .pt file). If there are several, name the file itself."
        )
    check_regular(found[0])
    return found[0]


def check_regular(path: Path) -> None:
    """Raise if the path is a pipe or a device, which could make a reader wait forever."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file; expected a regular file, not a folder, pipe or device.")


def refuse_gguf(path: Path) -> None:
    """Raise if the path is a GGUF file or a folder with one, and say how to convert it."""
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path] if path.suffix == ".gguf" else []
    if not files:
        return
    file = files[0]
    command = (
        f"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"[x.from_pretrained({str(file.parent)!r}, gguf_file={file.name!r}).save_pretrained({file.stem!r}) "
        f"for x in (M, T)]"
    )
    raise CheckpointError(
        f"{file} is a GGUF file, whose quantized weights headwise does not read. Get the model as safetensors, or "
        f'convert it with transformers (pip install transformers gguf): python -c "{command}"'
    )


def check_size_kept(path: Path, size: int) -> None:
    """Raise if a mapped file has become shorter or longer: reading beyond its end would end the process."""
    now = path.stat().st_size if path.is_file() else 0
    if now != size:
        raise CheckpointError(f"{path} had {size:,} bytes when it was opened and has {now:,} now; open it again.")


def _open_file(path: Path) -> TensorSource:
    refuse_gguf(path)
    check_regular(path)
    if path.name.endswith(".safetensors" + INDEX):
        return Safetensors.of_index(path)
    if path.name.endswith(INDEX):
        return TorchShards(path)
    if path.suffix == ".safetensors":
        return Safetensors.of_file(path)
    if path.suffix in TORCH_SUFFIXES:
        return _torch_file(path)
    raise CheckpointError(
        f"{path}: expected .safetensors, .pt, .pth, .bin or .ckpt, the index of several (.safetensors.index.json, "
        f".bin.index.json), or a folder with one of them."
    )


def _places(index: Path) -> dict[str, Path]:
    """Which tensor is in which shard, as an index says; the shards are in the same folder."""
    named = _json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise CheckpointError(f'{index} has no "weight_map" from tensors to files.')
    for shard in named.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} names the shard {shard!r}; expected a file in the same folder.")
    places = {name: index.parent / shard for name, shard in named.items()}
    missing = sorted({place.name for place in places.values() if not place.is_file()})
    if missing:
        raise CheckpointError(f"{index.name} names {', '.join(missing)}, which is not in {index.parent}.")
    return places


def _check_index(places: Mapping[str, Path], shards: Mapping[Path, Any]) -> None:
    """Raise unless every shard holds exactly the tensors that the index says."""
    for path, shard in shards.items():
        held, named = set(shard.keys()), {name for name, place in places.items() if place == path}
        if held != named:
            less, more = sorted(named - held), sorted(held - named)
            what = f"does not hold {less[0]}" if less else f"holds {more[0]}, which the index does not name"
            raise CheckpointError(f"{path.name} {what}: the index and the files do not belong together.")


def _torch_file(path: Path) -> StateDict:
    """A torch file, opened without running code; the state dict may be inside a larger object."""
    _check_growth(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, or is not a torch file: reading it would run code from the file. If you "
            f"trust it, load it yourself and save its state dict as safetensors."
        ) from error
    except (RuntimeError, EOFError, OSError, LookupError, ValueError, struct.error, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read as a torch file: {reason}.") from error
    found = _unwrapped(loaded, str(path))
    found.origin = (path, path.stat().st_size)
    for name, tensor in found.tensors.items():
        claimed, stored = tensor.numel() * tensor.itemsize, _stored_bytes(tensor)
        if claimed > stored:
            raise CheckpointError(f"{path}: {name} would grow from {stored:,} bytes in the file to {claimed:,}.")
    return found


def _stored_bytes(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        raise CheckpointError(f"a tensor of the layout {tensor.layout} is in the file; expected dense tensors.")
    return tensor.untyped_storage().nbytes()


def _check_growth(path: Path) -> None:
    """Raise if reading a torch file would need much more memory than the file has bytes."""
    size = path.stat().st_size
    try:
        if _is_zip(path):
            with zipfile.ZipFile(path) as archive:
                parts = archive.infolist()
                grown = sum(part.file_size for part in parts)
                if grown > size or any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                    raise CheckpointError(
                        f"{path} is compressed: its {size:,} bytes would become {grown:,}. Files of torch.save are not "
                        f"compressed. If you trust it, unpack it and save its state dict again."
                    )
                pickles = [archive.read(part) for part in parts if part.filename.endswith("data.pkl")]
                found = any(_allocates(io.BytesIO(data)) for data in pickles)
        else:
            with path.open("rb") as file:
                found = any(_allocates(file) for _ in range(LEGACY_PICKLES))
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, ValueError, LookupError) as error:
        if isinstance(error, CheckpointError):
            raise
        return  # torch says what is wrong with it
    if found:
        raise CheckpointError(f"{path} asks for an empty buffer of any size, which no state dict needs.")


def _allocates(file: IO[bytes]) -> bool:
    """Whether a pickle makes a bytearray: a few bytes in the file can ask for all memory."""
    texts: set[object] = set()
    for code, argument, _ in pickletools.genops(file):
        texts.add(argument if isinstance(argument, str) else None)
        if code.name == "GLOBAL" and str(argument).endswith(" bytearray"):
            return True
        if code.name == "STACK_GLOBAL" and "bytearray" in texts:
            return True
    return False


def _unwrapped(loaded: object, where: str) -> StateDict:
    """A state dict, or the one inside what a training script saved."""
    if isinstance(loaded, Mapping):
        for name in WRAPPERS:
            if isinstance(inner := loaded.get(name), Mapping):
                return StateDict(_tensors(inner, f"{where}, {name!r}"), loaded)
    return StateDict(_tensors(loaded, where))


def _is_zip(path: Path) -> bool:
    """Whether torch can map the file into memory instead of reading it."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _tensors(found: object, where: str) -> Mapping[str, Tensor]:
    """`found`, refused unless it is a state dict."""
    whole = isinstance(found, Mapping) and found and all(isinstance(x, Tensor) for x in found.values())
    if not isinstance(found, Mapping) or not whole or not all(isinstance(name, str) for name in found):
        kinds = sorted({type(x).__name__ for x in found.values()}) if isinstance(found, Mapping) else []
        held = f" of {', '.join(kinds)}" if kinds else ""
        raise CheckpointError(
            f"{where} is a {type(found).__name__}{held}; expected a state dict (names to tensors), or one under "
            f"{', '.join(map(repr, WRAPPERS))}."
        )
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}; expected a JSON object.")
    return found


def _check_suffix(path: Path, suffixes: tuple[str, ...]) -> None:
    if path.suffix not in suffixes or path.is_dir():
        raise CheckpointError(f"{path}: this checkpoint is written as a {' or '.join(suffixes)} file.")


def _make_folder(path: Path) -> None:
    if path.is_file() or path.suffix:
        raise CheckpointError(f"{path}: this checkpoint is several files; name a folder to write them into.")
    path.mkdir(parents=True, exist_ok=True)


def _copy_beside(index: Path, folder: Path) -> None:
    """Copy the index of the shards, and the configuration beside it, into another folder."""
    for origin in (index, index.parent / "config.json"):
        copy = folder / origin.name
        if origin.is_file() and not (copy.exists() and copy.samefile(origin)):
            shutil.copyfile(origin, copy)


# Writing ------------------------------------------------------------------------------------------------------------


def atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file completely or not at all: `write` makes a temporary file beside it, which then replaces it.

    If writing fails or the process is killed, the old file stays. When this returns, the new file is on disk, even if
    the machine then loses power. Devices and pipes are written to directly.
    """
    path = path.resolve() if path.is_symlink() and path.is_file() else path
    if (path.exists() and not path.is_file()) or path.parent == Path("/dev"):
        write(path)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(beside)
        sync(beside)
        beside.replace(path)
        sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes that lock the same folder waiting; where a system has no such locks, nothing waits."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):  # some network folders cannot be locked
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: str | bytes) -> None:
    """Write a file atomically and wait until it is on disk."""
    data = content.encode("utf-8") if isinstance(content, str) else content

    def write(beside: Path) -> None:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)

    atomically(path, write)


def sync(path: Path) -> None:
    """Wait until a file, or the list of the files in a folder, is on disk."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return  # Windows cannot sync a folder
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without it
            raise
    finally:
        os.close(descriptor)
