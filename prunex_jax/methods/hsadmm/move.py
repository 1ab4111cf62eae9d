"""The third stage of a round: the consensus moves, and copies and duals follow.

`core` puts its equations in order and says what they are for.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.trees import PyTree, map_with_path
from prunex_jax.channels import Layouts
from prunex_jax.comm import sum_over_slices
from prunex_jax.mesh import MeshAxes, vary
from prunex_jax.mesh.ordering import after
from prunex_jax.methods.hsadmm.arithmetic import (
    add,
    add_scaled,
    norm,
    norm_of,
    squares,
)
from prunex_jax.methods.hsadmm.choose import Choice
from prunex_jax.methods.hsadmm.outer import (
    Movements,
    follow,
    law_step,
    outer_step,
    start_movements,
)
from prunex_jax.methods.hsadmm.presets import Moving
from prunex_jax.methods.hsadmm.round import Copies, Round


class _HostLevel(NamedTuple):
    """The consensus of a host, where there are two levels; per_host."""

    values: PyTree  # z_i
    dual: PyTree  # v_i scaled


class Consensus(NamedTuple):
    """What copies agree on, and what holds them together.

    "As params" means per_host for device_level "gradient", per_device for "consensus".
    """

    values: PyTree  # z, replicated
    momentum: PyTree | None  # of z, replicated
    movements: Movements | None  # of rounds, where the step follows them; replicated
    host: _HostLevel | None  # None where z_i = z
    device_dual: PyTree | None  # u_ij scaled, as params
    rho_device: jax.Array  # float32[], replicated; that of the form
    rho_host: jax.Array  # float32[], replicated; that of the form

    @property
    def of_host(self) -> PyTree:
        """z_i, which is z where the two levels are collapsed."""
        return self.values if self.host is None else self.host.values


def shifted(consensus: Consensus, change: PyTree) -> Consensus:
    """The same with z, and z_i, elsewhere; what pulls the copies goes with them."""
    host = consensus.host
    if host is not None:
        host = host._replace(values=add(host.values, change))
    return consensus._replace(values=add(consensus.values, change), host=host)


def start_consensus(params: PyTree, form: Moving, copies: Copies) -> Consensus:
    """z at the parameters, duals at zero."""
    z = jax.tree.map(jnp.array, params)
    zeros = jax.tree.map(jnp.zeros_like, z)
    host = None
    if form.rho_host > 0:
        host = _HostLevel(jax.tree.map(jnp.copy, z), zeros)
    return Consensus(
        values=z,
        momentum=zeros if form.outer_momentum else None,
        movements=start_movements(form.outer, zeros),
        host=vary(host, (copies.axes.host,)),
        device_dual=copies.spread(zeros) if form.dual_decay else None,
        rho_device=jnp.asarray(form.rho_device, jnp.float32),
        rho_host=jnp.asarray(form.rho_host, jnp.float32),
    )


class Residuals(NamedTuple):
    """ADMM residuals of the last round (Boyd et al., 2011), as norms.

    Placed like the parameters: each copy has its own.
    """

    primal_device: jax.Array  # float32[]: ||theta_ij - z_i||, before the pull
    # float32[]: rho_device ||z_i - previous z_i||, with 1 where there is no penalty
    dual_device: jax.Array
    primal_host: jax.Array  # float32[]: ||z_i - z||
    dual_host: jax.Array  # float32[]: rho_host ||z - previous z||


def zero_residuals() -> Residuals:
    """Residuals before the first round."""
    nothing = jnp.zeros((), jnp.float32)
    return Residuals(nothing, nothing, nothing, nothing)


class RoundHealth(NamedTuple):
    """Where in the network copies differed in the last round.

    Placed like the parameters: each copy has its own.
    """

    host_drift: jax.Array  # float32[]: ||theta_ij - z|| / ||z|| over kept channels
    primal_by_group: dict[str, jax.Array]  # float32[] per group: part of primal_device
    dual_by_group: dict[str, jax.Array]  # float32[] per group: part of dual_device


def zero_health(names: Iterable[str]) -> RoundHealth:
    """Health before the first round, for groups of these names."""
    nothing = jnp.zeros((), jnp.float32)
    by_group = dict.fromkeys(names, nothing)
    return RoundHealth(nothing, by_group, dict(by_group))


def host_means(
    params: PyTree, state: Consensus, copies: Copies
) -> tuple[PyTree, PyTree]:
    """mean_j theta_ij, which is scored, and a_i, which is projected; both per_host.

    Collectives:
      As `Copies.mean_in_host` for theta, and once more for theta + u if there is u.
    """
    if state.device_dual is None:
        theta = with_dual = copies.mean_in_host(params)
    else:
        both = (params, add(params, state.device_dual))
        theta, with_dual = copies.mean_in_host(both)
    if state.host is None:
        return theta, with_dual
    weight = state.rho_host / (copies.num_per_host() * state.rho_device)
    anchor = optax.tree.sub(state.values, state.host.dual)
    # (a + weight * anchor) / (1 + weight)
    share = weight / (1 + weight)
    return theta, add_scaled(with_dual, share, optax.tree.sub(anchor, with_dual))


def difference_to_consensus(target: PyTree, choice: Choice, state: Consensus) -> PyTree:
    """z_i + v_i - z after the choice; per_host.

    Differences are sent rather than values: they have the same mean, and lose less in a
    narrow format.
    """
    projected = choice.apply(target)
    if state.host is not None:
        projected = add(projected, choice.apply(state.host.dual))
    return optax.tree.sub(projected, choice.apply(state.values))


def move_consensus(
    target: PyTree, moved: PyTree, choice: Choice, state: Consensus, this: Round
) -> Consensus:
    """Moves z along the mean difference to it, as hosts have received it, and z_i.

    Channels that go leave a_i, the target, z, v_i, the momentum of z and the last
    movement.

    Collectives:
      As `outer.follow` where the step follows movements.
    """
    form, host, movements = this.form.moving, state.host, state.movements
    if host is not None:
        host = _HostLevel(choice.apply(target), choice.apply(host.dual))
    momentum = state.momentum
    if momentum is not None:
        momentum = choice.apply(momentum)
    if movements is not None:
        before = movements._replace(last=choice.apply(movements.last))
        movements = follow(before, moved, this.copies.axes)
    z, momentum = outer_step(
        choice.apply(state.values),
        moved,
        momentum,
        _step_of(form, movements),
        form.outer_momentum,
    )
    return state._replace(values=z, momentum=momentum, movements=movements, host=host)


def _step_of(form: Moving, movements: Movements | None) -> jax.typing.ArrayLike:
    """Outer step of a round: that of the form, or what the law says."""
    if movements is None:
        return form.outer_step
    return law_step(form.outer_momentum, movements.average)


class _Distances(NamedTuple):
    """How far a round has moved the consensus, and copies are from it.

    Squares by path, float32[].
    """

    moved: dict[str, jax.Array]  # z - previous z, replicated
    # z_i - previous z_i, per_host; None where it is `moved`
    level_moved: dict[str, jax.Array] | None
    gaps: dict[str, jax.Array]  # theta_ij - z_i before the pull, as params
    # theta_ij - z over channels that the round keeps, as params; None where it is
    # `gaps`
    apart: dict[str, jax.Array] | None
    levels: dict[str, jax.Array] | None  # z_i - z, per_host; None where it is zero


def settle(
    params: PyTree,
    moved: Consensus,
    before: Consensus,
    choice: Choice,
    axes: MeshAxes,
) -> tuple[Consensus, _Distances]:
    """Puts z, its momentum and z_i where the old ones lie, after all were compared.

    Every leaf waits until it was compared with the old one and with theta. XLA would
    copy what is compared later, or compare in the pass that writes the new leaf, which
    then has to lie elsewhere, and copy that. Where copies are set to z they wait with
    it: values that wait apart would be computed apart, and rounded so.

    Returns:
      The new consensus, to be read from here on, and the distances.
    Collectives:
      As `comm.sum_over_slices` for the squares of two trees, of three if channels are
      pruned, and of five with two levels.
    """
    found = _distances(params, moved, before, choice)
    own = [each for each in found if each is not None]
    host = moved.host
    if host is not None:
        host = host._replace(values=_after_each(host.values, own))
    settled = moved._replace(
        values=_after_each(moved.values, own),
        momentum=_after_each(moved.momentum, own),
        host=host,
    )
    return settled, _Distances(*(sum_over_slices(each, axes) for each in found))


def _distances(
    params: PyTree, moved: Consensus, before: Consensus, choice: Choice
) -> _Distances:
    """The distances, of what this device has of the trees."""

    def between(tree: PyTree, other: PyTree) -> dict[str, jax.Array]:
        return squares(optax.tree.sub(tree, other))

    z, level, layouts = moved.values, moved.of_host, choice.layouts
    has_levels = moved.host is not None
    apart = None
    if has_levels or layouts:
        apart = squares(choice.apply(optax.tree.sub(params, z)))
    return _Distances(
        moved=between(z, before.values),
        level_moved=between(level, before.of_host) if has_levels else None,
        gaps=between(params, level),
        apart=apart,
        levels=between(level, z) if has_levels else None,
    )


def _after_each(
    tree: PyTree | None, found: Sequence[Mapping[str, jax.Array]]
) -> PyTree | None:
    """A tree, if there is one: each leaf once what was found at its path is known."""
    return map_with_path(lambda path, x: after([each[path] for each in found], x), tree)


def pull_copies(
    params: PyTree, state: Consensus, found: _Distances, choice: Choice, this: Round
) -> tuple[PyTree, Consensus, Residuals, RoundHealth]:
    """Duals, the proximal pull of theta, and the residuals, after `settle`.

    Drift is that of channels that the round keeps: from others it moves z away itself.

    Collectives:
      As `comm.sum_over_slices` for the squares of a tree.
    """
    form, copies = this.form.moving, this.copies
    level, z, host = state.of_host, state.values, state.host
    device_dual = state.device_dual
    gap = optax.tree.sub(params, level)
    if device_dual is not None:
        device_dual = add_scaled(gap, form.dual_decay, device_dual)
    if host is not None:
        host = host._replace(dual=add(host.dual, optax.tree.sub(level, z)))
    if form.resets_copies:  # exactly, where x - (x - z) would round
        params = copies.spread(level)
    elif form.prox_strength:
        params = add_scaled(params, -form.prox_strength, add(gap, device_dual))
    said = _residuals(found, state, form, choice.layouts, norm(z, copies.axes))
    residuals, health = copies.spread(said)
    pulled = state._replace(device_dual=device_dual, host=host)
    return params, pulled, residuals, health


def _residuals(
    found: _Distances,
    state: Consensus,
    form: Moving,
    layouts: Layouts,
    size: jax.Array,
) -> tuple[Residuals, RoundHealth]:
    """What the distances of a round say; `size` is ||z||."""
    level_moved = found.moved if found.level_moved is None else found.level_moved
    apart = found.gaps if found.apart is None else found.apart
    # Without a penalty the dual residual would say nothing: it counts as 1 here.
    weight = state.rho_device if form.rho_device else jnp.ones((), jnp.float32)
    residuals = Residuals(
        primal_device=norm_of(found.gaps),
        dual_device=weight * norm_of(level_moved),
        primal_host=norm_of(found.levels or {}),
        dual_host=state.rho_host * norm_of(found.moved),
    )
    dual_by_group = _norms_by_group(level_moved, layouts)
    health = RoundHealth(
        host_drift=norm_of(apart) / size,
        primal_by_group=_norms_by_group(found.gaps, layouts),
        dual_by_group={name: weight * x for name, x in dual_by_group.items()},
    )
    return residuals, health


def harden(state: Consensus, copies: Copies) -> tuple[PyTree, Consensus]:
    """theta := z, z_i := z, duals zero: only kept channels are left anywhere."""
    z, host = state.values, state.host
    if host is not None:
        own = vary(z, (copies.axes.host,))
        host = _HostLevel(own, optax.tree.zeros_like(host.dual))
    return copies.spread(z), state._replace(
        device_dual=optax.tree.zeros_like(state.device_dual), host=host
    )


def _norms_by_group(
    squares: Mapping[str, jax.Array], layouts: Layouts
) -> dict[str, jax.Array]:
    """Norm of what carries the channels of each group, from squares by path.

    A parameter whose axes belong to two groups counts in both, and one that belongs to
    none in no group, so squares of these norms do not add up to that of `norm`.
    """
    members: dict[str, dict[str, jax.Array]] = {}
    for path, axes in layouts.items():
        for name in {name for layout in axes.values() for name, _ in layout.slices}:
            members.setdefault(name, {})[path] = squares[path]
    return {name: norm_of(members[name]) for name in sorted(members)}
