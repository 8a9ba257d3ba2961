"""Sizes of a test call, and constructor arguments chosen by the meaning of their names, then by trial."""

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, replace
from typing import Any

from headwise.check.vocabulary import (
    WEIGHTS_IN,
    call_role,
    constructor_role,
    has_usual_value,
    is_configuration,
    plain,
    usual_value,
)

__all__ = ["WEIGHTS_IN", "call_role", "constructor_role", "is_configuration", "plain"]  # of the vocabulary


@dataclass(frozen=True)
class CallSizes:
    """The sizes of one test call, different for every axis, so that a tensor's shape says what its axes are.

    The batch is larger than the width, so that linear maps can be solved for exactly.
    """

    B: int = 53
    T: int = 5
    S: int = 7
    H: int = 4
    E: int = 32
    context: int = 16
    O: int = 0  # noqa: E741 - the output width, where it is not that of the input
    V: int = 0  # the width of a head's values, where it is not that of its keys

    @property
    def D(self) -> int:
        """The width of one head."""
        return self.out // self.H

    @property
    def Dv(self) -> int:
        """The width of one head's values."""
        return self.V or self.D

    @property
    def out(self) -> int:
        """The width of the output."""
        return self.O or self.E


# Every size is different from the others of its setting, and heads are both more and fewer than the numbers in one.
OTHER_SIZES = (CallSizes(B=41, T=7, S=11, H=6, E=24, context=19), CallSizes(B=37, T=3, S=6, H=2, E=20, context=13))
SMALL = CallSizes(B=9, H=2, E=4)  # for code that loops over single numbers


def batch_for(width: int) -> int:
    """A prime batch size with enough samples at every position to solve for a linear map of this width."""
    least = width + 20 if width <= 256 else (width + 80) // 4  # wide layers are not tested for rotary positions
    candidate = least + 1 if least % 2 == 0 else least
    while any(candidate % factor == 0 for factor in range(2, int(candidate**0.5) + 1)):
        candidate += 2
    return candidate


def value_for(role: str, sizes: CallSizes) -> int | float | bool:
    """The value that a constructor argument of this meaning gets."""
    return {
        "width": sizes.E, "out_width": sizes.out, "heads": sizes.H, "head_width": sizes.D, "value_width": sizes.Dv,
        "context": sizes.context, "batch": sizes.B,
        "kv_heads": sizes.H,  # grouped heads then reduce to ordinary ones
        "dropout": 0.0, "bias": True,
    }[role]  # fmt: skip


# Configurations.


class PerLayer(int):
    """A size that some configurations hold once per layer: `config.n_heads` and `config.n_heads[3]` both work."""

    def __getitem__(self, layer: int) -> int:
        return int(self)


class StandInConfig:
    """A configuration that answers any attribute or key: from overrides, by the key's meaning, or from the file's own.

    A name without a meaning raises, as a missing key should, so `getattr(config, "flash", False)` gives its default.
    Such names are kept in `missed`, and the next attempt can pass values for them in `extra`.
    """

    def __init__(
        self, sizes: CallSizes, own: dict[str, Any] | None = None, extra: dict[str, Any] | None = None
    ) -> None:
        self.__dict__.update(_sizes=sizes, _own=own or {}, _extra=extra or {}, missed=[], asked=set())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found, value = self._look_up(name)
        if not found:
            self.missed.append(name)
            raise AttributeError(f"config has no {name!r}")
        return value

    def _look_up(self, name: str) -> tuple[bool, Any]:
        self.asked.add(name)
        if name in self._extra:
            return True, self._extra[name]
        own, role = self._own.get(name), constructor_role(name)
        if has_usual_value(name):
            usual = usual_value(name)
            return True, own if isinstance(own, bool) or (usual is None and isinstance(own, str)) else usual
        if role == "bias" and isinstance(own, bool):
            return True, own
        if role is not None and (own is None or isinstance(own, int | float)):
            value = value_for(role, self._sizes)
            return True, PerLayer(value) if type(value) is int else value
        return name in self._own, own

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __contains__(self, name: object) -> bool:
        return self._look_up(str(name))[0]

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    def keys(self) -> list[str]:
        """The keys of the file's own configuration: enough for `Class(**config)`."""
        return list(self._own)


# Ways to construct a class.

GUESSES = 61  # of all unknown arguments together
WIDTHS = ("width", "out_width")
HEAD_WIDTHS = ("head_width", "value_width")
MANY = 9  # how many guesses a second reading of the names counts for
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

    @property
    def certain(self) -> bool:
        """Whether nothing was guessed: neither an argument nor a key of the configuration."""
        return self.natural and not (self.config is not None and self.config.missed)

    def remake(self, cls: Callable[..., Any], sizes: CallSizes, changes: dict[str, Any]) -> Any:
        """Another object, made with some arguments or configuration keys changed."""
        if self.config is None:
            return cls(**(self.arguments | changes))
        config = StandInConfig(sizes, self.config._own, self.config._extra | changes)
        return cls(**{k: config if v is self.config else v for k, v in self.arguments.items()})

    def resized(self, cls: Callable[..., Any], old: CallSizes, new: CallSizes) -> "Built | None":
        """The same way to make it, with other sizes; None where no argument is a size."""
        changed = {name: _resized(name, value, old, new) for name, value in self.arguments.items()}
        if self.config is not None:
            extra = {name: _resized(name, value, old, new) for name, value in self.config._extra.items()}
            config = StandInConfig(new, self.config._own, extra)
            changed = {k: config if v is self.config else v for k, v in changed.items()}
            made = replace(self, make=lambda: cls(**changed), arguments=changed, config=config)
            return replace(made, text=f"{self.text} with width {new.E}, {new.H} heads")
        if changed == self.arguments or not isinstance(cls, type):
            return None
        return replace(_built(cls, changed, parameters_of(cls), self.natural), guessed=self.guessed)

    def names_with_role(self, role: str) -> list[str]:
        """Arguments, or keys that were asked of the configuration, with this meaning."""
        names = self.arguments if self.config is None else self.config.asked
        return [name for name in names if constructor_role(name) == role]

    def fixed_context(self, T: int) -> list[str]:
        """Arguments that had to equal the length of the input, because a stored mask or table is not sliced."""
        if self.config is not None and self.config._sizes.context == T:
            return ["the context length"]
        return [k for k, v in self.arguments.items() if constructor_role(k) == "context" and v == T]


def _resized(name: str, value: Any, old: CallSizes, new: CallSizes) -> Any:
    """An argument's value at other sizes: by the meaning of its name, or else by the size that it equals."""
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


def attempts(cls: type, namespace: Mapping[str, Any], sizes: CallSizes) -> Iterator[Built]:
    """Ways to construct `cls`, most likely first."""
    parameters = parameters_of(cls)
    if _takes_config(parameters):
        yield from _with_config(cls, parameters, namespace, sizes)
    yield from _with_names(cls, parameters, sizes)


def _takes_config(parameters: list[inspect.Parameter]) -> bool:
    required = [p for p in parameters if p.default is p.empty]
    named = [p for p in parameters if is_configuration(p.name)]
    if any(constructor_role(p.name) == "heads" for p in parameters):  # then a single letter is a size
        named = [p for p in named if p.default is p.empty and len(p.name) > 2]
    return bool(named) and len(required) <= len(named) + 2


def _with_config(
    cls: type, parameters: list[inspect.Parameter], namespace: Mapping[str, Any], sizes: CallSizes
) -> Iterator[Built]:
    own = _own_configuration(namespace)
    extra: dict[str, Any] = {}
    short = replace(sizes, context=sizes.T)  # for a stored mask that is not sliced
    guesses = (None, None, False, 0, 1, sizes.E, None)
    for guess, size in zip(guesses, [sizes] * 5 + [short] * 2, strict=True):
        config = StandInConfig(size, own, dict(extra))
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
    """Defaults of every configuration that the file defines, as a class, a dictionary or an object."""
    found: dict[str, Any] = {}
    for name, thing in list(namespace.items()):
        if not re.search("config|args|cfg", name.lower()):
            continue
        if isinstance(thing, dict):
            found |= {k: v for k, v in thing.items() if isinstance(k, str)}
        elif isinstance(thing, type):
            found |= _class_defaults(thing)
        elif hasattr(thing, "__dict__") and not callable(thing):
            found |= vars(thing)
    return found


def _class_defaults(cls: type) -> dict[str, Any]:
    found = {k: v for k, v in vars(cls).items() if not k.startswith("_") and not callable(v)}
    with contextlib.suppress(Exception):  # a configuration that needs arguments gives fewer defaults
        for p in inspect.signature(cls).parameters.values():
            if p.default is not p.empty and not isinstance(p.default, type(MISSING)):
                found[p.name] = p.default
        found |= vars(cls())
    return found


def _with_names(cls: type, parameters: list[inspect.Parameter], sizes: CallSizes) -> Iterator[Built]:
    roles = {p.name: constructor_role(p.name) for p in parameters}
    widths = {name for name, role in roles.items() if role in WIDTHS}
    known = {p.name: value for p in parameters if (value := _value(p, sizes)) is not _UNKNOWN}
    unknown = [p.name for p in parameters if p.default is p.empty and p.name not in known]
    optional = [name for name in roles if name in widths and name not in known and name not in unknown]
    if not widths & set(known) and optional:
        preferred = next((name for name in optional if "model" in name or "embed" in name), optional[0])
        yield _built(cls, known | {preferred: sizes.E} | dict.fromkeys(unknown), parameters)
    several = {n: sizes.E for n, role in roles.items() if role in HEAD_WIDTHS}
    if "heads" not in roles.values() and len(several) > 1:  # widths of the inputs, where nothing is split
        yield _built(cls, known | several | dict.fromkeys(unknown, sizes.E), parameters)
    meant = bool(widths) or not several  # otherwise a head width may be the model's
    if not meant and not unknown:
        yield _built(cls, known | several, parameters, natural=False)
    filled = [known | dict(zip(unknown, values, strict=True)) for values in _guesses(unknown, roles, sizes)]
    for arguments in filled:
        made = _built(cls, arguments, parameters, natural=not unknown and meant)
        yield replace(made, guessed=len(unknown) + (not meant))
    # Names may mislead: a head width where the model width was meant, or the other way round.
    other = {"head_width": sizes.E, "value_width": sizes.E, "width": sizes.D, "out_width": sizes.D, "context": sizes.T}
    second = [{name: other[role]} for name, role in roles.items() if role in other]
    for changed in [*second, several] if several else second:
        for arguments in filled:
            yield _built(cls, arguments | changed, parameters, natural=False)
    for p in parameters:  # something on by default may need inputs that we do not know
        count = type(p.default) is int and 1 < p.default <= 64
        if not unknown and p.name not in known and (p.default is True or count):
            yield _built(cls, known | {p.name: 1 if count else False}, parameters, natural=False)


def _built(cls: type, arguments: dict[str, Any], parameters: list[inspect.Parameter], natural: bool = True) -> Built:
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    first = [arguments[name] for name in positional if name in arguments]
    named = {name: value for name, value in arguments.items() if name not in positional}
    text = f"{cls.__name__}({', '.join(f'{k}={_short(v)}' for k, v in arguments.items())})"
    return Built(lambda: cls(*first, **named), text, arguments, None, natural, 0 if natural else MANY)


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | bool | str | None) else f"<{type(value).__name__}>"


_UNKNOWN = object()


def _value(p: inspect.Parameter, sizes: CallSizes) -> Any:
    """A value by the meaning of the name; a parameter with a default and no known meaning keeps its default."""
    word, role = plain(p.name), constructor_role(p.name)
    if word in SCALING and p.default in (False, p.empty):  # an option that is off by default is not a mistake
        return True
    if has_usual_value(p.name):
        return usual_value(p.name) if p.default is p.empty else _UNKNOWN
    if role is not None and role != "bias":
        optional = p.default is None and role not in ("heads", "batch", "dropout")
        return _UNKNOWN if optional or isinstance(p.default, bool) else value_for(role, sizes)
    if role == "bias" and p.default is p.empty:
        return True
    if p.default is not p.empty:
        return _UNKNOWN
    if p.annotation in (bool, "bool"):
        return False
    return 0.0 if p.annotation in (float, "float") else _UNKNOWN


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
