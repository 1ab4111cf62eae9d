"""Laws of the outer step that follows the cosines of round movements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.mesh import ALONE
from prunex_jax.methods import make_method, method_config
from prunex_jax.methods.hsadmm import HsadmmParameters, preset
from prunex_jax.methods.hsadmm.method import HsadmmConfig
from prunex_jax.methods.hsadmm.outer import (
    EFFECTIVE_STEP,
    follow,
    law_momentum,
    law_step,
    outer_step,
    start_movements,
)
from prunex_jax.methods.local_sgd import LocalSgdConfig
from prunex_jax.methods.method import RoundsConfig
from prunex_jax.train.records.checkpoint import Checkpointer
from tests.helpers.consensus_cases import START, draw, make_core
from tests.helpers.mean_cases import assert_same
from tests.methods import test_contract as contract


def movements_of_cosine(rho, num_rounds, size=20_000):
    """Movements of equal length; those k rounds apart have a cosine of rho^k."""
    rng = np.random.default_rng(0)
    moved = rng.normal(size=size)
    for _ in range(num_rounds):
        yield np.float32(moved)
        moved = rho * moved + np.sqrt(1 - rho**2) * rng.normal(size=size)


@pytest.mark.parametrize(("rho", "period"), [(0.9, 8), (0.3, 32), (0.95, 64)])
def test_the_law_reaches_the_effective_step(rho, period):
    """Measured on z: what it moves along a movement, in movements."""
    momentum = law_momentum(period)
    z = trace = jnp.zeros(20_000)
    movements = start_movements("law", z)
    taken = []
    for moved in movements_of_cosine(rho, 60):
        movements = follow(movements, moved)
        step = law_step(momentum, movements.average)
        after, trace = outer_step(z, moved, trace, step, momentum)
        taken.append(np.dot(after - z, moved) / np.dot(moved, moved))
        z = after
    assert float(movements.average) == pytest.approx(rho, abs=0.02)
    assert np.mean(taken[-20:]) == pytest.approx(EFFECTIVE_STEP, rel=0.03)
    if period == 8 and rho == 0.9:  # Where the published pair takes four times as much.
        assert float(step) == pytest.approx(0.96, abs=0.02)


@pytest.mark.parametrize(
    ("period", "low", "high"),
    [(1, 0, 0), (8, 0, 0.5), (16, 0.5, 0.5), (24, 0.5, 0.7), (32, 0.7, 0.7),
     (64, 0.9, 0.9), (500, 0.9, 0.9)],
)  # fmt: skip
def test_momentum_and_step_stay_where_they_should(period, low, high):
    assert low <= law_momentum(period) <= high
    for rho in (0.0, 0.5, 1.0):
        step = float(law_step(law_momentum(period), jnp.float32(rho)))
        assert 0.149 < step <= 1.5, rho


def test_opposite_movements_count_as_unrelated_and_nothing_as_unknown():
    moved = {"x": jnp.asarray([3.0, 4.0])}
    start = start_movements("law", {"x": jnp.zeros(2)})
    first = follow(start, moved)
    assert (float(first.cosine), float(first.average)) == (0.0, 0.5)
    back = follow(first, {"x": -2 * moved["x"]})
    assert float(back.cosine) == pytest.approx(-1.0)
    assert float(back.average) == pytest.approx(0.4)
    still = follow(back, {"x": jnp.zeros(2)})
    assert (float(still.cosine), float(still.average)) == (0.0, float(back.average))


def config_of(name, period=8, **changes):
    own = {"sync_period": period, **changes.pop("own", {})}
    wire_dtype = changes.pop("wire_dtype", "float32")
    return method_config(
        name,
        local_sgd=LocalSgdConfig(**own) if name != "hsadmm" else LocalSgdConfig(),
        hsadmm=HsadmmConfig(**own) if name == "hsadmm" else HsadmmConfig(),
        rounds=RoundsConfig(**changes),
        wire_dtype=wire_dtype,
    )


def health_of(config):
    """What the log has before the first round."""
    method = make_method(contract.recipe_of(config, axes=ALONE))
    return method.health(method.transform.init(START))


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "hsadmm"])
def test_settings_choose_the_law(name):
    for period in (8, 32):
        found = health_of(config_of(name, period, outer="law"))
        wanted = float(law_step(law_momentum(period), jnp.float32(0.5)))
        assert float(found["outer_step"]) == pytest.approx(wanted)
        assert float(found["round_cosine"]) == 0.0
    # What is not sent adds up as momentum does.
    largest = health_of(config_of(name, outer="law", top_k=64))
    assert float(largest["outer_step"]) == EFFECTIVE_STEP
    assert "round_cosine" not in health_of(config_of(name))


@pytest.mark.parametrize(
    ("match", "config"),
    [
        (r"outer_step=0.7 .*leave it out", ("diloco", {"own": {"outer_step": 0.7}})),
        ("outer_momentum=0.5 .*'fixed'", ("hsadmm", {"own": {"outer_momentum": 0.5}})),
        ("prox_strength=0.0.* take preset", ("hsadmm", {"own": {"preset": "paper"}})),
        ("dual_decay=0.5.* take preset", ("hsadmm", {"own": {"preset": "leaky"}})),
        ("rounds.outer='law' needs whole rounds", ("diloco", {"fragments": 2})),
    ],
)
def test_the_law_refuses_what_contradicts_it(match, config):
    name, changes = config
    with pytest.raises(UserError, match=match):
        health_of(config_of(name, outer="law", **changes))


def test_words_that_mean_nothing_are_refused():
    with pytest.raises(UserError, match="outer='laws' is not one of"):
        HsadmmParameters().replace(outer="laws")
    with pytest.raises(UserError, match="outer_step=2 has"):
        HsadmmParameters().replace(outer="law", outer_step=2)
    with pytest.raises(UserError, match=r"outer_step=0\.7"):
        preset("recommended", 8, outer="law", outer_step=0.7)
    assert preset("recommended", 32, outer="law").moving.outer_momentum == 0.7


def test_a_state_saved_before_stages_had_their_own_is_restored(tmp_path):
    """Also one that knows no movements, where the form measures none."""
    state = make_core("largest paper", on_mesh=False).init(START)
    channels, consensus = state.channels, state.consensus
    older = {
        "num_steps": state.num_steps,
        "num_rounds": state.num_rounds,
        "inner_state": state.inner_state,
        "global_consensus": consensus.values,
        "masks": channels.masks,
        "is_frozen": channels.is_frozen,
        "device_dual": draw(1),
        "host_consensus": draw(2),
        "host_dual": draw(3),
        "error": draw(4),
        "rho_device": consensus.rho_device,
        "rho_host": consensus.rho_host,
        "residuals": state.residuals,
        "health": state.health,
        "num_changed": channels.num_changed,
    }
    older = jax.tree.map(jnp.asarray, {"step": 3, "opt_state": older})
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, older, {}, wait=True)
        wanted = {"step": jnp.asarray(0), "opt_state": state}
        restored, _ = checkpointer.restore(wanted)
    found = restored["opt_state"]
    assert found.consensus.movements is None
    assert_same(found.consensus.device_dual, draw(1))
    assert_same(tuple(found.consensus.host), (draw(2), draw(3)))
    assert_same(found.sending.error, draw(4))
    assert_same(found.global_consensus, START)
