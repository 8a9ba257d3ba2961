"""The ten steps on real words: one attention layer of a real model, reading a sentence.

The layer gets what it gets inside the model. Queries and keys are taken after the model has encoded positions in them,
so the weights are those of the model; what else a model does to its scores is reported, not shown.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, OptionError
from headwise.layer import MultiHeadAttention
from headwise.layer.inputs import LayerInputs
from headwise.layer.positions import PositionalEncoding
from headwise.learn.configs import kind_of
from headwise.learn.steps import sentences
from headwise.models import TextModel, open_model
from headwise.models.checkpoint import open_checkpoint
from headwise.models.text_model import spoken
from headwise.study.finite import NotFiniteError, nan_told
from headwise.view.tokens import labels, shown

MOST_TOKENS = 32
NAMES = (
    "project", "split", "transpose", "scores", "mask", "scale", "softmax", "weighted values", "concat", "project",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cut:
    """The layer's numbers cut into some number of heads, as the scores see them: (H, T, D) each, positions encoded."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return self.query.shape[0]

    def scores(self) -> Tensor:
        """(H, T, T), neither masked nor scaled."""
        return self.query @ self.key.mT

    def weights(self, visible: Tensor) -> Tensor:
        """The attention weights (H, T, T)."""
        scores = self.scores() / math.sqrt(self.query.shape[-1])
        return scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)


@dataclasses.dataclass(frozen=True)
class WordSteps:
    """One layer of a model on a sentence.

    Args:
        model: its name.
        layer: the layer's name, and `place` its number.
        place: the layer's number.
        layers: how many layers the model has.
        words: the tokens as text.
        visible: True where a query may attend, (T, T).
        x: the input of the layer, (T, E).
        linears: weight and bias of the query, key, value and output projection.
        cuts: the numbers cut into heads, by number of heads; the model's own is `own`.
        own: the model's number of heads.
        notes: what the model does besides.
    """

    model: str
    layer: str
    place: int
    layers: int
    words: list[str]
    visible: Tensor
    x: Tensor
    linears: tuple[tuple[Tensor, Tensor | None], ...]
    cuts: dict[int, Cut]
    own: int
    notes: list[str]

    @property
    def cut(self) -> Cut:
        """The numbers as the model cuts them."""
        return self.cuts[self.own]

    def projected(self) -> dict[str, Tensor]:
        """Query, key and value after step 1, (T, H·D), before positions."""
        made = zip(("query", "key", "value"), self.linears, strict=False)
        return {name: nn.functional.linear(self.x, weight, bias) for name, (weight, bias) in made}

    def weights(self) -> Tensor:
        """The attention weights of every head, (H, T, T)."""
        return self.cut.weights(self.visible)

    def heads(self) -> Tensor:
        """What every head reads, (H, T, D)."""
        return self.weights() @ self.cut.value

    def merged(self) -> Tensor:
        """The heads side by side, (T, H·D)."""
        return self.heads().transpose(0, 1).flatten(1)

    def output(self) -> Tensor:
        """The output of the layer, (T, E)."""
        weight, bias = self.linears[3]
        return nn.functional.linear(self.merged(), weight, bias)

    def shapes(self) -> list[str]:
        """The shape after each of the ten steps."""
        T, H = len(self.words), self.own
        D, width, out = self.cut.query.shape[-1], self.merged().shape[1], self.output().shape[1]
        square = f"(1, {H}, {T}, {T})"
        split = f"(1, {T}, {H}, {D})"
        return [
            f"(1, {T}, {width})", split, f"(1, {H}, {T}, {D})", *[square] * 4, f"(1, {H}, {T}, {D})",
            f"(1, {T}, {width})", f"(1, {T}, {out})",
        ]  # fmt: skip

    def headline(self) -> str:
        """One line that says what is shown."""
        kind = f"{self.own} heads of width {self.cut.query.shape[-1]}"
        return f"{spoken(self.model)}, layer {self.place} (of 0 to {self.layers - 1}), {len(self.words)} tokens, {kind}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        reasons = sentences()
        return {
            "model": self.model, "layer": self.layer, "place": self.place, "layers": self.layers, "words": self.words,
            "heads": self.own, "also": self.notes,
            "steps": [
                {"number": number, "name": name, "shape": shape, "why": reasons[number]}
                for number, (name, shape) in enumerate(zip(NAMES, self.shapes(), strict=True), 1)
            ],
            "weights": self.weights().tolist(), "heads_read": self.heads().tolist(), "output": self.output().tolist(),
        }  # fmt: skip


def word_steps(text: str, model: Any = "builtin", layer: int | None = None) -> WordSteps:
    """The ten steps of one layer on a sentence.

    >>> steps = word_steps("The quick brown fox")
    >>> steps.words, steps.weights().shape
    (['<|start|>', 'The', 'quick', 'brown', 'fo', 'x'], torch.Size([8, 6, 6]))

    Args:
        text: the sentence, at most 32 tokens.
        model: "builtin", a model's folder, or a model in memory, as `headwise.models.open_model` takes it.
        layer: the number of the layer; by default one in the middle.
    """
    opened = open_model(model)
    tokens = opened.tokens(text, most=10**9)
    if tokens.shape[1] > MOST_TOKENS:
        raise OptionError(
            f"the text is {tokens.shape[1]} tokens long; the steps show at most {MOST_TOKENS}. Shorten it, or look at "
            f"long texts with `headwise view`."
        )
    layers = _layers(opened)
    place = _place(layer, len(layers))
    name, module, read = layers[place]
    x = _input(opened, tokens, module)
    attention = read().eval()
    with torch.no_grad():
        return _made(opened, tokens, place, len(layers), name, attention, x)


Layers = list[tuple[str, nn.Module, Callable[[], MultiHeadAttention]]]


def _layers(model: TextModel) -> Layers:
    """The name, the module and a headwise layer with its weights, for every attention layer."""
    own = [(name, m) for name, m in model.module.named_modules() if isinstance(m, MultiHeadAttention)]
    if own:
        return [(name, module, lambda module=module: module) for name, module in own]  # type: ignore[misc]
    config: dict[str, Any] = getattr(getattr(model.module, "config", None), "to_dict", dict)()
    checkpoint, modules = open_checkpoint(model.module, config=config), dict(model.module.named_modules())
    found = [(x.name, modules[x.name]) for x in checkpoint.layers if x.name in modules]
    if not found:
        raise OptionError(f"no attention layer was found in {model.name}. `headwise inspect` says what it holds.")
    return [(name, module, lambda name=name: checkpoint.read(name)) for name, module in found]  # type: ignore[misc]


def _place(layer: int | None, count: int) -> int:
    if layer is None:
        return min(count - 1, math.ceil(count / 2))
    if not 0 <= layer < count:
        raise OptionError(f"layer {layer}: the model has layers 0 to {count - 1}.")
    return layer


def _input(model: TextModel, tokens: Tensor, module: nn.Module) -> Tensor:
    """What the module is given when the model reads the tokens, (1, T, E)."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    hook = module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            model.read(tokens.to(model.device))
    finally:
        hook.remove()
    if not seen:
        raise OptionError(f"{model.name} did not run this layer on the text.")
    return seen[0].detach().float().cpu()


def _made(
    model: TextModel, tokens: Tensor, place: int, count: int, name: str, attention: MultiHeadAttention, x: Tensor
) -> WordSteps:
    attention = copy.deepcopy(attention).float().cpu()
    weights, biases = attention.projections()
    if attention.out_proj is None:
        raise OptionError(f"{name} has no output projection, so it does not have all ten steps.")
    linears = [*zip(weights, biases, strict=True), (attention.out_proj.weight, attention.out_proj.bias)]
    call = attention.plan(LayerInputs(x))
    group = call.query.shape[1] // call.key.shape[1]
    own = Cut(call.query[0], call.key[0].repeat_interleave(group, 0), call.value[0].repeat_interleave(group, 0))
    T = x.shape[1]
    mask = call.scoring.mask
    visible = torch.ones(T, T, dtype=torch.bool) if mask is None else mask.to_tensor(T).reshape(-1, T, T)[0]
    words, starts = zip(*model.codec.characters(tokens.flatten().tolist()), strict=True)
    pieces = [shown(piece) for piece in labels(words, starts)]
    cuts = {own.heads: own} | (_other_cuts(attention, x, linears) if group == 1 else {})
    steps = WordSteps(
        model.name, name, place, count, pieces, visible, x[0], tuple(linears), dict(sorted(cuts.items())), own.heads, []
    )  # fmt: skip
    true = attention(x, return_weights=True)[1][0]
    if not bool(steps.cut.scores().isfinite().all()):
        raise NotFiniteError(f"steps: {nan_told(name, place)}")
    if not bool(steps.output().isfinite().all()):
        raise NotFiniteError(f"steps: the output of {name} (layer {place}) is not finite; its weights may be damaged.")
    steps.notes.extend(_notes(attention, group, torch.allclose(true, steps.weights(), atol=1e-4)))
    return steps


def _other_cuts(
    attention: MultiHeadAttention, x: Tensor, linears: list[tuple[Tensor, Tensor | None]]
) -> dict[int, Cut]:
    """The same projections cut into other numbers of heads, where the positions allow it."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    state = {f"{name}.weight": weight for name, (weight, _) in zip(names, linears, strict=True)}
    state |= {f"{name}.bias": bias for name, (_, bias) in zip(names, linears, strict=True) if bias is not None}
    cuts = {}
    for heads in (1, 2, 4, 8, 16):
        if heads != attention.num_heads and linears[0][0].shape[0] % (2 * heads) == 0:
            try:
                other = MultiHeadAttention.from_state_dict(
                    state, num_heads=heads, causal=True, position=copy.deepcopy(attention.position)
                )
                call = other.plan(LayerInputs(x))
            except HeadwiseError:  # a position or a norm that fits one width only
                continue
            cuts[heads] = Cut(call.query[0], call.key[0], call.value[0])
    return cuts


def _notes(attention: MultiHeadAttention, group: int, agrees: bool) -> list[str]:
    notes = []
    if isinstance(attention.position, PositionalEncoding):
        notes.append(f"queries and keys are changed by position before the scores ({attention.position.describe()})")
    if group > 1:
        kind = kind_of(attention.num_heads, attention.num_heads // group)
        notes.append(f"{group} query heads share a key/value head ({kind}); it is shown once for each of them")
    if not agrees:
        notes.append("this model does more to its scores than the ten steps, so its own weights differ from these")
    return notes
