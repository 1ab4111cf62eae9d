"""Dense data parallelism: gradients averaged over the whole mesh in every step.

The fair baseline is hierarchical, so that every byte crosses the host link once; flat
is what programs do that know no hosts.
"""

from prunex_jax.comm import dense_size
from prunex_jax.comm.formulas import flat_sum, mesh_sum
from prunex_jax.methods.base import Method
from prunex_jax.methods.gradients import gradient_method
from prunex_jax.methods.recipe import Recipe
from prunex_jax.methods.transforms import average_gradients


def make_dense(recipe: Recipe) -> Method:
    """Builds the dense method."""
    num_elements = dense_size(recipe.shapes)
    config = recipe.config
    formula = flat_sum if config.dense.levels == "flat" else mesh_sum
    return gradient_method(
        "dense",
        recipe,
        average_gradients(recipe.axes, levels=config.dense.levels, wire=recipe.wire),
        placement="replicated",
        formula=lambda mesh_shape: formula(num_elements, mesh_shape, recipe.wire),
        payload_elements=num_elements,
        wire=recipe.wire,
    )
