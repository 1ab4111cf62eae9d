"""Submits a run to Slurm from Python, or starts it on this machine.

    python examples/submitit_job.py --workdir=/shared/runs/prunex --hosts=4 --gpus=8
    python examples/submitit_job.py --workdir=runs/try --cluster=local

One process per node. Before a time limit Slurm warns the run, which saves and ends; the
same command submits it again, and it goes on.
"""

import argparse
import zlib
from typing import Any

import submitit

# Ports above those that Linux gives to outgoing connections.
FIRST_PORT, NUM_PORTS = 61440, 4096


def work(config: str, workdir: str) -> dict[str, Any] | None:
    """One process of the run; its summary, or None if it was stopped and saved."""
    from prunex_jax.base.errors import RunStopped
    from prunex_jax.processes import LaunchFlags
    from prunex_jax.train import train
    from prunex_jax.train.commands.command import load_config

    job = submitit.JobEnvironment()
    port = FIRST_PORT + zlib.crc32(job.job_id.encode()) % NUM_PORTS
    head = job.hostnames[0] if job.num_nodes > 1 else "127.0.0.1"
    launch = LaunchFlags(f"{head}:{port}", job.num_tasks, job.global_rank)
    try:
        return dict(train(load_config(config), workdir, launch=launch).summary)
    except RunStopped:
        return None


def main() -> None:
    """Parses the command line, submits, and waits for the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="digits_resnet20_hsadmm")
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--cluster", default="slurm", choices=("slurm", "local"))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="Of each host.")
    parser.add_argument("--minutes", type=int, default=60)
    given = parser.parse_args()
    executor = submitit.AutoExecutor(f"{given.workdir}-jobs", cluster=given.cluster)
    is_local = given.cluster == "local"
    executor.update_parameters(
        # Locally, tasks of one machine are the hosts.
        nodes=1 if is_local else given.hosts,
        tasks_per_node=given.hosts if is_local else 1,
        gpus_per_node=given.gpus,
        timeout_min=given.minutes,
        # Time to save before the limit.
        slurm_signal_delay_s=180,
    )
    job = executor.submit(work, given.config, given.workdir)
    print(f"job {job.job_id}, logs in {given.workdir}-jobs")
    summary = job.results()[0]
    if summary is None:
        print("stopped and saved; the same command goes on")
    else:
        print(summary["test_accuracy"], summary["host_wire_ratio"])


if __name__ == "__main__":
    main()
