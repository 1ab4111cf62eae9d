"""Another number of hosts or devices: what stays of a state, for every method."""

import functools
import json
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path, shapes_by_path
from prunex_jax.mesh import make_topology, specs_of
from prunex_jax.methods import METHODS
from prunex_jax.models.base import to_moments
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.changes.regroup import (
    Regrouping,
    placed_like,
    regroup_copies,
    shares_of,
)
from prunex_jax.train.records.restoring import load_trained
from prunex_jax.train.run import train
from prunex_jax.train.steps.programs import placements_of
from prunex_jax.train.steps.state import FIRST_BAD_STEP
from tests.helpers.tiny_runs import (
    SETTINGS,
    StopAtOnce,
    merged,
    rows_of,
    start_two,
    stop_after,
)
from tests.methods.test_contract import RECIPES, ROWS, Runner

# Hosts x devices: before and after.
CHANGES = [
    ((4, 1), (2, 1)),
    ((4, 1), (3, 1)),
    ((4, 1), (8, 1)),
    ((4, 1), (1, 1)),
    ((2, 1), (2, 4)),
    ((2, 4), (3, 2)),
]


@functools.cache
def runner_of(row, shape):
    return Runner(row, shape, **RECIPES.get(row, {}))


def drawn(abstract, seed=0):
    """A state of these shapes in which all numbers differ."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        if jnp.issubdtype(leaf.dtype, np.floating):
            return rng.normal(size=leaf.shape).astype(leaf.dtype)
        return np.full(leaf.shape, 5, leaf.dtype)

    return jax.tree.map(draw, abstract)


def num_axes_of(method, state):
    """Leading axes of every leaf."""
    return flatten_by_path(
        jax.tree.map(
            lambda place, part: jax.tree.map(lambda _: len(specs_of(place)), part),
            placements_of(method),
            state,
        )
    )


def test_every_method_is_tested():
    assert {config.name for config in ROWS.values()} >= set(METHODS)


@pytest.mark.parametrize("old", range(1, 9))
@pytest.mark.parametrize("new", range(1, 9))
def test_shares_are_a_whole_for_both_sides(old, new):
    table = np.zeros((new, old))
    for owner, shares in enumerate(shares_of(old, new)):
        for i, share in shares.items():
            assert share > 0
            table[owner, i] = share
    np.testing.assert_allclose(table.sum(1), 1)
    np.testing.assert_allclose(table.sum(0), new / old)
    if old == new:
        np.testing.assert_array_equal(table, np.eye(old))


@pytest.mark.sampled(55)
@pytest.mark.parametrize("old, new", CHANGES)
@pytest.mark.parametrize("row", ROWS)
def test_means_over_owners_stay_and_zeros_stay_zero(row, old, new):
    """Consensus, sums of duals that are zero, and what is held back, per method."""
    before, after = runner_of(row, old), runner_of(row, new)
    method, wanted = before.method, after.programs.abstract_state()
    state = drawn(before.programs.abstract_state())
    regrouping = Regrouping(method, wanted, shapes_by_path(state))
    stored = flatten_by_path(regrouping.stored())
    found = flatten_by_path(regrouping.regrouped(state))
    empty = jax.tree.map(np.zeros_like, state)
    nothing = flatten_by_path(regrouping.regrouped(empty))
    counts, shapes = num_axes_of(method, state), flatten_by_path(wanted)
    assert (regrouping.old, regrouping.new) == (old, new)
    for path, leaf in flatten_by_path(state).items():
        axes = tuple(range(counts[path]))
        assert (stored[path].shape, stored[path].dtype) == (leaf.shape, leaf.dtype)
        assert found[path].shape == shapes[path].shape, path
        assert found[path].dtype == shapes[path].dtype, path
        assert not np.any(nothing[path]), path
        if not axes:
            assert found[path] is leaf
        elif path == f"totals/{FIRST_BAD_STEP}":
            assert np.all(found[path] == 5)
        elif path.startswith("totals/"):
            total = leaf.sum(dtype=np.float64)
            np.testing.assert_allclose(found[path].sum(), total, atol=1e-5)
        elif path.startswith("statistics/"):
            continue  # Below.
        elif method.placements.copies == "own":
            np.testing.assert_array_equal(found[path][0], leaf[0])
        elif leaf.dtype == np.float32:
            mean = leaf.mean(axes, dtype=np.float64)
            np.testing.assert_allclose(
                found[path].mean(axes, dtype=np.float64), mean, atol=1e-6, err_msg=path
            )
        else:
            assert np.all(found[path] == 5), path


@pytest.mark.parametrize("old, new", CHANGES)
def test_the_mean_of_a_host_is_its_share_of_the_old_hosts(old, new):
    """So device duals and copies go on fitting to the consensus of their host."""
    runner, row = runner_of("hsadmm per device", old), "b/kernel"
    state = drawn(runner.programs.abstract_state())
    wanted = runner_of("hsadmm per device", new).programs.abstract_state()
    regrouping = Regrouping(runner.method, wanted, shapes_by_path(state))
    found = regrouping.regrouped(state)
    before, after = (flatten_by_path(each.params)[row] for each in (state, found))
    assert after.shape[:2] == new
    of_hosts = regroup_copies(before.mean(1), new[0])
    np.testing.assert_allclose(after.mean(1), of_hosts, atol=1e-6)


def test_equal_copies_stay_bit_for_bit():
    one = np.random.default_rng(2).normal(size=100).astype(np.float32)
    for old, new in [(4, 3), (3, 7), (5, 2)]:
        found = regroup_copies(np.stack([one] * old), new)
        np.testing.assert_array_equal(found, np.stack([one] * new))


def test_bfloat16_is_averaged_in_float32():
    copies = jnp.array([[1.0], [1.0], [1.0078125]], jnp.bfloat16)
    found = regroup_copies(np.asarray(copies), 1)
    assert found.dtype == jnp.bfloat16 and float(found[0, 0]) == 1.0


@pytest.mark.parametrize("name", METHODS)
def test_the_network_that_a_method_stands_for_stays(name):
    """On a real mesh, in the programs of the trainer."""
    row = next(row for row, config in ROWS.items() if config.name == name)
    before, after = runner_of(row, (4, 1)), runner_of(row, (3, 1))
    fresh = before.init()
    state = jax.tree.map(
        lambda x: (
            x + np.arange(x.size, dtype=np.float32).reshape(x.shape) / x.size
            if x.ndim and x.dtype == np.float32
            else x
        ),
        jax.device_get(fresh),
    )
    like = before.programs.abstract_state()
    wanted = after.programs.abstract_state()
    regrouping = Regrouping(before.method, wanted, shapes_by_path(state))
    new = regrouping.regrouped(state)
    new = jax.tree.map(np.asarray, new)
    old_network, _ = before.programs.network(placed_like(state, like))
    new_network, _ = after.programs.network(placed_like(new, wanted))
    for was, now in zip(*map(jax.tree.leaves, (old_network, new_network)), strict=True):
        np.testing.assert_allclose(was, now, rtol=1e-6)
    old_masks = before.method.pruning.masks(state.opt_state)
    new_masks = after.method.pruning.masks(new.opt_state)
    jax.tree.map(np.testing.assert_array_equal, old_masks, new_masks)


def test_running_statistics_keep_the_moments_of_all_devices():
    runner = runner_of("dense", (4, 1))
    rng = np.random.default_rng(3)
    norm = {"mean": rng.normal(size=(4, 1, 5)), "var": rng.uniform(1, 2, (4, 1, 5))}
    norm = {name: x.astype(np.float32) for name, x in norm.items()}
    state = drawn(runner.programs.abstract_state())._replace(statistics={"norm": norm})
    wanted = runner_of("dense", (3, 2)).programs.abstract_state()
    regrouping = Regrouping(runner.method, wanted, shapes_by_path(state))
    found = regrouping.regrouped(state)
    before = to_moments(state.statistics)["norm"]
    after = to_moments(found.statistics)["norm"]
    for name, x in before.items():
        assert after[name].shape == (3, 2, 5)
        np.testing.assert_allclose(
            after[name].mean((0, 1)), x.mean((0, 1)), rtol=1e-4, atol=1e-5
        )


def values_of(hosts, method="hsadmm", steps=12):
    """Settings of a run on simulated hosts."""
    changes = {
        "topology": {"layout": "auto", "simulated": f"{hosts}x1"},
        "data": {"batch_size": 48},
        "method": {"name": method},
        "run": {"steps": steps},
    }
    return merged(SETTINGS, changes)


def run_until(step, values, workdir):
    """Trains until a step, and ends there as a crash would."""
    with pytest.raises(StopAtOnce):
        train(resolve_config(values), workdir, after_step=[stop_after(step)])


@pytest.mark.slow
def test_a_run_goes_on_on_fewer_hosts_unless_refused(tmp_path, capsys):
    run_until(7, values_of(4, "topk"), tmp_path)
    config = resolve_config(values_of(2, "topk"))
    with pytest.raises(UserError, match=r"num_hosts=4, this one has 2; .*exact_topo"):
        train(config, tmp_path, exact_topology=True)
    capsys.readouterr()
    result = train(config, tmp_path)
    assert "continues on 2 hosts instead of 4" in capsys.readouterr().out
    assert result.summary["hosts"] == 2
    earlier = json.loads((tmp_path / "environment.json").read_text())["earlier"]
    assert [each["topology"]["num_hosts"] for each in earlier] == [4]
    # 5 steps on 4 hosts and 7 on 2, each 2 (M - 1) / M of all parameters.
    size = 4 * result.summary["params_dense"]
    dense = size * (5 * 1.5 + 7 * 1.0)
    assert result.summary["host_wire_bytes_dense"] == dense
    assert 0 < result.summary["host_wire_ratio"] < 1


@pytest.mark.slow
def test_a_checkpoint_older_than_the_last_start_is_refused_too(tmp_path):
    """The folder names the mesh of the last start, which may have saved nothing."""
    run_until(7, values_of(4, "topk"), tmp_path)
    run_until(5, values_of(2, "topk"), tmp_path)
    with pytest.raises(UserError, match=r"num_hosts=4, this one has 2"):
        train(resolve_config(values_of(2, "topk")), tmp_path, exact_topology=True)


@pytest.mark.slow
def test_a_run_goes_on_where_its_batches_do_not_divide(tmp_path, capsys):
    """48 examples a step on 4 hosts, then 45 on 5: what is left out is not counted."""
    five = resolve_config(values_of(5, "topk"))
    with pytest.raises(UserError, match="batch_size=48 does not divide evenly over 5"):
        train(five, tmp_path)
    run_until(7, values_of(4, "topk"), tmp_path)
    run_until(10, values_of(5, "topk"), tmp_path)
    summary = train(five, tmp_path).summary
    assert "5 hosts x 9 = 5 devices x 9 (and 3 left out)" in capsys.readouterr().out
    seen = 5 * 48 + 7 * 45
    assert summary["examples_seen"] == rows_of(tmp_path)[-1]["examples_seen"] == seen
    assert summary["training_macs"] == seen * summary["macs_dense"]
    assert summary["training_macs_dense"] == seen * summary["macs_dense"]
    assert load_trained(tmp_path).step == 12


def test_the_last_examples_of_a_batch_are_left_out():
    """The others are those of the same step, also where a device has them in parts."""

    def going_on(hosts, micro_batches):
        changes = {"optimizer": {"micro_batches": micro_batches}}
        config = resolve_config(merged(values_of(hosts), changes))
        topology = make_topology("auto", simulated=f"{hosts}x1")
        return make_experiment(config, topology, goes_on=True)

    whole, parts = going_on(4, 1), going_on(5, 2)
    assert (whole.batch_size, whole.left_out) == (48, 0)
    assert (parts.batch_size, parts.left_out) == (40, 8)
    assert parts.eval_batch_size == 40
    with whole.batches(3) as all_of_them, parts.batches(3) as most:
        for _ in range(2):
            jax.tree.map(
                lambda x, y: np.testing.assert_array_equal(x[:40], y),
                next(all_of_them),
                next(most),
            )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"batch_size": 4}, "data.batch_size=4 does not divide evenly over 5 devices"),
        (
            {"shards": "label_sorted"},
            "batch_size=48 does not divide evenly over 5",
        ),
    ],
)
def test_batches_that_cannot_lose_examples_are_refused(data, text):
    config = resolve_config(merged(values_of(5), {"data": data}))
    with pytest.raises(UserError, match=text):
        make_experiment(config, make_topology("auto", simulated="5x1"), goes_on=True)


@pytest.mark.slow
def test_two_processes_go_on_with_what_four_hosts_have_saved(tmp_path):
    run_until(7, values_of(4), tmp_path / "run")
    topology = {"simulated": "", "layout": "process", "cpu_devices": 2}
    values = merged(values_of(4), {"topology": topology})
    processes = start_two(tmp_path, values, tmp_path / "run")
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "continues on 2 hosts x 2 devices instead of 4 x 1" in outputs[0]


def run_through(method, workdir, seed=0):
    """A run on four hosts that crashes, goes on with two, and ends on three."""
    four, two, three = (
        {**values_of(hosts, method, 160), "seed": seed} for hosts in (4, 2, 3)
    )
    run_until(60, four, workdir)
    run_until(110, two, workdir)
    return train(resolve_config(three), workdir)


# Test accuracy of undisturbed runs, seeds 0 to 4: `python -m benchmarks regroup`.
UNDISTURBED = {
    "hsadmm": (0.866, 0.880, 0.833, 0.694, 0.749),
    "dgc": (0.454, 0.535, 0.451, 0.462, 0.479),
}


@pytest.mark.rotates
@pytest.mark.parametrize("method", UNDISTURBED)
def test_four_hosts_then_two_then_three_end_well(method, tmp_path):
    """Within the spread of undisturbed runs, and near the one of the same seed."""
    four = values_of(4, method, 160)
    undisturbed = train(resolve_config(four), tmp_path / "a")
    result = run_through(method, tmp_path / "b")
    rows = rows_of(tmp_path / "b")
    assert [row["step"] for row in rows] == [*range(3, 160, 3), 160]
    found = result.summary["test_accuracy"]
    mean, spread = (f(UNDISTURBED[method]) for f in (statistics.mean, statistics.stdev))
    assert abs(found - mean) < 2 * spread
    # Apart from it by 0.014, 0.039, -0.017 and 0.017, -0.039, -0.022 for three seeds.
    assert abs(found - undisturbed.summary["test_accuracy"]) < 0.06
    assert result.summary["params_kept"] == undisturbed.summary["params_kept"]
