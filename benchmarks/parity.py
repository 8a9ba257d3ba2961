"""Show how close the layer is to the attention of every model in transformers that it is tested against.

    python benchmarks/parity.py           # all models
    python benchmarks/parity.py -k llama  # some: options of pytest

It runs the tests of tests/models that hold the layer against transformers, and records the largest difference that
their comparisons of outputs see, in float64 where the model allows it. The last line is one JSON object.
"""

import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import harness
import pytest
import torch
from torch import Tensor

import closeness

TESTS = Path(__file__).resolve().parents[1] / "tests" / "models"
FILES = ("test_models.py", "test_parts.py", "test_latent_models.py")
COMPARISONS = ((torch.testing, "assert_close"), (closeness, "assert_close_to_truth"))
MODEL = re.compile(r"\[(?:static-|growing-)?([^\]]+?)(?:-static|-growing)?\]")


class Recorder:
    """A pytest plugin that notes the largest difference between two tensors that each test compares."""

    def __init__(self) -> None:
        self.current = ""
        self.largest: dict[str, float] = {}
        self.tests: dict[str, int] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        """Record while a test runs."""
        found = MODEL.search(item.name)
        self.current = found.group(1) if found else item.name.removeprefix("test_")
        self.tests[self.current] = self.tests.get(self.current, 0) + 1
        with contextlib.ExitStack() as patches:
            for place, name in COMPARISONS:
                compare = self.recording(getattr(place, name))
                for module in {place, item.module} if hasattr(item.module, name) else {place}:  # type: ignore[attr-defined]
                    patches.enter_context(mock.patch.object(module, name, compare))
            return (yield)

    def recording(self, compare: Callable[..., None]) -> Callable[..., None]:
        """The same comparison, noted."""

        def recorded(actual: Any, expected: Any, *rest: Any, **options: Any) -> None:
            if isinstance(actual, Tensor) and isinstance(expected, Tensor) and actual.shape == expected.shape:
                gap = (actual.double() - expected.double()).abs()
                worst = float(gap.max()) if gap.numel() else 0.0
                self.largest[self.current] = max(worst, self.largest.get(self.current, 0.0))
            compare(actual, expected, *rest, **options)

        return recorded


def main() -> int:
    """Run the tests, then print the table; pytest's exit status."""
    recorder = Recorder()
    files = [str(TESTS / name) for name in FILES if (TESTS / name).exists()]
    status = pytest.main([*files, "-q", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[recorder])
    rows = [
        {"model": model, "tests": recorder.tests[model], "largest difference": worst}
        for model, worst in recorder.largest.items()
    ]
    shown = [[row["model"], str(row["tests"]), f"{row['largest difference']:.1e}"] for row in rows]
    harness.table("largest difference from transformers", shown, ["model", "tests", "difference"])
    harness.finish("parity", "cpu", rows)
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
