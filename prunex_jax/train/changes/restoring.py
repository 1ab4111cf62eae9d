"""Reads a run back from a checkpoint, also one of another number of hosts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from prunex_jax.base.errors import UserError
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS
from prunex_jax.train.build.experiment import Experiment
from prunex_jax.train.build.network_mean import SavedRun
from prunex_jax.train.changes.regroup import (
    MeshSizes,
    Regrouping,
    describe_regrouping,
    mesh_of,
    placed_like,
    saved_mesh,
    saved_shapes_of,
)
from prunex_jax.train.changes.transitions import experiment_at, saved_shapes
from prunex_jax.train.records.checkpoint import Checkpointer
from prunex_jax.train.records.position import RunPosition
from prunex_jax.train.steps.state import TrainState


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

    def check_same_mesh(self) -> None:
        """Raises UserError if the checkpoint is of another mesh."""
        if self.old != self.new:
            raise UserError(
                f"the checkpoint of step {self.position.step} is of "
                f"{self.old[0]} hosts x {self.old[1]} devices and this run has "
                f"{self.new[0]} x {self.new[1]}; leave out --exact_topology to go on "
                "with it"
            )


def restore_run(
    checkpointer: Checkpointer, experiment: Experiment, step: int | None = None
) -> FoundRun:
    """Restores a run, and fits what hosts and devices have to the mesh of now.

    Args:
      checkpointer: Holds its checkpoints.
      experiment: The run, as it starts.
      step: As of `Checkpointer.restore`.
    Raises:
      UserError: As `Checkpointer.restore`.
    """

    # A run is built once for every checkpoint that is tried; the last is restored.
    tried: list[tuple[Experiment, SavedRun, Regrouping]] = []

    def shapes(extra: Mapping[str, Any], leaves: Mapping[str, str]) -> SavedRun:
        position = RunPosition.from_dict(extra)
        then = experiment_at(experiment, position)
        wanted = saved_shapes(then, position)
        regrouping = _regrouping(then, wanted, saved_shapes_of(leaves))
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


def _regrouping(
    experiment: Experiment, wanted: SavedRun, saved: Mapping[str, tuple[int, ...]]
) -> Regrouping:
    """From shapes that were saved to those of now."""
    new = mesh_of(wanted)
    method = experiment.current.method
    return Regrouping(method, saved_mesh(saved) or new, new, wanted.state, saved)


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
