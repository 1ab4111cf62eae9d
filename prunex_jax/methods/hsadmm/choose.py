"""The first stage of a round: which channels stay."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree
from prunex_jax.channels import ChannelGroup, KeepIndices, Layouts, mask_channels
from prunex_jax.comm import mean_over_hosts, sum_over_hosts, sum_over_slices
from prunex_jax.mesh import MeshAxes
from prunex_jax.methods.hsadmm.presets import HsadmmParameters
from prunex_jax.methods.hsadmm.round import Copies, Round
from prunex_jax.sparsity import (
    channel_scores,
    gradient_scores,
    project_channels,
    running_mean,
    uses_gradients,
)
from prunex_jax.sparsity.settings import Criterion


class ChannelState(NamedTuple):
    """What is known of the channels."""

    masks: dict[str, jax.Array]  # bool[size] per group, replicated; True means kept
    is_frozen: jax.Array  # bool[], replicated: a freeze round has been
    num_changed: jax.Array  # int32[], replicated: channels the last round removed
    # float32[size] per group, as params: mean over local steps of what gradients say of
    # channels; None where the criterion does not look at them.
    gradient_scores: dict[str, jax.Array] | None


def start_channels(
    groups: Sequence[ChannelGroup], criterion: Criterion, copies: Copies
) -> ChannelState:
    """All channels live."""
    nothing = {group.name: jnp.zeros(group.size, jnp.float32) for group in groups}
    return ChannelState(
        masks={group.name: jnp.ones(group.size, bool) for group in groups},
        is_frozen=jnp.zeros((), bool),
        num_changed=jnp.zeros((), jnp.int32),
        gradient_scores=copies.spread(nothing) if uses_gradients(criterion) else None,
    )


def living_of(state: ChannelState, form: HsadmmParameters) -> dict[str, jax.Array]:
    """Channels that local steps may change, as masks.

    Where every round sets the copies to z, channels outside the masks are zero and
    stay so. Other forms let them shrink under the pull, until the freeze.
    """
    if form.moving.resets_copies:
        return state.masks
    return {name: mask | ~state.is_frozen for name, mask in state.masks.items()}


def after_gradients(
    state: ChannelState,
    params: PyTree,
    grads: PyTree,
    num_steps: jax.Array,
    layouts: Layouts,
    axes: MeshAxes,
) -> ChannelState:
    """The state after what a step's gradients, of a copy, say of channels.

    Collectives:
      Of slices, as `comm.sum_over_slices` for one float32 per channel.
    """
    before = state.gradient_scores
    if before is None:
        return state
    total = functools.partial(sum_over_slices, axes=axes)
    found = gradient_scores(params, grads, layouts, total)
    return state._replace(gradient_scores=running_mean(before, found, num_steps))


def agreed_scores(
    theta: PyTree, z: PyTree, state: ChannelState, this: Round
) -> dict[str, jax.Array]:
    """Scores of the channels in this round, the same on every host.

    theta is scored, not theta + u: the dual grows on dead channels and would lift them
    back. A frozen round scores z by its norm, which every host has: with the counts of
    the masks the masks stay, and with smaller ones the weakest channels of z go.

    Collectives:
      Unless frozen, one float32 per channel as `comm.sum_over_hosts`; where the
      criterion looks at gradients, before that the same as `Copies.mean_in_host`. Of
      slices, what `channel_scores` adds up.
    """
    copies, criterion = this.copies, this.form.choosing.criterion
    total = functools.partial(sum_over_slices, axes=copies.axes)
    if this.kind == "frozen":
        return channel_scores("norm", z, this.layouts, total=total)
    of_gradients = copies.mean_in_host(state.gradient_scores)
    own = channel_scores(criterion, theta, this.layouts, of_gradients, total)
    return sum_over_hosts(own, copies.axes)


def network_scores(
    z: PyTree,
    state: ChannelState,
    layouts: Layouts,
    copies: Copies,
    criterion: Criterion,
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
    return channel_scores(criterion, z, layouts, of_gradients, total)


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Which channels a round keeps; replicated."""

    layouts: Layouts  # Where channels are.
    masks: dict[str, jax.Array]  # bool[size] per group: those that stay
    sent: KeepIndices  # int32[count] per group, sorted: those that are sent

    def apply(self, tree: PyTree) -> PyTree:
        """Projects a tree: zeros in the channels that go."""
        return mask_channels(tree, self.layouts, self.masks)


def choose(
    theta: PyTree, target: PyTree, z: PyTree, state: ChannelState, this: Round
) -> Choice:
    """Scores theta, and projects a_i, the target, onto the channels of all hosts.

    Collectives:
      As `agreed_scores`.
    """
    scores = agreed_scores(theta, z, state, this)
    found = project_channels(
        target, this.layouts, this.keep_counts, scores=scores, alive=state.masks
    )
    return Choice(this.layouts, found.masks, found.keep_indices)


def after_choice(state: ChannelState, choice: Choice, this: Round) -> ChannelState:
    """The channels that live on."""
    masks = choice.masks
    changed = [jnp.sum(masks[name] != state.masks[name]) for name in masks]
    is_frozen = jnp.ones((), bool) if this.kind == "freeze" else state.is_frozen
    return state._replace(
        masks=masks,
        is_frozen=is_frozen,
        num_changed=jnp.asarray(sum(changed), jnp.int32),
    )
