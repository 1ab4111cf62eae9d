"""What a person sees: the start screen, the last screen, and lines in between.

Only the primary process writes. The texts are functions of plain values.
"""

import sys
from collections.abc import Mapping
from typing import Any, TextIO

import prunex_jax
from prunex_jax.mesh import HOST_AXIS
from prunex_jax.train.config import config_difference
from prunex_jax.train.experiment import Experiment, with_method


class Screen:
    """Writes lines on the primary process, and none elsewhere.

    Args:
      is_primary: Whether this process writes.
      stream: Where to; None is the standard output of the moment.
    """

    def __init__(self, is_primary: bool, stream: TextIO | None = None) -> None:
        self._is_primary = is_primary
        self._stream = stream

    def line(self, text: str) -> None:
        """Writes one or more lines at once."""
        if self._is_primary:
            stream = self._stream or sys.stdout
            stream.write(text + "\n")
            stream.flush()


def start_screen(
    experiment: Experiment, workdir: str, environment: Mapping[str, Any], reason: str
) -> str:
    """Everything worth knowing before the first step, on one screen.

    Args:
      experiment: What will run.
      workdir: The run folder.
      environment: From `metrics.environment`.
      reason: What start-up detected, and why.
    """
    config, topology = experiment.config, experiment.topology
    versions = environment["versions"]
    names = ("python", "jax", "jaxlib", "flax", "optax", "orbax")
    lines = [
        f"prunex_jax {prunex_jax.__version__}  "
        + "  ".join(f"{name} {versions[name]}" for name in names),
        f"start     {reason}",
        *topology.table().splitlines(),
        *_what_is_trained(experiment),
        *_what_is_sent(experiment),
    ]
    changed = [
        f"{key}={value!r} (default {default!r})"
        for key, (default, value) in config_difference(config).items()
    ]
    lines += ["settings  " + ("all at their defaults" if not changed else changed[0])]
    lines += [f"          {text}" for text in changed[1:]]
    lines += [f"run       {experiment.plan.total_steps} steps into {workdir}"]
    return "\n".join(lines)


def _what_is_trained(experiment: Experiment) -> list[str]:
    data, mesh = experiment.dataset, experiment.mesh
    batch_size = experiment.config.data.batch_size
    per_host = batch_size // mesh.shape[HOST_AXIS]
    height, width, channels = data.image_shape
    lines = [
        f"data      {data.name}: {len(data.train)} training, {len(data.validation)} "
        f"validation images of {height}x{width}x{channels}, {data.num_classes} classes",
        f"batch     {batch_size} = {mesh.shape[HOST_AXIS]} hosts x {per_host} = "
        f"{mesh.size} devices x {batch_size // mesh.size}",
        f"model     {experiment.config.model.name}: {experiment.num_params:,} "
        f"parameters, {len(experiment.sizes)} channel groups with "
        f"{sum(experiment.sizes.values())} channels, "
        f"{experiment.trace.prunable_share():.1%} of the parameters prunable",
    ]
    if experiment.config.data.shards != "iid":
        lines.insert(1, _who_has_which_data(experiment))
    return lines


def _who_has_which_data(experiment: Experiment) -> str:
    config, num_hosts = experiment.config.data, experiment.mesh.shape[HOST_AXIS]
    alpha = config.dirichlet_alpha
    drawn = f" with alpha {alpha:g}" if config.shards == "dirichlet" else ""
    size = len(experiment.dataset.train) // num_hosts
    return (
        f"shards    {config.shards}{drawn}: each of {num_hosts} hosts has {size} "
        "training images of its own"
    )


def _what_is_sent(experiment: Experiment) -> list[str]:
    if len(experiment.phases) == 1:
        return _what_its_method_sends(experiment)
    lines = []
    for phase in experiment.phases:
        lines.append(f"phase     {phase.trigger}")
        lines += _what_its_method_sends(with_method(experiment, phase.method))
    return lines


def _what_its_method_sends(experiment: Experiment) -> list[str]:
    method, plan = experiment.method, experiment.plan
    dense_bytes = experiment.num_params * 4
    if not method.payload_elements(experiment.keep_counts):
        return [
            f"method    {method.name}: hosts exchange nothing and train networks of "
            "their own; this shows the speed without exchanges, not a way to train"
        ]
    if not plan.sync_period:
        when = "every step"
    elif not method.prunes:
        when = f"every {plan.sync_period} steps"
    else:
        stages = ", ".join(
            f"{stage.density:.3g}{' frozen' if stage.is_frozen else ''} from step "
            f"{stage.start_step}"
            for stage in plan.stages
        )
        share = "density"
        if experiment.config.sparsity.unit != "channels":
            share = f"share of {experiment.config.sparsity.unit}"
        when = f"every {plan.sync_period} steps; {share} {stages}"
        if plan.shrink_step:
            when += f"; the small network trains on from step {plan.shrink_step}"
    payload = method.payload_bytes(experiment.keep_counts)
    return [
        f"method    {method.name}: exchanges {when}",
        f"payload   {payload:,} bytes per exchange at the end, "
        f"{payload / dense_bytes:.3f} of the dense {dense_bytes:,}",
    ]


def last_screen(summary: Mapping[str, Any], workdir: str) -> str:
    """What came out, from the values of summary.json.

    Args:
      summary: What was written.
      workdir: The run folder.
    """
    value = dict(summary)
    value["ms"] = 1000 * value["seconds_per_step_median"]
    value["params_share"] = value["params_kept"] / value["params_dense"]
    value["macs_share"] = value["macs_kept"] / value["macs_dense"]
    value["workdir"] = workdir
    # A run that chooses settings has left the test split alone.
    split = "validation" if value["test_accuracy"] is None else "test"
    value |= {"split": split, "split_accuracy": value[f"{split}_accuracy"]}
    value["split_loss"] = value[f"{split}_loss"]
    return _LAST_SCREEN.format_map(value)


_LAST_SCREEN = """\
done      {steps} steps in {seconds_total:.0f} s, {ms:.1f} ms per step, \
{num_compilations} programs compiled
network   {split} accuracy {split_accuracy:.4f}, {split} loss {split_loss:.4f}
size      {params_kept:,} of {params_dense:,} parameters ({params_share:.3f}), \
{macs_kept:,} of {macs_dense:,} multiply-accumulates ({macs_share:.3f})
          {channel_sparsity:.1%} of the channels removed; masked and shrunk network \
differ by at most {shrink_max_abs_error:.1e}
host link {host_wire_bytes:,.0f} bytes sent per host, {host_wire_ratio:.4f} of the \
{host_wire_bytes_dense:,.0f} of hierarchical dense averaging
          {host_payload_bytes_steady:,} bytes per round at the end, \
{host_payload_ratio:.3f} of the dense {host_payload_bytes_dense:,}; {num_rounds} rounds
run       {workdir}"""
