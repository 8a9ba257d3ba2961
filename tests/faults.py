"""Faults on demand: the calls of a program to the file system, counted, and made to fail or to end the process.

    with Faults(folder) as calls: ...                                    counts the calls below a folder
    with Faults(folder, fail_at=7, error=errno.EIO): ...                 the seventh call fails once
    with Faults(folder, kill_at=7): ...                                  the process ends before the seventh call

Only functions of `os` are counted, so the code under test must use them, or parts of `pathlib` that do.
"""

import errno
import os
import warnings
from pathlib import Path

READS = ("open", "read", "stat", "listdir", "scandir")
WRITES = ("write", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir")


class Faults:
    def __init__(
        self, folder, kinds=READS + WRITES, *, fail_at=None, kill_at=None, error=errno.EIO, times=1, only=None
    ):
        self.folder, self.kinds = str(folder), kinds
        self.fail_at, self.kill_at, self.error, self.times, self.only = fail_at, kill_at, error, times, only
        self.calls, self._real, self._paths = [], {}, {}

    def __enter__(self):
        self._real = {name: getattr(os, name) for name in {*self.kinds, "open", "close"}}
        for name in self._real:
            setattr(os, name, self._wrapped(name))
        return self

    def __exit__(self, *problem):
        for name, real in self._real.items():
            setattr(os, name, real)

    def _wrapped(self, name):
        real = self._real[name]

        def call(*arguments, **options):
            path = self._path(arguments[0] if arguments else "")
            if path is not None and name in self.kinds and (self.only is None or self.only in path):
                self._site(name, path)
            found = real(*arguments, **options)
            if name == "open" and path is not None:
                self._paths[found] = path
            elif name == "close":
                self._paths.pop(arguments[0], None)
            return found

        return call

    def _path(self, argument):
        """The path of a call, if it is below the folder."""
        path = self._paths.get(argument) if isinstance(argument, int) else os.fspath(argument)
        path = path.decode() if isinstance(path, bytes) else path
        return path if path is not None and Path(path).absolute().as_posix().startswith(self.folder) else None

    def _site(self, name, path):
        self.calls.append((name, path))
        number = len(self.calls)
        if self.kill_at == number:
            os._exit(9)
        if self.fail_at is not None and self.fail_at <= number < self.fail_at + self.times:
            raise OSError(self.error, os.strerror(self.error), path)


def in_child(act):
    """The exit status of a process that runs `act`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs no thread
        child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
