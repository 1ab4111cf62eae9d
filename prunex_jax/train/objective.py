"""What a step minimises: how far answers are from labels, and from a teacher's."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

# Key of a batch under which the teacher's logits are.
TEACHER = "teacher"


@dataclasses.dataclass(frozen=True)
class Objective:
    """The training loss of a batch."""

    # Share of a label's probability that goes to all classes alike.
    label_smoothing: float = 0.0
    # Share of the loss that is the teacher's, where a batch has its logits.
    teacher_weight: float = 0.0
    # Divides both logits: the higher, the more counts what the teacher thinks of wrong
    # classes.
    teacher_temperature: float = 1.0

    def __call__(self, logits: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Mean loss over the examples of this device.

        Args:
          logits: float[batch, classes] of the network that is trained.
          batch: `label`, int32[batch], and perhaps `teacher`, float32[batch, classes].
        Returns:
          Cross entropy with labels; with a teacher's logits, a weighted mean of that
          and the Kullback-Leibler divergence from its answers, times the temperature
          squared, which keeps the size of gradients (Hinton, Vinyals and Dean, 2015,
          arXiv 1503.02531, section 2).
        Example:
          >>> batch = {'label': jnp.array([0]), 'teacher': jnp.array([[2.0, 0.0]])}
          >>> imitate = Objective(teacher_weight=1.0, teacher_temperature=4.0)
          >>> float(imitate(jnp.array([[5.0, 3.0]]), batch))  # the same answers
          0.0
        """
        targets = jax.nn.one_hot(batch["label"], logits.shape[-1])
        targets = optax.smooth_labels(targets, self.label_smoothing)
        loss = jnp.mean(optax.softmax_cross_entropy(logits, targets))
        if TEACHER not in batch:
            return loss
        taught = self._distance_to_teacher(logits, batch[TEACHER])
        return (1 - self.teacher_weight) * loss + self.teacher_weight * taught

    def _distance_to_teacher(self, logits: jax.Array, teacher: jax.Array) -> jax.Array:
        temperature = self.teacher_temperature
        distances = optax.losses.kl_divergence_with_log_targets(
            jax.nn.log_softmax(logits / temperature),
            jax.nn.log_softmax(teacher / temperature),
        )
        return temperature**2 * jnp.mean(distances)
