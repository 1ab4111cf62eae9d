"""Waits until all processes of a run are there, and says for whom.

jax waits for them in silence, and aborts the process where one does not come, or comes
twice. So before jax is started process 0 listens at the coordinator's address, all
others say who they are there, and process 0 answers when everybody has. Then it frees
the port, on which jax's service starts.

Each line that is sent is one JSON object: {"process": 1, "of": 4, "name": "node17"} to
process 0; {"say": text} from it while others are missing, and {"go": true} or
{"refuse": text} at the end. With {"go": true} come the number of those who are there
and the place among them, which are others than at first where a run may go on without
the missing.
"""

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from prunex_jax.base.command import warn
from prunex_jax.base.errors import UserError

# Between two lines that say for whom processes wait.
_SAY_EVERY = 10.0
_RETRY_EVERY = 0.3
Say = Callable[[str], None]


def call_roll(
    coordinator: str,
    num_processes: int,
    process_id: int,
    *,
    seconds: float,
    at_least: int = 0,
    name: str = "",
    say: Say | None = None,
) -> tuple[int, int]:
    """Returns when all processes of the run are there, or enough of them.

    Args:
      coordinator: Address of process 0 as HOST:PORT.
      num_processes: Processes of the run.
      process_id: This one.
      seconds: How long to wait.
      at_least: How many are enough after that, process 0 among them; 0 for all.
      name: Of this machine; its hostname where empty.
      say: Called with a line every ten seconds of waiting; None prints it.
    Returns:
      Processes that are there, and which of them this is.
    Raises:
      UserError: Somebody does not come, two have the same number, processes disagree on
        how many they are, or the port is taken. Everybody who is there gets it.
    """
    name, say = name or socket.gethostname(), say or warn
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    if process_id == 0:
        with _listener(coordinator, int(port)) as server:
            desk = _Desk(server, num_processes, at_least or num_processes, name, say)
            return desk.gather(seconds), 0
    return _report(host, int(port), num_processes, process_id, name, seconds, say)


class _Desk:
    """Where process 0 takes down who is there."""

    def __init__(
        self,
        server: socket.socket,
        num_processes: int,
        at_least: int,
        name: str,
        say: Say,
    ) -> None:
        self._server, self._num_processes, self._say = server, num_processes, say
        self._at_least = at_least
        self._names = {0: name}
        self._connections: dict[int, socket.socket] = {}
        self._problem = ""

    def gather(self, seconds: float) -> int:
        """Takes down everybody, or refuses all; returns how many go on."""
        began = said = time.monotonic()
        with contextlib.ExitStack() as open_ones:
            while not (self._problem or self._is_complete()):
                now = time.monotonic()
                if now - began > seconds and len(self._names) >= self._at_least:
                    self._tell(f"going on without {self._missing()}")
                    break
                if now - began > seconds:
                    self._problem = (
                        f"{self._missing()} did not come within {seconds:.0f} s; start "
                        "it, or check that it can reach the coordinator "
                        "(config.run.join_seconds sets how long to wait)"
                    )
                elif now - said > _SAY_EVERY:
                    said = now
                    self._tell(f"waiting for {self._missing()}, {now - began:.0f} s")
                self._accept(open_ones)
            for process, connection in self._connections.items():
                _send(connection, self._answer(process))
        if self._problem:
            raise UserError(self._problem)
        return len(self._names)

    def _answer(self, process: int) -> dict[str, Any]:
        if self._problem:
            return {"refuse": self._problem}
        there = sorted(self._names)
        return {"go": True, "of": len(there), "process": there.index(process)}

    def _accept(self, open_ones: contextlib.ExitStack) -> None:
        try:
            connection, address = self._server.accept()
        except TimeoutError:
            return
        open_ones.enter_context(connection)
        connection.settimeout(5)
        try:
            who = json.loads(_line(connection))
            process, of, name = int(who["process"]), int(who["of"]), str(who["name"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # Somebody who is not of any run.
        name = f"{name} ({address[0].removeprefix('::ffff:')})"
        if of != self._num_processes:
            self._problem = (
                f"process {process} on {name} was started as one of {of} processes, "
                f"and process 0 on {self._names[0]} as one of {self._num_processes}; "
                "give both the same --num_processes"
            )
        elif process in self._names and not self._has_left(process):
            self._problem = (
                f"process {process} is there twice, on {self._names[process]} and on "
                f"{name}; give each process its own --process_id"
            )
        if self._problem:
            _send(connection, {"refuse": self._problem})
        else:
            self._names[process] = name
            self._connections[process] = connection

    def _is_complete(self) -> bool:
        """Whether all are there, and nobody has left since."""
        if len(self._names) == self._num_processes:
            for process in filter(self._has_left, tuple(self._connections)):
                del self._names[process], self._connections[process]
        return len(self._names) == self._num_processes

    def _has_left(self, process: int) -> bool:
        """Whether a process that was there has hung up, as to start again."""
        connection = self._connections.get(process)
        if connection is None:
            return False
        # It says nothing after its first line: what can be read is its end.
        return bool(select.select([connection], [], [], 0)[0])

    def _missing(self) -> str:
        missing = [p for p in range(self._num_processes) if p not in self._names]
        listed = ", ".join(map(str, missing[:8])) + (", ..." if missing[8:] else "")
        return f"process {listed} of {self._num_processes}"

    def _tell(self, text: str) -> None:
        self._say(text)
        for connection in self._connections.values():
            _send(connection, {"say": text})


def _report(
    host: str,
    port: int,
    num_processes: int,
    process_id: int,
    name: str,
    seconds: float,
    say: Say,
) -> tuple[int, int]:
    """Tells process 0 that this process is there, and waits for its answer.

    Who answers otherwise, or hangs up, is not process 0 at its desk: as after a
    restart, when the service of the run before may still be there. Then it is tried
    again.
    """
    began = said = time.monotonic()
    who = {"process": process_id, "of": num_processes, "name": name}
    reason: Exception = ConnectionError("nobody answers")
    while (spent := time.monotonic() - began) <= seconds:
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                # Longer than process 0 is ever silent.
                connection.settimeout(3 * _SAY_EVERY)
                _send(connection, who)
                return _answer_of(connection, say)
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = error
        if time.monotonic() - said > _SAY_EVERY:
            said = time.monotonic()
            say(f"waiting for process 0 at {host}:{port}, {spent:.0f} s ({reason})")
        time.sleep(_RETRY_EVERY)
    raise UserError(
        f"process 0 at {host}:{port} cannot be reached within {seconds:.0f} s "
        f"({reason}); check that it runs, its address, and that no firewall is between"
    ) from reason


def _answer_of(connection: socket.socket, say: Say) -> tuple[int, int]:
    while text := _line(connection):
        answer = json.loads(text)
        if "go" in answer:
            return answer["of"], answer["process"]
        if "refuse" in answer:
            raise UserError(answer["refuse"])
        say(answer["say"])
    raise ConnectionError("it has hung up")


@contextlib.contextmanager
def _listener(coordinator: str, port: int) -> Iterator[socket.socket]:
    try:
        try:
            server = socket.create_server(
                ("::", port), family=socket.AF_INET6, dualstack_ipv6=True
            )
        except OSError:  # No IPv6 here; what else is wrong shows now.
            server = socket.create_server(("", port))
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at the coordinator's port {port} ({error}); give "
            f"another one than --coordinator={coordinator}"
        ) from error
    with server:
        server.settimeout(_RETRY_EVERY)
        yield server


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    # Who has gone away is missed elsewhere.
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _line(connection: socket.socket, limit: int = 4096) -> str:
    """Reads up to a line's end; empty at the end of the connection."""
    read = b""
    while not read.endswith(b"\n") and len(read) < limit:
        byte = connection.recv(1)
        if not byte:
            return ""
        read += byte
    return read.decode()
