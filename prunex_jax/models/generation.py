"""Writes text: draws one token after the other from a network's answers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from prunex_jax.base.errors import UserError


def generate(
    logits: Callable[[jax.Array], jax.Array],
    prompt: npt.ArrayLike,
    count: int,
    *,
    window: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> jax.Array:
    """Continues sequences of tokens.

    The network sees a window of fixed length: what was written so far and then zeros,
    which no answer that is used depends on; and later the last `window` tokens, which
    move on by one with every token that is drawn.

    Args:
      logits: Tokens int32[batch, window] -> float[batch, window, tokens], where every
        position sees itself and those before it: `Network.logits` of a trained
        language model, full or shrunk.
      prompt: int[batch, size], what is continued; at least one token each.
      count: Number of tokens to write.
      window: The length of sequences that the network was trained with.
      temperature: Divides the logits: the higher, the more varied; 0 takes the most
        probable token.
      seed: Of what is drawn.
    Returns:
      int32[batch, count], what follows the prompt.
    Raises:
      UserError: The prompt is empty, or a number is out of range.
    Example:
      >>> def one_more(tokens):  # surely the next number, of four
      ...     return 100 * jax.nn.one_hot((tokens + 1) % 4, 4)
      >>> generate(one_more, [[0], [2]], 5, window=3).tolist()
      [[1, 2, 3, 0, 1], [3, 0, 1, 2, 3]]
    """
    given = np.asarray(prompt, np.int32)
    if given.ndim != 2 or not given.size:
        raise UserError(
            f"prompt has shape {given.shape} and must be tokens [batch, size], at "
            "least one of each sequence"
        )
    if count < 1 or window < 1 or not 0 <= temperature < float("inf"):
        raise UserError(
            f"count={count} and window={window} must be positive, and "
            f"temperature={temperature} not negative"
        )
    seen = given[:, -window:]
    start = np.zeros((len(seen), window), np.int32)
    start[:, : seen.shape[1]] = seen

    def write(
        carry: tuple[jax.Array, jax.Array], key: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        tokens, size = carry
        answers = jax.lax.dynamic_index_in_dim(logits(tokens), size - 1, 1, False)
        drawn = _drawn(answers.astype(jnp.float32), temperature, key)
        is_full = size == window
        tokens = jnp.where(is_full, jnp.roll(tokens, -1, axis=1), tokens)
        place = jnp.where(is_full, window - 1, size)
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, drawn, place, 1)
        return (tokens, place + 1), drawn

    @jax.jit
    def written(tokens: jax.Array, keys: jax.Array) -> jax.Array:
        first = tokens, jnp.asarray(seen.shape[1])
        return jax.lax.scan(write, first, keys)[1].T

    return written(jnp.asarray(start), jax.random.split(jax.random.key(seed), count))


def _drawn(logits: jax.Array, temperature: float, key: jax.Array) -> jax.Array:
    """int32[batch], one token each."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)
