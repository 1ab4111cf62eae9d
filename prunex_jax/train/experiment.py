"""Builds everything a run consists of from its settings, before anything is compiled.

    config -> topology -> data -> model -> channels -> sparsity -> method -> programs

Whatever cannot work is refused here, in this order, with the value and the remedy.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import ExperimentConfig
from prunex_jax.base.trees import shapes_by_path
from prunex_jax.channels import (
    ChannelGroup,
    ChannelTrace,
    Layouts,
    layouts_of,
    trace_channels,
)
from prunex_jax.comm import dense_size, wire_bytes
from prunex_jax.comm.formulas import mesh_sum
from prunex_jax.data import Dataset, Loader, batch_rows, make_loader, open_dataset
from prunex_jax.data.shards import check_shards
from prunex_jax.mesh import HOST_AXIS, AnyMesh, Topology
from prunex_jax.methods import Method, Recipe, make_method
from prunex_jax.methods.inner import make_inner, make_learning_rate
from prunex_jax.models import Model, make_model
from prunex_jax.shrink.targets import Budget, model_budget
from prunex_jax.sparsity import check_excludes, validate_sparsity
from prunex_jax.train.config import total_steps
from prunex_jax.train.objective import Objective
from prunex_jax.train.phases import Phase, parse_phases
from prunex_jax.train.program import Ledger
from prunex_jax.train.rounds import RoundPlan, make_round_plan
from prunex_jax.train.step import Programs, make_programs
from prunex_jax.train.teacher import Teacher, read_teacher


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
      phases: Methods of the run, one after the other.
      method: What is exchanged now.
      plan: When.
      programs: What is compiled.
      ledger: What was sent, called and compiled so far.
      learning_rate: Schedule over steps.
      rows: Rows of the global batch that this process produces.
      eval_rows: The same for evaluation batches.
      teacher: What is learned from beside the labels.
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
    phases: tuple[Phase, ...]
    method: Method
    plan: RoundPlan
    programs: Programs
    ledger: Ledger
    learning_rate: optax.Schedule
    rows: np.ndarray
    eval_rows: np.ndarray
    teacher: Teacher | None

    @property
    def mesh(self) -> AnyMesh:
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

    def taught(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """A training batch as the local step takes it: with a teacher's answers."""
        return self.teacher.taught(batch) if self.teacher else batch

    def make_loader(self) -> Loader:
        """Makes what reads this process's part of the training batches."""
        return make_loader(
            self.dataset.train,
            self.config.data,
            rows=self.rows,
            seed=self.config.seed,
            num_hosts=self.mesh.shape[HOST_AXIS],
        )


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
    validate_sparsity(config.sparsity)
    mesh = topology.mesh
    rows = batch_rows(mesh, config.data.batch_size)
    _check_micro_batches(config, mesh)
    eval_batch_size = config.data.eval_batch_size or config.data.batch_size
    eval_rows = batch_rows(mesh, eval_batch_size, "data.eval_batch_size")
    dataset = open_dataset(config.data, config.seed)
    _check_can_train(config, dataset)
    check_shards(dataset.train, config.data, mesh.shape[HOST_AXIS])
    model = make_model(config.model, dataset.image_shape, dataset.num_classes)
    trace = trace_model(model)
    sizes = {group.name: group.size for group in trace.groups}
    check_excludes(config.sparsity.exclude, sizes)
    budget = model_budget(config.sparsity, model, trace)
    keep_counts = budget.keep_counts_at(1 - config.sparsity.sparsity)
    num_steps = total_steps(config, len(dataset.train))
    learning_rate = make_learning_rate(config.optimizer, num_steps)
    groups, shapes = trace.groups, trace.shapes
    _check_names(config.method.send_whole, shapes)
    phases = parse_phases(config.method, num_steps)
    made = []
    for phase in phases:
        method = _make_method(
            config, phase.method, learning_rate, num_steps, groups, shapes, keep_counts
        )
        made.append((method, _make_plan(config, num_steps, method)))
    _check_phases(phases, made)
    _check_can_shrink(config, made)
    _check_budget(config, made)
    method, plan = made[0]
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
        phases=phases,
        method=method,
        plan=plan,
        programs=_make_programs(config, mesh, ledger, model, method, layouts),
        ledger=ledger,
        learning_rate=learning_rate,
        rows=rows,
        eval_rows=eval_rows,
        teacher=read_teacher(config, dataset, mesh, ledger),
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
    without_groups = dataclasses.replace(experiment, trained=small, groups=())
    return with_method(without_groups, experiment.method.name)


def with_method(experiment: Experiment, name: str) -> Experiment:
    """Builds the same run again with another method, for the network that is trained.

    Args:
      experiment: The run.
      name: Key in `methods.METHODS`.
    Returns:
      The run with other programs and rounds; nothing is compiled.
    """
    config = experiment.config
    params, _ = jax.eval_shape(experiment.trained.init, jax.random.key(0))
    shapes, groups = shapes_by_path(params), experiment.groups
    num_steps = experiment.plan.total_steps
    method = _make_method(
        config,
        name,
        experiment.learning_rate,
        num_steps,
        groups,
        shapes,
        experiment.keep_counts if groups else {},
    )
    layouts = layouts_of(groups, shapes)
    return dataclasses.replace(
        experiment,
        method=method,
        plan=_make_plan(config, num_steps, method),
        programs=_make_programs(
            config,
            experiment.mesh,
            experiment.ledger,
            experiment.trained,
            method,
            layouts,
        ),
    )


def _make_plan(config: ExperimentConfig, num_steps: int, method: Method) -> RoundPlan:
    period = method.sync_period
    return make_round_plan(config.sparsity, num_steps, period, method.prunes)


def _make_method(
    config: ExperimentConfig,
    name: str,
    learning_rate: optax.Schedule,
    num_steps: int,
    groups: Sequence[ChannelGroup],
    shapes: Mapping[str, tuple[int, ...]],
    keep_counts: Mapping[str, int],
) -> Method:
    return make_method(
        Recipe(
            config=dataclasses.replace(config.method, name=name),
            inner=make_inner(config.optimizer, learning_rate),
            learning_rate=learning_rate,
            groups=groups,
            keep_counts=keep_counts,
            shapes=shapes,
            total_steps=num_steps,
            optimizer=config.optimizer,
        )
    )


def _make_programs(
    config: ExperimentConfig,
    mesh: AnyMesh,
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
        objective=Objective(
            label_smoothing=config.optimizer.label_smoothing,
            teacher_weight=config.distill.weight,
            teacher_temperature=config.distill.temperature,
        ),
        norm_scope=config.model.norm_scope,
        micro_batches=config.optimizer.micro_batches,
    )


def trace_model(model: Model) -> ChannelTrace:
    """Finds the channel groups of one of our models, without making parameters."""
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *model.image_shape), np.float32)
    return trace_channels(model.apply, params, image, statistics=statistics)


def _check_micro_batches(config: ExperimentConfig, mesh: AnyMesh) -> None:
    images = config.data.batch_size // mesh.size
    count = config.optimizer.micro_batches
    if images % count:
        fitting = [str(n) for n in range(1, images + 1) if images % n == 0]
        raise UserError(
            f"config.optimizer.micro_batches={count} does not divide the {images} "
            f"images that a device has of a batch; use one of {', '.join(fitting)}"
        )


def _check_can_train(config: ExperimentConfig, dataset: Dataset) -> None:
    if len(dataset.train) < config.data.batch_size:
        raise UserError(
            f"config.data.batch_size={config.data.batch_size} is more than the "
            f"{len(dataset.train)} training examples of {dataset.name}; lower it"
        )


def _check_phases(
    phases: Sequence[Phase], made: Sequence[tuple[Method, RoundPlan]]
) -> None:
    """Refuses schedules in which methods would undo or contradict each other."""
    pruning = [
        (phase, plan)
        for phase, (method, plan) in zip(phases, made, strict=True)
        if method.prunes or method.prepare is not None
    ]
    if len(pruning) > 1:
        raise UserError(
            f"config.method.schedule prunes twice, in {pruning[0][0].method} and "
            f"{pruning[1][0].method}; what the first has pruned is cut out when it "
            "ends, so let one of them prune"
        )
    for phase, plan in pruning:
        start, sparse = phase.trigger.step, [s for s in plan.stages if s.density < 1.0]
        if start and sparse and sparse[0].start_step < start:
            raise UserError(
                f"sparsity.start_share removes the first channels after step "
                f"{sparse[0].start_step}, but {phase.method}, which does it, starts at "
                f"step {start}; raise sparsity.start_share or start it earlier"
            )


def _check_names(names: Sequence[str], shapes: Mapping[str, Any]) -> None:
    for name in names:
        if not any(name in path for path in shapes):
            raise UserError(
                f"config.method.send_whole has {name!r}, which is part of no path of a "
                f"parameter; the first are {', '.join(list(shapes)[:3])}"
            )


def _check_budget(
    config: ExperimentConfig, made: Sequence[tuple[Method, RoundPlan]]
) -> None:
    """Pruning before the first step needs counts before there are scores."""
    early = [method.name for method, _ in made if method.prepare is not None]
    if early and config.sparsity.budget == "global":
        raise UserError(
            f"sparsity.budget='global' is not known to method {early[0]}, which prunes "
            "before its first step; set it to 'uniform'"
        )


def _check_can_shrink(
    config: ExperimentConfig, made: Sequence[tuple[Method, RoundPlan]]
) -> None:
    share = config.sparsity.shrink_share
    if share < 1.0 and all(plan.shrink_step is None for _, plan in made):
        names = ", ".join(dict.fromkeys(method.name for method, _ in made))
        reason = f"method {names} prunes none"
        if any(method.prepare is not None for method, _ in made):
            reason = f"method {names} prunes before its first step, and cuts at the end"
        if any(method.prunes for method, _ in made):
            reason = f"sparsity.sparsity = {config.sparsity.sparsity:g} prunes none"
        raise UserError(
            f"sparsity.shrink_share = {share:g} asks for dead channels to be cut out "
            f"during the run, and {reason}; set it to 1"
        )
