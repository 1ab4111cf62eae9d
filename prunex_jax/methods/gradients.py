"""What all methods share that exchange gradients in every step.

Such a method is an optax transformation that turns the gradients of one device into one
direction for all, in front of the inner optimizer. Parameters and the inner optimizer's
state are replicated; what an exchange holds back belongs to a host or a device.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.comm import FLOAT32, Collective, Wire
from prunex_jax.methods.base import Method, no_options
from prunex_jax.methods.recipe import Recipe


def gradient_method(
    name: str,
    recipe: Recipe,
    exchange: optax.GradientTransformation,
    *,
    placement: Any,
    formula: Callable[..., list[Collective]],
    payload_elements: int,
    wire: Wire = FLOAT32,
    position_bytes: int = 0,
    inner: optax.GradientTransformation | None = None,
    health: Callable[[PyTree], dict[str, jax.Array]] | None = None,
    masks: Callable[[PyTree], dict[str, jax.Array]] | None = None,
    step_options: Callable[[int], dict[str, Any]] = no_options,
) -> Method:
    """Puts an exchange of gradients in front of the inner optimizer.

    Args:
      name: Key in `methods.METHODS`.
      recipe: What the trainer has built.
      exchange: Local gradients -> one direction, replicated.
      placement: Where the parts of the exchange's state live, a prefix of it.
      formula: (mesh shape, and options of the step) -> what one step must send.
      payload_elements: Elements of the largest array that crosses the host axis.
      wire: How they cross it.
      position_bytes: Bytes that say where they belong.
      inner: In the stead of the recipe's inner optimizer.
      health: State of the exchange -> named scalars for the log, replicated.
      masks: State of the exchange -> channel masks, replicated.
      step_options: Step -> static keyword arguments of the exchange's update.
    Returns:
      The method.
    """

    def network(params: PyTree, opt_state: PyTree) -> PyTree:
        del opt_state
        return params

    def of_exchange(
        fn: Callable[[PyTree], dict[str, jax.Array]] | None,
    ) -> Callable[[PyTree], dict[str, jax.Array]]:
        return lambda opt_state: fn(opt_state[0]) if fn is not None else {}

    transform = optax.chain(exchange, recipe.inner if inner is None else inner)
    return Method(
        name=name,
        params_placement="replicated",
        opt_placement=(placement, "replicated"),
        transform=optax.with_extra_args_support(transform),
        sync_period=0,
        exchange=None,
        network=network,
        masks=of_exchange(masks),
        health=of_exchange(health),
        step_formula=formula,
        exchange_formula=lambda mesh_shape, keep_counts, kind: [],
        payload_elements=lambda keep_counts: payload_elements,
        inner_state=lambda opt_state: opt_state[1],
        with_inner=lambda opt_state, inner_state: (opt_state[0], inner_state),
        wire=wire,
        position_bytes=position_bytes,
        step_options=step_options,
    )


def momentum_of(name: str, recipe: Recipe) -> dict[str, Any]:
    """What a method takes over of the inner optimizer that applies momentum itself.

    Args:
      name: Key in `methods.METHODS`.
      recipe: What the trainer has built.
    Returns:
      momentum, nesterov and clip_norm, for the factory of its exchange.
    Raises:
      UserError: The inner optimizer is not SGD.
    """
    optimizer = recipe.optimizer
    if optimizer.name != "sgd":
        raise UserError(
            f"method {name} has no form of optimizer.name={optimizer.name!r}: it "
            "applies the momentum of SGD before it sends; choose sgd, or method topk"
        )
    return {
        "momentum": optimizer.momentum,
        "nesterov": optimizer.nesterov,
        "clip_norm": optimizer.clip_norm,
    }
