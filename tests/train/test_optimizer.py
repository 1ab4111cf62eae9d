"""The inner optimizer: order of its parts, what decays, and the rate over time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.train.build.optimizer import (
    as_matrix,
    check_inner,
    is_kernel,
    make_inner,
    make_learning_rate,
)

PARAMS = {"kernel": np.full((2, 3), 2.0, np.float32), "bias": np.ones(3, np.float32)}
GRADS = {"kernel": np.ones((2, 3), np.float32), "bias": np.full(3, 4.0, np.float32)}


def plain(**changes):
    settings = {
        "name": "sgd", "learning_rate": 0.1, "momentum": 0.0, "nesterov": False,
        "weight_decay": 0.0, "clip_norm": 0.0, **changes,
    }  # fmt: skip
    return OptimizerConfig(**settings)


def steps(config, count=1, rate=0.1):
    inner = make_inner(config, optax.constant_schedule(rate))
    params, state = PARAMS, inner.init(PARAMS)
    for _ in range(count):
        updates, state = inner.update(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_plain_sgd():
    after = steps(plain())
    np.testing.assert_allclose(after["kernel"], 1.9)
    np.testing.assert_allclose(after["bias"], 0.6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_follows_its_formula(nesterov):
    """b <- g + mu b;  theta <- theta - lr (g + mu b, or b)."""
    after = steps(plain(momentum=0.9, nesterov=nesterov), count=3)
    theta, b, g = 1.0, 0.0, 4.0
    for _ in range(3):
        b = g + 0.9 * b
        theta -= 0.1 * (g + 0.9 * b if nesterov else b)
    np.testing.assert_allclose(after["bias"], theta, rtol=1e-5)


def test_kernels_decay_through_the_momentum_and_biases_do_not():
    after = steps(plain(momentum=0.9, weight_decay=0.5), count=2)
    theta, b = 2.0, 0.0
    for _ in range(2):
        b = (1.0 + 0.5 * theta) + 0.9 * b
        theta -= 0.1 * b
    np.testing.assert_allclose(after["kernel"], theta, rtol=1e-6)
    bias = 1 - 0.1 * 4 - 0.1 * (4 + 0.9 * 4)
    np.testing.assert_allclose(after["bias"], bias, rtol=1e-6)


def test_adamw_decays_outside_the_moments():
    after = steps(plain(name="adamw", weight_decay=0.5))
    # The first Adam step has length lr whatever the gradient.
    np.testing.assert_allclose(after["kernel"], 2 - 0.1 * (1 + 0.5 * 2), rtol=1e-5)
    np.testing.assert_allclose(after["bias"], 1 - 0.1, rtol=1e-5)


def test_lion_goes_by_signs_and_decays_kernels_only():
    after = steps(plain(name="lion", weight_decay=0.5))
    np.testing.assert_allclose(after["kernel"], 2 - 0.1 * (1 + 0.5 * 2), rtol=1e-5)
    np.testing.assert_allclose(after["bias"], 1 - 0.1, rtol=1e-5)


def muon_updates(grads, **changes):
    inner = make_inner(plain(name="muon", **changes), optax.constant_schedule(0.1))
    params = jax.tree.map(jnp.ones_like, grads)
    return inner.update(grads, inner.init(params), params)[0]


def test_muon_moves_matrices_in_all_directions_alike_and_as_far_as_adamw():
    """Singular values become equal, and entries 0.2 lr in the mean square."""
    rng = np.random.default_rng(0)
    grads = {"dense": {"kernel": rng.normal(size=(48, 32)).astype(np.float32)}}
    update = np.asarray(muon_updates(grads)["dense"]["kernel"])
    values = np.linalg.svd(update / 0.1, compute_uv=False)
    assert values.max() / values.min() < 2 < np.linalg.cond(grads["dense"]["kernel"])
    assert np.sqrt(np.mean(update**2)) == pytest.approx(0.1 * 0.2, rel=0.25)
    assert np.sum(update * grads["dense"]["kernel"]) < 0


def test_muon_folds_axes_of_heads_and_windows():
    """A kernel with more axes moves as the matrix that it is."""
    rng = np.random.default_rng(1)
    folded = rng.normal(size=(36, 12)).astype(np.float32)
    for shape in ((3, 3, 4, 12), (36, 3, 4), (4, 9, 12)):
        found = muon_updates({"kernel": folded.reshape(shape)})["kernel"]
        wanted = muon_updates({"kernel": folded})["kernel"]
        np.testing.assert_allclose(found.reshape(36, 12), wanted, rtol=1e-4, atol=1e-6)


def test_muon_leaves_vectors_embeddings_and_heads_to_adamw():
    rng = np.random.default_rng(2)
    grads = {
        "embedding": rng.normal(size=(16, 8)).astype(np.float32),
        "norm": {"scale": rng.normal(size=8).astype(np.float32)},
        "block": {"kernel": rng.normal(size=(8, 8)).astype(np.float32)},
    }
    adamw = make_inner(plain(name="adamw"), optax.constant_schedule(0.1))
    params = jax.tree.map(jnp.ones_like, grads)
    wanted, _ = adamw.update(grads, adamw.init(params), params)
    found = muon_updates(grads)
    np.testing.assert_array_equal(found["embedding"], wanted["embedding"])
    np.testing.assert_array_equal(found["norm"]["scale"], wanted["norm"]["scale"])
    assert not np.allclose(found["block"]["kernel"], wanted["block"]["kernel"])
    moved = muon_updates(grads, adamw_paths=("block",))
    assert not np.allclose(moved["embedding"], wanted["embedding"])
    np.testing.assert_array_equal(moved["block"]["kernel"], wanted["block"]["kernel"])


@pytest.mark.parametrize(
    "shape, rows",
    [
        ((128, 4, 32), 1),  # queries of attention: heads are columns
        ((4, 32, 128), 2),  # what attention gives back: heads are rows
        ((128, 2, 32), 1),  # keys that queries share
        ((3, 3, 16, 32), 3),  # a convolution
        ((7, 7, 1, 96), 3),  # one channel at a time
        ((5, 5), 1),
    ],
)
def test_matrices_of_kernels(shape, rows):
    found = as_matrix(shape)
    assert found.reduction_axis == tuple(range(rows))
    assert found.output_axis == tuple(range(rows, len(shape)))


def test_functions_of_optax_get_the_rate_and_the_decay_of_kernels():
    after = steps(plain(name="optax:adamw", weight_decay=0.5))
    wanted = steps(plain(name="adamw", weight_decay=0.5))
    np.testing.assert_array_equal(after["kernel"], wanted["kernel"])
    np.testing.assert_array_equal(after["bias"], wanted["bias"])


def test_functions_of_the_user_are_called_with_the_rate():
    def mine(rate):
        return optax.chain(optax.scale(2.0), optax.sgd(rate))

    inner = make_inner(plain(), optax.constant_schedule(0.1), mine)
    updates, _ = inner.update(GRADS, inner.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["bias"], -0.8)


@pytest.mark.parametrize(
    "name, message",
    [
        ("adamv", "'adamv' is not known, did you mean 'adamw'.* optax:lamb"),
        ("optax:lamp", "'optax:lamp' cannot be imported .* no attribute 'lamp'"),
        ("optax:__version__", "is str, and should be a function of the learning rate"),
        ("optax:apply_updates", "cannot be called with the learning rate"),
        ("optax:constant_schedule", "gives function, and should give an optax"),
        ("own", "was brought to `train` in Python"),
    ],
)
def test_what_is_no_optimizer_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        make_inner(plain(name=name), optax.constant_schedule(0.1))


def test_optimizers_that_need_more_than_gradients_are_refused():
    needs_loss = optax.polyak_sgd()
    with pytest.raises(UserError, match=r"cannot be called with gradients.*value"):
        check_inner(needs_loss, PARAMS)
    check_inner(optax.adafactor(0.1), PARAMS)


def test_clipping_sees_the_gradient_without_the_decay():
    norm = np.sqrt(6 * 1 + 3 * 16)
    after = steps(plain(clip_norm=1.0, weight_decay=0.5))
    wanted = 2 - 0.1 * (1 / norm + 0.5 * 2)
    np.testing.assert_allclose(after["kernel"], wanted, rtol=1e-6)
    same = steps(plain(clip_norm=100.0))
    np.testing.assert_allclose(same["bias"], 0.6)


def test_only_arrays_with_two_axes_are_kernels():
    tree = {"conv": jnp.ones((3, 3, 1, 2)), "scale": jnp.ones(2), "one": jnp.ones(())}
    assert is_kernel(tree) == {"conv": True, "scale": False, "one": False}


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_the_rate_warms_up_and_decays(name):
    config = OptimizerConfig(learning_rate=0.4, schedule=name, warmup_share=0.1)
    rate = jax.vmap(make_learning_rate(config, 100))(jnp.arange(101))
    np.testing.assert_allclose(rate[:11], np.linspace(0, 0.4, 11), atol=1e-6)
    assert float(rate.max()) == pytest.approx(0.4)
    decay = np.linspace(0, 1, 91)
    wanted = {
        "cosine": 0.2 * (1 + np.cos(np.pi * decay)),
        "linear": 0.4 * (1 - decay),
        "constant": np.full(91, 0.4),
    }[name]
    np.testing.assert_allclose(rate[10:], wanted, atol=1e-6)


def test_no_warm_up_starts_at_the_peak_and_short_runs_have_a_rate():
    config = OptimizerConfig(learning_rate=0.4, schedule="linear", warmup_share=0.0)
    assert float(make_learning_rate(config, 10)(0)) == pytest.approx(0.4)
    for total_steps in (1, 2, 3):
        for share in (0.0, 0.5, 1.0):
            config = OptimizerConfig(learning_rate=0.4, warmup_share=share)
            rates = [
                float(make_learning_rate(config, total_steps)(s)) for s in range(3)
            ]
            assert np.isfinite(rates).all()


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.1])
def test_the_rate_stays_at_its_peak_and_then_decays_over_what_is_left(schedule, warmup):
    config = OptimizerConfig(
        learning_rate=0.4, schedule=schedule, warmup_share=warmup, flat_share=0.6
    )
    whole = make_learning_rate(config, 100)
    rates = np.array([float(whole(step)) for step in range(100)])
    np.testing.assert_allclose(rates[round(100 * warmup) : 60], 0.4, rtol=1e-6)
    plain = dataclasses.replace(config, flat_share=0.0, warmup_share=0.0)
    rest = make_learning_rate(plain, 40)
    np.testing.assert_allclose(rates[60:], [float(rest(s)) for s in range(40)])


@pytest.mark.parametrize("share", [0.05, 0.1])
def test_a_peak_that_ends_in_the_warm_up_changes_nothing(share):
    config = OptimizerConfig(warmup_share=0.1)
    flat = make_learning_rate(dataclasses.replace(config, flat_share=share), 100)
    usual = make_learning_rate(config, 100)
    assert [float(flat(s)) for s in range(100)] == [float(usual(s)) for s in range(100)]


def test_the_rate_starts_over_after_rewinding():
    """Both parts are schedules of their own length, warm-up included."""
    config = OptimizerConfig(warmup_share=0.1, rewind_share=0.4)
    whole = make_learning_rate(config, 100)
    for first, length in ((0, 40), (40, 60)):
        part = make_learning_rate(dataclasses.replace(config, rewind_share=0.0), length)
        for step in range(length):
            assert float(whole(first + step)) == pytest.approx(float(part(step)))
    assert float(whole(39)) < 0.01 < float(whole(46))


def test_biases_of_heads_and_positions_do_not_decay():
    """They have two axes, as kernels have."""
    tree = {"query": {"kernel": np.ones((4, 2, 3)), "bias": np.ones((2, 3))}}
    tree["positions"] = np.ones((5, 4))
    wanted = {"query": {"kernel": True, "bias": False}, "positions": False}
    assert is_kernel(tree) == wanted
