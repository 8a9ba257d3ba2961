"""`trace`: from an answer back to the tokens of the prompt that it came from, by several methods, with a test of each.

>>> from headwise import load_builtin, trace
>>> model = load_builtin()
>>> text = "The captain looked at the sea. The dog slept by the fire. The captain looked at the sea"
>>> found = trace(model, model.tokens(text), answer=(19, 20), draws=2)
>>> list(found.scores)
['rollout', 'attention', 'contributions', 'gradient']
>>> found.scores["gradient"].shape == (19,)
True

    rollout         r ← ½(r + mean over heads of Aᵀr), from the answer down through all layers (Abnar & Zuidema 2020)
    attention       the mean over layers and heads of the weights with which the answer's queries look at each token
    contributions   the same for the share of each token in what heads write, which is small for a small value
    gradient        Σ weight · ∂/∂weight of the answer's log-probability, over all layers, heads and queries, which is
                    ⟨value, ∂/∂value⟩: the fused backward pass has it (gradient × attention)

All of it streams: no method needs a T×T matrix. None is the truth, so each is tested: the passages it ranks first are
deleted, and the answer's loss is compared with that after deleting as many random passages.
"""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.models.text_model import TextModel
from headwise.shapes import check_size
from headwise.study.finite import check_finite
from headwise.study.importance import logits_of, why_not_predicting
from headwise.study.interventions import checked_layers
from headwise.study.outputs import HeadOutputs, as_projected
from headwise.study.samples import check_tokens, run, token_embedding
from headwise.study.watch import watch
from headwise.weights.spans import Spans, checked_spans
from headwise.weights.values import Contributions

Score = Callable[[Any, Tensor], Tensor]
METHODS = ("rollout", "attention", "contributions", "gradient")
BLOCKS = 24  # passages that a prompt is cut into if nothing else says how
SHARE = 0.2  # of the passages are deleted in the test
TRIED = 32  # tokens, to see whether the model predicts them
ENDS = (".", "!", "?", "\n", "。", "！", "？")
SHORT = {"contributions": "contrib."}  # what heads the column of a method


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerTrace:
    """Where an answer came from.

    tokens: the text, (T,).
    answer: its first token and its last + 1; none if a score of the whole text was traced.
    scores: by method, one number for each token before the answer; more means more support.
    by_layer: the same for each layer, by method and layer; rollout has one number for all layers.
    passages: spans of the prompt.
    loss: −log p of the answer, the mean over its tokens; or minus the score.
    tests: by method, the loss after deleting the passages it ranks first: "deleted"; and "random": the mean, the
        standard deviation and the number of random deletions of as many passages.
    words: the text of every token, if known; a character of several tokens is that of the first of them.
    """

    tokens: Tensor
    answer: tuple[int, int] | None
    scores: dict[str, Tensor]
    by_layer: dict[str, dict[str, Tensor]]
    passages: list[tuple[int, int]]
    loss: float
    tests: dict[str, Any]
    words: list[str] | None = None

    def of_passages(self, method: str) -> Tensor:
        """The scores of the passages by a `method`: sums over their tokens."""
        return torch.stack([self.scores[method][start:stop].sum() for start, stop in self.passages])

    def table(self, width: int = 80, count: int = 16) -> str:
        """The passages with their scores by every method, as shares, and the tests.

        Args:
            width: characters in a line.
            count: the most passages to show: those with the largest share by any method, in the order of the text.
        """
        shares = {method: _shares(self.of_passages(method)) for method in self.scores}
        lines = [" ".join([f"{SHORT.get(method, method):>9}" for method in shares]) + "  passage"]
        room = max(16, width - 10 * len(shares) - 1)
        largest = torch.stack([share.abs() for share in shares.values()]).amax(0)
        for number in sorted(largest.topk(min(count, len(largest))).indices.tolist()):
            start, stop = self.passages[number]
            numbers = " ".join(f"{percent(share[number].item()):>9}" for share in shares.values())
            lines.append(f"{numbers}  {self._text(start, stop, room)}")
        if len(largest) > count:
            lines.append(f"and {len(largest) - count} passages with smaller shares")
        if any((share < 0).any() for share in shares.values()):
            lines.append("(below 0: makes the answer less likely; without signs a column sums to 100 %)")
        return "\n".join([*lines, *self._told(width)])

    def _told(self, width: int) -> list[str]:
        """The answer or the score, and the tests of the methods."""
        sign, word, better = (-1, "score", "lower") if self.answer is None else (1, "loss", "higher")
        lines = [] if self.answer is None else [f"answer: {self._text(*self.answer, width - 8)}"]
        lines += [
            f"{word} {sign * self.loss:.3f}; after deleting {self.tests['passages']} of {len(self.passages)} passages",
            f"(those that a method ranks first; the {better} the {word}, the better the method):",
            *(f"  {method:<14} {sign * self.tests[method]:8.3f}" for method in self.scores),
        ]
        random = self.tests["random"]
        spread = f"± {random['deviation']:.3f} ({random['draws']} draws)"
        return [*lines, f"  {'random':<14} {sign * random['mean']:8.3f} {spread}"]

    def _text(self, start: int, stop: int, room: int) -> str:
        if self.words is None:
            return f"tokens {start} to {stop - 1}"
        text = " ".join("".join(self.words[start:stop]).split())
        return text if len(text) <= room else f"{text[: room - 1]}…"

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers, lists and strings."""
        return {
            "tokens": self.tokens.tolist(),
            "words": self.words,
            "answer": None if self.answer is None else list(self.answer),
            "scores": {method: score.tolist() for method, score in self.scores.items()},
            "passages": [list(span) for span in self.passages],
            "loss": self.loss,
            "tests": self.tests,
        }

    def plot(self, ax: Any = None) -> Any:
        """The scores of the passages by every method, as shares, drawn with matplotlib; the axes, `ax` if given."""
        from headwise.study.importance import drawn_heads

        shares = {method: _shares(self.of_passages(method)).clamp(min=0) for method in self.scores}
        ax = drawn_heads(shares, "share of each passage in the answer", ax)
        ax.set_xlabel("passage")
        return ax


def percent(share: float) -> str:
    """A share with its sign and one digit after the point.

    >>> percent(0.205), percent(-0.057), percent(-0.0001)
    ('20.5 %', '−5.7 %', '0.0 %')
    """
    return f"{100 * share:z.1f} %".replace("-", "−")


def _shares(scores: Tensor) -> Tensor:
    """Scores divided by the sum of their magnitudes."""
    size = scores.abs().sum()
    return scores / torch.where(size > 0, size, 1.0)


def trace(
    model: TextModel | nn.Module,
    tokens: Tensor,
    answer: tuple[int, int] | slice | None = None,
    *,
    score: Score | None = None,
    passages: Spans | None = None,
    methods: Sequence[str] = METHODS,
    delete: float = SHARE,
    draws: int = 8,
    seed: int = 0,
) -> AnswerTrace:
    """Which tokens of a prompt an answer came from, or a score of the whole text.

    Args:
        model: a model with its tokenizer, or any model that `headwise.watch` sees. For an answer, it must predict the
            next token.
        tokens: the prompt and the answer, (1, T) or (T,).
        answer: the answer's first token and its last + 1.
        score: instead of an answer, a function (output, tokens) -> one number that the model's output gives, such as
            the similarity of an embedding to a query. All tokens are the prompt, and all queries are followed.
        passages: spans of the prompt to compare and to delete; by default sentences, or blocks if there are no words.
        methods: which of "rollout", "attention", "contributions" and "gradient".
        delete: the share of passages to delete in the test, at least one.
        draws: random deletions to compare with.
        seed: of the random deletions.
    """
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods:
        given = repr(unknown[0]) if unknown else "[]"
        raise OptionError(f"trace(methods={given}): expected some of {', '.join(METHODS)}.")
    module = model.module if isinstance(model, TextModel) else model
    if (answer is None) == (score is None):
        raise OptionError(
            "trace: pass answer=, the tokens of an answer, or score=, a function (output, tokens) -> number."
        )
    study = _Tracing(module, tokens, answer) if score is None else _Scoring(module, tokens, score)
    words = words_of(model, study.tokens[0]) if isinstance(model, TextModel) else None
    first, last = (len(model.codec.before), len(model.codec.after)) if isinstance(model, TextModel) else (0, 0)
    stop = study.start if score is None else study.start - last
    spans = _passages(words, first, stop) if passages is None else checked_spans(passages, study.start)
    if len(spans) < 2:
        raise OptionError(
            f"trace: the prompt before the answer has {study.start - first} tokens and {len(spans)} passage; expected "
            f"two or more, to compare them. Use a longer prompt, or pass passages=."
        )
    scores, by_layer, loss = study.scores(methods)
    place = (study.start, study.stop) if score is None else None
    found = AnswerTrace(study.tokens[0].cpu(), place, scores, by_layer, spans, loss, {}, words)
    tests = study.tested(found, max(1, math.ceil(delete * len(spans))), check_size("draws", draws), seed)
    return dataclasses.replace(found, tests=tests)


def words_of(model: TextModel, tokens: Tensor) -> list[str]:
    """The text of every token; a character of several tokens is that of the first of them, and the others are empty."""
    return model.codec.once(tokens.tolist())


class _Tracing:
    """One text and its answer, in a model."""

    def __init__(self, module: nn.Module, tokens: Any, answer: Any) -> None:
        self.module, self.tokens = module, _one_text(module, tokens)
        T = self.tokens.shape[1]
        ((self.start, self.stop),) = checked_spans([answer], T)
        if not 1 <= self.start < self.stop:
            raise OptionError(f"trace(answer={answer!r}): expected tokens after the first, up to {T}.")
        self.rows = slice(self.start - 1, self.stop - 1)  # the queries that predict the answer
        self.tokens = self.tokens[:, : self.stop]
        few = self.tokens[:, :TRIED]
        check_finite(module, lambda: run(module, few), "trace")
        problem = why_not_predicting(module, few, few)
        if problem is not None:
            raise OptionError(
                f"trace: {type(module).__name__} {problem}. Expected a model that predicts the next token of one text, "
                f"such as AutoModelForCausalLM opens, or score=, a function (output, tokens) -> number."
            )

    def log_probability(self, tokens: Tensor, count: int) -> Tensor:
        """The log-probability of each of the last `count` tokens, (count,)."""
        options: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(self.module.forward).parameters:
            options["logits_to_keep"] = count + 1
        logits = logits_of(run(self.module, tokens, **options))
        assert logits is not None  # noqa: S101 - it was tried
        return -F.cross_entropy(logits[0, -count - 1 : -1], tokens[0, -count:], reduction="none")

    def support(self, tokens: Tensor) -> Tensor:
        """What is traced, for these tokens: the log-probability of each token of the answer, (count,)."""
        return self.log_probability(tokens, self.stop - self.start)

    def scores(self, methods: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], float]:
        """The scores of the prompt's tokens by every method, in all and by layer, and the loss."""
        slopes = "gradient" in methods
        with torch.set_grad_enabled(slopes), _learning(self.module, slopes), watch(self.module, outputs=True) as seen:
            chance = self.support(self.tokens)
        calls = [layer for same in seen.outputs.calls.values() for layer in same]
        calls.sort(key=seen.outputs.in_order.index)
        self._check(calls)
        values = [layer.value for layer in calls]
        grads = _slopes(chance, values, calls) if slopes else [None] * len(values)
        by_layer: dict[str, dict[str, Tensor]] = {method: {} for method in methods if method != "rollout"}
        with torch.no_grad():
            for layer, grad in zip(calls, grads, strict=True):
                for method in by_layer:
                    by_layer[method][layer.name] = self._of_layer(method, layer, grad)[: self.start].cpu()
            scores = {}
            for method in methods:
                if method == "rollout":
                    scores[method] = self._rollout(calls)[: self.start].cpu()
                else:
                    each = torch.stack(list(by_layer[method].values()))
                    scores[method] = each.sum(0) if method == "gradient" else each.mean(0)
        return scores, by_layer, -chance.mean().item()

    def _check(self, calls: Sequence[HeadOutputs]) -> None:
        T = self.tokens.shape[1]
        for layer in calls:
            if tuple(layer.weights.shape[2:]) != (T, T):
                raise OptionError(
                    f"trace: the map of {layer.name!r} is {tuple(layer.weights.shape)}, not of {T} tokens attending to "
                    f"each other, so an answer cannot be followed through it: the model may read two texts, or images."
                )

    def _of_layer(self, method: str, layer: HeadOutputs, grad: Tensor | None) -> Tensor:
        """One layer's scores of all tokens, (T,)."""
        if method == "gradient":
            assert grad is not None  # noqa: S101 - it was computed
            return (layer.value * grad)[0].sum((0, 2))
        if method == "attention":
            weights = layer.weights.detach().select(rows=self.rows)
            return weights.received().total[0].mean(0) / weights.shape[2]
        shares: Contributions = as_projected(layer.contributions, rows=self.rows)
        return shares.received()[0].mean(0) / shares.shape[2]

    def _rollout(self, layers: Sequence[HeadOutputs]) -> Tensor:
        """The rollout of the answer's queries down to the tokens, (T,)."""
        share = torch.zeros(1, self.tokens.shape[1], dtype=torch.float64, device=self.tokens.device)
        share[:, self.rows] = 1 / len(range(share.shape[1])[self.rows])
        for layer in reversed(layers):
            share = (share + layer.weights.detach().received(share).total.mean(1)) / 2
        return share[0]

    def tested(self, found: AnswerTrace, count: int, draws: int, seed: int) -> dict[str, Any]:
        """The loss without the passages that each method ranks first, and without random ones."""
        tests: dict[str, Any] = {"passages": count}
        for method in found.scores:
            top = found.of_passages(method).topk(count).indices.tolist()
            tests[method] = self._loss_without([found.passages[i] for i in top])
        generator, losses = torch.Generator().manual_seed(seed), []
        for _ in range(draws):
            order = torch.randperm(len(found.passages), generator=generator)[:count].tolist()
            losses.append(self._loss_without([found.passages[i] for i in order]))
        numbers = torch.tensor(losses, dtype=torch.float64)
        deviation = numbers.std(correction=min(1, draws - 1)).item()
        tests["random"] = {"mean": numbers.mean().item(), "deviation": deviation, "draws": draws}
        return tests

    def _loss_without(self, spans: Sequence[tuple[int, int]]) -> float:
        """The answer's loss if these spans of the prompt are deleted; one token of the prompt always stays."""
        kept = torch.ones(self.tokens.shape[1], dtype=torch.bool, device=self.tokens.device)
        for start, stop in spans:
            kept[start:stop] = False
        kept[self.start - 1] |= not bool(kept[: self.start].any())
        with torch.no_grad():
            return -self.support(self.tokens[:, kept]).mean().item()


class _Scoring(_Tracing):
    """One text and a score of it, in a model."""

    def __init__(self, module: nn.Module, tokens: Any, score: Score) -> None:
        self.module, self.tokens = module, _one_text(module, tokens)
        self.start = self.stop = self.tokens.shape[1]
        self.rows, self.score = slice(None), score

    def support(self, tokens: Tensor) -> Tensor:
        """The score, (1,)."""
        found = self.score(run(self.module, tokens), tokens)
        if not isinstance(found, Tensor) or found.numel() != 1:
            given = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise OptionError(f"trace: score returned {given}; expected a tensor with one number.")
        return found.reshape(1)


def _one_text(module: nn.Module, tokens: Any) -> Tensor:
    """The tokens as (1, T), checked."""
    checked_layers(module, "trace")
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dim() not in (1, 2):
        raise OptionError("trace(tokens=...): expected token ids, (T,) or (1, T).")
    found = tokens if tokens.dim() == 2 else tokens[None]
    if found.shape[0] != 1:
        raise OptionError(f"trace: {found.shape[0]} samples are given; expected one, (1, T).")
    check_tokens(module, found, "trace")
    return found


def _slopes(chance: Tensor, values: Sequence[Tensor], calls: Sequence[HeadOutputs]) -> Sequence[Tensor]:
    """The gradient of the answer's log-probability in the values of every layer."""
    for layer, value in zip(calls, values, strict=True):
        if not value.requires_grad:
            raise OptionError(
                f"trace: the model computes {layer.name!r} without gradients, so 'gradient' cannot follow the answer "
                f"through it. Leave it out: methods=['rollout', 'attention', 'contributions']."
            )
    found = torch.autograd.grad(chance.sum(), values, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(values, found, strict=True)]


@contextmanager
def _learning(module: nn.Module, wanted: bool) -> Iterator[None]:
    """Makes what the model computes differentiable, if its parameters are not: the embedding's output requires it."""
    if not wanted or any(x.requires_grad for x in module.parameters()):
        yield
        return
    embedding = token_embedding(module)
    if embedding is None:
        raise OptionError("trace: the model has no embedding of tokens to differentiate from; leave out 'gradient'.")
    hook = embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
    try:
        yield
    finally:
        hook.remove()


def _passages(words: list[str] | None, first: int, stop: int) -> list[tuple[int, int]]:
    """Sentences of a prompt of tokens `first` to `stop` − 1, or blocks of whole words if there are fewer than four."""
    sentences = [] if words is None else _between(_sentence_ends(words, first, stop), first, stop)
    if len(sentences) >= 4:
        return sentences
    count = min(BLOCKS, max(2, (stop - first) // 3))
    edges = [first + (stop - first) * i // count for i in range(1, count)]
    if words is not None:
        edges = [_word_start(words, edge, stop) for edge in edges]
    return _between(edges, first, stop)


def _sentence_ends(words: list[str], first: int, stop: int) -> list[int]:
    """The tokens after the ends of sentences, which have three tokens or more."""
    found = [first]
    for place in range(first, stop):
        if words[place].rstrip(" \"'”’)").endswith(ENDS) and place + 1 - found[-1] >= 3:
            found.append(place + 1)
    return found


def _word_start(words: list[str], place: int, stop: int) -> int:
    """The first token from `place` on that continues no word or character; `place` if the next ones all do."""
    for later in range(place, min(stop, place + 8)):
        continues = words[later][:1].isalnum() and words[later - 1][-1:].isalnum()
        if words[later] and not continues:
            return later
    return place


def _between(edges: Sequence[int], first: int, stop: int) -> list[tuple[int, int]]:
    """The spans between edges."""
    whole = sorted({first, *(edge for edge in edges if first < edge < stop), stop})
    return list(itertools.pairwise(whole))
