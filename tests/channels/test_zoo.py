"""Networks of other frameworks: channels are found, and cutting them changes nothing.

The few that need no other package run with `make test`, all of them with
`make test-zoo`; `tests/helpers/zoo` holds them.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.channels import ChannelTrace
from prunex_jax.shrink import make_cut
from tests.helpers.zoo import NETWORKS, PUBLISHED, Case, Network

FORWARD_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
# Outputs that hardly depend on inputs or on masks would hide a wrong equivalence.
LEAST_EFFECT = 1e-3
# Relative size of nudges that tell a gradient that jumps, and how many are tried.
ROUNDING, NUM_NUDGES = 3e-7, 16


def params_of(sparsities: tuple[float, ...]) -> list:
    """Every network, and every sparsity; what is not quick belongs to the zoo."""
    return [
        pytest.param(
            network,
            *((sparsity,) if sparsity else ()),
            id=f"{network.name}-{sparsity}" if sparsity else network.name,
            marks=_mark_of(network, sparsity),
        )
        for network in NETWORKS
        for sparsity in sparsities
    ]


def _mark_of(network: Network, sparsity: float) -> list:
    if not network.is_quick or sparsity not in (0, 0.5):
        return [pytest.mark.zoo]
    return [pytest.mark.slow] if sparsity else []


@functools.lru_cache(maxsize=1)
def traced(network: Network) -> tuple[Case, ChannelTrace]:
    """The tiny network and its channels; kept for the next test of it."""
    skip_without(network)
    case = network.build()
    return case, case.trace()


def skip_without(network: Network) -> None:
    for package in network.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; it is in the extra `zoo`")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("network", params_of((0,)))
def test_channels_are_found(network: Network) -> None:
    case, trace = traced(network)
    assert trace.prunable_share() >= network.floor_tiny, trace.explain()
    assert all(trace.explain(path) for path in trace.shapes)
    outputs = outputs_of(case, case.apply(*case.arguments))
    for output in jax.tree.leaves(outputs):
        assert np.isfinite(output).all()
    assert spread(outputs) > LEAST_EFFECT, "outputs hardly depend on inputs"


@pytest.mark.zoo
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_share_of_the_published_network(network: Network) -> None:
    skip_without(network)
    share = network.build(PUBLISHED).trace().prunable_share()
    assert share >= network.floor, f"{share:.4f} of the parameters are prunable"


@pytest.mark.parametrize(("network", "sparsity"), params_of((0.25, 0.5, 0.75)))
def test_cut_network_equals_masked_one(network: Network, sparsity: float) -> None:
    case, trace = traced(network)
    seed = round(100 * sparsity)
    masks = random_masks(trace, 1 - sparsity, np.random.default_rng(seed))
    cut = make_cut(trace, masks, case.params, case.statistics)
    small = cut.function(case.apply)
    masked = jax.jit(cut.mask)(case.params)
    statistics = () if case.statistics is None else (case.statistics,)
    few = tuple(map(cut.take_statistics, statistics))

    shapes = jax.eval_shape(case.apply, *case.arguments)
    weights = cotangents(outputs_of(case, shapes), seed)
    run = gradient_function(case, weights)
    full, gradient = run(case.apply, masked, *statistics, *case.inputs)
    less, small_gradient = run(small, cut.take(masked), *few, *case.inputs)
    if case.returns_statistics:
        full = (full[0], cut.take_statistics(full[1]))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(full))
    error = leaf_errors(full, less).max()
    assert error <= FORWARD_TOLERANCE, f"outputs differ by {error:.1e}"

    def gradients_nearby():
        for nudge in range(NUM_NUDGES):
            nearby = nudged(masked, nudge)
            yield cut.take(run(case.apply, nearby, *statistics, *case.inputs)[1])

    assert_gradients(cut.take(gradient), small_gradient, gradients_nearby)

    if not trace.groups:
        return  # nothing was cut; `floor` says so
    whole = outputs_of(case, jax.jit(case.apply)(*case.arguments))
    effect = leaf_errors(whole, outputs_of(case, full)).max()
    assert effect > LEAST_EFFECT, "the mask hardly changes the outputs"


def outputs_of(case: Case, result):
    return result[0] if case.returns_statistics else result


def random_masks(trace, density: float, rng) -> dict[str, np.ndarray]:
    """Keeps about `density` of every group, at random places; drops at least one."""
    masks = {}
    for group in trace.groups:
        most = max(1, group.size - 1)
        count = min(max(1, round(density * group.size)), most)
        masks[group.name] = rng.permutation(np.arange(group.size) < count)
    return masks


def cotangents(outputs, seed: int):
    """Random weights of the outputs; nothing for whole numbers."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), outputs
    )


def gradient_function(case: Case, weights):
    """Gives everything that a function returns, and the gradient of its parameters."""

    def run(apply, params, *rest):
        def loss(params):
            result = apply(params, *rest)
            products = jax.tree.map(
                lambda a, b: jnp.sum(a * b), outputs_of(case, result), weights
            )
            return sum(jax.tree.leaves(products)), result

        gradient, result = jax.grad(loss, has_aux=True)(params)
        return result, gradient

    return jax.jit(run, static_argnums=0)


def spread(outputs) -> float:
    """How much outputs differ between examples, relative to how large they are."""
    return max(
        float(np.std(x, axis=0).max() / max(np.abs(x).max(), 1e-30))
        for x in map(np.asarray, jax.tree.leaves(outputs))
    )


def leaf_errors(expected, actual) -> np.ndarray:
    """Largest error of every leaf, relative to its largest entry.

    A leaf whose entries are tiny beside those of the others is measured against these:
    it is a sum that cancels, and nothing but rounding is left of it.
    """
    expected, actual = jax.tree.leaves(expected), jax.tree.leaves(actual)
    largest = max(np.abs(x).max(initial=0) for x in expected)
    errors = []
    for a, b in zip(expected, actual, strict=True):
        assert a.shape == b.shape, "masked and cut give results of different shapes"
        scale = max(np.abs(a).max(initial=0), 1e-3 * largest, 1e-30)
        errors.append(np.abs(a - b).max(initial=0) / scale)
    return np.array(errors)


def nudged(params, seed: int):
    """Parameters that differ by about the rounding of their numbers."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x * (1 + ROUNDING * rng.normal(size=x.shape)).astype(x.dtype), params
    )


def assert_gradients(expected, actual, nearby) -> None:
    """Gradients agree, except where rounding alone moves them by as much.

    Where the input of a rectifier is zero but for rounding, the gradient jumps: then
    that of the masked network itself jumps too, for parameters next to these.
    """
    errors = leaf_errors(expected, actual)
    if errors.max() > GRADIENT_TOLERANCE:
        jumps = np.max([leaf_errors(expected, other) for other in nearby()], axis=0)
        errors = np.where(errors <= 2 * jumps, 0.0, errors)
    assert errors.max() <= GRADIENT_TOLERANCE, f"gradients differ by {errors.max():.1e}"
