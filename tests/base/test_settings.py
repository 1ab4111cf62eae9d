"""Settings are read with their types and refused outside their ranges, in one line."""

import dataclasses
from typing import Literal

import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import (
    Range,
    check_settings,
    read_settings,
    setting,
    without_none,
)


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = setting(0.1, above=0, at_most=1)
    share: float | None = setting(None, at_least=0, below=1)


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    steps: int = setting(1, at_least=1)
    free: float = 0.0
    flag: bool = False
    form: Literal["wide", "narrow"] = "wide"
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "message"),
    [
        (Range(at_least=0), (0, 1e300), (-1e-9,), "must not be negative"),
        (Range(above=0), (1e-9,), (0, -1), "must be positive"),
        (Range(at_least=3), (3, 4), (2,), "must be at least 3"),
        (Range(above=3), (4,), (3,), "must be above 3"),
        (Range(at_most=3), (3, -9), (4,), "must be at most 3"),
        (Range(below=3), (2,), (3,), "must be below 3"),
        (Range(at_least=0, at_most=1), (0, 1), (-0.1, 1.1), r"must lie in \[0, 1\]"),
        (Range(above=0, below=1), (0.5,), (0, 1), r"must lie in \(0, 1\)"),
        (Range(above=0, at_most=1), (1,), (0, 2), r"must lie in \(0, 1\]"),
        (Range(at_least=0, below=1), (0,), (1,), r"must lie in \[0, 1\)"),
        (Range(), (0, -5, 10**400), (float("inf"), float("nan")), "finite number"),
    ],
    ids=str,
)
def test_ranges(limits, inside, outside, message):
    for value in inside:
        limits.check("x", value)
    for value in outside:
        with pytest.raises(UserError, match=message):
            limits.check("x", value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Outer(Inner(rate=2.0)), r"^config.inner.rate=2.0 must lie in \(0, 1\]$"),
        (Outer(Inner(share=1.0)), r"config.inner.share=1.0 must lie in \[0, 1\)"),
        (Outer(steps=0), "config.steps=0 must be at least 1"),
        (Outer(free=float("inf")), "config.free=inf must be a finite number"),
    ],
)
def test_what_lies_outside_its_range_is_refused_by_its_path(settings, message):
    check_settings(Outer(), "config")
    with pytest.raises(UserError, match=message):
        check_settings(settings, "config")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": 1}, r"config.step is not a setting, did you mean .steps.* \(known: "),
        ({"inner": {"rat": 1}}, "config.inner.rat is not a setting, did you mean"),
        ({"inner": 3}, "config.inner=3 should be of type Inner"),
        ({"steps": 1.5}, "config.steps=1.5 should be of type int"),
        ({"steps": True}, "config.steps=True should be of type int"),
        ({"steps": None}, "config.steps=None should be of type int"),
        ({"flag": 1}, "config.flag=1 should be of type bool"),
        ({"free": "much"}, "config.free=.much. should be of type float"),
        ({"free": 10**400}, "should be of type float"),
        ({"form": "wid"}, "is not one of wide, narrow, did you mean .wide."),
        ({"names": "stem"}, "config.names=.stem. should be a tuple"),
        ({"names": (1,)}, "config.names=1 should be of type str"),
    ],
)
def test_bad_values_say_what_was_expected(values, message):
    with pytest.raises(UserError, match=message):
        read_settings(Outer(), values, "config")


def test_values_change_what_they_name_and_take_its_type():
    before = Outer(steps=7)
    values = {"inner": {"rate": 1, "share": 0}, "names": ["a"], "form": "narrow"}
    after = read_settings(before, values, "config")
    assert after == Outer(Inner(1.0, 0.0), 7, form="narrow", names=("a",))
    assert isinstance(after.inner.rate, float) and isinstance(after.inner.share, float)
    assert read_settings(after, {"inner": {"share": None}}, "c").inner.share is None
    assert read_settings(after, dataclasses.asdict(before), "c") == before


def test_optional_types():
    assert without_none(float | None) is float
    assert without_none(int) is int
