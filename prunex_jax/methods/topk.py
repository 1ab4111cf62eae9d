"""Top-K: averages the largest entries of gradients over hosts, with error feedback."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.settings import setting
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
from prunex_jax.methods.method import Method, MethodRow, Recipe, Variant


@dataclasses.dataclass(frozen=True)
class TopkConfig:
    """Largest entries with error feedback."""

    # Share of the entries that every host sends in every step.
    density: float = setting(0.01, above=0, at_most=1)
    # Of every 4096 entries the largest, with positions of 12 bits instead of 32.
    in_chunks: bool = False


class TopkState(NamedTuple):
    """What Top-K carries from step to step."""

    residual: PyTree  # float32, like the parameters, per_host: not sent yet


# Where the parts of the state live.
TOPK_PLACEMENTS = TopkState("per_host")


def topk(
    density: float = 0.01,
    *,
    in_chunks: bool = False,
    wire: Wire = FLOAT32,
    send_whole: Sequence[str] = (),
    axes: MeshAxes = ALONE,
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients over the mesh, the largest entries of every host only.

    Gradients are averaged over the devices of a host first. With g_i the mean gradient
    of host i, as one buffer for the whole tree:

        v_i = g_i + held back by host i
        sent_i = the k entries of v_i of largest magnitude
        direction = mean over hosts of sent_i
        held back by host i = v_i - sent_i

    Hosts choose for themselves, so positions travel with values, and all messages go to
    all hosts: (M - 1) * k * 8 bytes per host in float32, and 2.5 for 8 with int8 in
    chunks. What a narrow wire rounds away is held back, too, so v_i = sent_i + held
    back exactly, whatever the wire. With one host nothing is sent, and nothing held
    back.

    Args:
      density: Share of all entries that every host sends, in (0, 1].
      in_chunks: Whether the largest are those of every 4,096 entries, an even number
        and at least two: positions then have twelve bits, and choosing is cheaper.
      wire: Format of the values on the host axis; positions are int32, or in chunks
        twelve bits.
      send_whole: Leaves whose path contains one of these do not compete: they are sent
        whole, in float32, and nothing of them is held back.
      axes: Mesh axes of the caller; none is a single device.
    Returns:
      A transformation from local gradients to one direction, replicated. `update` takes
      a further static argument: `density=` instead of the usual one.
    Raises:
      UserError: A density outside (0, 1], or gradients that are sums
        over the mesh already; see `comm.check_local`.
    Collectives:
      One sum over `device_axis` of all gradients. Over `host_axis` as
      `comm.mean_of_entries` for k = density * all entries; in chunks as
      `comm.mean_of_largest`.
    Example:
      >>> tx = topk(0.25, axes=MeshAxes('host', None))
      >>> grads = jnp.array([[4., 1., 0., 2.], [1., 0., 0., 6.]])  # one row per host
      >>> state = tx.init(jnp.zeros(4))
      >>> def step(grad):
      ...     direction, after = tx.update(grad, state)
      ...     return direction, after.residual
      >>> direction, residual = jax.vmap(step, axis_name='host')(grads)
      >>> direction[0].tolist()
      [2.0, 0.0, 0.0, 3.0]
      >>> residual.tolist()
      [[0.0, 1.0, 0.0, 2.0], [1.0, 0.0, 0.0, 0.0]]

    References:
      Stich et al., Sparsified SGD with Memory, 2018, arXiv:1809.07599, algorithm 1.
      Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017,
      arXiv:1704.05021.
    Differs from:
      The papers: entries of all leaves compete in one buffer, where the latter chooses
      by layer or globally. Dense inside a host, sparse between hosts only. What is held
      back is in the scale of gradients, not of updates, so that any optimizer follows.
    """
    sparsifier = Sparsifier(density, wire, in_chunks, tuple(send_whole), axes)

    def init(params: PyTree) -> TopkState:
        return TopkState(zeros_like(params))

    def update(
        grads: PyTree,
        state: TopkState,
        params: PyTree | None = None,
        *,
        density: float | None = None,
        **extra: Any,
    ) -> tuple[PyTree, TopkState]:
        del params, extra
        local = mean_in_host(grads, axes)
        total = jax.tree.map(jnp.add, local, state.residual)
        sent = sparsifier.send(total, density)
        return optax.tree.cast_like(sent.mean, grads), TopkState(sent.held_back)

    return optax.GradientTransformationExtraArgs(init, update)


def make_topk(recipe: Recipe) -> Method:
    """Builds the Top-K method."""
    config: TopkConfig = recipe.settings
    sizes = EntrySizes(recipe, config.in_chunks)
    count = sizes.count(config.density)
    return gradient_method(
        recipe,
        topk(
            config.density,
            in_chunks=config.in_chunks,
            wire=recipe.wire,
            send_whole=recipe.config.send_whole,
            axes=recipe.axes,
        ),
        placement=TopkState(recipe.placed("per_host")),
        payload_elements=max(count, sizes.num_whole),
        position_bytes=sizes.position_bytes(config.density),
    )


ROW = MethodRow(
    "topk",
    make_topk,
    TopkConfig,
    takes_slices=True,
    variants=(
        Variant("topk", "Top-K, 1 %"),
        Variant(
            "topk-chunks",
            "Top-K, 40 of 4,096 numbers, int8",
            {"method.wire_dtype": "int8", "method.topk.in_chunks": True},
        ),
    ),
)
