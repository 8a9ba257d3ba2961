"""The reference itself as a backend: the last resort, always right, T×S in memory."""

from torch import Tensor

from headwise import reference
from headwise.backends.base import Call
from headwise.scoring import narrow


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
        bias = None if scoring.bias is None else narrow(scoring.bias, query.dtype)
        output, _ = reference.attend(
            query,
            key,
            value,
            visible=visible,
            bias=bias,
            scale=scoring.scale,
            softcap=scoring.softcap,
            sinks=scoring.sinks,
            dropout=dropout,
        )
        return output

    def run_with_lse(self, call: Call) -> tuple[Tensor, None]:
        """The reference hands out none."""
        return self.run(call), None
