"""A run is exported from its checkpoints, and scores the same when it is read back."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import map_with_path
from prunex_jax.data import Normalization
from prunex_jax.export import export_model, read_model
from prunex_jax.shrink import Network
from prunex_jax.train.changes.transitions import comparison_inputs
from prunex_jax.train.commands import evaluate as evaluation
from prunex_jax.train.commands.export import main as export_main
from prunex_jax.train.records.checkpoint import Checkpointer
from prunex_jax.train.records.restoring import load_trained
from prunex_jax.train.run import train
from tests.helpers.tiny_runs import merged

# They train networks of several kinds first.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Rounds of four steps: half of the channels are dead from step 12 on.
STEPS = 20
SETTINGS = {
    "topology": {"layout": "2"},
    "data": {"name": "digits", "batch_size": 32},
    "model": {"name": "tiny"},
    "sparsity": {"num_stairs": 1, "start_share": 0.1, "freeze_share": 0.25},
    "run": {
        "steps": STEPS,
        "log_every_steps": 8,
        "checkpoint_every_steps": 4,
        "checkpoints_kept": 9,
    },
}


def settings(**changes):
    return merged(SETTINGS, changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has ended, with checkpoints from all of its course."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train(settings(), folder), folder


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert export_main([f"--workdir={run[1]}", f"--out={folder}", "--quiet"]) == 0
    return folder


def refused(main, capsys, *arguments):
    """The one line that a refused command prints."""
    assert main([*map(str, arguments)]) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("error: ") and error.count("\n") == 1
    return error


def test_scores_as_the_run_did(run, exported):
    summary = run[0].summary
    for split in ("test", "validation"):
        found = evaluation.evaluate(exported, split, batch_size=100)
        measures = found.measures
        wanted = summary[f"{split}_accuracy"]
        assert measures["accuracy"] == pytest.approx(wanted, abs=1e-9)
        assert measures["loss"] == pytest.approx(summary[f"{split}_loss"], rel=1e-5)
        assert found.measures_of_run["accuracy"] == wanted
    assert found.examples == round(0.1 * 1438), "every example counts once"


def test_the_program_is_that_of_the_shrunk_network(run, exported):
    result, model = run[0], read_model(exported)
    images = np.random.default_rng(0).normal(size=(5, 8, 8, 1)).astype(np.float32)
    expected = result.network.logits(jnp.asarray(images))
    np.testing.assert_allclose(model(images), expected, rtol=1e-4, atol=1e-5)
    params = [x for name, x in model.arrays.items() if name.startswith("params/")]
    assert sum(x.size for x in params) == result.summary["params_kept"]


def test_the_manifest_says_what_a_reader_needs(run, exported):
    manifest = read_model(exported).manifest
    assert manifest["trained"]["step"] == manifest["trained"]["num_steps"] == STEPS
    assert manifest["metrics"]["summary"] == json.loads(
        (run[1] / "summary.json").read_text()
    )
    assert manifest["metrics"]["logged"]["step"] == STEPS
    assert manifest["config"] == json.loads((run[1] / "config.json").read_text())
    assert manifest["certificate"]["is_equal"]
    kept = {group["name"]: group["kept"] for group in manifest["channels"]}
    sizes = {group["name"]: group["size"] for group in manifest["channels"]}
    masks = run[0].masks
    assert kept == {name: np.flatnonzero(mask).tolist() for name, mask in masks.items()}
    assert sizes == {name: mask.size for name, mask in masks.items()}
    assert 0 < sum(map(len, kept.values())) < sum(sizes.values())
    dataset = manifest["dataset"]
    assert dataset["classes"] == {"count": 10, "names": list("0123456789")}
    assert (
        dataset["preprocessing"]["height"],
        dataset["preprocessing"]["channels"],
    ) == (
        8,
        1,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"split": "tset"}, "--split=tset is not one of"),
        ({"batch_size": 0}, "positive"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything_is_read(given, message):
    with pytest.raises(UserError, match=message):
        evaluation.evaluate("nowhere", **given)


def test_preprocessing_of_the_manifest_is_that_of_the_trainer(run, exported):
    """Pixels prepared as the manifest says give what evaluation batches give."""
    from sklearn.datasets import load_digits

    preprocessing = read_model(exported).manifest["dataset"]["preprocessing"]
    pixels = np.rint(load_digits().images * (255 / 16))[..., None]
    mean, std = (np.asarray(preprocessing[key]) for key in ("mean", "std"))
    prepared = (pixels / 255 - mean) / std
    batch = comparison_inputs(load_trained(run[1]).task)
    distances = np.abs(prepared[:, None] - batch[None, :4]).max(axis=(2, 3, 4))
    assert np.all(distances.min(axis=0) < 1e-5)


@pytest.mark.parametrize(("step", "logged"), [(4, None), (16, 16)])
def test_a_checkpoint_of_mid_training_is_exported(
    step, logged, run, exported, tmp_path, capsys
):
    arguments = [f"--workdir={run[1]}", f"--out={tmp_path / 'm'}"]
    assert export_main([*arguments, f"--step={step}"]) == 0
    assert f"exported  step {step} of {STEPS}" in capsys.readouterr().out
    manifest = read_model(tmp_path / "m").manifest
    assert manifest["metrics"]["summary"] is None, "those are of another network"
    assert (manifest["metrics"]["logged"] or {"step": None})["step"] == logged
    found = evaluation.evaluate(tmp_path / "m")
    assert found.measures_of_run == {}
    later = evaluation.evaluate(exported)
    assert found.measures["loss"] != pytest.approx(later.measures["loss"], rel=1e-3)


def test_a_run_is_only_read_also_while_it_is_saving(run, tmp_path):
    live = tmp_path / "live"
    shutil.copytree(run[1], live)
    (live / "summary.json").unlink()
    (live / "checkpoints" / "14.orbax-checkpoint-tmp").mkdir()
    with open(live / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "lo')
    before = {p: p.stat().st_mtime_ns for p in sorted(live.rglob("*"))}
    manifest = load_trained(live).export(tmp_path / "m")
    assert {p: p.stat().st_mtime_ns for p in sorted(live.rglob("*"))} == before
    assert manifest["metrics"]["summary"] is None
    assert manifest["trained"]["step"] == STEPS


RUNS = {
    "goes on with the small network": {"sparsity": {"shrink_share": 0.5}},
    "dense": {"method": {"name": "dense"}},
    "bfloat16": {"model": {"compute_dtype": "bfloat16"}},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", RUNS)
def test_runs_of_all_kinds_are_exported(kind, tmp_path):
    result = train(settings(**RUNS[kind]), tmp_path / "run")
    manifest = load_trained(tmp_path / "run").export(tmp_path / "m")
    summary = result.summary
    assert manifest["certificate"]["is_equal"]
    assert manifest["certificate"]["num_gradients"] == summary["params_kept"]
    kept = sum(len(group["kept"]) for group in manifest["channels"])
    total = sum(group["size"] for group in manifest["channels"])
    assert 1 - kept / total == pytest.approx(summary["channel_sparsity"])
    found = evaluation.evaluate(tmp_path / "m")
    # Bfloat16 rounds to three digits, and programs round in other places.
    is_half = kind == "bfloat16"
    assert found.measures["loss"] == pytest.approx(
        summary["test_loss"], rel=0.02 if is_half else 1e-5
    )
    assert found.measures["accuracy"] == pytest.approx(
        summary["test_accuracy"], abs=0.02 if is_half else 1e-9
    )


def test_a_cut_that_is_not_exact_is_not_exported(run, tmp_path, monkeypatch, capsys):
    exact = Network.shrunk

    def inexact(network, cut):
        shrunk = exact(network, cut)
        params = map_with_path(
            lambda path, x: x + 1e-2 if path == "classifier/bias" else x, shrunk.params
        )
        return dataclasses.replace(shrunk, params=params)

    monkeypatch.setattr(Network, "shrunk", inexact)
    arguments = f"--workdir={run[1]}", f"--out={tmp_path / 'm'}"
    error = refused(export_main, capsys, *arguments)
    assert "masked and shrunk function differ: output differs by" in error
    assert not (tmp_path / "m").exists()


def test_commands_run_as_others_run_them(tmp_path):
    """In processes of their own, the export with devices that it simulates."""

    def command(name, *arguments):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "prunex_jax", name, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]
        return done.stdout

    workdir, folder = f"--workdir={tmp_path / 'run'}", str(tmp_path / "m")
    config = ROOT / "configs" / "digits_resnet20_hsadmm.py"
    short = "--config.run.epochs=0", "--config.run.steps=8", "--config.model.width=0.25"
    command("train", f"--config={config}", workdir, *short)
    out = command("export", workdir, f"--out={folder}")
    assert "check it  python -m prunex_jax evaluate --model=" in out
    found = json.loads(command("evaluate", f"--model={folder}", "--json"))
    assert found["accuracy"] == pytest.approx(found["accuracy_of_run"], abs=1e-9)
    assert (found["dataset"], found["split"], found["examples"]) == (
        "digits",
        "test",
        359,
    )


def test_evaluation_prints_one_object(exported, capsys):
    assert evaluation.main([f"--model={exported}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == evaluation.evaluate(exported).plain()
    assert found["dataset"] == "digits" and found["examples"] == 359


def test_what_evaluation_prints(exported, capsys):
    assert evaluation.main([f"--model={exported}"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{exported}: 359 test images of digits"
    assert second.startswith("test accuracy 0.") and "(the run measured 0." in second
    arguments = [f"--model={exported}", "--quiet", "--split=validation"]
    assert evaluation.main(arguments) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("validation accuracy 0.") and "measured" not in line


def test_normalisation_is_that_of_the_manifest(exported, monkeypatch):
    expected = evaluation.evaluate(exported).measures
    made = evaluation.make_task

    def elsewhere(*arguments):
        task, other = made(*arguments), Normalization((0.0,), (9.0,))
        test = dataclasses.replace(task.dataset.test, normalization=other)
        return dataclasses.replace(
            task, dataset=dataclasses.replace(task.dataset, test=test)
        )

    monkeypatch.setattr(evaluation, "make_task", elsewhere)
    assert evaluation.evaluate(exported).measures == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--workdir is required"),
        (("--workdir={run}",), "--out is required"),
        (("--workdir={run}", "--out={tmp}/m", "--ste=3"), "ste"),
        (("--workdir={run}", "--out={tmp}/m", "--step=x"), "step"),
        (("--workdir={run}", "--out={tmp}/m", "stray"), "'stray' is not understood"),
        (("--workdir={run}", "--out={tmp}/m", "--step=5"), "no checkpoint of step 5"),
        (("--workdir={tmp}", "--out={tmp}/m"), "environment.json is missing"),
        (("--workdir={run}", "--out={run}"), "choose another folder"),
        (("--workdir={run}", "--out={exported}"), "holds an export already"),
    ],
)
def test_bad_flags_of_the_export(arguments, message, run, exported, tmp_path, capsys):
    given = [x.format(run=run[1], tmp=tmp_path, exported=exported) for x in arguments]
    assert message in refused(export_main, capsys, *given)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--model is required"),
        (("--model={tmp}",), "is no exported model"),
        (("--model={exported}", "--split=train"), "split"),
        (("--model={exported}", "--batch_size=0"), "--batch_size=0 must be at least 1"),
        (("--model={exported}", "--bach_size=1"), "bach_size"),
        (("--model={exported}", "stray"), "'stray' is not understood"),
    ],
)
def test_bad_flags_of_the_evaluation(arguments, message, exported, tmp_path, capsys):
    given = [x.format(tmp=tmp_path, exported=exported) for x in arguments]
    assert message in refused(evaluation.main, capsys, *given)


def test_damage_is_one_line(exported, tmp_path, capsys):
    shutil.copytree(exported, tmp_path / "m")
    content = bytearray((tmp_path / "m" / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "m" / "model.safetensors").write_bytes(content)
    error = refused(evaluation.main, capsys, f"--model={tmp_path / 'm'}")
    assert "model.safetensors is not as it was written" in error


def test_an_export_without_a_data_set_says_so(tmp_path, capsys):
    apply = lambda params, x: x @ params["w"]  # noqa: E731
    given = [np.ones((2, 3), np.float32)]
    params = {"w": np.ones((3, 2), np.float32)}
    export_model(tmp_path / "m", apply, params, given, certificate=None)
    error = refused(evaluation.main, capsys, f"--model={tmp_path / 'm'}")
    assert "names no data set" in error


def test_a_run_on_more_devices_is_explained(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run[1], folder)
    environment = json.loads((folder / "environment.json").read_text())
    environment["topology"]["num_hosts"] = 4
    (folder / "environment.json").write_text(json.dumps(environment))
    with pytest.raises(
        UserError, match=r"on 16 devices .* has 8; python -m prunex_jax"
    ):
        load_trained(folder)


def test_help_of_both_commands(capsys):
    for main, flags in (
        (export_main, ("workdir", "out", "step", "data_dir", "overwrite", "quiet")),
        (
            evaluation.main,
            ("model", "split", "data_dir", "batch_size", "json", "quiet"),
        ),
    ):
        assert main(["--help"]) == 0
        out = capsys.readouterr().out
        assert all(f"  --{flag} " in out for flag in flags)
        assert max(map(len, out.splitlines())) <= 88


def test_checkpoints_opened_for_reading_are_left_alone(tmp_path):
    state = {"x": jnp.arange(3.0)}
    with Checkpointer(tmp_path / "c", keep=2) as writer:
        writer.save(1, state, {"step": 1}, wait=True)
        (tmp_path / "c" / "2.orbax-checkpoint-tmp").mkdir()
        with Checkpointer(tmp_path / "c", read_only=True) as reader:
            restored, extra = reader.restore(state)
    np.testing.assert_array_equal(restored["x"], state["x"])
    assert extra == {"step": 1}
    assert (tmp_path / "c" / "2.orbax-checkpoint-tmp").exists()
    with Checkpointer(tmp_path / "missing", read_only=True) as reader:
        with pytest.raises(UserError, match="no checkpoint of any step"):
            reader.restore(state)
    assert not (tmp_path / "missing").exists()


def odd_manifest(exported: Path, folder: Path, *keys: str, value) -> Path:
    """An export whose manifest says something else, and whose checksums hold."""
    shutil.copytree(exported, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    section = manifest
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("files", []),
        ("program", 3),
        ("versions", None),
        ("versions", {"jax": 3}),
        ("arrays", {}),
        ("arrays", {"params/x": "float32[3]"}),
        ("dataset", None),
        ("dataset", {}),
        ("dataset", {"classes": 3, "preprocessing": 3}),
        ("dataset/classes", {"count": 99, "names": None}),
        ("dataset/classes", {"count": 10, "names": 3}),
        ("dataset/preprocessing/mean", "red"),
        ("dataset/preprocessing/std", [1, 2, 3, 4, 5]),
        ("metrics", []),
        ("metrics/summary", 3),
        ("metrics/summary", {"test_accuracy": "good", "test_loss": "x"}),
        ("config", 3),
        ("config", {"data": 3}),
        ("config/data", None),
        ("config/data/image_size", -5),
        ("config/data/name", "nowhere"),
        ("config/seed", "x"),
    ],
)
def test_odd_content_of_an_export_is_one_line(key, value, exported, tmp_path, capsys):
    folder = odd_manifest(exported, tmp_path / "m", *key.split("/"), value=value)
    code = evaluation.main([f"--model={folder}"])
    said = capsys.readouterr()
    if key == "versions" and value:  # Not needed for this program.
        assert code == 0
        return
    assert code == 2 and said.err.startswith("error: ") and said.err.count("\n") == 1


def test_evaluation_runs_no_plugin_of_an_export(exported, tmp_path, capsys):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    keys = ("config", "method", "plugins")
    folder = odd_manifest(exported, tmp_path / "m", *keys, value=[str(plugin)])
    assert evaluation.main([f"--model={folder}"]) == 0
    assert not (tmp_path / "ran").exists()


def test_evaluation_shows_where_an_export_makes_it_read(exported, tmp_path, capsys):
    place, keys = str(tmp_path / "elsewhere"), ("config", "data", "dir")
    folder = odd_manifest(exported, tmp_path / "m", *keys, value=place)
    assert evaluation.main([f"--model={folder}"]) == 0
    assert f"images of digits in {place}\n" in capsys.readouterr().out
    assert evaluation.main([f"--model={folder}", f"--data_dir={tmp_path}"]) == 0
    assert "images of digits\n" in capsys.readouterr().out
