"""Clears dead channels from what an inner optimizer remembers per parameter.

`optax.tree_map_params` knows which leaves those are, but not through `optax.masked` and
`optax.partition`, nor where a moment is not shaped like its parameter. Paths tell it of
every optimizer that keeps its moments in trees like the parameters.
"""

import jax

from prunex_jax.channels import Layouts, Masks, mask_channels
from prunex_jax.trees import PyTree, map_with_path, shapes_by_path


def mask_moments(
    inner_state: PyTree, params: PyTree, layouts: Layouts, masks: Masks
) -> PyTree:
    """Zeroes the dead entries of every moment.

    A leaf of the state is a moment of a parameter if its path ends in the parameter's
    and their shapes agree; of several such parameters the one with the longest path.
    What has another shape, such as factored moments, has no entries to call dead and
    stays.

    Args:
      inner_state: State of any optax transformation.
      params: The parameters it was made for, or their shapes.
      layouts: From `channels.layouts_of` for the parameters.
      masks: bool[size] per group, True where kept.
    Returns:
      A state like `inner_state`.
    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import optax
      >>> from prunex_jax.channels import ChannelGroup, ChannelSlice, layouts_of
      >>> rows = ChannelSlice('a', 0, np.arange(3)[:, None])
      >>> layouts = layouts_of([ChannelGroup('g', 3, (rows,))], {'a': (3,)})
      >>> params = {'a': jnp.ones(3)}
      >>> state = optax.TraceState({'a': jnp.ones(3)})
      >>> masks = {'g': jnp.array([True, False, True])}
      >>> mask_moments(state, params, layouts, masks).trace['a'].tolist()
      [1.0, 0.0, 1.0]
    """
    shapes = shapes_by_path(params)
    longest_first = sorted(shapes, key=len, reverse=True)

    def mask(path: str, leaf: jax.Array) -> jax.Array:
        for name in longest_first:
            if path.endswith(name) and path.removesuffix(name)[-1:] in ("", "/"):
                if name not in layouts or leaf.shape != shapes[name]:
                    return leaf
                one = {name: layouts[name]}
                return mask_channels({name: leaf}, one, masks)[name]
        return leaf

    return map_with_path(mask, inner_state)
