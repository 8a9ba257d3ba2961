"""`headwise survey`: what every head does over a whole corpus."""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import torch

from headwise.cli.terminal import write_page
from headwise.errors import OptionError
from headwise.models import open_model
from headwise.study.survey.job import SurveyJob
from headwise.study.survey.processes import processes_from_environment
from headwise.study.survey.result import Survey, many
from headwise.view.survey_terminal import drawn

SUMMARY = "what every head of a model does over a whole corpus; several processes by torchrun"
EXAMPLES = """examples:
  headwise survey texts --context 128
  headwise survey texts corpus.jsonl --out survey.json --resume
  headwise survey corpus.jsonl --column text --out survey.parquet --html survey.html --batch 4
"""
SKIPPED = 3  # the exit status where some documents could not be read
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("files", nargs="+", type=Path, help="text files, JSONL, Parquet, or folders of them")
    parser.add_argument(
        "--model",
        default="builtin",
        help="builtin, a folder that examples/train_gpt.py wrote, or a transformers model's folder (default builtin)",
    )
    parser.add_argument("--out", type=Path, help="the result, .parquet or .json; its journal lies beside it meanwhile")
    parser.add_argument("--resume", action="store_true", help="go on where a killed survey was, if there is one")
    parser.add_argument(
        "--context", type=int, help="tokens of a window; longer documents are cut (default the model's, at most 1024)"
    )
    parser.add_argument("--batch", type=int, default=8, help="windows looked at together (default 8)")
    parser.add_argument("--column", default="text", help="where JSONL and Parquet have the text (default text)")
    parser.add_argument("--device", help="cpu or cuda (default cuda where there is one)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default float32)")
    parser.add_argument(
        "--threads", type=int, default=1, help="of each process on the CPU (default 1; torchrun shares out cores)"
    )
    parser.add_argument("--save-every", type=float, default=10.0, help="seconds between saves (default 10)")
    parser.add_argument("--html", type=Path, help="write one page with every head")
    parser.add_argument("--all", action="store_true", help="every head in the table, not the most telling")
    parser.add_argument("--json", action="store_true", help="print all numbers as one JSON object")
    parser.add_argument("--skipped-is-fine", action="store_true", help="end with 0 although documents were skipped")


def run(options: argparse.Namespace) -> int:
    """Survey, print. Exit status 3: done, and some documents could not be read."""
    if options.threads < 1:
        raise OptionError(f"--threads {options.threads}: expected 1 or more.")
    torch.set_num_threads(options.threads)
    processes = processes_from_environment()
    model = open_model(options.model, device=_device(options.device), dtype=DTYPES[options.dtype], encoder=False)
    job = SurveyJob.of(model, options.files, context=options.context, batch=options.batch, column=options.column)
    found = job.run(
        options.out,
        processes=processes,
        resume=options.resume,
        every=options.save_every,
        stream=sys.stderr if processes.rank == 0 else None,
    )
    if found is None:
        return 0
    _print(found, options)
    if not found.skipped or options.skipped_is_fine:
        return 0
    count = found.counts["skipped"]
    lost = f"{many(count, 'document')} {'was' if count == 1 else 'were'} skipped"
    print(f"done; {lost}, so the exit status is {SKIPPED} (--skipped-is-fine: 0)", file=sys.stderr)
    return SKIPPED


def _print(found: Survey, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        print(drawn(found, max(40, shutil.get_terminal_size((120, 24)).columns), every_head=options.all))
    if options.out is not None:
        print(f"wrote {options.out}", file=sys.stderr)
    if options.html is not None:
        write_page(options.html, found.to_html())


def _device(name: str | None) -> torch.device:
    """What was named, or a GPU where there is one; of several, each process takes its own."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % max(torch.cuda.device_count(), 1)}"
    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"--device {name}: {str(error).partition(chr(10))[0]}") from error
