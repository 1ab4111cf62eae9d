"""Counts the work of training: what was seen, multiply-accumulates, and their speed.

All of it is counted in the program of the network that is trained. Until they are cut
out, masked channels are computed as all others are, so cuts make steps cheaper and
nothing else does. A cut keeps what the steps before it have cost, and a run that is
resumed counts on from there. Multiply-accumulates are those of forward passes; speed
also counts backward passes, which cost twice as much.
"""

from prunex_jax.mesh import peak_flops
from prunex_jax.train.experiment import Experiment, macs_of_one_example
from prunex_jax.train.position import Handover, RunPosition

# Floating point operations for one multiply-accumulate of a forward pass: two, and as
# many for the gradient by each of its two factors.
_FLOPS_PER_MAC = 6


def speed_of(experiment: Experiment, seconds: float) -> dict[str, float | None]:
    """How fast the network of now is trained.

    The work of its forward and backward passes counts, attention included; that of the
    optimizer, of the exchange and of a teacher does not.

    Args:
      experiment: The run.
      seconds: Of a step.
    Returns:
      `flops_per_second`, of all devices together; `flops_utilisation`, the share of
      what they can do at best (`mesh.peak_flops`), None where that is not known.

    References:
      Chowdhery et al., PaLM, 2022, arXiv:2204.02311, appendix B (model FLOPs
      utilisation).
    """
    macs = experiment.config.data.batch_size * experiment.current.macs
    speed = _FLOPS_PER_MAC * macs / max(seconds, 1e-9)
    devices = experiment.mesh.devices
    peak = peak_flops(devices.flat[0].device_kind)
    share = speed / (devices.size * peak) if peak else None
    return {"flops_per_second": speed, "flops_utilisation": share}


def seen_until(experiment: Experiment, step: int) -> dict[str, int]:
    """What networks have read in so many steps, by name: `examples_seen`, say.

    The same example in another epoch counts again.
    """
    objective = experiment.task.objective
    count = experiment.config.data.batch_size * objective.units_per_example
    return {f"{objective.unit}_seen": step * count}


def macs_until(experiment: Experiment, step: int, cut: Handover | None) -> int:
    """Multiply-accumulates of one example in each step so far, added up.

    Args:
      experiment: The run with the network of now.
      step: Steps done.
      cut: The last cut, if there was one.
    """
    now = experiment.current.macs
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
