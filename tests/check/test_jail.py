"""A hostile file reads nothing of yours, writes nothing, talks to nobody and leaves nothing running."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headwise.check import jail, sandbox
from headwise.check.report import Report
from headwise.check.templates import write

RIGHT = write("separate")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the jail is made of Linux system calls")

SCRIPT = """
import ctypes, json, os, signal, socket, subprocess, sys, threading
from headwise.check import jail

home, project, outside = sys.argv[1:4]
layers = jail.enter(home, [project])


def outcome(attempt):
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "done"


def call(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def thread():
    worker = threading.Thread(target=len, args=((),))
    worker.start()
    worker.join()


attempts = {
    "read a secret": lambda: open(outside + "/secret.txt").read(),
    "read the list of users": lambda: open("/etc/passwd").read(),
    "read a hidden file of the project": lambda: open(project + "/.env").read(),
    "list the folder of a secret": lambda: os.listdir(outside),
    "read another process": lambda: open(f"/proc/{PARENT}/environ").read(),
    "signal another process": lambda: os.kill(PARENT, 0),
    "write beside the project": lambda: open(outside + "/left.txt", "w"),
    "write into the project": lambda: open(project + "/left.txt", "w"),
    "change a file of the project": lambda: open(project + "/attention.py", "a"),
    "remove a file": lambda: os.remove(outside + "/secret.txt"),
    "open a socket": socket.socket,
    "open a local socket": lambda: socket.socket(socket.AF_UNIX),
    "fork": os.fork,
    "start a program": lambda: subprocess.run(["true"]),
    "mount": lambda: call("mount", b"tmpfs", home.encode(), b"tmpfs", 0, None),
    "enter a new namespace": lambda: call("unshare", 0x10000000),
    "trace": lambda: call("ptrace", 0, 0, 0, 0),
    "outlive its parent": lambda: call("prctl", 1, 0),
    # These must go on working.
    "write at home": lambda: open(home + "/kept.txt", "w").write("x"),
    "read the project": lambda: open(project + "/attention.py").read(),
    "start a thread": thread,
    "make a pipe": socket.socketpair,
}
PARENT = int(sys.argv[4])
print(json.dumps({"layers": layers, **{name: outcome(attempt) for name, attempt in attempts.items()}}))
"""
ALLOWED = ("write at home", "read the project", "start a thread", "make a pipe")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each attempt came to in a jailed process with an ordinary environment."""
    home, project, outside = (tmp_path_factory.mktemp(name) for name in ("home", "project", "outside"))
    (outside / "secret.txt").write_text("key")
    (project / ".env").write_text("key")
    (project / "attention.py").write_text("")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP")}
    command = [sys.executable, "-c", SCRIPT, str(home), str(project), str(outside), str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert (outside / "secret.txt").read_text() == "key"
    assert [p.name for p in outside.iterdir()] == ["secret.txt"]
    assert not list(home.iterdir()), "what is written at home is gone with the process"
    found = json.loads(done.stdout)
    if missing := jail.missing(found["layers"]):
        pytest.skip(f"this kernel does not offer every layer: code could {' and '.join(missing)}")
    return found


@LINUX
def test_every_attempt_on_what_is_not_the_learners_fails(outcomes):
    got_through = [name for name, result in outcomes.items() if result == "done" and name not in ALLOWED]
    assert got_through == []


@LINUX
def test_threads_pipes_the_project_and_the_home_still_work(outcomes):
    assert {name: outcomes[name] for name in ALLOWED} == dict.fromkeys(ALLOWED, "done")


def judged(folder: Path, source: str, **options) -> Report:
    path = folder / "attention.py"
    path.write_text(source)
    return sandbox.run(path, **options)


@LINUX
def test_a_report_says_which_layers_held(tmp_path):
    report = judged(tmp_path, RIGHT, require_jail=True)
    if report.verdict == "unknown":
        pytest.skip(report.doubts[0])
    assert report.jail == ["namespaces", "landlock", "seccomp", "limits"]
    assert str(report).endswith("jail    namespaces, landlock, seccomp, limits")
    assert report.to_dict()["jail"] == report.jail


def test_a_report_says_what_missing_layers_leave_open():
    weak = str(Report("right", jail=["seccomp", "limits"]))
    assert weak.endswith(
        "jail    seccomp, limits; the code could see other processes and outlive the check and read your files"
    )


def test_a_required_jail_that_cannot_be_built_refuses_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "KEPT", (*sandbox.KEPT, "HEADWISE_TEST"))
    path = tmp_path / "attention.py"
    path.write_text(RIGHT)
    child = (
        "import sys; from headwise.check import jail, sandbox; jail.enter = lambda *_, **__: ['limits']; sandbox.main()"
    )
    reading, writing = os.pipe()
    request = {"channel": writing, "requests": 0, "seconds": 20, "home": str(tmp_path), "readable": [],
               "starts_processes": False, "task": "headwise.check.sandbox:judge",
               "request": {"require_jail": True, "file": str(path)}}  # fmt: skip
    subprocess.run([sys.executable, "-c", child, json.dumps(request)], pass_fds=(writing,), check=True)
    os.close(writing)
    with os.fdopen(reading) as channel:
        told = [json.loads(line) for line in channel]
    assert told[-1]["report"]["doubts"] == [
        "a jail is required, and on this system the code could see other processes and outlive the check and read your "
        "files and open sockets and start processes"
    ]


LEAK = RIGHT.replace("batch = query.size(0)", "batch = query.size(0); raise ValueError(open({!r}).read())")


@LINUX
def test_a_secret_beside_the_project_does_not_reach_the_report(tmp_path):
    secret, project = tmp_path / "keys" / "secret.txt", tmp_path / "project"
    secret.parent.mkdir()
    secret.write_text("correct horse battery staple")
    project.mkdir()
    (project / "setup.py").write_text("")
    report = judged(project, LEAK.format(str(secret)))
    if "landlock" not in report.jail:
        pytest.skip("this kernel has no Landlock")
    assert "correct horse" not in json.dumps(report.to_dict())
    assert "Permission denied" in json.dumps(report.to_dict())


@LINUX
def test_no_connection_reaches_a_server_on_this_machine(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        visits = []
        stop = threading.Event()

        def listen():
            while not stop.is_set():
                try:
                    visits.append(server.accept())
                except TimeoutError:
                    continue

        listener = threading.Thread(target=listen)
        listener.start()
        code = f"""
import ctypes, socket
import _socket
try:
    plain = _socket.socket()
    plain.connect(("127.0.0.1", {server.getsockname()[1]}))
except OSError:
    pass
"""
        judged(tmp_path, RIGHT.replace("class MultiHead", f"class Visit:\n    exec({code!r})\n\n\nclass MultiHead"))
        stop.set()
        listener.join()
    assert visits == []


@LINUX
def test_nothing_outlives_the_time_limit(tmp_path):
    mark = f"{os.getpid()}.25"
    code = f"""
import os, subprocess, sys, time
os.setsid()
try:
    subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{mark}"])
except OSError:
    pass
time.sleep({mark})
"""
    start = time.monotonic()
    report = judged(
        tmp_path, RIGHT.replace("class MultiHead", f"class Stay:\n    exec({code!r})\n\n\nclass MultiHead"), seconds=3
    )
    assert report.verdict == "unknown"
    assert time.monotonic() - start < 20
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout  # noqa: S607
    assert mark not in running
