"""Counts the GPUs a process sees, and gives each process of a machine its share.

It owns the answer to "which GPUs are mine" before jax has started. It leaves the
number of processes on the machine to `clusters`. In the flow it comes before
`launcher`, which joins the two.
"""

from collections.abc import Mapping
from pathlib import Path

from prunex_jax.base.errors import UserError


def count_visible_gpus(
    environ: Mapping[str, str], device_dir: Path = Path("/dev")
) -> int | None:
    """Counts the NVIDIA GPUs that CUDA will show to this process.

    The driver is not asked: starting it here would claim memory on every GPU before
    the process knows which ones it may use.

    Args:
      environ: Environment variables; `CUDA_VISIBLE_DEVICES` decides when it is set.
      device_dir: Where device files are; its `nvidia0`, `nvidia1`, ... are counted
        otherwise.

    Returns:
      The number of GPUs, or None when there are none or they cannot be counted.

    Example:
      >>> count_visible_gpus({"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
      4
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        files = device_dir.glob("nvidia[0-9]*")
        return sum(file.name[len("nvidia") :].isdigit() for file in files) or None
    count = 0
    for entry in listed.split(","):
        # CUDA ignores everything from the first invalid entry on.
        if not entry.strip() or entry.strip() in ("-1", "NoDevFiles"):
            break
        count += 1
    return count or None


def split_gpus(
    num_visible: int,
    local_rank: int,
    local_tasks: int,
    gpus_per_task: int | None = None,
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

    Returns:
      Positions among the visible GPUs, increasing.

    Raises:
      UserError: The GPUs cannot be split evenly.

    Example:
      >>> split_gpus(8, local_rank=1, local_tasks=4)
      (2, 3)
      >>> split_gpus(1, local_rank=3, local_tasks=4)  # bound by the launcher
      (0,)
    """
    is_bound = num_visible < local_tasks or gpus_per_task == num_visible
    if local_tasks == 1 or is_bound:
        return tuple(range(num_visible))
    share, rest = divmod(num_visible, local_tasks)
    if rest:
        counts = [n for n in range(1, num_visible + 1) if num_visible % n == 0]
        raise UserError(
            f"{num_visible} GPUs cannot be split evenly over the {local_tasks} "
            f"processes of this machine: start {_either(counts)} processes per "
            "machine, or give each its own GPUs (CUDA_VISIBLE_DEVICES, or "
            "--gpus-per-task under Slurm)"
        )
    return tuple(range(local_rank * share, (local_rank + 1) * share))


def _either(values: list[int]) -> str:
    *head, last = [str(value) for value in values]
    return f"{', '.join(head)} or {last}" if head else last
