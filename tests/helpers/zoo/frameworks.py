"""Turns networks of the frameworks into plain functions over trees of arrays.

Each function builds shapes only, so that networks of published size cost no memory;
Equinox modules hold constants among their fields and are built whole.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .case import Case


def from_linen(
    module: Any, *inputs: Any, is_training: bool = False, **settings: Any
) -> Case:
    """A Flax Linen module; `settings` go to its call."""
    call = functools.partial(module.apply, **settings)
    variables = dict(
        jax.eval_shape(
            functools.partial(module.init, **settings), jax.random.key(0), *inputs
        )
    )
    params, statistics = variables.pop("params"), variables.pop("batch_stats", None)
    if variables:
        raise ValueError(f"variables {list(variables)} have no place here")
    if statistics is None:
        return Case(lambda p, *x: call({"params": p}, *x), params, inputs)

    def evaluate(p: Any, s: Any, *x: Any) -> Any:
        return call({"params": p, "batch_stats": s}, *x)

    def train(p: Any, s: Any, *x: Any) -> Any:
        out, new = call({"params": p, "batch_stats": s}, *x, mutable=["batch_stats"])
        return out, new["batch_stats"]

    apply = train if is_training else evaluate
    return Case(apply, params, inputs, statistics, is_training)


def from_nnx(
    make: Callable[[Any], Any], *inputs: Any, is_training: bool = False
) -> Case:
    """A Flax NNX module, from a function of `nnx.Rngs`."""
    from flax import nnx

    abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    (abstract.train if is_training else abstract.eval)()
    graph, params, statistics, rest = nnx.split(abstract, nnx.Param, nnx.BatchStat, ...)

    def run(p: Any, s: Any, *x: Any) -> Any:
        states = [_state(nnx, tree) for tree in (p, s)]
        network = nnx.merge(graph, *states, rest)
        out = network(*x)
        return (out, _tree(nnx, nnx.state(network, nnx.BatchStat))), network

    tree, running = _tree(nnx, params), _tree(nnx, statistics)
    if not running:
        return Case(lambda p, *x: run(p, {}, *x)[0][0], tree, inputs)
    if is_training:
        return Case(lambda *a: run(*a)[0], tree, inputs, running, True)
    return Case(lambda *a: run(*a)[0][0], tree, inputs, running)


def _tree(nnx: Any, state: Any) -> Any:
    """NNX state as nested dicts with string keys."""

    def plain(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        return {str(key): plain(value) for key, value in node.items()}

    return plain(nnx.to_pure_dict(state))


def _state(nnx: Any, tree: Any) -> Any:
    def numbered(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        return {
            int(key) if key.isdigit() else key: numbered(value)
            for key, value in node.items()
        }

    return nnx.State(numbered(tree))


def from_haiku(
    forward: Callable[..., Any], *inputs: Any, is_training: bool = False
) -> Case:
    """A function `forward(is_training, *inputs)` that calls Haiku modules."""
    import haiku as hk

    def transformed(is_training: bool) -> Any:
        function = functools.partial(forward, is_training)
        return hk.without_apply_rng(hk.transform_with_state(function))

    # Running statistics are made in training mode only.
    init, network = transformed(True).init, transformed(is_training)
    params, statistics = jax.eval_shape(init, jax.random.key(0), *inputs)
    if not jax.tree.leaves(statistics):
        return Case(lambda p, *x: network.apply(p, {}, *x)[0], params, inputs)
    if is_training:
        return Case(network.apply, params, inputs, statistics, True)
    return Case(lambda *a: network.apply(*a)[0], params, inputs, statistics)


def from_equinox(
    make: Callable[[], Any],
    *inputs: Any,
    has_state: bool = False,
    is_training: bool = False,
    call: Callable[..., Any] | None = None,
) -> Case:
    """An Equinox module for one example, mapped over the batch.

    Args:
      make: Returns the module; (module, state) if `has_state`.
      *inputs: With a batch axis in front.
      has_state: Whether the module is called with, and returns, a state.
      is_training: Whether the new state is returned.
      call: How the module is called; `module(x)` or `module(x, state)` if None.
    """
    import equinox as eqx

    made = make()
    module, state = made if has_state else (made, None)
    if not is_training:
        module = eqx.nn.inference_mode(module)
    # Constants that gradients never reach, such as tables of angles, are no parameters.
    params, static = eqx.partition(module, eqx.is_inexact_array)
    call = call or (lambda module, *x: module(*x))
    if not has_state:

        def plain(p: Any, *x: Any) -> Any:
            return jax.vmap(functools.partial(call, eqx.combine(p, static)))(*x)

        return Case(plain, params, inputs, kernel_out=0)
    running, fixed = eqx.partition(state, eqx.is_inexact_array)

    def stateful(p: Any, s: Any, *x: Any) -> Any:
        mapped = jax.vmap(
            functools.partial(call, eqx.combine(p, static)),
            axis_name="batch",
            in_axes=(*(0 for _ in x), None),
            out_axes=(0, None),
        )
        out, new = mapped(*x, eqx.combine(s, fixed))
        return (out, eqx.filter(new, eqx.is_inexact_array)) if is_training else out

    return Case(stateful, params, inputs, running, is_training, kernel_out=0)


def key_of(seed: int) -> jax.Array:
    """An old-style key, which every package takes."""
    return jnp.asarray(np.array([0, seed], np.uint32))
