"""Metrics in TensorBoard and W&B: at the right steps, and never in the way."""

import json
import subprocess
import sys
import types

import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.train.build.settings import RunConfig
from prunex_jax.train.records.folder import RunFolder
from prunex_jax.train.records.trackers import Trackers, check_trackers
from tests.helpers.event_files import needs_tensorboard, shown_in_tensorboard

CONFIG = {"seed": 1}


class FakeWandb:
    """What we use of the module, which keeps what it is told."""

    def __init__(self, fails_at=None):
        self.fails_at = fails_at
        self.inits, self.rows, self.metrics, self.finished = [], [], [], []

    def init(self, **options):
        self.inits.append(options)
        if self.fails_at == "init":
            raise ConnectionError("no network\nwhatever")
        return types.SimpleNamespace(
            log=self._log,
            define_metric=lambda *names, **more: self.metrics.append((names, more)),
            finish=lambda exit_code: self.finished.append(exit_code),
        )

    def _log(self, row):
        if self.fails_at == row["step"]:
            raise ConnectionError("no network")
        self.rows.append(row)


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def run(workdir, run_config, steps, resumed_at=-1, told=None, fresh=False):
    """What a run does with its folder: it goes on somewhere, and logs some steps."""
    folder = RunFolder.open(workdir, CONFIG, {}, is_primary=True, fresh=fresh)
    tell = ([] if told is None else told).append
    with Trackers(run_config, folder.workdir, CONFIG, tell) as trackers:
        object.__setattr__(folder, "trackers", trackers)
        folder.truncate_after(resumed_at)
        for step in steps:
            folder.append({"step": step, "loss": step / 8, "drift": {"conv": 0.25}})
            also = {"validation_loss": float("nan"), "on": "a", "loss": -1.0}
            folder.append({"step": step, **also})
    return [row["step"] for row in folder.read_rows()]


@needs_tensorboard
def test_tensorboard_shows_every_number_at_its_step(tmp_path):
    run(tmp_path, RunConfig(trackers=("tensorboard",)), [2, 4])
    assert shown_in_tensorboard(tmp_path) == {
        "loss": {2: 0.25, 4: 0.5},
        "drift/conv": {2: 0.25, 4: 0.25},
    }


@needs_tensorboard
def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path):
    config = RunConfig(trackers=("tensorboard",))
    run(tmp_path, config, [2, 4, 6])
    assert run(tmp_path, config, [4, 8], resumed_at=2) == [2, 2, 4, 4, 8, 8]
    assert shown_in_tensorboard(tmp_path)["loss"] == {2: 0.25, 4: 0.5, 8: 1.0}


@needs_tensorboard
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_over(tmp_path):
    config = RunConfig(trackers=("tensorboard",))
    run(tmp_path, config, [2, 4])
    run(tmp_path, config, [2, 6])
    assert shown_in_tensorboard(tmp_path)["loss"] == {2: 0.25, 6: 0.75}


@needs_tensorboard
def test_a_fresh_run_has_curves_of_its_own(tmp_path):
    run(tmp_path, RunConfig(trackers=("tensorboard",)), [2, 4])
    run(tmp_path, RunConfig(trackers=("tensorboard",)), [3], fresh=True)
    assert shown_in_tensorboard(tmp_path)["loss"] == {3: 0.375}


def test_nothing_is_tracked_unless_asked(tmp_path, wandb):
    run(tmp_path, RunConfig(), [2])
    assert not wandb.inits and not (tmp_path / "tensorboard").exists()


def test_wandb_gets_rows_settings_and_the_end(tmp_path, wandb):
    run(tmp_path, RunConfig(trackers=("wandb:mine",)), [2])
    (options,) = wandb.inits
    assert options["project"] == "mine" and options["config"] == CONFIG
    assert wandb.rows == [{"step": 2, "loss": 0.25, "drift/conv": 0.25}, {"step": 2}]
    assert (("*",), {"step_metric": "step"}) in wandb.metrics
    assert wandb.finished == [0]


def test_wandb_goes_on_with_the_same_run_and_repeats_no_step(tmp_path, wandb):
    config = RunConfig(trackers=("wandb:mine",))
    run(tmp_path, config, [2, 4, 6])
    run(tmp_path, config, [4, 6, 8], resumed_at=2)
    first, second = wandb.inits
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert [row["step"] for row in wandb.rows if "loss" in row] == [2, 4, 6, 8]
    run(tmp_path, config, [2], fresh=True)
    assert wandb.inits[2]["id"] != first["id"]


def test_wandb_that_is_turned_on_later_gets_all_rows_from_then(tmp_path, wandb):
    run(tmp_path, RunConfig(), [2, 4, 6])
    run(tmp_path, RunConfig(trackers=("wandb:mine",)), [4, 6], resumed_at=2)
    assert [row["step"] for row in wandb.rows if "loss" in row] == [4, 6]


@pytest.mark.parametrize("fails_at", ["init", 4])
def test_a_run_outlives_wandb_and_says_so_once(tmp_path, wandb, fails_at):
    wandb.fails_at, told = fails_at, []
    steps = run(tmp_path, RunConfig(trackers=("wandb:mine",)), [2, 4, 6], told=told)
    assert steps == [2, 2, 4, 4, 6, 6]
    (line,) = told
    assert line.startswith("wandb failed, the run goes on without it: ")
    assert "\n" not in line
    assert len(wandb.inits) == 1


class FakeTrackio:
    """What we use of the module, which keeps what it is told."""

    def __init__(self):
        self.inits, self.rows, self.num_finished = [], [], 0

    def init(self, **options):
        self.inits.append(options)
        return types.SimpleNamespace(
            log=lambda values, step: self.rows.append((step, values)),
            finish=self._finish,
        )

    def _finish(self):
        self.num_finished += 1


def test_trackio_goes_on_with_the_same_run_and_repeats_no_step(tmp_path, monkeypatch):
    fake, config = FakeTrackio(), RunConfig(trackers=("trackio:mine",))
    monkeypatch.setitem(sys.modules, "trackio", fake)
    run(tmp_path, config, [2, 4, 6])
    run(tmp_path, config, [4, 6, 8], resumed_at=2)
    run(tmp_path, config, [3], fresh=True)
    first, second, fresh = fake.inits
    assert (first["project"], first["config"]) == ("mine", CONFIG)
    assert first["name"] == second["name"] != fresh["name"]
    assert first["name"].startswith(f"{tmp_path.name}-")
    told = [step for step, values in fake.rows if "loss" in values]
    assert told == [2, 4, 6, 8, 3]
    assert fake.rows[0] == (2, {"loss": 0.25, "drift/conv": 0.25})
    assert fake.num_finished == 3


def test_trackio_itself_keeps_every_number(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "kept"))
    script = (
        "import pathlib\n"
        "from prunex_jax.train.build.settings import RunConfig\n"
        "from prunex_jax.train.records.trackers import Trackers\n"
        f"folder = pathlib.Path({str(tmp_path)!r}) / 'run'\n"
        "folder.mkdir()\n"
        "config = RunConfig(trackers=('trackio:mine',))\n"
        "with Trackers(config, folder, {'seed': 1}, print) as trackers:\n"
        "    for step in (2, 4):\n"
        "        trackers.show({'step': step, 'loss': step / 8})\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "(name,) = SQLiteStorage.get_runs('mine')\n"
        "print('kept', [(row['step'], row['loss']) for row in "
        "SQLiteStorage.get_logs('mine', name)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert "kept [(2, 0.25), (4, 0.5)]" in done.stdout, done.stdout + done.stderr


def test_an_error_that_ends_the_run_ends_wandb_as_failed(tmp_path, wandb):
    with pytest.raises(KeyError):
        with Trackers(
            RunConfig(trackers=("wandb:x",)), tmp_path, {}, print
        ) as trackers:
            trackers.show({"step": 1, "loss": 1.0})
            raise KeyError
    assert wandb.finished == [1]
    assert json.loads((tmp_path / "wandb.json").read_text())["project"] == "x"


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ("tensorboard", r"run\.trackers=\('tensorboard',\) needs .*\[tensorboard\]"),
        ("wandb:mine", r"run\.trackers=\('wandb:mine',\) needs .*prunex-jax\[wandb\]"),
    ],
)
def test_a_missing_package_is_refused(tracker, message, monkeypatch):
    check_trackers(RunConfig())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=message):
        check_trackers(RunConfig(trackers=(tracker,)))


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        (("wandbb:mine",), "has 'wandbb:mine'; trackers are .*did you mean 'wandb'"),
        (("tensorboard:mine",), "TensorBoard shows folders, no projects"),
        (("wandb:a", "wandb:b"), "has wandb twice; name one project"),
    ],
)
def test_trackers_that_there_are_not_are_refused(trackers, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(UserError, match=message):
        check_trackers(RunConfig(trackers=trackers))
