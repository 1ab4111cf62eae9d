"""A network as pure functions over plain trees, with every width written down.

Flax NNX builds the networks and stays behind this border, so that channels, methods,
checkpoints and shrinking see trees only.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx

from prunex_jax.base.trees import PyTree
from prunex_jax.models.layers import STATISTICS_DECAY, Convolution, Pass


class ModelSpec(Protocol):
    """Every width of a network; a shrunk network is the same class with another spec.

    Implementations are frozen dataclasses of numbers, strings and tuples, so that they
    hash, compare and print.
    """

    @property
    def smallest_side(self) -> int:
        """Height and width that images must at least have."""
        ...

    def make_network(
        self, image_shape: tuple[int, int, int], num_classes: int, rngs: nnx.Rngs
    ) -> nnx.Module:
        """Builds the module, with parameters drawn from `rngs`.

        The module is called with images, float[n, h, w, c], and a `Pass`, and returns
        logits, float32[n, num_classes].
        """
        ...

    def with_widths_of(self, params: PyTree) -> Self:
        """Returns the same network with the widths that the parameters have."""
        ...


class AnyModel(Protocol):
    """A network as the trainer knows it: pure functions over two trees.

    Parameters and statistics are trees of arrays; statistics are what changes without
    gradients, such as running means, and {} where there are none. Functions are called
    with the examples of one device, inside of `shard_map` in training. Two models are
    equal if they compute the same.
    """

    @property
    def is_random(self) -> bool:
        """Whether training draws numbers, as dropout does."""
        ...

    def example(self, count: int = 1) -> PyTree:
        """Shapes and types of what so many examples are to the network."""
        ...

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Draws parameters, and makes fresh statistics."""
        ...

    def apply(self, params: PyTree, statistics: PyTree, inputs: PyTree) -> PyTree:
        """Answers in evaluation, every example alone."""
        ...

    def apply_train(
        self,
        params: PyTree,
        statistics: PyTree,
        inputs: PyTree,
        axis_name: str | None = None,
        key: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Answers in training, and the statistics after them."""
        ...

    def reestimate(
        self,
        params: PyTree,
        statistics: PyTree,
        inputs: PyTree,
        num_seen: jax.Array,
        axis_name: str | None = None,
    ) -> PyTree:
        """Adds one batch to statistics that are a plain mean over batches."""
        ...

    def after(self, cut: Any) -> "AnyModel":
        """The network that is left after a `shrink.Cut`."""
        ...

    def in_float32(self) -> "AnyModel":
        """The same network with activations that are not rounded further."""
        ...


@dataclasses.dataclass(frozen=True)
class Model:
    """A network: a specification, and pure functions over two trees.

    Parameters and statistics are nested dicts with string keys, float32; leaves are
    named as in `blocks/0/conv1/kernel`. Kernels are float32[kh, kw, c_in, c_out] for
    convolutions and float32[c_in, c_out] for dense layers. Statistics are the running
    means and variances of batch norm; `layers` states their policy across devices.

    Attributes:
      spec: Every width of the network.
      image_shape: Height, width and channels of one image.
      num_classes: Number of logits.
      compute_dtype: float32 or bfloat16, for activations inside the network.
      convolution: How convolutions are formulated in training, see `layers.Conv`.

    Example:
      >>> from prunex_jax.models.settings import ModelConfig
      >>> from prunex_jax.models import make_model
      >>> model = make_model(ModelConfig(name='resnet20'), (32, 32, 3), 10)
      >>> params, statistics = jax.eval_shape(model.init, jax.random.key(0))
      >>> params['blocks']['0']['conv1']['kernel'].shape
      (3, 3, 16, 16)
    """

    spec: ModelSpec
    image_shape: tuple[int, int, int]
    num_classes: int
    compute_dtype: str = "float32"
    convolution: Convolution = "direct"

    is_random = False

    def example(self, count: int = 1) -> jax.ShapeDtypeStruct:
        """Shape and type of so many images, for tracing."""
        return jax.ShapeDtypeStruct((count, *self.image_shape), jnp.float32)

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Draws parameters and makes fresh statistics.

        Works under `jax.jit` and `jax.eval_shape`, so that parameters can be counted
        without being made, and born where they will live.
        """
        parts: Any = nnx.split(self._network(key), nnx.Param, nnx.BatchStat)
        _, params, statistics = parts
        return to_tree(params), to_tree(statistics)

    def apply(self, params: PyTree, statistics: PyTree, images: jax.Array) -> jax.Array:
        """Computes logits with running statistics, for evaluation and tracing.

        Every image is treated alone. The trace has ordinary primitives only: the
        convolutions with their own derivative rule belong to training.

        Args:
          params: As made by `init`, or shrunk if the spec is.
          statistics: As made by `init`.
          images: float[n, h, w, c], any number of images.
        Returns:
          Logits, float32[n, num_classes].
        """
        how = Pass(is_training=False, dtype=self.compute_dtype)
        network: Any = self._merge(params, statistics)
        return network(images, how)

    def apply_train(
        self,
        params: PyTree,
        statistics: PyTree,
        images: jax.Array,
        axis_name: str | None = None,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, PyTree]:
        """Computes logits with batch statistics, and the new running statistics.

        Args:
          params: As made by `init`, or shrunk if the spec is.
          statistics: As made by `init`; running statistics before this batch.
          images: float[n, h, w, c]; the images of one device inside `shard_map`.
          axis_name: Mesh axis whose devices share batch statistics; None keeps to the
            images at hand.
          key: Not needed.
        Returns:
          Logits, float32[n, num_classes], and statistics after this batch.
        Collectives:
          None without `axis_name`. With it, one mean over that axis per batch norm of
          float32[2, channels], and its transpose in the backward pass.
        """
        del key
        how = Pass(
            is_training=True,
            dtype=self.compute_dtype,
            convolution=self.convolution,
            axis_name=axis_name,
        )
        network: Any = self._merge(params, statistics)
        logits = network(images, how)
        return logits, to_tree(nnx.state(network, nnx.BatchStat))

    def reestimate(
        self,
        params: PyTree,
        statistics: PyTree,
        images: jax.Array,
        num_seen: jax.Array,
        axis_name: str | None = None,
    ) -> PyTree:
        """Adds one batch to statistics that are a plain mean over batches.

        Running statistics are those of networks on the way; a network that is a mean of
        others, as a consensus is, has none of its own before it has seen some images.

        Args:
          params: As for `apply_train`.
          statistics: Mean over the batches seen before.
          images: float[n, h, w, c], as for `apply_train`.
          num_seen: int32[], number of those batches; 0 drops `statistics`.
          axis_name: As for `apply_train`.
        Returns:
          Statistics, mean over all batches.
        Collectives:
          As `apply_train`.
        """
        # From nothing, running statistics move by a fixed share of the batch's own.
        nothing = jax.tree.map(jnp.zeros_like, statistics)
        _, moved = self.apply_train(params, nothing, images, axis_name)
        fresh = jax.tree.map(lambda x: x / (1 - STATISTICS_DECAY), moved)
        return mean_with(statistics, fresh, num_seen)

    def with_widths_of(self, params: PyTree) -> "Model":
        """Returns the network that shrunk parameters belong to."""
        return dataclasses.replace(self, spec=self.spec.with_widths_of(params))

    def after(self, cut: Any) -> "Model":
        """Returns the network that is left after a `shrink.Cut`."""
        params, _ = jax.eval_shape(self.init, jax.random.key(0))
        return self.with_widths_of(jax.eval_shape(cut.take, params))

    def in_float32(self) -> "Model":
        """Returns the network without bfloat16."""
        return dataclasses.replace(self, compute_dtype="float32")

    @functools.cached_property
    def _graph(self) -> Any:
        abstract = nnx.eval_shape(lambda: self._network(jax.random.key(0)))
        return nnx.split(abstract, nnx.Param, nnx.BatchStat)[0]

    def _network(self, key: jax.Array) -> nnx.Module:
        rngs = nnx.Rngs(params=key)
        return self.spec.make_network(self.image_shape, self.num_classes, rngs)

    def _merge(self, params: PyTree, statistics: PyTree) -> nnx.Module:
        return nnx.merge(
            self._graph,
            nnx.State(from_tree(params)),
            nnx.State(from_tree(statistics)),
        )


def mean_with(statistics: PyTree, fresh: PyTree, num_seen: jax.Array) -> PyTree:
    """Adds the statistics of one batch to their plain mean over batches.

    Args:
      statistics: Mean over the batches seen before.
      fresh: Those of the batch.
      num_seen: int32[], number of the batches before; 0 drops `statistics`.
    """
    share = 1 / (num_seen + 1)
    mixed = jax.tree.map(
        lambda old, new: (1 - share) * old + share * new,
        to_moments(statistics),
        to_moments(fresh),
    )
    return from_moments(mixed)


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
    """Applies fn(mean, var) to what is beside each other under these names."""
    if not isinstance(tree, Mapping):
        return tree
    if {"mean", "var"} <= tree.keys():
        return {**tree, "var": fn(tree["mean"], tree["var"])}
    return {key: _map_variances(fn, part) for key, part in tree.items()}


def to_tree(state: Any) -> PyTree:
    """Turns NNX state into nested dicts; positions in lists become string keys."""

    def with_string_keys(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {str(key): with_string_keys(value) for key, value in tree.items()}

    return with_string_keys(nnx.to_pure_dict(state))


def from_tree(tree: PyTree) -> PyTree:
    """Undoes the string keys of `to_tree`."""
    if not isinstance(tree, dict):
        return tree
    return {
        int(key) if key.isdigit() else key: from_tree(value)
        for key, value in tree.items()
    }
