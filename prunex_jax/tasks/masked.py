"""Masked language modelling: how well hidden tokens are told from all around them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from prunex_jax.data import ASKED, EXAMPLE, TARGET, VALID
from prunex_jax.tasks.base import LOSS, Batch, Metric, Sums, sum_valid, valid_rows
from prunex_jax.tasks.classification import ACCURACY, taught


@dataclasses.dataclass(frozen=True)
class MaskedLanguage:
    """Cross entropy of the tokens that are asked for.

    Batches are those of `data.masking.Masking`, with as many of these tokens in every
    sequence. Answers are logits of all tokens, float[batch, length, tokens].
    """

    length: int  # Tokens of a sequence, whether asked for or not.
    teacher_temperature: float = 1.0  # As of `Classification`.

    metrics = (LOSS, ACCURACY, Metric("perplexity", "ppl"))
    example = "tok"
    unit = "tokens"
    can_be_taught = True
    counted = ("correct", "tokens")

    @property
    def units_per_example(self) -> int:
        """Tokens of a sequence."""
        return self.length

    def inputs(self, batch: Batch) -> jax.Array:
        """The sequences with their hidden tokens: int32[batch, length]."""
        tokens: jax.Array = batch[EXAMPLE]
        return tokens

    def loss(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """Mean over tokens asked for; with a teacher as `Classification.loss`."""
        losses = self._losses(outputs, batch)
        losses = taught(losses, outputs, batch, self.teacher_temperature)
        return jnp.sum(losses * batch[ASKED]) / jnp.sum(batch[ASKED])

    def count(self, outputs: jax.Array, batch: Batch) -> Sums:
        """Tokens that are asked for, and those of them that are answered right."""
        valid = valid_rows(batch, outputs.shape[0])
        hits = (jnp.argmax(outputs, axis=-1) == batch[TARGET]) * batch[ASKED]
        return {
            "correct": sum_valid(hits, valid),
            "tokens": sum_valid(batch[ASKED], valid),
        }

    def score(self, outputs: jax.Array, batch: Batch) -> Sums:
        """The same, and the losses of these tokens."""
        losses = self._losses(outputs, batch) * batch[ASKED]
        return {
            "loss": sum_valid(losses, batch[VALID]),
            **self.count(outputs, batch),
        }

    def measures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Mean loss in nats, the share that is right, and the loss's exponential.

        Example:
          >>> sums = {'loss': 8.0, 'correct': 1.0, 'tokens': 4.0}
          >>> found = MaskedLanguage(8).measures(sums)
          >>> {name: round(float(value), 3) for name, value in found.items()}
          {'loss': 2.0, 'accuracy': 0.25, 'perplexity': 7.389}
        """
        loss = sums["loss"] / sums["tokens"]
        right = sums["correct"] / sums["tokens"]
        return {"loss": loss, "accuracy": right, "perplexity": jnp.exp(loss)}

    def _losses(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """float32[batch, length]."""
        logits = outputs.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[TARGET])
