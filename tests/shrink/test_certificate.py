"""A certificate is small for equal functions, and tells every other pair apart."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.channels import trace_channels
from prunex_jax.models import BlockSpec, Form, ResNetSpec, make_resnet
from prunex_jax.shrink import (
    Certificate,
    Network,
    certify,
    certify_networks,
    make_cut,
)
from prunex_jax.shrink.certificate import _other_inputs
from tests.helpers.channel_checks import draw, random_masks

KEPT = np.array([0, 2, 5])
SPEC = ResNetSpec("cifar", 8, (BlockSpec((6,), 8), BlockSpec((9,), 12, 2, True)))


def apply(params, x):
    hidden = jnp.tanh(x @ params["hidden"] + params["bias"][None])
    logits = hidden @ params["out"]
    return {"logits": logits, "label": jnp.argmax(logits, axis=-1)}


def take(tree):
    return {
        **tree,
        "hidden": tree["hidden"][:, KEPT],
        "bias": tree["bias"][KEPT],
        "out": tree["out"][KEPT],
    }


def masked_params():
    params = draw({"hidden": (4, 8), "bias": (8,), "out": (8, 3)})
    mask = jnp.zeros(8).at[KEPT].set(1.0)
    return {
        "hidden": params["hidden"] * mask[None],
        "bias": params["bias"] * mask,
        "out": params["out"] * mask[:, None],
        "steps": jnp.asarray(7),
    }


def inputs():
    return [jnp.asarray(np.random.default_rng(1).normal(size=(16, 4)), jnp.float32)]


def certified(full=apply, small=apply, change=lambda params: params, **options):
    masked = masked_params()
    given = change(take(masked))
    return certify(full, small, masked, given, inputs(), take, **options)


def small_networks(density=0.5, compute_dtype="float32"):
    model = make_resnet("small", SPEC, Form(compute_dtype), (8, 8, 3), 5)
    trees = jax.eval_shape(model.init, jax.random.key(0))
    network = Network(model, draw(trees[0]), draw(trees[1], seed=1))
    images = jnp.asarray(np.random.default_rng(2).normal(size=(4, 8, 8, 3)), "f4")
    trace = trace_channels(
        model.apply, network.params, images[:1], statistics=network.statistics
    )
    masks = random_masks(trace.groups, density, np.random.default_rng(3))
    cut = make_cut(trace, masks, network.params, network.statistics)
    return network, network.masked(cut), network.shrunk(cut), cut, images


def test_equal_functions_are_certified():
    certificate = certified()
    certificate.check()
    assert certificate.is_equal
    assert certificate.forward_error <= 1e-6
    assert certificate.gradient_error <= 1e-6
    assert certificate.num_values == 16 * 3 + 16, "logits and labels"
    assert certificate.num_gradients == 4 * 3 + 3 + 3 * 3 + 1, "of the small network"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("density", [0.25, 0.5, 0.75])
def test_shrunk_networks_are_certified(density):
    _, masked, shrunk, *rest = small_networks(density)
    certificate = certify_networks(masked, shrunk, *rest)
    certificate.check()
    assert certificate.gradient_error <= 1e-4
    assert certificate.num_gradients == sum(
        x.size for x in jax.tree.leaves(shrunk.params)
    )


def test_a_cut_of_a_network_that_is_not_masked_is_refused():
    network, _, shrunk, *rest = small_networks()
    certificate = certify_networks(network, shrunk, *rest)
    assert certificate.forward_error > 1e-2
    with pytest.raises(UserError, match=r"output by .* above the allowed 1e-05"):
        certificate.check()


@pytest.mark.slow
def test_rounding_of_half_precision_does_not_hide_a_cut():
    network, masked, shrunk, *rest = small_networks(compute_dtype="bfloat16")
    certificate = certify_networks(masked, shrunk, *rest)
    certificate.check()
    assert not certify_networks(network, shrunk, *rest).is_equal
    _, masked, shrunk, *rest = small_networks()
    assert certificate == certify_networks(masked, shrunk, *rest), "in float32"


def test_a_wrong_parameter_is_found_and_named():
    certificate = certified(change=lambda p: {**p, "out": p["out"].at[1, 2].add(0.1)})
    assert certificate.worst_output == "logits"
    expected = 0.1 * np.max(np.abs(np.tanh(inputs()[0] @ masked_params()["hidden"])))
    assert 0.1 * expected < certificate.max_abs_error < 10 * expected
    with pytest.raises(UserError, match="output 'logits' by"):
        certificate.check()


def test_a_function_that_is_equal_but_for_its_gradient_is_refused():
    @jax.custom_vjp
    def twice(x):
        return x

    twice.defvjp(lambda x: (x, None), lambda saved, grad: (2 * grad,))

    def small(params, x):
        return apply({**params, "bias": twice(params["bias"])}, x)

    certificate = certified(small=small)
    assert certificate.forward_error <= 1e-6
    assert certificate.gradient_error == pytest.approx(1.0)
    with pytest.raises(UserError, match="gradient 'bias' by 1 of its largest"):
        certificate.check()
    certified(small=small, gradients=False).check()


def with_a_tie(function, x=None):
    """A unit whose input is 0 for one example, but for how its sum was rounded."""
    x = inputs()[0] if x is None else x
    weight = jnp.asarray(np.random.default_rng(3).normal(size=(4, 6)), jnp.float32)
    offset = jnp.zeros(6).at[2].set((x @ weight)[5, 2])

    def apply(rounding):
        def of(params, x):
            hidden = (x @ params["w"]) * (1 + rounding) - offset[None]
            return function(hidden) @ params["out"]

        return of

    params = {"w": weight, "out": draw({"out": (6, 2)})["out"]}
    return apply, params


TIES = {
    "relu": jax.nn.relu,
    "max": lambda h: jnp.maximum(h, 0.1 * h),
    "sorted": lambda h: jnp.sort(h - jnp.roll(h, 1, 1), 1) + jnp.abs(h),
}


@pytest.mark.parametrize("kind", ["given", "random"])
@pytest.mark.parametrize("name", TIES)
def test_what_rounding_chooses_at_a_tie_is_no_error(name, kind):
    """The gradient of a unit at 0 is that of either side; the other one is as right."""
    x = {"given": inputs(), **_other_inputs(inputs())}[kind][0]
    apply, params = with_a_tie(TIES[name], jnp.asarray(x))
    certificate = certify(
        apply(-3e-7), apply(3e-7), params, params, inputs(), lambda tree: tree
    )
    certificate.check()
    assert certificate.gradient_error <= certificate.gradient_tolerance


@pytest.mark.parametrize("size", [3e-4, 0.1])
def test_a_wrong_gradient_is_found_beside_a_tie(size):
    @jax.custom_vjp
    def wrong(x):
        return x

    wrong.defvjp(lambda x: (x, None), lambda saved, grad: ((1 + size) * grad,))
    apply, params = with_a_tie(jax.nn.relu)

    def small(params, x):
        return apply(3e-7)({**params, "w": wrong(params["w"])}, x)

    arguments = (apply(0), small, params, params, inputs(), lambda tree: tree)
    certificate = certify(*arguments)
    assert certificate.forward_error < 1e-5
    assert certificate.gradient_error == pytest.approx(size, rel=0.1)
    with pytest.raises(UserError, match="gradient 'w' by"):
        certificate.check()


def test_gradients_of_small_parameters_are_compared_with_their_own_size():
    """An error in a parameter far below the largest gradient is not lost."""

    def function(sign):
        return lambda p, x: (x @ p["large"] + sign * 0.01 * x @ p["small"]) * 1.0

    params = {"large": jnp.ones((4, 1)), "small": jnp.zeros((4, 1))}
    certificate = certify(
        function(1), function(-1), params, params, inputs(), lambda tree: tree
    )
    assert certificate.forward_error == 0, "the small parameters are zero"
    assert certificate.worst_gradient == "small"
    # Twice a hundredth of the largest, against a tenth of it.
    assert certificate.gradient_error == pytest.approx(0.2)


@pytest.mark.slow
def test_gradients_that_are_zero_but_for_rounding_do_not_count():
    """Softmax does not see a constant, whose gradient is rounding."""

    def function(order):
        def fn(params, x):
            logits = x @ params["kernel"] + params["constant"]
            return jax.nn.softmax(logits[:, order])[:, np.argsort(order)]

        return fn

    params = {"kernel": draw({"kernel": (4, 8)})["kernel"], "constant": jnp.ones(())}
    orders = np.arange(8), np.arange(8)[::-1]
    for seed in range(5):
        certificate = certify(
            *map(function, orders),
            params,
            params,
            inputs(),
            lambda tree: tree,
            seed=seed,
        )
        certificate.check()
        assert 0 < certificate.gradient_error < certificate.gradient_tolerance / 5


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_values_that_are_not_finite_are_refused(value):
    def broken(params, x):
        out = apply(params, x)
        return {**out, "logits": out["logits"].at[0, 0].set(value)}

    for full, small in ((apply, broken), (broken, apply), (broken, broken)):
        certificate = certified(full, small)
        with pytest.raises(UserError, match="output 'logits' has 1 values not finite"):
            certificate.check()
        json.dumps(certificate.as_dict(), allow_nan=False)


def test_gradients_that_are_not_finite_are_refused():
    def root(params, x):
        return jnp.sqrt(jnp.abs(x @ params["w"]))

    params = {"w": jnp.zeros((4, 1))}
    certificate = certify(root, root, params, params, inputs(), lambda tree: tree)
    assert certificate.forward_error == 0
    with pytest.raises(UserError, match="gradient 'w' has 4 values not finite"):
        certificate.check()


def test_nothing_but_zeros_proves_nothing():
    nothing = jax.tree.map(jnp.zeros_like, masked_params())
    certificate = certify(apply, apply, nothing, take(nothing), inputs(), take)
    assert certificate.forward_error == 0
    with pytest.raises(UserError, match="every output is zero, which proves nothing"):
        certificate.check()


def test_integers_have_to_be_equal():
    def other(params, x):
        out = apply(params, x)
        return {**out, "label": out["label"].at[3].add(1)}

    with pytest.raises(UserError, match="output 'label' in 1 of 16 integers"):
        certified(small=other).check()


def test_functions_without_floating_values_are_compared():
    def ids(params, x):
        return (params["table"][x], x > 1)

    params = {"table": jnp.arange(5)}
    inputs = [jnp.asarray([0, 1, 4])]
    certificate = certify(ids, ids, params, params, inputs, lambda tree: tree)
    certificate.check()
    assert certificate.gradient_error is None and certificate.num_values == 6


@pytest.mark.parametrize(
    ("small", "message"),
    [
        (
            lambda p, x: apply(p, x)["logits"],
            r"output 'label' is int32\[16\] of the full function and absent",
        ),
        (
            lambda p, x: {**apply(p, x), "logits": x},
            r"output 'logits' is float32\[16, 3\] .* and float32\[16, 4\] of the small",
        ),
    ],
)
def test_functions_with_other_outputs_are_refused(small, message):
    with pytest.raises(UserError, match=message):
        certified(small=small)


def test_a_take_of_another_cut_is_refused():
    masked = masked_params()
    with pytest.raises(UserError, match=r"take gives 'bias' the shape \(8,\)"):
        certify(apply, apply, masked, take(masked), inputs(), lambda tree: tree)


def test_an_inexact_shrink_is_measured_and_refused_unless_it_is_meant():
    """A mean over the kept channels is not the mean over all."""

    def centred(params, x):
        hidden = x @ params["hidden"]
        return (hidden - hidden.mean(-1, keepdims=True)) @ params["out"]

    certificate = certified(centred, centred)
    assert 1e-3 < certificate.forward_error < 10
    with pytest.raises(UserError, match="renormalised"):
        certificate.check()
    accepted = certified(
        centred, centred, forward_tolerance=10.0, gradient_tolerance=10.0
    )
    accepted.check()
    assert accepted.as_dict()["forward_tolerance"] == 10.0, "what was accepted is said"


def test_an_error_that_is_not_a_number_is_refused():
    certificate = Certificate(math.nan, None, 0.0, num_values=1)
    assert not certificate.is_equal
    assert certificate.as_dict()["forward_error"] is None


def test_the_projection_depends_on_the_seed_only():
    a, b, c = (certified(seed=seed) for seed in (0, 0, 1))
    assert a == b
    assert a.forward_error == c.forward_error
    assert a.gradient_error != c.gradient_error


# Functions that are equal on the inputs given, and not on others.


def test_other_inputs_find_what_the_given_ones_cannot():
    kept = np.array([0, 2, 5])
    params = draw({"e": (6, 8)})
    masked = {"e": params["e"] * jnp.zeros(8).at[kept].set(1.0)[None]}
    small = {"e": masked["e"][:, kept]}

    def summed(params, ids):
        return jnp.nan_to_num(jnp.take(params["e"], ids, axis=0), nan=1.0).sum(-1)

    arguments = (summed, summed, masked, small, [jnp.array([0, 5, 3])])
    take = lambda tree: {"e": tree["e"][:, kept]}  # noqa: E731
    certify(*arguments, take, vary=False).check()
    certificate = certify(*arguments, take)
    assert certificate.inputs == ("given", "random", "zero", "large", "out of range")
    assert certificate.forward_error <= 1e-6, "of the given inputs"
    with pytest.raises(
        UserError, match=r"output differs by .* for out of range inputs"
    ):
        certificate.check()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda x: jnp.where(jnp.abs(x).max() < 20, x, x + 1), "large"),
        (lambda x: jnp.where(jnp.abs(x).max() > 0, x, x + 1), "zero"),
        (lambda x: jnp.where(x[0, 0] == inputs()[0][0, 0], x, 1.01 * x), "random"),
    ],
    ids=["large", "zero", "random"],
)
def test_other_inputs_are_random_zero_and_large(change, name):
    def small(params, x):
        return apply(params, change(x))

    with pytest.raises(UserError, match=f"for {name} inputs"):
        certified(small=small).check()
    certified(small=small, vary=False).check()


def test_what_rounding_does_to_other_inputs_is_no_error():
    def steep(params, x):
        return jnp.sin(1e5 * (x @ params["w"]))

    def other(params, x):
        y = x @ params["w"]
        return jnp.sin(1e5 * jnp.where(jnp.abs(x).max() > 20, y * (1 + 1e-6), y))

    params = draw({"w": (4, 2)})
    arguments = (params, params, inputs(), lambda tree: tree)
    certify(steep, other, *arguments, gradients=False).check()
    # The same difference where it is not rounding.
    flat = lambda params, x: steep(params, x / 1e5)  # noqa: E731
    apart = lambda params, x: flat(params, x) * jnp.where(jnp.abs(x).max() > 20, 2, 1)  # noqa: E731
    assert not certify(flat, apart, *arguments, gradients=False).is_equal


def test_functions_with_a_while_loop_are_compared_on_the_given_inputs():
    def looped(params, x):
        count = lambda c: (c[0] + 1, c[1] * 2)  # noqa: E731
        _, y = jax.lax.while_loop(lambda c: c[0] < x[0, 0], count, (0.0, x))
        return y @ params["w"]

    params = {"w": jnp.ones((4, 2))}
    certificate = certify(
        looped, looped, params, params, [jnp.ones((3, 4))], lambda tree: tree,
        gradients=False,
    )  # fmt: skip
    certificate.check()
    assert certificate.inputs == ("given",)
