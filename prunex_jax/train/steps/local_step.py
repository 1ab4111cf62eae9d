"""The local step: from the loss of a batch to updated parameters, on one device.

The one place where parameters are marked as varying is here. A batch may go through the
network in several parts, one after the other, as if of the whole: that is before any
exchange, so that what crosses a link does not depend on the parts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.trees import PyTree
from prunex_jax.mesh import MeshAxes, vary
from prunex_jax.mesh.ordering import zero_after
from prunex_jax.methods import Method
from prunex_jax.models import Model
from prunex_jax.tasks import Batch, Objective, Sums
from prunex_jax.train.steps.state import (
    FIRST_BAD_STEP,
    NEVER,
    Stored,
    Totals,
    TrainState,
)

_AXES = MeshAxes()
# Entry of a batch inside of a step: raw random keys, one for each of its parts.
_KEYS = "keys"
# (params, statistics, batch) -> ((mean loss, (statistics, sums over the batch)), the
# gradient of the loss)
Gradient = Callable[
    [PyTree, PyTree, PyTree], tuple[tuple[jax.Array, tuple[PyTree, PyTree]], PyTree]
]


@dataclasses.dataclass(frozen=True, eq=False)
class LocalStep:
    """One step of a device; `programs.Programs` says what most attributes are."""

    model: Model
    method: Method
    objective: Objective
    stored: Stored
    norm_axis: str | None  # Over which batch statistics are taken, beside the examples.
    seed: int
    micro_batches: int
    writes_parts_out: bool  # As `unroll` of `accumulated_grads`.

    def update(
        self, state: TrainState, batch: Batch, **options: Any
    ) -> tuple[TrainState, jax.Array]:
        """The state after a step, and the number of the step.

        Collectives:
          Those of the method's update.
        """
        # Apart from what the network reads: else GPUs update parameters in the
        # order in memory that convolutions want, and copy all of them afterwards.
        kept = jax.lax.optimization_barrier(state.params)
        params = self.stored.read_params(kept)
        state = self.stored.read(state)
        # Varying, so that gradients stay local: see mesh.vary.
        own = vary(state.params, _AXES.names)
        batch = self._with_keys(batch, state.step)
        grads_of = accumulated_grads(
            self._gradient(),
            self.micro_batches,
            _AXES.names,
            unroll=self.writes_parts_out,
        )
        grads, loss, statistics, sums = grads_of(own, state.statistics, batch)
        updates, opt_state = self.method.transform.update(
            grads, state.opt_state, params, **options
        )
        after = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(params, updates),
            statistics=statistics,
            opt_state=opt_state,
            totals=_add_to(state.totals, loss, sums, state.step),
        )
        return self.stored.write_changed(after), after.step

    def outputs(self, params: PyTree, state: TrainState, batch: Batch) -> PyTree:
        """Answers in training, with other parameters than those of the state."""
        batch = self._with_keys(batch, state.step)
        return self._train_outputs(params, state.statistics, batch)[0]

    def _with_keys(self, batch: Batch, step: jax.Array) -> Batch:
        """A batch with a random key for each of its parts, if the network draws.

        It follows from seed, step and device, so that a resumed run draws the same.
        """
        if not self.model.is_random:
            return batch
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        for axis in _AXES.names:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        keys = jax.random.split(key, self.micro_batches)
        return {**batch, _KEYS: jax.random.key_data(keys)}

    def _train_outputs(
        self, params: PyTree, statistics: PyTree, batch: Batch
    ) -> tuple[PyTree, PyTree]:
        """Answers for the examples of this device, and the statistics after them."""
        key = None
        if _KEYS in batch:
            key = jax.random.wrap_key_data(batch[_KEYS][0])
        inputs = self.objective.inputs(batch)
        return self.model.apply_train(
            params, statistics, inputs, axis_name=self.norm_axis, key=key
        )

    def _gradient(self) -> Gradient:
        """The loss and its gradient, by the parameters that a device has."""
        slicing = self.method.placements.params_slicing
        if slicing is not None:
            stored = self.stored
            dtype = stored.param_dtype if stored.is_narrow else None
            return slicing.value_and_grad(self._loss, dtype)
        return jax.value_and_grad(self._loss, has_aux=True)

    def _loss(
        self, params: PyTree, statistics: PyTree, batch: Batch
    ) -> tuple[jax.Array, tuple[PyTree, Sums]]:
        """Mean loss on this device, and what was seen on the way."""
        outputs, statistics = self._train_outputs(params, statistics, batch)
        loss = self.objective.loss(outputs, batch)
        counted = self.objective.count(outputs, batch)
        sums = {"loss": loss * counted[self.objective.unit], **counted}
        return loss, (vary(statistics, _AXES.names), sums)


def _add_to(totals: Totals, loss: jax.Array, sums: Sums, step: jax.Array) -> Totals:
    """Adds one batch; `step` counts from 0, reported steps from 1."""
    bad_step = jnp.where(jnp.isfinite(loss), NEVER, step + 1)
    added = {name: totals[name] + value for name, value in sums.items()}
    bad_step = jnp.minimum(totals[FIRST_BAD_STEP], bad_step)
    return {**added, FIRST_BAD_STEP: bad_step}


def accumulated_grads(
    gradient: Gradient,
    num_parts: int = 1,
    axes: Sequence[str | None] = (),
    *,
    unroll: bool = False,
) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, jax.Array, PyTree, PyTree]]:
    """Makes the gradient of a mean loss over a batch that is taken in equal parts.

    Activations need memory for one part only. Gradients and losses are the means of
    those of the parts, which are those of the batch; but batch norm sees the statistics
    of a part, and running statistics go through the parts in order.

    Args:
      gradient: (params, statistics, batch) -> ((mean loss, (statistics, sums)), the
        gradient), as `jax.value_and_grad` makes it.
      num_parts: Divides the leading axis of every leaf of a batch.
      axes: Mesh axes over which gradients differ; None is skipped.
      unroll: Write the parts out, one after the other, instead of in a loop: XLA on
        CPU computes convolutions in a loop several times slower. Memory is needed for
        one part in both forms.
    Returns:
      (params, statistics, batch) -> (gradients, mean loss, statistics, sums).
    Collectives:
      Those of `gradient`, once for every part.
    Example:
      >>> def loss(w, calls, x):
      ...     return jnp.mean((w * x) ** 2), (calls + 1, jnp.sum(x))
      >>> x = jnp.array([1.0, 2.0, 3.0, 4.0])
      >>> gradient = jax.value_and_grad(loss, has_aux=True)
      >>> found = accumulated_grads(gradient, 2)(jnp.ones(()), jnp.zeros(()), x)
      >>> [float(value) for value in found]
      [15.0, 7.5, 2.0, 10.0]
    """

    def one(
        params: PyTree, statistics: PyTree, batch: PyTree
    ) -> tuple[PyTree, jax.Array, PyTree, PyTree]:
        (value, (statistics, sums)), grads = gradient(params, statistics, batch)
        return grads, value, statistics, sums

    def several(
        params: PyTree, statistics: PyTree, batch: PyTree
    ) -> tuple[PyTree, jax.Array, PyTree, PyTree]:
        def add(
            carry: tuple[PyTree, PyTree], part: PyTree
        ) -> tuple[tuple[PyTree, PyTree], None]:
            total, statistics = carry
            grads, value, statistics, sums = one(params, statistics, part)
            found = (grads, value, sums)
            return (jax.tree.map(jnp.add, total, found), statistics), None

        parts = jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), batch)
        first = jax.tree.map(lambda x: x[0], parts)
        grads, value, _, sums = jax.eval_shape(one, params, statistics, first)
        nothing = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), (grads, value, sums)
        )
        carry = (vary(nothing, axes), statistics)
        if unroll:
            for number in range(num_parts):
                part = _part_after(carry[0], parts, number)
                carry, _ = add(carry, part)
        else:
            carry, _ = jax.lax.scan(add, carry, parts)
        (grads, value, sums), statistics = carry
        grads, value = jax.tree.map(lambda x: x / num_parts, (grads, value))
        return grads, value, statistics, sums

    return one if num_parts == 1 else several


def _part_after(earlier: PyTree, parts: PyTree, number: int) -> PyTree:
    """Part of that number, which can be had only when `earlier` has been computed.

    Otherwise XLA computes the parts beside each other, and holds the activations of
    all.
    """
    zero = zero_after(jax.tree.leaves(earlier))
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, number + zero, keepdims=False), parts
    )
