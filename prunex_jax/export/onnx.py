"""Turns a function into a program of ONNX, through the package jax2onnx.

Parameters become constants of the program, so that the file is whole by itself. The
batch is free where that is possible, by the same steps as in `program`.
"""

import contextlib
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from prunex_jax.base.errors import UserError, one_line
from prunex_jax.base.imports import need_package
from prunex_jax.base.jaxprs import called_program, interpret
from prunex_jax.base.trees import PyTree
from prunex_jax.channels.walk import evaluate
from prunex_jax.export.program import one_more, plain_tree, symbolic_functions
from prunex_jax.shrink import relative_error

# What a file of protobuf can hold.
_MOST_BYTES = 2**31 - 1
# Pooling, of which a window of several axes can be done axis by axis.
_POOLS = {"reduce_window_max", "reduce_window_min", "reduce_window_sum"}
_DILATIONS = ("base_dilation", "window_dilation")
_MOST_POOLED = 3
# Both sum in orders of their own.
_TOLERANCE = 1e-4


def check_onnx() -> None:
    """Refuses where a package is missing.

    Raises:
      UserError: It says what installs it.
    """
    need_package("onnxruntime", "onnx", "An export to ONNX")
    # Its releases ask for an older orbax-checkpoint than runs need, and work with both.
    if importlib.util.find_spec("jax2onnx") is None:
        raise UserError(
            "An export to ONNX needs the package jax2onnx, which is not installed: "
            "pip install 'prunex-jax[onnx]' && "
            "pip install --no-deps jax2onnx==0.17.1"
        )


def make_onnx(
    apply: Callable[..., PyTree],
    params: PyTree,
    inputs: Sequence[PyTree],
    *,
    fixed_batch: bool = False,
    in_float32: Callable[..., PyTree] | None = None,
) -> bytes:
    """Traces a function and converts what it computes.

    Args:
      apply: (params, *inputs) -> any tree of arrays.
      params: Arrays; they become part of the program.
      inputs: Arrays. The program is run on them by ONNX Runtime, with one example more
        where the batch is free, and compared with `apply`.
      fixed_batch: Keep all shapes as they are.
      in_float32: As `make_program` takes it.
    Returns:
      The bytes of the file. Inputs and outputs are arrays in the order of leaves.
    Raises:
      UserError: jax2onnx does not cover an operation, the program answers otherwise, or
        it is larger than a file of ONNX.
    """
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(list(inputs))):
        raise UserError("an export to ONNX needs arrays as inputs, to compare answers")
    given = inputs if fixed_batch else one_more(inputs)
    assert given is not None, "arrays have no symbolic dimensions"
    functions = symbolic_functions(apply, params, inputs, fixed_batch, in_float32)
    program = None
    failure: Exception = ValueError("no way to trace it")
    for fn, shapes in functions:
        try:
            program = _converted(fn, params, shapes)
            break
        except Exception as error:
            failure = error
    if program is None:
        fixed = "" if fixed_batch else ", or fixed_batch=True may help"
        raise UserError(
            f"jax2onnx cannot convert the function ({one_line(failure, 200)}); "
            f"export it without format='onnx'{fixed}"
        ) from failure
    _check_same(program, apply(params, *given), given)
    return program


def _converted(fn: Callable[..., PyTree], params: PyTree, shapes: Any) -> bytes:
    import jax2onnx

    leaves, structure = jax.tree.flatten(tuple(shapes))

    def flat(*given: Any) -> list[Any]:
        outputs = fn(params, *jax.tree.unflatten(structure, given))
        return jax.tree.leaves(plain_tree(outputs))

    # jax2onnx replaces functions of libraries while it traces. Traced before, the
    # function holds only operations of jax.
    jaxpr = jax.make_jaxpr(flat)(*leaves)
    with _quiet():
        model = jax2onnx.to_onnx(_with_plain_pools(jaxpr), inputs=leaves)
        _choose_by_logic(model.graph)
        size = model.ByteSize()
        if size > _MOST_BYTES:
            raise ValueError(f"the program has {size:,} bytes and ONNX holds 2 GB")
        return bytes(model.SerializeToString())


def _with_plain_pools(program: core.ClosedJaxpr) -> Callable[..., list[Any]]:
    """The function of a program, in which pooling is done axis by axis.

    jax2onnx pools over all axes of an array, and ONNX Runtime over three at most.
    """

    def do(eqn: core.JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name in ("jit", "pjit"):
            return interpret(called_program(eqn), values, do)
        if eqn.primitive.name in _POOLS and values[0].ndim > _MOST_POOLED:
            return [_pooled(eqn, values[0])]
        return evaluate(eqn, values)

    return lambda *values: interpret(program, values, do)


def _pooled(eqn: core.JaxprEqn, x: Any) -> Any:
    """What a window gives, along one axis after the other."""
    names = ("window_dimensions", "window_strides", "padding")
    params: Any = [eqn.params[name] for name in (*names, *_DILATIONS)]
    for axis, (size, step, edge, *spread) in enumerate(zip(*params, strict=True)):
        if (size, step, edge) == (1, 1, (0, 0)) and spread[0] == 1:
            continue
        turned = jnp.moveaxis(x, axis, -1)
        flat = turned.reshape(turned.shape[0], math.prod(turned.shape[1:-1]), -1)
        (found,) = evaluate(
            eqn,
            [flat],
            window_dimensions=(1, 1, size),
            window_strides=(1, 1, step),
            padding=((0, 0), (0, 0), edge),
            **{name: (1, 1, by) for name, by in zip(_DILATIONS, spread, strict=True)},
        )
        x = jnp.moveaxis(found.reshape(*turned.shape[:-1], -1), -1, axis)
    return x


def _choose_by_logic(graph: Any) -> None:
    """Writes choices of booleans, for which ONNX Runtime has no kernel, as And and Or.

    Masks such as `jnp.tril(jnp.ones((n, n), bool))` hold one.
    """
    from onnx import TensorProto, helper

    values = [*graph.input, *graph.output, *graph.value_info]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    nodes = []
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *[attribute.g][: attribute.HasField("g")]):
                _choose_by_logic(inner)
        if node.op_type != "Where" or types.get(node.output[0]) != TensorProto.BOOL:
            nodes.append(node)
            continue
        (which, yes, no), (out,) = node.input, node.output
        other, taken, rest = (f"{out}_{part}" for part in ("other", "taken", "rest"))
        nodes += [
            helper.make_node("Not", [which], [other]),
            helper.make_node("And", [which, yes], [taken]),
            helper.make_node("And", [other, no], [rest]),
            helper.make_node("Or", [taken, rest], [out]),
        ]
    del graph.node[:]
    graph.node.extend(nodes)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without lines of the converter about types that it does not need."""
    logger = logging.getLogger("onnx_ir")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _check_same(program: bytes, answers: PyTree, inputs: Sequence[PyTree]) -> None:
    """Runs the program and compares its answers with those of the function."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(
            program, providers=["CPUExecutionProvider"]
        )
        names = [given.name for given in session.get_inputs()]
        arrays = map(np.asarray, jax.tree.leaves(tuple(inputs)))
        found = session.run(None, dict(zip(names, arrays, strict=True)))
    except Exception as error:
        raise UserError(
            f"ONNX Runtime cannot run the program ({one_line(error, 200)}); export it "
            "without format='onnx', or with fixed_batch=True"
        ) from error
    gap = relative_error(found, jax.tree.leaves(plain_tree(answers)))
    if not gap <= _TOLERANCE:
        raise UserError(
            f"the program of ONNX differs from the function by {gap:.2g} of the "
            "largest answer; export it without format='onnx', or in float32"
        )
