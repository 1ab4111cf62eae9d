"""A mesh that one device simulates: the same numbers and bytes as the real one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.comm import Wire, gather_over_hosts, list_collectives, mean_over_mesh
from prunex_jax.mesh import (
    DEVICE_AXIS,
    HOST_AXIS,
    SimulatedMesh,
    make_topology,
    map_over,
    program_to_count,
    vary,
)
from prunex_jax.train.run import train
from tests.helpers.common import MESH, make_mesh
from tests.helpers.tiny_runs import rows_of, settings

AXES = (HOST_AXIS, DEVICE_AXIS)
SHAPES = ((2, 4), (2, 2), (4, 1), (1, 4))


def folded(shape):
    return SimulatedMesh(tuple(zip(AXES, shape, strict=True)), jax.devices()[0])


def here(x):
    """Something that differs on every device, and along neither axis alike."""
    own = 1.0 + 10 * jax.lax.axis_index(HOST_AXIS) + jax.lax.axis_index(DEVICE_AXIS)
    return vary(x, AXES) * own


# Body, specs of its arguments, spec of its result; arguments are [8, 8].
BODIES = {
    "split over both axes at once": (here, jax.P(AXES), jax.P(AXES)),
    "split over one dimension each": (here, jax.P(*AXES), jax.P(*AXES)),
    "split the other way round": (
        here,
        jax.P(DEVICE_AXIS, HOST_AXIS),
        jax.P(DEVICE_AXIS, HOST_AXIS),
    ),
    "second dimension": (here, jax.P(None, AXES), jax.P(None, AXES)),
    "per host": (
        lambda x: jax.lax.psum(here(x), DEVICE_AXIS),
        jax.P(HOST_AXIS),
        jax.P(HOST_AXIS),
    ),
    "replicated": (
        lambda x: mean_over_mesh(here(x), MESH),
        jax.P(),
        jax.P(),
    ),
    "rounded at random": (
        lambda x: mean_over_mesh(here(x), MESH, Wire("int8"), jax.random.key(3)),
        jax.P(AXES),
        jax.P(),
    ),
    "gathered": (
        lambda x: gather_over_hosts(x.ravel(), MESH),
        jax.P(HOST_AXIS),
        jax.P(),
    ),
}


# On the first shape, every body; on the others, those that differ most.
MIXED = ("split the other way round", "rounded at random", "gathered")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(
            name,
            shape,
            marks=[pytest.mark.slow] * (shape != SHAPES[0] and name not in MIXED),
            id=f"{name}-{shape[0]}x{shape[1]}",
        )
        for name in BODIES
        for shape in SHAPES
    ],
)
def test_blocks_and_collectives_are_those_of_the_real_mesh(name, shape):
    body, spec, result = BODIES[name]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    real = map_over(make_mesh(*shape), body, spec, result)
    simulated = map_over(folded(shape), body, spec, result)
    np.testing.assert_allclose(
        jax.jit(simulated)(x), jax.jit(real)(x), rtol=2e-6, atol=1e-6
    )
    counted = jax.make_jaxpr(program_to_count(simulated))(x)
    assert list_collectives(counted) == list_collectives(jax.make_jaxpr(real)(x))


def test_trees_have_specs_for_whole_parts():
    mesh = folded((2, 2))

    def body(state, batch):
        mean = mean_over_mesh(batch.mean(0), MESH)
        return {
            "all": mean,
            "own": state["own"] + mean[None],
            "step": state["step"] + 1,
        }

    specs = {"own": jax.P(HOST_AXIS), "step": jax.P()}
    run = map_over(mesh, body, (specs, jax.P(AXES)), {**specs, "all": jax.P()})
    state = {"own": jnp.zeros((2, 3)), "step": jnp.int32(4)}
    after = run(state, jnp.arange(24.0).reshape(8, 3))
    np.testing.assert_allclose(after["all"], [10.5, 11.5, 12.5])
    np.testing.assert_allclose(after["own"], [[10.5, 11.5, 12.5]] * 2)
    assert after["step"] == 5


RUNS = {
    "dense": {"method": {"name": "dense"}},
    "hsadmm": {
        "method": {"name": "hsadmm", "wire_dtype": "int8"},
        "sparsity": {"num_stairs": 1, "freeze_share": 0.3, "shrink_share": 0.6},
    },
    "powersgd": {"method": {"name": "powersgd"}},
    "topk": {"method": {"name": "topk"}},
    "importance": {"method": {"name": "importance"}},
    "pactrain": {"method": {"name": "pactrain"}},
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_run_of_the_real_mesh(name, tmp_path):
    changes = {
        **RUNS[name],
        "run": {"steps": 10, "log_every_steps": 2, "checkpoint_every_steps": 0},
        # Nothing is decided by rounding: small steps.
        "optimizer": {"learning_rate": 0.01},
    }
    summaries, rows = [], []
    for topology in ({"layout": "2", "cpu_devices": 8}, {"simulated": "2x4"}):
        place = tmp_path / str(len(rows))
        values = settings(topology={"layout": "auto", **topology}, **changes)
        summaries.append(train(values, place).summary)
        rows.append(rows_of(place))
    real, simulated = summaries
    same = ("host_wire_bytes", "num_rounds", "params_kept", "hosts", "devices_per_host")
    assert {key: real[key] for key in same} == {key: simulated[key] for key in same}
    for one, other in zip(*rows, strict=True):
        assert one["host_wire_bytes"] == other["host_wire_bytes"]
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3)


@pytest.mark.parametrize("text", ["4", "0x2", "2x", "2x2x2", "ax2"])
def test_what_is_not_understood_is_refused(text):
    with pytest.raises(UserError, match="write it as in 4x2"):
        make_topology("auto", simulated=text)
