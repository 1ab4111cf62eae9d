"""The inner optimizer and its learning rate, from settings; the chain in one place."""

import jax
import optax

from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.base.trees import PyTree, map_with_path

# Names of parameters that do not decay, however many axes they have.
_NOT_DECAYED = ("bias", "positions")


def make_learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Makes the learning rate as a function of the step.

    Args:
      config: Peak, warm-up and shape.
      total_steps: Length of the run.
    Returns:
      A schedule: linear warm-up from 0, the peak until `flat_share`, then the chosen
      decay: to 0 at the end, unless constant. With `rewind_share` this happens twice,
      before and after that share, each time with the same shares of a part.
    Example:
      >>> schedule = make_learning_rate(OptimizerConfig(schedule='linear'), 100)
      >>> [round(float(schedule(step)), 3) for step in (0, 5, 100)]
      [0.0, 0.1, 0.0]

    References:
      Renda et al., Comparing rewinding and fine-tuning in neural network pruning, 2020,
      arXiv:2003.02389 (the learning rate starts over after pruning).
    """
    first_steps = round(config.rewind_share * total_steps)
    if not 0 < first_steps < total_steps:
        return _one_cycle(config, total_steps)
    cycles = [_one_cycle(config, n) for n in (first_steps, total_steps - first_steps)]
    return optax.join_schedules(cycles, [first_steps])


def _one_cycle(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    peak = config.learning_rate
    warmup_steps = min(round(config.warmup_share * total_steps), total_steps)
    flat_steps = max(round(config.flat_share * total_steps) - warmup_steps, 0)
    decay_steps = max(total_steps - warmup_steps - flat_steps, 1)
    decays = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps),
        "linear": lambda: optax.linear_schedule(peak, 0.0, decay_steps),
        "constant": lambda: optax.constant_schedule(peak),
    }
    decay = decays[config.schedule]()
    if flat_steps:
        flat = optax.constant_schedule(peak)
        decay = optax.join_schedules([flat, decay], [flat_steps])
    if not warmup_steps:
        return decay
    warmup = optax.linear_schedule(0.0, peak, warmup_steps)
    return optax.join_schedules([warmup, decay], [warmup_steps])


def make_inner(
    config: OptimizerConfig, learning_rate: optax.Schedule
) -> optax.GradientTransformation:
    """Makes the inner optimizer.

    Order: clip the averaged gradient, decay kernels (sgd), momentum or Adam, decay
    kernels (adamw), learning rate.

    Returns:
      An optax transformation for averaged gradients. Momentum settings are for sgd.
    """
    clip = optax.clip_by_global_norm(config.clip_norm)
    parts = [clip] if config.clip_norm else []
    if config.name == "sgd":
        if config.weight_decay:
            parts.append(optax.add_decayed_weights(config.weight_decay, mask=is_kernel))
        parts.append(optax.sgd(learning_rate, config.momentum or None, config.nesterov))
    else:
        parts.append(
            optax.adamw(learning_rate, weight_decay=config.weight_decay, mask=is_kernel)
        )
    return optax.chain(*parts)


def is_kernel(params: PyTree) -> PyTree:
    """Tells kernels, which decay, from biases, norm scales and positions, which do not.

    Biases of attention heads have two axes, and so have positions: these are told by
    their names.
    """

    def decays(path: str, leaf: jax.Array) -> bool:
        return leaf.ndim > 1 and path.rpartition("/")[2] not in _NOT_DECAYED

    return map_with_path(decays, params)
