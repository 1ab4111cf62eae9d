"""PowerSGD is its paper's listing, conserves gradients, and treats matrices alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path, shapes_by_path
from prunex_jax.comm import Wire, dense_size, wire_bytes
from prunex_jax.mesh import MeshAxes, enter, leave, specs_of, vary
from prunex_jax.methods import (
    Recipe,
    low_rank,
    method_config,
    powersgd,
)
from prunex_jax.methods.powersgd import POWERSGD_PLACEMENTS, PowersgdConfig
from prunex_jax.models import make_model
from prunex_jax.models.settings import ModelConfig
from prunex_jax.train.build.config import resolve_config
from tests.helpers.common import MESH, make_mesh
from tests.helpers.formulas.means import mesh_sum
from tests.helpers.formulas.methods import formulas_of

AXES = ("host", "device")
QUICK = {"xla_backend_optimization_level": 0}
# A kernel, two matrices of one shape, their transpose, and what is no matrix.
SHAPES = {
    "conv": (3, 3, 2, 10),
    "dense": [(7, 4), (7, 4)],
    "wide": (4, 7),
    "bias": (5,),
    "scale": (),
}
# Rounding of float32, for numbers of the order of ten.
TIGHT = {"rtol": 1e-5, "atol": 2e-5}


def draw(seed, lead=(), shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(size=lead + shape).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@functools.cache
def programs(shape, settings):
    """Its two programs on a mesh, compiled once for all tests."""
    tx, specs = powersgd(**dict(settings), axes=MESH), specs_of(POWERSGD_PLACEMENTS)

    def init(grads):
        state = tx.init(jax.tree.map(lambda g: g[0, 0], grads))
        state = state._replace(residual=vary(state.residual, AXES[:1]))
        return leave(POWERSGD_PLACEMENTS, state)

    def update(grads, state):
        own = jax.tree.map(lambda g: g[0, 0], grads)
        direction, state = tx.update(own, enter(POWERSGD_PLACEMENTS, state))
        return direction, leave(POWERSGD_PLACEMENTS, state)

    def on_mesh(fn, in_specs, out_specs):
        run = jax.shard_map(
            fn, mesh=make_mesh(*shape), in_specs=in_specs, out_specs=out_specs
        )
        return jax.jit(run, compiler_options=QUICK)

    batch = jax.P(*AXES)
    return on_mesh(init, batch, specs), on_mesh(
        update, (batch, specs), (jax.P(), specs)
    )


def run(shape, grads, queries=None, **settings):
    """(direction, state) after every step; grads lead with [steps, hosts, devices]."""
    settings = {"min_gain": 0, **settings}
    init, step = programs(shape, tuple(sorted(settings.items())))
    state = init(at(grads, 0))
    if queries is not None:
        state = state._replace(queries=queries)
    seen = []
    for number in range(len(jax.tree.leaves(grads)[0])):
        direction, state = step(at(grads, number), state)
        seen.append(jax.tree.map(np.asarray, (direction, state)))
    return seen


def start_of(params, rank):
    """Queries before the first step."""
    return jax.tree.map(np.asarray, powersgd(rank, min_gain=0).init(params).queries)


def at(grads, step):
    return jax.tree.map(lambda g: g[step], grads)


def assert_close(found, wanted, what="", **tolerance):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, err_msg=what, **(tolerance or TIGHT))


def host_means(grads, step):
    """Mean gradient of every host, [hosts, ...]."""
    return jax.tree.map(lambda g: g[step].mean(1), grads)


@pytest.fixture(scope="module")
def grads():
    return draw(1, (4, 4, 2))


def with_awkward_steps(grads):
    """The second step has no gradients, the third only of rank one."""

    def change(g):
        g = g.copy()
        g[1] = 0
        if g.ndim > 5:
            g[2] *= 1e-3
        elif g.ndim > 4:
            g[2] = g[2, :1, :1, :, :1] * g[2, :1, :1, :1, :]
        return g

    return jax.tree.map(change, grads)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (1, 8)], ids=str)
def test_full_rank_is_dense(grads, shape):
    """At any rank of the gradients, and whatever the queries have become."""
    grads = with_awkward_steps(grads)
    grads = jax.tree.map(lambda g: g.reshape(4, *shape, *g.shape[3:]), grads)
    for step, (direction, state) in enumerate(run(shape, grads, rank=99)):
        mean = jax.tree.map(lambda g, step=step: g[step].mean((0, 1)), grads)
        assert_close(direction, mean, f"step {step}")
        assert max(np.abs(r).max() for r in jax.tree.leaves(state.residual)) < 1e-5


def as_matrix(x):
    return x.reshape(-1, x.shape[-1]).astype(np.float64)


def reference(grads, rank, queries):
    """Algorithms 1 and 2 of the paper in numpy, for one leaf, [steps, hosts, ...].

    The listing has M of every host in [outputs, inputs], and its error with the mean
    approximation. Returns directions, and errors with the host's own approximation.
    """
    errors = np.zeros(grads.shape[1:])
    own_errors = np.zeros(grads.shape[1:])
    found = []
    for grad in grads:
        updates = grad + errors
        p = np.mean([as_matrix(m).T @ queries for m in updates], axis=0)
        p, _ = np.linalg.qr(p)
        factors = np.mean([as_matrix(m) @ p for m in updates], axis=0)
        direction = (factors @ p.T).reshape(grad.shape[1:])
        errors = updates - direction
        own = grad + own_errors
        sent = np.stack([(as_matrix(m) @ p @ p.T).reshape(m.shape) for m in own])
        own_errors = own - sent
        queries = factors
        found.append((direction, own_errors, errors))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
def test_is_the_listing_of_the_paper(grads, rank):
    """Over four steps and hosts, with queries that the listing does not scale."""
    start = start_of(draw(0), rank)
    seen = run((4, 2), grads, rank=rank)
    places = [("conv", "18x10", 0), ("dense/0", "7x4", 0), ("dense/1", "7x4", 1)]
    for path, name, row in places:
        leaf = flatten_by_path(grads)[path].mean(2)
        query = np.asarray(start[name][row], np.float64)
        wanted = reference(leaf, rank, query)
        for step, (direction, state) in enumerate(seen):
            want, held_back, errors = wanted[step]
            assert_close(flatten_by_path(direction)[path], want, path)
            residual = flatten_by_path(state.residual)[path]
            assert_close(residual, held_back, path)
            # The listing's own errors have the same mean, and only it is ever sent.
            assert_close(residual.mean(0), errors.mean(0), path)


@pytest.mark.slow
def test_what_comes_in_is_sent_or_held_back(grads):
    """Per host: gradient + residual before = its part of the direction + after."""
    before = jax.tree.map(lambda g: np.zeros_like(g[0, :, 0]), grads)
    for step, (direction, state) in enumerate(run((4, 2), grads, rank=2)):
        came_in = jax.tree.map(np.add, host_means(grads, step), before)
        sent = jax.tree.map(np.subtract, came_in, state.residual)
        assert_close(jax.tree.map(lambda s: s.mean(0), sent), direction)
        for host in range(4):
            # What a host sends lies in the space that all agreed on.
            own = as_matrix(sent["conv"][host])
            _, _, space = np.linalg.svd(as_matrix(direction["conv"]))
            space = space[:2]
            assert_close(own @ space.T @ space, own, f"host {host}")
            assert_close(own, as_matrix(came_in["conv"][host]) @ space.T @ space)
        for leaf in ("bias", "scale"):
            assert not state.residual[leaf].any(), "a vector was held back"
        before = state.residual
    assert np.linalg.norm(before["conv"]) > 1, "nothing was held back at all"


def test_directions_catch_up_with_the_gradients():
    """The mean direction tends to the mean gradient: what is held back is bounded."""
    constant = draw(3, (1, 2, 1), {"w": (6, 8)})
    grads = jax.tree.map(lambda g: np.repeat(g, 60, 0), constant)
    seen = run((2, 1), grads, rank=1)
    mean = constant["w"][0].mean((0, 1))
    far = [
        np.linalg.norm(np.mean([d["w"] for d, _ in seen[:n]], axis=0) - mean)
        for n in (5, 60)
    ]
    assert far[1] < 0.2 * far[0], "the gap falls as one over the number of steps"
    held_back = [np.linalg.norm(state.residual["w"], axis=(1, 2)) for _, state in seen]
    assert np.max(held_back[30:]) < 1.2 * np.max(held_back[:30])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(12, 9), (9, 12), (3, 3, 4, 10)], ids=str)
def test_warm_start_finds_the_best_approximation(shape):
    """Without residuals, steps on one matrix are subspace iterations."""
    rng = np.random.default_rng(5)
    rows, cols = np.prod(shape[:-1]), shape[-1]
    left, _ = np.linalg.qr(rng.normal(size=(rows, min(rows, cols))))
    right, _ = np.linalg.qr(rng.normal(size=(cols, min(rows, cols))))
    values = 2.0 ** -np.arange(min(rows, cols))
    best = (left[:, :2] * values[:2]) @ right[:, :2].T
    grads = np.float32((left * values) @ right.T).reshape(shape)
    tx = powersgd(2, min_gain=0, axes=MeshAxes("host", None))

    @functools.partial(jax.vmap, axis_name="host")
    def repeat(grads):
        def step(state, _):
            direction, after = tx.update(grads, state)
            return after._replace(residual=state.residual), direction

        return jax.lax.scan(step, tx.init(grads), length=20)[1]

    found = np.asarray(repeat(jnp.stack([grads, grads])))[0].reshape(20, rows, cols)
    gaps = np.linalg.norm(found - best, axis=(1, 2))
    assert gaps[-1] < 1e-5, "not the best approximation of rank two"
    assert gaps[0] > 0.01, "found at once: the queries knew it"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rank", [1, 2])
def test_equal_shapes_are_treated_alone(rank):
    """Three matrices in one batch, of very different size, against each by itself."""
    shapes = {"a": (6, 5), "b": (6, 5), "c": (2, 3, 5)}
    grads = draw(6, (3, 2, 1), shapes)
    grads["b"] *= 1e4
    grads["c"] *= 1e-4
    together = run((2, 1), grads, rank=rank)
    start = start_of(draw(0, (), shapes), rank)
    assert list(start) == ["6x5"]
    for row, (name, leaf) in enumerate(grads.items()):
        own = {"6x5": start["6x5"][row : row + 1]}
        alone = run((2, 1), {name: leaf}, queries=own, rank=rank)
        for (direction, state), (want, wanted) in zip(together, alone, strict=True):
            tolerance = {"rtol": 1e-4, "atol": 1e-5 * np.abs(leaf).max()}
            assert_close(direction[name], want[name], name, **tolerance)
            residual = state.residual[name]
            assert_close(residual, wanted.residual[name], name, **tolerance)
            assert_close(state.queries["6x5"][row], wanted.queries["6x5"][0], name)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_bases_are_orthonormal_each_alone(rank, size):
    rng = np.random.default_rng(rank)
    given = rng.normal(size=(5, 7, rank)).astype(np.float32) * np.float32(size)
    given[1] = 0
    given[2] = given[2, :, :1]  # equal columns
    given[3, :, 0] = 0
    found = np.asarray(low_rank.orthonormal(given))
    for matrix, basis in zip(given, found, strict=True):
        np.testing.assert_allclose(basis.T @ basis, np.eye(rank), atol=1e-6)
        scaled = matrix / size
        np.testing.assert_allclose(basis @ (basis.T @ scaled), scaled, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (2, 1)], ids=str)
def test_devices_of_a_host_change_nothing(shape):
    """Two hosts with the same gradients, spread over one, two or four devices."""
    grads = with_awkward_steps(draw(8, (4, 2, 4)))
    wanted = run((2, 4), grads, rank=2)
    split = jax.tree.map(
        lambda g: g.reshape(4, *shape, -1, *g.shape[3:]).mean(3), grads
    )
    for (direction, state), (want, end) in zip(
        run(shape, split, rank=2), wanted, strict=True
    ):
        assert_close(direction, want)
        assert_close(state.residual, end.residual)


def test_zero_gradients_lose_nothing():
    """No NaN, no direction; queries stay, and dead rows do not blind them."""
    rng = np.random.default_rng(9)
    grads = np.zeros((6, 2, 1, 5, 8), np.float32)
    grads[2:, :, :, 3:] = rng.normal(size=(8,))  # rank one, first rows dead
    seen = run((2, 1), {"w": grads}, rank=1)
    start = start_of({"w": grads[0, 0, 0]}, 1)["5x8"]
    for direction, state in seen[:2]:
        assert not direction["w"].any() and not state.residual["w"].any()
        assert_close(state.queries["5x8"], start)
    for direction, _ in seen[2:]:
        assert_close(direction["w"], grads[2, 0, 0])


@pytest.mark.slow
def test_a_query_that_sees_nothing_recovers():
    """Its products are zero; a spare direction finds what there is."""
    grad = np.zeros((2, 5, 8), np.float32)
    grad[:, 3:, 4:] = 1
    tx = powersgd(1, min_gain=0, axes=MeshAxes("host", None))
    blind = jnp.zeros((1, 8, 1)).at[0, 0, 0].set(1.0)

    @functools.partial(jax.vmap, axis_name="host")
    def steps(grad):
        state = tx.init(grad)._replace(queries={"5x8": blind})
        first, state = tx.update(grad, state)
        second, state = tx.update(grad, state)
        return first + second, state.residual

    sent, residual = steps(grad)
    assert_close(sent, 2 * grad)
    assert np.abs(residual).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16", "int8"])
def test_narrow_wires_hold_back_the_same_and_lose_nothing_on_average(wire_dtype):
    """Gradient + residual before = what a host meant to send + after, at every step.

    The mean of what hosts meant to send is the direction, but for the rounding of one
    message, which neither grows nor keeps a sign: it is unbiased.
    """
    constant = draw(11, (1, 4, 2), {"w": (12, 8), "b": (5,)})
    grads = jax.tree.map(lambda g: np.repeat(g, 60, 0), constant)
    seen = run((4, 2), grads, rank=2, wire=Wire(wire_dtype))
    spacing = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "int8": 2.0**-6}[wire_dtype]
    before = np.zeros((4, 12, 8), np.float32)
    gaps = []
    for step, (direction, state) in enumerate(seen):
        came_in = host_means(grads, step)["w"] + before
        before = state.residual["w"]
        meant = came_in - before
        gaps.append(direction["w"] - meant.mean(0))
        assert np.abs(gaps[-1]).max() < 2 * spacing * np.abs(came_in).max()
        assert not state.residual["b"].any()
    assert np.abs(gaps).max() > 0, "nothing was rounded"
    spread = np.std(gaps, axis=0) / np.sqrt(len(gaps))
    assert np.all(np.abs(np.mean(gaps, axis=0)) < 5 * spread + 1e-6), "biased"
    mean = np.mean([direction["b"] for direction, _ in seen], axis=0)
    size = np.abs(constant["b"]).max()
    np.testing.assert_allclose(
        mean, constant["b"].mean((0, 1, 2)), atol=spacing * size / 3
    )


@pytest.mark.slow
def test_buckets_change_nothing(grads):
    whole = run((4, 2), grads, rank=2)
    cut = run((4, 2), grads, rank=2, wire=Wire(bucket_bytes=64))
    assert_close(cut, whole)


def test_kernels_are_outputs_against_the_rest():
    """A kernel whose outputs are multiples of one filter is sent exactly at rank 1."""
    rng = np.random.default_rng(10)
    filter_ = rng.normal(size=(2, 1, 3, 3, 4, 1))
    grads = np.float32(filter_ * rng.normal(size=(12,)))[None]
    same = np.repeat(grads[:, :1], 2, axis=1)
    ((direction, state),) = run((2, 1), {"w": same}, rank=1)
    assert_close(direction["w"], same[0, 0, 0])
    assert np.abs(state.residual["w"]).max() < 1e-5
    views = {
        (3, 3, 64, 128): (576, 128),  # convolution
        (7, 7, 3, 64): (147, 64),  # stem
        (1, 1, 64, 256): (64, 256),
        (3, 3, 1, 64): (9, 64),  # depthwise
        (512, 10): (512, 10),
        (768, 12, 64): (768, 768),  # attention, to the heads
        (12, 64, 768): (768, 768),  # and back
    }
    for shape, want in views.items():
        view = low_rank.view_of(shape, 2)
        assert (view.rows, view.cols) == want
    for shape in [(), (5,), (0, 4)]:
        assert low_rank.view_of(shape, 2) is None


def test_leaves_are_factored_where_it_pays():
    plan = low_rank.make_plan([(64, 64), (8, 4), (4,)], rank=2, min_gain=2.0)
    assert [at for _, at in plan.batches] == [(0,)] and plan.whole == (1, 2)
    ((view, _),) = plan.batches
    assert view.gain == 64 * 64 / (2 * 128)
    everything = low_rank.make_plan([(64, 64), (8, 4), (4,)], rank=9, min_gain=0)
    assert [view.rank for view, _ in everything.batches] == [9, 4]
    assert everything.whole == (2,)


@pytest.mark.slow
def test_types_come_back_and_residuals_are_wide():
    grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.bfloat16), draw(2, (2, 2, 2)))
    seen = run((2, 2), grads, rank=1)
    for direction, state in seen:
        assert {x.dtype for x in jax.tree.leaves(direction)} == {np.dtype(jnp.bfloat16)}
        assert {x.dtype for x in jax.tree.leaves(state.residual)} == {
            np.dtype(np.float32)
        }


def test_nothing_but_vectors_or_nothing_but_matrices():
    for shapes in ({"a": (3,)}, {"a": (3, 4)}):
        grads = draw(2, (1, 2, 2), shapes)
        ((direction, _),) = run((2, 2), grads, rank=9)
        assert_close(direction["a"], grads["a"][0].mean((0, 1)))


def test_refuses_what_means_nothing():
    for arguments in ({"rank": 0}, {"rank": 1, "min_gain": -1.0}):
        with pytest.raises(UserError, match="powersgd got rank"):
            powersgd(**arguments)
    for key, value in (("rank", 0), ("min_gain", -1.0)):
        with pytest.raises(UserError, match=f"method.powersgd.{key}"):
            resolve_config({"run": {"steps": 1}, "method": {"powersgd": {key: value}}})

    def summed_already(x):
        def loss(w):
            return jnp.sum(w * x)

        tx = powersgd(1, min_gain=0, axes=MESH)
        w = jnp.ones((2, 2))
        return tx.update(jax.grad(loss)(w), tx.init(w))[0]

    fn = jax.shard_map(
        summed_already, mesh=make_mesh(2, 2), in_specs=jax.P(*AXES), out_specs=jax.P()
    )
    with pytest.raises(UserError, match="summed"):
        jax.eval_shape(fn, jnp.ones((4, 4)))


@pytest.mark.slow
def test_untyped_shard_map_gives_the_same(grads):
    """Users' own loops may say check_vma=False."""
    tx = powersgd(2, min_gain=0, axes=MESH)
    (want, _), *_ = run((4, 2), grads, rank=2)

    def body(grad):
        own = jax.tree.map(lambda g: g[0, 0], grad)
        return tx.update(own, tx.init(own), unheard_of=1)[0]

    fn = jax.shard_map(
        body, mesh=make_mesh(4, 2), in_specs=jax.P(*AXES), out_specs=jax.P(),
        check_vma=False,
    )  # fmt: skip
    first = jax.tree.map(lambda g: g[0], grads)
    assert_close(jax.jit(fn, compiler_options=QUICK)(first), want)


# Elements of dense over those of PowerSGD, as the paper has them for this network.
PAPER_RATIOS = {1: 243, 2: 136, 4: 72}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rank", PAPER_RATIOS)
@pytest.mark.parametrize("shape", [(8, 1), (4, 8)], ids=str)
def test_bytes_of_resnet18(rank, shape):
    """ResNet-18 on CIFAR-10: at most 1/100 of hierarchical dense at rank 2."""
    model = make_model(ModelConfig(name="resnet18", stem="cifar"), (32, 32, 3), 10)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    shapes = shapes_by_path(params)
    recipe = Recipe(
        config=method_config("powersgd", powersgd=PowersgdConfig(rank=rank)),
        inner=optax.sgd(0.1),
        learning_rate=optax.constant_schedule(0.1),
        groups=(),
        keep_counts={},
        shapes=shapes,
    )
    mesh_shape = dict(zip(AXES, shape, strict=True))
    sent = wire_bytes(formulas_of(recipe).step(mesh_shape), mesh_shape)
    dense = wire_bytes(mesh_sum(dense_size(shapes), mesh_shape), mesh_shape)
    ratio = dense["host"] / sent["host"]
    assert ratio == pytest.approx(PAPER_RATIOS[rank], abs=0.5)
    if rank == 2:
        assert ratio >= 100
