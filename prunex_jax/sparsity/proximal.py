"""Proximal maps of penalties that kill whole channels.

A proximal map trades the distance to a given tree against a penalty; the channel norms
in the penalties are the square roots of the package's scores. It knows no optimizer.
"""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree, flatten_by_path, map_with_path
from prunex_jax.channels.groups import AxisLayout, Layouts
from prunex_jax.channels.slicing import mask_channels, sum_squares_by_channel
from prunex_jax.sparsity.scores import channel_scores, entries_per_channel, group_sizes

Strength = float | jax.Array
# Flat path -> array, one for each place at which an entry can carry a channel.
Copies = list[dict[str, jax.Array]]
# A dual point, and which channels reached the border of their ball.
Stepped = tuple[Copies, dict[str, jax.Array]]
DualStep = Callable[[Copies | None], Stepped]


def root_entry_weights(tree: PyTree, layouts: Layouts) -> dict[str, float]:
    """Weighs each group by the square root of the entries of one channel.

    The usual weight of the group lasso: without it, channels with many entries have
    large norms and are spared for their size alone.

    Args:
      tree: Any tree whose leaves have a shape.
      layouts: From `channels.groups.layouts_of`.
    Returns:
      Weight by group name, for `prox_group_l2`.
    """
    entries = entries_per_channel(tree, layouts)
    return {name: math.sqrt(count) for name, count in entries.items()}


def _thresholds(
    layouts: Layouts, strength: Strength, weights: Mapping[str, float] | None
) -> dict[str, Strength]:
    """Strength times weight, by group."""
    if isinstance(strength, int | float) and not strength >= 0:
        raise UserError(
            f"strength {strength:g} of a proximal map must not be negative; 0 changes "
            "nothing"
        )
    names = group_sizes(layouts)
    if weights is None:
        return dict.fromkeys(names, strength)
    missing = sorted(set(names) - set(weights))
    if missing:
        raise UserError(
            f"weights has no entry for channel group {missing[0]!r}; give one weight "
            "per group"
        )
    return {name: strength * weights[name] for name in names}


def prox_group_l0(
    tree: PyTree,
    layouts: Layouts,
    strength: Strength,
    weights: Mapping[str, float] | None = None,
) -> PyTree:
    """Kills every channel that is not worth its price (hard threshold).

    The problem:

        minimise over x   1/2 ||x - tree||^2 + strength * sum over g of
                          weights[g] * (number of channels of group g alive)

    Solved exactly when no entry carries two channels: channel c stays unchanged when
    ||tree_c||^2 > 2 * strength * weights[g] and becomes zero otherwise. With shared
    entries each channel is judged by its own norm, as in `project_channels`; the value
    reached is then at most m times the smallest, m the most channels one entry carries.

    Use it where the price of a channel is known and the number kept may vary; as that
    number is not static, it cannot feed compact arrays. Jit-able.

    Args:
      tree: Any tree of floating leaves. Leaves in no group are returned as they are.
      layouts: From `channels.groups.layouts_of`.
      strength: Price of a channel in units of half a squared norm, not negative.
      weights: Relative price per group, None for 1; `entries_per_channel` charges per
        entry.
    Returns:
      A tree like `tree` with exact zeros on the removed channels. A channel whose norm
      is NaN is removed.
    Raises:
      UserError: A negative strength, or a group without a weight.
    """
    thresholds = _thresholds(layouts, strength, weights)
    scores = channel_scores(tree, layouts)
    masks = {name: scores[name] > 2 * thresholds[name] for name in scores}
    return mask_channels(tree, layouts, masks)


def prox_group_l2(
    tree: PyTree,
    layouts: Layouts,
    strength: Strength,
    weights: Mapping[str, float] | None = None,
    num_iterations: int = 100,
) -> PyTree:
    """Shrinks every channel towards zero and kills the weak ones (group lasso).

    The problem, convex, with one solution:

        minimise over x   1/2 ||x - tree||^2 + strength * sum over g of
                          weights[g] * sum over channels c of g of ||x_c||

    Without shared entries (`scores.shared_paths` is empty) the solution is the group
    soft threshold, computed in closed form:

        x_c = max(0, 1 - strength * weights[g] / ||tree_c||) * tree_c

    With shared entries there is no closed form, and multiplying the shrink factors of
    an entry's channels is the proximal map of nothing. The dual is solved instead: one
    vector d_c with ||d_c|| <= strength * weights[g] per channel, x = tree - sum of d_c,
    by accelerated projected gradient steps. It converges to the solution of the problem
    above; on random kernels chained in a ring, 20 iterations left a relative error of
    1e-3 or less and 100 iterations one of 1e-6. A channel whose d_c is inside its ball
    is dead, and is set to exact zeros.

    Non-expansive, like every proximal map of a convex function. Jit-able.

    Args:
      tree: Any tree of floating leaves, finite. Leaves in no group are returned as they
        are.
      layouts: From `channels.groups.layouts_of`.
      strength: How far the norm of a channel shrinks, not negative.
      weights: Factor on the strength per group, None for 1; see `root_entry_weights`.
      num_iterations: Static number of dual steps where entries are shared; unused
        where they are not.
    Returns:
      A tree like `tree`.
    Raises:
      UserError: A negative strength, a group without a weight, no iterations.
    References:
      Yuan and Lin, Model selection and estimation in regression with grouped variables,
      2006. Jenatton, Mairal, Obozinski and Bach, Proximal methods for hierarchical
      sparse coding, 2011 (the dual). Beck and Teboulle, A fast iterative
      shrinkage-thresholding algorithm, 2009 (the acceleration).
    """
    if num_iterations < 1:
        raise UserError(f"num_iterations {num_iterations} must be at least 1")
    radii = _thresholds(layouts, strength, weights)
    layers = _layers(layouts)
    start = {
        path: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        for path, leaf in flatten_by_path(tree).items()
        if path in layouts
    }

    def step(dual: Copies | None) -> Stepped:
        primal = start if dual is None else _subtract(start, dual)
        moved = [
            {
                path: primal[path] / len(layers)
                + (0 if dual is None else dual[i][path])
                for path in layer
                if path in primal
            }
            for i, layer in enumerate(layers)
        ]
        return _project_balls(moved, layers, radii)

    dual, is_alive = step(None)
    if len(layers) > 1:
        dual, is_alive = _accelerate(step, dual, num_iterations)
    solution = mask_channels(_subtract(start, dual), layouts, is_alive)
    return map_with_path(
        lambda path, leaf: solution.get(path, leaf).astype(leaf.dtype), tree
    )


def _layers(layouts: Layouts) -> list[dict[str, dict[int, AxisLayout]]]:
    """Splits layouts so that each part touches at most one axis of a leaf."""
    depth = max((len(by_axis) for by_axis in layouts.values()), default=0)
    return [
        {
            path: dict([list(by_axis.items())[i]])
            for path, by_axis in layouts.items()
            if i < len(by_axis)
        }
        for i in range(depth)
    ]


def _subtract(start: dict[str, jax.Array], dual: Copies) -> dict[str, jax.Array]:
    """The primal point of a dual one."""
    primal = dict(start)
    for part in dual:
        for path, copy in part.items():
            primal[path] = primal[path] - copy
    return primal


def _project_balls(
    moved: Copies, layers: list, radii: Mapping[str, Strength]
) -> Stepped:
    """Puts the dual vector of every channel back into its ball; tells which left it."""
    squares: dict[str, jax.Array] = {}
    for part, layer in zip(moved, layers, strict=True):
        for name, square in sum_squares_by_channel(part, layer).items():
            squares[name] = squares[name] + square if name in squares else square
    norms = {name: jnp.sqrt(square) for name, square in squares.items()}
    is_outside = {name: norm > radii[name] for name, norm in norms.items()}
    factors = {
        name: jnp.where(is_outside[name], radii[name] / jnp.where(norm > 0, norm, 1), 1)
        for name, norm in norms.items()
    }
    dual = [
        _scale_channels(part, layer, factors)
        for part, layer in zip(moved, layers, strict=True)
    ]
    return dual, is_outside


def _scale_channels(
    part: dict[str, jax.Array], layer: Layouts, factors: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Multiplies every channel by its factor, and what is in no channel by zero."""
    scaled = {}
    for path, copy in part.items():
        ((axis, layout),) = layer[path].items()
        line = jnp.zeros(layout.size, copy.dtype)
        for name, positions in layout.slices:
            values = jnp.repeat(factors[name].astype(copy.dtype), positions.shape[1])
            line = line.at[positions.ravel()].set(values)
        shape = [1] * copy.ndim
        shape[axis] = layout.size
        scaled[path] = copy * line.reshape(shape)
    return scaled


def _accelerate(step: DualStep, dual: Copies, num_iterations: int) -> Stepped:
    """Repeats a dual step with Nesterov's momentum; ends with a step without it."""

    def body(i: jax.Array, carry: tuple[Copies, Copies]) -> tuple[Copies, Copies]:
        last, ahead = carry
        now, _ = step(ahead)
        momentum = i / (i + 3)
        return now, jax.tree.map(
            lambda a, b: a + momentum.astype(a.dtype) * (a - b), now, last
        )

    dual, _ = jax.lax.fori_loop(0, num_iterations, body, (dual, dual))
    return step(dual)
