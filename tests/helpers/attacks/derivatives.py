"""Attacks by derivatives that people write, and by derivatives inside of networks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.helpers.attacks import IMAGES, SEQUENCES, X, attack, conv


@jax.custom_vjp
def clip_grad(x):
    return x


clip_grad.defvjp(
    lambda x: (x, None),
    lambda _, g: (g / jnp.sqrt(0.001 + (g * g).sum(-1, keepdims=True)),),
)


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def vjp_clip_dead_one(p, x):
    return clip_grad(jnp.cos(x @ p["a"])) @ p["w"]


@jax.custom_vjp
def scale_by_mean(u):
    return u


scale_by_mean.defvjp(
    lambda u: (u, u), lambda u, g: (g * (1 + u.mean(-1, keepdims=True)),)
)


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def vjp_mean_unknown(p, x):
    return scale_by_mean(x @ p["a"] + x[:, :1]) @ p["w"]


@jax.custom_jvp
def center_grad(u):
    return u


@center_grad.defjvp
def _(pr, t):
    return (pr[0], t[0] - t[0].mean(-1, keepdims=True))


# What is centred is no longer known, and is read with weight zero.
@attack({"a": (3, 6), "w": (6, 2)})
def jvp_center(p, x):
    return center_grad(jnp.cos(x @ p["a"])) @ p["w"]


@jax.custom_jvp
def scaled_jvp(u):
    return jnp.tanh(u)


@scaled_jvp.defjvp
def _(pr, t):
    return (jnp.tanh(pr[0]), t[0] * (pr[0] ** 2).mean(-1, keepdims=True))


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def jvp_mean_unknown(p, x):
    return scaled_jvp(x @ p["a"] + x[:, :1]) @ p["w"]


@jax.custom_vjp
def lsq(h, s):
    return jnp.round(jnp.clip(h / s, -4, 4)) * s


def _f(h, s):
    return (lsq(h, s), (h, s))


def _b(r, g):
    h, s = r
    v = h / s
    q = jnp.round(jnp.clip(v, -4, 4))
    ins = jnp.abs(v) < 4
    return (g * ins, jnp.sum(g * jnp.where(ins, q - v, q)) / np.sqrt(h.size * 4))


lsq.defvjp(_f, _b)


@attack({"a": (3, 6), "w": (6, 2), "s": jnp.float32(0.3)})
def lsq_quant(p, x):
    return lsq(jax.nn.relu(x @ p["a"]), p["s"]) @ lsq(p["w"], p["s"])


@jax.custom_vjp
def spike(u):
    return (u > 0).astype(jnp.float32)


spike.defvjp(lambda u: (spike(u), u), lambda u, g: (g / (1 + u * u),))


@attack({"a": (3, 6), "r": (6, 6), "w": (6, 2), "beta": (6,)}, SEQUENCES)
def snn(p, x):

    def step(c, xt):
        v, s = c
        v = p["beta"] * v * (1 - s) + xt @ p["a"] + s @ p["r"]
        s = spike(v - 0.5)
        return ((v, s), s)

    z = jnp.zeros((2, 6))
    _, ys = lax.scan(step, (z, z), x.swapaxes(0, 1))
    return ys.mean(0) @ p["w"] + 0.1 * ys.sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def powscale(x, k):
    return x * k


powscale.defvjp(lambda x, k: (x * k, None), lambda k, _, g: (g * k * 2,))


@attack({"a": (3, 6), "w": (6, 2)})
def vjp_nondiff(p, x):
    return powscale(jnp.sin(x @ p["a"]), 3.0) @ p["w"]


@jax.custom_vjp
def masked_vjp(x, m):
    return x * m


masked_vjp.defvjp(lambda x, m: (x * m, m), lambda m, g: (g * m * 1.5, None))


@attack({"a": (3, 6), "w": (6, 2)})
def vjp_int_arg(p, x):
    h = x @ p["a"]
    return masked_vjp(h, (h > 0).astype(jnp.int32)) @ p["w"]


@jax.custom_jvp
def int_jvp(x, n):
    return x * n


@int_jvp.defjvp
def _(pr, t):
    return (pr[0] * pr[1], t[0] * pr[1] * 2.0)


@attack({"a": (3, 6), "w": (6, 2)})
def jvp_int_arg(p, x):
    h = x @ p["a"]
    return int_jvp(h, (h > 0).astype(jnp.int32)) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, jax.random.key(3), X)
def vjp_key_arg(p, k, x):

    @jax.custom_vjp
    def noisy(h, k):
        return h + jax.random.normal(k, h.shape)

    noisy.defvjp(
        lambda h, k: (noisy(h, k), k),
        lambda k, g: (g * jax.random.bernoulli(k, 0.5, g.shape), None),
    )
    return noisy(x @ p["a"], k) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def vjp_in_jit_in_remat(p, x):
    f = jax.checkpoint(jax.jit(lambda h: clip_grad(jnp.cos(h)) * 2))
    return f(f(x @ p["a"])) @ p["w"]


@attack({"a": (3, 6), "b": (6, 5), "w": (5, 1)})
def forces(p, x):
    def e(x):
        return (jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["w"]).sum()

    return (jax.grad(e)(x), e(x))


@attack({"a": (3, 6), "b": (6, 5), "w": (5, 1)})
def hessian_trace(p, x):
    def u(x):
        return (jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["w"])[0]

    return jax.vmap(lambda x: jnp.trace(jax.hessian(u)(x)))(x)


@attack({"k": (3, 3, 3, 6), "l": (3, 3, 6, 4), "w": (4, 2)}, IMAGES)
def conv_forces(p, x):

    def e(x):
        h = jax.nn.relu(conv(x, p["k"], 2))
        h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")
        return (jax.nn.silu(conv(h, p["l"])).mean((1, 2)) @ p["w"]).sum()

    return jax.grad(e)(x)


@attack({"k": (3, 3, 3, 6), "l": (3, 3, 6, 4), "w": (4, 2)}, IMAGES)
def conv_forces_smooth(p, x):

    def e(x):
        h = jax.nn.silu(conv(x, p["k"], 2))
        h = lax.reduce_window(h, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")
        return (jax.nn.silu(conv(h, p["l"])).mean((1, 2)) @ p["w"]).sum()

    return jax.grad(e)(x)


@attack({"a": (3, 6), "w": (6, 2)})
def maml_clipped(p, x):
    def loss(q):
        return ((jnp.tanh(x @ q["a"]) @ q["w"]) ** 2).mean()

    g = jax.grad(loss)(p)
    n = jnp.sqrt(sum((v * v).sum() for v in jax.tree.leaves(g)))
    q = jax.tree.map(lambda a, b: a - 0.1 * b / n, p, g)
    return jnp.tanh(x @ q["a"]) @ q["w"]


@jax.custom_jvp
def ste(q, x):
    return q


ste.defjvp(lambda pr, t: (pr[0], t[1]))


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def ste_uniform(p, x):
    h = x @ p["a"]
    return ste(jnp.broadcast_to(x[:, :1], (4, 6)), h) @ p["w"] + h @ p["w"]


@attack({"a": (3, 6), "b": (3, 6), "w": (6, 2)})
def ste_other(p, x):
    return ste(x @ p["b"], x @ p["a"]) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def ste_frozen(p, x):
    h = x @ p["a"]
    return ste(jnp.concatenate([x, x], -1), h).sum(-1, keepdims=True) + h @ p["w"]


@jax.custom_vjp
def keep2(q, h):
    return h


keep2.defvjp(lambda q, h: (h, None), lambda r, g: (g, g))


@attack({"a": (3, 6), "q": (3, 6), "w": (6, 2)}, frozen=True)
def vjp_frozen_operand(p, x):
    return keep2(jnp.concatenate([x, x], -1) * p["q"].sum(), x @ p["a"]) @ p["w"]


@attack({"a": (3, 6), "q": (2,), "w": (6, 2)}, frozen=True)
def vjp_uniform_operand(p, x):
    return keep2(jnp.broadcast_to(p["q"][0] * x[:, :1], (4, 6)), x @ p["a"]) @ p["w"]


@jax.custom_jvp
def wrongsin(x):
    return jnp.sin(x)


@wrongsin.defjvp
def _(pr, t):
    return (wrongsin(pr[0]), 2 * wrongsin(pr[0] + 1) * t[0])


@attack({"a": (3, 6), "w": (6, 2)})
def third_order(p, x):
    return wrongsin(x @ p["a"]) @ p["w"]


@attack({"a": (3, 6), "w": (6, 1)})
def custom_inside_grads(p, x):
    def u(x):
        return (wrongsin(x @ p["a"]) @ p["w"])[0]

    return jax.vmap(jax.hessian(u))(x).sum((1, 2))


@attack({"a": (3, 6), "w": (6, 2)})
def relu_hess(p, x):
    def u(x):
        return jax.nn.relu(x @ p["a"]) @ p["w"]

    return jax.jvp(u, (x,), (jnp.ones_like(x),))


@jax.custom_jvp
def multi(x, y):
    return (x * y, jnp.sum(y, -1))


@multi.defjvp
def _(pr, t):
    x, y = pr
    return (multi(x, y), (t[0] * y * 2, jnp.sum(t[1], -1) + x.sum(-1) * 0))


@attack({"a": (3, 6), "b": (3, 6), "w": (6, 2)})
def jvp_multi(p, x):
    u, v = multi(x @ p["a"], x @ p["b"])
    return u @ p["w"] + v[:, None]


@attack({"a": (3, 6), "w": (6, 2)})
def vjp_residual_only(p, x):

    @jax.custom_vjp
    def f(h, s):
        return h * jnp.exp(s)

    f.defvjp(
        lambda h, s: (f(h, s), (h, s)),
        lambda r, g: (
            g * jnp.exp(r[1]) * (1 + jax.nn.softmax(r[0], 0)),
            jnp.sum(g * r[0]),
        ),
    )
    return f(x @ p["a"], p["w"].sum()) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)})
def vjp_in_scan(p, x):

    @jax.custom_vjp
    def f(h):
        return jnp.tanh(h)

    f.defvjp(lambda h: (f(h), h), lambda h, g: (g * 2 * jnp.cos(h),))
    h, _ = lax.scan(lambda h, _: (f(h) + h, None), x @ p["a"], None, length=3)
    return h @ p["w"]


@attack({"a": (3, 6), "f": (6, 6), "w": (6, 2)}, frozen=None)
def odeint_weights(p, x):
    from jax.experimental.ode import odeint

    return (
        odeint(
            lambda y, t, q: jnp.tanh(y @ q), x @ p["a"], jnp.array([0.0, 0.5]), p["f"]
        )[-1]
        @ p["w"]
    )


@attack({"a": (3, 6), "w": (6, 2)}, frozen=None)
def custom_root(p, x):
    return (
        lax.custom_root(
            lambda z: z - jnp.cos(0.3 * z) - x @ p["a"],
            x @ p["a"],
            lambda f, z: lax.fori_loop(0, 30, lambda i, z: z - f(z), z),
            lambda g, y: y / g(jnp.ones_like(y)),
        )
        @ p["w"]
    )


@attack({"a": (3, 6), "w": (6, 2)}, frozen=False)
def linear_solve(p, x):
    h = x @ p["a"]
    return (
        jax.scipy.sparse.linalg.cg(lambda v: v * 2 + v * h * h * 0.1, h, maxiter=5)[0]
        @ p["w"]
    )


# Gradients mix channels where the transpose does.
@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def linear_solve_transposed_wrong(p, x):
    h = x @ p["a"]
    solved = lax.custom_linear_solve(
        lambda v: 2 * v,
        h,
        lambda _, b: b / 2,
        lambda _, b: b / 2 + jnp.square(b).sum(1, keepdims=True),
    )
    return solved @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def linear_call_transposed_wrong(p, x):
    wrong = lambda r, t: r * t + t.sum(1, keepdims=True)  # noqa: E731
    call = jax.custom_derivatives.linear_call
    return call(jnp.multiply, wrong, 2 * jnp.ones(6), x @ p["a"]) @ p["w"]


# What is said to be the transpose moves channels that are dead and not zero.
@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def linear_call_moves_dead(p, x):
    moved = lambda r, t: t + r  # noqa: E731
    h = jnp.sin(x @ p["a"] + x.sum(1, keepdims=True))
    call = jax.custom_derivatives.linear_call
    return call(lambda _, v: v, moved, jnp.ones((4, 6)), h) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def callback(p, x):
    h = x @ p["a"]
    return (
        jax.pure_callback(
            lambda h: np.tanh(h),
            jax.ShapeDtypeStruct(h.shape, h.dtype),
            lax.stop_gradient(h),
            vmap_method="sequential",
        )
        @ p["w"]
    )


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def debug_print(p, x):
    h = x @ p["a"]
    jax.debug.callback(lambda h: None, h)
    return h @ p["w"]


# Derivatives that are not zero where channels are dead.


@jax.custom_jvp
def jvp_shift(h, s):
    return h * 1.0


jvp_shift.defjvp(lambda pr, t: (pr[0] * 1.0, t[0] + t[1]))


@attack({"a": (3, 6), "s": jnp.float32(0.4)}, frozen=True)
def jvp_moves_dead(p, x):
    return jvp_shift(x @ p["a"], p["s"]).sum(-1)


@attack({"a": (3, 6), "s": jnp.float32(0.4), "w": (6, 2)})
def jvp_moves_dead_weighted(p, x):
    return jvp_shift(x @ p["a"], p["s"]) @ p["w"]


@jax.custom_jvp
def jvp_root(h):
    return h * 1.0


jvp_root.defjvp(lambda pr, t: (pr[0] * 1.0, t[0] / jnp.sqrt(jnp.abs(pr[0]))))


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def jvp_infinite_at_dead(p, x):
    return jvp_root(x @ p["a"]) @ p["w"]


@jax.custom_vjp
def decayed(h):
    return h


decayed.defvjp(lambda h: (h, h), lambda h, g: (g + 0.1 * h,))


@attack({"a": (3, 6), "s": jnp.float32(0.4), "w": (6, 2)}, frozen=True)
def vjp_moves_shared(p, x):
    return decayed(x @ p["a"] + p["s"]) @ p["w"]


@attack({"a": (3, 6), "b": (6,), "w": (6, 2)})
def vjp_moves_owned(p, x):
    return decayed(x @ p["a"] + p["b"]) @ p["w"]


@attack({"a": (3, 6), "g": (6,), "s": jnp.float32(0.4), "w": (6, 2)}, frozen=True)
def vjp_moves_shared_gated(p, x):
    return (decayed(x @ p["a"] + p["s"]) * p["g"]).sum(-1)


@jax.custom_vjp
def squared(h):
    return h


squared.defvjp(lambda h: (h, h), lambda h, g: (g * (1 + h * h),))


@attack({"a": (3, 6), "s": jnp.float32(0.4), "w": (6, 2)})
def vjp_scales_shared(p, x):
    return squared(x @ p["a"] + p["s"]) @ p["w"]


f_wrapped = jax.custom_vjp(jnp.tanh)


f_wrapped.defvjp(
    lambda h: (jnp.tanh(h), h),
    lambda h, g: (
        g * (1 - jnp.tanh(h) ** 2) / jnp.sqrt(0.001 + (g * g).sum(-1, keepdims=True)),
    ),
)


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def custom_around_jnp(p, x):
    return f_wrapped(jnp.cos(x @ p["a"])) @ p["w"]


j_wrapped = jax.custom_jvp(jnp.tanh)


j_wrapped.defjvp(
    lambda pr, t: (jnp.tanh(pr[0]), t[0] * (1 + pr[0].mean(-1, keepdims=True)))
)


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def custom_jvp_around_jnp(p, x):
    return j_wrapped(x @ p["a"] + x[:, :1]) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)})
def platform_dep(p, x):
    return (
        lax.platform_dependent(
            x @ p["a"], cpu=lambda h: jnp.cos(h), default=lambda h: jnp.tanh(h)
        )
        @ p["w"]
    )


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def new_ref(p, x):
    r = jax.new_ref(x @ p["a"])
    r[...] = jnp.tanh(r[...])
    return r[...] @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def shardmap(p, x):
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as S

    m = Mesh(np.array(jax.devices()[:1]), ("d",))
    return (
        jax.shard_map(lambda h: jnp.tanh(h), mesh=m, in_specs=S("d"), out_specs=S("d"))(
            x @ p["a"]
        )
        @ p["w"]
    )
