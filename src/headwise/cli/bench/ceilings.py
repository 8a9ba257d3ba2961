"""What this machine can do at most, measured now, and the least a layer needs: how near each candidate comes."""

import torch

from headwise.cli.bench.measuring import DTYPES, timed
from headwise.cli.bench.setting import Setting
from headwise.learn.cost import bound_seconds

SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices whose product is timed
COPIED = {"cpu": 2**27, "cuda": 2**31}  # bytes of the tensor that is copied: far more than caches hold
TIMES = 12  # runs, of which the fastest is the ceiling


def measured(device: str, dtype: str) -> dict[str, float]:
    """Operations a second in a matrix product of this dtype, and bytes a second read and written by a copy."""
    n, size = SIDE[device], COPIED[device]
    a, b = (torch.randn(n, n, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    product = min(timed(lambda: a @ b, device) for _ in range(TIMES)) / 1e3
    copy = min(timed(lambda: target.copy_(source), device) for _ in range(TIMES)) / 1e3
    return {"flops": 2 * n**3 / product, "bytes": 2 * size / copy}


def least(setting: Setting, tokens: int) -> tuple[int, int]:
    """Operations and bytes that no layer can do without.

    Forward: the matrix products over visible pairs, weights and input read, output written. Backward: every product has
    two more, weights, input and the output's gradient are read, the gradients of weights and input written.
    """
    cost = setting.cost(tokens)
    weights = cost.weight_bytes.value
    tensor = setting.batch * tokens * setting.d_model * setting.torch_dtype.itemsize
    if not setting.backward:
        return cost.visible_flops, weights + 2 * tensor
    return 3 * cost.visible_flops, 3 * weights + 5 * tensor


def share(setting: Setting, tokens: int, ms: float, ceilings: dict[str, float]) -> float:
    """The least time the machine could take, over the time taken."""
    bound = bound_seconds(*least(setting, tokens), ceilings["flops"], ceilings["bytes"])
    return 0.0 if bound is None else bound / (ms / 1e3)
