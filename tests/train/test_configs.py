"""Every file in configs/ loads, is valid, and builds its method without data."""

import functools
from pathlib import Path

import jax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.sync import SyncSchedule
from prunex_jax.data.tokenizer import NUM_BYTES
from prunex_jax.methods import METHODS, table
from prunex_jax.models import make_language_model, make_model
from prunex_jax.shrink import trace_model
from prunex_jax.sparsity import limits_of, uniform_keep_counts
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.rounds import make_round_plan
from prunex_jax.train.commands.command import load_config, override_config
from prunex_jax.train.run import train

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))
# Image shape and classes of the sets that configs name.
SHAPES = {
    "digits": ((8, 8, 1), 10),
    "cifar10": ((32, 32, 3), 10),
    "imagenet2012": ((224, 224, 3), 1000),
}


# Most configs name the same few networks.
traced = functools.cache(trace_model)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds(path: Path) -> None:
    config = resolve_config(load_config(str(path)))
    assert config.method.name in METHODS
    if config.data.name == "stdlib":
        model = make_language_model(
            config.model, NUM_BYTES, config.data.sequence_length
        )
    else:
        model = make_model(config.model, *SHAPES[config.data.name])
    trace = traced(model)
    assert trace.prunable_share() > 0.95
    sizes = {group.name: group.size for group in trace.groups}
    inner = {group.name for group in trace.groups if group.is_inner}
    density = 1 - config.sparsity.sparsity
    counts = uniform_keep_counts(limits_of(config.sparsity, sizes, inner), density)
    if config.sparsity.unit == "channels" and config.sparsity.scope == "all":
        total = density * sum(sizes.values())
        # Multiples of 8 leave a few more of groups that are no multiple of 16.
        assert sum(counts.values()) == pytest.approx(total, rel=0.02)
    sync = SyncSchedule(config.method.hsadmm.sync_period)
    plan = make_round_plan(config.sparsity, 1000, sync)
    assert plan.stages[-1].is_frozen


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_says_what_it_is(path: Path) -> None:
    text = path.read_text().split('"""')[1]
    assert f"configs/{path.name}" in text, "the command that runs it"
    for word in ("Hardware:", "Result:"):
        assert word in text


SHORT = (
    "--config.topology.layout=2",
    "--config.data.name=digits",
    "--config.data.augment=shift",
    "--config.data.batch_size=32",
    "--config.model.width=0.25",
    "--config.optimizer.learning_rate=0.01",
    "--config.method.hsadmm.sync_period=2",
    "--config.sparsity.num_stairs=1",
    "--config.run.epochs=0.0",
    "--config.run.steps=12",
    "--config.run.eval_every_steps=6",
)


@pytest.mark.rotates
@pytest.mark.parametrize("stem", ["cifar10_resnet18_hsadmm", "cifar10_resnet56_hsadmm"])
def test_configs_for_published_figures_run_in_short(stem: str, tmp_path: Path) -> None:
    path = next(p for p in CONFIGS if p.stem == stem)
    config = override_config(load_config(str(path)), SHORT)
    summary = train(config, tmp_path / "run").summary
    assert summary["steps"] == 12 and 0 < summary["shrink_step"] < 12
    if stem == "cifar10_resnet56_hsadmm":
        # Keep counts are rounded down to reach the target, so no more than asked.
        assert summary["macs_dense"] / summary["macs_kept"] >= 2.13
    assert summary["host_payload_ratio"] < 0.3


@pytest.mark.parametrize(
    ("form", "period", "share"),
    [("params", 2, 0.75), ("macs", 2, 0.5), ("bytes", 4, 0.75)],
)
def test_forms_by_name_are_what_was_measured(form: str, period: int, share: float):
    path = next(p for p in CONFIGS if p.stem == "cifar10_resnet18_hsadmm")
    config = resolve_config(load_config(f"{path}:{form}"))
    assert config.method.name == "hsadmm"
    assert config.method.rounds.sync_rule == "quadratic"
    assert config.method.hsadmm.sync_period == period
    assert (config.sparsity.sparsity, config.sparsity.criterion) == (share, "taylor")
    assert (config.sparsity.budget == "global") == (config.sparsity.unit == "params")
    assert config.sparsity.repair_batches > 0


def test_argument_simulates_hosts() -> None:
    path = next(p for p in CONFIGS if p.stem == "cifar10_resnet20_hsadmm")
    config = resolve_config(load_config(f"{path}:4x2"))
    assert (config.topology.layout, config.topology.cpu_devices) == ("4x2", 0)


@pytest.mark.parametrize("path", [p for p in CONFIGS if p.stem.startswith("digits")])
def test_the_demo_simulates_as_it_is_told(path: Path) -> None:
    assert load_config(str(path)).topology.layout == "2x2"
    topology = resolve_config(load_config(f"{path}:3x2")).topology
    assert (topology.layout, topology.cpu_devices, topology.simulated) == ("3x2", 0, "")


def test_overrides_reach_every_type() -> None:
    config = override_config(
        load_config(str(CONFIGS[0])),
        [
            "--config.seed=3",
            "--config.data.validation_share=0.25",
            "--noconfig.optimizer.nesterov",
            "--config.method.hsadmm.rho_device=0.5",
            '--config.sparsity.exclude=("stem", "head")',
        ],
    )
    resolved = resolve_config(config)
    assert resolved.seed == 3
    assert resolved.data.validation_share == 0.25
    assert resolved.optimizer.nesterov is False
    assert resolved.method.hsadmm.rho_device == 0.5
    assert resolved.sparsity.exclude == ("stem", "head")


@pytest.mark.parametrize(
    ("given", "exclude"),
    [
        (['("stem", "head")'], ("stem", "head")),
        (["stem"], ("stem",)),
        (["stem", "block0/conv1"], ("stem", "block0/conv1")),
        (["()"], ()),
    ],
)
def test_tuples_are_written_whole_or_element_by_element(given, exclude):
    overrides = [f"--config.sparsity.exclude={text}" for text in given]
    config = override_config(load_config(str(CONFIGS[0])), overrides)
    assert resolve_config(config).sparsity.exclude == exclude


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        (["*>=512:128"], ("*>=512:128",)),
        (["stages/0/*:16", "*>=512:128"], ("stages/0/*:16", "*>=512:128")),
        (['("a/*:16", "b:4")'], ("a/*:16", "b:4")),
    ],
)
def test_multiples_are_given_on_the_command_line(given, rows):
    overrides = [f"--config.sparsity.multiples={text}" for text in given]
    config = override_config(load_config(str(CONFIGS[0])), overrides)
    assert resolve_config(config).sparsity.multiples == rows


PLUGIN = """
import dataclasses
from prunex_jax.base.settings import setting
from prunex_jax.methods import METHODS, register_method

@dataclasses.dataclass(frozen=True)
class OwnConfig:
    rate: float = setting(0.5, above=0, at_most=1)

register_method(dataclasses.replace(
    METHODS["none"], name="own", key="own", settings=OwnConfig, variants=()))
"""


def test_settings_of_plugins_are_settings_of_the_command_line(tmp_path, monkeypatch):
    # What the plugin registers goes again at the end.
    monkeypatch.setattr(table, "METHODS", methods := dict(METHODS))
    monkeypatch.setattr("prunex_jax.methods.METHODS", methods)
    plugin = tmp_path / "own.py"
    plugin.write_text(PLUGIN)
    given = ["--config.method.own.rate=0.25", "--config.method.name=own"]
    with pytest.raises(UserError, match=r"config.method.own.rate is not a setting"):
        override_config(load_config(str(CONFIGS[0])), given)
    given.append(f"--config.method.plugins={plugin}")
    config = override_config(load_config(str(CONFIGS[0])), given)
    assert resolve_config(config).method.own.rate == 0.25
    config.method.own.rate = 2.0
    with pytest.raises(UserError, match=r"config.method.own.rate=2.0 must lie in"):
        resolve_config(config)


def test_shipped_configs_have_names():
    by_name, by_path = load_config("digits_resnet20_dgc"), load_config(str(CONFIGS[0]))
    assert by_name.method.name == "dgc" and by_path.method.name != "dgc"
    assert load_config("cifar10_resnet20_hsadmm:4x2").topology.layout == "4x2"


def test_tracing_makes_no_parameters() -> None:
    """Shapes are enough: the groups of a large network cost no memory."""
    path = next(p for p in CONFIGS if p.stem.startswith("imagenet"))
    config = resolve_config(load_config(str(path)))
    model = make_model(config.model, *SHAPES["imagenet2012"])
    before = len(jax.live_arrays())
    trace_model(model)
    assert len(jax.live_arrays()) - before < 10
