"""The reference itself as a backend: the last resort, always right, T×S in memory."""

from torch import Tensor

from headwise import reference
from headwise.attention.backends.base import Call


class Whole:
    """`reference.attend` on the whole T×S grid."""

    name = "reference"
    summary = "the reference, with the whole T×S matrix"

    def refuses(self, call: Call) -> str | None:
        """Never."""
        return None

    def run(self, call: Call) -> Tensor:
        """The algorithm as written in `reference.py`."""
        query, key, value, scoring, dropout = call
        visible = scoring.visible(query.shape[2], key.shape[2], query.device)
        output, _ = reference.attend(
            query,
            key,
            value,
            visible=visible,
            bias=scoring.whole_bias(query, key.shape[2]),
            scale=scoring.scale,
            softcap=scoring.softcap,
            sinks=scoring.learnable[1],
            dropout=dropout,
        )
        return output

    def dense_bytes(self, call: Call) -> int:
        """All weights."""
        B, H, T, _ = call.query.shape
        return B * H * T * call.key.shape[2] * call.query.element_size()

    def run_with_lse(self, call: Call) -> tuple[Tensor, None]:
        """The reference hands out none."""
        return self.run(call), None
