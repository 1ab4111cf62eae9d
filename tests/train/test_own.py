"""Networks, data and losses of the user's own, through whole runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from prunex_jax.base.errors import UserError
from prunex_jax.export import read_model
from prunex_jax.tasks import Own
from prunex_jax.train import open_run, train
from prunex_jax.train.commands.evaluate import evaluate
from prunex_jax.train.commands.evaluate import main as evaluate_command
from prunex_jax.train.commands.export import main as export_command
from prunex_jax.train.records.restoring import load_trained
from tests.helpers import own_networks
from tests.helpers.own_networks import HIDDEN, LinenNet, NnxNet, problem
from tests.helpers.tiny_runs import OVER_A_CUT, StopAtOnce, merged, rows_of, stop_after

SETTINGS = merged(
    OVER_A_CUT,
    {"data": {"batch_size": 32}, "run": {"steps": 40}},
)
DATA = {"train": problem(400), "test": problem(100, seed=1)}


def equinox_net():
    pytest.importorskip("equinox")
    return own_networks.equinox_net()


GIVEN = {
    "nnx": lambda: NnxNet,
    "linen": LinenNet,
    "equinox": equinox_net,
    "pair": lambda: (own_networks.init, own_networks.apply),
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_batch_statistics_of_a_host_go_on_after_a_cut(name, tmp_path):
    values = merged(SETTINGS, {"model": {"norm_scope": "host"}})
    result = train(values, tmp_path / "run", model=GIVEN[name](), data=DATA)
    assert result.summary["test_accuracy"] > 0.8
    assert result.summary["shrink_max_abs_error"] < 1e-5
    assert result.summary["shrink_step"] < result.summary["steps"]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", GIVEN)
def test_a_network_learns_and_ends_smaller(name, tmp_path):
    result = train(SETTINGS, tmp_path / "run", model=GIVEN[name](), data=DATA)
    summary = result.summary
    assert summary["test_accuracy"] > 0.8
    assert summary["params_kept"] < 0.7 * summary["params_dense"]
    assert summary["macs_kept"] < 0.7 * summary["macs_dense"]
    assert summary["shrink_max_abs_error"] < 1e-5
    assert 0 < summary["host_wire_ratio"] < 0.6
    x, labels = DATA["test"]
    answers = np.asarray(result.network.logits(x))
    right = float(np.mean(answers.argmax(-1) == labels))
    assert right == pytest.approx(summary["test_accuracy"])
    rows = rows_of(tmp_path / "run")
    assert {"loss", "accuracy"} <= set(rows[0])


class Recurrent(nnx.Module):
    """A layer whose loop starts from zeros."""

    def __init__(self, rngs):
        self.layer = nnx.RNN(nnx.GRUCell(3, HIDDEN, rngs=rngs))
        self.out = nnx.Linear(HIDDEN, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.layer(x)[:, -1])


class RecurrentLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        layer = linen.RNN(linen.OptimizedLSTMCell(HIDDEN))
        return linen.Dense(3)(layer(x)[:, -1])


def from_zeros(params, x):
    """As people write it."""
    kernel = params[0]["kernel"]

    def cell(state, row):
        return jnp.tanh(row @ kernel[:3] + state), None

    state = jnp.zeros((x.shape[0], HIDDEN))
    return jax.lax.scan(cell, state, x.swapaxes(0, 1))[0] @ params[1]["kernel"]


RECURRENT = {
    "nnx": Recurrent,
    "linen": RecurrentLinen(),
    "pair": (own_networks.init, from_zeros),
}


def looped_loss(answers, examples):
    """The squared error, number by number."""
    wanted = jax.nn.one_hot(examples[1], answers.shape[1])

    def body(column, total):
        return total + (answers - wanted)[:, column] ** 2

    return jax.lax.fori_loop(0, 3, body, jnp.zeros(len(answers)))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("method", ["hsadmm", "dense", "powersgd", "topk", "diloco"])
def test_recurrent_networks_train_are_cut_and_resume(name, method, tmp_path):
    """Loops that start from zeros, also in the loss."""
    x, labels = problem(400)
    data = {"train": (x.reshape(-1, 4, 3), labels)}
    values = merged(SETTINGS, {"method": {"name": method}, "run": {"steps": 24}})
    if method != "hsadmm":
        values["sparsity"] = {"num_stairs": 1}
    given = {"model": RECURRENT[name], "data": data, "loss": looped_loss}
    whole = train(values, tmp_path / "whole", **given)
    with pytest.raises(StopAtOnce):
        train(values, tmp_path / "run", **given, after_step=[stop_after(13)])
    resumed = train(values, tmp_path / "run", **given)
    for found, wanted in zip(
        *(jax.tree.leaves(r.network.params) for r in (resumed, whole)), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    rows = [row["loss"] for row in rows_of(tmp_path / "whole") if "loss" in row]
    assert rows[-1] < 0.95 * rows[0]
    if method == "hsadmm":
        assert whole.summary["params_kept"] < whole.summary["params_dense"]
        assert whole.summary["shrink_max_abs_error"] < 1e-5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stopped_at", [35, 15])
@pytest.mark.slow
def test_a_resumed_run_draws_the_same(stopped_at, tmp_path):
    """Dropout follows seed and step: before and after the cut."""
    whole = train(SETTINGS, tmp_path / "whole", model=NnxNet, data=DATA)
    with pytest.raises(StopAtOnce):
        train(
            SETTINGS,
            tmp_path / "run",
            model=NnxNet,
            data=DATA,
            after_step=[stop_after(stopped_at)],
        )
    resumed = train(SETTINGS, tmp_path / "run", model=NnxNet, data=DATA)
    for found, wanted in zip(
        *(jax.tree.leaves(r.network.params) for r in (resumed, whole)), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("model", [LinenNet(), NnxNet], ids=["linen", "nnx"])
def test_methods_may_look_at_batches_before_the_first_step(model, tmp_path):
    """Networks that draw numbers draw them there, too."""
    values = merged(SETTINGS, {"method": {"name": "pactrain"}, "run": {"steps": 8}})
    values["sparsity"] = {"num_stairs": 1}
    result = train(values, tmp_path / "run", model=model, data=DATA)
    assert result.summary["params_kept"] < 0.7 * result.summary["params_dense"]


@pytest.mark.slow
def test_losses_and_metrics_have_names_of_their_own(tmp_path, capsys):
    x, labels = problem(300)
    wanted = np.stack([np.sin(x[:, 0]), x[:, 1], labels], axis=-1)

    def loss(answers, examples):
        return jnp.mean(jnp.abs(answers - examples["wanted"]))

    def farthest(answers, examples):
        return jnp.max(jnp.abs(answers - examples["wanted"]), axis=-1)

    values = merged(SETTINGS, {"run": {"eval_every_steps": 20}})
    result = train(
        values,
        tmp_path / "run",
        model=NnxNet,
        data={"point": x, "wanted": wanted},
        inputs="point",
        loss=loss,
        metrics={"farthest": farthest},
    )
    summary = result.summary
    assert summary["test_loss"] is None and summary["test_farthest"] is None
    assert summary["validation_farthest"] > summary["validation_loss"] > 0
    assert "test_accuracy" not in summary
    rows = rows_of(tmp_path / "run")
    trained = [row["farthest"] for row in rows if "farthest" in row]
    assert len(trained) == 8 and trained[-1] < trained[0]
    assert [row["step"] for row in rows if "validation_farthest" in row] == [20]
    printed = capsys.readouterr().out
    assert "validation farthest" in printed and "ex/s" in printed


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["muon", "mine"])
@pytest.mark.slow
def test_other_optimizers_train_and_go_on_after_a_cut(optimizer, tmp_path):
    """What they remember is cut out with the channels, and restored."""
    given = {}
    if optimizer == "mine":
        given["optimizer"] = lambda rate: optax.adan(rate)
    values = merged(SETTINGS, {"optimizer": {"learning_rate": 0.03}})
    if not given:
        values["optimizer"]["name"] = optimizer
    whole = train(values, tmp_path / "whole", model=NnxNet, data=DATA, **given)
    assert whole.summary["test_accuracy"] > 0.8
    assert whole.summary["params_kept"] < 0.7 * whole.summary["params_dense"]
    with pytest.raises(StopAtOnce):
        watch = stop_after(35)
        run = tmp_path / "run"
        train(values, run, model=NnxNet, data=DATA, after_step=[watch], **given)
    resumed = train(values, tmp_path / "run", model=NnxNet, data=DATA, **given)
    for found, wanted in zip(
        *(jax.tree.leaves(r.network.params) for r in (resumed, whole)), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_settings_know_of_an_optimizer_that_was_given(tmp_path):
    short = merged(SETTINGS, {"run": {"steps": 2, "log_every_steps": 1}})
    short["sparsity"] = {"num_stairs": 1}
    run = tmp_path / "run"
    train(short, run, model=NnxNet, data=DATA, optimizer=optax.lion)
    settings = json.loads((run / "config.json").read_text())
    assert settings["optimizer"]["name"] == "own"
    with pytest.raises(UserError, match="was brought to `train` in Python"):
        train(settings, tmp_path / "other", model=NnxNet, data=DATA)


@pytest.mark.slow
def test_schedules_wait_for_metrics_of_the_user(tmp_path, capsys):
    values = merged(SETTINGS, {"method": {"schedule": ("dense", "hsadmm @ big > 0.5")}})
    values["sparsity"]["start_share"] = 0.3
    metrics = {"big": lambda answers, examples: jnp.ones(answers.shape[0])}
    train(values, tmp_path / "run", model=NnxNet, data=DATA, metrics=metrics)
    assert "step 5: goes on with method hsadmm" in capsys.readouterr().out
    with pytest.raises(UserError, match="'big' is not a metric"):
        train(values, tmp_path / "other", model=NnxNet, data=DATA)


@pytest.mark.rotates
def test_ours_and_theirs_go_together(tmp_path):
    """Our network on their images, and their network on our digits."""
    images = np.random.default_rng(0).integers(0, 255, (96, 8, 8, 1)).astype(np.float32)
    labels = np.arange(96) % 4
    short = {"run": {"steps": 4, "log_every_steps": 2}}
    values = merged(SETTINGS, {**short, "model": {"width": 0.25}})
    values["sparsity"] = {"num_stairs": 1}
    result = train(values, tmp_path / "ours", data=(images / 255, labels))
    assert result.network.params["classifier"]["bias"].shape == (4,)

    def init(key):
        return {"w": jax.random.normal(key, (64, 24)), "v": jnp.zeros((24, 10))}

    def apply(params, x):
        hidden = jnp.tanh(x.reshape(x.shape[0], -1) @ params["w"])
        return hidden @ params["v"]

    values = merged(SETTINGS, {"data": {"name": "digits", "augment": "shift"}})
    result = train(values, tmp_path / "digits", model=(init, apply))
    assert result.summary["test_accuracy"] > 0.3


def test_what_does_not_fit_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match="norm_scope='host' has no effect"):
        values = merged(SETTINGS, {"model": {"norm_scope": "host"}})
        train(values, tmp_path / "run", model=GIVEN["pair"](), data=DATA)
    assert not (tmp_path / "run").exists()
    values = merged(SETTINGS, {"distill": {"teacher": "self"}})
    with pytest.raises(UserError, match="has no say in a loss of your own"):
        loss = {"loss": lambda answers, examples: jnp.mean(answers**2)}
        train(values, tmp_path / "run", model=NnxNet, data=DATA, **loss)


@pytest.mark.slow
def test_a_network_is_named_on_the_command_line(tmp_path):
    name = "tests.helpers.own_networks:DigitsNet"
    values = merged(SETTINGS, {"data": {"name": "digits"}, "model": {"name": name}})
    result = train(values, tmp_path / "run")
    assert result.summary["params_kept"] < result.summary["params_dense"]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["name"] == name
    # Its program is scored without its code.
    folder = tmp_path / "out"
    manifest = load_trained(tmp_path / "run").export(folder)
    manifest["config"]["model"]["name"] = "gone.from_here:Network"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = evaluate(folder)
    for key in ("accuracy", "loss"):
        wanted = result.summary[f"test_{key}"]
        assert found.measures[key] == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(UserError, match="cannot be imported as package"):
        values["model"]["name"] = "tests.helpers.own_networks:Nothing"
        train(values, tmp_path / "other")


def _check_exports(folder, result):
    """By the result, the opened folder and the command line: the same network."""
    opened = open_run(folder / "run", model=NnxNet, data=DATA)
    assert opened.summary == json.loads(json.dumps(result.summary))
    assert [row["step"] for row in opened.rows] == list(range(5, 41, 5))
    assert opened.config.run.steps == 40
    assert opened.at(30).step == 30
    named = "--model=tests.helpers.own_networks:NnxNet", f"--data={__name__}:DATA"
    made = {
        "result": lambda out: result.export(out),
        "opened": lambda out: opened.export(out),
        "command": lambda out: export_command(
            [f"--workdir={folder / 'run'}", f"--out={out}", *named, "--quiet"]
        ),
    }
    x, _ = DATA["test"]
    for name, export in made.items():
        export(folder / name)
        found = read_model(folder / name)
        assert found.manifest["certificate"]["forward_error"] < 1e-5
        answers = np.asarray(found(x))
        np.testing.assert_allclose(answers, result.network.logits(x), atol=1e-5)
        assert evaluate_command([f"--model={folder / name}", named[1], "--quiet"]) == 0
    measured = evaluate(folder / "result", own=Own(data=DATA)).measures
    assert measured["accuracy"] == pytest.approx(result.summary["test_accuracy"])
    assert export_command([f"--workdir={folder / 'run'}", f"--out={folder / 'x'}"]) == 2


@pytest.mark.slow
def test_what_is_of_ones_own_is_not_run_from_settings(tmp_path):
    """Settings say that something was brought, and the same call goes on."""
    result = train(SETTINGS, tmp_path / "run", model=NnxNet, data=DATA)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["name"] == "own NnxNet" and config["data"]["name"] == "own"
    again = train(SETTINGS, tmp_path / "run", model=NnxNet, data=DATA)
    assert again.summary["test_loss"] == result.summary["test_loss"]
    with pytest.raises(UserError, match="holds a run with data"):
        train(SETTINGS, tmp_path / "run")
    with pytest.raises(UserError, match="'own' was brought to `train` in Python"):
        load_trained(tmp_path / "run").export(tmp_path / "out")
    _check_exports(tmp_path, result)
    data = {**config, "data": {**config["data"], "name": "digits"}}
    with pytest.raises(UserError, match="'own NnxNet' was brought to `train`"):
        train(data, tmp_path / "other")
