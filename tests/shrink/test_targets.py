"""Targets: the largest counts within a share or an amount, in every unit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.helpers.tiny_network  # noqa: F401
from prunex_jax.base.environment import environment
from prunex_jax.base.errors import UserError
from prunex_jax.channels import trace_channels
from prunex_jax.mesh import make_topology
from prunex_jax.models import BlockSpec, Form, ResNetSpec, make_resnet
from prunex_jax.shrink import Network, make_cut
from prunex_jax.shrink.cost import (
    count_macs,
    count_params,
    latency_cost,
    macs_cost,
    model_budget,
    size_costs,
    small_calls,
)
from prunex_jax.sparsity import (
    CountLimits,
    Target,
    normalise_scores,
    solve_keep_counts,
)
from prunex_jax.sparsity.counts import ranked_family, uniform_family
from prunex_jax.sparsity.quanta import quantum_of
from prunex_jax.sparsity.settings import SparsityConfig
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.console import start_screen
from prunex_jax.train.run import train

SPEC = ResNetSpec("cifar", 16, (BlockSpec((32,), 16), BlockSpec((24,), 32, 2, True)))
MODEL = make_resnet("small", SPEC, Form(), (8, 8, 3), 10)


@pytest.fixture(scope="module")
def trace():
    params, statistics = jax.eval_shape(MODEL.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *MODEL.example().shape[1:]), np.float32)
    return trace_channels(MODEL.apply, params, image, statistics=statistics)


@pytest.fixture(scope="module")
def sizes(trace):
    return {group.name: group.size for group in trace.groups}


@pytest.fixture(scope="module")
def limits(sizes):
    return CountLimits(sizes)


@pytest.fixture(scope="module")
def costs(trace):
    params, statistics = jax.eval_shape(MODEL.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *MODEL.example().shape[1:]), np.float32)
    macs = macs_cost(MODEL.apply, trace, params, image, statistics=statistics)
    return {**size_costs(trace, 2), "macs": macs}


@pytest.fixture(scope="module")
def network():
    return Network(MODEL, *jax.jit(MODEL.init)(jax.random.key(0)))


def scores_of(sizes, seed=1):
    rng = np.random.default_rng(seed)
    return {name: rng.exponential(size=size) for name, size in sizes.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keep", [1.0, 0.5, 0.2])
def test_costs_are_those_of_the_shrunk_network(trace, sizes, costs, network, keep):
    family = uniform_family(CountLimits(sizes))
    counts = family.counts(int(keep * (len(family) - 1)))
    rng = np.random.default_rng(0)
    masks = {n: np.arange(s) < counts[n] for n, s in sizes.items()}
    masks = {name: rng.permutation(mask) for name, mask in masks.items()}
    small = network.shrunk(make_cut(trace, masks, network.params, network.statistics))
    assert costs["channels"](counts) == sum(mask.sum() for mask in masks.values())
    assert costs["params"](counts) == count_params(small.params)
    assert costs["bytes"](counts) == 2 * count_params(small.params)
    image = jnp.zeros((1, *MODEL.example().shape[1:]))
    assert costs["macs"](counts) == count_macs(small.logits, image)


@pytest.mark.parametrize("unit", ["channels", "params", "macs", "bytes"])
@pytest.mark.parametrize("keep", [0.9, 0.5, 0.25])
@pytest.mark.parametrize("is_ranked", [False, True])
def test_solutions_are_the_largest_within_the_target(
    sizes, costs, unit, keep, is_ranked
):
    scores, limits = scores_of(sizes) if is_ranked else None, CountLimits(sizes)
    family = ranked_family(limits, scores) if is_ranked else uniform_family(limits)
    solution = solve_keep_counts(Target(unit, keep=keep), costs, limits, scores=scores)
    dense = costs[unit](sizes)
    within = [
        family.counts(i)
        for i in range(len(family))
        if costs[unit](family.counts(i)) <= keep * dense
    ]
    assert solution.keep_counts == within[-1]
    assert solution.achieved == costs[unit](within[-1])
    assert (solution.dense, solution.asked) == (dense, keep * dense)
    assert solution.is_monotone
    assert solution.evaluations <= 3 + np.ceil(np.log2(len(family)))


def test_amounts_and_shares_are_the_same_question(sizes, limits, costs):
    dense = costs["params"](sizes)
    share = solve_keep_counts(Target("params", keep=0.4), costs, limits)
    amount = solve_keep_counts(Target("params", at_most=0.4 * dense), costs, limits)
    assert share.keep_counts == amount.keep_counts


def test_everything_is_kept_where_everything_fits(sizes, limits, costs):
    solution = solve_keep_counts(Target("params", keep=1.0), costs, limits)
    assert solution.keep_counts == sizes
    assert solution.density == 1.0
    assert "(1.000)" in str(solution)


@pytest.mark.parametrize("round_to", [1, 4, 8])
def test_excluded_groups_and_multiples(sizes, costs, round_to):
    name = next(iter(sizes))
    limits = CountLimits(sizes, round_to, exclude=(name,))
    solution = solve_keep_counts(Target("params", keep=0.6), costs, limits)
    assert solution.keep_counts[name] == sizes[name]
    for other, kept in solution.keep_counts.items():
        whole = kept == sizes[other]
        assert whole or kept % quantum_of(sizes[other], round_to) == 0


@pytest.mark.parametrize("unit", ["params", "macs", "bytes"])
@pytest.mark.parametrize("is_ranked", [False, True])
def test_targets_are_met_in_multiples_or_refused(sizes, costs, unit, is_ranked):
    limits = CountLimits(sizes, multiples={"*>=32": 16, "*": 3})
    scores = scores_of(sizes) if is_ranked else None

    def solve(keep):
        target = Target(unit, keep=keep)
        return solve_keep_counts(target, costs, limits, scores=scores)

    for keep in (0.9, 0.6, 0.4):
        solution = solve(keep)
        assert solution.achieved == costs[unit](solution.keep_counts)
        assert solution.achieved <= keep * solution.dense
        for name, kept in solution.keep_counts.items():
            step = 16 if sizes[name] >= 32 else 3
            assert kept == sizes[name] or kept % step == 0
    with pytest.raises(UserError, match=r"out of reach.*round_to or multiples"):
        solve(0.02)


def test_what_cannot_be_reached_is_refused_with_the_least_that_can(limits, costs):
    least = costs["params"](uniform_family(limits).counts(0))
    solution = solve_keep_counts(Target("params", at_most=least), costs, limits)
    assert solution.achieved == least
    with pytest.raises(UserError, match=rf"out of reach: {least:,} \(0\.\d+ of the"):
        solve_keep_counts(Target("params", at_most=least - 1), costs, limits)


def test_costs_are_evaluated_once_and_few():
    calls = []

    def cost(counts):
        calls.append(counts["a"])
        return counts["a"]

    target, limits = Target("latency", keep=0.5), CountLimits({"a": 4096})
    solution = solve_keep_counts(target, {"latency": cost}, limits, max_evaluations=6)
    assert len(calls) == len(set(calls)) == solution.evaluations <= 6
    assert solution.achieved <= 2048
    assert 2048 - solution.achieved <= 4096 / 8, "eight evenly spaced members"


def test_a_cost_that_falls_is_reported_and_the_target_is_kept():
    # Faster with more channels in places, as measured latencies may be.
    def cost(counts):
        return counts["a"] + 400 * (counts["a"] // 64 % 2)

    target, limits = Target("latency", at_most=450), CountLimits({"a": 1024})
    solution = solve_keep_counts(target, {"latency": cost}, limits)
    assert solution.achieved == cost(solution.keep_counts) <= 450
    assert not solution.is_monotone


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"unit": "watts", "keep": 0.5}, "'watts' is unknown; use channels"),
        ({"unit": "macs"}, "exactly one"),
        ({"unit": "macs", "keep": 0.5, "at_most": 3}, "exactly one"),
        ({"unit": "macs", "keep": 0.0}, r"outside \(0, 1\]"),
        ({"unit": "macs", "keep": float("nan")}, r"outside \(0, 1\]"),
        ({"unit": "macs", "at_most": -1.0}, "must be positive"),
    ],
)
def test_targets_that_mean_nothing(arguments, words):
    with pytest.raises(UserError, match=words):
        Target(**arguments)


def test_a_unit_without_a_cost_and_a_search_without_evaluations(costs):
    limits = CountLimits({"a": 8})
    with pytest.raises(UserError, match="no cost for a target in latency"):
        solve_keep_counts(Target("latency", keep=0.5), costs, limits)
    with pytest.raises(UserError, match="max_evaluations=3"):
        solve_keep_counts(Target("params", keep=0.5), costs, limits, max_evaluations=3)


def test_latency_is_the_median_corrected_for_drift():
    """A clock that runs at half speed from the second measurement on."""
    clock, pace = [0.0], [1.0]

    def make_call(counts):
        def call():
            clock[0] += pace[0] * counts["a"]

        return call

    cost = latency_cost(make_call, {"a": 8}, num_calls=3, now=lambda: clock[0])
    assert cost({"a": 8}) == 8
    pace[0] = 2.0
    assert cost({"a": 4}) == 4, "twice the time, and so has the dense network"


def test_latency_of_a_function_is_measured_on_the_small_one(trace, sizes, network):
    images = jnp.zeros((2, *MODEL.example().shape[1:]))
    make_call = small_calls(
        MODEL.apply, trace, network.params, images, statistics=network.statistics
    )
    cost = latency_cost(make_call, sizes, num_calls=2, warm_up=1)
    assert cost({name: size // 2 for name, size in sizes.items()}) > 0.0
    assert make_call({name: 2 for name in sizes})().shape == (2, 10)


@pytest.mark.parametrize("unit", ["params", "macs", "bytes"])
def test_budgets_keep_the_share_of_their_unit(trace, sizes, costs, unit):
    config = SparsityConfig(sparsity=0.6, unit=unit)
    budget = model_budget(config, MODEL, trace)
    assert budget.keep_counts_at(1.0) == sizes
    shares = (0.9, 0.7, 0.4)
    counts = [budget.keep_counts_at(share) for share in shares]
    for share, found in zip(shares, counts, strict=True):
        assert costs[unit](found) <= share * costs[unit](sizes)
    for more, less in itertools.pairwise(counts):
        assert all(less[name] <= more[name] for name in sizes)


def test_budgets_round_to_the_multiples_of_their_settings(trace, sizes, costs):
    for unit in ("channels", "macs"):
        config = SparsityConfig(sparsity=0.6, unit=unit, multiples=("*:5",))
        budget = model_budget(config, MODEL, trace)
        counts = budget.keep_counts_at(0.4)
        assert all(kept % 5 == 0 or kept == sizes[n] for n, kept in counts.items())
        assert counts != sizes
    with pytest.raises(UserError, match=r"'convv\*', which names no channel group"):
        config = SparsityConfig(unit="params", multiples=("convv*:5",))
        model_budget(config, MODEL, trace).keep_counts_at(0.5)


def test_global_budgets_rank_normalised_scores(trace, sizes, costs):
    config = SparsityConfig(sparsity=0.5, unit="params", budget="global")
    budget = model_budget(config, MODEL, trace)

    def raw_scores(turn):
        # Of another scale in every group, which must not matter; few strong channels
        # in every second group, which must.
        return {
            name: scores ** (4 if (i + turn) % 2 else 0.1) * 10.0**i
            for i, (name, scores) in enumerate(scores_of(sizes).items())
        }

    raw = raw_scores(turn=1)
    first = budget.keep_counts_at(0.55, raw_scores(turn=0), sizes)
    second = budget.keep_counts_at(0.5, raw, first)
    free = budget.keep_counts_at(0.5, raw)
    assert any(free[name] > first[name] for name in sizes), "an empty test"
    scores = {n: np.asarray(s) for n, s in normalise_scores(raw).items()}
    family = ranked_family(CountLimits(sizes), scores, previous=first)
    assert second in [family.counts(i) for i in range(len(family))]
    assert all(second[name] <= first[name] for name in sizes)
    assert costs["params"](second) <= 0.5 * costs["params"](sizes)
    assert second != budget.keep_counts_at(0.5), "not the uniform ones"


def test_channels_are_rounded_to_the_nearest_as_ever(trace, sizes):
    budget = model_budget(SparsityConfig(sparsity=0.5), MODEL, trace)
    assert budget.keep_counts_at(0.5) == {n: s // 2 for n, s in sizes.items()}


def test_a_run_that_asks_for_too_much_names_its_settings(trace):
    config = SparsityConfig(sparsity=0.999, unit="macs")
    with pytest.raises(
        UserError, match=r"config\.sparsity\.sparsity=0\.999 of .*'macs'.*out of reach"
    ):
        model_budget(config, MODEL, trace).keep_counts_at(0.001)


@pytest.mark.parametrize("unit", ["channels", "params", "macs", "bytes"])
@pytest.mark.parametrize("budget", ["uniform", "global"])
@pytest.mark.parametrize("scope", ["all", "inner"])
def test_budgets_stay_within_the_limits_of_groups(
    trace, sizes, costs, unit, budget, scope
):
    config = SparsityConfig(
        sparsity=0.3,
        unit=unit,
        budget=budget,
        scope=scope,
        max_group_sparsity=0.5,
        exclude=("stem",),
    )
    inner = {group.name for group in trace.groups if group.is_inner}
    assert 0 < len(inner) < len(sizes)
    found = model_budget(config, MODEL, trace)
    scores = {
        n: s ** (4 * (i % 2)) for i, (n, s) in enumerate(scores_of(sizes).items())
    }
    counts = found.keep_counts_at(0.7, scores, sizes)
    for name, kept in counts.items():
        is_open = "stem" not in name and (scope == "all" or name in inner)
        assert kept == sizes[name] if not is_open else 2 * kept >= sizes[name]
    assert counts != sizes
    if unit != "channels":
        assert costs[unit](counts) <= 0.7 * costs[unit](sizes)


def test_a_share_that_the_limits_of_groups_leave_out_of_reach_names_both(trace):
    config = SparsityConfig(
        sparsity=0.8, unit="macs", max_group_sparsity=0.25, scope="inner"
    )
    both = r"sparsity=0\.8 .*max_group_sparsity=0\.25 and .*scope='inner': .*out of"
    with pytest.raises(UserError, match=both):
        model_budget(config, MODEL, trace).keep_counts_at(0.2)


RUN = {
    "data": {"batch_size": 32},
    "model": {"width": 0.5},
    "run": {"steps": 12},
    "topology": {"layout": "2"},
    "sparsity": {"sparsity": 0.6, "unit": "macs", "num_stairs": 2},
}


def test_experiments_solve_before_they_train():
    topology = make_topology("2", devices=jax.devices()[:2])
    run = {**RUN, "model": {"name": "tiny"}}
    experiment = make_experiment(resolve_config(run), topology)
    macs = experiment.channels.budget.costs["macs"]
    share = macs(experiment.channels.keep_counts) / macs(experiment.channels.sizes)
    assert 0.3 < share <= 0.4
    too_much = {**RUN["sparsity"], "sparsity": 0.9999}
    with pytest.raises(UserError, match=r"sparsity=0\.9999 of .*out of reach"):
        make_experiment(resolve_config({**run, "sparsity": too_much}), topology)


def test_experiments_prune_inside_of_blocks_only():
    topology = make_topology("2", devices=jax.devices()[:2])
    run = {**RUN, "model": {"name": "tiny"}}
    run["sparsity"] = {"scope": "inner", "sparsity": 0.5}
    experiment = make_experiment(resolve_config(run), topology)
    channels = experiment.channels
    for group in channels.trace.groups:
        kept = channels.keep_counts[group.name]
        assert kept == (group.size // 2 if group.is_inner else group.size)
    described = environment(topology.describe())
    screen = start_screen(experiment, "run", described, "new")
    assert "inner: 2 of the groups, with 24 channels" in screen
    run["sparsity"] = {"sparsity": 0.8, "max_group_sparsity": 0.75}
    with pytest.raises(UserError, match=r"max_group_sparsity = 0\.75"):
        make_experiment(resolve_config(run), topology)


@pytest.mark.rotates
@pytest.mark.parametrize("budget", ["uniform", "global"])
def test_runs_end_within_their_target(tmp_path, budget):
    sparsity = {**RUN["sparsity"], "budget": budget}
    result = train({**RUN, "sparsity": sparsity}, tmp_path / "run")
    share = result.summary["macs_kept"] / result.summary["macs_dense"]
    assert 0.3 < share <= 0.4


def test_unknown_units_are_refused_when_settings_are_read():
    with pytest.raises(UserError, match="did you mean 'params'"):
        resolve_config({"sparsity": {"unit": "parms"}, "run": {"steps": 1}})
