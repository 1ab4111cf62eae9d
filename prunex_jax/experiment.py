"""Builds everything a run consists of from its settings, before anything is compiled.

    config -> topology -> data -> model -> channels -> sparsity -> method -> programs

Whatever cannot work is refused here, in this order, with the value and the remedy.
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
import optax

from prunex_jax.channels import ChannelTrace, layouts_of, trace_channels
from prunex_jax.comm import dense_size, wire_bytes
from prunex_jax.comm.formulas import mesh_sum
from prunex_jax.config import ExperimentConfig, total_steps
from prunex_jax.data import Dataset, batch_rows, open_dataset
from prunex_jax.errors import UserError
from prunex_jax.methods import Method, Recipe, check_method, make_method
from prunex_jax.models import Model, make_model
from prunex_jax.optim.inner import make_inner, make_learning_rate
from prunex_jax.program import Ledger
from prunex_jax.rounds import RoundPlan, keep_counts_at, make_round_plan
from prunex_jax.sparsity import check_excludes, validate_sparsity
from prunex_jax.step import Programs, make_programs
from prunex_jax.topology import DEVICE_AXIS, HOST_AXIS, Topology


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
    """A run that is ready to start.

    Attributes:
      config: All settings.
      topology: Hosts, devices and the mesh.
      dataset: What is learned.
      model: The network at full width.
      trace: Its channel groups, and why the rest stays.
      sizes: Channels of every group.
      keep_counts: Channels that every group keeps at the end under a uniform budget.
      method: What is exchanged.
      plan: When.
      programs: What is compiled.
      ledger: What was sent, called and compiled so far.
      learning_rate: Schedule over steps.
      rows: Rows of the global batch that this process produces.
      eval_rows: The same for evaluation batches.
    """

    config: ExperimentConfig
    topology: Topology
    dataset: Dataset
    model: Model
    trace: ChannelTrace
    sizes: Mapping[str, int]
    keep_counts: Mapping[str, int]
    method: Method
    plan: RoundPlan
    programs: Programs
    ledger: Ledger
    learning_rate: optax.Schedule
    rows: np.ndarray
    eval_rows: np.ndarray

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The ('host', 'device') mesh."""
        return self.topology.mesh

    @property
    def eval_batch_size(self) -> int:
        """Examples per evaluation batch over the whole mesh."""
        return self.config.data.eval_batch_size or self.config.data.batch_size

    @property
    def num_params(self) -> int:
        """Trainable parameters at full width."""
        return dense_size(self.trace.shapes)

    @property
    def dense_host_bytes_per_step(self) -> float:
        """Bytes per host that hierarchical dense averaging sends over the host axis."""
        shape = dict(self.mesh.shape)
        return wire_bytes(mesh_sum(self.num_params, shape), shape)[HOST_AXIS]


def make_experiment(config: ExperimentConfig, topology: Topology) -> Experiment:
    """Builds a run from its settings.

    Args:
      config: Checked settings.
      topology: From `topology.make_topology`.
    Returns:
      Everything the loop needs; nothing is compiled, no parameter exists yet.
    Raises:
      UserError: Something cannot work, named with its value and the remedy.
    """
    check_method(config.method.name)
    validate_sparsity(config.sparsity)
    mesh = topology.mesh
    rows = batch_rows(mesh, config.data.batch_size)
    eval_batch_size = config.data.eval_batch_size or config.data.batch_size
    eval_rows = batch_rows(mesh, eval_batch_size, "data.eval_batch_size")
    dataset = open_dataset(config.data, config.seed)
    _check_can_train(config, dataset)
    model = make_model(config.model, dataset.image_shape, dataset.num_classes)
    trace = trace_model(model)
    sizes = {group.name: group.size for group in trace.groups}
    check_excludes(config.sparsity.exclude, sizes)
    keep_counts = keep_counts_at(config.sparsity, sizes, 1 - config.sparsity.sparsity)
    num_steps = total_steps(config, len(dataset.train))
    learning_rate = make_learning_rate(config.optimizer, num_steps)
    method = make_method(
        Recipe(
            config=config.method,
            inner=make_inner(config.optimizer, learning_rate),
            learning_rate=learning_rate,
            groups=trace.groups,
            keep_counts=keep_counts,
            shapes=trace.shapes,
            host_axis=HOST_AXIS,
            device_axis=DEVICE_AXIS,
        )
    )
    ledger = Ledger()
    programs = make_programs(
        model,
        method,
        mesh,
        ledger,
        layouts=layouts_of(trace.groups, trace.shapes),
        label_smoothing=config.optimizer.label_smoothing,
        norm_scope=config.model.norm_scope,
    )
    return Experiment(
        config=config,
        topology=topology,
        dataset=dataset,
        model=model,
        trace=trace,
        sizes=sizes,
        keep_counts=keep_counts,
        method=method,
        plan=make_round_plan(config.sparsity, num_steps, method.sync_period),
        programs=programs,
        ledger=ledger,
        learning_rate=learning_rate,
        rows=rows,
        eval_rows=eval_rows,
    )


def trace_model(model: Model) -> ChannelTrace:
    """Finds the channel groups of one of our models, without making parameters."""
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *model.image_shape), np.float32)
    return trace_channels(model.apply, params, image, statistics=statistics)


def _check_can_train(config: ExperimentConfig, dataset: Dataset) -> None:
    if len(dataset.train) < config.data.batch_size:
        raise UserError(
            f"config.data.batch_size={config.data.batch_size} is more than the "
            f"{len(dataset.train)} training examples of {dataset.name}; lower it"
        )
