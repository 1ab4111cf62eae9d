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
from prunex_jax.base.settings import Range, setting
from prunex_jax.base.trees import PyTree
from prunex_jax.comm import (
    FLOAT32,
    Wire,
    check_local,
    dense_size,
    flat_mean_over_mesh,
    key_of_slice,
    mean_over_devices,
    mean_over_mesh,
    mean_with_error,
    refuse_biased,
)
from prunex_jax.mesh import MeshAxes, vary
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
    # What remains until the next step of what a host has rounded away: it is sent then.
    # 0 keeps nothing, and rounds stochastically. None: 1 with int2, else 0.
    error_decay: float | None = setting(None, at_least=0, at_most=1)


class AverageState(NamedTuple):
    """State of `average_gradients`."""

    num_steps: jax.Array  # int32[], replicated: decides how narrow formats round
    error: PyTree | None = None  # per_host: what was rounded away; None keeps nothing


# Where the parts of the state live.
AVERAGE_PLACEMENTS = AverageState("replicated", "per_host")  # type: ignore[arg-type]


def average_gradients(
    axes: MeshAxes,
    *,
    levels: Levels = "hierarchical",
    wire: Wire = FLOAT32,
    error_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Averages updates over the mesh.

    Works inside anybody's `shard_map`. Narrow formats round stochastically, so the mean
    stays unbiased and no error is fed back; or, with an error decay, to nearest, and a
    host adds what that has lost to its next gradient.

    Args:
      axes: Mesh axes.
      levels: "hierarchical" sends each byte over the host axis once; "flat" is one sum
        over all devices.
      wire: How gradients cross hosts; see `comm.mean_over_hosts`.
      error_decay: What remains of an error until the next step, in [0, 1].
    Returns:
      A transformation for gradients of local losses.
    Raises:
      UserError: An argument that is not known or does not fit, or `update` got sums
        over the mesh; see `comm.check_local`.
    Collectives:
      As `comm.mean_over_mesh`, or `comm.flat_mean_over_mesh`, for all gradients. With
      an error decay, as `comm.mean_over_devices`, then as `comm.mean_with_error`.
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
    Range(at_least=0, at_most=1).check("error_decay", error_decay)
    if error_decay and levels == "flat":
        raise UserError(
            f"error_decay={error_decay} is for levels='hierarchical': where all "
            "devices are averaged at once, no host has an error of its own"
        )
    if not error_decay:
        refuse_biased(wire, "a mean of gradients without error_decay")
    mean = flat_mean_over_mesh if levels == "flat" else mean_over_mesh

    def init(params: PyTree) -> AverageState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        error = vary(zeros, (axes.host,)) if error_decay else None
        return AverageState(jnp.zeros((), jnp.int32), error)

    def update(
        grads: PyTree, state: AverageState, params: PyTree | None = None
    ) -> tuple[PyTree, AverageState]:
        del params
        check_local(grads, axes)
        num_steps = optax.safe_increment(state.num_steps)
        if state.error is not None:
            sent = jax.tree.map(
                lambda g, e: g + (error_decay * e).astype(g.dtype),
                mean_over_devices(grads, axes),
                state.error,
            )
            found, error = mean_with_error(sent, axes, wire)
            return found, AverageState(num_steps, error)
        key = jax.random.fold_in(jax.random.key(0), state.num_steps)
        key = key_of_slice(key, axes)
        return mean(grads, axes, wire, key), AverageState(num_steps)

    return optax.GradientTransformation(init, update)


def make_dense(recipe: Recipe) -> Method:
    """Builds the dense method."""
    config: DenseConfig = recipe.settings
    if recipe.slicing is not None and config.levels == "flat":
        raise UserError(
            "method.dense.levels='flat' is one sum over all devices, which leaves no "
            "slices; set topology.shard=none, or method.dense.levels=hierarchical"
        )
    num_elements, wire = dense_size(recipe.own_shapes), recipe.wire
    decay = config.error_decay
    if decay is None:
        decay = 1.0 if wire.format.is_biased else 0.0

    return gradient_method(
        recipe,
        average_gradients(
            recipe.axes, levels=config.levels, wire=wire, error_decay=decay
        ),
        placement=AVERAGE_PLACEMENTS._replace(error=recipe.placed("per_host")),
        payload_elements=num_elements,
    )


ROW = MethodRow(
    "dense",
    make_dense,
    DenseConfig,
    takes_slices=True,
    variants=(
        Variant("dense", "dense"),
        Variant("dense-flat", "dense, flat", {"method.dense.levels": "flat"}),
        Variant("dense-bfloat16", "dense, bfloat16", {"method.wire_dtype": "bfloat16"}),
        Variant("dense-int8", "dense, int8", {"method.wire_dtype": "int8"}),
        Variant("dense-int2", "dense, int2", {"method.wire_dtype": "int2"}),
    ),
)
