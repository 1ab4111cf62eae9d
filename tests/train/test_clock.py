"""Times of steps: what is counted, and what is not."""

import math

import pytest

from prunex_jax.train.steps.clock import Clock


class Time:
    """A clock that a test moves."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds

    def pass_(self, seconds):
        self.seconds += seconds


def test_clock_counts_steps_but_not_what_lies_between():
    now = Time()
    clock = Clock(now=now)
    assert math.isnan(clock.seconds_per_step_median)
    now.pass_(30.0)  # Compilation.
    clock.resume()
    for seconds in (1.0, 2.0, 4.0):
        now.pass_(seconds)
        clock.step_done()
        with clock.paused():
            now.pass_(50.0)  # Evaluation.
    now.pass_(0.5)
    clock.pause()
    clock.pause()
    now.pass_(7.0)
    clock.resume()
    clock.resume()
    now.pass_(0.5)
    clock.step_done()  # Half before the pause and half after it.
    now.pass_(2.0)
    clock.step_done()
    assert clock.seconds_per_step_median == 2.0
    assert clock.seconds_in_steps == 1.0 + 2.0 + 4.0 + 1.0 + 2.0
    assert clock.num_steps == 5
    assert clock.seconds_total == 30.0 + 7.0 + 150.0 + 1.0 + 7.0 + 2.0


def test_clock_refuses_steps_while_it_stands():
    clock = Clock(now=Time())
    with pytest.raises(RuntimeError, match="while the clock was paused"):
        clock.step_done()
    with clock.paused():
        pass
    with pytest.raises(RuntimeError, match="while the clock was paused"):
        clock.step_done()


def test_the_median_looks_at_the_newest_steps():
    now = Time()
    clock = Clock(now=now)
    clock.resume()
    for seconds in (1.0,) * 512 + (3.0,) * 300:
        now.pass_(seconds)
        clock.step_done()
    assert clock.seconds_per_step_median == 3.0
    assert len(clock.totals().intervals) == 512


def test_clock_forgets_steps_of_another_kind():
    now = Time()
    clock = Clock(now=now)
    clock.resume()
    for seconds in (9.0, 9.0, 2.0):
        if seconds == 2.0:
            clock.forget_steps()
            assert math.isnan(clock.seconds_per_step_median)
        now.pass_(seconds)
        clock.step_done()
    assert clock.seconds_per_step_median == 2.0
    assert (clock.num_steps, clock.seconds_in_steps) == (3, 20.0), "totals stay"


def test_clock_goes_on_after_a_restart():
    now = Time()
    clock = Clock(now=now)
    clock.resume()
    for seconds in (9.0, 1.0, 2.0, 3.0, 4.0):
        now.pass_(seconds)
        clock.step_done()
    earlier = clock.totals()
    assert earlier.intervals == (9.0, 1.0, 2.0, 3.0, 4.0)
    now.pass_(1e6)  # Between the two starts.
    later = Clock(earlier, now=now)
    assert later.seconds_total == 19.0
    now.pass_(5.0)
    later.resume()
    now.pass_(10.0)
    later.step_done()
    assert later.num_steps == 6
    assert later.seconds_total == 34.0
    assert later.seconds_in_steps == 29.0
    assert later.seconds_per_step_median == 3.5
