"""PowerSGD: averages gradients over hosts as products of two thin factors.

`low_rank` has the linear algebra.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import setting
from prunex_jax.base.trees import PyTree, shapes_by_path
from prunex_jax.comm import (
    FLOAT32,
    Collective,
    Wire,
    check_local,
    dense_size,
    mean_over_devices,
    mean_over_hosts,
    refuse_biased,
)
from prunex_jax.comm.formulas import device_sum, host_sum
from prunex_jax.mesh import ALONE, MeshAxes, axis_size
from prunex_jax.methods import low_rank
from prunex_jax.methods.entries import is_named
from prunex_jax.methods.gradients import gradient_method
from prunex_jax.methods.method import Method, MethodRow, Recipe, Variant

# Factors of all matrices, by view: float32[matrices of that view, length, rank].
Factors = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class PowersgdConfig:
    """Low-rank gradients."""

    rank: int = setting(2, at_least=1)
    # Matrices are sent whole where low rank would not make them this much smaller.
    min_gain: float = setting(2.0, at_least=0)


class PowersgdState(NamedTuple):
    """What PowerSGD carries from step to step."""

    residual: PyTree  # float32, shaped like the gradients, per_host: not sent yet
    queries: Factors  # over longer sides, columns of length one, replicated
    num_steps: jax.Array  # int32[], replicated


# Where the parts of the state live.
POWERSGD_PLACEMENTS = PowersgdState("per_host", "replicated", "replicated")  # type: ignore[arg-type]


def powersgd(
    rank: int = 2,
    *,
    min_gain: float = 2.0,
    wire: Wire = FLOAT32,
    send_whole: Sequence[str] = (),
    axes: MeshAxes = ALONE,
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients over the mesh, kernels at low rank with error feedback.

    Gradients are averaged over the devices of a host first. With M_i the mean gradient
    of host i plus what it has held back, for every matrix:

        P = orthonormal( mean over hosts of M_i Q )      first message
        C_i = M_i^T P,  C = mean over hosts of C_i       second message
        direction = P C^T
        held back by host i = M_i - P C_i^T
        Q = C with columns of length one                 the query of the next step

    Leaves that low rank does not make much smaller, and vectors, travel whole in the
    first message. Both messages hold all leaves in one buffer; matrices of one shape
    are multiplied in one batch. With one host nothing is sent, and nothing held back.

    Args:
      rank: Largest rank of a matrix; capped by its shorter side, where the exchange is
        exact.
      min_gain: Matrices are sent whole if their factors are not this much smaller; 0
        factors every matrix.
      wire: How both messages cross the host axis. Narrow formats round stochastically:
        what rounding adds is zero on average, and not held back.
      send_whole: Leaves whose path contains one of these are sent whole.
      axes: Mesh axes of the caller; none is a single device.
    Returns:
      A transformation from local gradients to one direction, replicated.
    Raises:
      UserError: A rank below one, a negative gain, or gradients that are
        sums over the mesh already; see `comm.check_local`.
    Collectives:
      One sum over `device_axis` of all gradients. Over `host_axis` as
      `comm.mean_over_hosts`, twice: rank * (shorter sides of the factored matrices) +
      all elements sent whole, then rank * (longer sides).
    Example:
      >>> tx = powersgd(rank=1, min_gain=0, axes=MeshAxes('host', None))
      >>> grads = jnp.arange(1., 9.).reshape(2, 2, 2)  # one matrix per host
      >>> state = tx.init(jnp.zeros((2, 2)))
      >>> def step(grad):
      ...     direction, after = tx.update(grad, state)
      ...     return direction, after.residual
      >>> direction, residual = jax.vmap(step, axis_name='host')(grads)
      >>> gap = direction + residual - grads  # sent = direction, but for the mean
      >>> bool(jnp.allclose(gap.mean(0), 0, atol=1e-5))
      True
      >>> int(jnp.linalg.matrix_rank(direction[0]))
      1

    References:
      Vogels et al., PowerSGD, 2019, arXiv:1905.13727, algorithms 1 and 2.
    Differs from:
      The paper, algorithm 2: host i holds back M_i - P C_i^T, not M_i - P C^T. Their
      means are the same, and only means are ever sent, so the directions are too. But
      the latter also adds up how far the gradients of the host are from those of the
      others, without end, and would spoil the scale of narrow wires.
      Queries are scaled to length one, which changes no span: the first message then
      has the scale of gradients, whatever the wire. A query that a step leaves empty
      (zero gradients, matrices of lower rank) stays what it was.
      The authors' later code sends one side per step in turns, after 100 steps of plain
      averages; here both sides are sent from the start, as in the paper.
      Kernels are viewed as `low_rank.view_of` says, the basis is over the shorter side:
      so it is exact at full rank, and the cheaper one to make.
    """
    if rank < 1 or min_gain < 0:
        raise UserError(
            f"powersgd got rank={rank} and min_gain={min_gain}: the rank must be at "
            "least 1 and the gain must not be negative"
        )
    core = _Powersgd(rank, min_gain, wire, tuple(send_whole), axes)
    return optax.GradientTransformationExtraArgs(core.init, core.update)


@dataclasses.dataclass(frozen=True)
class _Powersgd:
    rank: int
    min_gain: float
    wire: Wire
    send_whole: tuple[str, ...]
    axes: MeshAxes

    def plan(self, tree: PyTree) -> low_rank.Plan:
        shapes = shapes_by_path(tree)
        is_whole = is_named(shapes, self.send_whole)
        sizes = list(shapes.values())
        return low_rank.make_plan(sizes, self.rank, self.min_gain, is_whole)

    def init(self, params: PyTree) -> PowersgdState:
        queries = {}
        plan = self.plan(params)
        for index, (view, at) in enumerate(plan.batches):
            key = jax.random.fold_in(jax.random.key(0), index)
            drawn = jax.random.normal(key, (len(at), view.long, view.rank))
            queries[view.name] = low_rank.unit_columns(drawn, drawn)
        return PowersgdState(
            residual=jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params),
            queries=queries,
            num_steps=jnp.zeros((), jnp.int32),
        )

    def update(
        self,
        grads: PyTree,
        state: PowersgdState,
        params: PyTree | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PowersgdState]:
        del params, extra
        check_local(grads, self.axes)
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        local = mean_over_devices(wide, self.axes)
        total = jax.tree.map(jnp.add, local, state.residual)
        leaves, structure = jax.tree.flatten(total)
        if axis_size(self.axes.host) == 1:
            queries = state.queries
            means, sent = self._mean(leaves, state.num_steps, 0), leaves
        else:
            means, sent, queries = self._factored(
                self.plan(grads), leaves, state.queries, state.num_steps
            )
        held_back = [x - s for x, s in zip(leaves, sent, strict=True)]
        after = PowersgdState(
            residual=jax.tree.unflatten(structure, held_back),
            queries=queries,
            num_steps=state.num_steps + 1,
        )
        direction = jax.tree.unflatten(structure, means)
        return jax.tree.map(lambda d, g: d.astype(g.dtype), direction, grads), after

    def _factored(
        self,
        plan: low_rank.Plan,
        leaves: list[jax.Array],
        queries: Factors,
        step: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array], Factors]:
        """Means of all leaves, what this host sent of its own, and the next queries."""
        views = {view.name: (view, at) for view, at in plan.batches}
        matrices = {
            name: low_rank.stack(view, [leaves[i] for i in at])
            for name, (view, at) in views.items()
        }
        seen = {
            name: low_rank.to_short(view, matrices[name], queries[name])
            for name, (view, _) in views.items()
        }
        whole = {i: leaves[i] for i in plan.whole}
        seen, whole = self._mean((seen, whole), step, 0)
        bases = {name: low_rank.orthonormal(factor) for name, factor in seen.items()}
        own_factors = {
            name: low_rank.to_long(view, matrices[name], bases[name])
            for name, (view, _) in views.items()
        }
        factors = self._mean(own_factors, step, 1)
        means = [whole.get(i, leaf) for i, leaf in enumerate(leaves)]
        sent = list(leaves)
        for name, (view, at) in views.items():
            for into, factor in ((means, factors), (sent, own_factors)):
                found = low_rank.product(view, bases[name], factor[name])
                for row, i in enumerate(at):
                    into[i] = found[row].reshape(leaves[i].shape)
        following = {
            name: low_rank.unit_columns(factors[name], queries[name]) for name in views
        }
        return means, sent, following

    def _mean(self, message: PyTree, step: jax.Array, index: int) -> PyTree:
        """Averages the first or second message of a step over hosts."""
        key = jax.random.fold_in(jax.random.key(0), 2 * step + index)
        return mean_over_hosts(message, self.axes, self.wire, key)


def make_powersgd(recipe: Recipe) -> Method:
    """Builds the PowerSGD method."""
    refuse_biased(recipe.wire, "powersgd")
    config: PowersgdConfig = recipe.settings
    shapes, send_whole = list(recipe.shapes.values()), recipe.config.send_whole
    is_whole = is_named(recipe.shapes, send_whole)
    plan = low_rank.make_plan(shapes, config.rank, config.min_gain, is_whole)
    num_whole = sum(math.prod(shapes[i]) for i in plan.whole)
    messages = (plan.num_short + num_whole, plan.num_long)

    def formula(mesh_shape: Mapping[str, int]) -> list[Collective]:
        sent = device_sum(dense_size(recipe.shapes), mesh_shape)
        for num_elements in messages:
            sent += host_sum(num_elements, mesh_shape, recipe.wire)
        return sent

    return gradient_method(
        recipe,
        powersgd(
            config.rank,
            min_gain=config.min_gain,
            wire=recipe.wire,
            send_whole=send_whole,
            axes=recipe.axes,
        ),
        placement=POWERSGD_PLACEMENTS,
        formula=formula,
        payload_elements=max(messages),
    )


ROW = MethodRow(
    "powersgd",
    make_powersgd,
    PowersgdConfig,
    variants=(Variant("powersgd", "PowerSGD, rank 2"),),
)
