"""What a method sends, read from its programs on a mesh that need not be here.

Steps and exchanges are traced on an abstract mesh of any size, so that whoever asks
what thousands of hosts would send needs none of them, and a method states no formula.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import Collective, list_collectives, mean_over_mesh, wire_bytes
from prunex_jax.mesh import MeshAxes, enter, leave, settle, specs_of, vary
from prunex_jax.methods.method import KeepCounts, Method, RoundKind

MeshShape = Mapping[str, int]


class _State(NamedTuple):
    """What a method trains, and the state of its transform."""

    params: PyTree
    opt_state: PyTree


def step_collectives(
    method: Method,
    shapes: Mapping[str, tuple[int, ...]],
    mesh_shape: MeshShape,
    **options: Any,
) -> list[Collective]:
    """Lists what the update of one step sends.

    What the network itself sends is not in it, such as statistics over the devices of a
    host, or the gathers of parameters that lie in slices. Shapes are those of the
    parameters by path; the mesh has its slow axis first; options are of `StepOptions`.

    Example:
      >>> from prunex_jax.methods.dense import average_gradients
      >>> axes = MeshAxes('host', 'device')
      >>> method = Method(optax.with_extra_args_support(average_gradients(axes)))
      >>> mesh_shape = {'host': 1024, 'device': 8}
      >>> sent = step_collectives(method, {'kernel': (4, 100)}, mesh_shape)
      >>> round(wire_bytes(sent, mesh_shape)['host'])  # 2 (M - 1) / M of 1,600
      3197
    """

    def step(state: _State) -> _State:
        grads = vary(jax.tree.map(jnp.ones_like, state.params), tuple(mesh_shape))
        updates, opt_state = method.transform.update(
            grads, state.opt_state, state.params, **options
        )
        return _State(optax.apply_updates(state.params, updates), opt_state)

    return _traced(step, method, shapes, mesh_shape)


def exchange_collectives(
    method: Method,
    shapes: Mapping[str, tuple[int, ...]],
    mesh_shape: MeshShape,
    keep_counts: KeepCounts,
    kind: RoundKind = "frozen",
) -> list[Collective]:
    """Lists what one exchange beside the steps sends; see `step_collectives`."""
    rounds = method.rounds
    assert rounds is not None, f"{method.name} exchanges in its steps"

    def exchange(state: _State) -> _State:
        return _State(*rounds.exchange(*state, keep_counts, kind))

    return _traced(exchange, method, shapes, mesh_shape)


def dense_bytes(num_elements: int, mesh_shape: MeshShape) -> dict[str, float]:
    """What a host sends over each axis in one hierarchical dense float32 average.

    Example:
      >>> dense_bytes(1000, {'host': 4, 'device': 1})
      {'host': 6000.0, 'device': 0.0}
    """
    axes = MeshAxes(*mesh_shape)

    def mean(tree: PyTree) -> PyTree:
        return mean_over_mesh(vary(tree, axes.names), axes)

    program = jax.shard_map(
        mean, mesh=_abstract(mesh_shape), in_specs=jax.P(), out_specs=jax.P()
    )
    buffer = jax.ShapeDtypeStruct((num_elements,), jnp.float32)
    return wire_bytes(list_collectives(jax.make_jaxpr(program)(buffer)), mesh_shape)


def _abstract(mesh_shape: MeshShape) -> jax.sharding.AbstractMesh:
    return jax.sharding.AbstractMesh(tuple(mesh_shape.values()), tuple(mesh_shape))


def _traced(
    run: Callable[[_State], _State],
    method: Method,
    shapes: Mapping[str, tuple[int, ...]],
    mesh_shape: MeshShape,
) -> list[Collective]:
    """What a function of the state of one device sends."""
    mesh = _abstract(mesh_shape)
    placements = _State(method.placements.params, method.placements.opt_state)
    specs = specs_of(placements)

    def init(params: PyTree) -> _State:
        state = _State(
            method.placements.own_params(params), method.transform.init(params)
        )
        return settle(placements, leave(placements, state))

    def call(state: _State) -> _State:
        return leave(placements, run(enter(placements, state)))

    born = jax.shard_map(init, mesh=mesh, in_specs=(jax.P(),), out_specs=specs)
    program = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=specs)
    params = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()
    }
    return list_collectives(jax.make_jaxpr(program)(jax.eval_shape(born, params)))
