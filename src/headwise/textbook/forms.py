"""The classes of five documents: constructor, call, return values, attributes and methods as each document has them.

    a course step          mha = Course(512, 8)                          output, attention = mha(x, mask)
    a book section         head = CausalAttention(3, 2, 6, 0.0)          context = head(x)
                           mha = MultiHeadedAttentionWrapper(3, 2, 6, 0.0, 2)    as wide as num_heads * d_out
                           mha = MultiHeadAttn(768, 768, 1024, 0.1, 12)  output = mha(x)
    a homework guide       mha = Homework(768, 768, 1024, 0.1, 12)       output = mha(x)
    an interview question  mha = Interview(512, 8)                       output = mha(Q, K, V, mask)
    a handbook chapter     mha = Handbook(512, 8)                        output, weights = mha(query, key, value, mask)

Masks are True or 1 where a query may attend. Each class computes what `MultiHeadAttention` computes: `to_layer` returns
the fused layer with its weights, and `from_layer` goes back.
"""

import copy
import inspect
from typing import Any, Self

import torch
from torch import Tensor, nn

from headwise.errors import OptionError, ShapeError, UnknownOptionError
from headwise.layer import MultiHeadAttention
from headwise.textbook.ladder import CausalHead, HeadsAtOnce, width_of_one_head

PARTS = ("q_proj", "k_proj", "v_proj", "out_proj")  # what a layer calls its projections


class Convertible(nn.Module):
    """A document's class, which converts to and from `MultiHeadAttention`."""

    num_heads: int
    _returns_weights = False
    _layers: tuple[str, ...] = ("W_q", "W_k", "W_v", "W_o")  # what the document calls the projections

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep the signature of `__init__`, which `__new__` would hide."""
        super().__init_subclass__(**options)
        expected = inspect.signature(cls.__init__)
        cls.__signature__ = expected.replace(parameters=list(expected.parameters.values())[1:])  # type: ignore[attr-defined]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the arguments here: Python would name the class that `__init__` is inherited from."""
        if args or kwargs:  # a copy is made without
            _check_arguments(cls, args, kwargs)
        return super().__new__(cls)

    @classmethod
    def _like(cls, layer: MultiHeadAttention, **sizes: Any) -> Self:
        """A form with the sizes of `layer` and weights of its own; `sizes` are those that the layer does not have."""
        return cls(layer.d_model, layer.num_heads, **sizes)

    def _linears(self) -> dict[str, list[nn.Linear]]:
        """The modules of each projection, under the layer's names: one, or one for each head."""
        return {ours: [getattr(self, theirs)] for ours, theirs in zip(PARTS, self._layers, strict=False)}

    def to_layer(self) -> MultiHeadAttention:
        """The fused layer with these weights. It returns the same numbers, and a pair where this class does."""
        dropout = next((x.p for x in self.modules() if isinstance(x, nn.Dropout)), 0.0)
        options: dict[str, Any] = {"dropout": dropout, "return_weights": self._returns_weights}
        return MultiHeadAttention.from_state_dict(self.state_dict(), self.num_heads, **options).train(self.training)

    @classmethod
    def from_layer(cls, layer: MultiHeadAttention, **sizes: Any) -> Self:
        """This class with the weights of `layer`, refused if the layer does something that this class cannot.

        Args:
            layer: a layer with the options of this class. A projection without a bias gets one of zeros.
            sizes: what this class needs and the layer does not have, such as `context_length=`.
        """
        if not isinstance(layer, MultiHeadAttention):
            raise OptionError(
                f"{cls.__name__}.from_layer({type(layer).__name__}): expected a headwise.MultiHeadAttention; "
                f"MultiHeadAttention.from_state_dict(...) makes one of other layers."
            )
        form = cls._like(layer, **sizes).to(next(layer.parameters()))
        _check_same(cls, form.to_layer(), layer)
        given = _parts(layer)
        for name, linears in form._linears().items():
            for i, linear in enumerate(linears):
                rows = slice(i * linear.out_features, (i + 1) * linear.out_features)
                linear.weight.data.copy_(given[f"{name}.weight"][rows])
                if linear.bias is not None:
                    bias = given.get(f"{name}.bias")
                    linear.bias.data.copy_(torch.zeros(()) if bias is None else bias[rows])
        _check_equal(cls, form.to_layer(), layer)
        return form.train(layer.training)


def _check_arguments(cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    expected = inspect.signature(cls.__init__)
    try:
        expected.bind(None, *args, **kwargs)
    except TypeError as error:
        names = [name if p.default is p.empty else f"{name}={p.default}" for name, p in expected.parameters.items()]
        given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
        raise UnknownOptionError(
            f"{cls.__name__}({given}): {error}. Expected {cls.__name__}({', '.join(names[1:])})."
        ) from None


def _check_equal(form: type[Convertible], able: MultiHeadAttention, layer: MultiHeadAttention) -> None:
    """Raise unless both layers give the same output: options without parameters show in no state dict."""
    weight = next(layer.parameters())
    if weight.is_meta:
        return
    x = torch.randn(3, min(5, layer.context_length or 5), layer.d_in, dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        able, layer = copy.deepcopy(able).eval(), copy.deepcopy(layer).eval()
        ours, theirs = able(x, return_weights=False), layer(x, return_weights=False)
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2 if weight.dtype.itemsize < 4 else 1e-4):
        raise OptionError(
            f"{form.__name__} cannot do what this layer does: their outputs differ by "
            f"{(ours - theirs).abs().max().item():.2g}. Use the layer itself, or one without a gate, norms and other "
            f"options that {form.__name__} lacks."
        )


def _check_same(form: type[Convertible], able: MultiHeadAttention, layer: MultiHeadAttention) -> None:
    """Raise unless `layer` has the options of `able`, which is all that a form can do."""
    able.context_length = layer.context_length
    there, known = _parts(layer).keys(), _parts(able).keys()
    wrong = sorted(there - known) + sorted(x for x in known - there if not x.endswith(".bias"))
    if wrong or able.extra_repr() != layer.extra_repr():
        named = f"; they differ in {', '.join(wrong)}" if wrong else ""
        raise OptionError(
            f"{form.__name__} does what MultiHeadAttention({able.extra_repr()}) does, and this layer is "
            f"MultiHeadAttention({layer.extra_repr()}){named}. Use the layer itself, or one without these options."
        )


def _parts(layer: MultiHeadAttention) -> dict[str, Tensor]:
    """The tensors of a layer, with its query, key and value projections apart."""
    parts = {name: x for name, x in layer.state_dict().items() if not name.startswith("qkv_proj.")}
    for kind, tensors in zip(("weight", "bias"), layer.projections(), strict=True):
        parts |= {f"{name}.{kind}": x for name, x in zip(PARTS, tensors, strict=False) if x is not None}
    return parts


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the heads read (B, H, T, D) and the weights (B, H, T, S); a query that sees no key has zero weights."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5  # (B, H, T, S)
    if mask is None:
        weights = scores.softmax(dim=-1)
        return weights @ value, weights
    if mask.dim() == 3 and mask.shape[0] > 1:
        raise ShapeError(
            f"mask of shape {tuple(mask.shape)}: in three dimensions the first would be taken for heads. For one mask "
            f"per sample pass mask[:, None]."
        )
    hidden = mask == 0
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    weights = weights.masked_fill(hidden, 0.0)  # a row of minus infinities became NaN
    return weights @ value, weights


class FourLinears(Convertible):
    """What three of the documents have in common: `(d_model, num_heads)`, `d_k`, and W_q, W_k, W_v, W_o with biases."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = width_of_one_head(d_model, num_heads, "d_model")
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)


class Course(FourLinears):
    """The course step: self-attention that returns a pair.

    >>> mha = Course(d_model=512, num_heads=8)
    >>> output, attention = mha(torch.randn(2, 10, 512))
    >>> output.shape, attention.shape
    (torch.Size([2, 10, 512]), torch.Size([2, 8, 10, 10]))
    """

    _returns_weights = True

    def split_heads(self, x: Tensor) -> Tensor:
        """`x` (B, T, d_model) split into heads: (B, num_heads, T, d_k)."""
        return x.view(*x.shape[:2], self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The output (B, T, d_model) and the attention weights (B, num_heads, T, T) of the tokens `x` (B, T, d_model).

        The `mask` is 0 or False where a query may not attend: (T, T), or (B or 1, num_heads or 1, T, T).
        """
        Q, K, V = self.split_heads(self.W_q(x)), self.split_heads(self.W_k(x)), self.split_heads(self.W_v(x))
        heads, weights = attention(Q, K, V, mask)
        output: Tensor = self.W_o(heads.transpose(1, 2).flatten(2))
        return output, weights


class Interview(FourLinears):
    """The interview question: separate inputs, methods that split and combine heads, and one result.

    >>> mha, x = Interview(512, 8), torch.randn(2, 10, 512)
    >>> mha(x, x, x, torch.ones(10, 10).tril()).shape
    torch.Size([2, 10, 512])
    """

    def split_heads(self, x: Tensor) -> Tensor:
        """`x` (B, T, d_model) split into heads: (B, num_heads, T, d_k)."""
        return x.view(*x.shape[:2], self.num_heads, self.d_k).transpose(1, 2)

    def combine_heads(self, x: Tensor) -> Tensor:
        """The heads `x` (B, num_heads, T, d_k) side by side again: (B, T, d_model)."""
        return x.transpose(1, 2).flatten(2)

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
        """The output (B, T, d_model) for `Q` (B, T, d_model), `K` and `V` (B, S, d_model).

        The `mask` is 0 or False where a query may not attend, (T, S) or (B or 1, num_heads or 1, T or 1, S); a query
        that sees no key reads zeros.
        """
        Q, K, V = self.split_heads(self.W_q(Q)), self.split_heads(self.W_k(K)), self.split_heads(self.W_v(V))
        heads, _ = attention(Q, K, V, mask)
        output: Tensor = self.W_o(self.combine_heads(heads))
        return output


class Handbook(FourLinears):
    """The handbook chapter: separate inputs and a pair.

    >>> mha, x = Handbook(d_model=512, num_heads=8), torch.randn(2, 10, 512)
    >>> output, weights = mha(x, x, x)
    >>> output.shape, weights.shape
    (torch.Size([2, 10, 512]), torch.Size([2, 8, 10, 10]))
    """

    _returns_weights = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The output (B, T, d_model) and the attention weights (B, num_heads, T, S).

        Args:
            query: (B, T, d_model).
            key: (B, S, d_model).
            value: (B, S, d_model).
            mask: 0 or False where a query may not attend, (T, S) or (B or 1, num_heads or 1, T or 1, S).
        """
        shape = (self.num_heads, self.d_k)
        Q = self.W_q(query).unflatten(-1, shape).transpose(1, 2)  # (B, num_heads, T, d_k)
        K = self.W_k(key).unflatten(-1, shape).transpose(1, 2)
        V = self.W_v(value).unflatten(-1, shape).transpose(1, 2)
        heads, weights = attention(Q, K, V, mask)
        output: Tensor = self.W_o(heads.transpose(1, 2).flatten(2))
        return output, weights


class MultiHeadAttn(Convertible, HeadsAtOnce):
    """The book section's efficient class: the last rung of the ladder.

    >>> MultiHeadAttn(3, 4, context_length=6, dropout=0.0, num_heads=2)(torch.randn(2, 6, 3)).shape
    torch.Size([2, 6, 4])
    """

    _layers = ("W_query", "W_key", "W_value", "out_proj")

    @classmethod
    def _like(cls, layer: MultiHeadAttention, **sizes: Any) -> Self:
        """See `Convertible._like`; a layer without a `context_length` needs one here."""
        biased = any(bias is not None for bias in layer.projections()[1])
        return cls(layer.d_in, layer.d_model, *_of_buffer(cls, layer, sizes), layer.num_heads, biased)


class Homework(MultiHeadAttn):
    """The homework guide's class, which has the form of the book's.

    >>> mha = Homework(d_in=768, d_out=768, context_length=1024, dropout=0.1, num_heads=12, qkv_bias=False)
    >>> mha(torch.randn(4, 100, 768)).shape
    torch.Size([4, 100, 768])
    """


class CausalAttention(Convertible, CausalHead):
    """The book section's single head: the first rung of the ladder.

    >>> CausalAttention(3, 2, context_length=6, dropout=0.0)(torch.randn(2, 6, 3)).shape
    torch.Size([2, 6, 2])
    """

    num_heads = 1
    _layers = ("W_query", "W_key", "W_value")

    @classmethod
    def _like(cls, layer: MultiHeadAttention, **sizes: Any) -> Self:
        """See `Convertible._like`; a layer without a `context_length` needs one here."""
        biased = any(bias is not None for bias in layer.projections()[1])
        return cls(layer.d_in, layer.d_model, *_of_buffer(cls, layer, sizes), biased)


class MultiHeadedAttentionWrapper(Convertible):
    """The book section's naive wrapper: a list of heads, their results side by side.

    Each head is `d_out` wide, so that the result is `num_heads * d_out` wide: with the sizes of `MultiHeadAttn`, it is
    `num_heads` times as wide, holds `num_heads` times the weights, and has no projection that mixes the heads. For the
    width `d_out`, pass `d_out // num_heads`, or use `HeadsInAList`. `d_in` is the width of the tokens; `qkv_bias` gives
    the three projections of every head a bias.

    >>> MultiHeadedAttentionWrapper(3, 2, context_length=6, dropout=0.0, num_heads=2)(torch.randn(2, 6, 3)).shape
    torch.Size([2, 6, 4])
    """

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads)
        )

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """How many heads the list holds."""
        return len(self.heads)

    def forward(self, x: Tensor) -> Tensor:
        """The context vectors (B, T, num_heads * d_out) of the tokens `x` (B, T, d_in)."""
        return torch.cat([head(x) for head in self.heads], dim=-1)

    @classmethod
    def _like(cls, layer: MultiHeadAttention, **sizes: Any) -> Self:
        """See `Convertible._like`; a layer without a `context_length` needs one here."""
        biased = any(bias is not None for bias in layer.projections()[1])
        return cls(layer.d_in, layer.head_dim, *_of_buffer(cls, layer, sizes), layer.num_heads, biased)

    def _linears(self) -> dict[str, list[nn.Linear]]:
        """See `Convertible._linears`: the heads one after the other."""
        names = zip(PARTS, CausalAttention._layers, strict=False)
        return {ours: [getattr(head, theirs) for head in self.heads] for ours, theirs in names}


def _of_buffer(form: type[Convertible], layer: MultiHeadAttention, sizes: dict[str, Any]) -> tuple[int, float]:
    """The context length and the dropout of a form that stores its causal mask."""
    length = sizes.get("context_length", layer.context_length)
    if length is None:
        raise OptionError(
            f"{form.__name__} stores a mask of context_length × context_length, and this layer has no context_length. "
            f"Say how long: {form.__name__}.from_layer(layer, context_length=1024)."
        )
    return length, layer.dropout
