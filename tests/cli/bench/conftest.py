"""Small sizes for what would take seconds."""

import pytest

from headwise.cli.bench import sweep


@pytest.fixture(autouse=True, scope="session")
def small_ceilings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sweep.SIDE, "cpu", 64)
        patch.setitem(sweep.COPIED, "cpu", 2**16)
        yield
