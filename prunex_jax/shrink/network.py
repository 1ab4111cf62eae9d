"""Cuts dead channels out of a trained network, and proves that nothing changed.

Parameters and statistics lose the channels that masks call dead, the network is built
again with the widths that are left, and its outputs are compared with the masked ones.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from prunex_jax.base.trees import PyTree, shapes_by_path
from prunex_jax.channels import (
    ChannelGroup,
    layouts_of,
    mask_channels,
    take_channels,
)
from prunex_jax.models import Model
from prunex_jax.shrink.certificate import Certificate, certify
from prunex_jax.shrink.cut import check_masks


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
    Raises:
      UserError: A mask fits no group, or keeps no channel of its group.
    Example:
      >>> from prunex_jax.channels import trace_channels
      >>> from prunex_jax.models import VggSpec
      >>> model = Model(VggSpec(stages=((8,),), hidden=()), (4, 4, 1), 10)
      >>> params, statistics = jax.jit(model.init)(jax.random.key(0))
      >>> images = jnp.ones((1, 4, 4, 1))
      >>> groups = trace_channels(model.apply, params, images,
      ...                         statistics=statistics).groups
      >>> masks = {groups[0].name: np.arange(groups[0].size) % 2 == 0}
      >>> masked, small = shrink_network(Network(model, params, statistics), groups,
      ...                                masks)
      >>> small.params['features']['0']['conv']['kernel'].shape
      (3, 3, 1, 4)
      >>> shrink_error(masked, small, images) < 1e-5
      True
    """
    check_masks(groups, masks)
    known = {
        g.name: np.asarray(masks.get(g.name, np.ones(g.size, bool))) for g in groups
    }
    full = {name: jnp.asarray(mask) for name, mask in known.items()}
    keep = {name: jnp.asarray(np.flatnonzero(mask)) for name, mask in known.items()}
    params_layouts = layouts_of(groups, shapes_by_path(network.params))
    statistics_layouts = layouts_of(
        groups, shapes_by_path(network.statistics), "statistics"
    )

    @jax.jit  # one program instead of one per shape
    def cut(params: PyTree, statistics: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        return (
            mask_channels(params, params_layouts, full),
            take_channels(params, params_layouts, keep),
            take_channels(statistics, statistics_layouts, keep),
        )

    masked, params, statistics = cut(network.params, network.statistics)
    model = network.model.with_widths_of(params)
    return (
        dataclasses.replace(network, params=masked),
        Network(model, params, statistics),
    )


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


def certify_networks(
    masked: Network,
    shrunk: Network,
    groups: Sequence[ChannelGroup],
    masks: Mapping[str, Any],
    images: Any,
) -> Certificate:
    """Compares two networks of this package, from `shrink_network`.

    Activations are computed in float32 also where the network uses bfloat16: what is to
    be proven is that the cut is exact, and bfloat16 would round that away.

    Args:
      masked: Full widths with dead channels.
      shrunk: Cut widths.
      groups: Channel groups of the full network.
      masks: bool[size] per group; groups without one stay whole.
      images: float[n, h, w, c].
    Returns:
      The errors of logits and of gradients.
    """
    layouts = layouts_of(groups, shapes_by_path(masked.params))
    kept = {
        group.name: jnp.asarray(
            np.flatnonzero(masks.get(group.name, np.ones(group.size, bool)))
        )
        for group in groups
    }

    def function_of(network: Network) -> Callable[..., jax.Array]:
        model = dataclasses.replace(network.model, compute_dtype="float32")
        return lambda params, images: model.apply(params, network.statistics, images)

    return certify(
        function_of(masked),
        function_of(shrunk),
        masked.params,
        shrunk.params,
        [images],
        lambda tree: take_channels(tree, layouts, kept),
    )
