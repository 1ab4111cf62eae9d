"""Trains on a Ray cluster: one process of the run in an actor on every node.

    python examples/ray_actors.py --hosts=4 --gpus=8 --workdir=/shared/runs/prunex

Actors are spread over nodes; the first one says where the others find it. The folder
is on a file system that all nodes see. A run that was stopped or lost goes on with the
same command. Without --gpus the actors train on CPU, also several on one machine.
"""

import argparse
import socket
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(max_restarts=0)
class Process:
    """One process of the run."""

    def address(self) -> str:
        """A port of this node that nobody listens at."""
        with socket.socket() as asked:
            asked.bind(("", 0))
            port = asked.getsockname()[1]
        return f"{ray.util.get_node_ip_address()}:{port}"

    def train(
        self, config: str, workdir: str, coordinator: str, size: int, rank: int
    ) -> dict[str, Any]:
        """Trains with the others, and gives the summary."""
        from prunex_jax.processes import LaunchFlags
        from prunex_jax.train import train
        from prunex_jax.train.commands.command import load_config

        launch = LaunchFlags(coordinator, size, rank)
        result = train(load_config(config), workdir, launch=launch)
        return dict(result.summary)


def run(config: str, workdir: str, hosts: int, gpus: int) -> dict[str, Any]:
    """Starts a process on every host, and waits for all of them."""
    placed = ray.util.placement_group(
        [{"CPU": 1, **({"GPU": gpus} if gpus else {})}] * hosts, strategy="SPREAD"
    )
    ray.get(placed.ready())
    actors = [
        Process.options(
            num_cpus=1,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placed, rank),
        ).remote()
        for rank in range(hosts)
    ]
    coordinator = ray.get(actors[0].address.remote())
    # The first that fails ends the wait, with its error.
    summaries = ray.get(
        [
            actor.train.remote(config, workdir, coordinator, hosts, rank)
            for rank, actor in enumerate(actors)
        ]
    )
    return summaries[0]


def main() -> None:
    """Parses the command line, and trains on the cluster that Ray finds, or here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="digits_resnet20_hsadmm")
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="Of each host.")
    given = parser.parse_args()
    ray.init()
    summary = run(given.config, given.workdir, given.hosts, given.gpus)
    print(summary["test_accuracy"], summary["host_wire_ratio"])


if __name__ == "__main__":
    main()
