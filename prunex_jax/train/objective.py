"""What a step minimises: how far answers are from labels, and from a teacher's."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

# Keys of a batch: the teacher's logits, and their share of the loss of every example.
TEACHER = "teacher"
TEACHER_WEIGHT = "teacher_weight"


@dataclasses.dataclass(frozen=True)
class Objective:
    """The training loss of a batch."""

    # Share of a label's probability that goes to all classes alike.
    label_smoothing: float = 0.0
    # Divides the logits of network and teacher: the higher, the more counts what the
    # teacher thinks of wrong classes.
    teacher_temperature: float = 1.0

    def __call__(self, logits: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Mean loss over the examples of this device.

        Args:
          logits: float[batch, classes] of the network that is trained.
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
          >>> imitate = Objective(teacher_temperature=4.0)
          >>> float(imitate(jnp.array([[5.0, 3.0]]), batch))  # the same answers
          0.0
        """
        targets = jax.nn.one_hot(batch["label"], logits.shape[-1])
        targets = optax.smooth_labels(targets, self.label_smoothing)
        losses = optax.softmax_cross_entropy(logits, targets)
        if TEACHER in batch:
            distances = self._distances_to_teacher(logits, batch[TEACHER])
            losses = losses + batch[TEACHER_WEIGHT] * (distances - losses)
        return jnp.mean(losses)

    def _distances_to_teacher(self, logits: jax.Array, teacher: jax.Array) -> jax.Array:
        temperature = self.teacher_temperature
        distances = optax.losses.kl_divergence_with_log_targets(
            jax.nn.log_softmax(logits / temperature),
            jax.nn.log_softmax(teacher / temperature),
        )
        return temperature**2 * distances
