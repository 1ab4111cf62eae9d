"""How this process takes part in a run, from its environment and the flags.

Flags come first, then the JAX_* variables, then what a launcher says (`environments`).
Nothing here touches jax, whose own detection (`jax.distributed.initialize`) does the
rest: it finds the number of pods of a Kubernetes job, and asks mpi4py.

The variables are read here all the same, for what jax says otherwise or not at all:

- whether there are several processes, before jax is started: jax would take a batch
  script inside an allocation, or a notebook in a pod, for a part of something larger;
- the coordinator's address, at which processes register first (`rendezvous`): what jax
  detects it hands to nobody, and waits there at once, in silence;
- the number of processes in an interactive Slurm step, which keeps the SLURM_NTASKS of
  its job, and a port of its own for every step;
- Open MPI 5, MPICH, torchrun and Kubeflow, which jax does not know;
- the GPUs of a process: jax gives each process exactly one, here it is an equal share;
- what is missing, and what to do about it, in one line.
"""

import dataclasses
from collections.abc import Mapping

from prunex_jax.base.errors import UserError
from prunex_jax.processes.environments import FINDERS, LaunchedTask, Probes, find_task
from prunex_jax.processes.gpus import idle_gpus, split_gpus

LAUNCHERS = ("auto", "none", *FINDERS)

_FLAG_VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}


@dataclasses.dataclass(frozen=True)
class LaunchFlags:
    """What the user says about the processes of the run; defaults mean "not said".

    Attributes:
      coordinator: Address of process 0 as HOST:PORT.
      num_processes: Processes of the run; 0 when not said.
      process_id: This process among them; -1 when not said.
      launcher: One of `LAUNCHERS`.
      owns_process: Whether a command of this package runs, and nobody else's program,
        so that settings of the whole process may be made for its speed.
    """

    coordinator: str = ""
    num_processes: int = 0
    process_id: int = -1
    launcher: str = "auto"
    owns_process: bool = False


@dataclasses.dataclass(frozen=True)
class Launch:
    """How this process takes part in the run; jax finds what is None."""

    # single, the name of a launcher, flags, or caller (who had started
    # `jax.distributed` already).
    launcher: str
    reason: str  # What was detected and why, in one line.
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    # GPUs of this process, as positions among those it sees; None means all of them.
    local_device_ids: tuple[int, ...] | None = None
    # The method of jax that finds what is None: mpi4py, auto (all of them), or
    # deactivate when nothing is missing.
    detection: str = "deactivate"
    warning: str = ""  # What the user should look at, in one line; empty for nothing.
    # Hosts x devices that one device has to simulate, because jax ran here before with
    # other devices than were asked for; empty where it has those.
    simulated: str = ""
    # On process 0, where each process was met, by the number it was started with.
    addresses: tuple[str, ...] = ()

    @property
    def described(self) -> str:
        """The reason, and on a line of its own the warning, for the start screen."""
        return self.reason + (f"\nwarning   {self.warning}" if self.warning else "")

    @property
    def is_distributed(self) -> bool:
        """Whether several processes take part, or may, when only jax can tell."""
        return self.num_processes != 1


def detect_launch(
    environ: Mapping[str, str], flags: LaunchFlags, probes: Probes | None = None
) -> Launch:
    """Finds out how many processes the run has and which one this is.

    Raises:
      UserError: Flags that are incomplete or contradictory, a launcher that is named
        but did not start this process, or tells too little, GPUs that cannot be split
        evenly or would be claimed twice, or a run whose coordinator cannot be found.
    Example:
      >>> flags = LaunchFlags("10.0.0.1:4000", num_processes=2, process_id=1)
      >>> detect_launch({}, flags).reason
      'process 1 of 2 by flags'
      >>> detect_launch({}, LaunchFlags()).launcher
      'single'
    """
    if flags.launcher not in LAUNCHERS:
        raise UserError(
            f"launcher={flags.launcher!r} is unknown: use one of {', '.join(LAUNCHERS)}"
        )
    probes = probes or Probes()
    given = _with_variables(environ, flags)
    if given.num_processes == 1:
        return _single("one process by num_processes=1")
    task = None
    if flags.launcher != "none":
        task = find_task(environ, flags.launcher, probes)
    if task is None or task.num_processes == 1:
        return _launch_without_task(environ, flags, given, task)
    return _launch_of_task(environ, given, task, probes)


def _single(reason: str) -> Launch:
    return Launch("single", reason, num_processes=1, process_id=0)


def _said(flags: LaunchFlags) -> list[str]:
    """Which of the three flags were given."""
    return [
        n for n in _FLAG_VARIABLES if getattr(flags, n) != getattr(LaunchFlags(), n)
    ]


def _with_variables(environ: Mapping[str, str], flags: LaunchFlags) -> LaunchFlags:
    """The flags, with JAX_* variables for those that were not given."""
    # Both say that nothing but the flags counts.
    is_alone = flags.launcher == "none" or flags.num_processes == 1
    said = {} if is_alone else environ
    texts = {name: said.get(key) or "" for name, key in _FLAG_VARIABLES.items()}
    try:
        num_processes = flags.num_processes or int(texts["num_processes"] or 0)
        process_id = flags.process_id
        if process_id == -1:
            process_id = int(texts["process_id"] or -1)
    except ValueError:
        raise UserError(
            f"JAX_NUM_PROCESSES={texts['num_processes']!r} and JAX_PROCESS_ID="
            f"{texts['process_id']!r} must be whole numbers: correct or unset them"
        ) from None
    coordinator = flags.coordinator or texts["coordinator"]
    if num_processes < 0:
        raise UserError(f"num_processes={num_processes} must be at least 1")
    if process_id < -1 or (num_processes and process_id >= num_processes):
        raise UserError(
            f"process_id={process_id} must be from 0 to num_processes - 1 "
            f"(num_processes={num_processes})"
        )
    if coordinator and not coordinator.rpartition(":")[2].isdecimal():
        raise UserError(f"coordinator={coordinator!r} has no port: give HOST:PORT")
    if coordinator and not 0 < int(coordinator.rpartition(":")[2][:9]) < 65536:
        raise UserError(
            f"coordinator={coordinator!r} has a port that is not from 1 to 65535; give "
            "one that is free on the machine of process 0"
        )
    return LaunchFlags(coordinator, num_processes, process_id)


def _launch_without_task(
    environ: Mapping[str, str],
    flags: LaunchFlags,
    given: LaunchFlags,
    alone: LaunchedTask | None,
) -> Launch:
    """Goes by the flags alone; `alone` is a task that its launcher started singly."""
    said, by_flag = _said(given), _said(flags)
    missing = [name for name in _FLAG_VARIABLES if name not in said]
    if not missing:
        source = "flags" if by_flag else "the JAX_* environment variables"
        return Launch(
            "flags",
            f"process {given.process_id} of {given.num_processes} by {source}",
            given.coordinator,
            given.num_processes,
            given.process_id,
            _device_ids_by_variable(environ),
        )
    if not said or (alone is not None and not by_flag):
        if alone is None:
            return _single("no launcher found")
        return dataclasses.replace(_single(alone.reason), warning=alone.warning)
    wanted = " and ".join(f"--{name}" for name in missing)
    present = " and ".join(
        f"--{name}" if name in by_flag else _FLAG_VARIABLES[name] for name in said
    )
    raise UserError(
        f"{present} was given, but not {wanted}, and no launcher was found that gives "
        f"the rest: add {wanted}, or leave all of them out for a single process"
    )


def _launch_of_task(
    environ: Mapping[str, str], given: LaunchFlags, task: LaunchedTask, probes: Probes
) -> Launch:
    is_by_flags = len(_said(given)) == len(_FLAG_VARIABLES)
    if is_by_flags and task.num_processes not in (None, given.num_processes):
        # The launcher counts other processes than the flags do: ignore it.
        task = dataclasses.replace(task, local_tasks=None)
    coordinator = given.coordinator or task.coordinator
    num_processes = given.num_processes or task.num_processes
    process_id = task.process_id if given.process_id == -1 else given.process_id
    is_complete = None not in (coordinator, num_processes)
    if not is_complete and not task.detection:
        raise UserError(task.remedy)
    if num_processes is not None and not 0 <= process_id < num_processes:
        raise UserError(
            f"process_id={process_id} must be below num_processes={num_processes}: "
            f"give both flags, or neither ({task.reason})"
        )
    device_ids, note, idle = _local_devices(environ, task, probes)
    by_flags = f"process {process_id} of {num_processes} by flags; "
    return Launch(
        "flags" if is_by_flags else task.launcher,
        (by_flags if is_by_flags else "") + task.reason + note,
        coordinator,
        num_processes,
        process_id,
        device_ids,
        "deactivate" if is_complete else task.detection,
        task.warning or idle,
    )


def _local_devices(
    environ: Mapping[str, str], task: LaunchedTask, probes: Probes
) -> tuple[tuple[int, ...] | None, str, str]:
    """Chooses the GPUs of this process; words the choice, and what is left idle."""
    ids = _device_ids_by_variable(environ)
    if ids is not None:
        return ids, f", GPUs {','.join(map(str, ids))} by JAX_LOCAL_DEVICE_IDS", ""
    num_visible = probes.count_gpus(environ)
    if task.local_tasks is None or num_visible is None:
        return None, "", ""
    num_given = task.num_gpus
    if num_given is None and num_visible < task.local_tasks:
        num_given = _num_present(environ, probes)
    ids = split_gpus(
        num_visible, task.local_rank, task.local_tasks, task.gpus_per_task, num_given
    )
    note = (
        f", {task.local_tasks} on this machine, GPUs {','.join(map(str, ids))} of the "
        f"{num_visible} it sees"
    )
    return ids, note, idle_gpus(len(ids), task.local_tasks, num_given)


def _num_present(environ: Mapping[str, str], probes: Probes) -> int | None:
    """GPUs of the machine; parts of them (MIG) have no device files that count."""
    if "MIG" in environ.get("CUDA_VISIBLE_DEVICES", ""):
        return None
    return probes.count_present() or None


def _device_ids_by_variable(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    text = environ.get("JAX_LOCAL_DEVICE_IDS")
    if not text:
        return None
    try:
        return tuple(int(entry) for entry in text.split(","))
    except ValueError:
        raise UserError(
            f"JAX_LOCAL_DEVICE_IDS={text!r} is not a list like 0,1: correct or unset it"
        ) from None
