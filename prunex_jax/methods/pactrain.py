"""PacTrain as a method: pruned before the first step, packed gradients from then on."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import Collective, dense_size
from prunex_jax.comm.formulas import host_gather, mesh_sum, ternary_sum
from prunex_jax.methods.base import Method
from prunex_jax.methods.gradients import gradient_method
from prunex_jax.methods.grasp import grasp_pattern, magnitude_pattern
from prunex_jax.methods.moments import map_moments
from prunex_jax.methods.packing import ChannelPacking, Packing, WeightPacking
from prunex_jax.methods.pactrain_transform import PactrainState, is_stable, pactrain
from prunex_jax.methods.recipe import Recipe


def make_pactrain(recipe: Recipe) -> Method:
    """Builds the PacTrain method.

    Of a network without channel groups, as it is left once its dead channels were cut
    out, nothing is pruned.
    """
    config, wire_dtype = recipe.config.pactrain, recipe.config.wire_dtype
    packing = _packing_of(recipe)
    exchange = pactrain(
        packing,
        is_ternary=config.is_ternary,
        wire_dtype=wire_dtype,
        bucket_bytes=recipe.config.bucket_bytes,
        host_axis=recipe.host_axis,
        device_axis=recipe.device_axis,
    )
    everywhere: Any = "replicated"
    method = gradient_method(
        "pactrain",
        recipe,
        exchange,
        placement=PactrainState(everywhere, everywhere, everywhere),
        formula=_formula_of(recipe, packing),
        payload_elements=packing.num_kept,
        wire_dtype="ternary" if config.is_ternary else wire_dtype,
        masks=lambda state: packing.masks(state.pattern),
    )
    if config.stable_steps:
        method = dataclasses.replace(
            method,
            is_ready=lambda opt_state: is_stable(opt_state[0], config.stable_steps),
            unready_options={"packed": False},
        )
    if packing.num_kept == dense_size(recipe.shapes):
        return method
    return dataclasses.replace(
        method,
        prepare=_preparation(recipe, packing),
        prepare_batches=config.score_batches if config.score == "grasp" else 1,
    )


def _packing_of(recipe: Recipe) -> Packing:
    config = recipe.config.pactrain
    if config.structure == "weights":
        return WeightPacking(config.density, recipe.shapes)
    return ChannelPacking(recipe.groups, recipe.keep_counts, recipe.shapes)


def _formula_of(recipe: Recipe, packing: Packing) -> Callable[..., list[Collective]]:
    """What one step must send, from sizes alone."""
    wire = recipe.config.wire_dtype, recipe.config.bucket_bytes

    def formula(mesh_shape: Mapping[str, int], packed: bool = True) -> list[Collective]:
        if not packed:
            dense = mesh_sum(dense_size(recipe.shapes), mesh_shape, *wire)
            return dense + host_gather(2, mesh_shape, "uint32")
        if recipe.config.pactrain.is_ternary:
            return ternary_sum(packing.num_kept, mesh_shape)
        return mesh_sum(packing.num_kept, mesh_shape, *wire)

    return formula


def _preparation(recipe: Recipe, packing: Packing) -> Callable[..., Any]:
    """Chooses what is kept, and puts the rest to zero, moments included."""
    is_grasp = recipe.config.pactrain.score == "grasp"

    def prepare(
        loss_fn: Callable[..., jax.Array],
        params: PyTree,
        opt_state: PyTree,
        batches: Sequence[Any],
    ) -> tuple[PyTree, PyTree]:
        if is_grasp:
            pattern = grasp_pattern(
                loss_fn,
                params,
                batches,
                packing,
                host_axis=recipe.host_axis,
                device_axis=recipe.device_axis,
            )
        else:
            pattern = magnitude_pattern(params, packing)
        state, inner_state = opt_state
        inner_state = map_moments(
            lambda path, leaf: packing.mask({path: leaf}, pattern)[path],
            inner_state,
            params,
        )
        state = state._replace(pattern=pattern, age=0 * state.age)
        return packing.mask(params, pattern), (state, inner_state)

    return prepare
