"""PacTrain: scores by the book, dead weights stay dead, and packing only when safe."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import shapes_by_path
from prunex_jax.channels import trace_channels
from prunex_jax.comm import dense_size, list_collectives, wire_bytes
from prunex_jax.mesh import ALONE, MeshAxes, vary
from prunex_jax.methods import (
    Recipe,
    make_method,
    method_config,
    pactrain,
)
from prunex_jax.methods.pactrain import (
    ChannelPacking,
    PactrainConfig,
    WeightPacking,
    grasp_pattern,
    magnitude_pattern,
)
from prunex_jax.methods.pactrain.method import hosts_agree
from prunex_jax.models import make_model
from prunex_jax.models.settings import ModelConfig
from prunex_jax.shrink import trace_model
from prunex_jax.sparsity import CountLimits, uniform_keep_counts
from prunex_jax.train.build.config import resolve_config
from tests.helpers.common import MESH, make_mesh
from tests.helpers.formulas.means import mesh_sum
from tests.helpers.formulas.methods import formulas_of

AXES = ("host", "device")
REPLICATED = jax.P()
MESHES = [(1, 4), (2, 2), (4, 1)]
QUICK = {"xla_backend_optimization_level": 0}
SIZES = (5, 8, 6, 3)
NUM_IMAGES = 32


def apply(params, x):
    """Three layers; sigmoids have curvature everywhere."""
    x = jax.nn.sigmoid(x @ params["a"]["kernel"] + params["a"]["bias"][None])
    x = jax.nn.sigmoid(x @ params["b"]["kernel"])
    return x @ params["c"]["kernel"] + params["c"]["bias"][None]


def forward(params, batch):
    return apply(params, batch["x"])


def objective(logits, batch):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


def loss_fn(params, batch, temperature):
    return objective(forward(params, batch) / temperature, batch)


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    params = {}
    for name, sizes in zip("abc", itertools.pairwise(SIZES), strict=True):
        params[name] = {"kernel": rng.normal(size=sizes).astype(np.float32)}
    params["a"]["bias"] = rng.normal(size=SIZES[1]).astype(np.float32)
    params["c"]["bias"] = rng.normal(size=SIZES[3]).astype(np.float32)
    return params


PARAMS = make_params()
SHAPES = shapes_by_path(PARAMS)
GROUPS = trace_channels(apply, PARAMS, jnp.ones((2, SIZES[0]))).groups
HALF = {group.name: group.size // 2 for group in GROUPS}
ALL = {group.name: group.size for group in GROUPS}
PACKINGS = {
    "channels": ChannelPacking(GROUPS, HALF, SHAPES),
    "weights": WeightPacking(0.4, SHAPES),
}
WHOLE = {
    "all channels": ChannelPacking(GROUPS, ALL, SHAPES),
    "all weights": WeightPacking(1.0, SHAPES),
}


def make_batch(seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(NUM_IMAGES, SIZES[0])).astype(np.float32)
    return {"x": x, "y": rng.integers(0, SIZES[-1], NUM_IMAGES).astype(np.int32)}


BATCH = make_batch()


def on_mesh(shape, fn, in_specs, out_specs=REPLICATED):
    run = jax.shard_map(
        fn, mesh=make_mesh(*shape), in_specs=in_specs, out_specs=out_specs
    )
    return jax.jit(run, compiler_options=QUICK)


@functools.cache
def pattern_on(shape, name, temperature=2.0):
    def body(batch):
        cuts = np.array_split(np.arange(len(batch["y"])), 2)
        parts = [jax.tree.map(lambda x, cut=cut: x[cut], batch) for cut in cuts]
        return grasp_pattern(
            loss_fn, PARAMS, parts, PACKINGS[name],
            axes=MESH, temperature=temperature,
        )  # fmt: skip

    return jax.tree.map(np.asarray, on_mesh(shape, body, (jax.P(AXES),))(BATCH))


@functools.cache
def scores_by_the_book(temperature=2.0):
    """-w (H g) per entry of a kernel, from the whole Hessian; zeros for vectors."""
    flat, split = ravel_pytree(PARAMS)
    is_kernel = ravel_pytree(
        jax.tree.map(lambda x: np.full(x.shape, x.ndim > 1), PARAMS)
    )[0]

    def loss(flat):
        return loss_fn(split(flat), BATCH, temperature)

    flow = np.where(is_kernel, jax.grad(loss)(flat), 0)
    bend = np.asarray(jax.hessian(loss)(flat)) @ flow
    return split(jnp.asarray(np.where(is_kernel, -flat * bend, 0), jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_weights_of_highest_grasp_score_are_removed(shape):
    scores = scores_by_the_book()
    flat = np.concatenate([np.ravel(scores[name]["kernel"]) for name in "abc"])
    kept = pattern_on(shape, "weights")
    removed = np.setdiff1d(np.arange(flat.size), kept)
    assert len(kept) == round(0.4 * flat.size)
    assert flat[kept].max() < flat[removed].min(), "not the highest were removed"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_channels_of_highest_grasp_score_are_removed(shape):
    scores = scores_by_the_book()
    by_channel = {
        "a": np.sum(scores["a"]["kernel"], 0) + np.sum(scores["b"]["kernel"], 1),
        "b": np.sum(scores["b"]["kernel"], 0) + np.sum(scores["c"]["kernel"], 1),
    }
    kept = pattern_on(shape, "channels")
    assert kept.keys() == HALF.keys()
    for name, positions in kept.items():
        wanted = np.sort(np.argsort(by_channel[name[0]])[: HALF[name]])
        np.testing.assert_array_equal(positions, wanted)


def test_temperature_matters():
    """Dividing logits by 200 is not a scale of the score alone."""
    hot, cold = pattern_on((2, 2), "weights", 200.0), pattern_on((2, 2), "weights", 0.3)
    assert set(hot) != set(cold)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PACKINGS)
def test_masked_parameters_say_what_was_kept(name):
    packing, pattern = PACKINGS[name], pattern_on((2, 2), name)
    masked = packing.mask(PARAMS, pattern)
    found = magnitude_pattern(masked, packing)
    jax.tree.map(np.testing.assert_array_equal, found, pattern)
    found = packing.unpack(packing.pack(PARAMS, pattern), pattern, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, found, masked)
    packed = packing.pack(PARAMS, pattern)
    assert sum(x.size for x in jax.tree.leaves(packed)) == packing.num_kept
    dead = sum(int(np.sum(x == 0)) for x in jax.tree.leaves(masked))
    assert dead == dense_size(SHAPES) - packing.num_kept > 0


def draw(lead, seed=5):
    rng = np.random.default_rng(seed)
    return {
        name: {
            leaf: rng.normal(size=lead + x.shape).astype(np.float32)
            for leaf, x in leaves.items()
        }
        for name, leaves in PARAMS.items()
    }


@functools.cache
def step_program(shape, name, packed):
    packing = {**PACKINGS, **WHOLE}[name]
    tx = pactrain(packing, axes=MESH)

    def body(grads, state):
        own = jax.tree.map(lambda g: g[0, 0], grads)
        direction, state = tx.update(own, state, packed=packed, unheard_of=1)
        held = jax.tree.map(lambda x: vary(x, AXES)[None, None], direction)
        return direction, state, held

    out = (jax.P(), jax.P(), jax.P(*AXES))
    return tx.init, on_mesh(shape, body, (jax.P(*AXES), jax.P()), out)


def step_on(shape, name, grads, packed=True, state=None):
    """(direction, state, what every device holds of the direction)."""
    init, step = step_program(shape, name, packed)
    return step(grads, init(PARAMS) if state is None else state)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "tracking"])
@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", PACKINGS)
def test_direction_is_the_mean_of_living_gradients(name, shape, packed):
    packing, grads = PACKINGS[name], draw(shape)
    direction, state, _ = step_on(shape, name, grads, packed)
    mean = jax.tree.map(lambda g: g.mean((0, 1)), grads)
    wanted = packing.mask(mean, state.pattern)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), direction, wanted
    )
    jax.tree.map(  # exact zeros, and no others
        lambda a, b: np.testing.assert_array_equal(a == 0, b == 0), direction, wanted
    )
    assert int(state.age) == (0 if packed else 1)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "tracking"])
@pytest.mark.parametrize("name", WHOLE)
def test_with_nothing_pruned_it_is_dense(name, packed):
    grads = draw((2, 2))
    direction, _, _ = step_on((2, 2), name, grads, packed)
    for leaf, g in zip(*map(jax.tree.leaves, (direction, grads)), strict=True):
        np.testing.assert_allclose(leaf, g.mean((0, 1)), atol=1e-6)


def test_dead_weights_stay_zero_whatever_comes_after():
    """Weight decay, momentum and Adam of exact zeros are exact zeros."""
    for name, packing in PACKINGS.items():
        pattern = pattern_on((2, 2), name)
        start = packing.mask(PARAMS, pattern)
        for inner in (
            optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, 0.9, True)),
            optax.adamw(0.1, weight_decay=0.1),
        ):
            tx = optax.chain(pactrain(packing), inner)
            params, state = start, tx.init(start)
            for step in range(4):
                updates, state = tx.update(draw((), step), state, params)
                params = optax.apply_updates(params, updates)
            for now, before in zip(*map(jax.tree.leaves, (params, start)), strict=True):
                np.testing.assert_array_equal(np.asarray(now) == 0, before == 0)
                assert np.any(now != before), "nothing was trained"


@pytest.mark.parametrize("structure", PACKINGS)
def test_preparation_clears_the_momentum_of_what_dies(structure):
    """A method before this one may leave momentum behind."""
    config = PactrainConfig(structure=structure, density=0.4)
    method = make_method(
        Recipe(
            method_config("pactrain", pactrain=config), optax.sgd(0.1, 0.9),
            optax.constant_schedule(0.1), GROUPS, HALF, SHAPES, ALONE,
        )
    )  # fmt: skip
    state = jax.tree.map(
        lambda x: x + 1 if x.dtype == jnp.float32 else x, method.transform.init(PARAMS)
    )
    prepare = method.preparation.run
    params, state = prepare(forward, objective, PARAMS, state, [BATCH])
    dead = jax.tree.map(lambda x: np.asarray(x) == 0, params)
    assert sum(int(x.sum()) for x in jax.tree.leaves(dead)) > 20
    updates, _ = method.transform.update(draw(()), state, params)
    for update, is_dead in zip(*map(jax.tree.leaves, (updates, dead)), strict=True):
        np.testing.assert_array_equal(np.asarray(update) == 0, is_dead)


def differing_state(shape, packing, odd_host):
    """A state that passes as replicated, and is another one on one host."""
    mesh = make_mesh(*shape)
    usual = pactrain(packing).init(PARAMS)
    odd = usual._replace(pattern=jax.tree.map(lambda x: x.at[-1].add(1), usual.pattern))
    sharding = jax.sharding.NamedSharding(mesh, jax.P())
    odd_devices = set(mesh.devices[odd_host])

    def place(leaf, other):
        parts = [
            jax.device_put(other if device in odd_devices else leaf, device)
            for device in mesh.devices.ravel()
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)

    return jax.tree.map(place, usual, odd)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("name", PACKINGS)
def test_tracker_starts_again_while_a_host_differs(name, shape):
    packing, grads = PACKINGS[name], draw(shape)
    state = pactrain(packing).init(PARAMS)
    for step in range(3):
        assert (int(state.age) >= 2) == (step >= 2)
        _, state, _ = step_on(shape, name, grads, False, state)
    for odd_host in range(shape[0]):
        odd = differing_state(shape, packing, odd_host)._replace(age=state.age)
        _, odd, held = step_on(shape, name, grads, False, odd)
        assert int(odd.age) == 0
        for leaf in jax.tree.leaves(held):
            rows = np.asarray(leaf).reshape(shape[0] * shape[1], -1)
            assert np.all(rows == rows[:1]), "not dense: hosts got different directions"


@pytest.mark.slow
def test_patterns_differ_in_fingerprint_if_in_anything():
    rows = jnp.asarray(
        [[1, 2, 3], [1, 2, 4], [2, 1, 3], [0, 2, 3], [1, 3, 2], [1, 2, 3]], jnp.int32
    )
    both = jax.vmap(  # hosts that vmap simulates, two at a time
        lambda x: hosts_agree({"g": x}, MeshAxes("host", None)), axis_name="host"
    )
    for i in range(6):
        for j in range(6):
            same = bool(np.array_equal(rows[i], rows[j]))
            assert both(rows[np.array([i, j])]).tolist() == [same, same]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
def test_ternary_mean_is_unbiased_and_few_valued(shape):
    packing, grads = PACKINGS["channels"], draw(shape)
    tx = pactrain(packing, is_ternary=True, axes=MESH)
    start = tx.init(PARAMS)

    def body(grads):
        own = jax.tree.map(lambda g: g[0, 0], grads)

        def step(state, _):
            direction, state = tx.update(own, state)
            return state, ravel_pytree(packing.pack(direction, start.pattern))[0]

        return jax.lax.scan(step, start, length=4000)[1]

    found = np.asarray(on_mesh(shape, body, (jax.P(*AXES),))(grads))
    of_hosts = jax.vmap(lambda g: ravel_pytree(packing.pack(g, start.pattern))[0])(
        jax.tree.map(lambda g: g.mean(1), grads)
    )
    scale, mean = np.abs(of_hosts).max(), of_hosts.mean(0)
    values = found * shape[0] / scale
    np.testing.assert_allclose(values, np.round(values), atol=1e-5)
    assert np.abs(values).max() <= shape[0] + 1e-5
    noise = scale / np.sqrt(shape[0] * len(found))
    assert np.abs(found.mean(0) - mean).max() < 4 * noise, "biased"
    assert found.std(0).min() > 0, "nothing was drawn"
    slope = np.dot(found.mean(0), mean) / np.dot(mean, mean)
    assert abs(slope - 1) < 3 * noise / np.linalg.norm(mean), "small values are drawn"


def test_ternary_values_are_bytes_between_hosts():
    packing, mesh_shape = PACKINGS["channels"], {"host": 4, "device": 2}
    tx = pactrain(packing, is_ternary=True, axes=MESH)

    def body(grads):
        own = jax.tree.map(lambda g: g[0, 0], grads)
        return tx.update(own, tx.init(PARAMS))[0]

    run = on_mesh((4, 2), body, (jax.P(*AXES),))
    listed = list_collectives(run.trace(draw((4, 2))).jaxpr)
    sent = [c for c in listed if c.axes == ("host",) and c.dtype == "int8"]
    assert [c.num_elements for c in sent] == [-(-packing.num_kept // 2)]
    others = [c for c in listed if c not in sent and c.axes == ("host",)]
    assert sum(c.num_elements for c in others) == 4, "one scale per device of the mesh"
    assert wire_bytes(sent, mesh_shape)["host"] < packing.num_kept * 1.6


def resnet_recipe(name, **settings):
    model = make_model(ModelConfig(name=name), (32, 32, 3), 10)
    trace = trace_model(model)
    limits = CountLimits({group.name: group.size for group in trace.groups})
    return Recipe(
        method_config("pactrain", **settings), optax.sgd(0.1),
        optax.constant_schedule(0.1), trace.groups, uniform_keep_counts(limits, 0.5),
        trace.shapes,
    )  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["resnet20", "resnet18", "resnet50"])
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 0.26),
        ({"wire_dtype": "int8"}, 0.07),
        ({"pactrain": PactrainConfig(is_ternary=True)}, 0.07),
    ],
    ids=["float32", "int8", "ternary"],
)
def test_half_of_the_channels_is_a_quarter_of_the_bytes(name, settings, most):
    recipe, mesh_shape = resnet_recipe(name, **settings), {"host": 4, "device": 2}
    method = make_method(recipe)
    dense = wire_bytes(mesh_sum(dense_size(recipe.shapes), mesh_shape), mesh_shape)
    ours = wire_bytes(formulas_of(recipe).step(mesh_shape), mesh_shape)
    assert 0 < ours["host"] / dense["host"] <= most
    if name != "resnet20":
        return

    def body(grads):
        own = jax.tree.map(lambda g: vary(g, AXES), grads)
        state = method.transform.init(grads)
        return method.transform.update(own, state, grads)[0]

    tree = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32)
        for path, shape in recipe.shapes.items()
    }
    traced = on_mesh((4, 2), body, (jax.P(),)).trace(tree)
    assert wire_bytes(list_collectives(traced.jaxpr), mesh_shape) == ours


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("pactrain", "density", 0.0),
        ("pactrain", "score_batches", 0),
        ("pactrain", "stable_steps", -1),
        ("importance", "density", 1.5),
        ("importance", "num_choosers", 0),
        ("importance", "refresh_period", 0),
        ("importance", "damping", -1.0),
    ],
)
def test_settings_have_ranges(section, key, value):
    values = {"run": {"steps": 1}, "method": {section: {key: value}}}
    with pytest.raises(UserError, match=f"config.method.{section}.{key}={value}"):
        resolve_config(values)


@pytest.mark.slow
def test_bad_settings_are_refused():
    with pytest.raises(UserError, match="density 0 is outside"):
        WeightPacking(0.0, SHAPES)
    ternary = PactrainConfig(is_ternary=True)
    recipe = resnet_recipe("resnet20", pactrain=ternary, wire_dtype="int8")
    with pytest.raises(UserError, match="wire_dtype='int8': ternary values"):
        make_method(recipe)
    tx = pactrain(PACKINGS["weights"], is_ternary=True, axes=MeshAxes("host", None))
    grads = jax.tree.map(lambda x: np.zeros((128, *x.shape), np.float32), PARAMS)
    with pytest.raises(UserError, match="ternary values of 128 hosts"):
        run = jax.vmap(lambda g: tx.update(g, tx.init(PARAMS))[0], axis_name="host")
        jax.eval_shape(run, grads)
