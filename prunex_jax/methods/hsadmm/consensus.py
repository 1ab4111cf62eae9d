"""State of H-SADMM and the equations of one round, one function each.

`core` puts them in order and says what they are for. Sums over the mesh come from
`copies`, channels and their choice from `channels` and `sparsity`.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.trees import PyTree, map_with_path
from prunex_jax.channels import Layouts, mask_channels
from prunex_jax.comm import (
    key_of_slice,
    mean_over_hosts,
    sum_over_hosts,
    sum_over_slices,
)
from prunex_jax.mesh import IN_SLICES, MeshAxes, vary
from prunex_jax.mesh.ordering import after
from prunex_jax.methods.hsadmm.arithmetic import (
    add,
    add_scaled,
    norm,
    norm_of,
    scaled,
    squares,
)
from prunex_jax.methods.hsadmm.copies import Copies, DeviceLevel
from prunex_jax.methods.hsadmm.outer import (
    Movements,
    follow,
    law_step,
    outer_step,
)
from prunex_jax.methods.hsadmm.presets import HsadmmParameters
from prunex_jax.methods.hsadmm.sending import SentChannels, mean_of_differences
from prunex_jax.methods.method import RoundKind
from prunex_jax.sparsity import (
    Projection,
    channel_scores,
    gradient_scores,
    running_mean,
)
from prunex_jax.sparsity.settings import Criterion

# Residual balancing (Boyd et al., 2011, section 3.4.1): a penalty doubles or halves
# when the residuals differ tenfold. It stays within a factor 1024 of its start: where z
# stands still the dual residual is zero, and doubling would not end before infinity.
_TOLERATED_RATIO = 10.0
_FACTOR = 2.0
_LARGEST_CHANGE = 1024.0


# Parts of the state that are shaped as parameters, or hold parts that are.
_LIKE_PARAMS = (
    "inner_state",
    "global_consensus",
    "outer_trace",
    "device_dual",
    "host_consensus",
    "host_dual",
    "error",
    "movements",
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
    """Residuals before the first round, from which no penalty adapts."""
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


class Flight(NamedTuple):
    """What streaming rounds have under way between two steps."""

    whole_at: jax.Array  # int32[], replicated: steps done at the last whole round
    # Mean difference to z of every fragment under way, shaped as params, replicated;
    # None where means are applied in the step that has sent them.
    means: PyTree | None
    is_under_way: jax.Array | None  # bool[fragments], replicated; None with them


# Where the parts of a flight are if its means lie in slices.
FLIGHT_IN_SLICES: Any = Flight("replicated", "slices", "replicated")  # type: ignore[arg-type]


class HsadmmState(NamedTuple):
    """State of H-SADMM; parts that a form does not use are None.

    "As params" means per_host for device_level "gradient", per_device for "consensus".
    """

    num_steps: jax.Array  # int32[], replicated: local steps done
    num_rounds: jax.Array  # int32[], replicated
    inner_state: PyTree  # of the inner optimizer, as params
    global_consensus: PyTree  # z, replicated
    masks: dict[str, jax.Array]  # bool[size] per group, replicated; True means kept
    is_frozen: jax.Array  # bool[], replicated: a freeze round has been
    outer_trace: PyTree | None  # momentum of z, replicated
    device_dual: PyTree | None  # u_ij scaled, as params
    host_consensus: PyTree | None  # z_i, per_host; None where z_i = z
    host_dual: PyTree | None  # v_i scaled, per_host
    error: PyTree | None  # e_i, per_host: what host i has not sent yet
    rho_device: jax.Array  # float32[], replicated
    rho_host: jax.Array  # float32[], replicated
    residuals: Residuals  # of the last round, as params
    health: RoundHealth  # of the last round, as params
    num_changed: jax.Array  # int32[], replicated: channels the last round removed
    flight: Flight | None  # of streaming rounds
    movements: Movements | None  # of rounds, where they are measured; replicated
    # float32[size] per group, as params: mean over local steps of what gradients say of
    # channels; None where the criterion does not look at them.
    gradient_scores: dict[str, jax.Array] | None


def state_placements(device_level: DeviceLevel, in_slices: bool = False) -> HsadmmState:
    """Where every part of the state lives: replicated, per_host or per_device.

    A prefix of the state, for `mesh.specs_of`, `mesh.enter` and `mesh.leave`.

    Args:
      device_level: Who has a copy of the parameters.
      in_slices: Whether parts that are like parameters lie in slices over devices.

    Example:
      >>> state_placements('consensus').device_dual
      'per_device'
    """
    copies = "per_host" if device_level == "gradient" else "per_device"
    everywhere = dict.fromkeys(HsadmmState._fields, "replicated")
    of_copies = ("inner_state", "device_dual", "residuals", "health", "gradient_scores")
    own = dict.fromkeys(of_copies, copies)
    per_host = dict.fromkeys(("host_consensus", "host_dual", "error"), "per_host")
    placements: dict[str, Any] = {**everywhere, **own, **per_host}
    if in_slices:
        placements |= {name: IN_SLICES[placements[name]] for name in _LIKE_PARAMS}
    return HsadmmState(**placements)


def host_level(state: HsadmmState) -> PyTree:
    """z_i, which is z where the two levels are collapsed."""
    if state.host_consensus is None:
        return state.global_consensus
    return state.host_consensus


def balance_penalties(
    state: HsadmmState, form: HsadmmParameters, copies: Copies
) -> HsadmmState:
    """Adapts both penalties to the residuals of the last round; see `balanced`.

    Collectives:
      Four float32 as `Copies.mean_in_host`, then as `comm.mean_over_hosts`.
    """
    found = mean_over_hosts(copies.mean_in_host(state.residuals), copies.axes)
    rho_device = balanced(
        state.rho_device, form.rho_device, found.primal_device, found.dual_device
    )
    rho_host = balanced(
        state.rho_host, form.rho_host, found.primal_host, found.dual_host
    )
    return state._replace(
        rho_device=rho_device,
        rho_host=rho_host,
        device_dual=scaled(state.rho_device / rho_device, state.device_dual),
        host_dual=scaled(state.rho_host / rho_host, state.host_dual),
    )


def host_means(
    params: PyTree, state: HsadmmState, copies: Copies
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
    if state.host_dual is None:
        return theta, with_dual
    weight = state.rho_host / (copies.num_per_host() * state.rho_device)
    anchor = optax.tree.sub(state.global_consensus, state.host_dual)
    # (a + weight * anchor) / (1 + weight)
    share = weight / (1 + weight)
    return theta, add_scaled(with_dual, share, optax.tree.sub(anchor, with_dual))


def after_gradients(
    state: HsadmmState,
    params: PyTree,
    grads: PyTree,
    layouts: Layouts,
    criterion: Criterion,
    axes: MeshAxes,
) -> HsadmmState:
    """The state after what a step's gradients, of a copy, say of channels.

    Collectives:
      Of slices, as `comm.sum_over_slices` for one float32 per channel, or three with
      the mixture.
    """
    before = state.gradient_scores
    if before is None:
        return state
    total = functools.partial(sum_over_slices, axes=axes)
    found = gradient_scores(criterion, params, grads, layouts, total)
    mean = running_mean(before, found, state.num_steps)
    return state._replace(gradient_scores=mean)


def agreed_scores(
    theta: PyTree,
    state: HsadmmState,
    layouts: Layouts,
    kind: RoundKind,
    copies: Copies,
    criterion: Criterion = "norm",
) -> dict[str, jax.Array]:
    """Scores of the channels in this round, the same on every host.

    theta is scored, not theta + u: the dual grows on dead channels and would lift them
    back. A frozen round scores z by its norm, which every host has: with the counts of
    the masks the masks stay, and with smaller ones the weakest channels of z go.

    Collectives:
      Unless frozen, one float32 per channel as `comm.sum_over_hosts`; where
      the criterion looks at gradients, before that the same as `Copies.mean_in_host`.
      Of slices, what `channel_scores` adds up as `comm.sum_over_slices`.
    """
    total = functools.partial(sum_over_slices, axes=copies.axes)
    if kind == "frozen":
        z = state.global_consensus
        return channel_scores("norm", z, layouts, total=total)
    of_gradients = copies.mean_in_host(state.gradient_scores)
    own = channel_scores(criterion, theta, layouts, of_gradients, total)
    return sum_over_hosts(own, copies.axes)


def network_scores(
    state: HsadmmState, layouts: Layouts, copies: Copies, criterion: Criterion
) -> dict[str, jax.Array]:
    """Scores of the channels of z, replicated, for a budget over groups.

    Collectives:
      Where the criterion looks at gradients, one float32 per channel as
      `Copies.mean_in_host` and as `comm.mean_over_hosts`. Of slices, what
      `channel_scores` adds up as `comm.sum_over_slices`.
    """
    of_gradients = state.gradient_scores
    if of_gradients is not None:
        of_gradients = mean_over_hosts(copies.mean_in_host(of_gradients), copies.axes)
    total = functools.partial(sum_over_slices, axes=copies.axes)
    z = state.global_consensus
    return channel_scores(criterion, z, layouts, of_gradients, total)


class Choice(NamedTuple):
    """Which channels a round keeps, and what it leaves of the others; replicated."""

    kept: dict[str, jax.Array]  # bool[size] per group: stay as they are
    masks: dict[str, jax.Array]  # bool[size] per group: live on
    sent: SentChannels  # of those that live on
    left: float  # What is left of entries that live on and are not kept.

    def apply(self, tree: PyTree, layouts: Layouts) -> PyTree:
        """Projects a tree, or only shrinks what the projection would remove."""
        kept = mask_channels(tree, layouts, self.kept)
        if not self.left:
            return kept
        losing = optax.tree.sub(mask_channels(tree, layouts, self.masks), kept)
        return add_scaled(kept, self.left, losing)


def choice_of(
    found: Projection,
    state: HsadmmState,
    form: HsadmmParameters,
    layouts: Layouts,
    kind: RoundKind,
    copies: Copies,
) -> Choice:
    """What a projection means for a round: where channels fade, all live on for now."""
    if kind != "moving" or not form.fade:
        sent = SentChannels(layouts, found.keep_indices, slicing=copies.slicing)
        return Choice(found.masks, found.masks, sent, 0.0)
    everything = {
        name: jnp.arange(mask.shape[0], dtype=jnp.int32)
        for name, mask in state.masks.items()
    }
    sent = SentChannels(layouts, everything, slicing=copies.slicing)
    return Choice(found.masks, state.masks, sent, form.fade)


def difference_to_consensus(
    target: PyTree,
    choice: Choice,
    state: HsadmmState,
    form: HsadmmParameters,
    layouts: Layouts,
) -> PyTree:
    """s_i = z_i + v_i - z + delta e_i after the choice; per_host.

    Differences are sent rather than values: they have the same mean, and lose less in a
    narrow format.
    """

    def masked(tree: PyTree) -> PyTree:
        return choice.apply(tree, layouts)

    projected = add(masked(target), masked(state.host_dual))
    difference = optax.tree.sub(projected, masked(state.global_consensus))
    if state.error is None:
        return difference
    return add_scaled(difference, form.error_decay, masked(state.error))


def move_consensus(
    target: PyTree,
    difference: PyTree,
    choice: Choice,
    state: HsadmmState,
    form: HsadmmParameters,
    layouts: Layouts,
    kind: RoundKind,
    copies: Copies,
) -> HsadmmState:
    """Averages differences to z over hosts, moves z and z_i.

    What the choice does to a_i, the target, it does to z, v_i, e_i, the momentum of z
    and the last movement as well.

    Collectives:
      As `mean_movement`, and `outer.follow` where movements are measured.
    """

    def masked(tree: PyTree) -> PyTree:
        return choice.apply(tree, layouts)

    projected, sent = masked(target), choice.sent
    z, host_dual = masked(state.global_consensus), masked(state.host_dual)
    moved, error = mean_movement(difference, sent, state, form, kind, copies)
    trace, movements = masked(state.outer_trace), state.movements
    if movements is not None:
        before = movements._replace(last=masked(movements.last))
        movements = follow(before, moved, copies.axes)
    step = _step_of(form, movements)
    z, trace = outer_step(z, moved, trace, step, form.outer_momentum)
    masks = choice.masks
    changed = [jnp.sum(masks[name] != state.masks[name]) for name in masks]
    return state._replace(
        num_rounds=state.num_rounds + 1,
        global_consensus=z,
        outer_trace=trace,
        host_consensus=None if host_dual is None else projected,
        host_dual=host_dual,
        masks=masks,
        error=error,
        num_changed=jnp.asarray(sum(changed), jnp.int32),
        movements=movements,
    )


class Distances(NamedTuple):
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
    moved: HsadmmState,
    before: HsadmmState,
    choice: Choice,
    layouts: Layouts,
    axes: MeshAxes,
) -> tuple[HsadmmState, Distances]:
    """Puts z, its momentum and z_i where the old ones lie, after all were compared.

    Every leaf waits until it was compared with the old one and with the copies. XLA
    would copy what is compared later, or compare in the pass that writes the new leaf,
    which then has to lie elsewhere, and copy that. Where copies are set to z they wait
    with it: values that wait apart would be computed apart, and rounded so.

    Args:
      params: theta before the pull.
      moved: The state with the new ones.
      before: The state with the old ones.
      choice: Which channels the round keeps.
      layouts: Where channels are.
      axes: Mesh axes.
    Returns:
      The new state, to be read from here on, and the distances.
    Collectives:
      As `comm.sum_over_slices` for the squares of two trees, of three if channels are
      pruned, and of five with two levels.
    """
    found = _distances(params, moved, before, choice, layouts)
    own = [each for each in found if each is not None]
    settled = moved._replace(
        global_consensus=_after_each(moved.global_consensus, own),
        outer_trace=_after_each(moved.outer_trace, own),
        host_consensus=_after_each(moved.host_consensus, own),
    )
    return settled, Distances(*(sum_over_slices(each, axes) for each in found))


def _distances(
    params: PyTree,
    moved: HsadmmState,
    before: HsadmmState,
    choice: Choice,
    layouts: Layouts,
) -> Distances:
    """The distances, of what this device has of the trees."""

    def between(tree: PyTree, other: PyTree) -> dict[str, jax.Array]:
        return squares(optax.tree.sub(tree, other))

    z, level = moved.global_consensus, host_level(moved)
    has_levels = moved.host_consensus is not None
    apart = None
    if has_levels or layouts:
        kept = mask_channels(optax.tree.sub(params, z), layouts, choice.kept)
        apart = squares(kept)
    return Distances(
        moved=between(z, before.global_consensus),
        level_moved=between(level, host_level(before)) if has_levels else None,
        gaps=between(params, level),
        apart=apart,
        levels=between(level, z) if has_levels else None,
    )


def _after_each(
    tree: PyTree | None, found: Sequence[Mapping[str, jax.Array]]
) -> PyTree | None:
    """A tree, if there is one: each leaf once what was found at its path is known."""
    return map_with_path(lambda path, x: after([each[path] for each in found], x), tree)


def _step_of(
    form: HsadmmParameters, movements: Movements | None
) -> jax.typing.ArrayLike:
    """Outer step of a round: that of the form, or what the law says."""
    if movements is None or movements.average is None:
        return form.outer_step
    return law_step(form.outer_momentum, movements.average)


def mean_movement(
    difference: PyTree,
    sent: SentChannels,
    state: HsadmmState,
    form: HsadmmParameters,
    kind: RoundKind,
    copies: Copies,
) -> tuple[PyTree, PyTree | None]:
    """Averages differences to z over hosts.

    A narrow format rounds stochastically, or what it loses goes into the next round, as
    do numbers that are not sent.

    Returns:
      The mean, replicated; and e_i, per_host, or None.
    Collectives:
      The channels that are sent, as `sending.mean_of_differences`. Of slices, also as
      `SentChannels.take` and `put`, the latter twice where there is an error.
    """
    key = jax.random.fold_in(jax.random.key(0), state.num_rounds)
    key = key_of_slice(key, copies.axes)
    compact = sent.take(difference)
    mean, error = mean_of_differences(compact, form, copies.axes, key, kind)
    return sent.put(mean), None if error is None else sent.put(error)


def pull_copies(
    params: PyTree,
    state: HsadmmState,
    found: Distances,
    choice: Choice,
    form: HsadmmParameters,
    layouts: Layouts,
    copies: Copies,
) -> tuple[PyTree, HsadmmState]:
    """Duals, the proximal pull, and the residuals of the round.

    Drift is that of channels that the round keeps: from others it moves z away itself.

    Args:
      params: theta before the pull.
      state: The state after `settle`.
      found: From there.
      choice: Which channels the round keeps.
      form: The form of H-SADMM.
      layouts: Where channels are.
      copies: Where copies of the parameters live.
    Returns:
      theta and the state.
    Collectives:
      As `comm.sum_over_slices` for the squares of a tree.
    """
    level, z = host_level(state), state.global_consensus
    device_dual, host_dual = state.device_dual, state.host_dual
    gap = optax.tree.sub(params, level)
    if device_dual is not None:
        device_dual = add_scaled(gap, form.dual_decay, device_dual)
    if host_dual is not None:
        host_dual = add(host_dual, optax.tree.sub(level, z))
    if form.resets_copies:  # exactly, where x - (x - z) would round
        params = copies.spread(level)
    elif form.prox_strength:
        params = add_scaled(params, -form.prox_strength, add(gap, device_dual))
    residuals, health = _residuals(found, state, form, layouts, norm(z, copies.axes))
    return params, state._replace(
        device_dual=device_dual,
        host_dual=host_dual,
        residuals=copies.spread(residuals),
        health=copies.spread(health),
    )


def _residuals(
    found: Distances,
    state: HsadmmState,
    form: HsadmmParameters,
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
    dual_by_group = norms_by_group(level_moved, layouts)
    health = RoundHealth(
        host_drift=norm_of(apart) / size,
        primal_by_group=norms_by_group(found.gaps, layouts),
        dual_by_group={name: weight * x for name, x in dual_by_group.items()},
    )
    return residuals, health


def harden(state: HsadmmState, copies: Copies) -> tuple[PyTree, HsadmmState]:
    """theta := z, z_i := z, duals zero: only kept channels are left anywhere."""
    z = state.global_consensus
    has_levels = state.host_consensus is not None
    return copies.spread(z), state._replace(
        is_frozen=jnp.ones((), bool),
        device_dual=optax.tree.zeros_like(state.device_dual),
        host_dual=optax.tree.zeros_like(state.host_dual),
        host_consensus=vary(z, (copies.axes.host,)) if has_levels else None,
    )


def living_of(state: HsadmmState, form: HsadmmParameters) -> dict[str, jax.Array]:
    """Channels that local steps may change, as masks.

    Where every round sets the copies to z, channels outside the masks are zero and
    stay so. Other forms let them shrink under the pull, until the freeze.
    """
    if form.resets_copies:
        return state.masks
    return {name: mask | ~state.is_frozen for name, mask in state.masks.items()}


def norms_by_group(
    squares: Mapping[str, jax.Array], layouts: Layouts
) -> dict[str, jax.Array]:
    """Norm of what carries the channels of each group.

    A parameter whose axes belong to two groups counts in both, and one that belongs to
    none in no group, so squares of these norms do not add up to that of `norm`.

    Args:
      squares: Of the tree.
      layouts: Where channels are.
    Returns:
      float32[] per group that has parameters.
    Example:
      >>> import numpy as np
      >>> from prunex_jax.channels import AxisLayout
      >>> rows = AxisLayout(2, (('a', np.array([[0], [1]])),), np.array([]))
      >>> found = squares({'x': jnp.array([3.0, 4.0]), 'y': jnp.ones(2)})
      >>> {k: float(x) for k, x in norms_by_group(found, {'x': {0: rows}}).items()}
      {'a': 5.0}
    """
    members: dict[str, dict[str, jax.Array]] = {}
    for path, axes in layouts.items():
        for name in {name for layout in axes.values() for name, _ in layout.slices}:
            members.setdefault(name, {})[path] = squares[path]
    return {name: norm_of(members[name]) for name in sorted(members)}


def balanced(
    penalty: jax.Array, start: float, primal: jax.Array, dual: jax.Array
) -> jax.Array:
    """Penalty of the next round: more where copies disagree, less where z races.

    Args:
      penalty: float32[], now.
      start: What the run began with.
      primal: float32[], primal residual of the last round.
      dual: float32[], its dual residual.
    Returns:
      float32[], within a factor 1024 of `start`. The scaled dual must be multiplied by
      old / new, so that the dual itself, penalty times scaled dual, does not jump.
    Example:
      >>> one = jnp.ones(())
      >>> float(balanced(one, 1.0, 11 * one, one)), float(balanced(one, 1.0, one, one))
      (2.0, 1.0)
    """
    wanted = jnp.where(primal > _TOLERATED_RATIO * dual, penalty * _FACTOR, penalty)
    wanted = jnp.where(dual > _TOLERATED_RATIO * primal, penalty / _FACTOR, wanted)
    return jnp.clip(wanted, start / _LARGEST_CHANGE, start * _LARGEST_CHANGE)
