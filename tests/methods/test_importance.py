"""Importance-weighted pruning against its listing in numpy, and its conservation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import shapes_by_path
from prunex_jax.comm import Wire, dense_size, list_collectives, wire_bytes
from prunex_jax.mesh import leave, specs_of, vary
from prunex_jax.methods import (
    Recipe,
    importance,
    make_method,
    method_config,
)
from prunex_jax.methods.importance import (
    IMPORTANCE_PLACEMENTS,
    ImportanceConfig,
    choosers_of,
    chosen_counts,
)
from prunex_jax.models import make_model
from prunex_jax.models.settings import ModelConfig
from tests.helpers.common import MESH, make_mesh
from tests.helpers.formulas.means import mesh_sum, ring_sum
from tests.helpers.formulas.methods import formulas_of

AXES = ("host", "device")
QUICK = {"xla_backend_optimization_level": 0}
# Two leaves to choose from, and a vector that is sent whole.
SHAPES = {"a": (4, 5), "b": (3,), "c": (2, 3, 5)}
DENSITY = 0.15
COUNTS = {"a": 3, "b": 0, "c": 4}
NUM_STEPS = 6
DTYPES = ("int32", "float32")


def draw(lead=(), seed=0):
    rng = np.random.default_rng(seed)
    return {
        path: rng.normal(size=lead + shape).astype(np.float32)
        for path, shape in SHAPES.items()
    }


START = draw(seed=1)


def gradients_of(num_hosts, num_devices, seed=2):
    """[steps, hosts, devices, ...]; the mean of a host is the same for any devices."""
    means = draw((NUM_STEPS, num_hosts, 1), seed)
    if num_devices == 1:
        return means
    own = draw((NUM_STEPS, num_hosts, num_devices), seed + 1)
    return jax.tree.map(lambda m, x: m + x - x.mean(2, keepdims=True), means, own)


@functools.cache
def program_of(shape, refreshes, settings):
    """Runs NUM_STEPS; the state of every host and the direction after each of them."""
    tx = importance(**{"density": DENSITY, **dict(settings)}, axes=MESH)
    placements = IMPORTANCE_PLACEMENTS

    def cycle(state, grads):
        """One step for each entry of `refreshes`."""
        rows = []
        for i, refresh in enumerate(refreshes):
            own = jax.tree.map(lambda g, i=i: g[i, 0, 0], grads)
            direction, state = tx.update(
                own, state, START, refresh=refresh, unheard_of=None
            )
            # Every device shows the positions that it believes to be chosen.
            seen = vary(state.chosen, AXES)[None, None]
            rows.append((direction, leave(placements, state), seen))
        return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    def body(grads):
        start = jax.tree.map(
            lambda p, x: vary(x, ("host",) if p == "per_host" else ()),
            placements, tx.init(START),
        )  # fmt: skip
        by_cycle = jax.tree.map(
            lambda g: g.reshape(-1, len(refreshes), *g.shape[1:]), grads
        )
        _, history = jax.lax.scan(cycle, start, by_cycle)
        return jax.tree.map(lambda x: x.reshape(NUM_STEPS, *x.shape[2:]), history)

    specs = (jax.P(), specs_of(placements), jax.P(*AXES))
    after_step = jax.tree.map(lambda spec: jax.P(None, *spec), specs)
    run = jax.shard_map(
        body,
        mesh=make_mesh(*shape),
        in_specs=jax.P(None, *AXES),
        out_specs=after_step,
    )
    return jax.jit(run, compiler_options=QUICK)


def run_on(shape, grads, refreshes=(True,), **settings):
    history = program_of(shape, refreshes, tuple(settings.items()))(grads)
    history = jax.tree.map(np.asarray, history)
    return [
        as_buffers(*jax.tree.map(lambda x, step=step: x[step], history))
        for step in range(NUM_STEPS)
    ]


def as_buffers(direction, state, seen):
    """Trees of every host as rows: "a" and "c", of which hosts choose, then "b"."""

    def row(tree, paths):
        return np.concatenate([tree[p].reshape(len(tree[p]), -1) for p in paths], 1)

    def from_zero(chosen):
        num_entries = sum(np.prod(shape) for shape in SHAPES.values())
        return np.where(chosen > 0, chosen - 1, num_entries)

    assert not state.residual["b"].any(), "held back of what is sent whole"
    state = state._replace(
        chosen=from_zero(state.chosen),
        momentum=row(state.momentum, "acb"),
        residual=row(state.residual, "ac"),
    )
    return direction, state, from_zero(seen)


def by_the_book(
    grads, refreshes=(True,), num_choosers=1, momentum=0.9, damping=1.0, nesterov=False,
    clip_norm=0.0,
):  # fmt: skip
    """The listing, host by host and entry by entry, in float64."""
    num_hosts = grads["a"].shape[1]
    flat = {p: g.mean(2).reshape(NUM_STEPS, num_hosts, -1) for p, g in grads.items()}
    if clip_norm:
        norms = np.sqrt(sum((g**2).sum(2) for g in flat.values()))
        factor = np.minimum(1, clip_norm * np.sqrt(num_hosts) / norms)
        flat = {p: g * factor[..., None] for p, g in flat.items()}
    u = {p: np.zeros(g.shape[1:]) for p, g in flat.items()}
    r = {p: np.zeros(g.shape[1:]) for p, g in flat.items()}
    sets, turn, history = {p: set() for p in SHAPES}, 0, []
    for step in range(NUM_STEPS):
        moved = {}
        for p, g in flat.items():
            u[p] = momentum * u[p] + g[step]
            moved[p] = g[step] + momentum * u[p] if nesterov else u[p]
        for p in ("a", "c"):
            r[p] = r[p] + moved[p]
        if refreshes[step % len(refreshes)]:
            choosers = choosers_of(jnp.int32(turn), num_hosts, num_choosers)
            turn += 1
            for p in ("a", "c"):
                w = np.abs(START[p].ravel().astype(float))
                score = np.abs(r[p]) / (w + damping * np.sqrt(np.mean(w**2)))
                sets[p] = {
                    int(i)
                    for host in np.asarray(choosers)
                    for i in np.argsort(-score[host])[: COUNTS[p]]
                }
        direction = {"b": moved["b"].mean(0)}
        for p in ("a", "c"):
            direction[p] = np.zeros(u[p].shape[1])
            for i in sets[p]:
                direction[p][i] = r[p][:, i].mean()
                r[p][:, i] = u[p][:, i] = 0.0
        history.append(
            (
                {p: x.reshape(SHAPES[p]) for p, x in direction.items()},
                np.concatenate([u["a"], u["c"], u["b"]], axis=1),
                np.concatenate([r["a"], r["c"]], axis=1),
            )
        )
    return history


CASES = {
    "one chooser": {},
    "two choosers": {"num_choosers": 2},
    "all choose": {"num_choosers": 4},
    "nesterov": {"nesterov": True},
    "clipped": {"clip_norm": 3.5},
    "the weight alone": {"damping": 0.0, "momentum": 0.5},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("refreshes", [(True,), (True, False, False)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_listing(case, refreshes):
    grads = gradients_of(4, 2)
    wanted = by_the_book(grads, refreshes, **CASES[case])
    found = run_on((4, 2), grads, refreshes, **CASES[case])
    for (direction, state, _), (want, u, r) in zip(found, wanted, strict=True):
        for path in SHAPES:
            np.testing.assert_allclose(direction[path], want[path], atol=2e-6)
        np.testing.assert_allclose(state.momentum, u, atol=5e-6)
        np.testing.assert_allclose(state.residual, r, atol=5e-6)


@pytest.mark.parametrize("num_choosers", [1, 2, 3])
def test_nothing_is_lost(num_choosers):
    """Per host and entry: all that came in was sent or is still held back."""
    grads = gradients_of(4, 1)
    found = run_on((4, 1), grads, num_choosers=num_choosers, momentum=0.0)
    flat = {p: g[:, :, 0].reshape(NUM_STEPS, 4, -1) for p, g in grads.items()}
    came = np.concatenate([flat["a"], flat["c"]], axis=2).astype(float)
    held, sent, applied = np.zeros((2, 4, came.shape[2])), 0.0, 0.0
    for step, (direction, state, _) in enumerate(found):
        at = state.chosen[state.chosen < came.shape[2]]
        message = np.zeros_like(came[step])
        message[:, at] = (held[1] + came[step])[:, at]
        sent = sent + message
        held = held[1] + came[step] - message, state.residual
        np.testing.assert_allclose(held[1], held[0], atol=1e-5, err_msg="not held back")
        total = np.concatenate([direction["a"].ravel(), direction["c"].ravel()])
        np.testing.assert_allclose(total, message.mean(0), atol=1e-5)
        applied = applied + total
    np.testing.assert_allclose(sent + held[1], came.sum(0), atol=1e-5)
    np.testing.assert_allclose(applied, sent.mean(0), atol=1e-5)
    assert np.abs(held[1]).max() > 1, "nothing was held back; the test says nothing"


@pytest.mark.parametrize("all_reduce", ["native", "ring"])
def test_devices_of_a_host_make_no_difference(all_reduce):
    ends = []
    for num_devices in (1, 2):
        grads = gradients_of(4, num_devices)
        found = run_on((4, num_devices), grads, num_choosers=2, all_reduce=all_reduce)
        ends.append(jax.tree.map(lambda x: x, [(d, s) for d, s, _ in found]))
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_ring_is_the_native_mean():
    grads = gradients_of(4, 2)
    ring = run_on((4, 2), grads, all_reduce="ring")
    native = run_on((4, 2), grads)
    for a, b in zip(jax.tree.leaves(ring), jax.tree.leaves(native), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("num_choosers", [1, 2, 3, 4])
def test_hosts_agree_on_positions(num_choosers):
    found = run_on((4, 2), gradients_of(4, 2), num_choosers=num_choosers)
    num_entries = sum(np.prod(shape) for shape in SHAPES.values())
    for _, state, seen in found:
        for row in seen.reshape(8, -1):
            np.testing.assert_array_equal(row, state.chosen, "hosts disagree")
        real = state.chosen[state.chosen < num_entries]
        assert len(set(real)) == len(real), "an entry would be applied twice"
        assert sum(COUNTS.values()) <= len(real) <= num_choosers * sum(COUNTS.values())


def test_an_entry_chosen_twice_counts_once():
    """Equal hosts choose the same: two choosers are no more than one."""
    one = gradients_of(1, 1)
    grads = jax.tree.map(lambda g: np.repeat(g, 4, axis=1), one)
    single = run_on((4, 1), grads)
    double = run_on((4, 1), grads, num_choosers=2)
    for (a, *_), (b, state, _) in zip(single, double, strict=True):
        for path in SHAPES:
            np.testing.assert_allclose(a[path], b[path], atol=2e-6)
        num_entries = sum(np.prod(shape) for shape in SHAPES.values())
        assert np.sum(state.chosen == num_entries) == sum(COUNTS.values())


@pytest.mark.parametrize(("num_hosts", "num_choosers"), [(8, 1), (8, 2), (5, 2)])
def test_every_host_has_its_turn(num_hosts, num_choosers):
    cycle = -(-num_hosts // num_choosers)
    turns = [
        np.asarray(choosers_of(jnp.int32(i), num_hosts, num_choosers))
        for i in range(3 * cycle)
    ]
    assert all(len(set(turn)) == num_choosers for turn in turns)
    cycles = [np.concatenate(turns[i * cycle :][:cycle]) for i in range(3)]
    assert all(set(c) == set(range(num_hosts)) for c in cycles)
    assert any(list(c) != list(cycles[0]) for c in cycles), "not shuffled again"
    others = [choosers_of(jnp.int32(i), num_hosts, num_choosers, 1) for i in range(6)]
    assert any(list(a) != list(b) for a, b in zip(others, turns, strict=False))


def momentum_sgd(grads, momentum, nesterov):
    tx = optax.trace(momentum, nesterov)
    state, found = tx.init(START), []
    for step in range(NUM_STEPS):
        mean = jax.tree.map(lambda g, step=step: g[step].mean((0, 1)), grads)
        direction, state = tx.update(mean, state)
        found.append(direction)
    return found


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("shape", "density"), [((4, 2), 1.0), ((1, 4), 0.1)])
def test_dense_limit_is_momentum_sgd(shape, density, momentum, nesterov):
    """With everything chosen, and on a single host, where nothing need be held back."""
    grads = gradients_of(*shape)
    settings = {"density": density, "momentum": momentum, "nesterov": nesterov}
    found = run_on(shape, grads, **settings)
    wanted = momentum_sgd(grads, momentum, nesterov)
    for (direction, state, _), want in zip(found, wanted, strict=True):
        for path in SHAPES:
            np.testing.assert_allclose(direction[path], want[path], atol=5e-6)
        assert not state.residual.any()


def listed(shape, refreshes, **settings):
    grads = jax.eval_shape(lambda: gradients_of(*shape))
    program = program_of(shape, refreshes, tuple(settings.items()))
    return list_collectives(program.trace(grads).jaxpr)


def test_without_refresh_no_positions_travel():
    for refreshes, times in (((True,), NUM_STEPS), ((True, False, False), 2)):
        over_hosts = [c for c in listed((8, 1), refreshes) if c.axes == ("host",)]
        found = {dtype: [c for c in over_hosts if c.dtype == dtype] for dtype in DTYPES}
        assert {c.num_elements for c in found["int32"]} == {sum(COUNTS.values())}
        assert sum(c.count for c in found["int32"]) == times
        assert sum(c.count for c in found["float32"]) == NUM_STEPS


@pytest.mark.parametrize(
    ("num_choosers", "kind"), [(1, "sum"), (3, "sum"), (4, "gather")]
)
def test_positions_take_the_shorter_way(num_choosers, kind):
    found = listed((8, 1), (True,), num_choosers=num_choosers)
    (sent,) = {c for c in found if c.axes == ("host",) and c.dtype == "int32"}
    count = sum(chosen_counts(SHAPES, DENSITY, num_choosers))
    assert sent.kind == kind
    assert sent.num_elements == count * (num_choosers if kind == "sum" else 1)


def test_without_a_mesh():
    tx = importance(0.1, momentum=0.5)
    grads = draw(seed=3)
    state = tx.init(START)
    for factor in (1.0, 1.5):
        direction, state = tx.update(grads, state, START)
        for path in SHAPES:
            np.testing.assert_allclose(direction[path], factor * grads[path], rtol=1e-6)


def test_bad_settings_are_refused():
    for settings, words in (
        ({"density": 0.0}, r"density=0.0 must lie in \(0, 1\]"),
        ({"density": 0.1, "num_choosers": 0}, "num_choosers=0"),
        ({"density": 0.1, "momentum": 1.0}, r"momentum=1.0 must lie in \[0, 1\)"),
        ({"density": 0.1, "damping": -1.0}, "damping=-1.0"),
        ({"density": 0.1, "clip_norm": -1.0}, "clip_norm=-1.0"),
    ):
        with pytest.raises(UserError, match=words):
            importance(**settings)
    with pytest.raises(UserError, match="num_choosers=3 is more than the 2 hosts"):
        listed((2, 1), (True,), num_choosers=3)
    tx = importance(0.1)
    with pytest.raises(UserError, match="params"):
        tx.update(START, tx.init(START))


def test_update_refuses_gradients_that_are_summed():
    tx = importance(0.5, axes=MESH)

    def body(params):
        grads = jax.grad(lambda p: jnp.sum(p["a"] ** 2))(params)
        return tx.update(grads, tx.init(params), params)[0]

    run = jax.shard_map(body, mesh=make_mesh(2, 2), in_specs=jax.P(), out_specs=jax.P())
    with pytest.raises(UserError, match="do not vary"):
        jax.make_jaxpr(run)({"a": START["a"]})


# Kernels of AlexNet as it was published, two of them grouped.
ALEXNET = {
    "conv1": (11, 11, 3, 96),
    "conv2": (5, 5, 48, 256),
    "conv3": (3, 3, 256, 384),
    "conv4": (3, 3, 192, 384),
    "conv5": (3, 3, 192, 256),
    "fc6": (9216, 4096),
    "fc7": (4096, 4096),
    "fc8": (4096, 1000),
}


def large_network(name):
    if name == "resnet50":
        model = make_model(ModelConfig(name="resnet50"), (224, 224, 3), 1000)
        return shapes_by_path(jax.eval_shape(model.init, jax.random.key(0))[0])
    biases = {f"{layer}/bias": shape[-1:] for layer, shape in ALEXNET.items()}
    return {f"{layer}/kernel": shape for layer, shape in ALEXNET.items()} | biases


def ratio_of(shapes, devices_per_host, wire_dtype, **settings):
    """Bytes of hierarchical dense float32 over ours at 8 hosts, positions included."""
    config = ImportanceConfig(**settings)
    recipe = Recipe(
        method_config("importance", importance=config, wire_dtype=wire_dtype),
        optax.sgd(0.1), optax.constant_schedule(0.1), (), {}, shapes,
    )  # fmt: skip
    method, formulas = make_method(recipe), formulas_of(recipe)
    mesh_shape = {"host": 8, "device": devices_per_host}
    sent = 0.0
    for step in range(config.refresh_period):
        formula = formulas.step(mesh_shape, **method.step_options.at(step))
        sent += wire_bytes(formula, mesh_shape)["host"] / config.refresh_period
    dense = mesh_sum(dense_size(shapes), mesh_shape)
    return wire_bytes(dense, mesh_shape)["host"] / sent


@pytest.mark.parametrize("devices_per_host", [1, 4])
@pytest.mark.parametrize(
    ("wire_dtype", "settings"),
    [
        ("float32", {"density": 0.0074}),
        ("bfloat16", {"density": 0.01}),
        ("bfloat16", {"density": 0.02, "refresh_period": 4}),
        ("int8", {"density": 0.03, "refresh_period": 6}),
    ],
    ids=str,
)
def test_published_ratios_are_reached_with_positions(
    wire_dtype, settings, devices_per_host
):
    assert dense_size(large_network("alexnet")) * 4 / 2**20 == pytest.approx(
        232.56, 1e-4
    )
    for name, published in (("resnet50", 58.8), ("alexnet", 64.0)):
        shapes = large_network(name)
        assert ratio_of(shapes, devices_per_host, wire_dtype, **settings) >= published


def test_published_ratios_are_not_reached_at_their_density_in_float32():
    """58.8 is 1 / 1.7 %: it counts values, and no positions."""
    found = ratio_of(large_network("resnet50"), 1, "float32", density=1 / 58.8)
    assert 27.0 < found < 28.0


@pytest.mark.parametrize("shape", [(8, 1), (2, 4)], ids=str)
def test_hops_of_the_ring_are_the_host_bytes(shape):
    """All that crosses between hosts is in the list of hops, but the positions."""
    mesh_shape = dict(zip(AXES, shape, strict=True))
    sent = listed(shape, (True,), all_reduce="ring", wire=Wire("int8"))
    num_values = sum(COUNTS.values()) + 3
    hops = ring_sum(num_values, mesh_shape, Wire("int8"))
    by_hop = NUM_STEPS * wire_bytes(hops, mesh_shape)["host"]
    others = [c for c in sent if c.dtype == "int32"]
    assert wire_bytes(sent, mesh_shape)["host"] == pytest.approx(
        by_hop + wire_bytes(others, mesh_shape)["host"]
    )
