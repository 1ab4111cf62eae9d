"""Networks made to mislead: shrunk exactly, or explained; none comes out wrong."""

import pytest

from tests.helpers.attacks import (
    ATTACKS,
    check,
    derivatives,
    layouts,
    loops,
    numbers,
    sequences,
    vision,
)

MODULES = (
    derivatives,
    layouts,
    loops,
    numbers,
    sequences,
    vision,
)


# Every other one in the quick tests.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if index % 2 else [])
        for index, name in enumerate(ATTACKS)
    ],
)
def test_masked_equals_shrunk_or_all_stays(name):
    check(name)


def test_every_module_has_attacks():
    owners = {case.apply.__module__ for case in ATTACKS.values()}
    assert owners == {module.__name__ for module in MODULES}
