"""What launchers tell a process about itself and its run, in environment variables.

Every launcher has a function that reads its variables and gives a `LaunchedTask`, or
None where it did not start this process. What is there in part is refused with the
remedy: a process that overlooks its launcher starts a run of its own, and so do all the
others, in one folder. `launcher` says why this is not left to jax.
"""

import dataclasses
import importlib.util
import re
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prunex_jax.base.errors import UserError
from prunex_jax.processes.gpus import GpuFiles, visible_gpus

Environ = Mapping[str, str]

_SLURM_VARIABLES = tuple(
    f"SLURM_{name}"
    for name in ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID")
)
_OPENMPI_VARIABLES = tuple(
    f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
)
# Set by mpirun up to Open MPI 4: the addresses of mpirun itself, and of the daemon that
# started this process; they are the same on mpirun's machine.
_ORTE_URI = "OMPI_MCA_orte_hnp_uri"
_ORTE_LOCAL_URI = "OMPI_MCA_orte_local_daemon_uri"
_PMI_VARIABLES = ("PMI_RANK", "PMI_SIZE")
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_KUBEFLOW_VARIABLES = tuple(
    "COORDINATOR_ADDRESS COORDINATOR_PORT NUM_PROCESSES PROCESS_ID".split()
)
_KUBERNETES_VARIABLES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
_SKYPILOT_VARIABLES = ("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")
# Where the coordinator of a Kubernetes job listens; pods have all ports to themselves.
_KUBERNETES_PORT = 55527
# Ports above those that Linux gives to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 61440, 4096


@dataclasses.dataclass(frozen=True)
class LaunchedTask:
    """What a launcher told this process about itself and the run."""

    launcher: str
    reason: str  # What was found, in one line.
    num_processes: int | None = 1  # None: jax finds it.
    process_id: int = 0
    coordinator: str | None = None
    detection: str = ""  # Method of jax for what is missing; empty where it has none.
    remedy: str = ""  # What the user has to do then.
    local_rank: int = 0
    local_tasks: int | None = None  # Processes of the run on this machine.
    gpus_per_task: int | None = None  # Promised by the launcher.
    num_gpus: int | None = None  # Given to the run on this machine.
    warning: str = ""  # What the user should look at, in one line.


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@dataclasses.dataclass(frozen=True)
class Probes:
    """Questions about the machine that the environment does not answer."""

    # Those that CUDA or ROCm will show; None where there are none, or nobody can tell.
    count_gpus: Callable[[Environ], int | None] = lambda environ: (
        len(visible_gpus(environ)) or None
    )
    count_present: Callable[[], int] = lambda: len(GpuFiles().present)
    fqdn: Callable[[], str] = socket.getfqdn
    has_module: Callable[[str], bool] = _has_module


@dataclasses.dataclass(frozen=True)
class _Said:
    """What the environment says of a launcher."""

    environ: Environ
    is_named: bool  # Whether the user has named this launcher.
    probes: Probes

    def __contains__(self, name: str) -> bool:
        return name in self.environ

    def __getitem__(self, name: str) -> str:
        return self.environ[name]

    def integer(self, name: str) -> int:
        """A variable that has to be a whole number."""
        try:
            return int(self.environ[name])
        except ValueError:
            raise UserError(
                f"environment variable {name}={self.environ[name]!r} is not a whole "
                "number"
            ) from None

    def count(self, name: str) -> int | None:
        """A whole number; None where it is 0, or not said."""
        return (self.integer(name) or None) if self.environ.get(name) else None

    def integers(self, names: Sequence[str]) -> list[int]:
        """Several of them."""
        return [self.integer(name) for name in names]

    def local(self, rank: str, count: str) -> dict[str, Any]:
        """This process among those of its machine, where two variables say so."""
        if rank not in self or count not in self:
            return {}
        return {"local_rank": self.integer(rank), "local_tasks": self.integer(count)}

    def missing(self, names: Sequence[str], problem: str, remedy: str) -> list[str]:
        """Variables of a launcher that are not there; refused if it was named."""
        missing = [name for name in names if name not in self]
        if missing and self.is_named:
            raise UserError(
                f"launcher={problem} (no {', '.join(missing)}): {remedy}, or use "
                "launcher=none"
            )
        return missing

    def half(
        self, names: Sequence[str], missing: Sequence[str], launcher: str
    ) -> UserError:
        """Says that a part of what a launcher sets is there."""
        there = ", ".join(f"{name}={self[name]}" for name in names if name in self)
        return UserError(
            f"{there or 'nothing'} is set as {launcher} does, but not "
            f"{', '.join(missing)}: set them too, or use --launcher=none for a run of "
            "its own"
        )


def find_task(environ: Environ, launcher: str, probes: Probes) -> LaunchedTask | None:
    """This process as its launcher describes it; None where no launcher started it.

    Args:
      environ: Environment variables.
      launcher: One of `FINDERS`, or auto for the first that started several processes,
        or else one.
      probes: Questions about the machine.
    Raises:
      UserError: Variables that are missing or malformed.
    """
    if launcher != "auto":
        return FINDERS[launcher](_Said(environ, True, probes))
    alone, said = None, _Said(environ, False, probes)
    for name in _order(environ):
        task = FINDERS[name](said)
        if task is not None and task.num_processes != 1:
            return task
        # A batch script is one process for Slurm, whatever it starts by itself.
        alone = alone or task
    return alone


def _order(environ: Environ) -> list[str]:
    """Launchers, the innermost first: each inherits the variables of the outer ones."""
    names = list(FINDERS)
    # What torchrun itself starts is told apart from variables that a script exports.
    inner = {"torchrun": "TORCHELASTIC_RUN_ID", "pmi": "MPI_LOCALRANKID"}
    names.sort(key=lambda name: inner.get(name, name) not in environ)
    return names


def _spread_port(number: int) -> int:
    """A port, another one for each of 4096 consecutive numbers."""
    return _FIRST_PORT + number % _NUM_PORTS


def _find_slurm(said: _Said) -> LaunchedTask | None:
    """This process as a task of a Slurm job step.

    A batch script, or a shell inside an allocation, belongs to no step: it is a single
    process, however many tasks the job may start.
    """
    problem = "slurm, but this process is not part of a Slurm job step"
    missing = said.missing(_SLURM_VARIABLES, problem, "start it with srun")
    if "SLURM_JOB_ID" not in said:
        return None
    job = f"Slurm job {said['SLURM_JOB_ID']}"
    if missing:
        return LaunchedTask("slurm", f"{job}, not started by srun: one process")
    # An interactive step keeps the job's SLURM_NTASKS; its own count is the true one.
    counted = "SLURM_STEP_NUM_TASKS"
    num_tasks = said.integer(counted if counted in said else "SLURM_NTASKS")
    if num_tasks == 1:
        return LaunchedTask("slurm", f"{job} with one task")
    process_id = said.integer("SLURM_PROCID")
    return LaunchedTask(
        "slurm",
        f"{job}, task {process_id} of {num_tasks}",
        num_processes=num_tasks,
        process_id=process_id,
        coordinator=_slurm_coordinator(said),
        local_rank=said.integer("SLURM_LOCALID"),
        local_tasks=_slurm_local_tasks(said),
        gpus_per_task=_slurm_gpus_per_task(said),
        # Of this step on this node, whichever of them this task sees.
        num_gpus=said.count("SLURM_GPUS_ON_NODE"),
    )


def _slurm_coordinator(said: _Said) -> str:
    """The first node of the step, and a port of its own for every step of a job.

    jax derives the port from the job alone, so that steps which run side by side meet.
    """
    name = "SLURM_STEP_NODELIST"
    listed = said[name]
    # Up to the first comma outside of brackets.
    match = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?=,|$)", listed)
    if match is None:
        raise UserError(
            f"{name}={listed!r} is not a list like node[1-3,7],gpu01: give "
            "--coordinator=HOST:PORT"
        )
    node = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])
    job, step = said.integer("SLURM_JOB_ID"), said.count("SLURM_STEP_ID") or 0
    # 611 has no factor in common with the number of ports.
    return f"{node}:{_spread_port(job + 611 * step)}"


def _slurm_local_tasks(said: _Said) -> int | None:
    """Reads this node's entry of a list like "4(x2),3"."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name not in said:
            continue
        counts: list[int] = []
        for entry in said[name].split(","):
            match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
            if match is None:
                raise UserError(f"{name}={said[name]!r} is not a list like 4(x2),3")
            counts += [int(match[1])] * int(match[2] or 1)
        node = said.count("SLURM_NODEID") or 0
        if node >= len(counts):
            raise UserError(
                f"{name}={said[name]!r} has no entry for node {node} (SLURM_NODEID):"
                " unset variables of another job step, or start with srun"
            )
        return counts[node]
    return None


def _slurm_gpus_per_task(said: _Said) -> int | None:
    """Reads forms like "2", "a100:2" and "cpu=4,gres/gpu:a100=2"."""
    plain = re.search(r"(\d+)$", said.environ.get("SLURM_GPUS_PER_TASK", ""))
    listed = re.search(
        r"gres/gpu(?:[:/=][^,=:]+)?[:=](\d+)(?:,|$)",
        said.environ.get("SLURM_TRES_PER_TASK", ""),
    )
    found = plain or listed
    return int(found[1]) if found else None


def _find_openmpi(said: _Said) -> LaunchedTask | None:
    """This process as one that Open MPI's mpirun started.

    Up to version 4, mpirun says where it runs, and that is the coordinator. From
    version 5 on it says nothing of the kind. Then the coordinator is this machine when
    all processes run here, or mpi4py is asked when it is installed, or the user.
    """
    problem = "openmpi, but Open MPI did not start this process"
    if said.missing(_OPENMPI_VARIABLES, problem, "start it with mpirun"):
        return None
    size, rank, local_rank, local_size = said.integers(_OPENMPI_VARIABLES)
    if size == 1:
        return LaunchedTask("openmpi", "Open MPI with one process")
    coordinator, detection = None, ""
    remedy = (
        "Open MPI 5 does not tell its processes where rank 0 runs: give "
        "--coordinator=HOST:PORT (the machine of rank 0 and a free port), or install "
        "mpi4py"
    )
    if _ORTE_URI in said and rank == 0 and not _is_on_machine_of_mpirun(said):
        # The others wait at mpirun's machine; mpirun ends them when this one ends.
        remedy = (
            "mpirun runs on a machine without rank 0, whose address Open MPI does not "
            "tell: give --coordinator=HOST:PORT, the machine of rank 0 and a free port "
            "(in a Kubeflow MPIJob JOB-worker-0.JOB:4000)"
        )
    elif _ORTE_URI in said:
        coordinator = _machine_of_mpirun(said[_ORTE_URI])
    elif local_size == size:
        # The same port on every process, and likely another one for another job.
        namespace = said.environ.get("PMIX_NAMESPACE", "")
        coordinator = f"127.0.0.1:{_spread_port(zlib.crc32(namespace.encode()))}"
    elif said.probes.has_module("mpi4py"):
        detection = "mpi4py"
    return LaunchedTask(
        "openmpi",
        f"Open MPI, rank {rank} of {size}",
        num_processes=size,
        process_id=rank,
        coordinator=coordinator,
        detection=detection,
        remedy=remedy,
        local_rank=local_rank,
        local_tasks=local_size,
    )


def _machine_of_mpirun(uri: str) -> str:
    """The coordinator: the first address of mpirun, and a port of its own for a job.

    As jax has it, which waits there for the others in silence. The number of a job is a
    multiple of 4096.
    """
    match = re.match(r"(\d+)\.\d+;tcp6?://(?:\[([^\],]+)|([^,:\[]+))", uri)
    if match is None:
        raise UserError(
            f"{_ORTE_URI}={uri!r} is not like 4096.0;tcp://10.0.0.1:34911: give "
            "--coordinator=HOST:PORT (the machine of rank 0 and a free port)"
        )
    host = f"[{match[2]}]" if match[2] else match[3]
    return f"{host}:{_spread_port(int(match[1]) // 4096)}"


def _is_on_machine_of_mpirun(said: _Said) -> bool:
    return said.environ.get(_ORTE_LOCAL_URI) in (None, said[_ORTE_URI])


def _find_pmi(said: _Said) -> LaunchedTask | None:
    """This process as one that MPICH's or Intel MPI's mpiexec started.

    Slurm sets some of these variables too (srun --mpi=pmi2), and is asked before
    unless mpiexec tells the local rank.
    """
    problem = "pmi, but no mpiexec of MPICH or Intel MPI started this process"
    if said.missing(_PMI_VARIABLES, problem, "start it with mpiexec"):
        return None
    rank, size = said.integers(_PMI_VARIABLES)
    if size == 1:
        return LaunchedTask("pmi", "mpiexec with one process")
    return LaunchedTask(
        "pmi",
        f"mpiexec (PMI), rank {rank} of {size}",
        num_processes=size,
        process_id=rank,
        detection="mpi4py" if said.probes.has_module("mpi4py") else "",
        remedy="mpiexec does not tell its processes where rank 0 runs (PMI_SIZE="
        f"{size}): give --coordinator=HOST:PORT (the machine of rank 0 and a free "
        "port), or install mpi4py; --launcher=none makes each a run of its own",
        **said.local("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    )


def _find_torchrun(said: _Said) -> LaunchedTask | None:
    """This process as one that torchrun started, or a script in its manner."""
    missing = [name for name in _TORCHRUN_VARIABLES if name not in said]
    counts = [name for name in _TORCHRUN_VARIABLES[:2] if name in said]
    if len(counts) < 2 and not said.is_named:
        return None
    if missing and (said.is_named or said.integer("WORLD_SIZE") > 1):
        raise said.half(_TORCHRUN_VARIABLES, missing, "torchrun")
    rank, size = said.integers(_TORCHRUN_VARIABLES[:2])
    if size == 1:
        return LaunchedTask("torchrun", "torchrun with one process")
    port = said.integer("MASTER_PORT")
    if "TORCHELASTIC_RUN_ID" in said:
        # torchrun itself listens at its port.
        port = _spread_port(port + 1)
    return LaunchedTask(
        "torchrun",
        f"torchrun, rank {rank} of {size}",
        num_processes=size,
        process_id=rank,
        coordinator=f"{said['MASTER_ADDR']}:{port}",
        **said.local("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    )


def _find_kubeflow(said: _Said) -> LaunchedTask | None:
    """This process as a pod of Kubeflow's JAXJob.

    A TrainJob of Kubeflow's trainer sets the JAX_* variables, which come first.
    """
    address, port_name, *counts = _KUBEFLOW_VARIABLES
    missing = [name for name in _KUBEFLOW_VARIABLES if name not in said]
    is_meant = address in said or all(name in said for name in counts)
    if not (said.is_named or is_meant):
        return None
    if ":" in said.environ.get(address, "") and port_name in missing:
        missing.remove(port_name)
    if missing:
        raise said.half(_KUBEFLOW_VARIABLES, missing, "a JAXJob")
    size, rank = said.integers(counts)
    if size == 1:
        return LaunchedTask("kubeflow", "JAXJob with one process")
    coordinator = said[address]
    if ":" not in coordinator:
        coordinator += f":{said.integer(port_name)}"
    return LaunchedTask(
        "kubeflow",
        f"JAXJob, process {rank} of {size}",
        num_processes=size,
        process_id=rank,
        coordinator=coordinator,
    )


def _find_kubernetes(said: _Said) -> LaunchedTask | None:
    """This process as a pod of an indexed Kubernetes Job or JobSet.

    Running in a pod means nothing: notebooks do, and so do sweeps, whose indexed pods
    are independent runs. Pods of one run need a headless service to reach each other,
    and it shows in the pod's full name.
    """
    problem = "kubernetes, but this is no pod of an indexed job"
    remedy = "set completionMode: Indexed in the Job"
    if said.missing(_KUBERNETES_VARIABLES, problem, remedy):
        return None
    index = said.integer("JOB_COMPLETION_INDEX")
    is_jobset = "JOBSET_NAME" in said
    name = said.probes.fqdn()
    if not (is_jobset or ".svc" in name or said.is_named):
        return LaunchedTask(
            "kubernetes",
            "indexed Kubernetes job without a headless service, so its pods are "
            "separate runs",
            warning="every pod of this indexed job is a run of its own: for one run of "
            "all pods set `subdomain` in the pod's template to a headless service, for "
            "separate runs give each a --workdir of its own and --launcher=none",
        )
    coordinator = None if is_jobset else _pod_zero(name, index)
    missing_flags = "--num_processes=N (or JAX_NUM_PROCESSES: completions of the Job)"
    if coordinator is None:
        missing_flags = "--coordinator, --num_processes and --process_id"
    return LaunchedTask(
        "kubernetes",
        f"Kubernetes job, index {index}",
        num_processes=None,
        process_id=index,
        coordinator=coordinator,
        detection="auto" if said.probes.has_module("kubernetes") else "",
        remedy="jax finds the pods of a Kubernetes job through the kubernetes package:"
        f" install jax[k8s], or give {missing_flags}",
    )


def _pod_zero(name: str, index: int) -> str | None:
    """The coordinator of a job, `JOB-0.SUBDOMAIN...`, from the full name of a pod."""
    pod, _, domain = name.partition(".")
    job = pod.removesuffix(f"-{index}")
    if job == pod or ".svc" not in domain:
        return None
    return f"{job}-0.{domain}:{_KUBERNETES_PORT}"


def _find_skypilot(said: _Said) -> LaunchedTask | None:
    """This process as the one of a node of a SkyPilot task."""
    problem = "skypilot, but this is no task of SkyPilot"
    remedy = "start it with sky launch or sky jobs launch"
    missing = said.missing(_SKYPILOT_VARIABLES, problem, remedy)
    if len(missing) == len(_SKYPILOT_VARIABLES):
        return None
    if missing:
        raise said.half(_SKYPILOT_VARIABLES, missing, "SkyPilot")
    nodes = said["SKYPILOT_NODE_IPS"].split()
    rank, asked = said.integer("SKYPILOT_NODE_RANK"), said.count("SKYPILOT_NUM_NODES")
    count = len(nodes)
    if not 0 <= rank < count or asked not in (None, count):
        raise UserError(
            f"SKYPILOT_NODE_RANK={rank} and SKYPILOT_NUM_NODES={asked or ''} do not fit"
            f" the {count} addresses of SKYPILOT_NODE_IPS; use --launcher=none for a "
            "run of its own"
        )
    task = said.environ.get("SKYPILOT_TASK_ID", "")
    if count == 1:
        return LaunchedTask("skypilot", "SkyPilot task on one node")
    return LaunchedTask(
        "skypilot",
        f"SkyPilot task, node {rank} of {count}",
        num_processes=count,
        process_id=rank,
        coordinator=f"{nodes[0]}:{_spread_port(zlib.crc32(task.encode()))}",
        local_tasks=1,
        num_gpus=said.count("SKYPILOT_NUM_GPUS_PER_NODE"),
    )


# In the order in which they are asked: mpirun inside a Slurm job inherits the Slurm
# variables of its own daemon, and job scripts export what torchrun sets.
FINDERS: Mapping[str, Callable[[_Said], LaunchedTask | None]] = {
    "openmpi": _find_openmpi,
    "slurm": _find_slurm,
    "pmi": _find_pmi,
    "torchrun": _find_torchrun,
    "kubeflow": _find_kubeflow,
    "kubernetes": _find_kubernetes,
    "skypilot": _find_skypilot,
}
