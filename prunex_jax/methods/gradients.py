"""What all methods share that exchange gradients in every step.

Such a method is an optax transformation that turns the gradients of one device into one
direction for all, in front of the inner optimizer. Parameters and the inner optimizer's
state are replicated; what an exchange holds back belongs to a host or a device.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import Wire
from prunex_jax.methods.method import Method, Recipe


def gradient_method(
    recipe: Recipe,
    exchange: optax.GradientTransformation,
    *,
    placement: Any,
    payload_elements: int,
    wire: Wire | None = None,
    position_bytes: int = 0,
    inner: optax.GradientTransformation | None = None,
    masks: Callable[[PyTree], dict[str, jax.Array]] | None = None,
    **hooks: Any,
) -> Method:
    """Puts an exchange of gradients in front of the inner optimizer.

    Args:
      recipe: What the trainer has built.
      exchange: Local gradients -> one direction, replicated.
      placement: Where the parts of the exchange's state live, a prefix of it.
      payload_elements: Elements of the largest array that crosses the host axis.
      wire: How they cross it; None takes that of the recipe.
      position_bytes: Bytes that say where they belong.
      inner: Instead of the recipe's inner optimizer.
      masks: State of the exchange -> channel masks, replicated.
      **hooks: Further fields of `Method`.
    Returns:
      The method.
    """

    transform = optax.chain(exchange, recipe.inner if inner is None else inner)
    if masks is not None:
        hooks["masks"] = lambda opt_state: masks(opt_state[0])
    return Method(
        transform=optax.with_extra_args_support(transform),
        opt_placement=(placement, recipe.placed("replicated")),
        payload_elements=lambda keep_counts: payload_elements,
        wire=recipe.wire if wire is None else wire,
        position_bytes=lambda keep_counts: position_bytes,
        **chain_hooks(),
        **hooks,
    )


def chain_hooks() -> dict[str, Any]:
    """Where a chain of an exchange and the inner optimizer keeps the latter's state."""
    return {
        "inner_state": lambda opt_state: opt_state[1],
        "with_inner": lambda opt_state, inner_state: (opt_state[0], inner_state),
    }
