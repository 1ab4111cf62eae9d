"""No exchange over hosts at all: a reference for speed.

Every host trains a network of its own. What is evaluated is the network of the first
host, which has seen its own share of the data only.
"""

import optax

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import take_from_host
from prunex_jax.mesh import MeshAxes
from prunex_jax.methods.dense import average_gradients
from prunex_jax.methods.gradients import INNER_OF_CHAIN
from prunex_jax.methods.method import Method, MethodRow, Placements, Recipe, Variant


def make_none(recipe: Recipe) -> Method:
    """Builds the method that sends nothing over the host axis while training."""
    average = average_gradients(MeshAxes(None, recipe.axes.device))

    def network(params: PyTree, opt_state: PyTree) -> PyTree:
        del opt_state
        return take_from_host(0, params, recipe.axes)

    return Method(
        transform=optax.with_extra_args_support(optax.chain(average, recipe.inner)),
        placements=Placements("per_host", recipe.placed("per_host"), copies="own"),
        network=network,
        inner=INNER_OF_CHAIN,
    )


ROW = MethodRow(
    "none",
    make_none,
    variants=(Variant("none", "no exchange"),),
    takes_slices=True,
)
