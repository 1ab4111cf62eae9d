"""The command line refuses bad input in one line, before anything is compiled."""

import json
from pathlib import Path

import pytest

from prunex_jax.train.commands.command import main

CONFIGS = Path(__file__).parents[2] / "configs"
# Without the simulated devices: this process has eight already.
DEMO = [
    f"--config={CONFIGS / 'digits_resnet20_hsadmm.py'}",
    "--config.topology.layout=2",
]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the error output."""
    code = main([*arguments])
    return code, capsys.readouterr().err


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.nam=x", "data.nam is not a setting, did you mean 'data.name'"),
        ("data.batch_size=abc", "batch_size=abc should be of type int"),
        ("optimizer.nesterov=abc", "nesterov=abc should be of type bool"),
        ("data.batch_size", "--config.data.batch_size needs a value"),
        ("sparsity.exclude=(1,)", "sparsity.exclude=1 should be of type str"),
        ("sparsity.exclude=a,b", "sparsity.exclude=a,b is no tuple"),
        ("method=dense", "--config.method is not a setting"),
        ("data.batch_size=63", "63 does not divide evenly over 8 devices: use 56 or"),
        ("data.batch_size=0", "config.data.batch_size=0 must be at least 1"),
        ("method.dgc.density=2", "config.method.dgc.density=2.0 must lie in (0, 1]"),
        ("run.max_host_drift=-1", "run.max_host_drift=-1.0 must not be negative"),
        ("optimizer.learning_rate=nan", "learning_rate=nan must be a finite number"),
        ("data.batch_size=8000", "more than the 1294 training examples"),
        ("sparsity.sparsity=1.0", "sparsity.sparsity=1.0 must lie in [0, 1)"),
        ("sparsity.sparsity=-0.5", "sparsity.sparsity=-0.5 must lie in [0, 1)"),
        ("sparsity.start_share=0.9", "start_share = 0.9 is after"),
        ("sparsity.shrink_share=0.4", "shrink_share = 0.4 is before"),
        ("sparsity.shrink_share=0.999", "leaves the small network no step"),
        ("topology.layout=3", "layout=3 cannot be cut from 8 devices"),
        ("data.name=cifar1", "did you mean 'cifar10'"),
        ("method.name=hsadm", "did you mean 'hsadmm'"),
        ("method.hsadmm.preset=papr", "did you mean 'paper'"),
        ("method.hsadmm.rho_host=1.0", "needs rho_device > 0"),
        ("method.rounds.top_k=3", "top_k=3 must be an even number from 2 to 4096"),
        ("method.rounds.top_k=5000", "method.rounds.top_k=5000 must lie in [0, 4096]"),
        ("method.rounds.error_decay=2", "rounds.error_decay=2.0 must lie in [0, 1]"),
        ("model.name=resnet21", "is not known"),
        ("optimizer.schedule=cosin", "did you mean 'cosine'"),
        ("run.steps=5", "give exactly one of them"),
    ],
)
def test_bad_settings(override, message, tmp_path, capsys):
    workdir = tmp_path / "run"
    code, error = run(capsys, *DEMO, f"--config.{override}", f"--workdir={workdir}")
    assert code == 2
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not workdir.exists(), "nothing is left behind"


def test_a_setting_may_stand_apart_from_its_value(tmp_path, capsys):
    workdir = tmp_path / "run"
    code, error = run(
        capsys, *DEMO, f"--workdir={workdir}", "--config.data.batch_size", "63"
    )
    assert code == 2 and "63 does not divide evenly over 8 devices" in error


def test_missing_data_set_says_how_to_prepare_it(tmp_path, capsys):
    code, error = run(
        capsys,
        *DEMO,
        "--config.data.name=cifar10",
        f"--config.data.dir={tmp_path}",
        f"--workdir={tmp_path / 'run'}",
    )
    assert code == 2
    assert str(tmp_path) in error and "tfds build cifar10" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--config is required"),
        ((DEMO[0],), "--workdir is required"),
        (("--config=nowhere.py", "--workdir=x"), "nowhere.py is not a file"),
        ((*DEMO, "--workdi=x"), "workdi"),
        ((*DEMO, "--workdir=x", "stray"), "'stray' is not understood"),
        ((f"{DEMO[0]}:4xx", "--workdir=x"), "topology.layout='4xx' is unknown: use"),
        (("--config=stdlib_bert_hsadmm:x", "--workdir=x"), "be called with argument x"),
        ((*DEMO, "--workdir=x", "--stopped_exit_code=256"), "=256 must be from 0 to"),
        ((*DEMO, "--workdir=x", "--num_processes=2"), "coordinator"),
    ],
)
def test_bad_flags(arguments, message, capsys):
    code, error = run(capsys, *arguments)
    assert code == 2
    assert message in error and error.count("\n") == 1


@pytest.mark.slow
def test_unusable_folders(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("")
    for workdir in (tmp_path / "file", foreign, Path("/proc/nowhere")):
        code, error = run(capsys, *DEMO, f"--workdir={workdir}")
        assert code == 2, workdir
        assert str(workdir) in error
    assert (foreign / "thesis.txt").exists()


def test_config_file_that_fails(tmp_path, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text("def get_config():\n    return 1 / 0\n")
    code, error = run(capsys, f"--config={broken}", "--workdir=x")
    assert code == 2 and "ZeroDivisionError" in error and "Traceback" not in error


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "--workdir" in capsys.readouterr().out


@pytest.mark.slow
def test_command_line_trains_resumes_and_starts_over(tmp_path, capsys):
    workdir = tmp_path / "run"
    arguments = [
        *DEMO,
        "--config.model.width=0.25",
        "--config.run.epochs=0",
        "--config.run.steps=9",
        "--config.run.log_every_steps=3",
        f"--workdir={workdir}",
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "2 hosts x 4 devices" in out, "the table of hosts"
    assert "model.width=0.25 (default 1.0)" in out, "what differs from the defaults"
    assert "test accuracy" in out.splitlines()[-6], "the last screen"
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["steps"] == 9

    assert main(arguments) == 0
    assert "resumed at step 9 of 9" in capsys.readouterr().out

    code, error = run(capsys, *arguments, "--config.seed=1")
    assert code == 2 and "seed" in error
    assert main([*arguments, "--config.seed=1", "--fresh"]) == 0
    assert json.loads((workdir / "config.json").read_text())["seed"] == 1
