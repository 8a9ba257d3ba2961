"""The ten steps explained: input, operation, output and reason, and what the key operations do to memory.

The tensors come from the reference itself and the explanations are its comments, so they cannot drift apart. The
operations are Python: a test evaluates each on the tensors before it and compares the result with the tensors after it.
"""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headwise import reference
from headwise.errors import OptionError
from headwise.layer import MultiHeadAttention
from headwise.layer.options import Widths
from headwise.learn.configs import Config
from headwise.learn.forms import FORMS, Form
from headwise.masks import causal as causal_mask
from headwise.shapes import check_size

Projections = tuple[reference.Linear, reference.Linear, reference.Linear, reference.Linear | None]

SIX = "in six steps: project (1), split (2), transpose (3), attention (4 to 8), concat (9), project (10)"
SHORT = {"query": "q", "key": "k", "value": "v"}
UNMIXED = "This form has no output projection: the heads stay side by side and are never mixed."
FITS = 8  # the most rows and columns of numbers that are shown
MOST_NUMBERS = 2**26  # above this, only shapes are traced, on the meta device
COPIES = ("aten.clone", "aten._to_copy", "aten.copy_")

# The tensors that a step reads, each from the last step that made it; step 1 reads the input.
READS = {
    2: ("query", "key", "value"), 3: ("query", "key", "value"), 4: ("query", "key"), 5: ("scores",), 6: ("scores",),
    7: ("scores",), 8: ("weights", "value"), 9: ("heads",), 10: ("merged",),
}  # fmt: skip


class Explained(NamedTuple):
    """One of the ten steps with the tensors before and after it."""

    number: int
    name: str
    operation: str  # Python on the names before, q, k, v for query, key, value, and B, T, H, D, future, sqrt, inf, cat
    why: str
    before: dict[str, Tensor]
    after: dict[str, Tensor]

    def shapes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """The shapes before and after, grouped by shape, under the names that operations use."""
        return by_shape(self.before, short=self.number > 1), by_shape(self.after)

    def numbers(self) -> dict[str, list[list[float]]]:
        """The numbers of the first head of the first sample after the step, if they fit on a screen."""
        found = {}
        for name, tensor in self.after.items():
            slice_ = tensor[0] if tensor.dim() == 3 else tensor[0, :, 0] if self.number == 2 else tensor[0, 0]
            if not tensor.is_meta and max(slice_.shape) <= FITS:
                found[name] = slice_.tolist()
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON, which has no infinity: hidden scores become None."""
        return {
            "number": self.number,
            "name": self.name,
            "operation": self.operation,
            "why": self.why,
            "before": {name: list(tensor.shape) for name, tensor in self.before.items()},
            "shapes": {name: list(tensor.shape) for name, tensor in self.after.items()},
            "numbers": {
                name: [[n if math.isfinite(n) else None for n in row] for row in rows]
                for name, rows in self.numbers().items()
            },
        }


def by_shape(tensors: dict[str, Tensor], *, short: bool = True) -> dict[str, tuple[int, ...]]:
    """Shapes by name; tensors of the same shape share an entry.

    >>> by_shape({"query": torch.ones(2, 3), "key": torch.ones(5), "value": torch.ones(5)})
    {'q': (2, 3), 'k, v': (5,)}
    """
    found: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault(tuple(tensor.shape), []).append(SHORT.get(name, name) if short else name)
    return {", ".join(names): shape for shape, names in found.items()}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What to trace: sizes, mask, and the form or model it follows.

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
        """A complete setting; raises an error if its parts contradict each other.

        Args:
            form: the form to explain, from `FORMS`; "course" by default.
            config: a known model from `CONFIGS`, which sets the widths.
            d_model: width of all heads together.
            num_heads: attention heads; 2 by default.
            seq: sequence length.
            keys: number of keys, for cross-attention; `seq` by default.
            batch: batch size.
            causal: whether later keys are hidden; by default as in the form or model.
        """
        form = FORMS["course"] if form is None else form
        if form.name == "head" and num_heads not in (None, 1):
            raise OptionError(f"{num_heads} heads: the form 'head' is a single head. Use the form 'list' for several.")
        num_heads = 2 if num_heads is None else num_heads
        if config is not None:
            widths = Widths.complete(config.d_model, config.num_heads, config.num_kv_heads, config.head_dim)
        elif form.name == "head":
            widths = Widths.complete(d_model, 1)
        elif form.widens:  # every head is as wide as d_out
            d_out = check_size("num_heads", num_heads) * check_size("d_out", d_model)
            widths = Widths.complete(d_model, num_heads, head_dim=d_model, d_out=d_out)
        else:
            widths = Widths.complete(d_model, num_heads)
        default = form.own_mask if config is None else config.causal
        hides = default if causal is None else causal
        if form.own_mask and not hides:
            raise OptionError(f"the form {form.name!r} always has a causal mask. Leave out --no-causal.")
        if keys is not None and keys != seq and not form.crosses:
            crossing = ", ".join(f.name for f in FORMS.values() if f.crosses)
            raise OptionError(
                f"{seq} tokens and {keys} keys: the form {form.name!r} takes one input, {form.call}, so it has as many "
                f"keys as tokens. Forms that take separate keys: {crossing}."
            )
        seq, keys = check_size("seq", seq), check_size("keys", seq if keys is None else keys)
        return cls(widths, seq, keys, check_size("batch", batch), hides, form, config)

    @property
    def size(self) -> int:
        """How many numbers the projection matrices and the scores hold; these are the largest tensors."""
        w = self.widths
        matrices = 2 * w.d_model * w.head_dim * (w.num_heads + w.num_kv_heads)
        return matrices + self.batch * w.num_heads * self.seq * self.keys

    @property
    def device(self) -> str:
        """The device of the tensors: "meta", without data, if they are large."""
        return "meta" if self.size > MOST_NUMBERS else "cpu"

    def tensors(self, seed: int = 0) -> tuple[dict[str, Tensor], Projections]:
        """Random inputs and projections, reproducible by `seed`."""
        device, w, form = self.device, self.widths, self.form
        generator = None if device == "meta" else torch.Generator().manual_seed(seed)
        qkv_bias, out_bias = (form.qkv_bias, True) if self.config is None else (self.config.bias,) * 2

        def linear(out: int, width: int, bias: bool) -> reference.Linear:
            weight = torch.randn(out, width, generator=generator, device=device) / width**0.5
            return reference.Linear(weight, torch.randn(out, generator=generator, device=device) if bias else None)

        kv_width = w.num_kv_heads * w.head_dim
        first = [linear(n, w.d_model, qkv_bias) for n in (w.heads_width, kv_width, kv_width)]
        last = None if form.projections[3] is None else linear(w.d_out, w.heads_width, out_bias)
        lengths = [self.seq] + [self.keys] * (len(form.inputs) - 1)
        inputs = {
            name: torch.randn(self.batch, length, w.d_model, generator=generator, device=device)
            for name, length in zip(form.inputs, lengths, strict=True)
        }
        return inputs, (first[0], first[1], first[2], last)

    def headline(self) -> str:
        """One line that says what is traced."""
        w = self.widths
        shared = "" if w.group == 1 else f", {w.num_kv_heads} key/value heads"
        keys = "" if self.keys == self.seq else f", {self.keys} keys"
        hides = "causal" if self.causal else "nothing hidden"
        return (
            f"batch {self.batch}, {self.seq} tokens{keys}, width {w.d_model}, {w.num_heads} "
            f"head{'s' * (w.num_heads > 1)} of width {w.head_dim}{shared}, {hides}"
        )

    def subject(self) -> str:
        """The form or the model, in one line."""
        form = self.form
        if self.config is not None:
            return f"attention of {self.config.name}, {self.config.layers} layers ({self.config.source})"
        names = " or ".join((form.name, *form.aliases))
        return f"form {names}, {form.title}: {form.constructor}, {form.call} → {form.returns}"

    def differences(self) -> dict[int, str]:
        """How the form writes the steps that forms write differently; empty for a model."""
        return self.form.differences() if self.config is None else {}

    def notes(self) -> list[str]:
        """What the model does in addition to the ten steps; empty for a form."""
        return [] if self.config is None else self.config.options()

    def key_operations(self) -> "list[Operation]":
        """The key operations on tensors of these sizes."""
        return key_operations(self.batch, self.seq, self.widths.num_heads, self.widths.head_dim, self.device)


@functools.cache
def sentences() -> dict[int, str]:
    """The reason for each step: the comments of `reference.py`.

    >>> sentences()[10]
    'So far the heads were independent; here they are mixed.'
    """
    found = re.findall(r"^ *# (\d+)\. [A-Z][\w ]*?\. (.*)$", inspect.getsource(reference), re.MULTILINE)
    return {int(number): sentence for number, sentence in found}


def operations(form: Form, group: int = 1, *, hides: bool = True, crosses: bool = False) -> dict[int, str]:
    """The Python code of each step."""
    q, k, v, out = form.projections
    x, y, z = form.inputs if form.crosses else form.inputs * 3
    shared = "" if group == 1 else f".repeat_interleave({group}, 1)"
    cut = "view(B, -1, H, D)" if crosses else "view(B, T, H, D)"
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
        inputs: one tensor by name (self-attention), or three: query, key and value.
        projections: the four linear maps, as `reference.multi_head_attention` takes them.
        num_heads: query heads.
        num_kv_heads: key/value heads; `num_heads` by default.
        visible: True where a query may attend, (T, S) or with leading axes; everywhere by default.
        form: the form to explain, where it differs from the reference; None for the names of "course" only.
    """
    own = {} if form is None else _own_answers(form)
    form = FORMS["course"] if form is None else form
    query, key, value = inputs.values() if len(inputs) == 3 else list(inputs.values()) * 3
    made: list[reference.Step] = []
    with torch.no_grad():
        reference.multi_head_attention(
            query, key, value, projections, num_heads, num_kv_heads, visible=visible, steps=made
        )
    group = num_heads // (num_heads if num_kv_heads is None else num_kv_heads)
    does = operations(form, group, hides=visible is not None, crosses=query.shape[1] != key.shape[1])
    D = made[2].tensors["query"].shape[-1]
    reasons = sentences() | ({} if projections[3] is not None else {10: UNMIXED})
    here = {6: f" Here √{D} = {math.sqrt(D):.4g}."} | own
    if visible is None:
        here[5] = here.get(5, "") + " Here nothing is hidden."
    result = []
    latest: dict[str, Tensor] = {}
    for step in made:
        why = reasons[step.number] + here.get(step.number, "")
        before = {name: latest[name] for name in READS.get(step.number, ())} or inputs
        latest |= step.tensors
        result.append(Explained(step.number, step.name, does[step.number], why, before, step.tensors))
    return result


def _own_answers(form: Form) -> dict[int, str]:
    """What a form does otherwise than the reference where the reason of a step says what the reference does."""
    fill, blind_row = form.answers.fill, form.answers.blind_row
    return {
        5: "" if fill == "−inf" else f" The form {form.name} fills with {fill} all the same.",
        7: "" if blind_row.endswith("set to 0") else f" In the form {form.name} it {blind_row}.",
    }


def trace(setting: Setting, seed: int = 0) -> list[Explained]:
    """The ten steps of `setting` on random numbers, reproducible by `seed`.

    >>> [tuple(t.shape) for t in trace(Setting.of(d_model=12, num_heads=3, seq=5))[3].after.values()]
    [(1, 3, 5, 5)]
    """
    inputs, projections = setting.tensors(seed)
    T, S, w = setting.seq, setting.keys, setting.widths
    form = setting.form if setting.config is None else None
    visible = causal_mask().to_tensor(T, S, device=torch.device(setting.device)) if setting.causal else None
    return explain_steps(inputs, projections, w.num_heads, w.num_kv_heads, visible=visible, form=form)


def layer_projections(layer: MultiHeadAttention, dtype: torch.dtype | None = None) -> Projections:
    """The projections of a layer, as the reference takes them."""
    weights, biases = layer.projections()
    pairs: list[tuple[Tensor, Tensor | None]] = list(zip(weights, biases, strict=True))
    if layer.out_proj is not None:
        pairs.append((layer.out_proj.weight, layer.out_proj.bias))
    query, key, value, *out = (
        reference.Linear(w.to(dtype or w.dtype), None if b is None else b.to(dtype or b.dtype)) for w, b in pairs
    )
    return query, key, value, out[0] if out else None


def shape_text(shape: Iterable[int]) -> str:
    """A shape as torch prints it.

    >>> shape_text([2, 3])
    '(2, 3)'
    """
    return f"({', '.join(map(str, shape))})"


def number_text(n: float) -> str:
    """A number as small matrices show it.

    >>> number_text(-1.234), number_text(-0.001), number_text(-math.inf)
    ('−1.23', '0.00', '−inf')
    """
    return f"{n:z.2f}".replace("-", "−")


class MemoryLayout(NamedTuple):
    """How a tensor is laid out in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # numbers to skip to advance by one along each axis
    contiguous: bool

    @classmethod
    def of(cls, x: Tensor) -> "MemoryLayout":
        """The layout of `x`."""
        return cls(tuple(x.shape), x.stride(), x.is_contiguous())


class Operation(NamedTuple):
    """One operation, measured."""

    name: str
    code: str
    before: MemoryLayout
    after: MemoryLayout | None  # None if torch raises an error
    shares: bool  # whether both use the same memory
    copied: int  # bytes that torch copied
    made: int  # bytes of new memory for the result
    why: str

    @property
    def memory(self) -> str:
        """What the operation did to memory, in words."""
        if self.after is None:
            return "RuntimeError"
        if self.shares:
            return "same memory, contiguous" if self.after.contiguous else "same memory, not contiguous"
        return f"{self.copied:,} bytes copied, {self.made:,} new"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        after = None if self.after is None else self.after._asdict()
        return self._asdict() | {"before": self.before._asdict(), "after": after}


class _Copies(TorchDispatchMode):
    """Counts the bytes that torch copies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing dynamo takes a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(COPIES):
            self.bytes += result.numel() * result.element_size()
        return result


def key_operations(batch: int, seq: int, num_heads: int, head_dim: int, device: str = "cpu") -> list[Operation]:
    """The four key operations on tensors (`batch`, `seq`, `num_heads`, `head_dim`), in order of use, and two traps.

    >>> [(o.name, o.shares) for o in key_operations(2, 5, 3, 7)][:4]
    [('view', True), ('transpose', True), ('matmul', False), ('contiguous', False)]
    """
    B, T, H, D = batch, seq, num_heads, head_dim
    x = torch.zeros(B, T, H * D, device=device)
    split = x.view(B, T, H, D)
    query = split.transpose(1, 2)
    heads = torch.zeros(B, H, T, D, device=device).transpose(1, 2)  # the output of step 8, transposed back
    measured = [
        _measure(
            "view", f"x.view({B}, {T}, {H}, {D})", x, lambda: x.view(B, T, H, D),
            "The same memory read with another shape: H·D numbers become H groups of D.",
        ),
        _measure(
            "transpose", "x.transpose(1, 2)", split, lambda: split.transpose(1, 2),
            "Two strides swap places; no number moves. The tokens of one head are H·D numbers apart.",
        ),
        _measure(
            "matmul", "q @ k.transpose(-2, -1)", query, lambda: query @ query.transpose(-2, -1),
            "Writes a new tensor, T×T for every head. With several samples, the heads are first copied together.",
        ),
        _measure(
            "contiguous", f"x.contiguous().view({B}, {T}, {H * D})", heads,
            lambda: heads.contiguous().view(B, T, H * D),
            "Copies into reading order: the heads of a token become adjacent, so a view can join them.",
        ),
    ]  # fmt: skip
    traps = [
        _measure(
            "trap: view after transpose", f"x.view({B}, {T}, {H * D})", heads, lambda: heads.view(B, T, H * D),
            "No stride can join axes that are not adjacent in memory. reshape and flatten copy where they must.",
        ),
        _measure(
            "trap: view instead of transpose", f"x.view({B}, {H}, {T}, {D})", x, lambda: x.view(B, H, T, D),
            "The right shape with the wrong numbers: a head would hold pieces of other tokens.",
        ),
    ]  # fmt: skip
    return measured if 1 in (T, H) else measured + traps  # with one token or one head both traps are harmless


def _measure(name: str, code: str, before: Tensor, do: Callable[[], Tensor], why: str) -> Operation:
    copies = _Copies()
    try:
        with torch.no_grad(), copies:
            after = do()
    except RuntimeError:
        return Operation(name, code, MemoryLayout.of(before), None, False, copies.bytes, 0, why)
    shares = after.untyped_storage()._cdata == before.untyped_storage()._cdata
    made = 0 if shares else after.numel() * after.element_size()
    return Operation(name, code, MemoryLayout.of(before), MemoryLayout.of(after), shares, copies.bytes, made, why)


def head_split_text() -> str:
    """Why a view alone splits heads wrongly: the smallest example, in words."""
    memory = torch.arange(12)
    right, wrong = memory.view(2, 2, 3).transpose(0, 1)[0].tolist(), memory.view(2, 2, 3)[0].tolist()
    return (
        f"Memory of 2 tokens, 2 heads of 3: {' '.join(map(str, memory.tolist()))}. Head 0 is {right}; a view alone "
        f"would read {wrong}, all of token 0."
    )
