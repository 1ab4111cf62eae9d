"""Turns positions of a stream into examples, for training and for evaluation.

Batches from memory and single examples in grain's workers come from the same functions,
which is why both ways of reading give the same bits.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from prunex_jax.data.augment import Normalization
from prunex_jax.data.order import Order, Positions, uniforms
from prunex_jax.data.splits import Split

# 'image', 'label' and, in evaluation, 'valid'; the first axis is the batch.
Batch = dict[str, npt.NDArray[np.generic]]


@dataclasses.dataclass(frozen=True)
class TrainingExamples:
    """Examples of the endless, shuffled and augmented training stream."""

    split: Split  # What is read.
    order: Order  # Position -> example of the split.
    seed: int  # Seed of the augmentation.

    def __call__(self, positions: Positions) -> Batch:
        """Returns `image` uint8[batch, h, w, c] and `label` int32[batch]."""
        images, labels = self.split.read(self.order(positions))
        recipe = self.split.recipe
        draws = uniforms(self.seed, positions, recipe.num_draws)
        return {"image": recipe.training_images(images, draws), "label": labels}


@dataclasses.dataclass(frozen=True)
class EvaluationExamples:
    """Every example of a split once, in its stored order, then padding."""

    split: Split

    def __call__(self, positions: Positions) -> Batch:
        """Returns `image`, `label` and `valid` float32[batch], 0.0 for padding.

        Padding has a black image and label 0.
        """
        is_valid = positions < len(self.split)
        images, labels = self.split.read(positions[is_valid])
        size, recipe = len(positions), self.split.recipe
        batch: Batch = {
            "image": np.zeros((size, *recipe.image_shape), np.uint8),
            "label": np.zeros(size, np.int32),
            "valid": is_valid.astype(np.float32),
        }
        if len(labels):
            batch["image"][is_valid] = recipe.evaluation_images(images)
            batch["label"][is_valid] = labels
        return batch


# Pure functions from positions to examples with uint8 images, before normalisation.
Examples = TrainingExamples | EvaluationExamples


def normalized(batch: Batch, normalization: Normalization) -> Batch:
    """Returns the batch with float32 images, as the model reads them."""
    return {**batch, "image": normalization.apply(np.asarray(batch["image"], np.uint8))}
