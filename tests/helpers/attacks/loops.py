"""Attacks by loops, branches and random numbers."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.helpers.attacks import KEY, SEQUENCES, X, attack


@attack({"a": (3, 6), "b": (3, 6), "r": (6, 6), "w": (6, 2)}, SEQUENCES)
def swap_carry(p, x):

    def step(c, xt):
        h, g = c
        return ((jnp.tanh(g @ p["r"] + xt @ p["a"]), h), h)

    (h, g), ys = lax.scan(step, (x[:, 0] @ p["a"], x[:, 1] @ p["b"]), x.swapaxes(0, 1))
    return (h + 2 * g) @ p["w"] + ys.sum(0) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, SEQUENCES, frozen=True)
def swap_carry_dead(p, x):
    h = x[:, 0] @ p["a"]

    def step(c, _):
        a, b, d = c
        return ((b, d, a), None)

    (a, b, d), _ = lax.scan(step, (h, jnp.cos(h), h + 1), None, length=4)
    return a.sum(-1, keepdims=True) + b @ p["w"] + d @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, SEQUENCES, frozen=True)
def rotate_ten(p, x):
    h = x[:, 0] @ p["a"]
    start = tuple([h] * 9 + [jnp.cos(h)])
    c, _ = lax.scan(lambda c, _: (c[1:] + c[:1], None), start, None, length=13)
    return c[0].sum(-1, keepdims=True) + c[3] @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)})
def fori_pow(p, x):
    return lax.fori_loop(0, 5, lambda i, h: h * jnp.cos(h) + i, x @ p["a"]) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, differentiable=False)
def while_norm(p, x):
    h = lax.while_loop(lambda h: (h * h).sum() > 1.0, lambda h: h * 0.7, x @ p["a"])
    return h @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, differentiable=False)
def while_any(p, x):
    h = lax.while_loop(lambda h: jnp.any(h > 1.0), lambda h: h * 0.7, x @ p["a"])
    return h @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, differentiable=False)
def while_count(p, x):
    h, n = lax.while_loop(
        lambda c: (c[0] ** 2).sum() > 1.0,
        lambda c: (c[0] * 0.7, c[1] + 1),
        (x @ p["a"], 0),
    )
    return (h @ p["w"], n)


@attack({"a": (3, 6), "b": (6, 6), "w": (6, 2)}, differentiable=False)
def deq(p, x):
    u = x @ p["a"]

    def body(c):
        z, _, i = c
        n = jnp.tanh(u + 0.3 * z @ p["b"])
        return (n, jnp.sum((n - z) ** 2), i + 1)

    z, _, _ = lax.while_loop(
        lambda c: (c[1] > 1e-08) & (c[2] < 30),
        body,
        (jnp.zeros_like(u), jnp.float32(1), 0),
    )
    return z @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)})
def cond_sum(p, x):
    h = x @ p["a"]
    h = lax.cond(h.sum() > 0, jnp.tanh, lambda h: jnp.cos(h), h)
    return h @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)})
def cond_sum2(p, x):
    h = x @ p["a"]
    h = lax.cond(h.sum() > 0, lambda h: jnp.ones_like(h), lambda h: jnp.cos(h), h)
    return h @ p["w"] + x @ p["a"] @ p["w"]


@attack({"a": (3, 6), "b": (3, 6), "w": (6, 2)})
def cond_branches_join(p, x):
    return lax.cond(x.sum() > 0, lambda: x @ p["a"], lambda: x @ p["b"]) @ p["w"]


@attack({"a": (3, 6), "b": (3, 6), "w": (6, 2)})
def switch_branches(p, x):
    return (
        lax.switch(
            jnp.argmax(x[0]),
            [
                lambda x: x @ p["a"],
                lambda x: jnp.zeros((4, 6)),
                lambda x: jnp.sin(x @ p["b"]),
            ],
            x,
        )
        @ p["w"]
    )


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def scan_channel_axis(p, x):
    h = x @ p["a"]
    c, ys = lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(4), h.T)
    return c[:, None] + ys.T @ p["w"]


@attack({"l": (4, 6, 6), "a": (3, 6), "w": (6, 2)})
def fori_layers(p, x):
    return (
        lax.fori_loop(0, 4, lambda i, h: h + jax.nn.relu(h @ p["l"][i]), x @ p["a"])
        @ p["w"]
    )


@attack({"l": (2, 3, 6, 6), "a": (3, 6), "w": (6, 2)})
def nested_scan(p, x):
    def inner(h, w):
        return (jnp.tanh(h @ w) + h, h.sum(-1))

    def outer(h, ws):
        return lax.scan(inner, h, ws)

    h, ys = lax.scan(outer, x @ p["a"], p["l"])
    return h @ p["w"] + ys.sum((0, 1))[:, None]


@attack({"a": (3, 6), "w": (6, 2)}, SEQUENCES)
def scan_uniform_carry(p, x):

    def step(c, xt):
        n = c * 0.5 + xt @ p["a"]
        return (n, c)

    c, ys = lax.scan(step, jnp.ones((2, 6)), x.swapaxes(0, 1))
    return c @ p["w"] + ys.sum(0) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, SEQUENCES)
def kv_cache(p, x):

    def step(c, t):
        xt = lax.dynamic_index_in_dim(x, t, 1, False)
        cache = lax.dynamic_update_slice(c, (xt @ p["a"])[:, None], (0, t, 0))
        return (cache, cache.sum(1) @ p["w"])

    c, ys = lax.scan(step, jnp.zeros((2, 5, 6)), jnp.arange(5))
    return ys.sum(0) + c.sum(1) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, SEQUENCES)
def lax_map(p, x):
    return lax.map(lambda r: jnp.tanh(r @ p["a"]) @ p["w"], x)


@attack({"a": (3, 6), "g": (3, 6), "w": (6, 2)}, SEQUENCES)
def assoc_scan(p, x):
    def f(a, b):
        return (a[0] * b[0], b[0] * a[1] + b[1])

    _, h = lax.associative_scan(f, (jax.nn.sigmoid(x @ p["g"]), x @ p["a"]), axis=1)
    return h @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def assoc_scan_channels(p, x):
    return lax.associative_scan(jnp.maximum, x @ p["a"], axis=1) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, SEQUENCES, KEY)
def dropout_scan(p, x, k):

    def step(c, xt):
        h, k = c
        k, s = jax.random.split(k)
        h = jnp.tanh(h + xt @ p["a"])
        h = jnp.where(jax.random.bernoulli(s, 0.6, h.shape), h / 0.6, 0)
        return ((h, k), h)

    (h, _), ys = lax.scan(step, (jnp.zeros((2, 6)), k), x.swapaxes(0, 1))
    return (h + ys.sum(0)) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, X, KEY)
def dropout_channel(p, x, k):
    h = x @ p["a"]
    return h * jax.random.bernoulli(k, 0.6, (6,)) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, X, KEY)
def noise_channel(p, x, k):
    h = x @ p["a"]
    return (h + jax.random.normal(k, (6,))) @ p["w"] + (
        h * jax.random.normal(k, h.shape)
    ).sum(-1, keepdims=True)


@attack({"a": (3, 6), "w": (6, 2)}, X, KEY, frozen=True)
def gumbel(p, x, k):
    return jax.nn.softmax(x @ p["a"] + jax.random.gumbel(k, (4, 6))) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, X, KEY)
def vmapped_dropout(p, x, k):
    def f(x, k):
        return jnp.where(jax.random.bernoulli(k, 0.5, (6,)), x @ p["a"], 0) @ p["w"]

    return jax.vmap(f)(x, jax.random.split(k, 4))


@attack({"a": (3, 6), "l": (6, 6), "w": (6, 2)})
def ten_shared_layers(p, x):
    h = x @ p["a"]
    layer = jax.jit(lambda h, w: jnp.tanh(h @ w) + h)
    for _ in range(4):
        h = layer(h, p["l"])
    return h @ p["w"]


@attack({"a": (3, 6), "l": (6, 6), "m": (6, 6), "w": (6, 2), "v": (6, 2)})
def shared_jit_two(p, x):
    layer = jax.jit(lambda h, w: jnp.tanh(h @ w))
    a = layer(x @ p["a"], p["l"])
    b = layer(x @ p["a"], p["m"])
    return a @ p["w"] + jnp.cos(b) @ p["v"]


@attack({"a": (3, 6), "w": (6, 2)})
def jit_twice_diff_dead(p, x):
    f = jax.jit(lambda h: (h * 2).sum(-1, keepdims=True))
    h = x @ p["a"]
    return f(h) + f(jnp.cos(h)) + h @ p["w"]


@attack(
    {
        "a": (3, 12),
        "A": (6, 4),
        "dt": (6, 6),
        "B": (6, 4),
        "C": (6, 4),
        "w": (6, 2),
        "cv": (3, 1, 6),
    },
    SEQUENCES,
)
def mamba(p, x):
    h = x @ p["a"]
    u, z = jnp.split(h, 2, -1)
    u = jax.nn.silu(
        lax.conv_general_dilated(
            u,
            p["cv"],
            (1,),
            ((2, 0),),
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=6,
        )
    )
    dt = jax.nn.softplus(u @ p["dt"])
    A = -jnp.exp(p["A"])
    dA = jnp.exp(dt[..., None] * A)
    dBu = (dt * u)[..., None] * (u @ p["B"])[:, :, None]

    def f(a, b):
        return (a[0] * b[0], b[0] * a[1] + b[1])

    _, s = lax.associative_scan(f, (dA, dBu), axis=1)
    y = jnp.einsum("btdn,btn->btd", s, u @ p["C"])
    return y * jax.nn.silu(z) @ p["w"]


@attack({"a": (3, 6), "th": (6,), "w": (6, 2)}, SEQUENCES)
def lru_complex(p, x):
    lam = jnp.exp(-jnp.exp(p["th"]) + 1j * p["th"])

    def f(a, b):
        return (a[0] * b[0], b[0] * a[1] + b[1])

    u = (x @ p["a"]).astype(jnp.complex64)
    _, h = lax.associative_scan(f, (jnp.broadcast_to(lam, u.shape), u), axis=1)
    return h.real @ p["w"]


@attack({"a": (3, 6), "d": (6,), "w": (6, 2)}, SEQUENCES)
def retention(p, x):
    h = x @ p["a"]
    g = jax.nn.sigmoid(p["d"])
    n = jnp.arange(5)
    D = jnp.where(n[:, None] >= n, g[:, None, None] ** (n[:, None] - n), 0.0)
    return jnp.einsum("cts,bsc->btc", D, h) @ p["w"]


@attack({"a": (3, 24), "r": (6, 24), "w": (6, 2)}, SEQUENCES)
def lstm_peek(p, x):

    def st(c, xt):
        h, s = c
        i, f, g, o = jnp.split(xt @ p["a"] + h @ p["r"], 4, -1)
        s = jax.nn.sigmoid(f + 1) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(s)
        return ((h, s), h)

    (h, s), ys = lax.scan(
        st,
        (jnp.zeros((2, 6)), jnp.zeros((2, 6))),
        x.swapaxes(0, 1),
        reverse=True,
        unroll=2,
    )
    return (jnp.concatenate([h, s]) @ p["w"], ys.sum(0) @ p["w"])


@attack({"a": (3, 18), "r": (6, 18), "w": (6, 2)}, SEQUENCES)
def gru(p, x):

    def st(h, xt):
        a = (xt @ p["a"]).reshape(-1, 3, 6)
        b = (h @ p["r"]).reshape(-1, 3, 6)
        z = jax.nn.sigmoid(a[:, 0] + b[:, 0])
        q = jax.nn.sigmoid(a[:, 1] + b[:, 1])
        n = jnp.tanh(a[:, 2] + q * b[:, 2])
        return ((1 - z) * n + z * h, None)

    return lax.scan(st, jnp.zeros((2, 6)), x.swapaxes(0, 1))[0] @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, SEQUENCES)
def cond_in_scan(p, x):

    def st(h, xt):
        return (
            lax.cond(xt.sum() > 0, lambda h: h + xt @ p["a"], lambda h: jnp.tanh(h), h),
            None,
        )

    return lax.scan(st, jnp.zeros((2, 6)), x.swapaxes(0, 1))[0] @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, SEQUENCES)
def remat_policy(p, x):
    f = jax.checkpoint(
        lambda x: jnp.tanh(
            __import__("jax.ad_checkpoint", fromlist=["x"]).checkpoint_name(
                x @ p["a"], "h"
            )
        ),
        policy=jax.checkpoint_policies.save_only_these_names("h"),
    )
    return f(x) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, KEY, X, frozen=True)
def gamma_sample(p, k, x):
    return lax.stop_gradient(jax.random.gamma(k, jax.nn.softplus(x @ p["a"]))) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, KEY, X, frozen=True)
def random_shuffle(p, k, x):
    return jax.random.permutation(k, x @ p["a"], axis=1) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, KEY, X)
def mixup(p, k, x):
    h = x @ p["a"]
    return (h * 0.3 + 0.7 * h[jax.random.permutation(k, 4)]) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, KEY, X, frozen=True)
def categorical(p, k, x):
    h = x @ p["a"]
    return jax.nn.one_hot(jax.random.categorical(k, h), 6) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2), "e": (6,)}, KEY, X)
def vae(p, k, x):
    m, s = jnp.split(x @ p["a"], 2, -1)
    z = m + jnp.exp(0.5 * s) * jax.random.normal(k, m.shape)
    kl = -0.5 * (1 + s - m**2 - jnp.exp(s)).sum(-1)
    return (z @ p["w"][:3], kl)


@attack({"a": (3, 6), "w": (6, 2)}, KEY, X)
def vae2(p, k, x):
    m = x @ p["a"]
    z = m + jax.random.normal(k, m.shape)
    return (z @ p["w"], 0.5 * (m**2).sum(-1))
