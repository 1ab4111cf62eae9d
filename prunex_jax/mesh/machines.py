"""Finds out on which machine each process of the run is."""

import collections
import dataclasses
import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import jax

from prunex_jax.base.errors import UserError
from prunex_jax.mesh.agreement import gather_texts


@dataclasses.dataclass(frozen=True)
class Machine:
    """One computer, whatever number of processes it runs."""

    key: str  # Equal for processes on the same machine, and for them only.
    name: str  # For people.


def local_machine(
    environ: Mapping[str, str] = os.environ,
    boot_id_file: Path = Path("/proc/sys/kernel/random/boot_id"),
) -> Machine:
    """Identifies the machine this process runs on.

    The kernel's boot identifier is the same in all containers of a machine, where
    the hostname is not, and differs between machines that were given the same name.

    Args:
      environ: Environment variables; `PRUNEX_HOST_ID` replaces the identity, to
        make one machine several hosts, or several one.
      boot_id_file: Where the kernel tells its boot identifier; without it the
        hostname is the identity.

    Returns:
      The machine.
    """
    chosen = environ.get("PRUNEX_HOST_ID")
    name = chosen or socket.gethostname()
    try:
        identity = chosen or boot_id_file.read_text().strip() or name
    except OSError:
        identity = name
    return Machine(hashlib.sha256(identity.encode()).hexdigest(), name)


def gather_machines() -> tuple[Machine, ...]:
    """Exchanges the machines between all processes of the run.

    Collectives:
      As `gather_texts`.

    Raises:
      UserError: Processes have different numbers of devices.
    """
    local = local_machine()
    if jax.process_count() == 1:
        return (local,)
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        # The gather below needs equal counts, and so does every mesh.
        listed = ", ".join(f"process {p}: {n}" for p, n in sorted(counts.items()))
        raise UserError(
            f"processes have different numbers of devices ({listed}): give each the "
            "same number (CUDA_VISIBLE_DEVICES, --gpus-per-task, or "
            "topology.cpu_devices for simulated ones)"
        )
    texts = gather_texts(f"{local.key} {local.name}")
    return tuple(Machine(*text.split(" ", 1)) for text in texts)
