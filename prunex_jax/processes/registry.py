"""Where one process of a run takes down who else is there.

Each line that is sent is one JSON object. To the registry: {"process": 1, "of": 4,
"name": "node17", "run": "", "unusable": ""}. From it: {"noted": true} at once,
{"say": text} while others are missing, and {"go": true} or {"refuse": text} at the end.
With {"go": true} come the number of those who are there and the place among them, which
are others than at first where a run may go on without the missing. The process at the
registry has place 0.
"""

import contextlib
import dataclasses
import json
import select
import socket
import time
from collections.abc import Callable
from typing import Any, Self

from prunex_jax.base.errors import UserError

# Between two lines that say for whom processes wait.
SAY_EVERY = 10.0
# How long a registry waits for the next one to come before it looks at the time.
ACCEPT_SECONDS = 0.3
_LONGEST_LINE = 4096
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of a run.

    Attributes:
      number: Which one it is, as it was started.
      of: How many processes the run was started with.
      name: Its machine.
      run: The run folder, where it looks for others of the run without process 0; empty
        where it was told whom to meet.
      unusable: What its machine's name means there, if other machines cannot reach it
        by that and jax is going to try; else empty.
    """

    number: int
    of: int
    name: str
    run: str = ""
    unusable: str = ""


@dataclasses.dataclass(frozen=True)
class LastStart:
    """What is known of the last start of a run.

    Attributes:
      run: The run folder, which says so.
      addresses: Where each process was met, by number; may be empty.
    """

    run: str = ""
    addresses: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Call:
    """What a process knows of its run, and wants of it.

    Attributes:
      me: This process.
      port: Of the registry, wherever it is.
      at_least: How many are enough, once nobody else is waited for.
      last: The last start of the run, by as many processes.
      say: Called with a line every ten seconds of waiting.
    """

    me: Member
    port: int
    at_least: int
    last: LastStart
    say: Say


@dataclasses.dataclass(frozen=True)
class Roster:
    """Who is there.

    Attributes:
      num_there: How many processes go on.
      place: Which of them this is.
      coordinator: Address of the one at place 0, as HOST:PORT.
      addresses: On place 0, where each process of the run was met last, by the number
        it was started with; empty where it never was. () on the others.
    """

    num_there: int
    place: int
    coordinator: str
    addresses: tuple[str, ...] = ()


class Registry:
    """Takes down who is there, and tells all whether they go on; leaving it hangs up.

    Args:
      server: Where the others come, with a timeout.
      call: What this process knows and wants.
      address: How the others reach this machine.
      seconds: How long to wait.
    """

    def __init__(
        self, server: socket.socket, call: Call, address: str, seconds: float
    ) -> None:
        self._server, self._call, self._seconds = server, call, seconds
        self._me = call.me
        self._names = {call.me.number: call.me.name}
        self._unusable = {call.me.number: call.me.unusable}
        self._connections: dict[int, socket.socket] = {}
        self._addresses = dict(enumerate(call.last.addresses)) | {
            call.me.number: address
        }
        self._problem = ""
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in self._connections.values():
            connection.close()

    def wait(self) -> Roster | None:
        """Waits a moment for somebody to come.

        Returns:
          Who is there once all are, or enough when the time is over; None before.
        Raises:
          UserError: They are refused, and all who are there were told why.
        """
        self._accept()
        waited = time.monotonic() - self._began
        is_over = waited > self._seconds
        if is_over or self._is_complete():
            self._drop_those_who_left()
        if is_over and not self._is_complete() and not self._problem:
            self._judge_the_missing()
        if is_over or self._is_complete() or self._problem:
            return self._settle()
        self._say_sometimes(waited)
        return None

    def _settle(self) -> Roster:
        self._problem = self._problem or self._unusable_name()
        for process, connection in self._connections.items():
            send(connection, self._answer(process))
        if self._problem:
            raise UserError(self._problem)
        at = joined(self._addresses[self._me.number], self._call.port)
        return Roster(len(self._names), 0, at, self._all_addresses())

    def _is_complete(self) -> bool:
        return len(self._names) == self._me.of

    def _judge_the_missing(self) -> None:
        if len(self._names) >= self._call.at_least:
            self._tell(f"going on without {self._missing()}")
            return
        self._problem = (
            f"{self._missing()} did not come within {self._seconds:.0f} s; start it, "
            "or check that it can reach the coordinator (config.run.join_seconds sets "
            "how long to wait)"
        )

    def _say_sometimes(self, waited: float) -> None:
        now = time.monotonic()
        if now - self._said > SAY_EVERY:
            self._said = now
            self._tell(f"waiting for {self._missing()}, {waited:.0f} s")

    def _places(self) -> list[int]:
        """Numbers of those who are there in their new order: first this process."""
        mine = self._me.number
        return sorted(self._names, key=lambda number: (number != mine, number))

    def _all_addresses(self) -> tuple[str, ...]:
        return tuple(self._addresses.get(number, "") for number in range(self._me.of))

    def _answer(self, process: int) -> dict[str, Any]:
        if self._problem:
            return {"refuse": self._problem}
        places = self._places()
        return {"go": True, "of": len(places), "process": places.index(process)}

    def _accept(self) -> None:
        try:
            connection, peer = self._server.accept()
        except TimeoutError:
            return
        connection.settimeout(5)
        who = _who(connection)
        if who is None or not self._is_of_this_run(who):
            connection.close()
            return
        self._addresses[who.number] = self._address_of(connection)
        name = f"{who.name} ({_bare(peer[0])})"
        self._problem = self._problem_with(who, name)
        if self._problem:
            send(connection, {"refuse": self._problem})
            connection.close()
            return
        if who.number in self._connections:
            self._connections[who.number].close()
        self._names[who.number] = name
        self._unusable[who.number] = who.unusable
        self._connections[who.number] = connection
        send(connection, {"noted": True})

    def _is_of_this_run(self, who: Member) -> bool:
        """Whether it was told to come here, or is to meet those who are left."""
        if self._me.number == 0 and not who.run:
            return True
        return who.run == self._call.last.run

    def _problem_with(self, who: Member, name: str) -> str:
        if who.of != self._me.of:
            return (
                f"process {who.number} on {name} was started as one of {who.of} "
                f"processes, and process {self._me.number} on {self._me.name} as one "
                f"of {self._me.of}; give both the same --num_processes"
            )
        if who.number in self._names and not self._has_left(who.number):
            return (
                f"process {who.number} is there twice, on {self._names[who.number]} "
                f"and on {name}; give each process its own --process_id"
            )
        return ""

    def _unusable_name(self) -> str:
        """Why those of several machines cannot go on; empty if they can."""
        if len({self._addresses[number] for number in self._names}) == 1:
            return ""
        for number, name in self._names.items():
            if meaning := self._unusable[number]:
                return (
                    f"on the machine of process {number}, {name}, its own name means "
                    f"{meaning}, where jax cannot be reached from the other machines: "
                    "put the address that they know into /etc/hosts there, for that "
                    "name"
                )
        return ""

    def _address_of(self, connection: socket.socket) -> str:
        """How the others reach who has come: on this machine, as they reach this."""
        peer, own = connection.getpeername()[0], connection.getsockname()[0]
        return self._addresses[self._me.number] if peer == own else _bare(peer)

    def _drop_those_who_left(self) -> None:
        for process in filter(self._has_left, tuple(self._connections)):
            self._connections.pop(process).close()
            del self._names[process]

    def _has_left(self, process: int) -> bool:
        """Whether a process that was there has hung up, as to start again."""
        connection = self._connections.get(process)
        if connection is None:
            return False
        # It says nothing after its first line: what can be read is its end.
        return bool(select.select([connection], [], [], 0)[0])

    def _missing(self) -> str:
        missing = [p for p in range(self._me.of) if p not in self._names]
        listed = ", ".join(map(str, missing[:8])) + (", ..." if missing[8:] else "")
        return f"process {listed} of {self._me.of}"

    def _tell(self, text: str) -> None:
        self._call.say(text)
        for connection in self._connections.values():
            send(connection, {"say": text})


def listen(port: int, host: str = "") -> socket.socket:
    """Opens a port for a registry, on IPv6 as well where there is any.

    Args:
      port: The port.
      host: Address of this machine; the port is opened on all addresses it has.
    Raises:
      OSError: The port is taken.
    """
    del host
    try:
        server = socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    except OSError:  # No IPv6 here; what else is wrong shows now.
        server = socket.create_server(("", port))
    server.settimeout(ACCEPT_SECONDS)
    return server


def joined(host: str, port: int) -> str:
    """HOST:PORT.

    Example:
      >>> joined('10.0.0.1', 4000), joined('fd00::1', 4000)
      ('10.0.0.1:4000', '[fd00::1]:4000')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a line; who has gone away is missed elsewhere."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def read_line(connection: socket.socket) -> str:
    """Reads up to a line's end; empty at the end of the connection."""
    read = b""
    while not read.endswith(b"\n") and len(read) < _LONGEST_LINE:
        byte = connection.recv(1)
        if not byte:
            return ""
        read += byte
    return read.decode()


def _who(connection: socket.socket) -> Member | None:
    """Who has come; None for somebody who is not of any run."""
    try:
        who = json.loads(read_line(connection))
        texts = (str(who[key]) for key in ("name", "run", "unusable"))
        return Member(int(who["process"]), int(who["of"]), *texts)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _bare(address: str) -> str:
    """An IPv4 address as such, where a socket for both kinds calls it IPv6."""
    return address.removeprefix("::ffff:")
