"""Every extra has a feature that `tests/extras.py` tries before a release."""

import extras


def test_every_extra_has_a_feature_to_try():
    assert set(extras.FEATURES) == set(extras.extras())
