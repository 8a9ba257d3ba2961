"""Attention written to be read: the ladder from one head to all heads at once, and the classes of five documents.

`ladder.py` builds the same function three times, each doing more of the work at once. `forms.py` holds the classes of a
course step, a book section, a homework guide, an interview question and a handbook chapter, with their constructors,
calls, return values and names; each converts to and from `MultiHeadAttention`. May import layer and the rooms below it.

Four common mistakes in such classes, and what is done here instead:

- *Undefined names.* A `forward` that reshapes with a `batch_size` it never defined works in a notebook, where an
  earlier cell happens to define one, and nowhere else. Here sizes are always read from the tensor itself.
- *A wrapper that widens.* With `num_heads` heads of width `d_out` each, concatenation gives `num_heads * d_out`, not
  `d_out`. On the ladder one head is `d_out // num_heads` wide, so that every rung returns `d_out`. The book's own
  wrapper, `MultiHeadedAttentionWrapper`, widens as it does in the book, and says so.
- *-1e9 as minus infinity.* The largest float16 is 65504: -1e9 overflows there, and in float32 a row that sees nothing
  becomes an even average over keys it must not see. Here the fill is a true minus infinity.
- *NaN for a row that sees nothing.* The softmax of a row of minus infinities is 0/0. A causal row always sees itself;
  with a mask of your own, such a row has zero weights here, and its heads read zeros.
"""

from headwise.textbook.forms import (
    CausalAttention,
    Course,
    Handbook,
    Homework,
    Interview,
    MultiHeadAttn,
    MultiHeadedAttentionWrapper,
)
from headwise.textbook.ladder import CausalHead, HeadsAtOnce, HeadsInAList

__all__ = [
    "CausalAttention",
    "CausalHead",
    "Course",
    "Handbook",
    "HeadsAtOnce",
    "HeadsInAList",
    "Homework",
    "Interview",
    "MultiHeadAttn",
    "MultiHeadedAttentionWrapper",
]
