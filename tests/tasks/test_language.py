"""Bits per byte are over bytes of the text, whatever tokens it is read in."""

import math

import numpy as np
import pytest

from prunex_jax.data import BYTES, EXAMPLE, VALID
from prunex_jax.tasks import Language

LENGTH, VOCABULARY = 6, 32


def score(num_rows, num_valid, objective, **more):
    """Sums where every token is as likely as any other."""
    tokens = np.arange(num_rows * (LENGTH + 1)).reshape(num_rows, -1) % VOCABULARY
    valid = (np.arange(num_rows) < num_valid).astype(np.float32)
    batch = {EXAMPLE: tokens, VALID: valid, **more}
    return objective.score(np.zeros((num_rows, LENGTH, VOCABULARY)), batch)


def test_bits_are_over_the_bytes_that_batches_say():
    objective = Language(LENGTH)
    parts = [
        score(4, 4, objective, **{BYTES: np.full(4, 18.0)}),
        score(4, 1, objective, **{BYTES: np.full(4, 30.0)}),
    ]
    sums = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert set(sums) == {"loss", *objective.counted}
    found = objective.measures(sums)
    assert found["loss"] == pytest.approx(math.log(VOCABULARY))
    wanted = 5 * LENGTH * math.log2(VOCABULARY) / (4 * 18 + 30)
    assert found["bits_per_byte"] == pytest.approx(wanted)
    assert set(found) == {metric.name for metric in objective.metrics}


def test_tokens_are_bytes_where_batches_say_nothing():
    objective = Language(LENGTH)
    sums = score(4, 3, objective)
    assert sums["bytes"] == sums["tokens"] == 3 * LENGTH
    found = objective.measures(sums)
    assert found["bits_per_byte"] == pytest.approx(math.log2(VOCABULARY))


def test_bits_are_left_out_where_bytes_are_not_known():
    objective = Language(LENGTH, has_bytes=False)
    sums = score(4, 3, objective)
    found = objective.measures(sums)
    assert set(sums) == {"loss", "tokens"} == {"loss", *objective.counted}
    assert set(found) == {"loss", "perplexity"}
    assert set(found) == {metric.name for metric in objective.metrics}
