"""A window of steps for jax's profiler."""

import jax
import jax.numpy as jnp
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.train.steps.profiling import Profiler, profile_window


@pytest.mark.parametrize(
    "text", ["5", "a:b", "5:", "-1:4", "1:2:3", " 1:2", "4:4", "5:4", "3:21", "20:21"]
)
def test_windows_that_cannot_be_are_refused(text):
    with pytest.raises(UserError, match=r"config\.run\.profile_steps=") as refused:
        profile_window(text, 20)
    assert text in str(refused.value)


def test_windows_of_a_run():
    assert profile_window("", 20) is None
    assert profile_window("0:20", 20) == (0, 20)


class FakeProfiler:
    """Keeps when a trace starts and stops."""

    def __init__(self, monkeypatch):
        self.events, self.step = [], 0
        start, stop = "start_trace", "stop_trace"
        monkeypatch.setattr(
            jax.profiler, start, lambda folder: self.events.append(("on", self.step))
        )
        monkeypatch.setattr(
            jax.profiler, stop, lambda: self.events.append(("off", self.step))
        )

    def run(self, profiler, first, last):
        for self.step in range(first, last):
            profiler.before_step(self.step)
            self.step += 1
            profiler.after_step(self.step, jnp.zeros(()))


@pytest.mark.parametrize(
    ("first", "last", "events"),
    [
        (0, 9, [("on", 2), ("off", 4)]),
        (3, 9, [("on", 3), ("off", 4)]),  # resumed within the window
        (4, 9, []),  # and after it
        (0, 3, [("on", 2), ("off", 3)]),  # ended within it
        (0, 2, []),
    ],
)
def test_a_trace_covers_its_window(first, last, events, tmp_path, monkeypatch):
    fake, told = FakeProfiler(monkeypatch), []
    with Profiler((2, 4), tmp_path, told.append) as profiler:
        fake.run(profiler, first, last)
    assert fake.events == events
    assert len(told) == bool(events)


def test_without_a_window_nothing_is_traced(tmp_path, monkeypatch):
    fake = FakeProfiler(monkeypatch)
    with Profiler(None, tmp_path, print) as profiler:
        fake.run(profiler, 0, 9)
    assert not fake.events


def test_a_real_trace_is_a_file(tmp_path):
    with Profiler((0, 1), tmp_path / "profile", lambda text: None) as profiler:
        profiler.before_step(0)
        profiler.after_step(1, jnp.ones(3) + 1)
    assert list(tmp_path.rglob("*.xplane.pb"))
