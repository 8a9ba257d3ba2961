"""Writes a right attention class with the constructor, call, names, mask and return values that somebody asks for."""

import inspect
from dataclasses import dataclass, field

from headwise.check.arguments import constructor_role, parameters_of
from headwise.check.assignment.transfer import has_bias
from headwise.check.binding import Bound
from headwise.check.calls import PLAIN, leaves
from headwise.check.faults.mask_meaning import MEANING, measured
from headwise.check.objects import call_parameters
from headwise.check.reading import AttentionReading

HIDES = {"keep": "{mask} == 0", "drop": "{mask} != 0"}  # meaning of a mask → where it hides a key


@dataclass(frozen=True)
class Blueprint:
    """What a class must look like from outside; expressions are in terms of the constructor's parameters.

    Args:
        name: the class.
        constructor: the parameters of `__init__`, as written.
        call: the parameters of `forward`, as written.
        inputs: the names of query, key and value among them.
        width_in: the width of the input.
        width_out: the width of the output.
        heads: the number of heads.
        bias: whether queries, keys and values have a bias.
        out_bias: whether the output projection has one.
        context: the longest input; empty for no limit.
        dropout: the probability; empty for none.
        layers: the names of the query, key, value and output projections.
        sizes: further attributes and their values; they must hold the number of heads and the width of one.
        heads_name: the attribute that holds the number of heads.
        width_name: the attribute that holds the width of a head.
        methods: the names of the methods that split and merge heads, where they are asked for.
        causal: whether the future is always hidden.
        buffer: the name of the stored causal mask; empty where it is made in the call.
        mask: the name of the mask argument; empty for none.
        meaning: keep, drop or additive.
        mask_axes: for a mask of so many axes, the index that adds the missing ones.
        weights: whether attention weights are returned beside the output.
    """

    name: str
    constructor: str
    call: str
    inputs: tuple[str, str, str]
    width_in: str
    width_out: str
    heads: str
    bias: str = "True"
    out_bias: str = "True"
    context: str = ""
    dropout: str = ""
    layers: tuple[str, str, str, str] = ("w_q", "w_k", "w_v", "w_o")
    sizes: dict[str, str] = field(default_factory=dict)
    heads_name: str = "num_heads"
    width_name: str = "head_dim"
    methods: tuple[str, ...] = ()
    causal: bool = False
    buffer: str = ""
    mask: str = ""
    meaning: str = "keep"
    mask_axes: dict[int, str] = field(default_factory=dict)
    weights: bool = False

    def source(self) -> str:
        """The class, with its imports.

        >>> made = Blueprint("MHA", "dim, heads", "x", ("x", "x", "x"), "dim", "dim", "heads").source()
        >>> "self.w_q = nn.Linear(dim, dim)" in made
        True
        """
        head = ["import math", "", "import torch", "from torch import nn", "", "", f"class {self.name}(nn.Module):"]
        init = [f"def __init__(self, {self.constructor}):", *_indented(self._init())]
        forward = [f"def forward(self, {self.call}):", *_indented(self._forward())]
        body = [*init, *self._methods(), "", *forward]
        return "\n".join([*head, *_indented(body)]) + "\n"

    def _init(self) -> list[str]:
        layers = zip(self.layers[:3], (self._linear(self.width_in, self.bias),) * 3, strict=True)
        lines = [
            "super().__init__()",
            f"if {self.width_out} % {self.heads} != 0:",
            f'    raise ValueError(f"width {{{self.width_out}}} is not a multiple of {{{self.heads}}} heads")',
            *(f"self.{name} = {value}" for name, value in self._sizes().items()),
            *(f"self.{name} = {made}" for name, made in layers),
            f"self.{self.layers[3]} = {self._linear(self.width_out, self.out_bias)}",
        ]
        lines += [f"self.dropout = nn.Dropout({self.dropout})"] if self.dropout else []
        if self.buffer:
            table = f"torch.triu(torch.ones({self.context}, {self.context}), diagonal=1)"
            lines += ["# 1 hides the future", f'self.register_buffer("{self.buffer}", {table})']
        return lines

    def _linear(self, width: str, bias: str) -> str:
        return f"nn.Linear({width}, {self.width_out}{'' if bias == 'True' else f', bias={bias}'})"

    def _sizes(self) -> dict[str, str]:
        needed = {self.heads_name: self.heads, self.width_name: f"{self.width_out} // {self.heads}"}
        return needed | self.sizes

    def _methods(self) -> list[str]:
        bodies = [
            f"return {self._split('x')}  # (B, T, H·D) to (B, H, T, D)",
            "return x.transpose(1, 2).flatten(2)  # (B, H, T, D) to (B, T, H·D)",
        ]
        lines: list[str] = []
        for name, body in zip(self.methods, bodies, strict=False):
            lines += ["", f"def {name}(self, x):", f"    {body}"]
        return lines

    def _split(self, x: str) -> str:
        return f"{x}.unflatten(-1, (self.{self.heads_name}, self.{self.width_name})).transpose(1, 2)"

    def _forward(self) -> list[str]:
        lines = self._checked_length() if self.buffer else []
        names = ("query", "key", "value")
        if any(name in self.inputs[place + 1 :] for place, name in enumerate(names)):
            names = ("q", "k", "v")  # an input of that name is still to be projected once more
        query, key, value = names
        for name, layer, source in zip(names, self.layers[:3], self.inputs, strict=True):
            projected = f"self.{layer}({source})"
            split = f"self.{self.methods[0]}({projected})" if self.methods else self._split(projected)
            lines.append(f"{name} = {split}" + ("  # (B, H, T, D)" if name == query else ""))
        lines.append(f"scores = {query} @ {key}.transpose(-2, -1) / math.sqrt(self.{self.width_name})  # (B, H, T, S)")
        lines += self._causal() if self.causal else []
        lines += self._masked() if self.mask else []
        lines += ["weights = scores.softmax(dim=-1)"]
        if self.mask and self.meaning in HIDES:
            lines += [
                "if hidden is not None:",
                "    weights = weights.masked_fill(hidden, 0.0)  # zeros, not NaN, without a key",
            ]
        mixed = f"self.dropout(weights) @ {value}" if self.dropout else f"weights @ {value}"
        merged = (
            f"self.{self.methods[1]}({mixed})" if len(self.methods) > 1 else f"({mixed}).transpose(1, 2).flatten(2)"
        )
        output = f"self.{self.layers[3]}({merged})"
        return (
            [*lines, f"output = {output}", "return output, weights"] if self.weights else [*lines, f"return {output}"]
        )

    def _checked_length(self) -> list[str]:
        return [
            f"T = {self.inputs[0]}.shape[1]",
            f"if T > len(self.{self.buffer}):",
            f'    raise ValueError(f"{{T}} tokens, but the longest input has {{len(self.{self.buffer})}}")',
        ]

    def _causal(self) -> list[str]:
        if self.buffer:
            return [f"scores = scores.masked_fill(self.{self.buffer}[:T, :T].bool(), -math.inf)"]
        return [
            "future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)",
            "scores = scores.masked_fill(future, -math.inf)",
        ]

    def _masked(self) -> list[str]:
        lines = []
        for axes, index in self.mask_axes.items():
            lines += [f"if {self.mask} is not None and {self.mask}.dim() == {axes}:"]
            lines += [f"    {self.mask} = {self.mask}[{index}]"]
        if self.meaning not in HIDES:
            return [*lines, f"if {self.mask} is not None:", f"    scores = scores + {self.mask}"]
        where = HIDES[self.meaning].format(mask=self.mask)
        return [
            *lines,
            f"hidden = None if {self.mask} is None else {where}",
            "if hidden is not None:",
            "    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)",
        ]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" if line else line for line in lines]


def as_written(p: inspect.Parameter) -> str:
    """A parameter without its annotation."""
    return p.name if p.default is p.empty else f"{p.name}={p.default!r}"


# The signature of somebody's class.


def blueprint_of(bound: Bound, reading: AttentionReading | None) -> Blueprint | None:
    """What a bound class looks like from outside; None where it cannot be written as a plain class."""
    size = _size_expressions(bound)
    if reading is None or bound.form.layout != PLAIN or "width" not in size or not inspect.isclass(bound.case.target):
        return None
    inputs = {role: name for name, role in bound.form.roles.items()}
    query = inputs.get("query", inputs.get("self", ""))
    key = inputs.get("key", inputs.get("memory", query))
    masks = [argument for argument in measured(bound, reading) if argument.meaning in MEANING]
    return Blueprint(
        bound.case.name,
        ", ".join(as_written(p) for p in parameters_of(bound.case.target)),
        ", ".join(as_written(p) for p in call_parameters(bound.thing)),
        (query, key, inputs.get("value", key)),
        size["width"],
        size.get("width_out", size["width"]),
        size.get("heads", str(reading.core.heads.shape[1])),
        size.get("bias", str(reading.query is None or has_bias(reading.query.fit))),
        str(reading.output is None or has_bias(reading.output.fit)),
        size.get("context", ""),
        size.get("dropout", ""),
        causal=reading.pattern == "causal",
        mask=masks[0].name if masks else "",
        meaning=masks[0].meaning if masks else "keep",
        mask_axes=_mask_axes(masks[0].shapes()) if masks else {},
        weights=_returns_weights(bound),
    )


def is_plain(reading: AttentionReading | None) -> bool:
    """Whether it is attention and nothing more: no positions, norms, residual or added terms."""
    if reading is None or reading.scores is None or reading.output is None:
        return False
    parts = reading.projections.values()
    special = any(p.position or p.norm or p.then for p in parts) or reading.scores.bias is not None
    return len(parts) == 3 and not special and reading.output.residual == 0 and reading.output.last


def _size_expressions(bound: Bound) -> dict[str, str]:
    """Sizes in terms of the constructor's parameters, or of the keys of its configuration."""
    built = bound.built
    holder = next((name for name, value in built.arguments.items() if value is built.config), "")
    names = (
        sorted(built.config.asked) if built.config is not None else [p.name for p in parameters_of(bound.case.target)]
    )
    found: dict[str, str] = {}
    for name in names:
        role, words = str(constructor_role(name)), f"{holder}.{name}" if built.config is not None else name
        if role == "out_width" or (role == "width" and role in found):
            found["width_out"] = words
        found.setdefault(role, words)
    return found


def _mask_axes(shapes: list[str]) -> dict[int, str]:
    """Which axes a mask of fewer than four needs, so that it broadcasts as in the reference."""
    axes: dict[int, str] = {}
    if "(B,T,S)" in shapes or "(B,1,S)" in shapes:
        axes[3] = ":, None"
    if "(B,S)" in shapes and "(T,S)" not in shapes:
        axes[2] = ":, None, None"
    return axes


def _returns_weights(bound: Bound) -> bool:
    B, T = bound.inputs.query.shape[:2]
    found = leaves(bound.returned)
    return isinstance(bound.returned, tuple) and len(found) == 2 and found[1].shape == (B, bound.sizes.H, T, T)
