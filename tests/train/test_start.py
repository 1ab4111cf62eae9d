"""Runs start from trained weights, score as these did, and resume without them."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prunex_jax.base.errors import AgreedError, UserError
from prunex_jax.base.trees import flatten_by_path, shapes_by_path
from prunex_jax.export.folder import ARRAYS, export_model
from prunex_jax.mesh import agreement
from prunex_jax.models import make_model
from prunex_jax.models.own import own_model
from prunex_jax.models.settings import ModelConfig
from prunex_jax.shrink import make_cut, trace_model
from prunex_jax.train.build.joining import check_same_weights
from prunex_jax.train.build.start import OURS, Weights, make_start, whole_tree
from prunex_jax.train.records.restoring import load_trained
from prunex_jax.train.records.weights import find_weights
from prunex_jax.train.run import train
from tests.helpers.tiny_runs import (
    StopAtOnce,
    merged,
    rows_of,
    start_two,
    stop_after,
)

PRUNING = {
    "topology": {"layout": "2"},
    "data": {"name": "digits", "batch_size": 32},
    "model": {"name": "tiny"},
    "sparsity": {"num_stairs": 1, "start_share": 0.1, "freeze_share": 0.25},
    "run": {"steps": 20, "log_every_steps": 20},
}
TINY = ModelConfig(name="tiny")


def dense(weights, **changes):
    """A few steps of the tiny network, from trained weights."""
    settings = {
        "topology": {"layout": "2"},
        "data": PRUNING["data"],
        "model": {"name": "tiny", "weights": str(weights)},
        "method": {"name": "dense"},
        "run": {"steps": 3, "log_every_steps": 2},
    }
    return merged(settings, changes)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run that has pruned half of its channels, its folder, and its export."""
    folder = tmp_path_factory.mktemp("source")
    result = train(PRUNING, folder / "run")
    load_trained(folder / "run").export(folder / "export")
    return result, folder / "run", folder / "export"


def widths_of(model):
    """Shapes of what a network is made of."""
    return shapes_by_path(whole_tree(*jax.eval_shape(model.init, jax.random.key(0))))


@pytest.fixture(scope="module")
def started(source, tmp_path_factory):
    """A run from the export, and its folder."""
    workdir = tmp_path_factory.mktemp("started") / "run"
    return train(dense(source[2]), workdir), workdir


@pytest.mark.slow
def test_the_first_evaluation_is_that_of_the_export(source, started):
    first, summary = rows_of(started[1])[0], source[0].summary
    assert first["step"] == 0
    assert first["validation_accuracy"] == summary["validation_accuracy"]
    assert first["validation_loss"] == pytest.approx(summary["validation_loss"])


@pytest.mark.slow
def test_a_shrunk_network_trains_on_with_its_widths(source, started):
    before, after = source[0].summary, started[0].summary
    assert before["params_kept"] < before["params_dense"]
    assert after["params_dense"] == after["params_kept"] == before["params_kept"]
    moved = [
        float(np.abs(new - old).max())
        for old, new in zip(
            jax.tree.leaves(source[0].network.params),
            jax.tree.leaves(started[0].network.params),
            strict=True,
        )
    ]
    assert max(moved) > 0


@pytest.mark.slow
def test_the_folder_says_what_it_started_from(source, started):
    said = json.loads((started[1] / "environment.json").read_text())["weights"]
    manifest = json.loads((source[2] / "manifest.json").read_text())
    assert said["source"] == str(source[2])
    assert said["digests"] == {ARRAYS: manifest["files"][ARRAYS]}


@pytest.mark.slow
def test_a_run_folder_is_as_good_as_its_export(source):
    there, here = find_weights(str(source[1])), find_weights(str(source[2]))
    assert there.shapes == here.shapes
    for path, array in here.tensors.arrays.items():
        np.testing.assert_allclose(there.tensors.arrays[path], array, rtol=1e-5)
    one = find_weights(f"{source[1]}/checkpoints/20")
    assert one.digests == there.digests
    with pytest.raises(UserError, match="no such checkpoint; there is: 20"):
        find_weights(f"{source[1]}/checkpoints/7")


@pytest.mark.slow
def test_what_was_started_is_exported_and_started_from_again(started, tmp_path):
    result, workdir = started
    trained = load_trained(workdir)
    same = flatten_by_path(trained.shrunk.params)
    for path, leaf in flatten_by_path(result.network.params).items():
        np.testing.assert_array_equal(same[path], leaf)
    weights = find_weights(str(workdir))
    model = make_model(TINY, (8, 8, 1), 10)
    assert widths_of(make_start(weights, model, TINY).model) == widths_of(
        result.network.model
    )


@pytest.mark.slow
def test_a_resumed_run_needs_the_weights_no_more(source, started, tmp_path):
    export = shutil.copytree(source[2], tmp_path / "export")
    values = dense(export, run={"checkpoint_every_steps": 2})
    with pytest.raises(StopAtOnce):
        train(values, tmp_path / "run", after_step=[stop_after(2)])
    shutil.rmtree(export)
    result = train(values, tmp_path / "run")
    for resumed, whole in zip(
        jax.tree.leaves(result.network.params),
        jax.tree.leaves(started[0].network.params),
        strict=True,
    ):
        np.testing.assert_array_equal(resumed, whole)
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [0, 2, 3]


@pytest.mark.slow
def test_changed_weights_are_noticed_before_the_first_checkpoint(source, tmp_path):
    file = tmp_path / "run" / "environment.json"
    values = dense(source[2])
    with pytest.raises(StopAtOnce):
        train(values, tmp_path / "run", after_step=[stop_after(0)])
    said = json.loads(file.read_text())
    said["weights"]["digests"][ARRAYS] = "0"
    file.write_text(json.dumps(said))
    with pytest.raises(UserError, match=r"has changed since the run in .* started"):
        train(values, tmp_path / "run")
    assert find_weights(str(source[2]), tmp_path / "run", fresh=True) is not None


def test_other_classes_get_a_fresh_classifier(source):
    weights = find_weights(str(source[2]))
    model = make_model(TINY, (8, 8, 1), 4)
    start = make_start(weights, model, TINY)
    names = {path for path in weights.shapes if "classifier" in path}
    assert len(names) == 2
    assert weights.shapes.keys() - start.arrays.keys() == names
    assert "start fresh, for another number of classes" in start.described[-1]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "resnet20",
            (8, 8, 1),
            r"fit config.model.name='resnet20': .* missing",
        ),
        ("vgg16", (32, 32, 1), "does not fit config.model.name='vgg16': "),
        ("tiny", (8, 8, 3), r"stem/conv/kernel is \[3, 3, 1, \d\] in it and \[3, 3, 3"),
    ],
)
def test_another_network_is_refused(name, shape, message, source):
    model = make_model(ModelConfig(name=name), shape, 10)
    with pytest.raises(UserError, match=message):
        make_start(find_weights(str(source[2])), model, ModelConfig(name=name))


def test_damaged_and_foreign_exports_are_refused(source, tmp_path):
    folder = shutil.copytree(source[2], tmp_path / "export")
    arrays = load_file(folder / ARRAYS)
    save_file({**arrays, "params/more": np.ones(1)}, folder / ARRAYS)
    with pytest.raises(UserError, match=r"is damaged: model.safetensors is not as it"):
        find_weights(str(folder))


def functions():
    """A network of a user's own, with a dead half."""

    def init(key):
        first, second = jax.random.split(key)
        return {
            "in": jax.random.normal(first, (3, 8)),
            "out": jax.random.normal(second, (8, 2)),
        }

    return init, lambda params, x: jnp.tanh(x @ params["in"]) @ params["out"]


def test_an_export_of_a_function_starts_a_network_of_its_own(tmp_path):
    init, apply = functions()
    params, inputs = init(jax.random.key(1)), np.ones((2, 3), np.float32)
    export_model(tmp_path / "m", apply, params, [inputs], certificate=None)
    start = make_start(
        find_weights(str(tmp_path / "m")), own_model((init, apply), inputs), TINY
    )
    for name, array in params.items():
        np.testing.assert_array_equal(start.arrays[f"params/{name}"], array)


def test_a_shrunk_network_of_functions_is_cut_again():
    model = own_model(functions(), jnp.ones((1, 3)))
    params, statistics = model.init(jax.random.key(0))
    trace = trace_model(model)
    mask = np.arange(8) % 3 > 0
    cut = make_cut(trace, {trace.groups[0].name: mask}, params, statistics)
    arrays = flatten_by_path(whole_tree(cut.take(params), statistics))
    kept = {trace.groups[0].name: (8, np.flatnonzero(mask).tolist())}
    shapes = {path: x.shape for path, x in arrays.items()}
    weights = Weights("file", OURS, {}, shapes, kept)
    weights = Weights.of_record(json.loads(json.dumps(weights.record())))
    start = make_start(weights, model, ModelConfig())
    inputs = jnp.ones((2, 3))
    whole = model.apply(cut.mask(params), statistics, inputs)
    small = start.model.apply(cut.take(params), statistics, inputs)
    np.testing.assert_allclose(small, whole, rtol=1e-5)
    with pytest.raises(UserError, match="it was shrunk, and that cannot be done again"):
        kept = {"other": (8, [0, 1])}
        make_start(Weights("file", OURS, {}, shapes, kept), model, ModelConfig())


def test_a_network_that_was_cut_twice_has_the_widths_of_its_arrays():
    """What is written with it tells which channels of the first cut were kept."""
    full = make_model(TINY, (8, 8, 1), 10)
    small, params, statistics = full, *jax.jit(full.init)(jax.random.key(0))
    kept = {}
    for seed in range(2):
        trace = trace_model(small)
        rng = np.random.default_rng(seed)
        masks = {g.name: rng.permutation(g.size) < g.size // 2 for g in trace.groups}
        cut = make_cut(trace, masks, params, statistics)
        kept = {name: (m.size, np.flatnonzero(m).tolist()) for name, m in masks.items()}
        params, statistics = cut.take(params), cut.take_statistics(statistics)
        small = small.after(cut)
    arrays = flatten_by_path(whole_tree(params, statistics))
    shapes = {path: x.shape for path, x in arrays.items()}
    start = make_start(Weights("file", OURS, {}, shapes, kept), full, TINY)
    images = jax.random.normal(jax.random.key(1), (2, 8, 8, 1))
    found, wanted = (
        jax.jit(model.apply)(params, statistics, images)
        for model in (start.model, small)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert any("its own widths" in line for line in start.described)


def test_hosts_with_other_files_are_told(source, monkeypatch):
    weights = find_weights(str(source[2]))
    check_same_weights(weights)
    monkeypatch.setattr(agreement, "gather_texts", lambda text: [text, "{}"])
    with pytest.raises(AgreedError, match="process 1; copy the same file to every"):
        check_same_weights(weights)


@pytest.mark.slow
def test_one_device_that_stands_for_all_starts_alike(source, started, tmp_path):
    values = dense(source[2], topology={"simulated": "2x4"})
    train(values, tmp_path / "run")
    first, same = rows_of(tmp_path / "run")[0], rows_of(started[1])[0]
    assert first["validation_loss"] == pytest.approx(same["validation_loss"])


@pytest.mark.rotates
def test_two_processes_start_alike(source, started, tmp_path):
    values = dense(source[2], topology={"cpu_devices": 4})
    processes = start_two(tmp_path, values, tmp_path / "run")
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    first, same = rows_of(tmp_path / "run")[0], rows_of(started[1])[0]
    assert first["validation_loss"] == pytest.approx(same["validation_loss"])
    # A checkpoint is read by one process.
    values = dense(source[1], topology={"cpu_devices": 4})
    processes = start_two(tmp_path, values, tmp_path / "other")
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert all("is a run folder, which one process can read" in x for x in outputs)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["export", "self"])
def test_a_taught_run_starts_from_its_teacher(teacher, source, tmp_path):
    values = merged(
        PRUNING,
        {
            "model": {"weights": str(source[1])},
            "distill": {"teacher": "self" if teacher == "self" else str(source[2])},
            "sparsity": {"start_share": 0.3, "freeze_share": 0.5},
        },
    )
    result = train(values, tmp_path / "run")
    assert result.summary["params_dense"] == source[0].summary["params_kept"]
    assert result.summary["params_kept"] < result.summary["params_dense"]
    assert result.summary["shrink_max_abs_error"] < 1e-4
    load_trained(tmp_path / "run").export(tmp_path / "export")
    again = find_weights(str(tmp_path / "export"))
    start = make_start(again, make_model(TINY, (8, 8, 1), 10), TINY)
    assert widths_of(start.model) == widths_of(result.network.model)


@pytest.mark.rotates
def test_a_shrunk_language_model_trains_on(tmp_path):
    widths = {"layers": 1, "width": 16, "heads": 2, "key_heads": 2, "head_width": 8}
    settings = {
        "topology": {"simulated": "2x1"},
        "data": {
            "name": "stdlib",
            "batch_size": 16,
            "eval_batch_size": 480,
            "sequence_length": 16,
        },
        "model": {"name": "gpt", "gpt": {**widths, "hidden": 32}},
        "optimizer": {"name": "adamw", "learning_rate": 0.001},
        "sparsity": {"num_stairs": 1, "start_share": 0.1, "freeze_share": 0.25},
        "run": {"steps": 20, "log_every_steps": 20, "read_test": False},
    }
    result = train(settings, tmp_path / "run")
    assert result.summary["params_kept"] < result.summary["params_dense"]
    changes = {
        "model": {"weights": str(tmp_path / "run")},
        "method": {"name": "dense"},
        "run": {"steps": 3, "checkpoint_every_steps": 2},
    }
    values = merged(settings, changes)
    with pytest.raises(StopAtOnce):
        train(values, tmp_path / "on", after_step=[stop_after(2)])
    after = train(values, tmp_path / "on")
    assert after.summary["params_dense"] == result.summary["params_kept"]
    first = rows_of(tmp_path / "on")[0]
    assert first["validation_loss"] == pytest.approx(result.summary["validation_loss"])
