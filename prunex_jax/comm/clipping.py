"""Keeps one host from outweighing the others in a mean over hosts.

Sits on `comm.collectives`; `comm.averaging` and `comm.chunks` average what comes out.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import collectives
from prunex_jax.comm.slices import sum_over_slices
from prunex_jax.mesh import MeshAxes, axis_size, position

# none: hosts weigh as much as what they send is long. median: at most as the host in
# the middle.
HostClip = Literal["none", "median"]


def clip_to_median(tree: PyTree, axes: MeshAxes) -> PyTree:
    """Scales the tree of a host down to the median of the hosts' norms.

        f_i = min(1, median_j ||x_j|| / ||x_i||)

    The mean of what comes out is that of f_i x_i. What is cut off, (1 - f_i) x_i, is
    for the caller to keep or to lose.

    Args:
      tree: Floating leaves, per_host.
      axes: Mesh axes; without a host axis or other hosts, the tree stays as it is.
    Returns:
      f_i x_i, per_host. The norm is that of all leaves together. Of an even number of
      hosts, the median is the lower of the two in the middle: of two, the longer is cut
      to the shorter. Nothing is cut by a median of zero, nor where a norm is not
      finite, so that what is not finite stays so.
    Collectives:
      As `gather_over_hosts` for one float32; of slices, before that as
      `sum_over_slices` for one.
    Example:
      >>> trees = {'x': jnp.array([[3.0, 4.0], [30.0, 40.0], [0.0, 6.0], [0.0, 1.0]])}
      >>> clip = lambda tree: clip_to_median(tree, MeshAxes('host', None))
      >>> jax.vmap(clip, axis_name='host')(trees)['x'].tolist()
      [[3.0, 4.0], [3.0, 4.0], [0.0, 5.0], [0.0, 1.0]]

    References:
      The public code of Sarfi et al., SparseLoCo, 2025, arXiv:2508.15706.
    Differs from:
      That code, which takes norms of compressed messages, of every parameter apart, and
      clips where they arrive. There the sender knows nothing of it, and keeps what it
      has not sent at its full length.
    """
    if axes.host is None or axis_size(axes.host) == 1:
        return tree
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)
    ]
    total = sum_over_slices(jnp.asarray(sum(squares), jnp.float32), axes)
    norm = jnp.sqrt(total)
    norms = collectives.gather_over_hosts(norm[None], axes).ravel()
    median = jnp.sort(norms)[(norms.size - 1) // 2]
    own = norms[position(axes.host)]
    is_cut = (own > median) & (median > 0) & jnp.isfinite(own)
    factor = jnp.where(is_cut, median / own, 1.0)
    return jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), tree)
