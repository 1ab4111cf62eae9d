"""Refits what reads channels that go to those that stay, in closed form.

The function and its masked form are computed side by side on some examples. Where one
has y as a matrix product, or a convolution, of a parameter W, and the other has x left
to read of the kept channels k, with all taps of a convolution,

    W_k <- (C + lambda I)^-1 (D + lambda W_k)
    C = sum of x x^T,   D = sum of x y^T

is the ridge regression of y on x, over examples and positions. The masked form goes on
with the new weights, so that later products make up for what earlier ones could not.

The traced program says where parameters are read, so it works for any JAX function.

References:
  Luo et al., ThiNet, 2017, arXiv:1707.06342 (least squares on kept channels).
  CORP, 2026, arXiv:2602.05243 (closed-form repair of transformers, with a ridge).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from prunex_jax.base.errors import UserError
from prunex_jax.base.jaxprs import CALLS, MESH_CASTS, called_program, interpret
from prunex_jax.base.trees import PyTree, flatten_by_path, map_with_path
from prunex_jax.channels.walk import evaluate
from prunex_jax.shrink.cut import Cut
from prunex_jax.shrink.part import Part

# Operations that move entries of a parameter and change none.
_MOVES = {"broadcast_in_dim", "reshape", "rev", "slice", "squeeze", "transpose"}
# Operations after which they are where they were, on an array of numbers or a mesh.
_STAYS = {"convert_element_type", "copy", "reshard", *MESH_CASTS}
# So many positions of a device are enough for thousands of inputs.
_MOST_POSITIONS = 2**16
# Adds up over hosts.
Total = Callable[[Any], Any]
_Place = tuple[int, ...]  # Number of an equation, in the programs around it.


def repair(
    apply: Callable[..., Any],
    params: PyTree,
    cut: Cut,
    *inputs: PyTree,
    statistics: PyTree | None = None,
    ridge: float = 1e-3,
    total: Total = lambda sums: sums,
) -> PyTree:
    """Refits all matrix products and convolutions that read channels that go.

    Args:
      apply: The function whose channels were traced, `apply(params, *inputs)` or
        `apply(params, statistics, *inputs)`.
      params: Its parameters, full size, before anything is set to zero.
      cut: What goes.
      *inputs: Some hundred examples; no labels.
      statistics: Running statistics of full size; None if the function takes none.
      ridge: lambda, as a share of the mean square of the kept inputs.
      total: Adds up what hosts have found of their own examples: per product a tuple of
        two float32 arrays, (kept inputs + 1) / 2, rounded up, x (kept inputs + 1), and
        (kept inputs) x (outputs), where inputs are channels times taps.
    Returns:
      Parameters of full size with zeros for what goes, as from `Cut.mask`, for
      `Cut.take`. Running statistics of norms fit them no longer: take them anew.
    Raises:
      UserError: No product of a parameter reads what goes.
    Example:
      >>> from prunex_jax.channels import trace_channels
      >>> from prunex_jax.shrink import make_cut
      >>> def apply(params, x):
      ...     return jnp.tanh(x @ params['in']) @ params['out']
      >>> one, x = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.eye(3)
      >>> twice = {'in': jnp.hstack([one, one]), 'out': jnp.ones((8, 2))}
      >>> trace = trace_channels(apply, twice, x)
      >>> cut = make_cut(trace, {'in': np.arange(8) < 4}, twice)
      >>> fitted = repair(apply, twice, cut, x)
      >>> bool(jnp.allclose(apply(fitted, x), apply(twice, x), atol=1e-2))
      True
    """
    running = () if statistics is None else (statistics,)
    closed = jax.make_jaxpr(apply)(params, *running, *inputs)
    with jax.ensure_compile_time_eval():  # Also where the caller is traced.
        consumers = _consumers(closed, cut.parameters)
    if not consumers:
        raise UserError(
            "repair found no matrix product or convolution of a parameter that reads "
            "what is cut out; leave it out"
        )
    fit = jax.jit(_Refit(closed, consumers, ridge, total))
    rest = jax.tree.leaves((*running, inputs))
    masked = cut.mask(params)
    fitted = fit(params, masked, rest)
    entries = {each.path: each.entries for each in consumers.values()}

    def new(path: str, leaf: Any) -> Any:
        if path not in fitted:
            return leaf
        flat = jnp.ravel(leaf).at[entries[path]].set(fitted[path].astype(leaf.dtype))
        return flat.reshape(np.shape(leaf))

    return map_with_path(new, masked)


@dataclasses.dataclass(frozen=True, eq=False)
class _Consumer:
    """A matrix product, or convolution, of a parameter and something computed."""

    path: str  # The parameter.
    # int[inputs, outputs], which entry of the flat parameter is where. The taps of a
    # convolution are inputs of their own.
    entries: np.ndarray
    alive: np.ndarray  # bool[inputs, outputs], which of them stay.
    operand: int  # Number of the operand that is the parameter; the other one is x.
    weight_axes: tuple[int, ...]  # Axes of that which are summed over,
    input_axes: tuple[int, ...]  # and the same of x.
    eqn: core.JaxprEqn  # The product.

    @property
    def kept(self) -> np.ndarray:
        """int[kept], the inputs that stay."""
        return np.flatnonzero(self.alive.any(1))

    def weight(self, rows: jax.Array, like: jax.Array) -> jax.Array:
        """The operand of these [inputs, outputs]; `like` the old one."""
        front = tuple(range(len(self.weight_axes)))
        zeros = jnp.zeros_like(like)  # Varies over a mesh as the old one does.
        moved = jnp.moveaxis(zeros, self.weight_axes, front)
        moved += rows.reshape(moved.shape).astype(like.dtype)
        return jnp.moveaxis(moved, front, self.weight_axes)

    def read_and_given(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """float32[positions, inputs] and [positions, outputs], of some positions."""
        if self.eqn.primitive.name == "dot_general":
            weight: Any = self.eqn.invars[self.operand].aval
            count = weight.ndim - len(self.weight_axes)
            given = tuple(range(count) if self.operand == 0 else range(-count, 0))
            read = self.input_axes
        else:
            x, y, axis = _patches(self.eqn, x, y)
            read = given = (axis,)
        return _rows(x, read, len(self.entries)), _rows(y, given, self.entries.shape[1])


class _Pair(NamedTuple):
    """A value of the function, and of its masked form."""

    whole: Any
    left: Any


@dataclasses.dataclass(frozen=True, eq=False)
class _Refit:
    """Computes a function and its masked form side by side, and refits the latter."""

    closed: Any
    consumers: Mapping[_Place, _Consumer]
    ridge: float
    total: Total

    def __call__(
        self, params: PyTree, masked: PyTree, rest: Sequence[Any]
    ) -> dict[str, jax.Array]:
        """New weights float32[inputs, rest] by path of the parameter."""
        fitted: dict[str, jax.Array] = {}
        leaves = flatten_by_path(params)

        def do(
            eqn: core.JaxprEqn, operands: list[_Pair], place: _Place
        ) -> Sequence[_Pair]:
            whole, left = ([x[side] for x in operands] for side in (0, 1))
            consumer, results = self.consumers.get(place), evaluate(eqn, whole)
            if consumer is not None:
                number = consumer.operand
                rows = jnp.ravel(leaves[consumer.path])[consumer.entries]
                rows = self._refitted(consumer, left[1 - number], results[0], rows)
                fitted[consumer.path] = rows
                left[number] = consumer.weight(rows, whole[number])
            is_same = all(x.whole is x.left for x in operands)
            others = results if is_same and consumer is None else evaluate(eqn, left)
            return list(map(_Pair, results, others))

        pairs = map(_Pair, jax.tree.leaves(params), jax.tree.leaves(masked))
        arguments = [*pairs, *(_Pair(x, x) for x in rest)]
        _through(self.closed, arguments, do, lambda value: _Pair(value, value))
        return fitted

    def _refitted(
        self, consumer: _Consumer, x: jax.Array, y: jax.Array, rows: jax.Array
    ) -> jax.Array:
        """The new weights, zero where they do not stay."""
        kept = consumer.kept
        left, wanted = consumer.read_and_given(x, y)
        left = left[:, kept]
        own = jnp.matmul(left.T, left, precision="highest")
        crossed = jnp.matmul(left.T, wanted, precision="highest")
        packed, crossed = self.total((pack_symmetric(own), crossed))
        own = unpack_symmetric(packed, len(kept))
        size = self.ridge * jnp.maximum(jnp.trace(own) / len(kept), 1e-30)
        old = rows.astype(jnp.float32)
        new = jax.scipy.linalg.solve(
            own + size * jnp.eye(len(kept)), crossed + size * old[kept], assume_a="pos"
        )
        return jnp.where(consumer.alive, old.at[kept].set(new), 0.0)


def pack_symmetric(matrix: jax.Array) -> jax.Array:
    """Puts the upper triangle of a symmetric matrix into half of its entries.

    Row i has what the diagonal and what is right of it hold in rows n-1-i and i.

    Args:
      matrix: float[n, n].
    Returns:
      float[(n + 1) // 2, n + 1]; `unpack_symmetric` inverts it.
    Example:
      >>> matrix = jnp.array([[1, 2, 3], [2, 4, 5], [3, 5, 6]])
      >>> pack_symmetric(matrix).tolist()
      [[6, 1, 2, 3], [5, 4, 4, 5]]
      >>> bool((unpack_symmetric(pack_symmetric(matrix), 3) == matrix).all())
      True
    """
    size = len(matrix)
    rows, columns = jnp.ogrid[: (size + 1) // 2, : size + 1]
    first = jnp.pad(matrix, ((0, 0), (1, 0)))[: len(rows)]
    last = jnp.pad(matrix[::-1, ::-1], ((0, 0), (0, 1)))[: len(rows)]
    return jnp.where(columns > rows, first, last)


def unpack_symmetric(packed: jax.Array, size: int) -> jax.Array:
    """The symmetric matrix of that size from `pack_symmetric`."""
    rows, columns = jnp.ogrid[:size, :size]
    top = packed[:, 1:]
    below = packed[: size // 2, :size][::-1, ::-1]
    upper = jnp.where(columns >= rows, jnp.concatenate([top, below]), 0)
    return upper + jnp.triu(upper, 1).T


def _rows(x: jax.Array, axes: tuple[int, ...], size: int) -> jax.Array:
    """float32[positions, size] of an array, with these axes together as the last."""
    moved = jnp.moveaxis(x, axes, tuple(range(-len(axes), 0)))
    return moved.reshape(-1, size)[:_MOST_POSITIONS].astype(jnp.float32)


def _patches(
    eqn: core.JaxprEqn, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array, int]:
    """What every position of a convolution reads, and what it gives, and where.

    Returns:
      What is read, of the first examples, as features: channels, then taps; what these
      give; and the axis of the features.
    """
    params: Any = eqn.params
    kernel: Any = eqn.invars[1].aval
    numbers = params["dimension_numbers"]
    batch, features, *space = numbers.out_spec
    # All taps of all positions of large images would not fit into memory.
    count = math.ceil(_MOST_POSITIONS / math.prod(y.shape[axis] for axis in space))
    x = lax.slice_in_dim(x, 0, min(count, y.shape[batch]), axis=numbers.lhs_spec[0])
    y = lax.slice_in_dim(y, 0, min(count, y.shape[batch]), axis=batch)
    read = lax.conv_general_dilated_patches(
        x.astype(jnp.float32),
        filter_shape=[kernel.shape[axis] for axis in numbers.rhs_spec[2:]],
        window_strides=params["window_strides"],
        padding=params["padding"],
        lhs_dilation=params["lhs_dilation"],
        rhs_dilation=params["rhs_dilation"],
        dimension_numbers=numbers,
        precision=lax.Precision.HIGHEST,
    )
    return read, y, features


def _through(
    program: Any,
    arguments: Sequence[Any],
    do: Callable[[core.JaxprEqn, list[Any], _Place], Sequence[Any]],
    constant: Callable[[Any], Any],
    place: _Place = (),
) -> list[Any]:
    """Goes through a program and those that it calls, with the place of everything."""
    numbers = itertools.count()

    def at(eqn: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        here = (*place, next(numbers))
        is_call = eqn.primitive.name in CALLS
        if is_call and (called := called_program(eqn)) is not None:
            return _through(called, operands, do, constant, here)
        return do(eqn, operands, here)

    return interpret(program, arguments, at, constant)


class _Index(NamedTuple):
    """Which entries of a parameter a value consists of."""

    path: str
    entries: np.ndarray


def _consumers(closed: Any, parameters: Part) -> dict[_Place, _Consumer]:
    """Products that read what goes, of parameters that nothing else reads."""
    alive = {
        path: functools.reduce(
            np.logical_and.outer,
            (parameters.stays(path, axis) for axis in range(len(shape))),
            np.array(True),
        ).ravel()
        for path, shape in parameters.shapes.items()
    }
    found: dict[_Place, _Consumer] = {}
    read = list[str]()

    def do(eqn: core.JaxprEqn, operands: list[Any], place: _Place) -> Sequence[Any]:
        indexed = [x for x in operands if x is not None]
        if len(operands) == len(indexed) == 1:
            if eqn.primitive.name in _STAYS:
                return operands
            if eqn.primitive.name in _MOVES:
                (index,) = operands
                (moved,) = evaluate(eqn, [jnp.asarray(index.entries)])
                return [_Index(index.path, np.asarray(moved))]
        read.extend(index.path for index in indexed)
        consumer = _consumer(eqn, operands, alive)
        if consumer is not None:
            found[place] = consumer
        return [None] * len(eqn.outvars)

    indices = [
        _Index(path, np.arange(math.prod(shape)).reshape(shape))
        for path, shape in parameters.shapes.items()
    ]
    others = [None] * (len(closed.jaxpr.invars) - len(indices))
    results = _through(closed, [*indices, *others], do, lambda value: None)
    read.extend(x.path for x in results if x is not None)
    return {
        place: each
        for place, each in found.items()
        if read.count(each.path) == 1 and len(each.kept) < len(each.entries)
    }


def _consumer(
    eqn: core.JaxprEqn, operands: Sequence[Any], alive: Mapping[str, np.ndarray]
) -> _Consumer | None:
    """What an equation reads by a parameter; None where it is no such product."""
    name, params = eqn.primitive.name, dict[str, Any](eqn.params)
    if name not in ("dot_general", "conv_general_dilated"):
        return None
    indexed = [number for number, x in enumerate(operands) if x is not None]
    if len(indexed) != 1:
        return None
    (number,) = indexed
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        if batch[number] or not contracted[number]:
            return None
        weight_axes, input_axes = contracted[number], contracted[1 - number]
    else:
        groups = params["feature_group_count"], params["batch_group_count"]
        if number == 0 or groups != (1, 1):
            return None
        numbers = params["dimension_numbers"]
        weight_axes, input_axes = numbers.rhs_spec[1:], numbers.lhs_spec[1:2]
    path, entries = operands[number]
    moved = np.moveaxis(entries, weight_axes, range(len(weight_axes)))
    entries = moved.reshape(math.prod(moved.shape[: len(weight_axes)]), -1)
    axes = tuple(weight_axes), tuple(input_axes)
    return _Consumer(path, entries, alive[path][entries], number, *axes, eqn)
