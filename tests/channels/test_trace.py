"""Tracing: which channels can be removed, exactly, and why the others stay."""

import jax
import jax.numpy as jnp
import pytest

from tests.helpers import any_width, networks
from tests.helpers.any_width import IMAGES, X, conv, norm
from tests.helpers.channel_checks import assert_exact, draw, members_of, one_density


def check(cases, name, **options):
    apply, shapes, groups, inputs = cases[name]
    trace = assert_exact(apply, draw(shapes), *inputs, **options)
    assert members_of(trace) == groups, trace.explain()


# One density in the quick tests: which one differs from network to network.
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", networks.CASES)
def test_masked_equals_shrunk_with_the_expected_groups(name):
    check(networks.CASES, name, densities=one_density(name))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", any_width.CASES)
def test_masked_equals_cut_where_functions_work_for_any_width(name):
    check(any_width.CASES, name, is_any_width=True, densities=one_density(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*networks.CASES, *any_width.CASES])
def test_masked_equals_shrunk_at_all_densities(name):
    is_any_width = name in any_width.CASES
    cases = any_width.CASES if is_any_width else networks.CASES
    check(cases, name, is_any_width=is_any_width)


def test_running_statistics_are_cut_with_their_channels():
    def apply(p, s, x):
        return (
            jax.nn.relu(norm(p["norm"], s["norm"], conv(x, p["a"]))).mean((1, 2))
            @ p["b"]
        )

    params = draw(
        {"a": (3, 3, 3, 8), "norm": {"scale": (8,), "bias": (8,)}, "b": (8, 2)}
    )
    statistics = draw({"norm": {"mean": (8,), "var": (8,)}, "steps": ()})
    trace = assert_exact(apply, params, IMAGES, statistics=statistics)
    (group,) = trace.groups
    assert [(m.path, m.axis) for m in group.statistics] == [
        ("norm/var", 0),
        ("norm/mean", 0),
    ]


@pytest.mark.parametrize(("wide", "narrow"), [("a", "b"), ("b", "a")])
def test_where_two_channel_axes_merge_the_longer_one_is_kept(wide, narrow):
    def apply(p, x):
        outer = jnp.einsum("nh,nk->nhk", x @ p["a"], x @ p["b"])
        return outer.reshape(x.shape[0], -1) @ p["c"]

    shapes = {wide: (3, 5), narrow: (3, 4), "c": (20, 2)}
    trace = assert_exact(apply, draw(shapes), X)
    assert members_of(trace) == {wide: (5, [(wide, 1, 1), ("c", 0, 4)])}
    assert "of which the axis of 5 is the one that is cut" in trace.explain(narrow)


def test_kernels_may_be_flattened():
    def apply(p, x):
        flat = p["a"].reshape(-1, p["a"].shape[3])
        flat = flat / (0.1 + jnp.abs(flat).sum(0, keepdims=True))
        h = jax.nn.relu(conv(conv(x, p["in"]), flat.reshape(p["a"].shape)))
        return h.mean((1, 2)) @ p["b"]

    shapes = {"in": (3, 3, 3, 4), "a": (3, 3, 4, 8), "b": (8, 2)}
    assert members_of(assert_exact(apply, draw(shapes), IMAGES)) == {
        "a": (4, [("a", 2, 1), ("in", 3, 1)]),
        "a#2": (8, [("a", 3, 1), ("b", 0, 1)]),
    }
