"""A published setting by the model of cost: PruneX on 64 devices, up to 4,096 hosts.

PruneX (Olama et al., 2025, arXiv:2512.14628) gives three strong-scaling speed-ups on 64
devices, 16 hosts of 4: its own, that of dense data parallelism, and that of Top-K. The
base is not stated; 8 devices fit best. Neither network, batch nor links are known, so
the link is set such that dense averaging gets its published speed-up, which says how
long its exchange takes beside a step's computation, and everything else follows.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import optax
from scipy import optimize

from benchmarks.report.cost import Extrapolation
from benchmarks.report.places import DENSE
from prunex_jax.base.errors import UserError
from prunex_jax.compare.step_time import Link, Traffic, steady_traffic
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS
from prunex_jax.methods import MethodConfig, Recipe, make_method, method_config
from prunex_jax.methods.hsadmm.method import HsadmmConfig
from prunex_jax.methods.topk import TopkConfig
from prunex_jax.models import make_model
from prunex_jax.models.settings import ModelConfig
from prunex_jax.shrink import trace_model
from prunex_jax.sparsity import CountLimits, uniform_keep_counts

TrafficOf = Callable[[int], Traffic]

DEVICES_PER_HOST, BASE_HOSTS, NUM_HOSTS = 4, 2, 16
HOSTS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
# Row -> its published speed-up over 8 devices on 64.
PUBLISHED: Mapping[str, float] = {DENSE: 5.81, "prunex": 6.75, "topk": 3.71}
# PruneX sends 60 % less than dense averaging.
_PRUNEX_SHARE = 0.4
# Assumptions: 64 images of a ResNet-50 on one device, and an HPC network. The ratios
# on 16 hosts hardly depend on them.
_STEP_SECONDS, _HOP_SECONDS = 0.17, 10e-6
_DENSITY = 0.5
# Speeds in Mbit/s between which one is looked for.
_SLOWEST, _FASTEST = 1e-3, 1e9


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Alike machines whose steps are predicted; links inside them cost nothing."""

    link: Link  # Between hosts; the devices of a host share it.
    batch_seconds: float  # Computation of one device for the whole batch.

    def step(
        self, traffic_of: TrafficOf, num_hosts: int, is_strong: bool = True
    ) -> "Step":
        """Predicts a step on a number of hosts.

        Args:
          traffic_of: Number of hosts -> what a step sends, as by `steady_traffic`.
          num_hosts: Size of the cluster.
          is_strong: Whether the batch stays the same, so that the computation of a
            device divides by their number and what is sent does not. Otherwise every
            device has as much to do as one of 16 hosts.
        """
        sent = traffic_of(num_hosts)
        sharing = DEVICES_PER_HOST * (num_hosts if is_strong else NUM_HOSTS)
        exchange = self.link.seconds(sent.host_bytes, sent.hops)
        return Step(self.batch_seconds / sharing, exchange)

    def speed_up(self, traffic_of: TrafficOf) -> float:
        """Of 64 devices over 8, as by formula, without what compressing costs."""
        base, point = (self.step(traffic_of, n) for n in (BASE_HOSTS, NUM_HOSTS))
        return base.seconds / point.seconds


class Step(NamedTuple):
    """Computation of a device, and the exchange between hosts."""

    compute_seconds: float
    host_seconds: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.compute_seconds + self.host_seconds


@dataclasses.dataclass(frozen=True)
class Setting:
    """The published setting as it can be told from the figures."""

    cluster: Cluster  # With a link on which dense averaging is as fast as published.
    traffic: Mapping[str, TrafficOf]  # Row -> number of hosts -> what a step sends.
    titles: Mapping[str, str]  # Row -> what it is called.

    @property
    def r(self) -> float:
        """Time of a dense exchange over that of computing, on 16 hosts."""
        step = self.cluster.step(self.traffic[DENSE], NUM_HOSTS)
        return step.host_seconds / step.compute_seconds

    def speed_up(self, row: str) -> float:
        """As of `Cluster`."""
        return self.cluster.speed_up(self.traffic[row])

    def implied_overhead(self, row: str) -> float:
        """Seconds per step beyond the model that would explain a published speed-up."""
        sizes = (BASE_HOSTS, NUM_HOSTS)
        base, point = (self.cluster.step(self.traffic[row], n).seconds for n in sizes)
        return (base - PUBLISHED[row] * point) / (PUBLISHED[row] - 1)


def published_setting(
    model_name: str = "resnet50", image_size: int = 224, num_classes: int = 1000
) -> Setting:
    """Works out the published setting for a network."""
    recipe = _recipe(model_name, image_size, num_classes)
    traffic = {row: _traffic_of(config, recipe) for row, (_, config) in _ROWS.items()}
    dense = traffic[DENSE]

    def prunex(num_hosts: int) -> Traffic:
        sent = dense(num_hosts)
        return Traffic(_PRUNEX_SHARE * sent.host_bytes, sent.hops)

    def cluster(megabits: float) -> Cluster:
        link = Link(megabits, _HOP_SECONDS)
        return Cluster(link, _STEP_SECONDS * NUM_HOSTS * DEVICES_PER_HOST)

    megabits = megabits_for(PUBLISHED[DENSE], lambda x: cluster(x).speed_up(dense))
    titles = {row: title for row, (title, _) in _ROWS.items()}
    return Setting(
        cluster(megabits),
        traffic={DENSE: dense, "prunex": prunex, **traffic},
        titles={DENSE: titles[DENSE], "prunex": "PruneX, as published", **titles},
    )


def megabits_for(speed_up: float, speed_up_at: Callable[[float], float]) -> float:
    """Finds the speed of a link at which something is as fast as wanted.

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


def published_extrapolations(setting: Setting) -> tuple[Extrapolation, ...]:
    """Step times from 1 to 4,096 hosts, in strong and in weak scaling."""
    names = {
        True: "the same batch",
        False: "as many images on every device (speed-ups are efficiencies)",
    }
    found = []
    for is_strong, name in names.items():
        times = {
            row: {n: setting.cluster.step(sent, n, is_strong).seconds for n in HOSTS}
            for row, sent in setting.traffic.items()
        }
        found.append(Extrapolation(f"PruneX's cluster, {name}", setting.titles, times))
    return tuple(found)


def published_notes(setting: Setting) -> tuple[str, ...]:
    """What the setting is and what it says of the published speed-ups."""
    speed_ups = ", ".join(
        f"{title} {setting.speed_up(row):.2f}"
        + (f" (published {PUBLISHED[row]})" if row in PUBLISHED else "")
        for row, title in setting.titles.items()
    )
    overhead = setting.implied_overhead("topk") / _STEP_SECONDS
    return (
        f"PruneX's cluster: {NUM_HOSTS} hosts of {DEVICES_PER_HOST} devices, a link on "
        f"which dense averaging gets its published {PUBLISHED[DENSE]}x over 8 devices, "
        f"which makes r {setting.r:.2f}; {_STEP_SECONDS} s of computation per step on "
        f"64 devices and {1e6 * _HOP_SECONDS:g} us per hop are assumed, links inside "
        "hosts and compressing cost nothing, and nothing overlaps.",
        f"Speed-ups of 64 devices over 8 there: {speed_ups}. The published one of "
        f"Top-K would need {overhead:.1f} times the computation of a step for choosing "
        "and merging.",
    )


# Row -> title and method.
_ROWS: Mapping[str, tuple[str, MethodConfig]] = {
    DENSE: ("dense", method_config("dense")),
    "dense-int8": ("dense, int8", method_config("dense", wire_dtype="int8")),
    "hsadmm": (
        "hsadmm, half of the channels, every step",
        method_config("hsadmm", hsadmm=HsadmmConfig(sync_period=1)),
    ),
    "hsadmm-int8-8": (
        "hsadmm, half of the channels, int8, every 8 steps",
        method_config("hsadmm", hsadmm=HsadmmConfig(sync_period=8), wire_dtype="int8"),
    ),
    "powersgd": ("powersgd, rank 2", method_config("powersgd")),
    "topk": ("topk, 1 %", method_config("topk", topk=TopkConfig(density=0.01))),
    "diloco": ("diloco, every 8 steps", method_config("diloco")),
}


def _recipe(model_name: str, image_size: int, num_classes: int) -> Recipe:
    image_shape = (image_size, image_size, 3)
    trace = trace_model(
        make_model(ModelConfig(name=model_name), image_shape, num_classes)
    )
    sizes = {group.name: group.size for group in trace.groups}
    return Recipe(
        config=method_config(),
        inner=optax.identity(),
        learning_rate=optax.constant_schedule(0.1),
        groups=trace.groups,
        keep_counts=uniform_keep_counts(CountLimits(sizes), _DENSITY),
        shapes=trace.shapes,
        total_steps=1000,
    )


def _traffic_of(config: MethodConfig, recipe: Recipe) -> TrafficOf:
    method = make_method(dataclasses.replace(recipe, config=config))

    def traffic(num_hosts: int) -> Traffic:
        shape = {HOST_AXIS: num_hosts, DEVICE_AXIS: DEVICES_PER_HOST}
        return steady_traffic(method, recipe.shapes, shape, recipe.keep_counts)

    return traffic
