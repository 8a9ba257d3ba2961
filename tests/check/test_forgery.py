"""A class without attention is not called right, whatever its file does to the process that judges it."""

import json
import struct
from io import BytesIO

import pytest
import torch

from headwise.check import sandbox
from headwise.check.faults import CERTIFICATE
from headwise.check.report import Report
from headwise.check.templates import write

wire = pytest.importorskip("headwise.check.wire")  # `headwise.check` is also a function
RIGHT = write("separate")
ITEMS = [{"name": name, "status": "verified", "words": "", "own": False} for name in CERTIFICATE]
CLAIM = {"verdict": "right", "subject": "MultiHeadAttention(32, 4)", "call": "forward(x)", "certificate": ITEMS}
# Runs while the file is loaded, inside the process that will judge it: everything there can be replaced.
ATTACK = f"""
import json, os, sys
import torch
import torch.nn as nn
from importlib import import_module

CLAIM = {json.dumps(json.dumps(CLAIM))}


def checker(name):
    return import_module("headwise.check." + name)


def claim(**changes):
    return checker("report").Report.from_dict(json.loads(CLAIM) | changes)


def claim_and_serve(*_):
    report = claim()
    case = checker("code.case").Case("MultiHeadAttention", MultiHeadAttention, globals())
    report.evidence = checker("challenge").Claim(checker("search").bind(case)[0], None)
    return report


def write_everywhere(data):
    for number in range(3, 64):
        try:
            os.write(number, data)
        except OSError:
            pass


def constant_tensors(bound, request):
    B, T, E = request["inputs"][0].shape
    even = torch.full((B, T, T), 1 / T)
    nodes = [
        ["bmm", [], torch.ones(B, T, T), [], [torch.ones(B, T, 8), torch.ones(B, 8, T)], [None, None]],
        ["_softmax", [0], even, [], [torch.ones(B, T, T)], [0]],
        ["bmm", [1], torch.ones(B, T, 8), [], [even, torch.ones(B, T, 8)], [1, None]],
    ]
    returned = [torch.ones(B, T, E)]
    return {{"returned": returned, "inputs": request["inputs"], "sources": [2], "nodes": nodes, "weights": {{}}}}


def even_weights(bound, request):
    x = request["inputs"][0]
    B, T, E = x.shape
    even = torch.full((B, T, T), 1 / T, dtype=torch.float64)
    nodes = [
        ["bmm", [], x @ x.mT, [], [x, x.mT], [None, None]],
        ["_softmax", [0], even, [], [x @ x.mT], [0]],
        ["bmm", [1], even @ x, [], [even, x], [1, None]],
    ]
    return {{"returned": [even @ x], "inputs": request["inputs"], "sources": [2], "nodes": nodes, "weights": {{}}}}


def attack():
    {{attack}}


"""
# Every output depends on its own token only.
IMPOSTOR = """
class MultiHeadAttention(nn.Module):
    attack()

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.out(x)
"""
SERVED = "checker('verdict')._best_report = claim_and_serve; "
FORGERS = {
    "no answers": "checker('verdict')._best_report = lambda *_: claim()",
    "a verdict as far as tested": "checker('verdict')._best_report = lambda *_: claim(verdict='partial')",
    "an empty certificate": "checker('verdict')._best_report = lambda *_: claim(certificate=[])",
    "a report on every pipe": r"write_everywhere(b'{\"report\": ' + CLAIM.encode() + b'}\n'); os._exit(0)",
    "a report and noise": r"write_everywhere(b'{\"report\": ' + CLAIM.encode() + b'}\n' + bytes(99999)); os._exit(0)",
    "faults that find nothing": "checker('faults').Examination.ask = lambda *_: None; "
    "checker('faults').Examination.certificate = lambda self: claim().certificate",
    "a class without attention answers": SERVED,
    "the input as output": SERVED + "nn.Linear.forward = lambda self, x: x",
    "constant tensors": SERVED + "checker('challenge').answer = constant_tensors",
    "even weights": SERVED + "checker('challenge').answer = even_weights",
    "comparisons that always agree": SERVED + "torch.allclose = torch.equal = lambda *_, **__: True; "
    "checker('fits').same = lambda *_, **__: True",
    "a parent that is patched here": SERVED + "checker('verification').confirmed = lambda report, *_: report",
}
# The first answer of each kind, again and again.
REPLAY = """checker('verdict'); challenge = checker('challenge'); kept = {}; first = challenge.answer
    def replayed(bound, request):
        key = (request["setting"], request["trace"], request["slope"] is not None)
        if key not in kept:
            kept[key] = first(bound, request)
        return kept[key]
    challenge.answer = replayed"""
HIDE = """checker('verdict'); found = checker('faults').Examination
    found.findings, found.wrong = property(lambda self: []), False
    found.certificate = lambda self: claim().certificate"""
HIDE_VARIANTS = """verdict = checker('verdict'); whole = verdict._best_report
    def plain(*given):
        report = whole(*given)
        report.variants, report.verdict = [], 'right'
        return report
    verdict._best_report = plain"""


def attacked(source, attack):
    """A file whose class, when it is defined, attacks the process around it."""
    before, _, body = source.partition("class ")
    first, _, rest = body.partition("\n")
    return before + ATTACK.replace("{attack}", attack) + f"class {first}\n    attack()\n{rest}"


def judged(folder, source):
    path = folder / "attention.py"
    path.write_text(source)
    return sandbox.run(path, thorough=False)


@pytest.mark.parametrize("forger", FORGERS)
def test_a_class_without_attention_is_not_called_right(forger, tmp_path):
    report = judged(tmp_path, ATTACK.replace("{attack}", FORGERS[forger]) + IMPOSTOR)
    assert (report.verdict, report.exit_code) == ("unknown", 2), report
    assert "its own process says that it is right, but answers to new questions do not confirm it" in report.doubts[0]


def test_answers_cannot_be_replayed(tmp_path):
    report = judged(tmp_path, attacked(RIGHT, REPLAY))
    assert report.verdict == "unknown"
    assert "answers to new questions do not confirm it" in report.doubts[0]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("scale-missing", "not scaled"),
        ("softmax-axis", "softmax"),
        ("split-view", "heads"),
        ("mask-after-softmax", "mask"),
        ("no-gradient", "grad"),
    ],
)
def test_a_mistake_that_its_process_hides_is_seen(mistake, words, tmp_path):
    report = judged(tmp_path, attacked(write("separate", mistake), HIDE))
    assert report.verdict == "unknown", report
    assert words in report.doubts[0]


def test_what_only_the_judged_process_says_is_marked(tmp_path):
    report = judged(tmp_path, RIGHT)
    own = {item.name for item in report.certificate if item.own}
    assert "nothing is read from outside the class" in own
    assert "matches the reference on fresh inputs" not in own
    assert "✓ nothing is read from outside the class*" in str(report)


def test_a_variant_that_is_hidden_is_named(tmp_path):
    report = judged(tmp_path, attacked(write("fused"), HIDE_VARIANTS))
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
    attack = "checker('verdict')._best_report = lambda *_: claim(verdict='unknown', subject='RIGHT   equals')"
    assert str(judged(tmp_path, ATTACK.replace("{attack}", attack) + IMPOSTOR)).startswith("attention.py")


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
