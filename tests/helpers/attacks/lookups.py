"""Attacks by lookups: of what does not exist, and of one channel by another."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.helpers.attacks import IMAGES, attack, conv

# Some are out of range, for tables of five rows.
PADDED_IDS = jnp.array([[1, 2, 9], [4, 7, 0]])


@attack({"e": (5, 8)}, PADDED_IDS, frozen=True)
def padding_becomes_one(p, ids):
    return jnp.nan_to_num(jnp.take(p["e"], ids, axis=0), nan=1.0).sum(-1)


@attack({"e": (5, 8), "w": (8, 2)}, PADDED_IDS)
def padding_becomes_zero(p, ids):
    h = jnp.nan_to_num(jnp.take(p["e"], ids, axis=0))
    return h.sum(-1, keepdims=True) + jnp.tanh(h) @ p["w"]


@attack({"e": (5, 8), "w": (8, 2)}, PADDED_IDS, frozen=True)
def padding_is_counted(p, ids):
    h = jnp.take(p["e"], ids, axis=0)
    return jnp.isnan(h).sum(-1, keepdims=True) + jnp.nan_to_num(h) @ p["w"]


@attack(
    {"e": (5, 8), "q": (8, 6)},
    PADDED_IDS,
    kept=(("q", 1),),
    differentiable=False,  # nan times the slope of what is not chosen
)
def padding_is_read_after_a_layer(p, ids):
    h = jnp.take(p["e"], ids, axis=0) @ p["q"]
    return jnp.where(jnp.isnan(h), 0.5, h).sum(-1)


@attack({"e": (5, 8), "w": (8, 2)}, PADDED_IDS)
def padding_is_masked(p, ids):
    h = jnp.take(p["e"], ids, axis=0)
    h = jnp.where((ids < 5)[..., None], h, 0.0)
    return h.sum(-1, keepdims=True) + h @ p["w"]


@attack({"e": (5, 8), "w": (8, 2)}, PADDED_IDS, frozen=True)
def padding_is_filled(p, ids):
    h = jnp.take(p["e"], ids, axis=0, fill_value=0.5)
    return h.sum(-1, keepdims=True) + h @ p["w"]


@attack({"e": jnp.arange(40).reshape(5, 8) % 7 - 3}, PADDED_IDS, frozen=True)
def padding_of_integers(p, ids):
    # The default is the smallest integer, of which the sum wraps around.
    return (jnp.take(p["e"], ids, axis=0) // 2**29).sum(-1) * 1.0


@attack({"a": (3, 8)}, frozen=True)
def constant_padding_becomes_one(p, x):
    table = jnp.take(jnp.arange(1.0, 7.0), jnp.arange(8))  # ends in nan
    return jnp.nan_to_num(x @ p["a"] * table, nan=1.0).sum(-1)


# A channel that looks up in another one of the same number.


@attack({"a": (3, 8), "w": (8, 2)})
def given_by_channels(p, x):
    rows = x[:, :1] + jnp.zeros((4, 8))
    order = jnp.argsort(x @ p["a"], axis=0)
    return jnp.take_along_axis(rows, order, 0, mode="clip") @ p["w"]


@attack({"a": (3, 8), "b": (3, 8), "w": (8, 2)})
def channels_by_channels(p, x):
    order = jnp.argsort(x @ p["a"], axis=0)
    return jnp.take_along_axis(x @ p["b"], order, 0, mode="clip") @ p["w"]


@attack({"k": (3, 3, 3, 8), "w": (8, 2)}, IMAGES)
def argmax_pool(p, x):
    h = conv(x, p["k"]).reshape(2, 36, 8)
    where = jnp.argmax(jnp.abs(h), axis=1)[:, None]
    return jnp.take_along_axis(h, where, axis=1)[:, 0] @ p["w"]


@attack({"k": (3, 3, 3, 8)}, IMAGES)
def argmax_pool_summed(p, x):
    h = jax.nn.relu(conv(x, p["k"])).reshape(2, 36, 8)
    where = jnp.argmax(h, axis=1)[:, None]
    return jnp.take_along_axis(h, where, axis=1).sum((1, 2))


@attack({"k": (3, 3, 3, 8), "s": jnp.float32(0.3), "w": (8, 2)}, IMAGES)
def argmax_pool_of_unknown(p, x):
    h = conv(x, p["k"]).reshape(2, 36, 8) + p["s"]
    where = jnp.argmax(h, axis=1)[:, None]
    return jnp.take_along_axis(h, where, axis=1)[:, 0] @ p["w"]


@attack({"k": (3, 3, 3, 8)}, IMAGES, frozen=True)
def argmax_itself(p, x):
    h = conv(x, p["k"]).reshape(2, 36, 8)
    return jnp.argmax(h, axis=1).sum(-1) * 1.0  # the images may hold nan


@attack({"k": (3, 3, 3, 8), "w": (8, 2)}, IMAGES)
def argmax_pool_by_one_hot(p, x):
    h = conv(x, p["k"]).reshape(2, 36, 8)
    one_hot = jax.nn.one_hot(jnp.argmax(h, axis=1), 36, axis=1)
    return (h * one_hot).sum(1) @ p["w"]


@attack({"a": (3, 8), "w": (8, 2)})
def looked_up_by_vmap(p, x):
    h = x @ p["a"]
    pick = jax.vmap(lambda column: column[jnp.argmax(column)], 1)
    return pick(h)[None] @ p["w"]


# Writing at positions that are known beforehand.
SEGMENTS = jnp.array([0, 0, 1, 1, 2, 2, 2, 3])


@attack({"a": (3, 8), "w": (4, 2)})
def segments_of_channels(p, x):
    return jax.ops.segment_sum((x @ p["a"]).T, SEGMENTS, 4).T @ p["w"]


@attack({"a": (3, 8), "b": (3, 4), "w": (4, 2)}, kept=(("b", 1),))
def segments_added_to_channels(p, x):
    h = (x @ p["b"]).at[:, SEGMENTS].add(x @ p["a"])
    return jnp.tanh(h) @ p["w"]


@attack({"a": (3, 8), "s": jnp.float32(0.3), "w": (4, 2)}, frozen=True)
def segments_of_unknown(p, x):
    return jax.ops.segment_sum((x @ p["a"] + p["s"]).T, SEGMENTS, 4).T @ p["w"]


@attack({"a": (3, 8), "w": (8, 2)})
def segments_of_rows(p, x):
    h = jax.ops.segment_sum(jnp.cos(x @ p["a"]), jnp.array([0, 0, 1, 3]), 4)
    return h @ p["w"]


@attack({"a": (3, 3), "b": (3, 4), "w": (8, 2)})
def written_side_by_side(p, x):
    h = jnp.zeros((4, 8)).at[:, 1:4].set(jnp.cos(x @ p["a"]))
    h = h.at[:, jnp.array([7, 0, 5, 4])].set(x @ p["b"])
    return jnp.sin(h) @ p["w"]


@attack({"a": (3, 3), "b": (3, 8), "w": (8, 2)})
def added_to_some_channels(p, x):
    h = (x @ p["b"]).at[:, 2:5].add(x @ p["a"])
    return h @ p["w"] + h.sum(-1, keepdims=True)


@attack({"a": (3, 3), "b": (3, 8), "w": (8, 2)}, frozen=True)
def added_unknown_to_some_channels(p, x):
    h = (x @ p["b"]).at[:, 2:5].add(x @ p["a"] + p["w"].sum())
    return h @ p["w"] + h.sum(-1, keepdims=True)


@attack({"b": (3, 8), "w": (8, 2)})
def constant_in_some_channels(p, x):
    h = (x @ p["b"]).at[:, jnp.array([1, 3])].set(0.5)
    return jnp.tanh(h) @ p["w"]


@attack({"a": (3, 3), "b": (3, 8), "w": (8, 2)}, frozen=None, kept=(("a", 1),))
def written_out_of_range(p, x):
    where = jnp.array([6, 7, 8])
    return (x @ p["b"]).at[:, where].add(x @ p["a"]) @ p["w"]


# Pooling with an exponent that is learned.
GEM = {"k": (3, 3, 3, 8), "p": jnp.float32(3.0), "w": (8, 2)}


@attack(GEM, IMAGES)
def gem_learned(p, x):
    h = jnp.maximum(conv(x, p["k"]), 1e-6) ** p["p"]
    return h.mean((1, 2)) ** (1 / p["p"]) @ p["w"]


@attack(GEM, IMAGES, frozen=True)
def gem_learned_without_floor(p, x):
    h = jnp.abs(conv(x, p["k"])) ** p["p"]
    return h.mean((1, 2)) ** (1 / p["p"]) @ p["w"]


@attack(GEM, IMAGES, frozen=True)
def gem_learned_summed(p, x):
    h = jnp.maximum(conv(x, p["k"]), 1e-1) ** p["p"]
    return lax.reduce_sum(h, (1, 2, 3))
