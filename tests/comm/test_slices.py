"""Trees in slices are cut, put together, averaged and compacted as whole ones are."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.channels import (
    ChannelGroup,
    ChannelSlice,
    layouts_of,
    mask_channels,
    mask_of,
    sum_squares_by_channel,
    take_channels,
)
from prunex_jax.comm import (
    Slicing,
    collectives,
    list_collectives,
    slices,
    slices_of,
    sum_over_slices,
    whole_of,
)
from prunex_jax.mesh import MeshAxes, vary
from tests.helpers.common import make_mesh
from tests.helpers.formulas import slices as formulas

AXES = MeshAxes("host", None, "device")
EVERYWHERE = jax.P()
# Nothing divides: last slices are filled up, and one device has a single number.
SHAPES = {
    "bias": (7,),
    "deep/kernel": (3, 3, 7, 10),
    "deep/scale": (10,),
    "head": (10, 3),
    "square": (5, 5),
    "temperature": (),
}
# Of `deep/kernel`, the longest axis carries channels; of `square`, none does.
GROUPS = [
    ChannelGroup(
        "in",
        7,
        (
            ChannelSlice("bias", 0, np.arange(7)[:, None]),
            ChannelSlice("deep/kernel", 2, np.arange(7)[:, None]),
        ),
    ),
    ChannelGroup(
        "out",
        5,
        tuple(
            ChannelSlice(path, axis, np.arange(10).reshape(2, 5).T)
            for path, axis in (("deep/kernel", 3), ("deep/scale", 0), ("head", 0))
        ),
    ),
]
LAYOUTS = layouts_of(GROUPS, SHAPES)
KEPT = {"in": np.array([0, 3, 6]), "out": np.array([1, 2])}
# Some channels of both groups, all of those along cut axes, and all there are.
CHOICES = {
    "some": KEPT,
    "one group whole": {**KEPT, "out": np.arange(5)},
    "all": {"in": np.arange(7), "out": np.arange(5)},
}
MESHES = [(2, 4), (2, 2), (1, 8), (4, 1)]


@pytest.fixture(params=MESHES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def mesh(request):
    return make_mesh(*request.param)


@pytest.fixture(params=[1, 2**16], ids=["apart", "together"], autouse=True)
def smallest(request, monkeypatch):
    """Every array in a message of its own, or all in one."""
    monkeypatch.setattr(slices, "_SMALL", request.param)


@pytest.fixture
def exchanged(monkeypatch):
    """Sums as between CPU processes, where Gloo's own are not to be trusted."""
    monkeypatch.setattr(collectives, "_is_summed_by_gloo", lambda: True)


def slicing_on(mesh):
    return Slicing(SHAPES, mesh.shape["device"])


def draw(lead=(), seed=0):
    rng = np.random.default_rng(seed)
    return {
        path: rng.normal(size=(*lead, *shape)).astype(np.float32)
        for path, shape in SHAPES.items()
    }


def on_devices(mesh, fn, tree, spec=EVERYWHERE):
    """The function on every device, its results stacked as [hosts, devices, ...]."""
    lead = len(spec)

    def run(tree):
        own = jax.tree.map(lambda x: x.reshape(x.shape[lead:]), tree)
        found = vary(fn(own), ("host", "device"))
        return jax.tree.map(lambda x: x[None, None], found)

    program = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=jax.P("host", "device"))
    )
    return program, jax.device_get(program(tree))


def assert_sent(program, tree, wanted):
    """The program sends this over devices, in whichever order, and nothing else."""
    listed = list_collectives(program.trace(tree).jaxpr)
    found, wanted = (
        sorted(repr(each) for each in part if each.axis_sizes != (1,))
        for part in (listed, wanted)
    )
    assert found == wanted


def assert_everywhere(found, wanted, tolerance=1e-6):
    """Every device has this."""
    for path, leaf in wanted.items():
        for row in found[path].reshape(-1, *leaf.shape):
            np.testing.assert_allclose(row, leaf, atol=tolerance, err_msg=path)


def test_slices_come_together_again(mesh):
    slicing, tree = slicing_on(mesh), draw()
    cut, slices_of = on_devices(mesh, slicing.take, tree)
    assert {p: x.shape[2:] for p, x in slices_of.items()} == slicing.own_shapes
    assert not list_collectives(cut.trace(tree).jaxpr)
    program, found = on_devices(mesh, lambda x: slicing.join(slicing.take(x)), tree)
    assert_everywhere(found, tree, tolerance=0)
    assert_sent(program, tree, formulas.joining(slicing))


def check_means(mesh):
    """Holds means in slices, put together, against those of numpy."""
    slicing = slicing_on(mesh)
    tree = draw((mesh.shape["host"], mesh.shape["device"]))
    spec = jax.P("host", "device")
    program, found = on_devices(
        mesh, lambda x: slicing.join(slicing.mean_of(x)), tree, spec
    )
    for path, leaf in tree.items():
        wanted = np.broadcast_to(leaf.mean(axis=1, keepdims=True), leaf.shape)
        np.testing.assert_allclose(found[path], wanted, atol=1e-6, err_msg=path)
    return program, tree, slicing


def test_slices_of_a_mean_are_the_mean_of_the_host(mesh):
    program, tree, slicing = check_means(mesh)
    assert_sent(program, tree, formulas.averaging(slicing) + formulas.joining(slicing))


def test_parts_that_are_exchanged_have_the_same_mean(exchanged):
    check_means(make_mesh(2, 4))


def test_gradients_by_slices_are_the_mean_of_those_of_devices():
    """Parameters are gathered twice if the backward pass reads them, else once."""
    mesh, shapes = make_mesh(2, 4), {"a": (16, 30), "b": (30, 16), "bias": (16,)}
    slicing, rng = Slicing(shapes, 4), np.random.default_rng(0)
    params = {k: 0.1 * rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    examples = rng.normal(size=(8, 5, 16)).astype(np.float32)

    def loss(params, x):
        hidden = jnp.tanh(x @ params["a"])
        return jnp.mean(
            (hidden @ params["b"] + params["bias"][None]) ** 2
        ), hidden.sum()

    def run(params, x):
        own = vary(slicing.take(params), ("host", "device"))
        (value, more), grads = slicing.value_and_grad(loss)(own, x[0])
        return jax.tree.map(lambda y: y[None, None], (value, more, grads))

    program = jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(jax.P(), jax.P(("host", "device"))),
            out_specs=jax.P("host", "device"),
        )
    )
    value, more, grads = program(params, examples)
    wanted = [jax.value_and_grad(loss, has_aux=True)(params, x) for x in examples]
    np.testing.assert_allclose(value.ravel(), [v for (v, _), _ in wanted], rtol=1e-5)
    np.testing.assert_allclose(more.ravel(), [m for (_, m), _ in wanted], rtol=1e-4)
    for path in shapes:
        found = np.asarray(grads[path])
        of_devices = np.stack([np.asarray(grad[path]) for _, grad in wanted])
        of_hosts = of_devices.reshape(2, 4, *of_devices.shape[1:]).mean(axis=1)
        for rows, mean in zip(found, of_hosts, strict=True):
            np.testing.assert_allclose(rows, slices_of(mean, 4), atol=1e-7)
    again = Slicing({"b": shapes["b"]}, 4)
    sent = (
        formulas.joining(slicing)
        + formulas.joining(again)
        + formulas.averaging(slicing)
    )
    found = list_collectives(program.trace(params, examples).jaxpr)
    assert sorted(map(repr, found)) == sorted(map(repr, sent))
    # The compiler does not make one gather of two, which would keep all of it.
    text = program.lower(params, examples).compile().as_text()
    assert text.count(" all-gather(") == sum(each.kind == "gather" for each in sent)


@pytest.fixture(params=CHOICES)
def kept(request):
    return CHOICES[request.param]


def counts_of(kept):
    return {name: len(indices) for name, indices in kept.items()}


def test_kept_channels_are_slices_of_what_is_left(mesh, kept):
    slicing, tree, counts = slicing_on(mesh), draw(), counts_of(kept)
    layouts = slicing.layouts(LAYOUTS)

    def take(tree):
        return slicing.take_kept(slicing.take(tree), layouts, kept)

    program, found = on_devices(mesh, take, tree)
    own_shapes = slicing.own_kept_shapes(LAYOUTS, counts)
    assert {path: x.shape[2:] for path, x in found.items()} == own_shapes
    sent = formulas.taking(slicing, LAYOUTS, counts)
    assert_sent(program, tree, sent)
    if kept is CHOICES["all"]:
        assert sent == formulas.putting(slicing, LAYOUTS, counts) == []
    # Put together, it is what is left of the whole; whole cut axes stay as they are.
    left = jax.device_get(take_channels(tree, LAYOUTS, kept))
    for path, dim in slicing.dims.items():
        rows = [np.moveaxis(np.atleast_1d(x), dim, 0) for x in found[path][0]]
        wanted = np.moveaxis(np.atleast_1d(left[path]), dim, 0)
        joined = np.concatenate(rows)[: len(wanted)]
        if dim in LAYOUTS.get(path, {}) and len(wanted) == np.shape(tree[path])[dim]:
            layouts_left = {dim: LAYOUTS[path][dim]}
            whole = take_channels(
                {path: np.moveaxis(joined, 0, dim)}, {path: layouts_left}, kept
            )
            joined = np.moveaxis(np.asarray(whole[path]), dim, 0)
        np.testing.assert_array_equal(joined, wanted, err_msg=path)


@pytest.mark.sampled(4)
def test_kept_channels_go_back_where_they_were(mesh, kept):
    slicing, tree, counts = slicing_on(mesh), draw(), counts_of(kept)
    layouts = slicing.layouts(LAYOUTS)
    masks = {
        group.name: mask_of(jnp.asarray(kept[group.name]), group.size)
        for group in GROUPS
    }

    def put(tree):
        taken = slicing.take_kept(slicing.take(tree), layouts, kept)
        return slicing.put_kept(taken, layouts, jax.tree.map(jnp.asarray, kept))

    program, found = on_devices(mesh, put, tree)
    wanted = mask_channels(tree, LAYOUTS, masks)
    _, cut = on_devices(mesh, slicing.take, wanted)
    jax.tree.map(np.testing.assert_array_equal, found, cut)
    _, masked = on_devices(
        mesh, lambda x: mask_channels(slicing.take(x), layouts, masks), tree
    )
    jax.tree.map(np.testing.assert_array_equal, masked, cut)
    sent = formulas.taking(slicing, LAYOUTS, counts) + formulas.putting(
        slicing, LAYOUTS, counts
    )
    assert_sent(program, tree, sent)


def test_scores_of_slices_add_up_to_those_of_the_whole(mesh):
    slicing, tree = slicing_on(mesh), draw()

    def scores(tree):
        own = sum_squares_by_channel(slicing.take(tree), slicing.layouts(LAYOUTS))
        return sum_over_slices(own, AXES)

    _, found = on_devices(mesh, scores, tree)
    assert_everywhere(found, sum_squares_by_channel(tree, LAYOUTS), tolerance=1e-4)


@pytest.mark.sampled(5)
def test_trees_that_hold_parameters_are_cut_too(mesh):
    """As optimizers do; counters, and arrays of other shapes, stay."""
    slicing, tree = slicing_on(mesh), draw()
    held = {"0/mu": tree, "count": np.int32(3), "mask/bias": np.ones(3, np.float32)}
    _, cut = on_devices(mesh, slicing.take_all, held)
    _, wanted = on_devices(mesh, slicing.take, tree)
    jax.tree.map(np.testing.assert_array_equal, cut["0/mu"], wanted)
    _, found = on_devices(mesh, lambda x: slicing.join_all(slicing.take_all(x)), held)
    for row in found["count"].ravel():
        assert row == 3
    assert_everywhere(found["0/mu"], tree, tolerance=0)
    assert_everywhere({"x": found["mask/bias"]}, {"x": held["mask/bias"]})


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_slices_on_hosts_are_those_of_devices(parts):
    for path, leaf in draw().items():
        rows = slices_of(leaf, parts)
        own = Slicing(SHAPES, parts).own_shapes[path]
        assert rows.shape == (parts, *own)
        np.testing.assert_array_equal(whole_of(rows, leaf.shape), leaf)
    mesh = make_mesh(1, 4)
    _, found = on_devices(mesh, slicing_on(mesh).take, draw())
    for path, leaf in draw().items():
        np.testing.assert_array_equal(found[path][0], slices_of(leaf, 4))


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_slices_are_nearly_equal_parts(parts):
    """An axis is filled up by less than a position for every device."""
    for shape in [(64, 3), (1000,), (3, 3, 45, 37), (50257, 768)]:
        own = Slicing({"x": shape}, parts).own_shapes["x"]
        filled = math.prod(own) * parts
        assert filled < math.prod(shape) * (1 + parts / max(shape))
