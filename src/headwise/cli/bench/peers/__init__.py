"""The table of peers, ours first. Each is built with the same weights and computes the same function."""

from functools import partial

from headwise.cli.bench.peers.by_hand import flex, hand_wired
from headwise.cli.bench.peers.keras_layer import keras
from headwise.cli.bench.peers.peer import Peer
from headwise.cli.bench.peers.textbook_rungs import heads_at_once, heads_in_a_list, ours
from headwise.cli.bench.peers.torch_layer import with_weights, without_weights
from headwise.cli.bench.peers.transformers_layers import gpt2, llama
from headwise.cli.bench.peers.x_transformers_layer import x_transformers
from headwise.errors import OptionError

OURS = "headwise"
NO_FLEX = "on CUDA only: on the CPU every length takes half a minute to compile, and there is no gradient"
PEERS = (
    Peer(OURS, ours, about="MultiHeadAttention"),
    Peer("SDPA by hand", hand_wired, about="one QKV linear, scaled_dot_product_attention"),
    Peer("FlexAttention by hand", flex, about="one QKV linear, flex_attention compiled", cuda_only=NO_FLEX),
    Peer("nn.MHA", without_weights, about="nn.MultiheadAttention, need_weights=False"),
    Peer("nn.MHA with weights", with_weights, about="nn.MultiheadAttention, need_weights=True", matrices=3),
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
    Peer("keras", keras, "keras", "MultiHeadAttention on torch"),
    Peer("textbook class", heads_at_once, about="textbook.HeadsAtOnce", matrices=3, causal_only=True),
    Peer("textbook list", heads_in_a_list, about="textbook.HeadsInAList and a linear", matrices=1, causal_only=True),
)


def named(words: str | None) -> list[Peer]:
    """The peers whose name has one of these words, separated by commas; all of them for None.

    >>> [peer.name for peer in named("headwise,gpt-2")]
    ['headwise', 'GPT-2 sdpa', 'GPT-2 eager']
    """
    if words is None:
        return list(PEERS)
    wanted = [word.strip().lower() for word in words.split(",")]
    for word in wanted:
        if not word or not any(word in peer.name.lower() for peer in PEERS):
            raise OptionError(f"--only {words}: no peer has {word!r} in its name. Known: {_names()}.")
    return [peer for peer in PEERS if any(word in peer.name.lower() for word in wanted)]


def _names() -> str:
    return ", ".join(peer.name for peer in PEERS)
