"""Networks of this package, cut and compared by way of `Cut`."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree
from prunex_jax.channels import ChannelTrace, trace_channels
from prunex_jax.shrink.certificate import Certificate, certify
from prunex_jax.shrink.cut import Cut

# Brings Flax, which shrinking functions of others does not need.
if TYPE_CHECKING:
    from prunex_jax.models import Model


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A trained network: what to call, and what with.

    Attributes:
      model: The functions and the widths.
      params: Parameters of those widths.
      statistics: Running statistics of those widths.
    """

    model: "Model"
    params: PyTree
    statistics: PyTree

    def logits(self, inputs: PyTree) -> Any:
        """What it answers; of images, logits float32[n, classes]."""
        return self.model.apply(self.params, self.statistics, inputs)

    def masked(self, cut: Cut) -> "Network":
        """The same network with dead channels set to zero."""
        return dataclasses.replace(self, params=cut.mask(self.params))

    def shrunk(self, cut: Cut) -> "Network":
        """The network of the widths that are left; it computes what `masked` does.

        Raises:
          UserError: The cut is that of another network.
        Example:
          >>> import numpy as np
          >>> from prunex_jax.channels import trace_channels
          >>> from prunex_jax.models import Form, VggSpec, make_vgg
          >>> from prunex_jax.shrink import make_cut
          >>> model = make_vgg('one', VggSpec(((8,),), ()), Form(), (4, 4, 1), 10)
          >>> trees = jax.jit(model.init)(jax.random.key(0))
          >>> images = jnp.ones((1, 4, 4, 1))
          >>> trace = trace_channels(model.apply, trees[0], images, statistics=trees[1])
          >>> masks = {trace.groups[0].name: np.arange(8) % 2 == 0}
          >>> cut, network = make_cut(trace, masks, *trees), Network(model, *trees)
          >>> network.shrunk(cut).params['features']['0']['conv']['kernel'].shape
          (3, 3, 1, 4)
          >>> shrink_error(network.masked(cut), network.shrunk(cut), images) < 1e-5
          True
        """
        params = cut.take(self.params)
        statistics = cut.take_statistics(self.statistics)
        return Network(self.model.after(cut), params, statistics)


def trace_model(model: "Model") -> ChannelTrace:
    """Finds the channel groups of one of our models, without making parameters."""
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    return trace_channels(model.apply, params, model.example(), statistics=statistics)


def shrink_error(masked: Network, shrunk: Network, inputs: PyTree) -> float:
    """Largest absolute difference between the answers of two networks.

    Args:
      masked: Full widths with dead channels.
      shrunk: Cut widths.
      inputs: What both are given.
    Returns:
      max |masked - shrunk| over examples and all that is answered.
    """
    given = jax.tree.map(jnp.asarray, inputs)
    answers = jax.jit(masked.logits)(given), jax.jit(shrunk.logits)(given)
    differences = jax.tree.map(
        lambda one, other: jnp.max(jnp.abs(one - other)), *answers
    )
    return float(max(jax.tree.leaves(differences)))


def certify_networks(
    masked: Network, shrunk: Network, cut: Cut, inputs: PyTree
) -> Certificate:
    """Compares two networks of this package.

    Activations are computed in float32 also where the network uses bfloat16: what is to
    be proven is that the cut is exact, and bfloat16 would round that away.

    Args:
      masked: Full widths with dead channels.
      shrunk: Cut widths.
      cut: What was cut out.
      inputs: What both are given.
    Returns:
      The errors of logits and of gradients.
    """

    def logits(network: Network, params: PyTree, inputs: PyTree) -> PyTree:
        model = network.model.in_float32()
        return model.apply(params, network.statistics, inputs)

    return certify(
        functools.partial(logits, masked),
        functools.partial(logits, shrunk),
        masked.params,
        shrunk.params,
        [inputs],
        cut.take,
    )
