"""Scores networks on held-out examples, and says whether a run is worth going on."""

import math
from collections.abc import Callable, Iterable

import jax

from prunex_jax.base.errors import TrainingDivergedError
from prunex_jax.base.trees import PyTree
from prunex_jax.data import Split, batch_rows, evaluation_batches, place_batch
from prunex_jax.tasks import Objective, Sums
from prunex_jax.train.build.experiment import Experiment
from prunex_jax.train.steps.compiled import Program
from prunex_jax.train.steps.programs import Report
from prunex_jax.train.steps.state import NEVER, TrainState


def validate(
    experiment: Experiment,
    state: TrainState,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Scores the network that a state stands for on the validation split.

    Returns:
      Metric of the task -> its mean over the split; None if that is empty, or scoring
      was stopped.
    Collectives:
      Those of `programs.Programs.network` and of `evaluate_split`.
    """
    programs = experiment.current.programs
    network = programs.network(state)
    split = experiment.task.dataset.validation
    return evaluate_split(experiment, programs.evaluate, network, split, should_stop)


def evaluate_split(
    experiment: Experiment,
    program: Program,
    network: tuple[PyTree, PyTree],
    split: Split,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Scores a network on every example of a split once, on all devices of the mesh.

    Returns:
      Metric of the task -> its mean over all examples; None if there is none, or
      scoring was stopped.
    Raises:
      TrainingDivergedError: The loss is not finite.
    Collectives:
      One sum over the mesh of a few numbers per batch.
    """
    config, mesh = experiment.config.data, experiment.mesh
    batch_size = experiment.eval_batch_size
    rows = batch_rows(mesh, batch_size)
    objective = experiment.task.objective
    with evaluation_batches(split, batch_size, rows, config.num_workers) as batches:
        found = measured(
            objective,
            (program(*network, place_batch(batch, mesh, rows)) for batch in batches),
            should_stop,
        )
    if found is not None and not math.isfinite(found["loss"]):
        raise TrainingDivergedError(
            f"the loss of the {split.name} split is {found['loss']}, and those of "
            "training were finite; look there for labels or numbers that the training "
            "split does not have. The network is in the newest checkpoint"
        )
    return found


def measured(
    objective: Objective,
    scores: Iterable[Sums],
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Metrics of a task, from what its batches add up to; None as of a split."""
    sums = dict.fromkeys(("loss", *objective.counted), 0.0)
    for score in scores:
        if should_stop():
            return None
        found = jax.device_get(score)
        sums = {name: total + float(found[name]) for name, total in sums.items()}
    if not sums[objective.unit]:
        return None
    return {name: float(value) for name, value in objective.measures(sums).items()}


def check_health(
    report: Report, max_host_drift: float, step: int, last_good_step: int | None
) -> None:
    """Refuses to go on with a run that is lost.

    Args:
      report: What the mesh has seen, on the host.
      max_host_drift: Largest ||theta - z|| / ||z||, mean over copies; 0 allows any.
      step: Steps done.
      last_good_step: Of the newest checkpoint, if any.
    Raises:
      TrainingDivergedError: The loss is not finite, or the copies have left their
        consensus. The latter is how H-SADMM diverges: copies and duals chase each
        other, while every loss stays a finite number.
      RuntimeError: The report names a step that has not been: a sum over processes was
        wrong. The run can go on from its newest checkpoint.
    Example:
      >>> import numpy as np
      >>> far = Report({'loss': 1.0}, np.int32(NEVER), {'host_drift': 7.0})
      >>> check_health(far, 1.0, 40, 20)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      prunex_jax.base.errors.TrainingDivergedError: the copies of ...
    """
    kept = "there is no checkpoint before it"
    if last_good_step is not None:
        kept = f"the checkpoint of step {last_good_step} is kept"
    bad_step = int(report.first_bad_step)
    if bad_step != NEVER and not 0 < bad_step <= step:
        raise RuntimeError(
            f"a sum over the processes of the run was wrong by step {step}: the first "
            f"bad step is said to be {bad_step}; {kept}. Run the same command again"
        )
    if bad_step != NEVER:
        raise TrainingDivergedError(
            f"the loss is not finite since step {bad_step}; {kept}. "
            "Lower config.optimizer.learning_rate or lengthen its warm-up, and choose "
            "another --workdir"
        )
    drift = float(report.health.get("host_drift", 0.0))
    if max_host_drift and not drift <= max_host_drift:
        where = _worst_groups(report)
        raise TrainingDivergedError(
            f"the copies of the hosts have left their consensus by step {step}: they "
            f"are {drift:.3g} of its norm away, more than "
            f"config.run.max_host_drift={max_host_drift:g}{where}; {kept}. A smaller "
            "config.method.hsadmm.dual_decay, sync_period or learning rate keeps them "
            "together; choose another --workdir"
        )


def _worst_groups(report: Report) -> str:
    """Names the channel groups whose copies differ most, if that is known."""
    found = report.health.get("primal_residual_by_group", {})
    # What is not a number differs more than any number.
    sizes = {k: math.inf if math.isnan(x) else float(x) for k, x in found.items()}
    worst = sorted(sizes, key=lambda name: -sizes[name])[:3]
    return f", most of all in {', '.join(worst)}" if worst else ""
