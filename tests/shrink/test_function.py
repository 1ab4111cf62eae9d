"""Shrunk functions: the same under every transformation, type and batch size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.channels import trace_channels
from prunex_jax.mesh import vary
from prunex_jax.shrink import make_cut
from tests.helpers import networks
from tests.helpers.channel_checks import (
    DENSITIES,
    assert_equal_results,
    assert_exact,
    compiled,
    draw,
    gradient_errors,
    outputs_and_gradients,
    project,
    random_masks,
    relative_error,
)
from tests.helpers.common import assert_close

X = draw({"x": (8, 3)}, seed=1)["x"]
IMAGES = draw({"x": (4, 6, 6, 3)}, seed=2)["x"]
TOLERANCE = 1e-5

SHAPES = {"in": (3, 12), "bias": (12,), "mid": (12, 10), "out": (10, 2)}


def mlp(p, x):
    h = jax.nn.relu(x @ p["in"] + p["bias"][None])
    h = h * lax.rsqrt(jnp.square(h).mean(1, keepdims=True) + 1e-3)
    return jax.nn.gelu(h @ p["mid"]) @ p["out"]


def cut_of(apply, params, *inputs, statistics=None, density=0.5, **options):
    trace = trace_channels(apply, params, *inputs, statistics=statistics, **options)
    assert trace.groups
    masks = random_masks(trace.groups, density, np.random.default_rng(0))
    return make_cut(trace, masks, params, statistics)


def shrunk(apply=mlp, shapes=SHAPES, *inputs, **options):
    """What is cut, the shrunk function, masked and shrunk parameters."""
    params = draw(shapes)
    cut = cut_of(apply, params, *(inputs or (X,)), **options)
    return cut, cut.function(apply), cut.mask(params), cut.take(params)


def assert_same(cut, apply, small, masked, smaller, *inputs):
    outputs, grads = compiled(functools.partial(outputs_and_gradients, apply))(
        masked, *inputs
    )
    results = compiled(functools.partial(outputs_and_gradients, small))(
        smaller, *inputs
    )
    assert_equal_results((outputs, (cut.take(grads[0]), *grads[1:])), results, "")


@pytest.mark.slow
def test_other_batch_sizes_than_the_traced_one():
    cut, small, masked, smaller = shrunk()
    for size in (1, 3, 17):
        x = draw({"x": (size, 3)}, seed=size)["x"]
        assert_same(cut, mlp, small, masked, smaller, x)


def test_shapes_can_be_evaluated_without_values():
    _, small, _, smaller = shrunk()
    shapes = jax.eval_shape(lambda p: p, smaller)
    out = jax.eval_shape(small, shapes, jax.ShapeDtypeStruct((5, 3), jnp.float32))
    assert out.shape == (5, 2)


def loss(apply, params, x):
    return project(apply(params, x))


def batched(apply, params, x):
    return jax.vmap(apply, (None, 0))(params, x.reshape(4, 2, 3))


def batched_over_parameters(apply, params, x):
    pair = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    return jax.vmap(apply, (0, None))(pair, x)


def curvature(apply, params, x):
    """A Hessian times a vector that is zero wherever the parameters are."""
    slope = jax.grad(functools.partial(loss, apply))
    return jax.jvp(lambda p: slope(p, x), (params,), (params,))[1]


def twice_reversed(apply, params, x):
    slope = jax.grad(lambda x: loss(apply, params, x))
    return jax.grad(lambda x: jnp.square(slope(x)).sum())(x)


def remat(apply, params, x):
    return jax.grad(lambda p: loss(jax.checkpoint(apply), p, x))(params)


def forward_mode(apply, params, x):
    return jax.jacfwd(lambda x: apply(params, x))(x)


def scanned(apply, params, x):
    step = lambda total, row: (total + apply(params, row), total)  # noqa: E731
    return lax.scan(step, jnp.zeros((1, 2)), x[:, None])


def in_while(apply, params, x):
    body = lambda carry: (carry[0] + 1, apply(params, x) + 0.1 * carry[1])  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 3, body, (0, jnp.zeros((8, 2))))[1]


def eager(apply, params, x):
    return apply(params, x)


def over_devices(apply, params, x):
    """The gradient of the mean over eight devices, as a training step has it."""
    mesh = jax.make_mesh((8,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("device")), out_specs=(P(), P())
    )
    def step(params, x):
        def mean(params):
            total = jnp.square(apply(params, x)).sum()
            return lax.psum(total, "device") / 16

        return jax.value_and_grad(mean)(params)

    return step(params, x)


def varying_over_devices(apply, params, x):
    """Each device has gradients of its own, which are then summed up."""
    mesh = jax.make_mesh((8,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("device")), out_specs=P()
    )
    def step(params, x):
        own = vary(params, ("device",))
        grads = jax.grad(lambda p: jnp.square(apply(p, x)).sum())(own)
        return lax.psum(grads, "device")

    return step(params, x)


PATTERNS = {
    "reversed": lambda p, x: jax.nn.relu(x @ p["w"])[:, np.arange(8)[::-1]] @ p["o"],
    "shuffled": lambda p, x: (
        jax.nn.relu(x @ p["w"]).reshape(-1, 2, 4).swapaxes(1, 2).reshape(-1, 8) @ p["o"]
    ),
    "set": lambda p, x: jnp.tanh(x @ p["w"]).at[..., :4].set(0.0) @ p["o"],
    "added": lambda p, x: (x @ p["w"]).at[:, 0].add(1.0) @ p["o"],
    "segments": lambda p, x: (
        jax.ops.segment_sum(
            jnp.tanh(x @ p["w"]), jnp.arange(x.shape[0]) // 2, num_segments=1
        )
        @ p["o"]
    ),
    "recurrent": lambda p, x: (
        lax.scan(
            lambda state, row: (jnp.tanh(row @ p["w"]), row @ p["w"]), jnp.zeros(8), x
        )[1]
        @ p["o"]
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_constants_and_loops_are_cut_inside_of_shard_map(name):
    """Constants have no types of a mesh there, and loops from zeros have others."""
    apply, keys = PATTERNS[name], jax.random.split(jax.random.key(2), 3)
    params = {
        "w": jax.random.normal(keys[0], (5, 8)),
        "o": jax.random.normal(keys[1], (8, 3)),
    }
    x = jax.random.normal(keys[2], (4, 5))
    trace = trace_channels(apply, params, x[:2])
    masks = {group.name: np.arange(group.size) % 2 == 0 for group in trace.groups}
    cut = make_cut(trace, masks, params)
    small = cut.function(apply)

    def total(params, x):
        return jnp.sum(small(params, x) ** 2)

    mesh = jax.make_mesh((2,), ("device",), (jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P("device")), "out_specs": (P("device"), P())}

    def on_mesh(params, x):
        value, grads = jax.value_and_grad(total)(params, x)
        return value[None], grads  # Which jax has summed.

    values, grads = jax.jit(jax.shard_map(on_mesh, mesh=mesh, **specs))(
        cut.take(params), x
    )
    parts = x.reshape(2, 2, 5)
    masked = cut.mask(params)
    wanted = [float(jnp.sum(apply(masked, part) ** 2)) for part in parts]
    np.testing.assert_allclose(values, wanted, rtol=1e-5)
    alone = [jax.grad(total)(cut.take(params), part) for part in parts]
    assert_close(grads, jax.tree.map(jnp.add, *alone), 1e-5)


TRANSFORMATIONS = {
    fn.__name__: fn
    for fn in (
        eager,
        loss,
        batched,
        batched_over_parameters,
        curvature,
        twice_reversed,
        remat,
        forward_mode,
        scanned,
        in_while,
        over_devices,
        varying_over_devices,
    )
}
OF_PARAMETERS = {"curvature", "remat", "over_devices", "varying_over_devices"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_masked_equals_shrunk_under_transformations(name):
    cut, small, masked, smaller = shrunk()
    transform = TRANSFORMATIONS[name]
    wrap = (lambda fn: fn) if name == "eager" else jax.jit
    expected = wrap(lambda p: transform(mlp, p, X))(masked)
    result = wrap(lambda p: transform(small, p, X))(smaller)
    if name in OF_PARAMETERS:
        expected = cut.take(expected)
    assert relative_error(expected, result) < 1e-4


def masked_heads(p, x):
    """What is dead has a value known while running, and shares by a sum above zero."""
    h = x @ p["in"] + p["bias"][None]
    h = h - h.mean(1, keepdims=True)
    h = h * lax.rsqrt(jnp.square(h).mean(1, keepdims=True) + 1e-3)
    seen = jnp.arange(10) < 6
    scores = jnp.where(seen[None, None], (h @ p["mid"])[:, None] * p["heads"], -1e30)
    terms = jnp.exp(scores - lax.stop_gradient(scores.max(2, keepdims=True)))
    shares = terms / jnp.maximum(terms.sum(2, keepdims=True), 0.5)
    return jnp.einsum("nhs,hso->no", shares, p["values"])


MASKED_HEADS = {
    **{"in": (3, 12), "bias": (12,), "mid": (12, 10)},
    **{"heads": (1, 4, 1), "values": (4, 10, 2)},
}


@pytest.mark.parametrize("transform", [over_devices, varying_over_devices])
def test_what_dead_channels_share_varies_over_a_mesh(transform):
    cut, small, masked, smaller = shrunk(masked_heads, MASKED_HEADS)
    assert {group.size for group in cut.groups} >= {12, 4}
    expected = jax.jit(lambda p: transform(masked_heads, p, X))(masked)
    result = jax.jit(lambda p: transform(small, p, X))(smaller)
    assert relative_error(cut.take(expected), result) < 1e-4


def test_functions_that_close_over_traced_values():
    cut, _, masked, smaller = shrunk()

    def run(apply_of, params, scale):
        apply = apply_of(lambda p, x: scale * mlp(p, x))
        return project(apply(params, scale * X))

    both = [
        jax.jit(jax.value_and_grad(functools.partial(run, apply_of), argnums=1))
        for apply_of in (lambda apply: apply, cut.function)
    ]
    for scale in (1.5, -0.5):
        expected, result = both[0](masked, scale), both[1](smaller, scale)
        assert relative_error(expected, result) < TOLERANCE


def test_a_function_is_traced_once_for_inputs_of_one_shape():
    counts = []

    def counted(p, x):
        counts.append(x.shape)
        return mlp(p, x)

    _, _, _, smaller = shrunk()
    small = cut_of(mlp, draw(SHAPES), X).function(counted)
    for size in (8, 8, 2, 8, 2):
        small(smaller, X[:size])
    assert counts == [(8, 3), (2, 3)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision(dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), draw(SHAPES))
    cut = cut_of(mlp, params, X.astype(dtype))
    small, smaller = cut.function(mlp), cut.take(params)
    out = small(smaller, X.astype(dtype))
    assert out.dtype == dtype
    expected = mlp(cut.mask(params), X.astype(dtype))
    assert relative_error(expected, out) < 4 * float(jnp.finfo(dtype).eps)
    # Types may be others than those that were traced.
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (smaller, params))
    expected = mlp(cut.mask(wide[1]), X)
    assert relative_error(expected, small(wide[0], X)) < TOLERANCE


def test_inputs_may_be_numbers_keys_and_trees():
    def apply(p, batch, key, step):
        h = p["embed"][batch["ids"]] + p["where"][None, step][None]
        kept = jax.random.bernoulli(key, 0.7, h.shape)
        return (jnp.where(kept, h, 0.0) @ p["out"], batch["ids"]), key

    params = draw({"embed": (7, 8), "where": (3, 8), "out": (8, 2)})
    inputs = {"ids": jnp.array([[1, 6, 0], [2, 2, 5]])}, jax.random.key(3), 2
    cut = cut_of(apply, params, *inputs)
    small = jax.jit(cut.function(apply))
    (out, ids), key = small(cut.take(params), *inputs)
    (expected, _), _ = apply(cut.mask(params), *inputs)
    assert relative_error(expected, out) < TOLERANCE
    assert (ids == inputs[0]["ids"]).all() and key == inputs[1]


# Every channel is kept, or one of each group.


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", networks.CASES)
def test_nothing_changes_where_all_channels_are_kept(name):
    apply, shapes, _, inputs = networks.CASES[name]
    params = draw(shapes)
    cut = make_cut(trace_channels(apply, params, *inputs), {}, params)
    assert all(mask.all() for mask in cut.masks.values())
    functions = [apply, cut.function(apply)]
    a, b = (
        compiled(functools.partial(outputs_and_gradients, fn))(params, *inputs)
        for fn in functions
    )
    for one, other in zip(*map(jax.tree.leaves, (a[0], b[0])), strict=True):
        np.testing.assert_array_equal(one, other)
    # Terms of gradients may be added up in another order.
    assert relative_error(a[1], b[1]) < 1e-6
    for one, other in zip(
        *map(jax.tree.leaves, (params, cut.take(params))), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", networks.CASES)
def test_a_single_channel_may_be_left_of_every_group(name):
    apply, shapes, _, inputs = networks.CASES[name]
    assert_exact(apply, draw(shapes), *inputs, densities=(0.0,))


def test_nothing_may_be_left_of_a_part():
    """Of a group that is cut into two, one part may lose all of its channels."""

    def apply(p, x):
        left, right = jnp.split(x @ p["a"], 2, axis=1)
        both = jnp.concatenate([jnp.cos(left), jnp.tanh(right[:, ::-1])], axis=1)
        pooled = jnp.square(left).sum(1, keepdims=True) + (left @ left.T)[:, :1]
        return both @ p["b"] + pooled

    def last(groups, density, rng):
        return {group.name: np.arange(group.size) >= 5 for group in groups}

    shapes = {"a": (3, 8), "b": (8, 2)}
    trace = assert_exact(apply, draw(shapes), X, densities=(0.5,), make_masks=last)
    assert [group.size for group in trace.groups] == [8]


# Training mode: batch statistics.

NORMED = {
    "conv": (3, 3, 3, 8),
    "norm": {"scale": (8,), "bias": (8,)},
    "depth": (3, 3, 1, 8),
    "out": (8, 2),
}
STATISTICS = {"norm": {"mean": (8,), "var": (8,)}, "seen": ()}


def conv(x, kernel, groups=1):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=layout,
        feature_group_count=groups,
    )


def rest_of(p, x, mean, var):
    wide = lambda v: v[None, None, None]  # noqa: E731
    x = (x - wide(mean)) * lax.rsqrt(wide(var) + 1e-5) * wide(p["norm"]["scale"])
    x = jax.nn.relu(x + wide(p["norm"]["bias"]))
    return jax.nn.relu(conv(x, p["depth"], 8)).mean((1, 2)) @ p["out"]


def infer(p, s, x):
    return rest_of(p, conv(x, p["conv"]), s["norm"]["mean"], s["norm"]["var"])


def train(p, s, x):
    x = conv(x, p["conv"])
    mean = x.mean((0, 1, 2))
    var = jnp.square(x).mean((0, 1, 2)) - jnp.square(mean)
    new = {"mean": mean, "var": var}
    moved = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, s["norm"], new)
    return rest_of(p, x, mean, var), {"norm": moved, "seen": s["seen"] + 1}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("traced", ["inference", "training"])
def test_both_modes_are_shrunk_whichever_was_traced(traced):
    params, statistics = draw(NORMED), draw(STATISTICS)
    if traced == "inference":
        cut = cut_of(infer, params, IMAGES, statistics=statistics)
    else:
        options = {"statistics": statistics, "returns_statistics": True}
        cut = cut_of(train, params, IMAGES, **options)
    (group,) = cut.groups
    assert {m.path for m in group.statistics} == {"norm/mean", "norm/var"}
    masked, smaller = cut.mask(params), cut.take(params)
    state = cut.take_statistics(statistics)
    assert state["norm"]["mean"].shape == (4,) and state["seen"] == statistics["seen"]

    small = cut.function(infer, returns_statistics=False)
    expected = outputs_and_gradients(infer, masked, statistics, IMAGES)
    outputs, (grads, by_state, *rest) = expected
    by_state = cut.take_statistics(by_state)
    assert_equal_results(
        (outputs, (cut.take(grads), by_state, *rest)),
        outputs_and_gradients(small, smaller, state, IMAGES),
        "in inference",
    )
    small = cut.function(train, returns_statistics=True)
    (outputs, new), (grads, by_state, *rest) = outputs_and_gradients(
        train, masked, statistics, IMAGES
    )
    expected = outputs, cut.take_statistics(new)
    grads = cut.take(grads), cut.take_statistics(by_state), *rest
    # Statistics of dead channels are outputs too, but none of them are left.
    results = outputs_and_gradients(small, smaller, state, IMAGES)
    assert relative_error(expected, results[0]) < TOLERANCE
    by_outputs = [
        outputs_and_gradients(lambda *a, fn=fn: fn(*a)[0], p, s, IMAGES)[1]
        for fn, p, s in ((train, masked, statistics), (small, smaller, state))
    ]
    for path, error in gradient_errors(
        cut.take(by_outputs[0][0]), by_outputs[1][0]
    ).items():
        assert error < 1e-4, path


def test_several_training_steps_of_both_end_alike():
    params, statistics = draw(NORMED), draw(STATISTICS)
    cut = cut_of(infer, params, IMAGES, statistics=statistics)
    optimizer = optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))

    def trained(apply, params, statistics, finish):
        @jax.jit
        def step(params, statistics, state, x):
            def loss(params):
                out, new = apply(params, statistics, x)
                return project(jnp.tanh(out)), new

            grads, statistics = jax.grad(loss, has_aux=True)(params)
            updates, state = optimizer.update(grads, state, params)
            return finish(optax.apply_updates(params, updates)), statistics, state

        state = optimizer.init(params)
        for seed in range(3):
            x = draw({"x": (4, 6, 6, 3)}, seed=seed)["x"]
            params, statistics, state = step(params, statistics, state, x)
        return params, statistics, state

    masked = trained(train, cut.mask(params), statistics, cut.mask)
    small = cut.function(train, returns_statistics=True)
    smaller = trained(
        small, cut.take(params), cut.take_statistics(statistics), lambda p: p
    )
    expected = cut.take(masked[0]), cut.take_statistics(masked[1]), cut.take(masked[2])
    assert jax.tree.structure(expected) == jax.tree.structure(smaller)
    for one, other in zip(*map(jax.tree.leaves, (expected, smaller)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-5)


# What is cut with the parameters.


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3),
        optax.sgd(0.1, momentum=0.9),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3), optax.ema(0.9)),
        optax.multi_transform(
            {"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)},
            {"in": "a", "bias": "b", "mid": "a", "out": "b"},
        ),
        optax.adafactor(1e-3, min_dim_size_to_factor=128),
        optax.inject_hyperparams(optax.adamw)(1e-3),
    ],
    ids="adamw momentum chain multi_transform adafactor injected".split(),
)
def test_optimizer_states_are_cut_like_parameters(optimizer):
    cut, _, _, smaller = shrunk()
    params = draw(SHAPES, seed=5)
    _, state = optimizer.update(params, optimizer.init(params), params)
    taken = cut.take(state)
    expected = optimizer.init(smaller)
    assert jax.tree.structure(taken) == jax.tree.structure(expected)
    for (path, one), other in zip(
        flatten_by_path(taken).items(), jax.tree.leaves(expected), strict=True
    ):
        assert (np.shape(one), jnp.asarray(one).dtype) == (
            np.shape(other),
            jnp.asarray(other).dtype,
        ), path
    full, small = flatten_by_path(state), flatten_by_path(taken)
    for path in full:
        if path.endswith("mid"):
            first, second = (cut.keep_indices[name] for name in ("in", "mid"))
            rows = full[path][first][:, second] if full[path].ndim == 2 else full[path]
            np.testing.assert_array_equal(small[path], rows)


def test_a_tree_with_a_leaf_of_another_size_is_refused():
    cut, _, _, smaller = shrunk()
    with pytest.raises(UserError, match=r"nu/mid has shape .* parameter mid, whose"):
        cut.take({"nu": {"mid": smaller["mid"]}})


# What is refused.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {**p, "mid": draw(SHAPES)["mid"]}, r"mid has shape \(12, "),
        (lambda p: {**p, "bias": p["bias"][:2]}, r"parameter bias .* with `take`"),
        (lambda p: {k: v for k, v in p.items() if k != "out"}, "parameters .* out is "),
        (lambda p: {**p, "more": X}, "tree of parameters is not .* more is in one of"),
    ],
    ids=["full", "short", "missing", "more"],
)  # fmt: skip
def test_parameters_that_are_not_what_is_left_are_refused(change, message):
    _, small, _, smaller = shrunk()
    with pytest.raises(UserError, match=message):
        small(change(smaller), X)


def test_statistics_that_are_not_what_is_left_are_refused():
    params, statistics = draw(NORMED), draw(STATISTICS)
    cut = cut_of(infer, params, IMAGES, statistics=statistics)
    small = cut.function(infer)
    with pytest.raises(UserError, match=r"statistic norm/.* \(8,\), and \(4,\) is"):
        small(cut.take(params), statistics, IMAGES)


def runs_after_cosine(p, x):
    h = jax.nn.relu(x @ p["in"] + p["bias"][None])
    return lax.cumsum(jnp.cos(h @ p["mid"]), 1)[:, :2] + h @ p["mid"] @ p["out"]


def adds_reversed(p, x):
    h = x @ p["in"] + p["bias"][None]
    return jax.nn.relu((h + h[:, ::-1]) @ p["mid"]) @ p["out"]


def returns_hidden(p, x):
    h = jax.nn.relu(x @ p["in"] + p["bias"][None])
    return h, jax.nn.relu(h @ p["mid"]) @ p["out"]


@pytest.mark.parametrize("other", [runs_after_cosine, adds_reversed, returns_hidden])
def test_another_function_that_ties_dead_channels_to_kept_ones_is_refused(other):
    cut, _, _, smaller = shrunk()
    message = r"a channel that is dead .* cannot be cut .*; trace the channels of this"
    with pytest.raises(UserError, match=message) as caught:
        cut.function(other)(smaller, X)
    if other is runs_after_cosine:
        line = other.__code__.co_firstlineno + 2
        assert f"cumsum: runs along it at {__file__}:{line}" in str(caught.value)


def test_another_function_that_does_not_is_shrunk():
    """It may leave parameters out, and tie channels that all live or all die."""

    def features(p, x):
        return (jax.nn.relu(x @ p["in"] + p["bias"][None]) ** 2).sum(1)

    cut, _, masked, smaller = shrunk()
    assert_same(cut, features, cut.function(features), masked, smaller, X)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"stem": np.ones(12, bool)}, "a mask for channel group 'stem' and no such"),
        ({"in": np.ones(9, bool)}, r"in has shape \(9,\) and should have \(12,\)"),
        (
            {"in": np.zeros(12, bool)},
            "in keeps no channel, which leaves no network",
        ),
    ],
)
def test_masks_that_do_not_fit_are_refused(masks, message):
    params = draw(SHAPES)
    trace = trace_channels(mlp, params, X)
    with pytest.raises(UserError, match=message):
        make_cut(trace, masks, params)


def test_groups_without_a_mask_stay_whole():
    params = draw(SHAPES)
    trace = trace_channels(mlp, params, X)
    (first, second) = (group.name for group in trace.groups)
    cut = make_cut(trace, {second: np.arange(10) < 3}, params)
    smaller = cut.take(params)
    assert smaller["mid"].shape == (12, 3) and cut.masks[first].all()
    assert_same(cut, mlp, cut.function(mlp), cut.mask(params), smaller, X)


def test_what_is_dead_is_zero_after_masking_and_gone_after_taking():
    params = draw(SHAPES)
    for density in DENSITIES:
        cut = cut_of(mlp, params, X, density=density)
        masked, smaller = cut.mask(params), cut.take(params)
        for path, leaf in flatten_by_path(masked).items():
            alive = np.ones(leaf.shape, bool)
            for group in cut.groups:
                for member in group.members:
                    if member.path == path:
                        dead = member.positions[~cut.masks[group.name]].ravel()
                        index = [slice(None)] * leaf.ndim
                        index[member.axis] = dead
                        alive[tuple(index)] = False
            assert (np.asarray(leaf)[~alive] == 0).all()
            np.testing.assert_array_equal(
                np.asarray(params[path])[alive], np.ravel(smaller[path])
            )


@pytest.mark.parametrize(
    ("mask", "value"),
    [([0, 2, 5, 7], "2"), ([-0.5, 0.5, 1.0, -1.0], "-0.5"), ([1, 1, 0, np.nan], "nan")],
)
def test_masks_are_no_positions_and_no_scores(mask, value):
    params = {"in": jnp.ones((3, 4)), "out": jnp.ones((4, 2))}
    apply = lambda params, x: jnp.tanh(x @ params["in"]) @ params["out"]  # noqa: E731
    trace = trace_channels(apply, params, jnp.ones((1, 3)))
    with pytest.raises(UserError, match=rf"group in has the value {value}; give True"):
        make_cut(trace, {"in": np.array(mask)}, params)
    same = [
        make_cut(trace, {"in": np.array([1, 0, 1, 1], dtype)}, params).masks["in"]
        for dtype in (bool, np.int32, np.float32)
    ]
    assert all(found.tolist() == [True, False, True, True] for found in same)


@pytest.mark.parametrize("name", ["reversed", "shuffled"])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f])
def test_networks_that_communicate_read_constants_inside_of_shard_map(name, wrap):
    """Compiled or not; their constants are told to differ as what they meet does."""

    def apply(p, x):
        h = x @ p["w"]
        mean = lax.pmean(jnp.square(h).mean(0, keepdims=True), "device")
        return PATTERNS[name]({**p, "w": jnp.eye(8)}, h / (1 + mean))

    def together(p, x):
        return jax.vmap(lambda x: apply(p, x), axis_name="device")(x)

    keys = jax.random.split(jax.random.key(3), 3)
    params = {
        "w": jax.random.normal(keys[0], (5, 8)),
        "o": jax.random.normal(keys[1], (8, 3)),
    }
    x = jax.random.normal(keys[2], (2, 3, 5))
    trace = trace_channels(together, params, x)
    assert [group.size for group in trace.groups] == [8]
    masks = {group.name: np.arange(group.size) % 3 != 1 for group in trace.groups}
    cut = make_cut(trace, masks, params)
    mesh = jax.make_mesh((2,), ("device",), (jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P("device")), "out_specs": P("device")}
    on_mesh = wrap(jax.shard_map(cut.function(apply), mesh=mesh, **specs))
    found = on_mesh(cut.take(params), x.reshape(6, 5)).reshape(2, 3, 3)
    np.testing.assert_allclose(found, together(cut.mask(params), x), rtol=1e-5)
