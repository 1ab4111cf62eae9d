"""Image classification: how far answers are from labels, and from a teacher's."""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.trees import PyTree
from prunex_jax.data import LABEL_SHARE, OTHER_LABEL, VALID
from prunex_jax.tasks.base import (
    LOSS,
    TEACHER,
    TEACHER_WEIGHT,
    Batch,
    Measure,
    Metric,
    Sums,
    sum_valid,
    valid_rows,
)

ACCURACY = Metric("accuracy", label="acc", is_share=True)


@dataclasses.dataclass(frozen=True)
class Classification:
    """Cross entropy with labels, and the share of answers that are right.

    Answers are logits, float[batch, classes]. Unless `inputs_of` and `labels_of` say
    otherwise, a batch has `image`, float32[batch, h, w, c], and `label`, int32[batch].
    Where images are mixed of two, it also has `other_label`, int32[batch], and
    `label_share`, float32[batch], what the first label counts.
    """

    # Share of a label's probability that goes to all classes alike, in training.
    label_smoothing: float = 0.0
    # Divides the logits of network and teacher: the higher, the more counts what the
    # teacher thinks of wrong classes.
    teacher_temperature: float = 1.0
    # Batch -> what the network reads,
    inputs_of: Callable[[Batch], PyTree] = operator.itemgetter("image")
    # and batch -> labels.
    labels_of: Callable[[Batch], jax.Array] = operator.itemgetter("label")
    example: str = "img"  # What an example is.
    measured: tuple[tuple[str, Measure], ...] = ()  # What else is measured, by name.

    unit = "examples"
    units_per_example = 1
    can_be_taught = True

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Loss, accuracy, and what else is measured."""
        return (LOSS, ACCURACY, *(Metric(name) for name, _ in self.measured))

    @property
    def counted(self) -> tuple[str, ...]:
        """Right answers, examples, and sums of what else is measured."""
        return ("correct", "examples", *(name for name, _ in self.measured))

    def inputs(self, batch: Batch) -> PyTree:
        """The images, or what else is to be classified."""
        return self.inputs_of(batch)

    def loss(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """Mean loss over the examples of this device.

        Args:
          outputs: Logits, float[batch, classes], of the network that is trained.
          batch: Has labels, int32[batch]; where there is a teacher, also `teacher`,
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
        targets = self._targets(batch, outputs.shape[-1])
        targets = optax.smooth_labels(targets, self.label_smoothing)
        losses = optax.softmax_cross_entropy(outputs, targets)
        return jnp.mean(taught(losses, outputs, batch, self.teacher_temperature))

    def count(self, outputs: jax.Array, batch: Batch) -> Sums:
        """Answers that are right, examples, and what else is measured.

        An answer for a mixed image counts with the share of the label that it names.
        """
        labels = self.labels_of(batch)
        valid = valid_rows(batch, len(labels))
        answers = jnp.argmax(outputs, axis=-1, keepdims=True)
        correct = jnp.take_along_axis(
            self._targets(batch, outputs.shape[-1]), answers, axis=-1
        )[:, 0]
        more = {k: sum_valid(f(outputs, batch), valid) for k, f in self.measured}
        counted = {"correct": sum_valid(correct, valid), "examples": jnp.sum(valid)}
        return {**counted, **more}

    def score(self, outputs: jax.Array, batch: Batch) -> Sums:
        """The same, and the cross entropy with the labels as they are."""
        labels, counted = self.labels_of(batch), self.count(outputs, batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
        return {"loss": sum_valid(losses, batch[VALID]), **counted}

    def _targets(self, batch: Batch, num_classes: int) -> jax.Array:
        """What labels say of the classes, float32[batch, classes]."""
        targets = jax.nn.one_hot(self.labels_of(batch), num_classes)
        if OTHER_LABEL not in batch:
            return targets
        others = jax.nn.one_hot(batch[OTHER_LABEL], num_classes)
        return others + batch[LABEL_SHARE][:, None] * (targets - others)

    def measures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Means over examples.

        Example:
          >>> Classification().measures({'loss': 3.0, 'correct': 1.0, 'examples': 4.0})
          {'loss': 0.75, 'accuracy': 0.25}
        """
        of = {"loss": "loss", "accuracy": "correct", **{k: k for k, _ in self.measured}}
        return {name: sums[key] / sums["examples"] for name, key in of.items()}


def taught(
    losses: jax.Array, logits: jax.Array, batch: Batch, temperature: float
) -> jax.Array:
    """Losses of answers with those of a teacher, where a batch has them.

    Args:
      losses: float32[batch, ...], those without one.
      logits: float[batch, ..., classes].
      batch: Perhaps with `teacher`, like logits, and `teacher_weight`, float32[batch].
      temperature: As `Classification.teacher_temperature`.
    """
    if TEACHER not in batch:
        return losses
    distances = optax.losses.kl_divergence_with_log_targets(
        jax.nn.log_softmax(logits / temperature),
        jax.nn.log_softmax(batch[TEACHER] / temperature),
    )
    weights = batch[TEACHER_WEIGHT].reshape(-1, *(1,) * (losses.ndim - 1))
    return losses + weights * (temperature**2 * distances - losses)
