"""PacTrain as a method: pruned before the first step, packed gradients from then on."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.comm import TERNARY, Collective, Wire, dense_size
from prunex_jax.comm.formulas import host_gather, mesh_sum
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
    config, wire = recipe.config.pactrain, _wire_of(recipe)
    packing = _packing_of(recipe)
    exchange = pactrain(packing, wire=wire, axes=recipe.axes)
    everywhere: Any = "replicated"
    method = gradient_method(
        "pactrain",
        recipe,
        exchange,
        placement=PactrainState(everywhere, everywhere, everywhere),
        formula=_formula_of(recipe, packing),
        payload_elements=packing.num_kept,
        wire=wire,
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


def _wire_of(recipe: Recipe) -> Wire:
    """How packed gradients cross hosts."""
    wire = recipe.wire
    if not recipe.config.pactrain.is_ternary:
        return wire
    if wire != wire.in_float32():
        raise UserError(
            f"wire_dtype={wire.dtype!r}: ternary values travel as single bytes already;"
            " choose float32, or no ternary values"
        )
    return Wire(TERNARY, wire.bucket_bytes)


def _packing_of(recipe: Recipe) -> Packing:
    config = recipe.config.pactrain
    if config.structure == "weights":
        return WeightPacking(config.density, recipe.shapes)
    return ChannelPacking(recipe.groups, recipe.keep_counts, recipe.shapes)


def _formula_of(recipe: Recipe, packing: Packing) -> Callable[..., list[Collective]]:
    """What one step must send, from sizes alone."""

    def formula(mesh_shape: Mapping[str, int], packed: bool = True) -> list[Collective]:
        if not packed:
            dense = mesh_sum(dense_size(recipe.shapes), mesh_shape, recipe.wire)
            return dense + host_gather(2, mesh_shape, "uint32")
        return mesh_sum(packing.num_kept, mesh_shape, _wire_of(recipe))

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
                axes=recipe.axes,
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
