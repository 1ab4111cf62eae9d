"""Who is named as slow, and when, from totals of steps alone."""

import dataclasses
import random
import statistics

import pytest

from prunex_jax.processes.stragglers import StepTimes, Stragglers, slow_among


def steps(count, seconds, data=0.0, own=True):
    """So many equal steps."""
    known = (count, seconds, data) if own else ()
    return StepTimes(count, count * seconds, count * data, *known)


def total(before, new):
    return dataclasses.replace(
        new,
        steps=before.steps + new.steps,
        seconds=before.seconds + new.seconds,
        data_seconds=before.data_seconds + new.data_seconds,
        own_steps=before.own_steps + new.own_steps,
    )


def named(windows):
    """Lines said while every process does what each window says; windows of 10 s."""
    stragglers, totals, said = Stragglers(now=0.0), {}, []
    for number, window in enumerate(windows, 1):
        for process, new in enumerate(window):
            totals[process] = total(totals.get(process, StepTimes()), new)
        times = {p: (f"node{p}", own) for p, own in totals.items()}
        said.append(stragglers.news(times, now=10.0 * number))
    return said


def test_a_slow_process_is_named_once_and_again_when_it_has_caught_up():
    equal = [steps(20, 0.13)] * 4
    slow = [*equal[:3], steps(20, 0.31)]
    said = named([equal] * 4 + [slow] * 9 + [equal] * 9)
    assert [line for lines in said for line in lines] == [
        "process 3 on node3 needs 2.4 times as long as the median of the others per "
        "step: 310 ms against 130 ms",
        "process 3 on node3 is as fast as the others again",
    ]
    assert said[4 + 2], "after three comparisons"


def test_data_are_named_where_they_are_the_cause():
    quick = steps(20, 0.13, 0.002)
    found = slow_among({0: quick, 1: steps(20, 0.31, 0.18)})
    assert list(found) == [1] and found[1].cause == "data"
    assert found[1].figures.endswith("for 180 ms of it waits for its data")
    # Most of what it takes longer is something else.
    found = slow_among({0: quick, 1: steps(20, 0.31, 0.05)})
    assert found[1].cause == "step" and "data" not in found[1].figures


def test_another_cause_is_a_change():
    quick, slow, starved = steps(20, 0.1), steps(20, 0.3), steps(20, 0.3, 0.2)
    said = named([[quick, slow]] * 5 + [[quick, starved]] * 5)
    assert len([line for lines in said for line in lines]) == 2


def test_where_all_steps_are_exchanges_only_waiting_for_data_tells():
    """All take equally long, as everyone waits for the slowest."""
    quick = steps(20, 0.31, 0.002, own=False)
    found = slow_among({0: quick, 1: steps(20, 0.31, 0.18, own=False)})
    assert list(found) == [1]
    assert found[1].figures == (
        "holds up the others: for 180 ms of 310 ms per step it waits for its data, the "
        "others for 2 ms"
    )
    assert not slow_among({0: quick, 1: steps(20, 0.31, 0.05, own=False)})


@pytest.mark.parametrize("seconds", [0.004, 0.3])
def test_nobody_is_named_among_equals_on_a_noisy_machine(seconds):
    """Single steps take up to 30 times as long, and whole windows 1.4 times."""
    rng = random.Random(seconds)

    def window():
        speed = seconds * rng.uniform(1, 1.4)
        times = [speed * (30 if rng.random() < 0.02 else 1) for _ in range(32)]
        return StepTimes(32, sum(times), 0.0, 32, statistics.mean(sorted(times)[:-2]))

    assert not any(named([window() for _ in range(4)] for _ in range(300)))


def test_a_loader_that_stands_still_now_and_then_is_named():
    """Steps as they usually are do not show it."""
    pausing = StepTimes(40, 40 * 0.3, 40 * 0.18, 40, 0.13, 0.001)
    quick = StepTimes(40, 40 * 0.3, 40 * 0.01, 40, 0.13, 0.001)
    assert slow_among({0: quick, 1: pausing})[1].cause == "data"


def test_few_steps_short_times_and_small_differences_say_nothing():
    assert not any(named([[steps(2, 0.1), steps(2, 9.0)]] * 3))
    assert not slow_among({0: steps(20, 0.001), 1: steps(20, 0.005)})
    assert not slow_among({0: steps(20, 0.1), 1: steps(20, 0.14)})
    assert not slow_among({0: steps(20, 0.1)})
    # Steps add up until there are enough.
    said = named([[steps(8, 0.1), steps(8, 0.4)]] * 8)
    assert sum(map(len, said)) == 1


def test_the_slow_one_of_two_is_named_not_the_quick_one():
    found = slow_among({0: steps(20, 0.4), 1: steps(20, 0.1)})
    assert list(found) == [0]
