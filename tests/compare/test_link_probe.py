"""The probe finds the links it is given, in time, and counts bytes as traces do."""

import jax
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.comm import list_collectives, wire_bytes
from prunex_jax.compare import probe as link_probe
from prunex_jax.compare.probe import fit_link, probe_links, slowest
from tests.helpers.common import make_mesh


class SlowClock:
    """A clock on which every call of it takes a quarter of a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.25
        return self.seconds


@pytest.mark.slow
def test_both_axes_of_a_mesh_are_measured():
    found = probe_links(make_mesh(2, 2), max_seconds=0.1)
    assert set(found) == {"host", "device"}
    for probed in found.values():
        assert len(probed.sizes) >= 2
        sent = [size.num_bytes for size in probed.sizes]
        assert sent == sorted(sent)
        assert min(min(size.seconds) for size in probed.sizes) > 0
        assert probed.link.megabits > 0 and probed.link.hop_seconds >= 0
    # Two devices put 64 floats each into a ring of two hosts.
    assert found["host"].sizes[0].num_bytes == 2 * 64 * 4
    assert found["device"].sizes[0].num_bytes == 64 * 4


def test_bytes_are_those_of_the_program_that_ran(monkeypatch):
    traced = []

    def jit(fn, **options):
        if not options:  # the sum, not the making of its input
            traced.append(fn)
        return plain(fn, **options)

    plain = jax.jit
    monkeypatch.setattr(jax, "jit", jit)
    mesh = make_mesh(4, 2)
    found = probe_links(mesh, max_seconds=0.05)
    sizes = [*found["host"].sizes, *found["device"].sizes]
    names = ["host"] * len(found["host"].sizes) + ["device"] * len(
        found["device"].sizes
    )
    assert len(traced) == len(sizes)
    elements = [64 * 4**i for n in found for i in range(len(found[n].sizes))]
    for fn, axis, size, count in zip(traced, names, sizes, elements, strict=True):
        program = jax.make_jaxpr(fn)(np.zeros(mesh.size * count, np.float32))
        sent = wire_bytes(list_collectives(program), dict(mesh.shape))
        shared_by = 1 if axis == "host" else 2
        assert sent[axis] == shared_by * size.num_bytes
        assert sum(sent.values()) == sent[axis], "nothing crosses the other axis"


def test_an_axis_of_one_has_no_links():
    assert set(probe_links(make_mesh(1, 2), max_seconds=0.05)) == {"device"}
    assert probe_links(make_mesh(1, 1), max_seconds=0.05) == {}


def test_slow_links_are_not_measured_for_longer_than_asked():
    clock = SlowClock()
    (probed,) = probe_links(make_mesh(2, 1), max_seconds=2.0, now=clock).values()
    assert len(probed.sizes) == 2, "the least that gives a speed"
    assert sum(sum(size.seconds) for size in probed.sizes) <= 2.0


def test_time_must_be_positive():
    with pytest.raises(UserError, match="max_seconds=0"):
        probe_links(make_mesh(2, 1), max_seconds=0)


def test_a_link_is_found_in_noisy_times():
    rng = np.random.default_rng(0)
    sizes = [
        (4.0**i, (6 * 0.002 + 8e-6 * 4.0**i / 50) * rng.uniform(0.9, 1.1))
        for i in range(4, 12)
    ]
    link = fit_link(sizes, hops=6)
    assert link.megabits == pytest.approx(50, rel=0.1)
    assert link.hop_seconds == pytest.approx(0.002, rel=0.1)


def test_nothing_is_faster_than_free():
    # Longer messages were faster: no speed can be told, and none is negative.
    link = fit_link([(1e3, 0.2), (1e6, 0.1)], hops=2)
    assert link.hop_seconds > 0 and link.megabits > 1e3


def test_times_are_those_of_the_slowest_process(monkeypatch):
    def gather(own: np.ndarray) -> np.ndarray:
        return np.stack([own, own[::-1]])

    monkeypatch.setattr(link_probe.multihost_utils, "process_allgather", gather)
    assert slowest([1.0, 3.0, 2.0]) == (2.0, 3.0, 2.0)
