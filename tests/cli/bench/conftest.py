"""Small sizes for what would take seconds."""

import pytest

from headwise.cli.bench import measurement


@pytest.fixture(autouse=True, scope="session")
def small_ceilings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(measurement.SIDE, "cpu", 64)
        patch.setitem(measurement.COPIED, "cpu", 2**16)
        yield
