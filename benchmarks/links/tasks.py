"""What the processes of a study are told to run.

Settings of every row, checked before anything runs; the steps after which there are
gates; and command lines.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.links.gates import Spec, write_specs
from benchmarks.links.links import LinkedHosts
from benchmarks.report import places
from benchmarks.study import LinkRow, LinkStudy, check_goal
from prunex_jax.base.errors import UserError
from prunex_jax.compare.subprocesses import free_port
from prunex_jax.compare.sweep.study import settings_of
from prunex_jax.mesh import check_has_links
from prunex_jax.tasks import make_task
from prunex_jax.train.build.config import config_to_dict, resolve_config

# The row that every study runs first: steps without any exchange are what r counts in.
COMPUTATION = LinkRow(places.COMPUTATION, "computation alone", {"method.name": "none"})
# Rounds before measuring: dense, pruned, frozen and cut out, small; then one to spare.
_WARM_UP_ROUNDS = 5
_LEAST_WARM_UP_STEPS = 12
# What links are measured in is to be known well.
_COMPUTATION_STEPS = 30


@dataclasses.dataclass(frozen=True)
class Task:
    """One run of a row, with the link of every phase between two gates."""

    row: LinkRow
    links: tuple[str, ...]
    spec: Spec

    @property
    def kind(self) -> tuple[str, int]:
        """What tasks that share processes have in common: runtime, processes a host."""
        return self.row.runtime, self.row.processes_per_host


def row_settings(
    study: LinkStudy, is_simulated: bool = True
) -> dict[str, Mapping[str, Any]]:
    """Reads and checks the settings of every row, before anything runs.

    Args:
      study: The study.
      is_simulated: Whether every process is a host of virtual CPU devices; a cluster
        has devices and hosts of its own.
    Returns:
      LinkRow -> resolved training settings; `COMPUTATION` is one of them.
    Raises:
      UserError: A setting that is not known or cannot work.
    """
    own = {
        "topology.layout": "process" if is_simulated else "auto",
        "topology.cpu_devices": study.devices_per_host if is_simulated else 0,
    }
    found: dict[str, Mapping[str, Any]] = {}
    for row in (COMPUTATION, *study.rows):
        config = settings_of(study, row, own)
        check_has_links(config.topology.simulated)
        found[row.name] = config_to_dict(config)
    return found


def check_scores(study: LinkStudy, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses a study of whole runs that cannot be scored, before anything runs.

    Args:
      study: The study.
      settings: From `row_settings`.
    Raises:
      UserError: A task does not measure the goal, or has no validation split.
    """
    if study.figure is None:
        return
    seen = []
    for row in study.rows:
        parts = settings[row.name]["data"], settings[row.name]["model"]
        if parts in seen:
            continue
        seen.append(parts)
        config = resolve_config(settings[row.name])
        task = make_task(config.data, config.model, config.seed)
        check_goal(study.goal, [metric.name for metric in task.objective.metrics])
        if not len(task.dataset.validation):
            raise UserError(
                f"row {row.name}: goal={study.goal!r} is that of the validation split, "
                "which is empty; raise config.data.validation_share"
            )


@dataclasses.dataclass(frozen=True)
class Planner:
    """Makes the tasks of a study on one number of hosts."""

    study: LinkStudy  # The study.
    settings: Mapping[
        str, Mapping[str, Any]
    ]  # LinkRow -> settings, from `row_settings`.
    num_hosts: int  # Size of the host axis.
    workdir: Path  # Folder of the study.

    def steady(self, row: LinkRow, links: tuple[str, ...]) -> Task:
        """Steady steps of a row, over one link after the other."""
        warm_up = max(_LEAST_WARM_UP_STEPS, _WARM_UP_ROUNDS * row.period)
        steps = (self.study.rounds + 1) * row.period
        if row is COMPUTATION:
            steps = max(steps, _COMPUTATION_STEPS)
        boundaries = tuple(warm_up + steps * k for k in range(len(links) + 1))
        settings = _steady_settings(self.settings[row.name], row.period)
        return Task(row, links, self._spec(row, "steady", settings, boundaries))

    def training(self, row: LinkRow, link: str, seed: int) -> Task:
        """A whole run of a row over one link."""
        settings = {**self.settings[row.name], "seed": seed}
        run = settings["run"]
        boundaries = (*range(0, run["steps"], run["eval_every_steps"]), run["steps"])
        settings["run"] = {**run, "eval_every_steps": 0}
        spec = self._spec(row, f"{link}_{seed}", settings, boundaries)
        links = (link,) * (len(boundaries) - 1)
        scored = self.study.scored_examples
        return Task(
            row,
            links,
            dataclasses.replace(spec, metric=self.study.goal, scored_examples=scored),
        )

    def _spec(
        self,
        row: LinkRow,
        name: str,
        settings: Mapping[str, Any],
        boundaries: tuple[int, ...],
    ) -> Spec:
        plain = "".join(c if c.isalnum() else "-" for c in name)
        folder = f"{row.name}_{self.num_hosts}_{plain}"
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
    sparsity = {
        **settings["sparsity"],
        "start_share": 0.0,
        "freeze_share": 2 * period / total,
        "num_stairs": 1,
    }
    if sparsity["shrink_share"] < 1:
        sparsity["shrink_share"] = 3 * period / total
    method = settings["method"]
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
        "method": {**method, "dgc": {**method["dgc"], "warmup_share": 1 / total}},
        "run": {**settings["run"], **run},
    }


def session_commands(
    hosts: LinkedHosts, tasks: Sequence[Task], folder: Path
) -> list[list[str]]:
    """Command lines of the processes that run tasks of one kind, host by host."""
    runtime, per_host = tasks[0].kind
    folder.mkdir(parents=True, exist_ok=True)
    specs = folder / "specs.json"
    write_specs(specs, [task.spec for task in tasks])
    total, commands = hosts.num_hosts * per_host, []
    shared = [
        *(sys.executable, "-m", "benchmarks.links.host", f"--runtime={runtime}"),
        *(f"--spec={specs}", "--gate={gate}"),
        *(
            f"--coordinator={hosts.address(0)}:{free_port()}",
            f"--num_processes={total}",
        ),
    ]
    for number in range(total):
        host = number // per_host
        own = [f"--process_id={number}"]
        if runtime == "torch":
            own.append(f"--interface={hosts.interface}")
        commands.append(hosts.command(host, [*shared, *own]))
    return commands
