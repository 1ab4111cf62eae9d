"""Work counted from programs, against hand counts and published figures."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from prunex_jax.models import make_model
from prunex_jax.models.settings import ModelConfig
from prunex_jax.shrink.cost import count_macs, count_params


def conv(x, kernel, **settings):
    layout = ("NHWC", "HWIO", "NHWC")
    settings = {"window_strides": (1, 1), "padding": "SAME", **settings}
    return lax.conv_general_dilated(x, kernel, dimension_numbers=layout, **settings)


@pytest.mark.parametrize(
    ("name", "published"),
    [("resnet18", 1.814e9), ("resnet50", 4.089e9), ("vgg16", 15.47e9)],
)
def test_published_macs_of_imagenet_networks(name, published):
    model = make_model(ModelConfig(name=name), (224, 224, 3), 1000)
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    macs = count_macs(model.apply, params, statistics, image)
    assert macs == pytest.approx(published, rel=1e-3)


X = jnp.ones((2, 8, 8, 6))


@pytest.mark.parametrize(
    ("kernel", "settings", "expected"),
    [
        ((3, 3, 6, 4), {}, 2 * 64 * 4 * 9 * 6),
        ((3, 3, 2, 9), {"feature_group_count": 3}, 2 * 64 * 9 * 9 * 2),
        ((3, 3, 1, 6), {"feature_group_count": 6}, 2 * 64 * 6 * 9),
        ((3, 3, 6, 4), {"batch_group_count": 2}, 64 * 4 * 9 * 6),
        ((3, 3, 6, 4), {"rhs_dilation": (2, 2)}, 2 * 64 * 4 * 9 * 6),
        ((3, 3, 6, 4), {"window_strides": (2, 2)}, 2 * 16 * 4 * 9 * 6),
    ],
)
def test_convolutions(kernel, settings, expected):
    assert count_macs(lambda x, k: conv(x, k, **settings), X, jnp.ones(kernel)) == (
        expected
    )


def test_transposed_convolutions_do_not_count_inserted_zeros():
    def apply(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return lax.conv_transpose(x, kernel, (2, 2), "SAME", dimension_numbers=layout)

    every_input_meets_every_entry = X.size * 2 * 2 * 4
    assert count_macs(apply, X, jnp.ones((2, 2, 6, 4))) == (
        every_input_meets_every_entry
    )


def test_a_convolution_to_no_channels_costs_nothing():
    assert count_macs(conv, X, jnp.ones((3, 3, 6, 0))) == 0


def test_matrix_products_with_batch_axes():
    a, b = jnp.ones((5, 2, 3)), jnp.ones((5, 3, 7))
    assert count_macs(jnp.matmul, a, b) == 5 * 2 * 3 * 7


def test_loops_count_every_turn():
    def apply(h, w):
        step = jax.checkpoint(lambda h, _: (jnp.tanh(h @ w), None))
        return lax.scan(step, h, length=11)[0]

    assert count_macs(apply, jnp.ones((2, 3)), jnp.ones((3, 3))) == 11 * 2 * 3 * 3


def test_branches_count_the_most_expensive():
    def apply(flag, w):
        return lax.cond(flag, lambda w: w @ w @ w, lambda w: w @ w, w)

    assert count_macs(apply, True, jnp.ones((3, 3))) == 2 * 27


def test_work_inside_custom_rules_counts():
    @jax.custom_vjp
    def square(w):
        return w @ w

    square.defvjp(lambda w: (w @ w, w), lambda w, g: (g @ w.T + w.T @ g,))
    assert count_macs(jax.jit(square), jnp.ones((3, 3))) == 27
    assert count_macs(jax.grad(lambda w: square(w).sum()), jnp.ones((3, 3))) == 81


def test_params_are_counted_without_being_made():
    tree = {"a": jax.ShapeDtypeStruct((3, 4), jnp.float32), "b": jnp.float32(1)}
    assert count_params(tree) == 13
