"""`head_kinds`: which heads are of the known kinds, by experiment, each with a confidence interval.

>>> from headwise import head_kinds, load_builtin
>>> found = head_kinds(load_builtin(), samples=4, lengths=())
>>> [(row["layer"], row["head"]) for row in found.of("induction")[:2]]
[('blocks.5.attention', 4), ('blocks.5.attention', 6)]
>>> [(row["layer"], row["head"]) for row in found.of("previous")[:1]]
[('blocks.4.attention', 2)]

In random tokens, a head has nothing to go by but position and repetition. Definitions, each a mean over queries:

    induction   weight on keys that follow an earlier copy of the query's token, in the second of two copies of random
                tokens (Olsson et al. 2022, "prefix matching")
    duplicate   weight on the earlier copy of the query's own token, there too (Wang et al. 2022)
    previous    weight on the key before the query (Elhage et al. 2021)
    sink        weight on the first key, of all queries after it (Gu et al. 2024; a head is a sink above 0.3)
    retrieval   share of the tokens of a needle that the head copies: the model predicts the token, and the head's
                largest weight is on it (Wu et al. 2024), for needles of random tokens at several depths and lengths
    alignment   in cross-attention, weight of the query that predicts a token on that token in the encoder's text, if
                the decoder reads the same text (Garg et al. 2019 measure it on translations)

A head is of a kind if the lower end of its interval is above what uniform attention would give, and its score is at
least 0.1 (Wu et al. for retrieval), or 0.3 for sinks. `of` ranks all heads, `found` gives those of a kind.

An induction head needs a head of an earlier layer that marks every key with the token before it. `circuits` names it:
the previous-token head whose silence takes most of the induction head's weight, compared with silencing other heads.
"""

import dataclasses
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.masks.probes import induction, offset, previous_token, same_token, sink
from headwise.models.gpt import GPT
from headwise.models.text_model import TextModel
from headwise.shapes import check_size
from headwise.study.finite import check_finite
from headwise.study.importance import logits_of
from headwise.study.interventions import checked_layers, gate
from headwise.study.samples import token_embedding
from headwise.study.watch import watch
from headwise.weights import AttentionMap, Scoring

KINDS = ("induction", "duplicate", "previous", "sink", "retrieval", "alignment")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLE, CUE = 8, 3  # tokens of a needle, and how many of them the end of the text repeats as a question
LEAST, LEAST_SINK = 0.1, 0.3  # scores from which a head is of a kind
WIDE = 1.96  # standard errors to each side of the mean, for 95 %


@dataclasses.dataclass(frozen=True, eq=False)
class HeadKinds:
    """Scores of every head by kind, and the circuits found.

    scores: by kind and layer, (samples, H).
    circuits: for each induction head, the previous-token head that feeds it and what silencing it does.
    copied: the share of needle tokens that the model predicts; None if it was not tried.
    uniform: by kind, the score of a head that attends to all keys alike.
    layers: the names of all layers, in order; head 5.4 is head 4 of layers[5].
    before: the tokens that every text began with.
    """

    scores: dict[str, dict[str, Tensor]]
    circuits: list[dict[str, Any]]
    copied: float | None
    uniform: dict[str, float] = dataclasses.field(default_factory=dict)
    layers: tuple[str, ...] = ()
    before: tuple[int, ...] = ()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All heads by their score of this kind, largest first, with 95 % intervals; "found" says if they are of it."""
        if kind not in self.scores:
            raise OptionError(f"of({kind!r}): expected one of {', '.join(self.scores)}.")
        rows = []
        for name, scores in self.scores[kind].items():
            mean, error = scores.mean(0), scores.std(0, correction=min(1, len(scores) - 1)) / math.sqrt(len(scores))
            for head, (score, wide) in enumerate(zip(mean.tolist(), (WIDE * error).tolist(), strict=True)):
                low, high = max(0.0, score - wide), min(1.0, score + wide)
                found = low > self.uniform.get(kind, 0.0) and score >= (LEAST_SINK if kind == "sink" else LEAST)
                rows.append({"layer": name, "head": head, "score": score, "low": low, "high": high, "found": found})
        return sorted(rows, key=lambda row: -row["score"])

    def found(self, kind: str) -> list[dict[str, Any]]:
        """The heads of this kind, largest score first."""
        return [row for row in self.of(kind) if row["found"]]

    def short(self, layer: str, head: int) -> str:
        """The short name of a head: 5.4 is head 4 of layer 5, both counted from 0."""
        layers = self.layers or tuple(dict.fromkeys(name for scores in self.scores.values() for name in scores))
        return f"{layers.index(layer)}.{head}"

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def table(self, count: int = 3) -> str:
        """The first `count` heads of every kind and the circuits, as text; 5.4 is head 4 of layer 5."""
        lines = [f"{'kind':<10} {'head':<6} score  95 % interval   layer"]
        for kind in self:
            rows = self.found(kind)
            for row in rows[:count]:
                name, interval = self.short(row["layer"], row["head"]), f"{row['low']:.3f} to {row['high']:.3f}"
                lines.append(f"{kind:<10} {name:<6} {row['score']:.3f}  {interval}  {row['layer']}")
            if len(rows) > count:
                lines.append(f"{'':<10} and {len(rows) - count} more")
            if not rows:
                best = self.of(kind)[0]
                name = self.short(best["layer"], best["head"])
                lines.append(f"{kind:<10} none found (the largest score: {name}, {best['score']:.3f})")
        if self.copied is not None:
            lines.append(f"the model predicts {100 * self.copied:.0f} % of the needle tokens")
        start = f"token {', '.join(map(str, self.before))} of the vocabulary" if self.before else "no start token"
        lines.append(f"every text tried begins with {start}")
        return "\n".join([*lines, *(line for circuit in self.circuits for line in self._told(circuit))])

    def _told(self, circuit: dict[str, Any]) -> list[str]:
        """A circuit in words."""
        verb = "feeds" if circuit["confirmed"] else "is not shown to feed"
        feeder, fed = (self.short(circuit[f"{x}layer"], circuit[f"{x}head"]) for x in ("from_", ""))
        return [
            f"{feeder} {verb} {fed}: induction {circuit['before']:.3f}, {circuit['after']:.3f} without it;",
            f"  at least {circuit['control']:.3f} without any one of {circuit['controls']} other heads",
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers, lists and strings."""
        return {
            "kinds": {kind: self.of(kind) for kind in self},
            "circuits": self.circuits,
            "copied": self.copied,
            "uniform": self.uniform,
            "layers": list(self.layers),
            "before": list(self.before),
        }

    def plot(self, kind: str = "induction", ax: Any = None) -> Any:
        """The scores of one `kind`, one row per layer, drawn with matplotlib; the axes, `ax` if it is given."""
        from headwise.study.importance import drawn_heads

        means = {name: scores.mean(0) for name, scores in self.scores[kind].items()}
        return drawn_heads(means, f"{kind} score", ax)


def head_kinds(
    model: TextModel | nn.Module,
    *,
    vocabulary: int | Sequence[int] | Tensor | None = None,
    samples: int = 12,
    length: int = 32,
    lengths: Sequence[int] = (64, 128, 256),
    depths: Sequence[float] = DEPTHS,
    haystack: Tensor | None = None,
    before: Sequence[int] | None = None,
    seed: int = 0,
) -> HeadKinds:
    """The heads of the known kinds, by experiment on texts of random tokens.

    Args:
        model: a model with its tokenizer, from `headwise.models.open_model`, or any model that `headwise.watch` sees.
        vocabulary: the tokens to draw from, or how many there are; by default all of the model's.
        samples: random texts, for the intervals.
        length: random tokens in a text, which then repeats them.
        lengths: tokens of the texts in which needles are hidden; those that the model cannot read are left out.
        depths: where the needle is, from 0, the beginning, to 1.
        haystack: tokens of a natural text to hide needles in; random tokens by default.
        before: tokens that every text begins with, which heads with nothing to do attend to; by default those of the
            tokenizer, or of the built-in model. A transformers model without its tokenizer gets none.
        seed: of the texts.
    """
    tried = _Trial(model, vocabulary, before, check_size("samples", samples), check_size("length", length), seed)
    check_finite(tried.module, lambda: tried.run(tried.tokens[:1]), "head_kinds")
    scores = tried.repeated()
    copied = None
    fitting = [n for n in lengths if tried.limit is None or n <= tried.limit]
    if fitting and tried.predicts:
        scores["retrieval"], copied = tried.needles(fitting, depths, haystack)
    layers, start = tuple(tried.uniform), tuple(tried.before.tolist())
    uniform = {kind: max(x.get(kind, 0.0) for x in tried.uniform.values()) for kind in scores}
    return HeadKinds(scores, tried.circuits(scores), copied, uniform, layers, start)


class _Trial:
    """A model, and the texts to try it on."""

    def __init__(
        self, model: Any, vocabulary: Any, before: Sequence[int] | None, samples: int, length: int, seed: int
    ) -> None:
        self.module: nn.Module = model.module if isinstance(model, TextModel) else model
        self.layers = checked_layers(self.module, "head_kinds")
        start, after = (model.codec.before, model.codec.after) if isinstance(model, TextModel) else ((), ())
        if isinstance(model, GPT):
            start = (model.config.start,)
        before = tuple(start if before is None else before)
        self.limit = model.limit if isinstance(model, TextModel) else None
        self.before, self.after = torch.tensor(before, dtype=torch.long), torch.tensor(after, dtype=torch.long)
        self.device = next((x.device for x in self.module.parameters()), torch.device("cpu"))
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = self._pool(vocabulary)
        self.samples, self.length = samples, min(length, len(self.pool))
        if self.limit is not None:
            self.length = min(self.length, (self.limit - len(before) - len(after)) // 2)
        once = self.drawn(samples, self.length)
        self.tokens = self.framed(torch.cat([once, once], 1))
        self.two_texts = "decoder_input_ids" in inspect.signature(self.module.forward).parameters
        self.predicts = False
        self.uniform: dict[str, dict[str, float]] = {}  # by layer and kind

    def _pool(self, vocabulary: Any) -> Tensor:
        """The tokens to draw from."""
        if vocabulary is None:
            embedding = token_embedding(self.module)
            if embedding is None:
                raise OptionError(
                    "head_kinds: the model has no embedding of tokens; pass vocabulary=, how many there are."
                )
            vocabulary = embedding.weight.shape[0]
        if isinstance(vocabulary, int):
            special = {*self.before.tolist(), *self.after.tolist(), 0}
            return torch.tensor([token for token in range(vocabulary) if token not in special])
        return torch.as_tensor(vocabulary)

    def drawn(self, rows: int, count: int) -> Tensor:
        """Random tokens (rows, count), all different within a row."""
        order = torch.rand(rows, len(self.pool), generator=self.generator).argsort(1)[:, :count]
        return self.pool[order]

    def framed(self, tokens: Tensor) -> Tensor:
        """Tokens with those that every text of the model begins and ends with."""
        frame = (self.before.expand(len(tokens), -1), tokens, self.after.expand(len(tokens), -1))
        return torch.cat(frame, 1).to(self.device)

    def run(self, tokens: Tensor) -> Any:
        """What the model makes of the tokens."""
        if self.two_texts:  # the decoder reads one token less, so that maps of cross-attention are told by their shape
            return self.module(tokens, decoder_input_ids=tokens[:, :-1])
        return self.module(tokens)

    def second_half(self) -> slice:
        """The queries of the second copy that have a token after an earlier copy."""
        first = len(self.before) + self.length
        return slice(first, first + self.length - 1)

    def repeated(self) -> dict[str, dict[str, Tensor]]:
        """Scores on repeated random tokens, by kind and layer, (samples, H)."""

        def measured(weights: AttentionMap) -> tuple[dict[str, Tensor], dict[str, float]]:
            source = weights._source()
            alike = AttentionMap(torch.zeros_like(source.query), source.key, Scoring(source.mask)).select(heads=0)
            uniform = {kind: x.mean().item() for kind, x in self._masses(alike).items()}
            return {kind: x.cpu() for kind, x in self._masses(weights).items()}, uniform

        with torch.no_grad(), watch(self.module, statistics=measured) as seen:
            logits = logits_of(self.run(self.tokens))
        self.uniform = {name: uniform for name, (_, uniform) in seen.items()}
        self.predicts = logits is not None and logits.shape[:2] == self.tokens.shape
        scores: dict[str, dict[str, Tensor]] = {}
        for kind in KINDS:
            found = {name: layer[kind] for name, (layer, _) in seen.items() if kind in layer}
            if found:
                scores[kind] = found
        return scores

    def _masses(self, weights: AttentionMap) -> dict[str, Tensor]:
        """The scores of the heads of one map by kind, (samples, H)."""
        first, (T, S) = len(self.before), weights.shape[2:]
        if T != S:  # cross-attention: the query at t predicts token t + 1, which is at the same place from the end
            return {"alignment": weights.mass(offset(0))[:, :, first:].mean(2)}
        ids = self.tokens[:, :S]
        probes = {"induction": induction(ids), "duplicate": same_token(ids)}
        masses = weights.panel(masses=probes | {"previous": previous_token(), "sink": sink(1)}).masses
        found = {kind: masses[kind][:, :, self.second_half()].mean(2) for kind in probes}
        found["previous"] = masses["previous"][:, :, max(first, 1) :].mean(2)
        found["sink"] = masses["sink"][:, :, 1:].mean(2)
        return found

    def needles(
        self, lengths: Sequence[int], depths: Sequence[float], haystack: Tensor | None
    ) -> tuple[dict[str, Tensor], float]:
        """The share of needle tokens that each head copies, (lengths · depths, H) by layer, and that the model does."""
        found: dict[str, list[Tensor]] = {}
        copied = []
        for length in lengths:
            texts, places = zip(*(self._hidden(length, depth, haystack) for depth in depths), strict=True)
            tokens, place = (
                torch.cat(texts),
                torch.tensor(places, device=self.device),
            )  # place of the needle's first token
            T = tokens.shape[1] - len(self.after)
            rows = slice(T - NEEDLE + CUE - 1, T - 1)  # queries that predict the rest of the needle
            steps = torch.arange(CUE, NEEDLE, device=self.device)
            with (
                torch.no_grad(),
                watch(self.module, statistics=lambda weights, rows=rows: weights.select(rows=rows).peak().key) as seen,
            ):
                logits = logits_of(self.run(tokens))
            assert logits is not None  # noqa: S101 - `predicts` says so
            right = logits[:, rows].argmax(-1) == tokens[:, T - NEEDLE + CUE : T]  # (depths, steps)
            copied.append(right.float().mean())
            at = place[:, None] + steps
            for name, keys in seen.items():
                hits = (keys == at[:, None]) & right[:, None]
                found.setdefault(name, []).append(hits.float().mean(2).cpu())
        return {name: torch.cat(x) for name, x in found.items()}, torch.stack(copied).mean().item()

    def _hidden(self, length: int, depth: float, haystack: Tensor | None) -> tuple[Tensor, int]:
        """A text with a needle at some depth and again at its end, and where the first is."""
        room = length - len(self.before) - len(self.after) - 2 * NEEDLE
        if room < 1:
            raise OptionError(f"head_kinds(lengths={length}): a needle takes {2 * NEEDLE + 1} tokens or more.")
        needle = self.drawn(1, NEEDLE)
        if haystack is None:
            rest = self.pool[torch.randint(len(self.pool), (1, room), generator=self.generator)]
        else:
            if haystack.numel() < room:
                raise OptionError(f"head_kinds: the haystack has {haystack.numel()} tokens, and {room} are needed.")
            first = int(torch.randint(haystack.numel() - room + 1, (1,), generator=self.generator))
            rest = haystack.flatten()[first : first + room][None].cpu()
        place = round(depth * room)
        text = torch.cat([rest[:, :place], needle, rest[:, place:], needle], 1)
        return self.framed(text), len(self.before) + place

    # Circuits.

    def circuits(self, scores: dict[str, dict[str, Tensor]], most: int = 4, others: int = 8) -> list[dict[str, Any]]:
        """For the strongest induction heads, which previous-token head of an earlier layer feeds each."""
        order = {name: number for number, name in enumerate(scores["induction"])}
        found = []
        for row in HeadKinds(scores, [], None).of("induction")[:most]:
            if row["low"] < 0.2:
                continue
            layer, head = row["layer"], row["head"]
            earlier = [x for x in HeadKinds(scores, [], None).of("previous") if order[x["layer"]] < order[layer]]
            if not earlier:
                continue
            feeders, rest = earlier[:3], earlier[3:]
            picks = torch.randperm(len(rest), generator=self.generator)[:others].tolist()
            tried = [*feeders, *(rest[i] for i in picks)]
            after = self._without(layer, head, [(x["layer"], x["head"]) for x in tried])
            best = min(range(len(feeders)), key=lambda i: after[i])
            least = min(after[len(feeders) :], default=math.nan)
            confirmed = after[best] < least and after[best] < row["score"] - 0.1
            found.append(
                {
                    "layer": layer, "head": head,
                    "from_layer": feeders[best]["layer"], "from_head": feeders[best]["head"],
                    "before": row["score"], "after": after[best], "control": least, "controls": len(picks),
                    "confirmed": bool(confirmed),
                }
            )  # fmt: skip
        return found

    def _without(self, layer: str, head: int, silent: Sequence[tuple[str, int]]) -> list[float]:
        """The induction score of a head without each of some others, all of which share a pass for each sample."""
        second, sums = self.second_half(), torch.zeros(len(silent))
        widths = {name: H for name, H in self._widths().items() if name in {n for n, _ in silent}}
        gates = {name: torch.ones(len(silent), H, device=self.device) for name, H in widths.items()}
        for row, (name, other) in enumerate(silent):
            gates[name][row, other] = 0
        for sample in self.tokens:
            tokens = sample.expand(len(silent), -1)

            def measured(weights: AttentionMap, tokens: Tensor = tokens) -> Tensor:
                return weights.select(heads=head).mass(induction(tokens))[:, 0, second].mean(1)

            with (
                torch.no_grad(),
                gate(self.module, gates),
                watch(self.module, layers=[layer], statistics=measured) as seen,
            ):
                self.run(tokens)
            sums += seen[layer].cpu()
        return (sums / len(self.tokens)).tolist()

    def _widths(self) -> dict[str, int]:
        with torch.no_grad(), watch(self.module, statistics=lambda weights: weights.shape[1]) as seen:
            self.run(self.tokens[:1])
        return dict(seen)
