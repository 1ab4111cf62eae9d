"""Measures how far a shrunk function is from the masked one, forward and backward.

What is compared are two callables, so that any function of any framework can be
certified; `network.certify_networks` does it for networks of this package. The export
refuses what `Certificate.check` refuses.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.jaxprs import inner_programs, open_program
from prunex_jax.base.trees import PyTree, flatten_by_path

# Sums over other numbers of terms round differently; nothing else may differ.
_FORWARD_TOLERANCE = 1e-5
_GRADIENT_TOLERANCE = 1e-4
# Largest values below this share of the largest one of all are compared with that share
# of it. Some gradients are zero but for rounding: a bias in front of a normalisation,
# that of the keys of attention. What is left of them was up to 1e-6 of the largest
# gradient in float32, ten times less than what the share times the tolerance allows.
_SMALLEST_SHARE = {"output": 0.0, "gradient": 0.1}
# Errors on other inputs that are up to this many times what one rounding error of the
# parameters does may be rounding: of those, a forward pass makes many.
_NOISE = 30
# Where gradients differ, parameters are moved by this share, so many times: a tie that
# rounding breaks in two ways, as at 0 of a ReLU or in max pooling, is gone there.
_MOVED = 1e-3
_NUM_MOVES = 3


@dataclasses.dataclass(frozen=True)
class Certificate:
    """How far a shrunk function is from the masked one, on given inputs.

    It measures; `check` refuses. A shrink that is meant to be inexact, as one that
    renormalises over the kept channels, has a certificate that says by how much.

    Attributes:
      forward_error: max |a - b| / max |a| of the output for which it is worst, where a
        is masked and b shrunk; over floating outputs.
      gradient_error: The same of the gradient of a random projection of the outputs,
        for the parameter for which it is worst, on kept positions. A parameter whose
        gradient is below a tenth of the largest one is measured against that tenth.
        Differences that are gone for parameters that are a thousandth apart are left
        out: at a tie of two numbers, as in a ReLU or max pooling, rounding chooses the
        gradient, and elsewhere it does not. None if gradients were not compared.
      max_abs_error: max |a - b| over all floating outputs.
      num_values: Output values that were compared.
      num_gradients: Gradient values that were compared.
      worst_output: Path of the output that `forward_error` is of.
      worst_gradient: Path of the parameter that `gradient_error` is of.
      problems: What cannot be told as an error: values that are not finite, integers
        that differ, nothing but zeros, and errors for inputs other than the given ones.
      inputs: Which inputs were compared: those given, and others made of them.
      forward_tolerance: Largest `forward_error` that `check` accepts.
      gradient_tolerance: Largest `gradient_error` that `check` accepts.
    """

    forward_error: float
    gradient_error: float | None
    max_abs_error: float
    num_values: int
    num_gradients: int = 0
    worst_output: str = ""
    worst_gradient: str = ""
    problems: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ("given",)
    forward_tolerance: float = _FORWARD_TOLERANCE
    gradient_tolerance: float = _GRADIENT_TOLERANCE

    @property
    def is_equal(self) -> bool:
        """Whether `check` accepts."""
        return not self._complaints()

    def check(self) -> None:
        """Refuses a shrunk function that is another function than the masked one.

        Raises:
          UserError: An error is above its tolerance, or there are problems.
        Example:
          >>> Certificate(3e-7, None, 1e-6, num_values=64).check()
          >>> Certificate(0.2, None, 1.5, 64).check()  # doctest: +ELLIPSIS
          Traceback (most recent call last):
          ...
          prunex_jax.base.errors.UserError: masked ... above the allowed 1e-05...
        """
        complaints = self._complaints()
        if complaints:
            raise UserError(
                f"masked and shrunk function differ: {'; '.join(complaints)}; use the "
                "masks and the cut that the shrunk parameters came from and inputs as "
                "in training, or raise forward_tolerance and gradient_tolerance of "
                "certify if the difference is meant, as when a norm is renormalised"
            )

    def as_dict(self) -> dict[str, Any]:
        """Gives all figures as JSON can hold them, null for those not finite.

        Example:
          >>> Certificate(3e-7, None, 1e-6, num_values=64).as_dict()['is_equal']
          True
        """
        figures = dataclasses.asdict(self)
        for name, value in figures.items():
            if isinstance(value, float) and not math.isfinite(value):
                figures[name] = None
        return {
            "is_equal": self.is_equal,
            **figures,
            "problems": list(self.problems),
            "inputs": list(self.inputs),
        }

    def _complaints(self) -> list[str]:
        complaints = list(self.problems)
        # Negated, so that an error that is not a number is not accepted.
        if not self.forward_error <= self.forward_tolerance:
            complaints.append(
                f"{_named('output', self.worst_output)} by {self.forward_error:.2g} "
                f"of its largest value, above the allowed {self.forward_tolerance:g}"
            )
        error = self.gradient_error
        if error is not None and not error <= self.gradient_tolerance:
            complaints.append(
                f"{_named('gradient', self.worst_gradient)} by {error:.2g} of its "
                f"largest value, above the allowed {self.gradient_tolerance:g}"
            )
        return complaints


def certify(
    full: Callable[..., PyTree],
    small: Callable[..., PyTree],
    masked_params: PyTree,
    small_params: PyTree,
    inputs: Sequence[Any],
    take: Callable[[PyTree], PyTree],
    *,
    gradients: bool = True,
    vary: bool = True,
    seed: int = 0,
    forward_tolerance: float = _FORWARD_TOLERANCE,
    gradient_tolerance: float = _GRADIENT_TOLERANCE,
) -> Certificate:
    """Compares a masked function with its shrunk form.

    Both are compiled once, with matrix products in full precision also where the device
    would use less, and run on the given inputs. Figures are of these. Then they are run
    on inputs that are random, zero, large or, where they are whole numbers, out of
    range, and must agree there too, and be finite in the same places.

    What agrees on these inputs may still differ on others: this is a measurement, and
    the proof is that every operation was followed. Functions with a `while` loop, which
    other inputs might not end, are compared on the given ones only.

    Args:
      full: (params, *inputs) -> any tree of arrays; traceable.
      small: The same for shrunk parameters; outputs of the same paths and shapes.
      masked_params: Full shapes, dead channels zero.
      small_params: Shrunk.
      inputs: What both are given; a batch as in training. All zeros prove nothing.
      take: Cuts a tree shaped like `masked_params` to the shapes of `small_params`.
      gradients: Compare gradients with respect to all floating parameters.
      vary: Compare on other inputs too. Of those, gradients are compared for random
        inputs only. Where a change of parameters by a rounding error changes as much,
        nothing is said.
      seed: Of the projection whose gradient is taken: every floating output, relative
        to its largest value, times normal weights.
      forward_tolerance: What `Certificate.check` will accept.
      gradient_tolerance: The same for gradients.
    Returns:
      The errors. Integer outputs have to be equal.
    Raises:
      UserError: Outputs of the two differ in paths, shapes or types, `take` does not
        lead to `small_params`, or a tolerance is no finite number.
    Example:
      >>> def apply(params, x):
      ...     return jnp.tanh(x @ params['hidden']) @ params['out']
      >>> kept = np.array([0, 2])
      >>> params = {'hidden': jnp.eye(3), 'out': jnp.ones((3, 1))}
      >>> mask = jnp.array([[1.0, 0.0, 1.0]])
      >>> masked = {'hidden': params['hidden'] * mask,
      ...           'out': params['out'] * mask.T}
      >>> take = lambda t: {'hidden': t['hidden'][:, kept], 'out': t['out'][kept]}
      >>> certify(apply, apply, masked, take(masked), [jnp.ones((4, 3))], take).is_equal
      True
    """
    for name, tolerance in (
        ("forward_tolerance", forward_tolerance),
        ("gradient_tolerance", gradient_tolerance),
    ):
        if not 0 <= tolerance < math.inf:
            raise UserError(
                f"{name}={tolerance} accepts everything or nothing; give a share of "
                "the largest value, such as 1e-5"
            )
    program, shapes = jax.make_jaxpr(full, return_shape=True)(masked_params, *inputs)
    _check_alike(shapes, jax.eval_shape(small, small_params, *inputs))
    weights = _projection(shapes, seed) if gradients else {}
    run_full = _runner(full, masked_params, weights, take)
    run_small = _runner(small, small_params, weights)
    tolerances = {"output": forward_tolerance, "gradient": gradient_tolerance}
    others = _other_inputs(inputs, seed) if vary and not _may_not_end(program) else {}
    a, b = run_full(inputs), run_small(inputs)
    if "gradient" in a:
        _check_taken(a["gradient"], small_params)

    def without_ties(inputs: Sequence[Any], a: _Given, b: _Given) -> _Given:
        """What the small function gives, where differences of gradients stay."""
        moves = [_move(masked_params, number) for number in range(_NUM_MOVES)]
        pairs = [(a["gradient"], b["gradient"])] + [
            (
                run_full(inputs, move)["gradient"],
                run_small(inputs, take(move))["gradient"],
            )
            for move in moves
        ]
        return {**b, "gradient": _nearest(pairs)}

    if "gradient" in a:
        first = _compare(a["gradient"], b["gradient"], "gradient")
        if first.error > gradient_tolerance:
            rest = without_ties(inputs, a, b)
            left = _compare(a["gradient"], rest["gradient"], "gradient")
            b = rest if left.error <= gradient_tolerance else b
    found = {what: _compare(a[what], b[what], what) for what in a if what in b}
    outputs, grads = found["output"], found.get("gradient", _Comparison())
    further = [
        f"{problem} for {name} inputs"
        for name, some in others.items()
        for problem in _problems_with(
            name, some, run_full, run_small, without_ties, tolerances, masked_params
        )
    ]
    return Certificate(
        forward_error=outputs.error,
        gradient_error=grads.error if "gradient" in found else None,
        max_abs_error=outputs.max_abs_error,
        num_values=outputs.num_values,
        num_gradients=grads.num_values,
        worst_output=outputs.worst,
        worst_gradient=grads.worst,
        problems=(*outputs.problems, *grads.problems, *further),
        inputs=("given", *others),
        forward_tolerance=forward_tolerance,
        gradient_tolerance=gradient_tolerance,
    )


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """What one comparison of arrays by path has found."""

    error: float = 0.0
    worst: str = ""
    max_abs_error: float = 0.0
    num_values: int = 0
    problems: tuple[str, ...] = ()


# `output`, and `gradient` of a projection of the outputs where there is one -> by path
_Given = dict[str, dict[str, Any]]


def _runner(
    fn: Callable[..., PyTree],
    params: PyTree,
    weights: Mapping[str, np.ndarray],
    take: Callable[[PyTree], PyTree] = lambda tree: tree,
) -> Callable[..., _Given]:
    """Compiles a function, once for all inputs of the same shapes.

    Args:
      fn: (params, *inputs) -> any tree of arrays.
      params: Parameters; those that are not floating have a gradient of zeros.
      weights: By path of the outputs, for their projection.
      take: Of the gradient, a tree like params.
    Returns:
      (inputs, a change of parameters by path, None for none) -> what it gives.
    """

    def is_none(x: Any) -> bool:
        return x is None

    def project(
        floating: PyTree, params: PyTree, inputs: Sequence[Any], weights: Any
    ) -> tuple[jax.Array, PyTree]:
        merged = jax.tree.map(
            lambda x, rest: rest if x is None else x, floating, params, is_leaf=is_none
        )
        flat = flatten_by_path(fn(merged, *inputs))
        terms = [_projected(flat[path], weights[path]) for path in weights]
        return sum(terms, start=jnp.zeros(())), _plain_outputs(flat)

    floating = jax.tree.map(lambda x: x if _is_floating(x) else None, params)
    has_gradient = bool(weights) and bool(jax.tree.leaves(floating))
    differentiated = jax.value_and_grad(project, has_aux=True)
    compiled = jax.jit(differentiated if has_gradient else project)

    def run(inputs: Sequence[Any], factors: PyTree | None = None) -> _Given:
        moving = floating if factors is None else _times(floating, factors)
        with jax.default_matmul_precision("highest"):
            if not has_gradient:
                _, outputs = compiled(moving, params, inputs, {})
                return {"output": jax.device_get(outputs)}
            (_, outputs), found = compiled(moving, params, inputs, weights)
        gradient = jax.tree.map(
            lambda x, leaf: np.zeros(np.shape(leaf), np.float32) if x is None else x,
            found,
            params,
            is_leaf=is_none,
        )
        taken = flatten_by_path(take(gradient))
        return {"output": jax.device_get(outputs), "gradient": taken}

    return run


def relative_error(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """Largest difference of any array, of the largest value of that array.

    Args:
      found: Arrays.
      wanted: What they should be.
    Returns:
      max |a - b| / max |b| of the arrays for which it is worst; infinity if they are
      not as many, or of other shapes, nan if some hold nan.
    Example:
      >>> relative_error([np.array([1.0, 3.0])], [np.array([1.0, 4.0])])
      0.25
    """
    if [np.shape(x) for x in found] != [np.shape(x) for x in wanted]:
        return math.inf
    errors = [
        np.abs(_wide(a) - _wide(b)).max(initial=0.0)
        / max(np.abs(_wide(b)).max(initial=0.0), 1e-30)
        for a, b in zip(found, wanted, strict=True)
    ]
    return float(np.max(errors, initial=0.0))  # Of several, nan is the largest.


def _projected(output: jax.Array, weight: jax.Array) -> jax.Array:
    """The output relative to its largest value, times the weights."""
    wide = output.astype(jnp.promote_types(output.dtype, jnp.float32))
    size = jax.lax.stop_gradient(jnp.max(jnp.abs(wide)))
    return jnp.sum(jnp.real(wide * weight)) / jnp.where(size > 0, size, 1)


def _projection(shapes: PyTree, seed: int) -> dict[str, np.ndarray]:
    """Weights for every floating output that has values."""
    rng = np.random.default_rng(seed)
    return {
        path: rng.normal(size=leaf.shape) / math.sqrt(leaf.size)
        for path, leaf in flatten_by_path(shapes).items()
        if _is_floating(leaf) and leaf.size
    }


def _rounding(params: PyTree) -> PyTree:
    """Factors that change numbers by a rounding error of their type, up or down."""
    rng = np.random.default_rng(0)

    def factor(leaf: Any) -> np.ndarray:
        size = float(jnp.finfo(jnp.result_type(leaf)).eps) if _is_floating(leaf) else 0
        return 1 + size * rng.choice([-1.0, 1.0], np.shape(leaf))

    return jax.tree.map(factor, params)


def _move(params: PyTree, seed: int) -> PyTree:
    """Factors that change numbers by a small share of them, float32."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: np.float32(1 + _MOVED * rng.uniform(-1, 1, np.shape(x))), params
    )


def _times(floating: PyTree, factors: PyTree) -> PyTree:
    """Floating leaves times factors, in their types; None where there is none."""
    return jax.tree.map(
        lambda x, factor: None if x is None else _scaled(x, factor),
        floating,
        factors,
        is_leaf=lambda x: x is None,
    )


def _scaled(leaf: Any, factor: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return (array * np.asarray(factor)).astype(array.dtype)


def _may_not_end(program: Any) -> bool:
    """Whether there is a `while` loop in a program, or in one that it calls."""
    return any(
        eqn.primitive.name == "while" or any(map(_may_not_end, inner_programs(eqn)))
        for eqn in open_program(program).eqns
    )


def _other_inputs(inputs: Sequence[Any], seed: int = 0) -> dict[str, Sequence[Any]]:
    """Makes other inputs of the same shapes and types.

    Returns:
      Name -> inputs: `random` numbers distributed like the given ones, `zero`, `large`,
      a hundred times the random ones, and `out of range`, where some are whole numbers,
      which are then far from all positions of any axis.
    Example:
      >>> _other_inputs([np.array([1, 4])])['out of range']
      [array([ 1073741824, -1073741824], dtype=int32)]
    """
    rng = np.random.default_rng(seed)
    leaves, structure = jax.tree.flatten(list(inputs))
    kinds = [_kind(leaf) for leaf in leaves]
    if not set(kinds) - {""}:
        return {}

    def varied(change: Callable[[np.ndarray, str], Any]) -> Sequence[Any]:
        changed = [
            _like(leaf, change(np.asarray(leaf), kind)) if kind else leaf
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]
        return list(jax.tree.unflatten(structure, changed))

    def random(leaf: np.ndarray, kind: str) -> Any:
        if kind == "whole":
            low, high = (leaf.min(), leaf.max()) if leaf.size else (0, 0)
            return rng.integers(int(low), int(high), leaf.shape, endpoint=True)
        center, spread = (np.mean(leaf), np.std(leaf)) if leaf.size else (0.0, 1.0)
        spread = spread if np.isfinite(spread) and spread > 0 else 1.0
        center = center if np.isfinite(center) else 0.0
        return center + spread * rng.normal(size=leaf.shape)

    def large(leaf: np.ndarray, kind: str) -> Any:
        return random(leaf, kind) * (1 if kind == "whole" else 100)

    def outside(leaf: np.ndarray, kind: str) -> Any:
        if kind != "whole":
            return leaf
        bits = jnp.iinfo(jnp.result_type(leaf))
        far = np.array([int(bits.max) // 2 + 1, int(bits.min) // 2])
        return far[np.arange(leaf.size) % 2].reshape(leaf.shape)

    found = {
        "random": varied(random),
        "zero": varied(lambda leaf, _: np.zeros_like(leaf)),
        "large": varied(large),
    }
    if "whole" in kinds:
        found["out of range"] = varied(outside)
    return found


def _like(leaf: Any, value: Any) -> Any:
    """A value of the type of an input, where the input is."""
    array = np.asarray(value).astype(jnp.result_type(leaf))
    is_placed = isinstance(leaf, jax.Array)
    return jax.device_put(array, leaf.sharding) if is_placed else array


def _kind(leaf: Any) -> str:
    """What an input is made of, "" if it stays as it is."""
    if not getattr(leaf, "is_fully_addressable", True):  # in part on other hosts
        return ""
    dtype = jnp.result_type(leaf) if not _is_key(leaf) else None
    if dtype is None or dtype == jnp.bool_:
        return ""
    if jnp.issubdtype(dtype, jnp.integer):
        return "whole"
    return "floating" if jnp.issubdtype(dtype, jnp.floating) else ""


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _problems_with(
    name: str,
    inputs: Sequence[Any],
    run_full: Callable[..., _Given],
    run_small: Callable[..., _Given],
    without_ties: Callable[..., _Given],
    tolerances: Mapping[str, float],
    params: PyTree,
) -> list[str]:
    """How functions differ on inputs of this name, by more than rounding does."""
    full, small, problems = run_full(inputs), run_small(inputs), []
    for what in full if name == "random" else ("output",):
        found = _difference(what, full[what], small[what], tolerances[what])
        if found is not None and what == "gradient":
            small = without_ties(inputs, full, small)
            found = _difference(what, full[what], small[what], tolerances[what])
        if found is None:
            continue
        shaken = run_full(inputs, _rounding(params))
        noise = _difference(what, full[what], shaken[what], 0.0)
        if noise is None or _NOISE * noise[0] < found[0]:
            problems.append(found[1])
    return problems


def _nearest(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> dict[str, np.ndarray]:
    """The first arrays by path, plus the smallest difference of any pair, by entry."""
    (first, _), nearest = pairs[0], {}
    for path in first:
        gaps = [_wide(b[path]) - _wide(a[path]) for a, b in pairs]
        smallest = gaps[0]
        for gap in gaps[1:]:
            # What is not finite stays so.
            is_less = np.isfinite(smallest) & (np.abs(gap) < np.abs(smallest))
            smallest = np.where(is_less, gap, smallest)
        nearest[path] = _wide(first[path]) + smallest
    return nearest


def _difference(
    what: str, a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float
) -> tuple[float, str] | None:
    """By how much arrays differ, and in words; None if they do not."""
    for path, x in a.items():
        finite, other = np.isfinite(_wide(x)), np.isfinite(_wide(b[path]))
        if (finite != other).any():
            return math.inf, f"{_named(what, path)} is finite in one function only"
    finite_a, finite_b = (
        {path: np.where(np.isfinite(_wide(x)), x, 0) for path, x in tree.items()}
        for tree in (a, b)
    )
    found = _compare(finite_a, finite_b, what)
    if found.error > tolerance:
        return found.error, f"{_named(what, found.worst)} differs by {found.error:.2g}"
    texts = [text for text in found.problems if "integers" in text]
    return (math.inf, texts[0]) if texts else None


def _plain_outputs(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Random keys as the integers that they are made of."""
    is_key = jax.dtypes.prng_key
    return {
        path: jax.random.key_data(x) if jnp.issubdtype(x.dtype, is_key) else x
        for path, x in flat.items()
    }


def _compare(a: Mapping[str, Any], b: Mapping[str, Any], what: str) -> _Comparison:
    """Compares arrays of the same paths and shapes, in double precision."""
    sizes = {path: _largest(x) for path, x in a.items()}
    floor = _SMALLEST_SHARE[what] * max(sizes.values(), default=0.0)
    error, worst, largest, num_values = 0.0, "", 0.0, 0
    problems: list[str] = []
    for path, x in a.items():
        y = np.asarray(b[path])
        num_values += y.size
        if not _is_floating(x):
            if num := int(np.sum(np.asarray(x) != y)):
                problems.append(f"{_named(what, path)} in {num} of {y.size} integers")
            continue
        if num := int(np.sum(~np.isfinite(x) | ~np.isfinite(y))):
            problems.append(f"{_named(what, path)} has {num} values not finite")
            continue
        difference = _largest(_wide(x) - _wide(y))
        scale = max(sizes[path], floor)
        relative = difference / scale if scale else math.inf if difference else 0.0
        largest = max(largest, difference)
        if relative > error or not worst:
            error, worst = relative, path
    if any(map(_is_floating, a.values())) and not any(sizes.values()):
        problems.append(f"every {what} is zero, which proves nothing")
    return _Comparison(error, worst, largest, num_values, tuple(problems))


def _named(what: str, path: str) -> str:
    return f"{what} {path!r}" if path else what


def _largest(x: Any) -> float:
    """Largest finite magnitude."""
    sizes = np.abs(_wide(x))
    return float(np.max(sizes, initial=0.0, where=np.isfinite(sizes)))


def _wide(x: Any) -> np.ndarray:
    """The values in a type whose rounding does not matter."""
    array = np.asarray(x)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _is_floating(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def _check_alike(full: PyTree, small: PyTree) -> None:
    a, b = flatten_by_path(full), flatten_by_path(small)
    for path in (*a, *b):
        there, here = (
            f"{tree[path].dtype}{list(tree[path].shape)}" if path in tree else "absent"
            for tree in (a, b)
        )
        if there != here:
            raise UserError(
                f"{_named('output', path)} is {there} of the full function and {here} "
                "of the small one; a shrunk function returns what the full one returns"
            )


def _check_taken(taken: Mapping[str, Any], small_params: PyTree) -> None:
    """Refuses gradients that were cut to other shapes than those of the parameters."""
    got = {path: np.shape(leaf) for path, leaf in taken.items()}
    wanted = {path: np.shape(x) for path, x in flatten_by_path(small_params).items()}
    for path in (*wanted, *got):
        if got.get(path) != wanted.get(path):
            raise UserError(
                f"take gives {path!r} the shape {got.get(path, 'absent')} and the "
                f"shrunk parameters have {wanted.get(path, 'absent')}; give the take "
                "of the cut that made them"
            )
