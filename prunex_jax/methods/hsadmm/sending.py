"""How the differences of a round cross hosts, and what that sends.

Whatever the form, hosts end with the same mean; what a host has not sent, it keeps.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax

from prunex_jax.base.trees import PyTree
from prunex_jax.channels import KeepIndices, Layouts, put_channels, take_channels
from prunex_jax.comm import (
    Slicing,
    mean_of_largest,
    mean_over_hosts,
    mean_with_error,
)
from prunex_jax.comm.largest import CHUNK
from prunex_jax.mesh import MeshAxes
from prunex_jax.methods.hsadmm.presets import HsadmmParameters
from prunex_jax.methods.method import RoundKind

# Leaves of fewer axes are sent whole: scales and biases are few and matter much.
_MIN_NDIM = 2


class SentChannels(NamedTuple):
    """The channels that a round sends."""

    layouts: Layouts  # Where they are.
    keep_indices: KeepIndices  # int32[count] per group, sorted, replicated.
    slicing: Slicing | None = None  # How trees lie in slices; None if they are whole.

    def take(self, tree: PyTree) -> PyTree:
        """What is sent of a tree, in smaller leaves.

        Collectives:
          Of slices, as `Slicing.take_kept`.
        """
        if self.slicing is not None:
            return self.slicing.take_kept(tree, self.layouts, self.keep_indices)
        return take_channels(tree, self.layouts, self.keep_indices)

    def put(self, tree: PyTree) -> PyTree:
        """Puts it back where it came from, zeros elsewhere.

        Collectives:
          Of slices, as `Slicing.put_kept`.
        """
        if self.slicing is not None:
            return self.slicing.put_kept(tree, self.layouts, self.keep_indices)
        return put_channels(tree, self.layouts, self.keep_indices)


def mean_of_differences(
    sent: PyTree,
    form: HsadmmParameters,
    axes: MeshAxes,
    key: jax.Array,
    kind: RoundKind,
) -> tuple[PyTree, PyTree | None]:
    """Averages compact differences over hosts.

    Args:
      sent: Differences of the kept channels, with the last error, per_host.
      form: The form of H-SADMM.
      axes: Mesh axes.
      key: Random key, the same everywhere, for formats that round stochastically.
      kind: A freeze round sends everything, in eight bits at least: it follows a change
        of the network that a few entries would not repair.
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


def payload_of(sizes: Mapping[int, int], form: HsadmmParameters) -> tuple[int, int]:
    """Numbers that stand for a tree in a frozen round, and bytes of their positions.

    Args:
      sizes: As for `sent_differences`. What is sent whole beside the largest numbers is
        little, and not counted.
      form: As there.
    """
    if form.top is None:
        return sum(sizes.values()), 0
    num_chunks = -(-_large(sizes) // CHUNK)
    return num_chunks * form.top.per_chunk, num_chunks * form.top.position_bytes


def _large(sizes: Mapping[int, int]) -> int:
    """Elements of the leaves of which only the largest are sent."""
    return sum(size for ndim, size in sizes.items() if ndim >= _MIN_NDIM)


def _form_of(form: HsadmmParameters, kind: RoundKind) -> HsadmmParameters:
    """The form in which a round sends, where errors are kept."""
    if kind != "freeze":
        return form
    return dataclasses.replace(form, top=None, wire=form.wire.at_least_8_bits())
