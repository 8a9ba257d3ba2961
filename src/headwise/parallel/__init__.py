"""Beyond one device, on PyTorch's own engine: heads over ranks, or the sequence over ranks; the maps keep working.

    tensor_parallel(model, mesh)    every rank has some heads of each layer: where weights or caches are too large
    context_parallel(model, mesh)   every rank has a part of the sequence: where the text is too long

Both may act on one model, each on its own axis of a mesh. DDP, `fully_shard`, activation checkpointing and
`torch.distributed.checkpoint` need nothing from here: layers are ordinary modules. `docs/scaling.md` shows all of it.
"""

from headwise.parallel.context import context_parallel
from headwise.parallel.order import shard_sequence, unshard_sequence
from headwise.parallel.tensor import tensor_parallel

__all__ = ["context_parallel", "shard_sequence", "tensor_parallel", "unshard_sequence"]
