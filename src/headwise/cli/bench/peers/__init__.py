"""The peers, ours first. Each is built with the same weights and computes the same function."""

import dataclasses
from collections.abc import Callable
from functools import partial

from torch import nn

from headwise.cli.bench.peers.packages import KerasLayer, gpt2, llama, why_not, x_transformers
from headwise.cli.bench.peers.torch_layers import flex, hand_wired, heads_at_once, heads_in_a_list, ours, torch_mha
from headwise.cli.bench.workload import ProjectionWeights, Workload
from headwise.errors import OptionError

Build = Callable[[Workload, ProjectionWeights, int], nn.Module]


@dataclasses.dataclass(frozen=True)
class Peer:
    """One implementation of the layer.

    Args:
        name: its name in tables.
        build: makes the module (B, T, E) → (B, T, E) for a workload, with these weights, for this many tokens.
        package: the package it needs; torch by default.
        about: a short description.
        biases: whether its projections have biases.
        matrices: how many T×T tensors per head its forward pass holds at once; 0 for a fused kernel.
        causal_only: whether it supports only causal attention.
        cuda_only: why it runs on CUDA only.
    """

    name: str
    build: Build
    package: str = "torch"
    about: str = ""
    biases: bool = True
    matrices: int = 0
    causal_only: bool = False
    cuda_only: str | None = None

    def refuses(self, workload: Workload) -> str | None:
        """Why it cannot be measured on this workload, or None."""
        if self.causal_only and not workload.causal:
            return "it supports only causal attention"
        if self.cuda_only is not None and workload.device != "cuda":
            return self.cuda_only
        return why_not(self.package)


OURS = "headwise"
NO_FLEX = "on CUDA only: on the CPU every length takes half a minute to compile, and there is no gradient"
PEERS = (
    Peer(OURS, ours, about="MultiHeadAttention"),
    Peer("SDPA by hand", hand_wired, about="one QKV linear, scaled_dot_product_attention"),
    Peer("FlexAttention by hand", flex, about="one QKV linear, flex_attention compiled", cuda_only=NO_FLEX),
    Peer("nn.MHA", partial(torch_mha, need_weights=False), about="nn.MultiheadAttention, need_weights=False"),
    Peer(
        "nn.MHA with weights",
        partial(torch_mha, need_weights=True),
        "torch",
        "nn.MultiheadAttention, need_weights=True",
        matrices=3,
    ),
    Peer(
        "x-transformers flash",
        partial(x_transformers, flash=True),
        "x_transformers",
        "Attention(flash=True)",
        biases=False,
    ),
    Peer(
        "x-transformers",
        partial(x_transformers, flash=False),
        "x_transformers",
        "Attention(flash=False)",
        biases=False,
        matrices=4,
    ),
    Peer("GPT-2 sdpa", partial(gpt2, path="sdpa"), "transformers", "GPT2Attention"),
    Peer("GPT-2 eager", partial(gpt2, path="eager"), "transformers", "GPT2Attention", matrices=3),
    Peer("Llama sdpa", partial(llama, path="sdpa"), "transformers", "LlamaAttention, no rotation"),
    Peer("Llama eager", partial(llama, path="eager"), "transformers", "LlamaAttention, no rotation", matrices=4),
    Peer("keras", KerasLayer, "keras", "MultiHeadAttention on torch"),
    Peer("textbook class", heads_at_once, about="textbook.HeadsAtOnce", matrices=3, causal_only=True),
    Peer("textbook list", heads_in_a_list, about="textbook.HeadsInAList and a linear", matrices=1, causal_only=True),
)


def peer_named(name: str) -> Peer:
    """The peer with exactly this name."""
    return next(peer for peer in PEERS if peer.name == name)


def matching(words: str | None) -> list[Peer]:
    """The peers whose names contain one of these words, separated by commas; all of them for None.

    >>> [peer.name for peer in matching("headwise,gpt-2")]
    ['headwise', 'GPT-2 sdpa', 'GPT-2 eager']
    """
    if words is None:
        return list(PEERS)
    wanted = [word.strip().lower() for word in words.split(",")]
    for word in wanted:
        if not word or not any(word in peer.name.lower() for peer in PEERS):
            names = ", ".join(peer.name for peer in PEERS)
            raise OptionError(f"--only {words}: no peer has {word!r} in its name. Known: {names}.")
    return [peer for peer in PEERS if any(word in peer.name.lower() for word in wanted)]
