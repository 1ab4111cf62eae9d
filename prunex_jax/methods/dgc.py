"""Deep gradient compression as a method: sparse momentum, in every step."""

from collections.abc import Mapping
from typing import Any

from prunex_jax.comm import Collective
from prunex_jax.methods.base import Method
from prunex_jax.methods.dgc_transform import DGC_PLACEMENTS, dgc, warmup_density
from prunex_jax.methods.entries import EntryTraffic
from prunex_jax.methods.gradients import gradient_method, momentum_of
from prunex_jax.methods.inner import after_momentum
from prunex_jax.methods.recipe import Recipe


def make_dgc(recipe: Recipe) -> Method:
    """Builds the DGC method.

    It takes over clipping and momentum of the inner optimizer, which keeps its weight
    decay and learning rate.

    Raises:
      UserError: The inner optimizer is not SGD.
    """
    config = recipe.config.dgc
    traffic = EntryTraffic(recipe)
    warmup_steps = round(config.warmup_share * recipe.total_steps)

    def formula(
        mesh_shape: Mapping[str, int], density: float = config.density
    ) -> list[Collective]:
        return traffic.step(mesh_shape, density)

    def step_options(step: int) -> dict[str, Any]:
        density = warmup_density(step, warmup_steps, config.density)
        return {} if density == config.density else {"density": density}

    return gradient_method(
        "dgc",
        recipe,
        dgc(
            config.density,
            **momentum_of("dgc", recipe),
            is_exact=config.is_exact,
            wire=recipe.wire,
            send_whole=recipe.config.send_whole,
            axes=recipe.axes,
        ),
        placement=DGC_PLACEMENTS,
        formula=formula,
        payload_elements=max(traffic.count(config.density), traffic.num_whole),
        wire=recipe.wire,
        position_bytes=4 * traffic.count(config.density),
        inner=after_momentum(recipe.inner, recipe.learning_rate),
        step_options=step_options,
    )
