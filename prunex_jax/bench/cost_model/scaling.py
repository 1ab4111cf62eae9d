"""What a step takes on clusters of other sizes, by formula: up to thousands of hosts.

It owns the extrapolation of the model of cost in `step_time`: strong scaling, in which
computation divides by the devices and bytes do not, and weak scaling. Nothing runs.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from scipy import optimize

from prunex_jax.base.errors import UserError
from prunex_jax.bench.cost_model.step_time import Link, Traffic

# Speeds in Mbit/s between which one is looked for.
_SLOWEST, _FASTEST = 1e-3, 1e9


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Machines that are all alike.

    Attributes:
      devices_per_host: Size of the device axis.
      host_link: Between hosts; the devices of a host share it.
      device_link: Between the devices of a host; each has its own. None: its time
        counts as nothing.
    """

    devices_per_host: int
    host_link: Link
    device_link: Link | None = None


@dataclasses.dataclass(frozen=True)
class Point:
    """A step on a number of hosts.

    Attributes:
      num_hosts: Size of the host axis.
      compute_seconds: Of a device, with what the method itself computes.
      host_seconds: Of the exchange between hosts.
      device_seconds: Of that inside hosts.
      speed_up: Examples per second, of those of the base; 1 without a base.
    """

    num_hosts: int
    compute_seconds: float
    host_seconds: float
    device_seconds: float
    speed_up: float = 1.0

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.compute_seconds + self.host_seconds + self.device_seconds


def extrapolate(
    traffic_of: Callable[[int], Traffic],
    num_hosts: Sequence[int],
    cluster: Cluster,
    batch_seconds: float,
    *,
    is_strong: bool = True,
    overhead_seconds: float = 0.0,
    base: Point | None = None,
) -> list[Point]:
    """Predicts the steps of a method on clusters of other sizes.

    Args:
      traffic_of: Number of hosts -> what a step sends, as by `steady_traffic`.
      num_hosts: Sizes of the cluster.
      cluster: What each has.
      batch_seconds: Computation of one device for the whole batch (strong scaling), or
        for its own part of it (weak scaling).
      is_strong: Whether the batch stays the same, so that the computation of a device
        divides by their number and what is sent does not.
      overhead_seconds: What the method itself computes in a step, whatever the batch.
      base: What speed-ups are over, as this function gave it.
    Returns:
      One point per size.
    """
    points = []
    for size in num_hosts:
        count = size * cluster.devices_per_host
        traffic = traffic_of(size)
        inside = cluster.device_link or Link(math.inf)
        per_device = traffic.device_bytes / cluster.devices_per_host
        point = Point(
            num_hosts=size,
            compute_seconds=overhead_seconds
            + (batch_seconds / count if is_strong else batch_seconds),
            host_seconds=cluster.host_link.seconds(traffic.host_bytes, traffic.hops),
            device_seconds=inside.seconds(per_device, traffic.device_hops),
        )
        if base is not None:
            grown = 1.0 if is_strong else size / base.num_hosts
            speed_up = grown * base.seconds / point.seconds
            point = dataclasses.replace(point, speed_up=speed_up)
        points.append(point)
    return points


def megabits_for(
    speed_up: float,
    speed_up_at: Callable[[float], float],
) -> float:
    """Finds the speed of a link at which something is as fast as wanted.

    Args:
      speed_up: What is wanted.
      speed_up_at: Mbit/s -> speed-up, which grows with the speed of the link.
    Returns:
      Mbit/s.
    Raises:
      UserError: No link gives that.
    Example:
      >>> round(megabits_for(0.5, lambda megabits: megabits / (megabits + 100)))
      100
    """

    def excess(exponent: float) -> float:
        return speed_up_at(10**exponent) - speed_up

    low, high = math.log10(_SLOWEST), math.log10(_FASTEST)
    if not excess(low) <= 0 <= excess(high):
        raise UserError(
            f"no link between {_SLOWEST:g} and {_FASTEST:g} Mbit/s gives a speed-up of "
            f"{speed_up:g}: they give {speed_up_at(_SLOWEST):.3g} to "
            f"{speed_up_at(_FASTEST):.3g}"
        )
    return float(10 ** optimize.brentq(excess, low, high, xtol=1e-9))
