"""Signals are heard while somebody listens, and handled as before afterwards."""

import signal

import pytest

from prunex_jax.base.signals import STOPPING, StopRequest, handling


@pytest.fixture
def sigterm_ignored():
    earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, earlier)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    heard = []
    with handling([signal.SIGTERM], lambda number, frame: heard.append(number)):
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("also_ignored", [False, True])
def test_ignored_signals_stay_ignored_unless_asked_for(also_ignored, sigterm_ignored):
    heard = []
    numbers = [signal.SIGTERM]
    hear = lambda number, frame: heard.append(number)  # noqa: E731
    with handling(numbers, hear, also_ignored=also_ignored):
        signal.raise_signal(signal.SIGTERM)
    assert len(heard) == also_ignored
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGINT, *STOPPING])
def test_the_first_signal_asks_to_stop(number):
    with StopRequest() as stop:
        assert not stop.is_due()
        signal.raise_signal(number)
        assert stop.is_due() and stop.is_due()
        signal.raise_signal(signal.SIGTERM)  # Impatience changes nothing,
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # a second Ctrl-C interrupts.


def test_a_request_is_heard_in_the_background_of_a_shell_too(sigterm_ignored):
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_due()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
