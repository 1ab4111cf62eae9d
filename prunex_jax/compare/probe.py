"""Measures the links that a mesh is on: time of sums of several sizes over each axis.

Sums of growing size run over the host axis and over the device axis, so often that a
median can be taken, until one takes too long or the time is up. All processes decide on
the times of the slowest of them, so all run the same sequence. What is fitted to the
times is a `step_time.Link`: of a host, whose devices share it, and of a device.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from scipy import optimize

from prunex_jax.base.errors import UserError
from prunex_jax.comm import (
    Collective,
    count_hops,
    mean_over_devices,
    mean_over_hosts,
    ring_bytes,
)
from prunex_jax.compare.step_time import Link
from prunex_jax.mesh import (
    DEVICE_AXIS,
    HOST_AXIS,
    AnyMesh,
    MeshAxes,
    map_over,
    sharding_on,
)

# Numbers that every device puts into a sum: each message is four times as long as the
# one before.
_FIRST_ELEMENTS, _GROWTH, _MOST_ELEMENTS = 64, 4, 4**11
_MIN_REPEATS, _MAX_REPEATS = 3, 15
# Share of the time that repeats of one size may take.
_SHARE = 0.3


@dataclasses.dataclass(frozen=True)
class Size:
    """Sums of one size over an axis."""

    # Sent per sum: by a host over the host axis, by a device over the other.
    num_bytes: float
    seconds: tuple[float, ...]  # Of every repeat, of the slowest process.

    @property
    def median(self) -> float:
        """Median seconds of a sum."""
        return statistics.median(self.seconds)


@dataclasses.dataclass(frozen=True)
class ProbedLink:
    """What sums over one axis say about its links."""

    axis: str  # Of the mesh.
    link: Link  # Fitted to the medians of all sizes.
    # Fitted to the upper quartiles: a quarter of the sums was slower than that.
    slow: Link
    fast: Link  # Fitted to the lower quartiles.
    sizes: tuple[Size, ...]  # What was measured, from the smallest message on.

    def __str__(self) -> str:
        low, high = sorted((self.slow.megabits, self.fast.megabits))
        few, many = sorted((self.slow.hop_seconds, self.fast.hop_seconds))
        return (
            f"{self.link.megabits:,.4g} Mbit/s ({low:,.4g} to {high:,.4g}), "
            f"{1e3 * self.link.hop_seconds:.3g} ms per hop "
            f"({1e3 * few:.3g} to {1e3 * many:.3g})"
        )


def probe_links(
    mesh: AnyMesh,
    max_seconds: float = 10.0,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, ProbedLink]:
    """Measures both axes of a mesh; every process of it must call this.

    Args:
      mesh: ('host', 'device').
      max_seconds: Time for both axes together. One sum may be under way when it is up,
        and compilation comes on top.
      now: Seconds from any origin; a test passes its own.
    Returns:
      Axis -> what was found; without the axes of size one, which have no links.
    Collectives:
      Sums over each axis, and one small gather over all processes per size.
    """
    if not max_seconds > 0:
        raise UserError(f"max_seconds={max_seconds} must be positive")
    axes = [axis for axis in (HOST_AXIS, DEVICE_AXIS) if mesh.shape[axis] > 1]
    return {axis: _probe(mesh, axis, max_seconds / len(axes), now) for axis in axes}


def fit_link(sizes: Sequence[tuple[float, float]], hops: int) -> Link:
    """Fits speed and time of a hop to (bytes, seconds) of messages, two at least.

    Least squares on relative errors, so that short messages decide about hops and long
    ones about speed.

    Example:
      >>> link = fit_link([(1e3, 0.011), (1e6, 1.01)], hops=2)
      >>> round(link.megabits, 3), round(link.hop_seconds, 6)
      (8.0, 0.005)
    """
    table = np.array([[hops, 8e-6 * num_bytes] for num_bytes, _ in sizes])
    relative = table / np.array([[seconds] for _, seconds in sizes])
    scale = np.linalg.norm(relative, axis=0)
    found, _ = optimize.nnls(relative / scale, np.ones(len(sizes)))
    hop_seconds, per_megabit = found / scale
    megabits = 1 / float(per_megabit) if per_megabit > 0 else math.inf
    return Link(megabits, float(hop_seconds))


def _probe(
    mesh: AnyMesh, axis: str, max_seconds: float, now: Callable[[], float]
) -> ProbedLink:
    """Runs sums of growing size over one axis until the time is up."""
    sizes: list[Size] = []
    spent, num_elements = 0.0, _FIRST_ELEMENTS
    while num_elements <= _MOST_ELEMENTS:
        room = max_seconds - spent
        # All times are those of the slowest process, so that all decide alike.
        if len(sizes) >= 2 and (1 + _MIN_REPEATS) * _GROWTH * sizes[-1].median > room:
            break
        time_sums = _timed_sums(mesh, axis, num_elements, now)
        # The first opens connections, and takes what the links have saved up.
        (first,) = slowest(time_sums(1))
        fitting = _SHARE * room / first if first > 0 else _MAX_REPEATS
        seconds = slowest(time_sums(int(np.clip(fitting, _MIN_REPEATS, _MAX_REPEATS))))
        spent += first + sum(seconds)
        sizes.append(Size(_sent_bytes(mesh.shape, axis, num_elements), seconds))
        num_elements *= _GROWTH
    hops = count_hops([_sum(mesh.shape, axis, num_elements)], axis)

    def link_at(quantile: float) -> Link:
        times = [float(np.quantile(size.seconds, quantile)) for size in sizes]
        pairs = zip((size.num_bytes for size in sizes), times, strict=True)
        return fit_link(list(pairs), hops)

    return ProbedLink(axis, link_at(0.5), link_at(0.75), link_at(0.25), tuple(sizes))


def _timed_sums(
    mesh: AnyMesh, axis: str, num_elements: int, now: Callable[[], float]
) -> Callable[[int], list[float]]:
    """Compiles a sum of one size; what it returns times so many of them."""

    def add(buffer: jax.Array) -> jax.Array:
        if axis == HOST_AXIS:
            # Every device sums what it has over hosts, as it does with its share.
            return mean_over_hosts(buffer, MeshAxes(HOST_AXIS, None))
        return mean_over_devices(buffer, MeshAxes(None, DEVICE_AXIS))

    everywhere = jax.P((HOST_AXIS, DEVICE_AXIS))
    along = jax.P(DEVICE_AXIS if axis == HOST_AXIS else HOST_AXIS)
    program = jax.jit(map_over(mesh, add, everywhere, along))
    sharding = sharding_on(mesh, everywhere)
    ones = jax.jit(
        lambda: jnp.ones(mesh.size * num_elements, jnp.float32), out_shardings=sharding
    )()
    run = program.lower(ones).compile()

    def time_sums(repeats: int) -> list[float]:
        seconds = []
        for _ in range(repeats):
            start = now()
            jax.block_until_ready(run(ones))
            seconds.append(now() - start)
        return seconds

    return time_sums


def slowest(seconds: Sequence[float]) -> tuple[float, ...]:
    """Times of the slowest process, the same on all; every process calls this.

    Collectives:
      With several processes, one gather of 8 bytes per number and process.
    """
    rows = np.asarray(multihost_utils.process_allgather(np.array(seconds)))
    return tuple(map(float, rows.reshape(-1, len(seconds)).max(axis=0)))


def _sum(shape: Mapping[str, int], axis: str, num_elements: int) -> Collective:
    return Collective("sum", (axis,), (shape[axis],), num_elements, "float32")


def _sent_bytes(shape: Mapping[str, int], axis: str, num_elements: int) -> float:
    """Bytes of a sum: of a host over the host axis, of a device over the other."""
    sent = ring_bytes("sum", 4 * num_elements, shape[axis])
    return sent * shape[DEVICE_AXIS] if axis == HOST_AXIS else sent
