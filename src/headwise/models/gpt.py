"""A small GPT on headwise layers: embedding, blocks, head. It uses only the public interface of headwise.

tokens (B, T) ─ embedding ─ [norm ─ attention ─ + ─ norm ─ feed-forward ─ +] × layers ─ norm ─ head ─ logits (B, T, V)
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import HeadwiseError, OptionError, ShapeError
from headwise.layer import MultiHeadAttention
from headwise.layer.cache import KVCache
from headwise.layer.positions import rotary
from headwise.masks import Mask
from headwise.shapes import check_probability, check_size


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT.

    Args:
        vocab_size: number of tokens.
        d_model: width of the residual stream.
        num_heads: heads per layer.
        num_layers: number of blocks.
        context_length: tokens of the longest text it was trained on.
        position: "rotary" rotates queries and keys; "learned" adds a vector per position to the embedding.
        start: the token that every text begins with; heads with nothing to do can attend to it.
        dropout: probability of dropping an element of what a block adds, in training.
    """

    vocab_size: int
    d_model: int = 256
    num_heads: int = 8
    num_layers: int = 7
    context_length: int = 1024
    position: str = "rotary"
    start: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "num_heads", "num_layers", "context_length"):
            check_size(name, getattr(self, name))
        if self.position not in ("rotary", "learned"):
            raise OptionError(f"position={self.position!r}: expected 'rotary' or 'learned'.")
        check_probability("dropout", self.dropout)


class FeedForward(nn.Module):
    """The feed-forward network of a block: four times as wide, then back."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        return cast(Tensor, self.down(F.gelu(self.up(x))))


class TransformerBlock(nn.Module):
    """Attention, then a feed-forward network; both add to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        position = rotary() if config.position == "rotary" else None
        self.attention = MultiHeadAttention(
            config.d_model, config.num_heads, causal=True, bias=False, position=position
        )
        self.feed_forward_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.feed_forward = FeedForward(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Mask | None = None, cache: KVCache | None = None) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask, cache=cache))
        return cast(Tensor, x + self.dropout(self.feed_forward(self.feed_forward_norm(x))))


class GPT(nn.Module):
    """A decoder that predicts the next token; `config` gives its sizes.

    >>> model = GPT(GPTConfig(vocab_size=100, d_model=32, num_heads=4, num_layers=2, context_length=64))
    >>> model(torch.tensor([[0, 5, 7]])).shape
    torch.Size([1, 3, 100])
    >>> model.generate([0, 5, 7], 4, temperature=0).shape
    torch.Size([7])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        learned = config.position == "learned"
        self.position = nn.Embedding(config.context_length, config.d_model) if learned else None
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self._make_small()

    def reset_parameters(self) -> None:
        """Draw new weights, as the constructor does. It resets every part as well, so call it last."""
        for module in self.modules():
            if module is not self and callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        self._make_small()

    def _make_small(self) -> None:
        """Use small weights, and smaller ones in layers that add to the residual stream, which then does not grow with
        depth."""
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        for name, parameter in self.named_parameters():
            if name.endswith(("out_proj.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.num_layers) ** 0.5)

    def forward(self, tokens: Tensor, mask: Mask | None = None, caches: Sequence[KVCache] | None = None) -> Tensor:
        """Logits (B, T, V) for the token after each.

        Args:
            tokens: (B, T), integers below `vocab_size`.
            mask: applied in addition to the causal mask, such as `documents(...)` for several texts in one row.
            caches: from `make_caches`; `tokens` then continue the text in them.
        """
        return self.logits(self.features(tokens, mask, caches))

    def features(self, tokens: Tensor, mask: Mask | None = None, caches: Sequence[KVCache] | None = None) -> Tensor:
        """The output of the last layer for `tokens`, (B, T, E), without computing T·V logits.

        `mask` and `caches` as in a call.
        """
        x = self.embedding(self._checked(tokens))
        if self.position is not None:
            first = 0 if caches is None else max(caches[0].lengths)
            x = x + self.position(torch.arange(first, first + tokens.shape[1], device=tokens.device))
        for index, block in enumerate(self.blocks):
            x = block(x, mask, None if caches is None else caches[index])
        return cast(Tensor, self.norm(x))

    def logits(self, features: Tensor) -> Tensor:
        """Logits (..., V) from `features` (..., E)."""
        return F.linear(features, self.embedding.weight)

    def make_caches(self, batch: int = 1) -> list[KVCache]:
        """An empty cache for every layer, for `batch` samples."""
        return [cast(TransformerBlock, block).attention.make_cache(batch) for block in self.blocks]

    def generate(self, tokens: Sequence[int] | Tensor, max_new_tokens: int, **sampling: Any) -> Tensor:
        """The `tokens` (T,) and their continuation, (T + max_new_tokens,). `sampling` as in `stream`."""
        given = torch.as_tensor(tokens)
        new = list(self.stream(given, max_new_tokens, **sampling))
        return torch.cat([given, torch.tensor(new, dtype=given.dtype)])

    @torch.no_grad()
    def stream(
        self,
        tokens: Sequence[int] | Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Iterator[int]:
        """The continuation of `tokens`, one token at a time.

        When the text outgrows the context, the model continues from the start token and the last half of the text.

        Args:
            tokens: (T,), at least one.
            max_new_tokens: how many tokens to generate.
            temperature: below 1 sharper, above 1 more random; 0 takes the most likely token.
            top_k: sample only from this many most likely tokens.
            top_p: sample only from the smallest set of tokens with this total probability.
            seed: the same seed gives the same text.
        """
        check_size("max_new_tokens", max_new_tokens)
        sampler = Sampler(temperature, top_k, top_p, seed)
        text = [int(token) for token in tokens]
        if not text:
            raise ShapeError("there are no tokens to continue; pass at least the start token.")
        spread = cast(TransformerBlock, self.blocks[0]).attention._spread
        caches, new = self._started(text)
        for _ in range(max_new_tokens):
            if max(caches[0].lengths) + len(new) > self.config.context_length:
                caches, new = self._started(text)
            token = sampler(self(torch.tensor([new], device=self.embedding.weight.device), caches=caches)[0, -1])
            token = token if spread is None else spread.agreed(token)  # ranks draw from generators of their own
            yield token
            text.append(token)
            new = [token]

    def _started(self, text: list[int]) -> tuple[list[KVCache], list[int]]:
        """Empty caches, and the tokens to read first: the whole text if it leaves room for more, else its last half."""
        room = self.config.context_length
        if len(text) >= room:
            text = [self.config.start, *text[-(room // 2) :]]
        return self.make_caches(), text

    def _checked(self, tokens: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return tokens
        if tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] == 0:
            raise ShapeError(
                f"tokens have shape {tuple(tokens.shape)} and {tokens.dtype}; expected integers (B, T), T at least 1."
            )
        if self.position is not None and tokens.shape[1] > self.config.context_length:
            raise ShapeError(
                f"{tokens.shape[1]} tokens; this model has learned positions for {self.config.context_length}."
            )
        return tokens


class Sampler:
    """Samples the next token from logits (V,), with temperature, top-k, top-p and a seed.

    >>> Sampler(temperature=0)(torch.tensor([0.0, 3.0, 1.0]))
    1
    """

    def __init__(
        self, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, seed: int | None = None
    ) -> None:
        if not 0 <= temperature < float("inf"):
            raise OptionError(f"temperature={temperature}: expected 0 or more.")
        if top_k is not None and top_k < 1:
            raise OptionError(f"top_k={top_k}: expected 1 or more.")
        if top_p is not None and not 0 < top_p <= 1:
            raise OptionError(f"top_p={top_p}: expected a probability above 0, at most 1.")
        if seed is not None and not -(2**63) <= seed < 2**64:
            raise OptionError(f"seed={seed}: expected an integer of 64 bits.")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generator = torch.Generator()  # on the CPU, so that a seed means the same on every machine
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """The sampled token."""
        if bool(logits.isnan().any()):
            raise HeadwiseError("the model gives NaN for the next token; its weights may be damaged.")
        if self.temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial(self.probabilities(logits), 1, generator=self.generator))

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution it samples from, (V,)."""
        order = torch.sort(logits.double().cpu() / self.temperature, descending=True, stable=True)
        share = order.values.softmax(0)
        if self.top_k is not None:
            share[self.top_k :] = 0
        if self.top_p is not None:
            share = share / share.sum()
            before = share.cumsum(0) - share
            share[before >= self.top_p] = 0  # the most likely token stays: nothing is before it
        return torch.zeros_like(share).scatter(0, order.indices, share / share.sum())
