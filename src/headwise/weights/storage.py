"""Maps on disk: the parts of a map in one safetensors file, with a checksum.

A file that cannot be read, is damaged or is no map is refused with a `CheckpointError` that says which.
"""

import contextlib
import ctypes
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.errors import CheckpointError, HeadwiseError, need
from headwise.masks.composite import plan_from_json, plan_to_json
from headwise.weights.source import Frame

FORMAT = "headwise map 3"


class MapParts(NamedTuple):
    """A map taken apart: its tensors by name, how they fit together, and its frame as plain numbers."""

    tensors: dict[str, Tensor]
    plan: Any
    frame: Any


def write(path: str | Path, parts: MapParts) -> None:
    """Write the parts of a map to a file."""
    safetensors = need("safetensors.torch", "save", "saved maps")
    contiguous = {name: x.clone(memory_format=torch.contiguous_format).cpu() for name, x in parts.tensors.items()}
    metadata = {
        "format": FORMAT,
        "plan": json.dumps(plan_to_json(parts.plan)),
        "frame": json.dumps(parts.frame),
    }
    metadata["checksum"] = _checksum(contiguous, metadata)
    safetensors.save_file(contiguous, str(path), metadata=metadata)


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[MapParts]:
    """The parts of a map from a file. Errors while they are put together mean that the file is broken."""
    tensors, metadata = _read_file(Path(path))
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a saved attention map: its format is {metadata.get('format')!r}, expected "
            f"{FORMAT!r}. Maps are written by weights.save(path)."
        )
    unknown = sorted({*metadata} - {"format", "plan", "frame", "checksum"})
    if unknown:
        raise CheckpointError(f"{path} is damaged, or from a later version: it has {unknown[0]!r} in its metadata.")
    if "checksum" in metadata and metadata["checksum"] != _checksum(tensors, metadata):
        raise CheckpointError(f"{path} is damaged: its checksum does not match. Save the map again.")
    try:
        yield MapParts(tensors, plan_from_json(json.loads(metadata["plan"])), json.loads(metadata["frame"]))
    except HeadwiseError:
        raise
    except Exception as error:  # a file can be wrong in as many ways as there are classes in it
        raise CheckpointError(f"{path} is a broken attention map: {error!r}.") from error


def _read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file. They are copied: a mapped file may become shorter."""
    safetensors = need("safetensors", "save", "saved maps")
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file; expected a map that weights.save(path) wrote.")
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except Exception as error:  # safetensors raises many kinds of errors
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}.") from error


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of everything that `save` writes."""
    digest = hashlib.sha256()
    for name in ("format", "plan", "frame"):
        digest.update(f"{name} {metadata.get(name)}\0".encode("utf-8", "surrogatepass"))
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        tensor = tensor.contiguous()
        if tensor.numel():  # numpy, which would give the bytes too, may not be installed
            digest.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return digest.hexdigest()


def plain_frame(frame: Frame | None) -> Any:
    """The frame as tuples of numbers."""
    if frame is None:
        return None
    axes = (tuple(x.tolist()) if isinstance(x, Tensor) else (x.start, x.stop, x.step, "range") for x in frame[:3])
    return (*axes, *frame[3:])


def frame_from(plain: Any) -> Frame | None:
    """The frame that `plain_frame` made plain."""
    if plain is None:
        return None
    batch, head, row = (
        range(*x[:3]) if len(x) == 4 and x[3] == "range" else torch.tensor(x, dtype=torch.long) for x in plain[:3]
    )
    return Frame(batch, head, row, *plain[3:])
