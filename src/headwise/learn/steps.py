"""The ten steps explained: what goes in, what is done, what comes out, and why.

Tensors come from the reference itself, and the sentences are its comments, so that neither can drift. Operations are
Python: a test evaluates each on the tensors before it and finds the tensors after it.
"""

import dataclasses
import functools
import inspect
import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise import reference
from headwise.errors import OptionError
from headwise.layer import MultiHeadAttention
from headwise.layer.options import Widths
from headwise.learn.configs import Config
from headwise.learn.forms import FORMS, Form
from headwise.masks import causal as causal_mask
from headwise.shapes import check_size

Projections = tuple[reference.Linear, reference.Linear, reference.Linear, reference.Linear | None]

SIX = "in six: project (1), split (2), transpose (3), attention (4 to 8), concat (9), project (10)"
SHORT = {"query": "q", "key": "k", "value": "v"}
FITS = 8  # rows and columns of numbers that are shown
MOST_NUMBERS = 2**26  # beyond, tensors have shapes and no numbers: nobody could look at them anyway

# Which step made what a step reads; step 1 reads the input.
READS = {
    2: {"query": 1, "key": 1, "value": 1},
    3: {"query": 2, "key": 2, "value": 2},
    4: {"query": 3, "key": 3},
    5: {"scores": 4},
    6: {"scores": 5},
    7: {"scores": 6},
    8: {"weights": 7, "value": 3},
    9: {"heads": 8},
    10: {"merged": 9},
}


class Explained(NamedTuple):
    """One of the ten steps with the tensors before and after it."""

    number: int
    name: str
    operation: str  # Python on the names before, q, k, v for query, key, value, and B, T, H, D, future, sqrt, inf, cat
    why: str
    before: dict[str, Tensor]
    after: dict[str, Tensor]

    def shapes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Shapes before and after, tensors of one shape together, by the names that operations use."""
        return by_shape(self.before, short=self.number > 1), by_shape(self.after)


def by_shape(tensors: dict[str, Tensor], *, short: bool = True) -> dict[str, tuple[int, ...]]:
    """Shapes by names, one entry for tensors of one shape.

    >>> by_shape({"query": torch.ones(2, 3), "key": torch.ones(5), "value": torch.ones(5)})
    {'q': (2, 3), 'k, v': (5,)}
    """
    found: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault(tuple(tensor.shape), []).append(SHORT.get(name, name) if short else name)
    return {", ".join(names): shape for shape, names in found.items()}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is traced.

    >>> Setting.of(d_model=12, num_heads=3, seq=5).widths.head_dim
    4
    """

    widths: Widths
    seq: int
    keys: int
    batch: int
    causal: bool
    form: Form
    config: Config | None = None

    @classmethod
    def of(
        cls,
        form: Form | None = None,
        config: Config | None = None,
        *,
        d_model: int = 8,
        num_heads: int | None = None,
        seq: int = 4,
        keys: int | None = None,
        batch: int = 1,
        causal: bool | None = None,
    ) -> "Setting":
        """A complete setting, refused where its parts contradict each other.

        Args:
            form: whose code is explained, from `FORMS`; the course's unless given.
            config: a known model, from `CONFIGS`, which brings widths of its own.
            d_model: width of all heads together.
            num_heads: 2 unless given.
            seq: tokens.
            keys: keys of their own, for cross-attention; as many as tokens unless given.
            batch: samples.
            causal: whether later keys are hidden; as the form or the model does unless given.
        """
        form = FORMS["course"] if form is None else form
        if form.name == "head" and num_heads not in (None, 1):
            raise OptionError(f"{num_heads} heads: the form 'head' is one head alone. The form 'list' has several.")
        num_heads = 2 if num_heads is None else num_heads
        if config is not None:
            widths = Widths.complete(config.d_model, config.num_heads, config.num_kv_heads, config.head_dim)
        elif form.name == "head":
            widths = Widths.complete(d_model, 1)
        elif form.widens:  # every head is as wide as the output was meant to be
            check_size("num_heads", num_heads)
            widths = Widths.complete(
                d_model, num_heads, head_dim=d_model, d_out=num_heads * check_size("d_out", d_model)
            )
        else:
            widths = Widths.complete(d_model, num_heads)
        default = form.own_mask if config is None else config.causal
        hides = default if causal is None else causal
        if form.own_mask and not hides:
            raise OptionError(f"the form {form.name!r} has a causal mask of its own. Leave out --no-causal.")
        if keys is not None and keys != seq and not form.crosses:
            crossing = ", ".join(f.name for f in FORMS.values() if f.crosses)
            raise OptionError(
                f"{seq} tokens and {keys} keys: the form {form.name!r} takes one input, {form.call}, so its keys are "
                f"its tokens. Forms with keys of their own: {crossing}."
            )
        return cls(
            widths=widths,
            seq=check_size("seq", seq),
            keys=check_size("keys", seq if keys is None else keys),
            batch=check_size("batch", batch),
            causal=hides,
            form=form,
            config=config,
        )

    @property
    def size(self) -> int:
        """Numbers in the matrices and in the scores, the largest tensors there are."""
        w = self.widths
        matrices = 2 * w.d_model * w.head_dim * (w.num_heads + w.num_kv_heads)
        return matrices + self.batch * w.num_heads * self.seq * self.keys

    @property
    def device(self) -> str:
        """Where tensors are made: nowhere, if they are large."""
        return "meta" if self.size > MOST_NUMBERS else "cpu"


@functools.cache
def sentences() -> dict[int, str]:
    """Why each step is there: the comments of `reference.py`.

    >>> sentences()[10]
    'So far the heads were independent; here they are mixed.'
    """
    found = re.findall(r"^ *# (\d+)\. [A-Z][\w ]*?\. (.*)$", inspect.getsource(reference), re.MULTILINE)
    return {int(number): sentence for number, sentence in found}


def operations(form: Form, group: int = 1, *, hides: bool = True, crosses: bool = False) -> dict[int, str]:
    """What each step does, as Python."""
    q, k, v, out = form.projections
    x, y, z = form.inputs if form.crosses else form.inputs * 3
    shared = "" if group == 1 else f".repeat_interleave({group}, 1)"
    cut = "view(B, T, H, D)" if not crosses else "view(B, -1, H, D)"
    return {
        1: f"{q}({x}), {k}({y}), {v}({z})",
        2: f"[t.{cut if group == 1 else 'unflatten(-1, (-1, D))'} for t in (q, k, v)]",
        3: "[t.transpose(1, 2) for t in (q, k, v)]",
        4: f"q @ k{shared}.transpose(-2, -1)",
        5: "scores.masked_fill(future, -inf)" if hides else "scores",
        6: "scores / sqrt(D)",
        7: "scores.softmax(-1)",
        8: f"weights @ v{shared}",
        9: "cat(heads.unbind(1), -1)" if form.widens else "heads.transpose(1, 2).contiguous().view(B, T, H * D)",
        10: "merged" if out is None else f"{out}(merged)",
    }


def explain_steps(
    inputs: dict[str, Tensor],
    projections: Projections,
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    visible: Tensor | None = None,
    form: Form | None = None,
) -> list[Explained]:
    """The ten steps of the reference on these tensors, in order.

    Args:
        inputs: by name, one (self-attention) or three: query, key and value.
        projections: the four linear maps, as `reference.multi_head_attention` takes them.
        num_heads: query heads.
        num_kv_heads: key/value heads; as many unless given.
        visible: True where a query may attend, (T, S) or more axes; everywhere unless given.
        form: whose code is explained; the course's unless given.
    """
    form = FORMS["course"] if form is None else form
    query, key, value = inputs.values() if len(inputs) == 3 else list(inputs.values()) * 3
    made: list[reference.Step] = []
    with torch.no_grad():
        reference.multi_head_attention(
            query, key, value, projections, num_heads, num_kv_heads, visible=visible, steps=made
        )
    group = num_heads // (num_heads if num_kv_heads is None else num_kv_heads)
    does = operations(form, group, hides=visible is not None, crosses=query.shape[1] != key.shape[1])
    by_number = {step.number: step.tensors for step in made}
    D = by_number[3]["query"].shape[-1]
    here = {6: f" Here √{D} = {math.sqrt(D):.4g}."}
    if visible is None:
        here[5] = " Here nothing is hidden."
    if projections[3] is None:
        here[10] = " Here there is no such projection."
    result = []
    for step in made:
        why = sentences()[step.number] + here.get(step.number, "")
        before = {name: by_number[source][name] for name, source in READS.get(step.number, {}).items()} or inputs
        result.append(Explained(step.number, step.name, does[step.number], why, before, step.tensors))
    return result


def make(setting: Setting, seed: int = 0) -> tuple[dict[str, Tensor], Projections]:
    """Random inputs and projections for a setting, the same for the same seed."""
    device, w, form = setting.device, setting.widths, setting.form
    generator = None if device == "meta" else torch.Generator().manual_seed(seed)
    qkv_bias, out_bias = (form.qkv_bias, True) if setting.config is None else (setting.config.bias,) * 2

    def linear(out: int, width: int, bias: bool) -> reference.Linear:
        weight = torch.randn(out, width, generator=generator, device=device) / width**0.5
        return reference.Linear(weight, torch.randn(out, generator=generator, device=device) if bias else None)

    kv_width = w.num_kv_heads * w.head_dim
    first = [linear(n, w.d_model, qkv_bias) for n in (w.heads_width, kv_width, kv_width)]
    last = None if form.projections[3] is None else linear(w.d_out, w.heads_width, out_bias)
    lengths = [setting.seq] + [setting.keys] * (len(form.inputs) - 1)
    inputs = {
        name: torch.randn(setting.batch, length, w.d_model, generator=generator, device=device)
        for name, length in zip(form.inputs, lengths, strict=True)
    }
    return inputs, (first[0], first[1], first[2], last)


def trace(setting: Setting, seed: int = 0) -> list[Explained]:
    """The ten steps of a setting on random numbers, the same for the same `seed`.

    >>> [tuple(t.shape) for t in trace(Setting.of(d_model=12, num_heads=3, seq=5))[3].after.values()]
    [(1, 3, 5, 5)]
    """
    inputs, projections = make(setting, seed)
    T, S, w = setting.seq, setting.keys, setting.widths
    visible = causal_mask().to_tensor(T, S, device=torch.device(setting.device)) if setting.causal else None
    return explain_steps(inputs, projections, w.num_heads, w.num_kv_heads, visible=visible, form=setting.form)


def layer_projections(layer: MultiHeadAttention, dtype: torch.dtype | None = None) -> Projections:
    """A layer's linear maps as the reference takes them."""
    weights, biases = layer.projections()
    pairs: list[tuple[Tensor, Tensor | None]] = list(zip(weights, biases, strict=True))
    if layer.out_proj is not None:
        pairs.append((layer.out_proj.weight, layer.out_proj.bias))
    query, key, value, *out = (
        reference.Linear(w.to(dtype or w.dtype), None if b is None else b.to(dtype or b.dtype)) for w, b in pairs
    )
    return query, key, value, out[0] if out else None


def numbers(step: Explained) -> dict[str, list[list[float]]]:
    """What the first head of the first sample holds after a step, where it fits on a screen."""
    found = {}
    for name, tensor in step.after.items():
        slice_ = tensor[0] if tensor.dim() == 3 else tensor[0, :, 0] if step.number == 2 else tensor[0, 0]
        if not tensor.is_meta and max(slice_.shape) <= FITS:
            found[name] = slice_.tolist()
    return found


def number_text(n: float) -> str:
    """A number of a small matrix.

    >>> number_text(-1.234), number_text(-0.001), number_text(-math.inf)
    ('−1.23', '0.00', '−inf')
    """
    return f"{n:z.2f}".replace("-", "−")


def headline(setting: Setting) -> str:
    """One line: what is traced."""
    w = setting.widths
    shared = "" if w.group == 1 else f", {w.num_kv_heads} key/value heads"
    keys = "" if setting.keys == setting.seq else f", {setting.keys} keys"
    hides = "causal" if setting.causal else "nothing hidden"
    return (
        f"batch {setting.batch}, {setting.seq} tokens{keys}, width {w.d_model}, {w.num_heads} "
        f"head{'s' * (w.num_heads > 1)} of width {w.head_dim}{shared}, {hides}"
    )


def describe(steps: list[Explained]) -> list[dict[str, Any]]:
    """The steps as plain data."""
    return [
        {
            "number": step.number,
            "name": step.name,
            "operation": step.operation,
            "why": step.why,
            "before": {name: list(tensor.shape) for name, tensor in step.before.items()},
            "shapes": {name: list(tensor.shape) for name, tensor in step.after.items()},
            "numbers": {name: _finite(rows) for name, rows in numbers(step).items()},
        }
        for step in steps
    ]


def _finite(rows: list[list[float]]) -> list[list[float | None]]:
    """JSON knows no infinity: hidden scores become null."""
    return [[n if math.isfinite(n) else None for n in row] for row in rows]
