"""Shared by all tests: seeds, the axes' sizes, and closeness measured against float64."""

import os

import pytest
import torch

os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "0")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
