"""H-SADMM as a method: rounds on compact channels every `sync_period` steps."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax

from prunex_jax.base.settings import MethodConfig
from prunex_jax.base.trees import PyTree
from prunex_jax.channels import layouts_of
from prunex_jax.comm import Collective, Wire, compact_size, dense_size
from prunex_jax.comm.formulas import device_sum, host_sum
from prunex_jax.methods.base import Method
from prunex_jax.methods.recipe import Recipe
from prunex_jax.methods.transforms import (
    Hsadmm,
    HsadmmParameters,
    HsadmmState,
    RoundKind,
    preset,
    state_placements,
)


def parameters_of(method: MethodConfig) -> HsadmmParameters:
    """The preset with what the settings change of it."""
    config = method.hsadmm
    return preset(
        config.preset,
        config.sync_period,
        rho_device=config.rho_device,
        rho_host=config.rho_host,
        prox_strength=config.prox_strength,
        dual_decay=config.dual_decay,
        outer_step=config.outer_step,
        outer_momentum=config.outer_momentum,
        adapt=config.adapt,
        wire=Wire(method.wire_dtype, method.bucket_bytes),
    )


def make_hsadmm(recipe: Recipe) -> Method:
    """Builds the H-SADMM method."""
    config = recipe.config.hsadmm
    core = Hsadmm(
        recipe.inner,
        recipe.groups,
        recipe.keep_counts,
        parameters_of(recipe.config),
        config.sync_period,
        config.device_level,
        recipe.axes,
        recipe.learning_rate,
    )
    return consensus_method("hsadmm", core, recipe, prunes=True)


def consensus_method(name: str, core: Hsadmm, recipe: Recipe, prunes: bool) -> Method:
    """What all methods share whose copies meet in a consensus every so many steps.

    Args:
      name: Key in `methods.METHODS`.
      core: What a step and a round do.
      recipe: What the trainer has built.
      prunes: Whether the densities of the schedule are for it.
    Returns:
      The method.
    """
    placements = state_placements(core.device_level)

    def update(
        grads: PyTree, state: HsadmmState, params: PyTree, **extra: Any
    ) -> tuple[PyTree, HsadmmState]:
        return core.update(grads, state, params, sync=False, **extra)

    def exchange(
        params: PyTree,
        state: HsadmmState,
        keep_counts: Mapping[str, int],
        kind: RoundKind,
    ) -> tuple[PyTree, HsadmmState]:
        own = {group.name: keep_counts[group.name] for group in core.groups}
        return core.exchange(params, state, keep_counts=own, kind=kind)

    def network(params: PyTree, state: HsadmmState) -> PyTree:
        del params
        return state.global_consensus

    traffic = _Traffic(core, recipe)
    return Method(
        name=name,
        params_placement=placements.inner_state,
        opt_placement=placements,
        transform=optax.GradientTransformationExtraArgs(core.init, update),
        sync_period=core.sync_period,
        exchange=exchange,
        network=network,
        masks=lambda state: state.masks,
        health=_health,
        step_formula=traffic.step,
        exchange_formula=traffic.exchange,
        payload_elements=traffic.payload_elements,
        inner_state=lambda state: state.inner_state,
        with_inner=lambda state, inner: state._replace(inner_state=inner),
        wire=core.parameters.wire,
        prunes=prunes,
    )


def _health(state: HsadmmState) -> dict[str, Any]:
    residuals, health = state.residuals, state.health
    found = {
        "primal_residual": residuals.primal_device,
        "dual_residual": residuals.dual_device,
        "primal_residual_host": residuals.primal_host,
        "dual_residual_host": residuals.dual_host,
        "host_drift": health.host_drift,
        "consensus_norm": optax.tree.norm(state.global_consensus),
        "mask_changes": state.num_changed.astype(jnp.float32),
    }
    for name, dual in (
        ("device_dual_norm", state.device_dual),
        ("host_dual_norm", state.host_dual),
    ):
        if dual is not None:
            found[name] = optax.tree.norm(dual)
    if health.primal_by_group:
        found["primal_residual_by_group"] = health.primal_by_group
        found["dual_residual_by_group"] = health.dual_by_group
    return found


class _Traffic:
    """What H-SADMM must send, from sizes alone."""

    def __init__(self, core: Hsadmm, recipe: Recipe) -> None:
        self.core = core
        self.shapes = recipe.shapes
        self.layouts = layouts_of(core.groups, recipe.shapes)
        self.num_channels = sum(group.size for group in core.groups)

    def payload_elements(self, keep_counts: Mapping[str, int]) -> int:
        return compact_size(self.shapes, self.layouts, keep_counts)

    def step(self, mesh_shape: Mapping[str, int]) -> list[Collective]:
        if self.core.device_level == "consensus":
            return []
        return device_sum(dense_size(self.shapes), mesh_shape)

    def exchange(
        self,
        mesh_shape: Mapping[str, int],
        keep_counts: Mapping[str, int],
        kind: RoundKind,
    ) -> list[Collective]:
        form = self.core.parameters
        sent = []
        if self.core.device_level == "consensus":
            num_copies = 2 if form.dual_decay else 1
            num_elements = num_copies * dense_size(self.shapes)
            if form.adapt == "residual":
                sent += device_sum(4, mesh_shape)
            sent += device_sum(num_elements, mesh_shape)
        if form.adapt == "residual":
            sent += host_sum(4, mesh_shape)
        if kind != "frozen":
            sent += host_sum(self.num_channels, mesh_shape)
        payload = self.payload_elements(keep_counts)
        return sent + host_sum(payload, mesh_shape, form.wire)
