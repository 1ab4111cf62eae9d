"""Reads a run back from a checkpoint: to go on with it, or for its network.

Also where it had another number of hosts. Its folder is only read.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from prunex_jax.base.errors import UserError
from prunex_jax.base.files import expanded
from prunex_jax.base.trees import PyTree
from prunex_jax.export.folder import export_model
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS, make_topology
from prunex_jax.models import Model
from prunex_jax.shrink import (
    Certificate,
    Cut,
    Network,
    certify_networks,
)
from prunex_jax.shrink.compare import Comparison, Subject, compare
from prunex_jax.tasks import Own, Task
from prunex_jax.train.build.config import config_to_dict, resolve_config
from prunex_jax.train.build.experiment import Experiment, make_experiment
from prunex_jax.train.build.optimizer import MakeOptimizer
from prunex_jax.train.build.settings import DistillConfig
from prunex_jax.train.build.teaching import SELF
from prunex_jax.train.changes.regroup import (
    MeshSizes,
    Regrouping,
    describe_regrouping,
    placed_like,
    saved_shapes_of,
)
from prunex_jax.train.changes.transitions import (
    comparison_inputs,
    experiment_at,
    full_cut,
    network_of,
    on_host,
    saved_shapes,
)
from prunex_jax.train.records.checkpoint import Checkpointer
from prunex_jax.train.records.folder import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    SUMMARY,
    RunFolder,
    held_weights,
    read_json,
)
from prunex_jax.train.steps.position import RunPosition
from prunex_jax.train.steps.state import SavedRun, TrainState


@dataclasses.dataclass(frozen=True, eq=False)
class FoundRun:
    """A run as a checkpoint holds it, on the mesh of now."""

    experiment: Experiment  # With the method and the network of then.
    position: RunPosition
    run: SavedRun
    old: MeshSizes  # The mesh it was saved on,
    new: MeshSizes  # and the one it is on.

    @property
    def regrouped(self) -> str:
        """What is to be said of another mesh; "" on the same."""
        return "" if self.old == self.new else describe_regrouping(self.old, self.new)


def restore_run(
    checkpointer: Checkpointer, experiment: Experiment, step: int | None = None
) -> FoundRun:
    """Restores a run, and fits what hosts and devices have to the mesh of now.

    Raises:
      UserError: As `Checkpointer.restore`.
    """

    # A run is built once for every checkpoint that is tried; the last is restored.
    tried: list[tuple[Experiment, SavedRun, Regrouping]] = []

    def shapes(extra: Mapping[str, Any], leaves: Mapping[str, str]) -> SavedRun:
        position = RunPosition.from_dict(extra)
        _check_groups(position, experiment.channels.sizes)
        then = experiment_at(experiment, position)
        wanted = saved_shapes(then, position)
        method, saved = then.current.method, saved_shapes_of(leaves)
        regrouping = Regrouping(method, wanted.state, saved)
        tried.append((then, wanted, regrouping))
        if not regrouping.changes:
            return wanted
        return _with_state(wanted, regrouping.stored())

    run, extra = checkpointer.restore(shapes, step)
    position, (then, wanted, regrouping) = RunPosition.from_dict(extra), tried[-1]
    if regrouping.changes:
        state = regrouping.regrouped(run.state)
        run = _with_state(run, placed_like(state, wanted.state))
    old, new = regrouping.old, regrouping.new
    if old != new:
        position = _on_new_mesh(then, position, old)
    return FoundRun(then, position, run, old, new)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedNetwork:
    """What a checkpoint stands for."""

    workdir: Path  # The run folder.
    task: Task  # What was learned, with the full network.
    method: str
    num_steps: int  # Length of the run,
    step: int  # of which are done.
    shrunk: Network  # Cut widths.
    cut: Cut  # Which channels are kept.
    # Full widths, if that is what was trained until now.
    whole: Network | None = None

    @functools.cached_property
    def masked(self) -> Network:
        """Full widths, dead channels zero; host arrays."""
        if self.whole is not None:
            return on_host(self.whole.masked(self.cut))
        widened = (
            self.cut.put(self.shrunk.params),
            self.cut.put_statistics(self.shrunk.statistics),
        )
        return on_host(Network(self.task.model, *widened))

    def certify(self) -> Certificate:
        """Compares the masked and the shrunk network on examples of the run."""
        inputs = comparison_inputs(self.task)
        return certify_networks(self.masked, self.shrunk, self.cut, inputs)

    def module(self) -> Any:
        """The shrunk network as a module of PyTorch, if it was one.

        Raises:
          UserError: It was none, or `pruner.pytorch.smaller_module` refuses.
        """
        from prunex_jax.pruner.pytorch import smaller_module

        model, given = self.shrunk.model, self.task.model.functions.module
        if given is None:
            raise UserError("this network was no module of PyTorch; export it instead")
        arrays = {**self.shrunk.params, **self.shrunk.statistics}
        inputs = comparison_inputs(self.task)
        answers = self.shrunk.logits(inputs)
        return smaller_module(given, model.cuts, arrays, (inputs,), answers)

    def compare(self, batch_sizes: Sequence[int]) -> Comparison:
        """Measures full and small network on this device."""
        full, small = (
            Subject(network.model.apply, (network.params, network.statistics))
            for network in (self.masked, self.shrunk)
        )
        inputs = comparison_inputs(self.task)
        return compare(full, small, inputs, batch_sizes=batch_sizes)

    def export(
        self,
        folder: str | Path,
        *,
        overwrite: bool = False,
        format: str = "stablehlo",
    ) -> dict[str, Any]:
        """Exports the shrunk network.

        Args:
          folder: Where the export goes.
          overwrite: Replace an earlier export.
          format: onnx writes a program of ONNX, too.
        Returns:
          The manifest.
        Raises:
          UserError: The cut is not exact, or the export cannot be written.
        """
        shrunk, workdir = self.shrunk, self.workdir

        def apply(model: Model, tree: PyTree, inputs: PyTree) -> jax.Array:
            return model.apply(tree["params"], tree["statistics"], inputs)

        return export_model(
            folder,
            functools.partial(apply, shrunk.model),
            {"params": shrunk.params, "statistics": shrunk.statistics},
            [comparison_inputs(self.task)],
            certificate=self.certify(),
            cut=self.cut,
            about={
                "trained": {
                    "workdir": workdir.name,
                    "step": self.step,
                    "num_steps": self.num_steps,
                    "method": self.method,
                },
                "dataset": self.task.dataset.about(),
                "metrics": _metrics(workdir, self.step),
                "config": config_to_dict(resolve_config(read_json(workdir / CONFIG))),
            },
            in_float32=functools.partial(apply, shrunk.model.in_float32()),
            overwrite=overwrite,
            format=format,
        )


def load_trained(
    workdir: str | Path,
    *,
    step: int | None = None,
    data_dir: str = "",
    simulates: bool = False,
    own: Own | None = None,
    own_optimizer: MakeOptimizer | None = None,
) -> TrainedNetwork:
    """Makes the network that a checkpoint of a run stands for.

    Args:
      workdir: The run folder; it is only read.
      step: The checkpoint; None takes the newest.
      data_dir: Where the data set lies, if not where the run found it.
      simulates: Let one device stand for all that the run had.
      own: What the caller had brought to the run, if anything.
      own_optimizer: The same of what makes the inner optimizer.
    Returns:
      The masked and the shrunk network, host arrays.
    Raises:
      UserError: The folder holds no run or no such checkpoint, or this process has
        fewer devices than the run had.
    """
    path = expanded(workdir)
    full = _experiment(path, data_dir, simulates, own, own_optimizer)
    with Checkpointer(path / CHECKPOINTS, read_only=True) as checkpointer:
        found = restore_run(checkpointer, full, step)
    position, experiment, state = found.position, found.experiment, found.run.state
    trained = functools.partial(
        TrainedNetwork,
        path,
        full.task,
        full.current.method.name,
        full.num_steps,
        position.step,
    )
    network = network_of(experiment, state)
    if position.handover is not None:
        cut = full_cut(full, position.handover.masks(full.channels.sizes))
        return trained(network, cut)
    masks = jax.device_get(experiment.current.method.pruning.masks(state.opt_state))
    cut = full_cut(full, masks)
    return trained(on_host(network.shrunk(cut)), cut, network)


def mesh_in_folder(path: Path) -> tuple[int, int]:
    """Hosts and devices per host of the run in a folder.

    Raises:
      UserError: It does not say.
    """
    topology = read_json(path / ENVIRONMENT).get("topology", {})
    try:
        return int(topology["num_hosts"]), int(topology["devices_per_host"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(
            f"{path / ENVIRONMENT} does not say on how many hosts and devices the run "
            "was trained; give the --workdir of a run"
        ) from None


def _check_groups(position: RunPosition, sizes: Mapping[str, int]) -> None:
    """Refuses a position of another network, or one that was changed by hand.

    Raises:
      UserError: It names a channel group that is not there or misses one, or counts
        that do not fit.
    """
    cut = position.handover
    named = [position.keep_counts] if cut is None else [position.keep_counts, cut.kept]
    saved = f"the checkpoint of step {position.step}"
    remedy = "put back a copy of it, or start over with --fresh"
    for groups in named:
        for name in sorted(groups.keys() ^ sizes.keys()):
            problem = "misses" if name in sizes else "has"
            raise UserError(
                f"{saved} {problem} channel group {name!r}, other than the network; "
                f"{remedy}"
            )
    for name, count in position.keep_counts.items():
        if not 1 <= count <= sizes[name]:
            raise UserError(
                f"{saved} keeps {count} of the {sizes[name]} channels of {name!r}; "
                f"{remedy}"
            )


def _with_state(run: SavedRun, state: TrainState) -> SavedRun:
    return run._replace(**state._asdict())


def _on_new_mesh(
    experiment: Experiment, position: RunPosition, old: MeshSizes
) -> RunPosition:
    """Counts what dense averaging had sent on the old mesh."""
    shape = dict(zip((HOST_AXIS, DEVICE_AXIS), old, strict=True))
    before = position.dense_bytes(experiment.dense_host_bytes_on(shape))
    return dataclasses.replace(
        position, mesh_since=position.step, dense_bytes_before=before
    )


def _experiment(
    path: Path,
    data_dir: str,
    simulates: bool,
    own: Own | None,
    own_optimizer: MakeOptimizer | None,
) -> Experiment:
    """Builds the run again, on the first devices of this process."""
    hosts, per_host = mesh_in_folder(path)
    config = resolve_config(read_json(path / CONFIG))
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
    built = config
    if config.distill.teacher != SELF:  # It has nothing more to say, and may be gone.
        built = dataclasses.replace(config, distill=DistillConfig())
    experiment = make_experiment(
        built, topology, own, own_optimizer, weights, goes_on=True
    )
    return dataclasses.replace(experiment, config=config)


def _metrics(path: Path, step: int) -> dict[str, Any]:
    """What the run has measured of this very network."""
    summary: dict[str, Any] | None = None
    if (path / SUMMARY).exists():
        summary = read_json(path / SUMMARY)
        if summary.get("steps") != step:
            summary = None  # Of a later network.
    rows = RunFolder(path, is_primary=False).read_rows()
    logged = [row for row in rows if row["step"] <= step and "loss" in row]
    return {"summary": summary, "logged": logged[-1] if logged else None}
