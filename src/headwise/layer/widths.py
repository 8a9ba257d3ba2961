"""How wide everything in a layer is, and into how many heads it is cut."""

from typing import NamedTuple, Self

from headwise.errors import HeadCountError, OptionError
from headwise.shapes import check_size


class Widths(NamedTuple):
    """The sizes of one layer, complete and checked."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_in: int  # input of the query
    d_key: int
    d_value: int
    d_out: int

    @property
    def heads_width(self) -> int:
        """All query heads together: d_model, unless heads were given a width of their own."""
        return self.num_heads * self.head_dim

    @property
    def group(self) -> int:
        """How many query heads share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def complete(
        cls,
        d_model: int | None,
        num_heads: int | None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        d_in: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        d_out: int | None = None,
    ) -> Self:
        """All sizes from those given: an input is as wide as its neighbour before, the output as all heads."""
        if d_model is None or num_heads is None:
            raise OptionError(
                f"MultiHeadAttention(d_model={d_model}, num_heads={num_heads}): both are needed, as in "
                f"MultiHeadAttention(512, 8)."
            )
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        d_in = d_model if d_in is None else d_in
        d_key = d_in if d_key is None else d_key
        d_value = d_key if d_value is None else d_value
        d_out = d_model if d_out is None else d_out
        if head_dim is None:
            check_heads_divide(check_size("d_model", d_model), check_size("num_heads", num_heads))
            head_dim = d_model // num_heads
        given = (d_model, num_heads, num_kv_heads, head_dim, d_in, d_key, d_value, d_out)
        result = cls(*(check_size(name, size) for name, size in zip(cls._fields, given, strict=True)))
        check_heads_share(result.num_heads, result.num_kv_heads)
        return result

    def unmixed(self, d_out: int | None) -> Self:
        """The same without an output projection, where `d_out` was given: the output is the heads side by side."""
        if d_out not in (None, self.heads_width):
            raise OptionError(
                f"out_proj=False returns the heads side by side, {self.heads_width} wide, and d_out={d_out} asks for "
                f"another width. Leave out d_out, or keep the projection."
            )
        return self._replace(d_out=self.heads_width)


def check_heads_divide(d_model: int, num_heads: int) -> None:
    """Raise unless heads are equally wide."""
    if d_model % num_heads:
        divisors = [n for n in range(1, d_model + 1) if d_model % n == 0]
        near = sorted(sorted(divisors, key=lambda n: abs(n - num_heads))[:3])
        raise HeadCountError(
            f"d_model={d_model} cannot be cut into num_heads={num_heads} equal heads ({d_model} / {num_heads} = "
            f"{d_model / num_heads:g}). Choose a num_heads that divides {d_model}, such as {', '.join(map(str, near))}."
        )


def check_heads_share(num_heads: int, num_kv_heads: int) -> None:
    """Raise unless equally many query heads share each key/value head."""
    if num_heads % num_kv_heads:
        raise HeadCountError(
            f"num_heads={num_heads} query heads cannot share num_kv_heads={num_kv_heads} key/value heads evenly. "
            f"Choose a num_kv_heads that divides {num_heads}."
        )
