"""What a peer is: a layer of somebody's that computes the same function."""

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from torch import nn

from headwise import reference
from headwise.cli.bench.setting import Setting, Weights

INSTALL = "not installed: pip install 'headwise[bench]'"
Build = Callable[[Setting, Weights, int], nn.Module]


@dataclasses.dataclass(frozen=True)
class Peer:
    """One candidate.

    Args:
        name: what tables call it.
        build: the module for a setting, with these weights, for so many tokens: (B, T, E) to (B, T, E).
        package: what must be importable; torch itself unless given.
        about: what it is, in a few words.
        biases: whether its projections have biases.
        matrices: how many T×T tensors per head its forward pass holds at once; 0 for a fused kernel.
        causal_only: whether it can do nothing else.
        cuda_only: why it does not run elsewhere.
    """

    name: str
    build: Build
    package: str = "torch"
    about: str = ""
    biases: bool = True
    matrices: int = 0
    causal_only: bool = False
    cuda_only: str | None = None

    @property
    def version(self) -> str | None:
        """The version installed."""
        return version_of(self.package)

    def refuses(self, setting: Setting) -> str | None:
        """Why it cannot be measured in this setting, if so."""
        if self.causal_only and not setting.causal:
            return "it is causal and nothing else"
        if self.cuda_only is not None and setting.device != "cuda":
            return self.cuda_only
        return why_not(self.package)


def version_of(package: str) -> str | None:
    """The version of a package that is installed, or can be imported; None where it is absent."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return metadata.version(package.replace("_", "-"))
    except metadata.PackageNotFoundError:
        found = getattr(sys.modules.get(package), "__version__", "of unknown version")
        return str(found)  # a folder on the path, without the files of an installer


def why_not(package: str) -> str | None:
    """Why a package cannot be used here, if so: absent, or broken in whatever way."""
    if importlib.util.find_spec(package) is None:
        return INSTALL
    try:
        load(package)
    except Exception as error:  # noqa: BLE001, RUF100 - another package may fail as it likes; the others go on
        return f"cannot be imported: {said(error)}"
    return None


def load(name: str) -> Any:
    """A module of another package. What it warns of at import is no concern of who measures it."""
    with warnings.catch_warnings(), _kerass_folder(name):
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@contextlib.contextmanager
def _kerass_folder(name: str) -> Iterator[None]:
    """keras takes its backend from the environment, and writes a file into the home folder unless told where."""
    if not name.startswith("keras"):
        yield
        return
    os.environ.setdefault("KERAS_BACKEND", "torch")
    given = os.environ.get("KERAS_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KERAS_HOME"] = given or folder
        try:
            yield
        finally:
            del os.environ["KERAS_HOME"]
            os.environ.update({} if given is None else {"KERAS_HOME": given})


def said(error: BaseException) -> str:
    """The kind of an error and what it says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def fill(linear: nn.Linear, given: reference.Linear) -> None:
    """Put weights into a linear layer."""
    linear.weight.data.copy_(given.weight)
    if given.bias is not None:
        linear.bias.data.copy_(given.bias)
