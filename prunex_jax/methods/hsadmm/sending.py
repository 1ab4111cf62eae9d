"""How the differences of a round cross hosts, and what that sends.

Whatever the form, hosts end with the same mean; what a host has not sent, it keeps.
"""

import dataclasses
from collections.abc import Mapping

import jax

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import (
    Collective,
    clip_to_median,
    mean_of_largest,
    mean_over_hosts,
    mean_with_error,
    radial_mean_over_hosts,
)
from prunex_jax.comm.formulas import (
    MeshShape,
    host_gather,
    host_sum,
    host_sum_with_error,
    largest_sum,
    radial_host_sum,
)
from prunex_jax.comm.largest import CHUNK
from prunex_jax.mesh import MeshAxes
from prunex_jax.methods.hsadmm.presets import HsadmmParameters
from prunex_jax.methods.method import RoundKind

# Leaves of fewer axes are sent whole: scales and biases are few and matter much.
_MIN_NDIM = 2


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
        of the network that a few entries would not repair. So does a whole round, after
        which nothing is sent later.
    Returns:
      The mean, replicated, and the error, per_host; None where the form keeps none.
      What is clipped off is in neither.
    Collectives:
      With clip="median", as `comm.clip_to_median` before. Without error: as
      `comm.mean_over_hosts`, or with average="radial" as `comm.radial_mean_over_hosts`.
      With top_k, but for freeze and whole rounds: as `comm.mean_of_largest` for all
      leaves of two or more axes, and as `comm.mean_with_error` for the others.
      Otherwise as `comm.mean_with_error`.
    """
    if form.clip == "median":
        sent = clip_to_median(sent, axes)
    if form.average == "radial":
        return radial_mean_over_hosts(sent, axes, form.wire, key), None
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


def sent_differences(
    sizes: Mapping[int, int],
    num_leaves: int,
    form: HsadmmParameters,
    mesh_shape: MeshShape,
    kind: RoundKind,
) -> list[Collective]:
    """What `mean_of_differences` sends for a tree.

    Args:
      sizes: Elements of all compact leaves of so many axes.
      num_leaves: How many leaves these are.
      form: As there.
      mesh_shape: Axes of the mesh and their sizes.
      kind: As there.
    """
    norms = host_gather(1, mesh_shape) if form.clip == "median" else []
    return norms + _sent_means(sizes, num_leaves, form, mesh_shape, kind)


def _sent_means(
    sizes: Mapping[int, int],
    num_leaves: int,
    form: HsadmmParameters,
    mesh_shape: MeshShape,
    kind: RoundKind,
) -> list[Collective]:
    total = sum(sizes.values())
    if form.average == "radial":
        return radial_host_sum(total, num_leaves, mesh_shape, form.wire)
    if not form.error_decay:
        return host_sum(total, mesh_shape, form.wire)
    form = _form_of(form, kind)
    if form.top is None:
        return host_sum_with_error(total, mesh_shape, form.wire)
    large = _large(sizes)
    of_large = largest_sum(large, form.top, mesh_shape, form.wire)
    wire = form.wire.at_least_8_bits()
    return of_large + host_sum_with_error(total - large, mesh_shape, wire)


def _large(sizes: Mapping[int, int]) -> int:
    """Elements of the leaves of which only the largest are sent."""
    return sum(size for ndim, size in sizes.items() if ndim >= _MIN_NDIM)


def _form_of(form: HsadmmParameters, kind: RoundKind) -> HsadmmParameters:
    """The form in which a round sends, where errors are kept."""
    if kind not in ("freeze", "whole"):
        return form
    return dataclasses.replace(form, top=None, wire=form.wire.at_least_8_bits())
