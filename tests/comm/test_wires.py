"""Narrow formats: unbiased, bounded in error, the same everywhere, and as small."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.comm import (
    FORMATS,
    Wire,
    flat_mean_over_mesh,
    list_collectives,
    mean_over_devices,
    mean_over_hosts,
    mean_over_mesh,
    wire_bytes,
)
from prunex_jax.mesh import ALONE, vary
from prunex_jax.methods import average_gradients
from tests.helpers.common import MESH, ROOT, free_port, make_mesh
from tests.helpers.formulas.means import flat_sum, host_sum, mesh_sum
from tests.helpers.mean_cases import (
    AXES,
    BY_SIZE,
    MESHES,
    assert_same,
    flat,
    make_tree,
    on_mesh,
)

NARROW = ("float16", "bfloat16", "int8", "int4")
# Largest error of one stochastic rounding, relative to the number and to its block. A
# scale of int8 is the largest of the block over 126, rounded to 8 bits; that of int4,
# over 7, is rounded up.
RELATIVE = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "int8": 0.0, "int4": 0.0}
OF_BLOCK = {
    "float16": 2.0**-38,
    "bfloat16": 0.0,
    "int8": (1 + 2.0**-8) / 126,
    "int4": (1 + 2.0**-7) / 7,
}
# int2 is always rounded to nearest: see test_errors.py.
UNBIASED = [dtype for dtype, row in FORMATS.items() if not row.is_biased]
BLOCK = 128


def blocks(seed=0, num_blocks=4):
    """Blocks of very different sizes, and one with a wide range inside."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(num_blocks, BLOCK)) * 10.0 ** rng.uniform(
        -6, 6, (num_blocks, 1)
    )
    values[-1] *= 10.0 ** rng.uniform(-8, 0, BLOCK)
    return values.astype(np.float32)


def noise_of(key, shape):
    return jax.random.uniform(jax.random.key(key), shape, minval=1e-6)


def bound(wire, values, roundings=1):
    """Largest error that rounding may cause."""
    values = np.abs(values)
    largest = values.max(-1, keepdims=True)
    once = RELATIVE[wire] * values + OF_BLOCK[wire] * largest
    return roundings * once * (1 + RELATIVE[wire] + OF_BLOCK[wire]) + 1e-37


# ---- formats alone


def round_trip(values, wire, noise=None):
    """What arrives of blocks."""
    return FORMATS[wire].decode(FORMATS[wire].encode(values, noise))


@pytest.mark.parametrize("wire", NARROW)
@pytest.mark.parametrize("is_stochastic", [False, True])
def test_errors_are_bounded(wire, is_stochastic):
    values = blocks()
    noise = noise_of(1, values.shape) if is_stochastic else None
    found = round_trip(values, wire, noise)
    share = 1 if is_stochastic else 0.5
    error = np.abs(np.asarray(found) - values)
    assert np.all(error <= share * bound(wire, values) + 1e-37)
    assert error.max() > 0, "nothing was rounded"


@pytest.mark.parametrize("wire", NARROW)
def test_stochastic_rounding_is_unbiased(wire):
    """The mean of many encodings is the number: to five standard errors."""
    values, times = blocks(), 4000

    def draw(total, key):
        noise = jax.random.uniform(jax.random.key(key), values.shape, minval=1e-6)
        return total + (round_trip(values, wire, noise) - values), None

    zeros = jnp.zeros_like(values)
    total = jax.jit(lambda: jax.lax.scan(draw, zeros, jnp.arange(times))[0])()
    # A step apart with probability p: standard deviation at most half a step.
    error = np.abs(np.asarray(total)) / times
    assert np.all(error <= 5 * 0.5 * bound(wire, values) / times**0.5 + 1e-37)
    nearest = np.abs(round_trip(values, wire) - values)
    assert nearest.max() > 5 * error.max(), "rounding to nearest is biased"


@pytest.mark.parametrize("wire", NARROW)
def test_what_can_be_represented_is_not_rounded(wire):
    most = 7 if wire == "int4" else 126
    codes = np.random.default_rng(0).integers(-most, most + 1, (3, BLOCK))
    codes[:, 0] = most
    values = np.float32(codes * np.array([[1.0], [2.0**-20], [2.0**30]]))
    for noise in (None, noise_of(2, values.shape)):
        assert_same(round_trip(values, wire, noise), values)


@pytest.mark.parametrize("wire", NARROW)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-9, 1.0, 65504.0, 1e20, 3e38])
def test_no_size_overflows_or_vanishes(wire, size):
    """float16 alone ends at 65504 and at 6e-8."""
    values = np.full((1, BLOCK), size, np.float32)
    for noise in (None, noise_of(3, values.shape)):
        found = np.asarray(round_trip(values, wire, noise))
        assert np.all(np.isfinite(found))
        if size > 1e-35:
            # A scale of four bits that was rounded up leaves the largest to the draw.
            coarse = wire == "int4" and noise is not None
            np.testing.assert_allclose(found, values, rtol=0.15 if coarse else 0.017)
    zeros = np.zeros((1, BLOCK), np.float32)
    assert_same(round_trip(zeros, wire, noise_of(4, zeros.shape)), zeros)


@pytest.mark.parametrize("wire", NARROW)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_visible(wire, bad):
    values = blocks()
    values[1, 5] = bad
    for noise in (None, noise_of(5, values.shape)):
        found = np.asarray(round_trip(values, wire, noise))
        assert not np.isfinite(found[1, 5])
        assert np.all(np.isfinite(found[[0, 2, 3]])), "another block is lost as well"


@pytest.mark.parametrize("scale", [1e-35, 1e-20, 1.0, 1e20, 1e38])
def test_four_means_stand_for_a_block(scale):
    """Against numpy; the sum of a block is kept, and nothing overflows."""
    values = scale * np.random.default_rng(0).laplace(size=(6, 512))
    values[1] = scale / 3
    values[2, :500] = 0.0
    values = np.clip(values, -3e38, 3e38).astype(np.float32)
    exact = values.astype(np.float64)
    mean, away = exact.mean(1), 1.05 * exact.std(1)
    wanted = np.zeros_like(exact)
    for row, here in enumerate(exact):
        bounds = [mean[row] - away[row], mean[row], mean[row] + away[row]]
        codes = np.searchsorted(bounds, here)
        for code in set(codes):
            wanted[row, codes == code] = here[codes == code].mean()
    message = FORMATS["int2"].encode(values, None)
    assert message.nbytes == 6 * FORMATS["int2"].block_bytes
    found = np.asarray(FORMATS["int2"].decode(message), np.float64)
    largest = np.abs(exact).max(1, keepdims=True)
    # A number at a bound may fall to either side of it; means have eight bits.
    far = np.abs(found - wanted) > 2.0**-8 * largest + 2.0**-126
    assert np.mean(far) < 0.001
    error = np.abs(found.mean(1) - mean).max()
    assert error < 2.0**-8 * np.abs(exact).mean(1).max() + 2.0**-126
    assert np.square(found[0] - exact[0]).mean() < 0.2 * exact[0].var()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_visible_among_four_means(bad):
    values = np.random.default_rng(0).normal(size=(3, 512)).astype(np.float32)
    values[1, 5] = bad
    found = np.asarray(round_trip(values, "int2"))
    assert not np.isfinite(found[1, 5])
    assert np.all(np.isfinite(found[[0, 2]])), "another block is lost as well"


# ---- means over hosts


MEANS = {
    "hosts": lambda own, **kw: mean_over_hosts(
        mean_over_devices(own, MESH), MESH, **kw
    ),
    "mesh": lambda own, **kw: mean_over_mesh(own, MESH, **kw),
    "flat": lambda own, **kw: flat_mean_over_mesh(own, MESH, **kw),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wire", UNBIASED)
@pytest.mark.parametrize(
    ("shape", "check_vma"),
    [
        pytest.param((2, 4), True, id="2x4"),
        pytest.param((4, 2), True, id="4x2"),
        pytest.param((8, 1), True, id="8x1"),
        pytest.param((3, 2), True, id="3x2"),
        pytest.param((3, 2), False, id="3x2 untyped"),
    ],
)
def test_means_are_means_to_the_precision_of_the_wire(shape, check_vma, wire):
    tree = make_tree(shape)
    wanted = flat(tree, 2).mean((0, 1))
    largest = np.abs(flat(tree)).max()
    rounding = 1e-6
    if wire != "float32":
        rounding += 2 * (RELATIVE[wire] + OF_BLOCK[wire]) * largest

    def run(own):
        key = jax.random.key(3)
        return {k: fn(own, wire=Wire(wire), key=key) for k, fn in MEANS.items()}

    for found in on_mesh(run, shape, check_vma=check_vma)(tree).values():
        assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(found))
        error = np.abs(flat(found) - wanted).max()
        assert error <= rounding
        assert wire == "float32" or error > 1e-5, "nothing was rounded"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wire", NARROW)
def test_the_mean_is_unbiased(wire):
    """Over many keys, the mean of means comes to the mean; to nearest it does not."""
    shape, times = (2, 2), 256
    tree = make_tree(shape, size=150)
    wanted = flat(tree, 2).mean((0, 1))

    def run(own):
        def once(key):
            return mean_over_mesh(own, MESH, Wire(wire), jax.random.key(key))

        return jax.lax.map(once, jnp.arange(times)), mean_over_mesh(
            own, MESH, Wire(wire)
        )

    found, nearest = on_mesh(run, shape)(tree)
    draws = flat(found, 1)
    spread = draws.std(0)
    error = np.abs(draws.mean(0) - wanted)
    # Rare roundings may not have been drawn at all: one in `times` is allowed for.
    rare = (RELATIVE[wire] + OF_BLOCK[wire]) * np.abs(flat(tree)).max() / times**0.5
    assert np.all(error <= 5 * np.hypot(spread, rare) / times**0.5 + 1e-6)
    assert spread.max() > 0
    biased = np.abs(flat(nearest) - wanted)
    assert np.mean(biased) > 5 * np.mean(error)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", [None, 7])
@pytest.mark.parametrize("wire", NARROW)
def test_devices_and_buckets_do_not_change_a_bit(wire, key):
    """Four hosts with one, two devices; one message or many: the same bits."""
    key = None if key is None else jax.random.key(key)
    tree = make_tree((4, 1), size=700)
    found = []
    for num_devices, bucket_bytes in ((1, 0), (2, 0), (2, 400)):
        per_host = jax.tree.map(lambda x, n=num_devices: np.repeat(x, n, 1), tree)

        def run(own, bucket_bytes=bucket_bytes):
            # Typed as per_host; the mean of two equal numbers is exact.
            own = mean_over_devices(own, MESH)
            return mean_over_hosts(own, MESH, Wire(wire, bucket_bytes), key)

        found.append(on_mesh(run, (4, num_devices))(per_host))
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("bucket_bytes", [3, 30])
@pytest.mark.parametrize("fn", MEANS.values(), ids=MEANS)
def test_buckets_do_not_change_float32(fn, bucket_bytes, in_turn):
    tree = make_tree((2, 2), size=20)
    tree["half"] = np.float16(tree.pop("scale"))
    tree["none"] = None
    tree["empty"] = np.zeros((2, 2, 0), np.float32)

    def run(own):
        wire = Wire(bucket_bytes=bucket_bytes, in_turn=in_turn)
        return fn(own, wire=wire), fn(own)

    several, one = on_mesh(run, (2, 2))(tree)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), several, one)
    assert jax.tree.map(jnp.shape, several) == jax.tree.map(jnp.shape, one)
    assert several["half"].dtype == np.float16


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wire", NARROW)
def test_every_host_ends_with_the_same_bits(wire):
    tree = make_tree((4, 2))

    def run(own):
        means = [
            fn(own, wire=Wire(wire), key=jax.random.key(1)) for fn in MEANS.values()
        ]
        return jax.tree.map(lambda x: vary(x, AXES)[None, None], means)

    out = jax.P(*AXES)
    found = on_mesh(run, (4, 2), out, check_vma=False)(tree)
    jax.tree.map(lambda x: assert_same(x, np.broadcast_to(x[:1, :1], x.shape)), found)


@pytest.mark.parametrize("wire", NARROW)
def test_hosts_draw_independently(wire):
    """Eight hosts, nearly the same numbers but for the sign: errors average out."""
    rng = np.random.default_rng(0)
    sizes = rng.uniform(0.5, 1, (1, BLOCK)) + rng.uniform(0, 1e-4, (8, BLOCK))
    tree = np.float32(sizes * np.tile([1, -1], 4)[:, None])[:, None]

    def run(own):
        return mean_over_hosts(own, MESH, Wire(wire), jax.random.key(2))

    error = np.asarray(on_mesh(run, (8, 1))(tree)) - tree.mean((0, 1))
    steps = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 1 / 126, "int4": 1 / 7}
    step = steps[wire]
    # One rounding has a standard deviation of 0.4 steps on average, and 0.4 / 8^0.5 is
    # 0.15; with the same draws on all hosts it would stay 0.4.
    assert 0.08 * step < np.std(error) < 0.22 * step


@pytest.mark.parametrize("wire", NARROW)
def test_a_single_host_rounds_nothing_and_sends_nothing(wire):
    tree = make_tree((1, 4))
    plain = {name: on_mesh(fn, (1, 4))(tree) for name, fn in MEANS.items()}
    for name, fn in MEANS.items():
        run = functools.partial(fn, wire=Wire(wire), key=jax.random.key(0))
        program = on_mesh(run, (1, 4))
        assert_same(program(tree), plain[name])
        listed = list_collectives(program.trace(tree).jaxpr)
        assert wire_bytes(listed, {"host": 1, "device": 4})["host"] == 0
        assert {item.dtype for item in listed} == {"float32"}
    alone = jax.tree.map(lambda x: x[0, 0], tree)
    for fn in (mean_over_hosts, mean_over_mesh, flat_mean_over_mesh):
        assert_same(fn(alone, ALONE, Wire(wire), jax.random.key(0)), alone)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wire", NARROW)
def test_divergence_of_one_device_is_seen_by_all(wire):
    def run(own):
        key = jax.random.key(0)
        return [fn(own, wire=Wire(wire), key=key) for fn in MEANS.values()]

    program = on_mesh(run, (2, 2))
    for bad in (np.nan, np.inf):
        tree = make_tree((2, 2))
        tree["kernel"][1, 0, 7, 2] = bad
        for found in program(tree):
            assert not np.isfinite(found["kernel"][7, 2])
            assert np.isfinite(flat(found)).any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wire", NARROW)
def test_simulated_hosts_agree_with_a_mesh(wire):
    """`vmap` with axis names needs no mesh."""
    tree = make_tree((2, 2))
    key = jax.random.key(5)
    in_host = jax.vmap(
        lambda own: mean_over_mesh(own, MESH, Wire(wire), key), axis_name="device"
    )
    simulated = jax.jit(jax.vmap(in_host, axis_name="host"))(tree)
    wanted = on_mesh(lambda own: mean_over_mesh(own, MESH, Wire(wire), key), (2, 2))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[1, 1], b, rtol=1e-5, atol=1e-7),
        simulated,
        wanted(tree),
    )


@pytest.mark.parametrize("fn", MEANS.values(), ids=MEANS)
def test_a_biased_format_is_refused_where_nothing_is_fed_back(fn):
    with pytest.raises(UserError, match="wire_dtype='int2' rounds to nearest"):
        on_mesh(lambda own: fn(own, wire=Wire("int2")), (2, 2))(make_tree((2, 2)))


def test_unknown_formats_are_refused():
    with pytest.raises(UserError, match="wire_dtype='float8' must be one of float32"):
        Wire("float8")
    with pytest.raises(UserError, match="bucket_bytes=-1 must be zero or more"):
        Wire("int8", -1)
    with pytest.raises(UserError, match="levels='deep' must be hierarchical or flat"):
        average_gradients(ALONE, levels="deep")


# ---- bytes


FORMULAS = {"hosts": host_sum, "mesh": mesh_sum, "flat": flat_sum}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("bucket_bytes", [0, 200])
@pytest.mark.parametrize("wire", UNBIASED)
@pytest.mark.parametrize("shape", [*MESHES, (2, 3)], **BY_SIZE)
def test_formulas_are_what_is_sent(shape, wire, bucket_bytes):
    mesh_shape = dict(zip(AXES, shape, strict=True))
    own = make_tree((), size=1000)
    num_elements = flat(own).size
    settings = {"wire": Wire(wire, bucket_bytes)}
    for name, fn in MEANS.items():
        if name == "hosts":  # without the mean over devices before it

            def fn(own, **kw):
                return mean_over_hosts(own, MESH, **kw)

        run = functools.partial(fn, key=jax.random.key(0), **settings)
        program = jax.shard_map(
            run, mesh=make_mesh(*shape), in_specs=jax.P(), out_specs=jax.P()
        )
        found = list_collectives(jax.jit(program).trace(own).jaxpr)
        formula = FORMULAS[name](num_elements, mesh_shape, Wire(wire, bucket_bytes))
        sent = wire_bytes(found, mesh_shape)
        assert sent == wire_bytes(formula, mesh_shape), name
        assert shape[0] > 1 or sent["host"] == 0
        if shape[0] == 1:
            continue
        over_hosts = [item for item in found if "host" in item.axes]
        wanted = "uint16" if wire.endswith("float16") else wire.replace("int4", "int8")
        assert {item.dtype for item in over_hosts} == {wanted}
        largest = max(item.payload_bytes for item in over_hosts)
        # A message has room for one block per device of each host at least.
        slack = BLOCK * 3 * shape[0] * shape[1]
        assert not bucket_bytes or largest <= bucket_bytes + slack
        assert bucket_bytes == 0 or len(over_hosts) > 4


@pytest.mark.parametrize("shape", MESHES[1:], **BY_SIZE)
def test_narrow_is_as_small_as_it_says(shape):
    """Of a ResNet-20, and of what half of its channels leave."""
    mesh_shape = dict(zip(AXES, shape, strict=True))
    dense_size = 271_117

    def sent(size, wire):
        return wire_bytes(mesh_sum(size, mesh_shape, Wire(wire)), mesh_shape)["host"]

    dense = sent(dense_size, "float32")
    limits = {"float16": 0.51, "bfloat16": 0.505, "int8": 0.257, "int4": 0.131}
    for wire, most in limits.items():
        assert most - 0.012 < sent(dense_size, wire) / dense < most
    compact = round(0.256 * dense_size)
    assert sent(compact, "int8") / dense < 0.07
    assert (
        Wire("int8").payload_bytes(compact) / Wire().payload_bytes(dense_size) < 0.0652
    )


# ---- as an optax transformation


@pytest.mark.sampled(2)
@pytest.mark.parametrize("levels", ["hierarchical", "flat"])
@pytest.mark.parametrize("wire", NARROW)
def test_gradients_are_averaged_anew_in_every_step(wire, levels):
    tree = make_tree((2, 2))
    wanted = flat(tree, 2).mean((0, 1))
    tx = average_gradients(MESH, levels=levels, wire=Wire(wire))

    def run(own):
        state, found = tx.init(own), []
        for _ in range(2):
            mean, state = tx.update(own, state)
            found.append(mean)
        return found, state

    (first, second), state = on_mesh(run, (2, 2))(tree)
    assert int(state.num_steps) == 2
    assert np.any(flat(first) != flat(second)), "the same rounding twice adds up"
    for found in (first, second):
        assert np.abs(flat(found) - wanted).max() < (0.5 if wire == "int4" else 0.08)


# ---- two processes

TWO_PROCESSES = """
import sys
import jax
import numpy as np
from tests.comm.test_wires import means_of_known_numbers

jax.config.update("jax_num_cpu_devices", 2)
port, index, out = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
np.savez(out, *means_of_known_numbers(jax.devices()))
"""


def means_of_known_numbers(devices):
    """Every mean in every narrow format of numbers that differ by host."""
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), AXES)

    def run():
        numbers = jnp.arange(-400, 601, dtype=jnp.float32)
        own = {"w": numbers * (1 + 2 * jax.lax.axis_index("host"))}
        key = jax.random.key(0)
        hosts = [mean_over_hosts(own, MESH, Wire(wire, 300), key) for wire in NARROW]
        own = vary(own, AXES)
        flats = [flat_mean_over_mesh(own, MESH, Wire(wire), key) for wire in NARROW]
        return hosts + flats

    program = jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=jax.P())
    return [np.asarray(mean["w"]) for mean in jax.jit(program)()]


@pytest.mark.slow
def test_two_processes_compute_the_bits_of_one(tmp_path):
    """Integers of 8 and 16 bits through the real collectives between processes."""
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    port = free_port()
    started = [
        subprocess.Popen(
            [
                sys.executable,
                str(script),
                str(port),
                str(i),
                str(tmp_path / f"{i}.npz"),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for i in range(2)
    ]
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    wanted = means_of_known_numbers(jax.devices()[:4])
    for i in range(2):
        found = np.load(tmp_path / f"{i}.npz")
        assert_same([found[name] for name in found], wanted)
