"""Language modelling: how well tokens are predicted, the next one or masked ones."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from prunex_jax.data import ASKED, BYTES, EXAMPLE, TARGET, VALID
from prunex_jax.tasks.base import LOSS, Batch, Metric, Sums, sum_valid, valid_rows
from prunex_jax.tasks.classification import ACCURACY, taught


@dataclasses.dataclass(frozen=True)
class Language:
    """Cross entropy of the next token.

    Examples are int32[batch, length + 1] tokens, of which networks read all but the
    last. Answers are logits, float[batch, length, tokens]. Batches say how many bytes
    of text their sequences stand for, `BYTES`, unless every token is a byte: this is
    another number in every split.
    """

    length: int  # Tokens of a sequence.
    has_bytes: bool = True  # Whether the bytes of the text are known.
    teacher_temperature: float = 1.0  # As of `Classification`.

    example = "tok"
    unit = "tokens"
    can_be_taught = True

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Loss, perplexity and, where bytes are known, bits per byte."""
        found = LOSS, Metric("perplexity", "ppl")
        return (*found, Metric("bits_per_byte", "bpb")) if self.has_bytes else found

    @property
    def counted(self) -> tuple[str, ...]:
        """Tokens and, where they are known, bytes."""
        return ("tokens", "bytes") if self.has_bytes else ("tokens",)

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
        """Tokens that are predicted, and the bytes that they stand for."""
        size, length = outputs.shape[:2]
        valid = valid_rows(batch, size)
        sums = {"tokens": jnp.sum(valid) * length}
        if self.has_bytes:
            of_rows = batch.get(BYTES, jnp.full(size, float(length)))
            sums["bytes"] = sum_valid(of_rows, valid)
        return sums

    def score(self, outputs: jax.Array, batch: Batch) -> Sums:
        """The same, and the losses of all tokens."""
        losses = sum_valid(self._losses(outputs, batch), batch[VALID])
        return {"loss": losses, **self.count(outputs, batch)}

    def measures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Mean loss in nats per token, its exponential, and bits per byte.

        Example:
          >>> sums = {'loss': 80.0, 'tokens': 40.0, 'bytes': 160.0}
          >>> found = Language(8).measures(sums)
          >>> {name: round(float(value), 3) for name, value in found.items()}
          {'loss': 2.0, 'perplexity': 7.389, 'bits_per_byte': 0.721}
        """
        loss = sums["loss"] / sums["tokens"]
        found = {"loss": loss, "perplexity": jnp.exp(loss)}
        if self.has_bytes:
            found["bits_per_byte"] = sums["loss"] / math.log(2) / sums["bytes"]
        return found

    def _losses(self, outputs: jax.Array, batch: Batch) -> jax.Array:
        """float32[batch, length]."""
        targets = batch[EXAMPLE][:, 1:]
        logits = outputs.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


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
        return {"loss": sum_valid(losses, batch[VALID]), **self.count(outputs, batch)}

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
