"""Modules of PyTorch again, of what is left of one as a function of JAX.

`models.pytorch` makes the function.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prunex_jax.base.errors import UserError, one_line
from prunex_jax.base.trees import PyTree
from prunex_jax.models.pytorch import copy_of_module
from prunex_jax.shrink import Cut, relative_error

# What a module may differ by from the function: both sum in orders of their own.
_TOLERANCE = 1e-4


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
    cuts: Sequence[Cut],
    arrays: Mapping[str, Any],
    inputs: tuple[PyTree, ...],
    answers: PyTree,
) -> Any:
    """A module of PyTorch with fewer channels, for those who go on there.

    Every parameter that lost channels must belong to a linear layer, a convolution, a
    batch norm or an embedding, and no size may be left in a forward pass.

    Args:
      module: The module of full size, which stays as it is.
      cuts: What was cut out of it, one after the other.
      arrays: Parameters and statistics that are left, by name.
      inputs: Arrays, on which it is compared with the small function.
      answers: What that gives for them.
    Returns:
      A copy in evaluation mode with smaller parameters.
    Raises:
      UserError: A layer is of another kind, or the copy does not answer alike.
    """
    import torch

    small, tensors = copy_of_module(module), state_dict_of(module, arrays)
    first = _first_names(module)
    for path, layer in small.named_modules():
        own = {
            name: tensors[f"{path}.{name}" if path else name]
            for name in layer.state_dict()
            if "." not in name
        }
        if any(x.shape != getattr(layer, name).shape for name, x in own.items()):
            if isinstance(layer, torch.nn.modules.conv._ConvNd):
                left = _left(cuts, first[f"{path}.weight" if path else "weight"])
                of_one = layer.weight.shape[0] // layer.groups
                layer.groups = len(np.unique(left // of_one))
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


def _left(cuts: Sequence[Cut], name: str) -> np.ndarray:
    """Positions of a parameter's first axis that are left."""
    left = np.arange(cuts[0].parameters.shapes[name][0])
    for cut in cuts:
        left = left[cut.parameters.stays(name, 0)]
    return left


def _tensor(leaf: Any) -> Any:
    import torch

    is_array = isinstance(leaf, jax.Array | np.ndarray)
    return torch.tensor(np.asarray(leaf)) if is_array else leaf


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
