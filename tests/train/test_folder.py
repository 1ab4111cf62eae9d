"""Tests of the run folder, the description of the environment, clock and progress."""

import json
import math
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.environment import environment, source_revision
from prunex_jax.base.errors import UserError
from prunex_jax.train.build.config import FREE_ON_RESUME, config_to_dict, resolve_config
from prunex_jax.train.records import folder as metrics
from prunex_jax.train.records.folder import RunFolder

CONFIG = {"seed": 1, "data": {"name": "digits", "dir": ""}, "run": {"steps": 9}}
ENVIRONMENT = {
    "versions": {"jax": "1"},
    "topology": {"num_hosts": 2, "devices_per_host": 4},
}


def open_folder(path, config=CONFIG, environment=ENVIRONMENT, **options):
    return RunFolder.open(path, config, environment, is_primary=True, **options)


def changed(tree, key, value):
    """A copy of nested dicts with one dotted key replaced."""
    head, _, rest = key.partition(".")
    inner = changed(tree.get(head, {}), rest, value) if rest else value
    return {**tree, head: inner}


def load(path):
    """Reads JSON and refuses the words that only Python knows."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def make_run(path):
    """A run that ended, with a file of the user's beside its own."""
    folder = open_folder(path)
    folder.append({"step": 1, "loss": 2.0})
    folder.write_summary(dict.fromkeys(metrics.SUMMARY_KEYS, 0))
    (folder.checkpoint_dir / "5").mkdir(parents=True)
    (path / "notes.txt").write_text("mine")
    return folder


def test_a_new_folder_holds_config_and_environment(tmp_path):
    folder = open_folder(tmp_path / "a" / "b")
    assert load(folder.workdir / "config.json") == CONFIG
    assert load(folder.workdir / "environment.json") == ENVIRONMENT
    assert folder.checkpoint_dir == folder.workdir / "checkpoints"
    assert folder.read_rows() == []


def test_config_file_does_not_depend_on_the_order_of_keys(tmp_path):
    open_folder(tmp_path / "a")
    open_folder(tmp_path / "b", config=dict(reversed(CONFIG.items())))
    texts = [(tmp_path / name / "config.json").read_bytes() for name in "ab"]
    assert texts[0] == texts[1]


def test_resolved_config_runs_as_is(tmp_path):
    config = resolve_config({"run": {"steps": 3}, "sparsity": {"exclude": ["stem"]}})
    open_folder(tmp_path, config=config_to_dict(config))
    assert resolve_config(load(tmp_path / "config.json")) == config


def test_the_free_settings_exist():
    known = config_to_dict(resolve_config({"run": {"steps": 3}}))
    for key in FREE_ON_RESUME:
        section, name = key.split(".")
        assert name in known[section], f"{key} is not a setting any more"


def test_the_same_config_resumes(tmp_path):
    make_run(tmp_path)
    folder = open_folder(tmp_path, config=dict(reversed(CONFIG.items())))
    assert [row["step"] for row in folder.read_rows()] == [1]
    assert (folder.checkpoint_dir / "5").exists()
    assert (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("key", FREE_ON_RESUME)
def test_free_settings_may_change_on_resume(tmp_path, key):
    open_folder(tmp_path, config=changed(CONFIG, key, 1))
    other = changed(CONFIG, key, 2)
    open_folder(tmp_path, config=other)
    assert load(tmp_path / "config.json") == other


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", 2, r"seed=1, this one has 2"),
        ("run.steps", 10, r"run\.steps=9, this one has 10"),
        ("data.name", "cifar10", r"data\.name='digits', this one has 'cifar10'"),
        ("data.new", 1, r"data\.new='absent', this one has 1"),
    ],
)
def test_another_config_is_refused_and_changes_nothing(tmp_path, key, value, message):
    make_run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json*")}
    with pytest.raises(UserError, match=message + r"; .*another --workdir, or --fresh"):
        open_folder(tmp_path, config=changed(CONFIG, key, value))
    assert {path: path.read_bytes() for path in tmp_path.glob("*.json*")} == before


def test_a_setting_that_an_earlier_version_did_not_know_has_its_default(tmp_path):
    now = config_to_dict(resolve_config({"run": {"steps": 9}}))
    earlier = {name: part for name, part in now.items() if name != "distill"}
    open_folder(tmp_path, earlier)
    open_folder(tmp_path, now)
    open_folder(tmp_path / "other", earlier)
    with pytest.raises(UserError, match=r"distill\.weight=0\.5, this one has 0\.1"):
        open_folder(tmp_path / "other", changed(now, "distill.weight", 0.1))


def test_a_setting_that_is_no_more_is_forgotten_where_it_changed_nothing(tmp_path):
    now = config_to_dict(resolve_config({"run": {"steps": 9}}))
    earlier = now
    for key, value in (
        ("method.rounds.clip", "none"),
        ("method.hsadmm.adapt", "none"),
        ("method.topk.is_exact", True),
        ("sparsity.path", "stairs"),
    ):
        earlier = changed(earlier, key, value)
    assert config_to_dict(resolve_config(earlier)) == now
    open_folder(tmp_path, earlier)
    open_folder(tmp_path, now)
    earlier = changed(now, "run.average_share", 0.0)
    earlier = changed(earlier, "sparsity.shrink_stairs", False)
    assert config_to_dict(resolve_config(earlier)) == now
    clipped = changed(now, "method.rounds.clip", "median")
    open_folder(tmp_path / "other", clipped)
    with pytest.raises(UserError, match=r"clip='median', this one has 'absent'"):
        open_folder(tmp_path / "other", now)
    with pytest.raises(UserError, match=r"method\.rounds\.clip"):
        resolve_config(clipped)


@pytest.mark.parametrize("key", ["topology.num_hosts", "topology.devices_per_host"])
def test_another_mesh_is_refused_if_asked_to(tmp_path, key):
    open_folder(tmp_path)
    other = changed(ENVIRONMENT, key, 7)
    with pytest.raises(UserError, match=rf"{key}=\d, .* has 7"):
        open_folder(tmp_path, environment=other, exact_topology=True)
    open_folder(tmp_path, environment=other)
    earlier = load(tmp_path / "environment.json")["earlier"]
    assert [each["topology"] for each in earlier] == [ENVIRONMENT["topology"]]


def test_environment_remembers_the_starts_that_differ(tmp_path):
    def versions(number, command):
        new = changed(ENVIRONMENT, "versions.jax", number)
        return {**new, "command": command}

    for number, command in (("1", "a"), ("1", "b"), ("2", "c"), ("3", "d")):
        open_folder(tmp_path, environment=versions(number, command))
    found = load(tmp_path / "environment.json")
    assert found["versions"] == {"jax": "3"}
    assert found["command"] == "d"
    assert [e["versions"]["jax"] for e in found["earlier"]] == ["1", "2"]


def test_fresh_removes_the_files_of_the_run_and_no_other(tmp_path):
    make_run(tmp_path)
    other = changed(CONFIG, "seed", 2)
    folder = open_folder(tmp_path, config=other, fresh=True)
    assert folder.read_rows() == []
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "environment.json", "notes.txt"]
    assert load(tmp_path / "config.json") == other


def test_fresh_starts_over_where_the_config_cannot_be_read(tmp_path):
    make_run(tmp_path)
    (tmp_path / "config.json").write_text('{"seed": ')
    with pytest.raises(UserError, match=r"config\.json is no JSON object.*--fresh"):
        open_folder(tmp_path)
    open_folder(tmp_path, fresh=True)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", ["thesis.txt", "config.json"])
def test_a_folder_of_something_else_is_refused(tmp_path, name, fresh):
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=f"holds {name} and no run; choose a new"):
        open_folder(tmp_path, fresh=fresh)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_hidden_files_and_a_killed_first_start_do_not_matter(tmp_path):
    (tmp_path / ".DS_Store").write_text("")
    (tmp_path / "environment.json").write_text('{"versi')
    open_folder(tmp_path)
    assert load(tmp_path / "environment.json") == ENVIRONMENT


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_an_impossible_folder_is_refused(tmp_path, where):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"--workdir=.*cannot be used .*choose a folder"
    ):
        open_folder(tmp_path / where)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    def refuse(path, content, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(metrics, "write_json", refuse)
    with pytest.raises(UserError, match=r"cannot be used .*Permission denied"):
        open_folder(tmp_path)


def test_rows_are_strict_json_on_disk_at_once(tmp_path):
    folder = open_folder(tmp_path)
    row = {
        "step": np.int64(3),
        "loss": jnp.float32(0.5),
        "list": (np.float32(2.0), math.inf, {"x": jnp.asarray(jnp.nan)}),
        "ok": np.True_,
        "name": "a\nb",
        "none": None,
    }
    folder.append(row)
    folder.append({"step": 4})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert folder.read_rows()[0] == {
        "step": 3,
        "loss": 0.5,
        "list": [2.0, None, {"x": None}],
        "ok": True,
        "name": "a\nb",
        "none": None,
    }


def test_bad_rows_are_refused(tmp_path):
    folder = open_folder(tmp_path)
    with pytest.raises(ValueError, match="needs an integer step, got None"):
        folder.append({"loss": 1.0})
    with pytest.raises(TypeError, match=r"row\.a\[0\] is ndarray"):
        folder.append({"step": 1, "a": [np.zeros(2)]})
    assert folder.read_rows() == []


def test_truncating_drops_later_rows_and_a_cut_one(tmp_path):
    folder = open_folder(tmp_path)
    for step in (1, 2, 3, 4):
        folder.append({"step": step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    assert [row["step"] for row in folder.read_rows()] == [1, 2, 3, 4]
    folder.truncate_after(2)
    folder.append({"step": 3, "again": True})
    assert folder.read_rows() == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


@pytest.mark.parametrize("tail", ['{"step": 2, "lo', '{"step": 2}'])
def test_resuming_mends_the_last_line_before_rows_are_added(tmp_path, tail):
    open_folder(tmp_path).append({"step": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(tail)
    folder = open_folder(tmp_path)
    folder.append({"step": 3})
    steps = [1, 2, 3] if tail.endswith("}") else [1, 3]
    assert [row["step"] for row in folder.read_rows()] == steps


def test_a_spoilt_line_in_the_middle_is_named(tmp_path):
    folder = open_folder(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nspoilt\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: 'spoilt'"):
        folder.read_rows()


def test_truncating_is_atomic(tmp_path, monkeypatch):
    folder = open_folder(tmp_path)
    for step in (1, 2):
        folder.append({"step": step})

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        folder.truncate_after(1)
    assert [row["step"] for row in folder.read_rows()] == [1, 2]


def test_summary_has_what_others_read(tmp_path):
    folder = open_folder(tmp_path)
    with pytest.raises(ValueError, match=r"the summary lacks method, .*seconds_total"):
        folder.write_summary({"test_accuracy": 0.9})
    summary = dict.fromkeys(metrics.SUMMARY_KEYS, 1.5) | {
        "test_loss": math.nan,
        "more": np.float32(2.0),
    }
    folder.write_summary(summary)
    found = load(tmp_path / "summary.json")
    assert found == summary | {"test_loss": None, "more": 2.0}
    assert list(found)[: len(metrics.SUMMARY_KEYS)] == list(metrics.SUMMARY_KEYS)


def test_other_processes_touch_nothing(tmp_path):
    path = tmp_path / "run"
    folder = RunFolder.open(path, CONFIG, ENVIRONMENT, is_primary=False, fresh=True)
    folder.append({"step": 1})
    folder.truncate_after(0)
    folder.write_summary(dict.fromkeys(metrics.SUMMARY_KEYS, 0))
    assert folder.read_rows() == []
    assert not path.exists()


def test_environment_describes_this_process():
    found = environment({"num_hosts": 2})
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["orbax"].count(".") == 2
    assert found["platform"] == jax.default_backend()
    assert sum(found["device_kinds"].values()) == len(jax.devices())
    assert found["topology"] == {"num_hosts": 2}
    assert found["command"] == shlex.join(sys.orig_argv)
    json.dumps(found, allow_nan=False)


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path):
    try:
        git(tmp_path, "init", "-q")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("git is not installed")
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    git(tmp_path, "add", "package/a.py")
    git(tmp_path, "commit", "-qm", "Begin")
    return package


def test_source_revision_of_a_checkout(checkout):
    revision = git(checkout, "rev-parse", "HEAD").strip()
    assert source_revision(checkout) == {"revision": revision, "is_dirty": False}
    (checkout.parent / "elsewhere.txt").write_text("")
    assert not source_revision(checkout)["is_dirty"]
    (checkout / "b.py").write_text("")
    assert source_revision(checkout)["is_dirty"]


def test_source_revision_is_none_where_git_does_not_track(checkout, monkeypatch):
    installed = checkout.parent / ".venv" / "package"
    installed.mkdir(parents=True)
    (installed / "a.py").write_text("")
    assert source_revision(installed) is None
    assert source_revision(checkout / "missing") is None
    monkeypatch.setenv("PATH", "")
    assert source_revision(checkout) is None
