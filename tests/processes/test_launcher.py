import os

import jax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.mesh.settings import TopologyConfig
from prunex_jax.processes import LaunchFlags, start, start_processes
from prunex_jax.processes.environments import Probes
from prunex_jax.processes.gpus import GpuFiles, split_gpus, visible_gpus
from prunex_jax.processes.launcher import detect_launch
from tests.helpers.common import everybody_is_there

SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
}
OPENMPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-a-17@1",
}
OPENMPI_4 = {**OPENMPI_5, "OMPI_MCA_orte_hnp_uri": "15.0;tcp://10.0.0.1:3"}
PMI = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
JAXJOB = {
    "COORDINATOR_ADDRESS": "train-worker-0",
    "COORDINATOR_PORT": "6666",
    "NUM_PROCESSES": "4",
    "PROCESS_ID": "3",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n",
    "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-1",
}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}
SERVICE = "train-2.jaxpods.default.svc.cluster.local"
BY_VARIABLES = {
    "JAX_COORDINATOR_ADDRESS": "head:4000",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}

EIGHT_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


def detect(environ, num_gpus=None, fqdn="node1", modules=(), present=0, **flags):
    probes = Probes(
        count_gpus=lambda _: num_gpus,
        count_present=lambda: present,
        fqdn=lambda: fqdn,
        has_module=lambda name: name in modules,
    )
    return detect_launch(environ, LaunchFlags(**flags), probes)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "no launcher found"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, "Slurm job 42 with one task"),
        (
            {k: v for k, v in SLURM.items() if "STEP" not in k},
            "not started by srun",
        ),
        ({**OPENMPI_5, "OMPI_COMM_WORLD_SIZE": "1"}, "Open MPI with one process"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "no launcher found"),
        (KUBERNETES, "separate runs"),
    ],
)
def test_one_process_is_single(environ, reason):
    launch = detect(environ, num_gpus=8)
    assert launch.launcher == "single"
    assert not launch.is_distributed
    assert launch.local_device_ids is None, "a single process uses every GPU it sees"
    assert reason in launch.reason


def test_slurm_task_gets_its_share_of_the_gpus_of_its_node():
    launch = detect(SLURM, num_gpus=8)
    assert (launch.launcher, launch.detection) == ("slurm", "deactivate")
    assert (launch.num_processes, launch.process_id) == (8, 6)
    assert launch.coordinator == "node1:61482"
    assert launch.local_device_ids == (4, 5)
    assert launch.reason == (
        "Slurm job 42, task 6 of 8, 4 on this machine, GPUs 4,5 of the 8 it sees"
    )


def test_slurm_shares_of_a_node_cover_every_gpu_once():
    shares = [
        detect({**SLURM, "SLURM_LOCALID": str(i)}, num_gpus=8).local_device_ids
        for i in range(4)
    ]
    assert sorted(i for share in shares for i in share) == list(range(8))


@pytest.mark.parametrize(
    ("changes", "num_gpus", "expected"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4,1"}, 8, tuple(range(8))),
        ({}, 1, (0,)),
        ({"SLURM_GPUS_PER_TASK": "4"}, 4, (0, 1, 2, 3)),
        ({"SLURM_GPUS_PER_TASK": "a100:4"}, 4, (0, 1, 2, 3)),
        ({"SLURM_TRES_PER_TASK": "cpu=8,gres/gpu:a100=4"}, 4, (0, 1, 2, 3)),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2"}, 8, (4, 5)),
        ({"SLURM_GPUS_PER_TASK": "2"}, 8, (4, 5)),
        ({}, None, None),
        ({"JAX_LOCAL_DEVICE_IDS": "1,3"}, 8, (1, 3)),
    ],
    ids=[
        "one task on this node",
        "fewer than tasks",
        "bound",
        "bound by type",
        "bound by tres",
        "tres without binding",
        "not bound",
        "no gpu",
        "variable of jax",
    ],
)
def test_slurm_respects_bound_gpus(changes, num_gpus, expected):
    assert detect({**SLURM, **changes}, num_gpus).local_device_ids == expected


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("node001", "node001"),
        ("node1,node7", "node1"),
        ("node[1-3,7],gpu01", "node1"),
        ("node[007,009-012]", "node007"),
        ("gpu01,node[1-3]", "gpu01"),
        ("rack[2-3]-node[04-08]-ib,login", "rack2-node04-ib"),
        ("tux-a.site.org,tux-b.site.org", "tux-a.site.org"),
    ],
)
def test_slurm_coordinator_is_the_first_node_of_the_step(listed, first):
    launch = detect({**SLURM, "SLURM_STEP_NODELIST": listed})
    assert launch.coordinator.rpartition(":")[0] == first


def test_slurm_steps_of_a_job_and_jobs_of_a_node_have_ports_of_their_own():
    ports = {
        detect(
            {**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        ).coordinator.rpartition(":")[2]
        for job in range(1000, 1004)
        for step in range(40)
    }
    assert len(ports) == 160
    assert all(61440 <= int(port) <= 65535 for port in ports)


@pytest.mark.parametrize("listed", ["", "node[1-3", ",node1", "node]1"])
def test_a_malformed_list_of_nodes_is_named(listed):
    with pytest.raises(UserError, match=r"SLURM_STEP_NODELIST=.*--coordinator"):
        detect({**SLURM, "SLURM_STEP_NODELIST": listed})


# What Slurm 22.05 tells the two tasks of a node with four GPUs, by the options of srun.
TWO_TASKS = {
    **SLURM,
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_LOCALID": "1",
    "SLURM_GPUS_ON_NODE": "4",
}


@pytest.mark.parametrize(
    ("num_visible", "expected", "idle"),
    [(2, (0, 1), 0), (4, (2, 3), 0), (1, (0,), 2)],
    ids=["--gpus-per-task=2 or mask_gpu:0x3,0xc", "not bound", "--gpus-per-task=1"],
)
def test_slurm_gpus_bound_by_srun_are_all_taken(num_visible, expected, idle):
    launch = detect(TWO_TASKS, num_visible)
    assert launch.local_device_ids == expected
    assert (f"{idle} of the 4 GPUs of this machine" in launch.warning) == bool(idle)
    assert ("warning   " in launch.described) == bool(idle)


@pytest.mark.parametrize(
    ("environ", "num_visible", "present"),
    [
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 4, 4),
        ({**SLURM, "SLURM_GPUS_ON_NODE": "4"}, 2, 4),
        ({**SLURM, "SLURM_GPUS_ON_NODE": "1"}, 1, 1),
        ({**OPENMPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1, 2),
    ],
    ids=["8 tasks on 4", "4 x 2 of 4", "all on the only one", "4 x 1 of 2"],
)
def test_gpus_are_never_claimed_twice(environ, num_visible, present):
    text = f"see the same {num_visible} GPUs.*claimed twice.*--gpus-per-task=N"
    with pytest.raises(UserError, match=text):
        detect(environ, num_visible, present=present)


def test_one_gpu_for_each_process_is_taken_where_there_are_enough():
    four = {**OPENMPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert detect(four, 1, present=4).local_device_ids == (0,)
    parts = {**four, "CUDA_VISIBLE_DEVICES": "MIG-77"}
    assert detect(parts, 1, present=1).local_device_ids == (0,)


def test_slurm_uneven_gpus_are_refused_with_the_remedy():
    with pytest.raises(UserError, match=r"6 GPUs .* 4 processes.*1, 2, 3 or 6"):
        detect(SLURM, num_gpus=6)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x' is not a whole number"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4-2"}, "is not a list like"),
        ({"SLURM_NODEID": "2"}, "no entry for node 2"),
    ],
)
def test_malformed_slurm_variables_are_named(changes, text):
    with pytest.raises(UserError, match=text):
        detect({**SLURM, **changes}, num_gpus=8)


@pytest.mark.parametrize(
    ("uri", "coordinator"),
    [
        ("15.0;tcp://10.0.0.1:3", "10.0.0.1:61440"),
        ("1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "10.96.0.1:62624"),
        ("1314521088.0;tcp6://[2620:10d::2,fe80::1]:43370", "[2620:10d::2]:62880"),
    ],
)
def test_openmpi_4_meets_where_mpirun_runs(uri, coordinator):
    """Where jax would look, but with a roster call before."""
    launch = detect({**OPENMPI_5, "OMPI_MCA_orte_hnp_uri": uri}, num_gpus=4)
    assert (launch.launcher, launch.detection) == ("openmpi", "deactivate")
    assert (launch.num_processes, launch.process_id) == (4, 3)
    assert launch.coordinator == coordinator
    assert launch.local_device_ids == (2, 3)


def test_openmpi_4_and_jax_mean_the_same_place(monkeypatch):
    from jax._src.clusters.ompi_cluster import OmpiCluster

    for name, value in OPENMPI_4.items():
        monkeypatch.setenv(name, value)
    assert detect(OPENMPI_4).coordinator == OmpiCluster.get_coordinator_address(5, None)


def test_a_malformed_address_of_mpirun_is_named():
    with pytest.raises(UserError, match=r"orte_hnp_uri='x' is not.*--coordinator=HOST"):
        detect({**OPENMPI_4, "OMPI_MCA_orte_hnp_uri": "x"})


def test_openmpi_comes_before_the_slurm_it_was_started_in():
    assert detect({**SLURM, **OPENMPI_4}, num_gpus=4).launcher == "openmpi"


def test_openmpi_4_refuses_a_coordinator_where_no_rank_runs():
    """As in an MPIJob, whose mpirun has a pod of its own."""
    uri = "OMPI_MCA_orte_local_daemon_uri"
    rank_0 = {**OPENMPI_4, "OMPI_COMM_WORLD_RANK": "0"}
    same = {**rank_0, uri: OPENMPI_4["OMPI_MCA_orte_hnp_uri"]}
    assert detect(same).coordinator == "10.0.0.1:61440"
    elsewhere = {**rank_0, uri: "15.1;tcp://10.0.0.2:3"}
    with pytest.raises(UserError, match=r"machine without rank 0.*--coordinator=HOST"):
        detect(elsewhere)
    assert detect(elsewhere, coordinator="job-worker-0.job:4000").process_id == 0
    other = detect({**elsewhere, "OMPI_COMM_WORLD_RANK": "1"})
    assert other.coordinator == "10.0.0.1:61440"


def test_mpiexec_of_mpich_asks_for_the_coordinator():
    with pytest.raises(UserError, match=r"PMI_SIZE=4.*--coordinator=HOST:PORT"):
        detect(PMI)
    launch = detect(PMI, num_gpus=4, coordinator="head:4000")
    assert (launch.launcher, launch.num_processes, launch.process_id) == ("pmi", 4, 3)
    assert launch.local_device_ids == (2, 3)
    assert detect(PMI, modules=("mpi4py",)).detection == "mpi4py"
    lone = detect({**PMI, "PMI_RANK": "0", "PMI_SIZE": "1"})
    assert lone.launcher == "single"


def test_pmi_of_slurm_is_slurm_and_that_of_mpiexec_in_a_job_is_mpiexec():
    of_slurm = {"PMI_RANK": "6", "PMI_SIZE": "8"}
    assert detect({**SLURM, **of_slurm}).launcher == "slurm"
    assert detect({**SLURM, **PMI}, coordinator="a:1").launcher == "pmi"


def test_torchrun_gives_all_that_is_needed():
    launch = detect(TORCHRUN, num_gpus=4)
    assert (launch.launcher, launch.detection) == ("torchrun", "deactivate")
    assert (launch.num_processes, launch.process_id) == (4, 3)
    assert launch.local_device_ids == (2, 3)
    host, _, port = launch.coordinator.partition(":")
    assert host == "head" and int(port) != 29500, "torchrun listens there itself"
    high = detect({**TORCHRUN, "MASTER_PORT": "65535"}).coordinator
    assert high == "head:61440"


def test_torchrun_started_by_srun_comes_before_slurm():
    assert detect({**SLURM, **TORCHRUN}).launcher == "torchrun"
    exported = {k: v for k, v in TORCHRUN.items() if "ELASTIC" not in k}
    assert detect({**SLURM, **exported}).launcher == "slurm"
    batch = {k: v for k, v in SLURM.items() if "STEP" not in k}
    assert detect({**batch, **exported}).launcher == "torchrun", "started over ssh"


def test_variables_of_torchrun_that_a_script_exports_use_its_port():
    exported = {k: v for k, v in TORCHRUN.items() if "LOCAL" not in k}
    del exported["TORCHELASTIC_RUN_ID"]
    launch = detect(exported, num_gpus=4)
    assert launch.coordinator == "head:29500"
    assert launch.local_device_ids is None
    assert detect({"WORLD_SIZE": "4", "MASTER_ADDR": "head"}).launcher == "single"


def test_a_jaxjob_of_kubeflow_gives_all_that_is_needed():
    launch = detect(JAXJOB, num_gpus=8)
    assert (launch.launcher, launch.detection) == ("kubeflow", "deactivate")
    assert launch.coordinator == "train-worker-0:6666"
    assert (launch.num_processes, launch.process_id) == (4, 3)
    joined = {**JAXJOB, "COORDINATOR_ADDRESS": "head:7000"}
    del joined["COORDINATOR_PORT"]
    assert detect(joined).coordinator == "head:7000"
    assert detect({"NUM_PROCESSES": "4"}).launcher == "single", "too common a name"


@pytest.mark.parametrize(
    ("environ", "missing"),
    [(TORCHRUN, "MASTER_ADDR"), (TORCHRUN, "MASTER_PORT")]
    + [(JAXJOB, name) for name in JAXJOB],
)
def test_half_a_launcher_is_refused_and_no_run_of_its_own(environ, missing):
    rest = {name: value for name, value in environ.items() if name != missing}
    with pytest.raises(UserError, match=rf"but not {missing}: .*--launcher=none"):
        detect(rest)
    assert detect(rest, launcher="none").launcher == "single"


@pytest.mark.parametrize("launcher", ["pmi", "torchrun", "kubeflow", "skypilot"])
def test_a_launcher_that_is_named_must_have_started_the_process(launcher):
    with pytest.raises(UserError, match=r"no (PMI|SKYPILOT_NODE)_RANK|but not"):
        detect({}, launcher=launcher)


def test_a_task_of_skypilot_is_one_process_per_node():
    launch = detect(SKYPILOT, num_gpus=8)
    assert (launch.launcher, launch.detection) == ("skypilot", "deactivate")
    assert (launch.num_processes, launch.process_id) == (3, 2)
    assert launch.coordinator.startswith("10.0.0.1:")
    others = [detect({**SKYPILOT, "SKYPILOT_NODE_RANK": rank}) for rank in "01"]
    assert {each.coordinator for each in others} == {launch.coordinator}
    other = detect({**SKYPILOT, "SKYPILOT_TASK_ID": "sky-2"}).coordinator
    assert other != launch.coordinator, "tasks side by side do not meet"
    alone = {**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NUM_NODES": "1"}
    alone["SKYPILOT_NODE_RANK"] = "0"
    assert detect(alone).launcher == "single"
    inside = detect({**SKYPILOT, **TORCHRUN}, num_gpus=4)
    assert inside.launcher == "torchrun", "which a task may start"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SKYPILOT_NODE_IPS": None}, "but not SKYPILOT_NODE_IPS: .*--launcher=none"),
        ({"SKYPILOT_NODE_RANK": None}, "but not SKYPILOT_NODE_RANK"),
        ({"SKYPILOT_NODE_RANK": "3"}, "RANK=3 and .* do not fit the 3 addresses"),
        ({"SKYPILOT_NUM_NODES": "4"}, "NUM_NODES=4 do not fit the 3 addresses"),
        ({"SKYPILOT_NODE_RANK": "one"}, "'one' is not a whole number"),
    ],
)
def test_variables_of_skypilot_that_do_not_fit_are_refused(changes, said):
    environ = {k: v for k, v in {**SKYPILOT, **changes}.items() if v is not None}
    with pytest.raises(UserError, match=said):
        detect(environ)
    assert detect(environ, launcher="none").launcher == "single"


def test_openmpi_5_asks_for_the_coordinator():
    with pytest.raises(UserError, match=r"Open MPI 5 .*--coordinator=HOST:PORT"):
        detect(OPENMPI_5)
    launch = detect(OPENMPI_5, num_gpus=4, coordinator="head:4000")
    assert (launch.launcher, launch.detection) == ("openmpi", "deactivate")
    assert (launch.coordinator, launch.process_id) == ("head:4000", 3)
    assert launch.local_device_ids == (2, 3)


def test_openmpi_5_uses_mpi4py_when_installed():
    assert detect(OPENMPI_5, modules=("mpi4py",)).detection == "mpi4py"


def test_openmpi_5_on_one_machine_agrees_on_a_local_coordinator():
    local = {**OPENMPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    found = {
        detect({**local, "OMPI_COMM_WORLD_RANK": str(rank)}).coordinator
        for rank in range(4)
    }
    other = detect({**local, "PMIX_NAMESPACE": "prterun-a-18@1"}).coordinator
    assert len(found) == 1, "ranks of one job would wait at different ports"
    (address,) = found
    assert address.startswith("127.0.0.1:")
    assert 61440 <= int(address.partition(":")[2]) <= 65535
    assert other != address, "two jobs on one machine would share a port"


@pytest.mark.parametrize(
    ("environ", "fqdn", "flags"),
    [
        (KUBERNETES, SERVICE, {}),
        ({**KUBERNETES, "JOBSET_NAME": "train"}, "train-2", {}),
        (KUBERNETES, "train-2", {"launcher": "kubernetes"}),
    ],
    ids=["headless service", "jobset", "named"],
)
def test_kubernetes_job_is_left_to_jax(environ, fqdn, flags):
    launch = detect(environ, 8, fqdn=fqdn, modules=("kubernetes",), **flags)
    assert (launch.launcher, launch.detection) == ("kubernetes", "auto")
    assert (launch.num_processes, launch.process_id) == (None, 2)
    assert launch.is_distributed
    assert launch.local_device_ids is None


def test_kubernetes_without_its_package_says_how_to_go_on():
    with pytest.raises(UserError, match=r"install jax\[k8s\], or give --num_proc"):
        detect(KUBERNETES, fqdn=SERVICE)
    with pytest.raises(UserError, match="or give --coordinator, --num_processes and"):
        detect({**KUBERNETES, "JOBSET_NAME": "train"}, fqdn=SERVICE)
    launch = detect(KUBERNETES, fqdn=SERVICE, coordinator="a:1", num_processes=4)
    assert (launch.detection, launch.process_id) == ("deactivate", 2)


def test_kubernetes_coordinator_is_the_first_pod_of_the_job():
    launch = detect({**KUBERNETES, "JAX_NUM_PROCESSES": "4"}, num_gpus=8, fqdn=SERVICE)
    assert (launch.detection, launch.num_processes) == ("deactivate", 4)
    assert launch.coordinator == "train-0.jaxpods.default.svc.cluster.local:55527"
    assert launch.process_id == 2
    odd = detect(KUBERNETES, fqdn="other.jaxpods.a.svc", modules=("kubernetes",))
    assert odd.coordinator is None, "jax asks the cluster"


def test_kubernetes_pods_that_are_separate_runs_say_so():
    launch = detect(KUBERNETES)
    assert "`subdomain`" in launch.warning and "--launcher=none" in launch.warning
    assert not detect(KUBERNETES, launcher="none").warning


def test_flags_override_the_launcher():
    flags = {"coordinator": "head:4000", "num_processes": 2, "process_id": 1}
    launch = detect(SLURM, num_gpus=6, **flags)
    assert (launch.launcher, launch.detection) == ("flags", "deactivate")
    assert (launch.coordinator, launch.num_processes) == ("head:4000", 2)
    assert launch.process_id == 1
    assert launch.local_device_ids is None, "Slurm counts other processes"


def test_flags_that_agree_with_the_launcher_keep_its_share_of_the_gpus():
    launch = detect(SLURM, num_gpus=8, coordinator="a:1", num_processes=8, process_id=6)
    assert launch.launcher == "flags"
    assert launch.local_device_ids == (4, 5)


def test_one_flag_replaces_one_value():
    launch = detect(SLURM, num_gpus=8, coordinator="head:4000")
    assert (launch.launcher, launch.detection) == ("slurm", "deactivate")
    assert (launch.coordinator, launch.process_id) == ("head:4000", 6)


def test_variables_of_jax_count_as_flags():
    launch = detect({**KUBERNETES, **BY_VARIABLES}, fqdn=SERVICE)
    assert (launch.launcher, launch.num_processes, launch.process_id) == ("flags", 4, 3)
    assert detect(BY_VARIABLES).reason.endswith("JAX_* environment variables")
    assert detect(BY_VARIABLES, process_id=1).process_id == 1
    assert detect(BY_VARIABLES, process_id=0).process_id == 0


@pytest.mark.parametrize("environ", [SLURM, OPENMPI_5, BY_VARIABLES])
def test_one_process_or_no_launcher_by_flags_is_single(environ):
    assert detect(environ, num_processes=1).launcher == "single"
    assert detect(environ, launcher="none").launcher == "single"


def test_a_stray_coordinator_variable_does_not_disturb_a_lone_task():
    environ = {
        **SLURM,
        "SLURM_STEP_NUM_TASKS": "1",
        "JAX_COORDINATOR_ADDRESS": "head:4000",
    }
    assert detect(environ).launcher == "single"


@pytest.mark.parametrize(
    ("environ", "flags", "text"),
    [
        ({}, {"coordinator": "a:1"}, "add --num_processes and --process_id"),
        ({}, {"num_processes": 2}, "add --coordinator and --process_id"),
        ({}, {"process_id": 0}, "add --coordinator and --num_processes"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, {}, "JAX_COORDINATOR_ADDRESS was given"),
        ({}, {"num_processes": -2}, "num_processes=-2 must be at least 1"),
        ({}, {"num_processes": 2, "process_id": 2}, "process_id=2 must be from 0"),
        (SLURM, {"num_processes": 4}, "process_id=6 must be below num_processes=4"),
        ({}, {"coordinator": "head"}, "coordinator='head' has no port"),
        ({}, {"launcher": "pbs"}, "launcher='pbs' is unknown: use one of auto"),
        ({}, {"launcher": "slurm"}, "not part of a Slurm job step.*srun"),
        ({}, {"launcher": "openmpi"}, "Open MPI did not start this process.*mpirun"),
        ({}, {"launcher": "kubernetes"}, "no pod of an indexed job"),
        ({"JAX_NUM_PROCESSES": "two"}, {}, "JAX_NUM_PROCESSES='two'"),
        ({**SLURM, "JAX_LOCAL_DEVICE_IDS": "a"}, {}, "JAX_LOCAL_DEVICE_IDS='a'"),
    ],
)
def test_bad_flags_are_refused_with_the_remedy(environ, flags, text):
    with pytest.raises(UserError, match=text):
        detect(environ, **flags)


def num_visible(environ, folder):
    return len(visible_gpus(environ, GpuFiles(folder)))


@pytest.mark.parametrize(
    ("value", "count"),
    [("0,1,2", 3), ("GPU-8f3a,MIG-77", 2), ("", 0), ("-1", 0), ("0,-1,2", 1)],
)
def test_visible_gpus_are_those_that_cuda_would_show(value, count, tmp_path):
    (tmp_path / "nvidia0").touch()
    assert num_visible({"CUDA_VISIBLE_DEVICES": value}, tmp_path) == count


def test_visible_gpus_without_the_variable_are_the_device_files(tmp_path):
    assert num_visible({}, tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_visible({}, tmp_path) == 3


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 8),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3"}, 4),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"HIP_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_gpus_of_amd_are_counted(environ, count, tmp_path):
    (tmp_path / "dri").mkdir()
    for i in range(8):
        (tmp_path / "dri" / f"renderD{128 + i}").touch()
    assert not num_visible(environ, tmp_path) or "CUDA" in str(environ)
    (tmp_path / "kfd").touch()
    assert num_visible(environ, tmp_path) == count
    (tmp_path / "nvidia0").touch()
    assert num_visible({"ROCR_VISIBLE_DEVICES": "0,1"}, tmp_path) == 1


@pytest.mark.parametrize(("visible", "tasks"), [(8, 1), (8, 2), (8, 8), (6, 3)])
def test_shares_of_gpus_are_disjoint_and_complete(visible, tasks):
    shares = [split_gpus(visible, rank, tasks) for rank in range(tasks)]
    assert [i for share in shares for i in share] == list(range(visible))
    assert len({len(share) for share in shares}) == 1


class TableOfOne:
    """Where no other process says anything."""

    def __init__(self, name):
        del name

    def exchange(self, key, text, seconds):
        del key, seconds
        return [text]


@pytest.mark.parametrize(
    ("environ", "launcher", "arguments"),
    [
        ({**SLURM, **EIGHT_GPUS}, "auto", ("node1:61482", 8, 6, [4, 5], "deactivate")),
        (
            {**KUBERNETES, **BY_VARIABLES},
            "kubernetes",
            ("head:4000", 4, 3, None, "deactivate"),
        ),
    ],
)
def test_jax_is_told_what_was_detected(monkeypatch, environ, launcher, arguments):
    calls, rosters = [], []
    monkeypatch.setattr(start, "Store", TableOfOne)
    monkeypatch.setattr(
        jax.distributed,
        "initialize",
        lambda *args, **_: calls.append(args),
    )
    monkeypatch.setattr(start, "is_used", lambda: False)
    monkeypatch.setattr(
        start,
        "register",
        lambda *args, **_: rosters.append(args) or everybody_is_there(*args),
    )
    start_processes(TopologyConfig(), LaunchFlags(launcher=launcher), environ)
    assert calls == [arguments]
    # Who is to come is known where the coordinator is, and only there.
    assert rosters == ([arguments[:3]] if arguments[0] else [])


def join_by(monkeypatch, initialize):
    """Lets a function join the processes, all of which are there."""
    monkeypatch.setattr(start, "Store", TableOfOne)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(start, "is_used", lambda: False)
    monkeypatch.setattr(start, "register", lambda *args, **_: everybody_is_there(*args))


@pytest.mark.parametrize(
    ("silence", "gives_up"), [(60.0, 100), (90.5, 101), (600, 610)]
)
def test_jax_gives_up_on_a_process_later_than_the_pulse(monkeypatch, silence, gives_up):
    told = {}
    join_by(monkeypatch, lambda *_, **more: told.update(more))
    start_processes(TopologyConfig(), LaunchFlags(), SLURM, silence_seconds=silence)
    assert told["heartbeat_timeout_seconds"] == gives_up > silence


@pytest.mark.parametrize(
    ("settings", "environ", "made"),
    [
        ({"layout": "3x2"}, {}, [6]),
        ({"layout": "3x2"}, BY_VARIABLES, []),
        ({"layout": "3x2", "cpu_devices": 9}, {}, [9]),
        ({"layout": "3x2", "simulated": "4x1"}, {}, []),
        ({"layout": "3"}, {}, []),
    ],
)
def test_devices_stand_in_for_hosts_of_one_process(
    monkeypatch, settings, environ, made
):
    counts = []
    monkeypatch.setattr(start, "Store", TableOfOne)
    monkeypatch.setattr(start, "is_used", lambda: False)
    monkeypatch.setattr(start, "_with_those_there", lambda launch, *_: launch)
    monkeypatch.setattr(start, "_join", lambda *_: None)
    for name in ("_request_cpu_devices", "_check_cpu_devices"):
        monkeypatch.setattr(start, name, counts.append)
    start_processes(TopologyConfig(**settings), LaunchFlags(), environ)
    assert counts == made


@pytest.mark.parametrize(
    ("settings", "simulated"),
    [
        ({"layout": "3x2"}, "3x2"),
        ({"layout": "2", "cpu_devices": 6}, "2x3"),
        ({"layout": "auto", "cpu_devices": 5}, "1x5"),
        ({"layout": "2x2", "simulated": "4x1"}, ""),
        ({"layout": "2"}, ""),
    ],
)
def test_where_jax_runs_already_a_device_simulates_what_was_asked_for(
    settings, simulated
):
    """Any array that a notebook has made before starts jax."""
    count = len(jax.devices())
    launch = start_processes(TopologyConfig(**settings), LaunchFlags(), {})
    assert launch.simulated == simulated
    assert bool(launch.warning) == bool(simulated)
    if simulated:
        assert f"with {count} cpu devices, so one of them simulates" in launch.described
    there = TopologyConfig(layout="2", cpu_devices=count)
    assert start_processes(there, LaunchFlags(), {}).simulated == ""
    with pytest.raises(UserError, match=r"layout=4 cannot be cut .*cpu_devices=6"):
        uneven = TopologyConfig(layout="4", cpu_devices=6)
        start_processes(uneven, LaunchFlags(), {})
    with pytest.raises(UserError, match="restart the program"):
        flags = LaunchFlags(owns_process=True)
        start_processes(TopologyConfig(cpu_devices=count + 1), flags, {})


def test_a_failed_start_is_one_readable_line(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("DEADLINE_EXCEEDED:\n  no answer")

    join_by(monkeypatch, fail)
    text = r"cannot join .*task 6 of 8.*DEADLINE_EXCEEDED: no answer .check that"
    with pytest.raises(UserError, match=text) as raised:
        start_processes(TopologyConfig(), LaunchFlags(), SLURM)
    assert "\n" not in str(raised.value)


FLAG = "--xla_gpu_analytical_latency_estimator_options"


def start_with_links(monkeypatch, flags, is_used):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(start, "is_used", lambda: is_used)
    for name in ("_request_cpu_devices", "_check_cpu_devices"):
        monkeypatch.setattr(start, name, lambda _: None)
    config = TopologyConfig(cpu_devices=1, link_gbits=10.0)
    start_processes(config, LaunchFlags(launcher="none"), {})
    return os.environ["XLA_FLAGS"]


def test_xla_is_told_how_fast_links_are(monkeypatch):
    told = f"{FLAG}=nic_speed_gbps=1.25"
    assert start_with_links(monkeypatch, "", is_used=False) == told
    both = start_with_links(monkeypatch, "--xla_a=1", is_used=False)
    assert both == f"--xla_a=1 {told}"
    assert start_with_links(monkeypatch, both, is_used=True) == both


@pytest.mark.parametrize(
    ("flags", "is_used", "match"),
    [(f"{FLAG}=rtt_us=9", False, "XLA_FLAGS has"), ("", True, "comes too late")],
)
def test_links_that_xla_cannot_be_told_of_are_refused(
    monkeypatch, flags, is_used, match
):
    with pytest.raises(UserError, match=f"link_gbits=10.*{match}"):
        start_with_links(monkeypatch, flags, is_used)
