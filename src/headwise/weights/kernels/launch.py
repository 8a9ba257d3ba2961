"""Launches the kernels: what they support, their arguments, and their block sizes."""

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from headwise.masks import Mask
from headwise.masks.lowering import simplify
from headwise.weights.counting import code_reach, equal_codes
from headwise.weights.kernels.tile import FIRST, LEFT, RIGHT, STOP
from headwise.weights.kernels.walk import CUT, EVERYWHERE, NARROW, WIDE, walk_kernel
from headwise.weights.kernels.weights import weights_kernel
from headwise.weights.memory import BoundedMemory
from headwise.weights.source import Source
from headwise.weights.structure import FAR, Structure, structure_of

WIDEST = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WARP_ROWS = 16  # rows of a matrix product that one warp holds
NEAR = 256  # a rule that allows at most so many keys to a query is narrow, and so is one that allows a quarter of them
MOST_CELLS = 2**15  # along one side of a picture
Codes = tuple[Tensor, Tensor]  # of queries (B or 1, T) and keys (B or 1, S): a query may see a key if they are equal
memory = BoundedMemory()


class LaunchBlocks(NamedTuple):
    """Block sizes along the program's axis and along the walk, and resources of one launch."""

    own: int
    walk: int
    warps: int
    stages: int


# Blocks for 16-bit inputs and heads up to 64, 128 and 256 wide: the fastest on an H200 of those that were tried.
SMALL, WIDE_HEADS = LaunchBlocks(64, 64, 4, 3), LaunchBlocks(64, 64, 4, 2)
TABLE = {
    "few": (SMALL, SMALL, WIDE_HEADS),
    "many": (SMALL, SMALL, LaunchBlocks(64, 32, 4, 3)),
    "many, long": (LaunchBlocks(128, 64, 4, 3), LaunchBlocks(128, 64, 4, 3), LaunchBlocks(64, 32, 4, 3)),
    "keys": (LaunchBlocks(64, 128, 4, 3), LaunchBlocks(64, 128, 4, 3), WIDE_HEADS),
}
LONG = 8192  # with fewer keys, or with a mask that leaves fewer, larger blocks would leave part of the GPU idle
MANY = 4  # terms
FLOAT32 = LaunchBlocks(32, 32, 4, 2)  # full-precision products need more registers


def blocks_for(source: Source, terms: int = 1, *, small: bool = False, by_key: bool = False) -> LaunchBlocks:
    """The blocks for this width, length and dtype, and a walk of so many terms; never large ones if `small`."""
    if source.query.dtype == torch.float32:
        return FLOAT32
    D, long = source.query.shape[3], source.shape[3] >= LONG and not small
    kind = "keys" if by_key else "few" if terms < MANY else "many, long" if long else "many"
    return TABLE[kind][(D > 64) + (D > 128)]


def refuses(source: Source) -> bool:
    """Whether kernels cannot read this source, regardless of its mask."""
    query, key = source.query, source.key
    return (
        query.dtype not in DTYPES
        or key.dtype != query.dtype
        or query.shape[3] > WIDEST
        or query.stride(3) != 1
        or key.stride(3) != 1
        or source.frame.first_row is None
        or source.scoring.biased
        or source.scoring.score is not None
        or source.scoring.positions is not None
        or max(source.shape[2:]) >= 2**24  # positions are exact floats up to here
    )


class KeyRule(NamedTuple):
    """Which keys a query may see, or which a term looks at: a band, a range of keys, equal codes, open keys."""

    left: int = FAR
    right: int = FAR
    first: int = 0
    stop: int = FAR
    codes: Codes | None = None
    opened: Tensor | None = None

    def reach(self, S: int) -> int:
        """How a term with this rule uses inner tiles: all of them, none (it is narrow), or those within it."""
        band, span = self.left + self.right + 1, min(self.stop, S) - self.first
        if self.opened is not None:
            return int(WIDE.value)
        if self.left >= FAR and self.right >= FAR and span >= S:
            return int(EVERYWHERE.value)
        return int((NARROW if min(band, span) <= max(NEAR, S // 4) else WIDE).value)

    def tests(self, S: int) -> int:
        """What has to be tested of the rule."""
        tested = zip(
            (LEFT, RIGHT, FIRST, STOP), (self.left < FAR, self.right < FAR, self.first > 0, self.stop < S), strict=True
        )
        return sum(int(test.value) for test, needed in tested if needed)


def rule_of(mask: Mask | None, source: Source) -> KeyRule | None:
    """The rule equivalent to a mask or probe, or None if there is none."""
    frame = source.frame
    if mask is None:
        return KeyRule()
    key = (source.shape, frame.batch, frame.row, frame.T, frame.S, source.query.device)
    return memory.get([mask], key, lambda: _rule(structure_of(simplify(mask, frame.T, frame.S), source), source))


def _rule(structure: Structure | None, source: Source) -> KeyRule | None:
    if structure is None:
        return None
    opened = structure.open_keys
    if opened is not None:
        key = torch.arange(opened.shape[1], device=opened.device)
        opened = opened * ((key >= structure.first) & (key < structure.stop))
    codes = equal_codes(structure, source.positions(), source.frame.S)
    return KeyRule(structure.left, structure.right, structure.first, structure.stop, codes, opened)


class Term(NamedTuple):
    """A statistic for the walk: its functions (see `terms.py`), its tensors, where it looks, and tokens it gets.

    If `cut`, it looks everywhere, and makes edges of the tiles that its rule allows.
    """

    start: Any
    step: Any
    value: Any
    end: Any
    out: tuple[Any, ...]
    size: int = 0
    rule: KeyRule = KeyRule()
    tokens: Codes | None = None
    cut: bool = False

    def reach(self, S: int) -> int:
        """How the term uses inner tiles."""
        return int(CUT.value) if self.cut else self.rule.reach(S)


def walk(
    source: Source,
    mask: KeyRule,
    lse: Tensor | None,
    asked: Sequence[Term],
    blocks: LaunchBlocks,
    *,
    by_key: bool = False,
    normal: bool = False,
) -> None:
    """Compute all terms in one walk: over the keys of every query, or over the queries of every key.

    Args:
        source: what to walk over.
        mask: its mask.
        lse: (B, H, T), float32 and contiguous; None to give the terms scores in place of weights.
        asked: the terms.
        blocks: block sizes and resources.
        by_key: walk over the queries of every key.
        normal: rows sum to 1; then the first term is their mass.
    """
    S, filler = source.shape[3], source.query
    tables = _mask_tables(mask, filler, by_key)
    functions, outs, rules = [], [], [mask]
    for term in asked:
        places = []
        for given in (term.rule.codes, term.rule.opened, term.tokens):
            places.append(0 if given is None else len(tables))
            tables += [] if given is None else [_table(*given) if isinstance(given, tuple) else _table(given)]
        functions.append((*term[:4], term.size, term.reach(S), term.rule.tests(S), *places))
        outs.append(term.out)
        rules.append(term.rule)
    numbers = _numbers(tuple((*rule[:3], min(rule.stop, S)) for rule in rules), filler.device)
    options = {"TERMS": tuple(functions), "DIGEST": digest(functions), "BY_KEY": by_key, "SCORES": lse is None}
    narrow, cut = (sum(term[5] == kind.value for term in functions) for kind in (NARROW, CUT))
    options |= {"NORMAL": normal, "FULL": narrow < len(functions), "RUNS": 2 * (narrow + cut) + 5}
    options["TESTED"] = mask.tests(S) | int(STOP.value)  # also of the keys beyond the last one
    options |= {"CODES": mask.codes is not None, "OPEN": mask.opened is not None, "BO": blocks.own, "BW": blocks.walk}
    first = [filler.new_empty(1, dtype=torch.float32) if lse is None else lse, tuple(outs), tuple(tables), numbers]
    run(walk_kernel, source, blocks, first, triton.cdiv(source.shape[3 if by_key else 2], blocks.own), options)


def run(
    kernel: Any, source: Source, blocks: LaunchBlocks, first: list[Any], programs: int, options: dict[str, Any]
) -> None:
    """Run a kernel with so many programs for every head of every sample.

    The arguments after `first` are the same for all kernels. `options` are the kernel's own compile-time settings.
    """
    query, key, scoring = source.query, source.key, source.scoring
    D, (B, H, T, S) = query.shape[3], source.shape
    strides = [*query.stride()[:3], *key.stride()[:3]]
    offset = (source.frame.first_row or 0) + source.frame.S - source.frame.T  # query i is at key position i + offset
    scale2 = scoring.scale_for(D) * math.log2(math.e)
    sizes = [H, source.group, T, S, offset, scale2, float(scoring.softcap or 0.0)]
    options = options | {"D": D, "WIDTH": max(16, triton.next_power_of_2(D)), "CAPPED": scoring.softcap is not None}
    # tf32 would round float32 to 10 bits; with 16-bit inputs the setting has no effect
    options |= {"PRECISION": "ieee" if query.dtype == torch.float32 else "tf32"}
    options |= {"num_warps": blocks.warps, "num_stages": blocks.stages}
    launch(kernel, (programs, B * H), [query, key, *first, *strides, *sizes], options)


def launch(kernel: Any, grid: tuple[int, int], arguments: list[Any], options: dict[str, Any]) -> None:
    """Run a kernel on the device of its first argument."""
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        kernel[grid](*arguments, **options)


def new(source: Source, *tail: int, dtype: torch.dtype = torch.float32, zero: bool = False) -> Tensor:
    """A new tensor (B, H, *tail)."""
    make = torch.zeros if zero else torch.empty
    return make(*source.shape[:2], *tail, dtype=dtype, device=source.query.device)


def weights(source: Source, mask: KeyRule, lse: Tensor, cols: range, dtype: torch.dtype) -> Tensor:
    """The weights (B, H, T, len(cols)) of consecutive keys."""
    T = source.shape[2]
    blocks = LaunchBlocks(*((32, 32) if source.query.dtype == torch.float32 else (64, 128)), 4, 1)
    across = triton.cdiv(len(cols), blocks.walk)
    found = new(source, T, len(cols), dtype=dtype)
    numbers = _numbers(((*mask[:3], min(mask.stop, source.shape[3])),), source.query.device)
    first = [lse, found, tuple(_mask_tables(mask, source.query)), numbers]
    first += [cols.start, len(cols), across]
    options = {"CODES": mask.codes is not None, "OPEN": mask.opened is not None, "BO": blocks.own, "BW": blocks.walk}
    run(weights_kernel, source, blocks, first, triton.cdiv(T, blocks.own) * across, options)
    return found


def _table(*tensors: Tensor) -> tuple[Any, ...]:
    """Pointers to tables (B or 1, n), and the stride of each from sample to sample."""
    return *tensors, *(0 if len(x) == 1 else x.stride(0) for x in tensors)


def _mask_tables(mask: KeyRule, filler: Tensor, by_key: bool = False) -> list[tuple[Any, ...]]:
    """The codes of a mask, its open keys, and what indices of the program's axis reach by their codes.

    `filler` points anywhere in the place of what the mask does not have.
    """
    opened = (filler, 0) if mask.opened is None else _table(mask.opened)
    if mask.codes is None:
        return [(filler, filler, 0, 0), opened, (filler, 0)]
    own, walked = reversed(mask.codes) if by_key else mask.codes
    reach = memory.get(mask.codes, by_key, lambda: code_reach(own, walked))
    return [_table(*mask.codes), opened, _table(reach)]


@functools.lru_cache(maxsize=64)
def _numbers(rules: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Rules on the GPU; cached, because copying them takes longer than a kernel."""
    return torch.tensor(rules, dtype=torch.int32, device=device)


def digest(functions: Sequence[Any]) -> str:
    """A hash of the source of all functions of some terms."""
    keys = [getattr(x, "cache_key", "") for term in functions for x in term[:4]]
    return hashlib.sha256("".join(keys).encode()).hexdigest()[:16]
