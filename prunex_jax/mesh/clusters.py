"""Reads what Slurm, Open MPI and Kubernetes tell the processes they start.

It owns the names and formats of their environment variables. It leaves the choice
between them, and the flags, to `launcher`, and finding the address of process 0 to
jax wherever jax can do it. Everything here is a pure function of the environment.
"""

import dataclasses
import re
import zlib
from collections.abc import Mapping

from prunex_jax.base.errors import UserError

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
class ClusterTask:
    """What a launcher told this process about itself and the run.

    Attributes:
      launcher: slurm, openmpi or kubernetes.
      reason: What was found, readable.
      num_processes: Processes of the run; None where only jax can find out.
      process_id: This process among them.
      coordinator: Address of process 0 as HOST:PORT, where it is known already.
      detection: Name of the jax method that finds what is None above; "auto" tries
        all of them, and "" means that none can.
      remedy: What the user has to do when `detection` is "".
      local_rank: This process among those of the machine.
      local_tasks: Processes of the run on the machine; None when not told.
      gpus_per_task: GPUs that the launcher promised to each process.
    """

    launcher: str
    reason: str
    num_processes: int | None = 1
    process_id: int | None = 0
    coordinator: str | None = None
    detection: str = ""
    remedy: str = ""
    local_rank: int = 0
    local_tasks: int | None = None
    gpus_per_task: int | None = None


def find_slurm(environ: Mapping[str, str], required: bool) -> ClusterTask | None:
    """Describes this process as a task of a Slurm job step.

    A batch script, or a shell inside an allocation, belongs to no step: it is a single
    process, however many tasks the job may start.

    Args:
      environ: Environment variables.
      required: Whether the user named this launcher, so that a missing step is an
        error.

    Returns:
      The task, or None outside Slurm.

    Raises:
      UserError: `required`, but no step; or a malformed variable.
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
        return ClusterTask("slurm", f"{job}, not started by srun: one process")
    # An interactive step keeps the job's SLURM_NTASKS; its own count is the true one.
    counted = "SLURM_STEP_NUM_TASKS"
    num_tasks = _integer(environ, counted if counted in environ else "SLURM_NTASKS")
    if num_tasks == 1:
        return ClusterTask("slurm", f"{job} with one task")
    process_id = _integer(environ, "SLURM_PROCID")
    return ClusterTask(
        "slurm",
        f"{job}, task {process_id} of {num_tasks}",
        num_processes=num_tasks,
        process_id=process_id,
        detection="slurm",
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_tasks=_slurm_local_tasks(environ),
        gpus_per_task=_slurm_gpus_per_task(environ),
    )


def find_openmpi(
    environ: Mapping[str, str], required: bool, has_mpi4py: bool
) -> ClusterTask | None:
    """Describes this process as one that Open MPI's mpirun started.

    Up to version 4, mpirun says where it runs, and jax makes that the coordinator.
    From version 5 on it says nothing of the kind. Then the coordinator is this machine
    when all processes run here, or mpi4py is asked when it is installed, or the user.

    Args:
      environ: Environment variables.
      required: Whether the user named this launcher.
      has_mpi4py: Whether that package is installed.

    Returns:
      The process, or None when mpirun did not start it.

    Raises:
      UserError: `required`, but mpirun did not start it; or a malformed variable.
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
        return ClusterTask("openmpi", "Open MPI with one process")
    task = ClusterTask(
        "openmpi",
        f"Open MPI, rank {rank} of {size}",
        num_processes=size,
        process_id=rank,
        local_rank=local_rank,
        local_tasks=local_size,
    )
    if _ORTE_URI in environ:
        return dataclasses.replace(task, detection="ompi")
    if local_size == size:
        coordinator = f"127.0.0.1:{_port_of_job(environ.get('PMIX_NAMESPACE', ''))}"
        return dataclasses.replace(task, coordinator=coordinator)
    if has_mpi4py:
        return dataclasses.replace(task, detection="mpi4py")
    return dataclasses.replace(
        task,
        remedy="Open MPI 5 does not tell its processes where rank 0 runs: give "
        "--coordinator=HOST:PORT (the machine of rank 0 and a free port), or install "
        "mpi4py",
    )


def find_kubernetes(
    environ: Mapping[str, str], required: bool, fqdn: str, has_client: bool
) -> ClusterTask | None:
    """Describes this process as a pod of an indexed Kubernetes Job or JobSet.

    Running in a pod means nothing: notebooks do, and so do sweeps, whose indexed pods
    are independent runs. Pods of one run need a headless service to reach each other,
    and it shows in the pod's full name.

    Args:
      environ: Environment variables.
      required: Whether the user named this launcher.
      fqdn: Fully qualified name of this machine.
      has_client: Whether the `kubernetes` package, which jax uses, is installed.

    Returns:
      The pod, or None when it is not one of an indexed job.

    Raises:
      UserError: `required`, but this is no pod of an indexed job.
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
    has_service = "JOBSET_NAME" in environ or ".svc" in fqdn
    if not (has_service or required):
        return ClusterTask(
            "kubernetes",
            "indexed Kubernetes job without a headless service, so its pods are "
            "separate runs",
        )
    return ClusterTask(
        "kubernetes",
        f"Kubernetes job, index {index}",
        num_processes=None,
        process_id=index,
        detection="auto" if has_client else "",
        remedy="jax finds the pods of a Kubernetes job through the kubernetes package:"
        " install jax[k8s], or give --coordinator, --num_processes and --process_id",
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


def _port_of_job(name: str) -> int:
    # The same on every process, and likely different between jobs of one machine.
    return 61440 + zlib.crc32(name.encode()) % 4096


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(
            f"environment variable {name}={environ[name]!r} is not a whole number"
        ) from None
