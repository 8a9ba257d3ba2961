"""The judged side of a challenge: runs the class on what it is sent, and answers with tensors and traces.

The process that holds a stranger's class can say anything about it. So a verdict that would be RIGHT is only an offer:
`serve` says how the class can be asked, and `verification.py`, in a process that never loaded the file, asks with
weights, inputs and masks of its own.
"""

import contextlib
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from headwise.check import wire
from headwise.check.arguments import parameters_of
from headwise.check.binding import Bound
from headwise.check.calls import Inputs, leaves
from headwise.check.objects import call_parameters, kind_of_weight, tensors
from headwise.check.reading import AttentionReading
from headwise.check.sizes import OTHER_SIZES
from headwise.check.trace import Node


@dataclass(frozen=True)
class Claim:
    """What a positive verdict is about: the object that was judged, and what was read from its call."""

    bound: Bound
    reading: AttentionReading | None


def serve(evidence: Claim, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Offer to be asked, then answer until no more requests come."""
    bounds = [evidence.bound, *_resized(evidence.bound)]
    masks = evidence.reading.mask_arguments if evidence.reading is not None else None
    offered = {"settings": [_setting(bound) for bound in bounds], "masks": [_mask(mask) for mask in masks or []]}
    wire.send(answers, offered)
    with contextlib.suppress(wire.WireError):  # the other side is done
        while True:
            request = wire.receive(requests)
            wire.send(answers, answer(bounds[request["setting"]], request))


# The offer.


def _resized(bound: Bound) -> list[Bound]:
    """The same class at two more settings of all sizes, where they can be chosen."""
    from headwise.check.faults.sizes import fitting

    found: list[Bound | None] = []
    with contextlib.suppress(Exception):  # what fails here has a name of its own
        found = [bound.resized(fitting(bound, sizes)) for sizes in OTHER_SIZES]
    return [other for other in found if other is not None]


def _setting(bound: Bound) -> dict[str, Any]:
    """How an object is built and called, and which weights it has."""
    form, built = bound.form, bound.built
    arguments = built.arguments if built.config is None else dict.fromkeys(built.config.asked)
    defaults = {p.name: p.default for p in parameters_of(bound.case.target) if p.default is not p.empty}
    names = [p.name for p in parameters_of(bound.case.target) + call_parameters(bound.thing)]
    return {
        "name": bound.case.name, "sizes": asdict(bound.sizes), "layout": form.layout, "roles": form.roles,
        "fixed": form.fixed_tensor, "fitted": bound.length_fitted, "masks": list(form.masks),
        "configured": built.config is not None, "certain": built.certain, "arguments": _plain(arguments),
        "defaults": _plain(defaults), "parameters": names, "weights": _weights(bound.thing),
    }  # fmt: skip


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are numbers, texts or nothing; others only by name."""
    return {k: v if type(v) in (int, float, bool, str) else None for k, v in arguments.items()}


def _weights(thing: Any) -> dict[str, Any]:
    """Every weight once: its shape, and what kind of values it takes; a constant with its values."""
    found, seen = {}, set()
    for name, tensor in tensors(thing).items():
        if is_lazy(tensor) or not tensor.is_floating_point() or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        kind = kind_of_weight(tensor, thing)
        value = tensor.data if kind == "constant" else None
        found[name] = {"shape": list(tensor.shape), "kind": kind, "trained": tensor.requires_grad, "value": value}
    return found


def _mask(argument: Any) -> dict[str, Any]:
    """A mask argument, and the masks that worked: their shapes in words, and their types."""
    shapes: dict[str, str] = {}
    for tried in argument.tried:
        if tried.meaning == argument.meaning and tried.error is None:
            shapes.setdefault(tried.shape, str(tried.mask.dtype).removeprefix("torch."))
    return {"name": argument.name, "meaning": argument.meaning, "shapes": shapes}


# Answers.


def answer(bound: Bound, request: dict[str, Any]) -> dict[str, Any]:
    """What one call returns: its tensors, with `trace` every operation, with `slope` the gradients."""
    held = tensors(bound.thing)
    for name, value in request["weights"].items():
        held[name].data.copy_(value)
    inputs = Inputs(*request["inputs"])
    asked = _of_length(bound, inputs)
    masks = dict(request["masks"])
    try:
        if request["slope"] is not None:
            return _slopes(asked, inputs, held, request["slope"])
        if not request["trace"]:
            with asked.running(), torch.no_grad():
                returned = asked.form.call(asked.thing, inputs, masks, as_is=True)
            return {"returned": leaves(returned), "inputs": list(inputs)}
        other = asked.called(masks, inputs=inputs)
    except Exception as error:  # whatever a learner's code raises
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    sources = other.trace.returned
    return {"returned": leaves(other.returned), "sources": sources, "nodes": _nodes(other.trace.nodes)}


def _of_length(bound: Bound, inputs: Inputs) -> Bound:
    """The same object, with fixed arguments for the length of these inputs."""
    length = inputs.query.shape[1]
    if length == bound.sizes.T:
        return bound
    sizes = replace(bound.sizes, T=length, S=length)
    return replace(bound, sizes=sizes, form=bound.form_at(bound.thing, sizes))


def _slopes(bound: Bound, inputs: Inputs, held: dict[str, Tensor], slope: Tensor) -> dict[str, Any]:
    """Gradients of `(output * slope).sum()` with respect to the inputs and to every trained weight."""
    made = {id(x): x.clone().requires_grad_() for x in inputs}
    trained = {name: tensor for name, tensor in held.items() if tensor.requires_grad}
    with bound.running(), torch.enable_grad():
        passed = {key: leaf.clone() for key, leaf in made.items()}  # a call may write into them
        given = Inputs(*(passed[id(x)] for x in inputs))
        output = bound.form.result(bound.form.call(bound.thing, given, as_is=True), given)
        assert output is not None  # noqa: S101 - it gave one before
        wanted = [*made.values(), *trained.values()]
        found = torch.autograd.grad((output * slope).sum(), wanted, allow_unused=True)
    found = tuple(torch.zeros_like(x) if slope is None else slope for x, slope in zip(wanted, found, strict=True))
    return {"inputs": list(found[: len(made)]), "weights": dict(zip(trained, found[len(made) :], strict=True))}


def _nodes(nodes: list[Node]) -> list[Any]:
    """The operations of a trace; an operand that is the result of an earlier one is sent once."""
    sent = []
    for node in nodes:
        operands = [_operand(node, i, nodes) for i in range(len(node.operands))]
        sources = node.operand_nodes if operands else []
        sent.append([node.op, node.parents, _sendable(node.value), node.numbers, operands, sources])
    return sent


def _operand(node: Node, i: int, nodes: list[Node]) -> Tensor:
    operand, source = node.operands[i], node.operand_nodes[i]
    if source is not None and nodes[source].value.shape == operand.shape and nodes[source].value.equal(operand):
        return nodes[source].value
    return _sendable(operand)


def _sendable(value: Tensor) -> Tensor:
    """The tensor, or an empty one in place of a type that is never read."""
    known = str(value.dtype).removeprefix("torch.") in wire.DTYPES and value.layout is torch.strided
    return value if known and value.device.type == "cpu" else torch.empty(0)
