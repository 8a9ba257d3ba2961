"""What attention costs: parameters, operations of each step, bytes, each number with its formula.

    B batch   T tokens   E model width   H, Hkv query and key/value heads   D head width   S keys one token sees

One multiply-and-add counts as two operations (FLOPs), as usual. All numbers are for one layer unless they say
otherwise. Tests compare each formula with a real module, torch's FLOP counter, or the tensors that autograd saves.
"""

import dataclasses
from typing import NamedTuple, Self

from headwise.errors import OptionError
from headwise.layer.options import Widths
from headwise.learn.configs import Config, kind_of
from headwise.shapes import check_size

SOFTMAX_OPERATIONS = 5  # per score: compare for the maximum, subtract, exp, add, divide
DECIMAL = dict(enumerate(["n", "µ", "m", "", "k", "M", "G", "T", "P", "E"], start=-3))
BINARY = dict(enumerate(["", "Ki", "Mi", "Gi", "Ti", "Pi"]))
NUMBERS = {4: "float32", 2: "bfloat16", 1: "float8"}
LSE_BYTES = 4  # a fused kernel keeps one float32 per row for the backward pass


class Amount(NamedTuple):
    """A number and its formula."""

    formula: str
    value: int


class StepCost(NamedTuple):
    """The operations of one of the ten steps."""

    number: int
    name: str
    formula: str
    matmul: int  # in matrix products, which torch's FLOP counter counts
    pointwise: int  # elementwise
    visible: int  # of both, what a kernel that skips hidden pairs still does

    @property
    def total(self) -> int:
        """All operations of the step."""
        return self.matmul + self.pointwise


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one attention layer, and of `layers` of them.

    >>> gpt2 = Cost.of(768, 12, seq=1024)
    >>> gpt2.parameters.value, gpt2.kv_cache_per_token.value, gpt2.crossover
    (2359296, 3072, 1536.0)

    Args:
        d_model: width of input and output.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: head dimension.
        seq: sequence length.
        batch: batch size.
        causal: whether a token sees only itself and earlier tokens.
        bias: whether the four projections have a bias.
        item_bytes: bytes per number, 2 for bfloat16.
        layers: layers of the model.
        reach: the most keys a token of this layer sees, including itself; all by default.
        windowed_layers: how many layers see only `window` keys, in a model that has both kinds; see `near`.
        window: keys a token sees in such a layer.
        qk_norm: whether queries and keys are normalized per head.
        sinks: whether every head learns a sink.
    """

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    seq: int
    batch: int = 1
    causal: bool = True
    bias: bool = False
    item_bytes: int = 2
    layers: int = 1
    reach: int | None = None
    windowed_layers: int = 0
    window: int | None = None
    qk_norm: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        Widths.complete(self.d_model, self.num_heads, self.num_kv_heads, self.head_dim)
        for name in ("seq", "batch", "item_bytes", "layers"):
            check_size(name, getattr(self, name))
        if self.windowed_layers and self.window is None:
            raise OptionError(
                f"windowed_layers={self.windowed_layers} and no window: pass the number of keys they see as window."
            )

    @classmethod
    def of(
        cls,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        seq: int,
        batch: int = 1,
        causal: bool = True,
        bias: bool = False,
        item_bytes: int = 2,
        layers: int = 1,
    ) -> Self:
        """The cost at these sizes.

        Args:
            d_model: model width.
            num_heads: query heads.
            num_kv_heads: key/value heads; as many as query heads unless given.
            head_dim: width of a head; `d_model / num_heads` unless given.
            seq: tokens.
            batch: sequences.
            causal: whether a token sees only itself and the tokens before it.
            bias: whether the projections have biases.
            item_bytes: bytes per number.
            layers: layers of this kind.
        """
        widths = Widths.complete(d_model, num_heads, num_kv_heads, head_dim)
        return cls(*widths[:4], seq, batch, causal, bias, item_bytes, layers)

    @classmethod
    def of_model(cls, config: Config, seq: int, batch: int = 1, item_bytes: int = 2) -> Self:
        """The cost of a known model (`config` from `CONFIGS`); `seq`, `batch` and `item_bytes` are as in `of`."""
        mixed = 0 < config.windowed_layers < config.layers
        return cls(
            d_model=config.d_model,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            seq=seq,
            batch=batch,
            causal=config.causal,
            bias=config.bias,
            item_bytes=item_bytes,
            layers=config.layers,
            reach=None if mixed else config.window,
            windowed_layers=config.windowed_layers if mixed else 0,
            window=config.window if mixed else None,
            qk_norm=config.qk_norm,
            sinks=config.sinks,
        )

    def with_kv_heads(self, num_kv_heads: int) -> Self:
        """The same layer with `num_kv_heads` key/value heads."""
        return dataclasses.replace(self, num_kv_heads=num_kv_heads)

    def as_one_head(self) -> Self:
        """The same widths in a single head."""
        width = self.num_heads * self.head_dim
        return dataclasses.replace(self, num_heads=1, num_kv_heads=1, head_dim=width, qk_norm=False, sinks=False)

    @property
    def kind(self) -> str:
        """MHA, GQA or MQA."""
        return kind_of(self.num_heads, self.num_kv_heads)

    @property
    def keys(self) -> int:
        """Keys that the last token sees."""
        return self.seq if self.reach is None else min(self.seq, self.reach)

    @property
    def near(self) -> Self | None:
        """A windowed layer of the same model, if it has layers of both kinds and the text is longer than the window."""
        is_reached = self.window is not None and self.window < self.seq
        return dataclasses.replace(self, reach=self.window) if self.windowed_layers and is_reached else None

    @property
    def is_windowed(self) -> bool:
        """Whether some token of the text does not see all earlier ones, because of a window."""
        return self.keys < self.seq or self.near is not None

    @property
    def matrices(self) -> Amount:
        """Parameters of the four projections, without biases."""
        E, D = self.d_model, self.head_dim
        return Amount("2·E·D·(H + Hkv)", 2 * E * D * (self.num_heads + self.num_kv_heads))

    @property
    def parameters(self) -> Amount:
        """All parameters of the layer."""
        formula, value = self.matrices
        if self.bias:
            formula = f"{formula} + D·(H + 2·Hkv) + E"
            value += self.head_dim * (self.num_heads + 2 * self.num_kv_heads) + self.d_model
        if self.qk_norm:
            formula, value = f"{formula} + 2·D", value + 2 * self.head_dim
        if self.sinks:
            formula, value = f"{formula} + H", value + self.num_heads
        return Amount(formula, value)

    def pairs(self) -> int:
        """Query-key pairs of one head that the mask leaves visible."""
        T, W = self.seq, self.keys
        if not self.causal:
            return T * T
        return W * (W + 1) // 2 + (T - W) * W  # a triangle, then rows of W

    def steps(self) -> list[StepCost]:
        """Operations of each of the ten steps as the reference performs them, with the whole T×T matrix."""
        B, T, E, D, H, Hkv = self.batch, self.seq, self.d_model, self.head_dim, self.num_heads, self.num_kv_heads
        first, last = 2 * B * T * E * D * (H + 2 * Hkv), 2 * B * T * E * H * D
        scores, visible = B * H * T * T, B * H * self.pairs()
        n = SOFTMAX_OPERATIONS
        steps = [
            ("project", "2·B·T·E·D·(H + 2·Hkv)", first, 0, first),
            ("split", "0: a view", 0, 0, 0),
            ("transpose", "0: strides change", 0, 0, 0),
            ("scores", "2·B·H·T²·D", 2 * scores * D, 0, 2 * visible * D),
            ("mask", "0: numbers are replaced", 0, 0, 0),
            ("scale", "B·H·T²", 0, scores, visible),
            ("softmax", f"{n}·B·H·T²", 0, n * scores, n * visible),
            ("weighted values", "2·B·H·T²·D", 2 * scores * D, 0, 2 * visible * D),
            ("concat", "0: numbers are copied", 0, 0, 0),
            ("project", "2·B·T·E·H·D", last, 0, last),
        ]
        return [StepCost(number, *step) for number, step in enumerate(steps, start=1)]

    @property
    def flops(self) -> int:
        """Operations in matrix products, over all steps."""
        return sum(step.matmul for step in self.steps())

    @property
    def visible_flops(self) -> int:
        """The same without hidden pairs."""
        return sum(step.visible for step in self.steps() if step.matmul)

    def matmul_split(self) -> tuple[int, int]:
        """Operations of the projections (steps 1 and 10) and of the scores (steps 4 and 8)."""
        by_number = {step.number: step.matmul for step in self.steps()}
        return by_number[1] + by_number[10], by_number[4] + by_number[8]

    @property
    def crossover(self) -> float:
        """The length T above which scores (steps 4 and 8) cost more than projections: E·(1 + Hkv/H)."""
        return self.d_model * (1 + self.num_kv_heads / self.num_heads)

    @property
    def weight_bytes(self) -> Amount:
        """Bytes of the layer's weights."""
        return Amount("parameters · bytes", self.parameters.value * self.item_bytes)

    @property
    def matrix_bytes(self) -> Amount:
        """Bytes of the T×T matrix of all heads, which a fused kernel never stores."""
        return Amount("B·H·T² · bytes", self.batch * self.num_heads * self.seq**2 * self.item_bytes)

    @property
    def fused_activation_bytes(self) -> Amount:
        """Bytes a fused forward pass saves for backward: input, heads, their output, one number per row."""
        B, T, E, D, H, Hkv = self.batch, self.seq, self.d_model, self.head_dim, self.num_heads, self.num_kv_heads
        value = B * T * (E + 2 * D * (H + Hkv)) * self.item_bytes + LSE_BYTES * B * H * T
        return Amount(f"B·T·(E + 2·D·(H + Hkv)) · bytes + {LSE_BYTES}·B·H·T", value)

    @property
    def matrix_activation_bytes(self) -> Amount:
        """The same for a pass that stores the T×T matrix, with keys and values repeated for every query head."""
        B, T, E, D, H = self.batch, self.seq, self.d_model, self.head_dim, self.num_heads
        return Amount("B·T·(E + 4·D·H + H·T) · bytes", B * T * (E + 4 * D * H + H * T) * self.item_bytes)

    @property
    def kv_cache_per_token(self) -> Amount:
        """Bytes that one more token adds to the cache of one layer, for one text."""
        return Amount("2·Hkv·D · bytes", 2 * self.num_kv_heads * self.head_dim * self.item_bytes)

    @property
    def kv_cache(self) -> Amount:
        """Bytes of one layer's cache for the whole batch; it keeps no more tokens than the layer sees."""
        formula = f"2·B·{self._tokens}·Hkv·D · bytes"
        return Amount(formula, self.batch * self.keys * self.kv_cache_per_token.value)

    @property
    def model_kv_cache(self) -> Amount:
        """Bytes of the cache of all layers."""
        if self.near is None:
            return Amount(f"layers · {self.kv_cache.formula}", self.layers * self.kv_cache.value)
        full = (self.layers - self.windowed_layers) * self.kv_cache.value
        formula = "2·B·(full·T + windowed·min(T, W))·Hkv·D · bytes"
        return Amount(formula, full + self.windowed_layers * self.near.kv_cache.value)

    @property
    def decode_flops(self) -> Amount:
        """Operations for one new token of every text, with T tokens in the cache including the new one."""
        scores = 2 * self.num_heads * self.head_dim * self.keys
        return Amount(f"2·B·(matrices + 2·H·D·{self._tokens})", 2 * self.batch * (self.matrices.value + scores))

    @property
    def _tokens(self) -> str:
        return "T" if self.keys == self.seq else "min(T, W)"

    @property
    def decode_bytes(self) -> Amount:
        """Bytes to read for one decoding step: all weights once, and the cache of every text."""
        return Amount("weights + cache", self.weight_bytes.value + self.kv_cache.value)

    @property
    def intensity(self) -> float:
        """Operations per byte read in a decoding step."""
        return self.decode_flops.value / self.decode_bytes.value

    @property
    def prefill_bytes(self) -> int:
        """The fewest bytes a fused pass over the text moves: weights and input in, output and cache out."""
        text = self.batch * self.seq * self.d_model * self.item_bytes
        return self.weight_bytes.value + 2 * text + self.kv_cache.value


def alternatives(cost: Cost) -> list[Cost]:
    """The same layer as `cost` as MHA, GQA and MQA; GQA with about a quarter of the heads unless `cost` is GQA itself.

    >>> [c.num_kv_heads for c in alternatives(Cost.of(768, 12, seq=10))]
    [12, 3, 1]
    """
    H = cost.num_heads
    between = [n for n in range(2, H) if H % n == 0]
    grouped = cost.num_kv_heads if cost.kind == "GQA" else min(between, key=lambda n: abs(n - H / 4), default=None)
    return [cost.with_kv_heads(n) for n in dict.fromkeys((H, grouped, 1)) if n is not None]


def bound_seconds(operations: float, moved: float, flops: float | None, bandwidth: float | None) -> float | None:
    """The least seconds on a machine with `flops` operations and `bandwidth` bytes per second; None leaves one out.

    >>> bound_seconds(2e12, 1e9, flops=1e12, bandwidth=1e9)
    2.0
    """
    times = [amount / speed for amount, speed in ((operations, flops), (moved, bandwidth)) if speed is not None]
    return max(times, default=None)


def human(n: float, unit: str = "", *, binary: bool = False) -> str:
    """A readable number: three digits and a prefix.

    >>> human(2_359_296), human(0.00123, "s"), human(999_999), human(6144, "B", binary=True), human(2**20, binary=True)
    ('2.36 M', '1.23 ms', '1 M', '6 KiB', '1 Mi')
    """
    base, prefixes = (1024, BINARY) if binary else (1000, DECIMAL)
    power = 0
    while max(n, _three_digits(n / base**power) * base**power) >= base ** (power + 1) and power + 1 in prefixes:
        power += 1
    while 0 < _three_digits(n / base**power) < 1 and power - 1 in prefixes:
        power -= 1
    return f"{_three_digits(n / base**power):.6g} {prefixes[power]}{unit}".strip()


def _three_digits(n: float) -> float:
    return float(f"{n:.3g}")


class Answer(NamedTuple):
    """An interview question and its answer in numbers."""

    question: str
    answer: str


def answers(cost: Cost) -> list[Answer]:
    """Answers to common interview questions about attention, with the numbers of this `cost`.

    >>> answers(Cost.of(512, 8, seq=10))[0].question
    'Why several heads instead of one large one?'
    """
    return [_several_heads(cost), _complexity(cost), _grouped(cost), _matrix(cost), _decoding(cost)]


def _for_texts(cost: Cost) -> str:
    return "" if cost.batch == 1 else f" for {cost.batch} texts"


def _several_heads(cost: Cost) -> Answer:
    H, D, one = cost.num_heads, cost.head_dim, cost.as_one_head()
    own = "" if cost.kind == "MHA" else " with keys and values of their own"
    where = " in its projections" if cost.qk_norm or cost.sinks else ""
    here = f" With {cost.num_kv_heads} key/value heads, as here, it is {cost.parameters.value:,} parameters."
    return Answer(
        "Why several heads instead of one large one?",
        f"One head of width {H * D} takes the same {one.parameters.value:,} parameters{where} and "
        f"{human(one.flops)} operations in matrix products{_for_texts(cost)} as {H} of width {D}{own}, but gives "
        f"each token one set of attention weights instead of {H}. The price of {H} heads: the scores of a "
        f"head have rank {D} at most, and there are {H} times as many." + (here if own else ""),
    )


def _complexity(cost: Cost) -> Answer:
    projections, scores = cost.matmul_split()
    window = cost.reach if cost.window is None else cost.window
    longer = dataclasses.replace(cost, seq=2 * cost.seq)
    projections_2, scores_2 = longer.matmul_split()
    formula = "2·E" if cost.num_kv_heads == cost.num_heads else "E·(1 + Hkv/H)"
    return Answer(
        "What is the complexity?",
        f"O(T·E²) for the projections and O(T²·E) for the scores: at {cost.seq} tokens {human(projections)} and "
        f"{human(scores)} operations{_for_texts(cost)}; at {longer.seq} tokens, {projections_2 / projections:.0f} and "
        f"{scores_2 / scores:.0f} times as many. They are equal at T = {formula} = {cost.crossover:.6g} tokens."
        + (f" A window of {window} makes the scores O(T·W·E)." if cost.is_windowed else ""),
    )


def _grouped(cost: Cost) -> Answer:
    kinds, numbers = alternatives(cost), NUMBERS.get(cost.item_bytes, f"numbers of {cost.item_bytes} bytes")
    most = kinds[0]
    parts = []
    for c in kinds:
        saved = "" if c is most else f" (1/{most.num_kv_heads // c.num_kv_heads})"
        cache = f"cache {human(c.kv_cache_per_token.value, 'B', binary=True)} per token and layer{saved}"
        share = 100 * c.parameters.value / most.parameters.value
        parts.append(f"{c.kind} with {c.num_kv_heads}: {cache}, parameters {share:.4g}%")
    return Answer(
        "How do grouped-query and multi-query attention compare?",
        f"In {numbers}, {'; '.join(parts)}. Scores and weighted values cost the same in all of them: every query head "
        "still scores every key.",
    )


def _matrix(cost: Cost) -> Answer:
    whole, fused = cost.matrix_activation_bytes.value, cost.fused_activation_bytes.value
    return Answer(
        "Why a fused kernel?",
        f"The T×T matrix alone is {human(cost.matrix_bytes.value, 'B', binary=True)} per layer{_for_texts(cost)}. "
        f"Training stores {human(whole, 'B', binary=True)} with it and {human(fused, 'B', binary=True)} without: "
        "O(T²) against O(T).",
    )


def _decoding(cost: Cost) -> Answer:
    step = "Each new token" if cost.batch == 1 else f"Each step makes one new token for each of {cost.batch} texts and"
    sharing = "A larger batch shares the weights" if cost.batch == 1 else "The batch shares the weights"
    return Answer(
        "Why is generation slow?",
        f"{step} reads {human(cost.decode_bytes.value, 'B', binary=True)} per layer for "
        f"{human(cost.decode_flops.value)} operations, {cost.intensity:.3g} per byte, where a GPU can do "
        f"hundreds for every byte that it reads. {sharing}, and "
        f"fewer key/value heads shrink the cache.",
    )
