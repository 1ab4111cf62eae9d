"""GPUs that processes take, and refusal of one that two of them take.

Launchers bind GPUs to processes, and what they bind may overlap (`--gpu-bind`). A
process sees its own GPUs only, so that none can tell alone: all say what they are about
to take, once they have been joined and before a driver starts.
"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping, Sequence

from prunex_jax.base.errors import AgreedError
from prunex_jax.mesh.hosts import local_machine
from prunex_jax.processes.gpus import GpuFiles, visible_gpus

# Set to 1 by those who let processes share a GPU on purpose, as with NVIDIA's MPS.
_SHARE_GPUS = "PRUNEX_SHARE_GPUS"


@dataclasses.dataclass(frozen=True)
class Reservation:
    """What one process is about to take."""

    machine: str  # Equal for processes on the same machine, and for them only.
    name: str  # Of the machine, for people.
    gpus: tuple[str, ...] = ()  # Names that all processes of the machine have for them.
    is_shared: bool = False  # Whether others may take them too.

    @property
    def text(self) -> str:
        """The reservation as one line."""
        return json.dumps(dataclasses.asdict(self))


def read_reservation(text: str) -> Reservation:
    """The reservation that a text was made from."""
    fields = json.loads(text)
    return Reservation(**{**fields, "gpus": tuple(fields["gpus"])})


def has_gpu_support(platforms: str | None) -> bool:
    """Whether jax is going to look for GPUs: its plugin is installed, and allowed.

    `platforms` are those that are allowed, as `JAX_PLATFORMS` lists them; None for all.
    """
    gpu = ("cuda", "rocm", "gpu")
    if platforms and not any(name in platforms.lower() for name in gpu):
        return False
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return any(name in plugin.name for plugin in plugins for name in gpu)


def reserve_gpus(
    environ: Mapping[str, str],
    positions: Sequence[int] | None,
    files: GpuFiles | None = None,
) -> Reservation:
    """What this process is about to take.

    Without GPUs that are cut into parts and are not named by part, because it cannot be
    known who takes which. `positions` are those of its GPUs among those that it sees,
    None for all.
    """
    files = files or GpuFiles()
    visible = visible_gpus(environ, files)
    if positions is None:
        positions = range(len(visible))
    taken = (visible[i] for i in positions if 0 <= i < len(visible))
    # One machine that stands for several hosts still has each of its GPUs once.
    machine = local_machine({})
    return Reservation(
        machine.key,
        machine.name,
        tuple(name for name in taken if not files.is_partitioned(name)),
        environ.get(_SHARE_GPUS, "") not in ("", "0"),
    )


def check_reservations(reservations: Sequence[Reservation]) -> str:
    """Refuses processes that take the same GPU of a machine, for all of them.

    Gives a warning where both share it on purpose; empty for nothing.
    """
    owners: dict[tuple[str, str], int] = {}
    warning = ""
    for process, reservation in enumerate(reservations):
        for gpu in reservation.gpus:
            first = owners.setdefault((reservation.machine, gpu), process)
            if first == process:
                continue
            both = f"process {first} and by process {process}"
            text = f"GPU {gpu} of {reservation.name} is taken by {both}"
            if not (reservation.is_shared and reservations[first].is_shared):
                raise AgreedError(
                    f"{text}: bind GPUs to one process each (srun --gpu-bind, "
                    "--gpus-per-task, CUDA_VISIBLE_DEVICES, JAX_LOCAL_DEVICE_IDS), or "
                    f"set {_SHARE_GPUS}=1 to let processes share them"
                )
            warning = warning or f"{text}, as {_SHARE_GPUS} allows"
    return warning
