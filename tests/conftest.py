"""Shared by all tests: one seed, a browser, and GPU tests skipped where there is no GPU."""

import gc
import os
import shutil
import sys

import pytest
import torch
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine is no mistake
settings.load_profile("untimed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Readline, which pytest imports, sets these for every process that tests start, and messages would be wrapped.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
    os.unsetenv(name)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def stderr_stays_open():
    """keras brings absl, whose log handler would close the file in which pytest captures what tests print."""
    if "absl.logging" in sys.modules:
        sys.modules["absl.logging"].get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.fixture(autouse=True, scope="session")
def progress_of_its_own(tmp_path_factory):
    """Tests do not touch the progress of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="module")
def leave_modules_to_themselves():
    """What lives when a file of tests begins is not searched for garbage again: that took a third of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
