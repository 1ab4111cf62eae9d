"""Ends a run: shrinks the network, proves it equal, tests it once, sums up."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS, sharding_on
from prunex_jax.shrink import Network
from prunex_jax.shrink.cost import count_params
from prunex_jax.train.build.experiment import Experiment, macs_of_one_example
from prunex_jax.train.build.work import seen_until, speed_of, work_of_training
from prunex_jax.train.changes.transitions import cut_out, full_cut, network_of
from prunex_jax.train.records.restoring import TrainedNetwork
from prunex_jax.train.records.scores import evaluate_split
from prunex_jax.train.steps.clock import Clock
from prunex_jax.train.steps.position import RunPosition
from prunex_jax.train.steps.programs import Programs
from prunex_jax.train.steps.state import TrainState


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainResult:
    """What a run leaves behind, for notebooks and tests; printed, a short table.

    Attributes:
      summary: The content of summary.json.
      network: The trained network, shrunk where the method prunes; host arrays.
      masks: Which channels of the full network it kept, bool[size] per group.
      trained: The same network, for certificates and exports.
    """

    summary: Mapping[str, Any]
    network: Network
    masks: Mapping[str, np.ndarray]
    trained: TrainedNetwork

    def __repr__(self) -> str:
        """What the network is worth, what it has kept, and what was sent."""
        found, kept = self.summary, self.summary["channels_kept"]
        width = max(map(len, kept), default=0)
        groups = [f"  {k:<{width}}  {n:>6} of {size}" for k, (n, size) in kept.items()]
        return "\n".join(
            [
                f"{found['method']}, {found['steps']} steps: {worth_of(found)}",
                *groups,
                f"{found['params_kept']:,} of {found['params_dense']:,} parameters, "
                f"{found['macs_kept']:,} of {found['macs_dense']:,} "
                "multiply-accumulates",
                f"{found['host_wire_bytes']:,.0f} bytes sent per host, "
                f"{found['host_wire_ratio']:.4f} of dense averaging",
            ]
        )

    def module(self) -> Any:
        """The network as a module of PyTorch; see `TrainedNetwork.module`."""
        return self.trained.module()

    def export(self, folder: str | Path, *, overwrite: bool = False) -> dict[str, Any]:
        """Exports the network, with a certificate; see `TrainedNetwork.export`.

        Of several processes the first one writes; the others get {}.
        """
        if jax.process_index() != 0:
            return {}
        return self.trained.export(folder, overwrite=overwrite)


def finish(
    experiment: Experiment,
    position: RunPosition,
    clock: Clock,
    state: TrainState,
    workdir: Path,
    written: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Makes the network that a run stands for, and says what it is worth.

    Where the run had ended before, its written summary is given, and nothing is scored
    again.

    Collectives:
      Those of evaluating two splits.
    """
    handover, task = position.handover, experiment.task
    if handover is None:
        shrunk, masks, error = cut_out(experiment, state)
    else:
        shrunk = network_of(experiment, state)
        masks = handover.masks(experiment.channels.sizes)
        error = handover.max_abs_error
    cut = full_cut(experiment, masks)
    trained = TrainedNetwork(
        workdir,
        task,
        experiment.current.method.name,
        experiment.num_steps,
        position.step,
        shrunk,
        cut,
    )
    if written is not None:
        return TrainResult(written, shrunk, masks, trained)
    num_channels = sum(mask.size for mask in masks.values())
    num_kept = sum(int(mask.sum()) for mask in masks.values())
    summary = {
        "method": " -> ".join(phase.method for phase in experiment.phases),
        "steps": experiment.num_steps,
        "seed": experiment.config.seed,
        "hosts": experiment.topology.num_hosts,
        "devices_per_host": experiment.topology.devices_per_host,
        **_what_it_is_worth(experiment, shrunk),
        "params_dense": experiment.num_params,
        "params_kept": count_params(shrunk.params),
        "macs_dense": macs_of_one_example(task.model),
        "macs_kept": macs_of_one_example(shrunk.model),
        **work_of_training(experiment, position),
        **seen_until(experiment, position),
        "channels_kept": {
            name: [int(mask.sum()), mask.size] for name, mask in sorted(masks.items())
        },
        "channel_sparsity": 1 - num_kept / num_channels if num_channels else 0.0,
        "shrink_max_abs_error": error,
        "shrink_step": handover and handover.step,
        **_what_was_sent(experiment, position),
        "seconds_total": clock.seconds_total,
        "seconds_per_step_median": clock.seconds_per_step_median,
        "seconds_per_step_median_masked": handover and handover.seconds_per_step_median,
        **speed_of(experiment, clock.seconds_per_step_median),
        "warnings": list(experiment.warnings),
    }
    return TrainResult(summary, shrunk, masks, trained)


def _what_it_is_worth(experiment: Experiment, network: Network) -> dict[str, Any]:
    """Scores the network on validation and, this once, on test if it is read."""
    current, mesh = experiment.current, experiment.mesh
    programs = current.programs
    if network.model != current.model:
        programs = Programs(
            network.model,
            current.method,
            mesh,
            experiment.ledger,
            layouts={},
            objective=experiment.task.objective,
        )
    arrays = jax.device_put(
        (network.params, network.statistics), sharding_on(mesh, jax.P())
    )
    task, row = experiment.task, dict[str, Any]()
    dataset = task.dataset
    metrics = [metric.name for metric in task.objective.metrics]
    metrics.sort(key=lambda metric: metric == "loss")  # Which comes last.
    for name, split in (("validation", dataset.validation), ("test", dataset.test)):
        result = None
        if name == "validation" or experiment.config.run.read_test:
            result = evaluate_split(experiment, programs.evaluate, arrays, split)
        row |= {f"{name}_{metric}": (result or {}).get(metric) for metric in metrics}
    return row


def _what_was_sent(experiment: Experiment, position: RunPosition) -> dict[str, Any]:
    ledger, method = experiment.ledger, experiment.current.method
    host_bytes = ledger.wire_bytes.get(HOST_AXIS, 0.0)
    dense_bytes = position.dense_bytes(experiment.dense_host_bytes_per_step)
    payload = method.payload.num_bytes(position.keep_counts)
    dense_payload = experiment.num_params * 4
    return {
        "host_wire_bytes": host_bytes,
        "host_wire_bytes_dense": dense_bytes,
        "device_wire_bytes": ledger.wire_bytes.get(DEVICE_AXIS, 0.0),
        "host_wire_ratio": host_bytes / dense_bytes if dense_bytes else 0.0,
        "host_payload_bytes_steady": payload,
        "host_payload_bytes_dense": dense_payload,
        "host_payload_ratio": payload / dense_payload,
        "num_rounds": position.num_rounds,
        "num_compilations": ledger.num_compilations,
    }


def in_words(measures: Mapping[str, float | None], split: str = "") -> str:
    """Metrics by name, in a few words; the loss comes last.

    Example:
      >>> in_words({'loss': 0.5, 'accuracy': 0.75}, 'test')
      'test accuracy 0.7500, test loss 0.5000'
    """
    names = sorted(measures, key=lambda name: name == "loss")
    said = (f"{split} {name} {_four_digits(measures[name])}".strip() for name in names)
    return ", ".join(said)


def _four_digits(value: float | None) -> str:
    """A file has null for what is no number, and for what was not measured."""
    return "-" if value is None else f"{value:.4f}"


def worth_of(summary: Mapping[str, Any]) -> str:
    """What the network of a summary is worth, in words.

    On the test split, unless the run has left that alone, as one that chooses settings.
    """
    split = "validation" if summary["test_loss"] is None else "test"
    start = f"{split}_"
    found = {
        k.removeprefix(start): v for k, v in summary.items() if k.startswith(start)
    }
    return (
        in_words(found, split) if summary[f"{start}loss"] is not None else "not scored"
    )
