"""The layouts of attention in other libraries: how they name their tensors, and how those are arranged."""

import abc
import re
from collections.abc import Mapping
from typing import Any

from torch import Size, Tensor

from headwise.errors import CheckpointError
from headwise.layer.checkpoints import forms
from headwise.layer.checkpoints.forms import Arrangement, Correspondence, HeadByHead, Same, SideBySide

Shapes = Mapping[str, Size]
PARTS = ("q_proj", "k_proj", "v_proj")
KINDS = ("weight", "bias")
OUTS = ("out_proj", "o_proj", "proj", "W_o", "W_O", "Wo", "w_o", "wo", "fc_out", "fc", "out", "dense", "output")
META_TURNED = (
    "Meta's own files rotate neighboring pairs: position=rotary(base, interleaved=True). Files converted to halves: "
    "position=rotary(base)"
)
TURNED = "models with these names rotate queries and keys: position=rotary(base). If yours does not: position=None"
T5_TABLE = "relative_attention_bias.weight"
# Tensors that may be stored next to a layer and take no part in it: computed positions, masks, and the norm that
# follows.
BESIDE = re.compile(
    r"(.*\.)?(rotary_emb|rotary_pos_emb|rope)\..*|masked_bias|(output\.)?(LayerNorm|layer_?norm)\.(weight|bias|gamma|beta)"
)


class Layout(abc.ABC):
    """One way to name and arrange the tensors of attention."""

    title: str
    example: str
    anchor: str  # a name that every layer of this layout has
    mask: str | None = None  # a buffer that may hold a causal mask
    order: str | None = None  # of the rows of a fused projection, if two layouts share its name
    causal = False  # whether the names are those of a decoder
    unused: tuple[str, ...] = ()  # prefixes of tensor names to ignore

    def matches(self, names: Shapes) -> bool:
        """Whether these names belong to this layout."""
        return self.anchor in names

    @abc.abstractmethod
    def rules(self, names: Shapes) -> list[Correspondence]:
        """Which of our tensors correspond to which of theirs; raises a `CheckpointError` if some are missing."""

    def heads(self, names: Shapes) -> int | None:
        """The number of query heads, if the tensors show it."""
        return None

    def fused(self, names: Shapes) -> int | None:
        """The number of rows of a fused tensor of queries, keys and values, if there is one."""
        return None

    def width(self, names: Shapes) -> int | None:
        """The width of all query heads together, as the output projection next to a fused tensor shows."""
        return None

    def at_home(self, prefix: str) -> bool:
        """Whether layers with this prefix are known to have this layout."""
        return False

    def unsaid(self, names: Shapes, prefix: str) -> dict[str, str]:
        """Options that layers of this layout usually have and that no tensor shows, each with advice."""
        return {}

    def describe(self, state: Mapping[str, Tensor], heads: int) -> dict[str, Any] | None:
        """The options of a layer with these tensors, under our names, and this many heads; None for linear maps to
        queries, keys and values, whose shapes say everything."""
        return None

    def has_bias(self, part: str, names: Mapping[str, Any]) -> bool:
        """Whether the map of a role, q, k, v or out, has a bias, by our names of its tensors."""
        return f"{part}_proj.bias" in names


def linear(names: Shapes, theirs: str, ours: str, form: Arrangement | None = None) -> list[Correspondence]:
    """A linear map under another name."""
    if f"{theirs}.weight" not in names:
        raise CheckpointError(f"{theirs}.weight is missing; found {', '.join(sorted(names))}.")
    rules = [Correspondence((f"{theirs}.weight",), (f"{ours}.weight",), form or Same())]
    return rules + [Correspondence((f"{theirs}.bias",), (f"{ours}.bias",), Same())] * (f"{theirs}.bias" in names)


def last(names: Shapes, outs: tuple[str, ...]) -> list[Correspondence]:
    """The output projection under the first of these names that exists, if any."""
    found = next((name for name in outs if f"{name}.weight" in names), None)
    return [] if found is None else linear(names, found, "out_proj")


class Linears(Layout):
    """Four linear maps (or three, without the last), under any names."""

    mask = "mask"

    def __init__(
        self,
        query: str,
        key: str,
        value: str,
        outs: tuple[str, ...] = OUTS,
        *,
        title: str | None = None,
        more: Mapping[str, str] | None = None,
        complete: bool = False,
    ) -> None:
        self.title, self.complete = title or f"{query}, {key}, {value}, {outs[0]}", complete
        self.parts, self.outs, self.more = (query, key, value), outs, more or {}
        self.anchor = f"{query}.weight"
        self.example = f"{query}.weight, {key}.weight, {value}.weight, {outs[0]}.weight"

    def matches(self, names: Shapes) -> bool:
        there = all(f"{part}.weight" in names for part in self.parts)
        return there and not (self.complete and not any(f"{out}.weight" in names for out in self.outs))

    def rules(self, names: Shapes) -> list[Correspondence]:
        rules = [rule for theirs, ours in zip(self.parts, PARTS, strict=True) for rule in linear(names, theirs, ours)]
        rules += [Correspondence((theirs,), (ours,), Same()) for theirs, ours in self.more.items() if theirs in names]
        return rules + last(names, self.outs)

    def unsaid(self, names: Shapes, prefix: str) -> dict[str, str]:
        """Models with Llama's names use rotary positions; those with T5's names do not scale scores."""
        if self.anchor == "wq.weight":
            return {"position": META_TURNED, "causal": "pass causal=True for a decoder"}
        if "o_proj.weight" in names:
            return {"position": TURNED, "causal": "pass causal=True for a decoder"}
        if "o.weight" in names and self.anchor == "q.weight":
            return {"scale": "T5 does not scale its scores: scale=1.0. If yours does: scale=None"}
        return {}


class Llama(Linears):
    """`q_proj` and so on. If `q_proj` has twice the rows that `o_proj` takes, it holds a gate beside each query."""

    def __init__(self) -> None:
        super().__init__("q_proj", "k_proj", "v_proj", title="q_proj, k_proj, v_proj")

    def rules(self, names: Shapes) -> list[Correspondence]:
        rules = super().rules(names)
        query, out = names["q_proj.weight"], names.get("o_proj.weight", ())
        if len(query) != 2 or len(out) != 2 or query[0] != 2 * out[1]:
            return rules
        gate = {"q_proj.weight": "gate.proj.weight", "q_proj.bias": "gate.proj.bias"}
        return [
            rule._replace(ours=(rule.ours[0], gate[rule.ours[0]]), form=forms.QueryAndGate())
            if rule.ours[0] in gate
            else rule
            for rule in rules
        ]


class QueriesAlone(Linears):
    """`q_proj` and `o_proj` only: a layer that reads the keys and values of another, as the last layers of Gemma 3n do.

    Some files hold maps to keys and values that such a layer does not use.
    """

    unused = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")

    def __init__(self) -> None:
        super().__init__("q_proj", "k_proj", "v_proj", ("o_proj",), title="q_proj, o_proj, without keys and values")
        self.example = "q_proj.weight, o_proj.weight"

    def matches(self, names: Shapes) -> bool:
        others = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
        return {"q_proj.weight", "o_proj.weight"} <= set(names) and not any(name in names for name in others)

    def rules(self, names: Shapes) -> list[Correspondence]:
        return linear(names, "q_proj", "q_proj") + linear(names, "o_proj", "out_proj")

    def describe(self, state: Mapping[str, Tensor], heads: int) -> dict[str, Any]:
        """The options of the layer; how many key heads it reads is not in its tensors."""
        query, out = state["q_proj.weight"], state["out_proj.weight"]
        if query.dim() != 2 or out.dim() != 2 or query.shape[0] % heads or query.shape[0] != out.shape[1]:
            raise CheckpointError(
                f"{self.title}: query {tuple(query.shape)} and output {tuple(out.shape)} do not form {heads} heads."
            )
        sizes = {"d_model": query.shape[0], "num_heads": heads, "num_kv_heads": None, "d_in": query.shape[1]}
        return {**sizes, "out_proj": True, "d_out": out.shape[0]}

    def has_bias(self, part: str, names: Mapping[str, Any]) -> bool:
        """Whether the map of a role has a bias; keys and values have no map."""
        return super().has_bias("q" if part in "kv" else part, names)

    def unsaid(self, names: Shapes, prefix: str) -> dict[str, str]:
        cure = "if it reads those of another layer, pass projections=queries_only() and num_kv_heads="
        return {"projections": f"there is no k_proj and no v_proj; {cure}", **super().unsaid(names, prefix)}


class XTransformers(Linears):
    """`to_q` and so on. If query heads share keys, head i uses key i modulo their number; reading reorders the heads so
    that those of a group are next to each other, as ours are."""

    def __init__(self) -> None:
        super().__init__("to_q", "to_k", "to_v", ("to_out.0", "to_out"), title="x-transformers' to_q, to_out")

    def rules(self, names: Shapes) -> list[Correspondence]:
        rules = super().rules(names)
        # Diffusers, which names the last one to_out.0, shares keys between neighboring heads, as we do.
        if names["to_k.weight"][:1] == names["to_q.weight"][:1] or "to_out.weight" not in names:
            return rules
        axes = {"q_proj.weight": 0, "q_proj.bias": 0, "out_proj.weight": 1}
        return [
            rule._replace(form=forms.HeadsInterleaved(axes[rule.ours[0]])) if rule.ours[0] in axes else rule
            for rule in rules
        ]


class KeysWithValues(Layout):
    """One linear map for queries, and one for keys and values."""

    def __init__(self, query: str, pair: str, outs: tuple[str, ...]) -> None:
        self.title, self.query, self.pair, self.outs = f"{query}, {pair}", query, pair, outs
        self.anchor = f"{pair}.weight"
        self.example = f"{query}.weight, {pair}.weight, {outs[0]}.weight"

    def matches(self, names: Shapes) -> bool:
        return f"{self.query}.weight" in names and self.anchor in names

    def rules(self, names: Shapes) -> list[Correspondence]:
        rules = linear(names, self.query, "q_proj")
        for kind in KINDS:
            if f"{self.pair}.{kind}" in names:
                rules.append(
                    Correspondence((f"{self.pair}.{kind}",), (f"k_proj.{kind}", f"v_proj.{kind}"), forms.EqualParts(2))
                )
        return rules + last(names, self.outs)


class HeadList(Layout):
    """A list of heads with three linear maps each, and perhaps an output projection beside it; see `head_list`.

    Args:
        form: where a map is: {0} is the number of the head, {1} the map, as in "heads.{0}.{1}" and "{1}.{0}".
        parts: the names of the three maps.
        numbers: the numbers of the heads.
    """

    title = "a list of heads"
    example = "heads.0.query.weight, heads.0.key.weight, heads.0.value.weight, heads.1.query.weight, ..."

    def __init__(self, form: str, parts: tuple[str, str, str], numbers: set[int]) -> None:
        self.form, self.parts, self.numbers = form, parts, sorted(numbers)
        self.anchor = f"{form.format(self.numbers[0], parts[0])}.weight"

    def heads(self, names: Shapes) -> int:
        first = self.numbers[0]
        if first > 1 or self.numbers != list(range(first, first + len(self.numbers))):
            raise CheckpointError(f"{self.title}: heads {self.numbers} are not numbered from 0 without a gap.")
        return len(self.numbers)

    def rules(self, names: Shapes) -> list[Correspondence]:
        rules = []
        self.heads(names)
        for ours, theirs in zip(PARTS, self.parts, strict=True):
            for kind in KINDS:
                rows = tuple(f"{self.form.format(i, theirs)}.{kind}" for i in self.numbers)
                if any(row in names for row in rows) or kind == "weight":
                    self.check_alike(f"{theirs}.{kind}", [names.get(row) for row in rows])
                    rules.append(Correspondence(rows, (f"{ours}.{kind}",), forms.Listed()))
        return rules + last(names, OUTS)

    def check_alike(self, what: str, shapes: list[Size | None]) -> None:
        """Raise unless every head has the tensor, in one shape."""
        if None in shapes:
            raise CheckpointError(f"{self.title}: {what} is missing in some heads.")
        if len(set(shapes)) > 1 or shapes[0] == ():
            given = sorted({tuple(shape) for shape in shapes if shape is not None})
            raise CheckpointError(f"{self.title}: {what} has shapes {given}; all heads must be alike.")

    def is_one_layer(self, names: Shapes) -> bool:
        """Whether these are the heads of one layer, not layers in a list; raises if this is not clear.

        There are three signs: the list is named after heads, each map has a list of its own, or an output projection
        beside the list takes all of them.
        """
        if "head" in self.form.lower() or self.form.startswith("{1}"):
            return True
        count, shape = len(self.numbers), names[self.anchor]
        own_last = any(f"{self.form.format(self.numbers[0], out)}.weight" in names for out in OUTS)
        if count < 2 or own_last or len(shape) != 2 or not self.form.endswith(".{0}.{1}"):
            return False
        beside = [names[f"{out}.weight"] for out in OUTS if f"{out}.weight" in names]
        if any(len(x) == 2 and x[1] == count * shape[0] for x in beside):
            return True
        if shape[0] < shape[1]:
            listed = self.form.split(".")[0]
            raise CheckpointError(
                f"{self.anchor} {tuple(shape)} is one of {count} in the list {listed!r}: they may be {count} heads of "
                f"one layer or {count} layers without an output projection, and the names do not tell which. Rename "
                f"the list to 'heads', or read each as a layer: MultiHeadAttention.from_state_dict(state_dict, "
                f"num_heads, prefix='...{listed}.0.')."
            )
        return False

    def owns(self, name: str) -> bool:
        """Whether a tensor is in the list, and so in no layer of its own."""
        return any(name.startswith(self.form.format(i, "").rstrip(".") + ".") for i in self.numbers) or any(
            name.startswith(f"{self.form.format(i, part)}.") for i in self.numbers for part in self.parts
        )


# Names of the three maps within a head.
ROLES = (
    ("query", "key", "value"), ("W_query", "W_key", "W_value"), ("W_q", "W_k", "W_v"), ("q_proj", "k_proj", "v_proj"),
    ("q", "k", "v"), ("Wq", "Wk", "Wv"), ("wq", "wk", "wv"), ("w_q", "w_k", "w_v"), ("W_Q", "W_K", "W_V"),
    ("queries", "keys", "values"), ("to_q", "to_k", "to_v"), ("q_linear", "k_linear", "v_linear"),
    ("q_lin", "k_lin", "v_lin"), ("linear_q", "linear_k", "linear_v"), ("query_proj", "key_proj", "value_proj"),
    ("Q", "K", "V"), ("w_qs", "w_ks", "w_vs"), ("query_layer", "key_layer", "value_layer"),
)  # fmt: skip
_QUERY = "|".join(re.escape(query) for query, _, _ in ROLES)
# heads.0.query.weight, head_0.query.weight, and query.0.weight, query_heads.0.weight: before it, the layer's prefix.
IN_A_LIST = re.compile(rf"(?P<list>[^./]*?[^./_])(?P<dot>[._]?)(?P<number>\d+)\.(?P<role>{_QUERY})\.weight")
IN_ITS_OWN = re.compile(rf"(?P<role>{_QUERY})(?P<more>s|_heads|_list|_projs)?\.(?P<number>\d+)\.weight")


def head_list(names: Shapes) -> HeadList | None:
    """The list of heads among these names, if there is one; raises if it could also be a list of layers."""
    return next((found for found in lists_in(names) if found.is_one_layer(names)), None)


def lists_in(names: Shapes) -> list[HeadList]:
    """Every list that holds three linear maps for each number."""
    numbers: dict[tuple[str, str], set[int]] = {}
    for name in names:
        for pattern, form in ((IN_A_LIST, "{list}{dot}{{0}}.{{1}}"), (IN_ITS_OWN, "{{1}}{more}.{{0}}")):
            if (match := pattern.fullmatch(name)) is not None:
                words = {word: found or "" for word, found in match.groupdict().items()}
                numbers.setdefault((form.format(**words), words["role"]), set()).add(int(words["number"]))
    roles = {parts[0]: parts for parts in ROLES}
    found = [HeadList(form, roles[role], some) for (form, role), some in numbers.items()]
    return [one for one in found if all(f"{one.form.format(one.numbers[0], x)}.weight" in names for x in one.parts)]


class LowRank(Layout):
    """Multi-head latent attention: `kv_a_proj_with_mqa` and so on, with our names in the same order beside theirs.

    The first maps the input to the latent and the shared key, the second the latent to keys and values.
    """

    OURS = ("q_proj", "q_a_proj", "q_a_norm", "q_b_proj", "kv_a_proj", "kv_a_norm", "kv_b_proj", "out_proj")
    NEEDED = ("kv_a_proj", "kv_b_proj")

    def __init__(self, title: str, theirs: str) -> None:
        self.title, self.names = title, dict(zip(self.OURS, theirs.split(), strict=True))
        self.anchor = f"{self.names['kv_a_proj']}.weight"
        self.example = ", ".join(f"{self.names[x]}.weight" for x in ("q_a_proj", "q_b_proj", *self.NEEDED, "out_proj"))

    def matches(self, names: Shapes) -> bool:
        return all(f"{self.names[x]}.weight" in names for x in self.NEEDED)

    def rules(self, names: Shapes) -> list[Correspondence]:
        low = f"{self.names['q_a_proj']}.weight" in names
        needed = {*self.NEEDED, *(("q_a_proj", "q_b_proj") if low else ("q_proj",))}
        there = [x for x in self.OURS if x in needed or f"{self.names[x]}.weight" in names]
        return [rule for ours in there for rule in linear(names, self.names[ours], ours)]

    def describe(self, state: Mapping[str, Tensor], heads: int) -> dict[str, Any]:
        """The options of the layer, from the shapes of its tensors."""
        from headwise.layer.latent import RMS, latent  # which reads the arrangements of this package

        last = state["q_b_proj.weight" if "q_b_proj.weight" in state else "q_proj.weight"]
        down, up = state["kv_a_proj.weight"], state["kv_b_proj.weight"]
        kv_rank, rotary_dim = up.shape[1], down.shape[0] - up.shape[1]
        nope_dim = last.shape[0] // heads - rotary_dim
        value_dim = up.shape[0] // heads - nope_dim
        out = state.get("out_proj.weight")
        whole = last.shape[0] % heads == 0 and up.shape[0] % heads == 0 and min(nope_dim, value_dim, kv_rank) > 0
        if not whole or rotary_dim < 0 or (out is not None and out.shape[1] != heads * value_dim):
            shown = ", ".join(f"{name} {tuple(x.shape)}" for name, x in state.items() if name.endswith("weight"))
            raise CheckpointError(f"{self.title}: {shown} do not form {heads} heads with a latent that all share.")
        normed = "kv_a_norm.weight" in state
        q_rank = state["q_a_proj.weight"].shape[0] if "q_a_proj.weight" in state else None
        if q_rank is not None and ("q_a_norm.weight" in state) != normed:
            raise CheckpointError(
                f"{self.title}: only one of the two low-rank vectors has a norm; found {list(state)}."
            )
        sizes: dict[str, Any] = {"nope_dim": nope_dim, "rotary_dim": rotary_dim, "value_dim": value_dim}
        found = latent(kv_rank, q_rank=q_rank, norm=RMS if normed else None, **sizes)
        width = down.shape[1]
        options: dict[str, Any] = {"d_model": width, "num_heads": heads, "d_in": width, "projections": found}
        return options | {"out_proj": out is not None, "d_out": heads * value_dim if out is None else out.shape[0]}

    def has_bias(self, part: str, names: Mapping[str, Any]) -> bool:
        """Whether the map of a role has a bias: the first of two, if there are two."""
        roles = {"q": ("q_proj", "q_a_proj"), "k": ("kv_a_proj",), "v": ("kv_a_proj",), "out": ("out_proj",)}
        return any(f"{name}.bias" in names for name in roles[part])

    def unsaid(self, names: Shapes, prefix: str) -> dict[str, str]:
        turned = "DeepSeek's own files turn neighboring pairs: position=rotary(base, interleaved=True)"
        return {"position": turned, "causal": "pass causal=True for a decoder"}


class Torch(Layout):
    """`torch.nn.MultiheadAttention`, with one `in_proj_weight` or, if input widths differ, three weights."""

    title = "torch.nn.MultiheadAttention"
    example = "in_proj_weight, in_proj_bias, out_proj.weight, out_proj.bias"

    def __init__(self, anchor: str) -> None:
        self.anchor = anchor

    def rules(self, names: Shapes) -> list[Correspondence]:
        if "bias_k" in names or "bias_v" in names:
            raise CheckpointError(
                f"{self.title}: bias_k and bias_v (add_bias_kv=True) add a learned key that our layer does not have."
            )
        if self.anchor == "in_proj_weight":
            rules = [self.thirds(names, "weight")]
        else:
            missing = [f"{part}_weight" for part in PARTS if f"{part}_weight" not in names]
            if missing:
                raise CheckpointError(f"{missing[0]} is missing; found {', '.join(sorted(names))}.")
            rules = [Correspondence((f"{part}_weight",), (f"{part}.weight",), Same()) for part in PARTS]
        if "in_proj_bias" in names:
            rules.append(self.thirds(names, "bias"))
        return rules + linear(names, "out_proj", "out_proj")

    def thirds(self, names: Shapes, kind: str) -> Correspondence:
        """The fused tensor, which has as many keys as queries."""
        shape = names[f"in_proj_{kind}"]
        if not shape or shape[0] % 3:
            raise CheckpointError(
                f"in_proj_{kind} has shape {tuple(shape)}; expected three equal parts for query, key, value."
            )
        return Correspondence((f"in_proj_{kind}",), tuple(f"{part}.{kind}" for part in PARTS), forms.EqualParts(3))


class FusedTensor(Layout):
    """One linear map for queries, keys and values, in the arrangement `form`."""

    mask = "bias"  # GPT-NeoX and GPT-2 store their causal mask under this name

    def __init__(
        self,
        fused: str,
        outs: tuple[str, ...],
        form: Arrangement,
        *,
        title: str,
        order: str,
        home: str | None = None,
        turned: bool = False,
    ) -> None:
        self.title, self.name, self.outs, self.form = title, fused, outs, form
        self.order, self.home, self.turned = order, home, turned
        self.anchor = f"{fused}.weight"
        self.example = f"{fused}.weight, {outs[0]}.weight"

    def matches(self, names: Shapes) -> bool:
        """The fused projection exists, with one of its outputs or with nothing that could be an output."""
        there = [out for out in OUTS if f"{out}.weight" in names]
        return self.anchor in names and (any(f"{out}.weight" in names for out in self.outs) or not there)

    def at_home(self, prefix: str) -> bool:
        return self.home is not None and re.fullmatch(self.home, prefix) is not None

    def rules(self, names: Shapes) -> list[Correspondence]:
        rules = [
            Correspondence((f"{self.name}.{kind}",), tuple(f"{part}.{kind}" for part in PARTS), self.form)
            for kind in KINDS
            if f"{self.name}.{kind}" in names
        ]
        return rules + last(names, self.outs)

    def fused(self, names: Shapes) -> int:
        return names[self.anchor][0] if names[self.anchor] else 0

    def width(self, names: Shapes) -> int | None:
        return next((names[f"{out}.weight"][-1] for out in self.outs if names.get(f"{out}.weight")), None)

    def unsaid(self, names: Shapes, prefix: str) -> dict[str, str]:
        return {"position": TURNED} if self.turned else {}


class Gpt2(FusedTensor):
    """GPT-2's `c_attn`, stored as (in, out), and the same names with torch's linear maps."""

    causal = True

    def __init__(self) -> None:
        super().__init__("c_attn", ("c_proj",), SideBySide(), title="GPT-2's c_attn, c_proj", order="side by side")

    def transposed(self, names: Shapes) -> bool:
        """Whether weights are (in, out): the longer side, or the one that fits the bias, holds all three parts."""
        weight, bias = names[self.anchor], names.get("c_attn.bias")
        if bias is not None and len(bias) == 1 and len(weight) == 2 and weight[0] != weight[1]:
            return bias[0] == weight[1]
        return len(weight) == 2 and weight[1] > weight[0]

    def fused(self, names: Shapes) -> int:
        """The rows of its weight, or its columns if it is transposed."""
        return names[self.anchor][-1] if self.transposed(names) else super().fused(names)

    def width(self, names: Shapes) -> int | None:
        out = names.get("c_proj.weight")
        return out[0] if out and self.transposed(names) else super().width(names)

    def rules(self, names: Shapes) -> list[Correspondence]:
        if not self.transposed(names):
            return super().rules(names)
        ours = tuple(f"{part}.weight" for part in PARTS)
        rules = [rule for rule in super().rules(names) if rule.theirs[0].endswith("bias")]
        rules.append(Correspondence((self.anchor,), ours, SideBySide(transposed=True)))
        if "c_proj.weight" in names:
            rules.append(Correspondence(("c_proj.weight",), ("out_proj.weight",), forms.Transposed()))
        return rules


class Kernels(Layout):
    """Weights with an axis for heads, (E, H, D), as in Keras and Flax."""

    def __init__(self, out: str, dot: str) -> None:
        self.title = f"Keras-style kernels (E, H, D) with {out}"
        self.out, self.dot = out, dot
        self.anchor = f"query{dot}kernel"
        self.example = ", ".join(f"{part}{dot}kernel" for part in ("query", "key", "value", out))

    def matches(self, names: Shapes) -> bool:
        return all(f"{part}{self.dot}kernel" in names for part in ("query", "key", "value", self.out))

    def heads(self, names: Shapes) -> int | None:
        return names[self.anchor][1] if len(names[self.anchor]) == 3 else None

    def rules(self, names: Shapes) -> list[Correspondence]:
        rules = []
        self.check_alike(names)
        for theirs, ours in zip(("query", "key", "value"), PARTS, strict=True):
            form = forms.Kernel("heads" if theirs == "query" else "kv_heads")
            for name, kind, dims in (("kernel", "weight", 3), ("bias", "bias", 2)):
                spelled = f"{theirs}{self.dot}{name}"
                if spelled in names:
                    self.check_dims(spelled, names[spelled], dims)
                    rules.append(Correspondence((spelled,), (f"{ours}.{kind}",), form))
        kernel, bias = f"{self.out}{self.dot}kernel", f"{self.out}{self.dot}bias"
        self.check_dims(kernel, names[kernel], 3)
        rules.append(Correspondence((kernel,), ("out_proj.weight",), forms.OutKernel()))
        return rules + [Correspondence((bias,), ("out_proj.bias",), Same())] * (bias in names)

    def check_alike(self, names: Shapes) -> None:
        """Raise unless all heads have one width."""
        shapes = {part: names[f"{part}{self.dot}kernel"] for part in ("query", "key", "value", self.out)}
        if any(len(shape) != 3 for shape in shapes.values()):
            return  # `check_dims` reports it for each tensor
        q, k, v, out = shapes.values()
        biases = {part: names.get(f"{part}{self.dot}bias") for part in ("query", "key", "value")}
        fits = q[2] == k[2] == v[2] and k[1] == v[1] and out[:2] == q[1:]
        if not fits or any(bias not in (None, shapes[part][1:]) for part, bias in biases.items()):
            shown = ", ".join(f"{part} {tuple(shape)}" for part, shape in shapes.items())
            shown += "".join(f", {part} bias {tuple(bias)}" for part, bias in biases.items() if bias is not None)
            raise CheckpointError(
                f"{self.title}: {shown}; expected heads of one width: (E, H, D) thrice, (H, D, E), biases (H, D)."
            )

    def check_dims(self, name: str, shape: Size, dims: int) -> None:
        """Raise unless there is an axis for heads."""
        if len(shape) != dims:
            expected = {3: "(E, H, D), for the output (H, D, E)", 2: "(H, D)"}[dims]
            raise CheckpointError(f"{self.title}: {name} has shape {tuple(shape)}; expected {expected}.")


# The known layouts. The first one that matches wins.


HEADWISE = FusedTensor(
    "qkv_proj", ("out_proj",), HeadByHead(), title="headwise.MultiHeadAttention", order="head by head"
)
NEOX = FusedTensor(
    "query_key_value",
    ("dense",),
    HeadByHead(),
    title="query_key_value of GPT-NeoX, Falcon and BLOOM",
    order="head by head",
    home=r"(^|.*\.)(layers\.\d+\.attention|h\.\d+\.self_attention)\.",  # the prefixes of its layers
    turned=True,
)


QUERIES_ALONE = QueriesAlone()


def side_by_side(name: str, *outs: str, turned: bool = False) -> FusedTensor:
    """A fused projection with all queries first, then all keys, then all values."""
    return FusedTensor(name, outs, SideBySide(), title=f"{name}, {outs[0]}", order="side by side", turned=turned)


def textbook(query: str, key: str, value: str) -> Linears:
    """The names that books and courses use."""
    return Linears(query, key, value, title=f"{query}, {key}, {value}")


def nested(model: str, name: str) -> Linears:
    """Three projections in one module, the output projection in the next."""
    parts = (f"{name}.query", f"{name}.key", f"{name}.value")
    return Linears(*parts, ("output.dense",), title=f"{model}'s {parts[0]}, output.dense", complete=True)


LAYOUTS: tuple[Layout, ...] = (
    HEADWISE,
    side_by_side("qkv_proj", "out_proj"),
    LowRank(
        "DeepSeek's kv_a_proj_with_mqa, kv_b_proj",
        "q_proj q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj",
    ),
    LowRank("headwise.latent", " ".join(LowRank.OURS)),
    LowRank("DeepSeek's own wkv_a, wkv_b", "wq wq_a q_norm wq_b wkv_a kv_norm wkv_b wo"),
    Torch("in_proj_weight"),
    Torch("q_proj_weight"),
    Gpt2(),
    NEOX,
    side_by_side("query_key_value", "dense", turned=True),
    side_by_side("qkv_proj", "o_proj", turned=True),  # Phi-3
    side_by_side("qkv", "proj", "out_proj", "out"),  # timm
    side_by_side("Wqkv", "Wo", "out_proj", turned=True),  # ModernBERT
    FusedTensor("wqkv", ("wo",), HeadByHead(), title="wqkv of InternLM 2", order="head by head", turned=True),
    side_by_side("wqkv", "wo", turned=True),
    side_by_side("to_qkv", "to_out.0", "to_out"),
    nested("BERT", "self"),
    nested("ViT", "attention"),
    Linears("q_lin", "k_lin", "v_lin", ("out_lin",), title="DistilBERT's q_lin, out_lin"),
    XTransformers(),
    KeysWithValues("to_q", "to_kv", ("to_out.0", "to_out")),
    textbook("W_query", "W_key", "W_value"),
    Linears("W_q", "W_k", "W_v", ("W_o", "out_proj", "proj", "fc_out", "fc"), title="W_q, W_k, W_v"),
    Llama(),
    QUERIES_ALONE,
    Linears("q", "k", "v", ("o", "proj", "out_proj", "out"), more={T5_TABLE: "position.weight"}),
    Linears("wq", "wk", "wv", ("wo",), complete=True),
    textbook("Wq", "Wk", "Wv"),
    textbook("w_q", "w_k", "w_v"),
    textbook("W_Q", "W_K", "W_V"),
    textbook("w_qs", "w_ks", "w_vs"),
    textbook("query", "key", "value"),
    textbook("queries", "keys", "values"),
    Linears("q_linear", "k_linear", "v_linear", ("out", "out_linear", "out_proj", "fc"), title="q_linear, k_linear"),
    Linears("linears.0", "linears.1", "linears.2", ("linears.3",), title="four linears in a list"),
    Kernels("attention_output", "."),
    Kernels("attention_output", "/"),
    Kernels("out", "."),
    Kernels("out", "/"),
)
