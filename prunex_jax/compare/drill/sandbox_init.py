"""Process 1 of a sandbox: starts the command, hands signals on, ends with it.

`sandbox` runs this file by its path, as the first process of its own process, network
and mount namespaces; it needs nothing but the standard library. When it ends, for
whatever reason, the kernel kills all other processes of the sandbox and removes their
networks and mounts. So it ends as soon as the command has ended, or the supervisor.
It also collects the exit codes of processes whose parents are gone.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

# Set for the command; holds the identity of the sandbox's mounts.
MARKER = "PRUNEX_JAX_SANDBOX"
_NOT_STARTED = 127


def mounts_identity() -> str:
    """Names the mount namespace of this process, as in 'mnt:[4026531841]'."""
    return os.readlink("/proc/self/ns/mnt")


def run_init(lifeline: int, command: Sequence[str]) -> int:
    """Prepares the sandbox, runs the command to its end and gives its exit code.

    `lifeline` is a pipe whose other end only the supervisor has. Every byte in it is
    the number of a signal for the command; when it is closed, the sandbox ends.
    """
    os.set_inheritable(lifeline, False)
    # Not for process 1, which nobody inside may end by accident.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # What is written under /run, names of network namespaces among it, stays inside.
    # -n: without a note about it in the /run that everybody sees.
    subprocess.run(["mount", "-n", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    try:
        child = os.posix_spawnp(
            command[0],
            list(command),
            {**os.environ, MARKER: mounts_identity()},
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them
        )
    except OSError as error:
        sys.stderr.write(f"error: {command[0]}: {error.strerror}\n")
        return _NOT_STARTED
    threading.Thread(target=_listen, args=(lifeline, child), daemon=True).start()
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _listen(lifeline: int, child: int) -> None:
    while number := os.read(lifeline, 1):
        try:
            os.kill(child, number[0])
        except ProcessLookupError:  # has just ended
            return
    os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run_init(int(sys.argv[1]), sys.argv[2:]))
