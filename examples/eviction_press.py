"""A press for kvpress that scores keys from attention maps: the keys that its eager press keeps, without T×T weights.

kvpress 0.5.5 needs transformers below 5.3, so give it an environment of its own:

    pip install kvpress headwise
    python examples/eviction_press.py [FOLDER of a Llama, Mistral, Phi-3 or Qwen model] [tokens]

On a model with attn_implementation="headwise", kvpress hands every press an `AttentionMap` where eager attention would
give a tensor. `eviction_scores` reads it in one pass. Without a folder, the model is a small Llama with random weights.
"""

import dataclasses
import sys
from typing import Any

import torch
import transformers
from kvpress import ObservedAttentionPress, ScorerPress
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import AttentionMaskInterface

from headwise import AttentionMap, eviction_scores
from headwise.huggingface import NAME, mask_of


def mask_by_position(cache_position: Tensor, **rest: Any) -> Any:
    """`mask_of` for transformers 5.2, which says where the queries are by a tensor instead of two numbers."""
    return mask_of(q_length=len(cache_position), q_offset=int(cache_position[0]), **rest)


if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 3):
    AttentionMaskInterface.register(NAME, mask_by_position)


@dataclasses.dataclass
class MapPress(ScorerPress):
    """Drops the keys with the lowest scores of `headwise.eviction_scores`.

    method: "h2o", "observed", "snapkv" or "dropkv".
    window: how many of the last queries "snapkv" asks.
    """

    method: str = "observed"
    window: int = 64

    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> Tensor:
        """The scores of the keys, (B, Hkv, S)."""
        if not isinstance(attentions, AttentionMap):
            raise TypeError("MapPress needs a model with attn_implementation='headwise'.")
        return eviction_scores(attentions, self.method, value=values, window=self.window)


class Recorder:
    """Remembers which keys a press keeps in every layer."""

    def __init__(self, press: ScorerPress) -> None:
        self.kept: list[Tensor] = []
        score = press.score

        def recorded(*args: Any) -> Tensor:
            scores = score(*args)
            count = int(scores.shape[-1] * (1 - press.compression_ratio))
            self.kept.append(scores.topk(count).indices.sort(-1).values)
            return scores

        press.score = recorded


def kept(model: nn.Module, press: ScorerPress, tokens: Tensor) -> list[Tensor]:
    """The keys that a press keeps, (B, Hkv, kept), for every layer."""
    recorder = Recorder(press)
    with torch.no_grad(), press(model):
        model.model(tokens)  # without the head, whose logits are not needed
    return recorder.kept


def opened(folder: str | None, implementation: str) -> nn.Module:
    """The model in evaluation."""
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation).eval()
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_hidden_layers": 3, "intermediate_size": 64}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, num_key_value_heads=2, max_position_embeddings=65536, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def main() -> None:
    """Compare the keys that both presses keep."""
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 512
    ours, eager = opened(folder, "headwise"), opened(folder, "eager")
    tokens = torch.randint(3, ours.config.vocab_size, (2, size), generator=torch.Generator().manual_seed(1))
    theirs = kept(eager, ObservedAttentionPress(compression_ratio=0.5), tokens)
    for layer, (a, b) in enumerate(zip(kept(ours, MapPress(compression_ratio=0.5), tokens), theirs, strict=True)):
        same = sum(
            len(set(x.tolist()) & set(y.tolist())) for x, y in zip(a.flatten(0, 1), b.flatten(0, 1), strict=True)
        )
        print(f"layer {layer}: {same} of {a.numel()} keys kept by both presses")
    for method in ("h2o", "snapkv", "dropkv"):
        keys = kept(ours, MapPress(compression_ratio=0.5, method=method), tokens)
        print(f"{method}: keeps {keys[0].shape[-1]} of {size} keys in {len(keys)} layers")


if __name__ == "__main__":
    main()
