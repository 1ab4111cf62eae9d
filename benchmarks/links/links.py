"""What joins the hosts of a study: how fast it is, and what was sent over it.

A token bucket limits both ends of the link of a namespace (see
`prunex_jax.compare.drill.hosts`), so it is equally fast both ways, at the same time.
What its far end has received is what a host has sent: data, 0.75 % of it for headers,
and at most 0.4 % of what it receives for acknowledgements. Plain processes are the
fallback, neither limited nor counted. On a cluster there is nothing to make:
`ClusterLinks` only counts.
"""

import abc
import contextlib
from typing import ClassVar, Literal

from benchmarks.links.kernel import interface_bytes
from prunex_jax.base.errors import UserError
from prunex_jax.compare.drill.hosts import (
    Hosts,
    LoopbackHosts,
    NamespaceHosts,
    run_tool,
)

MIN_MEGABITS = 0.01
MAX_MEGABITS = 40_000.0
# Jumbo frames, as between hosts of a cluster. In frames of 1500 headers are 4.6 % of
# what is sent, and two cores cannot send 1 Gbit/s.
_MTU = 9000
FRAME_BYTES = _MTU + 14
_CONGESTION = "net/ipv4/tcp_congestion_control"
# A token bucket holds a frame, and what a link sends while the kernel's timer may be
# late: without it fast links are too slow; the more, the faster are short messages.
_BURST_SECONDS = 0.0003
# What may wait at an end of a link, at least and in time: what a few senders have on
# the way to one receiver, so that TCP does not collapse.
_QUEUE_BYTES = 4_000_000
_QUEUE_SECONDS = 0.4


class Links(abc.ABC):
    """What joins the hosts of a study.

    Attributes:
      kind: namespaces (limited and counted) | loopback (neither) | cluster (counted).
      num_hosts: How many it joins.
    """

    kind: ClassVar[Literal["namespaces", "loopback", "cluster"]]
    num_hosts: int

    def shape(self, megabits: float | None) -> None:
        """Sets the speed of every link, both ways. Links should be idle meanwhile.

        Args:
          megabits: In Mbit/s, with all headers; None lifts the limit.
        Raises:
          UserError: These links cannot be limited so.
        """
        if megabits is not None:
            raise UserError(
                f"a link of {megabits:g} Mbit/s needs namespaces; links of {self.kind} "
                "hosts are never limited"
            )

    @abc.abstractmethod
    def sent_bytes(self) -> tuple[int, ...] | None:
        """What every host has sent so far, with all headers; None if not counted."""


class LinkedHosts(Hosts, Links):
    """Hosts of this machine, and what joins them."""

    interface: ClassVar[str]  # Name that a host's network interface has on that host.


class ShapedHosts(NamespaceHosts, LinkedHosts):
    """Namespaces whose links are limited and counted."""

    kind, interface = "namespaces", "eth0"

    def _make(self, undo: contextlib.ExitStack) -> None:
        super()._make(undo)
        for host in range(self.num_hosts):
            for end in (f"ip link set v{host}", f"ip -n h{host} link set eth0"):
                # Large packets are cut into frames before they are limited and counted.
                run_tool(f"{end} mtu {_MTU} gso_max_segs 1")
            # Every kernel has it, and it does not wait between packets of its own
            # accord.
            command = f"nsenter --net=/run/netns/h{host} tee /proc/sys/{_CONGESTION}"
            run_tool(command, "reno")
        run_tool(f"ip link set br0 mtu {_MTU}")

    def shape(self, megabits: float | None) -> None:
        """See `Links`."""
        limit = _limit(megabits)
        for host in range(self.num_hosts):
            run_tool(f"tc qdisc replace dev v{host} root {limit}")
            run_tool(f"tc -n h{host} qdisc replace dev eth0 root {limit}")

    def sent_bytes(self) -> tuple[int, ...]:
        """See `Links`; all are read at once, at the far ends of the links."""
        found = interface_bytes()
        return tuple(found[f"v{host}"][0] for host in range(self.num_hosts))


class PlainHosts(LoopbackHosts, LinkedHosts):
    """Processes of this machine, over links that are neither limited nor counted."""

    kind, interface = "loopback", "lo"

    def sent_bytes(self) -> None:
        """See `Links`."""


class ClusterLinks(Links):
    """The links that the hosts of a cluster have: real ones, used unchanged."""

    kind = "cluster"

    def __init__(self, num_hosts: int) -> None:
        self.num_hosts = num_hosts

    def sent_bytes(self) -> tuple[int, ...] | None:
        """What this machine has sent so far, over all interfaces but the loopback."""
        found = interface_bytes()
        if not found:
            return None
        return (sum(sent for name, (_, sent) in found.items() if name != "lo"),)


def _limit(megabits: float | None) -> str:
    """Arguments of `tc` for an end of a link."""
    if megabits is None:
        return "noqueue"
    if not MIN_MEGABITS <= megabits <= MAX_MEGABITS:
        raise UserError(
            f"a link of {megabits:g} Mbit/s is impossible; take {MIN_MEGABITS:g} to "
            f"{MAX_MEGABITS:g}, or no limit"
        )
    per_second = megabits * 1e6 / 8
    burst = FRAME_BYTES + int(per_second * _BURST_SECONDS)
    queue = max(_QUEUE_BYTES, int(per_second * _QUEUE_SECONDS))
    return f"tbf rate {round(megabits * 1e6)}bit burst {burst} limit {queue}"
