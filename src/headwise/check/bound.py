"""An object that runs: how it was made, how it is called, and the trace of one call."""

import contextlib
import pdb
import sys
import warnings
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.check import building
from headwise.check.attempt import Failure
from headwise.check.calling import Form, Inputs, leaves
from headwise.check.configs import Config
from headwise.check.repairs import Repaired, Repairs
from headwise.check.sizes import Sizes
from headwise.check.trace import Trace


@dataclass
class Bound:
    """An object that runs, with the trace of one call."""

    thing: Any
    target: Any
    built: building.Built
    form: Form
    sizes: Sizes
    namespace: MutableMapping[str, Any]
    filename: str | None
    repaired: Repaired
    inputs: Inputs
    trace: Trace
    returned: Any
    output: Tensor | None
    failures: list[Failure] = field(default_factory=list)

    def call(self, inputs: Inputs, masks: dict[str, Any] | None = None, thing: Any = None) -> Any:
        """One more call, untraced."""
        with Repairs(self.filename, self.repaired), torch.no_grad(), quiet(), double_by_default():
            return self.form.call(self.thing if thing is None else thing, inputs, masks)

    def traced(self, inputs: Inputs, masks: dict[str, Any] | None = None) -> tuple[Any, Trace]:
        """One more call and its trace."""
        trace = Trace(self.filename)
        with Repairs(self.filename, self.repaired), torch.no_grad(), quiet(), double_by_default(), trace:
            returned = self.form.call(self.thing, inputs, masks)
        trace.returned = [trace.source(leaf) for leaf in leaves(returned)]
        return returned, trace

    def output_of(self, inputs: Inputs, masks: dict[str, Any] | None = None, thing: Any = None) -> Tensor | None:
        """The output of one call, or None where it raises or returns something else: it is a learner's code."""
        try:
            returned = self.call(inputs, masks, thing)
        except Exception:
            return None
        return self.form.result(returned, inputs)

    def again(self, **changes: Any) -> Any:
        """A second object, made with some constructor arguments changed."""
        if self.built.config is not None:
            config = Config(self.sizes, self.built.config._own, self.built.config._extra | changes)
            arguments = {k: config if v is self.built.config else v for k, v in self.built.arguments.items()}
            made = self.target(**arguments)
        else:
            made = self.target(**(self.built.arguments | changes))
        return made


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings of the learner's code or of torch about it, and no debugger that waits for somebody."""
    hook, trace = sys.breakpointhook, pdb.set_trace
    sys.breakpointhook = pdb.set_trace = lambda *_, **__: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.breakpointhook, pdb.set_trace = hook, trace


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    """Tensors that a call makes itself are double, too, unless it says otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
