"""The samples that a study reads: tokens, or keyword arguments of a model, checked and taken one by one."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.shapes import brief

Inputs = Tensor | Mapping[str, Any]


def first_tensor(inputs: Any, verb: str) -> Tensor:
    """The tensor whose rows are the samples of some inputs; errors begin with `verb`."""
    if isinstance(inputs, Tensor) and inputs.dim():
        return inputs
    if not isinstance(inputs, Mapping):
        raise OptionError(
            f"{verb}(tokens={brief(inputs)}): expected token ids (B, T), such as model.tokens(text), or keyword "
            f"arguments of the model."
        )
    for x in inputs.values():
        if isinstance(x, Tensor) and x.dim():
            return x
    raise OptionError(f"{verb}: the inputs hold no tensor; pass tokens (B, T), or a tokenizer's output as tensors.")


def samples_of(inputs: Any, verb: str) -> int:
    """How many samples some inputs have."""
    return first_tensor(inputs, verb).shape[0]


def taken(inputs: Inputs, samples: Tensor, count: int) -> Any:
    """These samples of the inputs, of which there are `count`."""
    if isinstance(inputs, Tensor):
        return inputs[samples.to(inputs.device)]
    return {
        name: x[samples.to(x.device)] if isinstance(x, Tensor) and x.dim() and x.shape[0] == count else x
        for name, x in inputs.items()
    }


def token_ids(inputs: Any) -> Tensor | None:
    """The token ids (B, T) among some inputs, if there are any."""
    ids = inputs if isinstance(inputs, Tensor) else inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    return ids if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point() else None


def token_embedding(model: nn.Module) -> Any:
    """The module that turns token ids into vectors, or None."""
    try:
        found = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # transformers' models that read no tokens
        found = None
    return found if found is not None else next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)


def check_tokens(model: nn.Module, inputs: Any, verb: str) -> None:
    """Raise if token ids are outside the model's vocabulary."""
    ids, embedding = token_ids(inputs), token_embedding(model)
    size = getattr(embedding, "num_embeddings", None)
    if ids is None or not isinstance(size, int) or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise OptionError(
            f"{verb}: token {low if low < 0 else high} is outside the model's vocabulary, from 0 to {size - 1}. Was "
            f"the text encoded with another model's tokenizer?"
        )


def without_cache(model: nn.Module, inputs: Any) -> dict[str, bool]:
    """The argument with which a model keeps no cache, if it takes one and the inputs do not say."""
    known = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False} if known and not (isinstance(inputs, Mapping) and "use_cache" in inputs) else {}


def run(model: nn.Module, inputs: Inputs, **options: Any) -> Any:
    """What the model makes of the inputs, without a cache if it would keep one."""
    options |= without_cache(model, inputs)
    return model(inputs, **options) if isinstance(inputs, Tensor) else model(**inputs, **options)


def closeness(x: Tensor) -> float:
    """How far apart numbers of this dtype may be, relative to the largest, and count as equal; norms and activations of
    float64 models often compute in float32."""
    return 1e-3 if x.dtype in (torch.float32, torch.float64) else 3e-2
