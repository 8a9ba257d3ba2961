"""`tensor_parallel` and `context_parallel`: the layers of a model over the ranks of a mesh.

In the fused projection's head-major layout a contiguous slice of rows is a set of whole heads. So for tensor
parallelism torch's column plan cuts between heads, and its row plan cuts the columns of the last projection to match:

    x ─ qkv_proj (columns) ─ this rank's heads ─ attention ─ out_proj (rows) ─ all-reduce ─ y

There is one all-reduce in the forward pass, of y, and one in the backward pass, of the gradient of x.
"""

from typing import Any, TypeVar

import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from headwise.errors import HeadCountError, OptionError
from headwise.layer import MultiHeadAttention
from headwise.layer.gates import OutputGate
from headwise.layer.options import rule_of
from headwise.layer.positions import PositionalEncoding
from headwise.models.gpt import GPT
from headwise.parallel.ring import Order, check_mesh
from headwise.parallel.shards import Heads, Sharding
from headwise.weights.scoring import RelativeBias

Model = TypeVar("Model", bound=nn.Module)
COLUMNS = ("qkv_proj", "q_proj", "k_proj", "v_proj")


def tensor_parallel(model: Model, mesh: DeviceMesh) -> Model:
    """`model`, changed in place, with the heads of its headwise layers divided over the ranks of `mesh`.

    Inputs and outputs of a layer stay whole on every rank. Each rank keeps the rows of the projections, the sinks, the
    learned relative positions and the cache of its own heads; `layer.num_heads` and `layer.num_kv_heads` then count
    these. Pass masks and biases for all heads, as before. Maps show this rank's heads, numbered as in the whole, and
    `weights.gather()` gives all of them. The rows of a gate are divided as well. Norms of single heads
    (`qk_norm="head"`) and the parameters of a `score` module stay on every rank; their gradients are summed by small
    all-reduces.

    Other modules are not changed: use torch's plans for them, with `parallelize_module`. Dropout on weights uses each
    rank's own random generator.

    Args:
        model: a model with at least one `MultiHeadAttention`. The weights of the first rank are used on all.
        mesh: a mesh with one axis, whose size divides `num_kv_heads` of every layer.

    >>> from torch.distributed.device_mesh import init_device_mesh  # doctest: +SKIP
    >>> tensor_parallel(model, init_device_mesh("cuda", (8,)))  # doctest: +SKIP
    """
    mesh = check_mesh("tensor_parallel", mesh)
    layers = layers_of("tensor_parallel", model)
    for name, layer in layers.items():  # check all first, so that a refused model is not changed
        _check(name, layer, mesh.size())
    for layer in layers.values():
        _shard(layer, mesh)
    return model


def context_parallel(model: Model, mesh: DeviceMesh) -> Model:
    """`model`, changed in place, whose headwise layers take each rank's part of a sequence and attend over all of it.

    Give every rank its part with `shard_sequence(x, mesh)`, of tokens and labels alike, and get a whole result with
    `unshard_sequence(y, mesh)`. Pass masks and biases for the whole text: `documents(ids)` with all ids. Rotary
    positions are correct without further arguments; a model that adds learned positions must be given those of its
    part. Every rank then has the gradient of its own tokens' loss: DDP or `fully_shard` over the mesh averages them.

    Maps show this rank's queries; `received` and pictures cover the whole text. All ranks must ask for the same
    statistics in the same order, because keys pass from rank to rank; these statistics have no gradients.

    Args:
        model: a model with at least one `MultiHeadAttention`, and without dropout on weights in training.
        mesh: a mesh with one axis.
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
            raise OptionError(f"context_parallel: layer {name!r} is already divided over a sequence.")
        rule = rule_of(layer.position)
        if isinstance(rule, PositionalEncoding) and rule.by_length:
            raise OptionError(
                f"context_parallel: the position of layer {name!r}, {rule.describe()}, depends on the length of the "
                f"text, and each rank has only a part of it. Use a position that does not, such as rotary(...)."
            )
    for layer in layers.values():
        layer._spread = Sharding(None if layer._spread is None else layer._spread.heads, order)
    return model


def layers_of(what: str, model: object) -> dict[str, MultiHeadAttention]:
    """The headwise layers of a model by name; an error if there is none."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"{what}({type(model).__name__}): expected a torch.nn.Module.")
    found = {name: module for name, module in model.named_modules() if isinstance(module, MultiHeadAttention)}
    if not found:
        raise OptionError(
            f"{what}({type(model).__name__}): there is no headwise.MultiHeadAttention in this model. Convert layers "
            f"of other libraries with MultiHeadAttention.from_state_dict or open_checkpoint(...).read_all(); models "
            f"of transformers have their own plan, from_pretrained(..., tp_plan='auto')."
        )
    return found


def _check(name: str, layer: MultiHeadAttention, ranks: int) -> None:
    """Raise if a layer cannot be divided by heads."""
    what = f"tensor_parallel: layer {name!r}" if name else "tensor_parallel: this layer"
    if layer._spread is not None and layer._spread.heads is not None:
        raise OptionError(f"{what} is already divided over ranks.")
    if not layer._projections.cut_by_heads:
        raise OptionError(
            f"{what} has projections={layer._projections!r}, whose maps cannot be cut by heads alone. Use "
            f"context_parallel or fully_shard for it."
        )
    if layer.num_kv_heads % ranks:
        cure = (
            f"Use a mesh of {layer.num_kv_heads} ranks, or a divisor of it, and the other ranks for data or "
            f"context parallel: init_device_mesh('cuda', (n, {layer.num_kv_heads}), mesh_dim_names=('dp', 'tp'))['tp']."
        )
        raise HeadCountError(
            f"{what} has {layer.num_kv_heads} key/value heads and the mesh {ranks} ranks; each rank must have a whole "
            f"number of them, because the gradient of a head on two ranks would have to be summed separately. {cure}"
        )
    if layer.out_proj is None:
        raise OptionError(f"{what} has out_proj=False: its output would be one rank's heads only. Keep the projection.")
    if any(getattr(norm, "mixes_heads", False) for norm in _norms(layer)):
        raise OptionError(
            f"{what} has qk_norm='width', which normalizes all heads together, and no rank has all of them. Use "
            f"context_parallel or fully_shard for it."
        )
    if layer.gate is not None and not isinstance(layer.gate, OutputGate):
        raise OptionError(
            f"{what} has a gate of its own, {type(layer.gate).__name__}, and nothing says which of its parameters "
            f"belong to which head. Use gate='element', gate='head' or an OutputGate, whose rows are heads."
        )
    linears = {part: getattr(layer, part, None) for part in (*COLUMNS, "out_proj")}
    for part, linear in (linears | {"gate.proj": getattr(layer.gate, "proj", None)}).items():
        if linear is not None and type(linear) is not nn.Linear:
            raise OptionError(
                f"{what}: {part} is a {type(linear).__name__}, and only a plain nn.Linear can be cut by torch's plans. "
                f"Merge an adapter into its weights first."
            )


def _shard(layer: MultiHeadAttention, mesh: DeviceMesh) -> None:
    """Divide one layer."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    plan: dict[str, Any] = {part: ColwiseParallel() for part in COLUMNS if hasattr(layer, part)}
    plan |= {} if layer.gate is None else {"gate.proj": ColwiseParallel()}  # the rows of its map are whole heads
    parallelize_module(layer, mesh, plan | {"out_proj": RowwiseParallel()})
    layer.register_forward_pre_hook(lambda _, args, kwargs: _replicated(args, kwargs, mesh), with_kwargs=True)
    if layer.sinks is not None:
        layer.sinks = nn.Parameter(distribute_tensor(layer.sinks.data, mesh, [Shard(0)]), layer.sinks.requires_grad)
    position = layer.position
    if isinstance(position, RelativeBias) and not isinstance(position.weight, DTensor):  # layers may share one
        weight = position.weight
        position.weight = nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(1)]), weight.requires_grad)
    for norm in _norms(layer):
        for name in getattr(norm, "sharded", ()):  # parameters with an axis for heads
            whole = getattr(norm, name)
            setattr(norm, name, nn.Parameter(distribute_tensor(whole.data, mesh, [Shard(0)]), whole.requires_grad))
        _sum_gradients(norm, mesh)
    if isinstance(position, nn.Module) and isinstance(rule_of(position), PositionalEncoding):
        _sum_gradients(position, mesh)
    if isinstance(layer.score, nn.Module):
        _sum_gradients(layer.score, mesh)
    count = layer.num_heads // ranks
    heads = Heads(mesh, rank * count, count, layer.num_heads)
    layer._spread = Sharding(heads, None if layer._spread is None else layer._spread.order)
    layer.num_heads, layer.num_kv_heads = count, layer.num_kv_heads // ranks
    layer.heads_width = count * layer.value_dim


def _norms(layer: MultiHeadAttention) -> list[nn.Module]:
    return [norm for norm in (layer.q_norm, layer.k_norm, layer.v_norm) if norm is not None]


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of parameters that every rank has over the ranks, each of which has seen its own heads only."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) and not hasattr(parameter, "_is_summed"):  # layers may share a module
            parameter.register_hook(lambda grad: collectives.wait_tensor(collectives.all_reduce(grad, "sum", mesh)))
            parameter._is_summed = True  # type: ignore[attr-defined]


def _replicated(
    args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a layer as replicated DTensors, one for each tensor even if it is passed several times.

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
