"""A run that is asked to stop is saved, and says so to whoever called it."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import RunStopped, UserError
from prunex_jax.train import train
from prunex_jax.train.run import train_steps

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
GIVEN = {
    "model": (lambda key: {"w": jnp.zeros((3, 2))}, lambda params, x: x @ params["w"]),
    "data": (X, (X[:, 0] > 0).astype(np.int32)),
}
SETTINGS = {
    "run": {"steps": 6},
    "data": {"batch_size": 16},
    "method": {"name": "dense"},
}


def interrupt_at(step, number=signal.SIGINT):
    def watch(progress, state):
        if progress.step == step:
            signal.raise_signal(number)

    return [watch]


@pytest.mark.parametrize("name", ["fresh", "exact_topology"])
def test_a_word_is_no_switch(name, tmp_path):
    """fresh="no" would remove a run."""
    with pytest.raises(UserError, match=f"{name}='no' must be True or False"):
        train(SETTINGS, tmp_path / "run", **GIVEN, **{name: "no"})


def test_a_stopped_call_is_interrupted_and_goes_on_when_called_again(tmp_path, capsys):
    with pytest.raises(RunStopped, match="the same call goes on") as stopped:
        train(SETTINGS, tmp_path / "run", **GIVEN, after_step=interrupt_at(2))
    assert isinstance(stopped.value, KeyboardInterrupt)
    assert not isinstance(stopped.value, Exception), "nobody takes it for a failure"
    assert not (tmp_path / "run" / "summary.json").exists()
    with pytest.raises(RunStopped):
        stopping = interrupt_at(4, signal.SIGTERM)
        steps = train_steps(SETTINGS, tmp_path / "run", **GIVEN, after_step=stopping)
        assert [progress.step for progress, _ in steps]
    result = train(SETTINGS, tmp_path / "run", **GIVEN)
    told = capsys.readouterr().out
    assert "stopped at step 2 of 6" in told and "resumed at step 4 of 6" in told
    whole = train(SETTINGS, tmp_path / "whole", **GIVEN)
    for found, wanted in zip(
        *(jax.tree.leaves(r.network.params) for r in (result, whole)), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def test_what_is_no_number_is_shown_again(tmp_path, capsys):
    """A metric that was not finite is null in the summary."""
    nowhere = {
        "metrics": {"nowhere": lambda answers, examples: jnp.nan * answers[:, 0]}
    }
    first = train(SETTINGS, tmp_path / "run", **GIVEN, **nowhere)
    assert np.isnan(first.summary["validation_nowhere"])
    again = train(SETTINGS, tmp_path / "run", **GIVEN, **nowhere)
    assert again.summary["validation_nowhere"] is None
    assert "validation nowhere -, validation loss 0." in capsys.readouterr().out


def test_a_run_without_held_out_examples_says_so(tmp_path, capsys):
    settings = {**SETTINGS, "data": {"batch_size": 16, "validation_share": 0.0}}
    result = train(settings, tmp_path / "run", **GIVEN)
    assert "network   not scored" in capsys.readouterr().out
    assert str(result).startswith("dense, 6 steps: not scored")


def test_a_start_that_trained_nothing_may_be_mended(tmp_path):
    """Its folder knows the functions that it began with, and nothing was learned."""

    def fail(progress, state):
        raise KeyError("at once")

    with pytest.raises(KeyError):
        train(SETTINGS, tmp_path / "run", **GIVEN, after_step=[fail])
    x, labels = GIVEN["data"]
    mended = {**GIVEN, "data": (2 * x, labels)}
    assert train(SETTINGS, tmp_path / "run", **mended).summary["steps"] == 6
    with pytest.raises(UserError, match="a run in which the content of"):
        train(SETTINGS, tmp_path / "run", **GIVEN)
