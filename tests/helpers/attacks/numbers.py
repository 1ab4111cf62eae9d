"""Attacks on what is known of the value of dead channels.

Every function is tried in two places: where its results are summed over channels, which
is exact only if dead ones give zero, and behind another layer, whose gradients must
stay finite.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.helpers.attacks import ATTACKS, Attack, X

SHAPES = {"a": (3, 6), "v": (6, 2), "i": (3, 5), "b": (5, 6), "w": (6, 2)}


def summed_and_deep(function):
    def apply(p, x):
        h = function(x @ p["a"])
        summed = h.sum(-1, keepdims=True) / 10 + h @ p["v"]
        return summed, function(jnp.tanh(x @ p["i"]) @ p["b"]) @ p["w"]

    return apply


def norm(h, axis=-1):
    return jnp.linalg.norm(h, axis=axis, keepdims=True)


BOTH, DEEP, NEITHER = (), (("a", 1),), (("a", 1), ("b", 1))
# name -> (function of channels, channels that must stay)
FUNCTIONS = {
    "cos": (jnp.cos, BOTH),
    "exp": (jnp.exp, BOTH),
    "softplus": (jax.nn.softplus, BOTH),
    "sinc": (jnp.sinc, BOTH),
    "powf0": (lambda h: jnp.power(jnp.abs(h), 1.7), BOTH),
    "pow25": (lambda h: jnp.power(jnp.abs(h), 0.5), NEITHER),
    "cbrt": (jnp.cbrt, NEITHER),
    "logcosh": (lambda h: jnp.logaddexp(h, -h) - jnp.log(2.0), BOTH),
    "erf": (lambda h: lax.erf(h), BOTH),
    "lgamma": (lambda h: lax.lgamma(h * h + 1), BOTH),
    "digamma": (lambda h: lax.digamma(h * h + 1), BOTH),
    "hypot": (lambda h: jnp.hypot(h, h + 1), NEITHER),
    "hypot0": (lambda h: jnp.hypot(h, 2 * h), NEITHER),
    "log_abs": (lambda h: jnp.log(jnp.abs(h) + 1e-6), BOTH),
    "signed_sqrt": (lambda h: jnp.sign(h) * jnp.sqrt(jnp.abs(h)), NEITHER),
    "signed_sqrt_eps": (lambda h: jnp.sign(h) * jnp.sqrt(jnp.abs(h) + 1e-6), BOTH),
    "nan_to_num_log": (lambda h: jnp.nan_to_num(jnp.log(h * h)), NEITHER),
    "heaviside": (lambda h: jnp.heaviside(h, 0.5) + h, BOTH),
    "signbit": (lambda h: jnp.signbit(h - 1e-3).astype(jnp.float32) * h, BOTH),
    "copysign": (lambda h: jnp.copysign(h + 1, h), DEEP),
    "ste": (lambda h: h + lax.stop_gradient(jnp.round(h) - h), BOTH),
    "reduce_precision": (lambda h: lax.reduce_precision(h + 0.3, 5, 4), BOTH),
    "frexp": (lambda h: jnp.frexp(h + 1.5)[0], DEEP),
    "bitcast": (
        lambda h: lax.bitcast_convert_type(
            lax.bitcast_convert_type(h, jnp.int32) & 0x7FFFFFFF, jnp.float32
        ),
        DEEP,
    ),
    "complexexp": (lambda h: jnp.exp(1j * h).real, BOTH),
    "complexangle": (lambda h: jnp.angle(h + 1j), NEITHER),
    "cplx": (lambda h: (lax.complex(h, jnp.cos(h)) ** 2).imag, BOTH),
    "int_round": (
        lambda h: jnp.round(h * 4).astype(jnp.int32).astype(jnp.float32) / 4 + h,
        BOTH,
    ),
    "popcount": (
        lambda h: (
            lax.population_count(jnp.round(jnp.abs(h) * 9).astype(jnp.uint32)).astype(
                jnp.float32
            )
            + h
        ),
        BOTH,
    ),
    "boolnot": (lambda h: (~(h > 0)).astype(jnp.float32) + h, BOTH),
    "boolxor": (lambda h: ((h > 0) ^ (h < 1)).astype(jnp.float32) + h, DEEP),
    "intfloordiv": (
        lambda h: (jnp.round(h).astype(jnp.int32) // 3).astype(jnp.float32) + h,
        BOTH,
    ),
    "shift": (
        lambda h: (jnp.round(h * 9).astype(jnp.int32) >> 1).astype(jnp.float32) + h,
        BOTH,
    ),
    "bf16": (lambda h: (h.astype(jnp.bfloat16)).astype(jnp.float32), BOTH),
    "select3": (
        lambda h: lax.select_n(
            (jnp.clip(jnp.round(h), 0, 2)).astype(jnp.int32), h, h + 1, jnp.cos(h)
        ),
        BOTH,
    ),
    "piecewise": (
        lambda h: jnp.piecewise(h, [h < 0, h > 1], [jnp.sin, jnp.cos, lambda h: h + 2]),
        BOTH,
    ),
    "select": (lambda h: jnp.select([h < 0, h == 0], [h, 7.0], jnp.exp(h)), DEEP),
    "cumsum": (lambda h: jnp.cumsum(h, -1), DEEP),
    "cumsum_cos": (lambda h: jnp.cumsum(jnp.cos(h), -1), NEITHER),
    "logsumexp": (lambda h: h - jax.nn.logsumexp(h, -1, keepdims=True), BOTH),
    "logsoftmax": (lambda h: jax.nn.log_softmax(h), BOTH),
    "ln": (
        lambda h: (
            (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
        ),
        BOTH,
    ),
    "rms": (lambda h: h * lax.rsqrt((h * h).mean(-1, keepdims=True)), BOTH),
    "rms_cos": (
        lambda h: jnp.cos(h) * lax.rsqrt((jnp.cos(h) ** 2).mean(-1, keepdims=True)),
        BOTH,
    ),
    "countz": (lambda h: h * (1 + jnp.sum(h == 0, -1, keepdims=True)), BOTH),
    "sortc": (lambda h: jnp.sort(h, -1), NEITHER),
    "topkmask": (lambda h: h * (h >= jnp.sort(h, -1)[:, -3:-2]), NEITHER),
    "argmaxc": (lambda h: jax.nn.one_hot(jnp.argmax(h, -1), 6) * h, NEITHER),
    "batchnorm": (lambda h: (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5), BOTH),
    "batchnorm0": (lambda h: (h - h.mean(0)) * lax.rsqrt(h.var(0)), NEITHER),
    "batchstd": (lambda h: h / h.std(0), NEITHER),
    "batchsm": (lambda h: jax.nn.softmax(h, 0), BOTH),
    "fftc": (lambda h: jnp.fft.fft(h).real, NEITHER),
    "stride2": (
        lambda h: jnp.concatenate([h[:, ::2] + h[:, 1::2], h[:, ::2]], -1),
        BOTH,
    ),
    "tile": (lambda h: jnp.tile(h[:, :3], (1, 2)), BOTH),
    "repeat": (lambda h: jnp.repeat(h[:, :3], 2, -1), BOTH),
    "padc": (lambda h: jnp.pad(h, ((0, 0), (2, 2)))[:, 1:7], BOTH),
    "pad1": (lambda h: jnp.pad(h, ((0, 0), (2, 2)), constant_values=1.0)[:, 1:7], DEEP),
    "padedge": (lambda h: jnp.pad(h, ((0, 0), (1, 0)), mode="edge")[:, :6], NEITHER),
    "padreflect": (lambda h: jnp.pad(h, ((0, 0), (2, 0)), mode="reflect")[:, :6], BOTH),
    "convc": (
        lambda h: jax.vmap(
            lambda r: jnp.convolve(r, jnp.array([0.2, 0.5, 0.3]), "same")
        )(h),
        NEITHER,
    ),
    "outer_self": (lambda h: jnp.einsum("bc,bd->bcd", h, h).sum(-1), BOTH),
    "insert": (lambda h: jnp.insert(h, 2, 1.0, axis=1)[:, :6], DEEP),
    "setcol": (lambda h: h.at[:, 2].set(1.0), NEITHER),
    "addcol": (lambda h: h.at[:, jnp.array([1, 3])].add(1.0), DEEP),
    "setrow1": (lambda h: h.at[1].set(1.0), DEEP),
    "mulrow": (lambda h: h.at[1].multiply(3.0), BOTH),
    "minall": (lambda h: h.at[:].min(0.3), BOTH),
    "segsum": (lambda h: jax.ops.segment_sum(h, jnp.array([0, 0, 1, 3]), 4), BOTH),
    "segmax": (
        lambda h: jax.ops.segment_max(h, jnp.array([0, 0, 1, 1]), 2)[
            jnp.array([0, 0, 1, 1])
        ],
        BOTH,
    ),
    "segmaxempty": (
        lambda h: jnp.nan_to_num(
            jax.ops.segment_max(h, jnp.array([0, 0, 1, 3]), 4), neginf=-1.0
        ),
        NEITHER,
    ),
    "where3": (lambda h: jnp.where(jnp.arange(6) < 3, h, jnp.cos(h)), DEEP),
    "where0": (lambda h: jnp.where(jnp.arange(6) < 3, h, 1.0), DEEP),
    "take_along": (lambda h: jnp.take_along_axis(h, jnp.argsort(h, 0), 0), NEITHER),
    "take_along_c": (
        lambda h: jnp.take_along_axis(h, jnp.array([[0, 1, 2, 3, 4, 5]] * 4), 1),
        NEITHER,
    ),
    "stackmean": (lambda h: jnp.stack([h, jnp.cos(h), h * 2]).mean(0), BOTH),
    "reshbad": (lambda h: h.reshape(6, 4).T, NEITHER),
    "reshbad2": (lambda h: jnp.sort(h.reshape(3, 8), 0).reshape(4, 6), BOTH),
    "ravelroll": (lambda h: jnp.roll(h.ravel(), 6).reshape(4, 6), BOTH),
    "ravelroll1": (lambda h: jnp.roll(h.ravel(), 1).reshape(4, 6), BOTH),
    "single": (lambda h: h * h[:, 2:3], BOTH),
    "cross": (
        lambda h: jnp.cross(h.reshape(4, 2, 3), h.reshape(4, 2, 3)[:, ::-1]).reshape(
            4, 6
        ),
        NEITHER,
    ),
    "lreduce": (
        lambda h: h + lax.reduce(h, 0.0, lambda a, b: a + b * b, (1,))[:, None],
        NEITHER,
    ),
    "lredwin": (
        lambda h: lax.reduce_window(
            h, 0.0, lambda a, b: jnp.maximum(a, b), (2, 1), (1, 1), "SAME"
        ),
        DEEP,
    ),
    "winC": (
        lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (1, 2), (1, 1), "SAME"),
        NEITHER,
    ),
    "winsum": (
        lambda h: lax.reduce_window(h, 0.0, lax.add, (2, 1), (1, 1), "SAME"),
        BOTH,
    ),
    "winpad": (
        lambda h: jnp.maximum(
            lax.reduce_window(h, -jnp.inf, lax.max, (1, 1), (1, 1), ((1, 0), (0, 0)))[
                :4
            ],
            -1.0,
        ),
        BOTH,
    ),
    "exp_log": (lambda h: jnp.exp(0.7 * jnp.log(jnp.abs(h))), NEITHER),
    "recip_recip": (lambda h: 1 / (1 / h), NEITHER),
    "tanh_recip": (lambda h: jnp.tanh(1 / h) * h, NEITHER),
    "max_log": (lambda h: jnp.maximum(jnp.log(jnp.abs(h)), -9.0) * h, NEITHER),
    "erfinv_half": (lambda h: jax.scipy.special.erfinv(jax.nn.sigmoid(h)) - 1, BOTH),
    "lax_round_half": (lambda h: lax.round(h + 0.5), BOTH),
    "reduce_precision_sub": (lambda h: lax.reduce_precision(h + 0.3, 5, 4) - 0.3, BOTH),
    "lgamma0": (lambda h: jax.scipy.special.gammaln(h * h) * 1e-2, NEITHER),
    "digamma0": (lambda h: jax.scipy.special.digamma(h * h + 1e-9) * 1e-9, BOTH),
    "f16_over": (
        lambda h: (
            (1 / ((h * 64).astype(jnp.float16) ** 2 + jnp.float16(1e-6))).astype(
                jnp.float32
            )
            * 1e-4
        ),
        NEITHER,
    ),
    "atan2_neg_const": (
        lambda h: 1 - jnp.sign(jnp.arctan2(h, -jnp.ones_like(h))),
        DEEP,
    ),
    "nan_to_num_log2": (lambda h: jnp.nan_to_num(jnp.log(h * h)), NEITHER),
    "div_self_safe": (
        lambda h: jnp.where(
            jnp.abs(h) > 1e-9, h / jnp.where(jnp.abs(h) > 1e-9, jnp.abs(h), 1), 0
        ),
        BOTH,
    ),
    "log_sigmoid_exp": (lambda h: jnp.exp(jax.nn.log_sigmoid(h)) - 0.5, BOTH),
    "pow_half": (lambda h: jnp.power(jax.nn.sigmoid(h), 2.0) - 0.25, BOTH),
    "cbrt1": (lambda h: jnp.cbrt(1 + h * h) - 1, BOTH),
    "acosh1": (lambda h: jnp.arccosh(1 + 9 * h * h), NEITHER),
    "sum_spatial": (
        lambda h: (jnp.tile((h + 0.1)[:, None], (1, 10, 1)).sum(1) - 1.0) * 1e6,
        BOTH,
    ),
    "mean_exact": (
        lambda h: jnp.sign(jnp.tile((h + 0.1)[:, None], (1, 7, 1)).mean(1) - 0.1),
        DEEP,
    ),
    "fma": (
        lambda h: jnp.sign((h + 0.1) * (h + 0.1) - np.float32(0.1) * np.float32(0.1)),
        DEEP,
    ),
    "uint_sub": (
        lambda h: (
            (jnp.abs(jnp.round(h)).astype(jnp.uint32) - jnp.uint32(1)).astype(
                jnp.float32
            )
            * 1e-9
        ),
        BOTH,
    ),
    "bool_allnot": (
        lambda h: (~jnp.stack([h > 0, h > 1]).all(0)).astype(jnp.float32),
        BOTH,
    ),
    "underflow_eq": (
        lambda h: (jnp.exp(-200 * jnp.cos(h)) == 0).astype(jnp.float32),
        DEEP,
    ),
    "underflow_mul": (
        lambda h: (
            ((jnp.cos(h) * 1e-30) * 1e-30 == 0).astype(jnp.float32) * (jnp.cos(h))
        ),
        DEEP,
    ),
    "klterm": (lambda h: 1 + h - h**2 - jnp.exp(h), BOTH),
    "overflow_mul": (
        lambda h: jnp.where((jnp.cos(h) * 1e30) * 1e30 > 1e38, 1.0, 0.0) - 1,
        DEEP,
    ),
    "int8_wraps": (
        lambda h: (
            jnp.repeat((h >= 0)[:, None].astype(jnp.int8), 128, 1).sum(1, jnp.int8) < 0
        ).astype(jnp.float32),
        DEEP,
    ),
    "int8_fits": (
        lambda h: (
            jnp.repeat((h >= 0)[:, None].astype(jnp.int8), 127, 1).sum(1, jnp.int8) < 0
        ).astype(jnp.float32),
        BOTH,
    ),
    "f16_sum_overflows": (
        lambda h: jnp.isinf(
            jnp.repeat((h * 0 + 6e4).astype(jnp.float16)[:, None], 3, 1).sum(1)
        ).astype(jnp.float32),
        DEEP,
    ),
    "bf16_rounds": (
        lambda h: (
            (h >= 0).astype(jnp.bfloat16) * jnp.bfloat16(1.5)
            == jnp.bfloat16(1.5) + jnp.bfloat16(0.002)
        ).astype(jnp.float32),
        DEEP,
    ),
    "int4": (
        lambda h: ((h > 0).astype(jnp.int4) * jnp.int4(7) + jnp.int4(1)).astype(
            jnp.float32
        ),
        BOTH,
    ),
    "int4_wraps": (
        lambda h: ((h >= 0).astype(jnp.int4) * jnp.int4(7) + jnp.int4(1) < 0).astype(
            jnp.float32
        ),
        DEEP,
    ),
    "uint2": (
        lambda h: ((h > 0).astype(jnp.uint2) * jnp.uint2(3)).astype(jnp.float32),
        BOTH,
    ),
    "int_by_zero": (
        lambda h: ((h > 0).astype(jnp.int32) // jnp.array([1, 0, 2, 0, 1, 3])).astype(
            jnp.float32
        ),
        DEEP,
    ),
    "zero_to_the_zero": (lambda h: lax.pow(jnp.abs(h), jnp.abs(h)), NEITHER),
    "by_constant_zero": (
        lambda h: jnp.nan_to_num(
            h / jnp.array([1.0, 0, 2, 0, 1, 3]), nan=1.0, posinf=1.0, neginf=1.0
        ),
        NEITHER,
    ),
    "float8": (
        lambda h: (h.astype(jnp.float8_e4m3fn) * jnp.float8_e4m3fn(2)).astype("f4"),
        BOTH,
    ),
    "float8_overflows": (
        lambda h: jnp.isnan(
            (jnp.cos(h) * 300).astype(jnp.float8_e4m3fn) * jnp.float8_e4m3fn(2)
        ).astype(jnp.float32),
        NEITHER,
    ),
}
# Gradients that jax does not have, or that are lost in rounding.
NO_GRADIENT = {
    "lredwin",
    "f16_over",
    "atan2_neg_const",
    "underflow_eq",
    "underflow_mul",
    "overflow_mul",
    "by_constant_zero",
}

ATTACKS.update(
    {
        name: Attack(
            summed_and_deep(function),
            SHAPES,
            (X,),
            kept=kept,
            differentiable=name not in NO_GRADIENT,
        )
        for name, (function, kept) in FUNCTIONS.items()
    }
)
