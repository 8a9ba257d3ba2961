"""A configuration that answers any question by the name of the key."""

import re
from typing import Any

from headwise.check.names import constructor_role, plain, value_for
from headwise.check.sizes import Sizes

CONSTANTS: dict[str, Any] = {
    "ropetheta": 10000.0, "rotarybase": 10000.0, "layernormeps": 1e-5, "rmsnormeps": 1e-5, "normeps": 1e-5,
    "eps": 1e-5, "attnimplementation": "eager", "outputattentions": False, "usecache": False, "vocabsize": 50,
    "nlayer": 2, "nlayers": 2, "numlayers": 2, "numhiddenlayers": 2, "device": "cpu", "causal": False,
    "iscausal": False, "flash": False, "layeridx": 0, "positionembeddingtype": "absolute", "isdecoder": False,
    "slidingwindow": None, "qkvbias": True, "ropescaling": None, "dtype": None, "bias": True, "qknorm": False,
    "useflash": False, "useflashattention": False, "dff": 64, "ffndim": 64, "intermediatesize": 64,
    "initializerrange": 0.02, "prunedheads": (), "layernormepsilon": 1e-5,
}  # fmt: skip


BASE = 10000.0  # of rotary angles


def _is_base(name: str) -> bool:
    return re.search(r"theta|base|freq", plain(name)) is not None


class OfEveryLayer(int):
    """A size that some configurations hold once for every layer: `config.n_heads` and `config.n_heads[3]`."""

    def __getitem__(self, layer: int) -> int:
        return int(self)


class Config:
    """Attributes, keys and `get`, answered from overrides, then by meaning, then from what the file itself defines.

    A name that means nothing raises, as a missing key should: `getattr(config, "flash", False)` then takes its default.
    What was missed is kept in `missed`, and the next attempt can give it in `extra`.
    """

    def __init__(self, sizes: Sizes, own: dict[str, Any] | None = None, extra: dict[str, Any] | None = None) -> None:
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
        if plain(name) in CONSTANTS or _is_base(name):
            own = self._own.get(name)
            return True, own if isinstance(own, bool) else CONSTANTS.get(plain(name), BASE)
        own = self._own.get(name)
        role = constructor_role(name)
        if role == "bias" and isinstance(own, bool):
            return True, own
        if role is not None and (own is None or isinstance(own, int | float)):
            value = value_for(role, self._sizes)
            return True, OfEveryLayer(value) if type(value) is int else value
        return name in self._own, own

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __contains__(self, name: object) -> bool:
        return self._look_up(str(name))[0]

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict's."""
        found, value = self._look_up(name)
        if not found:
            self.missed.append(name)
        return value if found else default

    def keys(self) -> list[str]:
        """What the file's own configuration defines: enough for `Class(**config)`."""
        return list(self._own)
