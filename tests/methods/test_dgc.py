"""DGC is its paper's listing, becomes momentum SGD, and warms up in stages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.comm import Wire, list_collectives, wire_bytes
from prunex_jax.mesh import leave, vary
from prunex_jax.methods import Recipe, dgc, make_method, method_config
from prunex_jax.methods.dgc import DGC_PLACEMENTS, DgcConfig, warmup_density
from prunex_jax.methods.momentum import after_momentum
from prunex_jax.train.build.optimizer import make_inner, make_learning_rate
from tests.helpers.common import make_mesh
from tests.helpers.entry_cases import (
    AXES,
    HOST_GRADS,
    SIZE,
    WIRES,
    as_mesh,
    flat,
    largest,
    run,
)
from tests.helpers.formulas.methods import formulas_of

# Rounding of float32, for sums of a few numbers of the order of one.
TIGHT = {"rtol": 1e-5, "atol": 3e-6}


def run_dgc(shape, grads=None, options=(), **settings):
    grads = as_mesh(shape) if grads is None else grads
    return run(dgc, DGC_PLACEMENTS, shape, grads, options, **settings)


def reference(contributions, count, momentum, nesterov=False, threshold=np.inf):
    """Algorithm 4 of the paper, in numpy: every worker k adds its part to a sum.

    Its selection is global here. Nesterov momentum as the authors' code has it: the
    velocity is multiplied by the momentum when it is stored.
    """
    num_workers = contributions.shape[1]
    velocity = np.zeros_like(contributions[0])
    accumulated = np.zeros_like(velocity)
    seen = []
    for parts in contributions:
        total = np.zeros(parts.shape[-1])
        for k in range(num_workers):
            grad = parts[k]
            limit = threshold * num_workers**-0.5
            grad = grad * min(1, limit / np.linalg.norm(grad))
            if nesterov:
                velocity[k] = (velocity[k] + grad) * momentum
                accumulated[k] += velocity[k] + grad
            else:
                velocity[k] = momentum * velocity[k] + grad
                accumulated[k] += velocity[k]
            mask = np.zeros(parts.shape[-1], bool)
            mask[largest(accumulated[k], count)] = True
            total += accumulated[k] * mask
            accumulated[k] *= ~mask
            velocity[k] *= ~mask
        seen.append((total, velocity.copy(), accumulated.copy()))
    return seen


@pytest.mark.parametrize("threshold", [np.inf, 4.0])
@pytest.mark.parametrize("nesterov", [False, True])
def test_is_the_listing_of_the_paper(nesterov, threshold):
    """Momentum correction, clipping, accumulation and masking, step by step."""
    clip_norm = 0.0 if threshold == np.inf else threshold
    found = run_dgc(
        (4, 2), density=0.1, momentum=0.8, nesterov=nesterov, clip_norm=clip_norm
    )
    norms = np.linalg.norm(HOST_GRADS / 4, axis=-1)
    assert np.isinf(threshold) or np.all(norms > threshold / 2), "nothing is clipped"
    wanted = reference(HOST_GRADS / 4, 30, 0.8, nesterov, threshold)
    stored = 0.8 if nesterov else 1.0
    for (direction, state), (total, velocity, held_back) in zip(
        found, wanted, strict=True
    ):
        np.testing.assert_allclose(direction, total, **TIGHT)
        np.testing.assert_allclose(stored * state.velocity / 4, velocity, **TIGHT)
        np.testing.assert_allclose(state.residual / 4, held_back, **TIGHT)


def test_velocity_is_zero_where_a_host_has_sent_and_nowhere_else():
    for direction, state in run_dgc((4, 1), density=0.1, momentum=0.9):
        is_sent = state.residual == 0
        assert np.array_equal(is_sent.sum(1), [30] * 4)
        assert np.array_equal(state.velocity == 0, is_sent)
        assert np.array_equal(direction != 0, is_sent.any(0))


def test_chunks_clear_the_velocity_of_what_was_sent():
    rng = np.random.default_rng(3)
    grads = rng.normal(size=(4, 2, 1, 5000)).astype(np.float32)
    settings = {"density": 0.01, "momentum": 0.9, "in_chunks": True}
    for direction, state in run_dgc((2, 1), grads, **settings):
        is_sent = state.velocity == 0
        assert np.array_equal(is_sent.sum(1), [80, 80])
        assert np.array_equal(state.residual == 0, is_sent)
        assert np.array_equal(direction != 0, is_sent.any(0))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("wire_dtype", WIRES)
@pytest.mark.parametrize("shape", [(4, 1), (4, 2)])
def test_what_came_in_is_sent_or_held_back(shape, wire_dtype):
    """Of every host: the velocities that came in; the others are silent."""
    for host in range(4):
        grads = jax.tree.map(
            lambda g, h=host: (
                g * (np.arange(4) == h).reshape(1, 4, *[1] * (g.ndim - 2))
            ),
            as_mesh(shape),
        )
        settings = {"density": 0.1, "momentum": 0.7, "wire": Wire(wire_dtype)}
        sent = before = velocity = 0.0
        for (direction, state), now in zip(
            run_dgc(shape, grads, **settings), HOST_GRADS, strict=True
        ):
            came_in = 0.7 * velocity + now[host]
            sent = 4 * direction
            np.testing.assert_allclose(
                sent + state.residual[host], before + came_in, **TIGHT
            )
            before, velocity = state.residual[host], state.velocity[host]


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_devices_per_host_do_not_matter(wire_dtype):
    ends = [
        run_dgc(shape, density=0.1, clip_norm=3.0, wire=Wire(wire_dtype))[-1]
        for shape in ((4, 1), (4, 2))
    ]
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, **TIGHT)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("hosts", "density"), [(4, 1.0), (1, 0.01)])
def test_holding_nothing_back_is_momentum_sgd(hosts, density, nesterov):
    """At density 1, and on one host whatever the density."""
    grads = jax.tree.map(lambda g: g[:, :hosts], as_mesh((4, 2)))
    found = run_dgc((hosts, 2), grads, density=density, nesterov=nesterov)
    trace = optax.trace(0.9, nesterov)
    state = trace.init(np.zeros(SIZE, np.float32))
    for (direction, after), now in zip(
        found, HOST_GRADS[:, :hosts].mean(1), strict=True
    ):
        wanted, state = trace.update(now, state)
        np.testing.assert_allclose(direction, wanted, **TIGHT)
        assert not np.any(after.residual)


def recipe(shape, num_elements=SIZE, **settings):
    optimizer = settings.pop("optimizer", OptimizerConfig())
    learning_rate = make_learning_rate(optimizer, 100)
    return Recipe(
        config=method_config("dgc", dgc=DgcConfig(**settings)),
        inner=make_inner(optimizer, learning_rate),
        learning_rate=learning_rate,
        groups=(),
        keep_counts={},
        shapes={"x": (num_elements,)},
        total_steps=100,
        optimizer=optimizer,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(weight_decay=0.3, warmup_share=0.02),
        OptimizerConfig(weight_decay=0.3, nesterov=False, schedule="constant"),
        OptimizerConfig(momentum=0.0, weight_decay=0.3),
        OptimizerConfig(clip_norm=2.0, weight_decay=0.3),
    ],
    ids=["nesterov", "heavy ball", "no momentum", "clipped"],
)
def test_on_one_host_the_method_is_the_inner_optimizer(optimizer):
    """Momentum once, not twice; weight decay, clipping and learning rate as ever."""
    made = recipe((1, 2), optimizer=optimizer)
    tx, inner = make_method(made).transform, made.inner
    params = {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}
    keys = jax.random.split(jax.random.key(0), 5)
    grads = [
        jax.tree.map(lambda p, k=k: jax.random.normal(k, p.shape), params) for k in keys
    ]

    def train(update, init, own):
        params, state = own, init(own)
        for now in grads:
            updates, state = update(now, state, params)
            params = optax.apply_updates(params, updates)
        return params

    wanted = train(inner.update, inner.init, params)

    def on_mesh(params):
        def update(now, state, params):
            return tx.update(vary(now, AXES), state, params)

        return train(update, tx.init, params)

    run = jax.shard_map(
        on_mesh, mesh=make_mesh(1, 2), in_specs=jax.P(), out_specs=jax.P()
    )
    found = jax.jit(run)(params)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, **TIGHT)
    assert np.all(np.abs(flat(found, 0) - 1) > 1e-3), "nothing was learned"


def test_after_momentum_goes_on_with_the_schedule():
    made = recipe((1, 1), optimizer=OptimizerConfig(warmup_share=0.5))
    tx = after_momentum(
        make_inner(made.optimizer, made.learning_rate), made.learning_rate
    )
    params = jnp.zeros(2)  # one axis: no decay
    state = tx.init(params)
    for step in range(4):
        update, state = tx.update(jnp.ones(2), state, params)
        np.testing.assert_allclose(update, -0.1 * step / 50, rtol=1e-5)


@pytest.mark.parametrize(
    ("density", "wanted"),
    [
        (0.001, [1 / 4, 1 / 16, 1 / 64, 1 / 256]),
        (0.01, [1 / 4, 1 / 16, 1 / 64]),
        (1 / 16, [1 / 4]),
        (0.25, []),
        (1.0, []),
    ],
)
def test_warms_up_as_the_paper_does(density, wanted):
    """Sparsities 75 %, 93.75 %, 98.4375 %, 99.6 %, one stage as long as the other."""
    num_steps = 5 * max(len(wanted), 1)
    found = [warmup_density(step, num_steps, density) for step in range(num_steps + 3)]
    stages = [d for d in wanted for _ in range(5)]
    assert found == stages + [density] * (len(found) - len(stages))
    assert warmup_density(0, 0, density) == density


def test_a_warmup_may_start_lower():
    found = [warmup_density(step, 4, 0.001, first=0.01) for step in range(6)]
    assert found == [0.01, 0.01, 0.0025, 0.0025, 0.001, 0.001]
    assert warmup_density(0, 4, 0.02, first=0.01) == 0.02


def test_stages_of_a_short_warmup_only_fall():
    found = [warmup_density(step, 3, 0.001) for step in range(5)]
    assert found == sorted(found, reverse=True) and found[0] == 0.25
    assert found[3:] == [0.001, 0.001]


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_every_stage_sends_what_the_formula_says(shape):
    own = recipe(shape, density=0.01, warmup_share=0.3)
    method, formulas = make_method(own), formulas_of(own)
    mesh = make_mesh(*shape)

    def traced(options):
        def fn(params):
            grads = vary({"x": params}, AXES)
            state = method.transform.init({"x": params})
            updates, state = method.transform.update(
                grads, state, {"x": params}, **options
            )
            return updates, leave(
                method.placements.opt_state[0], vary(state[0], AXES[:1])
            )

        run = jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=jax.P(),
            out_specs=(
                jax.P(),
                DGC_PLACEMENTS._replace(velocity=jax.P("host"), residual=jax.P("host")),
            ),
        )
        return list_collectives(jax.make_jaxpr(run)(jnp.zeros(SIZE)))

    options = [method.step_options.at(step) for step in range(100)]
    counts = {0.25: 75, 0.0625: 19, 0.015625: 5, 0.01: 3}
    stages = [options[0], options[10], options[20], options[30]]
    assert options == [stages[min(step // 10, 3)] for step in range(100)]
    assert stages[3] == {}, "the steady state needs no options"
    for chosen, (density, count) in zip(stages, counts.items(), strict=True):
        assert chosen.get("density", 0.01) == density
        listed, sizes = traced(chosen), dict(mesh.shape)
        formula = formulas.step(sizes, **chosen)
        assert wire_bytes(listed, sizes) == wire_bytes(formula, sizes)
        share = -(-count // shape[1])
        wanted = (shape[0] - 1) * share * 8 * shape[1]
        assert wire_bytes(listed, sizes)["host"] == wanted


def test_refuses_an_optimizer_that_is_not_sgd():
    with pytest.raises(UserError, match="adamw"):
        make_method(recipe((1, 1), optimizer=OptimizerConfig(name="adamw")))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"density": 0.0}, "density=0.0"),
    ],
)
def test_refuses_what_means_nothing(settings, named):
    with pytest.raises(UserError, match=named):
        dgc(**settings)
