"""Formats in which numbers cross hosts, and the mean over hosts in the narrow ones.

A sum that a backend takes in a narrow type rounds at every hop, overflows, and on CPUs
widens bfloat16. Here numbers are narrow on the wire only: every host sends each other
host its part of the buffer, adds up in float32 what arrives for its own part, and sends
the result to all. That is two roundings, and the bytes of a ring.

Sits on `comm.collectives`; `comm.averaging` cuts trees into shares for it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.comm import collectives
from prunex_jax.mesh import Axis, axis_size, position


class _Narrow(NamedTuple):
    """What a block of numbers becomes."""

    carrier: str  # Type that is given to the collectives. Integers of the same width
    # stand for floats, which some backends would widen.
    width: int  # Carriers of a block, with its scale or its table.
    # Numbers that are encoded together: they share a scale where the format has one.
    # Blocks are counted from the start of a tree, so what becomes of a number depends
    # neither on the devices of a host nor on buckets.
    block: int = 128


_NARROW = {
    "float16": _Narrow("uint16", 128 + 1),  # a scale as bfloat16
    "bfloat16": _Narrow("uint16", 128),
    "int8": _Narrow("int8", 128 + 2),  # a scale
    "int4": _Narrow("int8", 128 // 2 + 2),  # two numbers in one, and a scale
    # Four numbers in one, and four means as bfloat16, for which blocks are longer.
    "int2": _Narrow("int8", 512 // 4 + 8, block=512),
}
# What may be asked for by `method.wire_dtype`. float32 is summed as it is.
WIRE_DTYPES = ("float32", *_NARROW)
# One of -1, 0 and 1 times a scale that all hosts share; see `averaging`.
TERNARY = "ternary"
# Steps from zero to the largest number of a block. int8 has room for one more, which a
# scale that was rounded down makes of it.
_STEPS = {"int8": 126, "int4": 7}
# Standard deviations between the mean of a block and the outer two of the three bounds
# of int2: the best for normal numbers is 0.98, for Laplace's 1.13 (Lloyd and Max).
_BOUND = 1.05
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
      in_turn: Whether a message waits for the mean of the one before the last, so that
        few are in memory. For trees that are known as a whole, as in rounds: gradients
        of a step become known in another order.
    """

    dtype: str = "float32"
    bucket_bytes: int = 0
    in_turn: bool = False

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
        return _NARROW[self.dtype].carrier if self.is_narrow else self.dtype

    @property
    def is_biased(self) -> bool:
        """Whether numbers are always rounded to nearest, so that errors add up."""
        return self.dtype == "int2"

    @property
    def block(self) -> int:
        """Numbers that are encoded together; 1 where none are."""
        return _NARROW[self.dtype].block if self.is_narrow else 1

    @property
    def block_width(self) -> int:
        """Carriers that stand for a block, scale included."""
        return _NARROW[self.dtype].width if self.is_narrow else 1

    @property
    def block_bytes(self) -> int:
        """Bytes of the message for a block, scale included.

        Example:
          >>> wires = [Wire(name) for name in WIRE_DTYPES]
          >>> [round(wire.block_bytes / wire.block, 2) for wire in wires]
          [4.0, 2.02, 2.0, 1.02, 0.52, 0.27]
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
        return self.block * max(1, self.bucket_bytes // self.block_bytes)

    def num_carriers(self, num_elements: int) -> int:
        """Carriers that stand for so many numbers: those of whole blocks."""
        return -(-num_elements // self.block) * self.block_width

    def payload_bytes(self, num_elements: int) -> int:
        """Bytes that stand for so many numbers: those of whole blocks.

        Every device carries whole blocks to every host, so a few more may be sent.

        Example:
          >>> FLOAT32.payload_bytes(1280), Wire('int8').payload_bytes(1280)
          (5120, 1300)
        """
        return self.num_carriers(num_elements) * jnp.dtype(self.carrier).itemsize

    def at_least_8_bits(self) -> "Wire":
        """The same message size, in int8 where numbers would be narrower."""
        is_coarse = self.block_bytes < self.block
        return dataclasses.replace(self, dtype="int8") if is_coarse else self

    def in_float32(self) -> "Wire":
        """The same message size, nothing rounded."""
        return dataclasses.replace(self, dtype="float32")


FLOAT32 = Wire()


def refuse_ternary(wire: Wire) -> None:
    """Raises UserError for ternary values, where they have no form."""
    if wire.dtype == TERNARY:
        raise UserError(
            "wire_dtype='ternary' is for means over hosts and over the mesh; choose "
            f"one of {', '.join(WIRE_DTYPES)}"
        )


def refuse_biased(wire: Wire, sender: str) -> None:
    """Raises UserError for a format that needs error feedback, where there is none."""
    if wire.is_biased:
        raise UserError(
            f"wire_dtype={wire.dtype!r} rounds to nearest, and {sender} does not send "
            "later what that loses; choose int4 or a wider format, or a method with "
            "error feedback: dense, hsadmm, local_sgd, diloco, topk, dgc"
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
    - int2: the mean of those numbers of the block that lie between the same two of
      three bounds: its mean, and 1.05 standard deviations to either side. The means
      travel as bfloat16. So the sum of the block is kept, up to that.

    A value that is not finite makes itself (bfloat16) or its block not finite.

    Args:
      values: float32[n, block], with the block of the format.
      wire_dtype: A narrow format.
      noise: float32[n, block] in (0, 1): a number is rounded up if the share that it
        has of the way there is larger. None rounds to nearest, as int2 always does.
    Returns:
      [n, width] of the carrier type.
    """
    if wire_dtype == "bfloat16":
        rounded = _round_significant(values, 8, 2.0**-119, noise)
        return _bits(rounded.astype(jnp.bfloat16), jnp.uint16)
    if wire_dtype == "int2":
        return _in_four_bins(values)
    largest = jnp.max(jnp.abs(values), axis=1, keepdims=True)
    if wire_dtype == "float16":
        # Normal also times the spacing of codes: XLA may divide by that product.
        scale = jnp.maximum(_power_of_two(largest) * 2.0**-14, _TINY * 2.0**24)
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
      float32[n, block].
    Example:
      >>> values = jnp.arange(256, dtype=jnp.float32).reshape(2, 128)
      >>> back = decode(encode(values, 'int8'), 'int8')
      >>> bool(jnp.max(jnp.abs(back - values)) <= 0.51 * 255 / 126)
      True
    """
    if wire_dtype == "bfloat16":
        return _bits(message, jnp.bfloat16).astype(jnp.float32)
    if wire_dtype == "int2":
        return _from_four_bins(message)
    num_codes = message.shape[1] - (1 if wire_dtype == "float16" else 2)
    codes, scale_bits = message[:, :num_codes], message[:, num_codes:]
    if wire_dtype == "float16":
        codes = _bits(codes, jnp.float16)
    else:
        scale_bits = scale_bits[:, None]  # two carriers make one scale
    if wire_dtype == "int4":
        codes = _apart(codes)
    scale = _bits(scale_bits, jnp.bfloat16).astype(jnp.float32)
    return codes.astype(jnp.float32) * scale


def write(values: jax.Array, wire: Wire) -> jax.Array:
    """Makes one message of few numbers, float32[n]; they are rounded to nearest.

    Returns:
      [wire.num_carriers(n)] of the carrier type.
    """
    if not wire.is_narrow:
        return values
    padded = jnp.pad(values, (0, -values.size % wire.block))
    return encode(padded.reshape(-1, wire.block), wire.dtype).ravel()


def read(message: jax.Array, num_elements: int, wire: Wire) -> jax.Array:
    """Inverse of `write` up to its rounding: float32[num_elements]."""
    if wire.is_narrow:
        message = decode(message.reshape(-1, wire.block_width), wire.dtype).ravel()
    return message[:num_elements]


def add_to_part(rows: jax.Array, part: jax.Array, index: jax.Array | int) -> jax.Array:
    """Adds to part `index` of rows [size * n, ...], which are cut into parts of n."""
    start = index * len(part)
    own = jax.lax.dynamic_slice_in_dim(rows, start, len(part))
    return jax.lax.dynamic_update_slice_in_dim(rows, own + part, start, 0)


def mean_of_shares(
    share: jax.Array,
    axis: Axis,
    first_block: jax.Array | int,
    wire: Wire,
    key: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Averages the shares of one device per host in a narrow format.

    Args:
      share: float32[size * blocks * block], with as many positions along the axis as
        `size` says.
      axis: The axis of the hosts, or several that are taken as one.
      first_block: Number of the first block of the share in the whole.
      wire: A narrow format.
      key: Random key, the same everywhere: rounding is stochastic, the mean unbiased.
        The draws of different hosts are independent. None rounds to nearest.
    Returns:
      [size * blocks, width]: the mean, still encoded, the same along the axis. And
      [size * blocks * block], what both roundings have lost here: the mean over the
      axis of what was given is what the first decodes to plus the mean of the second.
    Collectives:
      An exchange over `axis` of size * blocks * width carriers, and a gather of
      blocks * width from each position.
    """
    size, here = axis_size(axis), position(axis)
    blocks = share.reshape(-1, wire.block)
    noise = _noise(key, here + 1, first_block, blocks.shape)
    own = encode(blocks, wire.dtype, noise)
    arrived = collectives.exchange(own, axis)
    each = decode(arrived, wire.dtype).reshape(size, -1, wire.block)
    mean = jnp.sum(each / size, axis=0)  # divided first: the sum might overflow
    noise = _noise(key, 0, first_block + here * len(mean), mean.shape)
    final = encode(mean, wire.dtype, noise)
    lost = blocks - decode(own, wire.dtype)
    # What the mean loses is lost for all, and this host alone knows of it.
    lost = add_to_part(lost, size * (mean - decode(final, wire.dtype)), here)
    return collectives.collect(final, axis), lost.ravel()


def _noise(
    key: jax.Array | None,
    stream: jax.Array | int,
    first_block: jax.Array | int,
    shape: tuple[int, ...],
) -> jax.Array | None:
    """Uniform numbers in (0, 1) that belong to the blocks, whoever draws them."""
    if key is None:
        return None
    own = jax.random.fold_in(key, stream)
    num_blocks, block = shape

    def of_block(index: jax.Array) -> jax.Array:
        # 16 bits decide a rounding finely enough: two draws from every random word.
        words = jax.random.bits(jax.random.fold_in(own, index), (block // 2,))
        return _bits(words, jnp.uint16).reshape(block)

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


def _in_four_bins(values: jax.Array) -> jax.Array:
    """The message of int2, int8[n, block / 4 + 8]."""
    largest = jnp.max(jnp.abs(values), axis=1, keepdims=True)
    # Squares might overflow, or become zero; so would the reciprocal of the largest.
    scale = jnp.maximum(_power_of_two(largest) * 2.0**-50, _TINY)
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


def _from_four_bins(message: jax.Array) -> jax.Array:
    """Inverse of `_in_four_bins`, up to its rounding."""
    packed, table_bits = message[:, :-8], message[:, -8:]
    codes = jnp.concatenate([(packed >> (2 * i)) & 3 for i in range(4)], axis=1)
    table = _bits(table_bits.reshape(-1, 4, 2), jnp.bfloat16).astype(jnp.float32)
    chosen = [jnp.where(codes == i, table[:, i : i + 1], 0.0) for i in range(4)]
    return sum(chosen[1:], start=chosen[0])


def _bits(values: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The same bits, read as another type."""
    return jax.lax.bitcast_convert_type(values, dtype)
