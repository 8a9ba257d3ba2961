"""The process in which a learner's file runs: limits first, then the judgement, reported line by line to the parent."""

import json
import os
import signal
import sys
from typing import Any

from headwise.check import limits


def main() -> None:
    """Read the request, judge, answer: one JSON line, or the end of this process, whatever the file does."""
    request = json.loads(sys.argv[1])
    channel = os.fdopen(int(request["channel"]), "w", buffering=1)
    limits.apply(request["seconds"])
    _mute()

    def tell(kind: str, value: Any) -> None:
        channel.write(json.dumps({kind: value}) + "\n")
        channel.flush()

    tell("progress", "starting")
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    tell("report", _judged(request, tell))
    channel.flush()
    os._exit(0)  # threads and exit handlers of the file have no say


class TooLong(BaseException):
    """Raised by the alarm. No `except Exception` of a learner catches it."""


def _too_long(*_: Any) -> None:
    raise TooLong


def _mute() -> None:
    """Prints go nowhere: a file may print megabytes."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def _judged(request: dict[str, Any], tell: Any) -> dict[str, Any]:
    from pathlib import Path

    import torch

    from headwise.check.filing import judge_file
    from headwise.check.report import Report

    torch.set_num_threads(max(1, min(2, os.cpu_count() or 1)))
    stage = ["loading"]

    def progress(words: str) -> None:
        stage[0] = words
        tell("progress", words)

    try:
        report = judge_file(
            Path(request["file"]), request["name"], progress, request["thorough"], request["build"], request["call"],
            request["solution"],
        )  # fmt: skip
    except TooLong:
        report = Report("unknown", subject=Path(request["file"]).name)
        report.doubts.append(
            f"it was still {stage[0]} after {request['seconds']:.0f} s: an endless loop, or too much work"
        )
    except MemoryError:
        report = Report("unknown", subject=Path(request["file"]).name)
        report.doubts.append(f"it ran out of memory while {stage[0]} (limit {limits.MEMORY >> 30} GiB)")
    except RecursionError:
        report = Report("unknown", subject=Path(request["file"]).name)
        report.doubts.append(f"it called itself without end while {stage[0]}")
    except Exception as error:
        report = Report("unknown", subject=Path(request["file"]).name)
        report.doubts.append(f"a fault of the checker itself while {stage[0]}, please report it: {error!r}")
    except SystemExit:
        report = Report("unknown", subject=Path(request["file"]).name)
        report.doubts.append(f"it ended the program while {stage[0]}: exit() or quit() in code that must run")
    return report.to_dict()


if __name__ == "__main__":
    main()
