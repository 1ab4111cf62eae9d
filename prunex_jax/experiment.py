"""Builds everything a run consists of from its settings, before anything is compiled.

    config -> topology -> data -> model -> channels -> sparsity -> method -> programs

Whatever cannot work is refused here, in this order, with the value and the remedy.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import optax

from prunex_jax.channels import (
    ChannelGroup,
    ChannelTrace,
    Layouts,
    layouts_of,
    trace_channels,
)
from prunex_jax.comm import dense_size, wire_bytes
from prunex_jax.comm.formulas import mesh_sum
from prunex_jax.config import ExperimentConfig, total_steps
from prunex_jax.data import Dataset, batch_rows, open_dataset
from prunex_jax.errors import UserError
from prunex_jax.methods import Method, Recipe, check_method, make_method
from prunex_jax.models import Model, make_model
from prunex_jax.optim.inner import make_inner, make_learning_rate
from prunex_jax.program import Ledger
from prunex_jax.rounds import RoundPlan, make_round_plan
from prunex_jax.sparsity import check_excludes, validate_sparsity
from prunex_jax.step import Programs, make_programs
from prunex_jax.targets import Budget, model_budget
from prunex_jax.topology import DEVICE_AXIS, HOST_AXIS, Topology
from prunex_jax.trees import shapes_by_path


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
      budget: Channels that every group keeps at each density.
      keep_counts: Those at the end under a uniform budget.
      trained: The network that is trained: `model`, or what is left of it once its dead
        channels were cut out.
      groups: Channel groups of `trained` that are to be pruned; none once they were.
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
    budget: Budget
    keep_counts: Mapping[str, int]
    trained: Model
    groups: tuple[ChannelGroup, ...]
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
    budget = model_budget(config.sparsity, model, trace)
    keep_counts = budget.keep_counts_at(1 - config.sparsity.sparsity)
    num_steps = total_steps(config, len(dataset.train))
    learning_rate = make_learning_rate(config.optimizer, num_steps)
    groups, shapes = trace.groups, trace.shapes
    method = _make_method(config, learning_rate, groups, shapes, keep_counts)
    plan = make_round_plan(config.sparsity, num_steps, method.sync_period)
    _check_can_shrink(config, plan)
    ledger = Ledger()
    layouts = layouts_of(groups, shapes)
    return Experiment(
        config=config,
        topology=topology,
        dataset=dataset,
        model=model,
        trace=trace,
        sizes=sizes,
        budget=budget,
        keep_counts=keep_counts,
        trained=model,
        groups=groups,
        method=method,
        plan=plan,
        programs=_make_programs(config, mesh, ledger, model, method, layouts),
        ledger=ledger,
        learning_rate=learning_rate,
        rows=rows,
        eval_rows=eval_rows,
    )


def with_small_network(experiment: Experiment, small: Model) -> Experiment:
    """Builds the same run again for what is left of its network.

    Nothing is left to prune, so the method gets no channel groups: it exchanges whole
    parameters, without choosing, masking or gathering. Model, groups, sizes and dense
    figures stay those of the full network; bytes are counted in the same ledger.

    Args:
      experiment: The run.
      small: `experiment.model` without its dead channels.
    Returns:
      The run with other programs; nothing is compiled.
    """
    config, ledger = experiment.config, experiment.ledger
    params, _ = jax.eval_shape(small.init, jax.random.key(0))
    shapes = shapes_by_path(params)
    method = _make_method(config, experiment.learning_rate, (), shapes, {})
    return dataclasses.replace(
        experiment,
        trained=small,
        groups=(),
        method=method,
        programs=_make_programs(config, experiment.mesh, ledger, small, method, {}),
    )


def _make_method(
    config: ExperimentConfig,
    learning_rate: optax.Schedule,
    groups: Sequence[ChannelGroup],
    shapes: Mapping[str, tuple[int, ...]],
    keep_counts: Mapping[str, int],
) -> Method:
    return make_method(
        Recipe(
            config=config.method,
            inner=make_inner(config.optimizer, learning_rate),
            learning_rate=learning_rate,
            groups=groups,
            keep_counts=keep_counts,
            shapes=shapes,
            host_axis=HOST_AXIS,
            device_axis=DEVICE_AXIS,
        )
    )


def _make_programs(
    config: ExperimentConfig,
    mesh: jax.sharding.Mesh,
    ledger: Ledger,
    model: Model,
    method: Method,
    layouts: Layouts,
) -> Programs:
    return make_programs(
        model,
        method,
        mesh,
        ledger,
        layouts=layouts,
        label_smoothing=config.optimizer.label_smoothing,
        norm_scope=config.model.norm_scope,
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


def _check_can_shrink(config: ExperimentConfig, plan: RoundPlan) -> None:
    share = config.sparsity.shrink_share
    if share < 1.0 and plan.shrink_step is None:
        reason = f"method {config.method.name} prunes none"
        if plan.sync_period:
            reason = f"sparsity.sparsity = {config.sparsity.sparsity:g} prunes none"
        raise UserError(
            f"sparsity.shrink_share = {share:g} asks for dead channels to be cut out "
            f"during the run, and {reason}; set it to 1"
        )
