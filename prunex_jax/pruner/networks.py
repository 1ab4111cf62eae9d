"""What people call a network, as a function of trees; only packages in use are read."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class FullNetwork:
    """A function and what it is called with.

    Attributes:
      apply: `apply(params, *inputs)`, or `apply(params, statistics, *inputs)`.
      params: Arrays of full size.
      statistics: Running statistics; None if the function takes none.
      inputs: Examples.
      module: The PyTorch module that it was made of, or None.
    """

    apply: Callable[..., PyTree]
    params: PyTree
    statistics: PyTree | None
    inputs: tuple[PyTree, ...]
    module: Any = None

    def as_inputs(self, inputs: PyTree) -> tuple[PyTree, ...]:
        """Inputs of a batch, as one array or a tuple of several, for a call."""
        return tuple(inputs) if len(self.inputs) > 1 else (inputs,)


def full_network(
    network: Any, given: Sequence[PyTree], statistics: PyTree
) -> FullNetwork:
    """Makes a function of a network.

    Args:
      network: A function, which is given (params, *inputs), or what `hk.transform` or
        `hk.transform_with_state` made, which is given the same; a Linen module, which
        is given (variables, *inputs); a module of Flax NNX, of Equinox, or of PyTorch,
        which is given inputs.
      given: What stands behind it.
      statistics: Of functions that take some; None otherwise.
    Raises:
      UserError: It is no network, or inputs are missing.
    """
    if _is_of(network, "torch.nn"):
        from prunex_jax.models.pytorch import as_arrays

        _check_statistics(statistics, "module of PyTorch")
        return _of_module(network, as_arrays(_inputs(given, "inputs")))
    for package in ("flax.nnx", "equinox"):
        if _is_of(network, package):
            _check_statistics(statistics, f"module of {package}")
            return _of_module(network, _inputs(given, "inputs"))
    if _is_of(network, "flax.linen"):
        _check_statistics(statistics, "module of Linen, whose variables have them")
        return _of_linen(network, *_split(given, "variables"))
    params, inputs = _split(given, "parameters")
    transformed = _haiku_apply(network, statistics is not None)
    if transformed is None and (not callable(network) or isinstance(network, type)):
        raise UserError(
            f"{network!r} is no network: give a function, a module of Flax, Equinox or "
            "PyTorch, or what hk.transform made"
        )
    return FullNetwork(transformed or network, params, statistics, inputs)


def _is_of(network: Any, package: str) -> bool:
    found = sys.modules.get(package)
    return found is not None and isinstance(network, found.Module)


def _inputs(given: Sequence[PyTree], what: str) -> tuple[PyTree, ...]:
    if not given:
        raise UserError(f"prune is given no {what}; give examples behind the network")
    return tuple(given)


def _split(given: Sequence[PyTree], what: str) -> tuple[PyTree, tuple[PyTree, ...]]:
    if not given:
        raise UserError(f"prune is given no {what}; give them behind the network")
    return given[0], _inputs(given[1:], f"inputs behind the {what}")


def _check_statistics(statistics: PyTree, what: str) -> None:
    if statistics is not None:
        raise UserError(f"statistics= is for functions; leave it out for a {what}")


def _of_module(module: Any, inputs: tuple[PyTree, ...]) -> FullNetwork:
    """A module that holds its parameters."""
    from prunex_jax.models import functions_of

    functions = functions_of(module, *inputs)
    params, statistics = functions.init(jax.random.key(0))
    found = _with_statistics(functions.apply, params, statistics, inputs)
    return dataclasses.replace(found, module=functions.module)


def _of_linen(module: Any, variables: Any, inputs: tuple[PyTree, ...]) -> FullNetwork:
    from prunex_jax.models import functions_of, split_variables

    if "params" not in variables:
        raise UserError(
            f"the variables have no params, but {', '.join(variables) or 'nothing'}; "
            "give what module.init returned"
        )
    params, collections = split_variables(variables)
    apply = functions_of(module, *inputs).apply
    return _with_statistics(apply, params, collections, inputs)


def _with_statistics(
    apply: Callable[..., PyTree],
    params: PyTree,
    statistics: PyTree,
    inputs: tuple[PyTree, ...],
) -> FullNetwork:
    """Leaves out statistics where there are none."""
    if jax.tree.leaves(statistics):
        return FullNetwork(apply, params, statistics, inputs)
    return FullNetwork(
        lambda params, *inputs: apply(params, statistics, *inputs), params, None, inputs
    )


def _haiku_apply(network: Any, has_state: bool) -> Callable[..., PyTree] | None:
    """The function of what Haiku transformed; None if it is none of it."""
    haiku = sys.modules.get("haiku")
    if haiku is None:
        return None
    if isinstance(network, haiku.Transformed):
        return lambda params, *inputs: network.apply(params, None, *inputs)
    if not isinstance(network, haiku.TransformedWithState):
        return None
    if not has_state:
        raise UserError("hk.transform_with_state has a state: give it as statistics=")
    return lambda params, state, *inputs: network.apply(params, state, None, *inputs)[0]


def trees_of(params: PyTree, statistics: PyTree | None) -> tuple[PyTree, ...]:
    """What functions take before their inputs: parameters, and statistics if any."""
    return (params,) if statistics is None else (params, statistics)


def in_float32(tree: PyTree) -> PyTree:
    """Floating arrays of fewer bits as float32, what else there is as it was."""

    def wide(leaf: Any) -> Any:
        dtype = jnp.result_type(leaf)
        is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return leaf.astype(jnp.float32) if is_narrow else leaf

    return jax.tree.map(wide, tree)
