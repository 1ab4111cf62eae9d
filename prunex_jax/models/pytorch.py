"""Modules of PyTorch as functions of JAX, in evaluation and in training.

`torchax` runs a module on arrays of JAX. Parameters keep the names of the state dict;
running statistics are told apart, and other buffers, such as masks and tables of
positions, are constants. Where torchax trains another way than PyTorch does, this is
PyTorch's: batch norms, what `torch.no_grad` and `detach` keep from the gradient, and
random numbers, which follow the key that is given.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from prunex_jax.base.errors import UserError, one_line
from prunex_jax.base.imports import need_package
from prunex_jax.base.trees import PyTree
from prunex_jax.models.base import Functions
from prunex_jax.models.layers import moments

# Buffers that training changes, by the last part of their names, and those that it
# changes without a use here.
_RUNNING = ("running_mean", "running_var")
_COUNTERS = ("num_batches_tracked",)
# A call changes the module, and torchax, until it returns; programs may be compiled in
# threads.
_ONE_AT_A_TIME = threading.RLock()


def functions_of_module(module: Any, examples: tuple[PyTree, ...]) -> Functions:
    """Functions of a `torch.nn.Module`, which stays as it is.

    Parameters and statistics are flat dicts by their names in the state dict, a
    parameter that is used under several names under the first of them.

    Args:
      module: The module; its parameters are what training starts from.
      examples: What it is called with, or shapes and types of that.
    Raises:
      UserError: torchax is not installed or cannot run the module.
    """
    need_package("torchax", "pytorch", "A module of PyTorch")
    import torchax

    name, environment = type(module).__name__, torchax.default_env()
    frozen = copy_of_module(module)
    params = environment.t2j_copy(dict(frozen.named_parameters()))
    buffers = environment.t2j_copy(_buffers(frozen))
    running = {key: x for key, x in buffers.items() if key.endswith(_RUNNING)}
    fixed = {key: x for key, x in buffers.items() if key not in running}

    def apply(params: PyTree, statistics: PyTree, *inputs: PyTree) -> PyTree:
        key, arrays = jax.random.key(0), {**fixed, **params, **statistics}
        with _ONE_AT_A_TIME:
            frozen.eval()
            return _called(frozen, arrays, inputs, key)[0]

    def train(
        params: PyTree,
        statistics: PyTree,
        inputs: PyTree,
        key: jax.Array | None,
        axis_name: str | None,
    ) -> tuple[PyTree, PyTree]:
        _check_trains(frozen)
        key = jax.random.key(0) if key is None else key
        arrays = {**fixed, **params, **statistics}
        with _ONE_AT_A_TIME, _no_gradients_of_its_own(name):
            frozen.train()
            answers, after = _called(frozen, arrays, (inputs,), key, axis_name)
        for buffer, array in fixed.items():
            if after[buffer] is not array and not buffer.endswith(_COUNTERS):
                raise UserError(
                    f"buffer {buffer!r} of model={name} is changed in training, and "
                    f"only {' and '.join(_RUNNING)} are kept between steps; make it a "
                    "parameter, or leave out the layer that changes it"
                )
        return answers, {path: after[path] for path in statistics}

    try:
        jax.eval_shape(apply, params, running, *examples)
    except Exception as error:
        raise UserError(
            f"torchax cannot run {name} on these inputs: {one_line(error, 300)}"
        ) from error
    return Functions(
        name=name,
        init=lambda key: (params, running),
        apply=apply,
        apply_train=train,
        # Whether it draws cannot be seen; a key that is not used costs nothing.
        is_random=True,
        example=examples[0] if len(examples) == 1 else examples,
        module=frozen,
    )


def as_arrays(tree: PyTree) -> PyTree:
    """Tensors of PyTorch as arrays of JAX, and what is none as it was."""
    import torch

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        plain = leaf.detach().cpu()
        if plain.dtype is torch.bfloat16:
            return jnp.asarray(plain.float().numpy(), jnp.bfloat16)
        return jnp.asarray(plain.numpy())

    return jax.tree.map(array, tree)


def _buffers(module: Any) -> dict[str, Any]:
    """Buffers by name, and tensors that are plain attributes."""
    import torch

    found = dict(module.named_buffers())
    for path, layer in module.named_modules():
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor):
                found[f"{path}.{name}" if path else name] = value
    return found


def copy_of_module(module: Any) -> Any:
    """A copy in evaluation mode, without what the module has computed for later."""
    # PyTorch copies no tensors that were computed.
    plain = {id(x): x.detach() for x in _tensors(module) if x.grad_fn is not None}
    # Caches are dropped where training begins.
    return copy.deepcopy(module, plain).train().eval()


def _tensors(module: Any) -> list[Any]:
    """Parameters, buffers, and tensors in other attributes."""
    import torch
    from torch.utils import _pytree

    leaves = [_pytree.tree_leaves(vars(layer)) for layer in module.modules()]
    return [x for found in leaves for x in found if isinstance(x, torch.Tensor)]


def _called(
    module: Any,
    arrays: dict[str, jax.Array],
    inputs: tuple[PyTree, ...],
    key: jax.Array,
    axis_name: str | None = None,
) -> tuple[PyTree, dict[str, jax.Array]]:
    """What a module answers with these parameters and buffers, and what they are then.

    What it keeps for later calls, such as tables of positions that evaluation computes
    once, is computed in every call.

    Raises:
      UserError: It draws from PyTorch's own generator, which a compiled program would
        do once for all steps.
    """
    import torch
    import torchax

    environment, drawn = torchax.default_env(), torch.get_rng_state()
    tensors, given = map(
        environment.j2t_iso, jax.tree.map(_on_device, (arrays, inputs))
    )
    with (
        environment,
        environment.override_property(prng=key),
        torch.enable_grad(),
        _as_pytorch_trains(axis_name),
        # torchax counts on it, whatever the program around it has set.
        jax.numpy_rank_promotion("allow"),
    ):
        called = copy.deepcopy(module, {id(x): x for x in _tensors(module)})
        answers = torch.func.functional_call(called, tensors, given)
    if not torch.equal(drawn, torch.get_rng_state()):
        raise UserError(
            f"model={type(module).__name__} draws random numbers outside of torchax, "
            "as torch.rand(()) does, and they would be the same in every step; draw "
            "them on the device of the inputs: torch.rand((), device=x.device)"
        )
    found = environment.t2j_iso(answers)
    if _is_symbolic(inputs) and not all(map(_is_symbolic, jax.tree.leaves(found))):
        raise UserError(
            f"torchax takes a batch of any size for one example in "
            f"{type(module).__name__}; give it batches of a size that is known"
        )
    return found, environment.t2j_iso(tensors)


def _is_symbolic(tree: PyTree) -> bool:
    """Whether a size is left open, which torchax reads as 1 in some operations."""
    shapes = (np.shape(leaf) for leaf in jax.tree.leaves(tree))
    return not all(isinstance(size, int) for shape in shapes for size in shape)


@contextlib.contextmanager
def _no_gradients_of_its_own(name: str) -> Iterator[None]:
    """Refuses what says itself how it is differentiated, which JAX would not heed.

    Raises:
      UserError: The module calls such a function.
    """
    import torch

    def refuse(cls: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        raise UserError(
            f"model={name} calls {cls.__name__}, a torch.autograd.Function, whose "
            "backward pass is not followed here; write it with operations of PyTorch, "
            "such as x + (y - x).detach()"
        )

    function, plain = torch.autograd.Function, vars(torch.autograd.Function)["apply"]
    function.apply = classmethod(refuse)
    try:
        yield
    finally:
        function.apply = plain


def _on_device(leaf: Any) -> Any:
    """Arrays of numpy, which torchax takes for constants, as arrays of JAX."""
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf


def _as_pytorch_trains(axis_name: str | None) -> Any:
    """What makes functions of PyTorch do in torchax what they do in PyTorch."""
    import torch
    import torchax

    environment = torchax.default_env()
    stopping = (torch.Tensor.detach, torch.detach)

    def stopped(answers: Any) -> Any:
        plain = environment.t2j_iso(answers)
        return environment.j2t_iso(jax.tree.map(lax.stop_gradient, plain))

    class Training(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            del types
            kwargs = kwargs or {}
            if func is torch.nn.functional.batch_norm:
                return _batch_norm(func, axis_name, *args, **kwargs)
            if func is torch.nn.functional.normalize:
                return _normalize(func, *args, **kwargs)
            answers = func(*args, **kwargs)
            if func in stopping or not torch.is_grad_enabled():
                return stopped(answers)
            return answers

    return Training()


def _normalize(
    otherwise: Callable[..., Any],
    x: Any,
    p: float = 2.0,
    dim: Any = 1,
    eps: float = 1e-12,
    out: Any = None,
) -> Any:
    """`torch.nn.functional.normalize`, which has a derivative of 0 for zeros.

    torchax takes a square root of 0, whose derivative is not finite.
    """
    import torch

    if p != 2.0 or out is not None:
        return otherwise(x, p, dim, eps, out)
    squares = (x * x).sum(dim, keepdim=True)
    is_more = squares > 0
    norm = torch.where(is_more, squares, torch.ones_like(squares)).sqrt()
    norm = torch.where(is_more, norm, torch.zeros_like(norm))
    return x / norm.clamp_min(eps)


def _batch_norm(
    otherwise: Callable[..., Any],
    axis_name: str | None,
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """`torch.nn.functional.batch_norm`, which moves running statistics in training.

    torchax leaves them as they are, and knows of no mesh axis.
    """
    import torchax

    if not training:
        return otherwise(
            x, running_mean, running_var, weight, bias, training, momentum, eps
        )

    def normalised(x: jax.Array) -> tuple[jax.Array, ...]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean, var, count = _moments(wide, axis_name)
        shape = (1, -1, *(1,) * (x.ndim - 2))
        y = (wide - mean.reshape(shape)) * lax.rsqrt(var + eps).reshape(shape)
        if weight is not None:
            y = y * weight.jax().reshape(shape)
        if bias is not None:
            y = y + bias.jax().reshape(shape)
        return y.astype(x.dtype), mean, var * (count / (count - 1))

    y, *found = normalised(x.jax())
    for running, new in zip((running_mean, running_var), found, strict=True):
        if running is not None:
            running.apply_jax_(_moved, new, momentum)
    return torchax.default_env().j2t_iso(y)


def _moved(old: jax.Array, new: jax.Array, momentum: float) -> jax.Array:
    return ((1 - momentum) * old + momentum * new).astype(old.dtype)


def _moments(x: jax.Array, axis_name: str | None) -> tuple[jax.Array, jax.Array, int]:
    """Mean and variance of channels, and how many numbers they are of.

    Raises:
      UserError: They are of one number, whose variance is unknown.
    """
    axes, count = (0, *range(2, x.ndim)), x.size // x.shape[1]
    if axis_name is None:
        mean, var = x.mean(axes), x.var(axes)
    else:
        mean, var = moments(x, axes, axis_name)
        count *= lax.axis_size(axis_name)
    if count < 2:
        raise UserError(
            "a batch norm sees one number per channel in a step; give "
            "config.data.batch_size more examples per device"
        )
    return mean, var, count


def _check_trains(module: Any) -> None:
    """Refuses what would train another way than in PyTorch.

    Raises:
      UserError: A parameter is not to be trained, or a layer keeps statistics of a kind
        that is not known here.
    """
    from torch.nn.modules import batchnorm, instancenorm

    what = f"of model={type(module).__name__}"
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise UserError(
                f"parameter {name!r} {what} has requires_grad=False, and all "
                "parameters are trained; call module.requires_grad_() before"
            )
    for name, layer in module.named_modules():
        keeps = getattr(layer, "track_running_stats", False)
        if keeps and isinstance(layer, instancenorm._InstanceNorm):
            raise UserError(
                f"layer {name!r} {what} is {type(layer).__name__} with "
                "track_running_stats=True, whose statistics are not moved here; make "
                "it without"
            )
        is_mean = keeps and isinstance(layer, batchnorm._NormBase)
        if is_mean and layer.momentum is None:
            raise UserError(
                f"layer {name!r} {what} has momentum=None, a mean over all steps; give "
                "it a share, such as layer.momentum = 0.1"
            )
