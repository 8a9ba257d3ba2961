"""Exercises 11 and 12: cache and grouped heads, a Transformer block."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headwise.learn.course.exercise import (
    CACHE_STEP,
    WAITS,
    DocumentedCall,
    Exercise,
    Part,
    Space,
    WrongPartError,
    close,
    ignores,
    made,
    unused,
)
from headwise.learn.course.pieces import source


def _fewer(space: Space) -> None:
    for heads, few in ((6, 2), (6, 3), (4, 1)):
        width = 24 // heads
        layer = made(space, "GroupedAttention", 24, heads, few)
        count = sum(p.numel() for p in layer.parameters())
        wanted = 2 * 24 * width * (heads + few)
        if not wanted <= count <= wanted + 24 + width * (heads + 2 * few):
            said = f"{few} key/value head{'s' * (few > 1)} of {width}"
            raise WrongPartError(
                f"(24, {heads}, {few}) has {count:,} parameters; expected {wanted:,} and biases, for {said}"
            )


def _neighbors_share(space: Space) -> None:
    """Fail if query head h does not read key/value head h // (heads in a group)."""
    for heads, few in ((6, 2), (6, 3), (4, 2)):
        read = _heads_read(made(space, "GroupedAttention", 24, heads, few).double(), heads, few)
        wanted = [head * few // heads for head in range(heads)]
        if read not in ([], wanted):
            raise WrongPartError(
                f"query heads 0 to {heads - 1} read key/value heads {', '.join(map(str, read))}; expected "
                f"{', '.join(map(str, wanted))}, so that neighbors share one"
            )


def _heads_read(layer: nn.Module, heads: int, few: int) -> list[int]:
    """The key/value head that every query head reads; empty if the projections are laid out in an unknown way.

    Rows of a projection that make one head are changed. Those of a query head change one of the merged heads, those
    of a key/value head the heads of its group.
    """
    x, width = torch.randn(1, 5, 24, dtype=torch.float64), 24 // heads
    named = [parameter for parameter in layer.parameters() if parameter.dim() == 2 and parameter.shape[1] == 24]
    out = next((parameter for parameter, sums in _slopes(layer, x, named) if _same_rows(sums)), None)
    if out is None:
        return []

    def merged() -> torch.Tensor:
        ((_, sums),) = _slopes(layer, x, [out])
        return sums[0].view(heads, width)

    before, changed = merged(), list[list[int]]()
    for rows in (rows for p in named if p is not out and p.shape[0] % width == 0 for rows in p.detach().split(width)):
        kept = rows.clone()
        rows.add_(torch.randn_like(rows))
        changed.append(((merged() - before).abs().amax(1) > 1e-9).nonzero().flatten().tolist())
        rows.copy_(kept)
    queries = [found[0] for found in changed if len(found) == 1]
    groups = list(dict.fromkeys(tuple(found) for found in changed if len(found) == heads // few))
    members = sorted(head for group in groups for head in group)
    if len(changed) != heads + 2 * few or not sorted(queries) == members == [*range(heads)]:
        return []
    return [next(i for i, group in enumerate(groups) if head in group) for head in queries]


def _slopes(
    layer: nn.Module, x: torch.Tensor, parameters: list[nn.Parameter]
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Parameters with the gradient of the sum of the output; for an output projection, it is the sum of its input."""
    returned = layer(x)
    output = returned[0] if isinstance(returned, tuple) else returned  # the cache is looked at in a part of its own
    found = torch.autograd.grad(output.sum(), parameters, allow_unused=True)
    return [(p, slope) for p, slope in zip(parameters, found, strict=True) if slope is not None]


def _same_rows(slope: torch.Tensor) -> bool:
    return slope.shape[0] == 24 and torch.allclose(slope, slope[:1].expand_as(slope), atol=1e-12)


def _called(layer: nn.Module, *inputs: Any) -> tuple[torch.Tensor, Any]:
    """The output and the cache of a call."""
    found = layer(*inputs)
    if not isinstance(found, tuple) or len(found) != 2:
        given = f"{len(found)} results" if isinstance(found, tuple) else f"one {type(found).__name__}"
        raise WrongPartError(f"the layer returns {given}; expected two results, the output and the cache")
    return found


def _token_by_token(space: Space) -> None:
    for heads, few, sizes, what in (
        (6, 2, [1] * 5, "the output of five calls with one token each"),
        (6, 2, [2, 1, 2], "the output of calls with 2, 1 and 2 tokens"),
        (4, 1, [3, 2], "with 4 heads and 1 key/value head, the output of calls with 3 and 2 tokens"),
    ):
        layer, x = made(space, "GroupedAttention", 24, heads, few), torch.randn(2, 5, 24)
        with torch.no_grad():
            whole, _ = _called(layer, x)
            cache, found = None, []
            for piece in x.split(sizes, dim=1):
                output, cache = _called(layer, piece, cache)
                found.append(output)
        close(torch.cat(found, 1), whole, what)


def _size(space: Space) -> None:
    layer = made(space, "GroupedAttention", 24, 6, 2)
    with torch.no_grad():
        _, cache = _called(layer, torch.randn(1, 5, 24))
    sizes = [tuple(x.shape) for x in cache] if isinstance(cache, tuple | list) else []
    if sizes != [(1, 2, 5, 4)] * 2:
        raise WrongPartError(f"the cache holds {sizes or type(cache).__name__}; expected keys and values (1, 2, 5, 4)")


def _grows(space: Space) -> None:
    """A cache that was filled by two calls is the cache of one call with the whole text."""
    _size(space)
    layer, x = made(space, "GroupedAttention", 24, 6, 2), torch.randn(1, 5, 24)
    with torch.no_grad():
        _, whole = _called(layer, x)
        _, cache = _called(layer, x[:, :3])
        _, cache = _called(layer, x[:, 3:], cache)
    for name, found, wanted in zip(("keys", "values"), cache, whole, strict=True):
        what = f"after a call with tokens 0 to 2 and one with 3 and 4, {name} in the cache"
        if found.shape == wanted.shape and torch.allclose(found, torch.cat([wanted[:, :, 3:], wanted[:, :, :3]], 2)):
            raise WrongPartError(f"{what} are in the wrong order: the old ones come first")
        close(found, wanted, what)


CACHE = Exercise(
    "cache-and-grouped-heads",
    "Cache and grouped heads",
    difficulty=4,
    minutes=30,
    idea="When a model writes token by token, the keys and values of the past never change. If you keep them, each new "
    "token costs one row of scores. The size of this cache then limits a server, so several query heads share one "
    "key/value head.",
    solution=source('''
        """Exercise 11: cache and grouped heads."""

        $imports

        Cache = tuple[Tensor, Tensor]  # keys and values of the text so far, (B, Hkv, S, D) each


        class GroupedAttention(nn.Module):
            """Causal attention in which groups of query heads share a key/value head, with a cache."""

            def __init__(self, d_model: int, num_heads: int, num_kv_heads: int) -> None:
                """Queries have num_heads heads of width D = d_model // num_heads; keys and values have num_kv_heads."""
                super().__init__()
                self.num_heads, self.num_kv_heads, self.d_head = num_heads, num_kv_heads, d_model // num_heads
                self.query = nn.Linear(d_model, num_heads * self.d_head)
                self.key = nn.Linear(d_model, num_kv_heads * self.d_head)
                self.value = nn.Linear(d_model, num_kv_heads * self.d_head)
                self.out = nn.Linear(num_heads * self.d_head, d_model)

            def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
                """x continues the text in the cache; returns the output and the cache with x in it.

                Query heads 0 and 1 read key/value head 0 if there are twice as many,
                and so on. The last token of x sees everything, the one before it
                everything but the last.
                x (B, T, d_model) → (B, T, d_model)
                """
                B, T, _ = x.shape
                query = self.query(x).view(B, T, self.num_heads, self.d_head).transpose(1, 2)
                key, value = (
                    project(x).view(B, T, self.num_kv_heads, self.d_head).transpose(1, 2)
                    for project in (self.key, self.value)
                )
                if cache is not None:
                    key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
                cache, S = (key, value), key.shape[2]
                group = self.num_heads // self.num_kv_heads
                key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
                scores = query @ key.transpose(-2, -1) / math.sqrt(self.d_head)  # (B, H, T, S)
                future = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
                weights = scores.masked_fill(future, -math.inf).softmax(-1)
                return self.out((weights @ value).transpose(1, 2).reshape(B, T, -1)), cache
    '''),
    judged="GroupedAttention",
    call=DocumentedCall((24, 6, 2), ((7, 5, 24),), (7, 5, 24), causal=True, results=2),
    parts=(
        Part(
            "fewer key/value heads",
            "How wide is the projection that makes num_kv_heads keys?",
            "num_kv_heads · D, where D is still d_model // num_heads.",
            "self.key = nn.Linear(d_model, num_kv_heads * self.d_head)",
            _fewer,
        ),
        Part(
            "the layer without a cache",
            "Which query heads share a key/value head?",
            "Neighbors: repeat each key/value head for its group with repeat_interleave along the head axis.",
            "key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)",
            steps=tuple(range(1, 11)),
            last=_neighbors_share,
        ),
        Part(
            "what the cache holds",
            "Before or after the heads are repeated? And along which axis do new tokens follow the old ones?",
            "Before: repeated heads would make the cache as large as without groups. The old tokens come first, along "
            "the axis of the tokens, which is 2 here. Return it as (keys, values).",
            "key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)",
            _grows,
        ),
        Part(
            "token by token",
            "The new token is query 0 of this call, but which position of the text is it?",
            "With S keys and T queries, query i is token i + S − T: shift the triangle by S − T.",
            "future = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)",
            _token_by_token,
            steps=(CACHE_STEP,),
        ),
    ),
    more="headwise cost --model llama-3.1-8b counts what the cache saves; docs/layer.md has ours.",
)


NORMS = (nn.LayerNorm, nn.RMSNorm)
BENDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a ReLU": nn.functional.relu, "a SiLU": nn.functional.silu, "a tanh": torch.tanh, "a sigmoid": torch.sigmoid,
}  # fmt: skip


def _block(space: Space) -> nn.Module:
    return made(space, "Block", 12, 3)


def _keeps_shape(space: Space) -> None:
    with torch.no_grad():
        found = _block(space)(torch.randn(2, 5, 12))
    if tuple(found.shape) != (2, 5, 12):
        raise WrongPartError(f"the block gives shape {tuple(found.shape)}; expected (2, 5, 12), the shape of its input")


def _without_projections(block: nn.Module) -> nn.Module:
    """The block with attention and feed-forward that add nothing."""
    for module in block.modules():
        if not isinstance(module, NORMS):
            for parameter in module.parameters(recurse=False):
                parameter.zero_()
    return block


def _residual(space: Space) -> None:
    block, x = _block(space), torch.randn(2, 5, 12)
    with torch.no_grad():
        found = block(x)
        if isinstance(found, torch.Tensor) and torch.equal(found, x):
            raise WrongPartError(WAITS)
        found = _without_projections(block)(x)
        if isinstance(found, torch.Tensor) and torch.allclose(found, nn.functional.layer_norm(x, (12,)), atol=1e-3):
            raise WrongPartError(
                "the stream itself is normalized: add what attention and feed-forward make of a normalized copy"
            )
        close(found, x, "with all projections at 0 a block returns its input; its output")


def _normed_first(space: Space) -> None:
    _needs_both(space)
    _reads_the_stream(_block(space))
    block, x = _block(space).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    with torch.no_grad():
        added, larger = block(1e3 * x) - 1e3 * x, block(1e6 * x) - 1e6 * x
    if (larger - added).abs().max() > 0.1 * added.abs().max() + 0.01:
        raise WrongPartError(
            "what the block adds grows with the size of x: normalize the input of attention and feed-forward"
        )
    _all_used(_block(space), are_norms=True)


def _one_after_the_other(space: Space) -> None:
    """Fail if the two parts read the stream in another order than the task says.

    Without biases, a part adds nothing if its matrices are 0; those of the feed-forward part have 4 · d_model rows or
    columns.
    """
    x, outputs = torch.randn(2, 5, 12), list[torch.Tensor]()
    whole = _without_biases(_block(space))
    attends, feeds = (_without_biases(_block(space)) for _ in range(2))
    with torch.no_grad():
        for matrix in _wide(attends):
            matrix.zero_()
        kept = {*_wide(feeds)}
        for parameter in _matrices(feeds):
            parameter.mul_(1.0 if parameter in kept else 0.0)
        outputs = [whole(x), feeds(attends(x)), attends(x) + feeds(x) - x, attends(feeds(x))]
    found, *orders = outputs
    after, beside, before = (torch.allclose(found, order, atol=1e-5) for order in orders)
    if beside and not after:
        raise WrongPartError(
            "the feed-forward part reads the stream from before the attention: add the attention to x first, then "
            "normalize that sum for the feed-forward part"
        )
    if before and not after:
        raise WrongPartError("the feed-forward part comes before the attention; the task has the attention first")
    if not after:
        raise WrongPartError("the block is not x + attention(norm(x)), and then that plus what is made of norm(that)")


def _matrices(block: nn.Module) -> list[nn.Parameter]:
    """The parameters of attention and feed-forward but for their biases."""
    return [p for module in block.modules() if not isinstance(module, NORMS)
            for p in module.parameters(recurse=False) if p.dim() > 1]  # fmt: skip


def _wide(block: nn.Module) -> list[nn.Parameter]:
    """The matrices between d_model and 4 · d_model."""
    return [p for p in _matrices(block) if sorted(p.shape) == [12, 48]]


def _without_biases(block: nn.Module) -> nn.Module:
    """The block with biases of 0; norms stay as they are."""
    with torch.no_grad():
        for module in block.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 1 and not isinstance(module, NORMS):
                    parameter.zero_()
    return block


def _needs_both(space: Space) -> None:
    """Fail if the block lacks one of its two parts around a stream, because its norms cannot be judged then."""
    for test in (_residual, _reaches_later, _uses_more_than_attention):
        try:
            test(space)
        except WrongPartError:
            raise WrongPartError(WAITS) from None


def _uses_more_than_attention(space: Space) -> None:
    """Fail if the matrices that the output depends on are not more than the four of an attention."""
    block = _block(space)
    matrices = [p for p in block.parameters() if p.dim() == 2]
    used = torch.autograd.grad(block(torch.randn(2, 5, 12)).sum(), matrices, allow_unused=True)
    if sum(matrix.numel() for matrix, found in zip(matrices, used, strict=True) if found is not None) <= 4 * 12**2:
        raise WrongPartError(WAITS)


def _reads_the_stream(block: nn.Module) -> None:
    """Fail if a norm reads something else than the stream, which is x if attention and feed-forward add nothing."""
    x, read = torch.randn(2, 5, 12), list[torch.Tensor]()
    for module in block.modules():
        if isinstance(module, NORMS) and tuple(module.normalized_shape) == (12,):
            module.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    with torch.no_grad():
        _without_projections(block)(x)
    if not all(found.shape == x.shape and torch.allclose(found, x, atol=1e-5) for found in read):
        raise WrongPartError(
            "a norm reads what attention or feed-forward gives; it comes before them: x + attention(norm(x))"
        )


def _mixes(space: Space) -> None:
    block, x = _block(space), torch.randn(2, 5, 12)
    if _change(block, x)[:2].max() > 1e-5:
        raise WrongPartError("tokens 0 and 1 changed when token 2 did: the attention in a decoder is causal")
    _reaches_later(space)
    if ignores(space, "Block", (12, 3), (12, 2), x):
        raise WrongPartError("num_heads is not used: with 2 and 3 heads and the same weights, the block is the same")


def _reaches_later(space: Space) -> None:
    if not _reads(_block(space)):
        raise WrongPartError("tokens 3 and 4 did not change when token 2 did: where is the attention?")


def _reads(block: nn.Module) -> bool:
    """Whether tokens 3 and 4 depend on token 2."""
    return bool(_change(block, torch.randn(2, 5, 12))[3:].min() >= 1e-6)


def _change(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """By how much every token changes with token 2."""
    changed = x.clone()
    changed[:, 2] += torch.randn(12)
    with torch.no_grad():
        gap: torch.Tensor = (block(x) - block(changed)).abs().amax((0, 2))
    return gap


def _all_used(block: nn.Module, *, are_norms: bool) -> None:
    """Fail if the block has a norm, or another layer, that its output does not depend on."""
    modules = dict(block.named_modules())
    for name in unused(block, block(torch.randn(2, 5, 12))):
        if isinstance(modules.get(name), NORMS) == are_norms:
            raise WrongPartError(f"{name} is made and never used")


def _nonlinear(space: Space) -> None:
    """Without norms, the attention of a single token is affine in it, so that what bends is the feed-forward part."""
    block = _block(space)
    if not any(p.dim() == 2 and max(p.shape) > 36 for p in block.parameters()):
        raise WrongPartError("no matrix is wider than the model: the feed-forward part widens to 4 · d_model and back")
    for module in [*block.modules()]:
        for name, norm in module.named_children():
            if isinstance(norm, NORMS):
                setattr(module, name, nn.Identity())
    x = torch.randn(1, 1, 12)
    with torch.no_grad():
        below, middle, above = (block(sign * x) for sign in (-1, 0, 1))
    if (below + above - 2 * middle).abs().max() < 1e-5:
        cause = "a GELU is missing between its two matrices" if _uses_wide(space) else "its two matrices are not used"
        raise WrongPartError(f"what the block adds is linear: {cause}")
    if _reads(_block(space)):  # otherwise it is the attention that is not used
        _all_used(_block(space), are_norms=False)
    _gelu_between(_block(space))
    if _has_both(space):
        _one_after_the_other(space)


def _uses_wide(space: Space) -> bool:
    """Whether the output depends on a matrix between d_model and 4 · d_model."""
    block = _block(space)
    wide = _wide(block)
    found = torch.autograd.grad(block(torch.randn(1, 1, 12)).sum(), wide, allow_unused=True) if wide else ()
    return any(slope is not None for slope in found)


def _has_both(space: Space) -> bool:
    """Whether the two parts can be told apart, around a stream; if not, other steps say so."""
    try:
        _needs_both(space)
    except WrongPartError:
        return False
    return True


def _gelu_between(block: nn.Module) -> None:
    """Fail if the feed-forward part is not two matrices, 4 · d_model wide inside, with a GELU between them."""
    wide = _wide(block)
    if len(wide) != 2:
        widest = max(max(p.shape) for p in _matrices(block))
        raise WrongPartError(
            f"{len(wide)} matrices are between d_model and 4 · d_model (12 and 48), and the widest has {widest}; "
            "expected two, up to 4 · d_model and back down"
        )
    points = torch.tensor([-3.0, -1.0, -0.5, 0.5, 1.0, 3.0])
    bends = _between(block, wide, points)
    if bends is not None and (bends - nn.functional.gelu(points)).abs().max() > 0.05:
        known = (named for named, bend in BENDS.items() if torch.allclose(bends, bend(points), atol=1e-3))
        if (other := next(known, None)) is not None:
            raise WrongPartError(f"between the two matrices is {other}; expected a GELU")
        raise WrongPartError(
            f"with a single 1 in both matrices, the feed-forward part adds {bends[4]:.3g} to a stream of 1; a GELU "
            "between them, and nothing else, adds 0.841"
        )


def _between(block: nn.Module, wide: list[nn.Parameter], points: torch.Tensor) -> torch.Tensor | None:
    """What the feed-forward part makes of single numbers, where everything else adds nothing.

    None without norms that can be taken away, and without a stream around both parts.
    """
    if not any(isinstance(module, NORMS) for module in block.modules()):
        return None
    for module in [*block.modules()]:
        for name, norm in module.named_children():
            if isinstance(norm, NORMS):
                setattr(module, name, nn.Identity())
    x = torch.zeros(len(points), 1, 12)
    x[:, 0, 0] = points
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
        if not torch.equal(block(x), x):
            return None
        for matrix in wide:
            matrix[0, 0] = 1.0
        found: torch.Tensor = (block(x) - x)[:, 0, 0]
    return found


BLOCK = Exercise(
    "block",
    "A Transformer block",
    difficulty=3,
    minutes=20,
    idea="Attention moves information between tokens; a feed-forward part then works on each token alone. Both read a "
    "normalized copy of the stream and add to it, so a block starts near the identity and deep models can train.",
    solution=source('''
        """Exercise 12: a Transformer block."""

        import torch
        from torch import Tensor, nn

        from headwise import MultiHeadAttention  # or your own from exercise 7


        class Block(nn.Module):
            """x + attention(norm(x)), then the same with a feed-forward part."""

            def __init__(self, d_model: int, num_heads: int) -> None:
                """Two norms, a causal attention, and two linear layers with a GELU between them, 4 · d_model wide."""
                super().__init__()
                $block_layers

            def forward(self, x: Tensor) -> Tensor:
                """x (B, T, d_model) → (B, T, d_model)"""
                $block
    '''),
    parts=(
        Part(
            "the shape",
            "What must a block return so that another block can follow it?",
            "The same shape as its input.",
            "return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))",
            _keeps_shape,
        ),
        Part(
            "the residual stream",
            "What should come out if attention and feed-forward contribute nothing?",
            "Both parts add to x; neither replaces it.",
            "x = x + self.attention(self.first_norm(x))",
            _residual,
        ),
        Part(
            "the norms",
            "Is the stream itself normalized, or a copy of it?",
            "Norm first: attention and feed-forward read norm(x) and add to x.",
            "x = x + self.attention(self.first_norm(x))",
            _normed_first,
        ),
        Part(
            "the attention",
            "Which part lets token 3 read token 2?",
            "Only the attention does, and it is causal.",
            "self.attention = MultiHeadAttention(d_model, num_heads, causal=True)",
            _mixes,
        ),
        Part(
            "the feed-forward part",
            "How wide is it inside?",
            "Up to 4 · d_model, a GELU, and back down.",
            "self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)",
            _nonlinear,
        ),
    ),
    more="docs/gpt.md: the same block in the built-in model.",
)

EXERCISES = (CACHE, BLOCK)
