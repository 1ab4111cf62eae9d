"""Cuts dead channels out of a trained network, and proves that nothing changed.

Parameters and statistics lose the channels that masks call dead, the network is built
again with the widths that are left, and its outputs are compared with the masked ones.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from prunex_jax.channels import (
    ChannelGroup,
    layouts_of,
    mask_channels,
    take_channels,
)
from prunex_jax.models import Model
from prunex_jax.trees import PyTree, flatten_by_path


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A trained network: what to call, and what with.

    Attributes:
      model: The functions and the widths.
      params: Parameters of those widths.
      statistics: Running statistics of those widths.
    """

    model: Model
    params: PyTree
    statistics: PyTree

    def logits(self, images: jax.Array) -> jax.Array:
        """Logits of images, float32[n, classes]."""
        return self.model.apply(self.params, self.statistics, images)


def shrink_network(
    network: Network,
    groups: Sequence[ChannelGroup],
    masks: Mapping[str, Any],
) -> tuple[Network, Network]:
    """Cuts the channels out that masks call dead.

    Args:
      network: Full widths; need not be masked.
      groups: Channel groups of the network.
      masks: bool[size] per group, True where kept; groups without one stay whole.
    Returns:
      The masked network of full widths, and the shrunk one; they compute the same.
    Example:
      >>> from prunex_jax.channels import trace_channels
      >>> from prunex_jax.config import ModelConfig
      >>> from prunex_jax.models import make_model
      >>> model = make_model(ModelConfig(name='resnet20'), (8, 8, 1), 10)
      >>> params, statistics = jax.jit(model.init)(jax.random.key(0))
      >>> images = jnp.ones((1, 8, 8, 1))
      >>> groups = trace_channels(model.apply, params, images,
      ...                         statistics=statistics).groups
      >>> masks = {groups[0].name: np.arange(groups[0].size) % 2 == 0}
      >>> masked, small = shrink_network(Network(model, params, statistics), groups,
      ...                                masks)
      >>> small.params['stem']['conv']['kernel'].shape
      (3, 3, 1, 8)
      >>> shrink_error(masked, small, images) < 1e-5
      True
    """
    full = {
        g.name: jnp.asarray(masks.get(g.name, np.ones(g.size, bool))) for g in groups
    }
    keep = {name: jnp.asarray(np.flatnonzero(mask)) for name, mask in full.items()}
    params_layouts = layouts_of(groups, _shapes(network.params))
    statistics_layouts = layouts_of(groups, _shapes(network.statistics), "statistics")
    masked = dataclasses.replace(
        network, params=mask_channels(network.params, params_layouts, full)
    )
    params = take_channels(network.params, params_layouts, keep)
    statistics = take_channels(network.statistics, statistics_layouts, keep)
    return masked, Network(network.model.with_widths_of(params), params, statistics)


def shrink_error(masked: Network, shrunk: Network, images: ArrayLike) -> float:
    """Largest absolute difference between the logits of two networks.

    Args:
      masked: Full widths with dead channels.
      shrunk: Cut widths.
      images: What both are given, float[n, h, w, c].
    Returns:
      max |masked - shrunk| over images and classes.
    """
    given = jnp.asarray(images)
    difference = jax.jit(masked.logits)(given) - jax.jit(shrunk.logits)(given)
    return float(jnp.max(jnp.abs(difference)))


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in flatten_by_path(tree).items()}
