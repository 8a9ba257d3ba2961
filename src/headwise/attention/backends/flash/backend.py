"""Which calls FlashAttention-4 runs."""

import os

import torch
from torch import Tensor

from headwise.attention.backends.base import WIDEST, Backend, Call
from headwise.attention.backends.flash import kernel, trial
from headwise.attention.backends.flash.lowering import FlashArguments, lower, visible_keys
from headwise.attention.backends.sdpa import HALF
from headwise.errors import install_command
from headwise.masks import Causal
from headwise.masks.lowering import simplify

HOPPER = (9, 0)
# Floating-point operations of a forward pass from which the library is worth its Python, about 100 µs a call. On an
# H200, plain causal attention lost with 13 · 10⁹ and won with 190 · 10⁹; with a mask or an option for which torch has
# no fused kernel, it won with 17 · 10⁹.
WORTHWHILE = 10**11
WORTHWHILE_ALONE = 10**10


class FlashKernel(Backend):
    """FlashAttention-4, of the package `flash-attn-4`."""

    name = "flash"
    summary = "FlashAttention-4"

    def refuses(self, call: Call) -> str | None:
        if not call.query.is_cuda:
            return "it is for CUDA"
        if torch.cuda.get_device_capability(call.query.device) < HOPPER:
            return "it needs a GPU of compute capability 9.0 (Hopper) or newer"
        how = self.meaning(call)
        if isinstance(how, str):
            return how
        if not kernel.installed():
            return f"FlashAttention-4 is not installed: {install_command('flash')}"
        if os.environ.get("HEADWISE_FLASH") == "0":
            return "HEADWISE_FLASH=0 turns it off"
        if torch.compiler.is_compiling():
            return None  # a trial cannot be part of a graph
        return trial.failure(trial.Specialization.of(call, how, dtype_of(call)))

    def meaning(self, call: Call) -> FlashArguments | str:
        """The call in the library's terms, or why it cannot run there or would not pay."""
        query, _key, value, _, dropout = call
        if query.numel() == 0 or value.numel() == 0:
            return "an axis has size 0"
        if dropout:
            return "it does not support dropout"
        D, Dv = query.shape[3], value.shape[3]
        if dtype_of(call) not in HALF or D % 8 or Dv % 8 or max(D, Dv) > WIDEST:
            return "it supports head dimensions 8, 16, ..., 256 in 16 bit"
        if type(query) is not Tensor or torch._C._functorch.peek_interpreter_stack() is not None:
            return "it runs neither on subclasses of Tensor nor inside transforms such as vmap"
        how = lower(call)
        if isinstance(how, str) or torch.compiler.is_compiling():
            return how
        B, H, T, _ = query.shape
        work = 2 * B * H * T * visible_keys(call, how) * (D + Dv)
        return how if work >= least_work(call) else "there is too little to compute to be worth calling it"

    def may_pay(self, call: Call) -> bool:
        """Whether an ordinary call is worth asking about: this takes no time where most calls are short."""
        if torch.compiler.is_compiling():  # looking at a length would fix it into the graph
            return False
        return call.query.numel() * call.key.size(2) * 4 >= WORTHWHILE and kernel.installed()

    def run(self, call: Call) -> Tensor:
        return self.run_with_lse(call)[0]

    def run_with_lse(self, call: Call) -> tuple[Tensor, Tensor | None]:
        query, key, value, scoring, _ = call
        how = lower(call)
        if isinstance(how, str):
            raise TypeError(how)
        _, sinks, *_ = scoring.learnable
        dtype = dtype_of(call)
        output, lse = kernel.attend(query.to(dtype), key.to(dtype), value.to(dtype), sinks, how)
        # The library's log-sum-exp of a row that sees no key is not ours.
        return output, None if scoring.may_empty_a_row(query.shape[2], key.shape[2]) else lse


def dtype_of(call: Call) -> torch.dtype:
    """The dtype to compute in, which autocast may choose."""
    device = call.query.device.type
    cast = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)  # Dynamo cannot ask what is available
    return torch.get_autocast_dtype(device) if cast else call.query.dtype


def least_work(call: Call) -> int:
    """How many operations a call must have for the library to win, which depends on what else could run it."""
    mask = simplify(call.scoring.mask, call.query.shape[2], call.key.shape[2])
    ordinary = (mask is None or type(mask) is Causal) and not call.scoring.beyond_sdpa
    return WORTHWHILE if ordinary else WORTHWHILE_ALONE
