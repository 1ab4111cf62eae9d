"""Top-K as a method: the largest entries of gradients, in every step."""

from collections.abc import Mapping

from prunex_jax.comm import Collective, dense_size
from prunex_jax.comm.formulas import device_sum, entry_gather
from prunex_jax.methods.base import Method
from prunex_jax.methods.gradients import gradient_method
from prunex_jax.methods.recipe import Recipe
from prunex_jax.optim.topk import TOPK_PLACEMENTS, topk
from prunex_jax.sparsity import entry_count


def make_topk(recipe: Recipe) -> Method:
    """Builds the Top-K method."""
    config, wire_dtype = recipe.config.topk, recipe.config.wire_dtype
    num_elements = dense_size(recipe.shapes)
    count = entry_count(config.density, num_elements)

    def formula(mesh_shape: Mapping[str, int]) -> list[Collective]:
        inside = device_sum(num_elements, mesh_shape)
        return inside + entry_gather(count, mesh_shape, wire_dtype)

    return gradient_method(
        "topk",
        recipe,
        topk(
            config.density,
            is_exact=config.is_exact,
            wire_dtype=wire_dtype,
            host_axis=recipe.host_axis,
            device_axis=recipe.device_axis,
        ),
        placement=TOPK_PLACEMENTS,
        formula=formula,
        payload_elements=count,
        wire_dtype=wire_dtype,
        position_bytes=4 * count,
    )
