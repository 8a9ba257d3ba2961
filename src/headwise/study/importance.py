"""`importance`: how much the loss depends on each head.

>>> from headwise import importance, load_builtin
>>> model = load_builtin()
>>> tokens = model.tokens("The captain looked at the sea, and the sea looked at the captain.")
>>> found = importance(model.gpt, tokens, controls=2)
>>> found["blocks.4.attention"].shape  # what removing each head adds to the loss, for every sample
torch.Size([1, 8])
>>> len(found.top(3)), found.passes
(3, 1)

Attention weights say where a head looks. What it is worth is measured by removing it:

    gradient   the loss's slope in a gate on the head, at 1 (Michel et al. 2019): first order, one backward pass
    silence    the head's output becomes zero
    mean       it becomes its mean over all samples and positions
    patch      it becomes what it is in another run, by default for another sample of the batch

A head is compared with controls: random subspaces of its layer's heads, as wide as one head, removed in the same way.
If a head matters less than a random slice of its layer, its effect does not come from being a head.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import OptionError, ShapeError, need
from headwise.shapes import check_size
from headwise.study.earlier import EarlierModules
from headwise.study.interventions import Intervention, checked_layers
from headwise.study.outputs import derangement
from headwise.study.samples import Inputs, check_tokens, first_tensor, run, taken
from headwise.study.watch import watch

WAYS = ("gradient", "silence", "mean", "patch")
Loss = Callable[[Any, Any], Tensor]
TOKENS = {"cpu": 2048}  # in one pass of a sweep, if the caller does not say how many rows: more leave the cache
MOST_TOKENS = 8192  # on other devices
ROWS = 64
KEPT = 2**16  # tokens of all samples for which the outputs of modules are kept during a sweep


class HeadEffect(NamedTuple):
    """What removing one head adds to the loss.

    effect: the mean over samples.
    error: its standard error; NaN for one sample.
    """

    effect: float
    error: float


@dataclasses.dataclass(frozen=True, eq=False)
class Importance(Mapping[str, Tensor]):
    """What each head is worth: `found[layer]` is (samples, H), what removing a head adds to the loss of a sample.

    by: how heads were removed.
    effects: what removing each head adds to the loss, (samples, H), by layer; below 0 the head does harm.
    controls: the same for random subspaces as wide as a head, (samples, controls), by layer.
    loss: the loss of the whole model, (samples,).
    passes: how many batches the model read to measure this; preparing it took two or three more.
    """

    by: str
    effects: dict[str, Tensor]
    controls: dict[str, Tensor]
    loss: Tensor
    passes: int

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.effects:
            raise OptionError(f"importance(...)[{name!r}]: not a layer of this model; there are {list(self.effects)}.")
        return self.effects[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.effects)

    def __len__(self) -> int:
        return len(self.effects)

    def __repr__(self) -> str:
        heads = sum(x.shape[1] for x in self.effects.values())
        samples = len(self.loss)
        return f"Importance(by={self.by!r}, {heads} heads in {len(self)} layers, {samples} samples)"

    @property
    def scores(self) -> dict[str, Tensor]:
        """The mean over samples of |effect|, (H,), by layer."""
        return {name: x.abs().mean(0) for name, x in self.effects.items()}

    @property
    def heads(self) -> dict[tuple[str, int], HeadEffect]:
        """The effect of every head with its standard error, by layer and head: what a picture is colored by."""
        return {(row["layer"], row["head"]): HeadEffect(row["effect"], row["error"]) for row in self.rows()}

    def rows(self) -> list[dict[str, Any]]:
        """One row per head: layer, head, effect, its standard error, score, the layer's controls, and how many of the
        controls have a smaller score."""
        found = []
        for name, effects in self.effects.items():
            controls = self.controls[name].abs().mean(0)
            error = (
                effects.std(0) / math.sqrt(len(effects)) if len(effects) > 1 else torch.full_like(effects[0], math.nan)
            )
            for head in range(effects.shape[1]):
                score = effects[:, head].abs().mean()
                found.append(
                    {
                        "layer": name,
                        "head": head,
                        "effect": effects[:, head].mean().item(),
                        "error": error[head].item(),
                        "score": score.item(),
                        "control": controls.mean().item() if len(controls) else math.nan,
                        "above": int((score > controls).sum()),
                    }
                )
        return found

    def top(self, count: int = 10) -> list[dict[str, Any]]:
        """The rows of the `count` heads with the largest scores."""
        return sorted(self.rows(), key=lambda row: -row["score"])[:count]

    def table(self, count: int = 10) -> str:
        """The `count` heads with the largest scores, as text; 5.4 is head 4 of layer 5, both counted from 0."""
        draws = next(iter(self.controls.values())).shape[1] if self.controls else 0
        numbers = {name: number for number, name in enumerate(self.effects)}
        lines = ["head     effect ± error    score  control  above  layer"]
        for row in self.top(count):
            error = "" if math.isnan(row["error"]) else f" ± {row['error']:.4f}"
            control = "" if math.isnan(row["control"]) else f"{row['control']:.4f}"
            above = f"{row['above']}/{draws}" if draws else ""
            name = f"{numbers[row['layer']]}.{row['head']}"
            effect = f"{row['effect']:+.4f}{error}"
            lines.append(f"{name:<6} {effect:>17}  {row['score']:>7.4f}  {control:>7}  {above:>5}  {row['layer']}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers, lists and strings; NaN becomes None."""
        rows = [
            {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in self.rows()
        ]
        return {
            "by": self.by,
            "samples": len(self.loss),
            "passes": self.passes,
            "loss": self.loss.mean().item(),
            "heads": rows,
        }

    def plot(self, ax: Any = None) -> Any:
        """The scores of all heads, one row per layer, drawn with matplotlib; the axes, `ax` if given."""
        return drawn_heads(self.scores, f"|change of the loss| by {self.by}", ax)

    def rank_correlation(self, other: "Importance") -> float:
        """Spearman's correlation of the scores of all heads with those of `other`, of the same heads."""
        if {n: x.shape[1] for n, x in self.items()} != {n: x.shape[1] for n, x in other.items()}:
            raise OptionError("rank_correlation: the two measurements are of different heads.")
        a, b = (torch.cat([found.scores[name] for name in self.effects]) for found in (self, other))
        ranks = torch.stack([_ranks(a), _ranks(b)])
        return torch.corrcoef(ranks)[0, 1].item()


def drawn_heads(scores: Mapping[str, Tensor], title: str, ax: Any = None) -> Any:
    """Numbers of heads, (H,) by layer, as a matplotlib picture with one row per layer; the axes."""
    pyplot = need("matplotlib.pyplot", "plot", "plots")
    most = max(len(x) for x in scores.values())
    grid = torch.full((len(scores), most), math.nan)
    for row, score in enumerate(scores.values()):
        grid[row, : len(score)] = score
    ax = _own_axes(pyplot, most, len(scores)) if ax is None else ax
    image = ax.imshow(grid.numpy(), cmap="cividis", vmin=0)
    ax.set_yticks(range(len(scores)), list(scores))
    ax.set_xlabel("head")
    ax.set_title(title)
    ax.figure.colorbar(image, ax=ax)
    return ax


def _own_axes(pyplot: Any, heads: int, layers: int) -> Any:
    """New axes for so many cells, with room for the names of layers."""
    size = (0.5 * heads + 3, 0.4 * layers + 1.5)
    return pyplot.subplots(figsize=size, layout="constrained")[1]


def _ranks(numbers: Tensor) -> Tensor:
    """Ranks from 0, equal numbers sharing their mean rank."""
    smaller = (numbers[:, None] > numbers).sum(1).double()
    equal = (numbers[:, None] == numbers).sum(1).double()
    return smaller + (equal - 1) / 2


def importance(
    model: nn.Module,
    tokens: Inputs,
    *,
    by: str = "gradient",
    loss: Loss | None = None,
    source: Inputs | None = None,
    controls: int = 8,
    batch: int | None = None,
    seed: int = 0,
) -> Importance:
    """What every head is worth to the loss on some samples, with random controls.

    Args:
        model: a model that `headwise.watch` can see, in evaluation.
        tokens: (B, T), or keyword arguments of the model, such as a tokenizer's output. Every row is a sample.
        by: "gradient", "silence", "mean" or "patch".
        loss: a function (output, tokens) -> (B,), one number for each sample; by default the mean cross-entropy of the
            next token, for models that predict it.
        source: for "patch", the other run's tokens, of the same shape; by default the same samples in another order.
        controls: how many random subspaces of each layer to remove for comparison.
        batch: rows of one forward pass; by default as many as make 2048 tokens (8192 on a GPU), at most 64.
        seed: of the controls and of the order of samples.
    """
    if by not in WAYS:
        raise OptionError(f"importance(by={by!r}): expected one of {', '.join(map(repr, WAYS))}.")
    study = _Study(model, tokens, loss, controls, batch, seed)
    return study.by_gradient() if by == "gradient" else study.by_removal(by, source)


# How it is measured ------------------------------------------------------------------------------------------------


def batch_of(length: int, device: torch.device) -> int:
    """How many samples of so many tokens one pass holds."""
    return min(ROWS, max(1, TOKENS.get(device.type, MOST_TOKENS) // max(1, length)))


class _Study:
    """A model, its samples and its loss, ready to remove heads."""

    def __init__(
        self, model: nn.Module, tokens: Inputs, loss: Loss | None, controls: int, batch: int | None, seed: int
    ) -> None:
        self.layers = checked_layers(model, "importance")
        self.model, self.inputs, self.seed, self.passes = model, tokens, seed, 0
        shown = first_tensor(tokens, "importance")
        check_tokens(model, tokens, "importance")
        self.samples, length = shown.shape[0], shown[0].numel() if len(shown) else 0
        if self.samples < 1:
            raise OptionError(f"importance(tokens={tuple(shown.shape)}): there are no samples; expected (B, T).")
        self.device = shown.device
        self.controls = controls if controls == 0 else check_size("controls", controls)
        self.batch = batch_of(length, shown.device) if batch is None else check_size("batch", batch)
        self.loss = next_token_loss(model, self.rows(torch.arange(1))) if loss is None else loss
        self.widths = self._widths()

    def rows(self, samples: Tensor) -> Any:
        """These samples of the inputs."""
        return taken(self.inputs, samples, self.samples)

    def run(self, inputs: Any, count: int) -> Tensor:
        """The loss of every sample of the inputs, (count,)."""
        self.passes += 1
        found = self.loss(run(self.model, inputs), inputs)
        if not isinstance(found, Tensor) or found.shape != (count,):
            raise ShapeError(
                f"loss returned {tuple(found.shape) if isinstance(found, Tensor) else found!r}; expected one number "
                f"for each of {count} samples, ({count},). Use reduction='none' and a mean over positions."
            )
        return found

    def _widths(self) -> dict[str, tuple[int, int]]:
        """The number of heads and their width, by layer, as two samples show them."""
        with torch.no_grad(), watch(self.model, outputs=True) as seen:
            run(self.model, self.rows(torch.tensor([0, self.samples - 1])))
        if any(layer.shape[0] != 2 for layer in seen.outputs.values()):
            self.batch = 1  # rows are not samples, as in windows of images: a gate then applies to all rows of a pass
        return {name: (layer.shape[1], layer.shape[3]) for name, layer in seen.outputs.items()}

    def removal(self, amounts: Mapping[str, Tensor], targets: Mapping[str, Any]) -> Intervention:
        """A context in which units of layers are removed by these amounts, (rows, H + controls)."""

        def made(name: str) -> tuple[Any, ...]:
            return (_Removal(amounts[name], targets.get(name), self.frames[name]),)

        return Intervention(self.model, self.layers, made, amounts)

    @functools.cached_property
    def frames(self) -> dict[str, Tensor]:
        """Random orthonormal frames of each layer's heads, (controls, H · Dv, Dv)."""
        generator, found = torch.Generator().manual_seed(self.seed), {}
        for name, (H, D) in self.widths.items():
            found[name] = torch.linalg.qr(torch.randn(self.controls, H * D, D, generator=generator)).Q.to(self.device)
        return found

    def by_gradient(self) -> Importance:
        """The slope of the loss in the amount that is removed of each unit."""
        self.passes = 0
        found: dict[str, list[Tensor]] = {name: [] for name in self.widths}
        losses = []
        for chunk in torch.arange(self.samples).split(self.batch):
            amounts = {
                name: torch.zeros(len(chunk), H + self.controls, device=self.device, requires_grad=True)
                for name, (H, _) in self.widths.items()
            }
            with torch.enable_grad(), self.removal(amounts, {}):
                loss = self.run(self.rows(chunk), len(chunk))
                slopes = self._slopes(loss, amounts)
            losses.append(loss.detach())
            for name, slope in zip(amounts, slopes, strict=True):
                found[name].append(slope)
        return self._result("gradient", {name: torch.cat(x) for name, x in found.items()}, torch.cat(losses))

    def _slopes(self, loss: Tensor, amounts: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """The gradient of the loss in what is removed, by layer."""
        found = [None] * len(amounts)
        if loss.requires_grad:
            found = torch.autograd.grad(loss.sum(), list(amounts.values()), allow_unused=True)  # type: ignore[assignment]
        missing = [name for name, slope in zip(amounts, found, strict=True) if slope is None]
        if missing:
            raise OptionError(
                f"importance(by='gradient'): the loss has no gradient in the heads of {missing[0]!r}: the model or the "
                f"loss computes something without gradients, or does not use these heads. Use by='silence'."
            )
        return found  # type: ignore[return-value]

    @torch.no_grad()
    def by_removal(self, by: str, source: Inputs | None) -> Importance:
        """The loss without each unit, many units of a layer in one pass, minus the loss of the whole model."""
        self.passes = 0
        base, prefix = self._whole()
        targets = self._targets(by, source)
        found = {name: base.new_zeros(self.samples, H + self.controls) for name, (H, _) in self.widths.items()}
        for name in self.widths:
            for tasks, loss in self._swept(name, targets.get(name, []), prefix, base):
                samples, units = tasks.to(base.device).unbind(1)
                found[name][samples, units] = loss - base[samples]
        return self._result(by, found, base)

    def _whole(self) -> tuple[Tensor, EarlierModules | None]:
        """The loss of the whole model, and what its modules returned, unless that is too much to keep."""
        size = self.samples * first_tensor(self.inputs, "importance")[0].numel()
        if size > KEPT or set(self.widths) - set(self.layers):  # too much to keep; or a layer is called several times
            chunks = torch.arange(self.samples).split(self.batch)
            return torch.cat([self.run(self.rows(chunk), len(chunk)) for chunk in chunks]), None
        losses: dict[int, Tensor] = {}

        def each(sample: int) -> None:
            losses[sample] = self.run(self.rows(torch.tensor([sample])), 1)

        prefix = EarlierModules(self.model, self.layers, each, self.samples)
        return torch.cat([losses[sample] for sample in range(self.samples)]), prefix

    def _swept(
        self, name: str, targets: Sequence[Tensor], prefix: EarlierModules | None, base: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Samples and units of a layer, (tasks, 2), with the loss without them, (tasks,).

        What comes before the layer is not computed again. In the first pass, one more row removes nothing: if its loss
        is not that of the whole model, the model cannot be run in part.
        """
        units = self.widths[name][0] + self.controls
        for tasks in torch.cartesian_prod(torch.arange(self.samples), torch.arange(units)).split(self.batch):
            first = not int(tasks[0].sum())
            if prefix is not None and first:
                whole = torch.tensor([[self.samples - 1, units]])
                loss = self._in_part(name, torch.cat([tasks, whole]), targets, prefix)
                if loss is not None and torch.allclose(loss[-1:], base[-1:], rtol=1e-3, atol=1e-4):
                    yield tasks, loss[:-1]
                    continue
                prefix = None
            with nullcontext() if prefix is None else prefix.skipped(name, tasks[:, 0]):
                loss = self._without(name, tasks, targets)
            yield tasks, loss

    def _in_part(self, name: str, tasks: Tensor, targets: Sequence[Tensor], prefix: EarlierModules) -> Tensor | None:
        """The loss of tasks if nothing before the layer is computed again; None if that cannot be done."""
        try:
            with prefix.skipped(name, tasks[:, 0]):
                return self._without(name, tasks, targets)
        except Exception:  # code that we do not know, and which cannot be run in part
            return None

    def _without(self, name: str, tasks: Tensor, targets: Sequence[Tensor]) -> Tensor:
        """The loss of samples without one unit each; a unit after the last removes nothing."""
        samples, units = tasks.unbind(1)
        amount = torch.eye(self.widths[name][0] + self.controls + 1)[units, :-1]
        chosen = [_of_rows(x, samples, self.samples) for x in targets]
        with self.removal({name: amount.to(self.device)}, {name: chosen}):
            return self.run(self.rows(samples), len(tasks))

    def _targets(self, by: str, source: Inputs | None) -> dict[str, list[Tensor]]:
        """What removed heads become, by layer and call; nothing for zeros."""
        if by == "silence":
            return {}
        inputs = self.inputs
        if by == "patch":
            if source is None and self.samples < 2:
                raise OptionError("importance(by='patch') of one sample needs source=, the tokens of another run.")
            inputs = self.rows(derangement(self.samples, self.seed)) if source is None else source
        seen = []
        for chunk in torch.arange(self.samples).split(self.batch):
            with watch(self.model, outputs=True) as part:
                self.run(taken(inputs, chunk, self.samples), len(chunk))
            seen.append(part.outputs)
        if by == "mean":
            sizes = torch.tensor([len(chunk) for chunk in torch.arange(self.samples).split(self.batch)])
            means = {name: torch.stack([x.mean()[name] for x in seen]) for name in self.widths}
            share = (sizes / sizes.sum()).view(-1, 1, 1, 1, 1)
            return {name: [(x * share.to(x)).sum(0)] for name, x in means.items()}
        return {
            name: [torch.cat([x.calls[name][i].read for x in seen]) for i in range(len(seen[0].calls[name]))]
            for name in self.widths
        }

    def _result(self, by: str, found: dict[str, Tensor], loss: Tensor) -> Importance:
        heads = {name: x[:, : self.widths[name][0]].cpu() for name, x in found.items()}
        controls = {name: x[:, self.widths[name][0] :].cpu() for name, x in found.items()}
        return Importance(by, heads, controls, loss.cpu(), self.passes)


class _Removal:
    """Moves units of what heads read towards a target: heads, and random subspaces of all heads together.

    Args:
        amount: (rows, H + controls), 1 to remove a unit from a row, 0 to leave it; differentiable.
        target: for each call, what a removed unit becomes, (rows or 1, H, T or 1, Dv); None for zeros.
        frames: (controls, H · Dv, Dv), the subspaces.
    """

    def __init__(self, amount: Tensor, target: list[Tensor] | None, frames: Tensor) -> None:
        self.amount, self.target, self.frames, self.number = amount, target, frames, -1

    def __call__(self, read: Tensor) -> Tensor:
        self.number += 1
        B, H, T, D = read.shape
        apart = read if not self.target else read - self.target[self.number % len(self.target)].to(read)
        amount = self.amount.to(read.dtype)
        amount = amount.expand(B, -1) if len(amount) == 1 else amount
        changed = read - amount[:, :H, None, None] * apart
        merged = apart.transpose(1, 2).flatten(2)  # (B, T, H · Dv)
        for number, frame in enumerate(self.frames.to(read.dtype)):
            share = amount[:, H + number]
            rows = torch.arange(B, device=read.device) if amount.requires_grad else share.nonzero()[:, 0]
            if len(rows):
                removed = ((merged[rows] @ frame) @ frame.T).view(-1, T, H, D).transpose(1, 2)
                changed = changed.index_add(0, rows, -share[rows, None, None, None] * removed)
        return changed


def _of_rows(target: Tensor, samples: Tensor, count: int) -> Tensor:
    """The target of each row of a pass; a sample may have several rows."""
    if target.shape[0] % count or count == 1:
        return target
    by_sample: Tensor = target.unflatten(0, (count, -1))
    return by_sample[samples.to(target.device)].flatten(0, 1)


# Losses ------------------------------------------------------------------------------------------------------------


def logits_of(output: Any) -> Tensor | None:
    """The logits (B, T, V) in what a model returned, or None."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return found if isinstance(found, Tensor) and found.dim() == 3 else None


def next_token_loss(model: nn.Module, inputs: Any) -> Loss:
    """The mean cross-entropy of the next token, for a model that predicts it; `inputs` is a sample to try it with."""
    cure = "Pass loss=, a function (output, tokens) -> (B,), one number for each sample."
    ids = inputs if isinstance(inputs, Tensor) else inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise OptionError(f"importance: the inputs are not tokens (B, T), so there is no default loss. {cure}")
    if ids.shape[1] < 2:
        raise OptionError(
            f"importance: samples of {ids.shape[1]} token have no next token, so there is no loss. Expected (B, T) "
            f"with T of 2 or more. {cure}"
        )
    problem = why_not_predicting(model, inputs, ids)
    if problem is not None:
        raise OptionError(f"importance: {type(model).__name__} {problem}. {cure}")
    return mean_cross_entropy


def why_not_predicting(model: nn.Module, inputs: Any, ids: Tensor) -> str | None:
    """Why a model does not predict the next token, or None if it does, which is tried: it may not see that token.

    Args:
        model: the model.
        inputs: tokens (B, T), or keyword arguments of the model.
        ids: the tokens among them.
    """

    def logits_for(tokens: Tensor) -> Tensor | None:
        with torch.no_grad():
            if isinstance(inputs, Tensor):
                return logits_of(model(tokens))
            return logits_of(model(**{**inputs, "input_ids": tokens}))

    first = logits_for(ids)
    if first is None or first.shape[:2] != ids.shape:
        return "gives no logits (B, T, V) for its tokens, so it predicts none"
    if bool(first.isnan().any()):
        return "gives logits that are NaN; its weights may be damaged"
    if ids.shape[1] < 2:
        return None
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % first.shape[2]
    second = logits_for(other)
    if second is None or not torch.allclose(first[:, :-1], second[:, :-1], atol=1e-3, rtol=1e-3):
        return "sees the tokens after each one, so it does not predict them"
    return None


def mean_cross_entropy(output: Any, inputs: Any) -> Tensor:
    """The mean cross-entropy of the next token of every sample, (B,); padding is left out if it is marked."""
    ids = inputs if isinstance(inputs, Tensor) else inputs["input_ids"]
    logits = logits_of(output)
    assert logits is not None  # noqa: S101 - `next_token_loss` has checked it
    targets = F.pad(ids[:, 1:], (0, 1))  # the last logits predict nothing; leaving them in avoids a copy of all
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(ids.shape)[:, :-1]
    real = None if isinstance(inputs, Tensor) else inputs.get("attention_mask")
    if real is None or real.shape != ids.shape:
        return each.mean(1)
    real = real[:, 1:].to(each)
    found: Tensor = (each * real).sum(1) / real.sum(1).clamp(min=1)
    return found
