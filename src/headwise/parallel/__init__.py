"""Attention over several devices with torch.distributed: heads over ranks, or the sequence over ranks.

    tensor_parallel(model, mesh)    every rank has some heads of each layer, if weights or caches are too large
    context_parallel(model, mesh)   every rank has a part of the sequence, if the text is too long

Both can be used on one model, each on its own axis of a mesh. Maps keep working. DDP, `fully_shard`, activation
checkpointing and `torch.distributed.checkpoint` need nothing from here, because layers are ordinary modules; see
`docs/scaling.md`. Imports models, layer, attention and weights.
"""

from headwise.parallel.plans import context_parallel, tensor_parallel
from headwise.parallel.ring import shard_sequence, unshard_sequence

__all__ = ["context_parallel", "shard_sequence", "tensor_parallel", "unshard_sequence"]
