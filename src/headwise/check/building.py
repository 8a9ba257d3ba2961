"""Makes an instance of somebody's class: arguments by what their names mean, then by trying."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headwise.check.configs import Config
from headwise.check.names import constructor_role, plain, value_for
from headwise.check.sizes import Sizes

CONFIG_NAMES = {
    "config", "cfg", "args", "conf", "params", "hparams", "hp", "modelargs", "opt", "configs", "c", "options",
    "modelconfig", "gptconfig", "configuration", "settings", "opts", "argument", "param", "self",
}  # fmt: skip
BY_NAME: dict[str, Any] = {
    "device": "cpu", "dtype": None, "layeridx": 0, "layerid": 0, "layernumber": 1, "layeridentifier": 0,
    "causal": False, "iscausal": False, "mask": False, "masked": False, "eps": 1e-5, "layernormeps": 1e-5,
    "base": 10000.0, "ropetheta": 10000.0, "theta": 10000.0, "vocabsize": 50, "batchfirst": True, "scale": True,
    "name": "attention", "usemask": False, "activation": None, "norm": False, "qknorm": False, "usebias": True,
    "qkvbias": True,
}  # fmt: skip

MANY = 9  # guesses: a second reading of names counts as so many
SCALING = {"scale", "scaled", "usescale", "scaling", "isscale", "doscale", "applyscale"}


@dataclasses.dataclass
class Built:
    """A way to make the object, and how it reads in words."""

    make: Callable[[], Any]
    text: str
    arguments: dict[str, Any]
    config: Config | None = None
    natural: bool = True  # every argument has a known meaning
    guessed: int = 0  # arguments whose meaning had to be guessed

    @property
    def certain(self) -> bool:
        """Whether nothing was guessed: neither an argument nor a key of the configuration."""
        return self.natural and not (self.config is not None and self.config.missed)


def attempts(cls: type, namespace: Mapping[str, Any], sizes: Sizes) -> Iterator[Built]:
    """Ways to construct `cls`, most likely first."""
    try:
        parameters = list(inspect.signature(cls).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    parameters = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if _takes_config(parameters):
        yield from _with_config(cls, parameters, namespace, sizes)
    yield from _with_names(cls, parameters, sizes)


def is_configuration(name: str) -> bool:
    """Whether a name stands for a configuration."""
    return plain(name) in CONFIG_NAMES or "config" in plain(name)


def _takes_config(parameters: list[inspect.Parameter]) -> bool:
    required = [p for p in parameters if p.default is p.empty]
    named = [p for p in parameters if is_configuration(p.name)]
    if any(constructor_role(p.name) == "heads" for p in parameters):  # then one letter is a size, not a configuration
        named = [p for p in named if p.default is p.empty and len(p.name) > 2]
    return bool(named) and len(required) <= len(named) + 2


def _with_config(
    cls: type, parameters: list[inspect.Parameter], namespace: Mapping[str, Any], sizes: Sizes
) -> Iterator[Built]:
    own = _own_configuration(namespace)
    extra: dict[str, Any] = {}
    short = dataclasses.replace(sizes, context=sizes.T)  # for a stored mask that is used whole
    for guess, size in (
        (None, sizes),
        (None, sizes),
        (False, sizes),
        (0, sizes),
        (1, sizes),
        (sizes.E, short),
        (None, short),
    ):
        config = Config(size, own, dict(extra))
        arguments: dict[str, Any] = {}
        for p in parameters:
            if is_configuration(p.name):
                arguments[p.name] = config
            elif p.default is p.empty:
                value = _value(p, sizes)
                arguments[p.name] = guess if value is _UNKNOWN else value
        yield Built(lambda a=arguments: cls(**a), f"{cls.__name__}(config)", arguments, config)  # type: ignore[misc]
        extra.update(dict.fromkeys(config.missed, guess))


def _own_configuration(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of every configuration that the file defines: classes, dictionaries, arguments of `__init__`."""
    found: dict[str, Any] = {}
    for name, thing in list(namespace.items()):
        if "config" not in name.lower() and "args" not in name.lower() and "cfg" not in name.lower():
            continue
        if isinstance(thing, dict):
            found.update({k: v for k, v in thing.items() if isinstance(k, str)})
        elif isinstance(thing, type):
            found.update(_class_defaults(thing))
        elif hasattr(thing, "__dict__") and not callable(thing):
            found.update(vars(thing))
    return found


def _class_defaults(cls: type) -> dict[str, Any]:
    found = {k: v for k, v in vars(cls).items() if not k.startswith("_") and not callable(v)}
    try:
        for p in inspect.signature(cls).parameters.values():
            if p.default is not p.empty and not isinstance(p.default, type(dataclasses.MISSING)):
                found[p.name] = p.default
        found.update(vars(cls()))
    except Exception:  # noqa: S110 - a configuration that needs arguments only gives fewer defaults
        pass
    return found


def _with_names(cls: type, parameters: list[inspect.Parameter], sizes: Sizes) -> Iterator[Built]:
    known: dict[str, Any] = {}
    unknown: list[str] = []
    roles = {p.name: constructor_role(p.name) for p in parameters}
    for p in parameters:
        value = _value(p, sizes)
        if value is not _UNKNOWN:
            known[p.name] = value
        elif p.default is p.empty:
            unknown.append(p.name)
    optional = [name for name, role in roles.items() if role == "width" and name not in known and name not in unknown]
    if "width" not in {roles[name] for name in known} and optional:
        preferred = next((name for name in optional if "model" in name or "embed" in name), optional[0])
        yield _built(cls, known | {preferred: sizes.E} | dict.fromkeys(unknown), parameters)
    several = {n: sizes.E for n, role in roles.items() if role == "head_width"}
    if "heads" not in roles.values() and len(several) > 1:  # widths of inputs, where nothing is split
        yield _built(cls, known | several | dict.fromkeys(unknown, sizes.E), parameters)
    meant = "width" in roles.values() or not several  # else a width of heads may be the model's
    if not meant and not unknown:
        yield _built(cls, known | several, parameters, natural=False)
    for values in _guesses(unknown, roles, sizes):
        made = _built(cls, known | dict(zip(unknown, values, strict=True)), parameters, natural=not unknown and meant)
        yield dataclasses.replace(made, guessed=len(unknown) + (not meant))
    # A head width or a kv-head count where the width of the model was meant, or the other way round.
    for name, value in _second_readings(parameters, roles, sizes):
        for values in _guesses(unknown, roles, sizes):
            yield _built(
                cls, known | dict(zip(unknown, values, strict=True)) | {name: value}, parameters, natural=False
            )
    if several:
        for values in _guesses(unknown, roles, sizes):
            yield _built(cls, known | dict(zip(unknown, values, strict=True)) | several, parameters, natural=False)
    for p in parameters:  # something is on by default that asks for inputs we do not know
        if not unknown and p.name not in known and (p.default is True or _is_count(p.default)):
            less = False if p.default is True else 1
            yield _built(cls, known | {p.name: less}, parameters, natural=False)


def _is_count(default: Any) -> bool:
    return type(default) is int and 1 < default <= 64


def _second_readings(
    parameters: list[inspect.Parameter], roles: dict[str, str | None], sizes: Sizes
) -> Iterator[tuple[str, Any]]:
    for p in parameters:
        other = {"head_width": sizes.E, "width": sizes.D, "context": sizes.T}.get(roles[p.name] or "")
        if other is not None:
            yield p.name, other


def _built(cls: type, arguments: dict[str, Any], parameters: list[inspect.Parameter], natural: bool = True) -> Built:
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    first = [arguments[name] for name in positional if name in arguments]
    named = {name: value for name, value in arguments.items() if name not in positional}
    text = ", ".join(f"{k}={_short(v)}" for k, v in arguments.items())
    return Built(
        lambda: cls(*first, **named), f"{cls.__name__}({text})", arguments, None, natural, 0 if natural else MANY
    )


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | bool | str | None) else f"<{type(value).__name__}>"


_UNKNOWN = object()


def _value(p: inspect.Parameter, sizes: Sizes) -> Any:
    """By the meaning of the name; what has a default and means nothing to us keeps it."""
    word, role = plain(p.name), constructor_role(p.name)
    if word in SCALING and p.default is False:  # an option that is off is no mistake of the class
        return True
    if word in BY_NAME:
        return BY_NAME[word] if p.default is p.empty else _UNKNOWN
    if role in ("width", "heads", "kv_heads", "head_width", "context", "batch", "dropout"):
        optional = p.default is None and role in ("head_width", "kv_heads", "width", "context")
        return _UNKNOWN if optional or isinstance(p.default, bool) else value_for(role, sizes)
    if role == "bias" and p.default is p.empty:
        return True
    if p.default is not p.empty:
        return _UNKNOWN
    if p.annotation is bool or p.annotation == "bool":
        return False
    if p.annotation is float or p.annotation == "float":
        return 0.0
    return _UNKNOWN


def _guesses(unknown: list[str], roles: dict[str, str | None], sizes: Sizes) -> Iterator[tuple[Any, ...]]:
    if not unknown:
        yield ()
        return
    used = set(roles.values())
    order: list[Any] = [sizes.E, sizes.H, sizes.context, sizes.D, None, False, 0.0]
    if "width" in used:
        order = [sizes.H, sizes.E, sizes.context, sizes.D, None, False, 0.0]
    if "heads" in used and "width" in used:
        order = [sizes.context, sizes.D, None, False, 0.0, sizes.E, sizes.H]
    if len(unknown) == 2 and "heads" not in used:
        yield (sizes.E, sizes.H)
        yield (sizes.H, sizes.E)
    for count, values in enumerate(itertools.product(order, repeat=min(len(unknown), 3))):
        if count > 60:
            return
        yield values + (None,) * (len(unknown) - len(values))
