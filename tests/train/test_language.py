"""A language model through the trainer: pruned, cut out, resumed, and scored."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import DataConfig
from prunex_jax.bench.cost_model.step_time import late_options
from prunex_jax.comm import wire_bytes
from prunex_jax.data import EXAMPLE, open_stdlib
from prunex_jax.export import read_model
from prunex_jax.mesh import make_topology
from prunex_jax.methods import METHODS
from prunex_jax.train import evaluate as evaluation
from prunex_jax.train import train
from prunex_jax.train.config import resolve_config
from prunex_jax.train.experiment import make_experiment
from prunex_jax.train.export import export_run
from tests.helpers.tiny_runs import StopAtOnce, merged, rows_of, stop_after

SLOW = pytest.mark.slow
# Two hosts of two devices; cut at 60 %.
SETTINGS = {
    "topology": {"layout": "2"},
    "data": {
        "name": "stdlib",
        "batch_size": 16,
        "eval_batch_size": 240,
        "sequence_length": 16,
    },
    "model": {
        "name": "gpt",
        "gpt": {
            **{"layers": 1, "width": 16, "heads": 2, "key_heads": 1},
            **{"head_width": 8, "hidden": 24},
        },
    },
    "optimizer": {"name": "adamw", "learning_rate": 0.01},
    "method": {"hsadmm": {"sync_period": 2}},
    "sparsity": {
        **{"num_stairs": 1, "start_share": 0.1},
        **{"freeze_share": 0.4, "shrink_share": 0.6},
    },
    "run": {
        **{"steps": 20, "log_every_steps": 5, "checkpoint_every_steps": 5},
        "read_test": False,
    },
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language") / "run"
    return train(SETTINGS, folder), folder


def test_it_learns_and_ends_smaller(whole):
    result, folder = whole
    summary, rows = result.summary, rows_of(folder)
    assert summary["params_kept"] < 0.6 * summary["params_dense"]
    assert summary["shrink_max_abs_error"] < 1e-5
    assert rows[-1]["loss"] < rows[0]["loss"] < math.log(256) + 0.1
    for row in rows:
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2))
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]), rel=1e-4)
    assert summary["validation_bits_per_byte"] < 8
    assert summary["test_bits_per_byte"] is None


def test_scores_are_those_of_the_network(whole):
    """Every token once, rows that fill up batches never."""
    result, _ = whole
    split = open_stdlib(DataConfig(**SETTINGS["data"])).validation
    tokens = split.evaluation_batch(np.arange(len(split)))[EXAMPLE]
    total = 0.0
    for part in np.array_split(tokens, 8):
        logits = jax.nn.log_softmax(result.network.logits(part[:, :-1]))
        total -= float(jnp.sum(jnp.take_along_axis(logits, part[:, 1:, None], -1)))
    mean = total / (len(split) * 16)
    assert result.summary["validation_loss"] == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("stopped_at", [pytest.param(7, marks=SLOW), 17])
def test_a_resumed_run_is_the_same(whole, stopped_at, tmp_path):
    with pytest.raises(StopAtOnce):
        train(SETTINGS, tmp_path / "run", watch=stop_after(stopped_at))
    resumed = train(SETTINGS, tmp_path / "run")
    for found, wanted in zip(
        *(jax.tree.leaves(r.network.params) for r in (resumed, whole[0])), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_a_model_learns_from_itself(tmp_path):
    """Answers of a teacher have a row for every token."""
    values = merged(SETTINGS, {"distill": {"teacher": "self"}})
    result = train(values, tmp_path / "run")
    assert np.isfinite(result.summary["validation_loss"])


def test_its_export_says_what_it_has_read(whole, tmp_path):
    result, folder = whole
    manifest = export_run(folder, tmp_path / "out")
    assert manifest["dataset"]["name"] == "stdlib"
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 255, (3, 16)), jnp.int32)
    found = read_model(tmp_path / "out")(tokens)
    np.testing.assert_allclose(found, result.network.logits(tokens), atol=1e-4)


def test_its_export_scores_as_the_run_did(whole, tmp_path, monkeypatch, capsys):
    result, folder = whole
    export_run(folder, tmp_path / "out")
    found = evaluation.evaluate(tmp_path / "out", "validation", batch_size=2000)
    for name in ("loss", "perplexity", "bits_per_byte"):
        wanted = float(result.summary[f"validation_{name}"])
        assert found.measures[name] == pytest.approx(wanted, rel=1e-4)
        assert found.measures_of_run[name] == pytest.approx(wanted)
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: found)
    command = [f"--model={tmp_path / 'out'}", "--split=validation"]
    assert evaluation.main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bits_per_byte"] == found.measures["bits_per_byte"]
    assert told["bits_per_byte_of_run"] == found.measures_of_run["bits_per_byte"]
    assert evaluation.main(command) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(f"{found.examples} validation sequences of stdlib")
    assert re.match(r"validation perplexity \d.*, bits per byte \d.*, loss \d", second)
    assert "(the run measured" in second


def test_other_text_than_that_of_the_run_is_called_so(
    whole, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "out"
    manifest = export_run(whole[1], folder)
    manifest["dataset"]["digest"] = "123456789abc"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    measures = {"loss": 1.0, "perplexity": 2.7, "bits_per_byte": 1.4}
    monkeypatch.setattr(evaluation, "_score", lambda *_: (measures, 3))
    assert evaluation.main([f"--model={folder}", "--split=validation"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert "other data than those of the run" in line and "123456789abc then" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"name": "resnet20"}},
            "images, and config.data.name='stdlib'",
        ),
        ({"data": {"name": "digits"}}, "text, and config.data.name='digits'"),
        ({"data": {"augment": "shift"}}, "data.augment='shift' is for images"),
        ({"model": {"compute_dtype": "bfloat16"}}, "has no effect on a model of text"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(merged(SETTINGS, changes), tmp_path / "run")


SHAPES = [(2, 2), *(pytest.param(shape, marks=SLOW) for shape in ((3, 2), (4, 1)))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_formula_bytes_are_traced_bytes(method, shape):
    """What every method says that it sends is in the programs of a language model."""
    values = merged(SETTINGS, {"data": {"batch_size": 24}, "method": {"name": method}})
    if method != "hsadmm":
        values["sparsity"].pop("shrink_share")
    if method in ("dgc", "importance"):  # They apply momentum before they send.
        values["optimizer"]["name"] = "sgd"
    devices = jax.devices()[: shape[0] * shape[1]]
    topology = make_topology(str(shape[0]), devices)
    experiment = make_experiment(resolve_config(values), topology)
    current, mesh_shape = experiment.current, dict(experiment.mesh.shape)
    programs, state = current.programs, current.programs.abstract_state()
    batch = {"example": jax.ShapeDtypeStruct((24, 17), np.int32)}
    for options in late_options(current.method):
        formula = current.method.step_formula(mesh_shape, **options)
        found = programs.local_step.collectives(state, batch, **options)
        assert wire_bytes(found, mesh_shape) == wire_bytes(formula, mesh_shape)
    if current.method.exchange is None:
        return
    counts = experiment.channels.keep_counts
    if not current.method.prunes:
        counts = experiment.channels.sizes
    for kind in ("moving", "freeze", "frozen"):
        options = current.exchange_options(counts, kind)
        formula = current.method.exchange_formula(mesh_shape, counts, kind)
        found = programs.exchange.collectives(state, **options)
        assert wire_bytes(found, mesh_shape) == wire_bytes(formula, mesh_shape)
