"""Teachers: networks whose answers a run learns beside the labels.

Any export serves as a teacher: that of a dense run, of an earlier checkpoint, or of a
network of another package, as long as it reads the same examples. Or a run that loses
channels learns from itself: from the mean of its networks over the last rounds before.
Logits are computed for every training batch on the device that has the examples, and
nothing is sent for them.

A batch has the same entries whether a teacher is asked or not, so that steps compile
once: where it is not, its weight is zero.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prunex_jax.base.errors import UserError
from prunex_jax.base.sync import SyncSchedule
from prunex_jax.base.trees import PyTree
from prunex_jax.data import ImageDataset
from prunex_jax.export import ExportedModel, read_model
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS, AnyMesh, map_over, placed
from prunex_jax.models import Model
from prunex_jax.tasks import TEACHER, TEACHER_WEIGHT, Batch, Objective, Task
from prunex_jax.train.build.config import ExperimentConfig
from prunex_jax.train.build.rounds import RoundPlan
from prunex_jax.train.build.settings import DistillConfig
from prunex_jax.train.steps.compiled import Ledger, Program
from prunex_jax.train.steps.state import NetworkMean

# The teacher that is the run's own network.
SELF = "self"
_BATCH = jax.P((HOST_AXIS, DEVICE_AXIS))


@dataclasses.dataclass(frozen=True)
class MeanPlan:
    """Which networks the own teacher is the mean of: those at the ends of rounds.

    A mean over rounds at a high learning rate is a better network than any of them.

    Example:
      >>> plan = MeanPlan.over(25, complete=60, sync=SyncSchedule(10))
      >>> [step for step in range(100) if plan.gathers_after(step)]
      [40, 50, 60]
    """

    first: int  # Steps done when the first network is taken into the mean,
    complete: int  # and when the last one is.
    sync: SyncSchedule  # When networks change.

    @classmethod
    def over(cls, window: int, complete: int, sync: SyncSchedule | None) -> Self:
        """The networks of the last `window` steps, and at least the last one."""
        sync = sync or SyncSchedule(1)
        first = sync.at_or_after(max(complete - window, 1))
        return cls(min(first, complete), complete, sync)

    def gathers_after(self, num_steps: int) -> bool:
        """Whether the network is taken into the mean after so many steps."""
        if num_steps == self.complete:
            return True
        return self.first <= num_steps < self.complete and self.sync.is_due(num_steps)


@dataclasses.dataclass(frozen=True, eq=False)
class Teaching:
    """How a run is taught."""

    # (arrays, what networks read of a batch) -> their answers; both split over the mesh
    # along the batch.
    program: Program
    objective: Objective  # Says what networks read of a batch.
    steps: range  # Those, from 0, in which the teacher is asked.
    # float32[batch]: its share of the loss then.
    weight: jax.Array
    # Entries of a batch in all other steps: answers of no weight.
    silence: Mapping[str, jax.Array]
    arrays: PyTree = None  # Of an exported teacher, on every device,
    macs: int | None = None  # and its multiply-accumulates of one example, if known.
    own: MeanPlan | None = None  # The networks of a run that teaches itself.

    def taught(self, batch: Batch, step: int, own: NetworkMean | None = None) -> Batch:
        """A training batch as step number `step` takes it: with a teacher's answers."""
        if step not in self.steps:
            return {**batch, **self.silence}
        arrays = self.arrays if own is None else (own.params, own.statistics)
        answers = self.program(arrays, self.objective.inputs(batch))
        return {**batch, TEACHER: answers, TEACHER_WEIGHT: self.weight}

    def holds_own_after(self, num_steps: int) -> bool:
        """Whether the run has a teacher of its own when so many steps are done.

        From its first network on, as long as it will be asked.
        """
        return self.own is not None and self.own.first <= num_steps < self.steps.stop


def read_teaching(
    config: ExperimentConfig,
    task: Task,
    mesh: AnyMesh,
    ledger: Ledger,
    num_steps: int,
    plans: Sequence[RoundPlan],
    batch_size: int,
) -> Teaching | None:
    """Prepares the teacher that settings name; None if they name none.

    Raises:
      UserError: The folder is no export or was damaged, or its network was made for
        other examples or answers; the run is to learn from itself and loses no
        channels; or no step is left to learn in.
    """
    distill = config.distill
    if not distill.teacher:
        return None
    if not task.objective.can_be_taught:
        raise UserError(
            f"distill.teacher={distill.teacher!r} has no say in a loss of your own; "
            "compare with its answers there, or leave it empty"
        )
    until = round(distill.until_share * num_steps)
    own, arrays, macs = None, None, None
    if distill.teacher == SELF:
        own = _own_plan(distill, num_steps, until, plans)
        answer: Callable[..., jax.Array] = _own_answers(task.model, mesh)
    else:
        exported = read_model(distill.teacher)
        count = batch_size // mesh.devices.size
        _check_teacher(exported, task, count, distill.teacher)
        arrays = placed(exported.arrays, mesh)
        answer, macs = _exported_answers(exported.program, mesh), _macs_of(exported)
    weight = np.full(batch_size, distill.weight, np.float32)
    outputs = _answers_of(task.model, batch_size)
    if not isinstance(outputs, jax.ShapeDtypeStruct):
        raise UserError(
            "distill.teacher needs a network that answers with one array of logits, "
            "and this one gives a tree; leave it empty"
        )
    answers = np.zeros(outputs.shape, np.float32)
    return Teaching(
        program=Program("teacher", lambda: answer, dict(mesh.shape), ledger),
        objective=task.objective,
        steps=range(0 if own is None else own.complete, until),
        weight=placed(weight, mesh, _BATCH),
        silence={
            TEACHER: placed(answers, mesh, _BATCH),
            TEACHER_WEIGHT: placed(np.zeros_like(weight), mesh, _BATCH),
        },
        arrays=arrays,
        macs=macs,
        own=own,
    )


def _own_plan(
    config: DistillConfig, num_steps: int, until: int, plans: Sequence[RoundPlan]
) -> MeanPlan:
    """The mean is complete when the first channels are about to go."""
    found = [
        (stage.start_step, plan.sync)
        for plan in plans
        for stage in plan.stages
        if stage.density < 1.0
    ]
    if not found:
        raise UserError(
            f"distill.teacher={SELF!r} learns from the network as it was before it "
            "lost channels, and this run removes none on its way; leave it empty, or "
            f"write './{SELF}' for a folder of that name"
        )
    complete, sync = min(found, key=lambda pair: pair[0])
    if not complete:
        raise UserError(
            f"distill.teacher={SELF!r} needs a network that has learned something, and "
            "the first channels go before the first step; raise sparsity.start_share"
        )
    if until <= complete:
        raise UserError(
            f"distill.until_share={config.until_share:g} ends at step {until}, and "
            f"distill.teacher={SELF!r} is there from step {complete} on; raise it, or "
            "lower sparsity.start_share"
        )
    window = round(config.average_share * num_steps)
    return MeanPlan.over(window, complete, sync)


def _own_answers(model: Model, mesh: AnyMesh) -> Callable[..., jax.Array]:
    """Every device answers its examples with running statistics."""

    def answer(network: tuple[PyTree, PyTree], inputs: PyTree) -> jax.Array:
        return model.apply(*network, inputs)

    return map_over(mesh, answer, (jax.P(), _BATCH), _BATCH)


def _exported_answers(
    program: Callable[..., Any], mesh: AnyMesh
) -> Callable[..., jax.Array]:
    """Every device answers its examples; a folded mesh has them all on one."""

    def answer(arrays: Mapping[str, jax.Array], inputs: PyTree) -> jax.Array:
        logits: jax.Array = program(dict(arrays), inputs)
        return logits.astype(jnp.float32)

    if not isinstance(mesh, Mesh):
        return answer
    # What is inside an exported program is not checked for how it varies over a mesh.
    return jax.shard_map(
        answer, mesh=mesh, in_specs=(jax.P(), _BATCH), out_specs=_BATCH, check_vma=False
    )


def _macs_of(model: ExportedModel) -> int | None:
    """What the run has counted whose last network was exported; None of all others."""
    summary = (model.manifest.get("metrics") or {}).get("summary") or {}
    macs: int | None = summary.get("macs_kept")
    return macs


def _check_teacher(model: ExportedModel, task: Task, count: int, folder: str) -> None:
    """Refuses a teacher that cannot take a device's examples, or answers otherwise."""
    dataset = task.dataset
    # Exports of functions do not say what they were trained on.
    said = model.manifest.get("dataset") or {}
    seen: Any = said.get("preprocessing") if isinstance(dataset, ImageDataset) else {}
    for key in ("mean", "std") if seen and "mean" in seen else ():
        theirs, ours = seen[key], dataset.about()["preprocessing"][key]
        if not np.array_equal(theirs, ours):
            raise UserError(
                f"the teacher in {folder} was trained on {said['name']} with pixels "
                f"of {key} {theirs}, and {dataset.name} has {ours} here; train one on "
                "this data set, with the same data.validation_share"
            )
    examples, wanted = task.model.example(count), _answers_of(task.model, count)
    try:
        shape = jax.eval_shape(model.program, dict(model.arrays), examples).shape
    except (TypeError, ValueError, AttributeError) as error:
        given = ", ".join(str(x.shape[1:]) for x in jax.tree.leaves(examples))
        raise UserError(
            f"the teacher in {folder} takes no {count} examples {given} of "
            f"{dataset.name}: {str(error).splitlines()[0]}"
        ) from error
    if shape != wanted.shape:
        raise UserError(
            f"the teacher in {folder} answers {count} examples with {list(shape)} "
            f"numbers, and the network that learns {dataset.name} with "
            f"{list(wanted.shape)}"
        )


def _answers_of(model: Model, count: int) -> Any:
    """Shapes of what a network answers to so many examples."""
    arrays = jax.eval_shape(model.init, jax.random.key(0))
    return jax.eval_shape(model.apply, *arrays, model.example(count))
