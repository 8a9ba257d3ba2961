"""Reads one layer: finds its layout, checks it, and converts its tensors to ours; writes it back."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.errors import CheckpointError
from headwise.layer.checkpoints.forms import Correspondence, Sizes, pack, unpack
from headwise.layer.checkpoints.layouts import (
    BESIDE,
    HEADWISE,
    LAYOUTS,
    T5_TABLE,
    HeadList,
    Layout,
    Shapes,
    head_list,
)
from headwise.layer.options import PROJECTIONS, biases
from headwise.shapes import check_size

State = Mapping[str, Tensor]
SHOWN = 12  # names in the error about an unknown layout
LEARNED = ("q_norm.", "k_norm.", "v_norm.", "gate.", "position.")  # parameters of our layer's options, under our names


class Found(NamedTuple):
    """A layer as read: arguments for `MultiHeadAttention`, and tensors under the names of its separate projections."""

    options: dict[str, Any]
    state: dict[str, Tensor]
    layout: Layout
    rules: list[Correspondence]
    sizes: Sizes
    unsaid: dict[str, str]  # options that layers of this layout usually have and that no tensor shows

    def check_said(self, options: Mapping[str, Any]) -> None:
        """Raise if an option of `unsaid` is given neither here nor by a tensor."""
        for name, cure in self.unsaid.items():
            if name not in options and not any(x.startswith(f"{name}.") for x in self.state):
                raise CheckpointError(f"{self.layout.title}: the tensors do not determine {name}=; {cure}.")

    def arranged(self, fused: bool) -> dict[str, Tensor]:
        """The state dict of our layer, with query, key and value projections fused or separate."""
        state = dict(self.state)
        for kind in ("weight", "bias") if fused else ():
            q, k, v = (state.pop(f"{x}_proj.{kind}", None) for x in "qkv")
            if q is not None and k is not None and v is not None:
                state[f"qkv_proj.{kind}"] = pack(q, k, v, *self.sizes)
        return state

    def written(self, names: State, layer: State, title: str) -> dict[str, Tensor]:
        """Their tensors, from the state dict of our layer; those that did not change are returned bit for bit."""
        state = self._separated(layer)
        # A shared relative bias is written by its owner.
        if lost := sorted(x for x in state if x not in self.state and not x.startswith("position.")):
            raise CheckpointError(
                f"{title}: the layer has {', '.join(lost)}, which the checkpoint does not; writing it would lose them."
            )
        result: dict[str, Tensor] = {}
        for rule in self.rules:
            theirs = [names[x] for x in rule.theirs]
            now = [self._fitting(state, x, title) for x in rule.ours]
            same = all(torch.equal(new, self.state[x].to(new.dtype)) for new, x in zip(now, rule.ours, strict=True))
            again = theirs if same else rule.form.theirs(now, self.sizes)
            result |= {x: new.to(old.dtype) for x, new, old in zip(rule.theirs, again, theirs, strict=True)}
        ours = {x for rule in self.rules for x in rule.ours}
        learned = [x for x in self.state if x not in ours]
        return result | {x: self._fitting(state, x, title).to(names[x].dtype) for x in learned}

    def _separated(self, layer: State) -> dict[str, Tensor]:
        """Copies of the layer's tensors, with separate projections, on the checkpoint's device."""
        state: dict[str, Tensor] = {}
        where = next(iter(self.state.values())).device
        for name, tensor in layer.items():
            if tensor.device.type == "meta":
                raise CheckpointError(f"{name} of the layer is on the meta device and holds no numbers to write.")
            state[name] = tensor.detach().to(where, copy=True)
        for kind in ("weight", "bias"):
            if (packed := state.pop(f"qkv_proj.{kind}", None)) is not None:
                parts = unpack(packed, *self.sizes)
                state |= zip((f"{part}_proj.{kind}" for part in "qkv"), parts, strict=True)
        return state

    def _fitting(self, state: State, name: str, title: str) -> Tensor:
        """A tensor of the layer, refused unless it has the shape it was read in."""
        was = tuple(self.state[name].shape)
        if name not in state or state[name].shape != was:
            now = "is not in the layer" if name not in state else f"has shape {tuple(state[name].shape)} in the layer"
            raise CheckpointError(f"{title}: {name} {now}; the checkpoint has {was}.")
        return state[name]


def read(
    state_dict: State,
    num_heads: int | None = None,
    prefix: str = "",
    num_kv_heads: int | None = None,
    layout: str | None = None,
) -> Found:
    """The options and the separate projections of the one layout that fits."""
    if not isinstance(state_dict, Mapping) or not all(isinstance(x, Tensor) for x in state_dict.values()):
        raise CheckpointError(
            f"a {type(state_dict).__name__} is given; expected a state dict, names to tensors, as "
            f"module.state_dict() returns."
        )
    if not isinstance(prefix, str):
        raise CheckpointError(f"prefix={prefix!r}: expected text, such as 'layers.0.attention.'; '' for none.")
    num_heads = None if num_heads is None else check_size("num_heads", num_heads)
    num_kv_heads = None if num_kv_heads is None else check_size("num_kv_heads", num_kv_heads)
    names = {name[len(prefix) :]: tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
    shapes = {name: tensor.shape for name, tensor in names.items()}
    found = choose(shapes, prefix, layout, made_by_us(getattr(state_dict, "_metadata", None), prefix))
    if found is None:
        raise CheckpointError(_unknown(names or state_dict, prefix))
    return take(found, names, num_heads, num_kv_heads)._replace(unsaid=found.unsaid(shapes, prefix))


def made_by_us(notes: object, prefix: str) -> bool | None:
    """Whether this is the state of our module, by the version that torch stores with it; None if there is none."""
    if not isinstance(notes, Mapping) or prefix.rstrip(".") not in notes:
        return None
    return bool(notes[prefix.rstrip(".")].get("version") == 2)


def choose(names: Shapes, prefix: str, order: str | None, ours: bool | None) -> Layout | None:
    """The layout of these names; raises if two match and nothing decides between them."""
    if (heads := head_list(names)) is not None:
        return heads
    fitting = [layout for layout in LAYOUTS if layout.matches(names)]
    if not fitting or fitting[0].order is None:
        return fitting[0] if fitting else None
    rivals = [layout for layout in fitting if layout.anchor == fitting[0].anchor]
    if order is not None:
        if order not in ("head by head", "side by side"):
            raise CheckpointError(f'layout={order!r}: expected "head by head" or "side by side".')
        named = [layout for layout in rivals if layout.order == order]
        rivals = named or rivals  # these names may have one order only
    elif HEADWISE in rivals and ours is not None:
        rivals = [layout for layout in rivals if (layout is HEADWISE) == ours]
    at_home = [layout for layout in rivals if layout.at_home(prefix)]
    rivals = at_home or rivals
    if len(rivals) > 1:
        raise CheckpointError(
            f"{rivals[0].anchor} may hold its rows head by head (as {rivals[0].title}) or side by side: all queries, "
            f'then all keys, then all values. The tensors do not show which. Pass layout="head by head" or '
            f'layout="side by side".'
        )
    return rivals[0]


def take(layout: Layout, names: State, num_heads: int | None, num_kv_heads: int | None) -> Found:
    """The tensors of a known layout, converted to ours."""
    shapes = {name: tensor.shape for name, tensor in names.items()}
    heads = _heads(layout, shapes, num_heads)
    rules = layout.rules(shapes)
    used = {name for rule in rules for name in rule.theirs}
    names = {name: tensor for name, tensor in names.items() if not name.startswith(layout.unused)}
    learned = [name for name in names if name not in used and (name == "sinks" or name.startswith(LEARNED))]
    used |= {*learned}
    masks = {
        name: x for name, x in names.items() if name == layout.mask or (name not in used and _may_be_mask(name, x))
    }
    if extra := sorted(x for x in names if x not in used and x not in masks and not BESIDE.fullmatch(x)):
        raise CheckpointError(
            f"this looks like {layout.title}, and {', '.join(extra)} would be lost: its meaning is unknown. Remove it "
            f"from the state dict if it plays no part in attention."
        )
    sizes = Sizes(heads, _kv_heads(layout, shapes, heads, num_kv_heads))
    state: dict[str, Tensor] = {}
    for rule in rules:
        state |= _applied(layout.title, rule, [names[name] for name in rule.theirs], sizes)
    options = layout.describe(state, heads)
    if options is None:
        options = describe(layout.title, state, heads)
    options["bias"] = _biases(layout, state, options["out_proj"])
    options |= _gate(state | {name: names[name] for name in learned}, heads)
    if lengths := {causal_length(name, mask) for name, mask in masks.items()}:
        options |= {"causal": True, "context_length": min(lengths)}
    if layout.causal:
        options["causal"] = True
    sizes = Sizes(heads, options.get("num_kv_heads") or heads)
    return Found(options, state | {name: names[name] for name in learned}, layout, rules, sizes, {})


def _applied(title: str, rule: Correspondence, theirs: list[Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Our tensors by one rule; raises with the shapes if they do not fit."""
    for name, tensor in zip(rule.theirs, theirs, strict=True):
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise CheckpointError(f"{title}: {name} is {tensor.dtype}, quantized; dequantize the checkpoint first.")
    try:
        return dict(zip(rule.ours, rule.form.ours(theirs, sizes), strict=True))
    except (RuntimeError, IndexError, ValueError, ZeroDivisionError) as error:
        shown = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(rule.theirs, theirs, strict=True))
        raise CheckpointError(
            f"{title}: {shown} does not hold {sizes.heads} query heads and {sizes.kv_heads} key and value heads."
        ) from error


def _may_be_mask(name: str, tensor: Tensor) -> bool:
    """Whether a tensor that no rule takes is a mask: square, not a weight, and triangular if its values are
    known."""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or name.endswith("weight"):
        return False
    return tensor.device.type == "meta" or _triangle(tensor) is not None


def _triangle(mask: Tensor) -> int | None:
    """The size of a causal mask, by its content: ones where a query may attend, or ones or minus infinity (or a very
    low number) where it may not; None for anything else."""
    if not 0 < mask.numel() == mask.shape[-1] ** 2:
        return None
    square = mask.reshape(mask.shape[-2:])
    below = torch.ones_like(square, dtype=torch.bool).tril()
    marked = square != 0
    marks = square[marked].double()
    ones, hiding = bool((marks == 1).all()), bool((marks < HIDING).all())
    visible, hidden = torch.equal(marked, below) and ones, torch.equal(marked, ~below) and (ones or hiding)
    return square.shape[0] if visible or hidden else None


HIDING = -1000.0  # what is added to a score to hide a key is lower than this


def causal_length(name: str, mask: Tensor) -> int:
    """The context length of a stored causal mask; raises if it is another mask."""
    if mask.dim() < 2:
        raise CheckpointError(f"the stored mask has shape {tuple(mask.shape)} ({name}); expected a square one.")
    if mask.device.type == "meta":  # only its shape is known
        return mask.shape[-1]
    if (length := _triangle(mask)) is None:
        raise CheckpointError(
            f"the stored mask {tuple(mask.shape)} is not causal ({name}); only causal masks can be read: ones on and "
            f"below the diagonal, or ones or minus infinity above it. Remove it from the state dict and pass the mask "
            f"with each call."
        )
    return length


def describe(title: str, state: State, heads: int) -> dict[str, Any]:
    """The options of the layer that these separate projections form, after checking their shapes."""
    state = {name: tensor for name, tensor in state.items() if "_proj." in name}
    for name, tensor in state.items():
        rows = state[name.replace("bias", "weight")].shape[:1]
        if tensor.dim() != 2 if name.endswith("weight") else tensor.shape != rows:
            expected = "2 dimensions (out, in)" if name.endswith("weight") else f"{tuple(rows)}, as its weight"
            raise CheckpointError(
                f"{title}: the {name} read from it has shape {tuple(tensor.shape)}; expected {expected}."
            )
    q, k, v = (state[f"{part}_proj.weight"] for part in "qkv")
    d_model, d_in = q.shape
    whole_heads = d_model and d_model % heads == 0 and k.shape[0] and k.shape[0] % (d_model // heads) == 0
    if not whole_heads or not d_in or k.shape[0] != v.shape[0]:
        raise CheckpointError(
            f"{title}: query {tuple(q.shape)}, key {tuple(k.shape)} and value {tuple(v.shape)} do not form "
            f"{heads} heads; rows must be whole heads of width d_model / num_heads, as many of value as of key."
        )
    out = state.get("out_proj.weight")
    if out is not None and out.shape[1] != d_model:
        raise CheckpointError(
            f"{title}: the output projection {tuple(out.shape)} expects {out.shape[1]}, heads give {d_model}."
        )
    options: dict[str, Any] = {"d_model": d_model, "num_heads": heads, "d_in": d_in}
    options |= {"out_proj": out is not None, "d_out": d_model if out is None else out.shape[0]}
    if k.shape[0] != d_model:
        options["num_kv_heads"] = k.shape[0] // (d_model // heads)
    if k.shape[1] != d_in or v.shape[1] != d_in:
        options |= {"d_key": k.shape[1], "d_value": v.shape[1]}
    return options


def merge(found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the layer: those found in a checkpoint, plus those of the user, which must not contradict."""
    said = {"num_kv_heads": found["num_heads"], "d_key": found["d_in"], "d_value": found["d_in"], **found}
    there = biases(found["bias"])
    if not there["q"] == there["k"] == there["v"] and "bias" not in given:
        raise CheckpointError(
            f"only some of query, key and value have a bias. If none is missing, pass bias={sorted(found['bias'])}."
        )
    for name, value in given.items():
        if name == "bias":
            asked = biases(value) | ({} if found["out_proj"] else {"out": there["out"]})
            agrees = asked == there
        else:
            agrees = name in ("context_length", "causal", "gate") or said.get(name, value) in (None, value)
        if not agrees:
            raise CheckpointError(f"{name}={value} is given and the tensors have {said[name]}; leave it out.")
    return {**found, **given}


def check_options(given: State, expected: State) -> None:
    """Raise unless the checkpoint holds the parameters of the layer's options and no others. A relative bias that is
    not in it stays as it was passed."""
    cures = {"sinks": "sinks=True", "position": "position="}
    cures |= dict.fromkeys(("q_norm", "k_norm", "v_norm"), "qk_norm=") | {"gate": "gate="}
    for name in sorted(set(given) ^ set(expected)):
        option = cures.get(name.split(".")[0])
        if option is None or (name.startswith("position.") and name in expected):
            continue
        if name in given:
            raise CheckpointError(
                f"the state dict holds {name}: pass the option it belongs to, {option}, to from_state_dict."
            )
        raise CheckpointError(
            f"{option} is given, and the state dict holds no {name}. Leave it out, or add the tensor."
        )


def _biases(layout: Layout, state: State, mixed: bool) -> bool | set[str]:
    """The option `bias`: True or False for all projections, or the names of some; `mixed` if there is a last one."""
    some = {part for part in PROJECTIONS if layout.has_bias(part, state)}
    return bool(some) if len(some) in (0, 3 + mixed) else some


def _gate(state: State, heads: int) -> dict[str, Any]:
    """The option of an output gate, if there is one: a row for each head, or for each number of a head."""
    gate = state.get("gate.proj.weight")
    if gate is None:
        return {}
    return {"gate": "head" if gate.shape[0] == heads else "element"}


def _heads(layout: Layout, names: Shapes, given: int | None) -> int:
    """The number of query heads, as given or as the tensors show; raises if neither does."""
    told, sinks, table = layout.heads(names), names.get("sinks", ()), names.get(T5_TABLE, ())
    if told is None and len(sinks) == 1:
        told = sinks[0]
    if told is None and len(table) == 2:
        told = table[1]
    found = given if told is None else told
    if found is None:
        raise CheckpointError(
            f"{layout.title}: num_heads is not given, and the tensors do not determine how many heads there are. "
            f"Pass num_heads=."
        )
    if given not in (None, found):
        raise CheckpointError(f"{layout.title}: num_heads={given} is given and the tensors have {told} heads.")
    return found


def _kv_heads(layout: Layout, names: Shapes, heads: int, given: int | None) -> int:
    """The number of key/value heads, from the rows of a fused tensor that are left after those of the queries."""
    rows, shape, width = layout.fused(names), tuple(names.get(layout.anchor, ())), layout.width(names)
    if rows is None:
        return _kv_rows(layout, names, heads)
    if given is None:
        if width is None:
            raise CheckpointError(
                f"{layout.title}: without an output projection the tensors do not determine how many key/value heads "
                f"there are. Pass num_kv_heads=, {heads} if there are as many as query heads."
            )
        rest, pair = rows - width, 2 * width // heads
        if rest <= 0 or pair == 0 or rest % pair:
            raise CheckpointError(
                f"{layout.title}: {layout.anchor} {shape} and an output projection from {width} do not form {heads} "
                f"query heads with their keys and values."
            )
        given = rest // pair
    if rows % (heads + 2 * given):
        raise CheckpointError(
            f"{layout.title}: {layout.anchor} {shape} does not hold {heads} query heads and {given} key and value "
            f"heads of one width."
        )
    return given


def _kv_rows(layout: Layout, names: Shapes, heads: int) -> int:
    """The number of key/value heads of separate projections, from their rows; `describe` checks that they fit."""
    rules = layout.rules(names)
    by_ours = {rule.ours[0]: names[rule.theirs[0]] for rule in rules}
    query, key = by_ours.get("q_proj.weight"), by_ours.get("k_proj.weight")
    if query is None or key is None or len(query) != 2 or len(key) != 2 or not query[0]:
        return heads
    parts = next(len(rule.ours) for rule in rules if rule.ours[0] == "q_proj.weight")  # 2 with a gate in it
    shared = key[0] * heads * parts // query[0]
    return shared if shared and heads % shared == 0 else heads


def _unknown(names: State, prefix: str) -> str:
    """The message if no layout matches."""
    rows = [(HeadList.title, HeadList.example), *((layout.title, layout.example) for layout in LAYOUTS)]
    known = "\n".join(f"  {title}: {example}" for title, example in rows)
    where = f" under the prefix {prefix!r}" if prefix else ""
    shown = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in list(names.items())[:SHOWN])
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (
        f"no attention layout recognized{where}. Found {shown or 'no names at all'}{more}; known layouts:\n{known}\n"
        f"If the names are nested in a model, pass prefix=, such as prefix='layers.0.attention.'; "
        f"headwise.open_checkpoint(...) finds all layers."
    )
