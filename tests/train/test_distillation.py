"""A teacher: what is learned from its answers, where they come from, who is refused."""

import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.export import export_model
from prunex_jax.mesh import make_topology
from prunex_jax.tasks import Classification
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.build.work import work_of_training
from prunex_jax.train.records.restoring import load_trained
from prunex_jax.train.run import train
from prunex_jax.train.steps.position import RunPosition
from tests.helpers.tiny_runs import settings

FAVOURITE = 3
DIGITS = {"mean": [0.0], "std": [1.0]}


def teacher_at(folder, shape=(8, 8, 1), classes=10, about=None):
    """A teacher that answers every image with its favourite class."""

    def apply(bias, images):
        return images.reshape(images.shape[0], -1)[:, :classes] * 0.1 + bias[None]

    bias = 8.0 * np.eye(classes, dtype=np.float32)[FAVOURITE]
    images = np.zeros((1, *shape), np.float32)
    export_model(folder, apply, bias, [images], certificate=None, about=about)
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return teacher_at(tmp_path_factory.mktemp("teacher") / "model")


def losses_of(folder, steps=6, **changes):
    run = {"steps": steps, "log_every_steps": 1, "checkpoint_every_steps": 0}
    values = settings(**{"run": run, "method": {"name": "dense"}, **changes})
    result = train(values, folder)
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return result, rows


def logits_of(result, seed=0):
    images = np.random.default_rng(seed).normal(size=(40, 8, 8, 1))
    return result.network.logits(jnp.asarray(images, jnp.float32))


def test_without_its_logits_a_teacher_is_not_missed():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(6, 4)))
    batch = {"label": jnp.asarray(rng.integers(4, size=6))}
    plain, taught = Classification(0.1).loss, Classification(0.1, 3.0).loss
    assert plain(logits, batch) == taught(logits, batch)
    answers = jnp.asarray(rng.normal(size=(6, 4)))
    shown = {**batch, "teacher": answers, "teacher_weight": jnp.zeros(6)}
    np.testing.assert_array_equal(taught(logits, shown), plain(logits, batch))


def test_hot_answers_are_matched_as_numbers():
    """The limit of high temperatures: the gradient is the difference of logits."""
    rng = np.random.default_rng(1)
    student, teacher = (
        jnp.asarray(x - x.mean(-1, keepdims=True)) for x in rng.normal(size=(2, 5, 7))
    )
    batch = {
        "label": jnp.zeros(5, jnp.int32),
        "teacher": teacher,
        "teacher_weight": jnp.ones(5),
    }
    found = jax.grad(Classification(0.0, 1e3).loss)(student, batch)
    np.testing.assert_allclose(found, (student - teacher) / 7 / 5, atol=1e-4)


@pytest.mark.slow
def test_a_network_learns_what_its_teacher_says(tmp_path, teacher):
    """Of one that knows nothing of labels."""
    distill = {"teacher": teacher, "weight": 1.0, "temperature": 1.0}
    result, _ = losses_of(tmp_path / "taught", steps=30, distill=distill)
    assert np.all(np.argmax(logits_of(result), axis=-1) == FAVOURITE)
    result, _ = losses_of(tmp_path / "alone", steps=30)
    assert len(set(np.argmax(logits_of(result), axis=-1).tolist())) > 2


@pytest.mark.slow
def test_a_teacher_of_no_weight_changes_nothing_and_sends_nothing(tmp_path, teacher):
    alone, rows = losses_of(tmp_path / "alone")
    silent = {"teacher": teacher, "weight": 0.0}
    taught, taught_rows = losses_of(tmp_path / "taught", distill=silent)
    np.testing.assert_allclose(logits_of(alone), logits_of(taught), atol=1e-5)
    assert len(rows) == len(taught_rows)
    for key in ("host_wire_bytes", "host_wire_ratio", "training_macs_dense"):
        assert alone.summary[key] == taught.summary[key]


def test_work_has_that_of_a_teacher_or_is_not_known(tmp_path, teacher):
    """Exports of a run's end say what they cost; those of other functions do not."""
    said = {"metrics": {"summary": {"macs_kept": 1000}}}
    known = teacher_at(tmp_path / "known", about=said)
    work = []
    for each in ("", teacher, known):
        distill = {"teacher": each, "until_share": 0.5}
        values = settings(distill=distill, method={"name": "dense"}, run={"steps": 6})
        experiment = make_experiment(resolve_config(values), make_topology("2"))
        position = RunPosition(experiment.channels.sizes, step=6)
        work.append(work_of_training(experiment, position)["training_macs"])
    assert work[1:] == [None, work[0] + 32 * 3 * 1000]


@pytest.mark.slow
def test_any_mesh_is_taught_alike(tmp_path, teacher):
    """Real and folded ones."""
    found = []
    meshes = ({"layout": "2"}, {"simulated": "2x4"})
    for number, topology in enumerate(meshes):
        result, _ = losses_of(
            tmp_path / str(number),
            topology=topology,
            distill={"teacher": teacher, "weight": 0.5},
        )
        found.append(logits_of(result))
    np.testing.assert_allclose(*found, atol=1e-3)


@pytest.mark.rotates
def test_a_run_that_was_stopped_goes_on_with_its_teacher(tmp_path):
    teacher = teacher_at(tmp_path / "teacher")
    changes = {
        "method": {"name": "hsadmm"},
        "distill": {"teacher": teacher, "weight": 0.5},
        "sparsity": {"num_stairs": 1, "freeze_share": 0.3, "shrink_share": 0.5},
        "run": {"steps": 20, "log_every_steps": 5, "checkpoint_every_steps": 3},
    }
    whole = train(settings(**changes), tmp_path / "whole")
    steps = itertools.count()

    def die(loop, state):
        if next(steps) == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(settings(**changes), tmp_path / "parts", after_step=[die])
    resumed = train(settings(**changes), tmp_path / "parts")
    np.testing.assert_array_equal(logits_of(whole), logits_of(resumed))
    assert whole.summary["params_kept"] < whole.summary["params_dense"]
    shutil.move(teacher, f"{teacher}-gone")
    about = load_trained(tmp_path / "whole").export(tmp_path / "small")
    assert about["config"]["distill"]["teacher"] == teacher


@pytest.mark.slow
def test_a_teacher_that_cannot_teach_is_refused(tmp_path):
    def said_of(folder, **changes):
        with pytest.raises(UserError) as error:
            train(settings(distill={"teacher": str(folder), **changes}), tmp_path / "x")
        assert not (tmp_path / "x").exists()
        return str(error.value)

    assert "nowhere" in said_of(tmp_path / "nowhere")
    few = teacher_at(tmp_path / "few", classes=4)
    assert "[4, 10]" in said_of(few) and str(few) in said_of(few)
    large = teacher_at(tmp_path / "large", shape=(16, 16, 1))
    assert "(8, 8, 1)" in said_of(large)
    other = {"dataset": {"name": "moon", "preprocessing": {**DIGITS, "mean": [9.0]}}}
    moon = teacher_at(tmp_path / "moon", about=other)
    assert "moon" in said_of(moon) and "[9.0]" in said_of(moon)
    assert "distill.weight=2.0" in said_of("", weight=2.0)
    assert "distill.temperature=0.0" in said_of("", temperature=0.0)
