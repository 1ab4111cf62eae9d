"""Names, reads and replaces leaves of a tree by path.

A path joins the keys from the root with `/`: `blocks/0/conv1/kernel`. Paths are the
only names by which channel groups, filters and reports refer to parameters, so that any
tree of dicts, lists, tuples and dataclasses works. It sits left of everything else.
"""

from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import numpy as np

PyTree = Any
# The last key of an array in a state of NNX.
_VALUE = jax.tree_util.GetAttrKey("value")


def path_of(key_path: tuple[Any, ...]) -> str:
    """Joins a jax key path into one readable path.

    A state of NNX has variables with a `value` where its pure form has arrays: both are
    the same parameter.

    Example:
      >>> from jax.tree_util import DictKey, GetAttrKey, SequenceKey
      >>> path_of((DictKey('blocks'), SequenceKey(0)))
      'blocks/0'
      >>> path_of((DictKey('kernel'), GetAttrKey('value')))
      'kernel'
    """
    *_, above, last = (None, None, *key_path)
    if isinstance(above, jax.tree_util.DictKey) and last == _VALUE:
        key_path = key_path[:-1]
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def flatten_by_path(tree: PyTree) -> dict[str, Any]:
    """Lists the leaves of a tree by path, in flattening order.

    Example:
      >>> flatten_by_path({'a': {'kernel': 1}, 'b': [2, 3]})
      {'a/kernel': 1, 'b/0': 2, 'b/1': 3}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_of(key_path): leaf for key_path, leaf in leaves}


def in_order(path: str) -> list[tuple[int, str]]:
    """Sorts paths such that numbers count: layer 10 is behind layer 9.

    Example:
      >>> sorted(['blocks/10/bias', 'blocks/9/kernel', 'blocks/9/bias'], key=in_order)
      ['blocks/9/bias', 'blocks/9/kernel', 'blocks/10/bias']
    """
    return [(int(key) if key.isdecimal() else 0, key) for key in path.split("/")]


def shapes_by_path(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Lists the shapes of the leaves of a tree by path, in flattening order.

    Args:
      tree: Leaves are arrays, numbers, or anything with a shape.
    Example:
      >>> import numpy as np
      >>> shapes_by_path({'a': {'kernel': np.ones((2, 3))}})
      {'a/kernel': (2, 3)}
    """
    return {path: np.shape(leaf) for path, leaf in flatten_by_path(tree).items()}


def map_with_path(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps `fn(path, leaf, *other_leaves)` over trees of one structure.

    Example:
      >>> map_with_path(lambda path, x: f'{path}={x}', {'a': {'b': 1}})
      {'a': {'b': 'a/b=1'}}
    """
    return jax.tree_util.tree_map_with_path(
        lambda key_path, *leaves: fn(path_of(key_path), *leaves), tree, *rest
    )


def nested_by_path(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Makes nested dicts of leaves by path; `flatten_by_path` undoes it.

    Example:
      >>> nested_by_path({'a/kernel': 1, 'a/bias': 2, 'b': 3})
      {'a': {'kernel': 1, 'bias': 2}, 'b': 3}
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *keys, last = path.split("/")
        part = tree
        for key in keys:
            part = part.setdefault(key, {})
        part[last] = leaf
    return tree


def named_by(path: str, names: Container[str]) -> str | None:
    """The longest of some paths that a path ends with, whole keys only; None if none.

    So trees that hold others name the leaves of those, as the moments of an optimizer
    name parameters.

    Example:
      >>> named_by('0/mu/head/kernel', {'head/kernel', 'kernel'})
      'head/kernel'
    """
    keys = path.split("/")
    ends = ("/".join(keys[start:]) for start in range(len(keys)))
    return next((name for name in ends if name in names), None)
