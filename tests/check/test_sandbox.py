"""A file may do anything: the answer is a report, in time, and nothing else happens."""

import time

import pytest

from headwise.check import sandbox
from headwise.check.templates import write

RIGHT = write("separate")
IN_FORWARD = RIGHT.replace("batch = query.size(0)", "batch = query.size(0); {}")


def run(folder, source, **options):
    path = folder / "attention.py"
    path.write_text(source)
    return sandbox.run(path, thorough=False, **options)


def test_a_right_file_is_right_and_progress_is_told(tmp_path):
    stages = []
    report = run(tmp_path, RIGHT, progress=stages.append)
    assert report.verdict == "right"
    assert stages[0] == "starting"
    assert stages[-1] == "probing"


def test_a_page_with_a_right_class_is_confirmed_from_outside(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Attention\n\nIt isn't hard:\n\n```python\n{write('separate')}```\n")
    assert sandbox.run(page).verdict == "right"


def test_a_fault_comes_through_with_line_and_words(tmp_path):
    report = run(tmp_path, write("fused", "scale-missing"))
    assert report.cause == "scale-missing"
    assert report.findings[0].text == "att = (q @ k.transpose(-2, -1))"


def test_an_endless_loop_is_stopped(tmp_path):
    start = time.monotonic()
    report = run(tmp_path, IN_FORWARD.format("[None for _ in iter(int, 1)]"), seconds=5)
    assert report.verdict == "unknown"
    assert "an endless loop, or too much work" in report.doubts[0]
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("exit(0)", "ended the program"),
        ("__import__('os')._exit(7)", "ended the process with status 7"),
        ("__import__('ctypes').string_at(0)", "SIGSEGV"),
        ("bytearray(10**11)", "memory"),
    ],
    ids=["exit", "hard exit", "crash", "memory"],
)
def test_a_file_that_ends_its_process_is_not_judged(code, words, tmp_path):
    report = run(tmp_path, IN_FORWARD.format(code))
    assert report.verdict == "unknown", report
    assert words in " ".join(report.doubts + report.tried), report


def test_there_is_no_network(tmp_path):
    code = "import urllib.request; urllib.request.urlopen('http://example.com', timeout=3)"
    report = run(tmp_path, IN_FORWARD.format(code))
    assert report.verdict != "right"
    assert "without a network" in " ".join(report.tried + [f.detail for f in report.findings] + report.doubts)


STAYS_INSIDE = """import os
        print('x' * 10**7)
        open(os.path.expanduser('~/left.txt'), 'w').write('x'); assert 'left.txt' in os.listdir()"""


def test_megabytes_of_output_are_swallowed_and_files_are_temporary(tmp_path, capfd):
    assert run(tmp_path, IN_FORWARD.format(STAYS_INSIDE)).verdict == "right"
    assert capfd.readouterr().out == ""
    assert [p.name for p in tmp_path.iterdir()] == ["attention.py"]


def test_a_missing_file_is_answered(tmp_path):
    report = sandbox.run(tmp_path / "nowhere.py")
    assert report.doubts == [f"there is no file {tmp_path / 'nowhere.py'}"]


def test_build_and_call_are_obeyed_and_their_faults_answered(tmp_path):
    told = run(tmp_path, RIGHT, build="MultiHeadAttention(E, H)", call="m(q, k, v, mask)")
    assert (told.verdict, told.subject) == ("right", "MultiHeadAttention(E, H)")
    report = run(tmp_path, RIGHT, build="MultiHeadAttention(1, 2, 3, 4)")
    assert "--build 'MultiHeadAttention(1, 2, 3, 4)' raises TypeError" in report.doubts[0]
