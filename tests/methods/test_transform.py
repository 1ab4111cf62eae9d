"""H-SADMM as users meet it: an optax transformation in loops of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from prunex_jax.base.errors import UserError
from prunex_jax.channels import ChannelGroup, ChannelSlice, trace_channels
from prunex_jax.mesh import ALONE, enter, leave, specs_of, vary
from prunex_jax.methods import hsadmm
from prunex_jax.methods.hsadmm import state_placements
from tests.helpers.common import MESH, make_mesh
from tests.helpers.consensus_cases import (
    AXES,
    FINAL,
    FORMS,
    GROUPS,
    QUICK,
    START,
    draw,
    make_core,
    quadratic,
    targets_of,
)

NUM_STEPS = 12


def apply(params, x):
    """A sigmoid of a dead channel is not zero, so its readers have gradients."""
    return jax.nn.sigmoid(x @ params["a"] + params["bias"][None]) @ params["b"]


PARAMS = {
    "a": jax.random.normal(jax.random.key(0), (3, 8)),
    "bias": jnp.linspace(-1.0, 1.0, 8),
    "b": jax.random.normal(jax.random.key(1), (8, 2)),
}
GROUP = trace_channels(apply, PARAMS, jnp.ones((2, 3))).groups
(NAME,) = (group.name for group in GROUP)


def loss_of(params, x, y):
    return jnp.mean((apply(params, x) - y) ** 2)


def make_batch(num_hosts, num_devices):
    """Every host has targets of its own."""
    x = jax.random.normal(jax.random.key(2), (num_hosts, num_devices, 16, 3))
    shift = jnp.arange(num_hosts).reshape(-1, 1, 1, 1) / 4
    return x, jnp.sin(x[..., :2]) + shift


def make_user_transform(on_mesh=True, **kwargs):
    axes = MESH if on_mesh else ALONE
    return hsadmm(
        optax.adam(0.05), GROUP, {NAME: 4}, sync_period=2, freeze_round=2,
        axes=axes, **kwargs,
    )  # fmt: skip


def train(tx, start, x, y):
    """A user's training loop, written once for every kind of mesh."""
    params = vary(start, ("host",))

    def step(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_of)(vary(params, AXES), x, y)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    carry, losses = jax.lax.scan(step, (params, tx.init(start)), length=NUM_STEPS)
    return carry, losses


@functools.cache
def trained(shape, check_vma=True):
    tx = make_user_transform()
    placements = ("per_host", state_placements("gradient"))

    def body(start, x, y):
        carry, losses = train(tx, start, x[0, 0], y[0, 0])
        return leave(placements, carry), losses[None, None]

    run = jax.shard_map(
        body,
        mesh=make_mesh(*shape),
        in_specs=(jax.P(), jax.P(*AXES), jax.P(*AXES)),
        out_specs=(specs_of(placements), jax.P(*AXES)),
        check_vma=check_vma,
    )
    return jax.jit(run, compiler_options=QUICK)(PARAMS, *make_batch(*shape))


def assert_close(found, wanted, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=1e-5),
        found,
        wanted,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)])
def test_trains_in_the_users_own_shard_map(shape):
    (params, state), losses = trained(shape)
    mean = losses.mean((0, 1))
    assert mean[-1] < 0.7 * mean[0]
    assert int(state.masks[NAME].sum()) == 4
    assert int(state.num_rounds) == NUM_STEPS // 2 and bool(state.channels.is_frozen)
    dead = ~np.asarray(state.masks[NAME])
    moments = state.inner_state[0]
    for part in (params, moments.mu, moments.nu):
        assert not np.any(part["a"][..., dead]), "dead columns moved after the freeze"
        assert not np.any(part["bias"][..., dead])
        assert not np.any(part["b"][..., dead, :]), "dead rows moved after the freeze"
    z = state.global_consensus
    for host in range(shape[0]):
        assert_close(jax.tree.map(lambda x, i=host: x[i], params), z, 1e-6)


def test_types_need_not_be_tracked():
    assert_close(trained((2, 2), check_vma=False), trained((2, 2)))


def test_hosts_can_be_simulated_by_vmap():
    """No mesh: `vmap` with axis names gives what four hosts give."""
    tx = make_user_transform()
    run = functools.partial(train, tx, PARAMS)
    over_devices = jax.vmap(run, axis_name="device")
    simulated = jax.jit(jax.vmap(over_devices, axis_name="host"))
    (params, state), losses = simulated(*make_batch(4, 1))
    (mesh_params, mesh_state), mesh_losses = trained((4, 1))
    assert_close(losses, mesh_losses)
    assert_close(jax.tree.map(lambda x: x[:, 0], params), mesh_params)
    np.testing.assert_array_equal(state.masks[NAME][3, 0], mesh_state.masks[NAME])


@pytest.mark.parametrize(
    ("missing", "own"), [("device", ("host",)), ("host", ("device",))]
)
def test_gradients_that_jax_has_summed_are_refused(missing, own):
    tx = make_user_transform()

    def body(start, x, y):
        grads = jax.grad(loss_of)(vary(start, own), x[0, 0], y[0, 0])
        updates, _ = tx.update(grads, tx.init(start), vary(start, ("host",)))
        return updates

    run = jax.shard_map(
        body, mesh=make_mesh(2, 2), in_specs=(jax.P(), jax.P(*AXES), jax.P(*AXES)),
        out_specs=jax.P(),
    )  # fmt: skip
    with pytest.raises(UserError, match=f"do not vary over mesh axis '{missing}'"):
        jax.jit(run).trace(PARAMS, *make_batch(2, 2))


def test_one_trace_serves_every_call_and_every_mask():
    tx = make_user_transform(on_mesh=False)
    num_traces = 0

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(params, state, x, y):
        nonlocal num_traces
        num_traces += 1
        updates, state = tx.update(jax.grad(loss_of)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    found = set()
    x, y = (a[0, 0] for a in make_batch(1, 1))
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(8)
        params = {
            "a": PARAMS["a"][:, order], "bias": PARAMS["bias"][order],
            "b": PARAMS["b"][order],
        }  # fmt: skip
        state = tx.init(params)
        for _ in range(6):
            params, state = step(params, state, x, y)
        found.add(tuple(np.flatnonzero(state.masks[NAME])))
    assert len(found) > 1, "all runs kept the same channels: nothing was tested"
    assert num_traces == 1 and step._cache_size() == 1


@pytest.mark.slow
def test_counting_inside_the_program_equals_saying_when():
    """sync=None and kind=None decide as explicit arguments would."""
    core = make_core("leaky", on_mesh=False, freeze_round=1)
    target = jax.tree.map(lambda t: t[0, 0], targets_of((1, 1)))

    def step(params, state, **when):
        grads = jax.grad(quadratic)(params, target)
        updates, state = core.update(grads, state, params, **when)
        return optax.apply_updates(params, updates), state

    own = jax.jit(step, compiler_options=QUICK)
    told = jax.jit(step, static_argnames=("sync", "kind"), compiler_options=QUICK)
    left = right = (START, core.init(START))
    schedule = [(False, None), (True, "moving"), (False, None), (True, "freeze")]
    schedule += [(False, None), (True, "frozen")]
    for sync, kind in schedule:
        left = own(*left)
        right = told(*right, sync=sync, kind=kind)
    assert bool(left[1].channels.is_frozen) and int(left[1].num_rounds) == 3
    assert_close(left, right, 1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["recommended", "all"])
def test_state_keeps_its_types_for_bfloat16_parameters(form):
    """`scan` refuses a carry that changes its type, a `cond` two that differ."""
    core = make_core(form, on_mesh=False, freeze_round=1)
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), START)

    @jax.jit
    def run(params):
        def step(carry, _):
            params, state = carry
            grads = jax.tree.map(lambda x: x - 1, params)
            updates, state = core.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, core.init(params)), length=6)[0]

    params, state = run.lower(half).compile(QUICK)(half)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
    assert state.residuals.primal_device.dtype == jnp.float32
    assert np.isfinite(np.asarray(state.residuals)).all()


@pytest.mark.parametrize("form", ["recommended", "paper"])
def test_trees_without_groups_with_gaps_and_scalars(form):
    tx = hsadmm(optax.sgd(0.1), (), {}, parameters=FORMS[form], learning_rate=0.1)
    params = {"w": jnp.ones(3), "scale": jnp.ones(()), "nothing": None, "empty": ()}
    state = tx.init(params)
    updates, state = tx.update(params, state, params, sync=True, value=1.0)
    after = optax.apply_updates(params, updates)
    assert jax.tree.structure(after) == jax.tree.structure(params)
    assert float(after["scale"]) < 1 and state.masks == {}
    assert int(state.channels.num_changed) == 0


def test_members_that_a_tree_lacks_are_no_obstacle():
    """One list of groups serves a tree and parts of it, such as a frozen trunk."""
    rows = ChannelSlice("elsewhere/kernel", 0, np.arange(8)[:, None])
    group = ChannelGroup("a", 8, (*GROUPS[0].members, rows))
    tx = hsadmm(optax.sgd(0.1), (group, GROUPS[1]), FINAL)
    _, state = tx.update(draw(3), tx.init(START), START, sync=True)
    assert int(state.masks["a"].sum()) == FINAL["a"]


def test_enter_undoes_leave_for_a_whole_state():
    state = make_core("paper", on_mesh=False).init(START)
    placements = state_placements("consensus")
    back = enter(placements, leave(placements, state))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert_close(back, state, 0)


def test_an_optimizer_of_nnx_finds_channels_that_were_traced_on_its_state():
    """Its arrays lie under `value` in a state of NNX, and not where it updates them."""

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(4, 16, rngs=rngs)
            self.out = nnx.Linear(16, 2, rngs=rngs)

        def __call__(self, x):
            return self.out(jax.nn.relu(self.hidden(x)))

    network, x = Network(nnx.Rngs(0)), jnp.ones((8, 4))
    definition, params = nnx.split(network, nnx.Param)
    trace = trace_channels(lambda p, x: nnx.merge(definition, p)(x), params, x)
    (group,) = trace.groups
    assert "value" not in group.name and trace.explain("hidden/kernel/value")
    tx = hsadmm(
        optax.sgd(0.1), trace.groups, {group.name: 8}, sync_period=2, freeze_round=2
    )
    optimizer = nnx.Optimizer(network, tx, wrt=nnx.Param)
    for _ in range(6):
        grads = nnx.grad(lambda network: jnp.mean((network(x) - 1) ** 2))(network)
        optimizer.update(network, grads)
    assert int((network.hidden.kernel[...] != 0).any(0).sum()) == 8
