"""Shared by the tests of channels: random trees and masks, masked against shrunk."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from prunex_jax.base.trees import flatten_by_path, shapes_by_path
from prunex_jax.channels import layouts_of, mask_channels, trace_channels
from prunex_jax.shrink import make_cut

DENSITIES = (0.25, 0.5, 0.75)
# Sums over other numbers of terms round differently; nothing else may differ. Of
# outputs and of gradients, in float32.
TOLERANCES = (1e-5, 1e-4)
# A gradient that is zero but for rounding is compared with this share of the largest.
SMALLEST_SHARE = 1e-3


def compiled(fn):
    # Compiling is most of the time, and little is computed.
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    return jax.jit(fn, compiler_options=options)


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


def one_density(name):
    """One of `DENSITIES`, the same one for a name every time."""
    return (DENSITIES[zlib.crc32(name.encode()) % len(DENSITIES)],)


def random_masks(groups, density, rng):
    """About `density` of every group, at random places; at least one channel."""
    masks = {}
    for group in groups:
        count = max(1, round(density * group.size))
        mask = np.zeros(group.size, bool)
        mask[rng.permutation(group.size)[:count]] = True
        masks[group.name] = mask
    return masks


def relative_error(a, b):
    a, b = ([np.ravel(x) for x in jax.tree.leaves(tree)] for tree in (a, b))
    a, b = (np.concatenate(x).astype(np.float64) for x in (a, b))
    assert a.shape == b.shape, "masked and cut give results of different sizes"
    return float(np.max(np.abs(a - b)) / max(np.max(np.abs(a)), 1e-6))


def gradient_errors(a, b):
    """Errors of single leaves, by path; what is nearly zero counts by the largest."""
    a, b = (
        {path: np.asarray(x, np.float64) for path, x in flatten_by_path(tree).items()}
        for tree in (a, b)
    )
    assert {k: x.shape for k, x in a.items()} == {k: x.shape for k, x in b.items()}
    sizes = {path: np.max(np.abs(x), initial=0) for path, x in a.items()}
    floor = max(SMALLEST_SHARE * max(sizes.values(), default=0), 1e-6)
    return {
        path: float(np.max(np.abs(x - b[path]), initial=0) / max(sizes[path], floor))
        for path, x in a.items()
    }


def is_real(x):
    return jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)


def reals_of(tree):
    return [x for x in jax.tree.leaves(tree) if is_real(x)]


def project(outputs):
    """A number that depends on every floating output, on no two of them alike."""
    leaves = [x.astype(jnp.float32) for x in reals_of(outputs)]
    return sum(
        jnp.sum(x * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape))
        for x in leaves
    )


def outputs_and_gradients(apply, *arguments):
    """What a function returns, and the derivatives of `project` of it.

    The latter as a tuple of trees like the arguments, with zeros for what is not real.
    """
    leaves, structure = jax.tree.flatten(arguments)
    reals = [i for i, x in enumerate(leaves) if is_real(x)]

    def loss(values):
        replaced = list(leaves)
        for i, value in zip(reals, values, strict=True):
            replaced[i] = value
        outputs = apply(*jax.tree.unflatten(structure, replaced))
        return project(outputs), outputs

    grads, outputs = jax.grad(loss, has_aux=True)([leaves[i] for i in reals])
    by_leaf = [jnp.zeros(np.shape(x)) for x in leaves]
    for i, grad in zip(reals, grads, strict=True):
        by_leaf[i] = grad
    return outputs, jax.tree.unflatten(structure, by_leaf)


def assert_equal_results(masked, shrunk, where, tolerances=TOLERANCES):
    """Compares two results of `outputs_and_gradients`."""
    (a, a_grads), (b, b_grads) = masked, shrunk
    finite = all(np.isfinite(x).all() for x in map(np.asarray, reals_of(a)))
    assert finite, f"masking made outputs not finite {where}"
    error = relative_error(a, b)
    assert error <= tolerances[0], f"masked and shrunk differ by {error:.1e} {where}"
    for one, other in zip(a_grads, b_grads, strict=True):
        for path, error in gradient_errors(one, other).items():
            assert error <= tolerances[1], (
                f"derivatives by {path or 'an input'} differ by {error:.1e} {where}"
            )


def assert_exact(
    apply,
    params,
    *inputs,
    statistics=None,
    densities=DENSITIES,
    seed=0,
    is_any_width=False,
    make_masks=random_masks,
    tolerances=TOLERANCES,
    **options,
):
    """Masked and shrunk function agree in outputs and derivatives.

    Args:
      apply: As for `trace_channels`, as are `params`, `inputs` and `statistics`.
      densities: Share of the channels that are kept, one comparison each.
      seed: Of the masks.
      is_any_width: Whether `apply` may also be called with cut parameters.
      make_masks: (groups, density, rng) -> masks.
      tolerances: Largest errors of outputs and of derivatives.
      **options: Fields of `TraceOptions`.
    Returns:
      The trace.
    """
    trace = trace_channels(apply, params, *inputs, statistics=statistics, **options)
    if not trace.groups:
        return trace
    running = () if statistics is None else (statistics,)
    layouts = layouts_of(trace.groups, shapes_by_path(params))

    def masked(params, masks):
        alive = mask_channels(params, layouts, masks)
        return outputs_and_gradients(apply, alive, *running, *inputs)

    rng = np.random.default_rng(seed)
    quick = compiled(masked)
    for density in densities:
        masks = make_masks(trace.groups, density, rng)
        cut = make_cut(trace, masks, params, statistics)

        def take(params, *rest, cut=cut):
            state = [cut.take_statistics(tree) for tree in rest[: len(running)]]
            return cut.take(params), *state, *rest[len(running) :]

        def shrunk(params, results, cut=cut, take=take):
            smaller = take(params, *running, *inputs)
            outputs, grads = results
            if trace.options.returns_statistics:
                outputs = outputs[0], cut.take_statistics(outputs[1])
            again = apply(*smaller) if is_any_width else outputs
            small = cut.function(apply)
            want = outputs, take(*grads)
            return want, outputs_and_gradients(small, *smaller), again

        want, have, again = compiled(shrunk)(params, quick(params, masks))
        if not all(np.isfinite(x).all() for x in reals_of((want, have))):
            # A program may compute an operand twice, and round it differently: then no
            # channel is the largest one, and the gradient of the maximum is none.
            want, have, again = shrunk(params, masked(params, masks))
        where = f"at density {density}; groups {members_of(trace)}"
        assert_equal_results(want, have, where, tolerances)
        error = relative_error(want[0], again)
        assert error <= tolerances[0], f"masked and cut differ by {error:.1e} {where}"
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


def primitives_of(program):
    """Names of all primitives of a program, and of the programs in it."""
    jaxpr = program.jaxpr if isinstance(program, core.ClosedJaxpr) else program
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for value in jax.tree.leaves(
            dict(eqn.params), is_leaf=lambda x: isinstance(x, core.ClosedJaxpr)
        ):
            if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
                found |= primitives_of(value)
    return found
