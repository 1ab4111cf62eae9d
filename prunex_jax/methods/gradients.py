"""What all methods share that exchange gradients in every step.

Such a method is an optax transformation that turns the gradients of one device into one
direction for all, in front of the inner optimizer. Parameters and the inner optimizer's
state are replicated; what an exchange holds back belongs to a host or a device.
"""

from collections.abc import Callable
from typing import Any

import optax

from prunex_jax.methods.method import (
    InnerState,
    Method,
    Payload,
    Placements,
    Recipe,
)


def gradient_method(
    recipe: Recipe,
    exchange: optax.GradientTransformation,
    *,
    placement: Any,
    payload_elements: int,
    bytes_of: Callable[[int], int] | None = None,
    position_bytes: int = 0,
    inner: optax.GradientTransformation | None = None,
    forgotten: tuple[str, ...] = (),
    **parts: Any,
) -> Method:
    """Puts an exchange of gradients in front of the inner optimizer.

    Args:
      recipe: What the trainer has built.
      exchange: Local gradients -> one direction, replicated.
      placement: Where the parts of the exchange's state live, a prefix of it.
      payload_elements: Elements of the largest array that crosses the host axis.
      bytes_of: Bytes that stand for so many; None takes those of the recipe's wire.
      position_bytes: Bytes that say where they belong.
      inner: Instead of the recipe's inner optimizer.
      forgotten: As of `Placements`.
      **parts: Further fields of `Method`.
    Returns:
      The method.
    """

    transform = optax.chain(exchange, recipe.inner if inner is None else inner)
    return Method(
        transform=optax.with_extra_args_support(transform),
        placements=Placements(
            opt_state=(placement, recipe.placed("replicated")), forgotten=forgotten
        ),
        payload=Payload(
            lambda keep_counts: payload_elements,
            recipe.wire.payload_bytes if bytes_of is None else bytes_of,
            lambda keep_counts: position_bytes,
        ),
        inner=INNER_OF_CHAIN,
        **parts,
    )


# Where a chain of an exchange and the inner optimizer keeps the latter's state.
INNER_OF_CHAIN = InnerState(
    get=lambda opt_state: opt_state[1],
    put=lambda opt_state, inner_state: (opt_state[0], inner_state),
)
