"""A step accumulates, compresses, clips, and counts what is not finite."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.base.trees import shapes_by_path
from prunex_jax.comm import wire_bytes
from prunex_jax.mesh import make_topology
from prunex_jax.methods import Recipe, make_method, method_config
from prunex_jax.methods.powersgd import PowersgdConfig
from prunex_jax.methods.traffic import step_collectives
from prunex_jax.tasks import Classification
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.build.optimizer import make_inner
from prunex_jax.train.steps.compiled import Ledger
from prunex_jax.train.steps.programs import Programs
from prunex_jax.train.steps.state import NEVER
from tests.helpers.common import make_mesh

SHAPE = (2, 2)
IMAGES, CLASSES = 32, 10


class Plain(NamedTuple):
    """A network without batch norm, whose statistics count how often it was called."""

    is_random = False

    def init(self, key):
        keys = jax.random.split(key)
        params = {
            "hidden": jax.random.normal(keys[0], (12, 16)) / 3,
            "logits": jax.random.normal(keys[1], (16, CLASSES)) / 4,
            "bias": jnp.zeros(CLASSES),
        }
        return params, {"calls": jnp.zeros(())}

    def apply(self, params, statistics, images):
        del statistics
        hidden = jnp.tanh(images @ params["hidden"])
        return hidden @ params["logits"] + params["bias"][None]

    def apply_train(self, params, statistics, images, axis_name=None, key=None):
        del axis_name, key
        logits = self.apply(params, statistics, images)
        return logits, {"calls": statistics["calls"] + 1}


METHODS = {
    "dense": method_config("dense"),
    "powersgd": method_config("powersgd", powersgd=PowersgdConfig(1, 0.0)),
    "int8": method_config(
        "powersgd", powersgd=PowersgdConfig(1, 0.0), wire_dtype="int8"
    ),
}


@functools.cache
def programs_of(method, micro_batches=1, clip_norm=0.0, momentum=0.9):
    optimizer = OptimizerConfig(clip_norm=clip_norm, momentum=momentum)
    optimizer = dataclasses.replace(optimizer, weight_decay=0.0, nesterov=False)
    rate = optax.constant_schedule(0.1)
    params, _ = jax.eval_shape(Plain().init, jax.random.key(0))
    recipe = Recipe(
        config=METHODS[method],
        inner=make_inner(optimizer, rate),
        learning_rate=rate,
        groups=(),
        keep_counts={},
        shapes=shapes_by_path(params),
        total_steps=10,
    )
    made = make_method(recipe)
    return made, Programs(
        Plain(),
        made,
        make_mesh(*SHAPE),
        Ledger(),
        layouts={},
        objective=Classification(),
        micro_batches=micro_batches,
    )


def batch_of(seed):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.normal(size=(IMAGES, 12)).astype(np.float32),
        "label": rng.integers(CLASSES, size=IMAGES),
    }


def run(programs, num_steps=3, spoil=None):
    """States after every step; the steps donate theirs."""
    state = programs.init(jax.random.key(0))
    seen = [jax.tree.map(np.array, state)]
    for step in range(num_steps):
        batch = batch_of(step)
        if spoil is not None and step == spoil[0]:
            batch["image"][spoil[1]] = np.nan
        state, _ = programs.local_step(state, batch)
        seen.append(jax.tree.map(np.array, state))
    return seen, jax.device_get(programs.report(state))


def assert_close(found, wanted, atol=2e-6):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("method", ["dense", "powersgd"])
def test_micro_batches_are_one_step_of_the_whole_batch(method, count):
    """Parameters, momentum, what is held back, and the report; without batch norm."""
    _, whole = programs_of(method)
    _, parts = programs_of(method, count)
    (wanted, report), (found, report_of_parts) = run(whole), run(parts)
    assert_close(found[-1].params, wanted[-1].params)
    assert_close(found[-1].opt_state, wanted[-1].opt_state)
    assert_close(report_of_parts, report)
    if method == "powersgd":
        residual = jax.tree.leaves(found[-1].opt_state[0].residual)
        assert max(np.abs(leaf).max() for leaf in residual) > 1e-3
    # Statistics go through the parts, one after the other.
    np.testing.assert_array_equal(wanted[-1].statistics["calls"], 3)
    np.testing.assert_array_equal(found[-1].statistics["calls"], 3 * count)


def test_statistics_are_those_of_the_images_of_all_devices():
    """Variances of devices that see different data leave out how far these differ."""
    _, programs = programs_of("dense")
    state = programs.init(jax.random.key(0))
    images = np.random.default_rng(0).normal(np.arange(4)[:, None], 1.0, (4, 50))
    norm = {"mean": images.mean(1).reshape(2, 2), "var": images.var(1).reshape(2, 2)}
    norm = {key: np.float32(value)[..., None] for key, value in norm.items()}
    _, found = programs.network(state._replace(statistics={"norm": norm}))
    np.testing.assert_allclose(found["norm"]["mean"], images.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["norm"]["var"], images.var(), rtol=1e-5)
    assert images.var() > 1.5 * norm["var"].mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", METHODS)
def test_bytes_do_not_depend_on_micro_batches(method):
    """They are those of the method alone."""
    mesh_shape = dict(zip(("host", "device"), SHAPE, strict=True))
    shapes = shapes_by_path(jax.eval_shape(Plain().init, jax.random.key(0))[0])
    for count in (1, 4):
        made, programs = programs_of(method, count)
        state = jax.eval_shape(programs.abstract_state)
        compiled = programs.local_step.compile(state, batch_of(0))
        found = wire_bytes(compiled.collectives, mesh_shape)
        alone = step_collectives(made, shapes, mesh_shape)
        assert found == wire_bytes(alone, mesh_shape)


def test_micro_batches_are_no_loop_on_cpu():
    """In one, XLA computes convolutions several times slower there."""
    _, programs = programs_of("dense", 4)
    state = jax.eval_shape(programs.abstract_state)
    compiled = programs.local_step.compile(state, batch_of(0))
    assert " while(" not in compiled.run.as_text()


def test_clipping_is_behind_the_exchange():
    """It limits the update, and changes nothing that is sent or held back."""
    _, free = programs_of("powersgd", momentum=0.0)
    _, clipped = programs_of("powersgd", clip_norm=0.01, momentum=0.0)
    (loose, _), (tight, _) = run(free, 1), run(clipped, 1)
    assert_close(tight[1].opt_state[0], loose[1].opt_state[0], atol=0)
    steps = [
        jax.tree.map(np.subtract, states[1].params, states[0].params)
        for states in (loose, tight)
    ]
    norms = [float(optax.tree.norm(step)) for step in steps]
    assert norms[1] == pytest.approx(0.1 * 0.01, rel=1e-4) and norms[0] > 10 * norms[1]
    shrunk = jax.tree.map(lambda x: x * norms[1] / norms[0], steps[0])
    assert_close(steps[1], shrunk, atol=1e-7)


@pytest.mark.parametrize("count", [1, 4])
def test_the_first_step_that_is_not_finite_is_named(count):
    """Whichever device and part it was in; no step is skipped or repaired."""
    _, programs = programs_of("powersgd", count)
    seen, report = run(programs, spoil=(1, 13))
    assert report.first_bad_step == 2 and not np.isfinite(report.measures["loss"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(seen[1].params))
    assert all(np.isnan(x).all() for x in jax.tree.leaves(seen[2].params))
    _, report = run(programs)
    assert report.first_bad_step == NEVER


def test_micro_batches_that_do_not_fit_are_refused():
    settings = {
        "topology": {"layout": "2"},
        "data": {"name": "digits", "batch_size": 48},
        "run": {"steps": 1},
    }
    config = resolve_config({**settings, "optimizer": {"micro_batches": 4}})
    topology = make_topology("2")
    with pytest.raises(
        UserError, match=r"micro_batches=4 .* the 6 examples .* 1, 2, 3"
    ):
        make_experiment(config, topology)
    with pytest.raises(UserError, match=r"optimizer.micro_batches=0"):
        resolve_config({**settings, "optimizer": {"micro_batches": 0}})
