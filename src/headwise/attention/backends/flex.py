"""FlexAttention, compiled: masks that skip whole blocks, soft-cap, score functions, relative positions and
sinks on a GPU.

It receives our masks and scorings as functions of one score, and the list of 128×128 blocks in which anything is
visible, which is computed from the mask strip by strip. Sinks are applied afterwards, by scaling each row.
"""

import functools
from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.attention.backends.base import Backend, Call
from headwise.attention.backends.dense import RowByRow
from headwise.masks import Causal, Grid, Mask
from headwise.masks.lowering import block_mask, simplify
from headwise.weights import Scoring
from headwise.weights.score import ScoreFunction

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

WORTHWHILE = 2**20  # scores of one head below which a kernel is not worth compiling
FIXED_LENGTHS = 8  # each one costs seconds to compile
MOST_KEPT = 32  # block masks
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class FlexKernel(Backend):
    """`torch.nn.attention.flex_attention`, compiled on first use."""

    name = "flex"
    summary = "torch's FlexAttention, compiled for this mask and scoring"

    def refuses(self, call: Call) -> str | None:
        query, key, value, scoring, dropout = call
        if not query.is_cuda:
            return "it is for CUDA: on the CPU it is slower than torch's attention and has no backward pass"
        if torch.compiler.is_compiling():
            return "its block mask must be made outside a compiled graph"
        if query.numel() == 0 or value.numel() == 0:
            return "an axis has size 0"
        if dropout:
            return "it does not support dropout"
        if query.dtype not in DTYPES or query.shape[3] < 16 or max(query.shape[3], value.shape[3]) > 256:
            return "it supports head dimensions 16 to 256 in 16 or 32 bit"
        if query.shape[2] * key.shape[2] < WORTHWHILE:
            return "the sequence is too short to be worth compiling a kernel for"
        if scoring.applied is not None and any(x.requires_grad for x in scoring.applied.learnable):
            return "the score function has a gradient, which is computed by blocks of rows"
        if scoring.applied is not None and _code(scoring.applied.called) in _unfit:
            return "it could not compile the score function"
        if scoring.bias is not None and (not scoring.beyond_sdpa or scoring.bias.requires_grad):
            return "a dense bias exists in full anyway, and torch's own kernels compute its gradient faster"
        mask = simplify(scoring.mask, query.shape[2], key.shape[2])
        if (mask is None or type(mask) is Causal) and not scoring.beyond_sdpa:
            return "torch's own kernels run this call as it is, and are faster"
        return None

    def run(self, call: Call) -> Tensor:
        return self.run_with_lse(call)[0]

    def run_with_lse(self, call: Call) -> tuple[Tensor, Tensor | None]:
        query, key, value, scoring, _ = call
        T, S = query.shape[2], key.shape[2]
        scoring = scoring.simplified(T, S)
        mod = score_mod(scoring, query.dtype, T, S)
        blocks = None if scoring.mask is None else kept_block_mask(scoring.mask, T, S, query.device)
        try:
            with torch._dynamo.config.patch(recompile_limit=256):
                output, lse = compiled(fixed_length(T, S))(query, key, value, mod, blocks, scoring.scale, call.grouped)
        except Exception as error:
            if scoring.applied is None or not _is_of_compiler(error):
                raise
            _unfit.add(_code(scoring.applied.called))  # it runs by blocks of rows
            return RowByRow().run(call), None
        _, sinks, *_ = scoring.learnable
        if sinks is None:
            return output, lse.detach()
        sink = sinks.float()[:, None]
        left = torch.sigmoid(lse - sink)  # the share that the sink leaves; 0 for a row that sees no key
        counted = torch.where(lse > -torch.inf, torch.logaddexp(lse, sink), lse)
        return (output * left[..., None]).to(query.dtype), counted.detach()


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mod: ScoreFunction | None,
    blocks: Any,
    scale: float | None,
    grouped: bool,
) -> tuple[Tensor, Tensor]:
    """Output and row log-sum-exp. A separate function, because torch.compile counts recompilations per function."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    output, aux = flex_attention(query, key, value, mod, blocks, scale, grouped, return_aux=AuxRequest(lse=True))
    return output, aux.lse  # type: ignore[return-value]


@functools.cache
def compiled(fixed: bool) -> Any:
    """The kernel compiled for each length, or once for all lengths, which is up to 1.5 times slower."""
    return torch.compile(fused, dynamic=not fixed, fullgraph=True)


_lengths: set[tuple[int, int]] = set()
_unfit: set[int] = set()  # score functions that could not be compiled


def _code(function: ScoreFunction) -> int:
    """The same number for all functions made by one line of code."""
    return id(getattr(function, "__code__", function))


def _is_of_compiler(error: Exception) -> bool:
    """Whether torch could not compile something, rather than run it."""
    modules = {kind.__module__.partition(".exc")[0] for kind in type(error).__mro__}
    return bool(modules & {"torch._dynamo", "torch._inductor"})


def fixed_length(T: int, S: int) -> bool:
    """Whether to compile for this length alone, as is done for the first few lengths of a program."""
    if (T, S) not in _lengths and len(_lengths) < FIXED_LENGTHS:
        _lengths.add((T, S))
    return (T, S) in _lengths


def score_mod(scoring: Scoring, dtype: torch.dtype, T: int, S: int) -> ScoreFunction | None:
    """The change to one score, in the form FlexAttention expects."""
    softcap = scoring.softcap
    if not scoring.biased and scoring.linear:
        return None

    def mod(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        grid = Grid(batch, head, row, col, T, S)
        score = scoring.changed(score, grid)
        added = scoring.bias_at(grid, dtype) if scoring.biased else None
        return score if added is None else score + added

    return mod


_kept: "OrderedDict[Any, tuple[Mask, BlockMask]]" = OrderedDict()


def kept_block_mask(mask: Mask, T: int, S: int, device: torch.device) -> "BlockMask":
    """The mask in FlexAttention's form. The last few are kept, since a layer uses the same one again and again."""
    place = (fingerprint(mask), T, S, device)
    if place not in _kept:
        _kept[place] = (mask, block_mask(mask, T, S, device=device))  # the mask stays alive, and with it every id
        while len(_kept) > MOST_KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(place)
    return _kept[place][1]


def fingerprint(x: Any) -> Any:
    """Equal for masks that hide the same: of one class, with the same values and the same unchanged tensors."""
    if isinstance(x, Mask):
        return type(x), tuple((name, fingerprint(value)) for name, value in sorted(vars(x).items()))
    if isinstance(x, Tensor):
        return id(x), None if x.is_inference() else x._version
    return x if isinstance(x, Hashable) else id(x)
