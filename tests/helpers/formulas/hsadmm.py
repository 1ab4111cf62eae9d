"""Closed formulas of what rounds of H-SADMM, local SGD and DiLoCo send."""

import math
from collections.abc import Collection, Iterable, Mapping

from prunex_jax.channels import kept_shape, layouts_of
from prunex_jax.comm import Collective, dense_size
from prunex_jax.methods.hsadmm import Sending, send
from prunex_jax.methods.hsadmm.core import Hsadmm
from prunex_jax.methods.hsadmm.streaming import fragments_of
from prunex_jax.methods.method import Recipe, RoundKind
from prunex_jax.sparsity import uses_gradients
from tests.helpers.formulas import slices
from tests.helpers.formulas.base import Formulas
from tests.helpers.formulas.means import (
    MeshShape,
    device_sum,
    host_sum,
    host_sum_with_error,
    largest_sum,
)

FixedCounts = tuple[tuple[str, int], ...]


def sent_differences(
    sizes: Mapping[int, int],
    form: Sending,
    mesh_shape: MeshShape,
    kind: RoundKind,
) -> list[Collective]:
    """What `mean_of_differences` sends for a tree.

    Args:
      sizes: Elements of all compact leaves of so many axes.
      form: As there.
      mesh_shape: Axes of the mesh and their sizes.
      kind: As there.
    """
    total = sum(sizes.values())
    if not form.error_decay:
        return host_sum(total, mesh_shape, form.wire)
    form = send._form_of(form, kind)
    if form.top is None:
        return host_sum_with_error(total, mesh_shape, form.wire)
    large = send._large(sizes)
    of_large = largest_sum(large, form.top, mesh_shape, form.wire)
    wire = form.wire.at_least_8_bits()
    return of_large + host_sum_with_error(total - large, mesh_shape, wire)


class HsadmmFormulas(Formulas):
    """What forms of the core send."""

    def __init__(self, core: Hsadmm, recipe: Recipe) -> None:
        self.core = core
        self.shapes = recipe.shapes
        self.layouts = layouts_of(core.groups, recipe.shapes)
        self.slicing = recipe.slicing
        self.num_channels = sum(group.size for group in core.groups)
        count = 1 if core.streaming is None else core.streaming.num_fragments
        self.fragments = fragments_of(recipe.own_shapes, count)

    def sizes(
        self,
        keep_counts: Mapping[str, int],
        paths: Iterable[str] | None = None,
    ) -> dict[int, int]:
        """Elements of all compact leaves, or of some, of so many axes."""
        if self.slicing is not None:
            left = self.slicing.own_kept_shapes(self.layouts, keep_counts)
        else:
            left = {
                path: kept_shape(shape, self.layouts.get(path), keep_counts)
                for path, shape in self.shapes.items()
            }
        sizes: dict[int, int] = {}
        for path in left if paths is None else paths:
            num_axes = len(left[path])
            sizes[num_axes] = sizes.get(num_axes, 0) + math.prod(left[path])
        return sizes

    def slices_sent(
        self, keep_counts: Mapping[str, int], paths: Collection[str]
    ) -> list[Collective]:
        """What slices of parameters tell each other to send what is kept of them."""
        slicing, form = self.slicing, self.core.parameters.sending
        if slicing is None:
            return []
        own = {path: self.layouts[path] for path in paths if path in self.layouts}
        puts = 2 if form.error_decay else 1
        taken = slices.taking(slicing, own, keep_counts)
        return taken + puts * slices.putting(slicing, own, keep_counts)

    def norms_of_slices(
        self, paths: Collection[str], more: int = 0
    ) -> list[Collective]:
        """What they tell each other for the residuals of a round, and more norms."""
        num_trees = 4 if any(path in self.layouts for path in paths) else 3
        if self.core.parameters.moving.rho_host:
            num_trees = 6
        return self.numbers_of_slices([len(paths)] * (num_trees + more))

    def numbers_of_slices(self, counts: Iterable[int]) -> list[Collective]:
        """Sums over slices of so many numbers each."""
        if self.slicing is None:
            return []
        return [slices.summing(self.slicing, count) for count in counts if count]

    def step(
        self,
        mesh_shape: Mapping[str, int],
        sends: int | None = None,
        keep_counts: FixedCounts | None = None,
    ) -> list[Collective]:
        is_consensus = self.core.device_level == "consensus"
        sent = []
        if not is_consensus:
            sent += device_sum(dense_size(self.shapes), mesh_shape)
        criterion = self.core.parameters.choosing.criterion
        if uses_gradients(criterion):
            sent += self.numbers_of_slices([self.num_channels])
        if sends is None:
            return sent
        paths = self.fragments[sends]
        sent += self.norms_of_slices(paths, 1)
        if is_consensus:
            size = dense_size({path: self.shapes[path] for path in paths})
            sent += device_sum(size, mesh_shape)
        counts = self.core.keep_counts if keep_counts is None else dict(keep_counts)
        sizes = self.sizes(counts, paths=paths)
        form = self.core.parameters.sending
        sent += self.slices_sent(counts, paths)
        return sent + sent_differences(sizes, form, mesh_shape, "frozen")

    def exchange(
        self,
        mesh_shape: Mapping[str, int],
        keep_counts: Mapping[str, int],
        kind: RoundKind,
    ) -> list[Collective]:
        form = self.core.parameters.moving
        criterion = self.core.parameters.choosing.criterion
        is_scored = kind != "frozen"
        sent = []
        if self.core.device_level == "consensus":
            num_copies = 2 if form.dual_decay else 1
            num_elements = num_copies * dense_size(self.shapes)
            sent += device_sum(num_elements, mesh_shape)
            if is_scored and uses_gradients(criterion):
                sent += device_sum(self.num_channels, mesh_shape)
        if is_scored:
            sent += host_sum(self.num_channels, mesh_shape)
        sizes = self.sizes(keep_counts)
        sent += self.slices_sent(keep_counts, self.shapes)
        if not (is_scored and criterion == "taylor"):
            sent += self.numbers_of_slices([self.num_channels])
        sent += self.norms_of_slices(self.shapes)
        if form.outer != "fixed":
            sent += self.numbers_of_slices([len(self.shapes)] * 2 + [1])
        sending = self.core.parameters.sending
        return sent + sent_differences(sizes, sending, mesh_shape, kind)
