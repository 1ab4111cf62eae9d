"""Runs that cut their dead channels out in mid-run are the runs that do not."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.comm import list_collectives
from prunex_jax.mesh import make_topology
from prunex_jax.shrink.cost import count_macs
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import macs_of_one_example, make_experiment
from prunex_jax.train.build.work import macs_until
from prunex_jax.train.changes.transitions import experiment_at, hand_over
from prunex_jax.train.records.checkpoint import Checkpointer
from prunex_jax.train.run import train
from prunex_jax.train.steps.position import RunPosition
from tests.helpers.tiny_runs import (
    ROUNDING,
    complete_steps,
    merged,
    rows_of,
    settings,
    start,
    start_two,
    wait_for_checkpoint,
)

# Rounds of four steps: the mask freezes in the one that ends at step 12.
EVENT, NUM_STEPS = 16, 28
SHRINKING = {"start_share": 0.1, "freeze_share": 0.25, "shrink_share": 0.5}


def shrinking(share=0.5, **changes):
    """Settings of a small run that shrinks at step 16, or at its end with share 1."""
    values = settings(
        sparsity={**SHRINKING, "shrink_share": share, "num_stairs": 1},
        run={
            "steps": NUM_STEPS,
            "log_every_steps": 4,
            "checkpoint_every_steps": 4,
            "checkpoints_kept": 9,
        },
        # Larger steps blow rounding up.
        optimizer={"learning_rate": 0.001},
    )
    return merged(values, changes)


def experiment_of(values):
    config = resolve_config(values)
    return make_experiment(config, make_topology(config.topology.layout))


def checkpoint_of(values, workdir, step=None):
    """Experiment, state and position of a checkpoint; the newest without `step`."""
    full = experiment_of(values)

    def at(saved):
        return experiment_at(full, RunPosition.from_dict(saved))

    with Checkpointer(workdir / "checkpoints", keep=9) as checkpointer:
        state, saved = checkpointer.restore(
            lambda saved, _: at(saved).current.programs.abstract_state(), step
        )
    return at(saved), state, RunPosition.from_dict(saved)


def sizes_of(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def assert_same_bits(actual, expected):
    expected = flatten_by_path(expected)
    assert flatten_by_path(actual).keys() == expected.keys()
    for path, leaf in flatten_by_path(actual).items():
        wanted = np.asarray(expected[path])
        assert np.asarray(leaf).tobytes() == wanted.tobytes(), path


FORMS = {
    "sgd with momentum": {},
    "a copy and dual per device, two levels": {
        "method": {
            "hsadmm": {
                "preset": "paper",
                "device_level": "consensus",
            }
        },
    },
    "a leaky dual, adamw": {
        "method": {"hsadmm": {"preset": "leaky"}},
        "optimizer": {"name": "adamw", "clip_norm": 1.0},
        "model": {"norm_scope": "host"},
    },
    "errors of rounds": {
        "method": {
            "wire_dtype": "bfloat16",
            "rounds": {"error_decay": 0.9, "top_k": 4096, "top_k_route": "owners"},
        },
    },
    "channels where they matter": {"sparsity": {"budget": "global"}},
    "an outer step by law": {"method": {"rounds": {"outer": "law"}}},
    "slopes of the loss inside of blocks": {
        "sparsity": {"criterion": "taylor", "scope": "inner"}
    },
}


EXHAUSTIVE_FORMS = (
    "a leaky dual, adamw",
    "a copy and dual per device, two levels",
    "channels where they matter",
    "slopes of the loss inside of blocks",
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(
            form,
            marks=pytest.mark.rotates if form in EXHAUSTIVE_FORMS else pytest.mark.slow,
        )
        for form in FORMS
    ],
)
def test_cutting_and_training_commute(form, tmp_path):
    """Cut and train on, or train on and cut: everything is the same, to rounding.

    Parameters, moments, consensus, duals and statistics, on 2 hosts x 4 devices; 12
    steps apart.
    """
    values = shrinking(**FORMS[form])
    later = shrinking(**FORMS[form])
    later["sparsity"]["shrink_share"] = 1.0
    shrunk = train(values, tmp_path / "shrunk")
    masked = train(later, tmp_path / "masked")

    for name, mask in masked.masks.items():
        np.testing.assert_array_equal(shrunk.masks[name], mask, err_msg=name)
    small, state, _ = checkpoint_of(values, tmp_path / "shrunk")
    full, full_state, _ = checkpoint_of(later, tmp_path / "masked")
    cut_later, cut_state, _ = hand_over(full, full_state, NUM_STEPS, 0.0)
    kept = [x.model.kept for x in (cut_later.current, small.current, shrunk.network)]
    assert kept[0] == kept[1] == kept[2]
    _, at_event, _ = checkpoint_of(values, tmp_path / "shrunk", EVENT)
    # On the host: operation by operation, sums over devices can wait for each other.
    state, cut_state, at_event = jax.device_get((state, cut_state, at_event))

    found, wanted = flatten_by_path(state), flatten_by_path(cut_state)
    scale = optax.tree.norm(optax.tree.sub(state.params, at_event.params))
    assert scale > 1e-3, "nothing was trained"
    assert found.keys() == wanted.keys()
    for path, leaf in found.items():
        value, other = np.asarray(leaf, np.float64), np.asarray(wanted[path])
        apart = np.linalg.norm(value - other)
        # Momentum holds single gradients, in which a ReLU near zero may go either way.
        assert apart <= 3 * ROUNDING * np.linalg.norm(value) + 1e-7, path
    apart = optax.tree.norm(optax.tree.sub(state.params, cut_state.params))
    assert apart < ROUNDING * scale
    difference = optax.tree.sub(shrunk.network.params, masked.network.params)
    assert optax.tree.norm(difference) < ROUNDING * scale


@pytest.mark.slow
def test_work_is_that_of_the_networks_that_were_trained(tmp_path):
    """Also what a run goes on from that is resumed after its cut."""
    models, values = [], shrinking(run={"steps": NUM_STEPS, "checkpoints_kept": 20})

    def look(progress, state):
        models.append(progress.experiment.current.model)

    result = train(values, tmp_path, after_step=[look])
    counted = {model: macs_of_one_example(model) for model in set(models)}
    macs = [counted[model] for model in models[:-1]]
    assert len(macs) == NUM_STEPS and len(set(macs)) == 2
    assert result.summary["training_macs"] == 32 * sum(macs)
    assert result.summary["training_macs_dense"] == 32 * NUM_STEPS * macs[0]
    run, _, position = checkpoint_of(values, tmp_path)
    assert macs_until(run, NUM_STEPS, position.handover) == sum(macs)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """One shrinking run without interruption, in this process."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    return train(shrinking(), workdir), workdir


@pytest.mark.rotates
def test_killed_before_and_after_the_event_it_ends_with_the_same_bits(
    whole_run, tmp_path
):
    reference, reference_dir = whole_run
    values = shrinking(topology={"cpu_devices": 8})
    workdir = tmp_path / "run"
    for least in (4, EVENT):
        killed = start(tmp_path, values, workdir)
        wait_for_checkpoint(killed, workdir, least)
        killed.kill()
        killed.communicate(timeout=120)
        assert not (workdir / "summary.json").exists(), "to be killed before the end"
        is_after = max(complete_steps(workdir)) >= EVENT
        assert is_after == (least == EVENT), "killed on the wrong side of the event"
    finished = start(tmp_path, values, workdir)
    output, _ = finished.communicate(timeout=240)
    assert finished.returncode == 0, output
    resumed = re.search(r"resumed at step (\d+)", output)
    assert resumed and EVENT <= int(resumed[1]) < NUM_STEPS

    small, state, position = checkpoint_of(shrinking(), workdir)
    same, expected, _ = checkpoint_of(shrinking(), reference_dir)
    assert position.step == NUM_STEPS
    assert small.current.model.kept == same.current.model.kept
    assert_same_bits(state, expected)
    rows = rows_of(workdir)
    assert [row["step"] for row in rows] == list(range(4, NUM_STEPS + 1, 4))
    for row, wanted in zip(rows, rows_of(reference_dir), strict=True):
        timed = {key for key in row if "second" in key}
        assert {k: v for k, v in row.items() if k not in timed} == {
            k: v for k, v in wanted.items() if k not in timed
        }
    summary = json.loads((workdir / "summary.json").read_text())
    for key, value in summary.items():
        if "second" not in key and key != "num_compilations":
            assert value == reference.summary[key], key


@pytest.mark.slow
def test_a_checkpoint_before_the_event_holds_the_full_network(whole_run):
    result, workdir = whole_run
    for step, size in ((EVENT - 4, "params_dense"), (EVENT, "params_kept")):
        experiment, state, _ = checkpoint_of(shrinking(), workdir, step)
        params, _ = experiment.current.programs.network(state)
        assert sizes_of(params) == result.summary[size]


@pytest.mark.slow
def test_summary_and_curves_are_of_one_run(whole_run):
    result, workdir = whole_run
    summary, rows = result.summary, rows_of(workdir)
    assert summary["shrink_step"] == EVENT
    assert summary["shrink_max_abs_error"] < 1e-4
    assert summary["params_kept"] == sizes_of(result.network.params)
    assert summary["params_kept"] / summary["params_dense"] < 0.3
    assert summary["macs_kept"] / summary["macs_dense"] < 0.3
    assert summary["channel_sparsity"] == 0.5
    assert summary["host_payload_bytes_steady"] == 4 * summary["params_kept"]
    assert summary["host_payload_bytes_dense"] == 4 * summary["params_dense"]
    assert summary["num_rounds"] == NUM_STEPS // 4
    assert {row["sparsity"] for row in rows if row["step"] >= EVENT} == {0.5}
    sent = np.diff([row["host_wire_bytes"] for row in rows])
    steps = [row["step"] for row in rows[1:]]
    # The first row after the event also has the statistics for measuring its error.
    frozen = [n for n, step in zip(sent, steps, strict=True) if step > EVENT + 4]
    assert len(frozen) == 2
    # The payload, padded for four devices, and a few numbers for the log.
    for num_bytes in frozen:
        assert 0 <= num_bytes - summary["host_payload_bytes_steady"] < 300
    assert all(np.isfinite(row["seconds_per_step_median"]) for row in rows)
    for row in rows:
        dense = row["host_wire_bytes"] / row["host_wire_ratio"]
        assert dense == pytest.approx(4 * summary["params_dense"] * row["step"], 1e-3)


@pytest.mark.slow
def test_same_command_again_changes_nothing(whole_run):
    result, workdir = whole_run
    again = train(shrinking(), workdir)
    assert_same_bits(again.network.params, result.network.params)
    for key in ("test_loss", "shrink_max_abs_error", "host_payload_bytes_steady"):
        assert again.summary[key] == result.summary[key]


@pytest.mark.slow
def test_steps_and_exchanges_are_those_of_the_small_network(whole_run):
    _, workdir = whole_run
    full = experiment_of(shrinking())
    small, _, _ = checkpoint_of(shrinking(), workdir)
    batch = {
        "image": full.task.model.example(32),
        "label": jax.ShapeDtypeStruct((32,), np.int32),
    }
    macs, texts, payloads = [], [], []
    for experiment in (full, small):
        state = experiment.current.programs.abstract_state()
        counts = [
            (g.name, experiment.channels.keep_counts[g.name])
            for g in experiment.current.groups
        ]
        compiled = experiment.current.programs.exchange.compile(
            state, keep_counts=tuple(counts), kind="frozen"
        )
        sent = [c.num_elements for c in compiled.collectives if c.axes == ("host",)]
        payloads.append(max(sent))
        build = experiment.current.programs.exchange._build
        traced = jax.make_jaxpr(build(keep_counts=tuple(counts), kind="frozen"))(state)
        texts.append(str(traced))
        step = experiment.current.programs.local_step._build()
        macs.append(count_macs(step, state, batch))
        listed = list_collectives(jax.make_jaxpr(step)(state, batch))
        sums = [c.num_elements for c in listed if c.axes == ("device",)]
        shapes = jax.eval_shape(experiment.current.model.init, jax.random.key(0))[0]
        assert max(sums) == sizes_of(shapes), "gradients are those of the network"
    # A quarter, and the forward part of convolutions in chunks again, which their
    # gradients do not read, and XLA leaves out.
    assert macs[1] < 0.33 * macs[0]
    assert payloads[0] == payloads[1]
    for word in ("gather[", "sort["):
        assert word in texts[0], "choosing and compacting"
        assert word not in texts[1], "nothing is left to choose or to compact"


@pytest.mark.slow
def test_a_part_that_cannot_be_cut_is_named(monkeypatch):
    """An optimizer that keeps one number per output channel, not one per weight."""

    def make_odd(config, learning_rate, own, axes=None):
        def init(params):
            return {"norms": jax.tree.map(lambda p: jnp.zeros(p.shape[-1]), params)}

        def update(updates, state, params=None):
            return updates, state

        odd = optax.GradientTransformation(init, update)
        return optax.chain(optax.sgd(learning_rate), odd)

    monkeypatch.setattr("prunex_jax.train.build.experiment.make_inner", make_odd)
    experiment = experiment_of(shrinking())
    state = experiment.current.programs.init(jax.random.key(0))
    counts = tuple(experiment.channels.keep_counts.items())
    state = experiment.current.programs.exchange(
        state, keep_counts=counts, kind="freeze"
    )
    with pytest.raises(UserError, match=r"shrink_share = 0.5.*norms/.*set it to 1"):
        hand_over(experiment, state, 4, 0.1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sparsity": {"shrink_share": 0.2}}, "0.2 is before sparsity.freeze_share"),
        ({"method": {"name": "dense"}}, "method dense prunes none"),
        ({"sparsity": {"sparsity": 0.0}}, r"sparsity.sparsity = 0 prunes none"),
        ({"sparsity": {"shrink_share": 0.95}}, "after step 28 of 28"),
    ],
)
def test_what_cannot_shrink_is_refused_before_anything_is_written(
    changes, text, tmp_path
):
    with pytest.raises(UserError, match=text):
        train(shrinking(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_network_that_loses_nothing_goes_on(tmp_path):
    """All groups are left dense: the event cuts nothing and changes nothing."""
    values = shrinking(sparsity={"exclude": ("blocks", "stem")}, run={"steps": 20})
    summary = train(values, tmp_path / "run").summary
    assert summary["params_kept"] == summary["params_dense"]
    assert summary["channel_sparsity"] == 0.0


@pytest.mark.slow
def test_processes_shrink_together(tmp_path):
    """Two processes, stopped by a signal after the event, end like one process."""
    values = shrinking(topology={"cpu_devices": 4}, data={"batch_size": 64})
    per_process = shrinking(
        topology={"cpu_devices": 2, "layout": "process"}, data={"batch_size": 64}
    )
    processes = start_two(tmp_path, per_process, tmp_path / "two")
    wait_for_checkpoint(processes[0], tmp_path / "two", EVENT)
    for process in processes:
        process.kill()
        process.communicate(timeout=120)
    processes = start_two(tmp_path, per_process, tmp_path / "two")
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    resumed = re.search(r"resumed at step (\d+)", outputs[0])
    assert resumed and int(resumed[1]) >= EVENT

    one = start(tmp_path, values, tmp_path / "one")
    output, _ = one.communicate(timeout=300)
    assert one.returncode == 0, output
    config = resolve_config(values)
    topology = make_topology("2", devices=jax.devices()[:4])
    full = make_experiment(config, topology)
    ends, kept = [], []
    for name in ("one", "two"):
        with Checkpointer(tmp_path / name / "checkpoints", keep=9) as checkpointer:

            def at(saved):
                return experiment_at(full, RunPosition.from_dict(saved))

            state, saved = checkpointer.restore(
                lambda saved, _: at(saved).current.programs.abstract_state()
            )
        kept.append(saved["handover"]["kept"])
        ends.append(jax.device_get(state.opt_state.global_consensus))
    assert kept[0] == kept[1]
    apart = optax.tree.norm(optax.tree.sub(*ends))
    # Sums over processes round in another order; another event would differ by 0.1.
    assert float(apart) < 1e-3 * float(optax.tree.norm(ends[0]))
