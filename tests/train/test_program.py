"""Programs count what they send, how often they run and how often they compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.comm import accounting
from prunex_jax.mesh import vary
from prunex_jax.train.steps.compiled import Ledger, Program
from tests.helpers.common import make_mesh

MESH_SHAPE = {"host": 2, "device": 2}


def make_program(ledger, name="sum", donate=()):
    """Sums over hosts, `times` times; builds are counted."""
    builds = []

    def build(times=1):
        builds.append(times)

        def fn(x):
            for _ in range(times):
                x = vary(jax.lax.psum(x, "host"), ("host",))
            return x

        return jax.shard_map(
            fn, mesh=make_mesh(2, 2), in_specs=jax.P("host"), out_specs=jax.P("host")
        )

    return Program(name, build, MESH_SHAPE, ledger, donate), builds


def test_calls_compilations_and_bytes_add_up():
    ledger = Ledger()
    program, builds = make_program(ledger)
    x = jnp.ones(6)
    assert not program.is_compiled(times=2)
    np.testing.assert_array_equal(program(x, times=2), 4 * np.ones(6))
    assert program.is_compiled(times=2) and not program.is_compiled(times=1)
    # Two devices per host, 2 (M-1)/M = 1 times 3 float32 each, twice.
    once = 2 * 3 * 4
    assert ledger.wire_bytes == {"host": 2 * once, "device": 0.0}
    program(x, times=1)
    program(x, times=2)
    assert ledger.wire_bytes["host"] == (2 + 1 + 2) * once
    assert ledger.num_calls == {"sum": 3}
    assert ledger.num_compilations == 2 and builds == [2, 1]


def test_compiling_sends_and_calls_nothing():
    ledger = Ledger()
    program, _ = make_program(ledger)
    compiled = program.compile(jax.ShapeDtypeStruct((6,), jnp.float32), times=1)
    assert ledger == Ledger(num_compilations=1)
    assert [c.axes for c in compiled.collectives] == [("host",)]
    program(jnp.ones(6), times=1)
    assert ledger.num_compilations == 1, "compiled again"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a measure for CPUs")
def test_what_runs_once_is_compiled_quickly(monkeypatch):
    compile_it, options = jax.stages.Lowered.compile, []

    def record(self, given=None):
        options.append(given)
        return compile_it(self, given)

    monkeypatch.setattr(jax.stages.Lowered, "compile", record)

    def build():
        return lambda key: 0.3 * jax.random.normal(key, (40, 7))

    found = [
        Program("f", build, MESH_SHAPE, Ledger(), runs_once=once)(jax.random.key(3))
        for once in (False, True)
    ]
    assert options == [None, {"xla_backend_optimization_level": 1}]
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_programs_share_a_ledger_under_their_names():
    ledger = Ledger()
    first, second = (make_program(ledger, name)[0] for name in ("one", "two"))
    first(jnp.ones(2))
    second(jnp.ones(2))
    second(jnp.ones(2))
    assert ledger.num_calls == {"one": 1, "two": 2}
    assert ledger.num_compilations == 2
    assert ledger.wire_bytes["host"] == 3 * 2 * 4


def test_static_arguments_are_the_key_whatever_their_order():
    seen = []

    def build(**static):
        seen.append(static)
        return lambda x: x + 1

    program = Program("f", build, MESH_SHAPE, Ledger())
    program(jnp.ones(()), a=1, b=(("g", 2),))
    program(jnp.ones(()), b=(("g", 2),), a=1)
    program(jnp.ones(()), a=1, b=(("g", 3),))
    assert len(seen) == 2


def test_donated_arguments_are_gone():
    ledger = Ledger()
    program, _ = make_program(ledger, donate=(0,))
    sharding = jax.sharding.NamedSharding(make_mesh(2, 2), jax.P("host"))
    x = jax.device_put(jnp.ones(6), sharding)
    program(x)
    assert x.is_deleted()


def test_other_shapes_are_an_error_not_a_second_program():
    program, _ = make_program(Ledger())
    program(jnp.ones(6))
    with pytest.raises(TypeError):
        program(jnp.ones(8))


def test_unknown_traffic_is_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.delitem(accounting._KINDS, "ppermute")
    ledger = Ledger()

    def build():
        def fn(x):
            return jax.lax.ppermute(x, "host", [(0, 1), (1, 0)])

        specs = jax.P("host")
        mesh = make_mesh(2, 2)
        return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=specs)

    with pytest.raises(ValueError, match="ppermute"):
        Program("f", build, MESH_SHAPE, ledger)(jnp.ones(2))
    assert ledger == Ledger()
