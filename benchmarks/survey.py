"""Compare `headwise survey` with one process and with two, each with one thread, in one run.

    python benchmarks/survey.py                    about 200 kB of this repository's own Python files
    python benchmarks/survey.py --kilobytes 50     less text
    python benchmarks/survey.py --measures         what evidence, other maps and importance cost, in one process

The script times whole commands in turn, including start-up. The start-up time is that of a survey of one short text. It
reports nothing unless both commands write exactly the same bytes. It needs two idle cores.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

WAYS: dict[str, dict[str, object]] = {
    "attention weights": {"evidence": 0},
    "with evidence": {},
    "by value": {"evidence": 0, "by": "value"},
    "by contribution": {"evidence": 0, "by": "contribution"},
    "with importance": {"evidence": 0, "importance": True},
}
SOURCES = Path(__file__).parent.parent / "src" / "headwise"


def copy_corpus(folder: Path, kilobytes: int) -> None:
    """Copy Python files, one document each, up to this many kilobytes."""
    folder.mkdir()
    room = kilobytes * 1000
    for source in sorted(SOURCES.rglob("*.py")):
        text = source.read_text(encoding="utf-8")[:room]
        room -= len(text)
        if text.strip():
            (folder / f"{source.parent.name}-{source.name}").write_text(text, encoding="utf-8")
        if room <= 0:
            return


def survey(corpus: Path, out: Path, processes: int, context: int) -> tuple[float, float]:
    """The wall-clock and CPU seconds of a whole command."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launch, "-m", "headwise", "survey", corpus, "--out", out, "--context", context]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start, worked = time.perf_counter(), cpu_seconds()
    subprocess.run([str(part) for part in command], env=environment, check=True, capture_output=True)
    return time.perf_counter() - start, cpu_seconds() - worked


def cpu_seconds() -> float:
    """The CPU seconds of all child processes so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(folder: Path, kilobytes: int, rounds: int, context: int) -> dict[str, object]:
    """The median seconds with one and two processes, and their ratio with and without start-up."""
    copy_corpus(folder / "corpus", kilobytes)
    (folder / "short").mkdir()
    (folder / "short" / "one.txt").write_text("The captain looked at the sea.")
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name in ("short", "corpus"):
            for processes in (1, 2):
                seconds = survey(folder / name, folder / f"{name}{processes}.json", processes, context)
                times.setdefault((name, processes), []).append(seconds)
            if (folder / f"{name}1.json").read_bytes() != (folder / f"{name}2.json").read_bytes():
                sys.exit("one process and two processes wrote different files")
    order = [(name, processes) for name in ("corpus", "short") for processes in (1, 2)]
    one, two, start_one, start_two = (statistics.median(clock for clock, _ in times[key]) for key in order)
    cpu_one, cpu_two, cpu_start_one, cpu_start_two = (statistics.median(cpu for _, cpu in times[key]) for key in order)
    return {
        "kilobytes": kilobytes,
        "context": context,
        "rounds": rounds,
        "one": round(one, 2),
        "two": round(two, 2),
        "start one": round(start_one, 2),
        "start two": round(start_two, 2),
        "faster": round(one / two, 2),
        "faster without start": round((one - start_one) / (two - start_two), 2),
        "cpu one": round(cpu_one, 2),
        "cpu two": round(cpu_two, 2),
        # The speedup that CPU time alone allows on two idle cores, which share the work of two processes evenly.
        "cpu allows": round(2 * cpu_one / cpu_two, 2),
        "cpu allows without start": round(2 * (cpu_one - cpu_start_one) / (cpu_two - cpu_start_two), 2),
    }


def measure_ways(folder: Path, kilobytes: int, rounds: int, context: int) -> list[dict[str, object]]:
    """The least CPU seconds of a survey in each way, in turns, relative to attention weights without evidence."""
    import torch

    import headwise

    torch.set_num_threads(1)
    copy_corpus(folder / "corpus", kilobytes)
    model = headwise.load_builtin()
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, options in WAYS.items():
            start = time.process_time()
            found = headwise.survey(model, folder / "corpus", context=context, **options)
            seconds[name].append(time.process_time() - start)
    first = min(next(iter(seconds.values())))
    return [
        {"survey": name, "tokens": found.counts["tokens"], "cpu s": round(min(x), 2), "times": round(min(x) / first, 2)}
        for name, x in seconds.items()
    ]


def main() -> None:
    """Print a table and then one JSON object."""
    parser = harness.parser(__doc__)
    parser.add_argument("--kilobytes", type=int, default=200, help="amount of text (default 200)")
    parser.add_argument("--rounds", type=int, default=3, help="how often to run all commands (default 3)")
    parser.add_argument("--context", type=int, default=512, help="tokens per window (default 512)")
    parser.add_argument("--measures", action="store_true", help="compare what can be measured, in one process")
    options = parser.parse_args()
    if options.measures:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure_ways(Path(folder), options.kilobytes, options.rounds, options.context)
        harness.table("headwise survey, one thread", [[str(x) for x in row.values()] for row in rows], list(rows[0]))
        harness.finish("survey-measures", "cpu", rows)
        return
    with tempfile.TemporaryDirectory() as folder:
        row = measure(Path(folder), options.kilobytes, options.rounds, options.context)
    harness.table(
        "headwise survey, one thread per process", [[name, str(value)] for name, value in row.items()], ["", ""]
    )
    harness.finish("survey", "cpu", [row])


if __name__ == "__main__":
    main()
