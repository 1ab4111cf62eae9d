"""Bad inputs of every command end with exit code 2 and one line, soon."""

import time
from pathlib import Path

import pytest

from prunex_jax.__main__ import main
from prunex_jax.train.build.config import default_config, dotted_keys

CONFIG = "--config=digits_resnet20_hsadmm"
# This process has its devices already.
TRAIN = ("train", CONFIG, "--config.topology.layout=2", "--workdir={tmp}/run")
HUGE = 10**20
# More than any of them takes, by far; they end before anything is compiled.
SECONDS = 20.0


def settings_of(*kinds: type) -> list[str]:
    """Keys of all settings of a type."""
    config = default_config()
    keys = []
    for key in dotted_keys(config.to_dict()):
        *sections, last = key.split(".")
        section = config
        for name in sections:
            section = section[name]
        if section.get_type(last) in kinds:
            keys.append(key)
    return keys


# Config file -> part of the message.
CONFIGS = {
    "import sys\nsys.exit(0)\n": "SystemExit",
    "def get_config():\n    raise SystemExit(0)\n": "SystemExit",
    "def get_config():\n    exit()\n": "SystemExit",
    "def get_config():\n    quit(3)\n": "SystemExit",
    "raise KeyboardInterrupt\n": "KeyboardInterrupt",
    "class Stop(BaseException): pass\nraise Stop\n": "Stop",
    "def get_config():\n    raise GeneratorExit\n": "GeneratorExit",
    "def get_config():\n    return get_config()\n": "RecursionError",
    "def get_config(:\n": "SyntaxError",
    "import nowhere_at_all\n": "nowhere_at_all",
    "\x00": "cannot be loaded",
    "pass\n": "get_config",
    "get_config = 3\n": "is no function",
    "get_config = None\n": "is no function",
    "def get_config(a):\n    pass\n": "cannot be called",
    "def get_config():\n    pass\n": "gives NoneType, not settings",
    "def get_config():\n    return 3\n": "gives int, not settings",
    "def get_config():\n    return 'x'\n": "gives str, not settings",
    "def get_config():\n    return {}\n": "gives dict, not settings",
    "def get_config():\n    return []\n": "gives list, not settings",
    "def get_config():\n    yield 1\n": "gives generator, not settings",
    "async def get_config():\n    yield 1\n": "gives async_generator, not",
    "def get_config():\n    return int\n": "gives type, not settings",
    "from ml_collections import ConfigDict\ndef get_config():\n"
    "    return ConfigDict()\n": "gives no section",
    "from ml_collections import ConfigDict\ndef get_config():\n"
    "    return ConfigDict({'method': 3})\n": "gives no section",
    "from ml_collections import FrozenConfigDict\ndef get_config():\n"
    "    return FrozenConfigDict()\n": "gives FrozenConfigDict, not settings",
}
# Lines of a config file that change its settings -> part of the message.
CHANGES = {
    "config.run.steps = 1e20": "steps",
    "config.run.steps = 10**20": "run.steps=1",
    "config.run.steps = float('inf')": "steps",
    "config.run.steps = '5'": "steps",
    "config.run.epochs = float('inf')": "epochs=inf must be a finite number",
    "config.run.epochs = 10**400": "OverflowError",
    "config.optimizer.learning_rate = float('nan')": "learning_rate=nan must be",
    "config.optimizer.learning_rate = None": "learning_rate",
    "config.optimizer.learning_rat = 0.1": "learning_rat",
    "config.data = 5": "data",
    "config.data.name = 5": "name",
    "config.sparsity.exclude = 'stem'": "exclude",
    "config.sparsity.exclude = (1,)": "exclude",
    "config.seed = -1": "config.seed=-1",
    "config.seed = 2**80": "config.seed=",
    "config.seed = True": "seed",
    "config.topology.layout = 2": "layout",
}
# Arguments of train after those of TRAIN -> part of the message.
ARGUMENTS = {
    "--config.topology.cpu_devices=100000": "cpu_devices=100000 must lie in",
    "--config.topology.cpu_devices=-1": "cpu_devices=-1 must lie in",
    "--config.topology.simulated=1000000x1000000": "more than the 4096 devices",
    "--config.topology.simulated=5000x1": "more than the 4096 devices",
    f"--config.topology.simulated={'9' * 5000}x1": "more than the 4096 devices",
    "--config.topology.simulated=2": "is not hosts x devices",
    "--config.topology.simulated=2x": "is not hosts x devices",
    "--config.topology.simulated=0x2": "is not hosts x devices",
    "--config.topology.simulated=-1x2": "is not hosts x devices",
    "--config.topology.simulated=٣x2": "is not hosts x devices",
    "--config.topology.layout=": "layout",
    "--config.topology.layout=0": "layout",
    "--config.topology.layout=-2": "layout",
    "--config.topology.layout=1e3": "layout",
    f"--config.topology.layout={HUGE}": "layout",
    "--config.run.steps=1e20": "should be of type int",
    f"--config.run.steps={'9' * 5000}": "should be of type int",
    "--config.run.steps=-1": "run.steps=-1",
    "--config.run.epochs=0": "exactly one",
    "--config.run.epochs=-1": "run.epochs=-1",
    "--config.data.batch_size=": "should be of type int",
    "--config.data.batch_size=0x40": "should be of type int",
    "--config.data.validation_share=1": "validation_share=1.0 must lie in",
    "--config.data.name=": "data.name=''",
    "--config.data.name=../x": "data.name",
    "--config.data.augment=flip": "augment",
    "--config.data.loader=disk": "loader",
    "--config.data.image_size=1000000": "image_size=1000000 must lie in",
    "--config.data.num_workers=100000": "num_workers=100000 must lie in",
    "--config.data.synthetic_examples=9999999999": "synthetic_examples",
    "--config.model.name=": "model",
    "--config.model.width=0": "model.width",
    "--config.model.width=-1": "model.width",
    "--config.model.weights=/nowhere/at/all": "/nowhere/at/all",
    "--config.optimizer.name=sdg": "did you mean 'sgd'",
    "--config.optimizer.micro_batches=3": "micro_batches=3 does not divide",
    "--config.method.name=": "method",
    "--config.method.plugins=nowhere_at_all": "nowhere_at_all",
    "--config.method.schedule=hsadmm:5": "schedule",
    "--config.method.send_whole=nowhere": "part of no path",
    "--config.sparsity.exclude=nowhere": "nowhere",
    "--config.sparsity.multiples=a": "multiples",
    "--config.distill.teacher=/nowhere": "/nowhere",
    "--config.nowhere=1": "is not a setting",
    "--config.=1": "is not a setting",
    "--noconfig.run.steps": "needs a value",
    "--fresh=maybe": "fresh",
    "--coordinator=host:99999 --num_processes=2 --process_id=0": "not from 1 to 65535",
    "--coordinator=host:0 --num_processes=2 --process_id=0": "not from 1 to 65535",
    "--coordinator=host:-1 --num_processes=2 --process_id=0": "has no port",
    "--coordinator=host --num_processes=2 --process_id=0": "has no port",
    "--coordinator=host:² --num_processes=2 --process_id=0": "has no port",
    "--coordinator=host:1 --num_processes=2 --process_id=2": "process_id=2",
    "--coordinator=host:1 --num_processes=-2 --process_id=0": "num_processes=-2",
    "--coordinator=host:1 --process_id=0": "num_processes",
    "--num_processes=x": "num_processes",
    "--process_id=1e3": "process_id",
    "--launcher=pbs": "pbs",
    "--launcher=slurm": "slurm",
}
# Whole command lines -> part of the message.
COMMANDS = {
    "trian": "did you mean 'train'",
    "train": "--config is required",
    f"train {CONFIG}": "--workdir is required",
    f"train {CONFIG}:3 --workdir=x": "layout=3 cannot be cut",
    f"train {CONFIG}:4xx --workdir=x": "layout='4xx' is unknown",
    f"train {CONFIG}:x --workdir=x": "layout='x' is unknown",
    f"train {CONFIG}:0x2 --workdir=x": "layout='0x2' is unknown",
    f"train {CONFIG}:2x2x2 --workdir=x": "layout='2x2x2' is unknown",
    f"train {CONFIG}:9999x9999 --workdir=x": "layout='9999x9999' is unknown",
    "train --config=digits_resnet20_dense:4xx --workdir=x": "layout='4xx' is unknown",
    "train --config=cifar10_resnet20_hsadmm:4xx --workdir=x": "layout='4xx' is unknown",
    "train --config=stdlib_gpt_dense:2x2 --workdir=x": "cannot be called with",
    "train --config=nowhere --workdir=x": "is not a file",
    "train --config= --workdir=x": "--config is required",
    "train --config=/ --workdir=x": "is not a file",
    "train --config=/dev/null --workdir=x": "is not a",
    f"train --config={'x' * 5000} --workdir=x": "is not a file",
    f"train {CONFIG} --config.topology.layout=2 --workdir=/proc/x": "/proc/x",
    f"train {CONFIG} --config.topology.layout=2 --workdir=/dev/null": "/dev/null",
    f"train {CONFIG} --config.topology.layout=2 --workdir=/{'x' * 5000}": "xxx",
    f"train {CONFIG} --config.topology.layout=2 --workdir=~noone/x": "'~noone/x'",
    f"train {CONFIG} --config.topology.layout=2 --workdir={{tmp}}/x "
    "--config.model.weights=~noone/x": "'~noone/x'",
    "evaluate ~noone/x": "'~noone/x'",
    "export --workdir=~noone/x --out={tmp}/x": "'~noone/x'",
    "report ~noone/x": "'~noone/x'",
    "doctor --workdir=~noone/x --cpu_devices=8": "'~noone/x'",
    "evaluate": "--model is required",
    "evaluate --model={tmp}": "is no exported model",
    "evaluate --model=/nowhere": "is no exported model",
    "evaluate --model=/dev/null": "is no exported model",
    "evaluate --model=x --split=train": "split",
    "evaluate --model=x --batch_size=0": "--batch_size=0 must be at least 1",
    "evaluate --model=x --batch_size=x": "batch_size",
    "evaluate --model=x --quiet=x": "quiet",
    "export": "--workdir is required",
    "export --workdir=x": "--out is required",
    "export --workdir={tmp} --out={tmp}/out": "environment.json",
    "export --workdir=/dev/null --out={tmp}/out": "environment.json",
    "export --workdir={tmp} --out={tmp}/out --step=x": "step",
    "export --workdir={tmp} --out={tmp}/out --compare=a": "environment.json",
    "sweep": "--sweep is required",
    "sweep --sweep=nowhere --workdir={tmp}": "is not a file",
    "sweep --sweep={tmp} --workdir={tmp}": "is not a file",
    "sweep --sweep=x": "--workdir is required",
    "advise --nowhere": "--nowhere",
    "report --nowhere": "--nowhere",
    "report": "give run folders",
}


def refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    code = main(arguments)
    said = capsys.readouterr()
    assert code == 2, said
    assert message in said.err
    assert said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    assert "Traceback" not in said.out + said.err
    assert time.monotonic() - started < SECONDS


def refused_setting(override: str, message: str, tmp: Path, capsys) -> None:
    arguments = [part.format(tmp=tmp) for part in TRAIN]
    refused([*arguments, f"--config.{override}"], message, capsys)
    assert not (tmp / "run").exists(), "nothing is left behind"


@pytest.mark.sampled(87)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("key", settings_of(float))
def test_floats_are_finite(key, value, tmp_path, capsys):
    refused_setting(f"{key}={value}", f"{key}={value} must", tmp_path, capsys)


@pytest.mark.parametrize("key", settings_of(int))
def test_whole_numbers_are_not_endless(key, tmp_path, capsys):
    refused_setting(f"{key}={HUGE}", f"{key}={HUGE} must", tmp_path, capsys)


def settings_file(tmp_path: Path, content: str, capsys, message: str) -> None:
    file = tmp_path / "settings_file.py"
    file.write_text(content)
    arguments = ["train", f"--config={file}", f"--workdir={tmp_path / 'run'}"]
    refused(arguments, message, capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("content", "message"), CONFIGS.items())
def test_config_files(content, message, tmp_path, capsys):
    settings_file(tmp_path, content, capsys, message)


@pytest.mark.parametrize(("change", "message"), CHANGES.items())
def test_config_files_that_change_settings(change, message, tmp_path, capsys):
    content = (
        "from prunex_jax.train.build.config import default_config\n"
        "def get_config():\n    config = default_config()\n"
        f"    config.run.epochs = 1.0\n    {change}\n    return config\n"
    )
    settings_file(tmp_path, content, capsys, message)


@pytest.mark.sampled(29)
@pytest.mark.parametrize(("given", "message"), ARGUMENTS.items())
def test_arguments_of_train(given, message, tmp_path, capsys):
    arguments = [part.format(tmp=tmp_path) for part in TRAIN]
    refused([*arguments, *given.split(" ")], message, capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("line", "message"), COMMANDS.items())
def test_command_lines(line, message, tmp_path, capsys):
    refused(line.replace("{tmp}", str(tmp_path)).split(), message, capsys)


@pytest.mark.parametrize("simulated", ["2x2", "1x1", "4x2"])
def test_argument_of_the_demo_simulates_hosts(simulated):
    from prunex_jax.train.commands.command import load_config

    topology = load_config(f"digits_resnet20_topk:{simulated}").topology
    assert (topology.layout, topology.cpu_devices) == (simulated, 0)
