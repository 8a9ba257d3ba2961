"""What open contexts attach to a layer: functions that see its maps and outputs, and functions that change them.

`headwise.watch`, `headwise.silence` and the other interventions are such contexts. What they attach applies only in the
thread or task that opened them and in tasks started from there, so that several can use one model at the same time. A
copy of a layer has nothing attached.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention.backends import Call
from headwise.errors import OptionError
from headwise.weights import AttentionMap

Watcher = Callable[[AttentionMap], None]
Observer = Callable[[Call, Tensor], None]
_open: ContextVar[frozenset[object]] = ContextVar("headwise_open", default=frozenset())
_lock = threading.Lock()


class Attachment(NamedTuple):
    """What one context attaches to one layer.

    watcher: sees the attention map of every call.
    silent: heads that hand zeros to the output projection.
    reading: what attention shall return instead, given the call and what it returned, (B, H, T, Dv).
    change: what the heads shall hand to the output projection instead, (B, H, T, Dv).
    observer: sees the call and what the heads hand to the output projection, after all changes.
    """

    watcher: Watcher | None = None
    silent: tuple[int, ...] | Callable[[], tuple[int, ...]] = ()  # a function if it differs from call to call
    reading: Callable[[Call, Tensor], Tensor] | None = None
    change: Callable[[Tensor], Tensor] | None = None
    observer: Observer | None = None


Entries = tuple[tuple[object, Attachment], ...]


class Attached:
    """All attachments of a layer with their contexts, kept as its attribute `_attached` while there are any."""

    def __init__(self, entries: Entries = ()) -> None:
        self.entries = entries

    def watchers(self) -> tuple[Watcher, ...]:
        """The functions to call with every map."""
        return tuple(entry.watcher for entry in self._here() if entry.watcher is not None)

    def silent(self) -> tuple[int, ...]:
        """The heads that are switched off, in order."""
        heads = (entry.silent() if callable(entry.silent) else entry.silent for entry in self._here())
        return tuple(sorted({head for some in heads for head in some}))

    def read(self, call: Call, read: Tensor) -> Tensor:
        """What attention returns for `call` (B, H, T, Dv), as contexts change it."""
        for entry in self._here():
            if entry.reading is not None:
                read = entry.reading(call, read)
        return read

    def handed(self, call: Call, heads: Tensor) -> Tensor:
        """What the heads hand to the output projection (B, H, T, Dv), as contexts change it, in the order they opened.
        Observers see the result."""
        here = self._here()
        silent = self.silent()
        if silent:
            if max(silent) >= heads.shape[1]:
                raise OptionError(f"silence(head {max(silent)}): this layer has {heads.shape[1]} heads, from 0 up.")
            heads = heads.index_fill(1, torch.tensor(silent, device=heads.device), 0.0)
        for entry in here:
            if entry.change is not None:
                heads = entry.change(heads)
        for entry in here:
            if entry.observer is not None:
                entry.observer(call, heads)
        return heads

    def _here(self) -> tuple[Attachment, ...]:
        if torch.compiler.is_compiling():  # a graph is recompiled when entries change, not for every thread
            return tuple(attachment for _, attachment in self.entries)
        opened = _open.get()
        return tuple(attachment for context, attachment in self.entries if context in opened)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Attached":
        return Attached()

    def __reduce__(self) -> tuple[type["Attached"], tuple[()]]:
        return Attached, ()


@contextmanager
def attached(layers: Mapping[str, Any], attachments: Mapping[str, Attachment]) -> Iterator[None]:
    """Attach something to some of the layers, by name, for this thread or task."""
    context = object()
    _open.set(_open.get() | {context})
    try:
        for name, attachment in attachments.items():
            _set(layers[name], context, attachment)
        yield
    finally:
        for name in attachments:
            _set(layers[name], context, None)
        _open.set(_open.get() - {context})


@contextmanager
def detached() -> Iterator[None]:
    """A context in which nothing applies that others have attached, for runs of a model that they shall not see."""
    here = _open.set(frozenset())
    try:
        yield
    finally:
        _open.reset(here)


def _set(layer: Any, context: object, attachment: Attachment | None) -> None:
    """Set what a context attaches to a layer; None removes it."""
    with _lock:
        before = getattr(layer, "_attached", None)
        entries = () if before is None else tuple(entry for entry in before.entries if entry[0] is not context)
        entries = entries if attachment is None else (*entries, (context, attachment))
        if entries:
            layer._attached = Attached(entries)
        elif "_attached" in layer.__dict__:
            del layer._attached
