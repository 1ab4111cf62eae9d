"""What a run logs after some steps: a row of `metrics.jsonl`."""

from typing import Any

import jax

from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS
from prunex_jax.train.build.experiment import Experiment
from prunex_jax.train.build.work import seen_until, speed_of
from prunex_jax.train.steps.clock import Clock
from prunex_jax.train.steps.position import RunPosition
from prunex_jax.train.steps.programs import Report


def training_row(
    experiment: Experiment, position: RunPosition, clock: Clock, report: Report
) -> dict[str, Any]:
    """What training has measured since the last row, and cost so far."""
    cost = spent(experiment, position, clock)
    dense_bytes = position.dense_bytes(experiment.dense_host_bytes_per_step)
    median = clock.seconds_per_step_median
    return {
        "step": position.step,
        **jax.tree.map(float, report.measures),
        "learning_rate": float(experiment.learning_rate(position.step - 1)),
        "sparsity": channel_sparsity(experiment, position),
        **cost,
        "host_wire_ratio": cost["host_wire_bytes"] / dense_bytes
        if dense_bytes
        else 0.0,
        **seen_until(experiment, position),
        "seconds_per_step_median": median,
        **speed_of(experiment, median),
        **jax.tree.map(float, report.health),
    }


def spent(
    experiment: Experiment, position: RunPosition, clock: Clock
) -> dict[str, float]:
    """What a run has cost so far, and in which of its phases it is."""
    sent = experiment.ledger.wire_bytes
    return {
        "phase": position.phase,
        "host_wire_bytes": sent.get(HOST_AXIS, 0.0),
        "device_wire_bytes": sent.get(DEVICE_AXIS, 0.0),
        "seconds_in_steps": clock.seconds_in_steps,
    }


def channel_sparsity(experiment: Experiment, position: RunPosition) -> float:
    """Share of the prunable channels that are removed now."""
    total = sum(experiment.channels.sizes.values())
    return 1.0 - sum(position.keep_counts.values()) / max(total, 1)
