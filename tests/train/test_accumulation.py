"""Gradients in parts: the same in both forms, and memory for one part in both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.train.steps.local_step import accumulated_grads

IMAGES, SIDE, WIDTH = 32, 16, 8


def loss(params, statistics, batch):
    """Convolutions, a running statistic, and sums: mean over the images of a part."""
    x = batch["image"]
    for kernel in params["kernels"]:
        x = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jnp.tanh(x)
    error = jnp.mean((x.mean((1, 2)) - batch["target"]) ** 2)
    return error, (0.9 * statistics + jnp.max(x), jnp.sum(x))


def inputs():
    keys = jax.random.split(jax.random.key(0), 8)
    shape = (3, 3, WIDTH, WIDTH)
    kernels = [0.2 * jax.random.normal(key, shape) for key in keys[:6]]
    params = {"kernels": kernels, "unused": jnp.zeros((0, 3))}
    batch = {
        "image": jax.random.normal(keys[6], (IMAGES, SIDE, SIDE, WIDTH)),
        "target": jax.random.normal(keys[7], (IMAGES, WIDTH)),
    }
    return params, jnp.zeros(()), batch


def compiled(num_parts, unroll=True):
    return jax.jit(
        accumulated_grads(
            jax.value_and_grad(loss, has_aux=True), num_parts, unroll=unroll
        )
    ).lower(*inputs())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_parts", [2, 8])
def test_both_forms_take_the_parts_in_order(num_parts):
    loop = compiled(num_parts, unroll=False).compile()(*inputs())
    unrolled = compiled(num_parts).compile()(*inputs())
    for a, b in zip(jax.tree.leaves(loop), jax.tree.leaves(unrolled), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)
    (whole, *_), (grads, *_) = compiled(1).compile()(*inputs()), unrolled
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_written_out_parts_need_the_memory_of_one():
    """XLA would otherwise compute them beside each other."""
    whole, parts = (
        compiled(count).compile().memory_analysis().temp_size_in_bytes
        for count in (1, 8)
    )
    assert parts < whole / 3


def test_no_convolution_is_in_a_loop_on_cpu():
    assert " while(" in compiled(2, unroll=False).compile().as_text()
    assert " while(" not in compiled(2).compile().as_text()
