"""Takes networks as people have them: modules of any framework, or functions.

Only the packages of what is given are imported.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError, one_line
from prunex_jax.base.trees import PyTree, flatten_by_path, nested_by_path
from prunex_jax.models.base import Functions, Model

# Names by which Linen modules are told whether they train, and what they are told then.
_TRAINING = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
# What `Functions.apply_train` is given beside arrays.
_Key = jax.Array | None
_Axis = str | None


def own_model(given: Any, example: PyTree) -> Model:
    """Makes a network of the user's own one that the trainer takes.

    Args:
      given: A Flax NNX module, which starts from the parameters that it has, or its
        class, or a function of `nnx.Rngs` that makes one; a Linen module; an Equinox
        module, which takes one example and starts from the parameters that it has; a
        PyTorch module, which starts from those that it has; or a pair (init, apply) of
        `init(key) -> params` and `apply(params, inputs)`, which in training is given
        `key` and `axis_name`, if it has these parameters.
      example: Arrays, or their shapes and types: a batch of one example, as the
        network reads it.
    Raises:
      UserError: It is none of these, has a state of Equinox or parameters that are no
        floats, cannot be called with the example, or answers otherwise in training.
    Example:
      >>> def init(key):
      ...     return {'w': jax.random.normal(key, (4, 2))}
      >>> model = own_model((init, lambda params, x: x @ params['w']), jnp.ones((1, 4)))
      >>> params, statistics = jax.eval_shape(model.init, jax.random.key(0))
      >>> jax.eval_shape(model.apply, params, statistics, model.example(8)).shape
      (8, 2)
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), example)
    model = Model(functions_of(given, shapes))
    try:
        arrays = jax.eval_shape(model.init, jax.random.key(0))
        _check_floats(model.functions.name, arrays[0])
        answers = jax.eval_shape(model.apply, *arrays, model.example(2))
        key = jax.random.key(0) if model.is_random else None
        train = functools.partial(model.apply_train, key=key)
        in_training, _ = jax.eval_shape(train, *arrays, model.example(2))
    except UserError:
        raise
    except Exception as error:
        reads = ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(shapes))
        raise UserError(
            f"model={model.functions.name} cannot be called with a batch of {reads}: "
            f"{one_line(error, 300)}"
        ) from error
    wanted: Any = jax.tree.structure(answers)
    if jax.tree.structure(in_training) != wanted:
        raise UserError(
            f"model={model.functions.name} answers {jax.tree.structure(in_training)} "
            f"in training and {wanted} in evaluation, and one loss is for both; let it "
            "answer alike, without what is for training only"
        )
    return model


def _check_floats(name: str, params: PyTree) -> None:
    """Refuses parameters without a gradient, such as quantised weights."""
    for path, leaf in flatten_by_path(params).items():
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise UserError(
                f"parameter {path!r} of model={name} is {leaf.dtype} and cannot be "
                "trained; let the function hold it, or keep it beside the parameters, "
                "such as in a variable of Flax that is no parameter"
            )


def nnx_model(
    name: str,
    make: Callable[[str, Any], Any],
    dtype: str,
    example: PyTree,
    **known: Any,
) -> Model:
    """Makes a model of an NNX module of ours.

    Args:
      name: What people call it.
      make: (type of activations, `nnx.Rngs`) -> the module.
      dtype: Type of activations.
      example: Shapes and types of a batch of one example.
      **known: Fields of `Functions` for what is known of the module.
    """

    def functions(dtype: str) -> Functions:
        module_of = functools.partial(make, dtype)
        return dataclasses.replace(_of_nnx(module_of, (example,)), name=name, **known)

    rounded = dtype != "float32"
    in_float32 = (lambda: functions("float32")) if rounded else None
    return Model(dataclasses.replace(functions(dtype), in_float32=in_float32))


def functions_of(given: Any, *inputs: PyTree) -> Functions:
    """The functions of a network; `apply` takes as many inputs as are given here.

    Args:
      given: As `own_model` takes it.
      *inputs: What it is called with, or shapes and types of that.
    Raises:
      UserError: It is no network, or has a state of Equinox.
    """
    if isinstance(given, tuple) and len(given) == 2 and all(map(callable, given)):
        return _of_pair(*given, inputs)
    equinox = sys.modules.get("equinox")
    if equinox is not None and _has_equinox_state(given, equinox):
        raise UserError(
            "layers of Equinox with a state, such as BatchNorm, are not trained: use "
            "LayerNorm or GroupNorm instead, or give a pair (init, apply) of "
            "functions"
        )
    kinds = {
        "flax.nnx": _of_nnx,
        "flax.linen": _of_linen,
        "equinox": _of_equinox,
        "torch.nn": _of_pytorch,
    }
    for name, make in kinds.items():
        package = sys.modules.get(name)
        if package is not None and isinstance(given, package.Module):
            return make(given, inputs)
    torch = sys.modules.get("torch.nn")
    if torch and isinstance(given, type) and issubclass(given, torch.Module):
        raise UserError(
            f"model={_name_of(given)} is a class of PyTorch; give an object of it, "
            "with the weights to start from"
        )
    if callable(given):
        return _of_nnx(given, inputs)
    raise UserError(
        f"model={given!r} is no network: give a Flax NNX or Linen module, a module of "
        "Equinox or PyTorch, or a pair (init, apply) of functions"
    )


def _of_pair(
    init: Callable[[jax.Array], PyTree],
    apply: Callable[..., PyTree],
    examples: tuple[PyTree, ...],
) -> Functions:
    names = _parameters_of(apply)

    def call(params: PyTree, statistics: PyTree, *inputs: PyTree) -> PyTree:
        del statistics
        return apply(params, *inputs)

    def train(
        params: PyTree, statistics: PyTree, inputs: PyTree, key: _Key, axis_name: _Axis
    ) -> tuple[PyTree, PyTree]:
        given = {"key": key, "axis_name": axis_name}
        told = {name: value for name, value in given.items() if name in names}
        return apply(params, inputs, **told), statistics

    return Functions(
        name=getattr(apply, "__name__", "functions"),
        init=lambda key: (init(key), {}),
        apply=call,
        apply_train=train,
        is_random="key" in names,
        example=_one_or_all(examples),
    )


def _of_nnx(given: Any, examples: tuple[PyTree, ...]) -> Functions:
    """Functions of a Flax NNX module, its class, or what makes one of `nnx.Rngs`."""
    from flax import nnx

    is_made = isinstance(given, nnx.Module)

    def parts(key: jax.Array) -> tuple[Any, ...]:
        module = given if is_made else given(nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise UserError(
                f"model={_name_of(given)} is no network: of nnx.Rngs it makes "
                f"{type(module).__name__}; give a class of nnx.Module, or its object"
            )
        split: tuple[Any, ...] = nnx.split(module, nnx.Param, nnx.BatchStat, ...)
        return split

    def init(key: jax.Array) -> tuple[PyTree, PyTree]:
        _, params, statistics, _ = parts(key)
        return _to_tree(params), _to_tree(statistics)

    abstract = nnx.eval_shape(lambda: nnx.merge(*parts(jax.random.key(0))))
    split: Any = nnx.split(abstract, nnx.Param, nnx.BatchStat, ...)
    graph = split[0]
    # Random streams and the like, which are no parameters.
    rest = nnx.to_pure_dict(split[3])
    if jax.tree.leaves(rest):
        rest = jax.jit(lambda key: nnx.to_pure_dict(parts(key)[3]))(jax.random.key(0))

    def module_of(params: PyTree, statistics: PyTree, rest: PyTree) -> Any:
        known = map(nnx.restore_int_paths, (params, statistics))
        states: Any = map(nnx.State, (*known, rest))
        return nnx.merge(graph, *states)

    def apply(params: PyTree, statistics: PyTree, *inputs: PyTree) -> PyTree:
        module = module_of(params, statistics, rest)
        module.eval()
        return module(*inputs)

    def train(
        params: PyTree, statistics: PyTree, inputs: PyTree, key: _Key, axis_name: _Axis
    ) -> tuple[PyTree, PyTree]:
        drawn = rest if key is None else _with_keys(rest, key)
        module = module_of(params, statistics, drawn)
        module.train()
        if axis_name is not None:
            norms: Any = [m for _, m in nnx.iter_modules(module) if _is_batch_norm(m)]
            for norm in norms:
                norm.axis_name = axis_name
        answers = module(inputs)
        return answers, _to_tree(nnx.state(module, nnx.BatchStat))

    is_random = any(map(_is_key, jax.tree.leaves(rest)))
    example = _one_or_all(examples)
    return Functions(_name_of(given), init, apply, train, is_random, example)


def _one_or_all(examples: tuple[PyTree, ...]) -> PyTree:
    return examples[0] if len(examples) == 1 else examples


def _is_batch_norm(module: Any) -> bool:
    """Whether a layer of Flax takes statistics of a batch, over a mesh axis if told."""
    return hasattr(module, "axis_name") and hasattr(module, "use_running_average")


def _to_tree(state: Any) -> PyTree:
    """Turns NNX state into nested dicts; positions in lists become string keys."""
    from flax import nnx

    def with_string_keys(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {str(key): with_string_keys(value) for key, value in tree.items()}

    return with_string_keys(nnx.to_pure_dict(state))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _with_keys(state: PyTree, key: jax.Array) -> PyTree:
    """Random streams, of which several may have one name, with keys of their own."""
    leaves, structure = jax.tree.flatten(state)
    for number, leaf in enumerate(leaves):
        if _is_key(leaf):
            leaves[number] = jax.random.split(
                jax.random.fold_in(key, number), leaf.shape
            )
    return jax.tree.unflatten(structure, leaves)


def _of_linen(given: Any, examples: tuple[PyTree, ...]) -> Functions:
    from flax import linen as nn

    told = {
        name: value
        for name, value in _TRAINING.items()
        if name in _parameters_of(given.__call__)
    }
    untold = {name: not value for name, value in told.items()}
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), examples)

    def init(key: jax.Array) -> tuple[PyTree, PyTree]:
        return split_variables(given.init(key, *zeros, **untold))

    def apply(params: PyTree, statistics: PyTree, *inputs: PyTree) -> PyTree:
        return given.apply({"params": params, **statistics}, *inputs, **untold)

    def train(
        params: PyTree, statistics: PyTree, inputs: PyTree, key: _Key, axis_name: _Axis
    ) -> tuple[PyTree, PyTree]:
        variables = {"params": params, **statistics}
        with nn.intercept_methods(_over_axis(axis_name)):
            answers, changed = given.apply(
                variables,
                inputs,
                **told,
                rngs={"dropout": key},
                mutable=list(statistics),
            )
        return answers, dict(changed)

    # Whether it draws cannot be seen; a key that is not used costs nothing.
    example = _one_or_all(examples)
    return Functions(type(given).__name__, init, apply, train, True, example)


def split_variables(variables: Any) -> tuple[PyTree, PyTree]:
    """Parameters of a Linen module, and its other collections.

    They are plain arrays: boxes that say how an array is laid out over a mesh of the
    user's are taken off, as ours is another one.
    """
    from flax import linen as nn

    plain = dict(nn.meta.unbox(variables))
    return plain.pop("params", {}), plain


def _over_axis(axis_name: str | None) -> Callable[..., Any]:
    """What makes batch norms of Linen take statistics over a mesh axis, too."""

    def call(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if axis_name is None or not _is_batch_norm(module):
            return method(*args, **kwargs)
        before = module.axis_name
        # Modules of Linen are frozen, and made anew in every pass from their settings.
        object.__setattr__(module, "axis_name", axis_name)
        try:
            return method(*args, **kwargs)
        finally:
            object.__setattr__(module, "axis_name", before)

    return call


def _has_equinox_state(given: Any, eqx: Any) -> bool:
    """Whether a layer reads a state, or the state itself was given."""
    kinds = (eqx.nn.StateIndex, eqx.nn.State)
    if not isinstance(given, tuple | eqx.Module):
        return False
    leaves = jax.tree.leaves(given, is_leaf=lambda x: isinstance(x, kinds))
    return any(isinstance(leaf, kinds) for leaf in leaves)


def _of_equinox(given: Any, examples: tuple[PyTree, ...]) -> Functions:
    import equinox as eqx

    arrays, static = eqx.partition(given, eqx.is_inexact_array)
    paths = tuple(flatten_by_path(arrays))
    structure = jax.tree.structure(arrays)
    is_random = "key" in _parameters_of(type(given).__call__)

    def module_of(params: PyTree) -> Any:
        found = flatten_by_path(params)
        leaves = [found[path] for path in paths]
        return eqx.combine(jax.tree.unflatten(structure, leaves), static)

    def init(key: jax.Array) -> tuple[PyTree, PyTree]:
        del key
        return nested_by_path(flatten_by_path(arrays)), {}

    def apply(params: PyTree, statistics: PyTree, *inputs: PyTree) -> PyTree:
        del statistics
        module = eqx.nn.inference_mode(module_of(params))
        return jax.vmap(module)(*inputs)

    def train(
        params: PyTree, statistics: PyTree, inputs: PyTree, key: _Key, axis_name: _Axis
    ) -> tuple[PyTree, PyTree]:
        del axis_name
        module = eqx.nn.inference_mode(module_of(params), value=False)
        if key is None:
            return jax.vmap(module)(inputs), statistics
        count = jax.tree.leaves(inputs)[0].shape[0]
        keys = jax.random.split(key, count)
        return jax.vmap(lambda x, key: module(x, key=key))(inputs, keys), statistics

    example = _one_or_all(examples)
    return Functions(type(given).__name__, init, apply, train, is_random, example)


def _of_pytorch(given: Any, examples: tuple[PyTree, ...]) -> Functions:
    """Functions of a PyTorch module."""
    from prunex_jax.models.pytorch import functions_of_module

    return functions_of_module(given, examples)


def _parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _name_of(given: Any) -> str:
    return getattr(given, "__name__", type(given).__name__)
