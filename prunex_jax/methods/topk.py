"""Top-K as a method: the largest entries of gradients, in every step."""

from collections.abc import Mapping

from prunex_jax.comm import Collective
from prunex_jax.methods.base import Method
from prunex_jax.methods.entries import EntryTraffic
from prunex_jax.methods.gradients import gradient_method
from prunex_jax.methods.recipe import Recipe
from prunex_jax.methods.topk_transform import TOPK_PLACEMENTS, topk


def make_topk(recipe: Recipe) -> Method:
    """Builds the Top-K method."""
    config = recipe.config.topk
    traffic = EntryTraffic(recipe)

    def formula(mesh_shape: Mapping[str, int]) -> list[Collective]:
        return traffic.step(mesh_shape, config.density)

    return gradient_method(
        "topk",
        recipe,
        topk(
            config.density,
            is_exact=config.is_exact,
            wire=recipe.wire,
            send_whole=recipe.config.send_whole,
            axes=recipe.axes,
        ),
        placement=TOPK_PLACEMENTS,
        formula=formula,
        payload_elements=max(traffic.count(config.density), traffic.num_whole),
        wire=recipe.wire,
        position_bytes=4 * traffic.count(config.density),
    )
