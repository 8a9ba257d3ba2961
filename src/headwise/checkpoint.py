"""The attention layers of a whole model on disk or in memory: found, read, written back."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.checkpoints import families
from headwise.checkpoints.files import Source, open_source
from headwise.checkpoints.layouts import LAYOUTS, Layout
from headwise.checkpoints.reading import Found, choose, made_by_us, take
from headwise.errors import CheckpointError, HeadwiseError
from headwise.layer import MultiHeadAttention
from headwise.masks import Window
from headwise.packing import unpack
from headwise.relative import RelativeBias


class AttentionLayer(NamedTuple):
    """One attention layer of a checkpoint, as its names and shapes tell before any number is read."""

    name: str  # such as "model.layers.0.self_attn"
    layout: str
    options: dict[str, Any]  # arguments for MultiHeadAttention, as far as they are known
    parameters: int
    dtype: torch.dtype
    problem: str | None  # why it cannot be made without more being said
    cached: bool  # whether decoding keeps its keys and values; an encoder's are not kept

    @property
    def num_heads(self) -> int | None:
        """Query heads, if they are known."""
        return self.options.get("num_heads")

    @property
    def num_kv_heads(self) -> int | None:
        """Key/value heads, if they are known."""
        return self.options.get("num_kv_heads", self.num_heads)

    @property
    def head_dim(self) -> int | None:
        """Width of a head, if it is known."""
        return None if self.num_heads is None else self.options["d_model"] // self.num_heads

    def cache_bytes(self, tokens: int = 1) -> int | None:
        """What a cache keeps for one sample of so many tokens, in the dtype of the checkpoint, if heads are known."""
        if self.num_kv_heads is None or self.head_dim is None:
            return None
        mask = self.options.get("mask")
        if self.options.get("causal") and isinstance(mask, Window):
            tokens = min(tokens, mask.left + 1)
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize * tokens if self.cached else 0


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
        source: a `.safetensors` file, the index of a sharded one, a `.pt` file (opened with `weights_only=True`), a
            model's folder, a state dict, or a module.
        config: the model's configuration as a dictionary; the `config.json` beside the file unless given.
        layout: "head by head" or "side by side", where the order of a fused projection is ambiguous.
        options: arguments for every layer that neither tensors nor configuration tell: num_heads, causal, position...
    """
    tensors, beside = open_source(source)
    if config is not None and not isinstance(config, Mapping):
        raise CheckpointError(f"config={config!r}: expected the dictionary of a config.json.")
    return Checkpoint(tensors, beside if config is None else dict(config), layout, options)


class Checkpoint:
    """See `open_checkpoint`."""

    def __init__(
        self, source: Source, config: Mapping[str, Any] | None, order: str | None, options: Mapping[str, Any]
    ) -> None:
        self.source, self.config, self._options = source, config, dict(options)
        self._sketches = {name: source.sketch(name) for name in source}
        self._sites = _sites(self._sketches, order, source.notes)
        self._shared: dict[str, RelativeBias] = {}
        self.layers = tuple(self._describe(prefix) for prefix in self._sites)

    def read(self, name: str, **options: Any) -> MultiHeadAttention:
        """One layer, with its weights; `options` add to those given when the checkpoint was opened."""
        prefix = self._prefix(name)
        tensors = {x: self.source[x] for x in self._under(prefix)}
        said = self._said(prefix) | options
        position = said.get("position")
        layer = MultiHeadAttention.from_state_dict(
            tensors, said.pop("num_heads", None), prefix=prefix, layout=self._sites[prefix].order, **said
        )
        if isinstance(position, RelativeBias) and "position" not in options:
            layer.position = self._stack_bias(prefix, layer.position)
        return layer

    def read_all(self, **options: Any) -> dict[str, MultiHeadAttention]:
        """Every layer by its name."""
        if not self.layers:
            raise CheckpointError(f"no attention layer was found among {len(self.source)} tensors.")
        return {layer.name: self.read(layer.name, **options) for layer in self.layers}

    def state_dict(self, layers: Mapping[str, MultiHeadAttention]) -> dict[str, Tensor]:
        """All tensors by their own names and in their own layout, those of `layers` as they are now.

        A tensor whose numbers did not change is the one that was read, to the last bit.
        """
        return {**self.source, **self._changed(layers)}

    def save(self, path: str | Path, layers: Mapping[str, MultiHeadAttention]) -> None:
        """Write what `state_dict` gives, in the same kind of file, or files, as was read."""
        self.source.write(Path(path), self._changed(layers))

    def __repr__(self) -> str:
        return f"Checkpoint({len(self.source)} tensors, {len(self.layers)} attention layers)"

    def _changed(self, layers: Mapping[str, MultiHeadAttention]) -> dict[str, Tensor]:
        changed: dict[str, Tensor] = {}
        for name, layer in layers.items():
            prefix = self._prefix(name)
            names = {x[len(prefix) :]: self.source[x] for x in self._under(prefix)}
            found = take(self._sites[prefix], names, layer.num_heads, layer.num_kv_heads)
            changed |= {prefix + x: tensor for x, tensor in _written(found, names, layer, name).items()}
        return changed

    def _prefix(self, name: str) -> str:
        for prefix in self._sites:
            if name in (prefix, prefix[:-1]):
                return prefix
        names = [prefix[:-1] for prefix in self._sites]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise CheckpointError(f"no attention layer {name!r}; found {shown or 'none'}.")

    def _under(self, prefix: str) -> list[str]:
        return [name for name in self._sketches if name.startswith(prefix)]

    def _said(self, prefix: str) -> dict[str, Any]:
        """What configuration and user say about a layer."""
        by_config = {} if self.config is None else families.options(self.config, prefix)
        return by_config | self._options

    def _describe(self, prefix: str) -> AttentionLayer:
        """A layer without reading its numbers."""
        names = {x[len(prefix) :]: self._sketches[x] for x in self._under(prefix)}
        layout, problem = self._sites[prefix], None
        said: dict[str, Any] = {}
        try:
            said = self._said(prefix)
            found = take(layout, names, said.get("num_heads"), said.get("num_kv_heads"))
            options = {**found.options, **said}
            open_ = [x for x in layout.unsaid({n: t.shape for n, t in names.items()}, prefix) if x not in said]
            problem = f"{', '.join(open_)}= must be said" if open_ else None
        except HeadwiseError as error:
            options, problem = said, str(error)
        first = next(iter(names.values()))
        used = [x for x in names.values() if x.is_floating_point()]
        encoder = self.config is not None and families.known(self.config, prefix) and not options.get("causal")
        return AttentionLayer(
            prefix[:-1],
            layout.title,
            options,
            sum(x.numel() for x in used),
            (used or [first])[0].dtype,
            problem,
            cached=not encoder or families.Place.of(prefix).cross,
        )

    def _stack_bias(self, prefix: str, bias: Any) -> RelativeBias:
        """The learned bias of a stack, which stands in its first layer and is one module for all."""
        stack = re.split(r"\d", prefix)[0]
        if stack not in self._shared:
            name = next((x for x in self.source if x.startswith(stack) and x.endswith("attention_bias.weight")), None)
            if name is None:
                raise CheckpointError(f"{prefix[:-1]}: no relative_attention_bias.weight in any layer of {stack!r}.")
            bias.weight = nn.Parameter(self.source[name].clone())
            self._shared[stack] = bias
        return self._shared[stack]


def _sites(names: Mapping[str, Tensor], order: str | None, notes: object) -> dict[str, Layout]:
    """Where attention layers begin, and how each is laid out; a tensor belongs to the first layout that claims it."""
    found: dict[str, Layout] = {}
    holder = _Noted(notes)
    for name in names:
        for layout in LAYOUTS:
            prefix = name[: -len(layout.anchor)]
            if not name.endswith(layout.anchor) or (prefix and prefix[-1] not in "./") or prefix in found:
                continue
            shapes = {x[len(prefix) :]: tensor.shape for x, tensor in names.items() if x.startswith(prefix)}
            if layout.matches(shapes):
                found[prefix] = choose(shapes, prefix, order, made_by_us(holder, prefix)) or layout
                break
    return found


class _Noted:
    """Stands for a state dict whose notes are kept elsewhere."""

    def __init__(self, notes: object) -> None:
        self._metadata = notes


def _written(found: Found, names: Mapping[str, Tensor], layer: MultiHeadAttention, title: str) -> dict[str, Tensor]:
    """The tensors of a layer in the layout they were read in."""
    state = {name: tensor.detach() for name, tensor in layer.state_dict().items()}
    for kind in ("weight", "bias"):
        if f"qkv_proj.{kind}" in state:
            parts = unpack(state[f"qkv_proj.{kind}"], layer.num_heads, layer.num_kv_heads)
            state |= zip((f"{part}_proj.{kind}" for part in "qkv"), parts, strict=True)
    written: dict[str, Tensor] = {}
    for rule in found.rules:
        theirs, now = [names[x] for x in rule.theirs], [_fitting(state, found.state, x, title) for x in rule.ours]
        same = all(torch.equal(new, found.state[x].to(new.dtype)) for new, x in zip(now, rule.ours, strict=True))
        again = theirs if same else rule.form.theirs(now, found.sizes)
        written |= {x: new.to(old.dtype) for x, new, old in zip(rule.theirs, again, theirs, strict=True)}
    ours = {x for rule in found.rules for x in rule.ours}
    learned = [x for x in found.state if x not in ours]
    return written | {x: _fitting(state, found.state, x, title).to(names[x].dtype) for x in learned}


def _fitting(state: Mapping[str, Tensor], was: Mapping[str, Tensor], name: str, title: str) -> Tensor:
    """A tensor of the layer, of the shape it had."""
    if name not in state or state[name].shape != was[name].shape:
        now = "is not in the layer" if name not in state else f"has shape {tuple(state[name].shape)} in the layer"
        raise CheckpointError(f"{title}: {name} {now}; the checkpoint has {tuple(was[name].shape)}.")
    return state[name]
