"""A run that is watched in every way, stopped and resumed."""

import jax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.compare.report.run_report import write_runs
from prunex_jax.mesh import make_topology
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.run import train
from tests.helpers.event_files import needs_tensorboard, shown_in_tensorboard
from tests.helpers.tiny_runs import StopAtOnce, rows_of, settings, stop_after

RUN = {
    "steps": 8,
    "log_every_steps": 2,
    "checkpoint_every_steps": 3,
    "eval_every_steps": 4,
    "trackers": ("tensorboard",),
}


def watched(**run):
    return settings(run={**RUN, **run})


def test_a_window_beyond_the_run_is_refused_before_anything_is_compiled():
    config = resolve_config(watched(profile_steps="4:9"))
    with pytest.raises(UserError, match=r"profile_steps=4:9 .* step 8 of the run"):
        make_experiment(config, make_topology("2", devices=jax.devices()[:4]))


@pytest.mark.slow
@needs_tensorboard
def test_a_watched_run_shows_each_row_once_although_it_was_killed(tmp_path, capsys):
    run = tmp_path / "run"
    with pytest.raises(StopAtOnce):
        train(watched(), run, after_step=[stop_after(5)])
    assert [row["step"] for row in rows_of(run) if "loss" in row] == [2, 4]
    train(watched(profile_steps="4:6"), run)
    shown = shown_in_tensorboard(run)
    rows = rows_of(run)
    for key in ("loss", "validation_loss", "device_wire_bytes"):
        # Rows of validation repeat what the run has cost.
        logged = {row["step"]: row[key] for row in reversed(rows) if key in row}
        assert shown[key] == pytest.approx(logged), key
    assert rows[-1]["device_wire_bytes"] > 0
    assert len(list(run.rglob("*.xplane.pb"))) == 1
    page = write_runs([run]).read_text()
    assert "devices; ended, 8 steps done." in page
    told = capsys.readouterr().out
    assert "resumed at step 3 of 8" in told and told.count("columns   step") == 2
