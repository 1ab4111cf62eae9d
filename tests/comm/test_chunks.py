"""Means of the largest numbers of chunks: what is sent and kept, and its bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.comm import (
    TopK,
    Wire,
    list_collectives,
    mean_of_largest,
    wire_bytes,
)
from prunex_jax.comm.chunks import (
    CHUNK,
    FEW_HOSTS,
    pack_positions,
    route_of,
    unpack_positions,
)
from prunex_jax.mesh import ALONE, vary
from tests.helpers.common import MESH, ROOT, make_mesh
from tests.helpers.formulas.means import host_sum_with_error, largest_sum
from tests.helpers.mean_cases import AXES, BY_SIZE, MESHES, assert_same, on_mesh

# Three chunks, the last one not full, in leaves whose ends lie inside chunks.
SIZES = {"a": (50, 60), "b": (5001,), "c": (40, 30)}
SIZE = 9201
ROUTES = ("gather", "owners")
# One without blocks, one with short and one with long ones.
DTYPES = ("float32", "int8", "int2")
FLOAT32_CHUNK = 4 * CHUNK  # bytes


def make_rows(num_hosts, seed=0):
    """What every host has, float32[hosts, SIZE], of heavy tails and both signs."""
    rng = np.random.default_rng(seed)
    return rng.standard_t(3, size=(num_hosts, SIZE)).astype(np.float32)


def as_tree(rows):
    """Leaves [..., *shape] of rows [..., SIZE]."""
    found, start = {}, 0
    for name, shape in SIZES.items():
        stop = start + np.prod(shape)
        found[name] = rows[..., start:stop].reshape(*rows.shape[:-1], *shape)
        start = stop
    return found


def as_rows(tree, num_lead=0):
    leaves = [np.reshape(x, (*x.shape[:num_lead], -1)) for x in tree.values()]
    return np.concatenate(leaves, axis=-1)


def run_on(shape, top, wire, rows, check_vma=True):
    """Mean float32[SIZE] and errors [hosts, SIZE] of rows per host."""
    tree = as_tree(np.repeat(rows[:, None], shape[1], axis=1))

    def run(own):
        # Equal on the devices of a host, which the mesh has to be told.
        own = jax.tree.map(lambda x: jax.lax.pmean(x, "device"), own)
        mean, error = mean_of_largest(own, top, MESH, wire)
        return mean, jax.tree.map(lambda e: e[None], error)

    specs = (jax.P(), jax.P("host"))
    mean, error = on_mesh(run, shape, specs, check_vma=check_vma)(tree)
    return as_rows(mean), as_rows(error, 1)


def chosen(rows, count):
    """Whether numbers are among the largest of their chunk, bool[hosts, SIZE]."""
    padded = np.pad(np.abs(rows), ((0, 0), (0, -SIZE % CHUNK)))
    chunks = padded.reshape(len(rows), -1, CHUNK)
    order = np.argsort(-chunks, axis=2, kind="stable")
    found = np.zeros(chunks.shape, bool)
    np.put_along_axis(found, order[:, :, :count], True, axis=2)
    return found.reshape(len(rows), -1)[:, :SIZE]


def test_positions_of_twelve_bits_come_back():
    positions = np.random.default_rng(0).permutation(CHUNK).reshape(8, -1)
    packed = pack_positions(jnp.asarray(positions))
    assert packed.dtype == np.uint8 and packed.size == CHUNK * 3 // 2
    np.testing.assert_array_equal(unpack_positions(packed), positions)


def test_the_largest_of_every_host_are_averaged():
    """Against numpy, unrounded; largest is largest in magnitude."""
    rows = make_rows(4)
    found, error = run_on((4, 2), TopK(64), Wire(), rows)
    is_sent = chosen(rows, 64)
    sent = np.where(is_sent, rows, 0.0)
    np.testing.assert_allclose(found, sent.mean(0), atol=1e-6)
    np.testing.assert_allclose(error, rows - sent, atol=1e-6)
    assert sent.min() < 0 < sent.max()


def test_owners_add_up_and_send_on_the_largest():
    rows = make_rows(4)
    found, error = run_on((4, 1), TopK(64, "owners"), Wire(), rows)
    sent = np.where(chosen(rows, 64), rows, 0.0)
    total = sent.mean(0)
    goes_on = chosen(total[None], 64)[0]
    np.testing.assert_allclose(found, np.where(goes_on, total, 0), atol=1e-6)
    # One chunk for each host, and the last has none: the owner keeps four times what
    # the mean is short of, since only a quarter of it will count.
    wanted = rows - sent
    rest = 4 * np.where(goes_on, 0, total)
    for owner in range(3):
        own = slice(owner * CHUNK, (owner + 1) * CHUNK)
        wanted[owner, own] += rest[own]
    np.testing.assert_allclose(error, wanted, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (8, 1), (3, 2)], **BY_SIZE)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_lost(dtype, route, shape):
    """The mean of what was given is the mean that was sent plus that of the errors."""
    rows = make_rows(shape[0])
    found, error = run_on(shape, TopK(64, route), Wire(dtype), rows)
    np.testing.assert_allclose(found + error.mean(0), rows.mean(0), atol=1e-5)
    count = (found != 0).sum()
    assert 0 < count <= 3 * 64 * (shape[0] if route == "gather" else 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_untyped_programs_agree(dtype, route):
    rows, top = make_rows(4), TopK(32, route)
    typed = run_on((4, 2), top, Wire(dtype), rows)
    untyped = run_on((4, 2), top, Wire(dtype), rows, check_vma=False)
    assert_same(untyped, typed)


@pytest.mark.parametrize("route", ROUTES)
def test_every_device_has_the_same_bits(route):
    top = TopK(64, route)

    def run(own):
        own = jax.tree.map(lambda x: jax.lax.pmean(x, "device"), own)
        found = mean_of_largest(own, top, MESH, Wire("int2"))
        return jax.tree.map(lambda x: vary(x, AXES)[None, None], found)

    tree = as_tree(np.repeat(make_rows(4)[:, None], 2, axis=1))
    mean, error = on_mesh(run, (4, 2), jax.P(*AXES), check_vma=False)(tree)
    jax.tree.map(lambda x: assert_same(x, np.broadcast_to(x[:1, :1], x.shape)), mean)
    jax.tree.map(lambda x: assert_same(x[:, 0], x[:, 1]), error)


def test_devices_change_no_bit_of_a_gather():
    rows = make_rows(4)
    found = [run_on((4, n), TopK(64), Wire("int2"), rows)[0] for n in (1, 2)]
    assert_same(*found)


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_not_finite_is_sent(route):
    rows = make_rows(2)
    rows[1, 4100] = np.nan
    found, _ = run_on((2, 2), TopK(64, route), Wire(), rows)
    assert np.isnan(found[4100])


@pytest.mark.parametrize("route", ROUTES)
def test_one_host_sends_nothing_and_keeps_nothing(route):
    rows = make_rows(1)
    found, error = run_on((1, 4), TopK(2, route), Wire("int2"), rows)
    np.testing.assert_allclose(found, rows[0], atol=1e-6)
    assert not error.any()
    assert mean_of_largest({}, TopK(2), ALONE) == ({}, {})


@pytest.mark.slow
def test_simulated_hosts_agree_with_a_mesh():
    rows, axes = make_rows(4), type(MESH)("host", None)
    for route in ROUTES:
        top = TopK(64, route)
        simulated = jax.jit(
            jax.vmap(
                lambda own, top=top: mean_of_largest(own, top, axes, Wire("int2")),
                axis_name="host",
            )
        )(as_tree(rows))
        mean, error = run_on((4, 1), top, Wire("int2"), rows)
        np.testing.assert_allclose(as_rows(simulated[0], 1)[2], mean, atol=1e-5)
        np.testing.assert_allclose(as_rows(simulated[1], 1), error, atol=1e-5)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("bucket_bytes", [0, 2 * FLOAT32_CHUNK])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("route", [*ROUTES, "auto"])
@pytest.mark.parametrize("shape", [*MESHES, (2, 3)], **BY_SIZE)
def test_formulas_are_what_is_sent(shape, route, dtype, bucket_bytes):
    mesh_shape = dict(zip(AXES, shape, strict=True))
    top, wire = TopK(64, route), Wire(dtype, bucket_bytes)
    program = jax.shard_map(
        lambda own: mean_of_largest(own, top, MESH, wire),
        mesh=make_mesh(*shape), in_specs=jax.P(), out_specs=(jax.P(), jax.P("host")),
    )  # fmt: skip
    own = as_tree(make_rows(1)[0])
    found = list_collectives(jax.jit(program).trace(own).jaxpr)
    formula = largest_sum(SIZE, top, mesh_shape, wire)
    assert wire_bytes(found, mesh_shape) == wire_bytes(formula, mesh_shape)
    if shape[0] > 1:
        over_hosts = [each for each in found if each.axes == ("host",)]
        in_one = 2 if route_of(SIZE, top, mesh_shape, wire) == "gather" else 4
        assert len(over_hosts) == in_one * (2 if bucket_bytes else 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_buckets_change_no_number_that_is_chosen(dtype, num_chunks):
    """Blocks of a narrow format end with a buffer, so rounding may differ."""
    rows, top = make_rows(2), TopK(64)
    whole, cut = (
        run_on((2, 2), top, Wire(dtype, bucket_bytes), rows)
        for bucket_bytes in (0, num_chunks * FLOAT32_CHUNK)
    )
    if dtype == "float32" or num_chunks == 3:
        assert_same(cut, whole)
    for found, wanted in zip(cut, whole, strict=True):
        assert_same(found == 0, wanted == 0)


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_is_lost_in_buckets(route):
    rows = make_rows(4)
    wire = Wire("int2", 2 * FLOAT32_CHUNK)
    found, error = run_on((4, 2), TopK(64, route), wire, rows)
    np.testing.assert_allclose(found + error.mean(0), rows.mean(0), atol=1e-5)


def sent_bytes(size, route, num_hosts, num_devices=1, dtype="int2", per_chunk=64):
    """What a host sends to others on a route; None sends all numbers."""
    mesh_shape = {"host": num_hosts, "device": num_devices}
    wire = Wire(dtype)
    if route is None:
        found = host_sum_with_error(size, mesh_shape, wire)
    else:
        top = TopK(per_chunk, route)
        found = largest_sum(size, top, mesh_shape, wire)
    return wire_bytes(found, mesh_shape)["host"]


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_auto_sends_fewer_bytes_from_five_hosts_on(dtype, num_devices):
    taken = set()
    for num_hosts in range(2, 65):
        for size in (100, 40_000, 300_000, 10_000_000):
            for per_chunk in (2, 64, 1024):
                case = (num_hosts, num_devices, dtype, per_chunk)
                auto, gather, owners = (
                    sent_bytes(size, route, *case) for route in ("auto", *ROUTES)
                )
                is_few = num_hosts <= FEW_HOSTS
                assert auto == (gather if is_few else min(gather, owners)), case
                taken.add((is_few, auto == gather))
    assert taken == {(True, True), (False, True), (False, False)}


def test_two_hosts_gather_where_both_routes_send_as_much():
    top, mesh_shape = TopK(64, "auto"), {"host": 2, "device": 1}
    assert route_of(2 * CHUNK, top, mesh_shape) == "gather"
    assert (
        len({sent_bytes(2 * CHUNK, each, 2, dtype="float32") for each in ROUTES}) == 1
    )


@pytest.mark.parametrize("shape", [(4, 2), (8, 1)], **BY_SIZE)
def test_auto_is_the_route_that_it_takes_bit_for_bit(shape):
    rows = make_rows(shape[0])
    mesh_shape = dict(zip(AXES, shape, strict=True))
    route = route_of(SIZE, TopK(64, "auto"), mesh_shape, Wire("int8"))
    assert route == {4: "gather", 8: "owners"}[shape[0]]
    found, wanted = (
        run_on(shape, TopK(64, each), Wire("int8"), rows) for each in ("auto", route)
    )
    assert_same(found, wanted)


def test_the_table_of_routes_is_that_of_the_formulas():
    text = (ROOT / "docs" / "explanation" / "bytes.md").read_text()
    table = text.split("| hosts | `gather` |")[1].split("\n\n")[0].splitlines()[2:]
    for line in table:
        num_hosts, *cells, taken = [cell.strip() for cell in line.strip("|").split("|")]
        sent = [
            sent_bytes(10_000_000, each, int(num_hosts)) for each in (*ROUTES, None)
        ]
        assert cells == [f"{each / 1e6:.2f}" for each in sent], num_hosts
        mesh_shape = {"host": int(num_hosts), "device": 1}
        top = TopK(64, "auto")
        assert taken == f"`{route_of(10_000_000, top, mesh_shape, Wire('int2'))}`"
    assert len(table) >= 7


def test_owners_send_as_much_whatever_the_number_of_hosts():
    size = 10_000_000
    one = size / CHUNK * (64 * 1.5 + 64 / 512 * 136)
    for num_hosts in (2, 4, 16, 64):
        gather, owners = (sent_bytes(size, route, num_hosts) for route in ROUTES)
        assert gather == pytest.approx((num_hosts - 1) * one, 0.01)
        share = 2 * (num_hosts - 1) / num_hosts
        assert owners == pytest.approx(share * one, 0.03)


def test_what_cannot_be_sent_is_refused():
    for count in (1, 3, 4098):
        with pytest.raises(UserError, match=f"top_k={count} must be an even number"):
            TopK(count)
    with pytest.raises(
        UserError, match="top_k_route='star' must be auto, gather or owners"
    ):
        TopK(2, "star")
