"""A class without attention is not called right, whatever its file does to the process that judges it."""

import json
import struct
from io import BytesIO

import pytest
import torch

from headwise.check import sandbox
from headwise.check.faults import CERTIFICATE
from headwise.check.report import POSITIVE, Report
from headwise.check.templates import write

wire = pytest.importorskip("headwise.check.wire")  # `headwise.check` is also a function
RIGHT = write("separate")
# Every output depends on its own token only.
IMPOSTOR = """
import json, os, struct, sys
import torch
import torch.nn as nn

class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.out(x)
"""
ITEMS = [{"name": name, "status": "verified", "words": "", "own": False} for name in CERTIFICATE]
CLAIM = {"verdict": "right", "subject": "MultiHeadAttention(32, 4)", "call": "forward(x)", "certificate": ITEMS}
MACHINERY = f"""
CLAIM = json.loads({json.dumps(CLAIM)!r})
from headwise.check.report import Item, Report

def claim(**changes):
    return Report.from_dict(CLAIM | changes)
"""
PIPES = """
def pipes():
    found = []
    for number in range(3, 64):
        try:
            found.append(number) if os.readlink(f"/proc/self/fd/{number}").startswith("pipe") else None
        except OSError:
            pass
    return found
"""
# Judged by the checker's own machinery, whose parts are replaced.
SERVED = """
import headwise.check.verdict
from headwise.check import challenge
from headwise.check.binding import bind
from headwise.check.code.loader import Case

def bound():
    return bind(Case("MultiHeadAttention", MultiHeadAttention, globals()))[0]

def forge(*_, **__):
    report = claim()
    report.evidence = challenge.Evidence(bound(), None)
    return report

headwise.check.verdict.judge_file = headwise.check.verdict.judge = forge
"""
FORGERS = {
    "no answers": "headwise_verdict = __import__('importlib').import_module('headwise.check.verdict')\n"
    "headwise_verdict._best_report = lambda *_: claim()\n",
    "a report written to the pipe": PIPES
    + "for number in pipes():\n"
    "    try:\n        os.write(number, json.dumps({'report': CLAIM}).encode() + b'\\n')\n"
    "    except OSError:\n        pass\n"
    "os._exit(0)\n",
    "a report and noise": PIPES
    + "for number in pipes():\n"
    "    try:\n        os.write(number, json.dumps({'report': CLAIM}).encode() + b'\\n' + bytes(range(256)) * 64)\n"
    "    except OSError:\n        pass\n"
    "os._exit(0)\n",
    "a verdict as far as tested": "headwise_verdict = __import__('importlib').import_module('headwise.check.verdict')\n"
    "headwise_verdict._best_report = lambda *_: claim(verdict='partial')\n",
    "no fault is ever asked": "faults = __import__('importlib').import_module('headwise.check.faults')\n"
    "verdict = __import__('importlib').import_module('headwise.check.verdict')\n"
    "faults.Examination.ask = lambda *_: None\n"
    "faults.Examination.certificate = lambda self: claim().certificate\n",
    "honest answers of a class without attention": SERVED.replace(
        "headwise.check.verdict.judge_file = headwise.check.verdict.judge = forge",
        "headwise.check.verdict._best_report = forge",
    ),
    "constant tensors": SERVED.replace(
        "headwise.check.verdict.judge_file = headwise.check.verdict.judge = forge",
        "headwise.check.verdict._best_report = forge\n"
        "def constant(bound, request):\n"
        "    x = request['inputs'][0]\n"
        "    nodes = [['bmm', [], torch.ones(53, 5, 5), [], [torch.ones(53, 5, 8), torch.ones(53, 8, 5)], [None, None]],\n"
        "             ['_softmax', [0], torch.full((53, 5, 5), 0.2), [], [torch.ones(53, 5, 5)], [0]],\n"
        "             ['bmm', [1], torch.ones(53, 5, 8), [], [torch.full((53, 5, 5), 0.2), torch.ones(53, 5, 8)], [1, None]]]\n"
        "    return {'returned': [torch.ones_like(x)], 'inputs': [x] * 3, 'sources': [2], 'nodes': nodes, 'weights': {}}\n"
        "challenge.answer = constant\n",
    ),
    "the input as output": SERVED.replace(
        "headwise.check.verdict.judge_file = headwise.check.verdict.judge = forge",
        "headwise.check.verdict._best_report = forge\nMultiHeadAttention.forward = lambda self, x: x",
    ),
    "comparisons that always agree": "torch.allclose = torch.equal = lambda *_, **__: True\n"
    "fits = __import__('importlib').import_module('headwise.check.fits')\n"
    "fits.same = lambda *_, **__: True\n"
    "verdict = __import__('importlib').import_module('headwise.check.verdict')\n"
    "verdict._best_report = lambda *_: claim()\n",
}
# Real attention judged once, then a class without it answers: replayed from what was seen, or by another class.
REPLAY = """
from headwise.check import challenge
kept = {}
first = challenge.answer

def replayed(bound, request):
    key = (request["setting"], bool(request["trace"]), request["slope"] is not None)
    if key not in kept:
        kept[key] = first(bound, request)
    return kept[key]

challenge.answer = replayed
"""


def judged(folder, source):
    path = folder / "attention.py"
    path.write_text(source)
    return sandbox.run(path, thorough=False)


@pytest.mark.parametrize("forger", FORGERS)
def test_a_class_without_attention_is_not_called_right(forger, tmp_path):
    report = judged(tmp_path, IMPOSTOR + MACHINERY + FORGERS[forger])
    assert report.verdict not in POSITIVE, report
    assert report.exit_code != 0


def test_answers_cannot_be_replayed(tmp_path):
    assert judged(tmp_path, RIGHT).verdict == "right"
    report = judged(tmp_path, RIGHT + REPLAY)
    assert report.verdict == "unknown"
    assert "answers to new questions do not confirm it" in report.doubts[0]


@pytest.mark.parametrize(
    "fault",
    ["scale-missing", "softmax-axis", "split-view", "mask-after-softmax", "merge-view", "gradient-cut"],
)
def test_a_mistake_that_its_process_hides_is_not_called_right(fault, tmp_path):
    hides = "\nfaults = __import__('importlib').import_module('headwise.check.faults')\n"
    hides += "mistakes = __import__('importlib').import_module('headwise.check.mistakes')\n"
    hides += "verdict = __import__('importlib').import_module('headwise.check.verdict')\n"
    hides += "faults.Examination.findings = verdict.Examination.findings = property(lambda self: [])\n"
    hides += "faults.Examination.certificate = lambda self: claim().certificate\n"
    source = write("separate", fault)
    report = judged(tmp_path, "import json\n" + source + MACHINERY + hides)
    assert report.verdict not in POSITIVE, report


def test_what_only_the_judged_process_says_is_marked(tmp_path):
    report = judged(tmp_path, RIGHT)
    own = {item.name for item in report.certificate if item.own}
    assert "nothing is read from outside the class" in own
    assert "matches the reference on fresh inputs" not in own
    assert "✓ in its own process: nothing is read from outside the class" in str(report)


def test_a_variant_that_is_hidden_is_named(tmp_path):
    source = "import json\n" + write("fused") + MACHINERY
    source += "verdict = __import__('importlib').import_module('headwise.check.verdict')\n"
    source += "whole = verdict._best_report\n"
    source += "def plain(*given):\n    report = whole(*given)\n    report.variants = []\n    report.verdict = 'right'\n"
    source += "    return report\nverdict._best_report = plain\n"
    report = judged(tmp_path, source)
    assert (report.verdict, report.variants) == ("variant", ["a built-in causal mask"])


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "splendid"},
        {"variants": "none"},
        {"doubts": [["nested"]]},
        {"findings": [{"name": "no-such-mistake", "severity": "wrong", "detail": "", "text": ""}]},
        {"certificate": [{"name": "x", "status": "excellent", "words": ""}]},
        {"stops": "9"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_report_that_is_not_one_of_ours_is_refused(change):
    assert Report.from_dict(CLAIM).verdict == "right"
    with pytest.raises(ValueError, match="a report"):
        Report.from_dict(CLAIM | change)


def test_a_subject_cannot_read_like_a_verdict(tmp_path):
    source = IMPOSTOR + MACHINERY + "verdict = __import__('importlib').import_module('headwise.check.verdict')\n"
    source += "verdict._best_report = lambda *_: claim(verdict='unknown', subject='RIGHT   equals the reference')\n"
    assert str(judged(tmp_path, source)).startswith("attention.py")


# The messages between the two processes.


def test_messages_carry_data_and_tensors_of_every_type():
    message = {
        "a": [torch.randn(2, 3), torch.arange(5), torch.tensor([True, False])],
        "b": {"c": 1.5, "d": None, "e": "text"},
        "empty": torch.zeros(0, 7),
        "complex": torch.randn(3, dtype=torch.complex128),
    }
    stream = BytesIO()
    wire.send(stream, message)
    stream.seek(0)
    got = wire.receive(stream)
    assert got["b"] == message["b"]
    assert all(torch.equal(x, y) for x, y in zip(got["a"], message["a"], strict=True))
    assert got["empty"].shape == (0, 7)
    assert torch.equal(got["complex"], message["complex"])


def test_a_tensor_that_occurs_twice_stays_one_tensor():
    x, stream = torch.randn(3), BytesIO()
    wire.send(stream, [x, x])
    stream.seek(0)
    first, second = wire.receive(stream)
    assert first is second


def framed(told, data=b""):
    text = told if isinstance(told, bytes) else json.dumps(told).encode()
    return BytesIO(struct.pack(">QQ", len(text), len(data)) + text + data)


@pytest.mark.parametrize(
    "stream",
    [
        BytesIO(b""),
        BytesIO(struct.pack(">QQ", 2**62, 0)),
        BytesIO(struct.pack(">QQ", 10, 2**62)),
        framed(b"[" * 200_000),
        framed({"message": 1}),
        framed({"message": {"tensor#": 0}, "tensors": []}),
        framed({"message": {"tensor#": -1}, "tensors": [["float64", [2]]]}, bytes(16)),
        framed({"message": 1, "tensors": [["float64", [3]]]}, bytes(16)),
        framed({"message": 1, "tensors": [["float64", [-1]]]}, bytes(16)),
        framed({"message": 1, "tensors": [["float64", [2**40, 2**40]]]}, bytes(16)),
        framed({"message": 1, "tensors": [["object", [2]]]}, bytes(16)),
        framed({"message": 1, "tensors": []}, bytes(16)),
    ],
)
def test_a_damaged_message_is_refused(stream):
    with pytest.raises(wire.WireError):
        wire.receive(stream)
