"""What a mesh must be, and which layers of a model are to be spread over it."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import OptionError
from headwise.layer import MultiHeadAttention


def check_mesh(what: str, mesh: object) -> DeviceMesh:
    """`mesh`, refused unless it is a mesh of one axis."""
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


def layers_of(what: str, model: object) -> dict[str, MultiHeadAttention]:
    """The headwise layers of a model by name; refused where there is none."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"{what}({type(model).__name__}): expected a torch.nn.Module.")
    found = {name: module for name, module in model.named_modules() if isinstance(module, MultiHeadAttention)}
    if not found:
        raise OptionError(
            f"{what}({type(model).__name__}): there is no headwise.MultiHeadAttention in this model. Layers of other "
            f"libraries become ours by MultiHeadAttention.from_state_dict or open_checkpoint(...).read_all(); models "
            f"of transformers bring their own plan, from_pretrained(..., tp_plan='auto')."
        )
    return found
