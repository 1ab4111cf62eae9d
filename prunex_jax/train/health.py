"""Says whether a run is worth going on with, and if not, why.

Sits between the reports of `step` and `loop`, which asks before it logs and before it
saves, so that no checkpoint holds a state that is already lost.
"""

import math

from prunex_jax.base.errors import TrainingDivergedError
from prunex_jax.train.state import NEVER
from prunex_jax.train.step import Report


def check_health(
    report: Report, max_host_drift: float, step: int, last_good_step: int | None
) -> None:
    """Refuses to go on with a run that is lost.

    Args:
      report: What the mesh has seen, on the host.
      max_host_drift: Largest ||theta - z|| / ||z||, mean over copies; 0 allows any.
      step: Steps done.
      last_good_step: Step of the newest checkpoint; None if there is none.
    Raises:
      TrainingDivergedError: The loss is not finite, or the copies have left their
        consensus. The latter is how H-SADMM diverges: copies and duals chase each
        other, while every loss stays a finite number.
    Example:
      >>> import numpy as np
      >>> far = Report(1.0, 0.5, np.int32(NEVER), {'host_drift': 7.0})
      >>> check_health(far, 1.0, 40, 20)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      prunex_jax.base.errors.TrainingDivergedError: the copies of ...
    """
    kept = "there is no checkpoint before it"
    if last_good_step is not None:
        kept = f"the checkpoint of step {last_good_step} is kept"
    if report.first_bad_step != NEVER:
        raise TrainingDivergedError(
            f"the loss is not finite since step {int(report.first_bad_step)}; {kept}. "
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
