"""PacTrain: gradients share the sparsity of the weights, and travel packed.

The network is pruned before training. From then on the gradient of a dead weight is set
to zero, all hosts know which weights those are, and an ordinary all-reduce carries the
others, without positions. What is kept is chosen elsewhere: by `optim.grasp`, by size,
or by the user; `optim.packing` knows how it is packed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.comm import (
    axis_size,
    check_local,
    check_wire_dtype,
    gather_over_hosts,
    mean_over_devices,
    mean_over_mesh,
    min_over_mesh,
    position,
    sum_over_hosts,
)
from prunex_jax.methods.grasp import magnitude_pattern
from prunex_jax.methods.packing import Packing, Pattern

# Sums of that many ternary values fit the type they travel in.
_MAX_TERNARY_HOSTS = 127
# Two odd factors and offsets with bits all over, one pair for each word of a print.
_SALTS = np.array([(0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F)], np.uint32)


class PactrainState(NamedTuple):
    """State of `pactrain`; everything is replicated."""

    num_steps: jax.Array  # int32[]
    pattern: PyTree  # what is kept, as the packing describes it
    age: jax.Array  # int32[]: steps in a row in which all hosts had the same pattern


def pactrain(
    packing: Packing,
    *,
    is_ternary: bool = False,
    wire_dtype: str = "float32",
    bucket_bytes: int = 0,
    host_axis: str | None = None,
    device_axis: str | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Averages the gradients of living weights over the mesh, packed into one buffer.

    `init` reads the pattern off the parameters: what is largest is kept. Prune them
    before, with `grasp.grasp_pattern` or as you like, and `packing.mask`; of masked
    parameters it finds the mask again. Dead gradients are exact zeros, so that weight
    decay and momentum behind it leave dead weights at zero, if they start there.

    As `update(..., packed=True)`, which is the default and needs hosts that agree, what
    is kept is taken out, averaged and put back. As `packed=False` it tracks masks: it
    masks whole gradients, averages those, and compares the patterns of all hosts; `age`
    counts the steps for which they have been the same, and starts again when they are
    not. Which of the two runs is static, because it decides what is sent; `is_stable`
    says when the second has done its work.

    Args:
      packing: What lives and dies together, and how much of it is kept.
      is_ternary: Whether packed values travel as -1, 0 or 1 times the largest magnitude
        of all hosts, one byte each, drawn so that the mean is unbiased.
      wire_dtype: Format of values on the host axis otherwise; see
        `comm.mean_over_hosts`.
      bucket_bytes: As there.
      host_axis: Mesh axis of the hosts; None is a single host.
      device_axis: Mesh axis of the devices of a host; None is a single device.
      seed: Of the draws.
    Returns:
      A transformation of local gradients into one direction, replicated.
    Raises:
      UserError: No such format; ternary values in another format, or of more hosts than
        a byte can count.
    Collectives:
      packed: as `comm.mean_over_mesh` for `packing.num_kept` values; if ternary, as
      `comm.mean_over_devices` for them, `comm.min_over_mesh` for the scale, and an int8
      sum as `comm.sum_over_hosts`. Otherwise as `comm.mean_over_mesh` for all values,
      and as `comm.gather_over_hosts` for two numbers.
    Example:
      >>> from prunex_jax.methods.packing import WeightPacking
      >>> params = {'kernel': jnp.array([[3.0, 0.0, 1.0, 0.0]])}
      >>> tx = pactrain(WeightPacking(0.5, {'kernel': (1, 4)}))
      >>> direction, state = tx.update({'kernel': jnp.ones((1, 4))}, tx.init(params))
      >>> direction['kernel'].tolist(), state.pattern.tolist()
      ([[1.0, 0.0, 1.0, 0.0]], [0, 2])

    References:
      Wang et al., PacTrain: Pruning and Adaptive Sparse Gradient Compression for
      Efficient Collective Communication in Distributed Deep Learning, 2025,
      arXiv:2505.18563.
      Wen et al., TernGrad, 2017, arXiv:1705.07878 (ternary values).
    Differs from:
      The paper, as far as it is public: the pattern of weights is tracked, not that of
      gradients, which flickers where living weights have no gradient; hosts compare
      patterns only until they are stable, since nothing changes them after that.
      Whole channels may be pruned, so that the network becomes small.
    """
    check_wire_dtype(wire_dtype)
    if is_ternary and wire_dtype != "float32":
        raise UserError(
            f"wire_dtype={wire_dtype!r}: ternary values travel as single bytes already;"
            " choose float32, or no ternary values"
        )
    axes = host_axis, device_axis

    def init(params: PyTree) -> PactrainState:
        nothing = jnp.zeros((), jnp.int32)
        return PactrainState(nothing, magnitude_pattern(params, packing), nothing)

    def average(tree: PyTree, key: jax.Array) -> PyTree:
        return mean_over_mesh(tree, *axes, wire_dtype, key, bucket_bytes)

    def update(
        grads: PyTree,
        state: PactrainState,
        params: PyTree | None = None,
        *,
        packed: bool = True,
        **extra: Any,
    ) -> tuple[PyTree, PactrainState]:
        del params, extra
        check_local(grads, axes)
        key = jax.random.fold_in(jax.random.key(seed), state.num_steps)
        state = state._replace(num_steps=state.num_steps + 1)
        pattern = state.pattern
        if not packed:
            masked = packing.mask(grads, pattern)
            age = jnp.where(hosts_agree(pattern, *axes), state.age + 1, 0)
            return average(masked, key), state._replace(age=age)
        kept = packing.pack(grads, pattern)
        if is_ternary and axis_size(host_axis) > 1:
            mean = _ternary_mean(kept, key, host_axis, device_axis)
        else:
            mean = average(kept, key)
        return packing.unpack(mean, pattern, grads), state

    return optax.GradientTransformationExtraArgs(init, update)


def is_stable(state: PactrainState, stable_steps: int) -> jax.Array:
    """Whether packed steps may begin: bool[].

    Args:
      state: Of `pactrain`.
      stable_steps: Steps for which all hosts must have had the same pattern.
    """
    return state.age >= stable_steps


def hosts_agree(
    pattern: Pattern, host_axis: str | None, device_axis: str | None
) -> jax.Array:
    """Whether all hosts have the same pattern.

    Args:
      pattern: Integers, said to be the same everywhere.
      host_axis: Mesh axis of the hosts, or None.
      device_axis: Mesh axis of the devices of a host, or None.
    Returns:
      bool[], the same everywhere. Two patterns that differ pass as equal with a
      probability of about 2^-64.
    Collectives:
      As `comm.gather_over_hosts` for two uint32.
    """
    if axis_size(host_axis) == 1:
        return jnp.ones((), bool)
    rows = gather_over_hosts(_fingerprint(pattern), host_axis, device_axis)
    return jnp.all(rows == rows[:1])


def _fingerprint(pattern: Pattern) -> jax.Array:
    """uint32[2] that says which integers are where, as a sum of scrambled pairs."""
    leaves = [leaf.ravel().astype(jnp.uint32) for leaf in jax.tree.leaves(pattern)]
    values = jnp.concatenate([*leaves, jnp.zeros(1, jnp.uint32)])
    places = jnp.arange(values.size, dtype=jnp.uint32)
    words = [
        jnp.sum(_scramble(values * a + _scramble(places + b)), dtype=jnp.uint32)
        for a, b in _SALTS
    ]
    return jnp.stack(words)


def _scramble(x: jax.Array) -> jax.Array:
    """The last steps of MurmurHash3: every bit depends on every other."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _ternary_mean(
    kept: PyTree, key: jax.Array, host_axis: str | None, device_axis: str | None
) -> PyTree:
    """Unbiased mean of which every host sends -1, 0 or 1 per entry."""
    num_hosts = axis_size(host_axis)
    if num_hosts > _MAX_TERNARY_HOSTS:
        raise UserError(
            f"ternary values of {num_hosts} hosts do not add up in a byte; the most is "
            f"{_MAX_TERNARY_HOSTS}"
        )
    buffer, split = ravel_pytree(kept)
    own = mean_over_devices(buffer.astype(jnp.float32), device_axis)
    scale = -min_over_mesh(-jnp.max(jnp.abs(own)), host_axis, device_axis)
    # Another draw on every host, and the same on its devices.
    own_key = jax.random.fold_in(key, position(host_axis))
    chance = jnp.abs(own) / jnp.where(scale > 0.0, scale, 1.0)
    is_drawn = jax.random.uniform(own_key, own.shape) < chance
    ternary = jnp.where(is_drawn, jnp.sign(own), 0.0).astype(jnp.int8)
    total = sum_over_hosts(ternary, host_axis, device_axis)
    mean = total.astype(jnp.float32) * (scale / num_hosts)
    return split(mean.astype(buffer.dtype))
