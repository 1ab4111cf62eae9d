"""Methods in other people's programs: what they import, and their own axis names."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.mesh import MeshAxes, enter, leave, settle, specs_of, vary
from prunex_jax.methods import hsadmm, topk
from prunex_jax.methods.hsadmm import state_placements
from tests.helpers.common import ROOT
from tests.helpers.consensus_cases import FINAL, GROUPS, START, quadratic, targets_of

IMPORTS = """
import importlib, pkgutil, sys

import optax  # needs absl itself

REFUSED = ("absl", "ml_collections", "orbax", "grain", "tensorflow_datasets")


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED:
            raise ImportError(f"{name} is not for a training loop of one's own")


before = set(sys.modules)
sys.meta_path.insert(0, Refuse())
import prunex_jax.methods

for found in pkgutil.walk_packages(prunex_jax.methods.__path__, "prunex_jax.methods."):
    importlib.import_module(found.name)
for name in ("hsadmm", "topk", "dgc", "powersgd", "importance", "pactrain"):
    assert callable(getattr(prunex_jax, name))
    assert callable(getattr(prunex_jax.methods, name))
assert not any(name.split(".")[0] in REFUSED for name in set(sys.modules) - before)
"""


@pytest.mark.slow
def test_no_transform_imports_what_only_the_trainer_needs():
    subprocess.run(
        [sys.executable, "-c", IMPORTS],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )


def train_on(names, num_steps=5):
    """H-SADMM in a `shard_map` over axes of these names; copies and state per host."""
    axes = MeshAxes(*names)
    mesh = jax.make_mesh(
        (2, 2), names, axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:4],
    )  # fmt: skip
    tx = hsadmm(
        optax.sgd(0.05, 0.9), GROUPS, FINAL, sync_period=2, axes=axes,
        parameters="leaky", freeze_round=1,
    )  # fmt: skip
    placements = ("per_host", state_placements("gradient"))
    specs = specs_of(placements, axes)

    def start(params):
        born = leave(placements, (params, tx.init(params)))
        return settle(placements, born, axes)

    def step(carry, target):
        params, state = enter(placements, carry)
        own = jax.tree.map(lambda t: t[0, 0], target)
        grads = jax.grad(quadratic)(vary(params, axes.names), own)
        updates, state = tx.update(grads, state, params)
        return leave(placements, (optax.apply_updates(params, updates), state))

    born = jax.shard_map(start, mesh=mesh, in_specs=jax.P(), out_specs=specs)
    run = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, jax.P(*names)), out_specs=specs
    )
    carry, program = jax.jit(born)(START), jax.jit(run)
    for _ in range(num_steps):
        carry = program(carry, targets_of((2, 2)))
    return carry


def test_placements_follow_the_names_of_the_caller():
    own, ours = train_on(("pod", "chip")), train_on(("host", "device"))
    jax.tree.map(np.testing.assert_array_equal, own, ours)
    params, state = own
    kernel = params["a"]["kernel"]
    assert kernel.sharding.spec == jax.P("pod") and kernel.shape == (2, 3, 8)
    assert state.global_consensus["a"]["kernel"].shape == (3, 8)
    assert int(state.num_rounds) == 2 and int(state.masks["a"].sum()) == FINAL["a"]


def test_one_axis_is_enough():
    """Hosts of a single device, simulated by `vmap`."""
    tx = topk(0.5, axes=MeshAxes("pod", None))
    grads = {"w": jnp.array([[4.0, 1.0], [2.0, -6.0]])}
    found = jax.vmap(
        lambda g: tx.update(g, tx.init({"w": jnp.zeros(2)}))[0], axis_name="pod"
    )(grads)
    assert found["w"].tolist() == [[2.0, -3.0]] * 2
