"""Dense data parallelism: gradients averaged over the whole mesh in every step.

The fair baseline: hierarchical, so that every byte crosses the host link once.
"""

import jax
import optax

from prunex_jax.comm import check_local, dense_size, mean_over_mesh
from prunex_jax.comm.formulas import mesh_sum
from prunex_jax.methods.base import Method
from prunex_jax.methods.recipe import Recipe
from prunex_jax.trees import PyTree


def average_gradients(
    host_axis: str | None, device_axis: str | None
) -> optax.GradientTransformation:
    """Averages updates over the mesh; stateless.

    Args:
      host_axis: Mesh axis of the hosts, or None.
      device_axis: Mesh axis of the devices of a host, or None.
    Returns:
      A transformation for gradients of local losses.
    Raises:
      UserError: `update` got sums over the mesh; see `comm.check_local`.
    Collectives:
      As `comm.mean_over_mesh` for all gradients in one buffer.
    """

    def average(grads: PyTree, params: PyTree | None) -> PyTree:
        del params
        check_local(grads, (host_axis, device_axis))
        return mean_over_mesh(grads, host_axis, device_axis)

    return optax.stateless(average)


def make_dense(recipe: Recipe) -> Method:
    """Builds the dense method."""
    average = average_gradients(recipe.host_axis, recipe.device_axis)
    num_elements = dense_size(recipe.shapes)

    def network(params: PyTree, opt_state: PyTree) -> PyTree:
        del opt_state
        return params

    def masks(opt_state: PyTree) -> dict[str, jax.Array]:
        del opt_state
        return {}

    return Method(
        name="dense",
        params_placement="replicated",
        opt_placement="replicated",
        transform=optax.with_extra_args_support(optax.chain(average, recipe.inner)),
        sync_period=0,
        exchange=None,
        network=network,
        masks=masks,
        health=masks,
        step_formula=lambda mesh_shape: mesh_sum(num_elements, mesh_shape),
        exchange_formula=lambda mesh_shape, keep_counts, kind: [],
        payload_elements=lambda keep_counts: num_elements,
    )
