"""The inner optimizer and its learning rate, from settings; the chain in one place."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from optax.contrib import MuonDimensionNumbers

from prunex_jax.base.errors import UserError, one_line, suggest
from prunex_jax.base.imports import import_named, is_named
from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.base.trees import (
    PyTree,
    flatten_by_path,
    map_with_path,
    nested_by_path,
    shapes_by_path,
)
from prunex_jax.comm import sum_over_slices
from prunex_jax.mesh import ALONE, MeshAxes

# Makes an optimizer of a learning rate, as functions of optax do.
MakeOptimizer = Callable[[optax.Schedule], optax.GradientTransformation]

_Make = Callable[[OptimizerConfig, optax.Schedule], optax.GradientTransformation]
# What settings call an optimizer that was given.
OWN_OPTIMIZER = "own"
# Root mean square of AdamW's updates, at a rate of 1.
_RMS_OF_ADAMW = 0.2


def make_learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Makes the learning rate as a function of the step.

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
    config: OptimizerConfig,
    learning_rate: optax.Schedule,
    own: MakeOptimizer | None = None,
    axes: MeshAxes = ALONE,
) -> optax.GradientTransformation:
    """Makes the inner optimizer.

    Order: clip the averaged gradient, decay kernels (sgd), the optimizer itself, decay
    kernels (the others), learning rate.

    Args:
      config: Which optimizer, and its settings; those of momentum are for sgd.
      learning_rate: The rate as a function of the step.
      own: Takes the rate and makes an optimizer instead of that of `config.name`.
      axes: Mesh axes; with `slices` it is for slices of averaged gradients.
    Collectives:
      For slices, with a clipped norm, as `comm.sum_over_slices` for one number.
    Raises:
      UserError: The name is not known, or a function of the user's own makes no optax
        transformation.
    Example:
      >>> import jax.numpy as jnp
      >>> config = OptimizerConfig(name='optax:sgd', weight_decay=0.0)
      >>> inner = make_inner(config, optax.constant_schedule(0.5))
      >>> params = {'w': jnp.ones(2)}
      >>> updates, _ = inner.update(params, inner.init(params), params)
      >>> updates['w'].tolist()
      [-0.5, -0.5]
    """
    parts = [_clip(config.clip_norm, axes)] if config.clip_norm else []
    if own is not None:
        optimizer = _from_function(own, "optimizer", config, learning_rate)
    elif config.name == OWN_OPTIMIZER:
        raise UserError(
            f"config.optimizer.name={OWN_OPTIMIZER!r} was brought to `train` in "
            "Python, and settings do not hold it; give the same optimizer again: to "
            "`train` or `open_run`, or on the command line as --optimizer="
            "package.module:object"
        )
    elif is_named(config.name):
        setting = f"config.optimizer.name={config.name!r}"
        function = import_named(config.name, "config.optimizer.name")
        optimizer = _from_function(function, setting, config, learning_rate)
    elif config.name in _OPTIMIZERS:
        optimizer = _OPTIMIZERS[config.name](config, learning_rate)
    else:
        raise UserError(
            f"config.optimizer.name={config.name!r} is not known"
            f"{suggest(config.name, _OPTIMIZERS)}; choose one of "
            f"{', '.join(_OPTIMIZERS)}, or write package.module:function, such as "
            "optax:lamb"
        )
    return optax.chain(*parts, optimizer)


def _clip(max_norm: float, axes: MeshAxes) -> optax.GradientTransformation:
    """Scales gradients down to a norm of all of them together."""
    if axes.slices is None:
        return optax.clip_by_global_norm(max_norm)

    def update(grads: PyTree, params: PyTree | None = None) -> PyTree:
        del params
        squares = optax.tree.norm(grads, squared=True)
        norm = jnp.sqrt(sum_over_slices(squares, axes))
        factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        return jax.tree.map(lambda x: (x * factor).astype(x.dtype), grads)

    return optax.stateless(update)


def check_inner(inner: optax.GradientTransformation, params: PyTree) -> None:
    """Refuses an optimizer that gradients and parameters are not enough for.

    Raises:
      UserError: It cannot be called, or gives something other than updates.
    Example:
      >>> check_inner(optax.adam(0.1), {'w': jax.ShapeDtypeStruct((2,), 'float32')})
    """

    def update(params: PyTree) -> PyTree:
        return inner.update(params, inner.init(params), params)[0]

    try:
        found = shapes_by_path(jax.eval_shape(update, params))
    except Exception as error:
        raise UserError(
            "the inner optimizer cannot be called with gradients, its state and "
            f"parameters: {one_line(error, 300)}"
        ) from error
    if found != shapes_by_path(params):
        raise UserError(
            "the inner optimizer gives other trees than parameters; it should be an "
            "optax transformation of gradients to updates"
        )


def check_sliceable(
    inner: optax.GradientTransformation, params: PyTree, axes: MeshAxes
) -> None:
    """Refuses an optimizer that would do something else with slices of parameters.

    It is tried on small arrays of as many axes, whole and in two slices, as every
    optimizer that looks at single entries, and at sums over all of them, does the same
    with both.

    Raises:
      UserError: It does not.
    Example:
      >>> params = {'w': jax.ShapeDtypeStruct((9, 2), 'float32')}
      >>> check_sliceable(optax.adam(0.1), params, MeshAxes(None, None, 'device'))
    """
    # One parameter of every kind that an optimizer may tell from others.
    leaves = flatten_by_path(params)
    kinds = {
        (len(x.shape), path.rpartition("/")[2]): path for path, x in leaves.items()
    }
    rng = np.random.default_rng(0)
    params, grads = (
        nested_by_path(
            {
                path: rng.normal(size=(4, *[2] * (ndim - 1)) if ndim else (4,))
                for (ndim, _), path in kinds.items()
            }
        )
        for _ in range(2)
    )

    def two_steps(params: PyTree, grads: PyTree) -> PyTree:
        state = inner.init(params)
        for _ in range(2):
            updates, state = inner.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    def ends(num_slices: int) -> PyTree:
        trees = jax.tree.map(
            lambda x: x.astype(np.float32).reshape(num_slices, -1, *x.shape[1:]),
            (params, grads),
        )
        found = jax.jit(jax.vmap(two_steps, axis_name=axes.slices))(*trees)
        return jax.tree.map(np.ravel, found)

    whole, sliced = flatten_by_path(ends(1)), flatten_by_path(ends(2))
    for path, found in whole.items():
        if not np.allclose(found, sliced[path], rtol=1e-4, atol=1e-6):
            raise UserError(
                "the inner optimizer looks at whole parameters, as it does something "
                f"else with slices of {path}; set topology.shard=none, or take "
                "config.optimizer.name=sgd, adamw or lion"
            )


def is_kernel(params: PyTree) -> PyTree:
    """Tells kernels, which decay, from biases, norm scales and positions.

    Biases of heads have two axes, and so have positions: these are told by their names.
    """

    def decays(path: str, leaf: jax.Array) -> bool:
        name = path.rpartition("/")[2]
        return leaf.ndim > 1 and not name.endswith(("bias", "positions"))

    return map_with_path(decays, params)


def as_matrix(shape: tuple[int, ...]) -> MuonDimensionNumbers:
    """Which axes of a kernel are the rows of its matrix, and which the columns.

    Axes are cut in two where the matrix is most nearly square. That is between inputs
    and outputs for convolutions, and for attention whose heads have an axis.

    Example:
      >>> as_matrix((128, 4, 32))
      MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1, 2))
      >>> as_matrix((3, 3, 16, 32)).reduction_axis
      (0, 1, 2)
    """

    def skew(cut: int) -> float:
        return abs(math.log(math.prod(shape[:cut]) / math.prod(shape[cut:])))

    # Of cuts that are alike, such as beside an axis of 1, the last.
    cut = min(range(len(shape) - 1, 0, -1), key=skew)
    axes = tuple(range(len(shape)))
    return MuonDimensionNumbers(reduction_axis=axes[:cut], output_axis=axes[cut:])


def _sgd(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    sgd = optax.sgd(rate, config.momentum or None, config.nesterov)
    if not config.weight_decay:
        return sgd
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=is_kernel), sgd
    )


def _decoupled(make: Callable[..., optax.GradientTransformation]) -> _Make:
    """Decays kernels beside the update, as optax does it for this optimizer."""
    return lambda config, rate: make(
        rate, weight_decay=config.weight_decay, mask=is_kernel
    )


_adamw = _decoupled(optax.adamw)


def _muon(
    config: OptimizerConfig, rate: optax.Schedule
) -> optax.GradientTransformation:
    """Muon for matrices, and AdamW for vectors, embeddings and heads.

    References:
      Jordan et al., Muon, 2024, https://kellerjordan.github.io/posts/muon (which
        parameters it is for).
      Liu et al., Muon is scalable for LLM training, 2025, arXiv:2502.16982, section
        2.2 (updates as large as those of AdamW, so that both have one rate).
    """

    def kinds(params: PyTree) -> PyTree:
        def kind(path: str, leaf: jax.Array) -> str:
            is_other = any(part in path for part in config.adamw_paths)
            return "adamw" if leaf.ndim < 2 or is_other else "muon"

        return map_with_path(kind, params)

    muon = optax.contrib.muon(
        rate,
        weight_decay=config.weight_decay,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda leaf: as_matrix(leaf.shape), params
        ),
        consistent_rms=_RMS_OF_ADAMW,
    )
    return optax.partition({"muon": muon, "adamw": _adamw(config, rate)}, kinds)


_OPTIMIZERS: Mapping[str, _Make] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "lion": _decoupled(optax.lion),
    "muon": _muon,
}


def _from_function(
    function: Any, named: str, config: OptimizerConfig, rate: optax.Schedule
) -> optax.GradientTransformation:
    """Calls a function of optax, or like those, with the settings that it takes."""
    if not callable(function):
        raise UserError(
            f"{named} is {type(function).__name__}, and should be a function of the "
            "learning rate that makes an optax transformation, such as optax.lamb or "
            "lambda rate: optax.adam(rate, b2=0.95)"
        )
    try:
        takes = inspect.signature(function).parameters
        options: dict[str, Any] = {}
        if "weight_decay" in takes:
            options["weight_decay"] = config.weight_decay
            masks = {"mask", "weight_decay_mask"} & set(takes)
            options |= dict.fromkeys(masks, is_kernel)
        made = function(rate, **options)
    except Exception as error:
        raise UserError(
            f"{named} cannot be called with the learning rate: {one_line(error)}"
        ) from error
    if not isinstance(made, optax.GradientTransformation):
        raise UserError(
            f"{named} gives {type(made).__name__}, and should give an optax "
            "transformation"
        )
    return made
