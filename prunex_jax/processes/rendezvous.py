"""Waits until all processes of a run are there, and says for whom.

jax waits for them in silence, and aborts the process where one does not come, or comes
twice. So before jax is started process 0 keeps a registry at the coordinator's address,
all others say who they are there, and process 0 answers when everybody has. Then it
frees the port, on which jax's service starts.

Where process 0 does not come, and a run may go on without some, the others meet at the
first of them: each keeps a registry, and leaves it for one at an address before its
own. Two parts of a run must never both go on, so more than half of it has to be there.
"""

import contextlib
import dataclasses
import ipaddress
import json
import socket
import time
from collections.abc import Iterator

from prunex_jax.base.command import warn
from prunex_jax.base.errors import UserError
from prunex_jax.processes.registry import (
    ACCEPT_SECONDS,
    SAY_EVERY,
    Call,
    LastStart,
    Member,
    Registry,
    Roster,
    Say,
    joined,
    listen,
    read_line,
    send,
)

# How long somebody who keeps a registry of its own tries another address.
_LOOK_SECONDS = 1.0
# How long something else may answer at the address of process 0. The service of the run
# before is there as long as its processes take to end.
STRANGER_SECONDS = 60.0


class _UnreachableError(UserError):
    """Process 0 cannot be reached."""


class _RefusedError(UserError):
    """A registry has refused this process."""


class _NoRegistryError(Exception):
    """Whoever answers at an address, if anybody does, keeps no registry there."""


class _StrangerError(_NoRegistryError):
    """Somebody answers there."""


def register(
    coordinator: str,
    num_processes: int,
    process_id: int,
    *,
    seconds: float,
    at_least: int = 0,
    last: LastStart | None = None,
    name: str = "",
    needs_name: bool = False,
    say: Say | None = None,
) -> Roster:
    """Returns who is there when all processes of the run are, or enough of them.

    Args:
      coordinator: Address of process 0 as HOST:PORT.
      num_processes: Processes of the run.
      process_id: This one.
      seconds: How long to wait; once more where the others meet without process 0.
      at_least: How many are enough after that; 0 for all. Process 0 has to be among
        them, unless this is more than half and `last` says where the others were.
      last: The last start of the run, if it was started before.
      name: Of this machine; its hostname where empty.
      needs_name: Whether others are going to be given the address that this machine's
        hostname means here, as jax does on CPUs.
      say: Called with a line every ten seconds of waiting; None prints it.
    Raises:
      UserError: Somebody does not come, two have the same number, processes disagree on
        how many they are, the port is taken, or the name of one of several machines
        cannot be used. Everybody who is there gets it.
    """
    hostname = socket.gethostname()
    unusable = unusable_meaning(hostname) if needs_name else ""
    me = Member(process_id, num_processes, name or hostname, unusable=unusable)
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    last = last or LastStart()
    if len(last.addresses) != num_processes:  # Another number was started then.
        last = LastStart(last.run)
    call = Call(me, int(port), at_least or num_processes, last, say or warn)
    if process_id == 0:
        try:
            server = listen(call.port, host)
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen at the coordinator's port {port} ({error}); "
                f"give another one than --coordinator={coordinator}"
            ) from error
        with server, Registry(server, call, host, seconds) as registry:
            while (roster := registry.wait()) is None:
                pass
            return roster
    try:
        return _report(host, call, seconds)
    except _UnreachableError:
        if not _may_meet_elsewhere(call):
            raise
    call.say(f"process 0 at {coordinator} did not come: the others meet without it")
    me = dataclasses.replace(me, run=last.run)
    return _meet_elsewhere(dataclasses.replace(call, me=me), seconds)


def _may_meet_elsewhere(call: Call) -> bool:
    """Whether others than process 0 know where to meet, and no second part could."""
    met = dict(enumerate(call.last.addresses))
    is_known = call.last.run != "" and met.get(call.me.number, "") != ""
    return is_known and call.me.of // 2 < call.at_least < call.me.of


def _report(host: str, call: Call, seconds: float) -> Roster:
    """Tells process 0 that this process is there, and waits for its answer.

    Who answers otherwise, or hangs up, is not process 0 at its registry, as after a
    restart when the service of the run before may still be there. It is tried again.
    """
    at, began = joined(host, call.port), time.monotonic()
    said, reason, free = began, "nobody answers", began
    while (spent := time.monotonic() - began) <= seconds:
        try:
            return _answer_of(_come_to(host, call, timeout=5), at, call.say)
        except _StrangerError as error:
            reason = f"what answers there is something else: {error}"
        except _NoRegistryError as error:
            reason, free = str(error), time.monotonic()
        if time.monotonic() - free > STRANGER_SECONDS:
            raise _UnreachableError(
                f"port {call.port} of {host} is taken: for {STRANGER_SECONDS:.0f} s "
                "something has answered there that is not process 0 of this run; give "
                f"all processes another one than --coordinator={at}"
            )
        if time.monotonic() - said > SAY_EVERY:
            said = time.monotonic()
            call.say(f"waiting for process 0 at {at}, {spent:.0f} s ({reason})")
        time.sleep(ACCEPT_SECONDS)
    raise _UnreachableError(
        f"process 0 at {at} cannot be reached within {seconds:.0f} s ({reason}); check "
        "that it runs, its address, and that no firewall is between"
    )


def _meet_elsewhere(call: Call, seconds: float) -> Roster:
    """Meets those who are left at the first address where somebody keeps a registry."""
    own = call.last.addresses[call.me.number]
    addresses = list(dict.fromkeys(filter(None, call.last.addresses)))
    before = addresses[: addresses.index(own)]
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            return _roster_of_first(call, before, own, left)
        except _NoRegistryError:  # The registry is given up, perhaps for one before it.
            time.sleep(ACCEPT_SECONDS)
    raise UserError(
        f"neither process 0 nor enough others were met within {2 * seconds:.0f} s at "
        f"port {call.port} of {', '.join(addresses)}; start them, or lower "
        "config.run.min_processes"
    )


def _roster_of_first(call: Call, before: list[str], own: str, seconds: float) -> Roster:
    """Who is there, by the first registry, which may be that of this process."""
    try:
        server = listen(call.port, own)
    except OSError:  # Another process of this machine keeps it.
        found = _find_registry([*before, own], call)
    else:
        with server, Registry(server, call, own, seconds) as registry:
            while not (found := _find_registry(before, call)):
                if roster := registry.wait():
                    return roster
    if not found:
        raise _NoRegistryError("nobody keeps a registry")
    return _answer_of(*found, call.say)


def _find_registry(hosts: list[str], call: Call) -> tuple[socket.socket, str] | None:
    """The first registry of those that there is, which has noted this process."""
    for host in hosts:
        with contextlib.suppress(_NoRegistryError):
            connection = _come_to(host, call, timeout=_LOOK_SECONDS)
            return connection, joined(host, call.port)
    return None


def _come_to(host: str, call: Call, *, timeout: float) -> socket.socket:
    """The connection to a registry that has noted this process.

    Raises:
      _NoRegistryError: There is none.
      UserError: This process is refused.
    """
    try:
        connection = socket.create_connection((host, call.port), timeout=timeout)
    except OSError as error:
        raise _NoRegistryError(str(error)) from error
    with _nobody_else(), contextlib.ExitStack() as on_error:
        on_error.enter_context(connection)
        me = call.me
        who = {"process": me.number, "of": me.of, "name": me.name}
        send(connection, {**who, "run": me.run, "unusable": me.unusable})
        answer = json.loads(read_line(connection))
        if "refuse" in answer:
            raise _RefusedError(answer["refuse"])
        answer["noted"]
        # Longer than a registry is ever silent.
        connection.settimeout(3 * SAY_EVERY)
        on_error.pop_all()
        return connection


def _answer_of(connection: socket.socket, at: str, say: Say) -> Roster:
    """What a registry answers at the end.

    Raises:
      _NoRegistryError: It hangs up, or falls silent.
      UserError: This process is refused.
    """
    with connection, _nobody_else():
        while text := read_line(connection):
            answer = json.loads(text)
            if "go" in answer:
                return Roster(answer["of"], answer["process"], at)
            if "refuse" in answer:
                raise _RefusedError(answer["refuse"])
            say(answer["say"])
        raise ConnectionError("it has hung up")


@contextlib.contextmanager
def _nobody_else() -> Iterator[None]:
    """Tells what others send, who are no registry, from what a registry says."""
    try:
        yield
    except _RefusedError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _StrangerError(str(error)) from error


def unusable_meaning(name: str) -> str:
    """What a name of this machine means here, if others cannot reach it by that.

    Returns:
      An address of this machine for itself only, or "no address"; else empty.
    Example:
      >>> unusable_meaning('localhost'), unusable_meaning('10.0.0.1')
      ('127.0.0.1', '')
    """
    try:
        meant = [entry[4][0] for entry in socket.getaddrinfo(name, None)]
    except OSError:
        return "no address"
    # The first one counts.
    return str(meant[0]) if ipaddress.ip_address(meant[0]).is_loopback else ""
