"""Importance-weighted pruning as a method: shared positions in every step."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from prunex_jax.comm import Collective, dense_size
from prunex_jax.comm.formulas import device_sum, host_gather, host_sum, ring_sum
from prunex_jax.methods.base import Method
from prunex_jax.methods.gradients import gradient_method, momentum_of
from prunex_jax.methods.importance_transform import importance, state_placements
from prunex_jax.methods.inner import after_momentum
from prunex_jax.methods.positions import chosen_counts, sums_positions
from prunex_jax.methods.recipe import Recipe


def make_importance(recipe: Recipe) -> Method:
    """Builds the method of importance-weighted pruning.

    It takes over clipping and momentum of the inner optimizer, which keeps its weight
    decay and learning rate.

    Raises:
      UserError: The inner optimizer is not SGD.
    """
    config = recipe.config.importance
    exchange = importance(
        config.density,
        num_choosers=config.num_choosers,
        **momentum_of("importance", recipe),
        damping=config.damping,
        all_reduce=config.all_reduce,
        wire=recipe.wire,
        send_whole=recipe.config.send_whole,
        axes=recipe.axes,
    )
    traffic = _Traffic(recipe)

    def step_options(step: int) -> dict[str, Any]:
        if config.refresh_period == 1:
            return {}
        return {"refresh": step % config.refresh_period == 0}

    return gradient_method(
        "importance",
        recipe,
        exchange,
        placement=state_placements(),
        formula=traffic.step,
        payload_elements=traffic.num_values,
        wire=recipe.wire,
        position_bytes=traffic.position_bytes,
        inner=after_momentum(recipe.inner, recipe.learning_rate),
        step_options=step_options,
    )


class _Traffic:
    """What one step must send, from sizes alone."""

    def __init__(self, recipe: Recipe) -> None:
        self.config = config = recipe.config.importance
        self.wire = recipe.wire
        shapes = recipe.shapes
        counts = chosen_counts(
            shapes, config.density, config.num_choosers, recipe.config.send_whole
        )
        pairs = zip(shapes.items(), counts, strict=True)
        whole = {path: shape for (path, shape), count in pairs if not count}
        self.num_elements = dense_size(shapes)
        self.num_positions = sum(counts)
        refreshed = self.config.num_choosers * sum(counts) / self.config.refresh_period
        self.position_bytes = round(4 * refreshed)  # of one step, on average
        self.num_values = self.config.num_choosers * sum(counts) + dense_size(whole)

    def step(
        self, mesh_shape: Mapping[str, int], refresh: bool = True
    ) -> list[Collective]:
        (_, num_hosts), _ = mesh_shape.items()
        sent = device_sum(self.num_elements, mesh_shape)
        if num_hosts == 1:
            return sent
        if refresh and self.num_positions:
            sent += self._positions(mesh_shape, num_hosts)
        if self.config.all_reduce == "ring":
            return sent + ring_sum(self.num_values, mesh_shape, self.wire)
        return sent + host_sum(self.num_values, mesh_shape, self.wire)

    def _positions(
        self, mesh_shape: Mapping[str, int], num_hosts: int
    ) -> list[Collective]:
        num_choosers = self.config.num_choosers
        if sums_positions(num_choosers, num_hosts):
            total = num_choosers * self.num_positions
            sums = host_sum(total, mesh_shape)
            return [dataclasses.replace(sent, dtype="int32") for sent in sums]
        return host_gather(self.num_positions, mesh_shape, "int32")
