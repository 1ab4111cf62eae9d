"""Counts the work of training: what was seen, multiply-accumulates, and their speed.

All of it is counted in the program of the network that is trained. Until they are cut
out, masked channels are computed as all others are, so the cut makes steps cheaper and
nothing else does. Multiply-accumulates are those of forward passes; speed
also counts backward passes, which cost twice as much.
"""

from prunex_jax.mesh import peak_flops
from prunex_jax.train.build.experiment import Experiment, macs_of_one_example
from prunex_jax.train.steps.position import Handover, RunPosition

# Floating point operations for one multiply-accumulate of a forward pass: two, and as
# many for the gradient by each of its two factors.
_FLOPS_PER_MAC = 6


def speed_of(experiment: Experiment, seconds: float) -> dict[str, float | None]:
    """How fast the network of now is trained.

    The work of its forward and backward passes counts, attention included; that of the
    optimizer, of the exchange and of a teacher does not.

    Returns:
      `flops_per_second`, of all devices together; `flops_utilisation`, the share of
      what they can do at best (`mesh.peak_flops`), None where that is not known.

    References:
      Chowdhery et al., PaLM, 2022, arXiv:2204.02311, appendix B (model FLOPs
      utilisation).
    """
    macs = experiment.batch_size * experiment.current.macs
    speed = _FLOPS_PER_MAC * macs / max(seconds, 1e-9)
    devices = experiment.mesh.devices
    peak = peak_flops(devices.flat[0].device_kind)
    share = speed / (devices.size * peak) if peak else None
    return {"flops_per_second": speed, "flops_utilisation": share}


def seen_until(experiment: Experiment, position: RunPosition) -> dict[str, int]:
    """What networks have read until then, by name: `examples_seen`, say.

    The same example in another epoch counts again.
    """
    objective = experiment.task.objective
    count = _examples_until(experiment, position) * objective.units_per_example
    return {f"{objective.unit}_seen": count}


def _examples_until(experiment: Experiment, position: RunPosition) -> int:
    """Examples of all batches until then, without those that were left out."""
    return position.step * experiment.config.data.batch_size - position.left_out


def macs_left_out(experiment: Experiment, step: int) -> int:
    """What the examples would have taken that a step, counted from 0, leaves out."""
    if not experiment.left_out:
        return 0
    macs, teaching = experiment.current.macs, experiment.teaching
    if teaching is not None and step in teaching.steps:
        macs += _macs_of_answer(experiment) or 0
    return experiment.left_out * macs


def macs_until(experiment: Experiment, step: int, cut: Handover | None) -> int:
    """Multiply-accumulates of one example in each step until now, added up."""
    now = experiment.current.macs
    if cut is None:
        return step * now
    before = macs_of_one_example(experiment.task.model)
    return cut.step * before + (step - cut.step) * now


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
    dense = macs_of_one_example(experiment.task.model)
    answer, teaching = _macs_of_answer(experiment), experiment.teaching
    asked = 0 if teaching is None else len(teaching.steps)
    work = None
    if answer is not None:
        whole = experiment.config.data.batch_size * (own + asked * answer)
        work = whole - position.left_out_macs
    return {
        "training_macs": work,
        "training_macs_dense": _examples_until(experiment, position) * dense,
    }


def _macs_of_answer(experiment: Experiment) -> int | None:
    """Those of a teacher for one example; None if its export does not say."""
    teaching = experiment.teaching
    if teaching is None:
        return 0
    if teaching.own is not None:
        return macs_of_one_example(experiment.task.model)
    return teaching.macs
