"""A new method is one file and one row: here, a method that is defined in a test.

It sends the signs of gradients with one scale per host, keeps what that loses, and has
a setting of its own. Nothing outside this file knows it.
"""

import dataclasses
import json
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import setting
from prunex_jax.comm import dense_size, mean_over_devices, mean_over_hosts
from prunex_jax.mesh import ALONE, MeshAxes
from prunex_jax.methods import (
    METHODS,
    Method,
    MethodRow,
    Recipe,
    Variant,
    check_method,
    find_variants,
    register_method,
)
from prunex_jax.methods.gradients import gradient_method
from prunex_jax.train import train
from prunex_jax.train.build.config import (
    config_difference,
    config_to_dict,
    resolve_config,
)
from tests.helpers import tiny_runs
from tests.helpers.common import ROOT
from tests.helpers.formulas.base import Formulas
from tests.helpers.formulas.means import device_sum, host_sum
from tests.helpers.formulas.methods import FORMULAS

# ---- the one file


@dataclasses.dataclass(frozen=True)
class SignConfig:
    """Signs of gradients, with error feedback."""

    # Share of what signs lose that comes back in the next step.
    feedback: float = setting(1.0, at_least=0, at_most=1)


class SignState(NamedTuple):
    """What signs have lost, per_host."""

    residual: jax.Array


def signs(
    feedback: float = 1.0, axes: MeshAxes = ALONE
) -> optax.GradientTransformation:
    """Averages the signs of gradients times their mean magnitude."""

    def init(params):
        return SignState(jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params=None):
        del params
        local = mean_over_devices(grads, axes)
        wanted = jax.tree.map(lambda g, r: g + feedback * r, local, state.residual)
        sent = jax.tree.map(lambda w: jnp.sign(w) * jnp.mean(jnp.abs(w)), wanted)
        lost = jax.tree.map(jnp.subtract, wanted, sent)
        return mean_over_hosts(sent, axes), SignState(lost)

    return optax.GradientTransformation(init, update)


def make_signs(recipe: Recipe) -> Method:
    size = dense_size(recipe.shapes)
    return gradient_method(
        recipe,
        signs(recipe.settings.feedback, recipe.axes),
        placement=SignState("per_host"),
        payload_elements=size,
        health=lambda opt_state: {"lost": optax.tree.norm(opt_state[0].residual)},
    )


# ---- the one row

ROW = MethodRow(
    "signs",
    make_signs,
    SignConfig,
    variants=(
        Variant("signs", "signs"),
        Variant("signs-half", "signs, half fed back", {"method.signs.feedback": 0.5}),
    ),
)
PLUGIN = """
from prunex_jax.methods import register_method
from tests.methods.test_registration import ROW

register_method(ROW)
"""


@pytest.fixture(autouse=True)
def registered():
    """The table as it is with the method, for one test."""
    register_method(ROW)
    yield
    METHODS.pop("signs", None)


class SignFormulas(Formulas):
    """What it must send, for the suite."""

    def __init__(self, recipe):
        self.size = dense_size(recipe.shapes)

    def step(self, mesh_shape):
        return device_sum(self.size, mesh_shape) + host_sum(self.size, mesh_shape)


# ---- what follows without another edit


def test_settings_have_a_key_a_type_and_a_range():
    config = resolve_config({"method": {"name": "signs"}, "run": {"steps": 1}})
    assert config.method.signs == SignConfig()
    values = {"method": {"signs": {"feedback": 0.5}}, "run": {"steps": 1}}
    changed = resolve_config(values)
    assert config_difference(changed)["method.signs.feedback"] == (1.0, 0.5)
    assert resolve_config(config_to_dict(changed)) == changed
    with pytest.raises(UserError, match=r"config.method.signs.feedback=2.0 must lie"):
        resolve_config({**values, "method": {"signs": {"feedback": 2.0}}})
    with pytest.raises(UserError, match="did you mean 'feedback'"):
        resolve_config({**values, "method": {"signs": {"feedbak": 1.0}}})


@pytest.mark.slow
def test_the_trainer_runs_it(tmp_path):
    values = tiny_runs.settings(
        method={"name": "signs", "signs": {"feedback": 0.9}},
        run={"steps": 12, "log_every_steps": 4, "checkpoint_every_steps": 0},
    )
    result = train(values, tmp_path / "run")
    rows = tiny_runs.rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(row["lost"] > 0 for row in rows), "its health is not logged"
    payload = 4 * result.summary["params_dense"]
    assert result.summary["host_payload_bytes_steady"] == payload
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["method"]["signs"] == {"feedback": 0.9}


@pytest.mark.parametrize("variant", [v.name for v in ROW.variants])
def test_the_contract_suite_holds_it_to_its_word(variant, monkeypatch):
    """Rows of the suite come from the variants of the table."""
    from tests.methods import test_contract as contract

    assert variant in contract.variant_rows()
    row = contract.variant_rows()[variant]
    monkeypatch.setitem(FORMULAS, "signs", SignFormulas)
    contract.check_formula_bytes(contract.Runner(row, (2, 4)))


def test_the_traffic_table_shows_it():
    from benchmarks.traffic_table import rows

    assert rows()["signs, half fed back"].signs.feedback == 0.5


def test_studies_find_its_variants():
    half = find_variants("signs-half")[0]
    assert half.settings == {"method.name": "signs", "method.signs.feedback": 0.5}
    with pytest.raises(UserError, match="did you mean 'signs-half'"):
        find_variants("signs-hal")


def test_its_transform_works_alone():
    """As every transform does: in anybody's loop, jitted, without a mesh."""
    tx = optax.chain(signs(), optax.sgd(0.1))

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.tree.map(lambda x: 2 * x, params), state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.array([3.0, -1.0, 0.5])}
    state = tx.init(params)
    for _ in range(60):
        params, state = step(params, state)
    assert np.abs(params["w"]).max() < 0.2


def test_names_and_keys_are_taken_once():
    register_method(ROW)  # a module that is imported again
    with pytest.raises(UserError, match="'dense' is registered already"):
        register_method(dataclasses.replace(ROW, name="dense", key="dense"))
    with pytest.raises(UserError, match=r"settings under method.topk: others"):
        register_method(dataclasses.replace(ROW, name="other", key="topk"))
    with pytest.raises(UserError, match=r"settings under method.schedule: others"):
        register_method(dataclasses.replace(ROW, name="other", key="schedule"))
    assert "other" not in METHODS


def test_plugins_are_found_by_path_and_by_module(tmp_path):
    METHODS.pop("signs")
    path = tmp_path / "own_method.py"
    path.write_text(PLUGIN)
    values = {
        "method": {"name": "signs", "plugins": [str(path)], "signs": {"feedback": 0.5}},
        "run": {"steps": 1},
    }
    config = resolve_config(values)
    check_method("signs")
    assert config.method.plugins == (str(path),)
    assert config.method.signs.feedback == 0.5
    again = resolve_config(config_to_dict(config))  # as a run that goes on reads it
    assert again == config
    with pytest.raises(UserError, match=r"plugins: 'no.such.module' cannot be impor"):
        resolve_config({**values, "method": {"plugins": ["no.such.module"]}})


@pytest.mark.slow
def test_other_processes_know_it_by_the_setting(tmp_path):
    """A process that has never heard of the method finds it in the run's settings."""
    path = tmp_path / "own_method.py"
    path.write_text(PLUGIN)
    script = (
        "from prunex_jax.train.build.config import resolve_config\n"
        f"values = {{'method': {{'name': 'signs', 'plugins': [{str(path)!r}]}},"
        " 'run': {'steps': 1}}\n"
        "print(resolve_config(values).method.signs.feedback)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "1.0"
