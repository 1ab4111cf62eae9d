"""What the processes of a study are told to run.

It owns the settings of every row, checked before anything runs, the steps after which
there are gates, and command lines. It leaves meeting processes at gates to `runner`.
"""

import dataclasses
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prunex_jax.bench.links.gates import Spec, write_specs
from prunex_jax.bench.links.hosts import Hosts
from prunex_jax.bench.report import places
from prunex_jax.bench.study import Row, Study
from prunex_jax.mesh import check_has_links
from prunex_jax.train.command import load_config, override_config
from prunex_jax.train.config import config_to_dict, resolve_config
from prunex_jax.train.program import keeping_programs

# The row that every study runs first: steps without any exchange are what r counts in.
COMPUTATION = Row(
    places.COMPUTATION, "computation alone", settings={"method.name": "none"}
)
# Rounds before measuring: dense, pruned, frozen and cut out, small; then one to spare.
_WARM_UP_ROUNDS = 5
_LEAST_WARM_UP_STEPS = 12
# Runtime -> module of a host process.
_MODULES = {
    "jax": "prunex_jax.bench.links.jax_host",
    "torch": "prunex_jax.bench.torch.host",
}
# What links are measured in is to be known well.
_COMPUTATION_STEPS = 30


@dataclasses.dataclass(frozen=True)
class Task:
    """One run of a row: over several links for its steps, over one for its accuracy."""

    row: Row
    links: tuple[str, ...]
    spec: Spec


def row_settings(
    study: Study, folder: Path, is_simulated: bool = True
) -> dict[str, Mapping[str, Any]]:
    """Reads and checks the settings of every row, before anything runs.

    Args:
      study: The study.
      folder: What `Study.config` is relative to.
      is_simulated: Whether every process is a host of virtual CPU devices; a cluster
        has devices and hosts of its own.
    Returns:
      Row -> resolved training settings; `COMPUTATION` is one of them.
    Raises:
      UserError: A setting that is not known or cannot work.
    """
    own: dict[str, Any] = {"topology.layout": "auto", "topology.cpu_devices": 0}
    if is_simulated:
        own = {
            "topology.layout": "process",
            "topology.cpu_devices": study.devices_per_host,
        }
    return {
        row.name: _settings_of(study, row, folder, own)
        for row in (COMPUTATION, *study.rows)
    }


def _settings_of(
    study: Study, row: Row, folder: Path, own: Mapping[str, Any]
) -> Mapping[str, Any]:
    config = load_config(str(folder / study.config))
    changes = {**study.settings, **row.settings, **own}
    overrides = [f"--config.{key}={value}" for key, value in changes.items()]
    resolved = resolve_config(override_config(config, overrides))
    check_has_links(resolved.topology.simulated)
    return config_to_dict(resolved)


@dataclasses.dataclass(frozen=True)
class Planner:
    """Makes the tasks of a study on one number of hosts.

    Attributes:
      study: The study.
      settings: Row -> settings, from `row_settings`.
      num_hosts: Size of the host axis.
      workdir: Folder of the study.
    """

    study: Study
    settings: Mapping[str, Mapping[str, Any]]
    num_hosts: int
    workdir: Path

    def steady(self, row: Row, links: tuple[str, ...]) -> Task:
        """Steady steps of a row, over one link after the other."""
        warm_up = max(_LEAST_WARM_UP_STEPS, _WARM_UP_ROUNDS * row.period)
        steps = (self.study.rounds + 1) * row.period
        if row is COMPUTATION:
            steps = max(steps, _COMPUTATION_STEPS)
        boundaries = tuple(warm_up + steps * k for k in range(len(links) + 1))
        settings = _steady_settings(self.settings[row.name], row.period)
        return Task(row, links, self._spec(row, "steady", settings, boundaries))

    def training(self, row: Row, link: str, seed: int) -> Task:
        """A whole run of a row over one link."""
        settings = {**self.settings[row.name], "seed": seed}
        run = settings["run"]
        boundaries = (*range(0, run["steps"], run["eval_every_steps"]), run["steps"])
        settings = {**settings, "run": {**run, "eval_every_steps": 0}}
        spec = self._spec(row, f"{link}_{seed}", settings, boundaries)
        return Task(row, (link,), dataclasses.replace(spec, evaluates=True))

    def _spec(
        self,
        row: Row,
        name: str,
        settings: Mapping[str, Any],
        boundaries: tuple[int, ...],
    ) -> Spec:
        folder = f"{row.name}_{self.num_hosts}_{_file_name(name)}"
        return Spec(
            config=settings,
            workdir=str(self.workdir / "runs" / self.study.name / folder),
            boundaries=boundaries,
            stand_in_seconds=self.study.stand_in_seconds / self.num_hosts,
            exchange_only=row.exchange_only,
            hook=row.hook,
            num_hosts=self.num_hosts,
        )


def _steady_settings(settings: Mapping[str, Any], period: int) -> Mapping[str, Any]:
    """Settings with which every method is in its steady state after the warm-up."""
    total = 1_000_000
    sparsity = dict(settings["sparsity"])
    sparsity |= {
        "start_share": 0.0,
        "freeze_share": 2 * period / total,
        "num_stairs": 1,
    }
    if sparsity["shrink_share"] < 1:
        sparsity["shrink_share"] = 3 * period / total
    method = dict(settings["method"])
    method["dgc"] = {**method["dgc"], "warmup_share": 1 / total}
    run = {
        "steps": total,
        "epochs": 0.0,
        "log_every_steps": total,
        "eval_every_steps": 0,
        "checkpoint_every_steps": 0,
    }
    return {
        **settings,
        "sparsity": sparsity,
        "method": method,
        "run": {**settings["run"], **run},
    }


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text)


def kind_of_processes(task: Task) -> tuple[str, int]:
    """What rows that share processes have in common: runtime, processes per host."""
    return task.row.runtime, task.row.processes_per_host


def session_commands(
    hosts: Hosts, runtime: str, per_host: int, session: Sequence[Task], folder: Path
) -> list[list[str]]:
    """Command lines of the processes of a session, host by host."""
    folder.mkdir(parents=True, exist_ok=True)
    specs = folder / "specs.json"
    write_specs(specs, [task.spec for task in session])
    address = f"{hosts.address(0)}:{_free_port()}"
    total, commands = hosts.num_hosts * per_host, []
    shared = [
        *(sys.executable, "-m", _MODULES[runtime]),
        *(f"--spec={specs}", "--gate={gate}"),
        *(f"--coordinator={address}", f"--num_processes={total}"),
    ]
    for number in range(total):
        host = number // per_host
        own = [f"--process_id={number}"]
        if runtime == "torch":
            own.append(f"--interface={hosts.interface(host)}")
        commands.append(hosts.command(host, [*shared, *own]))
    return commands


def session_environment(workdir: Path) -> dict[str, str]:
    """What processes inherit; nothing that tells jax of another launcher.

    Args:
      workdir: Keeps compiled programs, most of which many rows share.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUM_")}
    return {
        **keeping_programs(workdir / "compiled"),
        **inherited,
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as asked:
        asked.bind(("", 0))
        return int(asked.getsockname()[1])
