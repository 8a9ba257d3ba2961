"""Constructor arguments, chosen by the meaning of their names, then by trial."""

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headwise.check.configuration import StandInConfig, choices, configuration_class, own_configuration, uses_of
from headwise.check.ready_made import FreshLayer, StandIn, ready_made, with_parts
from headwise.check.sizes import OTHER_SIZES, SMALL, CallSizes, batch_for, value_for
from headwise.check.vocabulary import (
    MEMORY_WIDTH,
    WEIGHTS_IN,
    call_role,
    constructor_role,
    has_usual_value,
    is_configuration,
    plain,
    usual_value,
)

__all__ = [  # what other modules look for here
    "OTHER_SIZES", "SMALL", "WEIGHTS_IN", "CallSizes", "StandInConfig", "batch_for", "call_role", "constructor_role",
    "is_configuration", "plain", "value_for",
]  # fmt: skip


# Ways to construct a class.

NEW_KEYS = 12  # unknown keys that one attempt may find out
OTHERS = (None, False, 0, 1)  # what an argument beside the configuration could be
GUESSES = 61  # of all unknown arguments together
WIDTHS = ("width", "out_width")
HEAD_WIDTHS = ("head_width", "value_width")
MANY = 9  # how many guesses a second reading of the names counts for
WINDOW = re.compile(r"window|patch|area|grid|resolution|^(height|size|hw|shape)$")
CONFIG = re.compile(r"conf|cfg|hparams")
NUMBER_OF_LAYER = re.compile(r"layer(idx|id|index|number|num)")
SCALING = {"scale", "scaled", "usescale", "scaling", "isscale", "doscale", "applyscale"}


@dataclass
class Built:
    """A way to make the object, and its text, such as `MultiHeadAttention(d_model=32, num_heads=4)`."""

    make: Callable[[], Any]
    text: str
    arguments: dict[str, Any]
    config: StandInConfig | None = None
    natural: bool = True  # every argument has a known meaning
    guessed: int = 0  # arguments whose meaning had to be guessed
    at: "Callable[[CallSizes], Built] | None" = None  # the same for other sizes, where it was written with E and H

    @property
    def certain(self) -> bool:
        """Whether nothing was guessed: neither an argument nor a key of the configuration."""
        return self.natural and (self.config is None or self.config.certain)

    @property
    def roles(self) -> set[str]:
        """What the arguments mean, and the keys of the configuration."""
        return {role for name in self._names if (role := constructor_role(name)) is not None}

    @property
    def _names(self) -> set[str]:
        """Arguments, and keys that were asked of the configuration."""
        return {*self.arguments, *(() if self.config is None else self.config.asked)}

    def remake(self, cls: Callable[..., Any], sizes: CallSizes, changes: dict[str, Any]) -> Any:
        """Another object, made with some arguments or configuration keys changed."""
        if self.config is None:
            return _construct(cls, self.arguments | changes)
        own = {p.name for p in parameters_of(cls)} & set(changes)
        config = self.config.changed(sizes, {k: v for k, v in changes.items() if k not in own})
        given = {k: config if v is self.config else v for k, v in self.arguments.items()}
        return _construct(cls, given | {name: changes[name] for name in own})

    def changed(self, cls: type, changes: dict[str, Any]) -> "Built":
        """The same way to make it, with some arguments changed; not for a configuration."""
        return replace(_built(cls, self.arguments | changes, self.natural), guessed=self.guessed)

    def resized(self, cls: Callable[..., Any], old: CallSizes, new: CallSizes) -> "Built | None":
        """The same way to make it, with other sizes; None where no argument is a size."""
        changed = {name: _resized(name, value, old, new) for name, value in self.arguments.items()}
        if self.config is not None:
            extra = {name: _resized(name, value, old, new) for name, value in self.config._extra.items()}
            config = self.config.changed(new, extra)
            changed = {k: config if v is self.config else v for k, v in changed.items()}
            made = replace(self, make=lambda: _construct(cls, changed), arguments=changed, config=config)
            return replace(made, text=f"{self.text} with width {new.E}, {new.H} heads")
        if changed == self.arguments or not isinstance(cls, type):
            return None
        return replace(_built(cls, changed, self.natural), guessed=self.guessed)

    def names_with_role(self, role: str) -> list[str]:
        """Arguments, or keys that were asked of the configuration, with this meaning."""
        return [name for name in self._names if constructor_role(name) == role]

    def fixed_context(self, T: int) -> list[str]:
        """Arguments that had to equal the length of the input, because a stored mask or table is not sliced."""
        if self.config is not None and self.config._sizes.context == T:
            return ["the context length"]
        fits = (T, area(T))
        return [k for k, v in self.arguments.items() if constructor_role(k) == "context" and v in fits]


def _resized(name: str, value: Any, old: CallSizes, new: CallSizes) -> Any:
    """An argument's value at other sizes: by the meaning of its name, or else by the size that it equals."""
    if isinstance(value, FreshLayer):
        return value.at(new)
    if type(value) is tuple and value == area(old.T):
        return area(new.T)
    if type(value) is not int:
        return value
    role = constructor_role(name)
    if role is not None and value == value_for(role, old):
        return value_for(role, new)
    pairs = ((old.E, new.E), (old.H, new.H), (old.D, new.D), (old.context, new.context), (old.T, new.T))
    return next((other for size, other in pairs if value == size), value)


def parameters_of(target: Any) -> list[inspect.Parameter]:
    """The named parameters of a constructor or function; none where Python cannot tell."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def constructor_parameters(cls: type) -> list[inspect.Parameter]:
    """The parameters of a constructor, those of the bases that it hands `**kwargs` to, and keys it reads from them."""
    found = {p.name: p for p in parameters_of(cls)}
    for base in cls.__mro__[:-1]:
        init = vars(base).get("__init__")
        if init is None or base.__module__.startswith("torch."):
            continue
        listed = list(inspect.signature(init).parameters.values())[1:]
        found = {p.name: p for p in listed if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} | found
        rest = next((p.name for p in listed if p.kind is p.VAR_KEYWORD), None)
        if rest is None:
            break
        found |= {name: p for name, p in _keys_read(init, rest).items() if name not in found}
    return list(found.values())


def _keys_read(function: Any, rest: str) -> dict[str, inspect.Parameter]:
    """Keys that a function reads from its `**rest`; those without a default are required."""
    found: dict[str, inspect.Parameter] = {}
    for node in ast.walk(source_tree(function)):
        key, required = None, True
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == rest:
            key = node.slice
        elif isinstance(node, ast.Call) and node.args and getattr(getattr(node.func, "value", None), "id", "") == rest:
            key, required = node.args[0], getattr(node.func, "attr", "") == "pop" and len(node.args) == 1
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            default = inspect.Parameter.empty if required else None
            found[key.value] = inspect.Parameter(key.value, inspect.Parameter.KEYWORD_ONLY, default=default)
    return found


def source_tree(thing: Any) -> ast.Module:
    """The syntax tree of a function or class; an empty one where its source cannot be found."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(thing)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def attempts(cls: type, namespace: Mapping[str, Any], sizes: CallSizes) -> Iterator[Built]:
    """Ways to construct `cls`, most likely first."""
    parameters = constructor_parameters(cls)
    if _takes_config(parameters):
        yield from _with_config(cls, parameters, namespace, sizes)
    yield from _with_names(cls, parameters, sizes, namespace)


def _takes_config(parameters: list[inspect.Parameter]) -> bool:
    required = [p for p in parameters if p.default is p.empty]
    named = [p for p in parameters if is_configuration(p.name)]
    if any(constructor_role(p.name) == "heads" for p in parameters):  # then a single letter is a size
        named = [p for p in named if p.default is p.empty and len(p.name) > 2]
    told = any(p.default is p.empty and CONFIG.search(plain(p.name)) for p in named)  # no other kind of thing
    return told or (bool(named) and len(required) <= len(named) + 2)


def _with_config(
    cls: type, parameters: list[inspect.Parameter], namespace: Mapping[str, Any], sizes: CallSizes
) -> Iterator[Built]:
    """With a configuration: keys without a meaning are tried as everything that they could be."""
    own, uses = own_configuration(namespace), uses_of(cls)
    kinds = {p.name: configuration_class(p.annotation, namespace) for p in parameters if is_configuration(p.name)}
    unknown = {key: choices(key, uses, own, sizes) for key in uses.strings if key not in uses.optional}
    short = replace(sizes, context=sizes.T)  # for a stored mask that is not sliced
    for size, picked in _picks(unknown, (sizes, short)):
        for _ in range(NEW_KEYS):
            extra = {key: found[min(picked.get(key, picked[""]), len(found) - 1)] for key, found in unknown.items()}
            made = _configured(cls, parameters, kinds, StandInConfig(size, own, extra, None, uses), picked[""])
            yield made
            missed = [] if made.config is None else set(made.config.missed) - set(unknown) - uses.optional
            unknown.update({key: choices(key, uses, own, sizes) for key in missed})
            if not missed:
                break
    first = {key: found[0] for key, found in unknown.items()}
    for name in sorted(flags_asked_of(cls)):
        config = StandInConfig(sizes, own, first, None, uses)
        yield replace(_configured(cls, parameters, kinds, config, 0, {name: True}), natural=False, guessed=1)


def _picks(
    unknown: dict[str, list[Any]], both: tuple[CallSizes, CallSizes]
) -> Iterator[tuple[CallSizes, dict[str, int]]]:
    """Which choice every unknown key takes: all of them the same, then one of them another; `""` is for the rest.

    Keys that are found on the way are added to `unknown` by the caller.
    """
    sizes, short = both
    yield sizes, {"": 0}
    yield from ((sizes, {"": 0, key: i}) for key, found in list(unknown.items())[:4] for i in range(1, len(found)))
    if unknown:
        yield from ((sizes, {"": i}) for i in range(1, max(map(len, unknown.values()))))
    yield short, {"": 0}


def _configured(
    cls: type,
    parameters: list[inspect.Parameter],
    kinds: Mapping[str, type | None],
    plain_one: StandInConfig,
    level: int,
    flags: Mapping[str, bool] | None = None,
) -> Built:
    """A way to construct with a configuration, of the class that is annotated where there is one."""
    kind = next((kind for kind in kinds.values() if kind is not None), None)
    config = StandInConfig(plain_one._sizes, plain_one._own, plain_one._extra, kind, plain_one._uses)
    arguments: dict[str, Any] = dict(flags or {})
    for p in parameters:
        if p.name in kinds:
            arguments[p.name] = config
        elif p.default is None and NUMBER_OF_LAYER.fullmatch(plain(p.name)):  # a model numbers its layers
            arguments[p.name] = usual_value(p.name)
        elif p.default is p.empty:
            value = _value(p, config._sizes)
            arguments[p.name] = OTHERS[min(level, len(OTHERS) - 1)] if value is _UNKNOWN else value
    return replace(_built(cls, arguments), text=f"{cls.__name__}(config)", config=config, guessed=0)


def _with_names(
    cls: type, parameters: list[inspect.Parameter], sizes: CallSizes, namespace: Mapping[str, Any]
) -> Iterator[Built]:
    roles = {p.name: constructor_role(p.name) for p in parameters}
    widths = {name for name, role in roles.items() if role in WIDTHS}
    known = {p.name: value for p in parameters if (value := _value(p, sizes)) is not _UNKNOWN}
    unknown = [p.name for p in parameters if p.default is p.empty and p.name not in known]
    needed = [p.name for p in parameters if p.default is p.empty and known.get(p.name) is None]
    parts = _parts(cls, needed, sizes, namespace) if needed else {}
    sides = [p for p in parameters if (p.default is p.empty or isinstance(p.default, tuple)) and p.name in _areas(cls)]
    parts |= {p.name: area(sizes.T) for p in sides if p.default is p.empty}
    known, unknown = known | parts, [name for name in unknown if name not in parts]
    certain = not unknown and not any(isinstance(part, StandIn) for part in parts.values())
    optional = [name for name in roles if name in widths and name not in known and name not in unknown]
    if not widths & set(known) and optional:
        preferred = next((name for name in optional if "model" in name or "embed" in name), optional[0])
        yield _built(cls, known | {preferred: sizes.E} | dict.fromkeys(unknown))
    several = {n: sizes.E for n, role in roles.items() if role in HEAD_WIDTHS}
    if "heads" not in roles.values() and len(several) > 1:  # widths of the inputs, where nothing is split
        yield _built(cls, known | several | dict.fromkeys(unknown, sizes.E))
    meant = bool(widths) or not several  # otherwise a head width may be the model's
    whole = {p.name for p in parameters if _is_whole(p)}
    guesses = (dict(zip(unknown, values, strict=True)) for values in _guesses(unknown, roles, sizes))
    filled = [known | guess for guess in guesses if all(type(v) is int for n, v in guess.items() if n in whole)]
    for arguments in filled:
        made = _built(cls, arguments, natural=certain and meant)
        yield replace(made, guessed=len(unknown) + (not meant))
    if not meant and not unknown:
        yield _built(cls, known | several, natural=False)
    # Names may mislead: a head width where the model width was meant, or the other way round.
    other = {"head_width": sizes.E, "value_width": sizes.E, "width": sizes.D, "out_width": sizes.D, "context": sizes.T}
    second = [{name: other[role]} for name, role in roles.items() if role in other]
    for changed in [several, *second] if several else second:
        for arguments in filled:
            yield _built(cls, arguments | changed, natural=False)
    pairs = {p.name: area(sizes.T) for p in sides if p.default is not p.empty}
    if pairs and not unknown:  # of an area that is not as long as our input
        yield _built(cls, known | pairs, natural=False)
    for name in sorted(flags_asked_of(cls)) if not unknown else ():
        yield _built(cls, known | {name: True}, natural=False)
    for p in parameters:  # something on by default may need inputs that we do not know
        count = type(p.default) is int and 1 < p.default <= 64
        if not unknown and p.name not in known and (p.default is True or count):
            yield _built(cls, known | {p.name: 1 if count else False}, natural=False)
    if not unknown:
        yield from _with_optional_config(cls, known, parameters, sizes, namespace)


def _with_optional_config(
    cls: type,
    known: dict[str, Any],
    parameters: list[inspect.Parameter],
    sizes: CallSizes,
    namespace: Mapping[str, Any],
) -> Iterator[Built]:
    """With a configuration beside the sizes, where the default is None."""
    names = [p for p in parameters if p.default is None and len(p.name) > 2 and is_configuration(p.name)]
    if names:
        kind = configuration_class(names[0].annotation, namespace)
        config = StandInConfig(sizes, own_configuration(namespace), None, kind, uses_of(cls))
        layer = {p.name: usual_value(p.name) for p in parameters if NUMBER_OF_LAYER.fullmatch(plain(p.name))}
        made = _built(cls, known | layer | {names[0].name: config}, natural=False)
        yield replace(made, config=config, guessed=0)


def _parts(cls: type, names: list[str], sizes: CallSizes, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments among these that are parts, ready-made."""
    try:
        parts = ready_made(cls, names, source_tree(cls), namespace, lambda own: FreshLayer(own, _first_made, sizes))
        with_parts(parts)
    except Exception:  # a part that cannot be made
        return {}
    return parts


def flags_asked_of(cls: type, off: bool | None = False) -> set[str]:
    """Arguments with the default `off` that stand in the conditions under which the code refuses what it is given."""
    nodes = [*ast.walk(source_tree(cls))]
    tests = [n.test for n in nodes if isinstance(n, ast.Assert)]
    tests += [n.test for n in nodes if isinstance(n, ast.If) and any(isinstance(part, ast.Raise) for part in n.body)]
    read = [n for test in tests for n in ast.walk(test) if isinstance(n, ast.Name | ast.Attribute)]
    names = {n.id if isinstance(n, ast.Name) else n.attr for n in read}
    return {p.name for p in constructor_parameters(cls) if p.default is off} & names


def _first_made(part: type, sizes: CallSizes) -> Any:
    return next(attempts(part, {}, sizes)).make()


def area(T: int) -> tuple[int, int]:
    """Height and width of an image with as many places as there are tokens."""
    return (2, T // 2) if T % 2 == 0 else (T, 1)


def _areas(cls: type) -> set[str]:
    """Arguments of the constructor that it takes apart as height and width."""
    nodes = [*ast.walk(source_tree(cls))]
    taken = [n.value for n in nodes if isinstance(n, ast.Subscript) and getattr(n.slice, "value", None) in (0, 1)]
    taken += [n.value for n in nodes if isinstance(n, ast.Assign) and len(getattr(n.targets[0], "elts", ())) == 2]
    return {name for value in taken if WINDOW.search(plain(name := ast.unparse(value).removeprefix("self.")))}


def like_example(cls: type, given: Mapping[str, Any], sizes: CallSizes) -> Built | None:
    """A way to construct it in which unknown names mean what the numbers of an example say that they are.

    The number of heads is the smallest that divides a width; a number that is given twice is a width.
    """
    unknown = [n for n, v in given.items() if constructor_role(n) is None and type(v) is int and v > 1]
    numbers = [given[name] for name in unknown]
    divided = [n for n in numbers if any(n % h == 0 and h < n for h in numbers)]
    if not divided:
        return None
    width = max(divided, key=numbers.count)
    heads = min(h for h in numbers if width % h == 0)
    meant = {width: sizes.E, heads: sizes.H, width // heads: sizes.D}
    known = {p.name: v for p in constructor_parameters(cls) if (v := _value(p, sizes)) is not _UNKNOWN}
    arguments = dict(given) | known | {name: meant.get(given[name], sizes.context) for name in unknown}
    return replace(_built(cls, arguments, natural=False), guessed=1)


def _built(cls: type, arguments: dict[str, Any], natural: bool = True) -> Built:
    text = f"{cls.__name__}({', '.join(f'{k}={_short(v)}' for k, v in arguments.items())})"
    return Built(lambda: _construct(cls, arguments), text, arguments, None, natural, 0 if natural else MANY)


def _construct(cls: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The object that these arguments make, passed by position where the constructor wants that."""
    arguments = with_parts(arguments)
    positional = [p.name for p in parameters_of(cls) if p.kind is p.POSITIONAL_ONLY]
    first = [arguments[name] for name in positional if name in arguments]
    return cls(*first, **{name: value for name, value in arguments.items() if name not in positional})


def _short(value: Any) -> str:
    if isinstance(value, FreshLayer):
        return f"{value.made_of.__name__}(…)"
    if type(value) is StandInConfig:
        return "config"
    if isinstance(value, StandIn):
        return "<a part that changes nothing>"
    return repr(value) if isinstance(value, int | float | bool | str | None) else f"<{type(value).__name__}>"


_UNKNOWN = object()


def _value(p: inspect.Parameter, sizes: CallSizes) -> Any:
    """A value by the meaning of the name; a parameter with a default and no known meaning keeps its default."""
    word, role = plain(p.name), constructor_role(p.name)
    if word in SCALING and p.default is p.empty:
        return True
    if has_usual_value(p.name):
        usual = sizes.context if usual_value(p.name) is None and _is_whole(p) else usual_value(p.name)
        return usual if p.default is p.empty else _UNKNOWN
    if p.default is None and MEMORY_WIDTH.fullmatch(word):
        return sizes.E  # so that a memory is read
    if type(p.default) is int and p.default < 2 and role in (*WIDTHS, *HEAD_WIDTHS):
        return _UNKNOWN  # the number of an axis
    if role is not None and role != "bias":
        optional = p.default is None and role not in ("heads", "batch", "dropout")
        return _UNKNOWN if optional or isinstance(p.default, bool | tuple) else value_for(role, sizes)
    if role == "bias" and p.default is p.empty:
        return True
    if p.default is not p.empty:
        return _UNKNOWN
    if p.annotation in (bool, "bool"):
        return False
    return 0.0 if p.annotation in (float, "float") else _UNKNOWN


def _is_whole(p: inspect.Parameter) -> bool:
    """Whether it is annotated as a whole number."""
    return p.annotation in (int, "int")


def _guesses(unknown: list[str], roles: dict[str, str | None], sizes: CallSizes) -> Iterator[tuple[Any, ...]]:
    used = {"width" if role == "out_width" else role for role in roles.values()}
    order: list[Any] = [sizes.E, sizes.H, sizes.context, sizes.D, None, False, 0.0]
    if "width" in used:
        order = [sizes.H, sizes.E, sizes.context, sizes.D, None, False, 0.0]
    if "heads" in used and "width" in used:
        order = [sizes.context, sizes.D, None, False, 0.0, sizes.E, sizes.H]
    if len(unknown) == 2 and "heads" not in used:
        yield (sizes.E, sizes.H)
        yield (sizes.H, sizes.E)
    for values in itertools.islice(itertools.product(order, repeat=min(len(unknown), 3)), GUESSES):
        yield values + (None,) * (len(unknown) - len(values))
