"""Builds the programs of a run: birth, local step, exchange, report, evaluation.

The local step runs every step; the exchange, every `sync_period` steps, is the only one
of the two that touches the host axis where the method has one. They are separate
programs, so that each has a fixed list of collectives and a new density recompiles
only the exchange.
"""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree, map_with_path
from prunex_jax.channels import Layouts, sum_squares_by_channel
from prunex_jax.comm import mean_over_mesh, min_over_mesh, sum_over_mesh
from prunex_jax.mesh import (
    DEVICE_AXIS,
    AnyMesh,
    MeshAxes,
    axis_size,
    enter,
    leave,
    map_over,
    settle,
    specs_of,
    vary,
)
from prunex_jax.methods import Method, RoundKind
from prunex_jax.models import Model, from_moments, to_moments
from prunex_jax.tasks import Batch, Objective, Sums
from prunex_jax.train.steps.compiled import Ledger, Program, shapes_on
from prunex_jax.train.steps.local_step import LocalStep
from prunex_jax.train.steps.state import (
    FIRST_BAD_STEP,
    Stored,
    TrainState,
    whole_tree,
    zero_totals,
)

_AXES = MeshAxes()
_BATCH = jax.P(_AXES.names)
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})
# Static keep counts as a hashable value.
Counts = tuple[tuple[str, int], ...]


class Report(NamedTuple):
    """What the mesh has seen since the last report; replicated scalars."""

    measures: dict[str, jax.Array]  # the metrics of the task
    first_bad_step: jax.Array  # int32: first step with a loss that is not finite
    health: dict[str, Any]  # means over the copies, by group where there is a dict


def placements_of(method: Method) -> TrainState:
    """Where every part of the training state of a method lives."""
    placements: Any = TrainState(
        step="replicated",  # type: ignore[arg-type]
        params=method.placements.params,
        statistics="per_device",
        opt_state=method.placements.opt_state,
        totals="per_device",  # type: ignore[arg-type]
    )
    return placements


def mean_statistics(statistics: PyTree) -> PyTree:
    """Batch statistics of all devices together, replicated, from those of each.

    Collectives:
      As `comm.mean_over_mesh` of their moments.
    """
    return from_moments(mean_over_mesh(to_moments(statistics), _AXES))


class Programs:
    """The programs of a run; nothing is compiled before it is called.

    init: (key, arrays that take the place of what is drawn, by path as of exports,
      replicated; none are needed) -> TrainState, born where it will live.
    prepare: (state, batches) -> state, as `Preparation` says; donates the state.
    local_step: (state, batch; options of the step, see `Method`) -> (state, ticket);
      donates the state. The ticket is the step number, ready when the step is done, and
      outlives the state.
    exchange: (state; keep_counts, kind) -> state; donates the state.
    report: state -> Report.
    clear: state -> state with empty totals; donates the state.
    network: state -> (params, statistics) that the method stands for, replicated.
    reestimate: (state, batch, batches seen before) -> state with the statistics of the
      network that the method stands for, mean over batches; donates the state.
    average: (mean of networks, their number, state) -> the mean with the network that
      the method stands for, replicated; donates the mean.
    estimate: (params, statistics, batch, batches seen before) -> statistics of this
      network, per_device, as `reestimate` takes them.
    evaluate: (params, statistics, batch) -> sums, as `Objective.score` says,
      replicated.
    scores: state -> scores of the channels for a global budget, replicated, as
      `Pruning` says.

    Args:
      model: The network.
      method: What is exchanged, and when.
      mesh: ('host', 'device').
      ledger: Counts their calls, compilations and bytes.
      layouts: Where the parameters' channels are, for `scores`.
      objective: What is minimised, and what is measured.
      norm_scope: "device" or "host": over whose examples batch statistics are taken.
      seed: Of what networks draw in training.
      micro_batches: Parts in which the batch of a device goes through the network, one
        after the other: activations need that much less memory. Batch statistics are
        those of a part. A step is still one update of the mean gradient, and sends what
        it sends without.
      param_dtype: Type that parameters are stored in between programs; see
        `state.Stored`.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        mesh: AnyMesh,
        ledger: Ledger,
        *,
        layouts: Layouts,
        objective: Objective,
        norm_scope: str = "device",
        seed: int = 0,
        micro_batches: int = 1,
        param_dtype: str = "float32",
    ) -> None:
        self._model, self._method, self._mesh = model, method, mesh
        self._layouts, self._objective = layouts, objective
        # Axis over which batch statistics are taken, beside the examples of a device.
        self._norm_axis = DEVICE_AXIS if norm_scope == "host" else None
        self.stored = Stored(placements_of(method), param_dtype, seed)
        self._specs = specs_of(self.stored.placements)
        self._step = LocalStep(
            model,
            method,
            objective,
            self.stored,
            self._norm_axis,
            seed,
            micro_batches,
            writes_parts_out=mesh.devices.flat[0].platform == "cpu",
        )

        def program(
            build: Callable[..., Any], donates: bool = False, runs_once: bool = False
        ) -> Program:
            name, shape = build.__name__.strip("_"), dict(mesh.shape)
            donated = (0,) if donates else ()
            return Program(name, build, shape, ledger, donated, runs_once)

        self.init = program(self._init, runs_once=True)
        self.prepare = program(self._prepare, donates=True)
        self.local_step = program(self._local_step, donates=True)
        self.exchange = program(self._exchange, donates=True)
        self.report = program(self._report)
        self.clear = program(self._clear, donates=True)
        self.network = program(self._network)
        self.reestimate = program(self._reestimate, donates=True)
        self.average = program(self._average, donates=True)
        self.estimate = program(self._estimate)
        self.evaluate = program(self._evaluate)
        self.scores = program(self._scores)

    def _shard(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        return map_over(self._mesh, fn, in_specs, out_specs)

    def _init(self) -> Callable[..., TrainState]:
        def fn(key: jax.Array, given: Mapping[str, jax.Array] = _NOTHING) -> TrainState:
            network = map_with_path(
                lambda path, drawn: given.get(path, drawn),
                whole_tree(*self._model.init(key)),
            )
            state = TrainState(
                step=jnp.zeros((), jnp.int32),
                params=self._method.placements.own_params(network["params"]),
                statistics=network["statistics"],
                opt_state=self._method.transform.init(network["params"]),
                totals=zero_totals(self._objective.counted),
            )
            return settle(self.stored.placements, self.stored.write(state))

        return self._shard(fn, jax.P(), self._specs)

    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the state, for restoring it."""
        shapes = jax.eval_shape(self._init(), jax.random.key(0))

        place = functools.partial(shapes_on, self._mesh)
        return jax.tree.map(place, self._specs, shapes)

    def _prepare(self) -> Callable[..., TrainState]:
        preparation, placements = self._method.preparation, self._method.placements
        assert preparation is not None, f"{self._method.name} needs no preparation"

        def fn(state: TrainState, batches: Sequence[Batch]) -> TrainState:
            state = self.stored.read(state)

            def forward(params: PyTree, batch: Batch) -> PyTree:
                return self._step.outputs(params, state, batch)

            whole = placements.whole_params(state.params)
            params, opt_state = preparation.run(
                forward, self._objective.loss, whole, state.opt_state, batches
            )
            after = state._replace(
                params=placements.own_params(params), opt_state=opt_state
            )
            return self.stored.write(after)

        return self._shard(fn, (self._specs, _BATCH), self._specs)

    def _local_step(
        self, **options: Any
    ) -> Callable[..., tuple[TrainState, jax.Array]]:
        step = functools.partial(self._step.update, **options)
        return self._shard(step, (self._specs, _BATCH), (self._specs, jax.P()))

    def _exchange(
        self, *, keep_counts: Counts, kind: RoundKind
    ) -> Callable[..., TrainState]:
        rounds = self._method.rounds
        assert rounds is not None, f"{self._method.name} has no exchange"

        def fn(state: TrainState) -> TrainState:
            state = self.stored.read(state)
            params, opt_state = rounds.exchange(
                state.params, state.opt_state, dict(keep_counts), kind
            )
            after = state._replace(params=params, opt_state=opt_state)
            return self.stored.write_changed(after, is_round=True)

        return self._shard(fn, (self._specs,), self._specs)

    def _report(self) -> Callable[..., Report]:
        def fn(state: TrainState) -> Report:
            state = self.stored.read(state)
            totals = dict(state.totals)
            health = self._method.health(state.opt_state)
            # Everything in one message; a mean over copies is a sum over devices that
            # hold them, divided by their number.
            num_devices = axis_size(_AXES.names)
            first_bad_step = totals.pop(FIRST_BAD_STEP)
            sums, healths = sum_over_mesh((totals, vary(health, _AXES.names)), _AXES)
            return Report(
                measures=self._objective.measures(sums),
                first_bad_step=min_over_mesh(first_bad_step, _AXES),
                health=jax.tree.map(lambda total: total / num_devices, healths),
            )

        return self._shard(fn, (self._specs,), jax.P())

    def _clear(self) -> Callable[..., TrainState]:
        nothing = zero_totals(self._objective.counted)

        def fn(state: TrainState) -> TrainState:
            totals = leave("per_device", vary(nothing, _AXES.names))
            return state._replace(totals=totals)

        return self._shard(fn, (self._specs,), self._specs)

    def _network(self) -> Callable[..., tuple[PyTree, PyTree]]:
        def fn(state: TrainState) -> tuple[PyTree, PyTree]:
            state = self.stored.read(state)
            params = self._method.network(state.params, state.opt_state)
            return params, mean_statistics(state.statistics)

        return self._shard(fn, (self._specs,), (jax.P(), jax.P()))

    def _reestimate(self) -> Callable[..., TrainState]:
        def fn(state: TrainState, batch: Batch, num_seen: jax.Array) -> TrainState:
            state = self.stored.read(state)
            params = self._method.network(state.params, state.opt_state)
            statistics = self._with_batch(params, state.statistics, batch, num_seen)
            return self.stored.write(state._replace(statistics=statistics))

        return self._shard(fn, (self._specs, _BATCH, jax.P()), self._specs)

    def _estimate(self) -> Callable[..., PyTree]:
        placement, specs = self.stored.placements.statistics, self._specs.statistics

        def fn(
            params: PyTree, statistics: PyTree, batch: Batch, num_seen: jax.Array
        ) -> PyTree:
            statistics = enter(placement, statistics)
            return leave(
                placement, self._with_batch(params, statistics, batch, num_seen)
            )

        return self._shard(fn, (jax.P(), specs, _BATCH, jax.P()), specs)

    def _with_batch(
        self, params: PyTree, statistics: PyTree, batch: Batch, num_seen: jax.Array
    ) -> PyTree:
        """Statistics of a network, with those of the examples of this device."""
        inputs = self._objective.inputs(batch)
        found = self._model.reestimate(
            params, statistics, inputs, num_seen, axis_name=self._norm_axis
        )
        return vary(found, _AXES.names)

    def _average(self) -> Callable[..., PyTree]:
        def fn(mean: PyTree, num_networks: jax.Array, state: TrainState) -> PyTree:
            state = self.stored.read(state)
            params = self._method.network(state.params, state.opt_state)
            share = 1 / (num_networks + 1)
            return jax.tree.map(
                lambda old, new: (old + share * (new - old)).astype(old.dtype),
                mean,
                params,
            )

        return self._shard(fn, (jax.P(), jax.P(), self._specs), jax.P())

    def _evaluate(self) -> Callable[..., Sums]:
        def fn(params: PyTree, statistics: PyTree, batch: Batch) -> Sums:
            inputs = self._objective.inputs(batch)
            outputs = self._model.apply(params, statistics, inputs)
            return sum_over_mesh(self._objective.score(outputs, batch), _AXES)

        return self._shard(fn, (jax.P(), jax.P(), _BATCH), jax.P())

    def _scores(self) -> Callable[..., dict[str, jax.Array]]:
        def fn(state: TrainState) -> dict[str, jax.Array]:
            state = self.stored.read(state)
            if self._method.pruning.scores is not None:
                return self._method.pruning.scores(state.params, state.opt_state)
            params = self._method.network(state.params, state.opt_state)
            return sum_squares_by_channel(params, self._layouts)

        return self._shard(fn, (self._specs,), jax.P())
