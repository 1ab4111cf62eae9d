"""Goes through traced programs and those inside them, and knows where jax keeps what.

What is done with them is the caller's business.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core

_Value = TypeVar("_Value")

# An operation of a class of somebody's own, or of jax, that says what it is made of.
OF_A_CLASS = "call_hi_primitive"
# Such classes of jax whose derivative is that of what they are made of.
_DERIVED = {"CheckpointName", "Einsum", "Nonzero", "RematTraced", "SearchSorted"}
# Primitives that call a program once.
CALLS = frozenset(
    (
        *("checkpoint", "closed_call", "composite", "core_call", "custom_jvp_call"),
        *("custom_vjp_call", "eval_jaxpr", "jit", "pjit", "remat2", OF_A_CLASS),
    )
)


def inner_programs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Programs that an equation calls, branches or loops over."""
    if eqn.primitive.name == OF_A_CLASS and (found := called_program(eqn)) is not None:
        yield open_program(found)
    yield from _programs(eqn.params.values())


def _programs(values: Iterable[Any]) -> Iterator[core.Jaxpr]:
    for value in values:
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _programs(value)


# Primitives that change what is known of values along mesh axes, and not the values:
# those of `mesh.varying`, and jax's.
OWN_CASTS = ("agreed", "differing")
MESH_CASTS = frozenset(
    (
        *(*OWN_CASTS, "pcast", "preduced", "pvary"),
        *("vary_unreduced_cast", "vary_unreduced_cast_p"),
    )
)


def mesh_axes_of(eqn: core.JaxprEqn) -> tuple[str, ...]:
    """Mesh axes that an equation names; array axes are numbers."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def is_of_mesh(program: core.ClosedJaxpr | core.Jaxpr) -> bool:
    """Whether a traced program communicates, or tells devices apart.

    Example:
      >>> import jax
      >>> is_of_mesh(jax.make_jaxpr(lambda x: x + 1)(1.0))
      False
    """
    return any(
        (mesh_axes_of(eqn) and eqn.primitive.name not in MESH_CASTS)
        or any(map(is_of_mesh, inner_programs(eqn)))
        for eqn in open_program(program).eqns
    )


# Where an object of another process prints its place in memory.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Parameters of equations that say nothing of what is computed.
_NAMES = frozenset(("name", "debug_info"))


def digest_of(program: core.ClosedJaxpr) -> str:
    """What tells a traced program from another: what it computes, and its constants.

    Names of functions do not count, nor does the process that traces. Other versions of
    jax write programs differently.
    """
    text = repr(_described(program))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _described(value: Any) -> Any:
    """Nested tuples of texts that are the same in every process."""
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        return _described_program(value)
    if isinstance(value, Mapping):
        return tuple(sorted((str(k), _described(x)) for k, x in value.items()))
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(_described(x)) for x in value))
    if isinstance(value, tuple | list):
        return tuple(map(_described, value))
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        keys: Any = value
        array = np.asarray(jax.random.key_data(keys) if is_key else value)
        content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        return str(array.dtype), array.shape, content
    if callable(value):  # Rules of derivatives, whose programs are not traced yet.
        return "function"
    return _ADDRESS.sub("", str(value))


def _described_program(program: core.ClosedJaxpr | core.Jaxpr) -> Any:
    jaxpr = open_program(program)
    numbers: dict[Any, int] = {}

    def numbered(atom: Any) -> Any:
        shaped = str(atom.aval.dtype), tuple(map(str, atom.aval.shape))
        if isinstance(atom, core.Literal):
            return "literal", _described(atom.val), shaped
        return numbers.setdefault(atom, len(numbers)), shaped

    def form(atom: Any) -> Any:
        return numbered(atom) if hasattr(atom.aval, "dtype") else str(atom.aval)

    start = [form(x) for x in (*jaxpr.constvars, *jaxpr.invars)]
    eqns = [
        (
            eqn.primitive.name,
            [form(x) for x in eqn.invars],
            [form(x) for x in eqn.outvars],
            [
                (key, _described(eqn.params[key]))
                for key in sorted(eqn.params)
                if key not in _NAMES
            ],
        )
        for eqn in jaxpr.eqns
    ]
    constants = [_described(x) for x in constants_of(program)]
    return start, eqns, [form(x) for x in jaxpr.outvars], constants


def open_program(program: Any) -> core.Jaxpr:
    """The program itself, of one that may come with its constants."""
    return program.jaxpr if isinstance(program, core.ClosedJaxpr) else program


def constants_of(program: Any) -> Sequence[Any]:
    """Values of the constants of a program; none where they are operands."""
    is_closed = isinstance(program, core.ClosedJaxpr)
    return program.consts if is_closed else getattr(program, "consts", ())


def interpret(
    program: Any,
    arguments: Sequence[_Value],
    do: Callable[[core.JaxprEqn, list[_Value]], Sequence[_Value]],
    constant: Callable[[Any], _Value] = lambda value: value,
) -> list[_Value]:
    """Goes through a program with something that stands for each of its values.

    Args:
      program: A traced program, with or without its constants.
      arguments: What stands for its arguments.
      do: Makes results of an equation and its operands; called in order.
      constant: Says what stands for a constant; the constant itself, if not given.
    Example:
      >>> import jax
      >>> closed = jax.make_jaxpr(lambda x, y: x * y + 1)(1.0, 1.0)
      >>> written = lambda eqn, values: [f"{eqn.primitive}({', '.join(values)})"]
      >>> interpret(closed, ['x', 'y'], written, str)
      ['add(mul(x, y), 1.0)']
    """
    jaxpr = open_program(program)
    known = dict(zip(jaxpr.invars, arguments, strict=True))
    consts = map(constant, constants_of(program))
    known.update(zip(jaxpr.constvars, consts, strict=True))

    def read(atom: Any) -> _Value:
        return constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        results = do(eqn, [read(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def called_program(eqn: core.JaxprEqn) -> Any:
    """The program that an equation calls; where it is kept depends on jax.

    None of an operation of a class that does not say what it is made of.
    """
    params: Any = eqn.params
    if eqn.primitive.name == OF_A_CLASS:
        return _expanded(params["_prim"])
    names = ("jaxpr", "call_jaxpr", "callee")
    return next(params[name] for name in names if name in params)


def _expanded(operation: Any) -> core.ClosedJaxpr | None:
    """What an operation of a class of its own is made of, if it says so."""

    def function(*values: Any) -> list[Any]:
        arguments = jax.tree.unflatten(operation.in_tree, values)
        return jax.tree.leaves(operation.expand(*arguments))

    try:
        return jax.make_jaxpr(function)(*operation.in_avals_flat)
    except Exception:  # somebody else's code, which may fail in any way
        return None


def name_of(eqn: core.JaxprEqn) -> str:
    """Name of the operation, of one of a class of its own that of the class."""
    is_own = eqn.primitive.name == OF_A_CLASS
    return type(eqn.params["_prim"]).__name__ if is_own else eqn.primitive.name


def has_own_derivative(eqn: core.JaxprEqn) -> bool:
    """Whether somebody wrote the derivative of an operation, other than jax of its own.

    A class may have one that what it is made of has not.
    """
    name = eqn.primitive.name
    if name != OF_A_CLASS:
        return name.startswith("custom_")
    is_of_jax = type(eqn.params["_prim"]).__module__.startswith("jax._src.")
    return not (is_of_jax and name_of(eqn) in _DERIVED)


def is_rematerialised(eqn: core.JaxprEqn) -> bool:
    """Whether an operation does its program again instead of keeping results."""
    name = name_of(eqn)
    return name in ("checkpoint", "remat2", "RematTraced")


def scan_operands(
    eqn: core.JaxprEqn, operands: Sequence[_Value]
) -> tuple[Sequence[_Value], Sequence[_Value], Sequence[_Value]]:
    """What a `scan` reads in every turn, what it carries, and what it loops over.

    What is scanned, or stacked up, has an axis more outside than inside.
    """
    params: Any = eqn.params
    body = open_program(params["jaxpr"])

    def count_stacked(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(a.aval.ndim != b.aval.ndim for a, b in pairs)

    num_rows = count_stacked(eqn.invars, body.invars)
    num_carry = len(eqn.outvars) - count_stacked(eqn.outvars, body.outvars)
    return _in_three(operands, len(eqn.invars) - num_carry - num_rows, num_carry)


def while_operands(
    eqn: core.JaxprEqn, operands: Sequence[_Value]
) -> tuple[Sequence[_Value], Sequence[_Value], Sequence[_Value]]:
    """What the test of a `while` reads in every turn, what its body does, the carry."""
    params: Any = eqn.params
    return _in_three(operands, params["cond_nconsts"], params["body_nconsts"])


def linear_solve_operands(
    eqn: core.JaxprEqn, operands: Sequence[_Value]
) -> tuple[list[tuple[Any, Sequence[_Value]]], Sequence[_Value]]:
    """Programs of a `custom_linear_solve` with what each reads, and the right side.

    The solver comes first, then the map that it inverts; both transposed follow where
    they are given.
    """
    params: Any = eqn.params
    programs, counts = params["jaxprs"], params["const_lengths"]
    stops = np.cumsum(counts).tolist()
    own = [operands[stop - n : stop] for stop, n in zip(stops, counts, strict=True)]
    matvec, vecmat, solve, transpose = zip(programs, own, strict=True)
    pairs = [solve, matvec, *(x for x in (transpose, vecmat) if x[0] is not None)]
    return pairs, operands[stops[-1] :]


def transposed_call(
    eqn: core.JaxprEqn,
) -> tuple[core.ClosedJaxpr, range, range]:
    """What the caller of a `linear_call` says is its transpose.

    Returns:
      A program of some operands and of the cotangents of all results, that gives the
      cotangents of the other operands; and which ones these are.
    """
    params: Any = eqn.params
    program, consts = params["transpose_thunk"]()
    first = params["num_callee_consts"]
    stop = first + params["num_res"]

    def transposed(*values: Any) -> list[Any]:
        return core.jaxpr_as_fun(program)(*consts, *values)

    closed = jax.make_jaxpr(transposed)(*program.in_avals[len(consts) :])
    return closed, range(first, stop), range(stop, len(eqn.invars))


def _in_three(
    values: Sequence[_Value], first: int, second: int
) -> tuple[Sequence[_Value], Sequence[_Value], Sequence[_Value]]:
    return values[:first], values[first : first + second], values[first + second :]


def scanned(
    eqn: core.JaxprEqn,
    turn: Callable[..., Any],
    carry: Sequence[Any],
    rows: Sequence[Any],
) -> list[Any]:
    """Does a `scan` with other turns, and gives its results as it does."""
    params: Any = eqn.params
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(turn, carry, rows, **options)
    return [*carry, *stacked]


def rematerialised(
    eqn: core.JaxprEqn, run: Callable[..., Any], operands: Sequence[Any]
) -> Any:
    """Does a `checkpoint` with another program."""
    params: Any = eqn.params
    params = params["_prim"].params if "_prim" in params else params
    names = ("prevent_cse", "policy")  # the first one is not kept by every version
    options = {name: params[name] for name in names if name in params}
    if isinstance(options.get("prevent_cse"), tuple):  # of single operands
        options["prevent_cse"] = any(options["prevent_cse"])
    return jax.checkpoint(run, **options)(*operands)
