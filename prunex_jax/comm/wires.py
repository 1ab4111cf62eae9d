"""Formats in which numbers cross hosts, and the mean over hosts in the narrow ones.

A sum that a backend takes in a narrow type rounds at every hop, overflows, and on CPUs
widens bfloat16. Here numbers are narrow on the wire only: every host sends each other
host its part of the buffer, adds up in float32 what arrives for its own part, and sends
the result to all. That is two roundings, and the bytes of a ring.

Sits on `comm.collectives`; `comm.averaging` cuts trees into shares for it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.comm import collectives
from prunex_jax.mesh import Axis, axis_size, position

# Numbers that are encoded together: they share a scale where the format has one. Blocks
# are counted from the start of a tree, so what becomes of a number depends neither on
# the devices of a host nor on buckets.
BLOCK = 128
# Format -> type that is given to the collectives, and how many of it make a block: its
# numbers, and a scale as bfloat16. Integers of the same width stand for floats, which
# some backends would widen.
_NARROW = {
    "float16": ("uint16", BLOCK + 1),
    "bfloat16": ("uint16", BLOCK),
    "int8": ("int8", BLOCK + 2),
    "int4": ("int8", BLOCK // 2 + 2),  # two numbers in one
}
# What may be asked for by `method.wire_dtype`. float32 is summed as it is.
WIRE_DTYPES = ("float32", *_NARROW)
# One of -1, 0 and 1 times a scale that all hosts share; see `averaging`.
TERNARY = "ternary"
# Steps from zero to the largest number of a block. int8 has room for one more, which a
# scale that was rounded down makes of it.
_STEPS = {"int8": 126, "int4": 7}
# Smallest scale and spacing, a normal float32: backends flush smaller ones to zero.
_TINY = 2.0**-126


@dataclasses.dataclass(frozen=True)
class Wire:
    """How numbers cross hosts: their format, and the size of a message.

    Attributes:
      dtype: float32 is summed by the backend as it is. The other `WIRE_DTYPES`
        are sent in blocks, see `encode`. ternary sends -1, 0 or 1 times one scale in a
        byte each; means over hosts and over the mesh know it.
      bucket_bytes: Largest message that stands for a buffer; 0 sends one for a whole
        tree. A limit pays for large trees. Ternary values go in one.
    """

    dtype: str = "float32"
    bucket_bytes: int = 0

    def __post_init__(self) -> None:
        """Raises UserError if there is no such format or size."""
        if self.dtype not in (*WIRE_DTYPES, TERNARY):
            raise UserError(
                f"wire_dtype={self.dtype!r} must be one of {', '.join(WIRE_DTYPES)}"
            )
        if self.bucket_bytes < 0:
            raise UserError(f"bucket_bytes={self.bucket_bytes} must be zero or more")

    @property
    def is_narrow(self) -> bool:
        """Whether numbers are encoded, in blocks."""
        return self.dtype in _NARROW

    @property
    def carrier(self) -> str:
        """Type that is given to the collectives."""
        if self.dtype == TERNARY:
            return "int8"
        return _NARROW[self.dtype][0] if self.is_narrow else self.dtype

    @property
    def block_width(self) -> int:
        """Carriers that stand for `BLOCK` numbers, scale included."""
        return _NARROW[self.dtype][1] if self.is_narrow else BLOCK

    @property
    def block_bytes(self) -> int:
        """Bytes of the message for `BLOCK` numbers, scale included.

        Example:
          >>> [Wire(name).block_bytes for name in WIRE_DTYPES]
          [512, 258, 256, 130, 66]
        """
        return self.block_width * jnp.dtype(self.carrier).itemsize

    @property
    def bucket_elements(self) -> int:
        """Elements of a buffer whose message fits into a bucket; 0 is no limit.

        Narrow formats fill whole blocks. At least one element, or block, is sent.

        Example:
          >>> Wire('float32', 1000).bucket_elements, Wire('int8', 1000).bucket_elements
          (250, 896)
        """
        if not self.bucket_bytes or self.dtype == TERNARY:
            return 0
        if self.is_narrow:
            return BLOCK * max(1, self.bucket_bytes // self.block_bytes)
        return max(1, self.bucket_bytes * BLOCK // self.block_bytes)

    def payload_bytes(self, num_elements: int) -> int:
        """Bytes that stand for so many numbers: those of whole blocks.

        Every device carries whole blocks to every host, so a few more may be sent.

        Example:
          >>> FLOAT32.payload_bytes(1280), Wire('int8').payload_bytes(1280)
          (5120, 1300)
        """
        if self.is_narrow:
            return -(-num_elements // BLOCK) * self.block_bytes
        return num_elements * jnp.dtype(self.carrier).itemsize

    def in_float32(self) -> "Wire":
        """The same message size, nothing rounded."""
        return Wire("float32", self.bucket_bytes)


FLOAT32 = Wire()


def refuse_ternary(wire: Wire) -> None:
    """Raises UserError for ternary values, where they have no form."""
    if wire.dtype == TERNARY:
        raise UserError(
            "wire_dtype='ternary' is for means over hosts and over the mesh; choose "
            f"one of {', '.join(WIRE_DTYPES)}"
        )


def encode(
    values: jax.Array, wire_dtype: str, noise: jax.Array | None = None
) -> jax.Array:
    """Turns blocks of numbers into what is sent of them.

    - bfloat16: eight significant bits each, no scale.
    - float16: eleven significant bits each, after division by a power of two that puts
      the largest of the block just below 2^15. So nothing overflows, and what may be
      rounded to zero is below 2^-38 of the largest.
    - int8: multiples of the largest magnitude over 126, -127 to 127. The scale travels
      as bfloat16, which may be smaller by 1/256.
    - int4: multiples of the largest magnitude over 7, -7 to 7, two in a byte. The scale
      travels as bfloat16, which may be larger by 1/128.

    A value that is not finite makes itself (bfloat16) or its block not finite.

    Args:
      values: float32[n, BLOCK].
      wire_dtype: A narrow format.
      noise: float32[n, BLOCK] in (0, 1): a number is rounded up if the share that it
        has of the way there is larger. None rounds to nearest.
    Returns:
      [n, width] of the carrier type.
    """
    if wire_dtype == "bfloat16":
        rounded = _round_significant(values, 8, 2.0**-119, noise)
        return _bits(rounded.astype(jnp.bfloat16), jnp.uint16)
    largest = jnp.max(jnp.abs(values), axis=1, keepdims=True)
    if wire_dtype == "float16":
        scale = jnp.maximum(_power_of_two(largest) * 2.0**-14, _TINY)
        codes = _round_significant(values / scale, 11, 2.0**-14, noise)
        sent, carrier = codes.astype(jnp.float16), jnp.uint16
    else:
        exact = jnp.maximum(largest / _STEPS[wire_dtype], _TINY)
        scale = exact.astype(jnp.bfloat16)
        if wire_dtype == "int4":  # which has no room above the largest
            scale = jnp.where(scale < exact, _next_up(scale), scale)
        codes = _round(values / scale.astype(jnp.float32), noise).astype(jnp.int8)
        sent, carrier = codes if wire_dtype == "int8" else _pairs(codes), jnp.int8
    scale_bits = _bits(scale.astype(jnp.bfloat16), carrier)
    scale_bits = scale_bits.reshape(len(values), -1)
    return jnp.concatenate([_bits(sent, carrier), scale_bits], axis=1)


def decode(message: jax.Array, wire_dtype: str) -> jax.Array:
    """Numbers that a message stands for; inverse of `encode` up to its rounding.

    Args:
      message: [n, width], from `encode`.
      wire_dtype: As it was encoded.
    Returns:
      float32[n, BLOCK].
    Example:
      >>> values = jnp.arange(2 * BLOCK, dtype=jnp.float32).reshape(2, BLOCK)
      >>> back = decode(encode(values, 'int8'), 'int8')
      >>> bool(jnp.max(jnp.abs(back - values)) <= 0.51 * 255 / 126)
      True
    """
    if wire_dtype == "bfloat16":
        return _bits(message, jnp.bfloat16).astype(jnp.float32)
    num_codes = BLOCK // 2 if wire_dtype == "int4" else BLOCK
    codes, scale_bits = message[:, :num_codes], message[:, num_codes:]
    if wire_dtype == "float16":
        codes = _bits(codes, jnp.float16)
    else:
        scale_bits = scale_bits[:, None]  # two carriers make one scale
    if wire_dtype == "int4":
        codes = _apart(codes)
    scale = _bits(scale_bits, jnp.bfloat16).astype(jnp.float32)
    return codes.astype(jnp.float32) * scale


def mean_of_shares(
    share: jax.Array,
    axis: Axis,
    first_block: jax.Array | int,
    wire_dtype: str,
    key: jax.Array | None,
) -> jax.Array:
    """Averages the shares of one device per host in a narrow format.

    Args:
      share: float32[size * blocks * BLOCK], with as many positions along the axis as
        `size` says.
      axis: The axis of the hosts, or several that are taken as one.
      first_block: Number of the first block of the share in the whole.
      wire_dtype: A narrow format.
      key: Random key, the same everywhere: rounding is stochastic, the mean unbiased.
        The draws of different hosts are independent. None rounds to nearest.
    Returns:
      [size * blocks, width]: the mean, still encoded, the same along the axis.
    Collectives:
      An exchange over `axis` of size * blocks * width carriers, and a gather of
      blocks * width from each position.
    """
    size, here = axis_size(axis), position(axis)
    blocks = share.reshape(-1, BLOCK)
    noise = _noise(key, here + 1, first_block, len(blocks))
    arrived = collectives.exchange(encode(blocks, wire_dtype, noise), axis)
    each = decode(arrived, wire_dtype).reshape(size, -1, BLOCK)
    mean = jnp.sum(each / size, axis=0)  # divided first: the sum might overflow
    noise = _noise(key, 0, first_block + here * len(mean), len(mean))
    return collectives.collect(encode(mean, wire_dtype, noise), axis)


def _noise(
    key: jax.Array | None,
    stream: jax.Array | int,
    first_block: jax.Array | int,
    num_blocks: int,
) -> jax.Array | None:
    """Uniform numbers in (0, 1) that belong to the blocks, whoever draws them."""
    if key is None:
        return None
    own = jax.random.fold_in(key, stream)

    def of_block(index: jax.Array) -> jax.Array:
        # 16 bits decide a rounding finely enough: two draws from every random word.
        words = jax.random.bits(jax.random.fold_in(own, index), (BLOCK // 2,))
        return _bits(words, jnp.uint16).reshape(BLOCK)

    bits = jax.vmap(of_block)(first_block + jnp.arange(num_blocks))
    return (bits.astype(jnp.float32) + 0.5) * 2.0**-16


def _round(values: jax.Array, noise: jax.Array | None) -> jax.Array:
    """Rounds to whole numbers: to nearest, or up with the probability of the rest."""
    if noise is None:
        return jnp.round(values)
    below = jnp.floor(values)
    return below + (noise < values - below)


def _round_significant(
    values: jax.Array, num_bits: int, smallest: float, noise: jax.Array | None
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
