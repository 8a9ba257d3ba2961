"""Nothing that a command prints is wider than the terminal, or than COLUMNS says if there is none."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headwise.cli import VERBS
from headwise.view.tokens import wide

pty = pytest.importorskip("pty", reason="this system has no pseudoterminals")

TEXT = "To be, or not to be, that is the question."
WIDE = "東京は日本の首都です。東京は大きい。 שלום 👩‍🚀 東京"
COMMANDS = [
    *([verb, "--help"] for verb in VERBS),
    ["--help"],
    ["--version"],
    ["view", TEXT, "--html", "heads.html"],
    ["view", WIDE, "--no-html"],
    ["view", TEXT, "--layer", "3"],
    ["view", WIDE, "--layer", "5"],
    ["view", WIDE, "--plain", "--no-html"],
    ["view", WIDE, "--head", "3.0", "--plain"],
    ["serve", "--no-open", "--port", "0", "--for", "0.1"],
    ["survey", "texts", "--context", "128", "--all"],
    ["survey", "texts", "--context", "32", "--importance"],
    ["heads", "--samples", "2", "--lengths", "64"],
    ["trace", "builtin", "The dog was named Barnaby. He called Barnaby", "--answer", "Barnaby", "--draws", "2"],
    ["trace", "builtin", WIDE, "--new", "2", "--draws", "2", "--html", "trace.html"],
    ["check", "--list"],
    ["steps", TEXT],
    ["steps", WIDE[:9]],
    ["steps"],
    ["steps", "--forms"],
    ["steps", "--model", "llama-3.1-8b", "--seq", "16"],
    ["cost", "--model", "gpt-oss-20b", "--seq", "32768", "--bandwidth", "4800", "--flops", "990"],
    ["cost", "--models"],
    ["course"],
    ["course", "--list"],
    ["course", "--card"],
    ["course", "4", "--hint"],
    ["course", "--interview", "--list"],
    ["quiz"],
    ["quiz", "--hint"],
    ["quiz", "--list"],
    ["bench", "--list"],
    ["bench", "--from", "bench.json"],
    ["generate", "It was", "--tokens", "8", "--temperature", "0"],
    ["inspect", "model.safetensors", "--heads", "4"],
    ["inspect", "model.safetensors"],
    ["tour", "--no-speed"],
]
WRONG = [
    ["view"],
    ["view", "--modle", "x"],
    ["view", "a", "--model", "nowhere"],
    ["view", "a", "--layer", "99"],
    ["view", "a", "--head", "3"],
    ["view", "a", "--html", "absent/heads.html"],
    ["survey", "nowhere"],
    ["heads", "bultin"],
    ["heads", "--lengths", "a,b"],
    ["trace", "builtin", "hello", "--answer", "bye"],
    ["check"],
    ["check", "a_file_with_quite_a_long_name_that_is_not_there.py"],
    ["steps", "a", "--form", "course"],
    ["steps", "--form", "corse"],
    ["cost", "--model", "gpt22"],
    ["cost", "--model", "gpt2", "--heads", "3"],
    ["course", "splitt"],
    ["bench", "--only", "nothing"],
    ["generate", "a", "--temperature", "-1"],
    ["inspect", "nowhere"],
    ["tour", "--heads", "5"],
    ["interview"],
    [WIDE.replace(" ", "") * 3],
]
DRIVER = """
import json, sys
from headwise.cli import main
for command in json.loads(sys.argv[1]):
    print("\\0" + json.dumps(command), flush=True)
    try:
        status = main(command)
    except SystemExit as ended:
        status = ended.code
    sys.stderr.flush()
    print(f"\\0{status}", flush=True)
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands read."""
    from safetensors.torch import save_file

    made = tmp_path_factory.mktemp("w")
    save_file(torch.nn.TransformerEncoderLayer(16, 4, 8).state_dict(), made / "model.safetensors")
    shutil.copy(Path(__file__).parents[2] / "benchmarks" / "results" / "bench-cpu.json", made / "bench.json")
    (made / "texts").mkdir()
    (made / "texts" / "sea.txt").write_text(f"The captain looked at the sea. {WIDE} It was a dark evening. " * 3)
    return made


def in_a_pipe(commands: list[list[str]], columns: int, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(commands)],
        cwd=folder, env=environment(folder, COLUMNS=str(columns)), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True,
    )  # fmt: skip
    return done.stdout.decode()


def in_a_terminal(commands: list[list[str]], columns: int, folder: Path) -> str:
    ours, theirs = pty.openpty()
    set_size(theirs, columns)
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(commands)],
        cwd=folder, env=environment(folder), stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    parts = []
    while part := read(ours):
        parts.append(part)
    os.close(ours)
    assert process.wait() == 0
    return b"".join(parts).decode()


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return kept | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "HOME": str(folder)} | more


def set_size(terminal: int, columns: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side is closed
        return b""


# Documents are set for 80 columns; messages and what has to do with a text adapt to fewer.
NARROW = [command for command in COMMANDS if command[0] in ("view", "survey") and "--help" not in command]


@pytest.mark.parametrize(
    ("run", "columns", "commands"),
    [(in_a_pipe, 80, COMMANDS + WRONG), (in_a_pipe, 67, NARROW + WRONG), (in_a_terminal, 80, COMMANDS + WRONG)],
    ids=["80 in a pipe", "67 in a pipe", "80 in a terminal"],
)
def test_no_command_prints_a_line_that_is_too_wide(run, columns, commands, folder, tmp_path):
    work = tmp_path / "w"
    shutil.copytree(folder, work)
    printed = ESCAPES.sub("", run(commands, columns, work).replace("\r\n", "\n"))
    parts = printed.split("\0")[1:]
    assert len(parts) == 2 * len(commands)
    too_wide = []
    for whole, status in zip(parts[::2], parts[1::2], strict=True):
        command, _, text = whole.partition("\n")
        assert int(status) == (2 if json.loads(command) in (*WRONG, ["inspect", "model.safetensors"]) else 0), whole
        assert text.strip(), command
        lines = [line for long in text.split("\n") for line in long.split("\r")]  # a status replaces its line
        too_wide += [(command, line) for line in lines if wide(line) > columns]
    assert not too_wide, "\n".join(f"{command}: {line}" for command, line in too_wide)
