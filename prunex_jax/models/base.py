"""A network as pure functions over plain trees, whatever it was written with.

Flax and others build networks and stay behind this border, so that channels, methods,
checkpoints and shrinking see trees only. What is left of a network after a cut is found
by tracing its functions and doing their operations with fewer channels, so that nothing
has to be known of its layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree
from prunex_jax.mesh.varying import untyped

# What settings call networks that were given, with their names behind it.
_OWN = "own "
# Channel group -> positions that are left, or how many where that is all there is to
# know, as a value that can be compared.
_Kept = tuple[tuple[str, tuple[int, ...] | int], ...]


def is_own(name: str) -> bool:
    """Whether settings call a network by this name that was given.

    Example:
      >>> is_own('own Network'), is_own('resnet20')
      (True, False)
    """
    return name.startswith(_OWN)


@dataclasses.dataclass(frozen=True, eq=False)
class Functions:
    """What a network is made of.

    Parameters and statistics are trees of arrays; statistics are what changes without
    gradients, such as running means, and {} where there are none.

    Attributes:
      name: What people call it.
      init: key -> (parameters, statistics).
      apply: (parameters, statistics, *inputs) -> answers, every example alone; our
        networks, and those of the trainer, have one input.
      apply_train: (parameters, statistics, inputs, key, axis_name) -> (answers,
        statistics); `axis_name` as of `Model.apply_train`.
      is_random: Whether `apply_train` needs the key, which is None otherwise.
      example: Shapes and types of what a batch of one example is to the network.
      in_float32: Makes those of the same network with activations in float32; None
        where they are as they are.
      statistics_decay: Share of the old statistics that `apply_train` keeps, where it
        is known and the same for all.
      is_uniform: Whether it is known that channels of a group are computed alike. Then
        which of them are left makes no other network, but how many.
      module: The PyTorch module that they are of, as it was given; None for others.
    """

    name: str
    init: Callable[[jax.Array], tuple[PyTree, PyTree]]
    apply: Callable[..., PyTree]
    apply_train: Callable[..., tuple[PyTree, PyTree]]
    is_random: bool
    example: PyTree
    in_float32: Callable[[], "Functions"] | None = None
    statistics_decay: float | None = None
    is_uniform: bool = False
    module: Any = None


@dataclasses.dataclass(frozen=True)
class Model:
    """A network as the trainer knows it: functions, and what was cut out of them.

    Functions are called with the examples of one device, inside of `shard_map` in
    training. Of the networks of this package, parameters and statistics are nested
    dicts with string keys, float32; leaves are named as in `blocks/0/conv1/kernel`.
    Two models are equal if they are made of the same functions by cuts that leave the
    same.

    Attributes:
      functions: Those of the full network.
      kept: What every cut has left, for comparison.
      cuts: The cuts, `shrink.Cut`, first one first.

    Example:
      >>> from prunex_jax.models.settings import ModelConfig
      >>> from prunex_jax.models import make_model
      >>> model = make_model(ModelConfig(name='resnet20'), (32, 32, 3), 10)
      >>> params, statistics = jax.eval_shape(model.init, jax.random.key(0))
      >>> params['blocks']['0']['conv1']['kernel'].shape
      (3, 3, 16, 16)
    """

    functions: Functions
    kept: tuple[_Kept, ...] = ()
    cuts: tuple[Any, ...] = dataclasses.field(default=(), compare=False)

    @property
    def name(self) -> str:
        """What settings call it if it was given."""
        return f"{_OWN}{self.functions.name}"

    @property
    def is_random(self) -> bool:
        """Whether training draws numbers, as dropout does."""
        return self.functions.is_random

    def example(self, count: int = 1) -> PyTree:
        """Shapes and types of what so many examples are to the network."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype),
            self.functions.example,
        )

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Draws parameters, and makes fresh statistics, without what was cut out.

        Works under `jax.jit` and `jax.eval_shape`, so that parameters can be counted
        without being made, and born where they will live.
        """
        params, statistics = self.functions.init(key)
        for cut in self.cuts:
            params, statistics = cut.take(params), cut.take_statistics(statistics)
        return params, statistics

    def apply(self, params: PyTree, statistics: PyTree, inputs: PyTree) -> PyTree:
        """Answers in evaluation, with running statistics, every example alone."""
        return untyped(self._reduced(self.functions.apply))(params, statistics, inputs)

    def apply_train(
        self,
        params: PyTree,
        statistics: PyTree,
        inputs: PyTree,
        axis_name: str | None = None,
        key: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Answers in training, with statistics of the batch, and running ones after it.

        Args:
          params: As made by `init`.
          statistics: As made by `init`; those before this batch.
          inputs: The examples of one device inside `shard_map`.
          axis_name: Mesh axis whose devices share statistics of the batch; None keeps
            to the examples at hand.
          key: For what the network draws, if it does.
        Returns:
          Answers, and statistics after this batch.
        Collectives:
          None without `axis_name`. With it, those of the network's batch norms, and
          their transposes in the backward pass: of ours, one mean over that axis per
          batch norm of float32[2, channels].
        """
        function = functools.partial(self.functions.apply_train, axis_name=axis_name)
        train = self._reduced(function, returns_statistics=True)
        if axis_name is None:
            train = untyped(train)
        answered: tuple[PyTree, PyTree] = train(params, statistics, inputs, key)
        return answered

    def reestimate(
        self,
        params: PyTree,
        statistics: PyTree,
        inputs: PyTree,
        num_seen: jax.Array,
        axis_name: str | None = None,
    ) -> PyTree:
        """Adds one batch to statistics that are a plain mean over batches.

        Running statistics are those of networks on the way; a network that is a mean of
        others, as a consensus is, has none of its own before it has seen some examples.
        They are taken to be s <- m s + (1 - m) b, with the batch's own b and any m for
        each of them. Starting from 0 shows b where m is known; where it is not,
        starting from 1 as well shows both.

        Args:
          params: As for `apply_train`.
          statistics: Mean over the batches seen before.
          inputs: As for `apply_train`.
          num_seen: int32[], number of those batches; 0 drops `statistics`.
          axis_name: As for `apply_train`.
        Returns:
          Statistics, mean over all batches.
        Collectives:
          As `apply_train`.
        """
        key = jax.random.key(0) if self.is_random else None
        decay = self.functions.statistics_decay

        def moved(start: float) -> PyTree:
            from_there = jax.tree.map(lambda x: jnp.full_like(x, start), statistics)
            return self.apply_train(params, from_there, inputs, axis_name, key)[1]

        def own(old: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
            share = 1 - (high - low)
            return jnp.where(share > 0, low / jnp.where(share > 0, share, 1), old)

        if decay is None:
            fresh = jax.tree.map(own, statistics, moved(0.0), moved(1.0))
        else:
            fresh = jax.tree.map(lambda x: x / (1 - decay), moved(0.0))
        # Mean squares, and not variances, can be averaged.
        share = 1 / (num_seen + 1)
        mixed = jax.tree.map(
            lambda old, new: (1 - share) * old + share * new,
            to_moments(statistics),
            to_moments(fresh),
        )
        return from_moments(mixed)

    def after(self, cut: Any) -> "Model":
        """The network that is left after a `shrink.Cut`."""
        if all(mask.all() for mask in cut.masks.values()):
            return self
        is_uniform = self.functions.is_uniform
        kept = tuple(
            (name, len(at) if is_uniform else tuple(at.tolist()))
            for name, at in cut.keep_indices.items()
        )
        return dataclasses.replace(
            self, kept=(*self.kept, kept), cuts=(*self.cuts, cut)
        )

    def in_float32(self) -> "Model":
        """The network with activations in float32, where it is known how."""
        make = self.functions.in_float32
        return self if make is None else dataclasses.replace(self, functions=make())

    def _reduced(
        self, function: Callable[..., Any], **options: Any
    ) -> Callable[..., Any]:
        for cut in self.cuts:
            function = cut.function(function, **options)
        return function


def to_moments(statistics: PyTree) -> PyTree:
    """Replaces variances by mean squares, which can be averaged over any images.

    A mean of variances leaves out how far the means lie apart; that of mean squares
    does not, so batches and devices may see data that differ.

    Args:
      statistics: Nested dicts as made by `Model.init`; what is neither a mean nor a
        variance passes.
    Returns:
      The same tree; `from_moments` inverts it, up to rounding.
    Example:
      >>> one = {'norm': {'mean': jnp.array([1.0]), 'var': jnp.array([3.0])}}
      >>> float(to_moments(one)['norm']['var'][0])
      4.0
      >>> float(from_moments(to_moments(one))['norm']['var'][0])
      3.0
    """
    return _map_variances(lambda mean, var: var + mean * mean, statistics)


def from_moments(moments: PyTree) -> PyTree:
    """Variances from mean squares, not negative; see `to_moments`."""

    def variance(mean: jax.Array, square: jax.Array) -> jax.Array:
        return jnp.maximum(square - mean * mean, 0.0)

    return _map_variances(variance, moments)


def _map_variances(fn: Callable[..., jax.Array], tree: PyTree) -> PyTree:
    """Applies fn(mean, var) to what is beside each other under such names.

    They are `mean` and `var`, or end so and begin alike, as those of PyTorch's state
    dicts do: `norm.running_mean` and `norm.running_var`.
    """
    if not isinstance(tree, Mapping):
        return tree
    mapped = {key: _map_variances(fn, part) for key, part in tree.items()}
    for key in tree:
        mean = f"{key.removesuffix('var')}mean"
        if key.endswith("var") and mean in tree:
            mapped[key] = fn(tree[mean], tree[key])
    return mapped
