"""Maps on disk: one safetensors file with the tensors, and a description of the rest in its metadata."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import CheckpointError, need
from headwise.weights.map import AttentionMap, _together
from headwise.weights.map_form import apart

FORMAT = "headwise map 2"


def save(weights: AttentionMap, path: str | Path) -> None:
    """Write a map; the log-sum-exp is computed first, so that it need not be when it is read."""
    safetensors = need("safetensors.torch", "save", "saved maps")
    weights = weights.detach()
    weights._with_keys("save()")
    weights._normalised()
    leaves, (*context, _) = apart(weights)  # which ranks had the rest means nothing to a reader
    tensors = {
        name: x.clone(memory_format=torch.contiguous_format)
        for name, x in zip(_names(context, len(leaves)), leaves, strict=True)
    }
    metadata = {"format": FORMAT, "context": json.dumps(context)}
    safetensors.save_file(tensors, str(path), metadata=metadata)


def load(path: str | Path, device: torch.device | str = "cpu") -> AttentionMap:
    """Read a map."""
    safetensors = need("safetensors", "save", "saved maps")
    with safetensors.safe_open(str(path), framework="pt", device=str(device)) as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is not a saved attention map: its format is {metadata.get('format')!r}, expected {FORMAT!r}. "
                f"Maps are written by weights.save(path)."
            )
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    context = [*json.loads(metadata["context"]), None]
    return _together([tensors[name] for name in _names(context, len(tensors))], context)


def _names(context: Any, count: int) -> list[str]:
    """What the tensors of a map are called in the file, in order."""
    names = ["query", "key", *context[0]]
    return names + [f"mask.{i}" for i in range(count - len(names))]
