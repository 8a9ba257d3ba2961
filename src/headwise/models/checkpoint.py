"""The attention layers of a whole model, on disk or in memory: find them, read them, write them back."""

import bisect
import copy
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor, nn

from headwise.errors import CheckpointError, HeadwiseError
from headwise.layer import MultiHeadAttention
from headwise.layer.checkpoints.layouts import (
    IN_A_LIST,
    IN_ITS_OWN,
    LAYOUTS,
    QUERIES_ALONE,
    T5_TABLE,
    HeadList,
    Layout,
    Shapes,
    lists_in,
)
from headwise.layer.checkpoints.reading import choose, made_by_us, take
from headwise.layer.projections import Projections
from headwise.layer.sharing import QueriesOnly
from headwise.masks import Mask, causal, reach_back
from headwise.models import families
from headwise.models.builtin import FOLDER, FORMAT
from headwise.models.files import TensorSource, config_of, open_tensors
from headwise.shapes import check_size
from headwise.weights.scoring import RelativeBias


class Site(NamedTuple):
    """One attention layer: its names begin with `prefix`."""

    prefix: str
    layout: Layout
    problem: str | None = None  # why its layout cannot be determined

    @property
    def name(self) -> str:
        """The layer's name in the model."""
        return self.prefix[:-1]


class TensorNames:
    """The tensors of a checkpoint without their data, by name and by prefix."""

    def __init__(self, sketches: Mapping[str, Tensor]) -> None:
        self.sketches, self.order = sketches, sorted(sketches)

    def under(self, prefix: str) -> list[str]:
        """All names that begin with the prefix."""
        first = bisect.bisect_left(self.order, prefix)
        last = bisect.bisect_left(self.order, prefix + chr(0x10FFFF))
        return self.order[first:last]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under a prefix, by the remainder of their names."""
        return {name[len(prefix) :]: self.sketches[name] for name in self.under(prefix)}

    def shapes(self, prefix: str) -> dict[str, Size]:
        """The shapes of those tensors."""
        return {name: tensor.shape for name, tensor in self.part(prefix).items()}


def find_sites(names: TensorNames, order: str | None, notes: object) -> dict[str, Site]:
    """All attention layers, in the order of the file; the first layout in the table that fits is taken."""
    found = _lists_of_heads(names)
    heads = [(site.prefix, site.layout) for site in found.values() if isinstance(site.layout, HeadList)]
    for name in names.sketches:
        if any(name.startswith(prefix) and layout.owns(name[len(prefix) :]) for prefix, layout in heads):
            continue
        for layout in LAYOUTS:
            prefix = name[: -len(layout.anchor)]
            if not name.endswith(layout.anchor) or (prefix and prefix[-1] not in "./") or prefix in found:
                continue
            shapes = names.shapes(prefix)
            if layout.matches(shapes):
                try:
                    chosen = choose(shapes, prefix, order, made_by_us(notes, prefix))
                    found[prefix] = Site(prefix, chosen or layout)
                except CheckpointError as error:
                    found[prefix] = Site(prefix, layout, str(error))
                break
    return found | _incomplete(names, found)


def _lists_of_heads(names: TensorNames) -> dict[str, Site]:
    """Layers whose heads are in a list."""
    found: dict[str, Site] = {}
    for name in names.sketches:
        for pattern in (IN_A_LIST, IN_ITS_OWN):
            match = re.fullmatch(rf"(?P<prefix>(?:.*[./])?){pattern.pattern}", name)
            if match is None or match["prefix"] in found:
                continue
            prefix = match["prefix"]
            shapes = names.shapes(prefix)
            for layout in lists_in(shapes):
                try:
                    if layout.is_one_layer(shapes):
                        found[prefix] = Site(prefix, layout)
                except CheckpointError as error:
                    found[prefix] = Site(prefix, layout, str(error))
    return found


def _incomplete(names: TensorNames, found: Mapping[str, Site]) -> dict[str, Site]:
    """Layers whose prefix differs from that of a found layer only in its number, and that lack some tensors."""
    kinds: dict[str, Site] = {}
    for site in found.values():
        kinds.setdefault(_numberless(site.prefix), site)
    missing: dict[str, Site] = {}
    for pattern, site in kinds.items():
        if "#" not in pattern:
            continue
        parts = {rest for rule in site.layout.rules(names.shapes(site.prefix)) for rest in rule.theirs}
        for name in names.sketches:
            for rest in parts:
                prefix = name[: -len(rest)]
                if name.endswith(rest) and prefix not in found and _numberless(prefix) == pattern:
                    missing.setdefault(prefix, Site(prefix, site.layout, _gap(site.layout, names.shapes(prefix))))
    return missing


def _gap(layout: Layout, shapes: Shapes) -> str:
    """What a layer is missing."""
    try:
        layout.rules(shapes)
    except CheckpointError as error:
        return str(error)
    return f"some tensors of the layout {layout.title} are missing; found {', '.join(shapes)}."


def _numberless(prefix: str) -> str:
    return re.sub(r"\d+", "#", prefix)


class AttentionLayer(NamedTuple):
    """One attention layer of a checkpoint, described from names and shapes alone."""

    name: str  # such as "model.layers.0.self_attn"
    layout: str
    options: dict[str, Any]  # arguments for MultiHeadAttention, as far as known
    parameters: int
    dtype: torch.dtype
    problem: str | None  # why it cannot be built without more options
    cached: bool  # whether decoding caches its keys and values; False in an encoder

    @property
    def num_heads(self) -> int | None:
        """Query heads, if known."""
        return self.options.get("num_heads")

    @property
    def num_kv_heads(self) -> int | None:
        """Key/value heads, if known."""
        return self.options.get("num_kv_heads", self.num_heads)

    @property
    def head_dim(self) -> int | None:
        """The head dimension of queries and keys, if known."""
        if self._projections is not None and self._projections.head_dim is not None:
            return self._projections.head_dim
        width = self.options.get("d_model")
        return None if self.num_heads is None or width is None else width // self.num_heads

    @property
    def _projections(self) -> Projections | None:
        found: Projections | None = self.options.get("projections")
        return found

    def cache_bytes(self, tokens: int = 1) -> int | None:
        """Bytes of key/value cache for one sample of `tokens`, in the dtype of the checkpoint, if heads are known."""
        if self.num_kv_heads is None or self.head_dim is None:
            return None
        masks = [causal()] if self.options.get("causal") else []
        masks += [self.options["mask"]] if self.options.get("mask") is not None else []
        reach = reach_back(functools.reduce(Mask.__and__, masks)) if masks else None
        tokens = tokens if reach is None else min(tokens, reach + 1)
        numbers = 2 * self.num_kv_heads * self.head_dim
        if self._projections is not None:
            heads, key_dim, value_dim = self._projections.stored(self.num_kv_heads, self.head_dim)
            numbers = heads * (key_dim + value_dim)
        return numbers * self.dtype.itemsize * tokens if self.cached else 0


def open_checkpoint(
    source: str | Path | Mapping[str, Tensor] | nn.Module,
    *,
    config: Mapping[str, Any] | None = None,
    layout: str | None = None,
    **options: Any,
) -> "Checkpoint":
    """The attention layers of a model.

    >>> model = nn.TransformerEncoderLayer(32, 4, 64)
    >>> found = open_checkpoint(model, num_heads=4)
    >>> [layer.name for layer in found.layers]
    ['self_attn']
    >>> found.read("self_attn").num_heads
    4

    Args:
        source: "builtin", a `.safetensors`, `.bin` or `.pt` file (torch files are opened with `weights_only=True`), the
            index of several, a model's folder, a state dict, or a module.
        config: the model's configuration as a dictionary; the `config.json` beside the file by default.
        layout: "head by head" or "side by side", if the order of a fused projection is ambiguous.
        options: arguments for every layer that neither tensors nor configuration determine: num_heads, causal,
            position...
    """
    if config is not None and not isinstance(config, Mapping):
        raise CheckpointError(f"config={config!r}: expected the dictionary of a config.json.")
    for name in ("num_heads", "num_kv_heads"):
        if options.get(name) is not None:
            check_size(name, options[name])
    source = FOLDER if source == "builtin" else source
    tensors = open_tensors(source)
    found = (config_of(source) or tensors.config) if config is None else dict(config)
    if layout is None and (found or {}).get("model_type") == FORMAT:
        layout = "head by head"
    return Checkpoint(tensors, found, layout, options)


class Checkpoint:
    """The attention layers of a file or a model, in any known layout; made by `open_checkpoint`."""

    def __init__(
        self, source: TensorSource, config: Mapping[str, Any] | None, order: str | None, options: Mapping[str, Any]
    ) -> None:
        self.source, self.config, self._options = source, config, dict(options)
        self._names = TensorNames({name: source.sketch(name) for name in source})
        self._sites = {x: self._by_config(site) for x, site in find_sites(self._names, order, source.notes).items()}
        self.layers = tuple(self._describe(site) for site in self._sites.values())

    def _by_config(self, site: Site) -> Site:
        """The site, as a layer without keys and values if its model says so, even if the file holds such tensors."""
        try:
            shares = isinstance(self._said(site).get("projections"), QueriesOnly)
        except CheckpointError:  # `_describe` reports it
            shares = False
        return Site(site.prefix, QUERIES_ALONE) if shares else site

    def _tensors_of(self, site: Site) -> list[str]:
        """The names of a layer's tensors."""
        return [x for x in self._names.under(site.prefix) if not x[len(site.prefix) :].startswith(site.layout.unused)]

    def read(self, name: str, **options: Any) -> MultiHeadAttention:
        """The layer of this name, with its weights; `options` add to those given when the checkpoint was opened."""
        return self._read(self._site(name), options, {})

    def read_all(self, **options: Any) -> dict[str, MultiHeadAttention]:
        """Every layer by name, with `options` as in `read`. If layers share a learned bias, as in T5, they share one
        module for it."""
        if not self.layers:
            raise CheckpointError(f"no attention layer was found among {len(self.source)} tensors.")
        shared: dict[str, RelativeBias] = {}
        return {site.name: self._read(site, options, shared) for site in self._sites.values()}

    def state_dict(self, layers: Mapping[str, MultiHeadAttention]) -> dict[str, Tensor]:
        """All tensors of the checkpoint under their original names and layout, with the current values of `layers`.

        A tensor that did not change is bit-identical to the one that was read.
        """
        return {**self.source, **self._changed(layers)}

    def save(self, path: str | Path, layers: Mapping[str, MultiHeadAttention]) -> None:
        """Write `state_dict(layers)` to `path`, in the same file format that was read. If you write over the file that
        was read, open it again to see the new values."""
        self.source.write(Path(path), self._changed(layers))

    def __repr__(self) -> str:
        return f"Checkpoint({len(self.source)} tensors, {len(self.layers)} attention layers)"

    def _read(self, site: Site, options: Mapping[str, Any], shared: dict[str, RelativeBias]) -> MultiHeadAttention:
        if site.problem is not None:
            raise CheckpointError(f"{site.name}: {site.problem}")
        said = {**self._said(site), **options}
        bias = said.get("position")
        layer = self._made(site, {name: self.source[name] for name in self._tensors_of(site)}, said)
        if isinstance(bias, RelativeBias) and "position" not in options:
            weight = layer.state_dict(keep_vars=True)["qkv_proj.weight" if layer.fused else "q_proj.weight"]
            layer.position = self._stack_bias(site, bias, shared).to(weight.device, weight.dtype)
        return layer

    def _made(self, site: Site, tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> MultiHeadAttention:
        """A layer with these tensors; errors name the layer."""
        for name, cure in self._open_questions(site, said).items():
            raise CheckpointError(f"{site.name}: the tensors do not determine {name}=; {cure}.")
        rest = {name: value for name, value in said.items() if name != "num_heads"}
        layer = MultiHeadAttention.from_state_dict(
            tensors, said.get("num_heads"), prefix=site.prefix, layout=site.layout.order, **rest
        )
        if layer.out_proj is None and self.config is not None and families.known(self.config, site.prefix):
            found = ", ".join(self._names.part(site.prefix))
            raise CheckpointError(f"{site.name}: the output projection is missing; found {found}.")
        return layer

    def _changed(self, layers: Mapping[str, MultiHeadAttention]) -> dict[str, Tensor]:
        """The tensors of these layers, by the checkpoint's names."""
        if not isinstance(layers, Mapping):
            raise CheckpointError(f"layers are a {type(layers).__name__}; expected names to layers, as read_all gives.")
        changed: dict[str, Tensor] = {}
        for name, layer in layers.items():
            site = self._site(name)
            if not isinstance(layer, MultiHeadAttention):
                raise CheckpointError(f"{name} is a {type(layer).__name__}; expected a MultiHeadAttention.")
            names = {x[len(site.prefix) :]: self.source[x] for x in self._names.under(site.prefix)}
            self._check_heads(site, layer)
            found = take(site.layout, names, layer.num_heads, layer.num_kv_heads)
            new = found.written(names, layer.state_dict(), name)
            changed |= {site.prefix + x: tensor for x, tensor in new.items()}
            if isinstance(layer.position, RelativeBias) and "position.weight" not in found.state:
                owner = self._bias_name(site)
                changed.setdefault(owner, layer.position.weight.detach().to(self.source[owner].dtype, copy=True))
        return changed

    def _site(self, name: str) -> Site:
        for site in self._sites.values():
            if name in (site.prefix, site.name):
                return site
        names = [site.name for site in self._sites.values()]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise CheckpointError(f"no attention layer {name!r}; found {shown or 'none'}.")

    def _said(self, site: Site) -> dict[str, Any]:
        """The options of a layer from the configuration and the user; the user's take precedence."""
        by_config = {} if self.config is None else families.options(self.config, site.prefix, self._options)
        return by_config | self._options

    def _open_questions(self, site: Site, said: Mapping[str, Any]) -> dict[str, str]:
        """The options of a layer that are needed and not given, and how to give them."""
        shapes = self._names.shapes(site.prefix)
        asked = site.layout.unsaid(shapes, site.prefix)
        kind = None if self.config is None else families.unknown(self.config, site.prefix)
        if kind is not None:
            asked |= dict.fromkeys(("causal", "position"), f"the family {kind!r} is not known, so pass both")
        if site.layout.anchor == "to_q.weight" and any("rotary" in x or "rel_pos" in x for x in self.source):
            asked |= {"position": "the model has positional parameters that its layers share"}
        return {name: cure for name, cure in asked.items() if name not in said and f"{name}.weight" not in shapes}

    def _check_heads(self, site: Site, layer: MultiHeadAttention) -> None:
        """Raise if a layer to be written has a different number of heads than the checkpoint."""
        said = self._said(site)
        for name in ("num_heads", "num_kv_heads"):
            if said.get(name) not in (None, getattr(layer, name)):
                raise CheckpointError(f"{site.name}: {name} is {getattr(layer, name)} in the layer, here {said[name]}.")

    def _describe(self, site: Site) -> AttentionLayer:
        """A layer's description, without reading data: it is built on the meta device."""
        names = {x[len(site.prefix) :]: self._names.sketches[x] for x in self._tensors_of(site)}
        problem, options = site.problem, dict[str, Any]()
        used = list(names.values())
        try:
            options = self._said(site)
            found = take(site.layout, names, options.get("num_heads"), options.get("num_kv_heads"))
            used = list(found.state.values())
            said, options = copy.deepcopy(options), {**found.options, **options}
            if isinstance(said.get("position"), nn.Module):
                said["position"].to("meta")
            if problem is None:
                self._made(site, {site.prefix + x: tensor for x, tensor in names.items()}, said)
        except HeadwiseError as error:
            problem = problem or str(error).removeprefix(f"{site.name}: ")
        known = self.config is not None and families.known(self.config, site.prefix)
        cached = not known or bool(options.get("causal")) or families.is_cross(site.prefix)
        cached = cached and not isinstance(options.get("projections"), QueriesOnly)
        parameters = sum(x.numel() for x in used)
        return AttentionLayer(site.name, site.layout.title, options, parameters, used[0].dtype, problem, cached)

    def _bias_name(self, site: Site) -> str:
        """The name of the learned bias that the layers of a stack share."""
        stack = families.stack_of(site.prefix)
        name = next((x for x in self._names.under(stack) if x.endswith(T5_TABLE)), None)
        if name is None:
            raise CheckpointError(f"{site.name}: no {T5_TABLE} in any layer of {stack!r}.")
        return name

    def _stack_bias(self, site: Site, bias: RelativeBias, shared: dict[str, RelativeBias]) -> RelativeBias:
        """That bias as a module, one for all layers that are read together."""
        name = self._bias_name(site)
        if name not in shared:
            bias.weight = nn.Parameter(self.source[name].clone())
            shared[name] = bias
        return shared[name]
