"""Which GPUs of a machine one of its processes takes.

No driver is asked: starting one here would claim memory on every GPU before the process
knows which ones it may use.
"""

from collections.abc import Mapping
from pathlib import Path

from prunex_jax.base.errors import UserError

_REMEDY = (
    "give each its own GPUs (--gpus-per-task=N for Slurm's sbatch and srun, "
    "CUDA_VISIBLE_DEVICES or JAX_LOCAL_DEVICE_IDS)"
)


def count_visible_gpus(
    environ: Mapping[str, str], device_dir: Path = Path("/dev")
) -> int | None:
    """Counts the GPUs that CUDA or ROCm will show to this process.

    Args:
      environ: Environment variables; `CUDA_VISIBLE_DEVICES` decides when it is set, and
        on machines with AMD GPUs `ROCR_VISIBLE_DEVICES` and `HIP_VISIBLE_DEVICES`.
      device_dir: Where device files are; they are counted otherwise.
    Returns:
      The number of GPUs, or None when there are none or they cannot be counted.
    Example:
      >>> count_visible_gpus({"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
      4
    """
    names = ["CUDA_VISIBLE_DEVICES"]
    if _has_amd(device_dir):
        names += ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]
    listed = [_count_listed(environ[name]) for name in names if name in environ]
    # Each of AMD's variables chooses among what the others leave.
    return (min(listed) if listed else count_present_gpus(device_dir)) or None


def count_present_gpus(device_dir: Path = Path("/dev")) -> int:
    """Counts the device files of NVIDIA's GPUs, or of AMD's where there are none."""
    files = device_dir.glob("nvidia[0-9]*")
    nvidia = sum(file.name[len("nvidia") :].isdigit() for file in files)
    if nvidia or not _has_amd(device_dir):
        return nvidia
    return len(list((device_dir / "dri").glob("renderD[0-9]*")))


def _has_amd(device_dir: Path) -> bool:
    """Whether AMD's driver for computing is there, and no GPU of NVIDIA."""
    has_nvidia = any(device_dir.glob("nvidia[0-9]*"))
    return not has_nvidia and (device_dir / "kfd").exists()


def _count_listed(text: str) -> int:
    count = 0
    for entry in text.split(","):
        # CUDA ignores everything from the first invalid entry on.
        if not entry.strip() or entry.strip() in ("-1", "NoDevFiles"):
            break
        count += 1
    return count


def split_gpus(
    num_visible: int,
    local_rank: int,
    local_tasks: int,
    gpus_per_task: int | None = None,
    num_given: int | None = None,
) -> tuple[int, ...]:
    """Chooses the GPUs of one of several processes on a machine.

    A process takes an equal, contiguous share of what it sees. It takes everything it
    sees when it is alone, or when the launcher has already bound GPUs to processes:
    then other processes see other GPUs under the same numbers.

    Args:
      num_visible: GPUs this process sees.
      local_rank: Position of this process among those of the machine.
      local_tasks: Processes of this run on the machine.
      gpus_per_task: GPUs the launcher promised to each process, if it did.
      num_given: GPUs of the machine that the run may use, as far as anybody knows.
    Returns:
      Positions among the visible GPUs, increasing.
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
    num_visible: int,
    local_tasks: int,
    gpus_per_task: int | None,
    num_given: int | None,
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
