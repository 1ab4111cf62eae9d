"""Matrices of a tree and their factors: views, batches of one shape, orthonormal bases.

Linear algebra on one device; `powersgd` says what is sent. A leaf is viewed as
`A[rows, cols]` without being transposed, and approximated by a product of a `basis`
over its shorter side and `coefficients` over its longer one.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

# Below this share of its length, what is left of a column is rounding.
_ROUNDING = 1e-5
# Bases up to this rank are unrolled, which leaves few kernels.
_MAX_UNROLLED = 8
# GPUs would round the factors of float32 products to ten bits.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """How one leaf is viewed, and the rank it is given."""

    rows: int
    cols: int
    rank: int

    @property
    def short(self) -> int:
        """Length of the shorter side, over which the basis is."""
        return min(self.rows, self.cols)

    @property
    def long(self) -> int:
        """Length of the longer side, over which the coefficients are."""
        return max(self.rows, self.cols)

    @property
    def gain(self) -> float:
        """Elements of the matrix over those of its two factors."""
        return self.rows * self.cols / (self.rank * (self.rows + self.cols))

    @property
    def name(self) -> str:
        """What equal views are called: `576x64`."""
        return f"{self.rows}x{self.cols}"


@dataclasses.dataclass(frozen=True)
class Side:
    """The side of a matrix that lies in slices, as axes of the leaf it is a view of."""

    is_rows: bool
    is_short: bool  # Whether it is the shorter side, over which the basis is.
    axes: tuple[int, ...]  # Sizes of its axes in the leaf.
    dim: int  # That of them which is cut.
    parts: int

    @property
    def own_axes(self) -> tuple[int, ...]:
        """Sizes of the axes in a slice."""
        width = -(-self.axes[self.dim] // self.parts)
        return (*self.axes[: self.dim], width, *self.axes[self.dim + 1 :])


def side_of(view: Matrix, shape: Sequence[int], dim: int, parts: int) -> Side:
    """Which side of a view of a leaf lies in slices, if the leaf is cut along an axis.

    Example:
      >>> side_of(view_of((3, 3, 64, 32), 2), (3, 3, 64, 32), 2, 4).own_axes
      (3, 3, 16)
    """
    end = next(n for n in range(1, len(shape)) if math.prod(shape[:n]) == view.rows)
    rows_are_short = view.rows == view.short
    if dim < end:
        return Side(True, rows_are_short, tuple(shape[:end]), dim, parts)
    return Side(False, not rows_are_short, tuple(shape[end:]), dim - end, parts)


def view_of(shape: Sequence[int], rank: int) -> Matrix | None:
    """Splits the axes of a leaf where rows and columns are fewest together.

    Kernels [kh, kw, c_in, c_out] with c_out >= kh * kw, as nearly always, become
    [kh * kw * c_in, c_out], as PowerSGD's authors view them; dense kernels stay as they
    are, and those of attention, [width, heads, size], become [width, heads * size].
    Scalars, vectors and leaves without elements have no view.

    Example:
      >>> view_of((3, 3, 64, 128), 2)
      Matrix(rows=576, cols=128, rank=2)
      >>> view_of((3, 3, 1, 256), 2)
      Matrix(rows=9, cols=256, rank=2)
    """
    if len(shape) < 2 or not math.prod(shape):
        return None
    splits = [
        (math.prod(shape[:axis]), math.prod(shape[axis:]))
        for axis in range(len(shape) - 1, 0, -1)
    ]
    rows, cols = min(splits, key=sum)
    return Matrix(rows, cols, min(rank, rows, cols))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which leaves are factored, equal shapes together, and which are sent whole."""

    # (view, positions of the leaves that have it), in order of appearance.
    batches: tuple[tuple[Matrix, tuple[int, ...]], ...]
    whole: tuple[int, ...]  # Positions of the other leaves.

    @property
    def num_short(self) -> int:
        """Elements of all factors over shorter sides."""
        return sum(len(at) * view.short * view.rank for view, at in self.batches)

    @property
    def num_long(self) -> int:
        """Elements of all factors over longer sides."""
        return sum(len(at) * view.long * view.rank for view, at in self.batches)


def make_plan(
    shapes: Sequence[Sequence[int]],
    rank: int,
    min_gain: float,
    is_whole: Sequence[bool] | None = None,
) -> Plan:
    """Decides which leaves are factored: where it makes them `min_gain` smaller.

    Example:
      >>> make_plan([(64, 10), (10,), (64, 10), (4, 4)], rank=2, min_gain=2.0)
      Plan(batches=((Matrix(rows=64, cols=10, rank=2), (0, 2)),), whole=(1, 3))
    """
    batches: dict[Matrix, list[int]] = {}
    whole = []
    for position, shape in enumerate(shapes):
        view = view_of(shape, rank)
        is_excepted = is_whole is not None and is_whole[position]
        if view is None or is_excepted or view.gain < min_gain:
            whole.append(position)
        else:
            batches.setdefault(view, []).append(position)
    return Plan(tuple((view, tuple(at)) for view, at in batches.items()), tuple(whole))


def stack(
    view: Matrix, leaves: Sequence[jax.Array], side: Side | None = None
) -> jax.Array:
    """Views leaves of one shape, or slices of them, as float[batch, rows, cols]."""
    rows, cols = view.rows, view.cols
    if side is not None and side.is_rows:
        rows = math.prod(side.own_axes)
    elif side is not None:
        cols = math.prod(side.own_axes)
    return jnp.stack([leaf.reshape(rows, cols) for leaf in leaves])


def to_short(view: Matrix, matrices: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiplies matrices and factors [batch, long, rank] to [batch, short, rank]."""
    over = "bij,bjr->bir" if view.rows == view.short else "bij,bir->bjr"
    return _einsum(over, matrices, factor)


def to_long(view: Matrix, matrices: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiplies matrices and factors [batch, short, rank] to [batch, long, rank]."""
    over = "bij,bir->bjr" if view.rows == view.short else "bij,bjr->bir"
    return _einsum(over, matrices, factor)


def product(view: Matrix, basis: jax.Array, coefficients: jax.Array) -> jax.Array:
    """Multiplies factors, over the short and the long side, to matrices."""
    if view.rows == view.short:
        return _einsum("bir,bjr->bij", basis, coefficients)
    return _einsum("bir,bjr->bij", coefficients, basis)


def orthonormal(matrices: jax.Array) -> jax.Array:
    """Makes the columns of every matrix of float32[batch, n, rank] orthonormal.

    Gram-Schmidt, with every projection taken twice, which is enough for orthogonality
    to rounding (Giraud et al., 2005). A column that is zero, or depends on those before
    it, is replaced by a fixed random direction: the result is a full basis whatever
    comes in, and not blind to any row for ever. Not finite where the input is not.

    Example:
      >>> basis = orthonormal(jnp.ones((1, 4, 2)))  # two equal columns
      >>> bool(jnp.allclose(basis[0].T @ basis[0], jnp.eye(2), atol=1e-6))
      True
    """
    return jax.vmap(_orthonormal)(matrices)


def _orthonormal(matrix: jax.Array) -> jax.Array:
    num_rows, rank = matrix.shape
    spare = jax.random.normal(jax.random.key(1), (num_rows, rank), matrix.dtype)
    columns = jnp.arange(rank)[None]

    def add_column(index: int, basis: jax.Array) -> jax.Array:
        found = jnp.where(columns < index, basis, 0)

        def beside(column: jax.Array) -> jax.Array:
            for _ in range(2):
                along = _einsum("ir,i->r", found, column)
                column = column - _einsum("ir,r->i", found, along)
            return column

        column = _scaled(basis[:, index])
        rest = beside(column)
        is_dependent = _norm(rest) <= _ROUNDING * _norm(column)
        rest = jnp.where(is_dependent, beside(spare[:, index]), rest)
        # Once more at length one: what rounding left along the others has grown.
        rest = beside(rest / _norm(rest))
        return basis.at[:, index].set(rest / _norm(rest))

    is_small = rank <= _MAX_UNROLLED
    return jax.lax.fori_loop(0, rank, add_column, matrix, unroll=is_small or 1)


def unit_columns(matrices: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Scales the columns of every matrix of float32[batch, n, rank] to length one.

    Columns that are zero, or nothing but rounding beside the longest of their matrix,
    have no direction: those of `otherwise` are taken.
    """
    largest = jnp.max(jnp.abs(matrices), axis=(1, 2), keepdims=True)
    scaled = matrices / jnp.where(largest > 0, largest, 1)
    norms = jnp.sqrt(jnp.sum(jnp.square(scaled), axis=1, keepdims=True))
    longest = jnp.max(norms, axis=2, keepdims=True)
    is_rounding = norms <= _ROUNDING * longest
    return jnp.where(is_rounding, otherwise, scaled / jnp.where(is_rounding, 1, norms))


def _norm(vector: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(vector)))


def _scaled(vector: jax.Array) -> jax.Array:
    """Divides by the largest entry, so that squares neither overflow nor vanish."""
    largest = jnp.max(jnp.abs(vector))
    return vector / jnp.where(largest > 0, largest, 1)
