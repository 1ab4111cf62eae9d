"""PowerSGD as a method: low-rank gradients in every step."""

import math
from collections.abc import Mapping

from prunex_jax.comm import Collective, dense_size
from prunex_jax.comm.formulas import device_sum, host_sum
from prunex_jax.methods.base import Method
from prunex_jax.methods.gradients import gradient_method
from prunex_jax.methods.low_rank import make_plan
from prunex_jax.methods.positions import is_named
from prunex_jax.methods.powersgd_transform import POWERSGD_PLACEMENTS, powersgd
from prunex_jax.methods.recipe import Recipe


def make_powersgd(recipe: Recipe) -> Method:
    """Builds the PowerSGD method."""
    config = recipe.config.powersgd
    shapes = list(recipe.shapes.values())
    send_whole = recipe.config.send_whole
    is_whole = is_named(recipe.shapes, send_whole)
    plan = make_plan(shapes, config.rank, config.min_gain, is_whole)
    num_whole = sum(math.prod(shapes[i]) for i in plan.whole)
    messages = (plan.num_short + num_whole, plan.num_long)

    def formula(mesh_shape: Mapping[str, int]) -> list[Collective]:
        sent = device_sum(dense_size(recipe.shapes), mesh_shape)
        for num_elements in messages:
            sent += host_sum(num_elements, mesh_shape, recipe.wire)
        return sent

    return gradient_method(
        "powersgd",
        recipe,
        powersgd(
            config.rank,
            min_gain=config.min_gain,
            wire=recipe.wire,
            send_whole=send_whole,
            axes=recipe.axes,
        ),
        placement=POWERSGD_PLACEMENTS,
        formula=formula,
        payload_elements=max(messages),
        wire=recipe.wire,
    )
