"""The forms of attention that courses, books and interviews ask for: one function with different names and details."""

import dataclasses
from typing import NamedTuple

from headwise.errors import OptionError, suggestion


class Answers(NamedTuple):
    """How a form masks, where forms differ."""

    order: str  # of mask and scale
    fill: str  # the value of a hidden score
    blind_row: str  # what happens to a query that sees no key


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to write multi-head attention.

    Args:
        name: the name on the command line.
        title: where it is found.
        constructor: the arguments of its constructor.
        call: how it is called.
        returns: what it returns.
        inputs: the names of its inputs: one for self-attention only, three if it supports cross-attention.
        projections: the names of the query, key, value and output projections; None for no output projection.
        qkv_bias: whether the first three have a bias.
        mask: where its mask comes from.
        answers: how it masks.
        own_mask: whether it always has a causal mask.
        drops: whether it applies dropout to the weights.
        widens: whether each head is d_out wide, so that the output is H times as wide.
        aliases: other names.
    """

    name: str
    title: str
    constructor: str
    call: str
    returns: str
    inputs: tuple[str, ...]
    projections: tuple[str, str, str, str | None]
    qkv_bias: bool
    mask: str
    answers: Answers
    own_mask: bool = False
    drops: bool = False
    widens: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def crosses(self) -> bool:
        """Whether it supports cross-attention."""
        return len(self.inputs) == 3

    def differences(self) -> dict[int, str]:
        """How it writes the steps that forms write differently, by step number."""
        found = {1: self._projects()}
        if self.widens:
            found[2] = (
                "no head axis: H modules in a list, each (B, T, d_out), run one by one; the trace shows them together"
            )
            found[3] = "no transpose: every head is a separate tensor; the trace shows them on an axis after the batch"
            found[9] = "torch.cat along the last axis: every head is d_out wide, so the output is H·d_out wide"
        order = {"scale, mask": "after step 6: scales, then masks", "mask, scale": "before step 6: masks, then scales"}
        found[5] = f"{self.mask}; fills with {self.answers.fill} {order[self.answers.order]}"
        found[7] = f"a row that sees no key {self.answers.blind_row}"
        if self.drops:
            found[8] = "dropout is applied to the weights first, in training only"
        if self.projections[3] is None:
            found[10] = "no output projection: heads never mix"
        return dict(sorted(found.items()))

    def _projects(self) -> str:
        q, k, v, out = self.projections
        if out is None:
            return f"{q}, {k}, {v} {'with' if self.qkv_bias else 'without'} bias"
        return f"{q}, {k}, {v}, {out}, all with bias" if self.qkv_bias else f"{q}, {k}, {v} without bias, {out} with"


_D_MODEL = "(d_model, num_heads)"
_BOOK = "(d_in, d_out, context_length, dropout, num_heads, qkv_bias=False)"
_SHORT = ("W_q", "W_k", "W_v", "W_o")
_LONG = ("W_query", "W_key", "W_value", "out_proj")
_ARGUMENT = "mask argument, 0 hides"
_BUFFER = "mask buffer of the context length, 1 hides the future"
_SEES_ITSELF = "cannot occur: a token always sees itself"

FORMS: dict[str, Form] = {
    form.name: form
    for form in [
        Form(
            "course", "a course's assignment", _D_MODEL, "mha(x, mask=None)", "output, weights", ("x",), _SHORT, True,
            _ARGUMENT, Answers("scale, mask", "−1e9", "becomes an even average over all keys"), aliases=("self",),
        ),
        Form(
            "interview", "an interview question", _D_MODEL, "mha(Q, K, V, mask=None)", "output", ("Q", "K", "V"),
            _SHORT, True, _ARGUMENT, Answers("scale, mask", "−inf", "is NaN, which is then set to 0"),
        ),
        Form(
            "handbook", "a handbook's chapter", _D_MODEL, "mha(query, key, value, mask=None)", "output, weights",
            ("query", "key", "value"), _SHORT, True, _ARGUMENT, Answers("scale, mask", "−inf", "is NaN"),
        ),
        Form(
            "book", "a textbook's class, and homework in ten steps", _BOOK, "mha(x)", "output", ("x",), _LONG, False,
            _BUFFER, Answers("mask, scale", "−inf", _SEES_ITSELF), own_mask=True, drops=True,
            aliases=("homework", "textbook"),
        ),
        Form(
            "minimal", "the same in its shortest version", _BOOK, "mha(x)", "output", ("x",),
            ("W_q", "W_k", "W_v", "proj"), False, _BUFFER,
            Answers("scale, mask", "−inf", _SEES_ITSELF), own_mask=True,
        ),
        Form(
            "list", "the naive wrapper: a list of heads", _BOOK, "mha(x)", "output", ("x",),
            ("W_query", "W_key", "W_value", None), False, _BUFFER, Answers("mask, scale", "−inf", _SEES_ITSELF),
            own_mask=True, drops=True, widens=True, aliases=("wrapper",),
        ),
        Form(
            "head", "one causal head alone", "(d_in, d_out, context_length, dropout, qkv_bias=False)", "head(x)",
            "output", ("x",), ("W_query", "W_key", "W_value", None), False, _BUFFER,
            Answers("mask, scale", "−inf", _SEES_ITSELF), own_mask=True, drops=True, aliases=("single",),
        ),
    ]
}  # fmt: skip


def find(name: str) -> Form:
    """The form with this name or alias.

    >>> find("homework").constructor
    '(d_in, d_out, context_length, dropout, num_heads, qkv_bias=False)'
    """
    by_name = {known: form for form in FORMS.values() for known in (form.name, *form.aliases)}
    if name not in by_name:
        raise OptionError(f"no form is called {name!r}.{suggestion(name, by_name, 'headwise steps --forms')}")
    return by_name[name]
