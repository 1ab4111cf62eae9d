"""Hosts on one machine: where a process runs, how fast its link is, what it has sent.

`NamespaceHosts` are network namespaces of a sandbox, joined by a bridge:

    host 0: eth0 10.77.0.1 -- v0 --+
    host 1: eth0 10.77.0.2 -- v1 --+-- br0      (one veth pair per host)
    host 2: eth0 10.77.0.3 -- v2 --+

A token bucket limits both ends of a pair, so a link is equally fast both ways, at the
same time. What v0 has received is what host 0 has sent: data, 0.75 % of it for headers,
and at most 0.4 % of what it receives for acknowledgements. `LoopbackHosts` are the
fallback: plain processes, neither limited nor counted. On a cluster there is nothing to
make: `ClusterLinks` only counts.
"""

import abc
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from prunex_jax.base.errors import UserError
from prunex_jax.bench.links.kernel import interface_bytes
from prunex_jax.bench.links.sandbox import is_in_sandbox

MAX_HOSTS = 250
MIN_MEGABITS = 0.01
MAX_MEGABITS = 40_000.0
# Jumbo frames, as between hosts of a cluster. In frames of 1500 headers are 4.6 % of
# what is sent, and two cores cannot send 1 Gbit/s.
_MTU = 9000
_FRAME_BYTES = _MTU + 14
# A token bucket holds a frame, and what a link sends while the kernel's timer may be
# late: without it fast links are too slow; the more, the faster are short messages.
_BURST_SECONDS = 0.0003
# What may wait at an end of a link, at least and in time: what a few senders have on
# the way to one receiver, so that TCP does not collapse.
_QUEUE_BYTES = 4_000_000
_QUEUE_SECONDS = 0.4
_COMMAND_SECONDS = 20.0
_KILL_SECONDS = 5.0
_NAMES = Path("/run/hosts")


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


class Hosts(Links):
    """Hosts of this machine that exist while the context is entered.

    Leaving it ends the processes that still run on namespaces, and removes those.

    Raises:
      UserError: Not a possible number.
    """

    def __init__(self, num_hosts: int) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise UserError(f"{num_hosts} hosts are impossible; take 1 to {MAX_HOSTS}")
        self.num_hosts = num_hosts
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self._make(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    @abc.abstractmethod
    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs another one on a host.

        It becomes that other program: the process id is that of the program, and open
        files that it inherits stay open.
        """

    @abc.abstractmethod
    def address(self, host: int) -> str:
        """IPv4 address of a host."""

    @abc.abstractmethod
    def interface(self, host: int) -> str:
        """Name that a host's network interface has on that host."""

    def _make(self, undo: contextlib.ExitStack) -> None:
        """Makes the hosts, and says how to remove what is made."""


class NamespaceHosts(Hosts):
    """Hosts as network namespaces of the sandbox that this process is in.

    Programs there see `host0`, `host1`, ... as their hostname, and can resolve those
    of all.

    Raises:
      UserError: This process is not in a sandbox, or that is no possible number.
    """

    kind = "namespaces"

    def __init__(self, num_hosts: int) -> None:
        super().__init__(num_hosts)
        if not is_in_sandbox():
            raise UserError("namespaces need a sandbox; start it with run_in_sandbox")

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """See `Hosts`."""
        # gloo binds to the address that the hostname resolves to.
        script = 'hostname "$0" && exec "$@"'
        enter = ["nsenter", f"--net={_namespace(host)}", "unshare", "--uts"]
        return [*enter, "sh", "-c", script, f"host{host}", *argv]

    def address(self, host: int) -> str:
        """See `Hosts`."""
        return f"10.77.0.{host + 1}"

    def interface(self, host: int) -> str:
        """See `Hosts`."""
        del host
        return "eth0"

    def shape(self, megabits: float | None) -> None:
        """See `Links`."""
        limit = _limit(megabits)
        for host in range(self.num_hosts):
            _run(f"tc qdisc replace dev v{host} root {limit}")
            _run(f"tc -n h{host} qdisc replace dev eth0 root {limit}")

    def sent_bytes(self) -> tuple[int, ...]:
        """See `Links`; all are read at once, at the far ends of the links."""
        found = interface_bytes()
        return tuple(found[f"v{host}"][0] for host in range(self.num_hosts))

    def set_link(self, host: int, is_up: bool) -> None:
        """Takes the link of a host down, or up again: nothing arrives meanwhile."""
        _run(f"ip link set v{host} {'up' if is_up else 'down'}")

    def _make(self, undo: contextlib.ExitStack) -> None:
        self._make_names(undo)
        _run("ip link set lo up")
        _run(f"ip link add br0 mtu {_MTU} type bridge")
        undo.callback(_run, "ip link del br0")
        _run("ip link set br0 up")
        for host in range(self.num_hosts):
            self._make_host(host, undo)
        undo.callback(self._kill_all)

    def _make_names(self, undo: contextlib.ExitStack) -> None:
        hosts = range(self.num_hosts)
        own = "".join(f"{self.address(host)} host{host}\n" for host in hosts)
        _NAMES.write_text(own + Path("/etc/hosts").read_text())
        undo.callback(_NAMES.unlink)
        _run(f"mount -n --bind {_NAMES} /etc/hosts")
        undo.callback(_run, "umount -n /etc/hosts")

    def _make_host(self, host: int, undo: contextlib.ExitStack) -> None:
        _run(f"ip netns add h{host}")
        undo.callback(_run, f"ip netns del h{host}")
        _run(f"ip link add v{host} type veth peer name eth0 netns h{host}")
        # Namespaces go some time after their names, the interfaces are to go at once.
        undo.callback(_run, f"ip link del v{host}")
        for end in (f"ip link set v{host}", f"ip -n h{host} link set eth0"):
            # Large packets are cut into frames before they are limited and counted.
            _run(f"{end} mtu {_MTU} gso_max_segs 1")
            if Path("/proc/sys/net/ipv6").exists():
                # No address of its own, which the kernel would announce and check.
                _run(f"{end} addrgenmode none")
            _run(f"{end} up")
        _run(f"ip link set v{host} master br0")
        _run(f"ip -n h{host} link set lo up")
        _run(f"ip -n h{host} addr add {self.address(host)}/24 dev eth0")
        # Every kernel has it, and it does not wait between packets of its own accord.
        setting = "net/ipv4/tcp_congestion_control"
        command = f"nsenter --net={_namespace(host)} tee /proc/sys/{setting}"
        _run(command, "reno")

    def _kill_all(self) -> None:
        """Kills what runs on these hosts, and waits until it is gone."""
        hosts = range(self.num_hosts)
        namespaces = {_namespace(host).stat().st_ino for host in hosts}
        deadline = time.monotonic() + _KILL_SECONDS
        while alive := _processes_in(namespaces):
            if time.monotonic() > deadline:
                raise OSError(f"processes {alive} on hosts cannot be killed")
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


class LoopbackHosts(Hosts):
    """Hosts that all are this machine, if there can be no sandbox; see `Hosts`.

    Example:
      >>> with LoopbackHosts(2) as hosts:
      ...     hosts.address(1), hosts.command(1, ['true'])[-1], hosts.sent_bytes()
      ('127.0.0.1', 'true', None)
    """

    kind = "loopback"

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """See `Hosts`; where it can be, it ends with this process, which starts it."""
        del host
        if not shutil.which("setpriv"):
            return list(argv)
        # This process may have ended before the kernel was asked to watch over it.
        script = '[ "$PPID" = "$0" ] && exec "$@"'
        watched = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", script]
        return [*watched, str(os.getpid()), *argv]

    def address(self, host: int) -> str:
        """See `Hosts`."""
        del host
        return "127.0.0.1"

    def interface(self, host: int) -> str:
        """See `Hosts`."""
        del host
        return "lo"

    def sent_bytes(self) -> None:
        """See `Links`."""


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
    burst = _FRAME_BYTES + int(per_second * _BURST_SECONDS)
    queue = max(_QUEUE_BYTES, int(per_second * _QUEUE_SECONDS))
    return f"tbf rate {round(megabits * 1e6)}bit burst {burst} limit {queue}"


def _namespace(host: int) -> Path:
    return Path(f"/run/netns/h{host}")


def _processes_in(namespaces: Collection[int]) -> list[int]:
    """Ids of the processes in network namespaces, given as their inodes."""
    found = []
    for entry in Path("/proc").iterdir():
        # Processes end meanwhile, and those that have ended have no namespace.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "ns/net").stat().st_ino in namespaces:
                found.append(int(entry.name))
    return found


def _run(command: str, text: str = "") -> None:
    done = subprocess.run(
        command.split(),
        input=text,
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECONDS,
    )
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
