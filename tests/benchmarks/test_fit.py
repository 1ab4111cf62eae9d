"""The model of cost is found again from steps that it made, predicts others, and says
what it cannot know."""

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.report.cost_model import Sample, fit
from prunex_jax.base.errors import UserError

# Of the rows of the samples below: computation, bytes, hops on 4 hosts.
ROWS = {"dense": (0.5, 4e6, 6.0), "topk": (0.8, 2e5, 12.0), "small": (0.3, 5e5, 6.0)}
EFFICIENCY, HOP_SECONDS = 0.9, 0.004
SPEEDS = (2.0, 10.0, 50.0, 100.0, 1000.0, None)


def make_samples(noise: float = 0.0, speeds=SPEEDS, **changes) -> list[Sample]:
    """Steps of all rows by the model itself, on hosts that compute equally fast."""
    rng = np.random.default_rng(0)
    samples = []
    for row, (compute, num_bytes, hops) in ROWS.items():
        for speed in speeds:
            wire = 0.0 if speed is None else 8e-6 * num_bytes / speed / EFFICIENCY
            seconds = (compute + hops * HOP_SECONDS + wire) * (
                1 + noise * rng.uniform(-1, 1)
            )
            samples.append(Sample(row, 4, speed, num_bytes, hops, seconds, **changes))
    return samples


def error_of(model, sample: Sample) -> float:
    predicted = model.predict(
        sample.row, sample.num_hosts, sample.megabits, sample.num_bytes
    )
    return abs(predicted / sample.seconds - 1)


def test_known_parameters_are_found_again():
    model = fit(make_samples(noise=0.02))
    assert model.efficiency == pytest.approx(EFFICIENCY, rel=0.03)
    for row, (compute, _, hops) in ROWS.items():
        cost = model.rows[row, 4]
        whole = cost.compute_seconds + cost.hidden_seconds + hops * model.hop_seconds
        assert whole == pytest.approx(compute + hops * HOP_SECONDS, rel=0.05)


def test_unseen_links_are_predicted_although_one_step_was_held_up():
    seen = make_samples(noise=0.02, speeds=(2.0, 10.0, 100.0, None))
    seen[1] = dataclasses.replace(seen[1], seconds=5 * seen[1].seconds)
    model = fit(seen)
    for sample in make_samples(speeds=(5.0, 50.0, 1000.0)):
        assert error_of(model, sample) < 0.08, sample


def test_one_link_of_a_row_is_enough_where_others_tell_the_efficiency():
    samples = make_samples()
    known = [s for s in samples if s.row != "small" or s.megabits == 50.0]
    model = fit(known)
    for sample in samples:
        assert error_of(model, sample) < 0.05, sample


def test_a_row_may_use_links_worse_than_others():
    samples = [
        dataclasses.replace(
            s, seconds=s.seconds + 8e-6 * s.num_bytes / s.megabits / EFFICIENCY
        )
        if s.row == "small" and s.megabits
        else s
        for s in make_samples()
    ]
    model = fit(samples)
    assert model.rows["small", 4].efficiency == pytest.approx(EFFICIENCY / 2, rel=0.05)
    assert model.rows["dense", 4].efficiency == pytest.approx(EFFICIENCY, rel=0.05)


def test_work_that_a_slow_link_hides_is_not_counted_twice():
    hidden = 0.4
    samples = []
    for sample in make_samples():
        if sample.row == "dense":
            wire = 0.0
            if sample.megabits:
                wire = 8e-6 * sample.num_bytes / sample.megabits / EFFICIENCY
            seconds = 0.2 + max(wire, hidden)
            sample = dataclasses.replace(sample, seconds=seconds)
        samples.append(sample)
    model = fit([s for s in samples if s.megabits != 10.0])
    for sample in samples:
        assert error_of(model, sample) < 0.1, sample
    assert model.rows["dense", 4].hidden_seconds == pytest.approx(hidden, rel=0.15)


def test_a_hop_is_told_from_computation_that_is_known():
    samples = [
        dataclasses.replace(s, compute_seconds=ROWS[s.row][0]) for s in make_samples()
    ]
    model = fit(samples)
    assert model.hop_seconds == pytest.approx(HOP_SECONDS, rel=0.1)
    assert fit(make_samples()).hop_seconds == 0.0


def test_nothing_takes_less_than_no_time():
    # The faster link had the slower steps, and computing alone takes longer than all.
    samples = [
        Sample("a", 2, 10.0, 1e6, 2.0, 0.9, compute_seconds=2.0),
        Sample("a", 2, 1000.0, 1e6, 2.0, 1.0, compute_seconds=2.0),
        Sample("b", 2, 10.0, 5e7, 400.0, 50.0),
    ]
    model = fit(samples)
    assert model.hop_seconds >= 0 and model.efficiency > 0
    for cost in model.rows.values():
        assert cost.compute_seconds >= 0 and cost.hidden_seconds >= 0
        assert cost.efficiency > 0


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "Mbit/s: none"),
        (make_samples(speeds=(100.0,)), "no row that sends was measured on two links"),
        (
            [Sample("a", 2, 1.0, 0.0, 0.0, 1.0), Sample("a", 2, None, 0.0, 0.0, 1.0)],
            "Mbit/s: 1.0, None",
        ),
        ([*make_samples(), Sample("slow", 2, 1.0, 1.0, 1.0, math.nan)], "slow on 2"),
        ([*make_samples(), Sample("slow", 2, -5.0, 1.0, 1.0, 1.0)], "-5.0 Mbit/s"),
    ],
)
def test_what_cannot_be_told_is_said(samples, message):
    with pytest.raises(UserError, match=message):
        fit(samples)


def test_unknown_rows_are_named():
    model = fit(make_samples())
    with pytest.raises(UserError, match=r"dense on 8 hosts .*known: dense on 4"):
        model.predict("dense", 8, 10.0, 1e6)
