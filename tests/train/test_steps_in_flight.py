"""What a process measures of its own steps, on a clock of the test's own."""

from prunex_jax.train.steps.in_flight import StepsInFlight


class Ticket:
    """Of a step on devices of the test's own; waiting for it takes time."""

    def __init__(self, clock, ready):
        self.clock, self.ready = clock, ready

    def is_ready(self):
        return self.clock.now >= self.ready

    def block_until_ready(self):
        self.clock.now = max(self.clock.now, self.ready)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def batches(self, seconds):
        while True:
            self.now += seconds
            yield {}


def run(num_ahead, num_steps, data, step, period=0, exchange=0.0, is_local=True):
    """Steps of `step` s on the devices, and an exchange after every few of them."""
    clock = Clock()
    in_flight, batches = StepsInFlight(num_ahead, clock), clock.batches(data)
    free = ended = 0.0
    for number in range(1, num_steps + 1):
        in_flight.next_of(batches)
        free = max(free, clock.now) + step
        in_flight.started(Ticket(clock, free), is_local=is_local)
        if period and number % period == 0:
            free += exchange
            in_flight.exchanged()
        in_flight.wait()
        in_flight.step_done(clock.now - ended)
        ended = clock.now
    return in_flight.times()


def test_steps_without_exchange_are_own_whatever_the_exchanges_take():
    for num_ahead in (0, 2):
        for exchange in (0.0, 7.0):
            found = run(num_ahead, 40, 0.0, 0.25, period=4, exchange=exchange)
            assert found.own_seconds == 0.25 and found.steps == 40, num_ahead
            assert 20 <= found.own_steps <= 30
            assert found.data_seconds == 0.0


def test_steps_that_send_and_steps_between_exchanges_of_all_are_not_own():
    assert run(0, 40, 0.0, 0.25, is_local=False).own_steps == 0
    assert run(0, 40, 0.0, 0.25, period=1, exchange=1.0).own_steps == 0


def test_data_count_where_devices_wait_for_them():
    found = run(0, 40, 0.5, 0.25, period=4, exchange=1.0)
    assert (found.own_seconds, found.own_data_seconds) == (0.75, 0.5)
    # Two steps ahead, the devices have enough to do while a batch is read ...
    busy = run(2, 40, 0.125, 0.25)
    assert busy.own_seconds == 0.25 and busy.data_seconds <= 2 * 0.125
    # ... unless that takes longer.
    starved = run(2, 40, 0.5, 0.25)
    assert (starved.own_seconds, starved.own_data_seconds) == (0.5, 0.5)


def test_what_waits_for_all_steps_leaves_none_that_seems_short():
    clock = Clock()
    in_flight, batches = StepsInFlight(2, clock), clock.batches(0.0)
    for number in range(10):
        in_flight.next_of(batches)
        in_flight.started(Ticket(clock, 0.25 * (number + 1)), is_local=True)
        before = clock.now
        in_flight.wait()
        in_flight.step_done(clock.now - before)
        if number == 5:
            clock.now = 1.5
            in_flight.drained()
    # The first is not: who knows what went before it.
    assert (in_flight.times().own_steps, in_flight.times().own_seconds) == (5, 0.25)


def test_what_happens_now_and_then_counts_and_one_pause_does_not():
    def own_seconds(long_steps):
        clock, in_flight = Clock(), StepsInFlight(0)
        for number in range(33):
            seconds = 0.5 if number in long_steps else 0.125
            in_flight.started(Ticket(clock, 0.0), is_local=True)
            in_flight.wait()
            in_flight.step_done(seconds)
        return in_flight.times().own_seconds

    assert own_seconds({20}) == own_seconds({9, 22}) == 0.125
    assert own_seconds(range(0, 33, 6)) > 1.2 * 0.125
