"""Runs a learner's file in its own process: limited in time, memory and output, without network, in an empty home."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from headwise.check.report import Report

SECONDS = 60.0  # for everything; a typical file takes three
GRACE = 5.0  # more, before the process is killed
LONGEST = 4 * 2**20  # bytes of answer


def run(
    path: Path,
    *,
    name: str | None = None,
    build: str | None = None,
    call: str | None = None,
    seconds: float = SECONDS,
    thorough: bool = True,
    solution: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """The report of a file, whatever the file does."""
    if not path.is_file():
        return Report("unknown", subject=str(path), doubts=[f"there is no file {path}"])
    with tempfile.TemporaryDirectory(prefix="headwise-check-") as home:
        reading, writing = os.pipe()
        request = {
            "channel": writing, "file": str(path.resolve()), "name": name, "build": build, "call": call,
            "seconds": seconds, "thorough": thorough, "solution": solution,
        }  # fmt: skip
        process = subprocess.Popen(  # noqa: S603 - this interpreter, our module
            [sys.executable, "-P", "-m", "headwise.check.child", json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=home,
            env=_environment(home),
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        state: dict[str, Any] = {"stage": "starting", "report": None}
        with os.fdopen(reading, "rb") as channel:
            listener = threading.Thread(target=_listen, args=(channel, state, progress), daemon=True)
            listener.start()
            error = _wait(process, seconds + GRACE, listener)
            _end(process)
            listener.join(2.0)
    if state["report"] is not None:
        return Report.from_dict(state["report"])
    return _died(path, process.returncode, state["stage"], error, seconds)


def _environment(home: str) -> dict[str, str]:
    """Ours, with another home and without a GPU; where headwise is found is kept."""
    here = str(Path(__file__).resolve().parents[2])
    kept = {
        k: v
        for k, v in os.environ.items()
        if k in ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SYSTEMROOT")
    }
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return kept | {
        "HOME": home, "TMPDIR": home, "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg", "WANDB_MODE": "disabled", "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip


def _listen(channel: IO[bytes], state: dict[str, Any], progress: Callable[[str], None]) -> None:
    """Take progress and report from the child. The first report counts: nothing after it is read."""
    total = 0
    for line in channel:
        total += len(line)
        if total > LONGEST:
            return
        with contextlib.suppress(ValueError, AttributeError):
            told = json.loads(line)
            if "progress" in told:
                state["stage"] = str(told["progress"])
                progress(state["stage"])
            elif "report" in told:
                state["report"] = told["report"]
                return


def _wait(process: "subprocess.Popen[bytes]", seconds: float, listener: threading.Thread) -> str:
    """Until it ends or its time is over; the end of what it wrote to standard error before it was muted."""
    listener.join(seconds)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    _end(process)
    if process.stderr is None:
        return ""
    with process.stderr as stream:
        os.set_blocking(stream.fileno(), False)
        return (stream.read(20000) or b"").decode(errors="replace")[-2000:]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left, with all its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2.0)


def _died(path: Path, code: int | None, stage: str, error: str, seconds: float) -> Report:
    report = Report("unknown", subject=path.name, file=str(path))
    if code is not None and code < 0 and code != -signal.SIGKILL:
        how = f"it crashed the interpreter ({signal.Signals(-code).name}) while {stage}"
    elif code == -signal.SIGKILL:
        how = f"it was still {stage} after {seconds:.0f} s and was stopped, or it ran out of memory"
    else:
        how = f"it ended the process with status {code} while {stage}"
    report.doubts.append(how)
    if error.strip():
        report.doubts.append(error.strip().splitlines()[-1][:200])
    return report
