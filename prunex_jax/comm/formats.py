"""Formats of numbers on the wire, one row of a table each.

A format turns blocks of numbers into what is sent of them, and back. A new one is a
row of `FORMATS`: its two functions, and what a block becomes.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

# Uniform numbers in (0, 1) like the values, or None.
Noise = jax.Array | None

# Standard deviations between the mean of a block and the outer two of the three bounds
# of int2: the best for normal numbers is 0.98, for Laplace's 1.13 (Lloyd and Max).
_BOUND = 1.05
# Smallest scale and spacing, a normal float32: backends flush smaller ones to zero.
_TINY = 2.0**-126


@dataclasses.dataclass(frozen=True)
class Format:
    """How numbers are written.

    A value that is not finite makes itself (bfloat16) or its block not finite.

    Attributes:
      encode: (float32[n, block], noise) -> [n, width] of the carrier type. A number is
        rounded up if its share of the way there is larger than its noise; without
        noise, and where `is_biased`, it is rounded to nearest.
      decode: Its inverse, up to that rounding.
      carrier: Type that is given to the collectives. Integers of the same width stand
        for floats, which some backends would widen.
      width: Carriers of a block, with its scale or its table.
      block: Numbers that are encoded together, counted from the start of a tree, so
        that neither the devices of a host nor buckets change them.
      is_biased: Whether numbers are always rounded to nearest, so that errors add up.

    Example:
      >>> values = jnp.arange(256, dtype=jnp.float32).reshape(2, 128)
      >>> int8 = FORMATS['int8']
      >>> back = int8.decode(int8.encode(values, None))
      >>> bool(jnp.max(jnp.abs(back - values)) <= 0.51 * 255 / 126)
      True
    """

    encode: Callable[[jax.Array, Noise], jax.Array]
    decode: Callable[[jax.Array], jax.Array]
    carrier: str
    width: int
    block: int = 128
    is_biased: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of the message for a block, scale included."""
        return self.width * jnp.dtype(self.carrier).itemsize


def _as_is(values: jax.Array, noise: Noise) -> jax.Array:
    del noise
    return values


def _to_bfloat16(values: jax.Array, noise: Noise) -> jax.Array:
    """Eight significant bits each, no scale."""
    rounded = _round_significant(values, 8, 2.0**-119, noise)
    return _bits(rounded.astype(jnp.bfloat16), jnp.uint16)


def _from_bfloat16(message: jax.Array) -> jax.Array:
    return _bits(message, jnp.bfloat16).astype(jnp.float32)


def _to_float16(values: jax.Array, noise: Noise) -> jax.Array:
    """Eleven significant bits each, after division by a power of two.

    It puts the largest of the block just below 2^15. So nothing overflows, and what may
    be rounded to zero is below 2^-38 of the largest.
    """
    # Normal also times the spacing of codes: XLA may divide by that product.
    scale = jnp.maximum(_power_of_two(_largest(values)) * 2.0**-14, _TINY * 2.0**24)
    codes = _round_significant(values / scale, 11, 2.0**-14, noise)
    return _with_scale(codes.astype(jnp.float16), scale, jnp.uint16)


def _from_float16(message: jax.Array) -> jax.Array:
    codes = _bits(message[:, :-1], jnp.float16)
    return codes.astype(jnp.float32) * _scale_of(message[:, -1:])


def _to_int8(values: jax.Array, noise: Noise) -> jax.Array:
    """Multiples of the largest magnitude over 126, -127 to 127.

    The scale travels as bfloat16, which may be smaller by 1/256: int8 has room for one
    step more.
    """
    scale = jnp.maximum(_largest(values) / 126, _TINY).astype(jnp.bfloat16)
    return _with_scale(_multiples(values, scale, noise), scale, jnp.int8)


def _from_int8(message: jax.Array) -> jax.Array:
    codes, scale_bits = message[:, :-2], message[:, -2:]
    # Two carriers make one scale.
    return codes.astype(jnp.float32) * _scale_of(scale_bits[:, None])


def _to_int4(values: jax.Array, noise: Noise) -> jax.Array:
    """Multiples of the largest magnitude over 7, -7 to 7, two in a byte.

    The scale travels as bfloat16, which may be larger by 1/128, for there is no room
    above the largest.
    """
    exact = jnp.maximum(_largest(values) / 7, _TINY)
    scale = exact.astype(jnp.bfloat16)
    scale = jnp.where(scale < exact, _next_up(scale), scale)
    return _with_scale(_pairs(_multiples(values, scale, noise)), scale, jnp.int8)


def _from_int4(message: jax.Array) -> jax.Array:
    codes, scale_bits = _apart(message[:, :-2]), message[:, -2:]
    return codes.astype(jnp.float32) * _scale_of(scale_bits[:, None])


def _to_int2(values: jax.Array, noise: Noise) -> jax.Array:
    """The mean of those numbers of a block that lie between the same bounds.

    There are three: the mean of the block, and 1.05 standard deviations to either side.
    The four means travel as bfloat16. So the sum of the block is kept, up to that.
    """
    del noise
    # Squares might overflow, or become zero; so would the reciprocal of the largest.
    scale = jnp.maximum(_power_of_two(_largest(values)) * 2.0**-50, _TINY)
    values = values / scale
    mean = jnp.mean(values, axis=1, keepdims=True)
    away = _BOUND * jnp.std(values, axis=1, keepdims=True)
    bounds = jnp.stack([mean - away, mean, mean + away])
    codes = jnp.sum(values[None] > bounds, axis=0, dtype=jnp.int8)
    means = []
    for code in range(4):
        inside = codes == code
        total = jnp.sum(jnp.where(inside, values, 0.0), axis=1)
        means.append(total / jnp.maximum(jnp.sum(inside, axis=1), 1))
    table = _bits((scale * jnp.stack(means, axis=1)).astype(jnp.bfloat16), jnp.int8)
    quarters = codes.reshape(len(values), 4, -1)
    packed = quarters[:, 0]
    for i in range(1, 4):
        packed = packed | (quarters[:, i] << (2 * i))
    return jnp.concatenate([packed, table.reshape(len(values), -1)], axis=1)


def _from_int2(message: jax.Array) -> jax.Array:
    packed, table_bits = message[:, :-8], message[:, -8:]
    codes = jnp.concatenate([(packed >> (2 * i)) & 3 for i in range(4)], axis=1)
    table = _bits(table_bits.reshape(-1, 4, 2), jnp.bfloat16).astype(jnp.float32)
    chosen = [jnp.where(codes == i, table[:, i : i + 1], 0.0) for i in range(4)]
    return sum(chosen[1:], start=chosen[0])


# What may be asked for by `method.wire_dtype`. float32 is summed as it is.
FORMATS: Mapping[str, Format] = {
    "float32": Format(_as_is, lambda message: message, "float32", 1, block=1),
    "float16": Format(_to_float16, _from_float16, "uint16", 128 + 1),
    "bfloat16": Format(_to_bfloat16, _from_bfloat16, "uint16", 128),
    "int8": Format(_to_int8, _from_int8, "int8", 128 + 2),
    "int4": Format(_to_int4, _from_int4, "int8", 128 // 2 + 2),
    # Four means take eight bytes, for which blocks are longer.
    "int2": Format(_to_int2, _from_int2, "int8", 512 // 4 + 8, 512, is_biased=True),
}


def _largest(values: jax.Array) -> jax.Array:
    """Largest magnitude of every block, [n, 1]."""
    return jnp.max(jnp.abs(values), axis=1, keepdims=True)


def _multiples(values: jax.Array, scale: jax.Array, noise: Noise) -> jax.Array:
    return _round(values / scale.astype(jnp.float32), noise).astype(jnp.int8)


def _with_scale(
    codes: jax.Array, scale: jax.Array, carrier: jax.typing.DTypeLike
) -> jax.Array:
    """A message of codes and a scale, as bfloat16, for every block."""
    scale_bits = _bits(scale.astype(jnp.bfloat16), carrier).reshape(len(codes), -1)
    return jnp.concatenate([_bits(codes, carrier), scale_bits], axis=1)


def _scale_of(scale_bits: jax.Array) -> jax.Array:
    return _bits(scale_bits, jnp.bfloat16).astype(jnp.float32)


def _round(values: jax.Array, noise: Noise) -> jax.Array:
    """Rounds to whole numbers: to nearest, or up with the probability of the rest."""
    if noise is None:
        return jnp.round(values)
    below = jnp.floor(values)
    return below + (noise < values - below)


def _round_significant(
    values: jax.Array, num_bits: int, smallest: float, noise: Noise
) -> jax.Array:
    """Rounds to significant bits; below `smallest`, to its spacing."""
    power = jnp.maximum(_power_of_two(jnp.abs(values)), smallest)
    spacing = power * 2.0 ** (1 - num_bits)
    return _round(values / spacing, noise) * spacing


def _power_of_two(magnitudes: jax.Array) -> jax.Array:
    """Largest power of two that is not larger; infinite for what is not finite."""
    exponents = _bits(magnitudes, jnp.uint32) & jnp.uint32(0x7F800000)
    return _bits(exponents, jnp.float32)


def _next_up(values: jax.Array) -> jax.Array:
    """The next larger bfloat16 of positive ones; what is not finite stays so."""
    above = _bits(_bits(values, jnp.uint16) + jnp.uint16(1), jnp.bfloat16)
    return jnp.where(jnp.isfinite(values), above, values)


def _pairs(codes: jax.Array) -> jax.Array:
    """Puts numbers of four bits, int8[n, 2 k], into int8[n, k]."""
    low, high = codes[:, 0::2], codes[:, 1::2]
    return (high << 4) | (low & 15)


def _apart(pairs: jax.Array) -> jax.Array:
    """Inverse of `_pairs`."""
    low, high = (pairs << 4) >> 4, pairs >> 4  # shifts keep the sign
    return jnp.stack([low, high], axis=2).reshape(len(pairs), -1)


def _bits(values: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The same bits, read as another type."""
    return jax.lax.bitcast_convert_type(values, dtype)
