"""Language modelling: how well every token of a text is foretold by those before it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from prunex_jax.data import EXAMPLE, VALID
from prunex_jax.tasks.base import LOSS, Batch, Metric, Sums, sum_valid, valid_rows
from prunex_jax.tasks.classification import taught


@dataclasses.dataclass(frozen=True)
class Language:
    """Cross entropy of the next token.

    Examples are int32[batch, length + 1] tokens, of which networks read all but the
    last. Answers are logits, float[batch, length, tokens].
    """

    length: int  # Tokens of a sequence.
    bytes_per_token: float = 1.0  # Mean, over the text.
    teacher_temperature: float = 1.0  # As of `Classification`.

    metrics = (LOSS, Metric("perplexity", "ppl"), Metric("bits_per_byte", "bpb"))
    example = "tok"
    unit = "tokens"
    can_be_taught = True
    counted = ("tokens",)

    @property
    def units_per_example(self) -> int:
        """Tokens of a sequence."""
        return self.length

    def inputs(self, batch: Batch) -> jax.Array:
        """All tokens but the last: int32[batch, length]."""
        tokens: jax.Array = batch[EXAMPLE]
        return tokens[:, :-1]

    def loss(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """Mean over tokens; with a teacher as `Classification.loss`."""
        losses = self._losses(outputs, batch)
        return jnp.mean(taught(losses, outputs, batch, self.teacher_temperature))

    def count(self, outputs: jax.Array, batch: Batch) -> Sums:
        """Tokens that are foretold."""
        size, length = outputs.shape[:2]
        valid = valid_rows(batch, size)
        return {"tokens": jnp.sum(valid) * length}

    def score(self, outputs: jax.Array, batch: Batch) -> Sums:
        """The same, and the losses of all tokens."""
        losses = sum_valid(self._losses(outputs, batch), batch[VALID])
        return {"loss": losses, **self.count(outputs, batch)}

    def measures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Mean loss in nats per token, its exponential, and bits per byte.

        Example:
          >>> found = Language(8).measures({'loss': 80.0, 'tokens': 40.0})
          >>> {name: round(float(value), 3) for name, value in found.items()}
          {'loss': 2.0, 'perplexity': 7.389, 'bits_per_byte': 2.885}
        """
        loss = sums["loss"] / sums["tokens"]
        bits = loss / math.log(2) / self.bytes_per_token
        return {"loss": loss, "perplexity": jnp.exp(loss), "bits_per_byte": bits}

    def _losses(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """float32[batch, length]."""
        targets = batch[EXAMPLE][:, 1:]
        logits = outputs.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)
