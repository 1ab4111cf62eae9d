"""Derivatives that somebody wrote are kept when a function is shrunk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from prunex_jax.channels import trace_channels
from prunex_jax.shrink import make_cut
from tests.helpers.channel_checks import assert_exact, draw

X = draw({"x": (6, 3)}, seed=1)["x"]
SHAPES = {"a": (3, 8), "bias": (8,), "b": (8, 2)}


def with_jvp(f, rule):
    """f with the derivative rule(primals, tangents) of its own."""
    f = jax.custom_jvp(f)
    f.defjvp(lambda primals, tangents: (f(*primals), rule(primals, tangents)))
    return f


def with_vjp(f, rule):
    """f with the derivatives rule(operands, g) of its own."""
    new = jax.custom_vjp(f)
    new.defvjp(lambda *xs: (f(*xs), xs), rule)
    return new


def checked(f, shapes=SHAPES, **settings):
    """Asserts that f between two layers is exact, and that its derivative is its own.

    Returns the gradient by the first layer, of the full function.
    """

    def apply(p, x):
        return f(x @ p["a"] + p["bias"][None]) @ p["b"]

    trace = assert_exact(apply, draw(shapes), X, densities=(0.25, 0.5), **settings)
    assert trace.groups, trace.explain()
    return jax.grad(lambda p: apply(p, X).sum())(draw(shapes))["a"]


def rounded(h):
    return jnp.round(h)


def test_straight_through_estimators_keep_their_derivative():
    by_jvp = with_jvp(rounded, lambda primals, tangents: tangents[0])
    by_vjp = with_vjp(rounded, lambda xs, g: (g,))
    by_stop = lambda h: h + lax.stop_gradient(jnp.round(h) - h)  # noqa: E731
    grads = [checked(f) for f in (by_jvp, by_vjp, by_stop)]
    for grad in grads:
        assert np.abs(grad).max() > 0.1, "rounding has no derivative but this"
        np.testing.assert_allclose(grad, grads[0], rtol=1e-5)


def sign_of(h):
    return jnp.sign(h) * jnp.abs(h).mean(0, keepdims=True)


def hard_tanh_slope(primals, tangents):
    (h,), (t,) = primals, tangents
    return jnp.where(jnp.abs(h) < 1, t, 0.0) * jnp.abs(h).mean(0, keepdims=True)


def test_binary_activations_scale_by_what_they_average():
    by_jvp = with_jvp(sign_of, hard_tanh_slope)
    by_vjp = with_vjp(sign_of, lambda xs, g: (hard_tanh_slope(xs, (g,)),))
    np.testing.assert_allclose(checked(by_jvp), checked(by_vjp), rtol=1e-5)


def sorting_slope(primals, tangents):
    return 3 * tangents[0] + 0 * jnp.sort(primals[0], axis=1)


def summing_slope(primals, tangents):
    return tangents[0] + tangents[0].sum(1, keepdims=True)


def clipped(xs, g):
    return (g / (1 + jnp.sqrt(jnp.square(g).sum(1, keepdims=True))),)


@pytest.mark.parametrize(
    ("f", "primitive"),
    [
        (with_jvp(jnp.sin, sorting_slope), "sort"),
        (with_vjp(jnp.sin, clipped), "reduce_sum"),
    ],
    ids=["sorting", "clipping"],
)
def test_what_only_a_derivative_mixes_stays(f, primitive):
    def apply(p, x):
        return f(x @ p["a"]) @ p["b"] + jnp.tanh(x @ p["c"]) @ p["d"]

    shapes = {"a": (3, 8), "b": (8, 2), "c": (3, 5), "d": (5, 2)}
    trace = assert_exact(apply, draw(shapes), X)
    assert [group.name for group in trace.groups] == ["c"]
    line = trace.explain("a").splitlines()[1]
    assert line.startswith(f"a axis 1 (8): stays; {primitive}: ")


def test_tangents_of_known_numbers_are_zero_and_can_be_summed():
    grad = checked(with_jvp(jnp.sin, summing_slope))
    assert np.abs(grad - checked(jnp.sin)).max() > 0.1


def rms(h):
    return h * lax.rsqrt(jnp.square(h).mean(1, keepdims=True) + 1e-3)


def rms_slope(h, t):
    """The derivative of `rms`, times 2 so that it is told apart from it."""
    size = lax.rsqrt(jnp.square(h).mean(1, keepdims=True) + 1e-3)
    return 2 * size * (t - h * size**2 * (h * t).mean(1, keepdims=True))


def test_derivatives_of_norms_read_all_channels():
    by_jvp = with_jvp(rms, lambda hs, ts: rms_slope(hs[0], ts[0]))
    by_vjp = with_vjp(rms, lambda hs, g: (rms_slope(hs[0], g),))
    np.testing.assert_allclose(checked(by_jvp), checked(by_vjp), rtol=1e-4)


def test_several_operands_and_results_with_integers_among_them():
    def parts(h, number, scale):
        return h * number, jnp.sin(h) * scale

    def rule(primals, tangents):
        (h, number, scale), (t, _, ts) = primals, tangents
        return 2 * t * number, t * scale + ts * h

    def apply(f, p, x):
        h = x @ p["a"]
        one, two = f(h, (h > 0).astype(jnp.int32), p["scale"][None])
        return one @ p["b"] + two @ p["b"]

    by_jvp = with_jvp(parts, rule)
    nothing = lambda n: np.zeros(n.shape, jax.dtypes.float0)  # noqa: E731
    by_vjp = with_vjp(
        parts,
        lambda xs, g: (
            2 * g[0] * xs[1] + g[1] * xs[2],
            nothing(xs[1]),
            (g[1] * xs[0]).sum(0, keepdims=True),
        ),
    )
    shapes = {"a": (3, 8), "scale": (8,), "b": (8, 2)}
    for f in (by_jvp, by_vjp):
        trace = assert_exact(lambda p, x, f=f: apply(f, p, x), draw(shapes), X)
        assert [group.size for group in trace.groups] == [8]


def test_operands_that_are_not_differentiated():
    power = jax.custom_vjp(lambda h, n, scale: scale * h**n, nondiff_argnums=(1,))
    power.defvjp(
        lambda h, n, scale: (scale * h**n, (h, scale)),
        lambda n, kept, g: (5.0 * g * kept[0], jnp.zeros_like(kept[1])),
    )
    checked(lambda h: power(h, 2, jnp.float32(3)))


@pytest.mark.slow
def test_derivatives_inside_of_loops_maps_and_each_other():
    inner = with_jvp(jnp.sin, lambda xs, ts: 2 * ts[0])
    outer = with_jvp(
        lambda h: jnp.tanh(inner(h)), lambda xs, ts: inner(xs[0]) * 3 * ts[0]
    )
    vjp = with_vjp(lambda h: inner(h) * 2, lambda xs, g: (g * inner(xs[0]),))
    by_vmap = jax.vmap(lambda row: outer(vjp(row)))

    def by_scan(h):
        step = lambda c, _: (jax.checkpoint(outer)(c) + vjp(c), None)  # noqa: E731
        return lax.scan(step, h, length=2)[0]

    for f in (outer, vjp, by_vmap, by_scan, jax.jit(by_vmap)):
        checked(f)


def test_second_derivatives_are_those_of_the_rule():
    f = with_jvp(rounded, lambda xs, ts: jnp.cos(xs[0]) * ts[0])

    def apply(p, x):
        return f(x @ p["a"] + p["bias"][None]) @ p["b"]

    params = draw(SHAPES)
    cut = make_cut(
        trace_channels(apply, params, X), {"a": np.arange(8) % 3 > 0}, params
    )
    small = cut.function(apply)

    def twice(apply, params):
        inner = lambda x: apply(params, x).sum()  # noqa: E731
        return jax.grad(lambda x: jnp.square(jax.grad(inner)(x)).sum())(X)

    expected = twice(apply, cut.mask(params))
    assert np.abs(expected).max() > 1e-2
    np.testing.assert_allclose(twice(small, cut.take(params)), expected, rtol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("f", [jax.nn.relu, jax.nn.relu6, jnp.abs, jnp.maximum])
def test_derivatives_where_functions_have_a_corner(f):
    """At exact zeros: of relu it is 0, of max of equal values one half."""
    once = (lambda h: f(h, 0 * h)) if f is jnp.maximum else f

    def apply(p, x):
        return once(jnp.round(x) @ p["a"] * 0.0 + p["bias"][None]) @ p["b"]

    params = {**draw(SHAPES), "bias": jnp.array([0.0, 1, 0, -1, 0, 0, 2, 0])}
    trace = assert_exact(apply, params, X)
    assert [group.size for group in trace.groups] == [8]
