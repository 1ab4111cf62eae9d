"""A cluster on one machine: nodes with Slurm, and a shell on each for mpirun.

Everything lives in namespaces of its own (names, network, processes, mounted files), so
that nothing of the machine is touched, no cluster gets into the way of another, and all
of it ends with the first process in them, whatever happens. Each node has a name, an
interface and an address; nodes share the disk.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.common import ROOT

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "mpirun")
# Seconds that a loaded machine may take to train a little.
PATIENCE = 480.0
_NAMESPACES = ("--mount", "--pid", "--net", "--uts", "--ipc")
# Any character devices: Slurm wants to see files, and shows their numbers to tasks.
_GPU_FILES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")

# The first process. Daemons keep their state in a /run that nobody else sees.
_BOOT = """set -e
hostname head
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs none /run
ip link set lo up
ip link add name lan type bridge
ip addr add 10.77.0.10/24 dev lan
ip link set lan up
number=10
for node in {nodes}; do
    number=$((number + 1))
    ip netns add $node
    ip link add $node type veth peer name eth0 netns $node
    ip link set $node master lan up
    ip -n $node addr add 10.77.0.$number/24 dev eth0
    ip -n $node link set eth0 up
    ip -n $node link set lo up
done
(umask 077; head -c 1024 /dev/urandom > /run/munge.key)
munged --force --key-file=/run/munge.key --socket=/run/munge.socket \\
    --pid-file=/run/munged.pid --seed-file=/run/munge.seed --log-file=/run/munged.log
mkdir -p /run/state {spools}
slurmctld -D -c -f {folder}/slurm.conf &
for node in {nodes}; do
    {folder}/bin/shell-on $node exec slurmd -D -f {folder}/slurm.conf &
done
while :; do wait; sleep 1; done
"""
_SLURM = """ClusterName=small
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# Seconds that a requeued job waits, so that the end of its first start comes no later.
AuthInfo=socket=/run/munge.socket,cred_expire=60
StateSaveLocation=/run/state
SlurmdSpoolDir=/run/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=5
SlurmdParameters=config_overrides
ReturnToService=2
# A loaded machine saves slowly.
KillWait=120
OverTimeLimit=60
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# What examples call: the python of the tests, on a machine with an identity of its own.
_PYTHON = """#!/bin/sh
export PRUNEX_HOST_ID=$(hostname)
exec {python} "$@"
"""
# In place of ssh: a shell on a node.
_SHELL = """#!/bin/sh
node=$1
shift
exec nsenter --net=/run/netns/$node unshare --uts sh -c "hostname $node; $*"
"""


def why_not() -> str:
    """What this machine lacks for a cluster; empty for nothing."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)} here: `make launchers` installs them"
    make = ["ip", "link", "add", "name", "lan", "type", "bridge"]
    command = ["unshare", *_NAMESPACES, "--fork", *make]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no namespaces here: {error}"
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr!r}"


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Cluster:
    """Nodes that run Slurm, until `close`."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.nodes = [f"n{i + 1}" for i in range(num_nodes)]
        self._folder = folder
        self._write_files()
        with (folder / "daemons.log").open("wb") as log:
            self._outer = subprocess.Popen(
                [
                    *("unshare", *_NAMESPACES),
                    *("--fork", "--kill-child", "--mount-proc"),
                    *("sh", str(folder / "boot.sh")),
                ],
                env={**os.environ, "PATH": _path()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _write_files(self) -> None:
        names = enumerate(["head", *self.nodes])
        lines = [f"10.77.0.{10 + i} {name}\n" for i, name in names]
        self._write("hosts", "127.0.0.1 localhost\n" + "".join(lines))
        nodes = [
            f"NodeName={name} CPUs=8 Gres=gpu:{len(_GPU_FILES)}\n"
            for name in self.nodes
        ]
        self._write(
            "slurm.conf", _SLURM.replace("PartitionN", "".join(nodes) + "PartitionN")
        )
        gpus = [f"Name=gpu File={file}\n" for file in _GPU_FILES]
        self._write("gres.conf", "".join(gpus))
        boot = _BOOT.format(
            folder=self._folder,
            nodes=" ".join(self.nodes),
            spools=" ".join(f"/run/spool-{name}" for name in self.nodes),
        )
        self._write("boot.sh", boot)
        (self._folder / "bin").mkdir()
        self._write("bin/python", _PYTHON.format(python=sys.executable)).chmod(0o755)
        self._write("bin/shell-on", _SHELL).chmod(0o755)

    def _write(self, name: str, text: str) -> Path:
        path = self._folder / name
        path.write_text(text)
        return path

    def wait_until_idle(self) -> None:
        """Waits until all nodes are up, and done with the jobs they had."""
        deadline = time.monotonic() + 120
        states: list[str] = []
        while states != ["idle"] * len(self.nodes):
            assert self._outer.poll() is None, self.log
            assert time.monotonic() < deadline, f"{states}\n{self.log}"
            time.sleep(0.2)
            if self._first_process():
                asked = self.run("sinfo", "--noheader", "--Node", "--format=%T")
                states = asked.stdout.split()

    @property
    def log(self) -> str:
        """What the daemons say."""
        return (self._folder / "daemons.log").read_text()

    def _first_process(self) -> str:
        pid = self._outer.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()

    @property
    def for_mpirun(self) -> dict[str, str]:
        """Variables that let mpirun reach the nodes without ssh, as root."""
        return {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_plm_rsh_agent": f"{self._folder}/bin/shell-on",
        }

    def start(self, *command: str, **environ: str) -> subprocess.Popen[str]:
        """Starts a command at the cluster's head."""
        own = {
            "PYTHONPATH": str(ROOT),
            "PATH": f"{self._folder}/bin:{_path()}",
            "SLURM_CONF": f"{self._folder}/slurm.conf",
        }
        enter = ["nsenter", f"--target={self._first_process()}", *_NAMESPACES]
        return subprocess.Popen(
            [*enter, f"--wd={self._folder}", *command],
            env={**os.environ, **own, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(
        self, *command: str, timeout: float = PATIENCE, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command at the cluster's head to its end."""
        process = self.start(*command, **environ)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise AssertionError(f"{command}: {process.communicate()[0]}") from error
        return subprocess.CompletedProcess(command, process.returncode, output)

    def submit(self, *arguments: str, **environ: str) -> str:
        """Puts a job into the queue; returns its number."""
        done = self.run("sbatch", "--parsable", *arguments, timeout=30, **environ)
        assert done.returncode == 0, done.stdout
        return done.stdout.split()[-1]

    def state_of(self, job: str) -> dict[str, str]:
        """What Slurm says of a job: JobState, ExitCode, Restarts and more."""
        text = self.run("scontrol", "--oneliner", "show", "job", job, timeout=30).stdout
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def wait_for(self, job: str, *states: str) -> dict[str, str]:
        """Waits until a job is in one of some states."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.state_of(job)).get("JobState") not in states:
            assert time.monotonic() < deadline, f"{found}\n{self.log}"
            time.sleep(0.3)
        return found

    def close(self) -> None:
        """Ends all processes of the cluster."""
        self._outer.send_signal(signal.SIGKILL)
        self._outer.wait(30)


def small_cluster(folder: Path, num_nodes: int = 2) -> Iterator[Cluster]:
    """For a fixture: a cluster that is up, and gone afterwards."""
    cluster = Cluster(folder, num_nodes)
    try:
        cluster.wait_until_idle()
        yield cluster
    finally:
        cluster.close()
