"""Interview questions: an answer in code or in words, the points it makes, a model answer with numbers, follow-ups.

Numbers come from `headwise.learn.Cost`, for the sizes that interviewers like: 512 wide, 8 heads. Code is judged by the
checker, and arithmetic by what it computes; words are compared with `points`, which can only say what they found.
"""

import dataclasses
from collections.abc import Callable

from headwise.learn.cost import Cost, answers, human
from headwise.learn.course.points import POINTS, Point, PointFound

D_MODEL, HEADS, TOKENS = 512, 8, 1024


@dataclasses.dataclass(frozen=True)
class Question:
    """One question.

    Args:
        name: the name on the command line.
        question: what the interviewer asks.
        answer: the model answer for a cost.
        points: what a good answer says.
        follow_ups: what the interviewer asks next.
        minutes: the time to answer.
        code: whether the answer is code, which the checker judges.
    """

    name: str
    question: str
    answer: Callable[[Cost], str]
    points: tuple[Point, ...] = ()
    follow_ups: tuple[str, ...] = ()
    minutes: float = 2.0
    code: bool = False

    def judge(self, answer: str) -> dict[str, PointFound]:
        """For each point, whether an answer makes it."""
        return {point.name: point.found_in(answer) for point in self.points}


def sizes() -> Cost:
    """The layer that the numbers are for, with biases, in bfloat16 as in `headwise cost`."""
    return Cost.of(D_MODEL, HEADS, seq=TOKENS, bias=True)


def _from_cost(place: int) -> Callable[[Cost], str]:
    return lambda cost: answers(cost)[place].answer


def _code(_: Cost) -> str:
    from headwise.check.assignment.comparison import find_assignment

    assignment = find_assignment("interview", None)
    assert assignment is not None  # noqa: S101 - the checker has this form
    return assignment.solution()


def _grouped(cost: Cost) -> str:
    return f"Groups of query heads share one key/value head. {_from_cost(2)(cost)}"


def _parameters(cost: Cost) -> str:
    E, matrix = cost.d_model, cost.d_model**2
    return (
        f"Four matrices of {E} × {E} are 4 · {matrix:,} = {4 * matrix:,} weights, and four biases 4 · {E} = "
        f"{4 * E:,}: together {cost.parameters.value:,}. The number of heads does not matter: {cost.num_heads} heads "
        f"of {cost.head_dim} are cut from the same matrices."
    )


def _flops(cost: Cost) -> str:
    projections, scores = cost.matmul_split()
    return (
        f"The four projections take 8·T·E² = {human(projections)} operations, the scores and the weighted values "
        f"4·T²·E = {human(scores)}, counting a multiply-add as two: together {cost.flops:,}, or {human(cost.flops)}. "
        f"Beyond T = 2·E = {cost.crossover:.0f} tokens, the T² part is larger."
    )


def _memory(cost: Cost) -> str:
    return (
        f"The weights of all heads are H·T² = {cost.num_heads * cost.seq**2:,} numbers, "
        f"{human(cost.matrix_bytes.value, 'B', binary=True)} in bfloat16, and training keeps them for the backward "
        f"pass. A fused kernel computes them in tiles and keeps one number per row instead: O(T), not O(T²)."
    )


def _root(cost: Cost) -> str:
    D = cost.head_dim
    return (
        f"A dot product of D terms with mean 0 and variance 1 has variance D, so its standard deviation is √D: here "
        f"√{D} = {D**0.5:g}. Unscaled, one score would dominate, the softmax would be nearly one-hot, and its "
        f"gradient, w·(1 − w), nearly 0. It is the width of a head, not of the model: the sum runs over one head."
    )


def _cache(cost: Cost) -> str:
    token = human(cost.kv_cache_per_token.value, "B", binary=True)
    whole = human(cost.kv_cache.value, "B", binary=True)
    return (
        f"Keys and values of past tokens never change, because the mask is causal; queries of the past are never "
        f"needed again. So keep 2·Hkv·D numbers per token and layer, here {token} in "
        f"bfloat16, {whole} for {cost.seq} tokens. A "
        f"new token then costs O(T) instead of O(T²), and reading the cache from memory becomes what limits the speed."
    )


QUESTIONS = (  # in the order in which they are asked: each before its follow-ups
    Question(
        "code",
        "Implement multi-head attention from scratch in PyTorch: MultiHeadAttention(d_model, num_heads), "
        "forward(Q, K, V, mask=None). Split into heads, attend in parallel, concatenate, project; 0 in the mask hides.",
        _code,
        follow_ups=("complexity", "several-heads", "grouped"),
        minutes=20.0,
        code=True,
    ),
    Question(
        "complexity",
        "What is the computational complexity of multi-head attention, in the length T and the width E?",
        _from_cost(1),
        POINTS["complexity"],
        ("flops", "memory"),
    ),
    Question(
        "several-heads",
        "Why several heads instead of one large one?",
        _from_cost(0),
        POINTS["several-heads"],
        ("root", "parameters"),
    ),
    Question(
        "grouped",
        "How does this compare to grouped-query attention?",
        _grouped,
        POINTS["grouped"],
        ("cache",),
    ),
    Question(
        "flops",
        f"How many operations does one forward pass of MultiHeadAttention({D_MODEL}, {HEADS}) over {TOKENS} tokens "
        "take, in its matrix products?",
        _flops,
        POINTS["flops"],
        ("complexity", "memory"),
    ),
    Question(
        "memory",
        f"How much memory do the attention weights of {HEADS} heads over {TOKENS} tokens take, and what does a fused "
        "kernel do about it?",
        _memory,
        POINTS["memory"],
        ("cache",),
    ),
    Question(
        "root",
        "Why divide by √d, and which d?",
        _root,
        POINTS["root"],
        ("several-heads",),
    ),
    Question(
        "parameters",
        f"How many parameters does MultiHeadAttention({D_MODEL}, {HEADS}) have, with biases?",
        _parameters,
        POINTS["parameters"],
        ("flops",),
        minutes=3.0,
    ),
    Question(
        "cache",
        f"What is the key/value cache, and what does it cost? (MultiHeadAttention({D_MODEL}, {HEADS}) in bfloat16)",
        _cache,
        POINTS["cache"],
        ("grouped",),
    ),
    Question(
        "mask",
        "Why −∞ before the softmax, and not 0 after it or −1e9?",
        lambda _: (
            "A weight that is set to 0 after the softmax has already taken its share: the row no longer sums to 1. "
            "Before the softmax, exp(−∞) = 0 exactly, and the rest still sums to 1. −1e9 does not exist in float16 "
            "(the largest number is 65,504), and a row of equal −1e9 becomes an even average over hidden keys. A row "
            "of −∞ becomes NaN, so it needs one more line."
        ),
        POINTS["mask"],
    ),
    Question(
        "contiguous",
        "Why .contiguous() before the last .view()?",
        lambda _: (
            "transpose(1, 2) moves no number; it swaps strides. The heads of a token are then not adjacent in memory, "
            "and no stride can join them, so view raises an error. contiguous() copies once into reading order; "
            "reshape and flatten do the same where they must."
        ),
        POINTS["contiguous"],
    ),
    Question(
        "output-projection",
        "What would be lost without the output projection W_o?",
        lambda _: (
            "Concatenated heads are side by side, so number 0 of the output would come from head 0 alone. W_o is the "
            "place where heads are mixed, and it lets every head write anywhere into the model. Without it the layer "
            "is wrong by definition but still trains, which is why the mistake is hard to notice."
        ),
        POINTS["output-projection"],
    ),
)


def find_question(name: str) -> Question | None:
    """The question with this name."""
    return next((question for question in QUESTIONS if question.name == name), None)
