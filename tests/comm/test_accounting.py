"""The bytes of a traced program are those of closed formulas, per axis."""

import functools

import jax
import jax.numpy as jnp
import pytest

from prunex_jax.comm import (
    Collective,
    Wire,
    list_collectives,
    mean_over_devices,
    mean_over_hosts,
    mean_over_mesh,
    ring_bytes,
    sum_over_hosts,
    wire_bytes,
)
from prunex_jax.mesh import vary
from tests.helpers.common import MESH, make_mesh
from tests.helpers.formulas.means import device_sum, host_sum, mesh_sum

AXES = ("host", "device")
MESHES = [(1, 8), (2, 4), (4, 2), (8, 1), (2, 3)]
NUM_ELEMENTS = 11


def trace(fn, shape, check_vma=True, arg=None):
    """Program of `fn` on every device's own array; results are made replicated."""

    def body(x):
        out = fn(vary(x, AXES))
        return jax.lax.pmax(vary(out, AXES), AXES) * 0 if check_vma else out

    run = jax.shard_map(
        body, mesh=make_mesh(*shape), in_specs=jax.P(), out_specs=jax.P(),
        check_vma=check_vma,
    )  # fmt: skip
    arg = jnp.ones(NUM_ELEMENTS) if arg is None else arg
    return jax.jit(run).trace(arg).jaxpr


def listed(fn, shape=(2, 4), check_vma=True, arg=None):
    found = list_collectives(trace(fn, shape, check_vma, arg))
    return found[:-1] if check_vma else found  # without the pmax of `trace`


@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("shape", MESHES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_formulas_are_what_the_means_send(shape, check_vma):
    mesh_shape = dict(make_mesh(*shape).shape)
    half = functools.partial(mean_over_hosts, wire=Wire("float16"))

    def per_host(fn):
        return lambda x: fn(x * 0 + jax.lax.psum(x, "device"), MESH)

    for fn, formula, own in (
        (lambda x: mean_over_devices(x, MESH), device_sum, ()),
        (lambda x: mean_over_mesh(x, MESH), mesh_sum, ()),
        (per_host(mean_over_hosts), host_sum, ()),
        (per_host(sum_over_hosts), host_sum, ()),
        (per_host(half), host_sum, (Wire("float16"),)),
    ):
        found = listed(fn, shape, check_vma)
        wanted = formula(NUM_ELEMENTS, mesh_shape, *own)
        if formula is host_sum:  # the psum that made it per_host
            wanted = device_sum(NUM_ELEMENTS, mesh_shape) + wanted
        sent = wire_bytes(found, mesh_shape)
        if formula is host_sum and shape[0] == 1 and check_vma:
            # Typed as varying over devices, so gathered; see the next test.
            assert sent["host"] == 0
            continue
        assert sent == wire_bytes(wanted, mesh_shape)
        assert shape[0] > 1 or sent["host"] == 0, "a single host sends to itself"


def test_a_single_host_moves_nothing_to_average_over_hosts():
    def fn(x):
        return mean_over_hosts(jax.lax.psum(x, "device"), MESH)

    found = listed(fn, (1, 8))
    over_hosts = wire_bytes(found[1:], {"host": 1, "device": 8})
    assert over_hosts == {"host": 0.0, "device": 0.0}


def test_every_byte_crosses_the_host_link_once():
    """Payload B, M hosts: 2 (M-1)/M B per host, whatever the number of devices."""
    for shape in ((2, 4), (4, 2), (8, 1)):
        mesh_shape = dict(zip(AXES, shape, strict=True))
        sent = wire_bytes(mesh_sum(800, mesh_shape), mesh_shape)
        assert sent["host"] == 2 * (shape[0] - 1) / shape[0] * 800 * 4


def test_programs_inside_programs_are_walked():
    total = functools.partial(jax.lax.psum, axis_name="host")

    @jax.custom_vjp
    def custom(x):
        return total(x)

    custom.defvjp(lambda x: (total(x), None), lambda _, g: (g,))

    def looped(x):
        return jax.lax.scan(lambda c, _: (c + vary(total(c), AXES), None), x, length=3)

    def branched(x):
        return jax.lax.cond(jnp.sum(x) > 0, total, lambda x: total(2 * x), x)

    once = Collective("sum", ("host",), (2,), NUM_ELEMENTS, "float32")
    for fn, count in (
        (jax.jit(total), 1),
        (jax.remat(total), 1),
        (custom, 1),
        (lambda x: looped(x)[0], 3),
        (lambda x: jax.jit(lambda y: looped(y)[0])(x), 3),
        (branched, 1),
        (lambda x: jax.vmap(total)(x[:, None]), 1),
        (lambda x: jax.lax.pmean(x, "host"), 1),
        (lambda x: jax.lax.pmin(x, "host"), 1),
    ):
        (found,) = listed(fn)
        assert found.kind == once.kind and found.axes == once.axes
        assert found.count == count
        assert found.payload_bytes == count * once.payload_bytes


def test_axes_types_and_kinds_are_read():
    def fn(x):
        i = jax.lax.psum(jnp.arange(5) + x[0].astype(int), AXES)
        h = jax.lax.psum(x.astype(jnp.bfloat16), "device")
        g = jax.lax.all_gather(x, "host")
        s = jax.lax.psum_scatter(jnp.concatenate([x, x[:1]]), "device", tiled=True)
        parts = [jnp.sum(y).astype(float) for y in (i, h, g, s)]
        return sum(vary(p, AXES) for p in parts)

    assert listed(fn) == [
        Collective("sum", AXES, (2, 4), 5, "int32"),
        Collective("sum", ("device",), (4,), 11, "bfloat16"),
        Collective("gather", ("host",), (2,), 11, "float32"),
        Collective("scatter", ("device",), (4,), 12, "float32"),
    ]
    assert [c.payload_bytes for c in listed(fn)] == [20, 22, 44, 48]


def test_exchanges_and_shifts_are_read():
    def fn(x):
        rows = x[:8].astype(jnp.int8)
        e = jax.lax.all_to_all(rows, "device", 0, 0, tiled=True)
        b = jax.lax.all_to_all(rows, AXES, 0, 0, tiled=True)
        s = jax.lax.ppermute(x, "host", [(0, 1), (1, 0)])
        return sum(vary(jnp.sum(y).astype(float), AXES) for y in (e, b, s))

    assert listed(fn) == [
        Collective("exchange", ("device",), (4,), 8, "int8"),
        Collective("exchange", AXES, (2, 4), 8, "int8"),
        Collective("shift", ("host",), (2,), 11, "float32"),
    ]


def test_an_exchange_sends_each_part_to_its_place():
    """Counted one by one: 8 devices, 3 bytes from each to each."""
    mesh_shape = {"host": 2, "device": 4}
    hosts = [position // 4 for position in range(8)]
    pairs = [(i, j) for i in range(4) for j in range(8) if i != j]
    leaving = sum(3 for i, j in pairs if hosts[i] != hosts[j])
    staying = sum(3 for i, j in pairs if hosts[i] == hosts[j])
    both = Collective("exchange", AXES, (2, 4), 24, "int8")
    assert wire_bytes([both], mesh_shape) == {"host": leaving, "device": staying}
    one = Collective("exchange", ("device",), (4,), 12, "int8")
    assert wire_bytes([one], mesh_shape) == {"host": 0, "device": staying}
    hop = Collective("shift", ("host",), (2,), 5, "float32")
    assert wire_bytes([hop], mesh_shape) == {"host": 4 * 20, "device": 0}


def test_reductions_over_array_axes_and_types_are_free():
    def fn(x):
        return jnp.sum(x) + jax.lax.axis_index("host") + jnp.max(x)

    assert listed(fn) == []


def test_what_cannot_be_counted_is_refused():
    def loop(x):
        return jax.lax.while_loop(
            lambda c: jnp.sum(c) < 9, lambda c: vary(jax.lax.psum(c, "host"), AXES), x
        )

    def branches(x):
        total = functools.partial(jax.lax.psum, axis_name="host")
        return jax.lax.cond(
            jnp.sum(x) > 0, lambda x: vary(total(x), AXES), lambda x: x, x
        )

    def grouped(x):
        return jax.lax.psum(x, "device", axis_index_groups=[[0, 1], [2, 3]])

    for fn, check_vma, match in (
        (loop, True, "while loop communicates"),
        (branches, True, "sync=True"),
        (grouped, False, "groups of positions"),
    ):
        with pytest.raises(ValueError, match=match):
            listed(fn, check_vma=check_vma)


def test_silent_loops_and_branches_are_no_obstacle():
    def fn(x):
        x = jax.lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c + 1, x)
        return jax.lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x)

    assert listed(fn) == []


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        # A ring of 8 sends 2 * 7/8 of 800 bytes on every hop.
        ((2, 4), {"host": 1400.0, "device": 4200.0}),
        ((8, 1), {"host": 1400.0, "device": 0.0}),
        ((1, 8), {"host": 0.0, "device": 11200.0}),
    ],
)
def test_joint_axes_are_one_ring(shape, wanted):
    both = Collective("sum", AXES, shape, 200, "float32")
    assert wire_bytes([both], dict(zip(AXES, shape, strict=True))) == wanted


def test_rings_of_one_send_nothing_and_a_sum_is_scatter_and_gather():
    for kind in ("sum", "scatter", "gather", "exchange", "shift"):
        assert ring_bytes(kind, 100, 1) == 0
    for size in (2, 3, 8):
        parts = ring_bytes("scatter", 120, size) + ring_bytes(
            "gather", 120 / size, size
        )
        assert ring_bytes("sum", 120, size) == pytest.approx(parts)
    with pytest.raises(ValueError, match="unknown kind"):
        ring_bytes("broadcast", 1, 2)


def test_counts_multiply_payloads():
    three = Collective("gather", ("device",), (2,), 10, "float16", count=3)
    assert three.payload_bytes == 60
    assert wire_bytes([three, three], {"host": 2, "device": 2}) == {
        "host": 0.0, "device": 2 * 2 * 60.0,
    }  # fmt: skip
