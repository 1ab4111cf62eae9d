"""Clears dead channels from what an inner optimizer remembers per parameter.

`optax.tree_map_params` knows which leaves those are, but not through `optax.masked` and
`optax.partition`, nor where a moment is not shaped like its parameter. Paths tell it of
every optimizer that keeps its moments in trees like the parameters.
"""

from collections.abc import Callable

import jax

from prunex_jax.base.trees import PyTree, map_with_path, shapes_by_path
from prunex_jax.channels import Layouts, Masks, mask_channels


def map_moments(
    fn: Callable[[str, jax.Array], jax.Array], inner_state: PyTree, params: PyTree
) -> PyTree:
    """Maps `fn(path of the parameter, moment)` over the moments of an inner optimizer.

    A leaf of the state is a moment of a parameter if its path ends in the parameter's
    and their shapes agree; of several such parameters the one with the longest path.
    What has another shape, such as factored moments, stays.
    """
    shapes = shapes_by_path(params)
    longest_first = sorted(shapes, key=len, reverse=True)

    def of_leaf(path: str, leaf: jax.Array) -> jax.Array:
        for name in longest_first:
            if path.endswith(name) and path.removesuffix(name)[-1:] in ("", "/"):
                return fn(name, leaf) if leaf.shape == shapes[name] else leaf
        return leaf

    return map_with_path(of_leaf, inner_state)


def mask_moments(
    inner_state: PyTree, params: PyTree, layouts: Layouts, masks: Masks
) -> PyTree:
    """Zeroes the dead entries of every moment; see `map_moments`."""

    def mask(name: str, leaf: jax.Array) -> jax.Array:
        return mask_channels({name: leaf}, layouts, masks)[name]

    return map_moments(mask, inner_state, params)
