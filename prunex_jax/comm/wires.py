"""How numbers cross hosts, and the mean over hosts in the narrow formats.

A sum that a backend takes in a narrow type rounds at every hop, overflows, and on CPUs
widens bfloat16. Here numbers are narrow on the wire only: every host sends each other
host its part of the buffer, adds up in float32 what arrives for its own part, and sends
the result to all. That is two roundings, and the bytes of a ring.

Sits on `comm.collectives` and `comm.formats`; `comm.averaging` cuts trees into shares
for it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.comm import collectives
from prunex_jax.comm.formats import FORMATS, Format
from prunex_jax.mesh import Axis, axis_size, position


@dataclasses.dataclass(frozen=True)
class Wire:
    """How numbers cross hosts: their format, and the size of a message.

    Attributes:
      dtype: A row of `FORMATS`. float32 is summed by the backend as it is; the others
        are sent in blocks.
      bucket_bytes: Largest message that stands for a buffer; 0 sends one for a whole
        tree. A limit pays for large trees.
      in_turn: Whether a message waits for the mean of the one before the last, so that
        few are in memory. For trees that are known as a whole, as in rounds: gradients
        of a step become known in another order.
    """

    dtype: str = "float32"
    bucket_bytes: int = 0
    in_turn: bool = False

    def __post_init__(self) -> None:
        """Raises UserError if there is no such format or size."""
        if self.dtype not in FORMATS:
            raise UserError(
                f"wire_dtype={self.dtype!r} must be one of {', '.join(FORMATS)}"
            )
        if self.bucket_bytes < 0:
            raise UserError(f"bucket_bytes={self.bucket_bytes} must be zero or more")

    @property
    def format(self) -> Format:
        """How numbers are written."""
        return FORMATS[self.dtype]

    @property
    def is_narrow(self) -> bool:
        """Whether numbers are encoded, in blocks."""
        return self.dtype != "float32"

    @property
    def bucket_elements(self) -> int:
        """Elements of a buffer whose message fits into a bucket; 0 is no limit.

        Narrow formats fill whole blocks; at least one element, or block, is sent.

        Example:
          >>> Wire('float32', 1000).bucket_elements, Wire('int8', 1000).bucket_elements
          (250, 896)
        """
        if not self.bucket_bytes:
            return 0
        blocks = max(1, self.bucket_bytes // self.format.block_bytes)
        return self.format.block * blocks

    def num_carriers(self, num_elements: int) -> int:
        """Carriers that stand for so many numbers: those of whole blocks."""
        return -(-num_elements // self.format.block) * self.format.width

    def payload_bytes(self, num_elements: int) -> int:
        """Bytes that stand for so many numbers: those of whole blocks.

        Every device carries whole blocks to every host, so a few more may be sent.

        Example:
          >>> FLOAT32.payload_bytes(1280), Wire('int8').payload_bytes(1280)
          (5120, 1300)
        """
        return self.num_carriers(num_elements) * jnp.dtype(self.format.carrier).itemsize

    def at_least_8_bits(self) -> "Wire":
        """The same message size, in int8 where numbers would be narrower."""
        is_coarse = self.format.block_bytes < self.format.block
        return dataclasses.replace(self, dtype="int8") if is_coarse else self


FLOAT32 = Wire()


def refuse_biased(wire: Wire, sender: str) -> None:
    """Raises UserError for a format that needs error feedback, where there is none."""
    if wire.format.is_biased:
        raise UserError(
            f"wire_dtype={wire.dtype!r} rounds to nearest, and {sender} does not send "
            "later what that loses; choose int4 or a wider format, or a method with "
            "error feedback: dense, hsadmm, local_sgd, diloco, topk, dgc"
        )


def write(values: jax.Array, wire: Wire) -> jax.Array:
    """Makes one message of few numbers, float32[n], which are rounded to nearest."""
    block = wire.format.block
    padded = jnp.pad(values, (0, -values.size % block))
    return wire.format.encode(padded.reshape(-1, block), None).ravel()


def read(message: jax.Array, num_elements: int, wire: Wire) -> jax.Array:
    """Inverse of `write` up to its rounding: float32[num_elements]."""
    blocks = message.reshape(-1, wire.format.width)
    return wire.format.decode(blocks).ravel()[:num_elements]


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
      share: float32[size * blocks * block], with `size` positions along the axis.
      axis: The axis of the hosts, or several that are taken as one.
      first_block: Number of the first block of the share in the whole.
      wire: A narrow format.
      key: As in `mean_over_hosts`; the draws of different hosts are independent.
    Returns:
      [size * blocks, width]: the mean, still encoded, the same along the axis. And
      what both roundings have lost here, like the share: the mean over the axis of
      what was given is what the first decodes to plus the mean of the second.
    Collectives:
      An exchange over `axis` of size * blocks * width carriers, and a gather of
      blocks * width from each position.
    """
    size, here = axis_size(axis), position(axis)
    encode, decode, block = wire.format.encode, wire.format.decode, wire.format.block
    blocks = share.reshape(-1, block)
    noise = _noise(key, here + 1, first_block, blocks.shape)
    own = encode(blocks, noise)
    arrived = collectives.exchange(own, axis)
    each = decode(arrived).reshape(size, -1, block)
    mean = jnp.sum(each / size, axis=0)  # divided first: the sum might overflow
    noise = _noise(key, 0, first_block + here * len(mean), mean.shape)
    final = encode(mean, noise)
    lost = blocks - decode(own)
    # What the mean loses is lost for all, and this host alone knows of it.
    lost = add_to_part(lost, size * (mean - decode(final)), here)
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
        return jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(block)

    bits = jax.vmap(of_block)(first_block + jnp.arange(num_blocks))
    return (bits.astype(jnp.float32) + 0.5) * 2.0**-16
