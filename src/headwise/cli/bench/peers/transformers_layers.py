"""The attention of GPT-2 and of Llama as transformers has it, on its eager and its sdpa path."""

import torch
from torch import Tensor, nn

from headwise.cli.bench.peers.peer import fill, load
from headwise.cli.bench.setting import Setting, Weights
from headwise.reference import Linear

MODELS = "transformers.models"


class TransformersLayer(nn.Module):
    """One attention module, called as its model calls it. The eager path needs a mask, which is made once."""

    mask: Tensor | None

    def __init__(self, module: nn.Module, setting: Setting, tokens: int, path: str) -> None:
        super().__init__()
        self.module, self.causal = module, setting.causal
        mask = None
        if path == "eager" and setting.causal:
            lowest = torch.finfo(setting.torch_dtype).min  # transformers' own minus infinity
            mask = torch.full((1, 1, tokens, tokens), lowest, dtype=setting.torch_dtype).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, T, E) to (B, T, E), and the weights of every head (B, H, T, T) on the eager path."""
        T = x.shape[1]
        mask = None if self.mask is None else self.mask[..., :T, :T]
        output, weights = self.module(x, attention_mask=mask, is_causal=self.causal, **self.more(x))
        return output, weights

    def more(self, _x: Tensor) -> dict[str, object]:
        """What else the module is called with."""
        return {}

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        return self.both(x)[0]


class LlamaLayer(TransformersLayer):
    """Llama turns queries and keys by their position. Here by no angle: the work is done, the numbers stay."""

    cos: Tensor
    sin: Tensor

    def __init__(self, module: nn.Module, setting: Setting, tokens: int, path: str) -> None:
        super().__init__(module, setting, tokens, path)
        cos = torch.ones(1, tokens, setting.head_dim, dtype=setting.torch_dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", torch.zeros_like(cos), persistent=False)

    def more(self, x: Tensor) -> dict[str, object]:
        """Cosines and sines."""
        T = x.shape[1]
        return {"position_embeddings": (self.cos[:, :T], self.sin[:, :T])}


def gpt2(setting: Setting, weights: Weights, tokens: int, path: str) -> TransformersLayer:
    """GPT2Attention. Its matrices stand the other way round."""
    config = load("transformers").GPT2Config(
        n_embd=setting.d_model,
        n_head=setting.heads,
        n_positions=tokens,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        attn_implementation=path,
    )
    module = load(f"{MODELS}.gpt2.modeling_gpt2").GPT2Attention(config, layer_idx=0)
    for convolution, given in ((module.c_attn, weights.fused), (module.c_proj, weights.out)):
        fill(convolution, Linear(given.weight.T, given.bias))
    return TransformersLayer(module, setting, tokens, path)


def llama(setting: Setting, weights: Weights, tokens: int, path: str) -> TransformersLayer:
    """LlamaAttention with biases, which a Llama has not but may have."""
    config = load("transformers").LlamaConfig(
        hidden_size=setting.d_model,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.heads,
        head_dim=setting.head_dim,
        max_position_embeddings=tokens,
        attention_bias=True,
        attn_implementation=path,
    )
    module = load(f"{MODELS}.llama.modeling_llama").LlamaAttention(config, layer_idx=0)
    for linear, given in zip((module.q_proj, module.k_proj, module.v_proj, module.o_proj), weights, strict=True):
        fill(linear, given)
    return LlamaLayer(module, setting, tokens, path)
