"""Image classification: how far answers are from labels, and from a teacher's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from prunex_jax.tasks.base import (
    LOSS,
    TEACHER,
    TEACHER_WEIGHT,
    VALID,
    Batch,
    Metric,
    Sums,
)

ACCURACY = Metric("accuracy", higher_is_better=True, label="acc", is_share=True)


@dataclasses.dataclass(frozen=True)
class Classification:
    """Cross entropy with labels, and the share of answers that are right.

    A batch has `image`, float32[batch, h, w, c], and `label`, int32[batch]. Answers are
    logits, float[batch, classes].
    """

    # Share of a label's probability that goes to all classes alike, in training.
    label_smoothing: float = 0.0
    # Divides the logits of network and teacher: the higher, the more counts what the
    # teacher thinks of wrong classes.
    teacher_temperature: float = 1.0

    metrics = (LOSS, ACCURACY)
    example = "img"
    unit = "examples"
    counted = ("correct", "examples")

    def inputs(self, batch: Batch) -> jax.Array:
        """The images, float32[batch, h, w, c]."""
        images: jax.Array = batch["image"]
        return images

    def loss(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """Mean loss over the examples of this device.

        Args:
          outputs: Logits, float[batch, classes], of the network that is trained.
          batch: `label`, int32[batch]; where there is a teacher, also `teacher`,
            float32[batch, classes], and `teacher_weight`, float32[batch] in [0, 1].
        Returns:
          Cross entropy with labels; with a teacher's logits, the mean, weighted by
          `teacher_weight`, of that and the Kullback-Leibler divergence from its
          answers, times the temperature squared, which keeps the size of gradients
          (Hinton, Vinyals and Dean, 2015, arXiv 1503.02531, section 2).
        Example:
          >>> batch = {'label': jnp.array([0]), 'teacher': jnp.array([[2.0, 0.0]]),
          ...          'teacher_weight': jnp.ones(1)}
          >>> imitate = Classification(teacher_temperature=4.0)
          >>> float(imitate.loss(jnp.array([[5.0, 3.0]]), batch))  # the same answers
          0.0
        """
        targets = jax.nn.one_hot(batch["label"], outputs.shape[-1])
        targets = optax.smooth_labels(targets, self.label_smoothing)
        losses = optax.softmax_cross_entropy(outputs, targets)
        if TEACHER in batch:
            distances = self._distances_to_teacher(outputs, batch[TEACHER])
            losses = losses + batch[TEACHER_WEIGHT] * (distances - losses)
        return jnp.mean(losses)

    def count(self, outputs: jax.Array, batch: Batch) -> Sums:
        """Answers that are right, and examples."""
        labels = batch["label"]
        valid = batch.get(VALID, jnp.ones(labels.shape, jnp.float32))
        correct = (jnp.argmax(outputs, axis=-1) == labels).astype(jnp.float32)
        return {"correct": jnp.sum(correct * valid), "examples": jnp.sum(valid)}

    def score(self, outputs: jax.Array, batch: Batch) -> Sums:
        """The same, and the cross entropy with the labels as they are."""
        labels, counted = batch["label"], self.count(outputs, batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
        return {"loss": jnp.sum(losses * batch[VALID]), **counted}

    def measures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Means over examples.

        Example:
          >>> Classification().measures({'loss': 3.0, 'correct': 1.0, 'examples': 4.0})
          {'loss': 0.75, 'accuracy': 0.25}
        """
        examples = sums["examples"]
        return {"loss": sums["loss"] / examples, "accuracy": sums["correct"] / examples}

    def _distances_to_teacher(self, logits: jax.Array, teacher: jax.Array) -> jax.Array:
        temperature = self.teacher_temperature
        distances = optax.losses.kl_divergence_with_log_targets(
            jax.nn.log_softmax(logits / temperature),
            jax.nn.log_softmax(teacher / temperature),
        )
        return temperature**2 * distances
