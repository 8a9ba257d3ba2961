"""`headwise survey`: what every attention head does over a whole corpus."""

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch

from headwise.cli.console import (
    MODEL_HELP,
    add_json,
    check_at_least_one,
    check_file,
    check_seconds,
    print_json,
    say,
    write_file,
)
from headwise.errors import OptionError, printable
from headwise.models import open_model
from headwise.study.survey.job import SurveyJob, processes_from_environment
from headwise.study.survey.measures import PASSAGES, WAYS, Measures
from headwise.study.survey.result import Survey, many
from headwise.study.survey.statistics import OwnStatistic, own_statistics
from headwise.view.survey import drawn_survey, page

EXAMPLES = """examples:
  headwise survey texts --context 128
  headwise survey texts corpus.jsonl --out survey.json --resume
  headwise survey corpus.jsonl --column text --out survey.parquet --batch 4
  headwise survey texts --html survey.html
  headwise survey texts --by value --importance --evidence 5
"""
SKIPPED = 3  # exit status if some documents could not be read
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("files", nargs="+", type=Path, help="text files, JSONL, Parquet, or folders of them")
    parser.add_argument("--model", default="builtin", help=MODEL_HELP)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="save as .parquet or .json; a journal beside it allows --resume"
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted survey, if there is one")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens per window (default: the model's, at most 1024)",
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="windows per batch")
    parser.add_argument("--column", default="text", metavar="NAME", help="text field in JSONL and Parquet files")
    parser.add_argument(
        "--by",
        choices=WAYS,
        default="weight",
        help="measure attention weights, weights scaled by what their values write, or shares of what heads write",
    )
    parser.add_argument(
        "--statistic",
        action="append",
        default=[],
        metavar="FILE.py:NAME",
        help="also measure a statistic of your own; runs that Python file; may be repeated",
    )
    parser.add_argument("--importance", action="store_true", help="also measure how much the loss depends on each head")
    parser.add_argument(
        "--evidence", type=int, default=PASSAGES, metavar="N", help="passages to keep per head and number; 0 keeps none"
    )
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the model")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads per process")
    parser.add_argument("--save-every", type=float, default=10, metavar="SECONDS", help="time between saves")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with every head")
    parser.add_argument("--all", action="store_true", help="print every head, not only the most distinctive ones")
    add_json(parser, "a table")
    parser.add_argument("--strict", action="store_true", help="end with an error at the first text that is skipped")
    parser.add_argument(
        "--allow-skips", "--skipped-is-fine", action="store_true", help="exit with 0 even if texts were skipped"
    )


def run(options: argparse.Namespace) -> int:
    """Run the survey and print it. Exit status 3: done, but some documents could not be read."""
    check_at_least_one("--threads", options.threads)
    check_seconds("--save-every", options.save_every)
    check_file("--html", options.html)
    torch.set_num_threads(options.threads)
    processes = processes_from_environment()
    statistics = own_statistics([OwnStatistic.from_file(place) for place in options.statistic])
    measures = Measures(options.by, statistics, options.importance, options.evidence)
    model = open_model(options.model, device=_device(options.device), dtype=DTYPES[options.dtype], both=True)
    sizes = {"context": options.context, "batch": options.batch, "column": options.column}
    job = SurveyJob.of(model, options.files, **sizes, strict=options.strict, measures=measures)
    stream = sys.stderr if processes.rank == 0 else None
    found = job.run(options.out, processes=processes, resume=options.resume, every=options.save_every, stream=stream)
    if found is None:
        return 0
    _print(found, options)
    if not found.skipped or options.allow_skips:
        return 0
    count = max(found.counts["skipped"], len(found.skipped))
    lost = f"{many(count, 'document')} {'was' if count == 1 else 'were'} skipped"
    say(f"done; {lost}, so the exit status is {SKIPPED} (--allow-skips: 0)")
    return SKIPPED


def _print(found: Survey, options: argparse.Namespace) -> None:
    if options.json:
        print_json(found.to_dict())
    else:
        print(drawn_survey(found, max(40, shutil.get_terminal_size((120, 24)).columns), every_head=options.all))
    if options.out is not None:
        print(f"wrote {printable(str(options.out))}", file=sys.stderr)
    if options.html is not None:
        write_file("--html", options.html, page(found))


def _device(name: str | None) -> torch.device:
    """The device that was named, or a GPU if there is one; each process takes its own GPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % max(torch.cuda.device_count(), 1)}"
    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"--device {name}: {str(error).partition(chr(10))[0]}") from error
