"""The table of before and after: what is counted is exact, what is timed is paired."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.timing import Timing, time_in_turn
from prunex_jax.shrink.compare import Subject, compare


def apply(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def subject(width):
    return Subject(apply, ({"in": jnp.ones((8, width)), "out": jnp.ones((width, 4))},))


def compared(small=16, *, batch_sizes=(2, 5), **settings):
    x = np.ones((3, 8), np.float32)
    settings = {"num_calls": 2, "warm_up": 1, **settings}
    return compare(subject(64), subject(small), x, batch_sizes=batch_sizes, **settings)


def clock(*durations):
    """Seconds that pass between two looks at the clock, again and again."""
    now, turn = [0.0], itertools.count()

    def look():
        number = next(turn)
        if number % 2:
            now[0] += durations[number // 2 % len(durations)]
        return now[0]

    return look


def test_what_is_counted():
    table = compared()
    params, macs = table.row("parameters"), table.row("multiply-accumulates")
    assert (params.full, params.small) == (64 * 12, 16 * 12)
    assert (macs.full, macs.small, macs.ratio) == (64 * 12, 16 * 12, 0.25)


@pytest.mark.parametrize("batch_size", [2, 5])
def test_what_the_programs_need(batch_size):
    row = compared().row("memory of the program", batch_size)
    # Arguments and results at least; whatever is temporary comes on top.
    least = [4 * (w * 12 + batch_size * 12) for w in (64, 16)]
    assert row.full >= least[0]
    assert row.small >= least[1]
    assert row.full - row.small >= 4 * 48 * 12


def test_what_is_timed():
    # The small one is timed first of each pair.
    table = compared(batch_sizes=(5,), num_calls=4, now=clock(1, 4, 2, 10, 1, 2, 3, 9))
    latency = table.row("latency", 5)
    assert latency.small == np.median([1, 2, 1, 3])
    assert latency.full == np.median([4, 10, 2, 9])
    assert latency.small_quartiles == tuple(np.percentile([1, 2, 1, 3], [25, 75]))
    # A quotient of medians would be another: 1.5 / 6.5.
    assert latency.ratio == pytest.approx(np.median([1 / 4, 2 / 10, 1 / 2, 3 / 9]))
    throughput = table.row("throughput", 5)
    assert throughput.small == pytest.approx(5 / 1.5)
    assert throughput.ratio == pytest.approx(1 / latency.ratio)
    assert table.num_calls == 4


def test_little_gain_is_remarked():
    slow = compared(batch_sizes=(5,), now=clock(9, 10))
    assert "Batch size 5: 0.25 of the arithmetic takes 0.90" in slow.format()
    fast = compared(batch_sizes=(5,), now=clock(3, 10))
    assert fast.remarks == ()


def test_the_table_as_text():
    text = compared(batch_sizes=(2,)).format()
    assert text.splitlines()[1].split() == ["parameters", "768", "192", "0.250"]
    assert "medians of 2 calls" in text
    assert "jaxlib" in text


def test_rows_of_inputs_are_repeated_and_dropped():
    seen = []

    def shapes(params, x, tokens):
        seen.append((x.shape, tokens.shape))
        return x.sum() + tokens.sum() + params["in"].sum()

    both = Subject(shapes, ({"in": jnp.ones(3)},))
    inputs = (np.ones((3, 8), np.float32), np.ones((3, 2), np.int32))
    compare(both, both, *inputs, batch_sizes=(1, 7), num_calls=2)
    assert set(seen) == {((1, 8), (1, 2)), ((7, 8), (7, 2))}


@pytest.mark.parametrize(
    ("inputs", "batch_sizes", "words"),
    [
        ((), (1,), "nothing to compare on"),
        ((np.float32(1.0),), (1,), "no example on its first axis"),
        ((np.ones((0, 8)),), (1,), "no example on its first axis"),
        ((np.ones((1, 8)),), (), "at least one"),
        ((np.ones((1, 8)),), (4, 0), "each at least 1"),
    ],
)
def test_bad_input(inputs, batch_sizes, words):
    with pytest.raises(UserError, match=words):
        compare(subject(4), subject(2), *inputs, batch_sizes=batch_sizes)


def test_rows_that_are_not_there():
    with pytest.raises(UserError, match="there are parameters, multiply-accumulates"):
        compared(batch_sizes=(2,)).row("latency", 3)


def test_calls_are_timed_in_turn_after_warm_up():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = time_in_turn(calls, num_calls=3, warm_up=2, now=clock(1, 2))
    assert order == ["a", "b"] * 5
    assert timings == {"a": Timing((1.0,) * 3), "b": Timing((2.0,) * 3)}
