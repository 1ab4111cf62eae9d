"""Hosts on one machine: where a process runs, and what joins it with the others.

`NamespaceHosts` are network namespaces of a sandbox, joined by a bridge:

    host 0: eth0 10.77.0.1 -- v0 --+
    host 1: eth0 10.77.0.2 -- v1 --+-- br0      (one veth pair per host)
    host 2: eth0 10.77.0.3 -- v2 --+

`LoopbackHosts` are the fallback: plain processes of this machine.
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
from typing import Self

from prunex_jax.base.errors import UserError
from prunex_jax.compare.drill.sandbox import is_in_sandbox

MAX_HOSTS = 250
_COMMAND_SECONDS = 20.0
_KILL_SECONDS = 5.0
_NAMES = Path("/run/hosts")


class Hosts(abc.ABC):
    """Hosts of this machine that exist while the context is entered.

    Leaving it ends the processes that still run on namespaces, and removes those.
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

    def set_link(self, host: int, is_up: bool) -> None:
        """Takes the link of a host down, or up again: nothing arrives meanwhile."""
        raise NotImplementedError

    def _make(self, undo: contextlib.ExitStack) -> None:  # noqa: B027
        """Makes the hosts, and says how to remove what is made."""


class NamespaceHosts(Hosts):
    """Hosts as network namespaces of the sandbox that this process is in.

    Programs there see `host0`, `host1`, ... as their hostname, and can resolve those of
    all.
    """

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

    def set_link(self, host: int, is_up: bool) -> None:
        """See `Hosts`."""
        run_tool(f"ip link set v{host} {'up' if is_up else 'down'}")

    def _make(self, undo: contextlib.ExitStack) -> None:
        self._make_names(undo)
        run_tool("ip link set lo up")
        run_tool("ip link add br0 type bridge")
        undo.callback(run_tool, "ip link del br0")
        run_tool("ip link set br0 up")
        for host in range(self.num_hosts):
            self._make_host(host, undo)
        undo.callback(self._kill_all)

    def _make_names(self, undo: contextlib.ExitStack) -> None:
        hosts = range(self.num_hosts)
        own = "".join(f"{self.address(host)} host{host}\n" for host in hosts)
        _NAMES.write_text(own + Path("/etc/hosts").read_text())
        undo.callback(_NAMES.unlink)
        run_tool(f"mount -n --bind {_NAMES} /etc/hosts")
        undo.callback(run_tool, "umount -n /etc/hosts")

    def _make_host(self, host: int, undo: contextlib.ExitStack) -> None:
        run_tool(f"ip netns add h{host}")
        undo.callback(run_tool, f"ip netns del h{host}")
        run_tool(f"ip link add v{host} type veth peer name eth0 netns h{host}")
        # Namespaces go some time after their names, the interfaces are to go at once.
        undo.callback(run_tool, f"ip link del v{host}")
        for end in (f"ip link set v{host}", f"ip -n h{host} link set eth0"):
            if Path("/proc/sys/net/ipv6").exists():
                # No address of its own, which the kernel would announce and check.
                run_tool(f"{end} addrgenmode none")
            run_tool(f"{end} up")
        run_tool(f"ip link set v{host} master br0")
        run_tool(f"ip -n h{host} link set lo up")
        run_tool(f"ip -n h{host} addr add {self.address(host)}/24 dev eth0")

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
    """Hosts that all are this machine, if there can be no sandbox; see `Hosts`."""

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


def run_tool(command: str, text: str = "") -> None:
    """Runs a command of the system with a text as its input; OSError if it failed."""
    done = subprocess.run(
        command.split(),
        input=text,
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECONDS,
    )
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
