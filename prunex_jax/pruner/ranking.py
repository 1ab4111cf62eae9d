"""Scores of channels: from parameters alone, or from gradients of a loss.

Beside the criteria of `sparsity.criteria`, with theta all entries that carry a channel
and g their gradient in a batch:

    fisher    <theta, g>^2 / 2, the mean over batches: the second-order term of what the
              loss loses, with the outer products of gradients for its curvature
    random    draws from a uniform distribution, a baseline

References:
  Molchanov et al., Importance Estimation for Neural Network Pruning, 2019,
  arXiv:1906.10771 (fisher: the square there).
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree, shapes_by_path
from prunex_jax.channels import ChannelTrace, Layouts, layouts_of
from prunex_jax.pruner.networks import FullNetwork, trees_of
from prunex_jax.sparsity import channel_scores, gradient_scores
from prunex_jax.sparsity.settings import Criterion

Scores = dict[str, np.ndarray]
# (parameters, trace) -> float[size] per group.
OwnCriterion = Callable[[PyTree, ChannelTrace], Mapping[str, Any]]
# (answers, targets) -> the mean loss, or that of every example.
Loss = Callable[[PyTree, PyTree], jax.Array]
# (inputs, targets).
Batches = Sequence[tuple[PyTree, PyTree]]

_OF_GRADIENTS = ("taylor", "fisher")
_NAMES = (*typing.get_args(Criterion), "fisher", "random")


def estimates_damage(criterion: str | OwnCriterion) -> bool:
    """Whether scores say what the loss loses, so that costs can divide them."""
    return criterion in _OF_GRADIENTS


def check_criterion(
    criterion: str | OwnCriterion, loss: Loss | None, batches: Batches | None
) -> None:
    """Refuses criteria that are unknown, or need a loss that is not given."""
    if callable(criterion):
        return
    if criterion not in _NAMES:
        raise UserError(
            f"criterion={criterion!r} is unknown; use {', '.join(_NAMES)}, or a "
            "function (params, trace) -> scores by group"
        )
    if estimates_damage(criterion) and (loss is None or not batches):
        missing = "loss" if loss is None else "batches"
        raise UserError(
            f"criterion={criterion!r} needs gradients, and there is no {missing}: give "
            "loss=(answers, targets) -> loss and batches=[(inputs, targets), ...]"
        )


def scores_of(
    criterion: str | OwnCriterion,
    full: FullNetwork,
    params: PyTree,
    statistics: PyTree | None,
    trace: ChannelTrace,
    loss: Loss | None,
    batches: Batches | None,
    seed: int,
) -> Scores:
    """Scores of all channels.

    Args:
      criterion: A name, or a function.
      full: What is called with them.
      params: Full size.
      statistics: The same, or None.
      trace: Its groups.
      loss: For criteria that look at gradients.
      batches: The same.
      seed: Of random scores.
    Returns:
      float[size] per group.
    Raises:
      UserError: A function gives scores of other groups, or sizes.
    """
    sizes = {group.name: group.size for group in trace.groups}
    if criterion == "random":
        rng = np.random.default_rng(seed)
        return {name: rng.uniform(size=size) for name, size in sizes.items()}
    if callable(criterion):
        return _checked(criterion(params, trace), sizes)
    layouts = layouts_of(trace.groups, shapes_by_path(params))
    if criterion in _OF_GRADIENTS:
        assert loss is not None and batches is not None, "check_criterion has seen them"

        def loss_of(params: PyTree, inputs: tuple[PyTree, ...], targets: PyTree) -> Any:
            return jnp.mean(
                loss(full.apply(*trees_of(params, statistics), *inputs), targets)
            )

        calls = [(full.as_inputs(inputs), targets) for inputs, targets in batches]
        return _of_gradients(loss_of, params, layouts, calls, criterion == "fisher")
    floating = _floating(params)
    found = channel_scores(typing.cast(Criterion, criterion), floating, layouts)
    return {name: np.asarray(score) for name, score in found.items()}


def _checked(found: Mapping[str, Any], sizes: Mapping[str, int]) -> Scores:
    for name in (*sizes, *found):
        shape = np.shape(found[name]) if name in found else "absent"
        wanted = (sizes[name],) if name in sizes else "absent"
        if shape != wanted:
            raise UserError(
                f"the criterion gives scores of group {name!r} with shape {shape}, and "
                f"it should be {wanted}; give one number per channel of every group"
            )
    return {name: np.asarray(found[name], np.float64) for name in sizes}


def _of_gradients(
    loss_of: Callable[..., jax.Array],
    params: PyTree,
    layouts: Layouts,
    calls: Sequence[tuple[tuple[PyTree, ...], PyTree]],
    is_squared: bool,
) -> Scores:
    """Means over batches of what gradients say of channels."""

    @jax.jit
    def scores(params: PyTree, inputs: tuple[PyTree, ...], targets: PyTree) -> Any:
        grads = jax.grad(loss_of, allow_int=True)(params, inputs, targets)
        found = gradient_scores(_floating(params), _floating(grads), layouts)
        return {k: x**2 / 2 if is_squared else x for k, x in found.items()}

    # One after the other: batches in flight all hold their activations.
    every = [jax.device_get(scores(params, *call)) for call in calls]
    return {name: np.mean([each[name] for each in every], axis=0) for name in every[0]}


def _floating(tree: PyTree) -> PyTree:
    """Numbers as they are, zeros for what has no gradient."""

    def plain(leaf: Any) -> Any:
        is_floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return leaf if is_floating else jnp.zeros(np.shape(leaf), jnp.float32)

    return jax.tree.map(plain, tree)
