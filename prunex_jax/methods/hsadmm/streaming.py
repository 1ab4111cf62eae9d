"""Streaming rounds: parameters in fragments, each averaged at a time of its own.

In place of everything at once after every `sync_period` steps, a step sends one
fragment, beside its own gradients, and applies what comes back at its end. A fragment
is whole leaves. `Streaming` says when it is sent; `Fragments` does it to parameters and
the state of H-SADMM, with the stages of a round: `send` for a fragment alone, and then
`move`.

    sent     s = theta_f - z_f + delta e_f, its kept channels, before the step; its mean
             over hosts on the way beside the gradients;  e_f <- s - sent
    applied  after the step:  z_f takes the outer step along the mean;
             theta_f <- m theta_f + (1 - m) z_f

References:
  Douillard et al., Streaming DiLoCo with overlapping communication, 2025,
  arXiv:2501.18512, algorithm 2; m is its alpha, `delay` its tau, of 1 at most: what is
  sent in a program is there when the program ends.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import check_settings, setting
from prunex_jax.base.sync import SyncSchedule
from prunex_jax.base.trees import (
    PyTree,
    flatten_by_path,
    map_with_path,
    shapes_by_path,
)
from prunex_jax.channels import ChannelGroup
from prunex_jax.mesh import MeshAxes
from prunex_jax.methods.hsadmm import move
from prunex_jax.methods.hsadmm.arithmetic import norm
from prunex_jax.methods.hsadmm.choose import Choice
from prunex_jax.methods.hsadmm.move import Consensus, RoundHealth
from prunex_jax.methods.hsadmm.outer import outer_step
from prunex_jax.methods.hsadmm.presets import HsadmmParameters
from prunex_jax.methods.hsadmm.round import Copies, Round
from prunex_jax.methods.hsadmm.send import send
from prunex_jax.methods.hsadmm.state import HsadmmState
from prunex_jax.sparsity import choose_keep_indices


@dataclasses.dataclass(frozen=True)
class Streaming:
    """When fragments are sent, and how copies take them.

    Attributes:
      sync: When whole rounds would end; every fragment is sent once in each.
      num_fragments: Parts of the parameters, at most one per step.
      delay: 1 sends copies as they are before a step, beside it, and applies their mean
        after it; 0 sends them as they are after it, with nothing beside.
      mixing: What remains of the copies when a mean is applied.
    """

    sync: SyncSchedule
    num_fragments: int = setting(1, at_least=1)
    delay: int = setting(0, at_least=0, at_most=1)
    mixing: float = setting(0.0, at_least=0, below=1)

    def __post_init__(self) -> None:
        """Rejects what leaves no step to send a fragment in, or to work beside it."""
        check_settings(self, "rounds")
        if self.num_fragments > self.sync.period:
            raise UserError(
                f"rounds.fragments={self.num_fragments} is more than sync_period="
                f"{self.sync.period}: a step sends one fragment at most; lower the one "
                "or raise the other"
            )
        if self.delay >= self.sync.period:
            raise UserError(
                f"rounds.delay={self.delay} must be below sync_period="
                f"{self.sync.period}: copies would not move between two rounds"
            )

    def options_in(self, step: int) -> dict[str, Any]:
        """The fragment that a step of number `step`, from 0, sends and applies.

        The last fragment is sent as whole rounds would be, the others at equal
        distances before.

        Example:
          >>> streaming = Streaming(SyncSchedule(4), num_fragments=2, delay=1)
          >>> [streaming.options_in(step) for step in (2, 3, 4)]
          [{'sends': 0}, {}, {'sends': 1}]
        """
        number = self._due_after(step + 1 - self.delay)
        return {} if number is None else {"sends": number}

    def _due_after(self, num_steps: int) -> int | None:
        """The fragment whose copies are sent as they are after so many steps."""
        start = self.sync.start_of(num_steps - 1)
        length = self.sync.end_of(num_steps - 1) - start
        count = self.num_fragments
        dues = [start + (number + 1) * length // count for number in range(count)]
        return dues.index(num_steps) if num_steps in dues else None


def check_streams(form: HsadmmParameters) -> None:
    """Refuses forms whose duals, or outer steps by law, belong to whole rounds."""
    moving = form.moving
    duals = {"dual_decay": moving.dual_decay, "rho_host": moving.rho_host}
    for name, value in duals.items():
        if value:
            raise UserError(
                f"{name}={value} needs whole rounds: duals are of all parameters at "
                "one time; set rounds.fragments=1 and rounds.delay=0, or take a preset "
                "without duals: recommended or reset"
            )
    if moving.outer != "fixed":
        raise UserError(
            f"rounds.outer={moving.outer!r} needs whole rounds: it compares movements "
            "of all parameters; set rounds.fragments=1 and rounds.delay=0, or "
            "rounds.outer='fixed'"
        )


def fragments_of(
    shapes: Mapping[str, tuple[int, ...]], num_fragments: int
) -> tuple[tuple[str, ...], ...]:
    """Divides leaves among fragments of about the same size, as paths.

    The largest leaves first, each to the fragment that has least so far.

    Raises:
      UserError: There are fewer leaves.
    Example:
      >>> fragments_of({'a': (2, 3), 'b': (4,), 'c': (3,)}, 2)
      (('a',), ('b', 'c'))
    """
    if num_fragments > len(shapes):
        raise UserError(
            f"rounds.fragments={num_fragments} is more than the {len(shapes)} arrays "
            "that the parameters consist of; a fragment has whole ones, so lower it"
        )
    sizes = {path: max(math.prod(shape), 1) for path, shape in shapes.items()}
    totals, owner = [0] * num_fragments, dict[str, int]()
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        owner[path] = totals.index(min(totals))
        totals[owner[path]] += sizes[path]
    return tuple(
        tuple(path for path in shapes if owner[path] == number)
        for number in range(num_fragments)
    )


class _Arrival(NamedTuple):
    """What a fragment is to be moved by."""

    mean: dict[str, jax.Array]  # Mean difference to z by path, replicated.
    # bool[], replicated: whether there was a step since the last whole round, before
    # which copies are where they were put. What is sent then is not applied.
    counts: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Fragments:
    """The fragments of some parameters, on their way; masks do not move."""

    streaming: Streaming
    form: HsadmmParameters
    groups: tuple[ChannelGroup, ...]
    keep_counts: Mapping[str, int]
    copies: Copies

    def send(
        self, number: int, params: PyTree, state: HsadmmState
    ) -> tuple[_Arrival, HsadmmState]:
        """Averages the movement of a fragment since it was last applied.

        Collectives:
          As `Copies.mean_in_host` for the fragment, and its kept channels as `send`.
        """
        paths = self._paths(number, params)
        own, before = _part(params, paths), _part_of(state.consensus, paths)
        scores = {name: x.astype(jnp.float32) for name, x in state.masks.items()}
        kept = choose_keep_indices(scores, self.keep_counts, state.masks)
        this = self._round(own)
        choice = Choice(this.layouts, state.masks, kept)
        _, target = move.host_means(own, before, self.copies)
        difference = move.difference_to_consensus(target, choice, before)
        sending = state.sending
        held_back = None if sending.error is None else _part(sending.error, paths)
        mean, error = send(difference, choice, held_back, state.num_rounds, this)
        assert sending.flight is not None, "streaming keeps a flight"
        counts = state.num_steps > sending.flight.whole_at
        if error is not None:
            error = _where(counts, error, held_back)
            sending = sending._replace(error=_merged(sending.error, error))
        state = state._replace(num_rounds=state.num_rounds + 1, sending=sending)
        return _Arrival(mean, counts), state

    def land(
        self, number: int, found: _Arrival, params: PyTree, state: HsadmmState
    ) -> tuple[PyTree, HsadmmState]:
        """Moves the consensus of a fragment, and its copies towards it."""
        paths = self._paths(number, params)
        own, before = _part(params, paths), _part_of(state.consensus, paths)
        form, this = self.form.moving, self._round(own)
        z, momentum = outer_step(
            before.values,
            found.mean,
            before.momentum,
            form.outer_step,
            form.outer_momentum,
        )
        choice = Choice(this.layouts, state.masks, {})
        after = before._replace(values=z, momentum=momentum)
        after, distances = move.settle(own, after, before, choice, self.copies.axes)
        moved, pulled, residuals, health = move.pull_copies(
            own, after, distances, choice, this
        )
        health = _health_of_part(health, state.health, after.values, self.copies.axes)
        own, after, residuals, health = _where(
            found.counts,
            (moved, pulled, residuals, health),
            (own, before, state.residuals, state.health),
        )
        consensus = state.consensus._replace(
            values=_merged(state.consensus.values, after.values),
            momentum=_merged(state.consensus.momentum, after.momentum),
        )
        return _merged(params, own), state._replace(
            consensus=consensus, residuals=residuals, health=health
        )

    def _round(self, params: PyTree) -> Round:
        """A round of these leaves alone, after which copies mix."""
        form = self.form.replace(prox_strength=1.0 - self.streaming.mixing)
        layouts = self.copies.layouts(self.groups, params)
        return Round(form, self.copies, layouts, self.keep_counts, "frozen")

    def _paths(self, number: int, tree: PyTree) -> tuple[str, ...]:
        count = self.streaming.num_fragments
        return fragments_of(shapes_by_path(tree), count)[number]


def _part_of(consensus: Consensus, paths: tuple[str, ...]) -> Consensus:
    """The consensus as that of a network of these leaves alone."""
    momentum = consensus.momentum
    return consensus._replace(
        values=_part(consensus.values, paths),
        momentum=None if momentum is None else _part(momentum, paths),
    )


def _health_of_part(
    found: RoundHealth, before: RoundHealth, z: PyTree, axes: MeshAxes
) -> RoundHealth:
    """Health where a fragment was seen; that of before for groups it has nothing of."""
    size = norm(z, axes)  # Zero for a fragment of biases that nothing has moved.
    return RoundHealth(
        host_drift=jnp.where(size > 0, found.host_drift, 0.0),
        primal_by_group={**before.primal_by_group, **found.primal_by_group},
        dual_by_group={**before.dual_by_group, **found.dual_by_group},
    )


def _part(tree: PyTree, paths: tuple[str, ...]) -> dict[str, jax.Array]:
    """Some leaves by path."""
    leaves = flatten_by_path(tree)
    return {path: leaves[path] for path in paths}


def _merged(tree: PyTree | None, part: Mapping[str, jax.Array] | None) -> PyTree | None:
    """A tree with other leaves at some paths."""
    if tree is None or part is None:
        return tree
    return map_with_path(lambda path, leaf: part.get(path, leaf), tree)


def _where(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)
