"""FlexAttention, compiled: masks that skip whole blocks, soft-cap, distances and sinks on a GPU, forward and backward.

Our masks and scorings are handed to it as functions of one score; which 128×128 blocks hold something is found from the
mask itself, strip by strip. A sink is put in afterwards: it scales a row by what it leaves over.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.backends.base import Call, Streaming
from headwise.lowering import simplify
from headwise.mask_algebra import Grid, Mask
from headwise.masks import Causal
from headwise.scoring import Scoring

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
WORTHWHILE = 2**20  # scores of one head below which a kernel is not worth compiling
STRIP_BYTES = 2**26  # of the mask, looked at in one go
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Flex(Streaming):
    """`torch.nn.attention.flex_attention`, compiled on first use."""

    name = "flex"
    summary = "torch's FlexAttention, compiled for this mask and scoring"

    def refuses(self, call: Call) -> str | None:
        """What it cannot do, and what torch's own kernels do faster."""
        query, key, value, scoring, dropout = call
        if not query.is_cuda:
            return "it is for CUDA: on the CPU it is slower than torch's attention and has no gradient"
        if torch.compiler.is_compiling():
            return "its block mask is made outside a compiled graph"
        if query.numel() == 0 or value.numel() == 0:
            return "an axis has size 0"
        if dropout:
            return "it has no dropout"
        if query.dtype not in DTYPES or query.shape[3] < 16 or max(query.shape[3], value.shape[3]) > 256:
            return "it takes heads 16 to 256 wide in 16 or 32 bit"
        if query.shape[2] * key.shape[2] < WORTHWHILE:
            return "the sequence is too short to be worth compiling a kernel for"
        mask = simplify(scoring.mask, query.shape[2], key.shape[2])
        known_to_sdpa = mask is None or isinstance(mask, Causal)
        if known_to_sdpa and scoring.bias is None and not scoring.beyond_sdpa:
            return "torch's own kernels take this as it is, and are faster"
        return None

    def run(self, call: Call) -> Tensor:
        """One compiled call."""
        return self.run_with_lse(call)[0]

    def run_with_lse(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """The kernel hands out the row log-sum-exp."""
        from torch.nn.attention.flex_attention import AuxRequest

        query, key, value, scoring, _ = call
        T, S = query.shape[2], key.shape[2]
        scoring = scoring.simplified(T, S)
        with torch._dynamo.config.patch(recompile_limit=256):
            output, aux = compiled()(
                query,
                key,
                value,
                score_mod=score_mod(scoring, query.dtype, T, S),
                block_mask=None if scoring.mask is None else block_mask(scoring.mask, T, S, query.device),
                scale=scoring.scale,
                enable_gqa=call.grouped,
                kernel_options=kernel_options(scoring, T, S),
                return_aux=AuxRequest(lse=True),
            )
        _, sinks, _ = scoring.learnable
        if sinks is None:
            return output, aux.lse.detach()
        left = torch.sigmoid(aux.lse - sinks.float()[:, None])  # what the sink leaves of a row; 0 of an empty one
        lse = torch.where(aux.lse > -torch.inf, torch.logaddexp(aux.lse, sinks.float()[:, None]), aux.lse)
        return (output * left[..., None]).to(query.dtype), lse.detach()


@functools.cache
def compiled() -> Any:
    """FlexAttention's kernels, compiled for the shapes they meet."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def kernel_options(scoring: Scoring, T: int, S: int) -> dict[str, Any]:
    """What we know of the mask and the compiler does not."""
    options: dict[str, Any] = {}
    if not scoring.may_empty_a_row(T, S):
        options["ROWS_GUARANTEED_SAFE"] = True
    if scoring.mask is not None and scoring.mask.banded:
        options["BLOCKS_ARE_CONTIGUOUS"] = True
    return options


def score_mod(scoring: Scoring, dtype: torch.dtype, T: int, S: int) -> Score | None:
    """What becomes of one score, as FlexAttention asks for it."""
    softcap = scoring.softcap
    if softcap is None and not scoring.biased:
        return None

    def mod(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        added = scoring.bias_at(Grid(batch, head, row, col, T, S), dtype) if scoring.biased else None
        return score if added is None else score + added

    return mod


def block_mask(mask: Mask, T: int, S: int, device: torch.device) -> "BlockMask":
    """The mask as FlexAttention wants it; kept while its tensors do not change, for a layer asks again and again."""
    return _block_mask(mask, T, S, device, tuple(x._version for x in mask.tensors() if not x.is_inference()))


@functools.lru_cache(maxsize=32)
def _block_mask(mask: Mask, T: int, S: int, device: torch.device, versions: tuple[int, ...]) -> "BlockMask":
    from torch.nn.attention.flex_attention import BlockMask

    some, every = occupied(mask, T, S, device)
    partial, full = some & ~every, every

    def mask_mod(batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return mask.visible(Grid(batch, head, row, col, T, S))

    return BlockMask.from_kv_blocks(
        *_ordered(partial), *_ordered(full), BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(T, S)
    )


def occupied(mask: Mask, T: int, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For every 128×128 block whether something of it is visible, and whether all is; (B or 1, H or 1, rows, cols)."""
    B, H = (1 if size is None else size for size in mask.extent[:2])
    strip = max(1, STRIP_BYTES // (B * H * S * BLOCK)) * BLOCK
    some: list[Tensor] = []
    every: list[Tensor] = []
    for start in range(0, T, strip):
        seen = mask.tile(slice(start, min(start + strip, T)), slice(None), T, S, device=device)
        rows, cols = seen.shape[2], seen.shape[3]
        room = (0, -cols % BLOCK, 0, -rows % BLOCK)
        for found, value, reduce in ((some, False, torch.any), (every, True, torch.all)):
            padded = torch.nn.functional.pad(seen, room, value=value)
            blocks = padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
            found.append(reduce(reduce(blocks, 5), 3))
    return torch.cat(some, 2), torch.cat(every, 2)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row there are, and which: those first, in order."""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts, indices.contiguous()
