"""Counts the work of training: multiply-accumulates of its forward passes.

Until they are cut out, masked channels are computed as all others are, so cuts make
steps cheaper and nothing else does. A cut keeps what the steps before it have cost, and
a run that is resumed counts on from there. Backward passes, which cost about twice as
much, are not counted.
"""

import jax

from prunex_jax.models import AnyModel
from prunex_jax.shrink.cost import count_macs
from prunex_jax.train.experiment import Experiment
from prunex_jax.train.position import Handover, RunPosition


def macs_of_one_example(model: AnyModel) -> int:
    """Multiply-accumulates of one forward pass, without making parameters."""
    arrays = jax.eval_shape(model.init, jax.random.key(0))
    return count_macs(model.apply, *arrays, model.example())


def macs_until(experiment: Experiment, step: int, cut: Handover | None) -> int:
    """Multiply-accumulates of one example in each step so far, added up.

    Args:
      experiment: The run with the network of now.
      step: Steps done.
      cut: The last cut, if there was one.
    """
    now = macs_of_one_example(experiment.current.model)
    if cut is None:
        return step * now
    before = cut.macs_before
    if before is None:
        before = cut.step * macs_of_one_example(experiment.task.model)
    return before + (step - cut.step) * now


def work_of_training(
    experiment: Experiment, position: RunPosition
) -> dict[str, int | None]:
    """The work of a run that has ended, for its summary.

    Returns:
      `training_macs`: multiply-accumulates of the forward passes of all examples in all
      steps, those of a teacher included; None if its export does not say what they are.
      `training_macs_dense`: those of as many examples at full width, without a teacher.
    """
    own = macs_until(experiment, position.step, position.handover)
    dense = position.step * macs_of_one_example(experiment.task.model)
    taught = _macs_of_teacher(experiment)
    batch_size = experiment.config.data.batch_size
    return {
        "training_macs": None if taught is None else batch_size * (own + taught),
        "training_macs_dense": batch_size * dense,
    }


def _macs_of_teacher(experiment: Experiment) -> int | None:
    """Its multiply-accumulates of one example in each step that asks it, added up."""
    teaching = experiment.teaching
    if teaching is None:
        return 0
    answer = teaching.macs
    if teaching.own is not None:
        answer = macs_of_one_example(experiment.task.model)
    return None if answer is None else len(teaching.steps) * answer
