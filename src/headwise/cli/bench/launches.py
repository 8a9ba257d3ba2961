"""How many pieces of work a run gives to the device: kernels on CUDA, operators that compute on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.cli.bench.measuring import profiled


class Operators(TorchDispatchMode):
    """Counts operators as they are dispatched; a view computes nothing and is not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002, RUF100
        """Count one, and do it."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def launches(run: Callable[[], object], device: str) -> int:
    """Kernels, copies and fills that the device is given; on the CPU operators, backward included.

    >>> launches(lambda: torch.ones(2, 3).transpose(0, 1) + 1, "cpu")
    2
    """
    if device == "cpu":
        seen = Operators()
        with seen:
            run()
        return seen.count
    run()
    torch.cuda.synchronize()
    with profiled(cuda=True) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profile.events())
