"""FlashAttention-4 on Hopper and Blackwell GPUs, with the extra `headwise[flash]`.

`lowering.py` says what a call means in the library's terms, or why it cannot be said. `kernel.py` calls the library, as
an autograd function and as operators of torch. `trial.py` compares every specialization with the reference before its
first use: the library is young, and a wrong kernel must never be worth its speed.

May import masks, weights and the other backends.
"""

from headwise.attention.backends.flash.backend import FlashKernel

__all__ = ["FlashKernel"]
