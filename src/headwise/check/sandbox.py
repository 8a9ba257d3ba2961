"""Runs a learner's file in a process of its own, inside a jail (`jail.py`), with little time and memory.

This module holds both sides: `confined` in the parent starts a child, whose `main` builds the jail and runs a task
there, which answers line by line. `run` does so for a check, `headwise course` for grading. A report that calls the
file right is not trusted: the parent, which never loads the file, then sends questions (`verification.py`) that the
child must answer (`challenge.py`).
"""

import compileall
import contextlib
import gc
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from headwise.check import jail, templates
from headwise.check.code.project import search_folders
from headwise.check.code.source import read_source
from headwise.check.report import POSITIVE, Report

SECONDS = 60.0  # for everything; a typical file takes three
GRACE = 5.0  # more, before the process is killed
LONGEST = 4 * 2**20  # bytes of answer
SUBJECT = re.compile(r"[\w.-]{1,80}(\(.{0,400}\).{0,80})?")
CHILD = "from headwise.check.sandbox import main; main()"
KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SYSTEMROOT")


# The parent.


def run(
    path: Path,
    *,
    name: str | None = None,
    build: str | None = None,
    call: str | None = None,
    form: str | None = None,
    against: str | None = None,
    seconds: float = SECONDS,
    thorough: bool = False,
    solution: bool = False,
    require_jail: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """The report on a file, even if its code crashes; with `require_jail`, only if all layers of the jail hold."""
    answer = read_source(path, name).answer(name)
    if answer is not None:
        answer.solution = _solution(form) if solution else ""
        return answer
    against = None if against is None else str(Path(against).resolve())
    request = {
        "require_jail": require_jail, "file": str(path.resolve()), "name": name, "build": build, "call": call,
        "thorough": thorough, "solution": solution, "form": form, "against": against,
    }  # fmt: skip
    talk = Conversation(path, progress)
    code, error = confined(
        "headwise.check.sandbox:judge", request, talk, readable(path, against), seconds, starts_processes=thorough
    )
    report = talk.report or _died(path, code, talk.stage, error, seconds)
    report.jail = talk.jail or []
    return report


def confined(
    task: str,
    request: dict[str, Any],
    listener: "Listener",
    places: list[str],
    seconds: float,
    *,
    starts_processes: bool = False,
) -> tuple[int | None, str]:
    """Run a task in a process of its own, inside the jail; returns its exit status and the last line of its errors.

    Args:
        task: "module:function"; it is called in the child as `function(request, TaskChannel(...))`.
        request: what the task is given, as JSON.
        listener: hears what the task tells.
        places: files and folders that it may read.
        seconds: time limit.
        starts_processes: whether it may start processes.
    """
    _compile()
    with tempfile.TemporaryDirectory(prefix="headwise-check-") as home:
        reading, writing = os.pipe()
        asked, asking = os.pipe()
        around = {
            "task": task, "request": request, "channel": writing, "requests": asked, "seconds": seconds, "home": home,
            "readable": places, "starts_processes": starts_processes,
        }  # fmt: skip
        process = subprocess.Popen(  # noqa: S603 - this interpreter, our module
            [sys.executable, "-P", "-c", CHILD, json.dumps(around)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=home,
            env=_environment(home),
            pass_fds=(writing, asked),
            start_new_session=True,
        )
        os.close(writing)
        os.close(asked)
        with os.fdopen(reading, "rb") as answers, os.fdopen(asking, "wb") as requests:
            listener.answers, listener.requests = answers, requests
            listener.start()
            error = _wait(process, seconds + GRACE, listener)
            _kill(process)
            listener.join(2.0)
    return process.returncode, error


def readable(path: Path, against: str | None = None) -> list[str]:
    """The files and folders that the learner's file may read: its project, and that of the reference."""
    files = [path.resolve(), *([] if against is None else [Path(against.rpartition(":")[0] or against)])]
    places = [str(place) for file in files for place in (file, *search_folders(file))]
    return list(dict.fromkeys(places))


def _compile() -> None:
    """Byte-compile headwise, if it is not: the child cannot write, and would compile it again for every file."""
    here = Path(__file__).resolve().parents[1]
    if os.access(here, os.W_OK):
        compileall.compile_dir(here, quiet=2)


def _solution(form: str | None) -> str:
    """The solution for a file that was answered without being run."""
    if form is None:
        return templates.write("separate")
    from headwise.check.assignment.comparison import find_assignment

    assignment = find_assignment(form, None)
    return "" if assignment is None else assignment.solution()


def _environment(home: str) -> dict[str, str]:
    """Our environment with another home and without a GPU; headwise is still found."""
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {k: v for k, v in os.environ.items() if k in KEPT} | {
        "HOME": home, "TMPDIR": home, "PYTHONPATH": path, "USER": "learner", "LOGNAME": "learner",
        "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg", "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip


class Listener(threading.Thread):
    """Hears what the child tells, one JSON object per line, until it has heard enough."""

    answers: IO[bytes]
    requests: IO[bytes]

    def __init__(self, progress: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(daemon=True)
        self.progress, self.stage = progress, "starting"
        self.jail: list[str] | None = None
        self.done = False

    def run(self) -> None:
        """Listen. Whatever is no message of the expected shape is dropped."""
        while not self.done and (line := self.answers.readline(LONGEST)):
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                self.take(json.loads(line))

    def take(self, told: dict[str, Any]) -> None:
        """Keep one message."""
        if "jail" in told and self.jail is None:  # the first message, sent before the file is read
            self.jail = [str(layer) for layer in told["jail"]]
        elif "progress" in told:
            self.stage = str(told["progress"])[:80]
            self.progress(self.stage)


class Conversation(Listener):
    """Listens to a check until it has reported; a report that the file is right is confirmed by questions of ours."""

    def __init__(self, path: Path, progress: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(progress)
        self.path = path
        self.report: Report | None = None

    def run(self) -> None:
        """Receive progress and report. The first report counts: nothing after it is read, except answers."""
        ready = threading.Thread(target=_import_verification)
        ready.start()
        super().run()
        ready.join()

    def take(self, told: dict[str, Any]) -> None:
        """Keep one message."""
        super().take(told)
        if "report" in told:
            self.report = self._checked(self._named(Report.from_dict(told["report"])))
            self.done = True

    def _named(self, report: Report) -> Report:
        """The report with a subject that is a name with arguments, whatever the child calls it."""
        report.subject = report.subject if SUBJECT.fullmatch(report.subject) else self.path.name
        report.file = report.file and str(self.path)
        return report

    def _checked(self, report: Report) -> Report:
        """The report; one that calls the file right only as far as answers to our questions confirm it."""
        if report.verdict not in POSITIVE:
            return report
        from headwise.check.verification import confirmed

        self.stage = "answering questions"
        return confirmed(report, self.path, self.answers, self.requests)


def _import_verification() -> None:
    """Import torch and the reader while the child runs; a class that is wrong does not need them."""
    collecting = gc.isenabled()
    gc.disable()  # a third faster, as in the child
    try:
        importlib.import_module("headwise.check.verification")
    finally:
        if collecting:
            gc.enable()


def _wait(process: "subprocess.Popen[bytes]", seconds: float, talk: threading.Thread) -> str:
    """Wait until it ends or its time is up; the last of what it wrote to standard error before that was muted."""
    talk.join(seconds)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    _kill(process)
    if process.stderr is None:
        return ""
    with process.stderr as stream:
        os.set_blocking(stream.fileno(), False)
        return (stream.read(20000) or b"").decode(errors="replace")[-2000:]


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left, with all its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2.0)


def _died(path: Path, code: int | None, stage: str, error: str, seconds: float) -> Report:
    report = Report("unknown", subject=path.name, file=str(path))
    if code == -signal.SIGKILL:
        report.doubts.append(f"it was still {stage} after {seconds:.0f} s and was stopped, or it ran out of memory")
    elif code is not None and code < 0:
        report.doubts.append(f"it crashed the interpreter ({signal.Signals(-code).name}) while {stage}")
    else:
        report.doubts.append(f"it ended the process with status {code} while {stage}")
    if error.strip():
        report.doubts.append(error.strip().splitlines()[-1][:200])
    return report


# The child.


class TooLong(BaseException):
    """Raised by the alarm. A learner's `except Exception` does not catch it."""


class TaskChannel:
    """What connects a task in the child with its listener."""

    def __init__(self, channel: int, requests: int, layers: list[str], seconds: float) -> None:
        self.channel, self.requests = os.fdopen(channel, "wb"), os.fdopen(requests, "rb")
        self.layers, self.seconds = layers, seconds

    def tell(self, kind: str, value: Any) -> None:
        """Send one message."""
        self.channel.write(json.dumps({kind: value}).encode() + b"\n")
        self.channel.flush()


def main() -> None:
    """Build the jail, then run the task, whatever it does. After its time `TooLong` is raised in it."""
    around = json.loads(sys.argv[1])
    seconds = around["seconds"]
    jail.limit(seconds)
    layers = jail.enter(around["home"], around["readable"], starts_processes=around["starts_processes"])
    line = TaskChannel(around["channel"], around["requests"], layers, seconds)
    _close_network()
    _mute()
    line.tell("jail", layers)
    line.tell("progress", "starting")
    signal.signal(signal.SIGALRM, _raise_too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    module, _, function = around["task"].partition(":")
    getattr(importlib.import_module(module), function)(around["request"], line)
    os._exit(0)  # without the threads and exit handlers of the file


def judge(request: dict[str, Any], line: TaskChannel) -> None:
    """The task of a check: judge the file and report, then answer questions about it."""
    if request.pop("require_jail") and (open_doors := jail.missing(line.layers)):
        words = f"a jail is required, and on this system the code could {' and '.join(open_doors)}"
        line.tell("report", Report("unknown", subject=Path(request["file"]).name, doubts=[words]).to_dict())
        return
    report = _judged(request, line.seconds, line.tell)
    line.tell("report", report.to_dict())
    if report.evidence is not None:
        from headwise.check.challenge import serve

        with contextlib.suppress(TooLong):
            serve(report.evidence, line.requests, line.channel)


def _raise_too_long(*_: Any) -> None:
    raise TooLong


def _mute() -> None:
    """Discard everything that is printed: a file may print megabytes."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def _judged(request: dict[str, Any], seconds: float, tell: Callable[[str, Any], None]) -> Report:
    gc.disable()  # a third faster: importing torch makes a million objects, and all of them stay
    import torch

    from headwise.check.assignment.forms import find_form
    from headwise.check.verdict import judge_file

    gc.freeze()
    gc.enable()
    sys.dont_write_bytecode = True  # from here on: nothing is left beside the learner's files
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    torch.set_num_threads(1)  # too little work to share: on a busy machine threads mostly wait for each other
    path, stage = Path(request.pop("file")), "loading"

    def progress(words: str) -> None:
        nonlocal stage
        stage = words
        tell("progress", words)

    try:
        report = judge_file(path, progress=progress, **request)
        if request["solution"] and request["form"] and not report.solution:  # the file did not get as far
            report.solution = find_form(request["form"]).solution()
    except TooLong:
        words = f"it was still {stage} after {seconds:.0f} s: an endless loop, or too much work"
    except MemoryError:
        words = f"it ran out of memory while {stage} (limit {jail.MEMORY >> 30} GiB)"
    except RecursionError:
        words = f"it recursed without end while {stage}"
    except Exception as error:
        words = f"a fault of the checker itself while {stage}, please report it: {error!r}"
    except SystemExit:
        words = f"it ended the program while {stage}: exit() or quit() in code that must run"
    else:
        return report
    return Report("unknown", subject=path.name, doubts=[words])


def _close_network() -> None:
    """Make opening a connection raise an error with a clear message; the jail would only say "not permitted"."""
    for method in ("connect", "connect_ex", "sendto"):
        setattr(socket.socket, method, _refuse)
    socket.getaddrinfo = socket.create_connection = _refuse


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise OSError("the checker runs without a network")


if __name__ == "__main__":
    main()
