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
    Slicing,
    Wire,
    key_of_slice,
    mean_over_hosts,
    refuse_biased,
    sum_over_slices,
)
from prunex_jax.mesh import ALONE, MeshAxes, axis_size
from prunex_jax.methods import low_rank
from prunex_jax.methods.entries import is_named, mean_in_host, zeros_like
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
    slicing: Slicing | None = None,
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
      slicing: How gradients lie in slices; None if they are whole. Factors are those of
        whole matrices, and all devices have them.
    Returns:
      A transformation from local gradients to one direction, replicated.
    Raises:
      UserError: A rank below one, a negative gain, or gradients that are
        sums over the mesh already; see `comm.check_local`.
    Collectives:
      One sum over `device_axis` of all gradients. Over `host_axis` as
      `comm.mean_over_hosts`, twice: rank * (shorter sides of the factored matrices) +
      all elements sent whole, then rank * (longer sides). Of slices, what is sent whole
      is a message of its own, and both factors are put together as
      `comm.sum_over_slices` before they are averaged.
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
    core = _Powersgd(rank, min_gain, wire, tuple(send_whole), axes, slicing)
    return optax.GradientTransformationExtraArgs(core.init, core.update)


class _Group(NamedTuple):
    """Matrices of one view that are multiplied together."""

    view: low_rank.Matrix
    side: low_rank.Side | None  # The side that lies in slices; None if neither does.
    rows: tuple[int, ...]  # Their places among all of the view.
    at: tuple[int, ...]  # Their places in the tree.

    def own(
        self, factor: jax.Array, slicing: Slicing | None, is_short: bool
    ) -> jax.Array:
        """What a device needs of a factor over one side, [batch, length, rank]."""
        side = self.side
        if slicing is None or side is None or side.is_short != is_short:
            return factor
        apart = factor.reshape(len(factor), *side.axes, -1)
        own = slicing.part_of(apart, side.dim + 1)
        return own.reshape(len(factor), -1, self.view.rank)

    def share(
        self, found: jax.Array, slicing: Slicing | None, is_short: bool
    ) -> jax.Array:
        """What a device has found of a factor, as its part of a sum over devices."""
        side = self.side
        if slicing is None or side is None or side.is_short != is_short:
            return found
        apart = found.reshape(len(found), *side.own_axes, -1)
        size = side.axes[side.dim]
        placed = slicing.among_zeros(apart, side.dim + 1, size)
        return placed.reshape(len(found), -1, self.view.rank)


@dataclasses.dataclass(frozen=True)
class _Powersgd:
    rank: int
    min_gain: float
    wire: Wire
    send_whole: tuple[str, ...]
    axes: MeshAxes
    slicing: Slicing | None

    def plan(self, tree: PyTree) -> low_rank.Plan:
        shapes = self._shapes_of(tree)
        is_whole = is_named(shapes, self.send_whole)
        sizes = list(shapes.values())
        return low_rank.make_plan(sizes, self.rank, self.min_gain, is_whole)

    def _shapes_of(self, tree: PyTree) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the whole leaves of a tree."""
        own, slicing = shapes_by_path(tree), self.slicing
        return own if slicing is None else {path: slicing.shapes[path] for path in own}

    def _groups(self, plan: low_rank.Plan, tree: PyTree) -> list[_Group]:
        """Matrices of one view of which the same side lies in slices."""
        shapes, slicing = list(self._shapes_of(tree).items()), self.slicing
        groups = []
        for view, at in plan.batches:
            by_side: dict[low_rank.Side | None, list[tuple[int, int]]] = {}
            for row, i in enumerate(at):
                side = None
                if slicing is not None:
                    path, shape = shapes[i]
                    dim, parts = slicing.dims[path], slicing.parts
                    side = low_rank.side_of(view, shape, dim, parts)
                by_side.setdefault(side, []).append((row, i))
            for side, places in by_side.items():
                rows, there = zip(*places, strict=True)
                groups.append(_Group(view, side, rows, there))
        return groups

    def init(self, params: PyTree) -> PowersgdState:
        queries = {}
        plan = self.plan(params)
        for index, (view, at) in enumerate(plan.batches):
            key = jax.random.fold_in(jax.random.key(0), index)
            drawn = jax.random.normal(key, (len(at), view.long, view.rank))
            queries[view.name] = low_rank.unit_columns(drawn, drawn)
        return PowersgdState(
            residual=zeros_like(params),
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
        local = mean_in_host(grads, self.axes)
        total = jax.tree.map(jnp.add, local, state.residual)
        leaves, structure = jax.tree.flatten(total)
        if axis_size(self.axes.host) == 1:
            queries = state.queries
            means, sent = self._mean(leaves, state.num_steps, 0), leaves
        else:
            means, sent, queries = self._factored(
                grads, leaves, state.queries, state.num_steps
            )
        held_back = [x - s for x, s in zip(leaves, sent, strict=True)]
        after = PowersgdState(
            residual=jax.tree.unflatten(structure, held_back),
            queries=queries,
            num_steps=state.num_steps + 1,
        )
        direction = jax.tree.unflatten(structure, means)
        return optax.tree.cast_like(direction, grads), after

    def _factored(
        self,
        tree: PyTree,
        leaves: list[jax.Array],
        queries: Factors,
        step: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array], Factors]:
        """Means of all leaves, what this host sent of its own, and the next queries."""
        plan = self.plan(tree)
        groups = self._groups(plan, tree)
        matrices = [
            low_rank.stack(group.view, [leaves[i] for i in group.at], group.side)
            for group in groups
        ]
        seen = self._multiplied(groups, matrices, queries, to_short=True)
        whole = {i: leaves[i] for i in plan.whole}
        seen, whole = self._first_message(seen, whole, step)
        bases = {name: low_rank.orthonormal(factor) for name, factor in seen.items()}
        own_factors = self._multiplied(groups, matrices, bases, to_short=False)
        factors = self._mean(own_factors, step, 1, self.axes.whole)
        means = [whole.get(i, leaf) for i, leaf in enumerate(leaves)]
        sent = list(leaves)
        for group in groups:
            basis = self._own(group, bases, is_short=True)
            for into, factor in ((means, factors), (sent, own_factors)):
                coefficients = self._own(group, factor, is_short=False)
                found = low_rank.product(group.view, basis, coefficients)
                for product, i in zip(found, group.at, strict=True):
                    into[i] = product.reshape(leaves[i].shape)
        following = {
            name: low_rank.unit_columns(factors[name], queries[name])
            for name in factors
        }
        return means, sent, following

    def _multiplied(
        self,
        groups: Sequence[_Group],
        matrices: Sequence[jax.Array],
        factors: Factors,
        *,
        to_short: bool,
    ) -> Factors:
        """Products of all matrices of a host and factors over one of their sides.

        Collectives:
          Of slices, as `comm.sum_over_slices` for all products.
        """
        multiply = low_rank.to_short if to_short else low_rank.to_long
        found = []
        for group, matrix in zip(groups, matrices, strict=True):
            factor = self._own(group, factors, is_short=not to_short)
            product = multiply(group.view, matrix, factor)
            found.append(group.share(product, self.slicing, to_short))
        found = sum_over_slices(found, self.axes)
        by_view: Factors = {}
        for group, products in zip(groups, found, strict=True):
            name, count = group.view.name, len(factors[group.view.name])
            if len(group.rows) < count:
                rest = by_view.get(name, jnp.zeros((count, *products.shape[1:])))
                products = rest.at[jnp.array(group.rows)].set(products)
            by_view[name] = products
        return by_view

    def _own(self, group: _Group, factors: Factors, *, is_short: bool) -> jax.Array:
        """What this device needs of the factors of a group."""
        factor = factors[group.view.name]
        if len(group.rows) < len(factor):
            factor = factor[jnp.array(group.rows)]
        return group.own(factor, self.slicing, is_short)

    def _first_message(
        self, seen: Factors, whole: dict[int, jax.Array], step: jax.Array
    ) -> tuple[Factors, dict[int, jax.Array]]:
        """Means of the first factors, and of the leaves that are sent whole."""
        if self.slicing is None:
            means: tuple[Factors, dict[int, jax.Array]]
            means = self._mean((seen, whole), step, 0)
            return means
        factors = self._mean(seen, step, 0, self.axes.whole)
        return factors, self._mean(whole, step, 0)

    def _mean(
        self, message: PyTree, step: jax.Array, index: int, axes: MeshAxes | None = None
    ) -> PyTree:
        """Averages the first or second message of a step over hosts."""
        key = jax.random.fold_in(jax.random.key(0), 2 * step + index)
        if axes is None:
            axes, key = self.axes, key_of_slice(key, self.axes)
        return mean_over_hosts(message, axes, self.wire, key)


def plan_of(recipe: Recipe) -> tuple[low_rank.Plan, int]:
    """How parameters are sent, and elements of those that a device sends whole."""
    config, shapes = recipe.settings, list(recipe.shapes.values())
    is_whole = is_named(recipe.shapes, recipe.config.send_whole)
    plan = low_rank.make_plan(shapes, config.rank, config.min_gain, is_whole)
    own_shapes = list(recipe.own_shapes.values())
    return plan, sum(math.prod(own_shapes[i]) for i in plan.whole)


def make_powersgd(recipe: Recipe) -> Method:
    """Builds the PowerSGD method."""
    refuse_biased(recipe.wire, "powersgd")
    config: PowersgdConfig = recipe.settings
    send_whole, slicing = recipe.config.send_whole, recipe.slicing
    plan, num_whole = plan_of(recipe)

    if slicing is None:
        payload = max(plan.num_short + num_whole, plan.num_long)
    else:
        # Of one device: factors are shared out.
        payload = max(
            num_whole, -(-max(plan.num_short, plan.num_long) // slicing.parts)
        )
    return gradient_method(
        recipe,
        powersgd(
            config.rank,
            min_gain=config.min_gain,
            wire=recipe.wire,
            send_whole=send_whole,
            axes=recipe.axes,
            slicing=slicing,
        ),
        placement=POWERSGD_PLACEMENTS._replace(residual=recipe.placed("per_host")),
        payload_elements=payload,
    )


ROW = MethodRow(
    "powersgd",
    make_powersgd,
    PowersgdConfig,
    takes_slices=True,
    variants=(Variant("powersgd", "PowerSGD, rank 2"),),
)
