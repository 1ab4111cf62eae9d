"""Which GPUs of a machine one of its processes takes, and refusal of those taken twice.

No driver is asked: starting one here would claim memory on every GPU before the process
knows which ones it may use.

Launchers bind GPUs to processes, and what they bind may overlap (`--gpu-bind`). A
process sees its own GPUs only, so that none can tell alone: all say what they are about
to take, once they have been joined and before a driver starts.
"""

import dataclasses
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prunex_jax.base.errors import AgreedError, UserError
from prunex_jax.mesh.hosts import local_machine

# Set to 1 by those who let processes share a GPU on purpose, as with NVIDIA's MPS.
_SHARE_GPUS = "PRUNEX_SHARE_GPUS"
_REMEDY = (
    "give each its own GPUs (--gpus-per-task=N for Slurm's sbatch and srun, "
    "CUDA_VISIBLE_DEVICES or JAX_LOCAL_DEVICE_IDS)"
)


def _can_open(file: Path) -> bool:
    """Whether the launcher lets this process use a GPU; cgroups refuse at opening."""
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
    except PermissionError:
        return False
    except OSError:
        pass  # Something else is wrong with it, or it is busy.
    return True


@dataclasses.dataclass(frozen=True)
class GpuFiles:
    """What the kernel tells of the GPUs of this machine, without starting a driver."""

    devices: Path = Path("/dev")  # Folder of device files.
    driver: Path = Path("/proc/driver/nvidia")  # In which it describes itself.
    # Whether this process may use a GPU, by its device file.
    can_open: Callable[[Path], bool] = _can_open

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the GPUs, in order: the numbers of their device files.

        Processes in containers see the same numbers, though not all of them.
        """
        nvidia = _numbers(self.devices, "nvidia")
        if nvidia or not self.are_of_amd:
            return nvidia
        return _numbers(self.devices / "dri", "renderD")

    @property
    def are_of_amd(self) -> bool:
        """Whether AMD's driver for computing is there, and no GPU of NVIDIA."""
        has_nvidia = any(self.devices.glob("nvidia[0-9]*"))
        return not has_nvidia and (self.devices / "kfd").exists()

    @property
    def usable(self) -> tuple[str, ...]:
        """Names of the GPUs that this process may use."""
        start = "dri/renderD" if self.are_of_amd else "nvidia"
        file_of = {name: self.devices / f"{start}{name}" for name in self.present}
        return tuple(name for name, file in file_of.items() if self.can_open(file))

    def name_of(self, uuid: str) -> str:
        """The number of the device file of a GPU; its own name where none is known."""
        for file in self.driver.glob("gpus/*/information"):
            text = file.read_text()
            own = re.search(r"GPU UUID:\s*(\S+)", text)
            minor = re.search(r"Device Minor:\s*(\d+)", text)
            # CUDA takes the beginning of a name for the whole.
            if own and minor and own[1].startswith(uuid):
                return minor[1]
        return uuid

    def is_partitioned(self, name: str) -> bool:
        """Whether a GPU is cut into parts (MIG), which several processes may take."""
        return any(self.driver.glob(f"capabilities/gpu{name}/mig/gi*"))


def _numbers(folder: Path, start: str) -> tuple[str, ...]:
    """What follows a start in names of files, where it is a number; in order."""
    ends = [file.name[len(start) :] for file in folder.glob(f"{start}[0-9]*")]
    return tuple(sorted((end for end in ends if end.isdigit()), key=int))


def visible_gpus(
    environ: Mapping[str, str], files: GpuFiles | None = None
) -> tuple[str, ...]:
    """Names of the GPUs that CUDA or ROCm will show to this process, in their order.

    The same for all processes of the machine, whatever number each has for a GPU, as
    far as can be known. `CUDA_VISIBLE_DEVICES` chooses among the GPUs when it is set,
    and on machines with AMD GPUs `ROCR_VISIBLE_DEVICES` before `HIP_VISIBLE_DEVICES`.

    Example:
      >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "6,MIG-77"})
      ('6', 'MIG-77')
    """
    files = files or GpuFiles()
    found, names = files.present, ["CUDA_VISIBLE_DEVICES"]
    parts = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    if parts.startswith("MIG"):  # Of a container, which sees the file of the whole GPU.
        found = tuple(parts.split(","))
    if files.are_of_amd:
        hip = "HIP_VISIBLE_DEVICES"
        names = ["ROCR_VISIBLE_DEVICES", hip if hip in environ else names[0]]
    for name in filter(environ.__contains__, names):
        # Each of AMD's variables chooses among what the one before has left.
        found = _chosen(_listed(environ[name]), found, files)
        if not found:
            break
    return found


def _chosen(
    entries: list[str], among: tuple[str, ...], files: GpuFiles
) -> tuple[str, ...]:
    """Names of the entries of a variable, which are positions or names themselves."""
    first = [str(position) for position in range(len(entries))]
    if entries == first and len(entries) < len(among) and among == files.present:
        # Where a launcher bars GPUs, positions count those that are left.
        usable = files.usable
        among = usable if len(usable) >= len(entries) else among
    return tuple(_name(entry, among, files) for entry in entries)


def _name(entry: str, among: tuple[str, ...], files: GpuFiles) -> str:
    if not entry.isdecimal():
        return files.name_of(entry)
    return among[int(entry)] if int(entry) < len(among) else entry


def _listed(text: str) -> list[str]:
    """Entries of a list of GPUs, up to the first that is invalid, as CUDA reads it."""
    entries = []
    for entry in map(str.strip, text.split(",")):
        if entry in ("", "-1", "NoDevFiles"):
            break
        entries.append(entry)
    return entries


def split_gpus(
    num_visible: int,
    local_rank: int,
    local_tasks: int,
    gpus_per_task: int | None = None,
    num_given: int | None = None,
) -> tuple[int, ...]:
    """The GPUs of one of several processes, by position among those it sees.

    A process takes an equal, contiguous share of what it sees. It takes everything it
    sees when it is alone, or when the launcher has already bound GPUs to processes:
    then other processes see other GPUs under the same numbers.

    Args:
      num_visible: GPUs this process sees.
      local_rank: Position of this process among those of the machine.
      local_tasks: Processes of this run on the machine.
      gpus_per_task: GPUs the launcher promised to each process, if it did.
      num_given: GPUs of the machine that the run may use, as far as anybody knows.
    Raises:
      UserError: The GPUs cannot be split evenly, or processes would share some.
    Example:
      >>> split_gpus(8, local_rank=1, local_tasks=4)
      (2, 3)
      >>> split_gpus(2, local_rank=1, local_tasks=4, num_given=8)  # by the launcher
      (0, 1)
    """
    if local_tasks == 1 or _is_bound(
        num_visible, local_tasks, gpus_per_task, num_given
    ):
        return tuple(range(num_visible))
    if num_visible < local_tasks:
        raise UserError(
            f"{local_tasks} processes of this machine see the same {num_visible} GPUs, "
            f"so some would be claimed twice: start {num_visible} processes or fewer "
            f"per machine, or {_REMEDY}"
        )
    share, rest = divmod(num_visible, local_tasks)
    if rest:
        counts = [str(n) for n in range(1, num_visible + 1) if num_visible % n == 0]
        raise UserError(
            f"{num_visible} GPUs cannot be split evenly over the {local_tasks} "
            f"processes of this machine: start {', '.join(counts[:-1])} or "
            f"{counts[-1]} processes per machine, or {_REMEDY}"
        )
    return tuple(range(local_rank * share, (local_rank + 1) * share))


def _is_bound(
    num_visible: int, local_tasks: int, gpus_per_task: int | None, num_given: int | None
) -> bool:
    """Whether every process sees GPUs of its own."""
    if num_given is None:
        # One GPU for each is what launchers bind most often.
        return gpus_per_task == num_visible or (num_visible == 1 < local_tasks)
    fits = num_visible * local_tasks <= num_given
    return fits and (num_visible < num_given or gpus_per_task == num_visible)


def idle_gpus(num_taken: int, local_tasks: int, num_given: int | None) -> str:
    """Says that a run leaves GPUs of the machine idle; empty if it does not.

    Example:
      >>> idle_gpus(1, local_tasks=2, num_given=4)
      '2 of the 4 GPUs of this machine are left idle: its 2 processes take 1 each'
    """
    num_idle = (num_given or 0) - num_taken * local_tasks
    if num_idle <= 0:
        return ""
    return (
        f"{num_idle} of the {num_given} GPUs of this machine are left idle: its "
        f"{local_tasks} processes take {num_taken} each"
    )


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
