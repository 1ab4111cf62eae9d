"""How this process takes part in a run, from its environment and the flags.

Flags come first, then the JAX_* variables, then Open MPI (which Slurm may have
started), then Slurm, then Kubernetes. Nothing here touches jax, whose own detection
(`jax.distributed.initialize`) does the rest: it finds the address of process 0 under
Slurm and Open MPI 4, and everything about the pods of a Kubernetes job.

The variables are read here all the same, for what jax says otherwise or not at all:

- whether there are several processes, before jax is started: jax would take a batch
  script inside an allocation, or a notebook in a pod, for a part of something larger;
- the number of processes in an interactive Slurm step, which keeps the SLURM_NTASKS of
  its job;
- Open MPI 5, which jax does not know;
- the GPUs of a process: jax gives each process exactly one, here it is an equal share;
- what is missing, and what to do about it, in one line.
"""

import dataclasses
import importlib.util
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from prunex_jax.base.errors import UserError

LAUNCHERS = ("auto", "none", "slurm", "openmpi", "kubernetes")

_FLAG_VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
# What jax's own Slurm detection needs before it can find the coordinator.
_SLURM_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)
_OPENMPI_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
# Set by mpirun up to Open MPI 4; it contains the address of mpirun itself.
_ORTE_URI = "OMPI_MCA_orte_hnp_uri"
_KUBERNETES_VARIABLES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")


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
    """How this process takes part in the run; jax finds what is None."""

    # single, slurm, openmpi, kubernetes, flags, or caller (who had started
    # `jax.distributed` already).
    launcher: str
    reason: str  # What was detected and why, in one line.
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    # GPUs of this process, as positions among those it sees; None means all of them.
    local_device_ids: tuple[int, ...] | None = None
    # The method of jax that finds what is None: slurm, ompi, mpi4py, auto (all of
    # them), or deactivate when nothing is missing.
    detection: str = "deactivate"

    @property
    def is_distributed(self) -> bool:
        """Whether several processes take part, or may, when only jax can tell."""
        return self.num_processes != 1


@dataclasses.dataclass(frozen=True)
class _Task:
    """What a launcher told this process about itself and the run; as `Launch`."""

    launcher: str
    reason: str
    num_processes: int | None = 1
    process_id: int = 0
    coordinator: str | None = None
    detection: str = ""  # Empty where jax cannot find what is missing.
    remedy: str = ""  # What the user has to do then.
    local_rank: int = 0
    local_tasks: int | None = None  # Processes of the run on this machine.
    gpus_per_task: int | None = None  # Promised by the launcher.


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
        counts = [str(n) for n in range(1, num_visible + 1) if num_visible % n == 0]
        raise UserError(
            f"{num_visible} GPUs cannot be split evenly over the {local_tasks} "
            f"processes of this machine: start {', '.join(counts[:-1])} or "
            f"{counts[-1]} processes per machine, or give each its own GPUs "
            "(CUDA_VISIBLE_DEVICES, or --gpus-per-task under Slurm)"
        )
    return tuple(range(local_rank * share, (local_rank + 1) * share))


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@dataclasses.dataclass(frozen=True)
class Probes:
    """Questions about the machine that the environment does not answer."""

    count_gpus: Callable[[Mapping[str, str]], int | None] = count_visible_gpus
    fqdn: Callable[[], str] = socket.getfqdn
    has_module: Callable[[str], bool] = _has_module


def detect_launch(
    environ: Mapping[str, str], flags: LaunchFlags, probes: Probes | None = None
) -> Launch:
    """Finds out how many processes the run has and which one this is.

    Args:
      environ: Environment variables.
      flags: What the user said; each value given replaces what would be detected.
      probes: Questions about the machine; None asks this one.
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
    probes = probes or Probes()
    given = _with_variables(environ, flags)
    if given.num_processes == 1:
        return _single("one process by num_processes=1")
    task = _find_task(environ, flags.launcher, probes)
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


def _find_task(
    environ: Mapping[str, str], launcher: str, probes: Probes
) -> _Task | None:
    task = None
    # mpirun inside a Slurm job inherits the Slurm variables of its own daemon.
    if launcher in ("auto", "openmpi"):
        task = _find_openmpi(environ, launcher == "openmpi", probes)
    if task is None and launcher in ("auto", "slurm"):
        task = _find_slurm(environ, launcher == "slurm")
    if task is None and launcher in ("auto", "kubernetes"):
        task = _find_kubernetes(environ, launcher == "kubernetes", probes)
    return task


def _launch_without_task(
    environ: Mapping[str, str],
    flags: LaunchFlags,
    given: LaunchFlags,
    alone: _Task | None,
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
        return _single(alone.reason if alone is not None else "no launcher found")
    wanted = " and ".join(f"--{name}" for name in missing)
    present = " and ".join(
        f"--{name}" if name in by_flag else _FLAG_VARIABLES[name] for name in said
    )
    raise UserError(
        f"{present} was given, but not {wanted}, and no launcher was found that gives "
        f"the rest: add {wanted}, or leave all of them out for a single process"
    )


def _launch_of_task(
    environ: Mapping[str, str], given: LaunchFlags, task: _Task, probes: Probes
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
    device_ids, note = _local_devices(environ, task, probes)
    by_flags = f"process {process_id} of {num_processes} by flags; "
    return Launch(
        "flags" if is_by_flags else task.launcher,
        (by_flags if is_by_flags else "") + task.reason + note,
        coordinator,
        num_processes,
        process_id,
        device_ids,
        "deactivate" if is_complete else task.detection,
    )


def _local_devices(
    environ: Mapping[str, str], task: _Task, probes: Probes
) -> tuple[tuple[int, ...] | None, str]:
    """Chooses the GPUs of this process, and words the choice for the reason."""
    ids = _device_ids_by_variable(environ)
    if ids is not None:
        return ids, f", GPUs {','.join(map(str, ids))} by JAX_LOCAL_DEVICE_IDS"
    num_visible = probes.count_gpus(environ)
    if task.local_tasks is None or num_visible is None:
        return None, ""
    ids = split_gpus(num_visible, task.local_rank, task.local_tasks, task.gpus_per_task)
    return ids, (
        f", {task.local_tasks} on this machine, GPUs {','.join(map(str, ids))} of the "
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


def _find_slurm(environ: Mapping[str, str], required: bool) -> _Task | None:
    """This process as a task of a Slurm job step.

    A batch script, or a shell inside an allocation, belongs to no step: it is a single
    process, however many tasks the job may start.
    """
    missing = [name for name in _SLURM_VARIABLES if name not in environ]
    if missing and required:
        raise UserError(
            "launcher=slurm, but this process is not part of a Slurm job step "
            f"(no {', '.join(missing)}): start it with srun, or use launcher=none"
        )
    if "SLURM_JOB_ID" not in environ:
        return None
    job = f"Slurm job {environ['SLURM_JOB_ID']}"
    if missing:
        return _Task("slurm", f"{job}, not started by srun: one process")
    # An interactive step keeps the job's SLURM_NTASKS; its own count is the true one.
    counted = "SLURM_STEP_NUM_TASKS"
    num_tasks = _integer(environ, counted if counted in environ else "SLURM_NTASKS")
    if num_tasks == 1:
        return _Task("slurm", f"{job} with one task")
    process_id = _integer(environ, "SLURM_PROCID")
    return _Task(
        "slurm",
        f"{job}, task {process_id} of {num_tasks}",
        num_processes=num_tasks,
        process_id=process_id,
        detection="slurm",
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_tasks=_slurm_local_tasks(environ),
        gpus_per_task=_slurm_gpus_per_task(environ),
    )


def _slurm_local_tasks(environ: Mapping[str, str]) -> int | None:
    """Reads this node's entry of a list like "4(x2),3"."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name not in environ:
            continue
        counts: list[int] = []
        for entry in environ[name].split(","):
            match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
            if match is None:
                raise UserError(f"{name}={environ[name]!r} is not a list like 4(x2),3")
            counts += [int(match[1])] * int(match[2] or 1)
        node = _integer(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
        if node >= len(counts):
            raise UserError(
                f"{name}={environ[name]!r} has no entry for node {node} (SLURM_NODEID):"
                " unset variables of another job step, or start with srun"
            )
        return counts[node]
    return None


def _slurm_gpus_per_task(environ: Mapping[str, str]) -> int | None:
    """Reads forms like "2", "a100:2" and "cpu=4,gres/gpu:a100=2"."""
    plain = re.search(r"(\d+)$", environ.get("SLURM_GPUS_PER_TASK", ""))
    listed = re.search(
        r"gres/gpu(?:[:/=][^,=:]+)?[:=](\d+)(?:,|$)",
        environ.get("SLURM_TRES_PER_TASK", ""),
    )
    found = plain or listed
    return int(found[1]) if found else None


def _find_openmpi(
    environ: Mapping[str, str], required: bool, probes: Probes
) -> _Task | None:
    """This process as one that Open MPI's mpirun started.

    Up to version 4, mpirun says where it runs, and jax makes that the coordinator.
    From version 5 on it says nothing of the kind. Then the coordinator is this machine
    when all processes run here, or mpi4py is asked when it is installed, or the user.
    """
    missing = [name for name in _OPENMPI_VARIABLES if name not in environ]
    if missing:
        if required:
            raise UserError(
                "launcher=openmpi, but Open MPI did not start this process (no "
                f"{', '.join(missing)}): start it with mpirun, or use launcher=none"
            )
        return None
    size, rank, local_rank, local_size = (
        _integer(environ, name) for name in _OPENMPI_VARIABLES
    )
    if size == 1:
        return _Task("openmpi", "Open MPI with one process")
    coordinator, detection = None, ""
    if _ORTE_URI in environ:
        detection = "ompi"
    elif local_size == size:
        # The same port on every process, and likely another one for another job.
        port = 61440 + zlib.crc32(environ.get("PMIX_NAMESPACE", "").encode()) % 4096
        coordinator = f"127.0.0.1:{port}"
    elif probes.has_module("mpi4py"):
        detection = "mpi4py"
    return _Task(
        "openmpi",
        f"Open MPI, rank {rank} of {size}",
        num_processes=size,
        process_id=rank,
        coordinator=coordinator,
        detection=detection,
        remedy="Open MPI 5 does not tell its processes where rank 0 runs: give "
        "--coordinator=HOST:PORT (the machine of rank 0 and a free port), or install "
        "mpi4py",
        local_rank=local_rank,
        local_tasks=local_size,
    )


def _find_kubernetes(
    environ: Mapping[str, str], required: bool, probes: Probes
) -> _Task | None:
    """This process as a pod of an indexed Kubernetes Job or JobSet.

    Running in a pod means nothing: notebooks do, and so do sweeps, whose indexed pods
    are independent runs. Pods of one run need a headless service to reach each other,
    and it shows in the pod's full name.
    """
    missing = [name for name in _KUBERNETES_VARIABLES if name not in environ]
    if missing:
        if required:
            raise UserError(
                "launcher=kubernetes, but this is no pod of an indexed job (no "
                f"{', '.join(missing)}): set completionMode: Indexed in the Job, or "
                "use launcher=none"
            )
        return None
    index = _integer(environ, "JOB_COMPLETION_INDEX")
    if not ("JOBSET_NAME" in environ or ".svc" in probes.fqdn() or required):
        return _Task(
            "kubernetes",
            "indexed Kubernetes job without a headless service, so its pods are "
            "separate runs",
        )
    return _Task(
        "kubernetes",
        f"Kubernetes job, index {index}",
        num_processes=None,
        process_id=index,
        detection="auto" if probes.has_module("kubernetes") else "",
        remedy="jax finds the pods of a Kubernetes job through the kubernetes package:"
        " install jax[k8s], or give --coordinator, --num_processes and --process_id",
    )


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(
            f"environment variable {name}={environ[name]!r} is not a whole number"
        ) from None
