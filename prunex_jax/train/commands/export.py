"""Exports what a run has learned, from one of its checkpoints.

    prunex-jax export --workdir=FOLDER --out=FOLDER [--step=N]
        [--data_dir=FOLDER] [--overwrite] [--compare=1,8,64] [--quiet]

Makes a folder of what a run has learned: its network without the dead channels, as
safetensors, a StableHLO program and a JSON manifest, for use without this package. The
run may have ended, been stopped, or still be training; its folder is only read. Masked
and shrunk network are compared first, forward and gradients, and nothing is written if
they differ. --compare also measures both on this device and prints a table. Exit code
0: written; 2: bad input.

The run is rebuilt on as many devices as it had, simulated on the CPU:

    config.json -> experiment -> checkpoint -> network -> make_cut -> certify -> export
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from prunex_jax.base.command import Command, Flag, Values, run_command
from prunex_jax.base.errors import UserError
from prunex_jax.base.files import expanded
from prunex_jax.base.trees import PyTree
from prunex_jax.export.folder import check_target, export_model
from prunex_jax.mesh import make_topology
from prunex_jax.mesh.settings import TopologyConfig
from prunex_jax.processes import LaunchFlags, start_processes
from prunex_jax.shrink import (
    Certificate,
    Cut,
    Network,
    certify_networks,
    make_cut,
)
from prunex_jax.shrink.compare import Comparison, Subject, compare
from prunex_jax.train.build.config import config_to_dict, resolve_config
from prunex_jax.train.build.experiment import Experiment, make_experiment
from prunex_jax.train.build.settings import DistillConfig
from prunex_jax.train.build.teaching import SELF
from prunex_jax.train.changes.restoring import restore_run
from prunex_jax.train.changes.transitions import (
    comparison_inputs,
    network_of,
)
from prunex_jax.train.records.checkpoint import Checkpointer
from prunex_jax.train.records.folder import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    SUMMARY,
    RunFolder,
    held_weights,
)

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("workdir", "", "Run folder.", is_required=True),
        Flag("out", "", "Folder to make.", is_required=True),
        Flag("step", -1, "Checkpoint to export; -1 takes the newest."),
        Flag("data_dir", "", "Where the data set lies, if not where the run found it."),
        Flag("overwrite", False, "Replace an earlier export in --out."),
        Flag("compare", "", "Batch sizes, as in 1,8,64, for which both are measured."),
        Flag("quiet", False, "Print nothing but errors."),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and exports."""
    return run_command(COMMAND, _export, arguments)


def export_run(
    workdir: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    data_dir: str = "",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Exports the network of a run.

    Args:
      workdir: The run folder; it is only read.
      folder: Where the export goes.
      step: The checkpoint; None takes the newest.
      data_dir: Where the data set lies, if not where the run found it.
      overwrite: Replace an earlier export.
    Returns:
      The manifest.
    Raises:
      UserError: The folder holds no run or no such checkpoint, this process has fewer
        devices than the run had, the cut is not exact, or the export cannot be written.
    """
    check_target(folder, overwrite)  # Before all that takes time.
    trained = load_trained(workdir, step=step, data_dir=data_dir)
    return trained.export(folder, overwrite=overwrite)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedNetwork:
    """What a checkpoint stands for."""

    workdir: Path  # The run folder.
    experiment: Experiment  # The run with its full network.
    step: int  # Steps done.
    masked: Network  # Full widths, dead channels zero.
    shrunk: Network  # Cut widths.
    cut: Cut  # Which channels are kept.

    def certify(self) -> Certificate:
        """Compares the masked and the shrunk network on examples of the run."""
        inputs = comparison_inputs(self.experiment.task)
        return certify_networks(self.masked, self.shrunk, self.cut, inputs)

    def compare(self, batch_sizes: Sequence[int]) -> Comparison:
        """Measures full and small network on this device."""
        full, small = (
            Subject(network.model.apply, (network.params, network.statistics))
            for network in (self.masked, self.shrunk)
        )
        inputs = comparison_inputs(self.experiment.task)
        return compare(full, small, inputs, batch_sizes=batch_sizes)

    def export(self, folder: str | Path, *, overwrite: bool = False) -> dict[str, Any]:
        """Exports the shrunk network; see `export_run`."""
        experiment, shrunk = self.experiment, self.shrunk
        model, workdir = shrunk.model, self.workdir

        def apply(tree: PyTree, inputs: PyTree) -> jax.Array:
            return model.apply(tree["params"], tree["statistics"], inputs)

        return export_model(
            folder,
            apply,
            {"params": shrunk.params, "statistics": shrunk.statistics},
            [comparison_inputs(experiment.task)],
            certificate=self.certify(),
            cut=self.cut,
            about={
                "trained": {
                    "workdir": workdir.name,
                    "step": self.step,
                    "num_steps": experiment.num_steps,
                    "method": experiment.current.method.name,
                },
                "dataset": experiment.task.dataset.about(),
                "metrics": _metrics(workdir, self.step),
                "config": config_to_dict(resolve_config(_read_json(workdir / CONFIG))),
            },
            overwrite=overwrite,
        )


def load_trained(
    workdir: str | Path,
    *,
    step: int | None = None,
    data_dir: str = "",
    simulates: bool = False,
) -> TrainedNetwork:
    """Makes the network that a checkpoint of a run stands for.

    Args:
      workdir: As of `export_run`.
      step: As of `export_run`.
      data_dir: As of `export_run`.
      simulates: Let one device stand for all that the run had.
    Returns:
      The masked and the shrunk network, host arrays.
    Raises:
      UserError: As `export_run`.
    """
    path = expanded(workdir)
    full = _experiment(path, data_dir, simulates)
    with Checkpointer(path / CHECKPOINTS, read_only=True) as checkpointer:
        found = restore_run(checkpointer, full, step)
    position, experiment, saved_run = found.position, found.experiment, found.run
    handover = position.handover
    # A mean that is not complete yet has no batch statistics.
    is_last = position.step == experiment.num_steps
    state, mean = saved_run.state, saved_run.final_mean if is_last else None
    network = network_of(experiment, state, mean)
    if handover is None:
        masks = jax.device_get(experiment.current.method.pruning.masks(state.opt_state))
    else:
        masks = handover.masks(full.channels.sizes)
    shapes = jax.eval_shape(full.task.model.init, jax.random.key(0))
    cut = make_cut(full.channels.trace, masks, *shapes)
    if handover is None:
        pair = network.masked(cut), network.shrunk(cut)
    else:
        widened = cut.put(network.params), cut.put_statistics(network.statistics)
        pair = Network(full.task.model, *widened), network
    masked, shrunk = map(_on_host, pair)
    return TrainedNetwork(path, full, position.step, masked, shrunk, cut)


def _export(values: Values, rest: list[str]) -> None:
    del rest
    # As many devices as the run had, whatever this machine has.
    hosts, per_host = _mesh_of_run(expanded(values.workdir))
    topology = TopologyConfig(cpu_devices=hosts * per_host)
    start_processes(topology, LaunchFlags(launcher="none", owns_process=True))
    batch_sizes = _batch_sizes(values.compare)
    check_target(values.out, values.overwrite)  # Before all that takes time.
    step = None if values.step < 0 else values.step
    trained = load_trained(values.workdir, step=step, data_dir=values.data_dir)
    manifest = trained.export(values.out, overwrite=values.overwrite)
    if not values.quiet:
        sys.stdout.write(_described(manifest, values.out))
    if batch_sizes:
        sys.stdout.write("\n" + trained.compare(batch_sizes).format() + "\n")


def _batch_sizes(text: str) -> list[int]:
    numbers = [part.strip() for part in text.split(",") if part.strip()]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise UserError(
            f"--compare={text} is no list of batch sizes; write them as in 1,8,64"
        )
    return [int(number) for number in numbers]


def _described(manifest: Mapping[str, Any], folder: str) -> str:
    """Says in a few lines what was exported."""
    trained, certificate = manifest["trained"], manifest["certificate"]
    channels, program = manifest["channels"], manifest["program"]
    total = sum(group["size"] for group in channels)
    kept = sum(len(group["kept"]) for group in channels)
    lines = [
        f"exported  step {trained['step']} of {trained['num_steps']} to {folder}",
        f"channels  {kept} of {total} kept",
        f"equal     masked and shrunk differ by {certificate['forward_error']:.1e} "
        f"(outputs) and {certificate['gradient_error']:.1e} (gradients), relative",
        f"program   {program['inputs'][0]} -> {program['outputs']} on "
        f"{', '.join(program['platforms'])}",
        f"check it  python -m prunex_jax evaluate --model={folder}",
    ]
    return "\n".join(lines) + "\n"


def _experiment(path: Path, data_dir: str, simulates: bool) -> Experiment:
    """Builds the run again, on the first devices of this process."""
    hosts, per_host = _mesh_of_run(path)
    config = resolve_config(_read_json(path / CONFIG))
    if data_dir:
        data = dataclasses.replace(config.data, dir=data_dir)
        config = dataclasses.replace(config, data=data)
    devices, weights = jax.devices(), held_weights(path)
    if len(devices) < hosts * per_host and not simulates:
        raise UserError(
            f"{path} was trained on {hosts * per_host} devices and this process has "
            f"{len(devices)}; python -m prunex_jax export simulates them"
        )
    simulated = f"{hosts}x{per_host}" if simulates else ""
    topology = make_topology(str(hosts), devices[: hosts * per_host], simulated)
    if config.distill.teacher == SELF:  # Checkpoints hold it.
        return make_experiment(config, topology, weights=weights, goes_on=True)
    # Another teacher has nothing more to say, and may be gone.
    without_teacher = dataclasses.replace(config, distill=DistillConfig())
    experiment = make_experiment(
        without_teacher, topology, weights=weights, goes_on=True
    )
    return dataclasses.replace(experiment, config=config)


def _mesh_of_run(path: Path) -> tuple[int, int]:
    topology = _read_json(path / ENVIRONMENT).get("topology", {})
    try:
        return int(topology["num_hosts"]), int(topology["devices_per_host"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(
            f"{path / ENVIRONMENT} does not say on how many hosts and devices the run "
            "was trained; give the --workdir of a run"
        ) from None


def _on_host(network: Network) -> Network:
    params, statistics = jax.device_get((network.params, network.statistics))
    return Network(network.model, params, statistics)


def _metrics(path: Path, step: int) -> dict[str, Any]:
    """What the run has measured of this very network."""
    summary: dict[str, Any] | None = None
    if (path / SUMMARY).exists():
        summary = _read_json(path / SUMMARY)
        if summary.get("steps") != step:
            summary = None  # Of a later network.
    rows = RunFolder(path, is_primary=False).read_rows()
    logged = [row for row in rows if row["step"] <= step and "loss" in row]
    return {"summary": summary, "logged": logged[-1] if logged else None}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); give the --workdir of a run"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object; give the --workdir of a run")
    return content


if __name__ == "__main__":
    sys.exit(main())
