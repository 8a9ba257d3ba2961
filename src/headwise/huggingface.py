"""Run any transformers model on headwise: importing this module registers `attn_implementation="headwise"`.

    import headwise.huggingface
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="headwise")
    attentions = model(**inputs, output_attentions=True).attentions        # one AttentionMap per layer, at fused speed
    with headwise.watch(model) as seen: ...                                # the same maps without that flag

transformers calls two functions by that name: `mask_of` makes the mask (a `Mask`, never a T×T tensor) and `attention`
attends. Both are registered through transformers' public interfaces; nothing in transformers is replaced. A model that
computes attention in its own code is refused by name when it asks for a mask, or when it is watched or opened.
"""

import dataclasses
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from headwise import masks
from headwise.attention.backends import Call, choose
from headwise.errors import MaskError, MissingExtraError, OptionError, install_command
from headwise.layer.attached import Attached
from headwise.masks import Extent, Grid, Mask
from headwise.masks.mask import placed
from headwise.weights import AttentionMap, Scoring

try:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, prepare_padding_mask, sdpa_mask
except ImportError as error:
    raise MissingExtraError(
        "headwise.huggingface needs transformers 5.22 or newer. Install it with: " + install_command("huggingface")
    ) from error

NAME = "headwise"
CAUSAL = masks.causal()  # one shared object, so that `attention` recognizes it by identity

IndexFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# The attention function ---------------------------------------------------------------------------------------------


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: "PreparedMask | Tensor | None",
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, AttentionMap]:
    """The output (B, T, H, Dv), and the attention weights as a map; transformers calls this in every attention layer.

    Args:
        module: the model's attention module.
        query: (B, H, T, D), after rotary.
        key: (B, Hkv, S, D), after rotary and the cache.
        value: (B, Hkv, S, Dv).
        attention_mask: what `mask_of` returned, or a tensor from the caller: bool (True may attend) or float (added).
        dropout: probability; 0 in evaluation.
        scaling: the scale of the scores.
        is_causal: whether queries see no later key when there is no mask; `module.is_causal` by default.
        softcap: soft-cap of the scores, as in Gemma 2.
        s_aux: sinks, as in gpt-oss.
        position_bias: a bias on the scores, as in T5.
        rest: `cu_seq_lens_q`, the starts of packed sequences; `output_attentions`; and arguments that other
            implementations need and that the mask already contains, such as `sliding_window`.
    """
    _refuse_sparse(module, rest)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and query.shape[2] > 1 and key.shape[2] > query.shape[2]:
        # The first use of an empty static cache: only as many keys are filled as there are queries.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    mask, bias = _mask_and_bias(attention_mask, query.shape[2], key.shape[2], causal and query.shape[2] > 1)
    if rest.get("cu_seq_lens_q") is not None:
        packed = _packed(rest["cu_seq_lens_q"], query, key)
        mask = packed if mask is None else mask & packed
    bias = _added(bias, position_bias, key.shape[2])
    plain = bias is None and s_aux is None and (mask is None or mask is CAUSAL)
    cross = _crosses(module, causal, query.shape[2] != key.shape[2])
    if plain:
        scoring = _plain_scoring(mask, scaling, softcap, cross)
    else:
        scoring = Scoring(mask, bias, scaling, softcap, s_aux, cross=cross)
    call = Call(query, key, value, scoring, dropout)
    output, lse = choose(call).run_with_lse(call)
    weights = AttentionMap(query, key, scoring, lse)
    attached: Attached | None = getattr(module, "_attached", None)
    watchers = () if attached is None else attached.watchers()
    if (watchers or rest.get("output_attentions")) and query.shape[2] < key.shape[2]:
        weights = _without_the_cache(weights, scoring)
    for watcher in watchers:
        watcher(weights)
    if attached is not None:
        output = attached.handed(call, attached.read(call, output))
    return output.transpose(1, 2).contiguous(), weights


def _refuse_sparse(module: nn.Module, given: Mapping[str, Any]) -> None:
    for name in ("block_indices", "indices"):
        if given.get(name) is not None:
            raise OptionError(
                f"{type(module).__name__} uses sparse attention ({name}=), which attn_implementation='headwise' does "
                f"not support. Use attn_implementation='eager'."
            )


def _mask_and_bias(
    given: "PreparedMask | Tensor | None", T: int, S: int, causal: bool
) -> tuple[Mask | None, Tensor | None]:
    if given is None:
        return (CAUSAL if causal else None), None
    if isinstance(given, PreparedMask):
        return given.for_lengths(T, S), None
    if given.dtype == torch.bool:
        return masks.dense(given), None
    if not given.is_floating_point():
        raise OptionError(
            f"the attention mask has dtype {given.dtype}; expected bool (True may attend) or float (added to scores)."
        )
    return None, given


def _packed(starts: Tensor, query: Tensor, key: Tensor) -> Mask:
    """The mask of sequences packed into one row, given where each starts."""
    batch, _, T, _ = query.shape
    if batch != 1 or key.shape[2] != T or starts.dim() != 1:
        raise OptionError(
            f"cu_seq_lens_q has shape {tuple(starts.shape)} and (B, T, S) = {(batch, T, key.shape[2])}: packed "
            f"sequences need B = 1 and as many keys as queries."
        )
    sequences = torch.arange(len(starts) - 1, device=query.device)
    return masks.documents(torch.repeat_interleave(sequences, starts.diff().long(), output_size=T))


def _added(bias: Tensor | None, position_bias: Tensor | None, S: int) -> Tensor | None:
    """The sum of the biases for S keys; with a static cache they cover more keys than are filled."""
    parts = [x[..., :S] for x in (bias, position_bias) if x is not None]
    return sum(parts[1:], parts[0]) if parts else None


@functools.lru_cache(64)
def _plain_scoring(mask: Mask | None, scale: float | None, softcap: float | None, cross: bool) -> Scoring:
    """One object for all layers and calls; only for masks without tensors, which the cache would keep alive."""
    return Scoring(mask, None, scale, softcap, cross=cross)


def _crosses(module: nn.Module, causal: bool, lengths_differ: bool) -> bool:
    """Whether the keys are of another text: a decoder's attention that is not causal, or a class that says so."""
    decodes = getattr(module, "is_decoder", False) is True
    return "CrossAttention" in type(module).__name__ or (not causal and (decodes or lengths_differ))


def _without_the_cache(weights: AttentionMap, scoring: Scoring) -> AttentionMap:
    """The map of one generation step, in a form that does not keep the whole key cache alive."""
    if torch.compiler.is_compiling():
        return weights
    _, sinks, *_ = scoring.learnable
    smaller = weights._query.shape[1] * weights.shape[2] <= weights._key.shape[1] * weights._key.shape[3]
    return weights.kept() if smaller and sinks is None and not weights.requires_grad else weights.clone()


# The mask function --------------------------------------------------------------------------------------------------


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: IndexFunction | None = None,
    attention_mask: "Tensor | PreparedMask | None" = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **rest: Any,
) -> "PreparedMask | Tensor | None":
    """A headwise mask that means what transformers asked for, or None if every query sees every key."""
    if config is not None and bypasses_interface(type(config).__module__):
        raise bypass_error(getattr(config, "model_type", type(config).__name__))
    if isinstance(attention_mask, PreparedMask):
        return attention_mask
    function: Any = causal_mask_function if mask_function is None else mask_function
    if use_vmap:  # the function takes single indices only, which transformers handles itself
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask, use_vmap=True,
            allow_is_causal_skip=False, device=device,
        )  # fmt: skip
    frame = _MaskFrame(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    mask = frame.read(function)
    keys = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if keys is not None:
        keys = keys[:, kv_offset : kv_offset + kv_length].bool()
        if torch.compiler.is_compiling() or not bool(keys.all()):
            mask = masks.padding(keys) if mask is None else mask & masks.padding(keys)
    if mask is None and rest.get("allow_is_bidirectional_skip", True):
        return None
    if mask is None:  # the model wants a mask, though it hides nothing
        mask = masks.window(kv_length + q_length, kv_length + q_length)
    if not frame.aligned and q_length == 1:  # one token and a cache of fixed size: a compiled step needs a tensor
        return mask.to_tensor(q_length, kv_length, device=device).expand(batch_size, -1, -1, -1).contiguous()
    return PreparedMask(mask, batch_size, q_length, kv_length)


class PreparedMask:
    """A mask on its way from `mask_of` to `attention`.

    `generate`, or a model around another one, may make it in advance and then treats it like a tensor (B, 1, T, S): it
    may read `ndim` and `shape` and call `contiguous()`. Any other use raises, because the model would compute with a
    mask that is not a tensor.
    """

    ndim = 4

    def __init__(self, mask: Mask, batch: int, queries: int, keys: int) -> None:
        self.mask, self.queries, self.keys = mask, queries, keys
        self.shape = torch.Size((batch, 1, queries, keys))

    def for_lengths(self, T: int, S: int) -> Mask:
        """The mask; an error if the model attends to a different number of keys than the mask was made for."""
        if (self.queries, self.keys) != (T, S):
            raise MaskError(
                f"this model made its mask for (T, S) = {(self.queries, self.keys)} and attends with {(T, S)}: its "
                f"code changes the mask in between, which attn_implementation='headwise' does not support. Use 'eager'."
            )
        return self.mask

    def contiguous(self) -> "PreparedMask":
        """The mask itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own protocols, not the model
            raise AttributeError(name)
        raise _edited(f"reads its .{name}")

    def _refuse(self, *others: Any) -> Any:
        raise _edited("computes with it")

    __getitem__ = __setitem__ = __invert__ = __neg__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __and__ = __or__ = __bool__ = _refuse
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _edited(f"calls {getattr(function, '__name__', function)} on it")


class EditedMaskError(MaskError, AttributeError):
    """A model uses its mask as a tensor."""


def _edited(how: str) -> EditedMaskError:
    return EditedMaskError(
        f"this model uses its attention mask as a tensor ({how}), but attn_implementation='headwise' gives it a Mask. "
        f"Use attn_implementation='eager', whose output_attentions=True gives dense weights."
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class IndexMask(Mask):
    """A mask function of transformers (sample, head, query, key), with queries and keys counted from its offsets."""

    function: IndexFunction
    batch: int
    first_query: int | Tensor
    first_key: int
    pads = True

    @property
    def extent(self) -> Extent:
        return Extent(batch=self.batch if self.batch > 1 else None)

    def visible(self, grid: Grid) -> Tensor:
        return self.function(grid.batch, grid.head, grid.row + self.first_query, grid.col + self.first_key)

    def __repr__(self) -> str:
        return f"transformers' {getattr(self.function, '__qualname__', 'function')}"


@dataclasses.dataclass(frozen=True)
class _MaskFrame:
    """How many queries and keys a mask covers, and at which positions they start."""

    batch: int
    T: int
    S: int
    first_query: int | Tensor
    first_key: int
    device: torch.device | str

    @property
    def aligned(self) -> bool:
        """Whether the last query is at the position of the last key, as headwise masks assume."""
        return isinstance(self.first_query, int) and self.first_query + self.T == self.first_key + self.S

    def read(self, function: IndexFunction) -> Mask | None:
        """The same mask as one of ours if the function is known, else as an `IndexMask`; None if it hides nothing."""
        name, inside = getattr(function, "__qualname__", ""), _closure(function)
        if name == "and_masks.<locals>.and_mask":
            parts = [self.read(part) for part in inside["mask_functions"]]
            some = [part for part in parts if part is not None]
            return functools.reduce(Mask.__and__, some) if some else None
        if name == "or_masks.<locals>.or_mask":
            parts = [self.read(part) for part in inside["mask_functions"]]
            return None if any(part is None for part in parts) else functools.reduce(Mask.__or__, parts)  # type: ignore[arg-type]
        if name == "bidirectional_mask_function":
            return None
        if name == "causal_mask_function":
            return self._placed(CAUSAL)
        if name == "sliding_window_overlay.<locals>.inner_mask" and inside["sliding_window"] > 0:
            return self._placed(masks.window(inside["sliding_window"] - 1, self.S + self.T))
        if name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            reach = inside["sliding_window"]
            return self._placed(masks.window(reach, reach))
        if name == "packed_sequence_mask_function.<locals>.inner_mask" and self.aligned and not self.first_key:
            ids = inside["packed_sequence_mask"]
            if ids.shape[1] == self.S:
                return masks.documents(ids)
        return IndexMask(function, self.batch, self.first_query, self.first_key)

    def _placed(self, mask: Mask) -> Mask:
        """A mask that depends on positions, for queries at the positions of this frame."""
        if self.aligned:
            return mask
        steps = torch.arange(self.T, device=self.device)
        return placed(mask, (steps + (self.first_query - self.first_key))[None])


def _closure(function: IndexFunction) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals) if hasattr(function, "__closure__") else {}


# Models that compute attention in their own code --------------------------------------------------------------------


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def bypasses_interface(configuration: str) -> bool:
    """Whether a model defines attention that does not use transformers' attention interface.

    Args:
        configuration: the module that defines the model's configuration, such as
            "transformers.models.bloom.configuration_bloom". The model's code is in the module beside it.
    """
    try:
        names = vars(importlib.import_module(configuration.replace(".configuration_", ".modeling_")))
    except ImportError:
        return False
    own = any(
        isinstance(x, type) and "Attention" in name and x.__module__ == names["__name__"] for name, x in names.items()
    )
    return own and "ALL_ATTENTION_FUNCTIONS" not in names


def bypass_error(model: str) -> OptionError:
    """The error for a `model` that never calls `attention`."""
    return OptionError(
        f"{model} computes attention in its own code and does not go through transformers' attention interface, so "
        f"attn_implementation='headwise' cannot reach it. Use attn_implementation='eager', whose "
        f"output_attentions=True gives dense weights."
    )


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules, by name, of all parts of a model that run on `attn_implementation="headwise"`.

    It warns about modules that compute attention themselves, whose weights cannot be seen; if there are only such
    modules, it raises.
    """
    found, own = {}, set()
    kinds = {kind for kind in {type(module) for module in model.modules()} if attends(kind)}
    for name, module in model.named_modules():
        if type(module) not in kinds or any(type(x) in kinds for x in module.modules() if x is not module):
            continue
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if computes_attention(type(module)):
            own.add(type(module).__name__)
        elif implementation == NAME:
            found[name] = module
    if found and own:
        warnings.warn(
            f"{', '.join(sorted(own))} of {type(model).__name__} computes attention in its own code, not through "
            f"transformers' attention interface: its weights are not seen.",
            stacklevel=3,
        )
    if own and not found and getattr(getattr(model, "config", None), "_attn_implementation", None) == NAME:
        raise bypass_error(type(model).__name__)
    return found


def attends(kind: type) -> bool:
    """Whether a class is attention, by its name or because it calls the attention interface itself."""
    return "Attention" in kind.__name__ or any("ALL_ATTENTION_FUNCTIONS" in _names_in(part) for part in kind.__mro__)


def computes_attention(kind: type) -> bool:
    """Whether an attention class takes a softmax itself instead of calling the attention interface."""
    names = _names_in(kind)
    return not names.isdisjoint({"softmax", "scaled_dot_product_attention"}) and "ALL_ATTENTION_FUNCTIONS" not in names


def _names_in(kind: type) -> set[str]:
    """The global names and attributes that the methods of a class use."""
    codes = [x.__code__ for x in vars(kind).values() if isinstance(x, FunctionType)]
    return {name for code in codes for name in code.co_names}


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask_of)
