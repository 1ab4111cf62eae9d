"""A sandbox: namespaces of their own for a command, that vanish with it.

    supervisor -> setpriv -> unshare -> process 1 (`sandbox_init`) -> command

Networks, mounts and processes that the command makes belong to the namespaces of
process 1 and have no name outside of them. When process 1 ends, by whatever signal, the
kernel removes everything; and it ends with the supervisor: a pipe between the two is
closed, and the kernel sends SIGKILL down the chain.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from prunex_jax.base.errors import UserError
from prunex_jax.base.signals import handling
from prunex_jax.compare.drill import sandbox_init

Kind = Literal["root", "user"]

# Programs of util-linux, iproute2 and hostname that the testbed runs.
_TOOLS = ("setpriv", "unshare", "nsenter", "mount", "umount", "ip", "tc", "hostname")
# Other users than root often lack them in PATH.
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_PROBE = """set -e
mount -n -t tmpfs tmpfs /run
touch /run/hosts && mount -n --bind /run/hosts /etc/hosts
ip link add br0 type bridge
ip netns add h0
ip link add v0 type veth peer name eth0 netns h0
tc qdisc replace dev v0 root tbf rate 10mbit burst 20kb limit 1mb
nsenter --net=/run/netns/h0 unshare --uts hostname host0
"""
_PROBE_SECONDS = 20.0
# Seconds that the kernel has to remove a sandbox, before its processes are killed.
_END_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_in_sandbox() -> bool:
    """Whether this process runs in a sandbox, not just with its environment."""
    marker = os.environ.get(sandbox_init.MARKER)
    return marker is not None and marker == sandbox_init.mounts_identity()


def sandbox_kind() -> tuple[Kind | None, str]:
    """Finds out by trying which kind of sandbox is possible, and why, for a message.

    "root" if the rights of this process suffice, "user" if those in a user namespace
    do, None if there can be no sandbox.
    """
    environ = _environ()
    missing = [tool for tool in _TOOLS if not shutil.which(tool, path=environ["PATH"])]
    if missing:
        return None, f"no program {', '.join(missing)}; install util-linux and iproute2"
    if not Path("/etc/hosts").exists():
        return None, "no file /etc/hosts to put names of hosts in its place"
    reasons = []
    kinds: tuple[Kind, ...] = ("root", "user") if os.geteuid() == 0 else ("user",)
    for kind in kinds:
        obstacle = _obstacle(kind, environ)
        if obstacle is None:
            return kind, "namespaces work here"
        reasons.append(f"as {kind}: {obstacle}")
    return None, f"the kernel does not allow namespaces ({'; '.join(reasons)})"


def run_in_sandbox(command: Sequence[str], *, grace_seconds: float = 30.0) -> int:
    """Runs a command in a sandbox of its own until its end; gives its exit code.

    SIGINT, SIGTERM and SIGHUP are handed on to the command, once each: its side is in a
    session of its own, which a Ctrl-C does not reach. Whatever else the command has
    started ends with it; SIGKILL to this process ends all of it too. Call it from the
    main thread, which alone can listen to signals.

    Args:
      command: Argument vector; standard streams, folder and environment are ours.
      grace_seconds: How long the command may go on after the first such signal.
    Returns:
      128 + N if signal N has ended it, so 137 if it was killed after `grace_seconds`.
    Raises:
      UserError: There can be no sandbox here, or there is no command.
    """
    if not command:
        raise UserError("no command for the sandbox; name a program")
    kind, reason = sandbox_kind()
    if kind is None:
        raise UserError(f"no sandbox is possible here: {reason}")
    inner, ours = os.pipe()
    deadline = float("inf")

    def hand_on(number: int, frame: object) -> None:
        nonlocal deadline
        del frame
        deadline = min(deadline, time.monotonic() + grace_seconds)
        with contextlib.suppress(BrokenPipeError):  # process 1 has just ended
            os.write(ours, bytes([number]))

    try:
        with handling(_HANDED_ON, hand_on):
            process = _start(kind, inner, command)
            with open(os.pidfd_open(process.pid)) as watch:
                while process.poll() is None and time.monotonic() < deadline:
                    # A signal does not end this wait, so it must be short.
                    select.select([watch], [], [], _LOOK_SECONDS)
    finally:
        os.close(ours)  # ends process 1, if it has not ended
    return _end(process)


def _start(
    kind: Kind, lifeline: int, command: Sequence[str]
) -> subprocess.Popen[bytes]:
    init = [sys.executable, "-I", "-S", sandbox_init.__file__, str(lifeline)]
    try:
        return subprocess.Popen(
            [*_chain(kind), *init, *command],
            env=_environ(),
            pass_fds=(lifeline,),
            start_new_session=True,
        )
    finally:
        os.close(lifeline)


def _end(process: subprocess.Popen[bytes]) -> int:
    try:
        code = process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return code if code >= 0 else 128 - code


def _chain(kind: Kind) -> list[str]:
    user = ["-U", "-r"] if kind == "user" else []
    unshare = ["unshare", *user, *"-n -m -p -f --kill-child --mount-proc".split()]
    return ["setpriv", "--pdeathsig", "KILL", *unshare]


def _environ() -> Mapping[str, str]:
    """Our environment, in which the tools are found."""
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    more = [folder for folder in _SYSTEM_FOLDERS if folder not in path]
    return {**os.environ, "PATH": os.pathsep.join([*path, *more])}


def _obstacle(kind: Kind, environ: Mapping[str, str]) -> str | None:
    """What goes wrong in a sandbox of this kind; None if nothing does."""
    try:
        done = subprocess.run(
            [*_chain(kind), "sh", "-c", _PROBE],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"trying it took more than {_PROBE_SECONDS:g} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[0] if lines else f"unshare ended with {done.returncode}"
