"""Shared by the tests of channels: random trees and masks, masked against cut."""

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.channels import (
    layouts_of,
    mask_channels,
    take_channels,
    trace_channels,
)
from prunex_jax.trees import flatten_by_path

DENSITIES = (0.25, 0.5, 0.75)
# Sums over other numbers of terms round differently; nothing else may differ.
TOLERANCE = 1e-5


def draw(shapes, seed=0):
    """Normal arrays of the given shapes; positive where the path ends in `var`."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        shape = getattr(shape, "shape", shape)
        scale = np.prod(shape[:-1]) ** -0.5 if len(shape) > 1 else 1.0
        value = rng.normal(scale=scale, size=shape)
        if path.endswith("var"):
            value = rng.uniform(0.5, 2.0, size=shape)
        return jnp.asarray(value, jnp.float32)

    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map_with_path(
        lambda path, x: leaf(str(path[-1].key), x), shapes, is_leaf=is_shape
    )


def shapes_of(tree):
    return {path: np.shape(leaf) for path, leaf in flatten_by_path(tree).items()}


def random_masks(groups, density, rng):
    """About `density` of every group, at random places; at least one channel."""
    masks = {}
    for group in groups:
        count = max(1, round(density * group.size))
        mask = np.zeros(group.size, bool)
        mask[rng.permutation(group.size)[:count]] = True
        masks[group.name] = mask
    return masks


def keep_of(masks):
    return {name: np.flatnonzero(mask) for name, mask in masks.items()}


def relative_error(a, b):
    a, b = ([np.ravel(x) for x in jax.tree.leaves(tree)] for tree in (a, b))
    a, b = np.concatenate(a), np.concatenate(b)
    assert a.shape == b.shape, "masked and cut give results of different sizes"
    return float(np.max(np.abs(a - b)) / max(np.max(np.abs(a)), 1e-6))


def run_masked_and_cut(apply, groups, masks, params, statistics, *inputs):
    """Outputs with masked parameters, and with cut ones."""
    keep = keep_of(masks)
    layouts = layouts_of(groups, shapes_of(params))
    running = layouts_of(groups, shapes_of(statistics), "statistics")

    def both(params, statistics, inputs):
        masked = mask_channels(params, layouts, masks)
        cut = take_channels(params, layouts, keep)
        if statistics is None:
            return apply(masked, *inputs), apply(cut, *inputs)
        cut_statistics = take_channels(statistics, running, keep)
        return apply(masked, statistics, *inputs), apply(cut, cut_statistics, *inputs)

    # Compiling is most of the time, and little is computed.
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(both, compiler_options=options)(params, statistics, inputs)


def assert_exact(apply, params, *inputs, statistics=None, rules=None, **settings):
    """Masked outputs equal outputs of the function with cut parameters.

    Returns the trace. `settings`: densities, and seed of the masks.
    """
    trace = trace_channels(apply, params, *inputs, statistics=statistics, rules=rules)
    rng = np.random.default_rng(settings.get("seed", 0))
    for density in settings.get("densities", DENSITIES) if trace.groups else ():
        masks = random_masks(trace.groups, density, rng)
        a, b = run_masked_and_cut(
            apply, trace.groups, masks, params, statistics, *inputs
        )
        finite = all(np.isfinite(x).all() for x in jax.tree.leaves(a))
        assert finite, f"masking made outputs not finite at density {density}"
        error = relative_error(a, b)
        assert error <= TOLERANCE, (
            f"masked and cut differ by {error:.1e} at density {density}; groups "
            f"{members_of(trace)}"
        )
    return trace


def members_of(trace):
    """name -> (size, [(path, axis, positions per channel)])."""
    return {
        group.name: (
            group.size,
            [(m.path, m.axis, m.positions.shape[1]) for m in group.members],
        )
        for group in trace.groups
    }
