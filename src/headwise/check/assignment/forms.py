"""Assignments: the constructor, call, return values, names and mask that five documents ask for, as one table."""

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from headwise.check.arguments import CallSizes, constructor_role, value_for
from headwise.check.assignment.solutions import Blueprint
from headwise.errors import OptionError

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Assignment:
    """What one document asks for.

    Args:
        name: the name on the command line.
        title: what kind of document it is.
        classes: what the document calls the class.
        constructor: the parameters in order, with their defaults.
        examples: how the document builds the class: by names, by positions.
        inputs: the parameters of the call that are inputs.
        layers: the query, key, value and output projections.
        sizes: attributes that hold sizes, and how they follow from the constructor's parameters.
        mask: the name of the mask argument, where 1 keeps a key; empty for none.
        mask_example: whether the document passes a lower triangle of ones, (T, T), as floats.
        weights: whether (output, attention weights) is returned, not only the output.
        causal: whether the future is hidden without being asked.
        buffer: the name of the stored causal mask.
        methods: methods that split and merge heads.
        spellings: other names that the same document uses.
        wrapper: the attribute of the other class of the document, a list of heads of the full output width.
        naming: how serious another name is: style where the document leaves names to the writer.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    constructor: dict[str, Any]
    examples: tuple[str, ...]
    inputs: tuple[str, ...]
    layers: tuple[str, str, str, str]
    sizes: dict[str, str]
    mask: str = ""
    mask_example: bool = False
    weights: bool = False
    causal: bool = False
    buffer: str = ""
    methods: tuple[str, ...] = ()
    spellings: dict[str, str] = field(default_factory=dict)
    wrapper: str = ""
    naming: str = "fragile"

    @property
    def built(self) -> str:
        """`MultiHeadAttention(d_model, num_heads)`"""
        return f"{self.classes[0]}({_signature(self.constructor)})"

    @property
    def called(self) -> str:
        """`forward(x, mask=None)`"""
        return f"forward({_signature(self.call)})"

    @property
    def call(self) -> dict[str, Any]:
        """The parameters of the call, with their defaults."""
        return dict.fromkeys(self.inputs, REQUIRED) | ({self.mask: None} if self.mask else {})

    @property
    def returned(self) -> str:
        """What a call returns, in words."""
        return "a pair (output, attention weights)" if self.weights else "one tensor, the output"

    def is_wrapper(self, thing: Any) -> bool:
        """Whether it is the document's other class, the list of heads."""
        held = getattr(thing, self.wrapper, None) if self.wrapper else None
        listed = isinstance(held, nn.ModuleList | list | tuple) and all(isinstance(head, nn.Module) for head in held)
        return listed and not hasattr(thing, self.layers[3])

    def values(self, sizes: CallSizes) -> dict[str, Any]:
        """An argument for every parameter of the constructor."""
        return {
            name: value_for(str(constructor_role(name)), sizes) if default is REQUIRED else default
            for name, default in self.constructor.items()
        }

    def solution(self) -> str:
        """A right class in this form."""
        names = list(self.constructor)
        wide = [name for name in names if constructor_role(name) in ("width", "out_width")]
        roles = {str(constructor_role(name)): name for name in names}
        inputs = self.inputs if len(self.inputs) == 3 else self.inputs * 3
        return Blueprint(
            self.classes[0],
            _signature(self.constructor),
            _signature(self.call),
            (inputs[0], inputs[1], inputs[2]),
            wide[0],
            wide[-1],
            roles["heads"],
            roles.get("bias", "True"),
            context=roles.get("context", ""),
            dropout=roles.get("dropout", ""),
            layers=self.layers,
            sizes=self.sizes,
            width_name=next(name for name, value in self.sizes.items() if "//" in value),
            methods=self.methods,
            causal=self.causal,
            buffer=self.buffer,
            mask=self.mask,
            weights=self.weights,
        ).source()


def _signature(parameters: dict[str, Any]) -> str:
    return ", ".join(name if default is REQUIRED else f"{name}={default}" for name, default in parameters.items())


_SHORT = Assignment(
    "course", "the course step", ("MultiHeadAttention",), {"d_model": REQUIRED, "num_heads": REQUIRED}, ("names",),
    ("x",), ("W_q", "W_k", "W_v", "W_o"),
    {"d_model": "d_model", "num_heads": "num_heads", "d_k": "d_model // num_heads"},
    mask="mask", weights=True, methods=("split_heads",),
)  # fmt: skip
_LONG = Assignment(
    "book", "the book section", ("MultiHeadAttn", "MultiHeadedAttentionWrapper"),
    {"d_in": REQUIRED, "d_out": REQUIRED, "context_length": REQUIRED, "dropout": REQUIRED, "num_heads": REQUIRED,
     "qkv_bias": False}, ("positions",), ("x",), ("W_query", "W_key", "W_value", "out_proj"),
    {"d_out": "d_out", "num_heads": "num_heads", "head_dim": "d_out // num_heads"},
    causal=True, buffer="mask", wrapper="heads",
)  # fmt: skip
ASSIGNMENTS = {
    form.name: form
    for form in (
        _SHORT,
        _LONG,
        replace(
            _LONG, name="homework", title="the homework guide", classes=("MultiHeadAttention",),
            examples=("names", "positions"), wrapper="",
            spellings={"W_query": "W_q", "W_key": "W_k", "W_value": "W_v", "out_proj": "proj", "num_heads": "h",
                       "head_dim": "d"},
        ),
        replace(
            _SHORT, name="interview", title="the interview question", examples=("positions",), inputs=("Q", "K", "V"),
            mask_example=True, weights=False, methods=("split_heads", "combine_heads"), naming="style",
        ),
        replace(
            _SHORT, name="handbook", title="the handbook chapter", inputs=("query", "key", "value"), methods=(),
        ),
    )
}  # fmt: skip


def find_form(name: str) -> Assignment:
    """The form with this name.

    >>> find_form("interview").called
    'forward(Q, K, V, mask=None)'
    """
    if name not in ASSIGNMENTS:
        wrapper = " A list of heads side by side is judged by book." if name in ("wrapper", "list") else ""
        raise OptionError(f"no assignment is called {name!r}. Known: {', '.join(ASSIGNMENTS)}.{wrapper}")
    return ASSIGNMENTS[name]
