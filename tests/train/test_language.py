"""A language model through the trainer: pruned, cut out, resumed, and scored."""

import json
import math
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.comm import wire_bytes
from prunex_jax.compare.step_time import late_options
from prunex_jax.data import EXAMPLE, open_text
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.text import open_stdlib
from prunex_jax.export import read_model
from prunex_jax.mesh import make_topology
from prunex_jax.methods import METHODS
from prunex_jax.models import generate
from prunex_jax.train import train
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.commands import evaluate as evaluation
from prunex_jax.train.records.restoring import load_trained
from tests.helpers.formulas.methods import formulas_of_run
from tests.helpers.texts import make_text, write_tokenizer
from tests.helpers.tiny_runs import (
    ROUNDING,
    StopAtOnce,
    complete_steps,
    merged,
    rows_of,
    start,
    start_two,
    stop_after,
    wait_for_checkpoint,
)

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


GPT2 = merged(SETTINGS, {"model": {"name": "gpt2"}})
BERT = {
    **SETTINGS,
    "model": {
        "name": "bert",
        "bert": {"layers": 1, "width": 16, "heads": 2, "head_width": 8, "hidden": 24},
    },
}
NAMED = {"gpt2": GPT2, "bert": BERT}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language") / "run"
    return train(SETTINGS, folder), folder


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stopped_at", [17, 7])
@pytest.mark.slow
def test_a_resumed_run_is_the_same(whole, stopped_at, tmp_path):
    with pytest.raises(StopAtOnce):
        train(SETTINGS, tmp_path / "run", after_step=[stop_after(stopped_at)])
    resumed = train(SETTINGS, tmp_path / "run")
    for found, wanted in zip(
        *(jax.tree.leaves(r.network.params) for r in (resumed, whole[0])), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.rotates
def test_a_killed_run_is_the_same(tmp_path):
    """Killed before and after channels are cut out, it ends with the same numbers."""
    values = merged(SETTINGS, {"run": {"steps": 60}})
    cut_at = 36
    reference = train(values, tmp_path / "whole")
    assert reference.summary["shrink_step"] == cut_at
    elsewhere = merged(values, {"topology": {"cpu_devices": 8}})
    workdir = tmp_path / "run"
    for least in (5, 40):
        killed = start(tmp_path, elsewhere, workdir)
        wait_for_checkpoint(killed, workdir, least)
        killed.kill()
        killed.communicate(timeout=120)
        assert killed.returncode == -signal.SIGKILL, "to be killed before the end"
        is_cut = max(complete_steps(workdir)) >= cut_at
        assert is_cut == (least > cut_at), "killed on the wrong side of the cut"
    finished = start(tmp_path, elsewhere, workdir)
    output, _ = finished.communicate(timeout=240)
    assert finished.returncode == 0, output
    resumed_at = re.search(r"resumed at step (\d+)", output)
    assert resumed_at and cut_at <= int(resumed_at[1]) < 60
    found = train(values, workdir)  # There is nothing left to do.
    pair = (jax.tree.leaves(r.network.params) for r in (found, reference))
    for ours, wanted in zip(*pair, strict=True):
        np.testing.assert_array_equal(ours, wanted)
    losses = [[row["loss"] for row in rows_of(tmp_path / n)] for n in ("run", "whole")]
    assert losses[0] == losses[1]


def _tokens(folder):
    np.random.default_rng(0).integers(0, 90, 9000).astype("<u2").tofile(folder / "a")
    (folder / "a").rename(folder / "a.bin")
    return {"name": "tokens", "dir": str(folder / "a.bin"), "vocabulary": 100}


def _text(folder):
    (folder / "a.txt").write_text(make_text(6000))
    made = write_tokenizer(folder / "tokenizer.json")
    kept = {"tokenizer": str(made), "cache_dir": str(folder / "kept")}
    return {"name": "text", "dir": str(folder / "a.txt"), **kept}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [_tokens, _text])
@pytest.mark.slow
def test_other_text_trains_and_resumes_the_same(make, tmp_path):
    values = merged(
        SETTINGS,
        {
            "data": make(tmp_path),
            "method": {"name": "local_sgd", "local_sgd": {"sync_period": 3}},
            "run": {"steps": 8, "log_every_steps": 4, "read_test": True},
        },
    )
    values["sparsity"].pop("shrink_share")
    result = train(values, tmp_path / "whole")
    with pytest.raises(StopAtOnce):
        train(values, tmp_path / "run", after_step=[stop_after(5)])
    resumed = train(values, tmp_path / "run")
    for found, wanted in zip(
        *(jax.tree.leaves(r.network.params) for r in (resumed, result)), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    has_bytes = make is _text
    rows = [*rows_of(tmp_path / "whole"), resumed.summary]
    assert all(any("bits_per_byte" in x for x in row) == has_bytes for row in rows)
    if has_bytes:
        data = open_text(DataConfig(**values["data"]))
        for name, split in (("validation", data.validation), ("test", data.test)):
            bits = result.summary[f"{name}_loss"] / math.log(2) / split.bytes_per_token
            assert result.summary[f"{name}_bits_per_byte"] == pytest.approx(bits)


@pytest.mark.rotates
def test_two_processes_encode_once_and_learn_as_one(tmp_path):
    """Both find the same tokens, whichever of them has made these."""
    shape = {"topology": {"cpu_devices": 1, "layout": "process"}}
    method = {"name": "local_sgd", "local_sgd": {"sync_period": 3}}
    run = {"steps": 6, "log_every_steps": 3}
    changes = {"data": _text(tmp_path), "method": method, "run": run}
    values = merged(merged(SETTINGS, changes), shape)
    values["sparsity"].pop("shrink_share")
    processes = start_two(tmp_path, values, tmp_path / "two")
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    times = {x: x.stat().st_mtime_ns for x in (tmp_path / "kept").glob("*.bin")}
    assert len(times) == 3
    values["topology"] = {"cpu_devices": 2, "layout": "2"}
    one = start(tmp_path, values, tmp_path / "one")
    output, _ = one.communicate(timeout=300)
    assert one.returncode == 0, output
    found = (rows_of(tmp_path / name)[-1] for name in ("one", "two"))
    losses = [row["bits_per_byte"] for row in found]
    assert losses[0] == pytest.approx(losses[1], rel=ROUNDING)
    assert times == {path: path.stat().st_mtime_ns for path in times}


@pytest.mark.rotates
def test_a_masked_model_learns_shrinks_and_resumes(tmp_path):
    """With dropout and bfloat16, in parts of a batch."""
    values = merged(BERT, {"optimizer": {"micro_batches": 2}})
    values["model"]["compute_dtype"] = "bfloat16"
    values["model"]["bert"] = {**values["model"]["bert"], "dropout": 0.1}
    result = train(values, tmp_path / "whole")
    summary, rows = result.summary, rows_of(tmp_path / "whole")
    assert summary["params_kept"] < 0.6 * summary["params_dense"]
    assert summary["shrink_max_abs_error"] < 1e-5
    assert rows[-1]["loss"] < rows[0]["loss"] < math.log(257) + 0.1
    assert rows[-1]["tokens_seen"] == summary["tokens_seen"] == 20 * 16 * 16
    assert summary["validation_accuracy"] > 1 / 257
    with pytest.raises(StopAtOnce):
        train(values, tmp_path / "stopped", after_step=[stop_after(7)])
    resumed = train(values, tmp_path / "stopped")
    pair = (jax.tree.leaves(r.network.params) for r in (resumed, result))
    for found, wanted in zip(*pair, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.rotates
def test_masked_models_learn_the_same_on_any_mesh(tmp_path):
    """Up to rounding: what is asked for depends on seed and step alone."""
    dense = {"method": {"name": "dense"}, "run": {**BERT["run"], "steps": 6}}
    losses = []
    for layout in ("1", "4"):
        values = merged(BERT, {**dense, "topology": {"layout": layout}})
        values["sparsity"] = {}
        train(values, tmp_path / layout)
        losses.append([row["loss"] for row in rows_of(tmp_path / layout)])
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["dgc", "importance", "pactrain"])
def test_methods_with_needs_of_their_own_train_a_language_model(method, tmp_path):
    values = settings_of(SETTINGS, method)
    result, rows = train(values, tmp_path / "run"), rows_of(tmp_path / "run")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] < math.log(256) + 0.1
    assert result.summary["shrink_max_abs_error"] < 1e-5
    kept = result.summary["params_kept"] / result.summary["params_dense"]
    assert (kept < 0.6) == (method == "pactrain")


@pytest.mark.rotates
@pytest.mark.parametrize("values", [SETTINGS, BERT], ids=["gpt", "bert"])
def test_a_model_learns_from_itself(values, tmp_path):
    """Answers of a teacher have a row for every token."""
    values = merged(values, {"distill": {"teacher": "self"}})
    result = train(values, tmp_path / "run")
    assert np.isfinite(result.summary["validation_loss"])


@pytest.mark.slow
def test_its_export_says_what_it_has_read(whole, tmp_path):
    result, folder = whole
    manifest = load_trained(folder).export(tmp_path / "out")
    assert manifest["dataset"]["name"] == "stdlib"
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 255, (3, 16)), jnp.int32)
    found = read_model(tmp_path / "out")(tokens)
    np.testing.assert_allclose(found, result.network.logits(tokens), atol=1e-4)
    texts = [
        generate(logits, tokens[:, :4], 15, window=16, temperature=0.0)
        for logits in (read_model(tmp_path / "out"), result.network.logits)
    ]
    np.testing.assert_array_equal(*texts)


@pytest.mark.slow
def test_its_export_scores_as_the_run_did(whole, tmp_path, monkeypatch, capsys):
    result, folder = whole
    load_trained(folder).export(tmp_path / "out")
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


@pytest.mark.slow
def test_other_text_than_that_of_the_run_is_called_so(
    whole, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "out"
    manifest = load_trained(whole[1]).export(folder)
    manifest["dataset"]["digest"] = "123456789abc"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    measures = {"loss": 1.0, "perplexity": 2.7, "bits_per_byte": 1.4}
    monkeypatch.setattr(evaluation, "_score", lambda *_: measures)
    assert evaluation.main([f"--model={folder}", "--split=validation"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert "other data than those of the run" in line and "123456789abc then" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"name": "resnet20"}},
            "images, and config.data.name='stdlib' is text; choose one of gpt, gpt2",
        ),
        ({"data": {"name": "digits"}}, "text, and config.data.name='digits'"),
        ({"data": {"augment": "shift"}}, "data.augment='shift' has no effect on text"),
        ({"data": {"dir": "a"}}, "data.dir='a' has no effect on text of 'stdlib'"),
        ({"data": {"end_token": "a"}}, "data.end_token='a' has no effect on text"),
        ({"data": {"vocabulary": 9}}, "data.vocabulary=9 has no effect on text"),
        (
            {"optimizer": {"label_smoothing": 0.1}},
            "optimizer.label_smoothing=0.1 has no effect on text",
        ),
        (
            {"data": {"name": "digits"}, "model": {"name": "resnet20"}},
            "data.sequence_length=16 has no effect on data without text",
        ),
        ({"model": {"norm_scope": "host"}}, "has no effect on a model of text"),
        (
            {"model": {"bert": {"heads": 8}}},
            "config.model.bert.heads=8 has no effect on gpt",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(merged(SETTINGS, changes), tmp_path / "run")


SHAPES = [(2, 2), *(pytest.param(shape, marks=SLOW) for shape in ((3, 2), (4, 1)))]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_formula_bytes_are_traced_bytes(method, shape):
    """What every method says that it sends is in the programs of a language model."""
    check_bytes(SETTINGS, method, shape)


# Forms of H-SADMM beside the recommended one in float32.
HSADMM_FORMS = {
    **{name: {"hsadmm": {"preset": name}} for name in ("reset", "leaky", "paper")},
    "per device": {"hsadmm": {"device_level": "consensus"}},
    "paper per device": {"hsadmm": {"preset": "paper", "device_level": "consensus"}},
    "int8": {"wire_dtype": "int8"},
    "int2, top_k": {"wire_dtype": "int2", "rounds": {"top_k": 64}},
    "int2, top_k per device": {
        **{"wire_dtype": "int2", "rounds": {"top_k": 64}},
        "hsadmm": {"device_level": "consensus"},
    },
}


@pytest.mark.sampled(12)
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("form", HSADMM_FORMS)
def test_formula_bytes_are_traced_bytes_of_forms_of_hsadmm(form, shape):
    changes = {"hsadmm": {}, **HSADMM_FORMS[form]}
    changes["hsadmm"] = {"sync_period": 2, **changes["hsadmm"]}
    check_bytes(merged(SETTINGS, {"method": changes}), "hsadmm", shape)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(
    "method",
    [name if name == "hsadmm" else pytest.param(name, marks=SLOW) for name in METHODS],
)
def test_formula_bytes_are_traced_bytes_of_other_models(name, method):
    check_bytes(NAMED[name], method, (2, 2))


def settings_of(settings, method):
    """Those of a method that cuts at the end, with an optimizer that it takes."""
    values = merged(settings, {"method": {"name": method}})
    if method != "hsadmm":
        values["sparsity"].pop("shrink_share")
    if method in ("dgc", "importance"):  # They apply momentum before they send.
        values["optimizer"]["name"] = "sgd"
        values["optimizer"]["learning_rate"] = 0.3
    return values


def check_bytes(settings, method, shape):
    values = merged(settings_of(settings, method), {"data": {"batch_size": 24}})
    devices = jax.devices()[: shape[0] * shape[1]]
    topology = make_topology(str(shape[0]), devices)
    experiment = make_experiment(resolve_config(values), topology)
    current, mesh_shape = experiment.current, dict(experiment.mesh.shape)
    programs, state = current.programs, current.programs.abstract_state()
    formulas = formulas_of_run(experiment)
    split = experiment.task.dataset.train
    batch = jax.eval_shape(
        lambda: jax.tree.map(jnp.asarray, split.evaluation_batch(np.arange(24)))
    )
    for _, options in late_options(current.method):
        formula = formulas.step(mesh_shape, **options)
        found = programs.local_step.collectives(state, batch, **options)
        assert wire_bytes(found, mesh_shape) == wire_bytes(formula, mesh_shape)
    if current.method.rounds is None:
        return
    counts = experiment.channels.keep_counts
    if not current.method.pruning.in_rounds:
        counts = experiment.channels.sizes
    for kind in ("moving", "freeze", "frozen"):
        options = current.exchange_options(counts, kind)
        formula = formulas.exchange(mesh_shape, counts, kind)
        found = programs.exchange.collectives(state, **options)
        assert wire_bytes(found, mesh_shape) == wire_bytes(formula, mesh_shape)
