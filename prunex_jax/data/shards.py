"""Says which training examples belong to which host, where each has data of its own.

Shards are part of the data set, as the validation split is: `data.shuffle_seed` decides
them, and a run's seed only their order.
"""

import numpy as np
import numpy.typing as npt

from prunex_jax.base.errors import UserError
from prunex_jax.data.order import (
    SHARD_STREAM,
    Order,
    Positions,
    ShardedOrder,
    ShuffledOrder,
    permutation,
)
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.splits import Labels, Split

# Beyond these doubles overflow, and shards have long been of one class or all alike.
_ALPHA_RANGE = (1e-9, 1e9)


def make_order(split: Split, config: DataConfig, num_hosts: int, seed: int) -> Order:
    """The order of training examples that `data.shards` asks for.

    It maps positions of the endless stream to examples of the split, whose labels are
    read unless all hosts share it.
    """
    if config.shards == "iid":
        return ShuffledOrder(len(split), seed)
    check_shards(split, config, num_hosts)
    shards = make_shards(split.labels(), num_hosts, config)
    return ShardedOrder(shards, config.batch_size, seed)


def check_shards(split: Split, config: DataConfig, num_hosts: int) -> None:
    """Refuses shards that cannot be made, before anything is read."""
    if config.shards == "iid":
        return
    setting = f"config.data.shards={config.shards!r}"
    problem = split.why_no_labels()
    if problem:
        raise UserError(f"{setting} needs all labels before the first step, {problem}")
    if len(split) < num_hosts or config.batch_size % num_hosts:
        raise UserError(
            f"{setting} cannot give each of {num_hosts} hosts the same share of "
            f"{len(split)} examples and of data.batch_size={config.batch_size}: make "
            f"the batch a multiple of {num_hosts}, or use fewer hosts"
        )


def make_shards(labels: Labels, num_hosts: int, config: DataConfig) -> Positions:
    """Divides examples over hosts, in shards of equal size.

    Equal sizes keep the mean over hosts the mean over the data. Where they do not come
    out even, a remainder of less than one example per host, chosen at random, is left
    out of training.

        label_sorted   Sorted by label and cut: few classes per host, each with most or
                       all of its examples at one host.
        dirichlet      Host after host draws a mixture of classes from
                       Dirichlet(alpha) and then its examples by this mixture, without
                       replacement. A class that is used up leaves the
                       mixture, so the last host takes what the others have left.

    Which examples of a class go to which of its hosts is random.

    Args:
      labels: int32[num_examples].
      num_hosts: Number of shards.
      config: `shards`, `dirichlet_alpha` and `shuffle_seed` are used.
    Returns:
      int64[num_hosts, num_examples // num_hosts], disjoint, each row sorted; the same
      on every machine.
    References:
      McMahan et al., Communication-efficient learning of deep networks from
      decentralized data, 2017, arXiv:1602.05629 (shards of examples sorted by label).
      Hsu, Qi and Brown, Measuring the effects of non-identical data distribution for
      federated visual classification, 2019, arXiv:1909.06335 (mixtures of classes; its
      alpha is that of all classes together, here it is that of each, as is common).
      Reddi et al., Adaptive federated optimization, 2020, arXiv:2003.00295, appendix
      (classes that are used up leave the mixture).

    Example:
      >>> config = DataConfig(shards="label_sorted")
      >>> make_shards(np.array([1, 0, 1, 0]), 2, config).tolist()
      [[1, 3], [0, 2]]
    """
    size = len(labels) // num_hosts
    order = permutation(len(labels), SHARD_STREAM, config.shuffle_seed)
    order = order[: num_hosts * size]
    by_label = order[np.argsort(labels[order], kind="stable")]
    hosts = np.arange(num_hosts)
    if config.shards == "label_sorted":
        owners = np.repeat(hosts, size)
    else:
        counts = _dirichlet_counts(np.bincount(labels[order]), num_hosts, config)
        owners = np.repeat(np.tile(hosts, counts.shape[1]), counts.T.ravel())
    by_host = by_label[np.argsort(owners, kind="stable")]
    return np.sort(by_host.reshape(num_hosts, size), axis=1)


def _dirichlet_counts(
    stock: npt.NDArray[np.int64], num_hosts: int, config: DataConfig
) -> npt.NDArray[np.int64]:
    """Draws how many examples of every class each host has, int64[hosts, classes].

    Columns add up to `stock`, the examples of each class, and rows to the same number.

    Mixtures are kept as logarithms, because shares of small alpha underflow: a variable
    of Gamma(a) is one of Gamma(a + 1) times u^(1/a).
    """
    alpha = np.clip(config.dirichlet_alpha, *_ALPHA_RANGE)
    # A class of no examples counts as one of one, and never has room.
    concentration = alpha * len(stock) * np.maximum(stock, 1) / stock.sum()
    counts = np.zeros((num_hosts, len(stock)), np.int64)
    for host, taken in enumerate(counts):
        # numpy promises that this generator's numbers never change.
        random = np.random.RandomState([config.shuffle_seed % 2**32, host])
        logs = np.log(random.standard_gamma(concentration + 1))
        logs += np.log(1 - random.random_sample(len(stock))) / concentration
        left = stock - counts.sum(axis=0)
        while missing := stock.sum() // num_hosts - taken.sum():
            # Draws of a class beyond its last example are drawn again, from the others.
            room = left - taken
            weights = np.where(room > 0, logs, -np.inf)
            weights = np.exp(weights - weights.max())
            drawn = random.multinomial(missing, weights / weights.sum())
            taken += np.minimum(drawn, room)
    return counts
