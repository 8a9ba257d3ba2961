"""Binding as the learner says: `--build "MyMHA(512, 8)" --call "m(x, x, x, mask)"`."""

import ast
from typing import Any

from headwise.check.attempt import Attempt
from headwise.check.binding import try_form
from headwise.check.bound import Bound
from headwise.check.building import Built
from headwise.check.calling import Form
from headwise.check.case import Case
from headwise.check.repairs import Repaired
from headwise.check.sizes import Sizes, batch_for
from headwise.check.subject import entry, modules, prepare, signature
from headwise.errors import OptionError

ROLES = {"q": "query", "query": "query", "k": "key", "key": "key", "v": "value", "value": "value", "x": "self",
         "memory": "memory", "context": "memory", "y": "memory"}  # fmt: skip


def told(case: Case, build: str | None, call: str | None) -> Bound | None:
    """An object made and called as told; an `OptionError` where that is no Python or does not run."""
    sizes = Sizes()
    built = _built(case, build, sizes) if build is not None else _default(case)
    thing = built.make()
    if entry(thing) is None:
        raise OptionError(f"--build {build!r} gives a {type(thing).__name__}, which has no forward.")
    prepare(thing)
    sizes = _measured(thing, sizes)
    form = _form(call, thing) if call is not None else None
    attempt = Attempt(case.target, case.namespace, case.filename)
    if form is None:
        from headwise.check.calling import forms

        for candidate in forms(thing, sizes):
            bound = try_form(attempt, thing, built, candidate, sizes, Repaired())
            if bound is not None:
                return bound
        return None
    bound = try_form(attempt, thing, built, form, sizes, Repaired())
    if bound is None and attempt.failures:
        raise OptionError(
            f"--call {call!r} raises {type(attempt.failures[-1].error).__name__}: {attempt.failures[-1].error}"
        )
    return bound


def _built(case: Case, build: str, sizes: Sizes) -> Built:
    space = dict(case.namespace) | {"E": sizes.E, "H": sizes.H, "D": sizes.D, "context": sizes.context}
    space.setdefault(case.name, case.target)

    def make() -> Any:
        try:
            return eval(build, space)  # noqa: S307 - the learner's own words, in the same process as their file
        except Exception as error:
            raise OptionError(f"--build {build!r} raises {type(error).__name__}: {error}") from error

    return Built(make, build, {})


def _default(case: Case) -> Built:
    from headwise.check.building import attempts

    if not isinstance(case.target, type):
        return Built(lambda: case.target, case.name, {})
    return next(iter(attempts(case.target, case.namespace, Sizes())))


def _measured(thing: Any, sizes: Sizes) -> Sizes:
    """The width that its linear layers take."""
    import collections

    from torch import nn

    widths = collections.Counter(m.in_features for m in modules(thing) if isinstance(m, nn.Linear))
    if not widths or widths.most_common(1)[0][0] == sizes.E:
        return sizes
    width = widths.most_common(1)[0][0]
    named = (getattr(thing, name, None) for name in ("num_heads", "n_heads", "heads", "h", "n_head"))
    heads = next((value for value in named if isinstance(value, int)), 1)
    return Sizes(B=batch_for(width), H=heads, E=width)


def _form(call: str, thing: Any) -> Form:
    """`m(x, x, mask=None)`: names of inputs are x, q, k, v, memory; everything else must be a constant or `mask`."""
    try:
        tree = ast.parse(call, mode="eval").body
    except SyntaxError as error:
        raise OptionError(f'--call {call!r} is no Python call; write it like "m(x, x, x, mask)".') from error
    if not isinstance(tree, ast.Call):
        raise OptionError(f'--call {call!r} is no call; write it like "m(x, x, x, mask)".')
    names = [p.name for p in signature(thing)]
    given = list(zip(names, tree.args, strict=False)) + [(k.arg or "", k.value) for k in tree.keywords]
    roles, fixed, masks = {}, {}, []
    inputs = [node.id for _, node in given if isinstance(node, ast.Name) and node.id in ROLES]
    for position, (name, node) in enumerate(given):
        if isinstance(node, ast.Name) and "mask" in node.id:
            masks.append(name)
        elif isinstance(node, ast.Name) and node.id in ROLES:
            roles[name] = _role(node.id, inputs, position)
        else:
            try:
                fixed[name] = ast.literal_eval(node)
            except ValueError as error:
                raise OptionError(
                    f"--call {call!r}: {ast.unparse(node)} is neither x, q, k, v, memory, mask nor a constant."
                ) from error
    return Form(roles, fixed, tuple(masks))


def _role(word: str, inputs: list[str], position: int) -> str:
    """Three times x means query, key and value, in this order."""
    if word == "x" and inputs.count("x") == 3:
        return ("query", "key", "value")[min(position, 2)]
    return ROLES[word]
