"""`tensor_parallel`: the heads of every layer over the ranks of a mesh.

The head-major layout of the fused projection makes a contiguous slice of its rows a set of whole heads, so torch's
column plan cuts between heads, and its row plan cuts the columns of the last projection the same way:

    x ─ qkv_proj (columns) ─ this rank's heads ─ attention ─ out_proj (rows) ─ all-reduce ─ y

One all-reduce forwards, of y; one backwards, of the gradient of x.
"""

from typing import Any, TypeVar

import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from headwise.errors import HeadCountError, OptionError
from headwise.layer import MultiHeadAttention
from headwise.layer.options import WidthNorm
from headwise.parallel.heads import Heads
from headwise.parallel.meshes import check_mesh, layers_of
from headwise.parallel.spread import Spread
from headwise.weights.relative import RelativeBias

Model = TypeVar("Model", bound=nn.Module)
COLUMNS = ("qkv_proj", "q_proj", "k_proj", "v_proj")


def tensor_parallel(model: Model, mesh: DeviceMesh) -> Model:
    """`model`, in place, with the heads of its headwise layers shared out over the ranks of `mesh`.

    Inputs and outputs of a layer stay whole on every rank. Each rank keeps the rows of the projections, the sinks, the
    learned distances and the cache of its own heads; `layer.num_heads` and `layer.num_kv_heads` then count these. Masks
    and biases of a call are given as ever, for all heads. Maps show this rank's heads under their numbers in the whole,
    and `weights.gather()` gives all. Norms of single heads (`qk_norm="head"`) stay on every rank, and their gradients
    are summed, two small all-reduces more.

    Other modules stay as they are: give them torch's own plans by `parallelize_module`. Dropout on weights draws from
    each rank's own generator.

    Args:
        model: with at least one `MultiHeadAttention`, the same weights on all ranks (those of the first are taken).
        mesh: of one axis, whose size divides `num_kv_heads` of every layer.

    >>> from torch.distributed.device_mesh import init_device_mesh  # doctest: +SKIP
    >>> tensor_parallel(model, init_device_mesh("cuda", (8,)))  # doctest: +SKIP
    """
    mesh = check_mesh("tensor_parallel", mesh)
    layers = layers_of("tensor_parallel", model)
    for name, layer in layers.items():  # all before any: a model that is refused stays as it was
        _check(name, layer, mesh.size())
    for layer in layers.values():
        _spread(layer, mesh)
    return model


def _check(name: str, layer: MultiHeadAttention, ranks: int) -> None:
    """Raise where a layer cannot be cut between its heads."""
    what = f"tensor_parallel: layer {name!r}" if name else "tensor_parallel: this layer"
    if layer._spread is not None and layer._spread.heads is not None:
        raise OptionError(f"{what} is spread over ranks already.")
    if layer.num_kv_heads % ranks:
        cure = (
            f"Take a mesh of {layer.num_kv_heads} or of a divisor of it for this, and use the other ranks for data or "
            f"context parallel: init_device_mesh('cuda', (n, {layer.num_kv_heads}), mesh_dim_names=('dp', 'tp'))['tp']."
        )
        raise HeadCountError(
            f"{what} has {layer.num_kv_heads} key/value heads and the mesh {ranks} ranks; each rank must have a whole "
            f"number of them, for a head that two ranks had would need its gradient summed apart. {cure}"
        )
    if layer.out_proj is None:
        raise OptionError(f"{what} has out_proj=False: its output would be one rank's heads only. Keep the projection.")
    if isinstance(layer.q_norm, WidthNorm) or isinstance(layer.k_norm, WidthNorm):
        raise OptionError(
            f"{what} has qk_norm='width', which normalises all heads together, and no rank has all. Use "
            f"context_parallel or fully_shard for it."
        )
    for part in (*COLUMNS, "out_proj"):
        linear = getattr(layer, part, None)
        if linear is not None and type(linear) is not nn.Linear:
            raise OptionError(
                f"{what}: {part} is a {type(linear).__name__}, and only a plain nn.Linear can be cut by torch's plans. "
                f"Merge an adapter into its weights first."
            )


def _spread(layer: MultiHeadAttention, mesh: DeviceMesh) -> None:
    """Cut one layer."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    plan: dict[str, Any] = {part: ColwiseParallel() for part in COLUMNS if hasattr(layer, part)}
    parallelize_module(layer, mesh, plan | {"out_proj": RowwiseParallel()})
    layer.register_forward_pre_hook(lambda _, args, kwargs: _replicated(args, kwargs, mesh), with_kwargs=True)
    if layer.sinks is not None:
        layer.sinks = nn.Parameter(distribute_tensor(layer.sinks.data, mesh, [Shard(0)]), layer.sinks.requires_grad)
    position = layer.position
    if isinstance(position, RelativeBias) and not isinstance(position.weight, DTensor):  # layers may share one
        weight = position.weight
        position.weight = nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(1)]), weight.requires_grad)
    for norm in (layer.q_norm, layer.k_norm):
        for parameter in () if norm is None else norm.parameters():
            parameter.register_hook(lambda grad: collectives.wait_tensor(collectives.all_reduce(grad, "sum", mesh)))
    count = layer.num_heads // ranks
    heads = Heads(mesh, rank * count, count, layer.num_heads)
    layer._spread = Spread(heads, None if layer._spread is None else layer._spread.order)
    layer.num_heads, layer.num_kv_heads = count, layer.num_kv_heads // ranks
    layer.heads_width = count * layer.head_dim


def _replicated(
    args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a layer as DTensors that all ranks have, one for each tensor however often it is passed.

    Projections that share an input then share its gradient, which is summed over ranks once.
    """
    known: dict[int, DTensor] = {}

    def replicated(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, DTensor) or x.is_nested or x.dim() != 3:
            return x
        if id(x) not in known:
            known[id(x)] = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return known[id(x)]

    inputs = {name: replicated(kwargs[name]) for name in ("query", "key", "value") if name in kwargs}
    return tuple(replicated(x) for x in args), kwargs | inputs
