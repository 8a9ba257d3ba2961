"""`tensor_parallel` and `context_parallel`: the layers of a model over the ranks of a mesh.

A sequence is divided in chunks from both ends, which balances the work. Of 2n chunks, rank r of n has chunk r and chunk
2n − 1 − r: for 4 ranks 0 1 2 3 3 2 1 0. Under a causal mask a late chunk sees many keys and an early one few; each pair
sees the same number.
"""

import dataclasses
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from headwise.errors import HeadCountError, OptionError, ShapeError
from headwise.layer import MultiHeadAttention
from headwise.layer.options import WidthNorm
from headwise.models.gpt import GPT
from headwise.parallel.shards import Heads, Sharding
from headwise.weights.scoring import RelativeBias


@dataclasses.dataclass(frozen=True)
class Order:
    """The chunks of every rank of a mesh."""

    mesh: DeviceMesh

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """This rank."""
        return self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks."""
        return self.mesh.get_group()

    def chunks(self, rank: int, t: int) -> tuple[range, range]:
        """The positions of the two chunks of a rank that holds `t` tokens."""
        size = t // 2
        return tuple(range(i * size, (i + 1) * size) for i in (rank, 2 * self.ranks - 1 - rank))  # type: ignore[return-value]

    def positions(self, t: int, device: torch.device | None = None) -> Tensor:
        """The positions of this rank's `t` tokens in the text, (t,)."""
        return torch.cat([torch.arange(c.start, c.stop, device=device) for c in self.chunks(self.rank, t)])

    def check_part(self, t: int) -> None:
        """Raise unless a rank's `t` tokens can be two chunks."""
        if t % 2:
            raise ShapeError(
                f"this rank was given {t} tokens; expected two chunks of the same length, as shard_sequence(x, mesh) "
                f"gives each rank of {self.ranks}."
            )

    def check_length(self, T: int) -> None:
        """Raise unless a text of T tokens can be cut into equal chunks."""
        pieces = 2 * self.ranks
        if T % pieces:
            raise ShapeError(
                f"a sequence of {T} tokens cannot be cut into {pieces} equal chunks, two for each of {self.ranks} "
                f"ranks. Pad it to {-(-T // pieces) * pieces}: under a causal mask padding on the right is harmless."
            )


def shard_sequence(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """This rank's part of a tensor that all ranks have, cut along the sequence; a copy.

    Args:
        x: tokens, embeddings, labels, position ids: anything with a sequence axis.
        mesh: a mesh with one axis.
        dim: the sequence axis, whose length must be a multiple of twice the number of ranks.
    """
    order = Order(check_mesh("shard_sequence", mesh))
    order.check_length(x.shape[dim])
    return x.index_select(dim, order.positions(x.shape[dim] // order.ranks, x.device))


def unshard_sequence(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """The whole tensor, on every rank, from the parts that the ranks have; without gradients.

    Args:
        x: this rank's part, as `shard_sequence` cuts it.
        mesh: a mesh with one axis.
        dim: the sequence axis.
    """
    mesh = check_mesh("unshard_sequence", mesh)
    parts = all_parts(x.detach(), mesh)
    early, late = zip(*(part.split(x.shape[dim] // 2, dim) for part in parts), strict=True)
    return torch.cat([*early, *reversed(late)], dim)


def all_parts(x: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """The tensors that the ranks pass, by rank."""
    part = x.contiguous()
    parts = [torch.empty_like(part) for _ in range(mesh.size())]
    dist.all_gather(parts, part, group=mesh.get_group())
    return parts


def check_mesh(what: str, mesh: object) -> DeviceMesh:
    """`mesh`, refused unless it is a mesh with one axis."""
    if not isinstance(mesh, DeviceMesh):
        raise OptionError(
            f"{what}(mesh={type(mesh).__name__}): expected a DeviceMesh of one axis, such as "
            f"torch.distributed.device_mesh.init_device_mesh('cuda', (8,))."
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        cure = f"mesh[{names[0]!r}]" if names else "a mesh with mesh_dim_names=, and then mesh['tp']"
        raise OptionError(f"{what}: the mesh has {mesh.ndim} axes, of shape {tuple(mesh.shape)}; expected one: {cure}.")
    return mesh


Model = TypeVar("Model", bound=nn.Module)
COLUMNS = ("qkv_proj", "q_proj", "k_proj", "v_proj")


def tensor_parallel(model: Model, mesh: DeviceMesh) -> Model:
    """`model`, changed in place, with the heads of its headwise layers divided over the ranks of `mesh`.

    Inputs and outputs of a layer stay whole on every rank. Each rank keeps the rows of the projections, the sinks, the
    learned relative positions and the cache of its own heads; `layer.num_heads` and `layer.num_kv_heads` then count
    these. Pass masks and biases for all heads, as before. Maps show this rank's heads, numbered as in the whole, and
    `weights.gather()` gives all of them. Norms of single heads (`qk_norm="head"`) stay on every rank; summing their
    gradients takes two more small all-reduces.

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
    if isinstance(layer.q_norm, WidthNorm) or isinstance(layer.k_norm, WidthNorm):
        raise OptionError(
            f"{what} has qk_norm='width', which normalizes all heads together, and no rank has all of them. Use "
            f"context_parallel or fully_shard for it."
        )
    for part in (*COLUMNS, "out_proj"):
        linear = getattr(layer, part, None)
        if linear is not None and type(linear) is not nn.Linear:
            raise OptionError(
                f"{what}: {part} is a {type(linear).__name__}, and only a plain nn.Linear can be cut by torch's plans. "
                f"Merge an adapter into its weights first."
            )


def _shard(layer: MultiHeadAttention, mesh: DeviceMesh) -> None:
    """Divide one layer."""
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
    layer._spread = Sharding(heads, None if layer._spread is None else layer._spread.order)
    layer.num_heads, layer.num_kv_heads = count, layer.num_kv_heads // ranks
    layer.heads_width = count * layer.head_dim


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
