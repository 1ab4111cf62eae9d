"""Builds the programs of a run: birth, local step, exchange, report, evaluation.

The local step runs every step; the exchange, every `sync_period` steps, is the only one
of the two that touches the host axis where the method has one. They are separate
programs, so that each has a fixed list of collectives and a new density recompiles
only the exchange. The one place where parameters are marked as varying is here.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.trees import PyTree
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
    sharding_on,
    specs_of,
    vary,
)
from prunex_jax.methods import Method, RoundKind
from prunex_jax.models import Model, from_moments, to_moments
from prunex_jax.train.accumulation import accumulated_grads
from prunex_jax.train.objective import Objective
from prunex_jax.train.program import Ledger, Program
from prunex_jax.train.state import NEVER, Totals, TrainState, zero_totals

_AXES = MeshAxes()
_BATCH = jax.P(_AXES.names)
_LABELS = Objective()
# Static keep counts as a hashable value.
Counts = tuple[tuple[str, int], ...]
Batch = Mapping[str, jax.Array]


class Report(NamedTuple):
    """What the mesh has seen since the last report; replicated scalars."""

    loss: jax.Array  # mean over examples
    accuracy: jax.Array
    first_bad_step: jax.Array  # int32: first step with a loss that is not finite
    health: dict[str, Any]  # means over the copies, by group where there is a dict


class Score(NamedTuple):
    """Sums over evaluated examples; replicated scalars."""

    loss: jax.Array
    correct: jax.Array
    examples: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """The programs of a run."""

    init: Program  # key -> TrainState, born where it will live.
    # (state, batches) -> state, as `Method.prepare` says; donates the state.
    prepare: Program
    # (state, batch; options of the step, see `Method`) -> (state, ticket); donates the
    # state. The ticket is the step number, ready when the step is done, and outlives
    # the state.
    local_step: Program
    exchange: Program  # (state; keep_counts, kind) -> state; donates the state.
    report: Program  # state -> Report.
    clear: Program  # state -> state with empty totals; donates the state.
    # state -> (params, statistics) that the method stands for, replicated.
    network: Program
    # (state, batch, batches seen before) -> state with the statistics of the network
    # that the method stands for, mean over batches; donates the state.
    reestimate: Program
    evaluate: Program  # (params, statistics, batch) -> Score.
    scores: Program  # state -> squared channel norms of the network, replicated.
    # () -> shapes, types and shardings of the state, for restoring it.
    abstract_state: Callable[[], TrainState]


def placements_of(method: Method) -> TrainState:
    """Where every part of the training state of a method lives."""
    placements: Any = TrainState(
        step="replicated",  # type: ignore[arg-type]
        params=method.params_placement,
        statistics="per_device",
        opt_state=method.opt_placement,
        totals="per_device",  # type: ignore[arg-type]
    )
    return placements


def make_programs(
    model: Model,
    method: Method,
    mesh: AnyMesh,
    ledger: Ledger,
    *,
    layouts: Layouts,
    objective: Objective = _LABELS,
    norm_scope: str = "device",
    micro_batches: int = 1,
) -> Programs:
    """Builds the programs of a run; nothing is compiled before it is called.

    Args:
      model: The network.
      method: What is exchanged, and when.
      mesh: ('host', 'device').
      ledger: Counts their calls, compilations and bytes.
      layouts: Where the parameters' channels are, for `scores`.
      objective: The training loss.
      norm_scope: "device" or "host": over whose images batch statistics are taken.
      micro_batches: Parts in which the batch of a device goes through the network, one
        after the other: activations need that much less memory. Batch statistics are
        those of a part. A step is still one update of the mean gradient, and sends what
        it sends without.
    Returns:
      The programs.
    """
    builder = _Builder(
        model, method, mesh, objective, norm_scope, layouts, micro_batches
    )
    shape = dict(mesh.shape)

    def program(name: str, build: Callable[..., Any], donates: bool) -> Program:
        return Program(name, build, shape, ledger, donate=(0,) if donates else ())

    return Programs(
        init=program("init", builder.init, False),
        prepare=program("prepare", builder.prepare, True),
        local_step=program("local_step", builder.local_step, True),
        exchange=program("exchange", builder.exchange, True),
        report=program("report", builder.report, False),
        clear=program("clear", builder.clear, True),
        network=program("network", builder.network, False),
        reestimate=program("reestimate", builder.reestimate, True),
        evaluate=program("evaluate", builder.evaluate, False),
        scores=program("scores", builder.scores, False),
        abstract_state=builder.abstract_state,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Builder:
    """One method per program; each returns the function to compile."""

    model: Model
    method: Method
    mesh: AnyMesh
    objective: Objective
    norm_scope: str
    layouts: Layouts
    micro_batches: int

    def _shard(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        return map_over(self.mesh, fn, in_specs, out_specs)

    @property
    def _norm_axis(self) -> str | None:
        """Axis over which batch statistics are taken, beside the images of a device."""
        return DEVICE_AXIS if self.norm_scope == "host" else None

    @property
    def _placements(self) -> TrainState:
        return placements_of(self.method)

    @property
    def _specs(self) -> TrainState:
        return specs_of(self._placements)

    def init(self) -> Callable[..., TrainState]:
        def fn(key: jax.Array) -> TrainState:
            params, statistics = self.model.init(key)
            state = TrainState(
                step=jnp.zeros((), jnp.int32),
                params=params,
                statistics=statistics,
                opt_state=self.method.transform.init(params),
                totals=zero_totals(),
            )
            return settle(self._placements, leave(self._placements, state))

        return self._shard(fn, jax.P(), self._specs)

    def abstract_state(self) -> TrainState:
        shapes = jax.eval_shape(self.init(), jax.random.key(0))

        def shard(spec: jax.P, part: PyTree) -> PyTree:
            sharding = sharding_on(self.mesh, spec)
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                part,
            )

        return jax.tree.map(shard, self._specs, shapes)

    def prepare(self) -> Callable[..., TrainState]:
        run = self.method.prepare
        assert run is not None, f"{self.method.name} needs no preparation"

        def fn(state: TrainState, batches: Sequence[Batch]) -> TrainState:
            state = enter(self._placements, state)

            def forward(params: PyTree, batch: Batch) -> jax.Array:
                return self._train_logits(params, state.statistics, batch)[0]

            params, opt_state = run(
                forward, self.objective, state.params, state.opt_state, batches
            )
            after = state._replace(params=params, opt_state=opt_state)
            return leave(self._placements, after)

        return self._shard(fn, (self._specs, _BATCH), self._specs)

    def local_step(self, **options: Any) -> Callable[..., tuple[TrainState, jax.Array]]:
        def fn(
            state: TrainState, batch: Mapping[str, jax.Array]
        ) -> tuple[TrainState, jax.Array]:
            state = enter(self._placements, state)
            # Varying, so that gradients stay local: see mesh.vary.
            own = vary(state.params, _AXES.names)
            grads_of = accumulated_grads(self._loss, self.micro_batches, _AXES.names)
            grads, loss, statistics, correct = grads_of(own, state.statistics, batch)
            updates, opt_state = self.method.transform.update(
                grads, state.opt_state, state.params, **options
            )
            count = batch["label"].shape[0]
            after = TrainState(
                step=state.step + 1,
                params=optax.apply_updates(state.params, updates),
                statistics=statistics,
                opt_state=opt_state,
                totals=_add_to(state.totals, loss, correct, count, state.step),
            )
            return leave(self._placements, after), after.step

        return self._shard(fn, (self._specs, _BATCH), (self._specs, jax.P()))

    def _train_logits(
        self, params: PyTree, statistics: PyTree, batch: Batch
    ) -> tuple[jax.Array, PyTree]:
        """Answers for the images of this device, and the statistics after them."""
        return self.model.apply_train(
            params, statistics, batch["image"], axis_name=self._norm_axis
        )

    def _loss(
        self, params: PyTree, statistics: PyTree, batch: Batch
    ) -> tuple[jax.Array, tuple[PyTree, jax.Array]]:
        """Mean loss over the images of this device, and what was seen on the way."""
        logits, statistics = self._train_logits(params, statistics, batch)
        loss = self.objective(logits, batch)
        correct = jnp.sum(jnp.argmax(logits, axis=-1) == batch["label"])
        statistics = vary(statistics, _AXES.names)
        return loss, (statistics, correct.astype(jnp.float32))

    def exchange(
        self, *, keep_counts: Counts, kind: RoundKind
    ) -> Callable[..., TrainState]:
        run = self.method.exchange
        assert run is not None, f"{self.method.name} has no exchange"

        def fn(state: TrainState) -> TrainState:
            state = enter(self._placements, state)
            params, opt_state = run(
                state.params, state.opt_state, dict(keep_counts), kind
            )
            after = state._replace(params=params, opt_state=opt_state)
            return leave(self._placements, after)

        return self._shard(fn, (self._specs,), self._specs)

    def report(self) -> Callable[..., Report]:
        def fn(state: TrainState) -> Report:
            state = enter(self._placements, state)
            totals = state.totals
            health = self.method.health(state.opt_state)
            # Everything in one message; a mean over copies is a sum over devices that
            # hold them, divided by their number.
            num_devices = axis_size(_AXES.names)
            summed, healths = sum_over_mesh(
                (totals[:3], vary(health, _AXES.names)), _AXES
            )
            loss, correct, examples = summed
            return Report(
                loss=loss / examples,
                accuracy=correct / examples,
                first_bad_step=min_over_mesh(totals.first_bad_step, _AXES),
                health=jax.tree.map(lambda total: total / num_devices, healths),
            )

        return self._shard(fn, (self._specs,), jax.P())

    def clear(self) -> Callable[..., TrainState]:
        def fn(state: TrainState) -> TrainState:
            totals = leave("per_device", vary(zero_totals(), _AXES.names))
            return state._replace(totals=totals)

        return self._shard(fn, (self._specs,), self._specs)

    def network(self) -> Callable[..., tuple[PyTree, PyTree]]:
        def fn(state: TrainState) -> tuple[PyTree, PyTree]:
            state = enter(self._placements, state)
            params = self.method.network(state.params, state.opt_state)
            moments = to_moments(state.statistics)
            moments = mean_over_mesh(moments, _AXES)
            return params, from_moments(moments)

        return self._shard(fn, (self._specs,), (jax.P(), jax.P()))

    def reestimate(self) -> Callable[..., TrainState]:
        def fn(state: TrainState, batch: Batch, num_seen: jax.Array) -> TrainState:
            state = enter(self._placements, state)
            params = self.method.network(state.params, state.opt_state)
            statistics = self.model.reestimate(
                params,
                state.statistics,
                batch["image"],
                num_seen,
                axis_name=self._norm_axis,
            )
            statistics = vary(statistics, _AXES.names)
            return leave(self._placements, state._replace(statistics=statistics))

        return self._shard(fn, (self._specs, _BATCH, jax.P()), self._specs)

    def evaluate(self) -> Callable[..., Score]:
        def fn(
            params: PyTree, statistics: PyTree, batch: Mapping[str, jax.Array]
        ) -> Score:
            logits = self.model.apply(params, statistics, batch["image"])
            labels, valid = batch["label"], batch["valid"]
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            correct = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
            score = Score(
                jnp.sum(loss * valid), jnp.sum(correct * valid), jnp.sum(valid)
            )
            return sum_over_mesh(score, _AXES)

        return self._shard(fn, (jax.P(), jax.P(), _BATCH), jax.P())

    def scores(self) -> Callable[..., dict[str, jax.Array]]:
        def fn(state: TrainState) -> dict[str, jax.Array]:
            state = enter(self._placements, state)
            params = self.method.network(state.params, state.opt_state)
            return sum_squares_by_channel(params, self.layouts)

        return self._shard(fn, (self._specs,), jax.P())


def _add_to(
    totals: Totals, loss: jax.Array, correct: jax.Array, count: int, step: jax.Array
) -> Totals:
    """Adds one batch; `step` counts from 0, reported steps from 1."""
    bad_step = jnp.where(jnp.isfinite(loss), NEVER, step + 1)
    return Totals(
        loss=totals.loss + loss * count,
        correct=totals.correct + correct,
        examples=totals.examples + count,
        first_bad_step=jnp.minimum(totals.first_bad_step, bad_step),
    )
