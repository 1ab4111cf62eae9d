"""Methods whose state lies in slices over the devices of a host.

A method sees slices of parameters and gradients as a network of their own, on a single
device per host: work on single entries is the same there, and what crosses hosts are
slices of what crossed before. Here is what stands around it: gradients are averaged
over devices such that each keeps its slice, and what the method makes of it is put
together. That sends inside a host what the sum over devices has sent. Where parameters
lie in slices, too, the trainer gathers them for both passes of a step.
"""

import dataclasses
from typing import Any

import jax
import optax

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import Slicing, check_local
from prunex_jax.mesh import IN_SLICES, MeshAxes
from prunex_jax.methods.method import (
    KeepCounts,
    Method,
    Pruning,
    Recipe,
    RoundKind,
    Rounds,
)


def recipe_in_slices(recipe: Recipe, slicing: Slicing) -> Recipe:
    """The recipe of a method that works on slices."""
    axes = MeshAxes(recipe.axes.host, None, slicing.axis)
    return dataclasses.replace(recipe, axes=axes, slicing=slicing)


def with_sliced_params(method: Method, slicing: Slicing) -> Method:
    """Lets a method that works on slices train parameters that lie in slices, too.

    Its parameters and gradients are slices, as `Slicing.value_and_grad` takes and makes
    them; the network that it stands for is whole.
    """
    base = _on_whole(method, slicing)
    placements = base.placements

    def network(params: PyTree, opt_state: PyTree) -> PyTree:
        return slicing.join(method.network(params, opt_state))

    return dataclasses.replace(
        base,
        placements=dataclasses.replace(placements, params=IN_SLICES[placements.params]),
        network=network,
    )


def around_slices(method: Method, slicing: Slicing, axes: MeshAxes) -> Method:
    """Lets a method that works on slices train parameters that all devices have whole.

    A step sends, beside what the method sends, what `Slicing.mean_of` and
    `Slicing.join` do; a round what `Slicing.join` does.
    """
    base = _on_whole(method, slicing)

    def update(
        grads: PyTree, state: PyTree, params: PyTree, **options: Any
    ) -> tuple[PyTree, PyTree]:
        check_local(grads, axes)
        updates, state = method.transform.update(
            slicing.mean_of(grads), state, slicing.take(params), **options
        )
        return slicing.join(updates), state

    def network(params: PyTree, opt_state: PyTree) -> PyTree:
        return slicing.join(method.network(slicing.take(params), opt_state))

    return dataclasses.replace(
        base,
        transform=optax.GradientTransformationExtraArgs(base.transform.init, update),
        network=network,
        pruning=_pruning_of(method, slicing),
        rounds=_rounds_of(method, slicing),
    )


def _on_whole(method: Method, slicing: Slicing) -> Method:
    """The method as it starts from whole parameters."""

    def init(params: PyTree) -> PyTree:
        return method.transform.init(slicing.take(params))

    update = method.transform.update
    return dataclasses.replace(
        method,
        transform=optax.GradientTransformationExtraArgs(init, update),
        payload=method.payload.times(slicing.parts),
        placements=dataclasses.replace(method.placements, slicing=slicing),
    )


def _rounds_of(method: Method, slicing: Slicing) -> Rounds | None:
    rounds = method.rounds
    if rounds is None:
        return None
    run = rounds.exchange

    def exchange(
        params: PyTree, opt_state: PyTree, keep_counts: KeepCounts, kind: RoundKind
    ) -> tuple[PyTree, PyTree]:
        own, opt_state = run(slicing.take(params), opt_state, keep_counts, kind)
        return slicing.join(own), opt_state

    return dataclasses.replace(rounds, exchange=exchange)


def _pruning_of(method: Method, slicing: Slicing) -> Pruning:
    scores = method.pruning.scores
    if scores is None:
        return method.pruning

    def scores_of_whole(params: PyTree, opt_state: PyTree) -> dict[str, jax.Array]:
        return scores(slicing.take(params), opt_state)

    return dataclasses.replace(method.pruning, scores=scores_of_whole)
