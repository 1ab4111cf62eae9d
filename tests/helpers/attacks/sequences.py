"""Attacks by attention, mixtures of experts, embeddings and products of matrices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.helpers.attacks import SEQUENCES, TOKENS, X, attack
from tests.helpers.channel_checks import draw


def rms(v):
    return v * lax.rsqrt(jnp.mean(v * v, -1, keepdims=True) + 1e-06)


@attack({"wi": (8, 8), "wo": (8, 3)}, TOKENS)
def softmax_channel(p, x):
    return jax.nn.softmax(x @ p["wi"], -1) @ p["wo"]


@attack({"q": (8, 6), "k": (8, 6), "v": (8, 4), "o": (4, 3)}, TOKENS)
def linear_attention_softmax(p, x):
    q = jax.nn.softmax(x @ p["q"], -1)
    k = jax.nn.softmax(x @ p["k"], 1)
    return q @ jnp.einsum("btk,btv->bkv", k, x @ p["v"]) @ p["o"]


@attack({"q": (8, 6), "k": (8, 6), "v": (8, 4), "o": (4, 3)}, TOKENS)
def linear_attention_relu(p, x):
    q = jax.nn.relu(x @ p["q"])
    k = jax.nn.relu(x @ p["k"])
    kv = jnp.cumsum(k[..., :, None] * (x @ p["v"])[..., None, :], 1)
    z = (q * jnp.cumsum(k, 1)).sum(-1, keepdims=True)
    return jnp.einsum("btk,btkv->btv", q, kv) / (z + 0.001) @ p["o"]


@attack({"qkv": (8, 3, 4, 2), "o": (4, 2, 8), "n": (8,), "w": (8, 3)}, TOKENS)
def mha_einsum(p, x):
    x = x @ jnp.eye(8)
    h = x * p["n"]
    q, k, v = jnp.einsum("btd,dchk->cbthk", h, p["qkv"])
    a = jax.nn.softmax(
        jnp.where(
            jnp.tril(jnp.ones((5, 5), bool)),
            jnp.einsum("bqhk,bthk->bhqt", q, k),
            -jnp.inf,
        )
    )
    return (x + jnp.einsum("bhqt,bthk,hkd->bqd", a, v, p["o"])) @ p["w"]


@attack({"qkv": (8, 24), "o": (8, 8), "w": (8, 3)}, TOKENS)
def mha_fused(p, x):
    qkv = (x @ p["qkv"]).reshape(2, 5, 3, 2, 4).transpose(2, 0, 3, 1, 4)
    q, k, v = (qkv[0], qkv[1], qkv[2])
    return (
        (jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v)
        .transpose(0, 2, 1, 3)
        .reshape(2, 5, 8)
        @ p["o"]
        @ p["w"]
    )


@attack({"qkv": (8, 24), "o": (8, 8), "w": (8, 3)}, TOKENS)
def mha_head_major(p, x):
    q, k, v = jnp.split((x @ p["qkv"]).reshape(2, 5, 2, 12), 3, -1)
    return (
        jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v
        ).reshape(2, 5, 8)
        @ p["o"]
        @ p["w"]
    )


@attack(
    {"q": (8, 8), "k": (8, 8), "v": (8, 8), "o": (8, 3), "s": (4,), "t": (4,)}, TOKENS
)
def qk_norm(p, x):
    def sp(w):
        return (x @ w).reshape(2, 5, 2, 4)

    q = rms(sp(p["q"])) * p["s"]
    k = rms(sp(p["k"])) * p["t"]
    return (
        jnp.einsum(
            "bhqk,bkhd->bqhd",
            jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)),
            sp(p["v"]),
        ).reshape(2, 5, 8)
        @ p["o"]
    )


@attack({"q": (8, 8), "k": (8, 8), "v": (8, 8), "o": (8, 3)}, TOKENS)
def cosine_attention(p, x):
    def sp(w):
        return (x @ w).reshape(2, 5, 2, 4)

    def n(v):
        return v / jnp.linalg.norm(v, axis=-1, keepdims=True)

    return (
        jnp.einsum(
            "bhqk,bkhd->bqhd",
            jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", n(sp(p["q"])), n(sp(p["k"])))),
            sp(p["v"]),
        ).reshape(2, 5, 8)
        @ p["o"]
    )


@attack({"q": (8, 8), "k": (8, 4), "v": (8, 4), "o": (8, 3)}, TOKENS)
def jax_dot_product_attention(p, x):
    q = (x @ p["q"]).reshape(2, 5, 2, 4)
    k = (x @ p["k"]).reshape(2, 5, 1, 4)
    v = (x @ p["v"]).reshape(2, 5, 1, 4)
    return (
        jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(2, 5, 8) @ p["o"]
    )


@attack({"q": (8, 8), "k": (8, 8), "v": (8, 8), "o": (8, 3), "rp": (9, 2)}, TOKENS)
def rel_bias(p, x):
    def sp(w):
        return (x @ w).reshape(2, 5, 2, 4)

    idx = np.arange(5)[:, None] - np.arange(5) + 4
    a = jnp.einsum("bqhd,bkhd->bhqk", sp(p["q"]), sp(p["k"])) + p["rp"][idx].transpose(
        2, 0, 1
    )
    return (
        jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(a), sp(p["v"])).reshape(2, 5, 8)
        @ p["o"]
    )


@attack({"q": (8, 8), "k": (8, 8), "v": (8, 8), "o": (8, 3)}, TOKENS)
def alibi(p, x):
    def sp(w):
        return (x @ w).reshape(2, 5, 4, 2)

    sl = jnp.array([0.5, 0.25, 0.125, 0.06])
    d = jnp.arange(5)[None] - jnp.arange(5)[:, None]
    a = jnp.einsum("bqhd,bkhd->bhqk", sp(p["q"]), sp(p["k"])) + sl[:, None, None] * d
    return (
        jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(a), sp(p["v"])).reshape(2, 5, 8)
        @ p["o"]
    )


@attack({"q": (8, 8), "v": (8, 8), "o": (8, 3), "th": (4, 4)}, TOKENS)
def talking_heads(p, x):
    def sp(w):
        return (x @ w).reshape(2, 5, 4, 2)

    a = jnp.einsum("bqhd,bkhd,hg->bgqk", sp(p["q"]), sp(p["q"]), p["th"])
    return (
        jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(a), sp(p["v"])).reshape(2, 5, 8)
        @ p["o"]
    )


@attack(
    {"t1": (5, 6), "t2": (6, 5), "c1": (8, 7), "c2": (7, 8), "e": (8, 8), "o": (8, 3)},
    TOKENS,
)
def mixer(p, x):
    x = x @ p["e"]
    x = x + (jax.nn.gelu(x.swapaxes(1, 2) @ p["t1"]) @ p["t2"]).swapaxes(1, 2)
    x = x + jax.nn.gelu(x @ p["c1"]) @ p["c2"]
    return x.mean(1) @ p["o"]


@attack(
    {"e": (8, 8), "r": (8, 4), "w1": (4, 8, 6), "w2": (4, 6, 8), "o": (8, 3)}, TOKENS
)
def moe_onehot(p, x):
    x = (x @ p["e"]).reshape(10, 8)
    g = jax.nn.softmax(x @ p["r"])
    i = jnp.argmax(g, -1)
    d = jax.nn.one_hot(i, 4) * g.max(-1, keepdims=True)
    h = jax.nn.relu(jnp.einsum("nd,ne,edf->enf", x, d, p["w1"]))
    return jnp.einsum("enf,efd,ne->nd", h, p["w2"], d) @ p["o"]


@attack(
    {"e": (8, 8), "r": (8, 4), "w1": (4, 8, 6), "w2": (4, 6, 8), "o": (8, 3)}, TOKENS
)
def moe_topk_capacity(p, x):
    x = (x @ p["e"]).reshape(10, 8)
    g = jax.nn.softmax(x @ p["r"])
    v, i = lax.top_k(g, 2)
    oh = jax.nn.one_hot(i, 4)
    pos = (jnp.cumsum(oh.reshape(20, 4), 0).reshape(10, 2, 4) - oh) * oh
    pos = pos.sum(-1).astype(int)
    disp = jnp.einsum("nke,nkc->nec", oh, jax.nn.one_hot(pos, 5))
    comb = jnp.einsum("nke,nkc,nk->nec", oh, jax.nn.one_hot(pos, 5), v)
    xi = jnp.einsum("nec,nd->ecd", disp, x)
    y = jnp.einsum("ecd,edf->ecf", xi, p["w1"])
    y = jnp.einsum("ecf,efd->ecd", jax.nn.relu(y), p["w2"])
    return jnp.einsum("nec,ecd->nd", comb, y) @ p["o"]


@attack(
    {"e": (8, 8), "r": (8, 4), "w1": (4, 8, 6), "w2": (4, 6, 8), "o": (8, 3)}, TOKENS
)
def moe_gather_weights(p, x):
    x = (x @ p["e"]).reshape(10, 8)
    i = jnp.argmax(x @ p["r"], -1)
    w1 = p["w1"][i]
    w2 = p["w2"][i]
    return (
        jnp.einsum("nf,nfd->nd", jax.nn.relu(jnp.einsum("nd,ndf->nf", x, w1)), w2)
        @ p["o"]
    )


@attack(
    {"e": (8, 8), "w1": (4, 8, 6), "w2": (4, 6, 8), "o": (8, 3), "b": (4, 6)}, TOKENS
)
def moe_soft_vmap(p, x):
    x = x @ p["e"]
    y = jax.vmap(lambda a, b, c: jax.nn.relu(x @ a + c) @ b)(p["w1"], p["w2"], p["b"])
    return y.mean(0) @ p["o"]


@attack({"e": (8, 8), "w": (4, 8, 6), "b": (4, 6), "o": (6, 3)}, TOKENS)
def maxout_stack(p, x):
    return (
        jnp.einsum("btd,kdf->kbtf", x @ p["e"], p["w"]) + p["b"][:, None, None]
    ).max(0) @ p["o"]


@attack({"e": (8, 12), "o": (6, 3)}, TOKENS)
def maxout_pairs(p, x):
    return (x @ p["e"]).reshape(2, 5, 6, 2).max(-1) @ p["o"]


@attack({"e": (8, 12), "o": (6, 3)}, TOKENS)
def glu_interleaved(p, x):
    h = x @ p["e"]
    return h[..., ::2] * jax.nn.sigmoid(h[..., 1::2]) @ p["o"]


@attack({"e": (8, 12), "o": (12, 3)}, TOKENS)
def rotary_interleaved(p, x):
    h = x @ p["e"]
    ang = jnp.arange(5)[:, None] * (1 / 10 ** (jnp.arange(6) / 6))
    c, s = (jnp.cos(ang), jnp.sin(ang))
    a, b = (h[..., ::2], h[..., 1::2])
    return jnp.stack([a * c - b * s, a * s + b * c], -1).reshape(2, 5, 12) @ p["o"]


@attack({"e": (8, 6), "o": (36, 3)}, TOKENS, frozen=True)
def gram(p, x):
    h = x @ p["e"]
    return jnp.einsum("btc,btd->bcd", h, h).reshape(2, 36) @ p["o"]


@attack({"e": (8, 6), "o": (6, 6, 3)}, TOKENS)
def gram_kept(p, x):
    h = x @ p["e"]
    return jnp.einsum("btc,btd,cdo->bo", h, h, p["o"])


@attack({"e": (8, 6), "f": (8, 5), "o": (30, 3)}, TOKENS)
def bilinear(p, x):
    return ((x @ p["e"])[..., :, None] * (x @ p["f"])[..., None, :]).reshape(
        2, 5, 30
    ) @ p["o"]


@attack({"e": (8, 6)}, TOKENS)
def covariance(p, x):
    h = x @ p["e"]
    h = h - h.mean(1, keepdims=True)
    c = jnp.einsum("btc,btd->bcd", h, h)
    return (c * c).sum((1, 2))


@attack({"e": (8, 6)}, TOKENS, frozen=True)
def logdet_cov(p, x):
    h = x @ p["e"]
    c = jnp.einsum("btc,btd->bcd", h, h) + jnp.eye(6)
    return jnp.linalg.slogdet(c)[1]


@attack({"e": (8, 6), "o": (6, 3)}, TOKENS)
def einsum_diag(p, x):
    h = x @ p["e"]
    g = jnp.einsum("btc,btd->bcd", h, h)
    return jnp.einsum("bcc->bc", g) @ p["o"]


@attack({"e": (8, 6), "o": (6, 3)}, TOKENS)
def einsum_trace(p, x):
    h = x @ p["e"]
    g = jnp.einsum("btc,btd->bcd", h, h)
    return jnp.einsum("bcc->b", g)[:, None] + h.mean(1) @ p["o"]


@attack({"e": (8, 6), "o": (6, 3)}, TOKENS, frozen=True)
def jnp_diagonal(p, x):
    h = x @ p["e"]
    g = jnp.einsum("btc,btd->bcd", h, h)
    return jnp.diagonal(g, axis1=1, axis2=2) @ p["o"]


@attack({"e": (8, 6), "o": (6, 3)}, TOKENS)
def triu_mix(p, x):
    h = x @ p["e"]
    return h @ jnp.triu(p["e"].T @ p["e"]) @ p["o"]


@attack({"e": (8, 6), "o": (6, 3)}, TOKENS)
def w_wt(p, x):
    return jnp.tanh(x @ p["e"] @ (p["e"].T @ p["e"])) @ p["o"]


@attack({"e": (8, 6)}, TOKENS)
def autoencoder_tied(p, x):
    return jax.nn.relu(x @ p["e"]) @ p["e"].T


@attack({"e": (8, 6), "f": (6, 6), "o": (6, 3)}, TOKENS)
def symmetric_weight(p, x):
    return jnp.tanh(x @ p["e"] @ (p["f"] + p["f"].T)) @ p["o"]


@attack({"e": (8, 6), "f": (6, 6), "o": (6, 3)}, TOKENS, frozen=True)
def cayley_solve(p, x):
    a = p["f"] - p["f"].T
    return x @ p["e"] @ jnp.linalg.solve(jnp.eye(6) + a, jnp.eye(6) - a) @ p["o"]


@attack({"a": (3, 6), "A": (3, 2), "B": (2, 6), "w": (6, 2)})
def lora(p, x):
    return x @ (p["a"] + p["A"] @ p["B"]) @ p["w"]


@attack({"e": (7, 6), "w": (6, 7)}, jnp.array([[1, 2, 3], [4, 5, 6]]))
def onehot_embed(p, i):
    return jax.nn.one_hot(i, 7) @ p["e"] @ p["w"]


@attack({"e": (7, 6), "w": (6, 6)}, jnp.array([[1, 2, 3], [4, 5, 6]]))
def tied_embed(p, i):
    return jnp.tanh(p["e"][i] @ p["w"]) @ p["e"].T


@attack({"e": (7, 6), "pos": (9, 6), "w": (6, 2)}, jnp.array([[1, 2, 3], [4, 5, 6]]))
def pos_slice(p, i):
    return (p["e"][i] + p["pos"][2:5]) @ p["w"]


@attack({"e": (7, 6), "w": (6, 2)})
def embed_const_only(p, x):
    return x[:, :1] * p["e"][np.array([1, 1, 3, 0])] @ p["w"]


@attack({"e": (8, 6), "w": (6, 2), "m": (4, 8)}, draw({"x": (5, 4)})["x"])
def embed_rows_channels(p, x):
    return (
        (x @ p["m"])[:, np.array([[0, 1], [2, 3], [7, 5]])].sum(-1)
        @ p["e"][np.array([1, 3, 5])]
        @ p["w"]
    )


@attack({"e": (7, 6), "w": (6, 2)}, jnp.array([[1, 2, 3], [4, 5, 6]]))
def sinusoidal_set(p, i):
    f = 1 / 10 ** (jnp.arange(0, 6, 2) / 6)
    a = jnp.arange(3)[:, None] * f
    pe = jnp.zeros((3, 6)).at[:, 0::2].set(jnp.sin(a)).at[:, 1::2].set(jnp.cos(a))
    return (p["e"][i] + pe) @ p["w"]


@attack({"a": (3, 6), "k": (5, 6), "w": (6, 2)}, SEQUENCES)
def fft_longconv(p, x):
    u = x @ p["a"]
    return (
        jnp.fft.irfft(
            jnp.fft.rfft(u, n=10, axis=1) * jnp.fft.rfft(p["k"], n=10, axis=0),
            n=10,
            axis=1,
        )[:, :5]
        @ p["w"]
    )


@attack(
    {"a": (3, 6), "m": (6, 6), "w": (6, 2)},
    X,
    jnp.array([0, 1, 2, 3, 1]),
    jnp.array([1, 2, 3, 0, 3]),
)
def gnn(p, x, s, r):
    h = x @ p["a"]
    m = jnp.tanh(h[s] @ p["m"])
    d = jax.ops.segment_sum(jnp.ones(5), r, 4)
    return (h + jax.ops.segment_sum(m, r, 4) / jnp.maximum(d, 1)[:, None]) @ p["w"]


@attack(
    {"a": (3, 6), "q": (6, 1), "w": (6, 2)},
    X,
    jnp.array([0, 1, 2, 3, 1]),
    jnp.array([1, 2, 3, 0, 3]),
)
def gat(p, x, s, r):
    h = x @ p["a"]
    e = jax.nn.leaky_relu((h[s] + h[r]) @ p["q"])[:, 0]
    e = jnp.exp(e - jax.ops.segment_max(e, r, 4)[r])
    a = e / jax.ops.segment_sum(e, r, 4)[r]
    return jax.ops.segment_sum(h[s] * a[:, None], r, 4) @ p["w"]


@attack(
    {"a": (3, 6), "q": (6, 4), "w": (6, 2)},
    X,
    jnp.array([0, 1, 2, 3, 1]),
    jnp.array([1, 2, 3, 0, 3]),
    frozen=True,
)
def segment_softmax_channels(p, x, s, r):
    h = x @ p["a"]
    m = jax.ops.segment_max(h[s], r, 4)
    return jax.ops.segment_sum(jnp.exp(h[s] - m[r]), r, 4) @ p["w"]


@attack({"a": (3, 6), "b": (3, 6)}, X)
def contrastive(p, x):
    u = x @ p["a"]
    v = x @ p["b"]

    def n(h):
        return h / jnp.linalg.norm(h, axis=-1, keepdims=True)

    return jax.nn.log_softmax(n(u) @ n(v).T)


@attack({"a": (3, 6), "b": (3, 6)}, X, frozen=True)
def barlow(p, x):
    u = x @ p["a"]
    v = x @ p["b"]

    def n(h):
        return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-05)

    c = n(u).T @ n(v) / 4
    return ((c - jnp.eye(6)) ** 2).sum()


@attack({"a": (3, 6), "w": (6, 2)})
def simnorm(p, x):
    return jax.nn.softmax((x @ p["a"]).reshape(4, 2, 3)).reshape(4, 6) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)})
def heads_norm_eps0(p, x):
    h = (x @ p["a"]).reshape(4, 3, 2)
    return (h * lax.rsqrt((h * h).sum(-1, keepdims=True))).reshape(4, 6) @ p["w"]


@attack({"a": (3, 6), "c1": (6, 4), "c2": (6, 4), "w": (6, 2)})
def cp_factor(p, x):
    k = jnp.einsum("ir,jr->ij", p["c1"], p["c2"])
    return x @ p["a"] @ k @ p["w"]


@attack({"a": (3, 4), "t1": (2, 2, 3), "t2": (3, 2, 2), "w": (4, 2)})
def tensor_train(p, x):
    W = jnp.einsum("abr,rcd->acbd", p["t1"], p["t2"]).reshape(4, 4)
    return jnp.tanh(x @ p["a"] @ W) @ p["w"]


@attack({"a": (3, 4), "u": (2, 2), "v": (2, 2), "w": (4, 2)})
def kron_weight(p, x):
    return jnp.tanh(x @ p["a"] @ jnp.kron(p["u"], p["v"])) @ p["w"]
