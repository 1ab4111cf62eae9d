"""Laws of H-SADMM, without and inside the caller's own `shard_map`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_mesh

from prunex_jax.channels import layouts_of, mask_channels, trace_channels
from prunex_jax.errors import UserError
from prunex_jax.optim import PRESETS, Hsadmm, HsadmmParameters, hsadmm, preset
from prunex_jax.trees import flatten_by_path

P = jax.P
# float32 sums in another order.
ROUNDING = 2e-6


def apply(params, x):
    hidden = jnp.tanh(x @ params["a"]["kernel"] + params["a"]["bias"][None])
    return hidden @ params["b"]["kernel"] + params["b"]["bias"][None]


def make_params(key=0, inputs=4, hidden=16, outputs=3):
    keys = jax.random.split(jax.random.key(key), 2)
    return {
        "a": {
            "kernel": jax.random.normal(keys[0], (inputs, hidden)),
            "bias": jnp.zeros(hidden),
        },
        "b": {
            "kernel": jax.random.normal(keys[1], (hidden, outputs)) / 4,
            "bias": jnp.zeros(outputs),
        },
    }


PARAMS = make_params()
GROUPS = trace_channels(apply, PARAMS, jnp.ones((2, 4))).groups
LAYOUTS = layouts_of(GROUPS, {k: v.shape for k, v in flatten_by_path(PARAMS).items()})
KEEP = {"a": 8}


def make_data(num_hosts, devices_per_host):
    """Inputs and targets per device; every host has its own optimum."""
    shape = (num_hosts, devices_per_host, 32)
    x = jax.random.normal(jax.random.key(1), (*shape, 4))
    shift = jnp.arange(num_hosts)[:, None, None, None] * 0.3
    return x, jnp.sin(2 * x[..., :3]) + shift


def loss_of(params, x, y):
    return jnp.mean((apply(params, x) - y) ** 2)


def placement_of(core, state):
    """Spec of every part of the state, as `HsadmmState` documents it."""
    copies = P("host", "device") if core.device_level == "consensus" else P("host")
    return state._replace(
        **{field: P() for field in state._fields}
        | {
            "inner_state": copies,
            "device_dual": copies,
            "host_consensus": P("host"),
            "host_dual": P("host"),
            "residuals": copies,
        }
    )


class Cluster:
    """H-SADMM in a shard_map of our own, as a user would write it."""

    def __init__(self, core, mesh):
        self.core, self.mesh = core, mesh
        self.num_lead = 2 if core.device_level == "consensus" else 1
        self.copies = P("host", "device") if self.num_lead == 2 else P("host")
        with_lead = functools.partial(jax.tree.map, self._lead)
        shapes = jax.eval_shape(
            dataclass_without_axes(core).init, PARAMS
        )
        self.specs = placement_of(core, shapes)
        self._with_lead = with_lead

    def _lead(self, x):
        return x.reshape((1,) * self.num_lead + x.shape)

    def _enter(self, params, state):
        state = jax.tree.map(
            lambda spec, part: jax.tree.map(
                lambda x: x.reshape(x.shape[len(spec):]), part
            ),
            self.specs, state, is_leaf=lambda s: isinstance(s, P),
        )
        return jax.tree.map(lambda x: x.reshape(x.shape[self.num_lead:]), params), state

    def _leave(self, params, state):
        state = jax.tree.map(
            lambda spec, part: jax.tree.map(
                lambda x: x.reshape((1,) * len(spec) + x.shape), part
            ),
            self.specs, state, is_leaf=lambda s: isinstance(s, P),
        )
        return jax.tree.map(self._lead, params), state

    def run(self, fn, in_specs=(), num_args=0):
        specs = (self.copies, self.specs)

        def body(params, state, *args):
            args = [jax.tree.map(lambda x: x[0, 0], a) for a in args]
            return self._leave(*fn(*self._enter(params, state), *args))

        return jax.jit(
            jax.shard_map(
                body, mesh=self.mesh,
                in_specs=(*specs, *[P("host", "device")] * num_args),
                out_specs=specs,
            )
        )

    def init(self):
        axes = ("host", "device") if self.num_lead == 2 else ("host",)

        def start(params):
            state = self.core.init(params)
            return self._leave(jax.lax.pcast(params, axes, to="varying"), state)

        return jax.jit(
            jax.shard_map(start, mesh=self.mesh, in_specs=P(),
                          out_specs=(self.copies, self.specs))
        )(PARAMS)

    def step(self, **kwargs):
        def fn(params, state, x, y):
            own = jax.lax.pcast(params, "device", to="varying") if self.num_lead == 1 else params
            grads = jax.grad(loss_of)(own, x, y)
            updates, state = self.core.update(grads, state, params, **kwargs)
            return optax.apply_updates(params, updates), state

        return self.run(fn, num_args=2)


def dataclass_without_axes(core):
    import dataclasses
    return dataclasses.replace(core, host_axis=None, device_axis=None)


def make_core(form="recommended", **kwargs):
    form = preset(form, 2) if isinstance(form, str) else form
    kwargs = {"sync_period": 2, "host_axis": "host", "device_axis": "device", **kwargs}
    return Hsadmm(optax.sgd(0.1, momentum=0.9), GROUPS, KEEP, form, **kwargs)


@pytest.mark.parametrize("level", ["gradient", "consensus"])
@pytest.mark.parametrize("form", sorted(PRESETS))
@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)])
def test_smoke(form, level, shape):
    core = make_core(form, device_level=level, freeze_round=3, learning_rate=0.1)
    cluster = Cluster(core, make_mesh(*shape))
    params, state = cluster.init()
    data = make_data(*shape)
    step = cluster.step()
    for _ in range(10):
        params, state = step(params, state, *data)
    assert step._cache_size() <= 2
    flat = [jnp.reshape(d, (-1, d.shape[-1])) for d in data]
    print(form, level, shape, loss_of(state.global_consensus, *flat), state.residuals)
