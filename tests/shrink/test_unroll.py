"""Stacks taken apart: the same function, with channels of its own for every layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from prunex_jax.base.errors import UserError
from prunex_jax.base.jaxprs import inner_programs
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.channels import trace_channels
from prunex_jax.shrink import certify, make_cut, unroll_stacks
from tests.helpers.zoo import NETWORKS

DEPTH, WIDTH, INNER = 3, 4, 6


def normal(*shape, seed=0):
    draw = np.random.default_rng((seed, *shape)).normal(size=shape)
    return jnp.asarray(draw / 2, jnp.float32)


def layer(x, p):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def stack(*outer):
    return {"up": normal(*outer, WIDTH, INNER), "down": normal(*outer, INNER, WIDTH)}


def turn(x, p):
    return layer(x, p), None


def plain(p, x):
    return lax.scan(turn, x, p["layers"])[0] @ p["head"]


def backwards(p, x):
    """From the last layer to the first; what it stacks is read by another loop."""
    x, seen = lax.scan(
        lambda x, p: (layer(x, p), x), x, p["layers"], reverse=True, unroll=2
    )
    gate = lambda x, row: (x + row[0] * jnp.sum(row[1]["down"]), x.mean())  # noqa: E731
    x, means = lax.scan(gate, x, (seen[::-1], p["layers"]))
    return x @ p["head"] + means.sum()


def nested(p, x):
    blocks = lambda x, p: (lax.scan(turn, x, p)[0], None)  # noqa: E731
    return lax.scan(blocks, x, p["layers"])[0] @ p["head"]


def nested_then_some(p, x):
    """One inner stack once more, by itself."""
    again = jax.tree.map(lambda w: w[1], p["layers"])
    return nested(p, lax.scan(turn, x, again)[0])


def twice(p, x):
    """Shared by two loops, one the other way round; the first layer by itself too."""
    x, _ = lax.scan(turn, x, p["layers"])
    x, _ = lax.scan(turn, x, jax.tree.map(lambda w: w[::-1], p["layers"]))
    return layer(x, jax.tree.map(lambda w: w[0], p["layers"])) @ p["head"]


def in_parts(p, x):
    """The first layers in one loop, the others in another, in two ways."""
    x, _ = lax.scan(turn, x, jax.tree.map(lambda w: w[:1], p["layers"]))
    x, _ = lax.scan(turn, x, jax.tree.map(lambda w: w[1:], p["layers"]))
    x, _ = lax.scan(turn, x, jax.tree.map(lambda w: w[::2], p["layers"]))
    first, rest = lax.split(p["layers"]["up"], (2, 1), 0), p["layers"]["down"][:2]
    x, _ = lax.scan(turn, x, {"up": first[0], "down": rest})
    return x @ p["head"]


def prepared(p, x):
    """Layers on the last axis; scaled, laid out beside others, reshaped."""
    up = jnp.moveaxis(p["layers"]["up"], -1, 0) * 1.5
    down = jnp.exp(p["layers"]["down"].transpose(2, 0, 1)).reshape(-1, 2, 3, WIDTH)
    more = jnp.concatenate([up, -up[..., None][:, :, :, 0]])
    both = {"up": more, "down": jnp.concatenate([down, down[::-1]])}
    step = lambda x, p: (layer(x, {**p, "down": p["down"].reshape(INNER, -1)}), None)  # noqa: E731
    return lax.scan(step, x, both)[0] @ p["head"]


def rematerialised(p, x):
    loop = jax.checkpoint(jax.jit(lambda p, x: lax.scan(jax.checkpoint(turn), x, p)[0]))
    return loop(p["layers"], x) @ p["head"]


def over_time(p, x):
    """Layers are looped over inside a loop over inputs."""

    def step(state, row):
        out, _ = lax.scan(turn, 0.3 * row + state, p["layers"])
        return jnp.tanh(out), out.sum()

    state, sums = lax.scan(step, jnp.zeros(WIDTH), x)
    return state @ p["head"] + sums.sum()


def read_whole(p, x):
    """An operation that mixes layers, which are put together for it."""
    return plain(p, x + jnp.cumsum(p["layers"]["up"], 0).sum((0, 2))[None])


def in_branches(p, x):
    branch = lambda sign: lambda p, x: lax.scan(turn, sign * x, p)[0]  # noqa: E731
    x = lax.cond(x[0, 0] > 0, branch(1), branch(-1), p["layers"], x)
    enough = lambda turns_and_x: turns_and_x[0] < 2  # noqa: E731
    more = lambda s: (s[0] + 1, lax.scan(turn, s[1], p["layers"])[0])  # noqa: E731
    return lax.stop_gradient(lax.while_loop(enough, more, (0, x))[1]) + x


def with_keys(p, x):
    """What is looped over beside the layers: keys, inputs, numbers."""
    keys = jax.random.split(jax.random.key(1), DEPTH)

    def step(x, row):
        p, key, number = row
        return layer(x + number * jax.random.normal(key, x.shape), p), None

    return lax.scan(step, x, (p["layers"], keys, jnp.arange(3.0)))[0] @ p["head"]


PARAMS = {"layers": stack(DEPTH), "head": normal(WIDTH, 2)}
NESTED = {"layers": stack(2, DEPTH), "head": normal(WIDTH, 2)}
LAST = {
    "layers": {"up": normal(WIDTH, INNER, 3), "down": normal(INNER, WIDTH, 3)},
    "head": normal(WIDTH, 2),
}
CASES = {
    "plain": (plain, PARAMS),
    "backwards": (backwards, PARAMS),
    "nested": (nested, NESTED),
    "nested_then_some": (nested_then_some, NESTED),
    "twice": (twice, PARAMS),
    "in_parts": (in_parts, PARAMS),
    "prepared": (prepared, LAST),
    "rematerialised": (rematerialised, PARAMS),
    "over_time": (over_time, PARAMS),
    "read_whole": (read_whole, PARAMS),
    "in_branches": (in_branches, PARAMS),
    "with_keys": (with_keys, PARAMS),
}


QUICK = ("plain", "backwards", "nested", "twice", "prepared", "rematerialised")


@pytest.fixture(
    scope="module",
    params=[
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
    ],
)
def case(request):
    apply, params = CASES[request.param]
    return apply, params, unroll_stacks(apply, params, X), request.param


X = normal(5, WIDTH, seed=1)


def loss(apply):
    return lambda params, x: jnp.sum(jnp.sin(apply(params, x)))


def assert_close(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        largest = np.max(np.abs(b), initial=1.0)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * largest)


@pytest.mark.sampled(1)
def test_outputs_and_gradients_are_those_of_the_loop(case):
    apply, params, layers, _ = case
    unrolled, split = layers.function(apply), layers.split(params)
    assert_close(jax.jit(unrolled)(split, X), apply(params, X))
    stacked = jax.grad(loss(apply), (0, 1))(params, X)
    by_layer, of_x = jax.jit(jax.grad(loss(unrolled), (0, 1)))(split, X)
    assert_close((layers.join(by_layer), of_x), stacked)
    twofold = jnp.stack([X, 2 * X])
    assert_close(
        jax.vmap(unrolled, (None, 0))(split, twofold),
        jax.vmap(apply, (None, 0))(params, twofold),
    )


def lengths_of_loops(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["length"]
        for inner in inner_programs(eqn):
            yield from lengths_of_loops(inner)


def test_no_loop_over_layers_is_left(case):
    apply, params, layers, name = case
    before = jax.make_jaxpr(apply)(params, X).jaxpr
    after = jax.make_jaxpr(layers.function(apply))(layers.split(params), X).jaxpr
    assert list(lengths_of_loops(before))
    assert list(lengths_of_loops(after)) == ([5] if name == "over_time" else [])


def test_trees_come_back_as_they_were(case):
    _, params, layers, _ = case
    split = layers.split(params)
    assert len(jax.tree.leaves(split)) > len(jax.tree.leaves(params))
    for a, b in zip(
        jax.tree.leaves(layers.join(split)), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    state = optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params)
    apart = layers.split((state, 3, params))
    assert jax.tree.structure(layers.join(apart)) == jax.tree.structure(
        (state, 3, params)
    )
    of_layers = optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(split)
    assert jax.tree.structure(apart[0]) == jax.tree.structure(of_layers)
    shapes = jax.eval_shape(lambda: params)
    assert layers.join(layers.split(shapes)) == shapes


@pytest.mark.sampled(1)
def test_layers_keep_numbers_of_their_own(case):
    apply, params, layers, name = case
    unrolled, split = layers.function(apply), layers.split(params)
    trace = trace_channels(unrolled, split, X)
    count = len(jax.tree.leaves(split["layers"]["up"]))
    # What reads layers whole, or lays them out side by side, ties them.
    assert len(trace.groups) == {"read_whole": 1, "prepared": 2}.get(name, count)
    kept = {g.name: 1 + i % (g.size - 1) for i, g in enumerate(trace.groups)}
    masks = {g.name: np.arange(g.size) < kept[g.name] for g in trace.groups}
    cut = make_cut(trace, masks, split)
    small = cut.take(split)
    for group in trace.groups:
        share = kept[group.name] / group.size
        for member in group.members:
            leaf = flatten_by_path(small)[member.path]
            assert leaf.shape[member.axis] == share * member.positions.size
    certify(
        unrolled, cut.function(unrolled), cut.mask(split), small, [X], cut.take
    ).check()
    if len(trace.groups) > 1:
        with pytest.raises(UserError, match=r"layers/.* have shapes .*; put back what"):
            layers.join(small)
    assert_close(layers.join(cut.put(small)), layers.join(cut.mask(split)))


def test_reasons_name_the_lines_of_the_caller():
    layers = unroll_stacks(plain, PARAMS, X)
    trace = trace_channels(layers.function(plain), layers.split(PARAMS), X)
    assert "test_unroll.py:" in trace.explain("layers/up/0")


def norm_net(p, s, x):
    """Layers with running statistics, which come back."""

    def step(x, row):
        p, s = row
        h = x @ p["up"]
        mean, var = h.mean(0), h.var(0)
        new = {"mean": 0.9 * s["mean"] + 0.1 * mean, "var": 0.9 * s["var"] + 0.1 * var}
        h = (h - mean[None]) * (lax.rsqrt(var + 1e-3) * p["scale"])[None]
        h = jax.nn.relu(h)
        return x + h @ p["down"], new

    x, new = lax.scan(step, x, (p["layers"], s["layers"]))
    return x @ p["head"], {"layers": new}


@pytest.mark.slow
def test_running_statistics_are_taken_apart_too():
    scale = normal(DEPTH, INNER)
    p = {**PARAMS, "layers": {**PARAMS["layers"], "scale": scale}}
    s = {"layers": {"mean": normal(DEPTH, INNER), "var": jnp.ones((DEPTH, INNER))}}
    layers = unroll_stacks(norm_net, p, X, statistics=s)
    split, running = layers.split(p), layers.split_statistics(s)
    train = layers.function(norm_net, returns_statistics=True)
    out, new = train(split, running, X)
    assert jax.tree.structure(new) == jax.tree.structure(running)
    expected = norm_net(p, s, X)
    assert_close((out, layers.join_statistics(new)), expected)
    trace = trace_channels(train, split, X, statistics=running, returns_statistics=True)
    assert [g.size for g in trace.groups] == [INNER] * DEPTH
    assert all(len(g.statistics) == 2 for g in trace.groups)
    masks = {g.name: np.arange(INNER) > i for i, g in enumerate(trace.groups)}
    cut = make_cut(trace, masks, split, running)
    small = cut.function(train)(cut.take(split), cut.take_statistics(running), X)
    masked = train(cut.mask(split), running, X)
    assert_close(small, (masked[0], cut.take_statistics(masked[1])))


def test_only_the_loops_that_are_named_are_unrolled():
    def apply(p, x):
        x, _ = lax.scan(turn, x, p["encoder"])
        return lax.scan(turn, x, p["decoder"])[0]

    params = {"encoder": stack(2), "decoder": stack(3)}
    layers = unroll_stacks(apply, params, X, paths=["enc*/up"])
    assert set(layers.stacks) == {"encoder/up", "encoder/down"}
    unrolled, split = layers.function(apply), layers.split(params)
    left = lengths_of_loops(jax.make_jaxpr(unrolled)(split, X).jaxpr)
    assert list(left) == [3]
    assert_close(unrolled(split, X), apply(params, X))


@jax.custom_vjp
def reversible(p, x):
    return plain(p, x)


reversible.defvjp(lambda p, x: (plain(p, x), (p, x)), lambda saved, g: saved)


def by_counter(p, x):
    def body(i, x):
        return layer(x, jax.tree.map(lambda w: w[i], p["layers"]))

    return lax.fori_loop(0, DEPTH, body, x)


def crosswise(p, x):
    x, _ = lax.scan(lambda x, w: (x + w.sum(), None), x, p["layers"]["up"])
    columns = p["layers"]["up"].swapaxes(0, 1)
    return lax.scan(lambda x, w: (x * w.mean(), None), x, columns)[0]


def rows_of_a_table(p, x):
    return lax.map(lambda row: row.sum() + x, p["table"])


@pytest.mark.parametrize(
    ("apply", "params", "options", "words"),
    [
        (lambda p, x: x @ p["head"], PARAMS, {}, "no loop of this function is over"),
        (reversible, PARAMS, {}, "outside of functions with derivatives of their own"),
        (by_counter, PARAMS, {}, "no loop of this function is over parameters"),
        (crosswise, PARAMS, {}, r"layers/up is looped over along axes \[0, 1\]"),
        (rows_of_a_table, {"table": normal(300, 2)}, {}, r"test_unroll.* over table "
         "has 300 turns, which is much to write out"),
        (plain, PARAMS, {"paths": ["layer/*"]}, "'layer/.*', and no loop is over a "
         "parameter called so, did you mean 'layers/up'.*layers/down, layers/up"),
    ],
)  # fmt: skip
def test_what_cannot_be_unrolled_is_said(apply, params, options, words):
    with pytest.raises(UserError, match=words):
        unroll_stacks(apply, params, X, **options)


def test_a_long_loop_that_is_named_is_unrolled():
    params = {"table": normal(300, 2)}
    layers = unroll_stacks(rows_of_a_table, params, X, paths=["table"])
    assert len(layers.split(params)["table"]) == 300


def test_trees_of_other_networks_are_refused():
    layers = unroll_stacks(plain, PARAMS, X)
    split = layers.split(PARAMS)
    wrong = {**PARAMS, "layers": {**PARAMS["layers"], "up": jnp.ones((DEPTH, 2))}}
    with pytest.raises(UserError, match=r"layers/up has shape .* split it apart"):
        layers.split(wrong)
    with pytest.raises(UserError, match="nothing in this tree belongs to a parameter"):
        layers.split({"other": jnp.ones(3)})
    with pytest.raises(UserError, match="nothing in this tree belongs to a parameter"):
        layers.join({"other": jnp.ones(3)})
    short = {**split, "layers": {**split["layers"], "up": split["layers"]["up"][:2]}}
    with pytest.raises(UserError, match="layers/up has 2 layers and should have 3"):
        layers.join(short)
    with pytest.raises(
        UserError, match=r"layers/up is absent here .* the tree that `split`"
    ):
        bad = {**split["layers"], "up": list(split["layers"]["up"])}
        layers.function(plain)({**split, "layers": bad}, X)


_MARKS = {
    "nnx_gpt_scanned": (),
    "linen_gpt_scanned": pytest.mark.slow,
    "plain_gpt_scanned": pytest.mark.slow,
    "equinox_gpt_scanned": pytest.mark.zoo,
    "haiku_gpt_stacked": pytest.mark.zoo,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks) for name, marks in _MARKS.items()]
)
def test_networks_of_the_frameworks_are_taken_apart(name):
    (network,) = (network for network in NETWORKS if network.name == name)
    case = network.build()
    layers = unroll_stacks(case.apply, case.params, *case.inputs)
    unrolled, split = layers.function(case.apply), layers.split(case.params)
    assert_close(
        jax.jit(unrolled)(split, *case.inputs), jax.jit(case.apply)(*case.arguments)
    )
    whole = trace_channels(case.apply, case.params, *case.inputs)
    trace = trace_channels(unrolled, split, *case.inputs)
    assert len(trace.groups) > len(whole.groups)
    assert trace.prunable_share() >= whole.prunable_share() - 1e-9
    rng = np.random.default_rng(0)
    masks = {
        g.name: rng.permutation(g.size) <= g.size // 2 + i % (g.size // 2)
        for i, g in enumerate(trace.groups)
    }
    cut = make_cut(trace, masks, split)
    certify(
        unrolled,
        cut.function(unrolled),
        cut.mask(split),
        cut.take(split),
        case.inputs,
        cut.take,
    ).check()
