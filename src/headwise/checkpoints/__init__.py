"""Reads the weights of other people's attention: find the layout, check it, bring it into ours."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from headwise.checkpoints.layouts import LAYOUTS, Found
from headwise.errors import CheckpointError
from headwise.packing import pack
from headwise.shapes import check_size


def read(
    state_dict: Mapping[str, Tensor], num_heads: int | None = None, prefix: str = "", num_kv_heads: int | None = None
) -> Found:
    """The options and the separate projections of the one layout that fits."""
    if not isinstance(state_dict, Mapping) or not all(isinstance(x, Tensor) for x in state_dict.values()):
        raise CheckpointError(
            f"a {type(state_dict).__name__} is given; expected a state dict, names to tensors, as "
            f"module.state_dict() gives."
        )
    if num_heads is not None:
        num_heads = check_size("num_heads", num_heads)
    names = {name[len(prefix) :]: tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
    options = {
        name: x for name, x in names.items() if name == "sinks" or name.startswith(("q_norm.", "k_norm.", "position."))
    }
    projections = {name: x for name, x in names.items() if name not in options}
    for layout in LAYOUTS:
        if layout.matches(projections):
            found = layout.read(projections, num_heads, num_kv_heads)
            return Found(found.options, {**found.state, **options})
    known = "\n".join(f"  {layout.title}: {layout.example}" for layout in LAYOUTS)
    where = f" under the prefix {prefix!r}" if prefix else ""
    raise CheckpointError(
        f"no attention layout recognised{where}. Found {_list(names or state_dict)}; known layouts:\n{known}\n"
        f"If the names sit deeper in a model, pass prefix=, such as prefix='layers.0.attention.'."
    )


def merge(found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the layer: those found in a checkpoint, and those a user adds without contradicting them."""
    said = {"num_kv_heads": found["num_heads"], "d_key": found["d_in"], "d_value": found["d_in"], **found}
    if isinstance(found["bias"], set) and "bias" not in given:
        raise CheckpointError(
            f"only some of query, key and value have a bias. If none is missing, pass bias={sorted(found['bias'])}."
        )
    if isinstance(found["bias"], set):
        given = {**given, "bias": set(given["bias"]) if isinstance(given["bias"], Collection) else given["bias"]}
    for name, value in given.items():
        if name != "context_length" and said.get(name, value) != value:
            raise CheckpointError(f"{name}={value} is given and the tensors say {said[name]}; leave it out.")
    return {**found, **given}


def arrange(found: Found, fused: bool) -> dict[str, Tensor]:
    """The state dict of our layer, its first three projections fused or apart."""
    state = dict(found.state)
    if not fused:
        return state
    heads, kv_heads = (
        found.options["num_heads"],
        found.options.get("num_kv_heads") or found.options["num_heads"],
    )
    for kind in ("weight", "bias"):
        parts = [state.pop(f"{x}_proj.{kind}", None) for x in "qkv"]
        if parts[0] is not None and parts[1] is not None and parts[2] is not None:
            state[f"qkv_proj.{kind}"] = pack(parts[0], parts[1], parts[2], heads, kv_heads)
    return state


def check_options(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise unless what options of a layer learn is in the checkpoint, and nothing else is. A relative bias that is not
    there stays as it was passed."""
    cures = {
        "q_norm": "qk_norm=",
        "k_norm": "qk_norm=",
        "sinks": "scoring=Scoring(sinks=True)",
        "position": "position=",
    }
    for name in sorted(set(given) ^ set(expected)):
        option = cures.get(name.split(".")[0])
        if option is None or (name.startswith("position.") and name in expected):
            continue
        if name in given:
            raise CheckpointError(f"the state dict holds {name}: say what it is for with {option} in from_state_dict.")
        raise CheckpointError(
            f"{option} is given, and the state dict holds no {name}. Leave it out, or add the tensor."
        )


def _list(names: Mapping[str, Tensor], most: int = 12) -> str:
    shown = [f"{name} {tuple(tensor.shape)}" for name, tensor in list(names.items())[:most]]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(shown) or "no names at all") + more


__all__ = ["Found", "arrange", "check_options", "merge", "read"]
