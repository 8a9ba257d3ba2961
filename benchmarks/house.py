"""How the package is built, in numbers: its modules, repeated names, and how many files three ordinary calls cross.

    python benchmarks/house.py                        # this checkout
    PYTHONPATH=other/src python benchmarks/house.py   # another one

The last line is one JSON object.
"""

import ast
import itertools
import json
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import headwise

PACKAGE = Path(headwise.__file__).parent
TECHNICAL = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
SHORT = 60  # lines; a module below this rarely hides a decision

LEARNER = """
import math, torch
from torch import nn

class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.d = num_heads, d_model // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = (f(x).view(B, T, self.h, self.d).transpose(1, 2) for f in (self.q, self.k, self.v))
        w = (q @ k.transpose(-2, -1) / math.sqrt(self.d)).softmax(-1)
        return self.o((w @ v).transpose(1, 2).reshape(B, T, E))
"""


def modules() -> dict[str, ast.Module]:
    """Every module by its dotted name, parsed."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def importers(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Which modules import each module, lazily or not."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found[inner if inner in trees else node.module].add(name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.name].add(name)
    return found


def structure() -> dict[str, Any]:
    """Counts of modules, lines and names."""
    trees = modules()
    used = importers(trees)
    files = sorted(PACKAGE.rglob("*.py"))
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
    stems = Counter(path.stem for path in files if path.stem != "__init__")
    classes = Counter(node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef))
    return {
        "names at the root": sum(path.name not in TECHNICAL for path in PACKAGE.iterdir()),
        "modules": len(files),
        "lines": sum(lines),
        "median lines of a module": statistics.median(lines),
        f"modules under {SHORT} lines": sum(count < SHORT for count in lines),
        "modules with one importer": sum(len(used[name]) == 1 for name in trees),
        "repeated file names": sum(count > 1 for count in stems.values()),
        "repeated class names": sum(count > 1 for count in classes.values()),
    }


def crossings(call: Callable[[], object]) -> dict[str, int]:
    """Our functions called, the files they lie in, and how often control passes from one file to another."""
    calls: list[str] = []

    def record(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(PACKAGE)):
            calls.append(path)

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    switches = sum(one != other for one, other in itertools.pairwise(calls))
    return {"calls": len(calls), "files": len(set(calls)), "switches": switches}


def flows() -> dict[str, dict[str, int]]:
    """The three calls, each made once before it is counted, so that lazy imports and caches are not."""
    layer = headwise.MultiHeadAttention(64, 4, causal=True).eval()
    x = torch.randn(1, 64, 64)
    _, weights = layer(x, return_weights=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "attention.py"
        path.write_text(LEARNER)
        space: dict[str, Any] = {"__name__": "learner"}
        exec(compile(LEARNER, str(path), "exec"), space)  # noqa: S102
        tried: dict[str, Callable[[], object]] = {
            "layer(x, return_weights=True)": lambda: layer(x, return_weights=True),
            "weights.entropy()": weights.entropy,
            "headwise.check(a class of 15 lines)": lambda: headwise.check(space["MultiHeadAttention"]),
        }
        found = {}
        for name, call in tried.items():
            call()
            found[name] = crossings(call)
    return found


def main() -> None:
    """Print both tables and one JSON line."""
    built, followed = structure(), flows()
    for name, value in built.items():
        print(f"{name:40}{value:>10g}")
    for name, counts in followed.items():
        print(f"{name:40}" + "".join(f"{count:>10,} {what}" for what, count in counts.items()))
    print(json.dumps({"structure": built, "flows": followed}))


if __name__ == "__main__":
    main()
