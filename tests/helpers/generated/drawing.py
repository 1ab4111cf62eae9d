"""Draws the operands of a program: weights, layers, inputs, constants and lookups."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FLOATS = ("float32", "float32", "float32", "float16", "bfloat16", "float64")
TINY_FLOATS = ("float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "int32", "uint8", "int4", "uint4", "int2", "uint2", "int64")
# Numbers of which small sums are exact, so that their order does not matter.
STEPS = np.array([-2.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0])
ODD = (np.nan, np.inf, -np.inf, 0.0)
# What channels are made of, and how often. Most programs have only those kinds that
# keep channels apart; what freezes them is drawn often enough in the others.
MILD = {"layer": 8, "shifted": 2, "unknown": 3, "constant": 2, "single": 1, "taken": 1}
KINDS = {
    "layer": 12,
    "weights": 3,
    "shifted": 3,
    "unknown": 4,
    "constant": 3,
    "odd constant": 1,
    "full": 1,
    "single": 2,
    "input": 1,
    "nan input": 1,
    "taken": 1,
}


def is_float(dtype):
    return jnp.issubdtype(dtype, jnp.floating)


class Draw:
    """Draws one program; values are functions of (params, inputs).

    Attributes:
      params: Parameters that were drawn, by name.
      inputs: How inputs are drawn, by name: functions of a generator of numbers.
      log: What was drawn, for people.
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.params = {}
        self.inputs = {}
        self.log = []
        self.kinds = MILD if self.chance(0.6) else KINDS

    def pick(self, *options):
        return options[self.rng.integers(len(options))]

    def chance(self, share):
        return bool(self.rng.random() < share)

    def size(self):
        return self.pick(1, 2, 4, 4)

    def shape(self, *ranks):
        shape = [self.size() for _ in range(self.pick(*ranks))]
        if shape and max(shape) < 4 and self.chance(0.8):
            shape[self.rng.integers(len(shape))] = 4
        return tuple(shape)

    def channel_axis(self, shape):
        """An axis to put channels on: a long one if there is one."""
        long = [axis for axis, size in enumerate(shape) if size > 2]
        return self.pick(*(long or range(len(shape)))) if shape else None

    def dtype(self, *names):
        name = self.pick(*names)
        self.log.append(name)
        return jax.dtypes.canonicalize_dtype(jnp.dtype(name))

    def parameter(self, shape, dtype=jnp.float32, is_positive=False):
        name = f"p{len(self.params)}"
        values = self.rng.choice(STEPS, shape)
        values = np.abs(values) if is_positive else values
        self.params[name] = jnp.asarray(values, dtype)
        return lambda p, x: p[name]

    def input(self, shape, draw):
        name = f"x{len(self.inputs)}"
        self.inputs[name] = lambda rng: jnp.asarray(draw(rng, shape))
        return lambda p, x: x[name]

    def numbers(self, shape):
        return self.input(shape, lambda rng, s: rng.choice(STEPS, s).astype("f4"))

    def numbers_with_nan(self, shape):
        def draw(rng, s):
            values = rng.choice(STEPS, s).astype("f4")
            return np.where(rng.random(s) < 0.3, np.float32(np.nan), values)

        return self.input(shape, draw)

    def whole(self, shape, below, low=0):
        """Whole numbers from `low` to `below`, which is left out."""
        return self.input(shape, lambda rng, s: rng.integers(low, below, s, np.int32))

    def operand(self, shape, dtype=np.float32, axis=None, kinds=None):
        """A value of a shape and a type, with channels along an axis, if with any."""
        weights = {kind: KINDS[kind] for kind in kinds} if kinds else self.kinds
        total = sum(weights.values())
        kind = self.rng.choice(list(weights), p=[w / total for w in weights.values()])
        self.log.append(f"{kind}{list(shape)}@{axis}")
        if kind == "weights" and not jnp.issubdtype(dtype, jnp.bool_):
            if jnp.issubdtype(dtype, jnp.complexfloating):
                return self._converted(self.parameter(shape), dtype)
            return self.parameter(
                shape, dtype, jnp.issubdtype(dtype, jnp.unsignedinteger)
            )
        return self._converted(self._real(kind, shape, axis), dtype)

    def _real(self, kind, shape, axis):
        if kind in ("layer", "shifted", "unknown", "nan input", "weights"):
            if axis is None:
                return self.numbers(shape)
            layer = self._layer(shape, axis, is_nan=kind == "nan input")
            if kind == "shifted":
                return lambda p, x: layer(p, x) + 1.0
            if kind == "unknown":
                shift = self.parameter(())
                return lambda p, x: layer(p, x) + shift(p, x)
            return layer
        if kind == "input":
            return self.numbers(shape)
        if kind == "full":
            number = self.pick(0.0, 1.0, -0.5, np.inf, np.nan)
            return lambda p, x: jnp.full(shape, number, jnp.float32)
        if kind == "taken":
            return self._taken(shape, axis)
        if kind == "single":
            single = tuple(
                1 if self.chance(0.6) or a == axis else n for a, n in enumerate(shape)
            )
            value = self.pick(self.parameter, self.numbers)(single)
            if self.chance(0.5):
                reps = tuple(n // m for n, m in zip(shape, single, strict=True))
                return lambda p, x: (
                    jnp.tile(value(p, x), reps) if shape else value(p, x)
                )
            return lambda p, x: jnp.broadcast_to(value(p, x), shape)
        values = self.rng.choice(STEPS, shape).astype("f4")
        if kind == "odd constant":
            where = self.rng.random(shape) < 0.4
            values = np.where(where, np.float32(self.pick(*ODD)), values).astype("f4")
        return lambda p, x: jnp.asarray(values)

    def _layer(self, shape, axis, is_nan):
        """Numbers that are zero at dead channels, as behind a matrix of weights."""
        around = tuple(1 if a == axis else n for a, n in enumerate(shape))
        along = tuple(n if a == axis else 1 for a, n in enumerate(shape))
        rows = (self.numbers_with_nan if is_nan else self.numbers)(around)
        weight = self.parameter((shape[axis],))
        return lambda p, x: rows(p, x) * weight(p, x).reshape(along)

    def _taken(self, shape, axis):
        """Rows of a table, of which some do not exist."""
        if axis is None or not shape:
            return self.numbers(shape)
        rest = tuple(n for a, n in enumerate(shape) if a != axis)
        table = self.parameter((5, shape[axis]))
        ids = self.whole(rest, 8)
        return lambda p, x: jnp.moveaxis(
            jnp.take(table(p, x), ids(p, x), axis=0, mode="fill"), -1, axis
        )

    def _converted(self, value, dtype):
        if jnp.issubdtype(dtype, jnp.bool_):
            name = self.pick("gt", "ge", "ne")
            number = self.pick(0.0, 0.5)
            compare = getattr(lax, name)
            return lambda p, x: compare(value(p, x), jnp.full_like(value(p, x), number))
        if jnp.issubdtype(dtype, jnp.integer):
            factor = 2.0 if self.chance(0.7) else 40.0
            if jnp.iinfo(dtype).bits < 8:
                factor = 1.0
            return lambda p, x: (value(p, x) * factor).astype(dtype)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return lambda p, x: lax.complex(value(p, x), jnp.sin(value(p, x)))
        return lambda p, x: value(p, x).astype(dtype)


def is_complex(x):
    return jnp.issubdtype(jax.dtypes.result_type(x), jnp.complexfloating)
