"""Modules of PyTorch: as a function of JAX, and as a smaller module again.

`torchax` runs a module on arrays of JAX. Parameters keep the names of the state dict;
running statistics are told apart, and other buffers, such as masks and tables of
positions, are constants.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError, one_line
from prunex_jax.base.imports import need_package
from prunex_jax.base.trees import PyTree
from prunex_jax.shrink import Cut, relative_error

# Buffers that training changes, by the last part of their names.
_RUNNING = ("running_mean", "running_var")
# What a module may differ by from the function: both sum in orders of their own.
_TOLERANCE = 1e-4
_Function = tuple[Callable[..., PyTree], PyTree, PyTree | None, tuple[PyTree, ...]]


def function_of_module(module: Any, *inputs: PyTree) -> _Function:
    """A function of JAX of a module in evaluation mode; the module stays as it is.

    Args:
      module: A `torch.nn.Module`.
      *inputs: What it is called with: tensors, or arrays.
    Returns:
      `apply(params, *inputs)`, or `apply(params, statistics, *inputs)` where there are
      running statistics; parameters and statistics by their names in the state dict, a
      parameter that is used under several names under the first of them; statistics
      are None where there are none; and inputs as arrays.
    Raises:
      UserError: torchax is not installed or cannot run the module, or there are no
        inputs.
    """
    need_package("torchax", "pytorch", "A module of PyTorch")
    import torch
    import torchax

    if not inputs:
        raise UserError("prune is given no inputs; give examples behind the module")
    frozen, environment = copy.deepcopy(module).eval(), torchax.default_env()
    params = environment.t2j_copy(dict(frozen.named_parameters()))
    buffers = environment.t2j_copy(_buffers(frozen))
    running = {name: x for name, x in buffers.items() if name.endswith(_RUNNING)}
    fixed = {name: x for name, x in buffers.items() if name not in running}

    def apply(params: PyTree, statistics: PyTree, *inputs: PyTree) -> PyTree:
        tensors = environment.j2t_iso({**fixed, **params, **statistics})
        given = environment.j2t_iso(inputs)
        # torchax counts on it, whatever the program around it has set.
        with environment, jax.numpy_rank_promotion("allow"):
            answers = torch.func.functional_call(frozen, tensors, given)
        return environment.t2j_iso(answers)

    arrays = jax.tree.map(_array, inputs)
    try:
        jax.eval_shape(apply, params, running, *arrays)
    except Exception as error:
        raise UserError(
            f"torchax cannot run {type(module).__name__} on these inputs: "
            f"{one_line(error, 300)}"
        ) from error
    if running:
        return apply, params, running, arrays
    return lambda params, *inputs: apply(params, {}, *inputs), params, None, arrays


def _buffers(module: Any) -> dict[str, Any]:
    """Buffers by name, and tensors that are plain attributes."""
    import torch

    found = dict(module.named_buffers())
    for path, layer in module.named_modules():
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor):
                found[f"{path}.{name}" if path else name] = value
    return found


def _array(leaf: Any) -> Any:
    """A tensor as an array of JAX, and what is none as it was."""
    import torch

    if not isinstance(leaf, torch.Tensor):
        return leaf
    plain = leaf.detach().cpu()
    if plain.dtype is torch.bfloat16:
        return jnp.asarray(plain.float().numpy(), jnp.bfloat16)
    return jnp.asarray(plain.numpy())


def state_dict_of(module: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of a smaller module.

    Args:
      module: The module of full size.
      arrays: Parameters and statistics that are left, by name.
    Returns:
      Tensors by the names that `module.state_dict()` has, in its types; buffers that
      are no statistics as they are there.
    """
    import torch

    first = _first_names(module)

    def left(name: str, tensor: Any) -> Any:
        array = arrays.get(first.get(name, name))
        if array is None:
            return tensor.detach().clone()
        return torch.tensor(np.asarray(array, np.float32)).to(tensor.dtype)

    return {name: left(name, x) for name, x in module.state_dict().items()}


def _first_names(module: Any) -> dict[str, str]:
    """Name of every parameter -> the first name under which it is used."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(x), name) for name, x in named}


def smaller_module(
    module: Any,
    cut: Cut,
    arrays: Mapping[str, Any],
    inputs: tuple[PyTree, ...],
    answers: PyTree,
) -> Any:
    """A module of PyTorch with fewer channels, for those who go on there.

    Every parameter that lost channels must belong to a linear layer, a convolution, a
    batch norm or an embedding, and no size may be left in a forward pass.

    Args:
      module: The module of full size, which stays as it is.
      cut: What is cut out of it.
      arrays: Parameters and statistics that are left, by name.
      inputs: Arrays, on which it is compared with the small function.
      answers: What that gives for them.
    Returns:
      A copy in evaluation mode with smaller parameters.
    Raises:
      UserError: A layer is of another kind, or the copy does not answer alike.
    """
    import torch

    small, tensors = copy.deepcopy(module).eval(), state_dict_of(module, arrays)
    first = _first_names(module)
    for path, layer in small.named_modules():
        own = {
            name: tensors[f"{path}.{name}" if path else name]
            for name in layer.state_dict()
            if "." not in name
        }
        if any(x.shape != getattr(layer, name).shape for name, x in own.items()):
            if isinstance(layer, torch.nn.modules.conv._ConvNd):
                name = first[f"{path}.weight" if path else "weight"]
                stays = cut.parameters.stays(name, 0).reshape(layer.groups, -1)
                layer.groups = int(stays.any(1).sum())
            _resize(layer, path, own)
    small.load_state_dict(tensors)
    for name, one in first.items():
        path, _, last = name.rpartition(".")
        small.get_submodule(path)._parameters[last] = small.get_parameter(one)
    try:
        with torch.no_grad():
            found = small(*jax.tree.map(_tensor, inputs))
    except Exception as error:
        raise UserError(
            "the smaller module of PyTorch does not run, so a number or a buffer of "
            f"full size is left in its forward pass: {one_line(error, 200)}; go on "
            "with the small function, or its export"
        ) from error
    gap = relative_error(_leaves(found), jax.tree.leaves(answers))
    if not gap <= _TOLERANCE:
        raise UserError(
            f"the smaller module of PyTorch differs from the small function by "
            f"{gap:.2g} of the largest answer, so a number or a buffer of full size is "
            "left in its forward pass; go on with the small function, or its export"
        )
    return small


def _tensor(leaf: Any) -> Any:
    import torch

    return torch.tensor(np.asarray(leaf)) if isinstance(leaf, jax.Array) else leaf


def _leaves(answers: Any) -> list[np.ndarray]:
    from torch.utils import _pytree

    return [x.detach().float().numpy() for x in _pytree.tree_leaves(answers)]


def _resize(layer: Any, path: str, own: Mapping[str, Any]) -> None:
    """Gives a standard layer parameters of other sizes, and says so in its fields."""
    from torch import nn

    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = own["weight"].shape
    elif isinstance(layer, nn.Embedding):
        layer.num_embeddings, layer.embedding_dim = own["weight"].shape
    elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
        layer.num_features = len(next(iter(own.values())))
    elif isinstance(layer, nn.modules.conv._ConvNd):
        one, other = own["weight"].shape[0], own["weight"].shape[1] * layer.groups
        layer.in_channels = one if layer.transposed else other
        layer.out_channels = other if layer.transposed else one
    else:
        raise UserError(
            f"{path or 'the module'} is {type(layer).__name__} and loses channels; "
            "only linear layers, convolutions, batch norms and embeddings stay layers "
            "of PyTorch: go on with the small function or its export, or freeze= "
            "what belongs to this layer"
        )
    for name, value in own.items():
        if name in layer._parameters:
            needs = layer._parameters[name].requires_grad
            layer._parameters[name] = nn.Parameter(value.clone(), needs)
        else:
            layer._buffers[name] = value.clone()
