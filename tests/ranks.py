"""Real processes that talk by gloo, started once and given one function after the other."""

import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

PATIENCE = 120  # seconds for one function; ranks that wait for each other for good are ended

IMPORTED = ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.distributed.tensor.parallel"]
IMPORTED += ["torch.distributed.tensor.experimental", "headwise.parallel", "headwise.models"]

SEGFAULT = -11  # a crash of gloo's own run loop, seen once with torch 2.13


class EndedRankError(AssertionError):
    """A process is gone that nobody has ended."""

    def __init__(self, codes):
        super().__init__(f"a rank has ended by itself; exit codes {codes}")
        self.codes = codes


class Ranks:
    """`Ranks(4).run(function, ...)` calls `function(...)` on every rank and gives the list of results.

    What a rank raises, such as an assertion of its own, is raised here.
    """

    def __init__(self, count):
        self.count, self.processes = count, []

    def run(self, function, *args):
        try:
            return self._run(function, *args)
        except EndedRankError as error:
            if SEGFAULT not in error.codes:
                raise
            return self._run(function, *args)

    def _run(self, function, *args):
        if not self.processes:
            self._start()
        try:
            for pipe in self.pipes:
                pipe.send((function, args))
            found = [pipe.recv() if pipe.poll(PATIENCE) else (False, "no answer") for pipe in self.pipes]
        except (EOFError, OSError) as error:
            ended = [process.join(1) or process.exitcode for process in self.processes]
            self.stop()  # the next function gets new processes
            raise EndedRankError(ended) from error
        wrong = [f"rank {rank}: {what}" for rank, (right, what) in enumerate(found) if not right]
        if wrong:
            self.stop()  # the others may wait for ever for the one that failed
            raise AssertionError("\n".join(wrong))
        return [what for _, what in found]

    def assert_that(self, function, *args):
        """What `function` asserts holds on every rank; it gives nothing that somebody would have to look at."""
        assert self.run(function, *args) == [None] * self.count

    def _start(self):
        context = multiprocessing.get_context("forkserver")  # one process imports, and every rank is a copy of it
        context.set_forkserver_preload(IMPORTED)
        meeting = Path(tempfile.mkdtemp()) / "meeting"
        self.pipes, ends = zip(*(context.Pipe() for _ in range(self.count)), strict=True)
        self.processes = [
            context.Process(target=serve, args=(rank, self.count, str(meeting), end), daemon=True)
            for rank, end in enumerate(ends)
        ]
        for process in self.processes:
            process.start()

    def stop(self):
        for process in self.processes:
            process.terminate()
            process.join()
        self.processes = []


def serve(rank, count, meeting, pipe):
    """One rank: does what it is told until it is ended."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = {"init_method": f"file://{meeting}", "timeout": timedelta(seconds=PATIENCE / 2)}
    dist.init_process_group("gloo", rank=rank, world_size=count, **store)
    while True:
        function, args = pipe.recv()
        torch.manual_seed(0)
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
