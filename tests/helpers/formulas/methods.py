"""Closed formulas of every method of the table; tests may add those of their own."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import optax

from prunex_jax.channels import layouts_of
from prunex_jax.comm import Collective, Slicing, dense_size
from prunex_jax.methods import METHODS
from prunex_jax.methods.entries import EntrySizes, top_of
from prunex_jax.methods.hsadmm import method as hsadmm_method
from prunex_jax.methods.importance import chosen_counts, sums_positions
from prunex_jax.methods.local_sgd import core_of
from prunex_jax.methods.method import Recipe
from prunex_jax.methods.pactrain import method as pactrain_method
from prunex_jax.methods.powersgd import plan_of
from prunex_jax.methods.sliced import recipe_in_slices
from prunex_jax.train.build.experiment import Experiment
from tests.helpers.formulas import slices
from tests.helpers.formulas.base import Formulas
from tests.helpers.formulas.hsadmm import HsadmmFormulas
from tests.helpers.formulas.means import (
    device_sum,
    entry_gather,
    flat_sum,
    host_gather,
    host_sum,
    host_sum_with_error,
    largest_sum,
    mesh_sum,
    ring_sum,
    ternary_sum,
)

MeshShape = Mapping[str, int]


def formulas_of(
    recipe: Recipe,
    slicing: Slicing | None = None,
    shard: str = "state",
    param_dtype: str = "float32",
) -> Formulas:
    """Formulas of what `make_method` makes of the same arguments."""
    row = METHODS[recipe.config.name]
    if row.settings is not None:
        own = getattr(recipe.config, row.key)
        recipe = dataclasses.replace(recipe, settings=own)
    if slicing is None:
        return FORMULAS[row.name](recipe)
    own = FORMULAS[row.name](recipe_in_slices(recipe, slicing))
    num_parts = recipe.optimizer.micro_batches if shard == "params" else 0
    return InSlices(own, slicing, num_parts, param_dtype)


def formulas_of_run(experiment: Experiment) -> Formulas:
    """Formulas of the method that a run trains with, at full width."""
    config, current = experiment.config, experiment.current
    recipe = Recipe(
        config=dataclasses.replace(config.method, name=current.method.name),
        inner=optax.identity(),
        learning_rate=optax.constant_schedule(0.1),
        groups=current.groups,
        keep_counts=experiment.channels.keep_counts,
        shapes=current.shapes,
        total_steps=experiment.num_steps,
        criterion=config.sparsity.criterion,
        optimizer=config.optimizer,
    )
    slicing, dtype = current.method.placements.slicing, config.model.param_dtype
    return formulas_of(recipe, slicing, config.topology.shard, dtype)


class InSlices(Formulas):
    """Of a method on slices, with what stands around it.

    Where parameters lie in slices, too, a step has all of them gathered twice for each
    of its parts, which is the most: the second time it is those that the backward pass
    reads.
    """

    def __init__(
        self, own: Formulas, slicing: Slicing, num_parts: int, param_dtype: str
    ) -> None:
        self.own, self.slicing = own, slicing
        self.num_parts, self.param_dtype = num_parts, param_dtype

    def step(self, mesh_shape: MeshShape, **options: Any) -> list[Collective]:
        own = _that_move(self.own.step(_on_slices(mesh_shape), **options))
        averaging = slices.averaging(self.slicing)
        if not self.num_parts:
            return averaging + own + slices.joining(self.slicing)
        passes = 2 * slices.joining(self.slicing, self.param_dtype) + averaging
        return self.num_parts * passes + own

    def exchange(
        self, mesh_shape: MeshShape, keep_counts: Mapping[str, int], kind: str
    ) -> list[Collective]:
        own = self.own.exchange(_on_slices(mesh_shape), keep_counts, kind)
        if not own:
            return []
        joined = [] if self.num_parts else slices.joining(self.slicing)
        return _that_move(own) + joined


def _on_slices(mesh_shape: MeshShape) -> dict[str, int]:
    """The mesh as a method on slices knows it: a device per host."""
    host_axis, device_axis = mesh_shape
    return {host_axis: mesh_shape[host_axis], device_axis: 1}


def _that_move(listed: list[Collective]) -> list[Collective]:
    """Leaves out what goes over the one device that a method on slices knows."""
    return [each for each in listed if each.axis_sizes != (1,)]


class NoneFormulas(Formulas):
    """No exchange over hosts."""

    def __init__(self, recipe: Recipe) -> None:
        self.num_elements = dense_size(recipe.own_shapes)

    def step(self, mesh_shape: MeshShape) -> list[Collective]:
        host_axis, _ = mesh_shape
        return mesh_sum(self.num_elements, {**mesh_shape, host_axis: 1})


class DenseFormulas(Formulas):
    """Gradients, averaged over the mesh."""

    def __init__(self, recipe: Recipe) -> None:
        self.num_elements, self.wire = dense_size(recipe.own_shapes), recipe.wire
        self.levels, self.decay = recipe.settings.levels, recipe.settings.error_decay
        if self.decay is None:
            self.decay = 1.0 if self.wire.format.is_biased else 0.0

    def step(self, mesh_shape: MeshShape) -> list[Collective]:
        if self.decay:
            in_host = device_sum(self.num_elements, mesh_shape)
            return in_host + host_sum_with_error(
                self.num_elements, mesh_shape, self.wire
            )
        sum_of = flat_sum if self.levels == "flat" else mesh_sum
        return sum_of(self.num_elements, mesh_shape, self.wire)


class EntryFormulas(Formulas):
    """The largest entries of gradients."""

    def __init__(self, recipe: Recipe) -> None:
        self.density = recipe.settings.density
        self.sizes = EntrySizes(recipe, recipe.settings.in_chunks)
        self.num_elements = dense_size(recipe.own_shapes)
        self.clipping = []
        if recipe.config.name == "dgc":
            self.clipping = _sums_of_clipping(recipe)

    def step(
        self, mesh_shape: MeshShape, density: float | None = None
    ) -> list[Collective]:
        sizes, density = self.sizes, self.density if density is None else density
        sent = device_sum(self.num_elements, mesh_shape)
        if sizes.num_open and sizes.in_chunks:
            top = top_of(density)
            sent += largest_sum(sizes.num_open, top, mesh_shape, sizes.wire)
        elif sizes.num_open:
            sent += entry_gather(sizes.count(density), mesh_shape, sizes.wire)
        if sizes.num_whole:
            sent += host_sum(sizes.num_whole, mesh_shape)
        return sent + self.clipping


def _sums_of_clipping(recipe: Recipe) -> list[Collective]:
    """What `clip_of_host` sends in a step."""
    slicing = recipe.slicing
    if slicing is None or not recipe.optimizer.clip_norm:
        return []
    return [slices.summing(slicing, 1)]


class ImportanceFormulas(Formulas):
    """Entries that a few hosts choose for all."""

    def __init__(self, recipe: Recipe) -> None:
        self.config, self.wire = recipe.settings, recipe.wire
        shapes = recipe.own_shapes
        counts = chosen_counts(
            shapes,
            self.config.density,
            self.config.num_choosers,
            recipe.config.send_whole,
        )
        pairs = zip(shapes.items(), counts, strict=True)
        whole = {path: shape for (path, shape), count in pairs if not count}
        self.num_layers = sum(count > 0 for count in counts)
        self.slicing = recipe.slicing
        self.clipping = _sums_of_clipping(recipe)
        self.num_elements = dense_size(shapes)
        self.num_positions = sum(counts)
        self.num_values = self.config.num_choosers * sum(counts) + dense_size(whole)

    def step(self, mesh_shape: MeshShape, refresh: bool = True) -> list[Collective]:
        (_, num_hosts), _ = mesh_shape.items()
        sent = device_sum(self.num_elements, mesh_shape) + self.clipping
        if num_hosts == 1:
            return sent
        if refresh and self.num_positions:
            sent += self._positions(mesh_shape, num_hosts)
            if self.slicing is not None:
                sent.append(slices.summing(self.slicing, self.num_layers))
        if self.config.all_reduce == "ring":
            return sent + ring_sum(self.num_values, mesh_shape, self.wire)
        return sent + host_sum(self.num_values, mesh_shape, self.wire)

    def _positions(self, mesh_shape: MeshShape, num_hosts: int) -> list[Collective]:
        num_choosers = self.config.num_choosers
        if sums_positions(num_choosers, num_hosts):
            sums = host_sum(num_choosers * self.num_positions, mesh_shape)
            return [dataclasses.replace(sent, dtype="int32") for sent in sums]
        return host_gather(self.num_positions, mesh_shape, "int32")


class PowersgdFormulas(Formulas):
    """Factors of gradients."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.plan, self.num_whole = plan_of(recipe)

    def step(self, mesh_shape: MeshShape) -> list[Collective]:
        recipe, plan = self.recipe, self.plan
        slicing, wire = recipe.slicing, recipe.wire
        sent = device_sum(dense_size(recipe.own_shapes), mesh_shape)
        if slicing is None:
            sent += host_sum(plan.num_short + self.num_whole, mesh_shape, wire)
            return sent + host_sum(plan.num_long, mesh_shape, wire)
        (host_axis, num_hosts), _ = mesh_shape.items()
        sent += host_sum(self.num_whole, mesh_shape, wire)
        if num_hosts > 1:
            devices = {host_axis: num_hosts, slicing.axis: slicing.parts}
            for num_elements in (plan.num_short, plan.num_long):
                sent.append(slices.summing(slicing, num_elements))
                sent += host_sum(num_elements, devices, wire)
        return sent


class PactrainFormulas(Formulas):
    """What is kept of gradients, packed."""

    def __init__(self, recipe: Recipe) -> None:
        slicing = recipe.slicing
        self.num_elements = dense_size(recipe.own_shapes)
        self.wire = recipe.wire
        self.is_ternary = recipe.settings.is_ternary
        self.num_kept = pactrain_method._packing_of(recipe, slicing).num_kept
        self.moved = []
        if slicing is not None:
            layouts = layouts_of(recipe.groups, recipe.shapes)
            for move in (slices.taking, slices.putting):
                self.moved += move(slicing, layouts, recipe.keep_counts)

    def step(self, mesh_shape: MeshShape, packed: bool = True) -> list[Collective]:
        if not packed:
            dense = mesh_sum(self.num_elements, mesh_shape, self.wire)
            return dense + host_gather(2, mesh_shape, "uint32")
        if self.is_ternary:
            return ternary_sum(self.num_kept, mesh_shape) + self.moved
        return mesh_sum(self.num_kept, mesh_shape, self.wire) + self.moved


FORMULAS: dict[str, Callable[[Recipe], Formulas]] = {
    "none": NoneFormulas,
    "dense": DenseFormulas,
    "topk": EntryFormulas,
    "dgc": EntryFormulas,
    "importance": ImportanceFormulas,
    "powersgd": PowersgdFormulas,
    "pactrain": PactrainFormulas,
    "hsadmm": lambda recipe: HsadmmFormulas(hsadmm_method.core_of(recipe), recipe),
    "local_sgd": lambda recipe: HsadmmFormulas(core_of(recipe, 1.0, 0.0), recipe),
    "diloco": lambda recipe: HsadmmFormulas(core_of(recipe, 0.7, 0.9), recipe),
}
