"""`context_parallel`: the sequence of every layer over the ranks of a mesh."""

from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import OptionError
from headwise.models.gpt import GPT
from headwise.parallel.meshes import check_mesh, layers_of
from headwise.parallel.order import Order
from headwise.parallel.spread import Spread

Model = TypeVar("Model", bound=nn.Module)


def context_parallel(model: Model, mesh: DeviceMesh) -> Model:
    """`model`, in place, whose headwise layers take each rank's part of a sequence and attend over all of it, exactly.

    Give every rank its part with `shard_sequence(x, mesh)`, tokens and labels alike, and get the whole of a result with
    `unshard_sequence(y, mesh)`. Masks and biases of a call are given for the whole text: `documents(ids)` with all ids.
    A rotary counts positions of the text by itself; a model that adds learned positions must be given those of its
    part. Every rank then has the gradient of its own tokens' loss: DDP or `fully_shard` over the mesh averages them.

    Maps show this rank's queries; `received` and pictures are of the whole text. All ranks must ask for the same
    statistics at the same place, because keys pass from rank to rank meanwhile; they have no gradients.

    Args:
        model: with at least one `MultiHeadAttention`, without dropout on weights in training.
        mesh: of one axis.
    """
    order = Order(check_mesh("context_parallel", mesh))
    layers = layers_of("context_parallel", model)
    for module in model.modules():
        if isinstance(module, GPT) and module.position is not None:
            raise OptionError(
                "context_parallel: this GPT counts learned positions from the first token it is given, which on most "
                "ranks is not the first of the text. Use one with position='rotary'."
            )
    for name, layer in layers.items():
        if layer._spread is not None and layer._spread.order is not None:
            raise OptionError(f"context_parallel: layer {name!r} is spread over a sequence already.")
        layer._spread = Spread(None if layer._spread is None else layer._spread.heads, order)
    return model
