"""A small problem for H-SADMM, and its runs on a mesh.

Two kernels, two channel groups, so that one kernel is pruned on both axes, and a vector
that no group touches. Every copy has a quadratic loss of its own: the gradient is
theta - target, known without jax, and does not vanish on dead entries, so that nothing
is zero by luck.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prunex_jax.base.sync import SyncSchedule
from prunex_jax.channels import ChannelGroup, ChannelSlice
from prunex_jax.comm import TopK
from prunex_jax.mesh import ALONE, leave, specs_of, vary
from prunex_jax.methods.hsadmm import Hsadmm, HsadmmParameters, preset, state_placements
from tests.helpers.common import MESH, make_mesh

AXES = ("host", "device")
SHAPES = {"a": {"kernel": (3, 8)}, "b": {"kernel": (8, 6)}, "free": (2,)}
SIZES = {"a": 8, "b": 6}
FULL, FINAL = {"a": 8, "b": 6}, {"a": 4, "b": 3}
# Compiling takes longer than running here.
QUICK = {"xla_backend_optimization_level": 0}
LEARNING_RATE, MOMENTUM = 0.05, 0.9
SYNC_PERIOD = 2
ROUNDS = (
    ("frozen", FULL),  # dense warm-up
    ("moving", {"a": 6, "b": 5}),
    ("freeze", FINAL),
    ("frozen", FINAL),
)


def _members(group, *places):
    return tuple(
        ChannelSlice(path, axis, np.arange(SIZES[group])[:, None])
        for path, axis in places
    )


GROUPS = (
    ChannelGroup("a", 8, _members("a", ("a/kernel", 1), ("b/kernel", 0))),
    ChannelGroup("b", 6, _members("b", ("b/kernel", 1))),
)

PLAIN = HsadmmParameters()
FORMS = {
    "recommended": preset("recommended", SYNC_PERIOD),
    "reset": preset("reset", SYNC_PERIOD),  # without momentum of z
    "leaky": preset("leaky", SYNC_PERIOD),
    "paper": preset("paper", SYNC_PERIOD),
    # One level, full dual: the pull of the paper without z_i and v.
    "flat": preset("paper", SYNC_PERIOD, rho_host=0.0),
    # Everything at once.
    "all": PLAIN.replace(
        prox_strength=0.3,
        dual_decay=0.7,
        rho_device=0.02,
        rho_host=5.0,
        outer_step=0.8,
        outer_momentum=0.4,
    ),
    # The step follows the cosines of movements, while channels are removed.
    "law": PLAIN.replace(outer="law", outer_momentum=0.6),
    # Channels are ranked by what their gradients say.
    "taylor": PLAIN.replace(outer_momentum=0.3, criterion="taylor"),
    "taylor leaky": preset("leaky", SYNC_PERIOD, criterion="taylor"),
    # Ten of 72 numbers are sent; the other levels and duals are there as well.
    "largest": PLAIN.replace(outer_momentum=0.3, error_decay=0.9, top=TopK(10)),
    "largest paper": PLAIN.replace(
        prox_strength=0.3,
        dual_decay=0.7,
        rho_device=0.02,
        rho_host=0.05,
        error_decay=0.8,
        top=TopK(10),
    ),
}


def is_shape(x):
    return isinstance(x, tuple)


def draw(seed, lead=()):
    """Normal numbers in the shapes of the parameters, with leading axes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(size=lead + shape).astype(np.float32),
        SHAPES,
        is_leaf=is_shape,
    )


START = draw(0)


def targets_of(shape, same_on_devices=False):
    """Where every device would like its copy to be, [hosts, devices, ...]."""
    targets = draw(1, shape)
    if same_on_devices:
        targets = jax.tree.map(
            lambda t: np.broadcast_to(t[:, :1], t.shape).copy(), targets
        )
    return targets


def quadratic(params, target):
    gaps = jax.tree.map(lambda p, t: jnp.sum((p - t) ** 2) / 2, params, target)
    return sum(jax.tree.leaves(gaps))


def make_core(form="recommended", level="gradient", on_mesh=True, inner=None, **kwargs):
    settings = {
        "sync": SyncSchedule(SYNC_PERIOD),
        "learning_rate": LEARNING_RATE,
        "device_level": level,
        "axes": MESH if on_mesh else ALONE,
        **kwargs,
    }
    return Hsadmm(
        optax.sgd(LEARNING_RATE, MOMENTUM) if inner is None else inner,
        GROUPS,
        FINAL,
        FORMS[form] if isinstance(form, str) else form,
        **settings,
    )


def specs_for(core):
    """Placements and specs of (params, state)."""
    state = state_placements(core.device_level)
    placements = (state.inner_state, state)
    return placements, specs_of(placements)


def local_steps(core, params, state, target):
    for _ in range(core.sync.period):
        grads = jax.grad(quadratic)(vary(params, AXES), target)
        updates, state = core.local_update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def run_rounds(core, shape, targets, rounds=ROUNDS, start=START):
    """(params, state) after every round, with placement axes, as numpy arrays."""
    placements, specs = specs_for(core)

    def body(start, target):
        target = jax.tree.map(lambda t: t[0, 0], target)
        params, state = core.copies.spread(start), core.init(start)
        history = []
        for kind, counts in rounds:
            params, state = local_steps(core, params, state, target)
            params, state = core.exchange(params, state, keep_counts=counts, kind=kind)
            history.append(leave(placements, (params, state)))
        return history

    run = jax.shard_map(
        body,
        mesh=make_mesh(*shape),
        in_specs=(jax.P(), jax.P(*AXES)),
        out_specs=[specs] * len(rounds),
    )
    fast = jax.jit(run, compiler_options=QUICK)
    return jax.tree.map(np.asarray, fast(start, targets))


@functools.cache
def history_of(form, level, shape, same_on_devices=False):
    """The standard run; several tests look at the same one."""
    return run_rounds(make_core(form, level), shape, targets_of(shape, same_on_devices))


def block(x, placed, i, j):
    """What one copy holds of a value with placement axes."""
    index = {"replicated": (), "per_host": (i,), "per_device": (i, j)}[placed]
    return jax.tree.map(lambda leaf: leaf[index], x)
