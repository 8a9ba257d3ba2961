"""Any transformers model on our core: `attn_implementation="headwise"`, and attentions that are `AttentionMap`s.

    import headwise
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="headwise")
    attentions = model(**inputs, output_attentions=True).attentions        # one map per layer, at fused speed
    with headwise.watch(model) as seen: ...                                 # the same without that flag

transformers asks two functions: one makes the mask, which here is a `Mask` and no T×T tensor, the other attends.
"""

import dataclasses
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from headwise import masks
from headwise.attention.backends import Call, choose
from headwise.errors import MaskError, MissingExtraError, OptionError
from headwise.layer.projection import silenced
from headwise.masks import Extent, Grid, Mask
from headwise.masks.placement import placed
from headwise.weights import AttentionMap, Scoring

NAME = "headwise"


# Masks of transformers as ours: it describes a mask as a function of indices, which we recognise or ask tile by tile.

IndexFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Indexed(Mask):
    """Any function of sample, head, query and key, the last two counted from where transformers begins."""

    function: IndexFunction
    batch: int
    first_query: int | Tensor
    first_key: int

    @property
    def extent(self) -> Extent:
        return Extent(batch=self.batch if self.batch > 1 else None)

    def visible(self, grid: Grid) -> Tensor:
        return self.function(grid.batch, grid.head, grid.row + self.first_query, grid.col + self.first_key)

    def __repr__(self) -> str:
        return f"transformers' {getattr(self.function, '__qualname__', 'function')}"


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: IndexFunction | None = None,
    attention_mask: "Tensor | Prepared | None" = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> "Prepared | Tensor | None":
    """The mask function of `attn_implementation="headwise"`: a mask of ours, or None where nothing is hidden."""
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

    if isinstance(attention_mask, Prepared):
        return attention_mask
    function: Any = causal_mask_function if mask_function is None else mask_function
    if use_vmap:  # a function that only takes single numbers: transformers knows how to ask it
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask, use_vmap=True,
            allow_is_causal_skip=False, device=device,
        )  # fmt: skip
    place = _Place(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    found = place.read(function)
    keys = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if keys is not None:
        keys = keys[:, kv_offset : kv_offset + kv_length].bool()
        if torch.compiler.is_compiling() or not bool(keys.all()):
            found = masks.padding(keys) if found is None else found & masks.padding(keys)
    if found is None:
        return None
    if not place.aligned and q_length == 1:  # one token against a cache of fixed size: a compiled step wants a tensor
        return found.to_tensor(q_length, kv_length, device=device).expand(batch_size, -1, -1, -1).contiguous()
    return Prepared(found, q_length, kv_length)


CAUSAL = masks.causal()  # one object, by which the attention function knows it


class Prepared:
    """A mask on its way from where transformers makes it to where it attends. `generate` may make it beforehand, and
    then asks of it what one asks of a tensor (B, 1, T, S)."""

    ndim = 4

    def __init__(self, mask: Mask, queries: int, keys: int) -> None:
        self.mask, self.queries, self.keys = mask, queries, keys

    def for_lengths(self, T: int, S: int) -> Mask:
        """The mask, refused where the model attends to other keys than it was made for."""
        if (self.queries, self.keys) != (T, S):
            raise MaskError(
                f"this model made its mask for (T, S) = {(self.queries, self.keys)} and attends with {(T, S)}: its "
                f"code changes the mask on the way, which attn_implementation='headwise' cannot follow. Use 'eager'."
            )
        return self.mask

    def contiguous(self) -> "Prepared":
        """Itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asking what it can do, not a model
            raise AttributeError(name)
        raise _edited(f"asks for its .{name}")

    def _refuse(self, *others: Any) -> Any:
        raise _edited("computes with it")

    __getitem__ = __setitem__ = __invert__ = __neg__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __and__ = __or__ = __bool__ = _refuse
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _edited(f"calls {getattr(function, '__name__', function)} on it")


class EditedMaskError(MaskError, AttributeError):
    """A model treats its mask as a tensor."""


def _edited(how: str) -> EditedMaskError:
    return EditedMaskError(
        f"this model works on its attention mask as a tensor ({how}), and attn_implementation='headwise' gives it a "
        f"rule. Use attn_implementation='eager', whose output_attentions=True gives dense weights."
    )


@dataclasses.dataclass(frozen=True)
class _Place:
    """How many queries and keys there are, and where they begin in the text."""

    batch: int
    T: int
    S: int
    first_query: int | Tensor
    first_key: int
    device: torch.device | str

    @property
    def aligned(self) -> bool:
        """Whether the last query stands at the last key, as our masks have it."""
        return isinstance(self.first_query, int) and self.first_query + self.T == self.first_key + self.S

    def read(self, function: IndexFunction) -> Mask | None:
        """A mask of ours that says the same."""
        name, inside = getattr(function, "__qualname__", ""), _closure(function)
        if name == "and_masks.<locals>.and_mask":
            return _all([self.read(part) for part in inside["mask_functions"]])
        if name == "or_masks.<locals>.or_mask":
            parts = [self.read(part) for part in inside["mask_functions"]]
            return None if any(part is None for part in parts) else _any(parts)  # type: ignore[arg-type]
        if name == "bidirectional_mask_function":
            return None
        if name == "causal_mask_function":
            return self._here(CAUSAL)
        if name == "sliding_window_overlay.<locals>.inner_mask":
            return self._here(masks.window(inside["sliding_window"] - 1, self.S + self.T))
        if name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            return self._here(masks.window(inside["sliding_window"]))
        if name == "packed_sequence_mask_function.<locals>.inner_mask" and self.aligned and not self.first_key:
            ids = inside["packed_sequence_mask"]
            if ids.shape[1] == self.S:
                return masks.documents(ids)
        return Indexed(function, self.batch, self.first_query, self.first_key)

    def _here(self, mask: Mask) -> Mask:
        """A mask of positions for queries that stand where these do."""
        if self.aligned:
            return mask
        steps = torch.arange(self.T, device=self.device)
        return placed(mask, (steps + (self.first_query - self.first_key))[None])


def _closure(function: IndexFunction) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals) if hasattr(function, "__closure__") else {}


def _all(parts: list[Mask | None]) -> Mask | None:
    found = None
    for part in parts:
        found = part if found is None else found if part is None else found & part
    return found


def _any(parts: list[Mask]) -> Mask:
    found = parts[0]
    for part in parts[1:]:
        found = found | part
    return found


def register() -> None:
    """Make `attn_implementation="headwise"` known to transformers. `import headwise` does so once both are there."""
    try:
        from transformers import AttentionInterface, PreTrainedModel
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise MissingExtraError(
            "headwise.huggingface needs transformers 5.22 or newer. Install it with: "
            "pip install 'headwise[huggingface]'."
        ) from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_of)
    _refuse_models_that_bypass(PreTrainedModel)


def _refuse_models_that_bypass(base: Any) -> None:
    """Say no where a model would not ask us: some would otherwise fail without a word, one would be wrong."""
    check = getattr(base, "_check_and_adjust_attn_implementation", None)
    if check is None or hasattr(check, "by_headwise"):
        return

    @functools.wraps(check)
    def checked(model: Any, attn_implementation: str | None, *args: Any, **options: Any) -> Any:
        if attn_implementation == NAME and bypasses(type(model)):
            raise OptionError(
                f"{type(model).__name__} has attention of its own that does not go through transformers' attention "
                f"interface, so attn_implementation='headwise' cannot reach it. Use attn_implementation='eager', whose "
                f"output_attentions=True gives dense weights."
            )
        return check(model, attn_implementation, *args, **options)

    checked.by_headwise = True  # type: ignore[attr-defined]
    base._check_and_adjust_attn_implementation = checked


def bypasses(kind: type) -> bool:
    """Whether the file of this model defines attention and never asks transformers which implementation to use."""
    names = vars(sys.modules[kind.__module__])
    own = any(
        isinstance(x, type) and "Attention" in name and x.__module__ == kind.__module__ for name, x in names.items()
    )
    return own and "ALL_ATTENTION_FUNCTIONS" not in names


def attends_by_itself(kind: type) -> bool:
    """Whether an attention class takes a softmax of its own and asks nobody, as parts of some models do."""
    codes = [x.__code__ for x in vars(kind).values() if isinstance(x, FunctionType)]
    names = {name for code in codes for name in code.co_names}
    return not names.isdisjoint({"softmax", "scaled_dot_product_attention"}) and "ALL_ATTENTION_FUNCTIONS" not in names


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The attentions, by name, of all parts of a model that run on `attn_implementation="headwise"`; warns of parts
    that attend by themselves, of which nothing is seen."""
    found, alone = {}, set()
    for name, module in model.named_modules():
        inner = any("Attention" in type(x).__name__ for x in module.modules() if x is not module)
        if "Attention" not in type(module).__name__ or inner:
            continue
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if attends_by_itself(type(module)):
            alone.add(type(module).__name__)
        elif implementation == NAME:
            found[name] = module
    if found and alone:
        warnings.warn(
            f"{', '.join(sorted(alone))} of {type(model).__name__} attends by itself, not through transformers' "
            f"attention interface: its weights are not seen.",
            stacklevel=3,
        )
    return found


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Prepared | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, AttentionMap]:
    """The attention function: output (B, T, H, Dv), and the weights as a map.

    Args:
        module: the model's attention, for its `is_causal`.
        query: (B, H, T, D), after rotary.
        key: (B, Hkv, S, D), after rotary and cache.
        value: (B, Hkv, S, Dv).
        attention_mask: what `mask` made, or a tensor of the caller's: bool (True sees) or float, added.
        dropout: 0 in evaluation.
        scaling: of the scores.
        is_causal: whether, without a mask, queries see no later key; the module knows unless it is said.
        softcap: as in Gemma 2.
        s_aux: sinks, as in gpt-oss.
        position_bias: as in T5.
        rest: `cu_seq_lens_q`, where packed texts begin; `output_attentions`; and what other implementations need and
            ours reads from the mask, such as `sliding_window`.
    """
    _refuse_sparse(module, rest)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and query.shape[2] > 1 and key.shape[2] > query.shape[2]:
        # An empty static cache at its first use: only as many keys are filled as there are queries.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    found, bias = _read(attention_mask, query.shape[2], key.shape[2], causal and query.shape[2] > 1)
    if rest.get("cu_seq_lens_q") is not None:
        packed = _packed(rest["cu_seq_lens_q"], query, key)
        found = packed if found is None else found & packed
    bias = _added(bias, position_bias, key.shape[2])
    plain = bias is None and s_aux is None and (found is None or found is CAUSAL)
    scoring = _plain_scoring(found, scaling, softcap) if plain else Scoring(found, bias, scaling, softcap, s_aux)
    call = Call(query, key, value, scoring, dropout)
    output, lse = choose(call).run_with_lse(call)
    weights = AttentionMap(query, key, scoring, lse)
    watchers = getattr(module, "_watchers", ())
    if (watchers or rest.get("output_attentions")) and query.shape[2] < key.shape[2]:
        weights = _without_the_cache(weights, scoring)
    for watcher in watchers:
        watcher(weights)
    silent = getattr(module, "_silent", ())
    output = silenced(output, silent) if silent else output
    return output.transpose(1, 2).contiguous(), weights


def _refuse_sparse(module: nn.Module, given: Mapping[str, Any]) -> None:
    for name in ("block_indices", "indices"):
        if given.get(name) is not None:
            raise OptionError(
                f"{type(module).__name__} attends sparsely ({name}=), which attn_implementation='headwise' does not "
                f"know. Use attn_implementation='eager'."
            )


def _added(bias: Tensor | None, position_bias: Tensor | None, S: int) -> Tensor | None:
    """What is added to the scores of S keys; a static cache has it for more than are filled."""
    parts = [x[..., :S] for x in (bias, position_bias) if x is not None]
    return sum(parts[1:], parts[0]) if parts else None


@functools.lru_cache(64)
def _plain_scoring(mask: Mask | None, scale: float | None, softcap: float | None) -> Scoring:
    """One object for all layers and calls; only for masks that hold no tensors, which this would keep."""
    return Scoring(mask, None, scale, softcap)


def _without_the_cache(weights: AttentionMap, scoring: Scoring) -> AttentionMap:
    """The map of a step of generation, which must not hold or depend on the whole cache of keys."""
    if torch.compiler.is_compiling():
        return weights
    _, sinks, *_ = scoring.learnable
    smaller = weights._query.shape[1] * weights.shape[2] <= weights._key.shape[1] * weights._key.shape[3]
    return weights.kept() if smaller and sinks is None and not weights.requires_grad else weights.clone()


def _packed(borders: Tensor, query: Tensor, key: Tensor) -> Mask:
    """Texts packed into one row, told by where each begins."""
    batch, _, T, _ = query.shape
    if batch != 1 or key.shape[2] != T or borders.dim() != 1:
        raise OptionError(
            f"cu_seq_lens_q of shape {tuple(borders.shape)} with (B, T, S) = {(batch, T, key.shape[2])}: packed texts "
            f"are one row, B = 1, with as many keys as queries."
        )
    texts = torch.arange(len(borders) - 1, device=query.device)
    return masks.documents(torch.repeat_interleave(texts, borders.diff().long(), output_size=T))


def _read(given: Prepared | Tensor | None, T: int, S: int, causal: bool) -> tuple[Mask | None, Tensor | None]:
    """Mask and bias of what arrived."""
    if given is None:
        return (CAUSAL if causal else None), None
    if isinstance(given, Prepared):
        return given.for_lengths(T, S), None
    if given.dtype == torch.bool:
        return masks.dense(given), None
    if not given.is_floating_point():
        raise OptionError(f"an attention mask of {given.dtype}; expected bool (True sees) or float (added to scores).")
    return None, given
