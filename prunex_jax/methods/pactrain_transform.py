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

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import (
    FLOAT32,
    TERNARY,
    Wire,
    check_local,
    gather_over_hosts,
    mean_over_mesh,
)
from prunex_jax.mesh import ALONE, MeshAxes, axis_size
from prunex_jax.methods.grasp import magnitude_pattern
from prunex_jax.methods.packing import Packing, Pattern

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
    wire: Wire = FLOAT32,
    axes: MeshAxes = ALONE,
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
      wire: How packed values cross hosts. Those of "ternary" are -1, 0 or 1 times the
        largest magnitude of all hosts, one byte each, drawn so that the mean is
        unbiased; what is sent before it is packed then travels in float32.
      axes: Mesh axes of the caller; none is a single device.
      seed: Of the draws.
    Returns:
      A transformation of local gradients into one direction, replicated.
    Raises:
      UserError: Ternary values of more hosts than a byte can count.
    Collectives:
      packed: as `comm.mean_over_mesh` for `packing.num_kept` values. Otherwise as
      `comm.mean_over_mesh` for all values, and as `comm.gather_over_hosts` for two
      numbers.
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
    whole = wire.in_float32() if wire.dtype == TERNARY else wire

    def init(params: PyTree) -> PactrainState:
        nothing = jnp.zeros((), jnp.int32)
        return PactrainState(nothing, magnitude_pattern(params, packing), nothing)

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
            age = jnp.where(hosts_agree(pattern, axes), state.age + 1, 0)
            return mean_over_mesh(masked, axes, whole, key), state._replace(age=age)
        mean = mean_over_mesh(packing.pack(grads, pattern), axes, wire, key)
        return packing.unpack(mean, pattern, grads), state

    return optax.GradientTransformationExtraArgs(init, update)


def is_stable(state: PactrainState, stable_steps: int) -> jax.Array:
    """Whether packed steps may begin: bool[].

    Args:
      state: Of `pactrain`.
      stable_steps: Steps for which all hosts must have had the same pattern.
    """
    return state.age >= stable_steps


def hosts_agree(pattern: Pattern, axes: MeshAxes) -> jax.Array:
    """Whether all hosts have the same pattern.

    Args:
      pattern: Integers, said to be the same everywhere.
      axes: Mesh axes.
    Returns:
      bool[], the same everywhere. Two patterns that differ pass as equal with a
      probability of about 2^-64.
    Collectives:
      As `comm.gather_over_hosts` for two uint32.
    """
    if axis_size(axes.host) == 1:
        return jnp.ones((), bool)
    rows = gather_over_hosts(_fingerprint(pattern), axes)
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
