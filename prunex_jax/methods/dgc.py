"""Deep gradient compression: momentum before the largest entries are chosen."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.settings import Range, setting
from prunex_jax.base.trees import PyTree
from prunex_jax.comm import FLOAT32, Wire
from prunex_jax.mesh import ALONE, MeshAxes
from prunex_jax.methods.entries import (
    EntrySizes,
    Sparsifier,
    mean_in_host,
    zeros_like,
)
from prunex_jax.methods.gradients import gradient_method
from prunex_jax.methods.method import (
    Method,
    MethodRow,
    Recipe,
    StepOptions,
    Variant,
)
from prunex_jax.methods.momentum import (
    add_momentum,
    after_momentum,
    clip_of_host,
    momentum_of,
)


@dataclasses.dataclass(frozen=True)
class DgcConfig:
    """Deep gradient compression."""

    # Share of the entries that every host sends, after the warm-up.
    density: float = setting(0.001, above=0, at_most=1)
    # Share of the run in which the density falls to that.
    warmup_share: float = setting(0.05, at_least=0, at_most=1)
    # Of every 4096 entries the largest, with positions of 12 bits instead of 32.
    in_chunks: bool = False
    # Density at which the warm-up starts; each of its stages has a quarter of it.
    warmup_density: float = setting(0.25, above=0, at_most=1)


class DgcState(NamedTuple):
    """What DGC carries from step to step."""

    velocity: PyTree  # float32, like the parameters, per_host: momentum
    residual: PyTree  # float32, like the parameters, per_host: not sent yet


# Where the parts of the state live.
DGC_PLACEMENTS = DgcState("per_host", "per_host")


def dgc(
    density: float = 0.001,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    clip_norm: float = 0.0,
    in_chunks: bool = False,
    wire: Wire = FLOAT32,
    send_whole: Sequence[str] = (),
    axes: MeshAxes = ALONE,
) -> optax.GradientTransformationExtraArgs:
    """Averages momentum over the mesh, the largest entries of every host only.

    Gradients are averaged over the devices of a host first. With g_i the mean gradient
    of host i of M, clipped to a norm of clip_norm * sqrt(M), as one buffer for the
    whole tree:

        u_i = momentum u_i + g_i                            momentum correction
        v_i = v_i + u_i          (nesterov: v_i + g_i + momentum u_i)
        sent_i = the k entries of v_i of largest magnitude
        direction = mean over hosts of sent_i
        v_i = v_i - sent_i
        u_i = 0 where host i has sent                       momentum factor masking

    What a narrow wire rounds away stays in v_i. Where nothing is held back, because the
    density is 1 or there is one host only, no momentum is stale and none is masked: the
    direction is that of momentum SGD.

    Args:
      density: Share of all entries that every host sends, in (0, 1].
      momentum: In [0, 1); the optimizer behind must have none.
      nesterov: As in `optax.sgd`.
      clip_norm: Largest norm of the mean gradient of all hosts, if those of the hosts
        were independent; 0 means no clipping.
      in_chunks: As in `topk`.
      wire: As in `topk`.
      send_whole: Leaves whose path contains one of these do not compete: they are sent
        whole, in float32, and nothing of them is held back.
      axes: Mesh axes of the caller; none is a single device.
    Returns:
      A transformation from local gradients to one direction, replicated. `update` takes
      a further static argument: `density=` instead of the usual one, for a
      warm-up; see `warmup_density`.
    Raises:
      UserError: A density outside (0, 1], a momentum outside [0, 1), a negative norm,
        or gradients that are sums over the mesh already.
    Collectives:
      As `topk`, and of slices as `comm.sum_over_slices` for one number if gradients are
      clipped.
    Example:
      >>> import jax.numpy as jnp
      >>> tx = dgc(0.5, momentum=0.5)  # one host: momentum SGD
      >>> state = tx.init(jnp.zeros(2))
      >>> for _ in range(2):
      ...     direction, state = tx.update(jnp.array([2., 4.]), state)
      >>> direction.tolist(), state.residual.tolist()
      ([3.0, 6.0], [0.0, 0.0])

    References:
      Lin et al., Deep Gradient Compression, 2018, arXiv:1712.01887, algorithm 4.
    Differs from:
      The paper: entries of all leaves compete in one buffer, and the choice is exact,
      where the paper takes a threshold per layer from a sample. Gradients here are
      means per host where the paper has its contributions g_i / M to a sum, so its
      factor M^(-1/2) of the norm is sqrt(M). Nesterov momentum and weight decay (see
      `momentum`) are those of the authors' later code; that sends biases and the scales
      of norms whole, here they are entries as all others.
    """
    Range(at_least=0, below=1).check("momentum", momentum)
    Range(at_least=0).check("clip_norm", clip_norm)
    sparsifier = Sparsifier(density, wire, in_chunks, tuple(send_whole), axes)

    def init(params: PyTree) -> DgcState:
        return DgcState(zeros_like(params), zeros_like(params))

    def update(
        grads: PyTree,
        state: DgcState,
        params: PyTree | None = None,
        *,
        density: float | None = None,
        **extra: Any,
    ) -> tuple[PyTree, DgcState]:
        del params, extra
        local = clip_of_host(mean_in_host(grads, axes), clip_norm, axes)
        velocity, moved = add_momentum(local, state.velocity, momentum, nesterov)
        sent = sparsifier.send(jax.tree.map(jnp.add, state.residual, moved), density)
        if sent.is_sent is not None:
            velocity = jax.tree.map(
                lambda u, is_sent: jnp.where(is_sent, 0.0, u), velocity, sent.is_sent
            )
        after = DgcState(velocity, sent.held_back)
        return optax.tree.cast_like(sent.mean, grads), after

    return optax.GradientTransformationExtraArgs(init, update)


def warmup_density(
    step: int, num_steps: int, density: float, first: float = 0.25
) -> float:
    """Density of a step: the first, a quarter of it, ..., in equal shares of a warm-up.

    Example:
      >>> [warmup_density(step, 8, 0.001) for step in (0, 2, 4, 6, 8)]
      [0.25, 0.0625, 0.015625, 0.00390625, 0.001]
      >>> [warmup_density(step, 8, 0.001, first=0.01) for step in (0, 4, 8)]
      [0.01, 0.0025, 0.001]
    """
    num_stages = 0
    while first * 4.0**-num_stages > density:
        num_stages += 1
    if step >= num_steps or not num_stages:
        return density
    return first * 4.0 ** -(step * num_stages // num_steps)


def make_dgc(recipe: Recipe) -> Method:
    """Builds the DGC method, which needs SGD inside.

    It takes over clipping and momentum of the inner optimizer, which keeps its weight
    decay and learning rate.
    """
    config: DgcConfig = recipe.settings
    sizes = EntrySizes(recipe, config.in_chunks)
    count = sizes.count(config.density)
    warmup_steps = round(config.warmup_share * recipe.total_steps)

    def step_options(step: int) -> dict[str, Any]:
        density = warmup_density(
            step, warmup_steps, config.density, config.warmup_density
        )
        return {} if density == config.density else {"density": density}

    return gradient_method(
        recipe,
        dgc(
            config.density,
            **momentum_of(recipe),
            in_chunks=config.in_chunks,
            wire=recipe.wire,
            send_whole=recipe.config.send_whole,
            axes=recipe.axes,
        ),
        placement=DgcState(recipe.placed("per_host"), recipe.placed("per_host")),
        payload_elements=max(count, sizes.num_whole),
        position_bytes=sizes.position_bytes(config.density),
        inner=after_momentum(recipe.inner, recipe.learning_rate),
        step_options=StepOptions(step_options),
    )


ROW = MethodRow(
    "dgc",
    make_dgc,
    DgcConfig,
    takes_slices=True,
    variants=(
        Variant("dgc", "DGC, 0.1 %"),
        Variant(
            "dgc-chunks",
            "DGC, 4 of 4,096 numbers, int8, warm-up from 1.6 %",
            {
                "method.wire_dtype": "int8",
                "method.dgc.in_chunks": True,
                "method.dgc.warmup_density": 1 / 64,
            },
        ),
    ),
)
