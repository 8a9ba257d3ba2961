"""Peers from other packages: transformers, x-transformers and keras, and how those packages are found and imported."""

import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from headwise.cli.bench.peers.torch_layers import fill
from headwise.cli.bench.workload import ProjectionWeights, Workload
from headwise.errors import OptionError
from headwise.reference import Linear

INSTALL = "not installed: pip install 'headwise[bench]'"
MODELS = "transformers.models"


def version_of(package: str) -> str | None:
    """The version of an installed or importable package; None if there is no such package."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return metadata.version(package.replace("_", "-"))
    except metadata.PackageNotFoundError:
        found = getattr(sys.modules.get(package), "__version__", "of unknown version")
        return str(found)  # a folder on the path that no installer put there


def why_not(package: str) -> str | None:
    """Why a package cannot be used here, absent or broken; None if it can."""
    if importlib.util.find_spec(package) is None:
        return INSTALL
    try:
        load(package)
    except Exception as error:  # noqa: BLE001, RUF100 - one broken package must not stop the others
        return f"cannot be imported: {one_line(error)}"
    return None


def load(name: str) -> Any:
    """A module of another package, imported without its warnings."""
    with warnings.catch_warnings(), _keras_folder(name):
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@contextlib.contextmanager
def _keras_folder(name: str) -> Iterator[None]:
    """Set keras to torch, and keep it from writing into the home folder, while it is imported."""
    if not name.startswith("keras"):
        yield
        return
    os.environ.setdefault("KERAS_BACKEND", "torch")
    given = os.environ.get("KERAS_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KERAS_HOME"] = given or folder
        try:
            yield
        finally:
            del os.environ["KERAS_HOME"]
            os.environ.update({} if given is None else {"KERAS_HOME": given})


def one_line(error: BaseException) -> str:
    """The type of an error and its message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class TransformersLayer(nn.Module):
    """One attention module of transformers, called as its model calls it. The eager path's mask is made once."""

    mask: Tensor | None

    def __init__(self, module: nn.Module, workload: Workload, tokens: int, path: str) -> None:
        super().__init__()
        self.module, self.causal = module, workload.causal
        mask = None
        if path == "eager" and workload.causal:
            lowest = torch.finfo(workload.torch_dtype).min  # what transformers uses for minus infinity
            mask = torch.full((1, 1, tokens, tokens), lowest, dtype=workload.torch_dtype).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output (B, T, E), and on the eager path the weights of every head (B, H, T, T)."""
        T = x.shape[1]
        mask = None if self.mask is None else self.mask[..., :T, :T]
        output, weights = self.module(x, attention_mask=mask, is_causal=self.causal, **self.arguments(x))
        return output, weights

    def arguments(self, _x: Tensor) -> dict[str, object]:
        """The module's other arguments."""
        return {}

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        return self.both(x)[0]


class LlamaLayer(TransformersLayer):
    """Llama rotates queries and keys by position; here by angle 0, which does the work and keeps the numbers."""

    cos: Tensor
    sin: Tensor

    def __init__(self, module: nn.Module, workload: Workload, tokens: int, path: str) -> None:
        super().__init__(module, workload, tokens, path)
        cos = torch.ones(1, tokens, workload.head_dim, dtype=workload.torch_dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", torch.zeros_like(cos), persistent=False)

    def arguments(self, x: Tensor) -> dict[str, object]:
        """Cosines and sines."""
        T = x.shape[1]
        return {"position_embeddings": (self.cos[:, :T], self.sin[:, :T])}


def gpt2(workload: Workload, weights: ProjectionWeights, tokens: int, path: str) -> TransformersLayer:
    """GPT2Attention, which stores its matrices transposed."""
    config = load("transformers").GPT2Config(
        n_embd=workload.d_model,
        n_head=workload.heads,
        n_positions=tokens,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        attn_implementation=path,
    )
    module = load(f"{MODELS}.gpt2.modeling_gpt2").GPT2Attention(config, layer_idx=0)
    for convolution, given in ((module.c_attn, weights.fused), (module.c_proj, weights.out)):
        fill(convolution, Linear(given.weight.T, given.bias))
    return TransformersLayer(module, workload, tokens, path)


def llama(workload: Workload, weights: ProjectionWeights, tokens: int, path: str) -> TransformersLayer:
    """LlamaAttention with biases, which its configuration allows although no Llama has them."""
    config = load("transformers").LlamaConfig(
        hidden_size=workload.d_model,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.heads,
        head_dim=workload.head_dim,
        max_position_embeddings=tokens,
        attention_bias=True,
        attn_implementation=path,
    )
    module = load(f"{MODELS}.llama.modeling_llama").LlamaAttention(config, layer_idx=0)
    for linear, given in zip((module.q_proj, module.k_proj, module.v_proj, module.o_proj), weights, strict=True):
        fill(linear, given)
    return LlamaLayer(module, workload, tokens, path)


def x_transformers(workload: Workload, weights: ProjectionWeights, _tokens: int, *, flash: bool) -> nn.Module:
    """The `Attention` of x-transformers. Its projections have no biases."""
    module: nn.Module = load("x_transformers").Attention(
        workload.d_model, heads=workload.heads, dim_head=workload.head_dim, causal=workload.causal, flash=flash
    )
    for name, given in zip(("to_q", "to_k", "to_v", "to_out"), weights, strict=True):
        fill(module.get_submodule(name), given)  # type: ignore[arg-type]
    return module


class KerasLayer(nn.Module):
    """`keras.layers.MultiHeadAttention` on torch, in self-attention, on the measured device."""

    def __init__(self, workload: Workload, weights: ProjectionWeights, _tokens: int) -> None:
        super().__init__()
        self.keras, self.workload = load("keras"), workload
        if self.keras.backend.backend() != "torch":
            raise OptionError(f"keras runs on {self.keras.backend.backend()}; set KERAS_BACKEND=torch.")
        H, D, E = workload.heads, workload.head_dim, workload.d_model
        with self.keras.device(workload.device):
            self.layer = self.keras.layers.MultiHeadAttention(H, D, dtype=workload.dtype)
            self.layer.build((None, None, E), (None, None, E))
        dense = (self.layer.query_dense, self.layer.key_dense, self.layer.value_dense)
        for part, (weight, bias) in zip(dense, weights[:3], strict=True):
            _put(part, weight.T.reshape(E, H, D), None if bias is None else bias.view(H, D))
        _put(self.layer.output_dense, weights.out.weight.T.reshape(H, D, E), weights.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        with self.keras.device(self.workload.device):
            output: Tensor = self.layer(x, x, use_causal_mask=self.workload.causal)
            return output


def _put(part: object, kernel: Tensor, bias: Tensor | None) -> None:
    for name, given in (("kernel", kernel), ("bias", bias)):
        if given is not None:
            value: torch.Tensor = getattr(part, name).value
            value.data.copy_(given)
