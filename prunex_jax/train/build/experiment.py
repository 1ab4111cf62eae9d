"""Builds everything a run consists of from its settings, before anything is compiled.

    config -> topology -> data -> model -> channels -> sparsity -> method -> programs

Whatever cannot work is refused here, in this order, with the value and the remedy.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import shapes_by_path
from prunex_jax.channels import (
    ChannelGroup,
    ChannelTrace,
    layouts_of,
)
from prunex_jax.comm import Slicing, dense_size
from prunex_jax.data import (
    Loader,
    batch_rows,
    make_loader,
    place_batch,
    placed_shapes,
)
from prunex_jax.data.shards import check_shards
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS, AnyMesh, MeshAxes, Topology
from prunex_jax.methods import Method, Recipe, RoundKind, make_method
from prunex_jax.methods.traffic import dense_bytes
from prunex_jax.models import Model
from prunex_jax.shrink import trace_model
from prunex_jax.shrink.cost import count_macs, model_budget
from prunex_jax.sparsity import (
    Budget,
    check_excludes,
    validate_sparsity,
)
from prunex_jax.tasks import Batch, Own, Task, make_task
from prunex_jax.train.build.config import ExperimentConfig, total_steps
from prunex_jax.train.build.optimizer import (
    OWN_OPTIMIZER,
    MakeOptimizer,
    check_inner,
    check_sliceable,
    make_inner,
    make_learning_rate,
)
from prunex_jax.train.build.rounds import (
    Phase,
    RoundPlan,
    make_round_plan,
    parse_phases,
)
from prunex_jax.train.build.start import Start, Weights, make_start
from prunex_jax.train.build.teaching import Teaching, read_teaching
from prunex_jax.train.steps.compiled import Ledger, shapes_of
from prunex_jax.train.steps.profiling import profile_window
from prunex_jax.train.steps.programs import Programs


@dataclasses.dataclass(frozen=True, eq=False)
class Channels:
    """What can be pruned of the network at full width."""

    trace: ChannelTrace  # Its channel groups, and why the rest stays.
    budget: Budget  # Channels that every group keeps at each density.
    keep_counts: Mapping[str, int]  # Those at the end under a uniform budget.

    @property
    def sizes(self) -> dict[str, int]:
        """Channels of every group."""
        return {group.name: group.size for group in self.trace.groups}


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """What is trained now, and how: all that changes at a transition."""

    # `Task.model`, or what is left of it once its dead channels were cut out.
    model: Model
    # Its channel groups that are to be pruned; none once they were.
    groups: tuple[ChannelGroup, ...]
    method: Method  # What is exchanged.
    plan: RoundPlan  # When.
    programs: Programs  # What is compiled.

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by path."""
        return shapes_by_path(jax.eval_shape(self.model.init, jax.random.key(0))[0])

    @functools.cached_property
    def macs(self) -> int:
        """Multiply-accumulates of one forward pass of one example."""
        return macs_of_one_example(self.model)

    def exchange_options(
        self, keep_counts: Mapping[str, int], kind: RoundKind
    ) -> dict[str, Any]:
        """Static arguments of the exchange that keeps so many channels per group."""
        return {"keep_counts": self._fixed(keep_counts), "kind": kind}

    def step_options(self, step: int, keep_counts: Mapping[str, int]) -> dict[str, Any]:
        """Static arguments of step number `step`, from 0, in the steady state."""
        options = self.method.step_options.at(step)
        if not (self.method.is_streaming and options):
            return options
        if not self.plan.streams_in(step):
            return {}
        if not self.groups:
            return options
        return {**options, "keep_counts": self._fixed(keep_counts)}

    def _fixed(self, keep_counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        names = sorted(group.name for group in self.groups)
        return tuple((name, keep_counts[name]) for name in names)


@dataclasses.dataclass(frozen=True, eq=False)
class _Basis:
    """What every setup of a run is made from, whatever the network and the method."""

    config: ExperimentConfig  # All settings.
    topology: Topology  # Hosts, devices and the mesh.
    task: Task  # What is learned.
    # What makes the inner optimizer instead of `config.optimizer.name`.
    own_optimizer: MakeOptimizer | None
    ledger: Ledger  # What was sent, called and compiled so far.
    num_steps: int  # Length of the run.
    learning_rate: optax.Schedule  # Over its steps.

    @property
    def mesh(self) -> AnyMesh:
        """The ('host', 'device') mesh."""
        return self.topology.mesh


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment(_Basis):
    """A run that is ready to start, or to go on."""

    teaching: Teaching | None  # The teacher from which it learns beside the labels.
    channels: Channels  # What can be pruned.
    phases: tuple[Phase, ...]  # Methods of the run, one after the other.
    current: Setup  # What is trained now, and how. All other parts stay.
    batch_size: int  # Examples of a batch that are trained on; see `make_experiment`.
    prunes: bool = False  # Whether some method of the run removes channels.
    start: Start | None = None  # The trained network that it starts from.

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is odd about the run, for people."""
        channels = self.channels
        rounding = channels.budget.rounding(channels.keep_counts) if self.prunes else ""
        return (*self.task.warnings, *filter(None, [rounding]))

    @property
    def final_counts(self) -> Mapping[str, int]:
        """Channels that every group keeps at the end, under a uniform budget."""
        return self.channels.keep_counts if self.prunes else self.channels.sizes

    @property
    def left_out(self) -> int:
        """Examples that are left out of every batch."""
        return self.config.data.batch_size - self.batch_size

    @property
    def eval_batch_size(self) -> int:
        """Examples that are scored at a time, which divide among the devices."""
        asked = self.config.data.eval_batch_size or self.batch_size
        return asked - asked % self.mesh.size or self.mesh.size

    @property
    def num_params(self) -> int:
        """Trainable parameters at full width."""
        return dense_size(self.channels.trace.shapes)

    @functools.cached_property
    def dense_host_bytes_per_step(self) -> float:
        """Bytes per host that hierarchical dense averaging sends over the host axis."""
        return self.dense_host_bytes_on(dict(self.mesh.shape))

    def dense_host_bytes_on(self, mesh_shape: Mapping[str, int]) -> float:
        """The same on another mesh."""
        return dense_bytes(self.num_params, mesh_shape)[HOST_AXIS]

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """Rows of the global batch that this process produces."""
        return batch_rows(self.mesh, self.batch_size)

    def batch_shapes(self) -> Batch:
        """What a local step takes, as shapes, types and shardings.

        One example is read and nothing is placed, so that devices need not be here.
        """
        with self._reader(np.arange(1)).batches(0) as batches:
            shapes = placed_shapes(next(batches), self.mesh, self.batch_size)
        if self.teaching is not None:
            shapes |= shapes_of(self.teaching.silence)
        return shapes

    @contextlib.contextmanager
    def batches(self, step: int = 0) -> Iterator[Iterator[dict[str, jax.Array]]]:
        """Reads the training batches from a step on, placed on the mesh."""
        with self._reader(self.rows).batches(step) as batches:
            yield (place_batch(batch, self.mesh, self.rows) for batch in batches)

    def _reader(self, rows: np.ndarray) -> Loader:
        """Reads such rows of the training batches."""
        return make_loader(
            self.task.dataset.train,
            self.config.data,
            rows=rows,
            seed=self.config.seed,
            num_hosts=self.mesh.shape[HOST_AXIS],
        )


def own_of(
    model: Any = None,
    data: Any = None,
    loss: Callable[[Any, Any], Any] | str | None = None,
    inputs: Any = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
) -> Own | None:
    """What a user brings to `train`; None where that is nothing."""
    given = (model, data, loss, inputs, metrics)
    if all(part is None for part in given):
        return None
    return Own(*given[:4], metrics or {})


def make_experiment(
    config: ExperimentConfig,
    topology: Topology,
    own: Own | None = None,
    own_optimizer: MakeOptimizer | None = None,
    weights: Weights | None = None,
    *,
    goes_on: bool = False,
) -> Experiment:
    """Builds a run from its settings.

    Args:
      config: The settings.
      topology: Hosts, devices and the mesh.
      own: What the user brings instead of what the settings name.
      own_optimizer: Makes the inner optimizer of the learning rate instead.
      weights: What `config.model.weights` names; see `train.records.weights`.
      goes_on: Whether a run goes on, perhaps on fewer hosts, among whose devices its
        batches need not divide: then the last examples of each are left out.
    Returns:
      Everything the loop needs; nothing is compiled, no parameter exists yet.
    Raises:
      UserError: Something cannot work, named with its value and the remedy.
    """
    validate_sparsity(config.sparsity)
    batch_size = _dividing_batch_size(config, topology.mesh, goes_on)
    task = make_task(
        config.data,
        config.model,
        config.seed,
        own,
        label_smoothing=config.optimizer.label_smoothing,
        teacher_temperature=config.distill.temperature,
    )
    config, start = _with_names(config, task, own, own_optimizer), None
    if weights is not None:
        start = make_start(weights, task.model, config.model)
        task = dataclasses.replace(task, model=start.model)
    dataset, model = task.dataset, task.model
    if len(dataset.train) < config.data.batch_size:
        raise UserError(
            f"config.data.batch_size={config.data.batch_size} is more than the "
            f"{len(dataset.train)} training examples of {dataset.name}; lower it"
        )
    check_shards(dataset.train, config.data, topology.num_hosts)
    channels = _find_channels(config, model)
    num_steps = total_steps(config, len(dataset.train))
    profile_window(config.run.profile_steps, num_steps)
    metrics = [metric.name for metric in task.objective.metrics]
    phases = parse_phases(config.method, num_steps, metrics)
    learning_rate = make_learning_rate(config.optimizer, num_steps)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    check_inner(make_inner(config.optimizer, learning_rate, own_optimizer), params)
    axes = _axes_of_state(config, topology.mesh)
    if axes.slices:
        inner = make_inner(config.optimizer, learning_rate, own_optimizer, axes)
        check_sliceable(inner, params, axes)
    ledger = Ledger()
    basis = _Basis(
        config, topology, task, own_optimizer, ledger, num_steps, learning_rate
    )
    groups, counts = channels.trace.groups, channels.keep_counts
    setups = [_make_setup(basis, p.method, model, groups, counts) for p in phases]
    _check_phases(phases, setups)
    _check_can_shrink(config, setups)
    _check_early(config, setups)
    _check_repair(config, setups)
    plans = [setup.plan for setup in setups]
    teaching = read_teaching(
        config, task, topology.mesh, ledger, num_steps, plans, batch_size
    )
    return Experiment(
        **vars(basis),
        teaching=teaching,
        channels=channels,
        phases=phases,
        current=setups[0],
        batch_size=batch_size,
        prunes=any(setup.method.pruning.in_rounds for setup in setups)
        or any(setup.method.preparation is not None for setup in setups),
        start=start,
    )


def with_small_network(experiment: Experiment, small: Model) -> Experiment:
    """Builds the same run again for what is left of its network.

    Task, channels and dense figures stay those of the full network; bytes are counted
    in the same ledger. The method gets no channel groups, and exchanges whole
    parameters, without choosing, masking or gathering.
    """
    return _with_setup(experiment, experiment.current.method.name, small, ())


def with_method(experiment: Experiment, name: str) -> Experiment:
    """Builds the same run again with another method, for the network in training."""
    current = experiment.current
    return _with_setup(experiment, name, current.model, current.groups)


def _with_setup(
    experiment: Experiment, name: str, model: Model, groups: tuple[ChannelGroup, ...]
) -> Experiment:
    keep_counts = experiment.channels.keep_counts if groups else {}
    setup = _make_setup(experiment, name, model, groups, keep_counts)
    return dataclasses.replace(experiment, current=setup)


def _make_setup(
    basis: _Basis,
    name: str,
    model: Model,
    groups: tuple[ChannelGroup, ...],
    keep_counts: Mapping[str, int],
) -> Setup:
    """What is compiled for a network and a method, and when it is called."""
    config, num_steps = basis.config, basis.num_steps
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    shapes = shapes_by_path(params)
    learning_rate, axes = basis.learning_rate, _axes_of_state(config, basis.mesh)
    method = make_method(
        Recipe(
            config=dataclasses.replace(config.method, name=name),
            inner=make_inner(
                config.optimizer, learning_rate, basis.own_optimizer, axes
            ),
            learning_rate=learning_rate,
            groups=groups,
            keep_counts=keep_counts,
            shapes=shapes,
            total_steps=num_steps,
            criterion=config.sparsity.criterion,
            optimizer=config.optimizer,
        ),
        Slicing(shapes, basis.mesh.shape[axes.slices]) if axes.slices else None,
        config.topology.shard,
    )
    programs = Programs(
        model,
        method,
        basis.mesh,
        basis.ledger,
        layouts=layouts_of(groups, shapes),
        objective=basis.task.objective,
        norm_scope=config.model.norm_scope,
        seed=config.seed,
        micro_batches=config.optimizer.micro_batches,
        param_dtype=config.model.param_dtype,
    )
    plan = make_round_plan(
        config.sparsity,
        num_steps,
        method.sync,
        method.pruning.in_rounds,
        method.is_streaming,
    )
    return Setup(model, groups, method, plan, programs)


def _axes_of_state(config: ExperimentConfig, mesh: AnyMesh) -> MeshAxes:
    """Mesh axes for what trains: whole parameters, or slices of them."""
    if config.topology.shard == "none" or mesh.shape[DEVICE_AXIS] == 1:
        return MeshAxes()
    return MeshAxes(HOST_AXIS, None, DEVICE_AXIS)


def _with_names(
    config: ExperimentConfig,
    task: Task,
    own: Own | None,
    own_optimizer: MakeOptimizer | None,
) -> ExperimentConfig:
    """The settings with the names of what a user has brought."""
    if own_optimizer is not None:
        optimizer = dataclasses.replace(config.optimizer, name=OWN_OPTIMIZER)
        config = dataclasses.replace(config, optimizer=optimizer)
    if own is None:
        return config
    data = dataclasses.replace(config.data, name=task.dataset.name)
    model = config.model
    if own.model is not None:
        model = dataclasses.replace(model, name=task.model.name)
    return dataclasses.replace(config, data=data, model=model)


def _find_channels(config: ExperimentConfig, model: Model) -> Channels:
    trace = trace_model(model)
    check_excludes(config.sparsity.exclude, {g.name: g.size for g in trace.groups})
    for name in config.method.send_whole:
        if not any(name in path for path in trace.shapes):
            raise UserError(
                f"config.method.send_whole has {name!r}, which is part of no path of a "
                f"parameter; the first are {', '.join(list(trace.shapes)[:3])}"
            )
    budget = model_budget(config.sparsity, model, trace)
    keep_counts = budget.keep_counts_at(1 - config.sparsity.sparsity)
    return Channels(trace, budget, keep_counts)


def macs_of_one_example(model: Model) -> int:
    """Multiply-accumulates of one forward pass, without making parameters."""
    arrays = jax.eval_shape(model.init, jax.random.key(0))
    return count_macs(model.apply, *arrays, model.example())


def _dividing_batch_size(config: ExperimentConfig, mesh: AnyMesh, goes_on: bool) -> int:
    """Examples of a batch that divide among devices, and into their parts.

    Raises:
      UserError: They are not all of the batch, and the run does not go on; or none.
    """
    count, batch_size = config.optimizer.micro_batches, config.data.batch_size
    if config.data.eval_batch_size and not goes_on:
        batch_rows(mesh, config.data.eval_batch_size, "data.eval_batch_size")
    dividing = batch_size - batch_size % (mesh.size * count)
    if goes_on and dividing and config.data.shards == "iid":
        return dividing
    batch_rows(mesh, batch_size)
    examples = batch_size // mesh.size
    if examples % count:
        fitting = [str(n) for n in range(1, examples + 1) if examples % n == 0]
        raise UserError(
            f"config.optimizer.micro_batches={count} does not divide the {examples} "
            f"examples that a device has of a batch; use one of {', '.join(fitting)}"
        )
    return batch_size


def _check_phases(phases: Sequence[Phase], setups: Sequence[Setup]) -> None:
    """Refuses schedules in which methods would undo or contradict each other."""
    pruning = [
        (phase, setup.plan)
        for phase, setup in zip(phases, setups, strict=True)
        if setup.method.pruning.in_rounds or setup.method.preparation is not None
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


def _check_early(config: ExperimentConfig, setups: Sequence[Setup]) -> None:
    """Pruning before the first step needs counts, and scores, before there are any."""
    early = [s.method.name for s in setups if s.method.preparation is not None]
    only = {"budget": "uniform", "criterion": "norm"}
    for name, known in only.items():
        value = getattr(config.sparsity, name)
        if early and value != known:
            raise UserError(
                f"sparsity.{name}={value!r} is not known to method {early[0]}, which "
                f"prunes before its first step; set it to {known!r}"
            )


def _check_repair(config: ExperimentConfig, setups: Sequence[Setup]) -> None:
    count = config.sparsity.repair_batches
    if count and not any(s.method.pruning.moved is not None for s in setups):
        names = ", ".join(dict.fromkeys(s.method.name for s in setups))
        raise UserError(
            f"sparsity.repair_batches={count} refits what reads channels that rounds "
            f"remove, and method {names} has none that do; take hsadmm, or set it to 0"
        )


def _check_can_shrink(config: ExperimentConfig, setups: Sequence[Setup]) -> None:
    share, methods = config.sparsity.shrink_share, [s.method for s in setups]
    if share == 1.0 or any(setup.plan.shrink_step is not None for setup in setups):
        return
    names = ", ".join(dict.fromkeys(method.name for method in methods))
    reason = f"method {names} prunes none"
    if any(method.preparation is not None for method in methods):
        reason = f"method {names} prunes before its first step, and cuts at the end"
    if any(method.pruning.in_rounds for method in methods):
        reason = f"sparsity.sparsity = {config.sparsity.sparsity:g} prunes none"
    raise UserError(
        f"sparsity.shrink_share = {share:g} asks for dead channels to be cut out "
        f"during the run, and {reason}; set it to 1"
    )
