"""The second stage of a round: how differences to the consensus cross hosts.

Kept channels are compacted, and sent on a wire: all of their numbers, or the largest.
Whatever the form, hosts end with the same mean; what a host has not sent, it keeps.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax

from prunex_jax.base.trees import PyTree
from prunex_jax.channels import put_channels, take_channels
from prunex_jax.comm import (
    key_of_slice,
    mean_of_largest,
    mean_over_hosts,
    mean_with_error,
)
from prunex_jax.comm.chunks import CHUNK
from prunex_jax.mesh import MeshAxes
from prunex_jax.methods.hsadmm.arithmetic import add_scaled
from prunex_jax.methods.hsadmm.choose import Choice
from prunex_jax.methods.hsadmm.presets import Sending
from prunex_jax.methods.hsadmm.round import Round
from prunex_jax.methods.method import RoundKind

# Leaves of fewer axes are sent whole: scales and biases are few and matter much.
_MIN_NDIM = 2


class Flight(NamedTuple):
    """What streaming rounds remember of whole ones."""

    whole_at: jax.Array  # int32[], replicated: steps done at the last whole round


class SendState(NamedTuple):
    """What hosts have not sent yet, and when they sent all."""

    error: PyTree | None  # e_i, per_host: what host i has not sent yet
    flight: Flight | None  # of streaming rounds


def send(
    difference: PyTree,
    choice: Choice,
    error: PyTree | None,
    num_rounds: jax.Array,
    this: Round,
) -> tuple[PyTree, PyTree | None]:
    """Averages s_i = z_i + v_i - z + delta e_i over hosts, as compact arrays.

    A narrow format rounds stochastically, or what it loses goes into the next round, as
    do numbers that are not sent. `difference` is z_i + v_i - z after the choice.

    Returns:
      The mean, replicated; and e_i, per_host, or None where the form keeps none.
    Collectives:
      As `mean_of_differences`; of slices, also as `Slicing.take_kept` and `put_kept`,
      the latter twice where there is an error.
    """
    sending, axes = this.form.sending, this.copies.axes
    if error is not None:
        held_back = choice.apply(error)
        difference = add_scaled(difference, sending.error_decay, held_back)
    slicing = this.copies.slicing
    take = take_channels if slicing is None else slicing.take_kept
    put = put_channels if slicing is None else slicing.put_kept
    key = jax.random.fold_in(jax.random.key(0), num_rounds)
    key = key_of_slice(key, axes)
    compact = take(difference, choice.layouts, choice.sent)
    mean, error = mean_of_differences(compact, sending, axes, key, this.kind)
    if error is not None:
        error = put(error, choice.layouts, choice.sent)
    return put(mean, choice.layouts, choice.sent), error


def mean_of_differences(
    sent: PyTree,
    form: Sending,
    axes: MeshAxes,
    key: jax.Array,
    kind: RoundKind,
) -> tuple[PyTree, PyTree | None]:
    """Averages compact differences with the last error, per_host, over hosts.

    A freeze round sends everything, in eight bits at least: it follows a change of the
    network that a few entries would not repair.

    Returns:
      The mean, replicated, and the error, per_host; None where the form keeps none.
    Collectives:
      Without error: as `comm.mean_over_hosts`. With top_k, but for freeze rounds: as
      `comm.mean_of_largest` for all leaves of two or more axes, and as
      `comm.mean_with_error` for the others. Otherwise as `comm.mean_with_error`.
    """
    if not form.error_decay:
        return mean_over_hosts(sent, axes, form.wire, key), None
    form = _form_of(form, kind)
    if form.top is None:
        return mean_with_error(sent, axes, form.wire)
    leaves, structure = jax.tree.flatten(sent)
    large = [leaf for leaf in leaves if leaf.ndim >= _MIN_NDIM]
    small = [leaf for leaf in leaves if leaf.ndim < _MIN_NDIM]
    of_large = mean_of_largest(large, form.top, axes, form.wire)
    of_small = mean_with_error(small, axes, form.wire.at_least_8_bits())

    def whole(large: list[jax.Array], small: list[jax.Array]) -> PyTree:
        parts = {True: iter(large), False: iter(small)}
        found = [next(parts[leaf.ndim >= _MIN_NDIM]) for leaf in leaves]
        return jax.tree.unflatten(structure, found)

    mean, error = (whole(*pair) for pair in zip(of_large, of_small, strict=True))
    return mean, error


def payload_of(sizes: Mapping[int, int], form: Sending) -> tuple[int, int]:
    """Numbers that stand for a tree in a frozen round, and bytes of their positions.

    `sizes` are elements of all compact leaves by number of axes. What is sent whole
    beside the largest numbers is little, and not counted.
    """
    if form.top is None:
        return sum(sizes.values()), 0
    num_chunks = -(-_large(sizes) // CHUNK)
    return num_chunks * form.top.per_chunk, num_chunks * form.top.position_bytes


def _large(sizes: Mapping[int, int]) -> int:
    """Elements of the leaves of which only the largest are sent."""
    return sum(size for ndim, size in sizes.items() if ndim >= _MIN_NDIM)


def _form_of(form: Sending, kind: RoundKind) -> Sending:
    """The form in which a round sends, where errors are kept."""
    if kind != "freeze":
        return form
    return dataclasses.replace(form, top=None, wire=form.wire.at_least_8_bits())
