"""No exchange over hosts at all: an upper bound on speed, not a way to train.

Every host trains a network of its own. What is evaluated is the network of the first
host, which has seen its own share of the data only.
"""

from collections.abc import Mapping

import optax

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import Collective, dense_size, take_from_host
from prunex_jax.comm.formulas import mesh_sum
from prunex_jax.mesh import MeshAxes
from prunex_jax.methods.base import Method
from prunex_jax.methods.recipe import Recipe
from prunex_jax.methods.transforms import average_gradients


def make_none(recipe: Recipe) -> Method:
    """Builds the method that sends nothing over the host axis while training."""
    average = average_gradients(MeshAxes(None, recipe.axes.device))
    num_elements = dense_size(recipe.shapes)

    def network(params: PyTree, opt_state: PyTree) -> PyTree:
        del opt_state
        return take_from_host(0, params, recipe.axes)

    def formula(mesh_shape: Mapping[str, int]) -> list[Collective]:
        host_axis, _ = mesh_shape
        return mesh_sum(num_elements, {**mesh_shape, host_axis: 1})

    return Method(
        name="none",
        params_placement="per_host",
        opt_placement="per_host",
        transform=optax.with_extra_args_support(optax.chain(average, recipe.inner)),
        sync_period=0,
        exchange=None,
        network=network,
        masks=lambda opt_state: {},
        health=lambda opt_state: {},
        step_formula=formula,
        exchange_formula=lambda mesh_shape, keep_counts, kind: [],
        payload_elements=lambda keep_counts: 0,
        inner_state=lambda opt_state: opt_state[1],
        with_inner=lambda opt_state, inner_state: (opt_state[0], inner_state),
    )
