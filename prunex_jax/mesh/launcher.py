"""Decides how this process takes part in a run, from its environment and the flags.

It owns the precedence: flags, then the JAX_* variables, then Open MPI (which Slurm may
have started), then Slurm, then Kubernetes. It leaves reading their variables to
`clusters` and acting on the answer to `start`. Nothing here touches jax.
"""

import dataclasses
import importlib.util
import socket
from collections.abc import Callable, Mapping

from prunex_jax.base.errors import UserError
from prunex_jax.mesh import clusters, gpus
from prunex_jax.mesh.clusters import ClusterTask

LAUNCHERS = ("auto", "none", "slurm", "openmpi", "kubernetes")

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
      launcher: auto, none, slurm, openmpi or kubernetes.
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
    """How this process takes part in the run.

    Attributes:
      launcher: single, slurm, openmpi, kubernetes, flags, or caller (the caller had
        started `jax.distributed` already).
      coordinator: Address of process 0; None leaves finding it to jax.
      num_processes: Processes of the run; None leaves counting them to jax.
      process_id: This process among them.
      local_device_ids: GPUs of this process, as positions among those it sees; None
        means all of them.
      reason: What was detected and why, in one line.
      detection: The jax method that finds what is None above: slurm, ompi, mpi4py,
        auto (all of them), or deactivate when nothing is missing.
    """

    launcher: str
    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    local_device_ids: tuple[int, ...] | None
    reason: str
    detection: str = "deactivate"

    @property
    def is_distributed(self) -> bool:
        """Whether several processes take part, or may, when only jax can tell."""
        return self.num_processes != 1


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@dataclasses.dataclass(frozen=True)
class Probes:
    """Questions about the machine that the environment does not answer.

    Attributes:
      count_gpus: Counts the GPUs that a process with this environment sees.
      fqdn: Returns the fully qualified name of the machine.
      has_module: Tells whether a Python package is installed.
    """

    count_gpus: Callable[[Mapping[str, str]], int | None] = gpus.count_visible_gpus
    fqdn: Callable[[], str] = socket.getfqdn
    has_module: Callable[[str], bool] = _has_module


_PROBES = Probes()


def detect_launch(
    environ: Mapping[str, str],
    flags: LaunchFlags,
    probes: Probes = _PROBES,
) -> Launch:
    """Finds out how many processes the run has and which one this is.

    Args:
      environ: Environment variables.
      flags: What the user said; each value given replaces what would be detected.
      probes: Questions about the machine.

    Returns:
      The launch, complete up to what jax finds by itself.

    Raises:
      UserError: Flags that are incomplete or contradictory, a launcher that is named
        but did not start this process, GPUs that cannot be split evenly, or an Open
        MPI 5 or Kubernetes run whose coordinator cannot be found.

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
    given = _given(environ, flags)
    if given.num_processes == 1:
        return _single("one process by num_processes=1")
    task = _find_task(environ, flags.launcher, probes)
    if task is None or task.num_processes == 1:
        return _launch_without_task(environ, flags, given, task)
    return _launch_of_task(environ, given, task, probes)


@dataclasses.dataclass(frozen=True)
class _Given:
    """Flags merged with their JAX_* variables; None where neither is set."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None

    def missing(self) -> list[str]:
        values = dataclasses.asdict(self)
        return [name for name, value in values.items() if value is None]


def _given(environ: Mapping[str, str], flags: LaunchFlags) -> _Given:
    # Both say that nothing but the flags counts.
    is_alone = flags.launcher == "none" or flags.num_processes == 1
    said = {} if is_alone else environ
    texts = {name: said.get(key) or None for name, key in _FLAG_VARIABLES.items()}
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
    if coordinator and not coordinator.rpartition(":")[2].isdigit():
        raise UserError(f"coordinator={coordinator!r} has no port: give HOST:PORT")
    return _Given(
        coordinator,
        num_processes or None,
        None if process_id == -1 else process_id,
    )


def _find_task(
    environ: Mapping[str, str], launcher: str, probes: Probes
) -> ClusterTask | None:
    def wants(name: str) -> bool:
        return launcher in ("auto", name)

    task = None
    # mpirun inside a Slurm job inherits the Slurm variables of its own daemon.
    if wants("openmpi"):
        has_mpi4py = probes.has_module("mpi4py")
        task = clusters.find_openmpi(environ, launcher == "openmpi", has_mpi4py)
    if task is None and wants("slurm"):
        task = clusters.find_slurm(environ, launcher == "slurm")
    if task is None and wants("kubernetes"):
        # Asking for the name may be slow, so only pods of indexed jobs do.
        fqdn = probes.fqdn() if "JOB_COMPLETION_INDEX" in environ else ""
        task = clusters.find_kubernetes(
            environ, launcher == "kubernetes", fqdn, probes.has_module("kubernetes")
        )
    return task


def _launch_without_task(
    environ: Mapping[str, str],
    flags: LaunchFlags,
    given: _Given,
    alone: ClusterTask | None,
) -> Launch:
    """Goes by the flags alone; `alone` is a task that its launcher started singly."""
    missing = given.missing()
    has_flags = any(_is_flag(flags, name) for name in _FLAG_VARIABLES)
    if not missing:
        return Launch(
            "flags",
            given.coordinator,
            given.num_processes,
            given.process_id,
            _device_ids_by_variable(environ),
            f"process {given.process_id} of {given.num_processes} by "
            + ("flags" if has_flags else "the JAX_* environment variables"),
        )
    is_alone = alone is not None and not has_flags
    if len(missing) == len(_FLAG_VARIABLES) or is_alone:
        return _single(alone.reason if alone is not None else "no launcher found")
    wanted = " and ".join(f"--{name}" for name in missing)
    present = " and ".join(
        f"--{name}" if _is_flag(flags, name) else variable
        for name, variable in _FLAG_VARIABLES.items()
        if name not in missing
    )
    raise UserError(
        f"{present} was given, but not {wanted}, and no launcher was found that gives "
        f"the rest: add {wanted}, or leave all of them out for a single process"
    )


def _launch_of_task(
    environ: Mapping[str, str], given: _Given, task: ClusterTask, probes: Probes
) -> Launch:
    is_by_flags = not given.missing()
    if is_by_flags and task.num_processes not in (None, given.num_processes):
        # The launcher counts other processes than the flags do: ignore it.
        task = dataclasses.replace(task, local_tasks=None)
    coordinator = given.coordinator or task.coordinator
    num_processes = given.num_processes or task.num_processes
    process_id = task.process_id if given.process_id is None else given.process_id
    is_complete = None not in (coordinator, num_processes, process_id)
    if not is_complete and not task.detection:
        raise UserError(task.remedy)
    if num_processes is not None and not 0 <= (process_id or 0) < num_processes:
        raise UserError(
            f"process_id={process_id} must be below num_processes={num_processes}: "
            f"give both flags, or neither ({task.reason})"
        )
    device_ids, note = _local_devices(environ, task, probes)
    reason = task.reason
    if is_by_flags:
        reason = f"process {process_id} of {num_processes} by flags; {reason}"
    return Launch(
        "flags" if is_by_flags else task.launcher,
        coordinator,
        num_processes,
        process_id,
        device_ids,
        reason + note,
        "deactivate" if is_complete else task.detection,
    )


def _local_devices(
    environ: Mapping[str, str], task: ClusterTask, probes: Probes
) -> tuple[tuple[int, ...] | None, str]:
    """Chooses the GPUs of this process, and words the choice for the reason."""
    by_variable = _device_ids_by_variable(environ)
    if by_variable is not None:
        return by_variable, f", GPUs {_join(by_variable)} by JAX_LOCAL_DEVICE_IDS"
    num_visible = probes.count_gpus(environ)
    if task.local_tasks is None or num_visible is None:
        return None, ""
    ids = gpus.split_gpus(
        num_visible, task.local_rank, task.local_tasks, task.gpus_per_task
    )
    return ids, (
        f", {task.local_tasks} on this machine, GPUs {_join(ids)} of the "
        f"{num_visible} it sees"
    )


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


def _is_flag(flags: LaunchFlags, name: str) -> bool:
    return bool(getattr(flags, name) != getattr(LaunchFlags(), name))


def _single(reason: str) -> Launch:
    return Launch("single", None, 1, 0, None, reason)


def _join(ids: tuple[int, ...]) -> str:
    return ",".join(str(i) for i in ids)
