"""Measure the peak memory of a survey of one long document: a text file, one line of JSONL, one Parquet value.

    python benchmarks/survey_memory.py                   a document of 50 MB
    python benchmarks/survey_memory.py --megabytes 5     a shorter one

Every survey runs in a process of its own. All windows are cut, but only the first three batches go through the model:
the others need no more memory, and would take hours.
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import harness

KINDS = ("short text", "text", "jsonl", "parquet")
BATCHES = 3


def write_corpus(folder: Path, megabytes: int) -> dict[str, Path]:
    """The same document in every kind of file."""
    import pyarrow
    from pyarrow import parquet

    line = "The captain looked at the sea, and the sea looked at the captain; number {:,} said nothing.\n"
    text = "".join(map(line.format, range(megabytes * 1_000_000 // 100)))
    files = {kind: folder / f"a.{kind.replace(' ', '')}" for kind in KINDS}
    files["short text"].write_text(text[:40_000])
    files["text"].write_text(text)
    files["jsonl"].write_text(json.dumps({"text": text}) + "\n")
    parquet.write_table(pyarrow.table({"text": [text]}), files["parquet"])
    return files


def measure_here(file: Path) -> None:
    """Survey a file in this process, and print the windows and the peak memory in MB."""
    import torch

    from headwise.models import open_model
    from headwise.study.survey.job import SurveyJob
    from headwise.study.survey.measures import Measures

    torch.set_num_threads(1)
    real, calls = Measures.of, []

    def some(*arguments: object) -> dict[str, object]:
        calls.append(1)
        return real(*arguments) if len(calls) <= BATCHES else {}

    Measures.of = some
    survey = SurveyJob.of(open_model("builtin", dtype=torch.float32), [file]).run()
    print(survey.counts["windows"], peak_memory())


def peak_memory() -> int:
    """The peak memory of this process in MB. On Linux, `getrusage` may give that of the process that started it."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Print a table and then one JSON object."""
    parser = harness.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=50, help="size of the document (default 50)")
    parser.add_argument("--here", type=Path, help="survey this file in this process")
    options = parser.parse_args()
    if options.here is not None:
        measure_here(options.here)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, file in write_corpus(Path(folder), options.megabytes).items():
            command = [sys.executable, __file__, "--here", str(file)]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            rows.append({"file": kind, "windows": int(told[0]), "MB": int(told[1])})
    harness.table("headwise survey, one document", [[str(x) for x in row.values()] for row in rows], list(rows[0]))
    harness.finish("survey-memory", "cpu", rows)


if __name__ == "__main__":
    main()
