"""Dense data parallelism: gradients averaged over the whole mesh in every step.

The fair baseline is hierarchical, so that every byte crosses the host link once; flat
is what programs do that know no hosts.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.comm import (
    FLOAT32,
    Wire,
    check_local,
    dense_size,
    flat_mean_over_mesh,
    mean_over_mesh,
)
from prunex_jax.comm.formulas import flat_sum, mesh_sum
from prunex_jax.mesh import MeshAxes
from prunex_jax.methods.gradients import gradient_method
from prunex_jax.methods.method import Method, MethodRow, Recipe, Variant

# hierarchical: inside every host, then over hosts. flat: over all devices at once.
Levels = Literal["hierarchical", "flat"]


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """Gradients as they are."""

    # hierarchical (inside every host, then over hosts, each byte once) | flat (all
    # devices at once).
    levels: Levels = "hierarchical"


class AverageState(NamedTuple):
    """State of `average_gradients`."""

    num_steps: jax.Array  # int32[], replicated: decides how narrow formats round


def average_gradients(
    axes: MeshAxes,
    *,
    levels: Levels = "hierarchical",
    wire: Wire = FLOAT32,
) -> optax.GradientTransformation:
    """Averages updates over the mesh.

    Works inside anybody's `shard_map`. Narrow formats round stochastically, so the mean
    stays unbiased and no error is fed back.

    Args:
      axes: Mesh axes.
      levels: "hierarchical" sends each byte over the host axis once; "flat" is one sum
        over all devices.
      wire: How gradients cross hosts; see `comm.mean_over_hosts`.
    Returns:
      A transformation for gradients of local losses.
    Raises:
      UserError: An argument that is not known, or `update` got sums over the mesh; see
        `comm.check_local`.
    Collectives:
      As `comm.mean_over_mesh`, or `comm.flat_mean_over_mesh`, for all gradients.
    Example:
      >>> from prunex_jax.mesh import ALONE
      >>> tx = optax.chain(average_gradients(ALONE), optax.sgd(0.5))
      >>> params = {'w': jnp.ones(2)}
      >>> updates, state = tx.update({'w': jnp.ones(2)}, tx.init(params))
      >>> updates['w'].tolist(), int(state[0].num_steps)
      ([-0.5, -0.5], 1)
    """
    if levels not in ("hierarchical", "flat"):
        raise UserError(f"levels={levels!r} must be hierarchical or flat")
    mean = flat_mean_over_mesh if levels == "flat" else mean_over_mesh

    def init(params: PyTree) -> AverageState:
        del params
        return AverageState(jnp.zeros((), jnp.int32))

    def update(
        grads: PyTree, state: AverageState, params: PyTree | None = None
    ) -> tuple[PyTree, AverageState]:
        del params
        check_local(grads, axes)
        key = jax.random.fold_in(jax.random.key(0), state.num_steps)
        return mean(grads, axes, wire, key), AverageState(
            optax.safe_increment(state.num_steps)
        )

    return optax.GradientTransformation(init, update)


def make_dense(recipe: Recipe) -> Method:
    """Builds the dense method."""
    config: DenseConfig = recipe.settings
    num_elements, wire = dense_size(recipe.shapes), recipe.wire
    formula = flat_sum if config.levels == "flat" else mesh_sum
    return gradient_method(
        recipe,
        average_gradients(recipe.axes, levels=config.levels, wire=wire),
        placement="replicated",
        formula=lambda mesh_shape: formula(num_elements, mesh_shape, wire),
        payload_elements=num_elements,
    )


ROW = MethodRow(
    "dense",
    make_dense,
    DenseConfig,
    variants=(
        Variant("dense", "dense"),
        Variant("dense-flat", "dense, flat", {"method.dense.levels": "flat"}),
        Variant("dense-bfloat16", "dense, bfloat16", {"method.wire_dtype": "bfloat16"}),
        Variant("dense-int8", "dense, int8", {"method.wire_dtype": "int8"}),
    ),
)
