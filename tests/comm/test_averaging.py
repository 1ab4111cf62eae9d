"""Means and sums over the mesh are those of numpy, whatever the sizes and types."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.channels import (
    ChannelGroup,
    ChannelSlice,
    layouts_of,
    mask_channels,
    mask_of,
    put_channels,
    take_channels,
)
from prunex_jax.comm import (
    Wire,
    averaging,
    check_local,
    collectives,
    compact_size,
    list_collectives,
    mean_over_devices,
    mean_over_hosts,
    mean_over_mesh,
    min_over_mesh,
    sum_over_hosts,
    sum_over_mesh,
    wire_bytes,
)
from prunex_jax.mesh import ALONE, MeshAxes, vary
from tests.helpers.common import MESH
from tests.helpers.mean_cases import AXES, on_mesh

SHAPES = [(1, 4), (2, 2), (4, 1), (2, 3), (1, 1)]


def make_tree(lead, seed=0):
    """Eleven elements: divisible by no number of devices above one."""
    rng = np.random.default_rng(seed)
    return {
        "kernel": rng.normal(size=(*lead, 2, 4)).astype(np.float32),
        "scale": rng.normal(size=lead).astype(np.float32),
        "more": [rng.normal(size=(*lead, 2)).astype(np.float32), None],
    }


def assert_close(found, wanted, tolerance=1e-6):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), found, wanted
    )


@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_every_mean_is_the_mean(shape, check_vma):
    """One program for all, on every mesh, with types tracked or not."""
    tree = make_tree(shape)

    def run(own):
        in_host = mean_over_devices(own, MESH)
        return {
            "mesh mean": mean_over_mesh(own, MESH),
            "hierarchical mean": mean_over_hosts(in_host, MESH),
            "mesh sum": sum_over_mesh(own, MESH),
            "host sum": sum_over_hosts(in_host, MESH),
            "minimum": min_over_mesh(own["scale"], MESH),
            "without a device axis": mean_over_hosts(in_host, MeshAxes("host", None)),
        }

    found = on_mesh(run, shape, check_vma=check_vma)(tree)
    mean = jax.tree.map(lambda x: x.mean((0, 1)), tree)
    assert_close(found["mesh mean"], mean)
    assert_close(found["hierarchical mean"], mean)
    assert_close(found["mesh sum"], jax.tree.map(lambda x: x.sum((0, 1)), tree), 5e-6)
    assert_close(found["host sum"], jax.tree.map(lambda x: x * shape[0], mean), 5e-6)
    assert_close(found["minimum"], tree["scale"].min())
    assert_close(found["without a device axis"], mean)


def test_large_trees_are_summed_in_parts(monkeypatch):
    """Of whole leaves in the order of layers: the same sums, and the same bytes."""
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(1, 4, size)).astype("f4") for size in (3, 5) * 6]
    tree = {"layers": {str(i): layer for i, layer in enumerate(layers)}}
    in_host = functools.partial(on_mesh, shape=(1, 4), out_specs=jax.P("host"))

    def summed():
        program = in_host(lambda own: mean_over_devices(own, MESH))
        listed = list_collectives(program.trace(tree).jaxpr)
        return program(tree), [each.num_elements for each in listed]

    whole, sizes = summed()
    assert sizes == [48]
    monkeypatch.setattr(averaging, "_SUMMED_AT_ONCE", 10)
    parts, sizes = summed()
    # Three layers each, though "10" sorts before "2".
    assert sizes == [11, 13, 11, 13]
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


def test_without_axes_everything_is_its_own_mean():
    tree = make_tree(())
    for fn in (mean_over_mesh, mean_over_hosts, sum_over_mesh, sum_over_hosts):
        assert_close(fn(tree, ALONE), tree, 0)
    assert_close(mean_over_devices(tree, ALONE), tree, 0)
    assert float(min_over_mesh(jnp.float32(3), ALONE)) == 3
    assert_close(vary(tree, (None, "nowhere")), tree, 0)


def test_minimum_of_integers_with_never():
    """The largest int32 stands for "never" and must survive the sum."""
    never = np.iinfo(np.int32).max
    steps = np.full((2, 2), never, np.int32)
    fn = functools.partial(min_over_mesh, axes=MESH)
    assert int(on_mesh(fn, (2, 2))(steps)) == never
    steps[1, 0] = 7
    assert int(on_mesh(fn, (2, 2))(steps)) == 7


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (2, 3)], ids=lambda s: f"{s[1]}")
def test_where_gloo_adds_up_sums_and_bytes_are_those_of_a_scattered_sum(
    shape, dtype, monkeypatch
):
    values = np.random.default_rng(0).integers(-9, 9, (*shape, 11)).astype(dtype)
    found = {}
    for by_gloo in (False, True):
        monkeypatch.setattr(collectives, "_is_summed_by_gloo", lambda on=by_gloo: on)
        program = on_mesh(lambda own: sum_over_mesh(own, MESH), shape)
        listed = list_collectives(jax.make_jaxpr(program)(values))
        kinds = {each.kind for each in listed}
        assert ("exchange" in kinds, "scatter" in kinds) == (by_gloo, not by_gloo)
        sent = wire_bytes(listed, dict(zip(AXES, shape, strict=True)))
        found[by_gloo] = program(values), sent
    (scattered, scattered_bytes), (exchanged, exchanged_bytes) = found.values()
    assert exchanged.dtype == dtype
    np.testing.assert_array_equal(exchanged, values.sum((0, 1)))
    np.testing.assert_array_equal(exchanged, scattered)
    assert exchanged_bytes == scattered_bytes


def test_types_of_a_mixed_tree_come_back():
    tree = {
        "half": np.ones((2, 2, 3), jnp.bfloat16),
        "single": np.full((2, 2, 3), 1 + 2**-12, np.float32),
    }
    found = on_mesh(lambda own: mean_over_mesh(own, MESH), (2, 2))(tree)
    assert found["half"].dtype == jnp.bfloat16
    assert np.all(found["single"] == np.float32(1 + 2**-12)), "rounded to bfloat16"


def test_float16_rounds_what_crosses_hosts_only():
    tree = make_tree((4, 1))
    fn = functools.partial(mean_over_hosts, axes=MESH, wire=Wire("float16"))

    def run(own):
        return fn(own), vary(own["scale"], AXES)[None, None]

    specs = (jax.P(), jax.P(*AXES))
    (mean, _) = on_mesh(run, (4, 1), specs)(tree)
    wanted = jax.tree.map(lambda x: x.mean((0, 1)), tree)
    assert_close(mean, wanted, 2e-3)
    errors = jax.tree.map(lambda a, b: np.abs(a - b).max(), mean, wanted)
    assert max(jax.tree.leaves(errors)) > 1e-6, "nothing was rounded"
    assert mean["kernel"].dtype == np.float32
    single = jax.tree.map(lambda x: x[:1], tree)
    (alone, _) = on_mesh(run, (1, 1), specs)(single)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[0, 0]), alone, single)


def test_float16_does_not_overflow_in_the_sum():
    tree = np.full((4, 1, 3), 60000.0, np.float32)
    fn = functools.partial(mean_over_hosts, axes=MESH, wire=Wire("float16"))
    assert np.all(on_mesh(fn, (4, 1))(tree) == 60000.0)


def test_narrow_trees_are_averaged_as_precisely_as_the_wire_allows():
    """bfloat16 has 8 bits; the wire has 24, and only the result is rounded."""
    rng = np.random.default_rng(0)
    tree = jnp.asarray(rng.normal(size=(3, 1, 500)), jnp.bfloat16)
    mean = on_mesh(lambda own: mean_over_hosts(own, MESH), (3, 1))(tree)
    wanted = jnp.mean(tree.astype(jnp.float32), (0, 1)).astype(jnp.bfloat16)
    assert mean.dtype == jnp.bfloat16
    assert np.mean(mean != wanted) < 0.01, "rounded on the way"


def test_trees_without_leaves_send_nothing():
    def run(own):
        return [
            fn({}, MESH)
            for fn in (
                mean_over_mesh,
                mean_over_hosts,
                sum_over_hosts,
                sum_over_mesh,
                mean_over_devices,
            )
        ], sum_over_mesh(own, MESH)

    empty, _ = on_mesh(run, (2, 2))(np.ones((2, 2), np.float32))
    assert empty == [{}] * 5


def test_gradients_stay_local_behind_vary():
    """`jax.grad` sums over axes along which the parameters do not vary."""
    data = np.arange(4, dtype=np.float32).reshape(2, 2)

    def gradient(axes):
        def run(x):
            own = vary(jnp.ones(()), axes)
            grad = jax.grad(lambda p: p * x)(own)
            check_local(grad, MESH if len(axes) == 2 else MeshAxes("host", None))
            return vary(grad, AXES)[None, None]

        return on_mesh(run, (2, 2), jax.P(*AXES))(data)

    np.testing.assert_array_equal(gradient(AXES), data)
    by_host = np.broadcast_to(data.sum(1, keepdims=True), data.shape)
    np.testing.assert_array_equal(gradient(("host",)), by_host)


@pytest.mark.parametrize(("own", "missing"), [((), "host"), (("host",), "device")])
def test_summed_gradients_are_refused_where_types_tell(own, missing):
    def run(x):
        grad = jax.grad(lambda p: p * x)(vary(jnp.ones(()), own))
        check_local({"w": grad, "none": None}, MESH)
        return mean_over_mesh(grad, MESH)

    data = np.ones((2, 2), np.float32)
    with pytest.raises(UserError, match=f"'{missing}'.*mesh.vary"):
        on_mesh(run, (2, 2))(data)
    assert float(on_mesh(run, (2, 2), check_vma=False)(data)) == 1.0


def _rows(path, axis, size):
    return ChannelSlice(path, axis, np.arange(size)[:, None])


# The rows of "wide" come in fours, as behind a flattened 2x2 map; one is free.
GROUPS = (
    ChannelGroup("g", 6, (_rows("kernel", 1, 6), ChannelSlice(
        "wide", 0, np.arange(24).reshape(6, 4)))),
    ChannelGroup("h", 4, (_rows("kernel", 0, 4),)),
)  # fmt: skip
COMPACT = {"kernel": (4, 6), "wide": (25, 3), "free": (5,)}
LAYOUTS = layouts_of(GROUPS, COMPACT)


def _compact_mean(tree, keep):
    sent = take_channels(tree, LAYOUTS, keep)
    return put_channels(mean_over_hosts(sent, MESH), LAYOUTS, keep), sent


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@pytest.mark.parametrize("counts", [{"g": 6, "h": 4}, {"g": 3, "h": 1}])
def test_compact_mean_is_the_masked_dense_mean(shape, counts):
    rng = np.random.default_rng(3)
    tree = {
        path: rng.normal(size=(shape[0], 1, *size)).astype(np.float32)
        for path, size in COMPACT.items()
    }
    per_host = {k: np.repeat(x, shape[1], 1) for k, x in tree.items()}
    keep = {
        name: np.sort(rng.permutation(size)[: counts[name]]).astype(np.int32)
        for name, size in (("g", 6), ("h", 4))
    }
    sizes = {}

    def run(own):
        own = mean_over_devices(own, MESH)
        mean, sent = _compact_mean(own, keep)
        sizes["sent"] = sum(leaf.size for leaf in jax.tree.leaves(sent))
        return mean

    found = on_mesh(run, shape)(per_host)
    masks = {n: mask_of(keep[n], s) for n, s in (("g", 6), ("h", 4))}
    dense = {k: x.mean((0, 1)) for k, x in tree.items()}
    assert_close(found, mask_channels(dense, LAYOUTS, masks))
    assert sizes["sent"] == compact_size(COMPACT, LAYOUTS, counts)


def test_expanding_what_was_compacted_masks():
    rng = np.random.default_rng(4)
    tree = {p: rng.normal(size=s).astype(np.float32) for p, s in COMPACT.items()}
    keep = {"g": jnp.array([0, 2, 5]), "h": jnp.array([3])}
    back = put_channels(take_channels(tree, LAYOUTS, keep), LAYOUTS, keep)
    masks = {"g": mask_of(keep["g"], 6), "h": mask_of(keep["h"], 4)}
    for path, leaf in mask_channels(tree, LAYOUTS, masks).items():
        np.testing.assert_array_equal(back[path], leaf)
