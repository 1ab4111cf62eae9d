"""Mixup and CutMix: training images of two examples, with a share of the loss for each.

Rows of a batch are mixed in pairs of neighbours, each with a share of its own. The
order of examples is random, so neighbours are any two; and both rows of a pair lie
close to each other, so that a process reads at most two rows more than its own.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from prunex_jax.data.order import MIXING_STREAM, Positions, uniforms
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.splits import Batch

# Entries of a batch: the labels of the other examples, int32[batch], and the share of
# the loss that the own label has, float32[batch].
OTHER_LABEL = "other_label"
LABEL_SHARE = "label_share"
# Names of the settings.
MIXING = ("mixup", "cutmix")
# Which of the two, share, row and column.
_NUM_DRAWS = 4


@dataclasses.dataclass(frozen=True)
class Mixing:
    """How the rows of training batches are mixed.

    Attributes:
      mixup: Shares are drawn from Beta(mixup, mixup); 0 for no mixup.
      cutmix: The same of CutMix; where both are positive, each row takes one or the
        other with equal chance.
      block: Neighbours are found in blocks of so many rows.

    References:
      Zhang et al., mixup: beyond empirical risk minimization, 2018, arXiv:1710.09412.
      Yun et al., CutMix: regularization strategy to train strong classifiers with
      localizable features, 2019, arXiv:1905.04899.
    """

    mixup: float
    cutmix: float
    block: int

    @classmethod
    def of(cls, config: DataConfig, num_hosts: int) -> "Mixing | None":
        """What the settings say; None where nothing is mixed.

        Where hosts have data of their own, pairs are of one host.
        """
        if not (config.mixup or config.cutmix):
            return None
        is_shared = config.shards == "iid"
        block = config.batch_size // (1 if is_shared else num_hosts)
        return cls(config.mixup, config.cutmix, block)

    def partners(self, rows: Positions) -> Positions:
        """The neighbours of rows; the last of an odd block is its own.

        Example:
          >>> Mixing(1.0, 0.0, block=5).partners(np.arange(10)).tolist()
          [1, 0, 3, 2, 4, 6, 5, 8, 7, 9]
        """
        blocks, within = np.divmod(rows, self.block)
        other = within ^ 1
        return blocks * self.block + np.where(other < self.block, other, within)

    def mixed(self, own: Batch, other: Batch, positions: Positions, seed: int) -> Batch:
        """Mixes each row with another.

        Args:
          own: `image`, float32[batch, h, w, c], and `label`, int32[batch].
          other: The same of the partners.
          positions: int64[batch], of the own rows in the endless stream: with the seed
            they decide all that is random.
          seed: Of the run.
        Returns:
          The batch with mixed images, `OTHER_LABEL` and `LABEL_SHARE`.
        """
        draws = uniforms(seed, positions, _NUM_DRAWS, MIXING_STREAM)
        cuts = self._cuts(draws[:, 0])
        shares = np.where(
            cuts, _shares(self.cutmix, draws[:, 1]), _shares(self.mixup, draws[:, 1])
        )
        images = own["image"].copy()
        for row, cut in enumerate(cuts.tolist()):
            mine, theirs = images[row], other["image"][row]
            if cut:
                area = _cut_in(mine, theirs, shares[row], draws[row, 2:])
                shares[row] = 1 - area
            else:
                mine *= np.float32(shares[row])
                mine += np.float32(1 - shares[row]) * theirs
        return {
            **own,
            "image": images,
            OTHER_LABEL: other["label"],
            LABEL_SHARE: shares.astype(np.float32),
        }

    def _cuts(self, draws: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        if self.mixup and self.cutmix:
            return draws < 0.5
        return np.full(draws.shape, bool(self.cutmix))


def _shares(alpha: float, draws: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Numbers from Beta(alpha, alpha) for numbers from the unit interval; 1 for 0."""
    # Imported here: it takes half a second, and few runs mix.
    from scipy.special import betaincinv

    found: npt.NDArray[np.float64] = np.ones_like(draws)
    return betaincinv(alpha, alpha, draws) if alpha else found


def _cut_in(
    mine: npt.NDArray[np.float32],
    theirs: npt.NDArray[np.float32],
    share: float,
    place: npt.NDArray[np.float64],
) -> float:
    """Puts a rectangle of the other image in its place; returns its share of the area.

    Its sides are sqrt(1 - share) of those of the image, and its centre lies anywhere,
    so that a part may be cut off.
    """
    height, width = mine.shape[:2]
    side = np.sqrt(1 - share)
    spans = []
    for length, draw in zip((height, width), place.tolist(), strict=True):
        centre, half = int(draw * length), int(side * length) // 2
        spans.append(slice(max(centre - half, 0), min(centre + half, length)))
    rows, columns = spans
    mine[rows, columns] = theirs[rows, columns]
    return (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)
