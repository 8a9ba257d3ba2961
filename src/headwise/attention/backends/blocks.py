"""Query blocks on the CPU: each block is multiplied only with keys it can see.

torch's CPU kernel walks over keys in steps of 512 and skips nothing under a bias, so causal attention over 512 tokens
and every sliding window compute many hidden scores. In blocks, hidden keys are sliced away. For short bfloat16
sequences two matrix products and a softmax beat the kernel, but they round scores to bfloat16, so they are used only if
`torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)` allows it. `TABLE` holds what was measured and alone
decides.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.base import BEYOND_SDPA, Backend, Call, repeat_heads
from headwise.masks import Causal, Mask
from headwise.masks.lowering import simplify


class Rule(NamedTuple):
    """Sequences of `shortest` to `longest` queries run in blocks of `rows` by `engine`, if there are enough in all."""

    engine: str  # "fused": torch's kernel per block; "products": matmul, softmax, matmul
    shortest: int
    longest: int
    rows: int
    queries: int = 0  # B·H·T from which blocks save more than they cost


# Measured by benchmarks/cpu_blocks.py on 2 Zen 4 cores with torch 2.13: time against one call of torch's kernel.
TABLE = {
    # (bfloat16?, what hides keys)
    # T = 512: 0.81×, with backward 0.84×; later torch skips too
    (False, "causal"): Rule("fused", 384, 639, 128, 6000),
    # T = 128: 0.53×, with backward 0.34×; T = 512: 0.54×, 0.48×
    (True, "nothing"): Rule("products", 48, 512, 512, 512),
    # T = 128: 0.62×, 0.30×; T = 512: 0.47×, 0.48×
    (True, "causal"): Rule("products", 48, 512, 128, 1536),
    # T = 512: window(128) 0.34×, 0.32×; with padding 0.70×, 0.58×
    (True, "mask"): Rule("products", 48, 512, 128, 1536),
}  # "products" round scores to bfloat16. They would win up to T = 1024, but no row longer than 512 is ever rounded.
SHORTEST = min(rule.shortest for rule in TABLE.values())
# Masks that torch accepts only as a bias, under which it skips nothing: windows, padding or documents with causal.
BIASED = (
    Rule("fused", 64, 511, 128, 4096),
    Rule("fused", 512, 1023, 128),  # T = 512: window(128) 0.6×, causal & padding 0.85×
    Rule("fused", 1024, 2**62, 256),  # T = 2048: 0.2×, 0.6×; T = 4096: window(1024) 0.25×
)
WORTHWHILE = 0.7  # BIASED pays if at most this share of the T×S grid is left
PRODUCT_BYTES = 2**27  # all scores of a call by "products", which are kept for the backward pass


class QueryBlocks(Backend):
    """Query blocks, each with the keys it sees."""

    name = "blocks"
    summary = "query blocks that skip hidden keys, on the CPU"

    def refuses(self, call: Call) -> str | None:
        query = call.query
        if not query.is_cpu:
            return "it is for the CPU"
        if torch.compiler.is_compiling():  # first, because looking at a length would fix it into the graph
            return "blocks would fix the length into a compiled graph"
        if query.size(2) < SHORTEST:
            return "there are too few queries for blocks to pay"
        rule = choose_rule(call)
        return rule if isinstance(rule, str) else None

    def run(self, call: Call) -> Tensor:
        rule = choose_rule(call)
        assert isinstance(rule, Rule)  # noqa: S101 - refuses() has checked
        return in_blocks(call, rule)


def in_blocks(call: Call, rule: Rule) -> Tensor:
    """What every head reads, (B, H, T, Dv), computed block by block."""
    if rule.engine == "fused" and call.uneven:
        return in_blocks(call.even(), rule)[..., : call.value.size(3)]
    T, S = call.query.shape[2], call.key.shape[2]
    call = call._replace(scoring=call.scoring.simplified(T, S))
    mask = call.scoring.mask
    attend = by_products if rule.engine == "products" else by_fused
    outputs, known = [], dict[tuple[int, ...], Tensor | None]()
    for start in range(0, T, rule.rows):
        rows = slice(start, min(start + rule.rows, T))
        lo, hi = (0, S) if mask is None else mask.key_range(rows.start, rows.stop, T, S)
        if lo == hi:  # a block that sees nothing gets one key, which is hidden
            lo, hi = min(lo, S - 1), min(lo, S - 1) + 1
        bias = block_bias(call, rows, slice(lo, hi), known)
        outputs.append(attend(call, rows, slice(lo, hi), bias).transpose(1, 2))  # (B, t, H, Dv)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).transpose(1, 2)


def choose_rule(call: Call) -> Rule | str:
    """The rule for this call, or why there is none."""
    query, key, value, scoring, dropout = call
    if query.numel() == 0 or value.numel() == 0:
        return "an axis has size 0"
    if scoring.beyond_sdpa:
        return BEYOND_SDPA
    B, H, T, _ = query.shape
    S = key.shape[2]
    mask = simplify(scoring.mask, T, S)
    half, hiding = query.dtype == torch.bfloat16, what_hides(mask, scoring.bias, T, S)
    rule = None if half and not may_round() else TABLE.get((half, hiding))
    if rule is not None and rule.shortest <= T <= rule.longest and rule.longest >= S and rule.queries <= B * H * T:
        size = B * H * T * S * query.element_size()
        if rule.engine == "products" and size > PRODUCT_BYTES:
            return f"the scores take {size >> 20} MiB in all, more than the limit of {PRODUCT_BYTES >> 20} MiB"
        if rule.engine == "products" or not dropout:
            return rule
    if mask is None:
        return "no mask hides anything, so no block can be skipped"
    if dropout:
        return "torch's CPU kernel does not support dropout"
    if hiding == "causal":
        return "torch's own causal kernel is faster at this size"
    rule = next((rule for rule in BIASED if rule.shortest <= T <= rule.longest), None)
    if rule is not None and rule.queries > B * H * T:
        return "there are too few queries over all heads for blocks to pay"
    if rule is None or share_left(mask, T, S, rule.rows) > WORTHWHILE:
        return "the mask leaves most keys of a block visible"
    return rule


def may_round() -> bool:
    """Whether torch's switch allows attention to round scores to half precision, which is faster; not by default."""
    return bool(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())


def what_hides(mask: Mask | None, bias: Tensor | None, T: int, S: int) -> str:
    """What hides keys: "nothing", "causal" if torch's own flag expresses it, or "mask"."""
    if mask is None:
        return "nothing"
    return "causal" if type(mask) is Causal and T == S and bias is None else "mask"


def share_left(mask: Mask, T: int, S: int, rows: int) -> float:
    """The share of the T×S grid that blocks of `rows` rows would compute."""
    starts = range(0, T, rows)
    spans = (mask.key_range(start, min(start + rows, T), T, S) for start in starts)
    return sum(hi - lo for lo, hi in spans) / (len(starts) * S)


def block_bias(call: Call, rows: slice, cols: slice, known: dict[tuple[int, ...], Tensor | None]) -> Tensor | None:
    """What to add to the scores of one block. Under a banded mask, blocks at the same offset share one tensor."""
    query, S, scoring = call.query, call.key.shape[2], call.scoring
    if scoring.mask is None or scoring.bias is not None or not scoring.mask.banded:
        return scoring.additive(query, S, rows, cols)
    place = (rows.stop - rows.start, rows.start - cols.start, cols.stop - cols.start)
    if place not in known:
        known[place] = scoring.additive(query, S, rows, cols)
    return known[place]


def by_fused(call: Call, rows: slice, cols: slice, bias: Tensor | None) -> Tensor:
    """One block through torch's fused kernel."""
    query, key, value = call.query[:, :, rows], call.key[:, :, cols], call.value[:, :, cols]
    scale, grouped = call.scoring.scale, call.grouped
    return F.scaled_dot_product_attention(query, key, value, bias, scale=scale, enable_gqa=grouped)


def by_products(call: Call, rows: slice, cols: slice, bias: Tensor | None) -> Tensor:
    """One block as matmul, softmax, matmul. Scores are rounded to the query's dtype, as plain PyTorch does."""
    query = call.query[:, :, rows]
    B, H, t, D = query.shape
    key, value = repeat_heads(call.key[:, :, cols], H), repeat_heads(call.value[:, :, cols], H)
    s, Dv, scale = key.shape[2], value.shape[3], call.scoring.scale_for(D)
    empty = None
    if bias is not None and call.scoring.may_empty_a_row(call.query.shape[2], call.key.shape[2]):
        empty = (bias == -math.inf).all(-1, keepdim=True)
        bias = bias.masked_fill(empty, 0.0)
    start, beta = query.new_zeros(1, 1, 1), 0
    if bias is not None and bias.shape[:2] == (1, 1):  # one for all: the product itself adds it
        start, beta, bias = bias[0], 1, None
    flat_query, flat_key = query.reshape(B * H, t, D), key.reshape(B * H, s, D).transpose(1, 2)
    scores = torch.baddbmm(start, flat_query, flat_key, beta=beta, alpha=scale).view(B, H, t, s)
    scores = scores if bias is None else scores + bias
    weights = scores.softmax(-1)
    weights = weights if empty is None else weights.masked_fill(empty, 0.0)
    weights = torch.dropout(weights, call.dropout, train=True) if call.dropout > 0 else weights
    return torch.bmm(weights.view(B * H, t, s), value.reshape(B * H, s, Dv)).view(B, H, t, Dv)
