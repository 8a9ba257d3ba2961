"""Exercises 8 to 10: masks and padding, cross-attention, dropout."""

import torch

from headwise.learn.course.exercise import DocumentedCall, Exercise, Part, Space, WrongPartError, close, made, needs
from headwise.learn.course.pieces import source

LENGTHS = (4, 2, 5)


def _padding(space: Space) -> None:
    for longest in (5, 7):
        found = needs(space, "padding_mask")(torch.tensor(LENGTHS), longest)
        if tuple(found.shape) != (3, 1, 1, longest):
            raise WrongPartError(
                f"padding_mask gives shape {tuple(found.shape)} for 3 lengths and longest={longest}; expected "
                f"{(3, 1, 1, longest)}, that is (B, 1, 1, longest)"
            )
        wanted = torch.tensor([[j < length for j in range(longest)] for length in LENGTHS])
        close(found, wanted[:, None, None], f"padding_mask(torch.tensor({[*LENGTHS]}), {longest})")


def _broadcasts(layer: torch.nn.Module) -> None:
    """Fail if a mask does something else than the same mask in full, (B, H, T, T)."""
    x = torch.randn(2, 5, 12)
    for shape in ((5, 5), (2, 1, 1, 5), (2, 1, 5, 5), (2, 3, 5, 5)):
        mask = torch.rand(shape) < 0.6
        mask[..., 0] = True  # every query sees a key
        with torch.no_grad():
            found, wanted = layer(x, mask), layer(x, mask.expand(2, 3, 5, 5))
        if not torch.allclose(found, wanted, atol=1e-5):
            raise WrongPartError(
                f"a mask of shape {shape} does something else than the same mask expanded to (2, 3, 5, 5), which is "
                "(B, H, T, T): let it broadcast"
            )


def _true_means_visible(space: Space) -> None:
    _broadcasts(made(space, "MaskedAttention", 12, 3))
    layer, x = made(space, "MaskedAttention", 12, 3), torch.randn(1, 5, 12)
    changed = torch.cat([x[:, :-1], torch.randn(1, 1, 12)], 1)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    with torch.no_grad():
        reads, ignores = (
            not torch.allclose(layer(x, mask)[:, 1:-1], layer(changed, mask)[:, 1:-1], atol=1e-5)
            for mask in (visible, ~visible)
        )
    if reads and not ignores:
        raise WrongPartError(
            "the mask means the opposite: keys where it is True are hidden, those where it is False seen"
        )


def _sees_nothing(space: Space) -> None:
    layer = made(space, "MaskedAttention", 12, 3)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    mask[..., 2:4, :] = False
    x = torch.randn(1, 5, 12)
    with torch.no_grad():
        (found, next_one), (other, _) = (layer(tokens, mask)[0, 2:4] for tokens in (x, x + 10))
    if found.isnan().any():
        raise WrongPartError("a query that sees no key makes its output NaN: a row of −∞ has no softmax")
    if not torch.allclose(found, other, atol=1e-5):  # heads of 0 leave the bias of the output projection
        even = torch.allclose(found, next_one, atol=1e-5)  # whatever the query
        reads = "an even average of all tokens" if even else "the tokens"
        raise WrongPartError(
            f"a query that sees no key still reads {reads}: the first number of its output is {found[0]:.3g} for one "
            f"text and {other[0]:.3g} for another; with heads of 0 it is the same for every text"
        )
    _heads_are_zero(layer, x, mask)


def _heads_are_zero(layer: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor) -> None:
    """Fail if query 2, which sees no key, is set to 0 after the output projection, or makes gradients NaN.

    The bias of the output projection is what an output changes with one to one, whether its query sees a key or not.
    """
    parameters = dict(layer.named_parameters())
    found = layer(x, mask)

    def slopes(output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.autograd.grad(output.sum(), [*parameters.values()], retain_graph=True, allow_unused=True)

    seeing, blind = ([g is not None and g.dim() == 1 and bool((g == 1).all()) for g in slopes(found[0, i])]
                     for i in (0, 2))  # fmt: skip
    if any(seeing) and not any(blind):
        raise WrongPartError(
            f"a query that sees no key has the output {found[0, 2, 0]:.3g}, …; with heads of 0, the bias of the output "
            "projection remains: the weights become 0, not the output"
        )
    for name, slope in zip(parameters, slopes(found), strict=True):
        if slope is not None and not slope.isfinite().all():
            raise WrongPartError(f"a query that sees no key makes the gradient of {name} NaN, though not the output")


MASKS = Exercise(
    "masks-and-padding",
    "Masks and padding",
    difficulty=3,
    minutes=20,
    idea="Texts in a batch have different lengths, and the shorter ones end in padding that no token may "
    "read. A mask argument that broadcasts to (B, H, T, T) serves every case: (T, T) for a rule, (B, 1, 1, T) "
    "for padding, both with &.",
    solution=source('''
        """Exercise 8: masks and padding."""

        $imports


        def padding_mask(lengths: Tensor, longest: int) -> Tensor:
            """True for the tokens of each text, False for its padding; it broadcasts over heads and queries.

            lengths (B,) → (B, 1, 1, longest)
            """
            return (torch.arange(longest) < lengths[:, None])[:, None, None]


        class MaskedAttention(nn.Module):
            """Multi-head self-attention with a mask argument."""

            def __init__(self, d_model: int, num_heads: int) -> None:
                """Make the four projections of exercise 7."""
                super().__init__()
                $four_layers

            def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
                """mask: True where a query may see a key; anything that broadcasts to (B, H, T, T). None hides nothing.

                A query that sees no key reads nothing: its heads are 0, not NaN,
                and its gradients are finite.
                x (B, T, d_model) → (B, T, d_model)
                """
                $scores_of_all_heads
                if mask is not None:
                    scores = scores.masked_fill(~mask, -math.inf)
                weights = scores.softmax(-1)
                if mask is not None:
                    weights = weights.masked_fill(~mask, 0.0)
                return self.out((weights @ value).transpose(1, 2).reshape(B, T, E))
    '''),
    judged="MaskedAttention",
    ignores=("nan-empty-row",),  # the last part tries that
    call=DocumentedCall((12, 3), ((2, 5, 12),), (2, 5, 12)),
    parts=(
        Part(
            "the padding mask",
            "How do you compare positions 0, 1, 2, … with every length at once?",
            "torch.arange(longest) is (T,) and lengths[:, None] is (B, 1): a comparison broadcasts to (B, T). Then two "
            "axes of size 1 for heads and queries.",
            "return (torch.arange(longest) < lengths[:, None])[:, None, None]",
            _padding,
        ),
        Part(
            "the layer without a mask",
            "Does it still do what exercise 7 did, without the causal mask?",
            "Start from your MultiHeadAttention; the mask is an argument now.",
            "scores = query @ key.transpose(-2, -1) / math.sqrt(D)",
            steps=(1, 2, 3, 4, 6, 7, 8, 9, 10),
        ),
        Part(
            "the mask argument",
            "True means visible here. Which scores become −∞?",
            "Fill where the mask is False, before the softmax: ~mask.",
            "scores = scores.masked_fill(~mask, -math.inf)",
            _true_means_visible,
            steps=(5,),
        ),
        Part(
            "a query that sees nothing",
            "What is the softmax of a row in which every score is −∞?",
            "It is 0/0 = NaN; with −1e9 instead, an even average over hidden keys. Setting the weights of hidden keys "
            "to 0 once more makes both 0.",
            "weights = weights.masked_fill(~mask, 0.0)",
            _sees_nothing,
        ),
    ),
    more="Where conventions differ (True hides, or 0 hides), headwise check tells which one a class follows.",
)


def _lengths(space: Space) -> None:
    layer = made(space, "CrossAttention", 12, 3)
    for length in (7, 3):
        with torch.no_grad():
            found = layer(torch.randn(2, 5, 12), torch.randn(2, length, 12))
        if tuple(found.shape) != (2, 5, 12):
            raise WrongPartError(
                f"with 5 tokens in x and {length} in memory, the output has shape {tuple(found.shape)}; expected "
                "(2, 5, 12), one row for every token of x"
            )


def _reads_memory(space: Space) -> None:
    layer = made(space, "CrossAttention", 12, 3)
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    other = x.clone()
    other[:, 3] += 1
    with torch.no_grad():
        one, two = layer(x, memory), layer(other, memory)
        three = layer(x, memory + 1)
    if torch.allclose(one[:, 3], two[:, 3], atol=1e-5):
        raise WrongPartError("output 3 does not depend on token 3 of x: the queries come from x")
    if not torch.allclose(one[:, :3], two[:, :3], atol=1e-5):
        raise WrongPartError("token 0 changed when token 3 of x did: tokens of x must not read each other here")
    if torch.allclose(one, three, atol=1e-5):
        raise WrongPartError("the output does not depend on the memory")
    _reads_all(layer)


def _reads_all(layer: torch.nn.Module) -> None:
    """Fail if a token of x does not read a token of a memory, which may be longer than any before."""
    x, memory = torch.randn(1, 5, 12), torch.randn(1, 11, 12, requires_grad=True)
    for i, output in enumerate(layer(x, memory)[0]):
        (slope,) = torch.autograd.grad(output.square().sum(), memory, retain_graph=True)
        unread = (slope[0].abs().amax(-1) == 0).nonzero().flatten().tolist()
        if unread:
            raise WrongPartError(
                f"output {i} does not depend on token {unread[0]} of 11 in memory: every token of x reads all of them"
            )


CROSS = Exercise(
    "cross-attention",
    "Cross-attention",
    difficulty=3,
    minutes=15,
    idea="Queries may come from one text and keys and values from another, as when a translation reads its source. "
    "Nothing changes except that there are T queries and S keys, so code that assumed T = S now fails.",
    solution=source('''
        """Exercise 9: cross-attention."""

        $imports


        class CrossAttention(nn.Module):
            """Multi-head attention from one text to another."""

            def __init__(self, d_model: int, num_heads: int) -> None:
                """Make the four projections."""
                super().__init__()
                $four_layers

            def split(self, x: Tensor) -> Tensor:
                """(B, any length, H·D) → (B, H, any length, D)"""
                return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

            def forward(self, x: Tensor, memory: Tensor) -> Tensor:
                """Every token of x reads all tokens of memory.

                x (B, T, d_model), memory (B, S, d_model) → (B, T, d_model)
                """
                query = self.split(self.query(x))  # (B, H, T, D)
                key, value = self.split(self.key(memory)), self.split(self.value(memory))  # (B, H, S, D)
                scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # (B, H, T, S)
                return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
    '''),
    judged="CrossAttention",
    ignores=("cross-length",),  # the first part tries that
    call=DocumentedCall((12, 3), ((2, 5, 12), (2, 7, 12)), (2, 5, 12)),
    parts=(
        Part(
            "two lengths",
            "Where did exercise 8 use T for the keys?",
            "Split each tensor by its own length: -1 in a view, or unflatten, does not need to know it.",
            "return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)",
            _lengths,
        ),
        Part(
            "who reads whom",
            "Which of query, key and value come from x, and which from memory?",
            "Only the queries come from x. Keys and values always come from the same text.",
            "key, value = self.split(self.key(memory)), self.split(self.value(memory))",
            _reads_memory,
            steps=(1,),
        ),
        Part(
            "the rest of the layer",
            "Does it do what the other layers do: scale, softmax, merge, output projection?",
            "Start from your MaskedAttention and leave the mask out.",
            "scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])",
            steps=tuple(range(1, 11)),
        ),
    ),
    more="headwise steps --form interview --keys 6 shows the shapes.",
)


def _still(space: Space) -> None:
    layer, x = made(space, "DropoutAttention", 12, 3, 0.5), torch.randn(2, 5, 12)
    with torch.no_grad():
        if not torch.equal(layer(x), layer(x)):
            raise WrongPartError("two calls differ in evaluation mode")


def _drops(space: Space) -> None:
    layer, x = made(space, "DropoutAttention", 12, 3, 0.5).train(), torch.randn(2, 5, 12)
    with torch.no_grad():
        if torch.equal(layer(x), layer(x)):
            raise WrongPartError("two calls agree in training mode, with dropout=0.5")
    _drops_weights(layer, heads=3)
    for sizes, rate in (((12, 1, 0.2), 0.2), ((12, 1, 0.7), 0.7), ((12, 1), 0.1)):
        found = _share_dropped(made(space, "DropoutAttention", *sizes).train())
        if abs(found - rate) > 0.06:
            said = f"with dropout={rate:g}" if len(sizes) > 2 else "made without a dropout, which is then 0.1,"
            raise WrongPartError(f"{said} {found:.0%} of the weights are dropped")


def _share_dropped(layer: torch.nn.Module) -> float:
    """How often the only weight of a lone token is dropped in a layer of one head: the output is then always the same.

    What a token gives whose weight was kept depends on the token.
    """
    first, second = torch.randn(2, 1, 1, 12)
    with torch.no_grad():
        one, other = (layer(x.expand(2000, 1, 12))[:, 0] for x in (first, second))
    shared = torch.cdist(one, other).amin(1) < 1e-5
    return float(shared.float().mean())


def _drops_weights(layer: torch.nn.Module, heads: int) -> None:
    """A token alone has a weight of 1 in every head: each head is then there or not, and nothing else can differ."""
    with torch.no_grad():
        found = layer(torch.randn(1, 1, 12).expand(256, 1, 12))[:, 0]
    values = [column[column.abs() > 1e-6].sort().values for column in found.unbind(1)]
    kinds = max(1 + int((column.diff() > 1e-5).sum()) for column in values)
    where = "its scores or not at all" if torch.allclose(found, found[:1], atol=1e-5) else "its output"
    if kinds == 1:
        raise WrongPartError(f"dropout is not on the attention weights: of a single token, it changes {where}")
    if kinds > 2**heads:
        raise WrongPartError(
            f"dropout is not on the attention weights alone: a single token has one weight in each of {heads} heads, "
            f"so at most {2**heads} results, and {kinds} were found"
        )


DROPOUT = Exercise(
    "dropout",
    "Dropout",
    difficulty=2,
    minutes=10,
    idea="In training, some attention weights are set to 0 at random, so that no token relies on a single other one. "
    "The others grow by 1 / (1 − p), so the average stays the same; in evaluation nothing happens.",
    solution=source('''
        """Exercise 10: dropout."""

        $imports


        class DropoutAttention(nn.Module):
            """Causal multi-head self-attention with dropout on the attention weights."""

            def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1) -> None:
                """Make the four projections, and a module that drops out weights."""
                super().__init__()
                $four_layers
                self.dropout = nn.Dropout(dropout)

            def forward(self, x: Tensor) -> Tensor:
                """x (B, T, d_model) → (B, T, d_model)"""
                $scores_of_all_heads
                future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
                weights = self.dropout(scores.masked_fill(future, -math.inf).softmax(-1))
                return self.out((weights @ value).transpose(1, 2).reshape(B, T, E))
    '''),
    judged="DropoutAttention",
    ignores=("dropout-in-eval", "dropout-rate"),  # the parts between try that
    call=DocumentedCall((12, 3), ((2, 5, 12),), (2, 5, 12), causal=True),
    parts=(
        Part(
            "the layer itself",
            "Does it do what exercise 7 did if dropout is 0?",
            "Start from your MultiHeadAttention.",
            "scores = query @ key.transpose(-2, -1) / math.sqrt(D)",
            steps=(1, 2, 3, 4, 5, 6, 7, 9, 10),
        ),
        Part(
            "quiet in evaluation",
            "How does a module know whether it is being trained?",
            "nn.Dropout looks at self.training; F.dropout must be told.",
            "self.dropout = nn.Dropout(dropout)",
            _still,
        ),
        Part(
            "dropout in training",
            "What is dropped: scores, weights or outputs?",
            "Drop out weights, after the softmax and before the values. A dropped score would not be a dropped weight.",
            "weights = self.dropout(weights)",
            _drops,
        ),
        Part(
            "the average stays",
            "By how much do the remaining weights grow?",
            "nn.Dropout divides by 1 − p; do not normalize once more.",
            "weights = self.dropout(weights)",
            steps=(8,),
        ),
    ),
    more="headwise check measures the average over many calls.",
)

EXERCISES = (MASKS, CROSS, DROPOUT)
