"""Heads behind masks and biases of attention: which of them can be cut, and why not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.channels import trace_channels
from tests.helpers.channel_checks import assert_exact, draw

HEADS, FEATURES, WIDTH, LENGTH = 4, 6, 5, 3
FLAT = HEADS * FEATURES
SHAPES = {
    **{name: (WIDTH, FLAT) for name in "qkv"},
    **{name: (FLAT,) for name in ("q_bias", "v_bias")},
    "o": (FLAT, WIDTH),
}
X = draw({"x": (2, LENGTH, WIDTH)}, seed=1)["x"]
CAUSAL = np.tril(np.ones((1, 1, LENGTH, LENGTH), bool))
DIAGONAL = np.eye(LENGTH, dtype=bool)[None, None]
FIRST_ROW_MASKED = (np.arange(LENGTH)[:, None] > 0) & CAUSAL
UNSEEN = 1.0 - CAUSAL.astype(np.float32)
WEIGHTS = CAUSAL * np.arange(1.0, LENGTH + 1, dtype=np.float32)
SLOPES = 2.0 ** -np.arange(1, HEADS + 1, dtype=np.float32)[None, :, None, None]
DISTANCE = np.arange(LENGTH)[None] - np.arange(LENGTH)[:, None]
ALIBI = SLOPES * np.minimum(0, DISTANCE).astype(np.float32)


def projected(p, x):
    q, k, v = x @ p["q"] + p["q_bias"][None, None], x @ p["k"], x @ p["v"]
    v = v + p["v_bias"][None, None]
    return (h.reshape(*x.shape[:2], HEADS, FEATURES) for h in (q, k, v))


def attention(change, softmax=jax.nn.softmax):
    """Attention with changed scores, float[batch, heads, queries, keys]."""

    def apply(p, x, *masks):
        q, k, v = projected(p, x)
        scores = change(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.5, *masks)
        out = jnp.einsum("bhqk,bkhd->bqhd", softmax(scores), v)
        return out.reshape(*x.shape[:2], FLAT) @ p["o"]

    return apply


def fused(**options):
    def apply(p, x, *masks):
        q, k, v = projected(p, x)
        named = dict(zip(["mask"], masks, strict=False))
        out = jax.nn.dot_product_attention(q, k, v, **options, **named)
        return out.reshape(*x.shape[:2], FLAT) @ p["o"]

    return apply


def by_hand(scores):
    terms = jnp.exp(scores - scores.max(-1, keepdims=True))
    return terms / terms.sum(-1, keepdims=True)


def transposed_rows(scores):
    turned = scores.transpose(3, 0, 1, 2)
    terms = jnp.exp(turned - turned.max(0, keepdims=True))
    return (terms / terms.sum(0, keepdims=True)).transpose(1, 2, 3, 0)


def unshifted(scores):
    terms = jnp.exp(scores)
    return terms / terms.sum(-1, keepdims=True)


def shifted_by_another_row(scores):
    terms = jnp.exp(scores - scores[..., ::-1, :].max(-1, keepdims=True))
    return terms / terms.sum(-1, keepdims=True)


def over_other_axis(scores):
    """Of a row less the maximum of its column, no term need be 1."""
    terms = jnp.exp(scores - scores.max(-2, keepdims=True))
    return terms / terms.sum(-1, keepdims=True)


def half_of_it(scores):
    """Of a half of the row, the other one may have the largest term."""
    terms = jnp.exp(scores - scores.max(-1, keepdims=True))
    return terms / terms[..., :1].sum(-1, keepdims=True)


def softmax_where(mask):
    return lambda scores: jax.nn.softmax(scores, where=mask)


def log_softmax_where(mask):
    return lambda scores: jnp.exp(jax.nn.log_softmax(scores, where=mask))


def log_softmax_filled(scores):
    logs = jax.nn.log_softmax(scores, where=CAUSAL)
    return jnp.exp(jnp.where(CAUSAL, logs, -1e9))


def less_logsumexp(**options):
    def softmax(scores):
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True, **options)
        return jnp.where(CAUSAL, jnp.exp(scores - total), 0.0)

    return softmax


def less_sum_of_nothing(scores):
    seen = jnp.where(FIRST_ROW_MASKED, scores, -jnp.inf)
    return scores - jax.nn.logsumexp(seen, axis=-1, keepdims=True)


def with_initial(scores):
    """The maximum of a row that starts at a number, as of `jnp.max` with `initial`."""
    top = jnp.max(scores, -1, keepdims=True, where=CAUSAL, initial=-jnp.inf)
    terms = jnp.exp(jnp.where(CAUSAL, scores, -jnp.inf) - top)
    return terms / jnp.sum(terms, -1, keepdims=True, where=CAUSAL)


def sum_of_fewer(scores):
    """Of the positions that the maximum is of, only some are summed up."""
    top = jnp.max(scores, -1, keepdims=True, where=CAUSAL, initial=-jnp.inf)
    terms = jnp.exp(jnp.where(CAUSAL, scores, -jnp.inf) - top)
    return terms / jnp.sum(terms, -1, keepdims=True, where=DIAGONAL)


def fewer_than_maximum(scores):
    """The largest term is of a position that is not summed up."""
    top = jnp.max(scores, -1, keepdims=True, where=CAUSAL, initial=-jnp.inf)
    terms = jnp.exp(jnp.where(DIAGONAL, scores, -jnp.inf) - top)
    return terms / terms.sum(-1, keepdims=True)


def maximum_of_more(scores):
    """The largest term may be one that is masked."""
    top = jnp.max(scores, -1, keepdims=True)
    terms = jnp.exp(scores - top) * CAUSAL.astype(np.float32)
    return terms / terms.sum(-1, keepdims=True)


def biased(scores):
    """Of removed heads, scores that nobody knows beforehand."""
    return scores + ALIBI


def large(scores):
    return jnp.where(CAUSAL, scores, -1e9)


def infinite(scores):
    return jnp.where(CAUSAL, scores, -jnp.inf)


FREE = {
    "plain": (attention(lambda s: s), ()),
    "large": (attention(large), ()),
    "by_hand": (attention(large, by_hand), ()),
    "smallest": (attention(lambda s: jnp.where(CAUSAL, s, jnp.finfo(s).min)), ()),
    "shifted": (attention(lambda s: s - 10.0), ()),
    "alibi": (attention(lambda s: s + ALIBI), ()),
    "alibi_causal": (attention(lambda s: infinite(s + ALIBI)), ()),
    "slopes": (attention(lambda s: s + jnp.asarray(SLOPES) * 0.5), ()),
    "infinite": (attention(infinite), ()),
    "transposed": (attention(infinite, transposed_rows), ()),
    "infinite_by_hand": (attention(infinite, by_hand), ()),
    "infinite_added": (
        attention(lambda s: s + jnp.where(CAUSAL, 0.0, -jnp.inf)),
        (),
    ),
    "infinite_halves": (attention(lambda s: infinite(s).astype(jnp.float32) * 2), ()),
    "input": (attention(lambda s, m: jnp.where(m, s, -1e9)), (CAUSAL,)),
    "input_added": (attention(lambda s, m: s + (1.0 - m) * -1e9), (CAUSAL,)),
    "fused": (fused(), ()),
    "fused_causal": (fused(is_causal=True), ()),
    "fused_alibi": (fused(bias=jnp.asarray(ALIBI), is_causal=True), ()),
    "fused_input": (fused(), (CAUSAL,)),
    "fused_window": (fused(local_window_size=(1, 0)), ()),
    "where": (attention(biased, softmax_where(CAUSAL)), ()),
    "where_log": (attention(biased, log_softmax_where(CAUSAL)), ()),
    "where_log_filled": (attention(biased, log_softmax_filled), ()),
    "where_initial": (attention(biased, with_initial), ()),
    "sum": (attention(biased, less_logsumexp()), ()),
    "sum_where": (attention(biased, less_logsumexp(where=CAUSAL)), ()),
    "sum_weighted": (attention(biased, less_logsumexp(b=WEIGHTS)), ()),
    "sum_both": (attention(biased, less_logsumexp(where=CAUSAL, b=WEIGHTS + 1)), ()),
}
STUCK = {
    "input": (attention(lambda s, m: jnp.where(m, s, -jnp.inf)), (CAUSAL,)),
    "empty_row": (attention(lambda s: jnp.where(FIRST_ROW_MASKED, s, -jnp.inf)), ()),
    "not_subtracted": (attention(large, unshifted), ()),
    "another_row": (attention(large, shifted_by_another_row), ()),
    "another_axis": (attention(large, over_other_axis), ()),
    "half_a_row": (attention(large, half_of_it), ()),
    "where_input": (
        lambda p, x, m: attention(biased, softmax_where(m))(p, x),
        (CAUSAL,),
    ),
    "where_empty": (attention(biased, softmax_where(FIRST_ROW_MASKED)), ()),
    "where_log_empty": (attention(biased, log_softmax_where(FIRST_ROW_MASKED)), ()),
    "where_fewer": (attention(biased, sum_of_fewer), ()),
    "where_seen": (attention(biased, fewer_than_maximum), ()),
    "where_more": (attention(biased, maximum_of_more), ()),
    "sum_of_nothing": (attention(biased, less_sum_of_nothing), ()),
    "sum_empty": (attention(biased, less_logsumexp(where=FIRST_ROW_MASKED)), ()),
    "sum_negative": (attention(biased, less_logsumexp(b=WEIGHTS - 1.5)), ()),
    "sum_unseen": (attention(biased, less_logsumexp(where=CAUSAL, b=UNSEEN)), ()),
    "plus_infinity": (attention(lambda s: jnp.where(CAUSAL, s, jnp.inf)), ()),
}


def sizes_of(apply, *masks):
    groups = trace_channels(apply, draw(SHAPES), X, *masks, factors="all").groups
    return sorted(group.size for group in groups)


@pytest.mark.parametrize("name", FREE)
def test_heads_go_behind_masks_that_leave_their_rows_finite(name):
    apply, masks = FREE[name]
    assert sizes_of(apply, *masks) == [HEADS, FEATURES, FEATURES]


@pytest.mark.parametrize("name", STUCK)
def test_heads_stay_where_a_row_may_hold_no_number(name):
    apply, masks = STUCK[name]
    assert sizes_of(apply, *masks) == [FEATURES, FEATURES]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FREE)
def test_cut_heads_change_nothing(name):
    apply, masks = FREE[name]
    assert_exact(apply, draw(SHAPES), X, *masks, densities=(0.5,), factors="all")


@pytest.mark.parametrize("is_causal", [False, True])
def test_features_go_where_key_heads_are_few(is_causal):
    """Six heads are more than four features, but three of them go at a time."""

    def apply(p, x):
        heads = {"q": 6, "k": 2, "v": 2}
        q, k, v = ((x @ p[n]).reshape(*x.shape[:2], m, 4) for n, m in heads.items())
        out = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)
        return out.reshape(*x.shape[:2], 24) @ p["o"]

    shapes = {"q": (WIDTH, 24), "k": (WIDTH, 8), "v": (WIDTH, 8), "o": (24, WIDTH)}
    one = assert_exact(apply, draw(shapes), X, densities=(0.5,))
    assert [group.size for group in one.groups] == [4, 4]
    trace = assert_exact(apply, draw(shapes), X, densities=(0.5,), factors="all")
    assert sorted(group.size for group in trace.groups) == [2, 3, 4, 4]


def test_explanations_say_why_heads_stay():
    apply, masks = STUCK["input"]
    trace = trace_channels(apply, draw(SHAPES), X, *masks, factors="all")
    said = trace.explain("o").splitlines()[0]
    assert "group v, 6 channels of 4 positions; the axis of 4 that is a part" in said
    assert "the mask of -inf at" in said and "test_masked_attention.py" in said
    assert "use a large finite number such as -1e9, or a constant mask" in said
    free = trace_channels(FREE["infinite"][0], draw(SHAPES), X, factors="all")
    assert "part of it stays" not in free.explain("o")


def test_what_stays_of_packed_queries_keys_and_values_counts():
    def apply(p, x):
        h = jnp.tanh(x @ p["in"])
        return jnp.cumsum(h @ p["qkv"], -1) @ p["o"]

    shapes = {"in": (WIDTH, 8), "qkv": (8, FLAT), "o": (FLAT, WIDTH)}
    trace = trace_channels(apply, draw(shapes), X)
    cut = dataclasses.replace(trace, groups=trace.groups[:1])
    assert cut.prunable_share() == pytest.approx(
        (8 * WIDTH + 8 * FLAT / 2) / (8 * WIDTH + 8 * FLAT + FLAT * WIDTH)
    )


def test_attention_of_flax_and_equinox_loses_heads():
    nnx, linen = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen")
    eqx = pytest.importorskip("equinox")
    size = {"rngs": nnx.Rngs(0), "decode": False}
    graph, params, rest = nnx.split(
        nnx.MultiHeadAttention(HEADS, WIDTH, FLAT, **size), nnx.Param, ...
    )
    dot = linen.MultiHeadDotProductAttention(HEADS, qkv_features=FLAT)
    wide = {"qk_size": FEATURES, "vo_size": FEATURES, "key": jax.random.key(0)}
    arrays, static = eqx.partition(
        eqx.nn.MultiheadAttention(HEADS, WIDTH, **wide), eqx.is_array
    )

    def equinox(p, x):
        layer = eqx.combine(p, static)
        return jax.vmap(lambda h: layer(h, h, h, mask=CAUSAL[0, 0]))(x)

    layers = [
        (lambda p, x: nnx.merge(graph, p, rest)(x, mask=jnp.asarray(CAUSAL)), params),
        (
            lambda p, x: dot.apply(p, x, mask=jnp.asarray(CAUSAL)),
            jax.eval_shape(dot.init, jax.random.key(0), X),
        ),
        (equinox, arrays),
    ]
    for apply, leaves in layers:
        trace = trace_channels(apply, leaves, X, factors="all")
        sizes = sorted(group.size for group in trace.groups)
        assert sizes == [HEADS, FEATURES, FEATURES], trace.explain()
        # A residual stream around it may go, too; what is left are its own widths.
        assert trace.prunable_share() > 0.95


def test_a_mask_that_loops_and_calls_see_is_constant():
    def apply(p, x):
        step = jax.checkpoint(functools.partial(attention(infinite), p))
        return jax.lax.scan(lambda h, _: (h + step(h), None), x, None, length=2)[0]

    trace = assert_exact(apply, draw(SHAPES), X, densities=(0.5,), factors="all")
    assert HEADS in [group.size for group in trace.groups]


def test_blocks_of_nnx_that_are_computed_again_lose_heads():
    nnx = pytest.importorskip("flax.nnx")
    graph, params, rest = nnx.split(
        nnx.MultiHeadAttention(HEADS, WIDTH, FLAT, rngs=nnx.Rngs(0), decode=False),
        nnx.Param,
        ...,
    )

    @nnx.remat
    def block(layer, x):
        return layer(x, mask=jnp.asarray(CAUSAL))

    def apply(p, x):
        return block(nnx.merge(graph, p, rest), x)

    sizes = [g.size for g in trace_channels(apply, params, X, factors="all").groups]
    assert sorted(sizes) == [HEADS, FEATURES, FEATURES]
