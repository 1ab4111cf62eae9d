"""What the Linux kernel tells and grants: network interfaces, memory, cores.

Where a kernel tells nothing, answers are empty; where it grants nothing, nothing
happens.
"""

import contextlib
import os
from pathlib import Path


def interface_bytes() -> dict[str, tuple[int, int]]:
    """Interface of this network namespace -> bytes received and sent so far."""
    path, found = Path("/proc/self/net/dev"), {}
    if path.exists():
        for line in path.read_text().splitlines()[2:]:
            name, _, counts = line.partition(":")
            numbers = counts.split()
            found[name.strip()] = int(numbers[0]), int(numbers[8])
    return found


def peak_memory(pid: int | str = "self") -> int:
    """Largest resident set of a process so far, in bytes; 0 if there is no such."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    kilobytes = [line.split()[1] for line in status.splitlines() if "VmHWM" in line]
    return 1024 * int(kilobytes[0]) if kilobytes else 0


def forget_peak_memory() -> None:
    """Starts the record of this process's largest resident set anew, where it can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def share_cores(process: int, processes: int) -> None:
    """Confines this process to its share of the cores, as if they were its machine.

    Threads of many processes on few cores would wait for each other, which costs more
    than an exchange does, and differs from run to run. Call it before any of them
    starts: a runtime starts as many as there are cores.

    Args:
      process: Number of this one, of those that share the cores.
      processes: How many those are; if more than cores, each has one with others.
    """
    if processes < 2 or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[process % len(cores) :: processes])


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
